"""Ranks report to rank 0 and hear its verdict through the process group's store: no collective, so any thread may do
it while the main thread trains.

    rank      write ... report(part or error) ------------------------> verdict, acknowledge
    rank 0    write ... report -> gather (all parts, or the first error) -> conclude -> announce

Every rank keeps counting while it works. One whose count stands still for `timeout` seconds has died or hangs, and is
named. After an error `beat` raises on the ranks that still work, so that they stop within a moment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.comm.backends import timeout_of
from zeroshard.comm.blame import Seen
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.watch import BEAT_SECONDS, GRACE_SECONDS

_PART = 1 << 20  # a store refuses long values


class Stopped(Exception):
    """Another rank has failed: this one is to stop."""


class Meeting:
    """One for each save or load; `unique` is its name, the same on every rank. Without `collectives`, one process is
    alone, and needs no process group."""

    def __init__(self, collectives: Collectives | None, unique: str) -> None:
        self.rank, self.size, self._timeout = 0, 1, 0.0
        store: Store = HashStore()
        if collectives is not None:
            world = collectives.mesh.world
            self.rank, self.size, store = world.rank, world.size, _get_default_store()
            self._timeout = timeout_of(world.group, collectives.device).total_seconds()
        self._store = PrefixStore(f"zeroshard/{unique}", store)
        self._last_beat = 0.0

    def beat(self) -> None:
        """Called between two pieces of work.

        Raises:
            Stopped: another rank has failed.
        """
        now = time.monotonic()
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self._store.add(f"beat-{self.rank}", 1)
            if self._store.check(["stop"]):
                raise Stopped

    def report(self, part: Any = None, error: str = "") -> None:
        """This rank has done its part, or failed; `part` is JSON-able."""
        if error:
            self.stop()
        self._put(f"report-{self.rank}", {"part": part, "error": error})

    def stop(self) -> None:
        """Let the others stop."""
        self._store.set("stop", "1")

    def gather(self) -> list[Any]:
        """The parts of all ranks. Rank 0.

        Raises:
            CheckpointError: the first rank that failed, or has not been heard of.
        """
        # One after the other, but an error of any rank ends the wait for each (`_expect_no_error`).
        for rank in range(self.size):
            self._wait(f"report-{rank}", rank, self._expect_no_error)
        self._expect_no_error()
        return [self._get(f"report-{rank}")["part"] for rank in range(self.size)]

    def let_stop(self) -> None:
        """Wait a moment until all ranks have stopped. Rank 0, after an error, before it removes what they wrote."""
        self.stop()
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and not self._store.check([f"report-{rank}" for rank in range(self.size)]):
            time.sleep(0.005)

    def announce(self, error: str) -> None:
        """How it ended. Rank 0; waits a moment until the others know, and then leaves nothing in the store."""
        self._put("verdict", error)
        end = time.monotonic() + GRACE_SECONDS
        known = [f"known-{rank}" for rank in range(1, self.size)]
        while known and not self._store.check(known):
            if time.monotonic() > end:
                return  # whoever comes later finds it
            time.sleep(0.002)
        self.forget()

    def verdict(self) -> str:
        """How it ended: "" or an error. The other ranks.

        Raises:
            CheckpointError: rank 0 has not been heard of.
        """
        self._wait("verdict", 0)
        verdict = str(self._get("verdict"))
        self._store.set(f"known-{self.rank}", "1")
        return verdict

    def forget(self) -> None:
        """Remove what all ranks have put in the store."""
        names = ["stop", "verdict", *(f"{kind}-{r}" for kind in ("beat", "report", "known") for r in range(self.size))]
        for name in names:
            with suppress(RuntimeError):
                if self._store.check([name]):
                    parts = self._store.get(name) if name.startswith(("report", "verdict")) else b"0"
                    for key in [*(f"{name}/{i}" for i in range(int(parts))), name]:
                        self._store.delete_key(key)

    def _expect_no_error(self) -> None:
        if self._store.check(["stop"]):
            for rank in range(self.size):
                if self._store.check([f"report-{rank}"]) and (error := self._get(f"report-{rank}")["error"]):
                    raise CheckpointError(f"rank {rank}: {error}")

    def _wait(self, key: str, rank: int, look: Callable[[], None] = lambda: None) -> None:
        """Until the key is there, as long as that rank is heard of."""
        pause, seen = 0.001, Seen(beats=-1, where="", changed=time.monotonic(), looked=time.monotonic())
        while not self._store.check([key]):
            look()
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            with suppress(Stopped):
                self.beat()
            seen.note(time.monotonic(), beats=self._store.add(f"beat-{rank}", 0))
            if seen.silent_seconds > self._timeout:
                raise CheckpointError(f"no heartbeat from rank {rank} for {self._timeout:.0f} s: it died or hangs")

    def _put(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        parts = [text[i : i + _PART] for i in range(0, len(text), _PART)]
        for index, part in enumerate(parts):
            self._store.set(f"{key}/{index}", part)
        # Last: whoever finds the key finds all parts.
        self._store.set(key, str(len(parts)))

    def _get(self, key: str) -> Any:
        parts = [self._store.get(f"{key}/{index}") for index in range(int(self._store.get(key)))]
        return json.loads(b"".join(parts))
