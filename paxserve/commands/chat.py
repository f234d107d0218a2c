"""Talk to a model in the terminal."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from paxserve.config import environment_api_key
from paxserve.errors import ConfigError, RequestError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments, flags_of
from paxserve.sampling_flags import add_sampling_flags, sampling_values

USAGE = "--model MODEL | --url URL [flags]"
DESCRIPTION = """\
Talk to a model in the terminal. With --url the model is a server's, else it is loaded here.

    paxserve chat --model smollm2-135m-instruct
    paxserve chat --url http://127.0.0.1:8000

/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."""

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]
"""The pieces of the reply to a conversation, as they come."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the model is, the system prompt, sampling, and every flag of the engine."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--url", metavar="URL", help="a running server, such as http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: PAXSERVE_API_KEY or VLLM_API_KEY)")
    group.add_argument("--system", metavar="TEXT", help="a system prompt")
    add_sampling_flags(parser)
    add_flags(parser, ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Converse until the user leaves."""
    answer = remote_answer(arguments) if arguments.url else local_answer(arguments)
    with contextlib.suppress(ImportError):  # a Python without it has a plainer prompt
        import readline  # noqa: F401  its import gives `input` a history and line editing
    return converse(answer, arguments.system)


def converse(answer: Answer, system: str | None) -> int:
    """Read lines from standard input, print the replies, and remember both."""
    is_terminal = sys.stdin.isatty()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print("The commands are /reset and /exit.", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            _reply(answer, messages)


def _reply(answer: Answer, messages: list[Message]) -> None:
    """Print one reply and add it to the conversation; one that is refused takes its question with it."""
    pieces: list[str] = []
    stream = answer(messages)
    try:
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        getattr(stream, "close", lambda: None)()  # a generator: ends the request, so that it does not run on unseen
    except RequestError as error:
        print(f"refused: {error}", file=sys.stderr)
        messages.pop()
        return
    print()
    messages.append({"role": "assistant", "content": "".join(pieces)})


def local_answer(arguments: argparse.Namespace) -> Answer:
    """Replies from a model in this process."""
    engine = engine_arguments(arguments)
    from paxserve.chat import encode_chat, render_chat_text
    from paxserve.llm import LLM  # late: loads jax

    llm = LLM(**engine)
    tokenizer = llm.get_tokenizer()
    defaults = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=None)
    params = dataclasses.replace(defaults, **sampling_values(arguments))

    def answer(messages: list[Message]) -> Iterator[str]:
        text = render_chat_text(tokenizer, messages)
        for output in llm.stream({"prompt": text, "prompt_token_ids": encode_chat(tokenizer, text)}, params):
            yield from (choice.text for choice in output.outputs)

    return answer


def remote_answer(arguments: argparse.Namespace) -> Answer:
    """Replies from a server. Raises `ConfigError` when an engine flag is given too, or there is no server."""
    import httpx  # late: loading it takes longer than --help may

    from paxserve.bench.load import served_model
    from paxserve.client import LineSplitter, client_options, error_message, error_text, parse_event, server_root

    given = {flag.name for kind in ENGINE_SECTIONS for flag in flags_of(kind)} & vars(arguments).keys() - {"model"}
    if given:
        option = min(given).replace("_", "-")
        raise ConfigError(f"--{option} is the engine's: it cannot be combined with --url, whose server has its own.")
    root = server_root(arguments.url)
    key = arguments.api_key or environment_api_key()
    model = getattr(arguments, "model", None) or served_model(root, key)
    values = sampling_values(arguments)

    def answer(messages: list[Message]) -> Iterator[str]:
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True} | values
        try:
            with (
                httpx.Client(**client_options(root, key)) as client,
                client.stream("POST", f"{root}/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise RequestError(error_text(response.read()), code=response.status_code)
                lines = LineSplitter()
                for line in (line for chunk in response.iter_bytes() for line in lines.feed(chunk)):
                    event = parse_event(line) or {}
                    if event.get("error"):
                        raise RequestError(error_message(event))
                    for choice in event.get("choices", ()):
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            raise RequestError(f"The server does not answer: {error}") from None

    return answer
