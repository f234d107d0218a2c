"""The few shapes that steps are padded to, so that everything is compiled before the engine is ready."""

from paxserve.engine.batch import PARAM_COLUMNS, Layout


def _layout(num_tokens: int, max_num_seqs: int, page_size: int, *, is_rich: bool) -> Layout:
    rows = min(num_tokens, max_num_seqs)
    # A row crosses into at most one new page a token group; a few rows may be new to their slots.
    deltas = rows + num_tokens // page_size + 4 * len(PARAM_COLUMNS)
    return Layout(num_tokens, rows, deltas, is_rich)


def plain_layouts(max_num_batched_tokens: int, max_num_seqs: int, page_size: int) -> list[Layout]:
    """The ladder of plain programs: doubling token counts, `max_num_seqs`, and the whole budget at the top."""
    sizes = {max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens)}
    size = 1
    while size < max_num_batched_tokens:
        sizes.add(size)
        size *= 2
    return [_layout(size, max_num_seqs, page_size, is_rich=False) for size in sorted(sizes)]


def rich_layouts(max_num_batched_tokens: int, max_num_seqs: int, page_size: int) -> list[Layout]:
    """A coarser ladder for steps with log-probabilities, penalties or biases, which are rarer."""
    sizes = {max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens)}
    size = 1
    while size < max_num_batched_tokens:
        sizes.add(size)
        size *= 8
    return [_layout(size, max_num_seqs, page_size, is_rich=True) for size in sorted(sizes)]


def smallest_fitting(layouts: list[Layout], num_tokens: int, num_rows: int) -> Layout:
    """The first layout of the ladder that holds the step."""
    for layout in layouts:
        if num_tokens <= layout.num_tokens and num_rows <= layout.num_rows:
            return layout
    raise AssertionError(f"no bucket holds {num_tokens} tokens of {num_rows} rows")
