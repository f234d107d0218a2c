"""The few shapes that steps are padded to, so that everything is compiled before the engine is ready."""

from collections.abc import Sequence

from paxserve.engine.batch import PARAM_COLUMNS, Layout, MultiLayout
from paxserve.errors import ConfigError


def _layout(num_tokens: int, max_num_seqs: int, page_size: int, num_groups: int, *, is_rich: bool) -> Layout:
    rows = min(num_tokens, max_num_seqs)
    # A row crosses into at most one new page a token group, in each page table; a few rows may be new to their slots.
    deltas = num_groups * (rows + num_tokens // page_size) + 4 * len(PARAM_COLUMNS)
    return Layout(num_tokens, rows, deltas, is_rich)


def plain_layouts(
    budget: int, max_num_seqs: int, page_size: int, sizes: Sequence[int] = (), num_groups: int = 1
) -> list[Layout]:
    """The ladder of plain programs: one token, then from 8 on in doublings, `max_num_seqs`, and the budget at the top.

    2 to 4 tokens are left out because they take as long as 8 on every device: the weights are read once in each case.
    """
    sizes = _given(sizes, budget) or _ladder(8, 2, budget, max_num_seqs)
    return [_layout(size, max_num_seqs, page_size, num_groups, is_rich=False) for size in sizes]


def rich_layouts(
    budget: int, max_num_seqs: int, page_size: int, sizes: Sequence[int] = (), num_groups: int = 1
) -> list[Layout]:
    """A coarser ladder for steps with log-probabilities, penalties or biases, which are rarer."""
    sizes = _given(sizes, budget) or _ladder(8, 8, budget, max_num_seqs)
    return [_layout(size, max_num_seqs, page_size, num_groups, is_rich=True) for size in sizes]


def multi_layouts(
    budget: int, max_num_seqs: int, page_size: int, sizes: Sequence[int] = (), num_groups: int = 1, num_steps: int = 1
) -> list[MultiLayout]:
    """The ladder of programs that run several decode steps, by their rows; none if they are to run one."""
    most = min(max_num_seqs, budget)
    if num_steps == 1:
        return []
    counts = {size for size in _given(sizes, budget) or _ladder(8, 2, budget, max_num_seqs) if size <= most}
    plain = [_layout(size, max_num_seqs, page_size, num_groups, is_rich=False) for size in sorted(counts | {most})]
    extra = num_groups * (1 + num_steps // page_size)
    return [MultiLayout(x.num_tokens, x.num_rows, x.num_deltas + x.num_rows * extra, False, num_steps) for x in plain]


def _given(sizes: Sequence[int], budget: int) -> list[int]:
    """The sizes the user asks for, with the budget at the top; none if there was no wish."""
    for size in sizes:
        if not 1 <= size <= budget:
            raise ConfigError(f"compile_sizes must be between 1 and max_num_batched_tokens={budget}, got {size}.")
    return sorted({*sizes, budget}) if sizes else []


def _ladder(first: int, factor: int, budget: int, max_num_seqs: int) -> list[int]:
    sizes = {1, budget, min(max_num_seqs, budget)}
    while first < budget:
        sizes.add(first)
        first *= factor
    return sorted(sizes)


def fitting(layouts: Sequence[Layout], num_tokens: int, num_rows: int) -> list[Layout]:
    """The layouts of the ladder that hold the step, the smallest first."""
    found = [layout for layout in layouts if num_tokens <= layout.num_tokens and num_rows <= layout.num_rows]
    assert found, f"no bucket holds {num_tokens} tokens of {num_rows} rows"
    return found


def is_essential(layout: Layout, budget: int, max_num_seqs: int) -> bool:
    """Whether a start waits for this program: with one row, all rows and the budget any step can be run."""
    all_rows = min(max_num_seqs, budget)
    if isinstance(layout, MultiLayout):
        return layout.num_rows == all_rows
    return not layout.is_rich and layout.num_tokens in (1, all_rows, budget)
