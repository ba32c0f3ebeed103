"""Calls of the store. At the start of a run their number once grew with the square of the number of ranks (20 s at
1,024 ranks), and 16,384 ranks together asked 65,000 times a second whether a rank had failed."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from tests.patience import wait_until
from zeroshard.checkpoint import meeting
from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.errors import TookTooLong
from zeroshard.failures import bell, positions
from zeroshard.failures.bell import Bell, connection_of_its_own
from zeroshard.failures.heartbeat import BEAT_SECONDS, Due, Pace
from zeroshard.failures.positions import Position, Wait, in_short, knot

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "control_plane.py"


def test_no_path_takes_more_of_each_rank_where_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four times as many ranks, all ranks together make four times as many calls. The control: before, some paths
    made sixteen times as many. (This test also runs the benchmark's code.)"""
    spec = importlib.util.spec_from_file_location("control_plane", SCRIPT)
    assert spec is not None and spec.loader is not None
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 60.0)
    squares = set()
    for name, path in benchmark.PATHS.items():
        (small_before, small), (large_before, large) = path(128), path(512)
        assert large.calls <= 4.1 * max(small.calls, 1), name
        assert large.num_bytes <= 6 * small.num_bytes, name  # reports pass through leaders; few ranks have none
        if large_before.calls > 15 * max(small_before.calls, 1) or large_before.num_bytes > 15 * small_before.num_bytes:
            squares.add(name)
    assert squares >= {
        "start of the watch",
        "start: devices of a native backend",
        "a timeout on all ranks: who is it",
        "a deadlock: each look",
    }
    before, now = benchmark.control_exchange(512)
    assert now.num_bytes < benchmark.control_exchange(128)[1].num_bytes * 1.3 and before.num_bytes > 4 * now.num_bytes
    before, now = benchmark.materialized(512)
    assert now.num_bytes == benchmark.materialized(128)[1].num_bytes and before.num_bytes > 100 * now.num_bytes
    assert now.seconds < before.seconds / 10


def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("make", [server, HashStore])
def test_a_bell_is_heard_each_time_and_by_nobody_else(make: Callable[[], Any]) -> None:
    store = make()
    heard: list[int] = []
    bells = [
        Bell(connection_of_its_own(store), "p", f"bell-{i}", lambda store, i=i: heard.append(i), 0.01) for i in (0, 1)
    ]
    assert all(one.blocks is isinstance(store, TCPStore) for one in bells)
    ring = PrefixStore("p", store)
    for number in range(1, 4):
        ring.set("bell-0", "1")
        wait_until(lambda number=number: len(heard) == number)
        bells[0].wait(number - 1, 60.0)
        assert bells[0].count == number
    assert heard == [0, 0, 0] and not ring.check(["bell-0"])

    for number, one in enumerate(bells):
        one.close()
        ring.set(f"bell-{number}", "1")
        one.join(60.0)
        assert not one._thread.is_alive()
    assert heard == [0, 0, 0] and not any(one.gone for one in bells)


