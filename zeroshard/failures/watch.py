"""The watch: each rank learns when another rank fails, so that no rank waits for one that has failed.

    rank 1   raises ── prints its traceback ── tells the store ── exits
    rank 0   waits for rank 1 in a collective ... learns of it, or its connection closes ── prints one line ── exits

See "When a rank fails" in docs/design.md. A rank that has learnt of a failure has `GRACE_SECONDS` to end by itself, and
its waits inside gloo are interrupted; after that its watch ends the process. A rank that waits inside NCCL can end only
this way.

This file starts and ends the watch of this process, and brings it the errors that leave the program; what the watch
does in between is in `rank_watch.py`.
"""

from __future__ import annotations

import _thread
import atexit
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinFunctionType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from zeroshard.errors import InvalidState
from zeroshard.failures.blame import GIVING_UP, OUTSIDE
from zeroshard.failures.lost import LostPeer, in_one_line, is_of_others
from zeroshard.failures.membership import Membership
from zeroshard.failures.positions import HERE, Wait, in_short
from zeroshard.failures.rank_watch import FAILED, Watch, where_it_trains
from zeroshard.failures.store_line import Attended
from zeroshard.failures.whereabouts import SAVES, asks
from zeroshard.ranks.backends import backends_of, moves_nothing, timeout_of

_current: Watch | None = None

NO_WATCH = (
    "No watch runs here that could say which rank has not come, and where it is. Call zeroshard.init() on every rank, "
    "also after torch.distributed.init_process_group: it keeps that group. Ranks that wait for each other are then "
    "found within seconds"
)


def start(*, is_new: bool = False) -> None:
    """Start the watch over the ranks of the default process group. No effect in a world of one rank, or if it runs.
    `is_new`: its store has keys of this group only."""
    global _current
    store = _get_default_store()
    if (watch := current()) is not None and watch.of.store is store:
        return
    stop()
    backends = backends_of(group := dist.distributed_c10d._get_default_group())
    if dist.get_world_size() > 1 and not moves_nothing(group):
        _expect_threads()
        timeout = timeout_of(group, torch.device(next(iter(backends), "cpu"))).total_seconds()
        _current = Watch(Membership(group, store, is_new=is_new), timeout)
        _call_at_exit()
        _hooks.install()


_at_end: multiprocessing.util.Finalize | None = None


def _call_at_exit() -> None:
    global _at_end
    atexit.unregister(at_exit)  # of an earlier watch
    atexit.register(at_exit)
    if _at_end is not None:
        _at_end.cancel()
    if multiprocessing.parent_process() is not None:
        # What multiprocessing has forked ends by os._exit, without `atexit`: the others would take it for dead. Its own
        # way to end comes behind what the program has registered there (the lower the later), and its children.
        _at_end = multiprocessing.util.Finalize(None, _target_ended, exitpriority=-1)


def _target_ended() -> None:
    """The function that multiprocessing (`torch.multiprocessing.spawn`, say) has called in this process is over."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch has stored the error for its parent, and calls sys.exit
        error = error.__context__ if error.code else None
    for thread in threading.enumerate():
        if thread.name.startswith(SAVES):  # as the interpreter does at its end
            thread.join()
    if error is not None:
        abort(error, quiet=True)  # no `excepthook` is called: multiprocessing prints it
    at_exit()


def _expect_threads() -> None:
    """A thread of gevent runs only where another one of them waits by gevent: the watch's would stop the program."""
    starts = _thread.start_new_thread
    if not isinstance(starts, BuiltinFunctionType):
        library = starts.__module__.partition(".")[0]
        raise InvalidState(
            f"init: {library} has replaced Python's threads, and the watch needs one that runs beside the program. "
            "Keep them: gevent.monkey.patch_all(thread=False)"
        )


def current() -> Watch | None:
    """The watch of this process; None if there is none."""
    # [Note: forked workers]
    # A DataLoader forks by default (pytorch/pytorch#138957). A worker inherits its parent's objects and sockets, but
    # not its threads. It must neither beat nor report, nor wait for a message: it would use its parent's connections.
    return _current if _current is not None and _current.pid == os.getpid() and not _current.of.is_over else None


def of_group() -> Watch | None:
    """The watch, for a wait that all ranks begin at the same point of the program. None also once the program has
    destroyed the group: `current` then ends, at another moment on each rank, and some would wait for the others."""
    watch = current()
    return watch if watch is not None and watch.of.is_in_group else None


def stop() -> None:
    """End the watch of this process, and tell the other ranks that its work is done. Runs at exit by itself."""
    global _current
    watch, _current = current(), None
    if watch is not None:
        watch.close()


def at_exit() -> None:
    """Report the error that ends the program, if there is one, and `stop`. If the thread that trained has failed, the
    exit status says so."""
    _hooks.report_last()
    stop()
    if _hooks.has_failed:
        # The main thread has ended as usual, with status 0: a launcher would take the run for done.
        with suppress(Exception):  # they may be closed, or nobody reads them any longer
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(FAILED)


def abort(error: BaseException, *, quiet: bool = False) -> None:
    """Tell the other ranks that this one cannot go on: all ranks exit within seconds. An uncaught error does the same;
    call this where you catch an error and the rank gives up. Prints the traceback, unless `quiet`."""
    if (watch := current()) is not None:
        watch.report(error, None if quiet else partial(traceback.print_exception, error))


