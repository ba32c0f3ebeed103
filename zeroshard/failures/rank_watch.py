"""The watch of one rank: decides when this rank gives up, and what it prints then."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeroshard.errors import InvalidState, TookTooLong
from zeroshard.failures.bell import Bell, Pauses, can_wait, connection_of_its_own
from zeroshard.failures.blame import GIVING_UP, OUTSIDE
from zeroshard.failures.found import has_one_launcher, without_prefixes
from zeroshard.failures.heartbeat import BEAT_SECONDS, Due, Heartbeats
from zeroshard.failures.lost import LostPeer, handled_error, in_one_line, is_of_others, own_error
from zeroshard.failures.membership import Membership
from zeroshard.failures.notices import Beat, Cause, Notices
from zeroshard.failures.peers import Peers
from zeroshard.failures.positions import HERE, ON_WATCH
from zeroshard.failures.processes import Who
from zeroshard.failures.store_line import Closed, Silent, StoreLine
from zeroshard.failures.whereabouts import only_saves, waits_in_vain, where
from zeroshard.ranks.backends import backends_of
from zeroshard.ranks.clock import Clock
from zeroshard.ranks.pipes import interrupt_all

GRACE_SECONDS = 2.0
"""How long the other ranks have, after a rank has failed, to end or to stop writing a checkpoint."""
PATIENCE_SECONDS = 1.0
"""How long a rank that is about to exit waits for an answer of the store."""
LEAVING_SECONDS = 10.0
"""How long a rank whose work is done waits until the store has taken that down: without it, it is reported as dead."""
BEFORE_TIMEOUT = 0.9
"""The part of the timeout for which a rank waits for its device: after all of it, the watchdog of torch would end the
process, and name no rank."""
FAILED = 1
"""Exit status of a rank that its watch has ended."""

_CLOSED = re.compile(r"closed by|reset by peer|broken pipe", re.IGNORECASE)
"""Matches messages of errors that a connection raises once the other side has closed it."""
_HOLDER_ENDED = "the launcher or rank 0, whichever held it, has ended, or its host has been shut down"
_TAG = 31_333
"""A tag that no rank sends with (see `interrupt_gloo`)."""
_OTHERS_PATIENCE = 8 * BEAT_SECONDS
"""How long a rank waits for the finding of another rank that has timed out, too, and reads all heartbeats."""

T = TypeVar("T")


class Watch:
    """The watch of one rank, from `start` to `stop`: decides when this rank gives up, and what it reports.

    It has three threads: the line to the store, which may block in a call; the bell, which only blocks on a key; and a
    guard, which never blocks in the store.

    Attributes:
        line: makes the calls to the store.
        bell: wakes this rank when another rank has news for it.
        beats: number of rounds so far; a round writes a heartbeat if one is due.
        of: the group that the watch was started for. It ends when the program has destroyed the group.
    """

    def __init__(self, of: Membership, timeout: float) -> None:
        """`timeout`: of collectives, in seconds; a store that has not answered for this long is lost."""
        self.rank, self.world_size = rank, world_size = of.rank, of.world_size
        self.pid, self.of, store = os.getpid(), of, of.store
        self._notices = Notices(rank, world_size)
        self._heart = Heartbeats(rank, self._notices, timeout)
        self._peers = Peers(rank, world_size, self._notices, Who.this(self._heart.card))
        self.beats = 0
        self._cause: Cause | None = None
        self._ending = threading.Event()
        self._reported = self._said = False
        try:
            own = PrefixStore(of.prefix, connection_of_its_own(store, timeout))
            self.line = StoreLine(own, self._beat, BEAT_SECONDS)
            self.line.ask(lambda store: self._notices.come(store, self._peers.me), timeout)
            further = connection_of_its_own(store, timeout)
            self.bell = Bell(further, of.prefix, self._notices.bell, self._hear_bell, BEAT_SECONDS)
        except InvalidState as error:
            self._give_up_start(str(error))
            raise
        except (Silent, TookTooLong) as error:
            self._give_up_start(why := self._peers.why_silent(store))
            if isinstance(error, Closed):
                raise LostPeer(f"init: {error}: {_HOLDER_ENDED}", None, []) from None
            raise TookTooLong(f"init: {error}: {why}") from None
        # A third thread, which must not call the store: the other two may block in it forever, and this one notices.
        self._guard = threading.Thread(target=self._run, name="zeroshard watch", daemon=True)
        self._guard.start()

    def _give_up_start(self, why: str) -> None:
        """Wake who has stopped, and tell the others why this rank does not start."""
        self._peers.wake(self.of.store)
        with suppress(AttributeError, Silent):  # there is no line yet, or nobody to wake
            self.line.close(partial(self._announce_found, cause=Cause(self.rank, f"failed: {why}")), PATIENCE_SECONDS)

    def close(self) -> None:
        """End the watch of a rank whose work is done."""
        self._ending.set()
        if threading.current_thread() is not self._guard:
            self._guard.join(2 * BEAT_SECONDS)
        with self.of.ending:
            if not self.of.is_over:
                self._close()

    def _close(self) -> None:
        if self._has_failed:  # the guard may not have come to it
            self._peers.wake(self.of.store)
        self.bell.close()
        self.ring([self.rank])
        self.bell.join(2 * BEAT_SECONDS)
        with suppress(Silent):
            # Last: after this, other ranks report a wait for this rank as a wait that never ends. A later heartbeat
            # would replace it, and the other ranks would take the end of this process for its death. After a failure
            # they leave, too, and the store may be what has failed.
            self.line.close(self._leave, PATIENCE_SECONDS if self._has_failed else LEAVING_SECONDS)
        self.of.end()

    @property
    def _has_failed(self) -> bool:
        return self._cause is not None or self._reported

    def _leave(self, store: Store) -> None:
        self._heart.end()
        if not self._has_failed:
            self._notices.leave(store, self.beats, where_it_trains())
        # A cause that only this rank knows: the store had not answered, and does so only now.
        self._announce_found(store, self._cause)

    def report(self, error: BaseException, show: Callable[[], None] | None) -> None:
        """This rank cannot go on: tell the other ranks, which then leave. `show` prints the error: before the others
        are told, if this rank is the first to fail; not at all, if the error only follows from the first failure."""
        if self._reported:
            return
        self._reported = True
        mine = Cause(self.rank, f"failed: {in_one_line(error)}")
        follows = is_of_others(error)
        own = own_error(error.__context__) if follows and show is not None else None
        lost = error if isinstance(error, LostPeer) else self.what_happened(error) if follows else None
        cause = lost.cause if lost is not None else self._hear()
        if cause is None:
            found = lost.found if lost is not None else []
            if self._ask(partial(self._notices.claim, cause=mine), otherwise=True):
                if found:
                    mine = Cause(self.rank, f"failed while waiting: {'; '.join(found)}")
                try:
                    self._show_handled(own)
                    if found:
                        _print(f"rank {self.rank} of {self.world_size} failed while waiting for another rank:", *found)
                    elif show is not None:
                        _print(f"rank {self.rank} of {self.world_size} failed first:")
                    if show is not None:
                        show()
                finally:
                    # Only after the traceback is printed: the other ranks exit on this, and when one process exits, a
                    # launcher kills the rest. Also if nobody reads it any longer, which raises: no other rank may
                    # announce what this one has claimed.
                    self._announce(mine)
                return
            cause = self._hear(patience=2 * BEAT_SECONDS)
        if show is not None:
            if cause is None or not (follows or mine.what == cause.what):
                show()
            self._show_handled(own)
            self._say(cause)

    def leave(self, error: BaseException) -> None:
        """End this process, as its main thread does not know of the error: at once in its waits inside gloo, else after
        the grace period."""
        self._cause = self._cause or Cause(self.rank, f"failed: {in_one_line(error)}")

    @waits_in_vain
    def what_happened(self, error: BaseException | None = None) -> LostPeer:
        """Why a wait of this rank failed: the cause, if a rank has failed or ended; else where all ranks are. Returns
        within a few seconds. `error`: what the wait has raised."""
        cause = self._hear(patience=2 * BEAT_SECONDS)
        if cause is None and not self._ask(self._notices.may_look, otherwise=True):
            # Another rank reads all heartbeats, and will announce the cause.
            cause = self._hear(patience=_OTHERS_PATIENCE)
        if cause is not None:
            return LostPeer.because(cause)
        closed = error is not None and bool(_CLOSED.search(str(error)))
        stop = _own_stop(self.line.clock, self._heart.pace.timeout)
        found = [*(f"rank {self.rank} ({self._peers.me}) {said}" for said in stop), *self._whom_to_blame(closed=closed)]
        self._ask(self._notices.has_looked, None)
        return LostPeer("; ".join(found) or "nobody knows why", None, found)

    def lost_in_wait(self, error: BaseException | None = None) -> LostPeer:
        """As `what_happened`, with what this rank waits for."""
        wait, lost = HERE.wait, self.what_happened(error)
        text = f"failed while waiting{f' in {wait.text}' if wait is not None else ''}: {lost}"
        return LostPeer(text, lost.cause, lost.found)

    def wait_for_all(self, key: str, ranks: Sequence[int]) -> None:
        """Wait until each of these ranks has called this as often, as long as the missing ones send heartbeats.

        Raises:
            LostPeer: a rank has failed, or has sent no heartbeat for the timeout of a collective.
        """
        missing = [rank for rank in ranks if rank != self.rank]
        pauses = Pauses(self.bell, 0.05)
        # Twice the timeout, so that this call does not give up first: the guard ends the process if the store does not
        # answer for the timeout.
        come = self.line.ask(partial(self._notices.count, key=key, by=1), 2 * self._heart.pace.timeout)
        # By the store's count: that of this process may be of an earlier store. (All come before any comes again.)
        everyone = -(-come // len(ranks)) * len(ranks)
        if come == everyone:
            self.ring(missing)
        while come < everyone:
            pauses.wait(self._heart.pace.seconds)
            come = self._ask(partial(self._notices.count, key=key, by=0), come)
            if come < everyone:
                self.expect_alive(missing)

    def forget_waits(self, keys: Sequence[str]) -> None:
        self._ask(partial(self._notices.forget_counts, keys=keys), None)

    def ring(self, ranks: Sequence[int]) -> None:
        """Wake these ranks, so that they check what they wait for. (Without bells they do so from time to time.)"""
        if self.bell.blocks:
            self._ask(partial(self._notices.ring, ranks=ranks), None)

    def expect_alive(self, ranks: Sequence[int]) -> None:
        """Call it repeatedly while waiting for these ranks without a collective.

        Raises:
            LostPeer: a rank has failed, or has sent no heartbeat for the timeout of a collective.
        """
        if self._cause is not None:
            raise LostPeer.because(self._cause)
        if self.line.gone:
            raise LostPeer(self._on_silence(), None, [])
        if any(self._peers.seen(rank).silent_seconds > self._heart.pace.timeout for rank in ranks):
            raise self.what_happened()

    def last_seen(self, rank: int) -> str:
        """Where another rank is: asks it for a heartbeat. "last seen at ..." if none has come for two rounds."""
        look, end, before = partial(self._peers.look, ranks=[rank]), time.monotonic() + 2 * BEAT_SECONDS, None
        with suppress(Silent):
            self.line.ask(look, PATIENCE_SECONDS)
            before = self._peers.seen(rank).beat.number
            self.line.ask(lambda store: self._notices.call(store, [rank]), PATIENCE_SECONDS)
            while self._peers.seen(rank).beat.number == before and time.monotonic() < end:
                time.sleep(0.02)
                self.line.ask(look, PATIENCE_SECONDS)
        return self._peers.seen(rank).where_since(before)

    # When the bell has rung ------------------------------------------------------------------------------------------

    def _hear_bell(self, store: Store) -> None:
        """On the bell's thread: a failure has been announced, or a rank asks where this one is."""
        failure = self._notices.failure(store)
        if failure is not None:
            self._cause = failure
        elif self._heart.pace.is_called(self._notices.calls(store)):
            self.line.hurry()

    # Twice a second, on the line to the store ------------------------------------------------------------------------

    def _beat(self, store: Store) -> None:
        """One round: write the heartbeats that are due, and look for a failure."""
        self.beats += 1
        try:
            beat = self._here()
        except Exception:  # a fault of ours, which must not look like the end of this rank
            traceback.print_exc()
            beat = Beat(self.beats, OUTSIDE, None)
        if self._heart.round(store, beat, self._peers.neighbours) is not Due.NOTHING:
            self._peers.decide_who_looks(store, is_stuck=beat.position is not None)
        self._look_for_death(store)
        if self._cause is None and beat.position is not None and self._peers.looks:
            self._announce_found(store, self._peers.deadlock(store, beat.position, beat.where))

    def _here(self) -> Beat:
        """Where this rank is now."""
        position = HERE.position()
        # Whoever waits for this rank then waits in vain, however long the save takes.
        left = HERE.counts() if (saves := only_saves()) else None
        return Beat(self.beats, GIVING_UP if self._reported else where_it_trains(), position, left, saves)

    def _look_for_death(self, store: Store) -> None:
        self._peers.find_neighbours(store)
        self._announce_found(store, self._peers.death(store))

    def _announce_found(self, store: Store, cause: Cause | None) -> None:
        # Several ranks may find a death at the same time. Only the one that claims it may announce the cause, or ranks
        # would exit with different reasons.
        if cause is not None and self._notices.claim(store, cause):
            self._notices.announce(store, cause)
            self._cause = cause

    # The guard -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_noted, ON_WATCH.here = False, True
        while not self._ending.wait(BEAT_SECONDS / 2):
            if self._cause is not None:
                return self._end(self._cause)
            if self.of.is_left():
                return self.close()
            since = HERE.device_since
            if since is not None and time.monotonic() - since > BEFORE_TIMEOUT * self._heart.pace.timeout:
                # Only asks its own line, and with patience: see `_ask`.
                error = self.lost_in_wait()
                self.report(error, None)
                self.leave(error)
            if self.line.gone or self.bell.gone:  # the launcher, or rank 0, held the store and has ended
                if has_one_launcher(self.world_size):
                    return self._end(Cause(None, "is gone"))
                continue  # a wait for a device may still have to end
            silent = self.line.silent_for()
            if silent > GRACE_SECONDS and not is_noted:
                self._peers.note_stopped(self.of.store)
            is_noted = silent > GRACE_SECONDS
            if silent > self._heart.pace.timeout or (silent > GRACE_SECONDS and self._peers.holder_ended):
                return self._end(Cause("", self._on_silence()))
        return None

    def _end(self, cause: Cause) -> None:
        """Interrupt the main thread's waits in gloo so that it can end by itself; end the process after the grace
        period."""
        self._cause = cause
        self._peers.wake(self.of.store)
        interrupt_all()
        interrupt_gloo()
        if self._ending.wait(GRACE_SECONDS):
            return
        with suppress(Exception):
            if not self._reported:
                self._show_handled(handled_error(threading.main_thread().ident) or handled_error(HERE.thread))
            self._say(cause)
            sys.stdout.flush(), sys.stderr.flush()
        # Not sys.exit: in a thread it ends only that thread, and the main thread may wait inside NCCL, where no Python
        # exception can interrupt it.
        os._exit(FAILED)

    # What the main thread asks ---------------------------------------------------------------------------------------

    def _hear(self, patience: float = 0.0) -> Cause | None:
        """The announced cause, or None if there is none within `patience` seconds. With patience it also looks for a
        death: the wait of this rank may have failed because of it."""
        end = time.monotonic() + patience
        while self._cause is None:
            with suppress(Silent):
                self._cause = self.line.ask(self._notices.failure, max(PATIENCE_SECONDS, end - time.monotonic()))
                if self._cause is None and patience:
                    self.line.ask(self._look_for_death, PATIENCE_SECONDS)
            if time.monotonic() >= end:
                break
            time.sleep(0.02)
        return self._cause

    def _ask(self, job: Callable[[Store], T], otherwise: T) -> T:
        """The result of a job; `otherwise` if the store does not answer (the guard ends the process if it stays
        silent)."""
        try:
            return self.line.ask(job, PATIENCE_SECONDS)
        except Silent:
            return otherwise

    def _announce(self, cause: Cause) -> None:
        self._ask(partial(self._notices.announce, cause=cause), None)
        self._peers.wake(self.of.store)

    def _show_handled(self, error: BaseException | None) -> None:
        """Print the error that this rank was handling while it waited: often the first one of all. (A `finally:` that
        saves is called by the rank that raised alone, and the others never come.)"""
        if error is not None:
            _print(f"rank {self.rank} of {self.world_size} waited for another rank while it handled this error:")
            traceback.print_exception(error)

    def _say(self, cause: Cause | None) -> None:
        said, self._said = self._said, True  # both the main thread and the guard come here; one line is enough
        if cause is not None and cause.whose != self.rank and not said:
            _print(f"rank {self.rank} exits because {cause}")

    def _whom_to_blame(self, *, closed: bool) -> list[str]:
        """The lines of `blame`. Collects heartbeats for two seconds, or until one rank is clearly the cause."""
        end = time.monotonic() + 4 * BEAT_SECONDS
        with suppress(Silent):
            self.line.ask(self._peers.ask, PATIENCE_SECONDS)
        while True:
            try:
                self.line.ask(self._peers.look, PATIENCE_SECONDS)
            except Silent:
                return [self._on_silence()]
            if time.monotonic() >= end or self._peers.is_clear:
                return self._peers.blame(closed=closed, timeout=self._heart.pace.timeout)
            time.sleep(BEAT_SECONDS / 2)

    def _on_silence(self) -> str:
        store = f"the store of the process group{_address(self.of.store)}"
        if self.line.gone and can_wait(self.of.store):
            return f"{store} has closed its connections: {_HOLDER_ENDED}"
        if self.line.gone:
            return f"{store} has failed: {self.line.error}"
        why = self._peers.why_silent(self.of.store)
        return f"{store} has not answered for {self.line.silent_for():.0f} s: {why}"


