import json

import pytest

from paxserve import cli, flags
from paxserve.arguments import VLLM_VARIABLES, expand, known_flags
from paxserve.errors import ConfigError
from paxserve.vllm_flags import IMPLIED, NEUTRAL, REFUSED


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.setattr("paxserve.arguments.flag_environment", dict)


def variables(monkeypatch, **values):
    monkeypatch.setattr("paxserve.arguments.flag_environment", lambda: values)


def parse(*arguments: str):
    parsed = cli.build_parser().parse_args(expand(["serve", *arguments]))
    return flags.engine_config(parsed), flags.server_config(parsed)


def test_other_commands_are_left_alone(monkeypatch):
    variables(monkeypatch, PAXSERVE_PORT="1")
    assert expand(["chat", "--url=x", "--some_flag"]) == ["chat", "--url=x", "--some-flag"]
    assert expand([]) == []


def test_a_file_has_every_kind_of_value(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nmax-model-len: 32k\nport: 9000\nenable_prefix_caching: false\nopen-metrics: true\n"
        "api-key: [a, b]\noverride-generation-config: {temperature: 0.5}\nchat-template: null\nallowed-origins: []\n"
    )
    engine, server = parse("--config", str(file))
    assert (engine.model.model, engine.model.max_model_len) == ("m", 32_000)
    assert engine.cache.enable_prefix_caching is False
    assert engine.model.override_generation_config == {"temperature": 0.5}
    assert (server.port, server.open_metrics, server.api_key) == (9000, True, ["a", "b"])


def test_what_is_typed_wins_over_the_file_and_that_over_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nport: 1\nseed: 1\nserved-model-name: [a]\nopen-metrics: true\n")
    variables(monkeypatch, PAXSERVE_PORT="2", PAXSERVE_SEED="2", PAXSERVE_MAX_LOGPROBS="2", PAXSERVE_OPEN_VERSION="yes")
    engine, server = parse("--port=3", f"--config={file}", "--served_model_name", "b", "c", "--no-open-metrics")
    assert (server.port, engine.model.seed, engine.model.max_logprobs) == (3, 1, 2)
    assert server.served_model_name == ["b", "c"]
    assert (server.open_metrics, server.open_version) == (False, True)


def test_a_model_that_is_typed_wins_in_either_form(tmp_path, monkeypatch):
    variables(monkeypatch, PAXSERVE_MODEL="env", PAXSERVE_API_KEYS="x", PAXSERVE_ALLOWED_ORIGINS='["x", "y"]')
    assert parse()[0].model.model == "env"
    assert parse("typed", "--port", "5")[0].model.model == "typed"
    assert parse("--model", "typed")[0].model.model == "typed"
    assert parse("typed")[1].allowed_origins == ["x", "y"]


def test_keys_of_json_can_be_given_one_by_one():
    engine, server = parse(
        *("m", "--override-generation-config.temperature", "0.5", "--override_generation_config.top_k=7"),
        *("--default-chat-template-kwargs.mood", "glad", "--default-chat-template-kwargs.deep.er", "true"),
    )
    assert engine.model.override_generation_config == {"temperature": 0.5, "top_k": 7}
    assert server.default_chat_template_kwargs == {"mood": "glad", "deep": {"er": True}}


def test_variables_of_vllm_are_taken_with_a_note(monkeypatch, capsys):
    variables(monkeypatch, VLLM_MAX_STOP_STRINGS="9", VLLM_SERVER_DEV_MODE="1", PAXSERVE_COLOUR="red", VLLM_UNKNOWN="1")
    assert parse("m")[1].max_stop_strings == 9
    notes = capsys.readouterr().err
    assert "VLLM_MAX_STOP_STRINGS is taken as --max-stop-strings" in notes
    assert "admin routes need --admin-api-key" in notes
    assert "PAXSERVE_COLOUR names no flag" in notes
    assert set(VLLM_VARIABLES.values()) <= set(known_flags())


def test_variables_of_vllm_with_other_units_are_translated(monkeypatch):
    variables(monkeypatch, VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_KVCACHE_SPACE="1.5")
    engine, server = parse("m")
    assert engine.cache.kv_cache_memory_bytes == 3 * 2**29
    assert server.uvicorn_log_level == "warning"
    variables(monkeypatch, VLLM_CPU_KVCACHE_SPACE="0")
    assert parse("m")[0].cache.kv_cache_memory_bytes is None
    variables(monkeypatch, VLLM_CPU_KVCACHE_SPACE="much")
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE must be a number of GiB"):
        parse("m")


