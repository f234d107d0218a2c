"""How the server's processes write their log: one line an event, on standard error."""

import json
import logging
import sys
from collections.abc import Sequence
from typing import Literal

FORMAT = "%(levelname)-8s %(asctime)s %(process)d %(name)s: %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object a record; a record's own `fields` (see `AccessLog`) stand beside the common ones."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry = {
            "time": record.created, "level": record.levelname, "process": record.process, "logger": record.name,
            "message": record.getMessage(), **getattr(record, "fields", {}),
        }  # fmt: skip
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(level: str = "INFO", form: LogFormat = "text", names: Sequence[str] = ("paxserve",)) -> None:
    """Send the loggers of these names to standard error, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(FORMAT, DATE_FORMAT))
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
