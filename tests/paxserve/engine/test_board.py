import multiprocessing
from pathlib import Path

import pytest

from paxserve.engine.admission import Admission
from paxserve.engine.board import Board, Count
from paxserve.errors import RequestError
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams


def requests(name: str, count: int, length: int = 3) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"{name}{place}", prompt_token_ids=[1] * length, params=SamplingParams(), arrival_time=0.0
        )
        for place in range(count)
    ]


@pytest.fixture
def boards(tmp_path):
    """Those of a launcher and two fronts."""
    path = tmp_path / "board"
    made = [Board(path, num_places=2, place=place) for place in (0, 0, 1)]
    yield made
    for board in made:
        board.close()


def test_what_one_writes_all_see(boards):
    launcher, first, second = boards
    assert second.state == "open"
    first.state = "paused"
    first.sleep_level = 2
    first.add(Count.LOAD, 3)
    second.add(Count.LOAD, 4)
    second.add(Count.WAITING, 1)
    assert (second.state, launcher.sleep_level) == ("paused", 2)
    assert [board.total(Count.LOAD) for board in boards] == [7, 7, 7]
    launcher.clear(0)
    assert (second.total(Count.LOAD), first.total(Count.WAITING)) == (4, 1)


def test_a_server_that_stops_stays_so(boards):
    launcher, first, _ = boards
    launcher.state = "draining"
    first.state = "open"
    assert first.state == "draining"


def test_the_file_is_private(boards, tmp_path):
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


def test_the_limits_of_the_queue_are_those_of_all_fronts_together(boards):
    first, second = (Admission(max_requests=4, max_tokens=15, board=board) for board in boards[1:])
    first.admit(requests("a", 2))
    second.admit(requests("b", 2))
    for admission in (first, second):
        with pytest.raises(RequestError, match="4 of 4 are queued"):
            admission.admit(requests("c", 1))
    first.release("a0")
    with pytest.raises(RequestError, match="9 of 15 are queued"):
        second.admit(requests("c", 1, length=7))
    second.admit(requests("c", 1, length=6))
    first.release("a0")  # once is enough
    assert boards[0].total(Count.WAITING) == 4


def crowd(path: Path, place: int) -> None:
    """Admit requests against the limit, over and over."""
    admission = Admission(max_requests=5, board=Board(path, num_places=3, place=place))
    watcher = admission.board
    for turn in range(2000):
        name = f"{place}-{turn}-"
        try:
            admission.admit(requests(name, 3))
        except RequestError:
            continue
        assert watcher.total(Count.WAITING) <= 5
        for position in range(3):
            admission.release(f"{name}{position}")


def test_no_two_fronts_fill_the_same_room(tmp_path):
    processes = [
        multiprocessing.get_context("spawn").Process(target=crowd, args=(tmp_path / "board", place)) for place in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    board = Board(tmp_path / "board", num_places=3)
    assert board.total(Count.WAITING) == board.total(Count.WAITING_TOKENS) == 0
