"""The table of compiled steps: a row a step, refusals included, between its markers."""

import sys

import pytest

from paxserve.planning import step_table
from paxserve.planning.step_table import Case, rows
from tests.paxserve.planning.tiny_engines import GOLDEN, slice_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.json").write_text(GOLDEN.read_text().replace('"max_position_embeddings"', '"unused"'))
    monkeypatch.setattr(step_table, "describe_slice", lambda name: slice_of(hbm_bytes=100_000, name=name))
    return tmp_path


def test_a_refusal_is_a_row(folder):
    (row,) = rows(Case("v6e:1x1", "tiny"), folder)
    assert row.startswith("| v6e:1x1 | tiny | | | refused: ")
    assert row.count("|") == step_table.HEADER[0].count("|")


def test_it_is_written_between_the_markers(folder, monkeypatch):
    document = folder / "tpu.md"
    document.write_text(f"before\n{step_table.START}\nold\n{step_table.END}\nafter\n")
    monkeypatch.setattr(step_table, "CASES", (Case("v6e:1x1", "tiny"),))
    monkeypatch.setattr(sys, "argv", ["step_table", str(folder), "--document", str(document)])
    step_table.main()
    text = document.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "refused" in text


def test_rows_of_other_slices_can_be_left(folder, monkeypatch):
    kept, old = "| v5e:1x1 | tiny | 64 | kept |", "| v6e:1x1 | tiny | 64 | old |"
    document = folder / "tpu.md"
    document.write_text(f"{step_table.START}\n{kept}\n{old}\n{step_table.END}\n")
    monkeypatch.setattr(step_table, "CASES", (Case("v5e:1x1", "tiny"), Case("v6e:1x1", "tiny")))
    argv = ["step_table", str(folder), "--document", str(document), "--only", "v6e:1x1"]
    monkeypatch.setattr(sys, "argv", argv)
    step_table.main()
    text = document.read_text()
    assert kept in text
    assert "refused" in text
    assert "old" not in text
