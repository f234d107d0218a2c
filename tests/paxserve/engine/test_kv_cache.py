import pytest

from paxserve.engine.kv_cache import PagePool
from paxserve.engine.prefix_cache import page_hash, root_hash
from paxserve.errors import OutOfPages


def test_pages_are_held_shared_and_given_back():
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    pool.hold(pages[:1])
    pool.check_integrity([pages, pages[:1]])
    pool.release(pages)
    assert pool.num_in_use == 1
    pool.release(pages[:1])
    assert pool.num_in_use == 0


def test_a_failed_allocation_takes_nothing():
    pool = PagePool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    pool.check_integrity([held])
    assert pool.num_free == 1


def test_releasing_a_page_twice_is_caught():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


def test_cached_pages_are_evicted_last_and_from_the_end_of_their_prefix():
    pool = PagePool(4, 2)
    assert pool.prefix_cache is not None
    pages = pool.allocate(3)
    first = page_hash(root_hash(None), [1, 2])
    second = page_hash(first, [3, 4])
    pool.prefix_cache.insert(first, pages[0])
    pool.prefix_cache.insert(second, pages[1])
    pool.release(pages)
    pool.allocate(2)  # the page never used and the one without reusable content
    assert pool.prefix_cache.find([first, second]) == pages[:2]
    pool.allocate(1)
    assert pool.prefix_cache.find([first, second]) == pages[:1]


def test_a_salt_or_another_parent_gives_another_hash():
    hashes = {page_hash(root_hash(salt), [1, 2]) for salt in (None, "a", "b")}
    hashes.add(page_hash(page_hash(root_hash(None), [1, 2]), [1, 2]))
    assert len(hashes) == 4


def test_a_second_copy_of_a_page_is_found_when_the_first_is_gone():
    pool = PagePool(4, 2)
    cache = pool.prefix_cache
    assert cache is not None
    digest = page_hash(root_hash(None), [1, 2])
    pages = pool.allocate(3)
    for page in pages:
        cache.insert(digest, page)
    assert len(cache) == 1
    for page, left in zip(pages, ([pages[1]], [pages[2]], []), strict=True):
        assert cache.find([digest]) == [page]
        cache.forget(page)
        cache.check_integrity()
        assert cache.find([digest]) == left
    assert len(cache) == 0


def test_a_page_that_others_read_or_find_must_be_copied_before_it_is_written():
    pool = PagePool(4, 2)
    assert pool.prefix_cache is not None
    (page,) = pool.allocate(1)
    assert not pool.must_copy(page)
    pool.hold([page])
    assert pool.must_copy(page)
    pool.release([page])
    pool.prefix_cache.insert(page_hash(root_hash(None), [1, 2]), page)
    assert pool.must_copy(page)
