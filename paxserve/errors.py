"""The errors that paxserve raises on purpose; anything else is a bug."""


class PaxserveError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(PaxserveError):
    """A setting, checkpoint or machine does not allow the engine to start."""


class RequestError(PaxserveError, ValueError):
    """One request is refused: `param` names the field, `code` is the HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class EngineDeadError(PaxserveError):
    """The engine core has died: nothing that was in flight will be answered."""


class OutOfPages(Exception):
    """The page pool cannot serve an allocation; never escapes the scheduler."""
