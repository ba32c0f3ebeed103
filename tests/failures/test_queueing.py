"""Seconds without those of waiting for a processor: what limits on failures count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Event, Thread

import pytest

from tests.patience import wait_until
from tests.queueing import IS_COUNTED, Queueing, queued_by_this_thread, queued_by_threads

pytestmark = pytest.mark.skipif(not IS_COUNTED, reason="the kernel does not count this (CONFIG_SCHED_INFO)")


def own_seconds(fn: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a call, and of these the ones in which this thread was not waiting for a processor."""
    start, queued = time.monotonic(), queued_by_this_thread()
    fn()
    seconds = time.monotonic() - start
    return seconds, seconds - (queued_by_this_thread() - queued)


def compute() -> None:
    start = time.thread_time()
    while time.thread_time() < start + 0.3:
        pass


def on_one_processor(children: int, fn: Callable[[], None]) -> list[tuple[float, float]]:
    """`own_seconds(fn)` of as many processes, which share one processor."""
    processor = min(os.sched_getaffinity(0))
    reader, writer = os.pipe()
    for _ in range(children):
        if os.fork() == 0:
            os.sched_setaffinity(0, {processor})
            os.write(writer, f"{own_seconds(fn)}\n".encode())
            os._exit(0)
    for _ in range(children):
        os.wait()
    os.close(writer)
    with open(reader) as answers:
        return [eval(line) for line in answers]


def test_programs_beside_it_do_not_count() -> None:
    found = on_one_processor(3, compute)
    assert max(seconds for seconds, _ in found) > 0.75  # the last one to end, of 0.9 s for one processor
    assert all(0.2 < own < 0.6 for _, own in found), found


def test_waiting_for_a_time_counts() -> None:
    """In one of many tries: beside other programs the scheduler counts a part of a sleep as waiting for a processor."""
    wait_until(lambda: own_seconds(lambda: time.sleep(0.05))[1] > 0.04)


def test_threads_and_processes_are_added_up() -> None:
    over = Event()
    queueing = Queueing([os.getpid()])
    threads = [Thread(target=compute), Thread(target=over.wait)]
    for thread in threads:
        thread.start()
    assert len(queued_by_threads(os.getpid())) >= 2
    queueing.look()
    first = queueing.seconds
    over.set()
    for thread in threads:
        thread.join()
    queueing.look()
    assert queueing.seconds >= first >= 0
    assert queued_by_threads(2**22 + 1) == {}