def _where(thread: int | None) -> str:
    """Where a thread is, and the error that it handles there."""
    at, error = where(thread), handled_error(thread)
    if error is None or at in (OUTSIDE, GIVING_UP):
        return at
    return f"{at}, while it handles {in_one_line(error)[:200]}"


def where_it_trains() -> str:
    """Where the thread that trains is; if it has ended, where the main thread is."""
    at = _where(HERE.thread)
    return at if at != OUTSIDE else _where(threading.main_thread().ident)


def interrupt_gloo() -> None:
    """Make all waits inside gloo raise, in all threads of this process."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(Exception):
            size = dist.get_world_size(group)
            if size > 1 and backends_of(group).get("cpu") == "gloo":
                peer = (dist.get_rank(group) + 1) % size
                # gloo has no call that interrupts a wait. But a receive that times out makes gloo close all connections
                # of the group, and all waits on them raise.
                group.recv([torch.empty(1, device="cpu")], peer, _TAG).wait(timedelta(milliseconds=1))


def _own_stop(clock: Clock, timeout: float) -> list[str]:
    """What to say of this rank if it was stopped for so long that its own wait, or that of a rank which was stopped
    with it, has ended. (gloo counts that time, too; `Patience` does not.)"""
    noticed, seconds = clock.stop
    # A wait that began meanwhile has ended since, and this rank has waited for what another one finds.
    if seconds < timeout / 2 or time.monotonic() - noticed > 2 * timeout + _OTHERS_PATIENCE:
        return []
    return [
        f"did not run for {seconds:.0f} s: a signal stopped it (Control-Z, a job that is suspended, a container that "
        f"is paused), and a collective takes {timeout:.0f} s at most"
    ]


def _address(store: Any) -> str:
    """For messages: " at host:port" for a TCPStore, "" for other stores."""
    store = without_prefixes(store)
    return f" at {store.host}:{store.port}" if hasattr(store, "port") else ""


def _print(*lines: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any longer, or it has been closed
        for line in lines:
            print(f"zeroshard: {line}", file=sys.stderr, flush=True)
