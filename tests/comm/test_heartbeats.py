"""One rank of each host writes the regular heartbeats of all its ranks. Time is a number here, and a round of the watch
is a call, so these tests don't depend on how fast the machine is."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

import zeroshard
from tests.failures.common import Ranks
from tests.patience import HANG, wait_until
from zeroshard.failures import boards, heartbeat, watch
from zeroshard.failures.blame import OUTSIDE
from zeroshard.failures.boards import make_board
from zeroshard.failures.frames import calls_of
from zeroshard.failures.heartbeat import BEAT_SECONDS, STALE_ROUNDS, Due, Heartbeats
from zeroshard.failures.notices import Beat, Notices
from zeroshard.failures.positions import Position, Wait
from zeroshard.failures.processes import Who
from zeroshard.failures.whereabouts import asks, where
from zeroshard.testing import run_ranks

TIMEOUT = 80.0  # then a regular heartbeat is due every ten seconds, which are
EVERY = 20  # rounds


class Host:
    """Ranks of one host and their store. `stop` some, and `run` rounds of the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 4, timeout: float = TIMEOUT) -> None:
        self.store: Any = HashStore()
        self.number, self.calls = 0, Counter[int]()
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.number * BEAT_SECONDS))
        self.notices = [Notices(rank, num_ranks) for rank in range(num_ranks)]
        self.ranks = [Heartbeats(rank, self.notices[rank], timeout) for rank in range(num_ranks)]
        self.who = {rank: Who.this(one.card) for rank, one in enumerate(self.ranks)}
        for rank, notices in enumerate(self.notices):
            notices.come(self.store, self.who[rank])
        self.stopped: set[int] = set()
        self.position: dict[int, Position] = {}

    def run(self, rounds: int) -> Counter[int]:
        """Calls of the store, by rank, in the next `rounds` rounds."""
        self.calls.clear()
        for _ in range(rounds):
            self.number += 1
            for rank in range(len(self.ranks)):
                if rank not in self.stopped:
                    self.round(rank)
        return +self.calls

    def round(self, rank: int) -> Due:
        others = {other: who for other, who in self.who.items() if other != rank}
        beat = Beat(self.number, f"at line {self.number}", self.position.get(rank))
        return self.ranks[rank].round(self.counting(rank), beat, others)

    def counting(self, rank: int) -> Any:
        def multi_set(keys: list[str], values: list[str]) -> None:
            self.calls[rank] += 1
            self.store.multi_set(keys, values)

        return SimpleNamespace(multi_set=multi_set)

    def numbers(self) -> list[int]:
        beats = self.notices[0].last_beats(self.store, range(len(self.ranks)))
        return [beats[rank].number for rank in range(len(self.ranks))]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_a_host_makes_one_call_for_all_its_ranks(host: Host) -> None:
    host.run(2 * EVERY)  # at the start each writes its own, until it sees that the first one speaks for it
    assert host.run(4 * EVERY) == {0: 4}
    assert min(host.numbers()) >= host.number - EVERY - 1, "read in the round before, or this one"


