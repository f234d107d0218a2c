"""Plans: sizes as the engine counts them, memory that adds up, errors that say what to change."""

import io
import json
import shlex

import jax
import pytest
from rich.console import Console

from paxserve.errors import ConfigError
from paxserve.planning import plan as plan_module
from paxserve.planning.described_engine import describe_slice, read_hf_config, shard_bytes
from paxserve.planning.plan import Plan, as_json, make_plan, representative_layouts
from paxserve.planning.report import print_plan, serve_command
from paxserve.planning.step_time import collective_seconds, decode_work, prefill_work, roofline
from sharding.topology import CHIPS
from tests.paxserve.planning.tiny_engines import GOLDEN, HBM, slice_of, tiny_engine


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(tiny_engine(), context=16)


def test_pages_are_what_the_weights_leave_of_the_share():
    engine = tiny_engine(gpu_memory_utilization=0.5)
    weights = sum(leaf.size * 4 for leaf in engine.specs.weights)
    assert engine.weight_bytes == weights
    spec = engine.model.cache_spec
    assert engine.page_bytes == 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4 * 8
    room = (HBM // 2 - weights) // engine.page_bytes
    assert engine.num_pages == min(room, 4 * engine.max_model_len // 8)
    assert tiny_engine(num_gpu_blocks_override=7).num_pages == 7


def test_memory_adds_up_to_the_compilers_figures(plan):
    memory = plan.memory
    assert sum(memory.values()) == HBM
    largest = max(plan.programs, key=lambda program: program.total_bytes)
    compiled = plan.engine.specs.step(representative_layouts(plan.engine)[-1]).compile().memory_analysis()
    assert largest.num_tokens == 32
    rich = memory["penalties_and_biases"]  # held by the engine, and no argument of a plain step
    assert rich == sum(leaf.size * leaf.dtype.itemsize for leaf in plan.engine.specs.rich)
    assert memory["temporaries"] == compiled.temp_size_in_bytes
    assert sum(memory.values()) - memory["free"] == largest.total_bytes + rich
    assert memory["kv_pool"] == plan.engine.num_pages * plan.engine.page_bytes
    assert memory["other"] >= 0
    assert all(program.pool_is_aliased for program in plan.programs)


def test_representative_steps(plan):
    assert [(p.num_tokens, p.num_rows, p.is_rich) for p in plan.programs] == [(4, 4, False), (32, 4, False)]
    assert plan.num_engine_programs == len(plan.engine.specs.plain_layouts) + len(plan.engine.specs.rich_layouts) + 4


def test_json_and_text_say_the_same(plan):
    data = json.loads(json.dumps(as_json(plan)))
    assert data["num_pages"] == plan.engine.num_pages
    assert data["programs"][0]["temporary_bytes"] == plan.programs[0].temporary_bytes
    assert data["programs"][0]["seconds"] is None  # XLA:CPU estimates nothing
    out = io.StringIO()
    given = {"model": str(GOLDEN), "max_num_seqs": 4, "enable_prefix_caching": False}
    print_plan(plan, given, num_operations=2, console=Console(file=out, width=200))
    assert f"{plan.engine.num_pages:,} pages of 8 tokens" in out.getvalue()
    assert "tpu_configs/v6e-1.toml" in out.getvalue()
    words = shlex.split(serve_command(plan.engine, given))
    assert words[:3] == ["paxserve", "serve", str(GOLDEN.parent)]
    assert "--no-enable-prefix-caching" in words
    assert words[words.index("--block-size") + 1] == "8"


def test_weights_that_do_not_fit_say_what_would():
    with pytest.raises(ConfigError, match=r"a v6e slice of \d+ chips with --tensor-parallel-size \d+ would fit"):
        tiny_engine(slice_of(hbm_bytes=300_000))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_model_len": 10**6}, "max_model_len=1000000 is more than"),
        ({"kv_cache_memory_bytes": 10}, "less than one page"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        tiny_engine(**flags)


def test_a_program_beyond_the_memory_names_a_smaller_share():
    engine = tiny_engine()
    (layout, *_) = engine.specs.essential_layouts()
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 9M of 8M hbm. Exceeded hbm capacity by 1.00M."
    )
    assert "--gpu-memory-utilization 0.78" in plan_module._advice(engine, layout, message)
    assert "does not compile" in plan_module._advice(engine, layout, "INTERNAL: something else")


def test_roofline_by_hand():
    engine, chip = tiny_engine(), CHIPS["v6e"]
    read = engine.weight_bytes - engine.table_bytes
    assert engine.table_bytes == shard_bytes(engine.specs.weights[0])
    kv = 4 * 100 * engine.page_bytes / 8
    assert roofline(engine, decode_work(4, 100)) == pytest.approx((read + kv) / chip.hbm_bytes_per_second)
    many = prefill_work(10**6)
    spec, heads = engine.model.cache_spec, engine.model.config.num_attention_heads
    flops = 2 * 10**6 * read / 4 + 10**6 * 4 * 500_000 * heads * spec.head_dim * spec.num_layers
    assert roofline(engine, many) == pytest.approx(flops / chip.bf16_flops)


def test_roofline_of_experts_by_hand():
    """Two of four experts a token: half of them are read for one token, and all but 2 ** -10 for ten."""
    engine, chip = tiny_engine(golden="mixtral"), CHIPS["v6e"]
    experts = sum(leaf.size for leaf in engine.specs.weights if leaf.ndim == 4) * 4
    assert (engine.expert_bytes, engine.routed_share) == (experts, 0.5)
    always = engine.weight_bytes - engine.table_bytes - experts
    for num_rows, share in ((1, 0.5), (10, 1 - 2**-10)):
        kv = num_rows * engine.page_bytes / 8
        expected = (always + share * experts + kv) / chip.hbm_bytes_per_second
        assert roofline(engine, decode_work(num_rows, 1)) == pytest.approx(expected)


def test_collectives_by_hand():
    chip = CHIPS["v6e"]
    assert collective_seconds("all-reduce", 800, 8, chip) == pytest.approx(1400 / chip.ici_bytes_per_second)
    assert collective_seconds("all-gather", 800, 8, chip) == pytest.approx(700 / chip.ici_bytes_per_second)
    assert collective_seconds("reduce-scatter", 100, 8, chip) == pytest.approx(700 / chip.ici_bytes_per_second)
    assert collective_seconds("all-reduce", 800, 1, chip) == 0


def test_config_files(tmp_path):
    config = tiny_engine().config.model
    assert read_hf_config(config)["model_type"] == "llama"
    for content, message in (("[1]", "must hold a JSON object"), ("{", "is not JSON")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_hf_config(type(config)(model=str(tmp_path / "config.json")))


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install .jax.tpu."):
        describe_slice("v6e:1x1")


def test_nothing_was_put_on_a_device():
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(vars(tiny_engine().specs)))
