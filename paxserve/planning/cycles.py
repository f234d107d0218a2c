"""The compiler's estimated cycles of a TPU program, each times the trips of the loops around it.

Kernels and collectives carry no estimate and are listed apart. Of branches chosen at run time the cheapest counts (in
a step, the greedy one); a loop without a known number of trips counts as one trip.
"""

from typing import NamedTuple

from paxserve.planning.compiled_text import CompiledText, Instruction

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class Cost(NamedTuple):
    """One instruction of the program."""

    instruction: Instruction
    trips: int
    """How often a run of the program runs it."""
    kind: str = ""
    """Of a collective: which, such as "all-reduce"."""

    @property
    def cycles(self) -> int:
        """The estimate of all its runs together; 0 where there is none."""
        return self.trips * (self.instruction.cycles or 0)


class Cycles(NamedTuple):
    """What a run of the program is made of."""

    costs: list[Cost]
    """Instructions with an estimate."""
    kernels: list[Cost]
    """Pallas kernels."""
    collectives: list[Cost]
    unrated: list[Cost]
    """What sparse cores copy and gather, of which the compiler says that it has no estimate."""

    @property
    def total(self) -> int:
        """Estimated cycles of all that has an estimate."""
        return sum(cost.cycles for cost in self.costs)

    def top(self, count: int) -> list[Cost]:
        """The most expensive instructions, first."""
        return sorted(self.costs, key=lambda cost: -cost.cycles)[:count]


def read_cycles(text: str) -> Cycles:
    """The costs of the program with this text, from `compiled.as_text()`."""
    compiled = CompiledText(text)
    return _walk(compiled, compiled.entry, 1)


def _walk(compiled: CompiledText, computation: str, trips: int) -> Cycles:
    found = Cycles([], [], [], [])
    for instruction in compiled.computations[computation]:
        cost = Cost(instruction, trips)
        if kind := _collective(compiled, instruction):
            found.collectives.append(cost._replace(kind=kind))
        if instruction.is_unrated:
            found.unrated.append(cost)
        elif instruction.cycles is not None:
            found.costs.append(cost)
        if instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.attributes:
            found.kernels.append(cost)
        elif instruction.opcode == "while":
            inner = trips * (compiled.trips(instruction) or 1)
            _extend(found, _walk(compiled, instruction.called_as("body"), inner))
        elif instruction.opcode == "conditional":
            branches = [_walk(compiled, name, trips) for name in instruction.called]
            _extend(found, min(branches, key=lambda branch: branch.total))
        elif instruction.opcode in ("call", "call-start", "async-start"):
            for name in instruction.called:
                _extend(found, _walk(compiled, name, trips))
    return found


def _collective(compiled: CompiledText, instruction: Instruction) -> str | None:
    """The kind of collective that it starts, if any: itself, or in the fusion that it runs."""
    inner = compiled.computations[instruction.called_as("calls")] if instruction.opcode == "fusion" else []
    kinds = (each.opcode.removesuffix("-start") for each in (instruction, *inner))
    return next((kind for kind in kinds if kind in COLLECTIVES), None)


def _extend(found: Cycles, more: Cycles) -> None:
    for own, other in zip(found, more, strict=True):
        own.extend(other)