def test_a_bell_that_nobody_has_rung_for_weeks_still_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wait ends after 20 days. That was taken for the end of the store: under torchrun all ranks ended."""
    monkeypatch.setattr(bell, "_WITHOUT_END", timedelta(milliseconds=20))
    store, heard, waits = server(), list[int](), list[bool]()
    comes = Bell._comes
    monkeypatch.setattr(Bell, "_comes", lambda self: (waits.append(comes(self)), waits[-1])[1])
    one = Bell(connection_of_its_own(store), "p", "bell", lambda store: heard.append(1), 0.01)
    wait_until(lambda: len(waits) > 2 or one.gone)
    monkeypatch.undo()
    PrefixStore("p", store).set("bell", "1")
    wait_until(lambda: heard or one.gone)
    assert heard and not one.gone
    one.close()
    PrefixStore("p", store).set("bell", "1")
    one.join(60.0)


class Watched(TCPStore):
    """Takes down what its timeout is while it opens another connection."""

    timeouts: list[timedelta]

    def clone(self) -> Any:
        self.timeouts = [*getattr(self, "timeouts", []), self.timeout]
        return super().clone()


def test_connecting_may_take_longer_than_a_call() -> None:
    """A slow name server takes five seconds, which is more than a short timeout of collectives."""
    served, short = server(), timedelta(seconds=2)
    store = Watched("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=60))
    store.set_timeout(short)
    own: Any = connection_of_its_own(store)
    assert store.timeouts == [bell._CONNECTING] and store.timeout == own.timeout == short
    own.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_that_accepts_no_further_connection_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same connection was used once. While the bell waited for its key with it, all other calls of the rank waited
    as well, without end."""
    monkeypatch.setattr(bell, "_CONNECTING", timedelta(milliseconds=300))
    monkeypatch.setattr(bell, "_LOOK_SECONDS", 3600.0)  # nor is the connection that there is looked at meanwhile
    served = server()
    store = TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=60))
    store.set_timeout(timedelta(milliseconds=300))
    del served
    with pytest.raises(TookTooLong, match=r"no further connection to the store of the process group: .*timed out"):
        connection_of_its_own(store)
    assert store.timeout == timedelta(milliseconds=300)
    for thread in threading.enumerate():  # torch would end the process if it still tried to connect at its exit
        if thread.name == "zeroshard connects":
            thread.join(60)


def test_a_store_that_has_one_connection_is_polled() -> None:
    class Own(Store):  # a store in Python has no `clone`
        pass

    store = Own()
    assert connection_of_its_own(store) is store and not bell.can_wait(store)


def test_the_pace_of_a_rank() -> None:
    pace = Pace(120.0)
    assert pace.seconds == 10.0 and Pace(4.0).seconds == BEAT_SECONDS
    no, regular, news = Due.NOTHING, Due.REGULAR, Due.NEWS
    found = [pace.due(is_stuck=stuck) for stuck in (False, False, True, True, False, False)]
    assert found == [regular, no, news, no, news, no]  # first; when it gets stuck; when it no longer is
    found = [pace.due(is_stuck=False, is_spoken_for=spoken) for spoken in (True, True, False, False)]
    assert found == [no, no, regular, no]  # when nobody speaks for it any longer
    assert not pace.is_called(0) and pace.due(is_stuck=False) is no
    assert pace.is_called(1) and [pace.due(is_stuck=False) for _ in range(2)] == [news, news]
    assert not pace.is_called(1)


@pytest.mark.parametrize(
    "ranks", [(0,), (3,), (0, 1), (5, 4), tuple(range(16384)), tuple(range(3, 900, 8)), (0, 2, 3), (0, 5, 4, 9)]
)
def test_ranks_in_short_are_these_ranks(ranks: tuple[int, ...]) -> None:
    position = Position(Wait("a", 1, ranks, "text"), {"a": 2})
    assert Position.of(position.as_list()) == position
    assert len(ranks) < 100 or len(in_short(ranks)) < 12


def test_ranks_that_wait_for_the_same_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = tuple(range(4096))
    waits = [Wait(key, 3, everyone, key) for key in ("gather", "reduce")]
    begun = [{"gather": 4, "reduce": 3}, {"gather": 3, "reduce": 4}]
    looks = []
    needed = positions._needed
    monkeypatch.setattr(positions, "_needed", lambda *args: (looks.append(args[0]), needed(*args))[1])
    assert len(knot({rank: Position(waits[rank % 2], begun[rank % 2]) for rank in everyone}, {})) == 2
    assert looks == waits


# A meeting in a tree --------------------------------------------------------------------------------------------------


