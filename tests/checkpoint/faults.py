"""Fault injection: ranks that are killed, and file system calls of which the n-th fails or kills the process."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from zeroshard.checkpoint import files

CALLS = ("make_folder", "create", "write", "sync", "rename", "replace", "remove_file", "remove_empty_folder")

Action = Literal["count", "fail", "kill before", "kill half way", "kill after"]


class Injected(OSError):
    """An error that `faulty` injects."""


@contextmanager
def faulty(action: Action = "count", at: int = -1) -> Iterator[list[str]]:
    """Make the file system call number `at` fail, or kill this process there. Yields the list of the names of the calls
    so far."""
    seen: list[str] = []
    originals = {name: getattr(files, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 != at or action == "count":
                return originals[name](*args)
            if action == "fail":
                raise Injected(errno.EIO, f"injected into call {at}, {name}")
            if action == "kill half way" and name == "write":
                originals[name](args[0], args[1][: len(args[1]) // 2])
            if action == "kill after":
                originals[name](*args)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(files, name, wrap(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(files, name, original)


@contextmanager
def disk_with(free: int) -> Iterator[None]:
    """Writes fail once `free` bytes have been written, as on a full disk. The write that reaches the limit is cut
    short."""
    left, original = free, files.write

    def write(file: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device (injected)")
        written = original(file, data[:left])
        left -= written
        return written

    files.write = write
    try:
        yield
    finally:
        files.write = original


def fork(num_ranks: int, run: Callable[[int], None]) -> list[int]:
    """Fork one process for each rank, which calls `run(rank)`; `run` must not return. Returns the process ids."""
    pids = []
    for rank in range(num_ranks):
        sys.stdout.flush(), sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            run(rank)
        pids.append(pid)
    return pids


class StoreServer:
    """The store of forked ranks, in a process of its own, as a launcher's is, so that it outlives every rank. Not a
    `FileStore`: the others cannot read it after a rank was killed in the middle of a write. And not in the process that
    forks: a rank that is forked while a thread of the store holds a lock of libc hangs when it takes that lock."""

    def __init__(self, num_ranks: int) -> None:
        reader, writer = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
                os.write(writer, str(store.port).encode())
                while os.getppid() == parent:
                    time.sleep(1.0)
            finally:
                os._exit(1)
        os.close(writer)
        self.port = int(os.read(reader, 16))
        os.close(reader)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def join(port: int, rank: int, num_ranks: int, timeout: float, rank_0_holds_store: bool = False) -> None:
    """Join the process group of the forked ranks, by the store at `port` of this machine.

    `timeout`: of collectives and of the store, in seconds; to connect, ranks may take longer. `rank_0_holds_store`: the
    store of the group is in the process of rank 0, as without a launcher of torch elastic.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    limit = timedelta(seconds=timeout)
    # On a busy machine, and with a slow name server, since torch looks up a name for the store's address.
    start = max(limit, timedelta(seconds=120))
    store = met_at = TCPStore("127.0.0.1", port, num_ranks, is_master=False, timeout=start)
    _OF_TEST[:] = [met_at]
    if rank_0_holds_store:
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, timeout=start, wait_for_workers=False)
            met_at.set("port", str(store.port))
        else:
            store = TCPStore("127.0.0.1", int(met_at.get("port")), num_ranks, is_master=False, timeout=start)
        os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=start)
    # Each rank's last calls to the store are over before any rank can stop the one that holds it.
    met_at.set(f"joined/{rank}", "")
    met_at.wait([f"joined/{one}" for one in range(num_ranks)])
    set_timeout(limit)


_OF_TEST: list[TCPStore] = []


def store_of_test() -> TCPStore:
    """The store by which this rank has joined, which outlives every rank."""
    return _OF_TEST[0]


def set_timeout(limit: timedelta) -> None:
    """Of the default group's collectives, and of its store."""
    _get_default_store().set_timeout(limit)
    # torch 2.14 has another name for it, and warns about this one.
    getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(limit)


class Ranks:
    """Forked gloo ranks that may be killed. Each rank is passed a function `ready`, for `wait_ready`."""

    def __init__(self, fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120.0) -> None:
        self._store = StoreServer(num_ranks)
        self._ready, self._write_end = os.pipe()
        self.pids = fork(num_ranks, lambda rank: self._run(fn, rank, num_ranks, timeout, args))

    def _run(self, fn: Callable[..., Any], rank: int, num_ranks: int, timeout: float, args: Sequence[Any]) -> None:
        status = 1
        try:
            join(self._store.port, rank, num_ranks, timeout)
            fn(rank, lambda: os.write(self._write_end, b"."), *args)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    def wait_ready(self) -> None:
        """Wait until every rank has called `ready`."""
        for _ in self.pids:
            while not select.select([self._ready], [], [], 1.0)[0]:
                ended = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.pids]
                assert not any(ended), "a rank has ended before it was ready"
            os.read(self._ready, 1)

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def finish(self) -> list[int]:
        """Wait for all ranks to end; once one has been killed, kill the others, as a launcher does. Returns wait
        statuses."""
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + 600
        while len(statuses) < len(self.pids):
            for pid in set(self.pids) - set(statuses):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    statuses[pid] = status
                    if os.WIFSIGNALED(status):
                        for other in set(self.pids) - set(statuses):
                            os.kill(other, signal.SIGKILL)
            if time.monotonic() > deadline:
                for other in set(self.pids) - set(statuses):
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.001)
        os.close(self._ready), os.close(self._write_end)
        self._store.close()
        return [statuses[pid] for pid in self.pids]


def left_over(directory: Path) -> list[str]:
    """Temporary names that must not remain after a save."""
    return [name for name in os.listdir(directory) if ".tmp-" in name or ".old-" in name or name.startswith(".trash")]
