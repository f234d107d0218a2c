"""The few shapes that steps are padded to, so that everything is compiled before the engine is ready."""

from paxserve.engine.batch import PARAM_COLUMNS, Layout


def _layout(num_tokens: int, max_num_seqs: int, page_size: int, *, is_rich: bool) -> Layout:
    rows = min(num_tokens, max_num_seqs)
    # A row crosses into at most one new page a token group; a few rows may be new to their slots.
    deltas = rows + num_tokens // page_size + 4 * len(PARAM_COLUMNS)
    return Layout(num_tokens, rows, deltas, is_rich)


def plain_layouts(max_num_batched_tokens: int, max_num_seqs: int, page_size: int) -> list[Layout]:
    """The ladder of plain programs: one token, then from 8 on in doublings, `max_num_seqs`, and the budget at the top.

    2 to 4 tokens are left out because they take as long as 8 on every device: the weights are read once in each case.
    """
    sizes = _ladder(8, 2, max_num_batched_tokens, max_num_seqs)
    return [_layout(size, max_num_seqs, page_size, is_rich=False) for size in sizes]


def rich_layouts(max_num_batched_tokens: int, max_num_seqs: int, page_size: int) -> list[Layout]:
    """A coarser ladder for steps with log-probabilities, penalties or biases, which are rarer."""
    sizes = _ladder(8, 8, max_num_batched_tokens, max_num_seqs)
    return [_layout(size, max_num_seqs, page_size, is_rich=True) for size in sizes]


def _ladder(first: int, factor: int, budget: int, max_num_seqs: int) -> list[int]:
    sizes = {1, budget, min(max_num_seqs, budget)}
    while first < budget:
        sizes.add(first)
        first *= factor
    return sorted(sizes)


def smallest_fitting(layouts: list[Layout], num_tokens: int, num_rows: int) -> Layout:
    """The first layout of the ladder that holds the step."""
    for layout in layouts:
        if num_tokens <= layout.num_tokens and num_rows <= layout.num_rows:
            return layout
    raise AssertionError(f"no bucket holds {num_tokens} tokens of {num_rows} rows")
