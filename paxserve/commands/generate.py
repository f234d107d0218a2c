"""Complete prompts from the command line, a file or standard input."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from paxserve.errors import ConfigError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments
from paxserve.sampling_flags import add_sampling_flags, sampling_values

USAGE = "--model MODEL [PROMPT ...] [flags]"
DESCRIPTION = """\
Complete prompts, all in one go, and print what the model makes of them.

    paxserve generate --model smollm2-135m-instruct "The capital of France is" --max-tokens 8
    paxserve generate --model smollm2-135m-instruct --chat "Name three rivers."
    paxserve generate --model smollm2-135m-instruct --file prompts.txt --jsonl > answers.jsonl

Without PROMPT and --file, standard input is one prompt. A file has one prompt a line; a .jsonl file has rows with
"prompt", "prompt_token_ids" or "messages"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, output format, sampling, and every flag of the engine."""
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="a prompt; several are answered in their order")
    group = parser.add_argument_group("input and output")
    group.add_argument("--file", type=Path, metavar="FILE", help="read prompts from this file")
    group.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template first")
    group.add_argument("-n", type=int, default=1, metavar="N", help="outputs for each prompt (default: 1)")
    group.add_argument("--jsonl", action="store_true", help="print one JSON object for each prompt")
    group.add_argument("--progress", action="store_true", help="show a progress bar on standard error")
    add_sampling_flags(parser)
    add_flags(parser, ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Read the prompts, run them, print the outputs."""
    prompts, engine = read_prompts(arguments), engine_arguments(arguments)
    from paxserve.llm import LLM  # late: loads jax

    llm = LLM(**engine)
    params = dataclasses.replace(llm.get_default_sampling_params(), n=arguments.n, **sampling_values(arguments))
    is_chat = [isinstance(prompt, list) for prompt in prompts]
    if any(is_chat) and not all(is_chat):
        raise ConfigError('Rows with "messages" and other rows cannot be mixed in one file.')
    answer = llm.chat if all(is_chat) else llm.generate
    for output in answer(prompts, params, use_tqdm=arguments.progress):
        print(_json_row(output) if arguments.jsonl else "\n".join(choice.text for choice in output.outputs), flush=True)
    return 0


def read_prompts(arguments: argparse.Namespace) -> list[Any]:
    """The prompts as `LLM` takes them: text, `{"prompt_token_ids": ...}`, or lists of messages."""
    if arguments.file and arguments.prompts:
        raise ConfigError("Give prompts as arguments or in a --file, not both.")
    if arguments.file:
        prompts = _file_prompts(arguments.file)
    else:
        prompts = arguments.prompts or [sys.stdin.read()]
    if not any(prompts):
        raise ConfigError("There is no prompt.")
    if arguments.chat:
        return [_as_messages(prompt) for prompt in prompts]
    return prompts


def _file_prompts(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_jsonl_prompt(line, f"{path}:{n}") for n, line in numbered]


def _jsonl_prompt(line: str, place: str) -> Any:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error}).") from None
    match row:
        case {"prompt": str(text), **rest} if not rest:
            return text
        case {"prompt_token_ids": list(ids), **rest} if not rest:
            return {"prompt_token_ids": ids}
        case {"messages": list(messages), **rest} if not rest:
            return messages
    raise ConfigError(f'{place}: expected exactly one of "prompt", "prompt_token_ids" and "messages".')


def _as_messages(prompt: Any) -> list[dict[str, str]]:
    if isinstance(prompt, dict):
        raise ConfigError("--chat needs text: prompt_token_ids are taken as they are.")
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _json_row(output: Any) -> str:
    row = {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [
            {"text": choice.text, "token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
            for choice in output.outputs
        ],
    }
    return json.dumps(row, ensure_ascii=False)
