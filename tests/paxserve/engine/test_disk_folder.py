"""Pages in a folder: found after a restart, never more than allowed, never other bytes than were written."""

import os

import pytest

from paxserve.engine.disk_folder import HEADER, SUFFIX, DiskFolder
from paxserve.errors import ConfigError

A, B, C, D = (bytes([n] * 16) for n in range(4))
SIZE = 100 + HEADER.size


@pytest.fixture
def open_folder(tmp_path):
    opened = []

    def open_it(max_bytes=10**6, fingerprint="ours"):
        for folder in opened:
            folder.close()
        opened.append(DiskFolder(tmp_path, max_bytes, fingerprint))
        return opened[-1]

    yield open_it
    for folder in opened:
        folder.close()


def page(n):
    return [bytes([n]) * 60, memoryview(bytes([n + 1]) * 40)]


def test_a_restart_finds_what_was_written(open_folder):
    folder = open_folder()
    assert folder.write(A, page(1))
    assert folder.write(B, page(2))
    again = open_folder()
    assert len(again) == 2
    assert again.num_bytes == 2 * SIZE
    assert again.read(A) == b"".join(page(1))
    assert C not in again


def test_pages_of_another_fingerprint_are_not_found_but_count(open_folder):
    open_folder(fingerprint="theirs").write(A, page(1))
    folder = open_folder(2 * SIZE)
    assert A not in folder
    assert folder.read(A) is None
    assert folder.num_bytes == SIZE
    folder.write(B, page(2))
    folder.write(C, page(3))
    assert folder.num_bytes == 2 * SIZE
    assert len(folder) == 2
    assert A not in open_folder(fingerprint="theirs")


@pytest.mark.parametrize("use", [lambda folder: folder.read(A), lambda folder: folder.write(A, page(1))])
def test_the_least_recently_used_is_deleted_even_across_a_restart(open_folder, tmp_path, use):
    """What is read is used, and what is to be written although it is there."""
    folder = open_folder(3 * SIZE)
    for n, key in enumerate((A, B, C)):
        folder.write(key, page(n))
        os.utime(tmp_path / "ours" / f"{key.hex()}{SUFFIX}", (n, n))
    use(folder)
    folder = open_folder(3 * SIZE)
    folder.write(D, page(9))
    assert [key in folder for key in (A, B, C, D)] == [True, False, True, True]
    assert len(list((tmp_path / "ours").iterdir())) == 3
    assert len(open_folder(SIZE)) == 1


@pytest.mark.parametrize("harm", ["cut", "flip", "longer", "empty", "renamed"])
def test_a_damaged_page_is_not_read_and_is_deleted(open_folder, tmp_path, harm):
    open_folder().write(A, page(1))
    path = tmp_path / "ours" / f"{A.hex()}{SUFFIX}"
    content, key = path.read_bytes(), A
    if harm == "renamed":
        key = B
        path = path.rename(path.with_name(f"{B.hex()}{SUFFIX}"))
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes({"cut": content[:-7], "flip": flipped, "longer": content + b"x", "empty": b""}[harm])
    folder = open_folder()
    assert key in folder
    assert folder.read(key) is None
    assert key not in folder
    assert folder.num_damaged == 1
    assert folder.num_bytes == 0
    assert not path.exists()


def test_what_is_unfinished_goes_and_what_is_not_ours_stays(open_folder, tmp_path):
    open_folder().write(A, page(1))
    (tmp_path / "ours" / "7.unfinished").write_bytes(b"half")
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    folder = open_folder(SIZE)
    folder.write(B, page(2))
    assert A not in folder
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == [f"{B.hex()}{SUFFIX}", "notes.txt"]
    assert (tmp_path / "notes.txt").exists()


def test_a_file_that_vanishes_is_a_miss(open_folder, tmp_path):
    folder = open_folder()
    folder.write(A, page(1))
    (tmp_path / "ours" / f"{A.hex()}{SUFFIX}").unlink()
    assert folder.read(A) is None
    assert A not in folder


def test_a_page_larger_than_the_folder_is_refused(open_folder):
    folder = open_folder(SIZE - 1)
    assert not folder.write(A, page(1))
    assert folder.num_bytes == 0


def test_a_folder_has_one_engine(open_folder, tmp_path):
    open_folder()
    with pytest.raises(ConfigError, match="another engine uses"):
        DiskFolder(tmp_path, 10**6, "ours")


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_offloading_disk_path"):
        DiskFolder(tmp_path / "file", 10**6, "ours")