@pytest.mark.parametrize(
    ("content", "words"),
    [("prot: 1", "prot is no flag. Did you mean port?"), ("- a", "must map flags"), ("a: [", "YAML"),
     ("open-metrics: maybe", "open_metrics must be true or false")],
)  # fmt: skip
def test_files_that_are_wrong(tmp_path, content, words, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        expand(["serve", "m", "--config", str(file)])
    assert words in str(error.value)
    assert cli.main(["serve", "m", "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith("paxserve: ")
    with pytest.raises(ConfigError, match="YAML"):
        expand(["serve", "m", "--config", str(tmp_path / "nothing.yaml")])


def test_switches_of_vllm_that_ask_for_what_is_always_so(capsys):
    for name in IMPLIED:
        assert parse("m", f"--{name}", "--port", "5")[1].port == 5
        assert IMPLIED[name] in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_flags_of_vllm_that_are_not_offered_are_refused_with_the_reason(name):
    if name.replace("-", "_") in known_flags():
        return  # offered by now
    for argument in (f"--{name}", f"--{name}=x", f"--{name}.key=x"):
        with pytest.raises(ConfigError, match=f"--{name} is not supported: ") as error:
            expand(["serve", "m", argument])
        assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
def test_values_of_refused_flags_that_ask_for_what_is_always_so(name, value, capsys, tmp_path):
    assert name in REFUSED
    path = tmp_path / "serve.yaml"
    path.write_text(json.dumps({name: value, "port": 5}))
    for arguments in ([f"--{name}={value}", "--port=5"], [f"--{name}", value, "--port=5"], ["--config", str(path)]):
        assert parse("m", *arguments)[1].port == 5
        assert f"--{name} {value} changes nothing" in capsys.readouterr().err


def test_flags_of_vllm_in_a_file(capsys, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("enforce-eager: false\ndisable_log_requests: true\nport: 5")
    assert parse("m", "--config", str(path))[1].port == 5
    assert "--enforce-eager False changes nothing" in capsys.readouterr().err
    for line, words in (
        ("enforce-eager: true", "--enforce-eager is not supported: XLA compiles"),
        ("disable-log-requests: false", "--disable-log-requests cannot be False"),
        ("pipeline_parallel_size: 4", "--pipeline-parallel-size is not supported"),
        ("data-parallel-size: 2", "--data-parallel-size is not supported"),
    ):
        path.write_text(line)
        with pytest.raises(ConfigError, match=words):
            parse("m", "--config", str(path))


def test_the_number_of_fronts_in_every_form(monkeypatch, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("api_server_count: 4")
    assert parse("m")[1].api_server_count == 1
    assert parse("m", "--api-server-count", "4")[1].api_server_count == 4
    assert parse("m", "--api_server_count=4")[1].api_server_count == 4
    assert parse("m", "--config", str(path))[1].api_server_count == 4
    variables(monkeypatch, PAXSERVE_API_SERVER_COUNT="3")
    assert parse("m")[1].api_server_count == 3
    assert parse("m", "--config", str(path))[1].api_server_count == 4
    for wrong in ("0", "-1", "257"):
        with pytest.raises(ConfigError, match="api_server_count must be between 1 and 256"):
            parse("m", "--api-server-count", wrong)


def test_help_for_a_word(capsys):
    for word, shown, hidden in (
        ("queue", "--max-num-queued-reqs", "--port"), ("HTTP server: limits", "--max-json-depth", "--port"),
        ("max_model", "--max-model-len", "--port"), ("all", "--port", None),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as leaving:
            cli.main(["serve", f"--help={word}"])
        assert leaving.value.code == 0
        text = capsys.readouterr().out
        assert shown in text
        assert hidden is None or f"  {hidden}" not in text
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help=nonsenseword"])
    assert "0 arguments" in capsys.readouterr().out


def test_json_survives_the_way_through_the_arguments(tmp_path):
    values = {"temperature": 0.5, "text": "a b\"c'd"}
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps({"model": "m", "default-chat-template-kwargs": values}))
    assert parse("--config", str(file))[1].default_chat_template_kwargs == values