def explain(error: BaseException) -> LostPeer | None:
    """For an error that another rank has caused: an error that names that rank and what happened to it. None if this
    rank has no watch (a note then tells how to have one), or the error is its own."""
    if isinstance(error, LostPeer) or not is_of_others(error):
        return None
    if (watch := current()) is not None:
        return watch.lost_in_wait(error)
    if _current is None and NO_WATCH not in getattr(error, "__notes__", ()):
        error.add_note(NO_WATCH)
    return None


def attended(store: Store) -> Attended:
    """The store, for calls whose answers the program waits for. No error ends such a wait while whoever holds the store
    is stopped, and a heartbeat waits for no answer: the watch, if there is one, has to know of the call."""
    watch = of_group()
    return Attended(store) if watch is None else watch.line.attend(store)


@asks
def where_is(rank: int) -> str:
    """A clause for a message, ", at ...": the program line and the call that a rank is at; of other ranks, from their
    heartbeats. "" if it is not known."""
    watch = current()
    at = OUTSIDE
    if watch is None and not dist.is_initialized():
        return ""
    if rank == (watch.rank if watch is not None else dist.get_rank()):
        at = where_it_trains()
    elif watch is not None:
        at = watch.last_seen(rank)
    return f", {at}" if at not in (OUTSIDE, GIVING_UP) else ""


@contextmanager
def abort_on_error() -> Iterator[None]:
    """Call `abort` with an error that leaves the block; the error is then raised on."""
    try:
        yield
    except BaseException as error:
        abort(error)
        raise


def wait_for_all(ranks: Sequence[int] | None = None, name: str = "") -> None:
    """Return when every rank has called this. There is no time limit as long as the missing ranks send heartbeats.
    Collective. Call it after work that one rank does alone for longer than the timeout of a collective: the others wait
    for it through the watch. Without a watch (`init` starts it) it returns at once, and the next collective waits.

    Args:
        ranks: global ranks; None: all.
        name: tells the waits of several handles of the same ranks apart.

    Raises:
        LostPeer: a rank has failed, or has sent no heartbeat for the timeout of a collective.
    """
    if (watch := of_group()) is not None:
        everyone = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        key = _key_of_waits(everyone, name)
        number = HERE.begin(key)
        with HERE.waiting(Wait(key, number, everyone, "a wait for all ranks")):
            watch.wait_for_all(key, everyone)


def forget_waits(ranks: tuple[int, ...], names: Sequence[str]) -> None:
    """No rank calls `wait_for_all` with these names any longer."""
    if names and (watch := of_group()) is not None and watch.rank == ranks[0]:
        watch.forget_waits([_key_of_waits(ranks, name) for name in names])


def _key_of_waits(ranks: tuple[int, ...], name: str) -> str:
    return f"all {name} {in_short(ranks)}"


class _Hooks:
    """Report errors that nobody has caught: of the main thread, and of the thread that trains, if that is another one.
    Python ends that thread only, and the other ranks would wait for it. (Errors of other threads are none of ours:
    plain torch trains on.)

    Attributes:
        has_failed: whether the thread that trained, not the main thread, has ended with an error.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._reports: BaseException | None = None
        self._before = 0

    def install(self) -> None:
        self._before = id(_last_uncaught())
        hooks: tuple[tuple[Any, Callable[..., None]], ...] = (sys, self._main_ended), (threading, self._thread_ended)
        for module, ended in hooks:
            there = module.excepthook
            if getattr(there, "func", None) != ended:
                # The hook that was there belongs to this one, not to `self`: it may call that of an earlier `install`
                # (torch installs one with each process group), which must not call it in turn.
                module.excepthook = partial(ended, there)

    def _main_ended(
        self, there: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._report(error, partial(there, kind, error, trace))

    def _thread_ended(self, there: Callable[..., Any], ended: Any) -> None:
        error, show = ended.exc_value, partial(there, ended)
        if error is None or isinstance(error, SystemExit) or HERE.thread != threading.get_ident():
            show()
        elif (watch := self._report(error, show)) is not None:
            self.has_failed = True
            watch.leave(error)

    def report_last(self) -> None:
        """At the end: report an error that nobody has caught, if the program has replaced this hook by one that does
        not call it (`rich.traceback.install()`). That one has shown the error."""
        error, watch = _last_uncaught(), current()
        if watch is not None and error is not None and id(error) != self._before:
            with suppress(Exception):  # stderr may be closed
                watch.report(error, lambda: print(in_one_line(error), file=sys.stderr))

    def _report(self, error: BaseException, show: Callable[[], Any]) -> Watch | None:
        """Returns the watch that has reported it; None: there is none, or a hook that it has called calls this one."""
        watch = current()
        if watch is None or self._reports is error:
            show()
            return None
        self._reports = error
        try:
            watch.report(error, show)
        finally:
            self._reports = None
        return watch


def _last_uncaught() -> BaseException | None:
    """The last error that has ended the program (here, or before a fork). In an interactive one, where an error ends
    what was typed: None."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


_hooks = _Hooks()
