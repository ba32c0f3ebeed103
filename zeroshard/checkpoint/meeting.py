"""The meeting of a save or load: ranks report to rank 0 and read its verdict, through the process group's store.

    rank      write ... report(part or error) ------------------------> verdict, acknowledge
    rank 0    write ... report -> gather (all parts, or the first error) -> conclude -> announce

It uses no collective, so that a background thread may run it while the main thread trains. With more than `_FOLLOWERS`
ranks, the first rank of each `_FOLLOWERS` gathers their reports and passes them on as one: combined, if the meeting can
combine parts. A waiting rank is woken by the last rank that it waits for: that rank rings its bell.
Without a watch there are no bells, and the waiting rank polls.

Every rank increments a counter (its heartbeat) while it works. If a counter does not change for `timeout` seconds, its
rank has died or hangs, and the error names it. After an error, `beat` raises on the ranks that still work, so that they
stop soon. The interval between heartbeats grows with the number of ranks, so that all together make about a thousand
calls per second.
"""

from __future__ import annotations

import json
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.comm.collectives import Collectives
from zeroshard.failures import watch
from zeroshard.failures.bell import Pauses
from zeroshard.failures.heartbeat import BEAT_SECONDS
from zeroshard.failures.rank_watch import GRACE_SECONDS, Watch
from zeroshard.ranks.backends import timeout_of
from zeroshard.ranks.clock import LOOK_SECONDS, Clock

_PART = 1 << 20  # a store refuses long values
_FOLLOWERS = 64
_RANKS_AT_FULL_PACE = 256

Report = list[Any]
"""[rank, its part, its error in words ("" for none)]."""


Counts = dict[int, tuple[int, float]]
"""Rank -> its heartbeat counter, and the time at which it was last seen to change, by the clock of the meeting."""


class Stopped(Exception):
    """Another rank has failed, so this one must stop."""


