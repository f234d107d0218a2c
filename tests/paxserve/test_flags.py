"""Flags come from the configuration, all of it, and say what is wrong in one line."""

import argparse
import dataclasses
import subprocess
import sys

import pytest

from paxserve import config, flags
from paxserve.errors import ConfigError
from paxserve.server_config import ServerConfig


def parse(*arguments: str) -> argparse.Namespace:
    parser = flags.FlagParser(prog="try")
    flags.add_flags(parser, list(flags.SECTIONS))
    return parser.parse_args(flags.kebab(arguments))


def test_every_field_is_a_flag_with_help():
    for kind in flags.SECTIONS:
        assert [flag.name for flag in flags.flags_of(kind)] == [f.name for f in dataclasses.fields(kind)]
        assert all(len(flag.help) > 10 for flag in flags.flags_of(kind))


def test_every_section_of_the_engine_has_flags():
    assert {f.type for f in dataclasses.fields(config.EngineConfig)} == set(flags.ENGINE_SECTIONS)


def test_nothing_given_means_the_defaults_of_the_dataclasses():
    assert vars(parse()) == {}
    assert flags.engine_config(parse("--model", "m")) == config.EngineConfig(model=config.ModelConfig(model="m"))
    assert flags.server_config(parse()) == ServerConfig()


def test_values_of_every_kind():
    given = parse(
        *("--model", "m", "--max-model-len", "32k", "--seed", "7", "--gpu-memory-utilization", "0.5"),
        *("--no-enable-prefix-caching", "--dtype", "float32", "-tp", "1", "--api-key", "a", "b", "--api-key", "c"),
        *(
            "--override-generation-config",
            '{"temperature": 0}',
            "--shutdown-timeout",
            "1.5",
            "--served-model-name",
            "x",
        ),
    )
    engine, server = flags.engine_config(given), flags.server_config(given)
    assert (engine.model.max_model_len, engine.model.seed, engine.model.dtype) == (32_000, 7, "float32")
    assert (engine.cache.gpu_memory_utilization, engine.cache.enable_prefix_caching) == (0.5, False)
    assert engine.model.override_generation_config == {"temperature": 0}
    assert (server.api_key, server.served_model_name, server.shutdown_timeout) == (["a", "b", "c"], ["x"], 1.5)


def test_lists_may_be_json():
    given = parse("--allowed-origins", '["https://a.example", "https://b.example"]', "--allowed-methods", "GET", "POST")
    assert given.allowed_origins == ["https://a.example", "https://b.example"]
    assert given.allowed_methods == ["GET", "POST"]
    with pytest.raises(SystemExit):
        parse("--allowed-origins", "[")


def test_underscores_are_as_good_as_hyphens():
    assert parse("--max_model_len=9", "--no_enable_prefix_caching") == parse(
        "--max-model-len=9", "--no-enable-prefix-caching"
    )
    assert flags.kebab(["--a_b=c_d", "e_f", "--", "--g_h"]) == ["--a-b=c_d", "e_f", "--", "--g_h"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-length", "5"], ["unknown argument --max-model-length", "did you mean --max-model-len?"]),
        (["--seed", "x"], ["--seed", "invalid int value: 'x'"]),
        (["--dtype", "int3"], ["--dtype", "float32"]),
        (["--override-generation-config", "[1]"], ["--override-generation-config", "JSON object"]),
        (["--max-model"], ["unknown argument --max-model"]),
    ],
)
def test_a_wrong_flag_is_one_line_on_stderr(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        parse(*arguments)
    printed = capsys.readouterr().err
    assert error.value.code == 2
    assert printed.count("\n") == 1
    assert all(word in printed for word in words)


def test_a_wrong_value_is_a_config_error():
    with pytest.raises(ConfigError, match="max_model_len must be a number"):
        flags.engine_config(parse("--model", "m", "--max-model-len", "much"))
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        flags.engine_config(parse())
    with pytest.raises(ConfigError, match="port must be between"):
        flags.server_config(parse("--port", "70000"))


def test_a_type_that_no_flag_can_have_is_refused():
    with pytest.raises(TypeError, match="odd: no flag can be made"):
        flags._argparse_options(flags.Flag(name="odd", annotation=set[int], default=None, help=""))


def test_percent_signs_in_help_are_harmless(capsys):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd:
        """A section."""

        share: float | None = None
        """At most 50 % of it | or less."""

    parser = flags.FlagParser(prog="try")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(flags.SECTIONS, Odd, "odd")
        flags.add_flags(parser, [Odd])
        assert "50 % of it \\| or less." in flags.markdown_table()
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "At most 50 % of it | or less." in capsys.readouterr().out


def test_the_module_prints_the_table():
    done = subprocess.run(
        [sys.executable, "-m", "paxserve.flags", "--markdown"], capture_output=True, text=True, check=True
    )
    assert done.stdout == flags.markdown_table()
    assert "| `--[no-]enable-prefix-caching` | `true` |" in done.stdout
    assert "| `--tensor-parallel-size`, `-tp` | `1` |" in done.stdout


def test_the_table_replaces_the_one_in_a_document(tmp_path, capsys):
    document = tmp_path / "page.md"
    document.write_text("\n".join(["# Title", flags.MARKERS[0], "| old |", flags.MARKERS[1], "The end."]))
    for _ in range(2):
        assert flags.main(["--markdown", "--into", str(document)]) == 0
        begin, end = flags.MARKERS
        assert document.read_text() == f"# Title\n{begin}\n{flags.markdown_table()}{end}\nThe end."
    document.write_text("nothing")
    with pytest.raises(SystemExit):
        flags.main(["--markdown", "--into", str(document)])
    assert "lacks the lines" in capsys.readouterr().err
