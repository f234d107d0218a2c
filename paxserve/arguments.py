"""Arguments of `paxserve serve` from all their sources: environment, a YAML file, what is typed; the last one wins."""

import difflib
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paxserve.config import flag_environment
from paxserve.errors import ConfigError
from paxserve.flags import SECTIONS, Flag, flags_of, kebab
from paxserve.vllm_flags import IMPLIED, NEUTRAL, REFUSED

COMMANDS = ("serve", "run-batch")
"""Commands that take an engine's flags from everywhere."""

VLLM_VARIABLES = {
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "timeout_keep_alive",
    "VLLM_MAX_N_SEQUENCES": "max_n",
    "VLLM_MAX_COMPLETION_PROMPTS": "max_prompts",
    "VLLM_MAX_STOP_STRINGS": "max_stop_strings",
    "VLLM_MAX_NUM_BAD_WORDS": "max_bad_words",
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": "chat_template_timeout",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "max_request_body_bytes",
    "VLLM_ENABLE_RESPONSES_API_STORE": "enable_responses_store",
    "VLLM_LOGGING_LEVEL": "uvicorn_log_level",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_memory_bytes",
}
"""Variables of vLLM and the flag that each sets here."""

PREFIX = "PAXSERVE_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def expand(arguments: Sequence[str]) -> list[str]:
    """The whole command line, with what files and the environment add put before what was typed.

    Raises `ConfigError` for a file that cannot be read, a key that is no flag, and a flag that only vLLM has.
    """
    if not arguments or arguments[0] not in COMMANDS:
        return kebab(arguments)
    typed = join_dotted(without_implied(kebab(arguments[1:])))
    config, typed = take_config(typed)
    names = {argument.partition("=")[0].removeprefix("--no-").removeprefix("--") for argument in typed}
    if typed and not typed[0].startswith("-"):
        names.add("model")
    added = dict(from_environment(flag_environment())) | dict(from_file(config))
    known = known_flags()
    rest = [text for name, value in added.items() if name.replace("_", "-") not in names
            for text in as_arguments(known[name], value)]  # fmt: skip
    # What takes several values would swallow a positional argument that follows it.
    is_first = bool(typed) and not typed[0].startswith("-")
    return [arguments[0], *typed[:1], *rest, *typed[1:]] if is_first else [arguments[0], *rest, *typed]


def known_flags() -> dict[str, Flag]:
    """Every flag of engine and server by its name."""
    return {flag.name: flag for kind in SECTIONS for flag in flags_of(kind)}


def without_implied(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that ask for what is always so. Raises `ConfigError` for those that are refused."""
    known = {flag.option for flag in known_flags().values()}
    kept = []
    remaining = deque(arguments)
    while remaining:
        argument = remaining.popleft()
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--")
        if option.startswith("--") and option not in known:
            has_own_value = not equals and name in NEUTRAL and remaining
            if is_implied(name, remaining[0] if has_own_value else value):
                if has_own_value:
                    remaining.popleft()
                continue
        kept.append(argument)
    return kept


def is_implied(name: str, value: Any) -> bool:
    """Whether a flag of vLLM asks for what is always so, which is noted. Raises `ConfigError` for a refused one.

    Names that vLLM does not have are none of its business.
    """
    if name in IMPLIED:
        if str(value or "").lower() not in ("", *TRUE) or value is False:
            raise ConfigError(f"--{name} cannot be {value}: {IMPLIED[name]}.")
        sys.stderr.write(f"paxserve: --{name} changes nothing: {IMPLIED[name]}.\n")
        return True
    # In a file a switch may be there to say that it is off.
    if str(value) in NEUTRAL.get(name, ()) or (value is False and name in REFUSED):
        sys.stderr.write(f"paxserve: --{name} {value} changes nothing: it is always so.\n")
        return True
    if (flag := name.partition(".")[0]) in REFUSED:
        raise ConfigError(f"--{flag} is not supported: {REFUSED[flag]}.")
    return False


def join_dotted(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--a.b.c VALUE` joined to one `--a JSON` for each flag."""
    kept: list[str] = []
    joined: dict[str, dict[str, Any]] = {}
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if not (option.startswith("--") and "." in option):
            kept.append(argument)
            continue
        name, *path = option.removeprefix("--").split(".")
        if not equals:
            value = next(remaining, "true")
        holder = joined.setdefault(name, {})
        for key in path[:-1]:
            holder = holder.setdefault(key.replace("-", "_"), {})
        holder[path[-1].replace("-", "_")] = scalar(value)
    return kept + [text for name, value in joined.items() for text in (f"--{name}", json.dumps(value))]


def scalar(text: str) -> Any:
    """A value as JSON reads it, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def take_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that `--config` names, and the arguments without it."""
    path, kept = None, []
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option == "--config":
            path = Path(value if equals else next(remaining, ""))
        else:
            kept.append(argument)
    return path, kept


def from_file(path: Path | None) -> Iterator[tuple[str, Any]]:
    """Flags and values of a YAML file."""
    if path is None:
        return
    import yaml  # late: few use it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config must be a YAML file: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must map flags to values.")
    known = known_flags()
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            if is_implied(name.replace("_", "-"), value):
                continue
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ConfigError(f"{path}: {key} is no flag.{hint}")
        yield name, value


def from_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Flags and values of `PAXSERVE_...`, and of the variables of vLLM that mean the same here."""
    known = known_flags()
    for variable, value in variables.items():
        if variable in VLLM_VARIABLES:
            name = VLLM_VARIABLES[variable]
            sys.stderr.write(f"paxserve: {variable} is taken as --{name.replace('_', '-')}.\n")
            yield name, translated(variable, value)
        elif variable == "VLLM_SERVER_DEV_MODE":
            sys.stderr.write("paxserve: VLLM_SERVER_DEV_MODE is not used: admin routes need --admin-api-key.\n")
        elif variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name in known:
                yield name, value
            else:
                sys.stderr.write(f"paxserve: {variable} names no flag and is not used.\n")


def translated(variable: str, value: str) -> Any:
    """The value of a variable of vLLM as the flag here has it; None leaves the flag alone."""
    if variable == "VLLM_LOGGING_LEVEL":
        return value.lower()
    if variable != "VLLM_CPU_KVCACHE_SPACE":
        return value
    try:
        return int(float(value) * 2**30) or None  # GiB; 0 is vLLM's default too
    except (ValueError, OverflowError):
        raise ConfigError(f"{variable} must be a number of GiB, got {value!r}.") from None


def as_arguments(flag: Flag, value: Any) -> list[str]:
    """A value as it would be typed. Raises `ConfigError` for a switch that is neither true nor false."""
    if flag.is_switch:
        text = str(value).lower()
        if text not in (*TRUE, *FALSE):
            raise ConfigError(f"{flag.name} must be true or false, got {value!r}.")
        return [flag.option if text in TRUE else "--no-" + flag.option.removeprefix("--")]
    if value is None:
        return []
    if isinstance(value, list):
        return [flag.option, *map(str, value)] if value else []
    return [f"{flag.option}={json.dumps(value) if isinstance(value, dict) else value}"]