@pytest.mark.parametrize("missing", ["board", "memory of others", "room", "time"])
def test_without_a_board_every_rank_writes_its_own(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The system has no such memory, or does not let others read it, or it is too small; or the timeout is so short
    that the ranks would be taken for silent before the next one speaks for them."""
    if missing == "board":
        monkeypatch.delattr(os, "memfd_create")
    elif missing == "memory of others":
        monkeypatch.setattr(heartbeat, "open_board", lambda who: None)
    elif missing == "room":
        monkeypatch.setattr(boards, "_BYTES", 40)
    every = 1 if missing == "time" else EVERY
    host = Host(monkeypatch, timeout=4.0 if missing == "time" else TIMEOUT)
    host.run(2 * every)
    assert host.run(2 * every) == dict.fromkeys(range(4), 2)


def test_the_next_rank_takes_over_from_one_that_is_stopped(host: Host) -> None:
    """No rank that runs is silent for longer than the pace and the time after which a board is stale; and the stopped
    ones look stopped, with the line where they were."""
    host.run(2 * EVERY)
    for stopped in (0, 1):
        host.stopped.add(stopped)
        last = host.number
        for _ in range(3 * EVERY):
            host.run(1)
            assert min(host.numbers()[stopped + 1 :]) >= host.number - EVERY - STALE_ROUNDS - 1
        assert host.numbers()[stopped] <= last
        assert host.run(4 * EVERY) == {stopped + 1: 4}
    beats = host.notices[3].last_beats(host.store, [1])
    assert beats[1].where == f"at line {beats[1].number}"
    host.stopped.clear()
    host.run(2 * EVERY)
    assert host.run(4 * EVERY) == {0: 4}, "continued: the first one speaks again"


def test_a_rank_that_leaves_speaks_for_nobody_at_once(host: Host) -> None:
    host.run(2 * EVERY)
    host.ranks[0].end()
    host.stopped.add(0)
    host.run(1)
    assert min(host.numbers()[1:]) >= host.number - 1
    host.run(1)
    assert host.run(2 * EVERY) == {1: 2}


def test_nobody_is_forgotten_by_a_speaker_that_cannot_read_everybody(
    monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    """No other rank can read the board of rank 2, which therefore writes for itself."""
    can_open, hidden = heartbeat.open_board, host.who[2].board
    monkeypatch.setattr(heartbeat, "open_board", lambda who: can_open(who) if who.board != hidden else None)
    host.run(2 * EVERY)
    assert host.run(4 * EVERY) == {0: 4, 2: 4}
    assert min(host.numbers()) >= host.number - EVERY - 1


def test_news_is_written_by_the_rank_itself_at_once(host: Host) -> None:
    host.run(2 * EVERY)
    host.position[3] = Position(Wait("gather", 4, (0, 3), "gather of unit a"), {"gather": 5})
    host.run(1)
    found = host.notices[0].last_beats(host.store, [3])[3]
    assert found.number == host.number and found.position == host.position[3]
    host.run(2 * EVERY)
    assert host.notices[0].last_beats(host.store, [3])[3].position == host.position[3], "also as told by rank 0"
    host.position.clear()
    host.run(1)
    assert host.notices[0].last_beats(host.store, [3])[3].position is None


def test_who_is_asked_answers_itself(host: Host) -> None:
    """Whoever asks compares two heartbeats of each rank: one that is told for a stopped rank would look like life. And
    a speaker that only it was asked does not leave the others without a heartbeat."""
    host.run(2 * EVERY)
    host.stopped.add(2)
    for rank in (0, 1, 3):
        host.ranks[rank].pace.is_called(1)
    host.run(1)
    before = host.numbers()
    host.run(4)
    assert host.numbers() == [number + 4 if rank != 2 else number for rank, number in enumerate(before)]
    host.stopped.clear()
    host.run(3 * EVERY)
    host.ranks[0].pace.is_called(2)
    for _ in range(EVERY - 1):
        host.run(1)
        assert min(host.numbers()) >= host.number - EVERY - 1


def test_an_older_heartbeat_that_is_told_later_replaces_nothing(host: Host) -> None:
    """A speaker has read the board of a rank; the rank leaves; the speaker writes what it has read. With one key for
    both, the rank would no longer have left, and its end would be reported as a death."""
    store, notices = host.store, host.notices
    notices[1].leave(store, 7, "at the end")
    notices[0].beat(store, Beat(7, "", None), {1: Beat(7, "at line 7", None).encode()})
    assert notices[0].last_beats(store, [1])[1].left is not None
    notices[0].beat(store, Beat(8, "", None), {1: Beat(6, "at line 6", None).encode()})
    assert notices[0].last_beats(store, [1])[1].number == 7


def test_a_board_that_is_read_while_it_is_written() -> None:
    own = boards.make_board()
    assert own is not None
    other = boards.open_board(Who.this(own.card))
    assert other is not None and other.read() is None
    own.post(1, "first", [3])
    assert other.read() == boards.Posted(1, "first", (3,))
    own._memory[boards._HEAD.size] ^= 1  # the first half of the next one
    assert other.read() == boards.Posted(1, "first", (3,))
    own.post(2, "second", [])
    assert other.read() == boards.Posted(2, "second", ())


def test_only_the_board_of_that_process_is_opened() -> None:
    """In a container every rank may be process 1; and numbers of files are used again."""
    own = boards.make_board()
    assert own is not None
    identity, segment, fd = own.card
    assert boards.open_board(Who.this((identity + 1, segment, fd))) is None
    assert boards.open_board(Who.this((identity, segment + 1, fd))) is None
    assert boards.open_board(Who.this((identity, segment, fd + 1000))) is None
    assert boards.open_board(Who.this()) is None


# Processes ------------------------------------------------------------------------------------------------------------


def watched(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 0 is stopped. Rank 2 sees its own number grow in the store, which rank 1 now writes; it then continues rank
    0, and all end."""
    watch.start()
    current = watch.current()
    assert current is not None
    pace = current._heart.pace
    pace.seconds = 2 * BEAT_SECONDS

    def told() -> int:
        found: bytes = current.line.ask(lambda store: store.get(f"told-{rank}"), 60.0)
        return Beat.decode(found).number

    if rank == 2:
        wait_until(lambda: told() > 0)
        [pid] = [who.pid for other, who in current._peers.neighbours.items() if other == 0]
        os.kill(pid, signal.SIGSTOP)
        for _ in range(3):
            stopped = told()
            wait_until(lambda stopped=stopped: told() > stopped)
        os.kill(pid, signal.SIGCONT)
    current.wait_for_all("end", range(3))


def test_processes_speak_for_each_other() -> None:
    ended = Ranks(watched, 3).finish()
    assert (ended.statuses, ended.said) == ([0, 0, 0], ""), ended


def test_code_that_has_no_hash_has_a_place() -> None:
    """torch.compile generates such code, with dicts among its constants. The thread that writes the heartbeats ended
    with a TypeError, and the rank was taken to be dead."""

    def generated() -> str:
        return where(threading.get_ident())

    generated.__code__ = generated.__code__.replace(co_consts=(*generated.__code__.co_consts, {}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(generated.__code__)
    assert "in generated" in generated()


def test_a_thread_that_asks_where_it_is_does_not_wait_there() -> None:
    """Messages said "(waiting in whereabouts.py:41 frame_of)" of the rank that wrote them."""
    here = threading.get_ident()
    assert where(here).endswith(f"in {test_a_thread_that_asks_where_it_is_does_not_wait_there.__name__}")
    event = threading.Event()

    def until_it_waits() -> None:
        wait_until(lambda: "(waiting in threading.py" in where(here))
        event.set()

    threading.Thread(target=until_it_waits).start()
    assert event.wait(HANG), "the control: of another thread it is said"


def test_a_rank_that_writes_a_message_does_not_wait_in_the_watch() -> None:
    """Where two ranks differ, both write where the other one is: "(waiting in rank_watch.py:242 last_seen)"."""
    asked, seen = threading.Event(), threading.Event()

    @asks
    def writes_a_message() -> None:
        asked.set()
        seen.wait(HANG)

    thread = threading.Thread(target=lambda: writes_a_message())
    thread.start()
    assert asked.wait(HANG) and thread.ident is not None
    place = where(thread.ident)
    seen.set()
    thread.join()
    assert "test_heartbeats.py" in place and "waiting in" not in place


def test_a_place_that_is_old_is_told_as_old() -> None:
    """A rank that did not answer at once was said to be where it had been seconds before."""

    def check(rank: int) -> None:
        zeroshard.init()
        current = watch.current()
        assert current is not None
        watch.wait_for_all()
        if rank == 1:
            wait_until(lambda: current.last_seen(0).startswith("at test_heartbeats.py"))
            current._peers.look = lambda store, ranks: None  # type: ignore[method-assign]
            assert current.last_seen(0).startswith("last seen at test_heartbeats.py")
        watch.wait_for_all()

    run_ranks(check, 2)


def test_without_the_gil_no_other_thread_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the variables of a call while another thread runs it may end a free-threaded interpreter."""
    go_on, here = threading.Event(), threading.get_ident()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    try:
        for has_gil in (True, False):
            monkeypatch.setattr(sys, "_is_gil_enabled", lambda has_gil=has_gil: has_gil, raising=False)
            assert bool(calls_of(thread.ident)) == has_gil
            assert calls_of(here) and "in test_without_the_gil" in where(here)
        assert where(thread.ident) == OUTSIDE
    finally:
        go_on.set()
        thread.join()


def test_a_rank_speaks_for_higher_ranks_only() -> None:
    """Two ranks that list each other would both be silent."""
    heart = Heartbeats(1, Notices(1, 3), 120.0)
    for rank in (0, 2):
        board = make_board()
        assert board is not None and board.post(1, "a beat", ())
        heart._boards[rank] = board
    assert list(heart._others()) == [2]
