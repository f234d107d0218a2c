"""Chat templates rendered outside of this process, with a deadline that holds whatever the template does."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paxserve.errors import RequestError
from paxserve.loaders.chat_template import ChatTemplates

MAX_PROCESSES = 2
"""Templates rendered at a time; the others wait."""


class TemplateProcess:
    """A running `paxserve.template_process`."""

    def __init__(self, templates: ChatTemplates) -> None:
        search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paxserve.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search_path},
            start_new_session=True,  # a terminal's Ctrl-C is for the server to handle
        )
        self._send({"special_tokens": templates.special_tokens, "chat_templates": templates.chat_templates})

    @property
    def is_alive(self) -> bool:
        """Whether it can render more."""
        return self._process.poll() is None

    def render(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to an order; None, and the process is dead, when it takes more than `seconds`."""
        deadline = threading.Timer(seconds, self._process.kill)
        deadline.start()
        try:
            self._send(order)
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            deadline.cancel()
        if not line:
            self.close()
            return None
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what it had not read yet

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()


class TemplateRenderer:
    """Renders conversations in a few processes, which are started when they are first needed."""

    def __init__(self, templates: ChatTemplates, *, seconds: float, max_characters: int) -> None:
        self._templates, self._seconds, self._max_characters = templates, seconds, max_characters
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="template")
        self._idle: list[TemplateProcess] = []

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """What `render_chat_text` returns. Raises `RequestError` also when it takes too long, or makes too much."""
        order = {"messages": messages, **options}
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._render, order)
        if answer is None:
            raise RequestError(f"The chat template took more than {self._seconds:g} seconds.", "messages")
        if "message" in answer:
            raise RequestError(answer["message"], answer["param"])
        if len(answer["text"]) > self._max_characters:
            raise RequestError(f"The chat template made more than {self._max_characters} characters.", "messages")
        return answer["text"]

    def close(self) -> None:
        """End the processes that are idle; busy ones end at their deadline, or with this process."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _render(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        process = self._idle.pop() if self._idle else TemplateProcess(self._templates)
        answer = process.render(order, self._seconds)
        if process.is_alive:
            self._idle.append(process)
        return answer
