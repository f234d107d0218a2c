"""A compiled program's text (`compiled.as_text()`), read into computations and their instructions."""

import re
from collections.abc import Iterator
from typing import NamedTuple

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
UNRATED = str(2**63 - 1)
OP_NAME = re.compile(r'op_name="([^"]*)"')
CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
BITS = {"pred": 8, "bf16": 16, "f16": 16}


class Instruction(NamedTuple):
    """One instruction as the text has it."""

    name: str
    type: str
    """Type of the result, with its layout."""
    opcode: str
    attributes: str
    """All that follows the opcode: operands, attributes, metadata, the backend's configuration."""

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of one run, where it made one; kernels and collectives have none."""
        match = CYCLES.search(self.attributes)
        return None if match is None or match[1] == UNRATED else int(match[1])

    @property
    def is_unrated(self) -> bool:
        """Whether the compiler has said that it has no estimate, as it does of what a sparse core copies or gathers."""
        match = CYCLES.search(self.attributes)
        return match is not None and match[1] == UNRATED

    @property
    def op_name(self) -> str:
        """The path of the jax operation that it comes from; "" for what the compiler added."""
        match = OP_NAME.search(self.attributes)
        return "" if match is None else match[1]

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; a conditional's in the order of its branches."""
        branches = BRANCHES.search(self.attributes)
        if branches is not None:
            return [name.strip().lstrip("%") for name in branches[1].split(",")]
        return CALLED.findall(self.attributes)

    def called_as(self, role: str) -> str:
        """The computation that the attribute `role` (such as "body") names."""
        match = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        assert match is not None, f"{self.name} has no {role}"
        return match[1]

    @property
    def result_bytes(self) -> int:
        """Bytes of the result, all its arrays together."""
        return array_bytes(self.type)


class CompiledText:
    """The computations of a program, by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            header = COMPUTATION.match(line)
            if header is not None:
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("  "):
                instruction = parse_instruction(line)
                if instruction is not None:
                    current.append(instruction)
        if not self.entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY computation.")

    def trips(self, loop: Instruction) -> int | None:
        """How often a while loop's body runs; None where that is only known when it runs."""
        known = TRIP_COUNT.search(loop.attributes)
        if known is not None:
            return int(known[1])
        # A scan counts from 0 up to a constant; the comparison may have been put into a fusion.
        condition = self.computations[loop.called_as("condition")]
        limits = [c for i in condition if i.opcode == "constant" for c in re.findall(r"^\((\d+)\)", i.attributes)]
        inner = [j for i in condition for name in i.called for j in self.computations.get(name, [])]
        compares = [i for i in (*condition, *inner) if i.opcode == "compare"]
        if len(limits) == 1 and len(compares) == 1 and "direction=LT" in compares[0].attributes:
            return int(limits[0])
        return None

    def executed(self) -> Iterator[Instruction]:
        """Every instruction that has a result in memory: all but those inside fusions."""
        everything = [i for instructions in self.computations.values() for i in instructions]
        inside = {name for i in everything if i.opcode == "fusion" for name in i.called}
        for name, instructions in self.computations.items():
            if name not in inside:
                yield from instructions


def parse_instruction(line: str) -> Instruction | None:
    """The instruction on a line, or None if there is none."""
    name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _end_of_type(rest)
    opcode, _, attributes = rest[end:].lstrip().partition("(")
    return Instruction(name.lstrip("%"), rest[:end], opcode, f"({attributes}")


def _end_of_type(text: str) -> int:
    """Where the type at the start of `text` ends: a tuple's at its closing bracket, an array's at the first space."""
    if not text.startswith("("):
        return text.index(" ") if " " in text else len(text)
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    return len(text)


def array_bytes(type_text: str) -> int:
    """Bytes of all arrays in a type such as `(bf16[64,128]{1,0}, f32[])`, without padding."""
    total = 0
    for dtype, sizes in ARRAY.findall(re.sub(r"\{[^}]*\}", "", type_text)):
        bits = BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["32"])[0])
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += count * bits // 8
    return total
