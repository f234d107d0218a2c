"""The command line: quick to start, right exit statuses, no tracebacks for a user's mistake."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import paxserve
from paxserve import cli
from paxserve.errors import ConfigError

COMMANDS = [
    *(["serve"], ["generate"], ["chat"], ["version"], ["bench"], ["run-batch"], ["convert"], ["models"]),
    *(["plan"], ["compile"]),
    *(["bench", "serve"], ["bench", "throughput"], ["bench", "latency"], ["bench", "workload"], ["bench", "startup"]),
    *(["bench", "host"], ["bench", "stall"], ["bench", "simulate"], ["bench", "front"], ["bench", "loading"]),
    *(["bench", "perplexity"], ["bench", "http"], ["bench", "sharing"], ["bench", "offload"]),
]


def paxserve_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "paxserve", *arguments], capture_output=True, text=True)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {words[0]}\s", shown, re.MULTILINE) for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(words, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([*words, "--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0
    assert shown.startswith(f"usage: paxserve {' '.join(words)}")


def test_no_module_of_a_command_is_left_out():
    assert {" ".join(words) for words in cli.command_modules()} == {
        " ".join(words) for words in COMMANDS if words != ["bench"]
    }


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_no_command_prints_help_and_fails(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "commands:" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"{paxserve.__version__}\n" * 2


@pytest.mark.parametrize(
    ("raised", "status", "stderr"),
    [(ConfigError("too big"), 2, "paxserve: too big\n"), (KeyboardInterrupt(), 130, "\n")],
)
def test_expected_ends_have_a_status_and_no_traceback(raised, status, stderr, capsys, monkeypatch):
    def run(_arguments):
        raise raised

    command = SimpleNamespace(
        __doc__="A command.", DESCRIPTION="", USAGE="", add_arguments=lambda parser: None, run=run
    )
    monkeypatch.setattr(cli, "command_modules", lambda: {("try",): command})
    assert cli.main(["try"]) == status
    assert capsys.readouterr().err == stderr


def test_a_config_error_from_the_real_command():
    done = paxserve_command("serve", "some-model", "--block-size", "5000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "paxserve: block_size must be between 0 and 4096, got 5000.\n"


def test_an_unknown_flag_of_a_subcommand():
    done = paxserve_command("serve", "some-model", "--max_model_length", "5")
    assert done.returncode == 2
    assert done.stderr.startswith("paxserve serve: unknown argument --max-model-length, did you mean --max-model-len?")


def test_help_loads_nothing_slow():
    code = "import sys; from paxserve import cli; cli.build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {
        "jax",
        "flax",
        "numpy",
        "transformers",
        "fastapi",
        "pydantic",
        "httpx",
        "uvicorn",
        "matplotlib",
    }
    assert not re.search(r"\bpaxserve\.(llm|engine|entrypoints|loaders)\b", done.stdout)
