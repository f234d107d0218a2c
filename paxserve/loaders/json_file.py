"""JSON objects from a checkpoint's files, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from paxserve.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`; `ConfigError` when it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but {} when there is no such file."""
    return read_json_object(path) if path.is_file() else {}
