"""Command-line flags, their help and the README's table, all made from the configuration's fields.

A field becomes `--its-name` (underscores work too), its docstring the help, its default the default: nothing is
said twice. `python -m paxserve.flags --markdown` prints the table.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from paxserve import config
from paxserve.errors import ConfigError
from paxserve.server_config import SERVER_SECTIONS, ServerConfig

ALIASES = {"tensor_parallel_size": ("-tp",), "gpu_memory_utilization": ("--device-memory-utilization",)}
"""Short forms that vLLM's users know."""

SECTIONS: dict[type, str] = {
    config.ModelConfig: "model",
    config.CacheConfig: "KV cache",
    config.SchedulerConfig: "scheduler",
    config.ParallelConfig: "parallelism",
    config.CompileConfig: "compilation",
    **SERVER_SECTIONS,
}
"""The configuration's parts, in the order in which help and README show them."""

MARKERS = ("<!-- flags: made by `make readme` -->", "<!-- end of flags -->")
"""The lines of a document between which the table of flags stands."""

ENGINE_SECTIONS = tuple(kind for kind in SECTIONS if kind not in SERVER_SECTIONS)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One field of the configuration as the command line shows it."""

    name: str
    annotation: Any
    default: Any
    help: str

    @property
    def option(self) -> str:
        """The flag as typed, such as `--max-model-len`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off and takes no value."""
        return self.annotation is bool

    @property
    def shown_default(self) -> str:
        """The default as help and README show it; empty when the docstring has to explain it."""
        if self.default is None or self.default in ([], {}):
            return ""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def flags_of(kind: type) -> Iterator[Flag]:
    """The flags of one configuration dataclass, in the order of its fields."""
    docs = _field_docstrings(kind)
    for f in dataclasses.fields(kind):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        default = None if default is dataclasses.MISSING else default
        yield Flag(name=f.name, annotation=f.type, default=default, help=docs[f.name])


@functools.cache
def _field_docstrings(kind: type) -> dict[str, str]:
    """The string under each field, which Python itself throws away."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def add_flags(parser: argparse.ArgumentParser, kinds: Sequence[type], skip: Sequence[str] = ()) -> None:
    """Add the flags of several configuration dataclasses to `parser`, one group of help each.

    A flag that is not given leaves no attribute in the namespace, so that defaults live in the dataclasses alone.
    """
    for kind in kinds:
        group = parser.add_argument_group(SECTIONS[kind], (kind.__doc__ or "").splitlines()[0])
        for flag in flags_of(kind):
            if flag.name not in skip:
                names = (flag.option, *ALIASES.get(flag.name, ()))
                text = flag.help + (f" (default: {flag.shown_default})" if flag.shown_default else "")
                group.add_argument(
                    *names, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **_argparse_options(flag)
                )


def _argparse_options(flag: Flag) -> dict[str, Any]:
    """How argparse is to read the flag's value, from the field's type."""
    kind = flag.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arm for arm in get_args(kind) if arm is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if flag.name in config.SIZE_FIELDS:
        return {"type": str, "metavar": "SIZE"}
    if kind in (int, float, str):
        return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) in (list, tuple):
        return {"type": get_args(kind)[0], "nargs": "+", "action": _ExtendAction, "metavar": "ITEM"}
    if get_origin(kind) is dict:
        return {"type": _json_object, "metavar": "JSON"}
    raise TypeError(f"{flag.name}: no flag can be made from the type {flag.annotation}.")


class _ExtendAction(argparse.Action):
    """Collects values over several uses of a flag; one value may also be a whole list as JSON, as vLLM has it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if len(values) == 1 and str(values[0]).startswith("["):
            try:
                values = json.loads(values[0])
            except ValueError as error:
                parser.error(f"argument {option_string}: expected a JSON list ({error})")
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def engine_config(arguments: argparse.Namespace) -> config.EngineConfig:
    """The engine's configuration from parsed flags. Raises `ConfigError` when they do not fit together."""
    return config.EngineConfig.from_flags(**engine_arguments(arguments))


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags that were given, as `LLM(...)` takes them. Raises `ConfigError` when there is no model."""
    given = _given(arguments, ENGINE_SECTIONS)
    if "model" not in given:
        raise ConfigError(
            "Which model? Give a folder, hub name or .gguf file, or the demo's alias smollm2-135m-instruct."
        )
    return given


def model_config(arguments: argparse.Namespace) -> config.ModelConfig:
    """The model's settings from parsed flags. Raises `ConfigError` for a value out of range."""
    given = _given(arguments, [config.ModelConfig])
    config.check_types(config.ModelConfig, given)
    return config.ModelConfig(**given)


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """The HTTP server's configuration from parsed flags. Raises `ConfigError` for a value out of range."""
    given = _given(arguments, list(SERVER_SECTIONS))
    config.check_types(ServerConfig, given)
    return ServerConfig(**given)


