"""A signal stops all ranks for longer than the timeout, as Control-Z, a scheduler or a paused container does: they go
on. Where gloo counts that time, too, they say what has happened."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

import zeroshard
from tests.checkpoint.common import Run
from tests.checkpoint.faults import store_of_test
from tests.failures.common import Ranks, finish_all
from tests.patience import AT_ONCE, wait_until
from zeroshard.checkpoint import files, folders
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.comm.messages import Messages
from zeroshard.comm.orders import Orders
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.failures.rank_watch import _own_stop
from zeroshard.failures.store_line import StoreLine
from zeroshard.ranks import clock
from zeroshard.ranks.clock import Clock, Patience
from zeroshard.ranks.pipes import Pipes

TIMEOUT = 4.0
CASES: dict[str, tuple[type, str]] = {
    "step": (Pipes, "wait_until"),
    "save": (Meeting, "_pauses"),
    "gloo": (Messages, "compare"),
}
"""What waits for another rank in a case."""


def rank_of_three(rank: int, mark: Callable[[], Any], case: str, folder: Path) -> None:
    """Rank 1 comes when the others have been waiting for it, and have gone on after a stop."""
    if case == "gloo":
        SharedTransport.between = classmethod(lambda cls, *args: None)  # type: ignore[assignment,method-assign]
    zeroshard.init()
    run = Run(rank, "zero3", "fp32").train([0])
    waits, sync = getattr(*CASES[case]), files.sync

    def telling(*args: Any) -> Any:
        store_of_test().set(f"waits {rank}", "")
        return waits(*args)

    def come_late() -> None:
        store_of_test().wait(["waits 0", "waits 2"], timedelta(seconds=AT_ONCE))
        mark()
        wait_until((folder / "go on").exists)

    if rank != 1:
        setattr(*CASES[case], telling)
    elif case != "save":
        come_late()
    else:
        files.sync = lambda file: (come_late(), setattr(files, "sync", sync), sync(file))  # type: ignore[assignment]
    if case == "save":
        zeroshard.save(folder / "steps", run.handle, run.optimizer, step=1)
        assert folders.latest(folder / "steps") == 1
    run.train([1])


def test_ranks_that_are_stopped_together_go_on(tmp_path: Path) -> None:
    """The first one that went on took all of that time for silence of the others. A step ended with "nobody knows why",
    and a save with "no heartbeat from rank 1 for 4 s: it died or hangs"."""
    groups = []
    for case in CASES:
        (tmp_path / case).mkdir()
        groups.append(Ranks(rank_of_three, 3, case, tmp_path / case, timeout=TIMEOUT))
        groups[-1].wait_mark()
        groups[-1].signal(range(3), signal.SIGSTOP)
    time.sleep(2 * TIMEOUT)  # no event could end this: for how long they are stopped is what is tested
    for ranks in groups:
        ranks.signal([0, 2], signal.SIGCONT)
    time.sleep(1.0)  # nor this: they could give up meanwhile
    for ranks, case in zip(groups, CASES, strict=True):
        (tmp_path / case / "go on").touch()
        ranks.signal([1], signal.SIGCONT)
    ended = dict(zip(CASES, finish_all(groups, limit=60.0), strict=True))
    for case in ("step", "save"):
        assert (ended[case].statuses, ended[case].said) == ([0, 0, 0], ""), (case, ended[case])
    statuses, said = ended["gloo"].statuses, ended["gloo"].said
    if statuses == [0, 0, 0]:  # a busy machine: rank 1 came before gloo had looked at the time
        assert said == "", ended["gloo"]
    else:
        first = said.splitlines()[1]
        assert "did not run for" in first and "a signal stopped it" in first, ended["gloo"]


# Without processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`now`: the time by `time.monotonic`, for clocks."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_a_clock_counts_what_passes_between_two_looks_up_to_a_limit(moments: SimpleNamespace) -> None:
    counts, slow = Clock(), Clock(look_seconds=30.0)
    for passed, expected in ((0.5, 0.5), (1.5, 2.0), (3600.0, 4.0), (1.0, 5.0)):
        moments.now += passed
        assert counts.seconds() == expected
    assert counts.stop == (moments.now - 1.0, 3600.0)
    moments.now += 57.0 - 3603.0
    assert slow.seconds() == 57.0 and slow.stop[1] == 0.0


def test_patience_ends_after_the_time_for_which_the_process_has_run(moments: SimpleNamespace) -> None:
    patience, short = Patience(4.0), Patience(0.25)
    assert (patience.pause, short.pause) == (1.0, 0.25)
    moments.now += 3600.0
    assert patience.left == 2.0 and short.pause == 0.0 and short.left < 0
    moments.now += 1.5
    assert patience.pause == 0.5
    moments.now += 0.5
    assert patience.pause == 0.0 == patience.left


def test_a_line_to_the_store_leaves_out_the_time_of_a_stop(moments: SimpleNamespace) -> None:
    """The guard ended the process, as the store had not answered for all that time."""
    asked, answers = threading.Event(), threading.Event()

    class Store:
        def get(self) -> None:
            asked.set()
            answers.wait()

    line = StoreLine(Store(), lambda store: store.get(), 0.01)  # type: ignore[arg-type,call-arg]
    assert asked.wait(AT_ONCE)
    assert line.silent_for() == 0.0
    moments.now += 1.0
    assert line.silent_for() == 1.0
    moments.now += 3600.0
    assert line.silent_for() == 3.0 and line.clock.stop == (moments.now, 3600.0)
    answers.set()
    line.close(lambda store: None, AT_ONCE)


def test_a_rank_without_inputs_does_not_count_the_time_of_a_stop(moments: SimpleNamespace) -> None:
    """Without a watch. It raised that the leader has sent no order."""

    class Store:
        looks = 0

        def check(self, keys: list[str]) -> bool:
            self.looks += 1
            moments.now += 3600.0 if self.looks == 2 else 0.5
            return self.looks == 5

        def get(self, key: str) -> bytes:
            return b'["step"]'

    orders = Orders(HashStore(), "a", 0, (0, 1), timedelta(seconds=4))
    orders._store = Store()  # type: ignore[assignment]
    orders.meet([0])
    assert orders.take() == ["step"]


@pytest.mark.parametrize(("stop", "ago", "is_told"), [(5.0, 1.0, True), (2.0, 1.0, False), (5.0, 60.0, False)])
def test_only_a_long_stop_a_short_while_ago_is_told(stop: float, ago: float, is_told: bool) -> None:
    clock: Any = SimpleNamespace(stop=(time.monotonic() - ago, stop))
    assert bool(_own_stop(clock, 8.0)) == is_told
