"""Ranks that a signal has stopped are woken by the ranks of their host that leave: only then can they end, too. And a
rank ends that waits for its device, although the store is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch

import zeroshard
from tests.checkpoint.faults import store_of_test
from tests.failures.common import Ranks, init, said_by, wait_until_noted
from tests.patience import wait_until
from zeroshard.comm.orders import Orders
from zeroshard.failures import watch
from zeroshard.failures.peers import Peers
from zeroshard.failures.positions import HERE, Wait
from zeroshard.failures.rank_watch import Watch


def stop_here(key: str) -> None:
    """Stop this process, once `key` is in the store of the test. Tells its number there."""
    store = store_of_test()
    store.wait([key])
    store.set("stops", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped() -> None:
    pid = int(store_of_test().get("stops"))
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def rank_of_three(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 0 is stopped, rank 1 fails, rank 2 leaves before its guard has looked."""
    zeroshard.init()
    wait_until_noted()
    current = watch.current()
    assert current is not None
    if rank == 0:
        store_of_test().set("stop", "")
        stop_here("stop")
        wait_until(lambda: False)
    if rank == 2:
        current._end = lambda cause: None  # type: ignore[method-assign]
        store_of_test().set("goes on", "")
    wait_until_stopped()
    if rank == 1:
        store_of_test().wait(["goes on"])
        Peers.wake = lambda self, *store: None  # type: ignore[method-assign,assignment]  # as on another host
        mark()
        raise ValueError("a fault")
    wait_until(lambda: current._cause is not None)


def test_a_rank_wakes_others_however_soon_it_leaves() -> None:
    """Only the guard did it, and did not run any more if the program was over within a quarter of a second."""
    ended = Ranks(rank_of_three, 3).finish(limit=60.0)
    assert ended.statuses == [1, 1, 0], ended


def rank_that_fails(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 0, which holds the store, stops when rank 1 has failed. Rank 1 has not read yet which process rank 0 is."""
    of_test = store_of_test()
    Peers.find_neighbours = lambda self, store: None  # type: ignore[method-assign]
    zeroshard.init()
    if rank == 0:
        of_test.wait(["failed"])
        of_test.set("stops", str(os.getpid()))
        mark()
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(lambda: False)
    announce = Watch._announce

    def late(self: Watch, *cause: Any) -> None:
        of_test.set("failed", "")
        pid = int(of_test.get("stops"))
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        announce(self, *cause)

    Watch._announce = late  # type: ignore[method-assign]
    raise ValueError("a fault")


def test_who_holds_the_store_is_woken_by_a_rank_that_fails() -> None:
    """The store did not answer any more, and nobody had looked who holds it."""
    ended = Ranks(rank_that_fails, 2, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [1, 1], ended


def waits_for_a_device(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 0 holds the store and is killed, while rank 1 waits for its device: no collective raises there."""
    init(silence=4.0)
    wait_until_noted()
    if rank == 0:
        mark()
        os.kill(os.getpid(), signal.SIGKILL)
    with HERE.waiting(Wait("exchange 1 of 0-1", HERE.begin("exchange 1 of 0-1"), (0, 1), "a step"), on_device=True):
        wait_until(lambda: False)


def test_a_wait_for_a_device_ends_although_the_store_is_gone() -> None:
    """The guard had ended with the store, and the process waited on."""
    ended = Ranks(waits_for_a_device, 2, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [-signal.SIGKILL, 1], ended
    assert "rank 1 of 2 failed while waiting for another rank" in ended.said, ended
    assert "has closed its connections: the launcher or rank 0, whichever held it, has ended" in ended.said, ended


def rank_in_a_join(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 0, which holds the store, has no inputs left, and stops when rank 1 is about to delete old orders."""
    of_test = store_of_test()
    init(silence=3.0)
    meet, meetings = Orders.meet, [0]

    def met(self: Orders, *followers: Any) -> None:
        meetings[0] += 1
        if meetings[0] == 3 and rank == 0:
            of_test.set("stops", str(os.getpid()))
            mark()
            os.kill(os.getpid(), signal.SIGSTOP)
        if meetings[0] == 3:
            pid = int(of_test.get("stops"))
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        meet(self, *followers)

    Orders.meet = met  # type: ignore[method-assign]
    handle = zeroshard.shard(model := torch.nn.Linear(2, 2), "zero1")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    current = watch.current()
    assert current is not None
    wait_until(lambda: current._peers._complete)  # until then a beat waits for answers of the store
    with handle.join():
        for _ in range(1 + 3 * rank):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def test_who_holds_the_store_is_stopped_in_a_join() -> None:
    """The leader waited for ever until the store had deleted the last orders."""
    ended = Ranks(rank_in_a_join, 2, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [1, 1], ended
    assert "has not answered for" in ended.said and "has stopped (no heartbeat)" in ended.said, ended


def test_a_rank_does_not_wait_forever_to_join_a_store_whose_holder_is_stopped() -> None:
    """torch has no limit for the answers of a store that it has connected to."""
    listens = socket.create_server(("127.0.0.1", 0))
    port, fd = listens.getsockname()[1], listens.fileno()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    holds = (
        "import os, signal, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False, master_listen_fd={fd})\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    command = [sys.executable, "-c", holds]
    stopped = subprocess.Popen(command, env={**os.environ, **place, "RANK": "0"}, pass_fds=[fd])
    listens.close()
    os.waitpid(stopped.pid, os.WUNTRACED)
    program = "import zeroshard\ntry:\n    zeroshard.init(timeout=2)\nexcept TimeoutError as error:\n    print(error)"
    environment = {**os.environ, **place, "RANK": "1", "LOCAL_RANK": "1"}
    done = said_by(program, environment)
    assert "rank 1 of 2 did not meet the others at 127.0.0.1:" in done.stdout, done
    assert f"rank 0 (process {stopped.pid} on {socket.gethostname()}) had been stopped by a signal." in done.stdout, (
        done
    )
    assert stopped.wait() == 0