def scheduler_config(arguments: argparse.Namespace, **defaults: Any) -> config.SchedulerConfig:
    """The scheduler's configuration from parsed flags. Raises `ConfigError` for a value out of range."""
    given = defaults | _given(arguments, [config.SchedulerConfig])
    config.check_types(config.SchedulerConfig, given)
    return config.SchedulerConfig(**given)


def _given(arguments: argparse.Namespace, kinds: Sequence[type]) -> dict[str, Any]:
    names = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def kebab(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--some_flag=x` written as `--some-flag=x`; those after a bare `--` stay."""
    result, is_flag_allowed = [], True
    for argument in arguments:
        is_flag_allowed = is_flag_allowed and argument != "--"
        if is_flag_allowed and argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line and name the closest flag that exists."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation breaks when a new flag makes it ambiguous
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As argparse does, but an unknown flag is refused here, where the flags that exist are known.

        `--help=WORD` shows only the flags that have the word in their name, their help or their group's title.
        """
        for argument in args or ():
            if argument.startswith("--help=") and not (self._subparsers and args[0] != argument):
                self._print_matching(argument.partition("=")[2])
                self.exit(0)
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            close = difflib.get_close_matches(rest[0].partition("=")[0], known, n=1)
            self.error(f"unknown argument {rest[0]}" + (f", did you mean {close[0]}?" if close else ""))
        return namespace, rest

    def _print_matching(self, word: str) -> None:
        wanted = word.lower().replace("_", "-")
        formatter = self._get_formatter()
        num_found = 0
        for group in self._action_groups:
            is_whole = wanted == "all" or wanted in (group.title or "").lower()
            found = [
                action
                for action in group._group_actions
                if is_whole or wanted in f"{' '.join(action.option_strings)} {action.help}".lower()
            ]
            if found:
                formatter.start_section(group.title)
                formatter.add_arguments(found)
                formatter.end_section()
            num_found += len(found)
        text = formatter.format_help() if num_found else ""
        print(f"{self.prog}: {num_found} arguments with {word!r}\n{text}", end="")

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with one indented paragraph a flag, which stays readable with long names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def markdown_table() -> str:
    """The README's table: every flag of `paxserve serve`, its default and its meaning."""
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for kind, title in SECTIONS.items():
        lines.append(f"| **{title}** | | |")
        for flag in flags_of(kind):
            names = ", ".join(f"`{name}`" for name in (_markdown_option(flag), *ALIASES.get(flag.name, ())))
            default = f"`{flag.shown_default}`" if flag.shown_default else ""
            text = flag.help.replace("|", "\\|")
            choices = _choices(flag)
            lines.append(f"| {names} | {default} | {text}{choices} |")
    return "\n".join(lines) + "\n"


def _markdown_option(flag: Flag) -> str:
    is_switch = _argparse_options(flag).get("action") is argparse.BooleanOptionalAction
    return f"--[no-]{flag.option[2:]}" if is_switch else flag.option


def _choices(flag: Flag) -> str:
    choices = _argparse_options(flag).get("choices")
    return f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of flags, or put it between its two markers in a document."""
    parser = FlagParser(prog="python -m paxserve.flags", description="Print the table of paxserve's flags.")
    parser.add_argument("--markdown", action="store_true", required=True, help="as the README shows it")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write it between the markers in FILE instead")
    parsed = parser.parse_args(arguments)
    if parsed.into is None:
        sys.stdout.write(markdown_table())
        return 0
    before, _, rest = parsed.into.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not end:
        parser.error(f"{parsed.into} lacks the lines {MARKERS[0]} and {MARKERS[1]}")
    table = f"{MARKERS[0]}\n{markdown_table()}{MARKERS[1]}"
    parsed.into.write_text(before + table + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
