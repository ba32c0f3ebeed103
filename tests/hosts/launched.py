"""torchrun on every host of a cluster, with its c10d rendezvous on the first one; and what its ranks leave behind."""

from __future__ import annotations

import fcntl
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.namespaces import Hosts
from tests.patience import wait_until

GENEROUS = 300.0
"""Seconds that are added to the promised ones: the machine may be busy. The tests print how long it took (`-s`)."""
LOG = "torchrun"
PROGRAMS = "tests.hosts.programs"


@dataclass
class Launched:
    """The launchers on the hosts, and the ranks that they have started.

    Attributes:
        variables: of the environment of all launchers.
        launchers: of each host, the last one.
    """

    hosts: Hosts
    program: Sequence[str]
    per_host: int = 1
    restarts: int = 0
    forked: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    launchers: dict[int, subprocess.Popen[Any]] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.hosts) * self.per_host

    def start(self, number: int) -> None:
        """Start the launcher of one host."""
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=run"]
        rendezvous.append("--rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=6")  # the machine may be busy
        counts = [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={self.per_host}"]
        command = [sys.executable, "-m", "torch.distributed.run", *counts, *rendezvous]
        command += [f"--max-restarts={self.restarts}", "--monitor-interval=0.1", "-m", PROGRAMS, *self.program]
        host = self.hosts[number]
        self.launchers[number] = host.start(command, forked=self.forked, log=LOG, variables=self.variables)

    def wait_until(self, happened: Callable[[], object]) -> None:
        """Wait for an event that the ranks cause; fails if a launcher ends before it."""

        def happened_or_ended() -> bool:
            return bool(happened()) or any(one.poll() is not None for one in self.launchers.values())

        wait_until(happened_or_ended)
        assert happened(), self.said()

    def wait_for_step(self, step: int) -> None:
        """Wait until every rank has taken so many steps."""
        self.wait_until(lambda: all(self.number(rank, "step") >= step for rank in range(self.world_size)))

    def finish(self) -> list[int]:
        """Wait for all launchers that run; their exit statuses, by host."""
        return [self.launchers[number].wait() for number in sorted(self.launchers)]

    # What ranks leave in /tmp of their host ---------------------------------------------------------------------------

    def files(self, rank: int, name: str) -> list[Path]:
        """The files `{name}-{rank}`: one, unless the rank's host has changed."""
        found = [host.path(f"/tmp/{name}-{rank}") for host in self.hosts]
        return [path for path in found if path.exists()]

    def number(self, rank: int, name: str) -> int:
        """The number in such a file; -1: there is none."""
        return max((int(path.read_text() or -1) for path in self.files(rank, name)), default=-1)

    def results(self) -> list[Any]:
        """What `programs.leave` has left, by rank."""
        return [pickle.loads(self.files(rank, "result")[0].read_bytes()) for rank in range(self.world_size)]

    def seconds_until_over(self, ranks: Sequence[int], since: float) -> list[float]:
        """Wait until these ranks' processes have ended; seconds from `since` (monotonic) to the end of each."""
        seconds: dict[int, float] = {}

        def over() -> bool:
            for rank in ranks:
                if rank not in seconds and self._is_over(rank):
                    seconds[rank] = time.monotonic() - since
            return len(seconds) == len(ranks)

        wait_until(over)
        return [seconds[rank] for rank in ranks]

    def said(self, *numbers: int) -> str:
        """Standard error on these hosts; by default, on all."""
        logs = [self.hosts[number].path(f"/tmp/{LOG}.err") for number in numbers or range(len(self.hosts))]
        return "\n".join(path.read_text() for path in logs if path.exists())

    def lines(self, *numbers: int) -> list[str]:
        """The lines of zeroshard on these hosts' standard error."""
        return [line for line in self.said(*numbers).splitlines() if line.startswith("zeroshard: ")]

    def _is_over(self, rank: int) -> bool:
        """Whether the lock that the rank holds as long as it lives is free (`programs.join`)."""
        for path in self.files(rank, "alive"):
            with open(path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
        return True


def launch(
    hosts: Hosts,
    name: str,
    *,
    per_host: int = 1,
    restarts: int = 0,
    forked: bool = True,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Launched:
    """Run `programs.{name}(**arguments)` on all hosts. `forked`: as of `Host.start`."""
    launched = Launched(hosts, [name, json.dumps(arguments)], per_host, restarts, forked, variables or {})
    for host in hosts:
        launched.start(host.number)
    return launched