def meet(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[meeting.Meeting], None], absent: int = -1, grace: float = 60.0
) -> tuple[Any, Any]:
    """A meeting of seven ranks (threads); every third rank gathers the reports of the next ones. Returns the reports or
    the error that rank 0 finds, and the verdicts that the other ranks read."""
    monkeypatch.setattr(meeting, "_FOLLOWERS", 3)
    # Only where a rank is absent somebody waits until the time is over; elsewhere a busy machine must not end it.
    monkeypatch.setattr(meeting, "GRACE_SECONDS", grace if absent < 0 else 0.5)
    timeout = 120.0 if absent < 0 else 1.5
    store, found, heard = HashStore(), [], {}

    def run(rank: int) -> None:
        one = meeting.Meeting(None, "m")
        one.rank, one.size, one._timeout, one._store, one._pace = rank, 7, timeout, PrefixStore("m", store), 0.02
        one._mine, one._ranks = [f"beat-{rank}"], tuple(range(7))
        act(one)
        if rank:
            heard[rank] = one.verdict()
            return
        try:
            found.append(one.gather())
            one.announce("")
        except CheckpointError as error:
            found.append(str(error))
            one.let_stop()
            one.announce(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(7) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if absent < 0:
        assert store.num_keys() == 0, "nothing is left in the store"
    return found[0], heard


def test_a_late_rank_leaves_nothing_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that counts its report only after whoever waited for it has left, and one that reads the verdict only
    after rank 0 has left: each once left a key or more, in every save. (A verdict in several parts, too.)"""
    left = [threading.Event() for _ in range(7)]

    def act(one: meeting.Meeting) -> None:
        def wrap(name: str, awaited: int | None = None) -> None:
            call = getattr(one, name)

            def wrapped(*args: Any, **named: Any) -> Any:
                if awaited is not None:
                    left[awaited].wait(60.0)
                result = call(*args, **named)
                if name != "_be_counted":
                    left[one.rank].set()
                return result

            setattr(one, name, wrapped)

        wrap("announce")
        wrap("verdict", awaited=0 if one.rank == 5 else None)
        wrap("_be_counted", awaited=3 if one.rank == 4 else None)
        one.report(one.rank)

    monkeypatch.setattr(meeting, "_PART", 5)
    found, heard = meet(monkeypatch, act, grace=0.0)
    assert found == list(range(7)) and heard == dict.fromkeys(range(1, 7), "")


def test_whoever_waits_in_a_meeting_is_woken_by_the_last_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would look again only half a second later, three times in each save."""
    rung: list[tuple[int, ...]] = []

    def act(one: meeting.Meeting) -> None:
        one._ring = lambda ranks: rung.append(tuple(ranks))  # type: ignore[method-assign]
        one.report(one.rank)

    meet(monkeypatch, act)
    # Rank 0 by the last of 1 and 2, by the last of 3 and 6, and by the last that knows the verdict; 3 by that of 4, 5.
    assert Counter(rung) == {(0,): 3, (3,): 1, (1, 2, 3, 4, 5, 6): 1}


def test_reports_come_by_way_of_others_and_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, heard = meet(monkeypatch, lambda one: one.report(10 * one.rank))
    assert found == [0, 10, 20, 30, 40, 50, 60]
    assert heard == dict.fromkeys(range(1, 7), "")


def test_whoever_gathers_reports_passes_on_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(one: meeting.Meeting) -> None:
        one._combine = lambda parts: [number for part in parts for number in part]
        one.report([one.rank])

    found, heard = meet(monkeypatch, act)
    assert found == [[0, 1, 2], [3, 4, 5], [6]]
    assert heard == dict.fromkeys(range(1, 7), "")


@pytest.mark.parametrize("culprit", [1, 3, 5, 6])
def test_an_error_anywhere_in_the_tree_is_heard_by_all(monkeypatch: pytest.MonkeyPatch, culprit: int) -> None:
    def act(one: meeting.Meeting) -> None:
        one._combine = sum  # of no use where a part is missing
        one.report(None if one.rank == culprit else 0, error="no space" if one.rank == culprit else "")

    found, heard = meet(monkeypatch, act)
    assert found == f"rank {culprit}: no space" and heard == dict.fromkeys(range(1, 7), found)


@pytest.mark.parametrize("absent", [1, 4])
def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, absent: int) -> None:
    """Also where a rank other than 0 gathers its report. That rank keeps writing heartbeats while it waits."""
    found, heard = meet(monkeypatch, lambda one: one.report(0), absent=absent)
    assert found == f"no heartbeat from rank {absent} for 2 s: it died or hangs"
    assert set(heard.values()) == {found} and len(heard) == 5
