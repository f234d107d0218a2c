"""How the server's processes write their log: one line an event, on standard error."""

import logging
import sys

FORMAT = "%(levelname)-8s %(asctime)s %(process)d %(name)s: %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


def configure_logging(level: str = "INFO") -> None:
    """Send the `paxserve` loggers to standard error, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
    logger = logging.getLogger("paxserve")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
