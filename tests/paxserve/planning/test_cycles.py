"""Estimated cycles of a program's text, by hand."""

import pytest

from paxserve.planning.compiled_text import CompiledText, array_bytes
from paxserve.planning.cycles import read_cycles

TEXT = """\
HloModule jit_step, is_scheduled=true

%fused.1 (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %n = bf16[8,128]{1,0:T(8,128)(2,1)} negate(%p)
}

%reducing (p: f32[64]) -> f32[64] {
  %p.1 = f32[64]{0} parameter(0)
  ROOT %all-reduce.2 = f32[64]{0} all-reduce(%p.1), replica_groups={{0,1}}, to_apply=%sum
}

%offloaded (p.2: f32[64]) -> f32[64] {
  %p.2 = f32[64]{0} parameter(0)
  %u = f32[64]{0} copy(%p.2), backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  ROOT %all-reduce.3 = f32[64]{0} all-reduce(%p.2), replica_groups={{0,1}}, to_apply=%sum
}

%body (t: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %t = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %f = bf16[8,128]{1,0:T(8,128)} fusion(%x), calls=%fused.1, metadata={op_name="mul"}, c={"estimated_cycles":"100"}
  %k = bf16[8,128]{1,0} custom-call(%f), custom_call_target="tpu_custom_call"
  %r = f32[64]{0} fusion(%k), kind=kCustom, calls=%reducing
  %s = ((f32[64]{0}), f32[64]{0}) call-start(%r), async_execution_thread="sparsecore", to_apply=%offloaded
  ROOT %out = (s32[]{:T(128)}, bf16[8,128]{1,0}) tuple(%t, %k)
}

%condition (t.1: (s32[], bf16[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(32)
  %t.1 = (s32[]{:T(128)}, bf16[8,128]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%cheap (q: f32[2]) -> f32[2] {
  ROOT %c = f32[2]{0} negate(%q), backend_config={"window_config":{"estimated_cycles":"7"}}
}

%dear (q.1: f32[2]) -> f32[2] {
  ROOT %d = f32[2]{0} negate(%q.1), backend_config={"window_config":{"estimated_cycles":"7000"}}
}

ENTRY %main (a: bf16[8,128]) -> f32[2] {
  %a = bf16[8,128]{1,0} parameter(0)
  %loop = (s32[]{:T(128)}, bf16[8,128]{1,0}) while(%a), condition=%condition, body=%body
  %g = bf16[4,128]{1,0} all-gather-start(%a), dimensions={0}
  ROOT %choice = f32[2]{0} conditional(%a, %a, %a), branch_computations={%dear, %cheap}
}
"""


def test_cycles_times_trips_and_the_cheapest_branch():
    cycles = read_cycles(TEXT)
    assert cycles.total == 32 * 100 + 7
    assert [(cost.instruction.name, cost.trips, cost.cycles) for cost in cycles.top(1)] == [("f", 32, 3200)]
    assert cycles.top(1)[0].instruction.op_name == "mul"


def test_kernels_and_collectives_are_apart():
    cycles = read_cycles(TEXT)
    assert [(cost.instruction.name, cost.trips) for cost in cycles.kernels] == [("k", 32)]
    assert [(cost.kind, cost.trips) for cost in cycles.collectives] == [
        ("all-reduce", 32),
        ("all-reduce", 32),
        ("all-gather", 1),
    ]


def test_what_sparse_cores_run_has_no_estimate():
    cycles = read_cycles(TEXT)
    assert [(cost.instruction.name, cost.trips) for cost in cycles.unrated] == [("u", 32)]
    assert "u" not in {cost.instruction.name for cost in cycles.costs}


def test_what_is_inside_fusions_has_no_memory_of_its_own():
    names = {instruction.name for instruction in CompiledText(TEXT).executed()}
    assert {"f", "k", "loop", "d", "limit"} <= names
    assert not names & {"p", "n", "all-reduce.2"}


def test_a_loop_with_an_unknown_end_counts_once():
    assert read_cycles(TEXT.replace("constant(32)", "add(%t.1)")).total == 100 + 7
    known = TEXT.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert read_cycles(known).total == 5 * 100 + 7


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        CompiledText("nothing")


@pytest.mark.parametrize(
    ("type_text", "size"),
    [
        ("bf16[64,128]{1,0:T(8,128)(2,1)S(1)}", 64 * 128 * 2),
        ("(f32[2,3]{1,0}, s8[7]{0}, pred[]{:T(512)})", 24 + 7 + 1),
        ("f8e4m3fn[10]{0}", 10),
        ("s32[]", 4),
    ],
)
def test_bytes_of_a_type(type_text, size):
    assert array_bytes(type_text) == size
