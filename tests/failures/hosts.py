"""Ranks on several simulated hosts, forked from the test: they may call any function of it. `tests/hosts` starts ranks
by torchrun instead."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.hosts.namespaces import HUB_ADDRESS, SHARED, Hosts
from zeroshard.failures import watch

_PORT = 29400  # each cluster has a network of its own
_HUB = 1000
"""The value of `store_on` that stands for the hub."""


@dataclass(frozen=True)
class Result:
    """For each rank: its return value, its exit status (None: it had to be killed), and its end (seconds since the
    hosts were cut off). `said`: the stderr of all ranks."""

    values: list[Any]
    statuses: list[int | None]
    seconds: list[float]
    said: str


def on_hosts(
    fn: Callable[..., Any],
    hosts: Sequence[int],
    *args: Any,
    store_on: int = _HUB,
    timeout: float = 20.0,
    limit: float = 600.0,
) -> Result:
    """Call `fn(rank, *args)` on gloo ranks of which number `r` runs on the host `hosts[r]`, hosts numbered from 0. The
    hosts share the folder `SHARED`, and no other. On every host the ranks have the same process numbers.

    A rank that calls `cut_off()` disconnects all hosts except the first.

    Args:
        store_on: the host whose first rank holds the store.
        timeout: of collectives.
        limit: seconds for everything.
    """
    with Hosts(max(hosts) + 1) as cluster:
        children = _Children(cluster)
        if store_on == _HUB:
            children.serve(len(hosts), timeout)
        address = HUB_ADDRESS if store_on == _HUB else cluster[store_on].address
        for rank, host in enumerate(hosts):
            holds_store = host == store_on and rank == hosts.index(host)
            store = partial(_store, len(hosts), timeout, address, is_master=holds_store)
            children.start(rank, host, partial(_rank, rank, len(hosts), store, timeout, fn, args))
        statuses, ends = children.finish(limit)
        folder = cluster[0].path(SHARED)
        return Result(
            values=[_read(folder / f"value-{rank}") for rank in range(len(hosts))],
            statuses=[statuses.get(rank) for rank in range(len(hosts))],
            seconds=[ends.get(rank, limit) - children.cut for rank in range(len(hosts))],
            said=(folder / "said").read_text() if (folder / "said").exists() else "",
        )


def cut_off() -> None:
    """Called by a rank: disconnects the hosts from each other. Returns once no packet passes between them."""
    (SHARED / "cut off").touch()
    while not (SHARED / "cut").exists():
        time.sleep(0.01)


class _Children:
    """The children of the test that stand for the ranks.

    Attributes:
        cut: when the hosts were cut off (monotonic); 0.0: they were not.
    """

    def __init__(self, cluster: Hosts) -> None:
        self._cluster, self._ranks, self._server, self.cut = cluster, dict[int, int](), 0, 0.0

    def serve(self, world_size: int, timeout: float) -> None:
        def hold() -> int:
            held = _store(world_size, timeout, HUB_ADDRESS, is_master=True)
            signal.pause()
            del held
            return 0

        self._server = self._cluster.fork_at_hub(hold)

    def start(self, rank: int, host: int, run: Callable[[], int]) -> None:
        self._ranks[self._cluster[host].fork(run)] = rank

    def finish(self, limit: float) -> tuple[dict[int, int], dict[int, float]]:
        """Rank -> its exit status, rank -> its end; of the ranks that have ended within the limit."""
        statuses, ends, deadline = dict[int, int](), dict[int, float](), time.monotonic() + limit
        folder = self._cluster[0].path(SHARED)
        while self._ranks and time.monotonic() < deadline:
            for pid in list(self._ranks):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    rank = self._ranks.pop(pid)
                    statuses[rank], ends[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
            if (folder / "cut off").exists() and not self.cut:
                for host in list(self._cluster)[1:]:
                    self._cluster.cut(host.number)
                self.cut = time.monotonic()
                (folder / "cut").touch()
            time.sleep(0.005)
        for pid in [*self._ranks, *([self._server] if self._server else [])]:
            os.kill(pid, signal.SIGKILL)  # a rank itself ends with its host
            os.waitpid(pid, 0)
        return statuses, ends


def _rank(
    rank: int, world_size: int, store: Callable[[], TCPStore], timeout: float, fn: Callable[..., Any], args: Any
) -> int:
    os.closerange(3, 256)  # so that file descriptors have the same numbers on all hosts
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as `run_ranks` does
    log = os.open(SHARED / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    # pytest's own objects for both write to files that are closed now, whose numbers a pipe of the engine may have.
    sys.stdout, sys.stderr = (open(file, "w", closefd=False, buffering=1) for file in (1, 2))  # noqa: SIM115
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    try:
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store(), rank=rank, world_size=world_size, timeout=limit)
        (SHARED / f"value-{rank}").write_bytes(pickle.dumps(fn(rank, *args)))
        return 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        watch.stop()


def _store(world_size: int, timeout: float, address: str, *, is_master: bool) -> TCPStore:
    limit = timedelta(seconds=max(timeout, 20.0))
    return TCPStore(address, _PORT, world_size, is_master=is_master, wait_for_workers=False, timeout=limit)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None
