"""The thread that calls the store meets an error: of this package, which says nothing about the store; or of the store,
after which nobody waits for the other ranks without end."""

from __future__ import annotations

from typing import Any

import pytest

import zeroshard
from tests.patience import wait_until
from zeroshard.failures import watch
from zeroshard.failures.lost import LostPeer
from zeroshard.failures.positions import HERE
from zeroshard.testing import run_ranks


def test_a_fault_in_the_watch_is_no_failure_of_the_store(capfd: pytest.CaptureFixture[str]) -> None:
    """Any RuntimeError was taken for the store's. The thread ended in silence: rank 0 waited forever, and the other
    ranks took it for stopped."""

    def check(rank: int) -> None:
        def fails() -> None:
            raise RuntimeError("dictionary changed size during iteration")

        if rank == 0:
            HERE.position = fails
        zeroshard.init()
        current = watch.current()
        assert current is not None
        wait_until(lambda: current.beats > 1)
        watch.wait_for_all()
        if rank == 1:
            current.last_seen(0)
            before = current._peers.seen(0).beat.number
            assert before > 0
            wait_until(lambda: current.last_seen(0) is not None and current._peers.seen(0).beat.number > before)
        watch.wait_for_all()
        assert not current.line.gone

    run_ranks(check, 2)
    assert "dictionary changed size during iteration" in capfd.readouterr().err  # it is told


class Full:
    """A store on a disk that is full; one that is written in Python (torch has one, too) raises errors of any class."""

    def __getattr__(self, name: str) -> Any:
        def fails(*arguments: Any) -> None:
            raise OSError("write: No space left on device")

        return fails


def test_who_waits_for_ranks_with_a_store_that_has_failed_raises() -> None:
    def check(rank: int) -> None:
        zeroshard.init()
        current = watch.current()
        assert current is not None
        watch.wait_for_all()
        if rank == 0:
            before, current.line._store._store = current.line._store._store, Full()
            # It fails in a round of the watch, or in this wait.
            with pytest.raises((LostPeer, zeroshard.Error), match="the store of the process group"):
                watch.wait_for_all()
            assert current.line.gone
            with pytest.raises(LostPeer, match="has failed: write: No space left on device"):
                current.expect_alive([1])
            current.line._store._store = before
            rung, current.bell._store._store = current.bell._store._store, Full()
            wait_until(lambda: current.bell.gone)
            current.bell._store._store = rung

    run_ranks(check, 2)
