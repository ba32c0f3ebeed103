"""Python collects garbage in any thread, also in those of the watch. What is collected may have to be waited for."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.patience import AT_ONCE, wait_until
from zeroshard.comm.pending import Pending
from zeroshard.failures.store_line import StoreLine


class Work:
    """A receive whose message comes late."""

    def __init__(self) -> None:
        self.came, self.waited_in = threading.Event(), ""

    def wait(self) -> None:
        self.came.wait()
        self.waited_in = threading.current_thread().name


@pytest.mark.parametrize("by", ["the watch", "this thread"])
def test_heartbeats_do_not_wait_for_what_is_collected(by: str) -> None:
    """Peers would take this rank for stopped."""
    owner = SimpleNamespace(messages=SimpleNamespace(failed=False, keep=lambda works: None))
    beats, work = [], Work()

    def beat(store: Any) -> None:
        gc.collect()
        beats.append(len(beats))

    gc.disable()
    try:
        cycle: list[Any] = [Pending(owner, [work])]  # type: ignore[arg-type]
        cycle.append(cycle)
        del cycle
        if by == "the watch":
            line = StoreLine(HashStore(), beat, 0.01)
            wait_until(lambda: len(beats) > 2)
            line.close(lambda store: None, AT_ONCE)
            assert not work.waited_in
            work.came.set()
        else:
            work.came.set()
            gc.collect()
            assert work.waited_in == threading.current_thread().name  # nothing else runs before the message is there
        wait_until(lambda: work.waited_in != "")  # else gloo's connection would be blocked
    finally:
        gc.enable()
