"""Forked ranks that fail, are killed, stopped or told to stop: their exit statuses, times and messages."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

import zeroshard
from tests.checkpoint.faults import StoreServer, fork, join, set_timeout
from tests.forked import Forked
from tests.patience import wait_until
from tests.queueing import Queueing, queued_by_this_thread
from zeroshard.failures import watch
from zeroshard.ranks.backends import timeout_of
from zeroshard.ranks.groups import default_group

FULL = os.environ.get("ZEROSHARD_FAULTS") == "full"
_WITHOUT_NAME_SERVER = re.compile(r"^.*The hostname of the client socket cannot be retrieved.*\n", re.MULTILINE)
"""What torch prints if no name server answers."""
SEED = int(os.environ.get("ZEROSHARD_SEED", "20261121"))


def wait_until_noted() -> None:
    """Wait until a round of this rank's watch that began after this call is over: it has written a heartbeat, if one
    was due, and looked at the other ranks of its host."""
    current = watch.current()
    assert current is not None
    before = current.beats
    wait_until(lambda: current.beats > before + 1)


def init(silence: float) -> None:
    """`zeroshard.init()` with a watch that takes a store for lost that has not answered for `silence` seconds. Nothing
    else has this timeout."""
    before = timeout_of(default_group(), torch.device("cpu"))
    set_timeout(timedelta(seconds=silence))
    zeroshard.init()
    set_timeout(before)


def said_by(program: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What this program, a process of its own, prints."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    with Forked(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True)
class Ended:
    """Exit statuses, and seconds from `mark` (the moment of the fault) to the end, by rank. The status is None for a
    rank that had to be killed at the end. `said`: the stderr of all ranks, in order. `queued`: how many of these
    seconds some process was ready and had no processor, see `tests/queueing.py`."""

    statuses: list[int | None]
    seconds: list[float]
    said: str
    queued: list[float]

    def seconds_of_their_own(self) -> float:
        """Until the last rank has ended, without the time in which a process had no processor."""
        return max(0.0, *(seconds - queued for seconds, queued in zip(self.seconds, self.queued, strict=True)))


class Ranks:
    """Forked gloo ranks that end as an interpreter does: an uncaught error goes to `sys.excepthook`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        timeout: float = 120.0,
        awaited: Sequence[int] | None = None,
        rank_0_holds_store: bool = False,
    ) -> None:
        """Call `fn(rank, mark, *args)`; `mark()` records the moment of the fault. `timeout`: of collectives. `awaited`:
        the ranks whose end `finish` waits for before it kills the others; None: all. `rank_0_holds_store`: as without a
        launcher of torch elastic; otherwise a process of its own holds it."""
        self._rank_0_holds_store = rank_0_holds_store
        self._awaited = range(num_ranks) if awaited is None else awaited
        self._folder, self._store = tempfile.TemporaryDirectory(prefix="zeroshard-failures-"), StoreServer(num_ranks)
        self._reader, self._writer = os.pipe()
        self._marked: float | None = None
        self._statuses: dict[int, int | None] = {}
        self._ends: dict[int, float] = {}
        self._queueing: Queueing | None = None
        self._queued, self._queued_here = dict[int, float](), 0.0
        self.pids = fork(num_ranks, lambda rank: self._run(fn, rank, num_ranks, timeout, args))

    def _run(self, fn: Callable[..., Any], rank: int, num_ranks: int, timeout: float, args: Sequence[Any]) -> None:
        status = 1
        try:
            log = os.open(f"{self._folder.name}/said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            threading.excepthook = threading.__excepthook__  # pytest's shows nothing here
            random.seed(rank)
            join(self._store.port, rank, num_ranks, timeout, self._rank_0_holds_store)
            fn(rank, lambda: os.write(self._writer, b"."), *args)
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException as error:
            sys.last_value = error
            sys.excepthook(*sys.exc_info())
        finally:
            watch.at_exit()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    def wait_mark(self) -> None:
        while not select.select([self._reader], [], [], 1.0)[0]:
            ended = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.pids]
            assert not all(ended), "all ranks have ended without a mark"
        os.read(self._reader, 1)
        self._mark()

    def signal(self, ranks: Sequence[int], number: int) -> None:
        self._mark()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def finish(self, limit: float = 600.0) -> Ended:
        """Wait until the awaited ranks have ended, or `limit` seconds have passed, and kill the remaining ranks."""
        return finish_all([self], limit)[0]

    def poll(self) -> bool:
        """Record the ranks that have ended; returns whether all awaited ranks have."""
        with suppress(BlockingIOError):
            if os.read(self._reader, 1):
                self._mark()
        # What this process has queued since it looked last: an end may have been there so much earlier.
        before, self._queued_here = self._queued_here, queued_by_this_thread()
        if self._queueing is not None:
            self._queueing.look()
        for rank, pid in enumerate(self.pids):
            if rank not in self._statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._statuses[rank], self._ends[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
                    of_ranks = 0.0 if self._queueing is None else self._queueing.seconds
                    self._queued[rank] = of_ranks + self._queued_here - before
        return all(rank in self._statuses for rank in self._awaited)

    def _mark(self) -> None:
        if self._marked is None:
            self._marked = time.monotonic()
            self._queueing = Queueing([*self.pids, self._store.pid])

    def close(self) -> Ended:
        for rank, pid in enumerate(self.pids):
            if rank not in self._statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._statuses[rank], self._ends[rank] = None, time.monotonic()
        os.close(self._reader), os.close(self._writer)
        said = _WITHOUT_NAME_SERVER.sub("", Path(self._folder.name, "said").read_text())
        self._folder.cleanup()
        self._store.close()
        began = self._marked if self._marked is not None else time.monotonic()
        order = range(len(self.pids))
        return Ended(
            [self._statuses[rank] for rank in order],
            [self._ends[rank] - began for rank in order],
            said,
            [self._queued.get(rank, 0.0) for rank in order],
        )


def finish_all(groups: Sequence[Ranks], limit: float = 600.0) -> list[Ended]:
    """`finish` for several groups at once."""
    deadline = time.monotonic() + limit
    for ranks in groups:
        os.set_blocking(ranks._reader, False)
    while not all([ranks.poll() for ranks in groups]) and time.monotonic() < deadline:  # noqa: C419  all of them
        time.sleep(0.02)
    return [ranks.close() for ranks in groups]