class Meeting:
    """The meeting of one save or load. `unique`: its name, the same on every rank and different for each meeting, as it
    is part of the store keys. Without `collectives`: for one process without a process group."""

    def __init__(
        self, collectives: Collectives | None, unique: str, combine: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """`combine`: makes one part of several; whoever gathers the reports of others passes on one part."""
        self.rank, self.size, self._timeout = 0, 1, 0.0
        self._watch: Watch | None = None
        self._ranks: tuple[int, ...] = (0,)
        store: Store = HashStore()
        if collectives is not None:
            world = collectives.mesh.world
            self.rank, self.size, store = world.rank, world.size, _get_default_store()
            self._watch, self._ranks = watch.of_group(), world.ranks
            self._timeout = timeout_of(world.group, collectives.device).total_seconds()
        self._store = watch.attended(PrefixStore(f"zeroshard/{unique}", store))
        self._last_beat = 0.0
        slower = max(1.0, self.size / _RANKS_AT_FULL_PACE)
        self._pace = max(BEAT_SECONDS, min(BEAT_SECONDS * slower, self._timeout / 4))
        self._clock = Clock(max(LOOK_SECONDS, self._pace))
        self._mine = [f"beat-{self.rank}"]  # keys that this rank has set, for `forget`
        self._reports: list[Report] = []  # of this rank and of the ranks whose reports it gathers
        self._combine = combine

    @property
    def first(self) -> int:
        """The number of rank 0 in the whole job: messages name ranks by it."""
        return self._ranks[0]

    def beat(self) -> None:
        """Count a heartbeat, if one is due. Call it regularly while working.

        Raises:
            Stopped: another rank has failed.
        """
        now = time.monotonic()
        if now - self._last_beat >= self._pace:
            self._last_beat = now
            self._store.add(f"beat-{self.rank}", 1)
            if self._store.check(["stop"]):
                raise Stopped

    def report(self, part: Any = None, error: str = "") -> None:
        """Report that this rank has done its part, or failed. `part`: JSON-able. The first of every `_FOLLOWERS` ranks
        waits here for the reports of the others, so that rank 0 need not read them all."""
        if error:
            self.stop()
        self._reports = [[self.rank, part, error and f"rank {self._ranks[self.rank]}: {error}"]]
        if self.rank % _FOLLOWERS == 0:
            self._take_reports(self._followers(self.rank))
            self._pass_on_one()
        if self.rank:
            self._put(f"report-{self.rank}", self._reports)
            leads = self.rank % _FOLLOWERS == 0
            leader = 0 if leads else self.rank // _FOLLOWERS * _FOLLOWERS
            awaited = self._leaders() if leads else self._followers(leader)
            self._be_counted(f"reports-{leader}-{leads}", len(awaited), leader, at_once=bool(error))

    def stop(self) -> None:
        """Make `beat` raise on the other ranks."""
        self._store.set("stop", "1")

    def gather(self) -> list[Any]:
        """The parts of all ranks. Called on rank 0, after its own `report`.

        Raises:
            CheckpointError: names the first rank that failed, or sent no heartbeat for the timeout.
        """
        self._take_reports(self._leaders())
        # By rank, not by arrival: the message names the lowest failed rank.
        self._reports.sort(key=lambda report: report[0])
        for _, _, error in self._reports:
            if error:
                raise CheckpointError(error)
        return [part for _, part, _ in self._reports]

    def let_stop(self) -> None:
        """Stop all ranks, and wait until they have stopped, for at most the grace period. Called on rank 0 after an
        error, before it removes the ranks' files."""
        self.stop()
        known = {rank for rank, *_ in self._reports}
        missing = [rank for rank in (*self._followers(0), *self._leaders()) if rank not in known]
        end = time.monotonic() + GRACE_SECONDS
        while missing and time.monotonic() < end and not self._store.check([f"report-{rank}" for rank in missing]):
            time.sleep(0.005)

    def announce(self, error: str) -> None:
        """Announce the result. Called on rank 0. Waits, for at most the grace period, until the other ranks have read
        it; then removes all keys. (If one has not, that one still finds the verdict, and removes what is left.)"""
        self._put("verdict", error)
        self._ring(self._ranks[1:])
        pauses, end = self._pauses(), time.monotonic() + GRACE_SECONDS
        while self.size > 1 and self._store.add("known", 0) < self.size - 1:
            if time.monotonic() > end:
                break
            pauses.wait(end - time.monotonic())
        self._leave()

    def verdict(self) -> str:
        """Wait for the result: "" or an error. Called on all ranks but rank 0.

        Raises:
            CheckpointError: rank 0 has sent no heartbeat for the timeout.
        """
        pauses, counts = self._pauses(), Counts()
        while not self._store.check(["verdict"]):
            pauses.wait(self._pace)
            self._keep_counting()
            if self._is_silent(0, counts):
                raise CheckpointError(self._silence_of(0))
        verdict = str(self._get("verdict"))
        self._leave()
        return verdict

    def forget(self) -> None:
        """Delete the keys that this rank has set; rank 0 also deletes that of `stop`. For a meeting without a
        verdict."""
        self._delete([*self._mine, *["stop"] * (self.rank == 0)])

    def _leave(self) -> None:
        """This rank knows the verdict: delete the keys that it has set. The last rank also deletes those that another
        one may still read or count in."""
        self._delete([key for key in self._mine if key.partition("/")[0] != "verdict"])
        known = self._store.add("known", 1)
        if known == self.size - 1 and self.rank:
            self._ring([self.first])
        if known == self.size:
            counts = [f"reports-{leader}-False" for leader in (0, *self._leaders())]
            self._delete(["beat-0", "stop", "known", "reports-0-True", *counts, *self._keys_of_verdict()])

    def _delete(self, keys: Sequence[str]) -> None:
        for key in dict.fromkeys(keys):
            with suppress(RuntimeError):
                self._store.delete_key(key)

    # Reports ---------------------------------------------------------------------------------------------------------

    def _pass_on_one(self) -> None:
        """Combine the parts of this rank and its followers, unless one of them has none (it failed, or was stopped)."""
        if self._combine is not None and all(part is not None for _, part, _ in self._reports):
            parts = [part for _, part, _ in sorted(self._reports, key=lambda report: report[0])]
            self._reports = [[self.rank, self._combine(parts), ""]]

    def _take_reports(self, ranks: Sequence[int]) -> None:
        """Wait for the reports of these ranks, as long as they send heartbeats. After an error, for at most the grace
        period."""
        missing, counts = list(ranks), Counts()
        pauses, end = self._pauses(), float("inf")
        while missing and time.monotonic() <= end:
            is_complete = self._store.check([f"report-{rank}" for rank in missing])
            for rank in list(missing):
                if is_complete or self._store.check([f"report-{rank}"]):
                    self._reports += self._get(f"report-{rank}")
                    missing.remove(rank)
                elif self._is_silent(rank, counts):
                    self._reports.append([rank, None, self._silence_of(rank)])
                    missing.remove(rank)
                    self.stop()
            if any(error for _, _, error in self._reports):
                end = min(end, time.monotonic() + GRACE_SECONDS)
            if missing:
                pauses.wait(self._pace if end == float("inf") else 0.05)
                self._keep_counting()

    def _followers(self, leader: int) -> range:
        return range(leader + 1, min(leader + _FOLLOWERS, self.size))

    def _leaders(self) -> range:
        return range(_FOLLOWERS, self.size, _FOLLOWERS)

    def _pauses(self) -> Pauses:
        return Pauses(
            None if self._watch is None else self._watch.bell, 0.02 * max(1.0, self.size / _RANKS_AT_FULL_PACE)
        )

    def _be_counted(self, key: str, awaited: int, by: int, *, at_once: bool) -> None:
        """Count this rank's arrival. The last of the `awaited` ranks rings the bell of rank `by`, which waits;
        `at_once`: this one does."""
        if self._store.add(key, 1) == awaited or at_once:
            self._ring([self._ranks[by]])

    def _ring(self, ranks: Sequence[int]) -> None:
        if self._watch is not None:
            self._watch.ring(ranks)

    def _keep_counting(self) -> None:
        with suppress(Stopped):
            self.beat()

    def _is_silent(self, rank: int, counts: Counts) -> bool:
        """Whether the rank has sent no heartbeat for the timeout. `counts`: as seen at the last calls; updated."""
        now, count = self._clock.seconds(), self._store.add(f"beat-{rank}", 0)
        if rank not in counts or counts[rank][0] != count:
            counts[rank] = count, now
        return now - counts[rank][1] > self._timeout

    def _silence_of(self, rank: int) -> str:
        return f"no heartbeat from rank {self._ranks[rank]} for {self._timeout:.0f} s: it died or hangs"

    def _put(self, key: str, value: Any) -> None:
        """Set a value: compressed, as the names of tensors repeat, and split into parts if it is long."""
        # The first part, under `key`, contains the number of the others. It is set last: who finds it finds all.
        text = b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()
        first, *others = [text[i : i + _PART] for i in range(0, len(text), _PART)]
        for index, part in enumerate(others):
            self._set(f"{key}/{index}", part)
        self._set(key, f"{len(others)} {first}")

    def _set(self, key: str, value: str) -> None:
        self._mine.append(key)
        self._store.set(key, value)

    def _get(self, key: str) -> Any:
        count, _, first = self._store.get(key).partition(b" ")
        others = [self._store.get(f"{key}/{index}") for index in range(int(count))]
        return json.loads(zlib.decompress(b64decode(b"".join([first, *others]))))

    def _keys_of_verdict(self) -> list[str]:
        """Of its first part, and of the others."""
        count, _, _ = self._store.get("verdict").partition(b" ")
        return ["verdict", *(f"verdict/{index}" for index in range(int(count)))]
