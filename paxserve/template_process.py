"""A process that renders chat templates for the server, which kills it when one takes too long.

Orders come on standard input and texts go to standard output, each a line of JSON. It lives as long as its input.
"""

import json
import resource
import sys
from typing import Any

from paxserve.chat import render_chat_text
from paxserve.errors import RequestError
from paxserve.loaders.chat_template import ChatTemplates

MAX_MEMORY_BYTES = 2 * 2**30
"""Address space of the process: a template that wants more fails."""


def main() -> int:
    """Take the templates, then render until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    sys.setrecursionlimit(2000)
    templates: ChatTemplates | None = None
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if templates is None:
            templates = ChatTemplates(**order)
            continue
        answer = json.dumps(answer_of(templates, order))
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


def answer_of(templates: ChatTemplates, order: dict[str, Any]) -> dict[str, Any]:
    """The text of one order, or what is wrong with it."""
    try:
        return {"text": render_chat_text(templates, **order)}
    except RequestError as error:
        return {"message": error.message, "param": error.param}
    except MemoryError:
        return {"message": "The chat template takes too much memory for these messages.", "param": "messages"}


if __name__ == "__main__":
    sys.exit(main())
