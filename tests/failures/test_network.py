"""Two hosts that can no longer reach each other, with a timeout of 10 s: the side with the store ended after 12 to 14 s
and reported that rank 1 "stands still". The other side was still running 70 s later, waiting for an answer of the
store."""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import zeroshard
from tests.failures.common import wait_until_noted
from tests.failures.hosts import cut_off, on_hosts
from tests.kit import Block, Net, loss_of_tokens, make
from tests.patience import AT_ONCE, wait_until
from zeroshard.failures import positions, processes
from zeroshard.failures.blame import Seen, blame
from zeroshard.failures.found import stopped_of_this_job
from zeroshard.failures.notices import Beat, Notices, _name
from zeroshard.failures.peers import Peers
from zeroshard.failures.positions import Position, Wait
from zeroshard.failures.processes import Who, _stat, is_stopped
from zeroshard.failures.store_line import Closed, Silent, StoreLine

TIMEOUT = 5.0


def train_until_cut_off(rank: int, culprit: int, plan: str) -> None:
    zeroshard.init()
    model = make(Net)
    handle = zeroshard.shard(model, plan, units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
    for step in range(100_000):
        loss_of_tokens(model, rank, 0, step, 1).backward()
        optimizer.step()
        if step == 3:
            wait_until_noted()
        if step == 4 and rank == culprit:  # after a step that all ranks have begun: each has waited above
            cut_off()


@pytest.mark.long
@pytest.mark.parametrize(("store_on", "plan"), [(0, "zero3"), (1, "ddp")])
def test_hosts_that_cannot_reach_each_other_leave_on_both_sides(store_on: int, plan: str) -> None:
    """Two ranks on the first host, one on the second; the store is on the first or on the second host."""
    ended = on_hosts(train_until_cut_off, [0, 0, 1], 0, plan, store_on=store_on, timeout=TIMEOUT, limit=300.0)
    assert ended.statuses == [1, 1, 1], ended.said
    assert max(ended.seconds) < TIMEOUT + AT_ONCE, ended
    here, there = ("node0", "node1") if store_on == 0 else ("node1", "node0")
    ranks = r"\(rank 2\)" if store_on == 0 else r"\(ranks 0, 1\)"
    likely = "is the likely cause, not a process"
    network = f"the network between {here} and {there}, or {there} itself, {likely}"
    heard = rf"no heartbeat from {there} {ranks} for \d+ s: {network}"
    store = rf"the store of the process group at 10.77.0.1{store_on}:\d+ has not answered for \d+ s"
    assert re.search(heard, ended.said), ended.said
    assert re.search(
        rf"{store}: the network between {there} and its host, or that host itself, {likely}", ended.said
    ), ended.said
    assert "stands still" not in ended.said


# Without namespaces -------------------------------------------------------------------------------------------------


def seen(silent: float, where: str = "at train.py:3 in main", left: bool = False) -> Seen:
    return Seen(Beat(7, where, None, {} if left else None), changed=100.0 - silent, looked=100.0)


HERE, ELSEWHERE = "boot pid:[1]", "other pid:[2]"


def who(host: str, name: str, pid: int = 999_999_999) -> Who:
    return Who(host, pid, 1, name)


def test_who_is_blamed_when_ranks_are_silent() -> None:
    everybody = {0: who(HERE, "a"), 1: who(ELSEWHERE, "b"), 2: who(ELSEWHERE, "b"), 3: who("third", "c")}
    network = blame(0, everybody, {1: seen(9.0), 2: seen(8.4), 3: seen(0.2)})
    likely = "the network between a and b, or b itself, is the likely cause, not a process"
    assert network == [f"no heartbeat from b (ranks 1, 2) for 8 s: {likely}"]
    # The rank of a host with one rank is killed: no other rank sees its process end. The network was blamed for it.
    killed = blame(0, everybody, {1: seen(0.2), 2: seen(0.4), 3: seen(1.7)}, closed=True)
    why = "its processes were killed (often out of memory) or crashed, or the host was shut down"
    assert killed == [f"no heartbeat from c (rank 3) for 2 s, and a connection was closed: {why}"]
    # The host is cut off: another rank's wait has timed out first, and it has closed its connection to this one.
    cut_off = blame(0, everybody, {1: seen(0.2), 2: seen(0.4), 3: seen(29.0)}, closed=True, timeout=30.0)
    likely = "the network between a and c, or c itself, is the likely cause, not a process"
    assert cut_off == [f"no heartbeat from c (rank 3) for 29 s: {likely}"]
    in_time = blame(0, everybody, {1: seen(0.2), 2: seen(0.4), 3: seen(9.0)}, closed=True, timeout=30.0)
    assert in_time == [f"no heartbeat from c (rank 3) for 9 s, and a connection was closed: {why}"]
    process = blame(0, everybody, {1: seen(9.0), 2: seen(0.3), 3: seen(0.2)})
    assert process == ["rank 1 (process 999999999 on b) has stopped (no heartbeat), last seen at train.py:3 in main"]
    ended = blame(0, {0: who(HERE, "a"), 1: who(HERE, "a")}, {1: seen(0.2)})
    assert ended == ["rank 1 (process 999999999 on a) has ended; it was last seen at train.py:3 in main"]
    nobody = blame(0, everybody, {1: seen(0.1), 2: seen(0.3), 3: seen(0.2)})
    assert len(nobody) == 3 and all("is at train.py:3" in line for line in nobody)
    left = blame(0, everybody, {1: seen(9.0, left=True), 2: seen(0.3), 3: seen(0.2)})
    assert len(left) == 1 and "rank 1 (process 999999999 on b) has reached the end of its program" in left[0]


def test_a_rank_is_silent_only_if_it_has_been_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular heartbeats come every ten seconds. A rank that looked more often, as it had waited for long, reported
    after the timeout of a collective that a rank at another place of the program had stopped."""
    now, store = [100.0], HashStore()
    monkeypatch.setattr("zeroshard.failures.peers.time.monotonic", lambda: now[0])
    mine, theirs = Notices(0, 2), Notices(1, 2)
    theirs.come(store, who(ELSEWHERE, "b"))
    peers = Peers(0, 2, mine)

    def look_for(seconds: float) -> list[str]:
        for _ in range(int(4 * seconds)):
            now[0] += 0.25
            peers.look(store)
        return peers.blame(closed=False, timeout=120.0)

    look_for(8.0)  # for ranks that wait for each other
    peers.ask(store)
    assert look_for(1.0) == ["rank 1 (process 999999999 on b) is at the start"] and not peers.is_clear
    assert theirs.calls(store) == 1
    theirs.beat(store, Beat(1, "at train.py:3 in main", None))
    assert look_for(1.0) == ["rank 1 (process 999999999 on b) is at train.py:3 in main"] and not peers.is_clear
    peers.ask(store)
    [line] = look_for(2.0)
    assert peers.is_clear and line.startswith("no heartbeat from b (rank 1) for 3 s: the network between"), line


def test_only_ranks_that_may_hold_this_one_up_are_blamed() -> None:
    """Where a rank of one group hung, the ranks of other groups were named as well; where those had ended their work,
    they alone."""
    store, peers = HashStore(), Peers(0, 5, Notices(0, 5))
    waits = Position(Wait("all_gather b", 3, (2, 3), "all_gather of unit b"), {})
    beats: dict[int, dict[str, Any]] = {
        1: {"position": None},
        2: {"position": waits},
        3: {"position": None},
        4: {"position": None, "left": {}},
    }
    for rank, beat in beats.items():
        Notices(rank, 5).come(store, who(ELSEWHERE, "b"))
        Notices(rank, 5).beat(store, Beat(1, f"at train.py:{rank} in main", **beat))
    peers.look(store)
    with positions.HERE.waiting(Wait("all_gather a", 5, (0, 2), "all_gather of unit a")):
        assert not peers.is_clear
        named = [f"rank {rank} (process 999999999 on b) is at train.py:{rank} in main" for rank in (2, 3)]
        assert peers.blame(closed=False, timeout=120.0) == named
    assert peers.is_clear
    [line] = peers.blame(closed=False, timeout=120.0)
    assert "rank 4 (process 999999999 on b) has reached the end of its program" in line


def test_a_neighbour_is_told_by_its_number_and_its_start() -> None:
    """Process ids are reused, and mean nothing on another host (or after a machine has been cloned)."""
    me = Who.this()
    assert me.state == "runs" and me.is_neighbour_of(me)
    later = Who(me.host, me.pid, me.started + 1, me.name)
    assert not later.is_neighbour_of(me) and later.state == "ended"
    assert not Who("", me.pid, me.started, me.name).is_neighbour_of(Who("", 5, 5, "b"))
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended and is a zombie
    gone = Who(me.host, child, _stat(child)[1], me.name)
    assert gone.is_neighbour_of(me) and gone.state == "ended"
    os.waitpid(child, 0)
    assert gone.is_neighbour_of(me) and gone.state == "ended"


def test_a_process_with_any_name_is_found() -> None:
    """A program `./тренировка.py` has a name that ends in the middle of a character. Each rank was reported as dead by
    its neighbours, and all ended."""
    mine = Path("/proc/self/comm")
    before, name = mine.read_bytes(), "тренировка".encode()[:15]
    mine.write_bytes(name)
    try:
        assert mine.read_bytes() == name + b"\n"
        assert Who.this().started > 0 and Who.this().state == "runs"
    finally:
        mine.write_bytes(before)


def test_a_process_that_cannot_be_looked_at_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While this one has as many files open as it may: it reported its neighbours as dead, and all ended."""
    me, other, limit = Who.this(), Who.of_process(os.getppid()), resource.getrlimit(resource.RLIMIT_NOFILE)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        assert other.state == "runs" and other.is_neighbour_of(me) and not is_stopped(other.pid)
        assert stopped_of_this_job() == {}  # it raised, and the process was not ended any more
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("answer", [PermissionError, None])
def test_a_process_that_proc_hides_runs(monkeypatch: pytest.MonkeyPatch, answer: type[OSError] | None) -> None:
    """Ranks of several users, where /proc is mounted with `hidepid`: each reported its neighbours as dead, and all
    ended."""
    me, other = Who.this(), Who.of_process(os.getppid())

    def hidden(path: str, *mode: str) -> Any:
        raise FileNotFoundError(path)

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (other.pid, 0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(processes, "open", hidden, raising=False)
    assert (other.state, Who(me.host, 2**22 + 1, 1, me.name).state) == ("runs", "ended")  # no process has this number
    monkeypatch.setattr(processes.os, "kill", kill)
    assert other.state == "runs" and other.is_neighbour_of(me) and not is_stopped(other.pid)


def test_a_seat_that_is_counted_and_not_written_yet_is_not_waited_for() -> None:
    """The read would last until the timeout of the store, and the rank would send no heartbeat meanwhile."""
    me, store, notices = Who.this(), HashStore(), Notices(0, 3)
    notices.come(store, me)
    host = _name(me)
    assert store.add(f"seats-{host}", 1) == 2
    assert notices.on_host_of(store, me, 0) == [0]
    store.set(f"seat-{host}-2", "2")
    assert notices.on_host_of(store, me, 1) == [2]


def test_a_rank_looks_at_the_processes_of_its_own_host_alone() -> None:
    me = Who.this()
    peers = Peers(0, 3, Notices(0, 3))
    peers._know({0: me, 1: me, 2: who(ELSEWHERE, "b")})
    assert peers.neighbours == {1: me}


def test_whoever_asks_a_store_that_does_not_answer_goes_on() -> None:
    answering, beats = threading.Event(), []

    class Store:
        def get(self, key: str) -> bytes:
            beats.append(time.monotonic())
            answering.wait()
            return key.encode()

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    line: StoreLine = StoreLine(Store(), lambda store: store.get("a"), 0.05)  # type: ignore[arg-type]
    wait_until(lambda: beats)
    start = time.monotonic()
    with pytest.raises(Silent, match="has not answered for"):
        line.ask(lambda store: store.get("b"), 0.1)
    assert line.silent_for() > 0.05 and time.monotonic() - start < AT_ONCE
    answering.set()
    assert line.ask(lambda store: store.get("a"), AT_ONCE) == b"a"
    assert not line.gone and line.silent_for() < AT_ONCE

    def faulty(store: Any) -> None:
        raise RuntimeError("not of the store")

    with pytest.raises(RuntimeError, match="not of the store"):
        line.ask(faulty, AT_ONCE)
    assert not line.gone

    def broken(store: Any) -> None:
        store.set("a", "b")

    with pytest.raises(Silent, match="is gone"):
        line.ask(broken, AT_ONCE)
    with pytest.raises(Silent, match="is gone"):
        line.ask(lambda store: None, AT_ONCE)
    assert line.gone
    with pytest.raises(Silent, match="is gone"):
        line.close(lambda store: None, AT_ONCE)


def test_nobody_waits_for_the_answers_of_a_store_that_is_gone() -> None:
    """Whoever had asked behind the call that failed waited for all of its patience: in `wait_for_all`, for two
    timeouts."""
    asked, failing = threading.Event(), threading.Event()

    class Store:
        def get(self, key: str) -> bytes:
            asked.set()
            failing.wait()
            raise RuntimeError("connection reset")

    line, refused = StoreLine(Store(), lambda store: None, 1000.0), list[str]()  # type: ignore[arg-type]

    def ask() -> None:
        with pytest.raises(Closed, match="is gone"):
            line.ask(lambda store: store.get("a"), 10 * AT_ONCE)
        refused.append(threading.current_thread().name)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    asked.wait()
    wait_until(lambda: line._jobs.qsize() == 2)
    start = time.monotonic()
    failing.set()
    for thread in threads:
        thread.join()
    assert len(refused) == 3 and line.gone and time.monotonic() - start < AT_ONCE


def test_a_look_at_the_silence_survives_a_save_that_begins() -> None:
    """The guard of the watch looks, and ended for good if another thread attended a store between two lines of that."""
    line = StoreLine(HashStore(), lambda store: None, 1000.0)
    kept = [line.attend(HashStore())]

    def attend(frame: Any, event: str, argument: Any) -> Any:
        """Before each line of the look, also of a set that it loops over."""
        if frame.f_code.co_name not in ("silent_for", "__iter__"):
            return None
        if event == "line":
            kept.append(line.attend(HashStore()))
        return attend

    kept[0].asked = line.clock.seconds() - 5.0
    sys.settrace(attend)
    try:
        assert line.silent_for() > 4.0
    finally:
        sys.settrace(None)
    assert len(kept) > 1
    line.close(lambda store: None, AT_ONCE)


def test_nothing_is_written_after_the_last_word() -> None:
    """A heartbeat that was due at the end once replaced the notice that the rank's work is done. The other ranks then
    reported that it had been killed."""
    said: list[str] = []
    line = StoreLine(HashStore(), lambda store: said.append("beat"), 0.0)  # a beat is always due
    wait_until(lambda: said)

    def last(store: Any) -> None:
        said.append("last")

    line.close(last, AT_ONCE)
    assert not line._thread.is_alive() and said[-1] == "last" and "beat" in said


def test_an_error_in_a_beat_does_not_end_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Once it was a TypeError: the rank heard of no failure any more."""
    beats: list[int] = []

    def beat(store: Any) -> None:
        beats.append(len(beats))
        if len(beats) == 1:
            raise KeyError("a fault in a heartbeat")

    line = StoreLine(HashStore(), beat, 0.0)
    wait_until(lambda: len(beats) > 1)
    line.close(lambda store: None, AT_ONCE)
    assert not line.gone and "a fault in a heartbeat" in capsys.readouterr().err


def test_a_process_that_becomes_known_while_another_one_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard finds who holds the store, while the line is in a loop over the processes of the host: that raised a
    RuntimeError, and the store was taken to be gone."""
    store, me = HashStore(), Who.this()
    peers = Peers(0, 3, Notices(0, 3))
    peers._know({1: me})

    def looked_at(who: Who) -> str:
        peers._know({2: me})
        return "runs"

    monkeypatch.setattr(Who, "state", property(looked_at))
    assert peers.death(store) is None and peers.stopped() == {}
    assert list(peers.neighbours) == [1, 2]
