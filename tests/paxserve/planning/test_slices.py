"""Which slices are enough."""

import io
import json

import pytest
from rich.console import Console

from paxserve.config import EngineConfig
from paxserve.planning import slices
from paxserve.planning.report import print_slices
from paxserve.planning.slices import compare_slices, load_slices, slice_name
from tests.paxserve.planning.tiny_engines import GOLDEN, slice_of


@pytest.fixture
def answers(monkeypatch):
    kept = {name: load_slices()[name] for name in ("v6e-1", "v5e-1")}
    kept["v6e-1"]["mesh"] = kept["v5e-1"]["mesh"] = {"tensor": 1}
    monkeypatch.setattr(slices, "load_slices", lambda: kept)
    sizes = {"v6e:1x1": 8 << 20, "v5e:1x1": 200_000}
    monkeypatch.setattr(slices, "describe_slice", lambda name: slice_of(hbm_bytes=sizes[name], name=name))
    config = EngineConfig.from_flags(model="tiny", dtype="float32", attention_backend="xla", max_num_seqs=4)
    hf_config = json.loads(GOLDEN.read_text())
    return compare_slices(config, hf_config, prices={"v6e": 2.5}, context=16)


def test_what_is_enough_comes_first_and_the_rest_says_why(answers):
    enough, refused = answers
    assert (enough.name, enough.refusal, enough.price_per_hour) == ("v6e-1", None, 2.5)
    assert enough.full_length_requests >= 1
    assert enough.roofline_tokens_per_second > 0
    assert refused.name == "v5e-1"
    assert "The weights take" in (refused.refusal or "")


def test_the_table_has_what_is_enough_and_reasons_follow(answers):
    out = io.StringIO()
    print_slices(answers, Console(file=out, width=120))
    assert out.getvalue().index("v6e-1") < out.getvalue().index("v5e-1 is not enough: The weights take")


def test_every_slice_has_a_name():
    assert slice_name(slice_of(name="v6e:2x4")) == "v6e-8"
    assert slice_name(slice_of(name="v6e:16x16")) is None
