"""The watch: a thread in each rank through which the ranks hear of each other's end, so that none waits for a dead one.

    rank 1   raises ── prints its traceback ── tells the store ── exits
    rank 0   waits for rank 1 in a collective ... hears of it, or its connection closes ── says so in a line ── exits

Twice a second each thread writes down that its process runs, and where its main thread is. So whoever gives up waiting
can say whom it waited for: a process that no longer exists, one that stands still, or one that is somewhere else. Who
has heard of a failure has `GRACE_SECONDS` to end by itself; then its watch ends it. That is the only way out for a
rank that waits inside of gloo or NCCL.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

BEAT_SECONDS = 0.5
GRACE_SECONDS = 2.0
FAILED = 1
"""Exit status of a rank that its watch has ended."""

_OF_OTHERS = re.compile(
    r"clos|reset|broken pipe|tim(ed?|ing)[ -]?out|abort|refused|remote|not been heard of|gone", re.IGNORECASE
)
"""Messages of an error that another rank's end may have caused."""
_GIVING_UP = "giving up"
_HERE = os.path.dirname(__file__) + os.sep
_LIBRARIES = (_HERE, os.path.dirname(str(dist.__file__)).removesuffix("distributed"), "<frozen")
_STANDARD = os.path.dirname(os.__file__) + os.sep

_Cause = list[Any]
"""[rank (None: the launcher), what became of it]: a sentence in two parts."""

_current: Watch | None = None


class Watch:
    """One in each rank, from `start` to `stop`."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.pid, self.of_store = rank, world_size, os.getpid(), store
        self._store: Store = PrefixStore("zeroshard/watch", _connection_of_its_own(store))
        self._main = threading.main_thread().ident
        self._host = _host()
        self._known_pids: dict[int, int] = {}
        self._ending = threading.Event()
        self._reported = self._said = False
        self._store.set(f"who-{rank}", json.dumps([self._host, self.pid, socket.gethostname()]))
        self._store.set(f"beat-{rank}", json.dumps([0, "at the start"]))
        self._thread = threading.Thread(target=self._run, name="zeroshard watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """This rank leaves, and nothing is wrong."""
        if self._ending.is_set() or os.getpid() != self.pid:
            return
        self._ending.set()
        self._thread.join(2 * BEAT_SECONDS)
        with suppress(RuntimeError):
            self._store.set(f"left-{self.rank}", "1")

    def report(self, error: BaseException, show: Callable[[], None] | None) -> None:
        """This rank cannot go on: tell the others, who then leave. `show` prints the error: before the others hear of
        it where it is the first, and not at all where it only follows from the first."""
        if self._reported or os.getpid() != self.pid:
            return
        self._reported = True
        mine: _Cause = [self.rank, f"failed: {_in_one_line(error)}"]
        follows = isinstance(error, RuntimeError) and _OF_OTHERS.search(str(error)) is not None
        cause = None
        with suppress(RuntimeError):  # the store is gone
            cause = self._hear(patience=2 * BEAT_SECONDS if follows else 0.0)
            if cause is None:
                found = self._whom_to_blame() if follows else []
                if self._is_first(mine):
                    if show is not None:
                        _tell(f"rank {self.rank} of {self.world_size} failed first:")
                        show()
                    if found:
                        mine[1] = f"waited in vain: {'; '.join(found)}"
                        _tell(*found)
                    self._store.set("failure", json.dumps(mine))
                    self._wake_neighbours()
                    return
                cause = self._hear(patience=2 * BEAT_SECONDS)
        if show is not None:
            if cause is None or not (follows or mine[1] == cause[1]):
                show()
            self._say(cause)

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        beats = 0
        try:
            while not self._ending.wait(BEAT_SECONDS):
                beats += 1
                self._beat(beats)
                cause = self._hear() or self._look_for_the_dead()
                if cause is not None:
                    self._end(cause)
                    return
        except RuntimeError:  # the store is gone: with the launcher, or with rank 0, of which the connections tell
            if has_one_launcher(self.world_size):
                self._end([None, "is gone"])
            self._ending.set()

    def _beat(self, beats: int) -> None:
        where = _GIVING_UP if self._reported else _where(self._main)
        self._store.set(f"beat-{self.rank}", json.dumps([beats, where]))

    def _hear(self, patience: float = 0.0) -> _Cause | None:
        """What the rank that failed first has said, or None."""
        end = time.monotonic() + patience
        while not self._store.check(["failure"]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)
        cause: _Cause = json.loads(self._store.get("failure"))
        return cause

    def _look_for_the_dead(self) -> _Cause | None:
        """A rank of this machine whose process has ended, though it has not left."""
        for rank, pid in self._neighbours().items():
            if not _alive(pid) and not self._store.check([f"left-{rank}"]):
                cause: _Cause = [rank, f"has ended without a word (process {pid}): killed, perhaps for want of memory"]
                if self._is_first(cause):
                    self._store.set("failure", json.dumps(cause))
                return self._hear(patience=2 * BEAT_SECONDS)
        return None

    def _is_first(self, cause: _Cause) -> bool:
        """Whether nobody has failed before."""
        text = json.dumps(cause)
        return bool(self._store.compare_set("first", "", text).decode() == text)

    def _neighbours(self) -> dict[int, int]:
        """Ranks whose processes can be seen from here, and their process ids."""
        if len(self._known_pids) < self.world_size - 1 and self._host:
            for rank in range(self.world_size):
                if rank not in self._known_pids and rank != self.rank and self._store.check([f"who-{rank}"]):
                    host, pid, _ = json.loads(self._store.get(f"who-{rank}"))
                    self._known_pids[rank] = pid if host == self._host else 0
        return {rank: pid for rank, pid in self._known_pids.items() if pid}

    def _wake_neighbours(self) -> None:
        """Whoever has been stopped by a signal is to leave, too."""
        for pid in self._neighbours().values():
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _end(self, cause: _Cause) -> None:
        """Give the main thread a moment to end by itself, and the process no more than that."""
        with suppress(RuntimeError):
            self._wake_neighbours()
        if self._ending.wait(GRACE_SECONDS):
            return
        with suppress(Exception):
            self._say(cause)
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(FAILED)

    def _say(self, cause: _Cause | None) -> None:
        said, self._said = self._said, True  # the main thread, or this one
        if cause is not None and cause[0] != self.rank and not said:
            who = "the launcher" if cause[0] is None else f"rank {cause[0]}"
            _tell(f"rank {self.rank} leaves, because {who} {cause[1]}")

    # Who it was ------------------------------------------------------------------------------------------------------

    def _whom_to_blame(self) -> list[str]:
        """A line for each rank that has ended or stands still; if there is none, where everybody is."""
        before = self._beats()
        time.sleep(3 * BEAT_SECONDS)
        lines, elsewhere = [], []
        for rank, (beats, where) in self._beats().items():
            host, pid, name = json.loads(self._store.get(f"who-{rank}"))
            who = f"rank {rank} (process {pid} on {name})"
            if self._store.check([f"left-{rank}"]):
                lines.append(f"{who} has left; it was last seen {where}")
            elif host and host == self._host and not _alive(pid):
                lines.append(f"{who} has ended; it was last seen {where}")
            elif beats == before.get(rank, (None,))[0]:
                lines.append(f"{who} has stopped: it stands still, last seen {where}")
            elif where != _GIVING_UP:
                elsewhere.append(f"{who} is {where}")
        return lines or elsewhere

    def _beats(self) -> dict[int, tuple[int, str]]:
        known = [r for r in range(self.world_size) if r != self.rank and self._store.check([f"beat-{r}"])]
        return {rank: tuple(json.loads(self._store.get(f"beat-{rank}"))) for rank in known}


def start() -> None:
    """Watch over the ranks of the default process group; nothing to do in a world of one, or where that is done."""
    global _current
    store = _get_default_store()
    if _current is not None and _current.of_store is store and _current.pid == os.getpid():
        return
    stop()
    if dist.get_world_size() > 1 and str(dist.get_backend()) != "fake":
        _current = Watch(store, dist.get_rank(), dist.get_world_size())
        atexit.register(stop)
        if sys.excepthook is not _excepthook:
            _excepthook.previous = sys.excepthook
            sys.excepthook = _excepthook


def stop() -> None:
    """Leave: the others no longer count on this rank. At exit this happens by itself."""
    global _current
    watch, _current = _current, None
    if watch is not None:
        watch.close()


def abort(error: BaseException, *, quiet: bool = False) -> None:
    """Tell the other ranks that this one cannot go on: all leave within seconds. An error that nobody catches does the
    same; call this where one is caught, and the rank gives up. It prints the traceback, unless `quiet`."""
    if _current is not None:
        _current.report(error, None if quiet else partial(traceback.print_exception, error))


@contextmanager
def abort_on_error() -> Iterator[None]:
    """`abort` with what leaves the block, which is then raised on."""
    try:
        yield
    except BaseException as error:
        abort(error)
        raise


class _Excepthook:
    """Errors that nobody has caught."""

    def __init__(self) -> None:
        self.previous: Callable[..., Any] = sys.__excepthook__

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _current is None or os.getpid() != _current.pid:
            self.previous(kind, error, trace)
        else:
            _current.report(error, partial(self.previous, kind, error, trace))


_excepthook = _Excepthook()


def has_one_launcher(world_size: int) -> bool:
    """Whether torch's elastic launcher has started all ranks, on this machine, and holds the store: then it outlives
    them if nothing is wrong."""
    environment = os.environ
    of_launcher = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return of_launcher and environment.get("LOCAL_WORLD_SIZE") == str(world_size)


def _connection_of_its_own(store: Any) -> Store:
    """To the same store: the main thread may be waiting on the other one."""
    try:
        own: Store = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # not every store has that
        return cast(Store, store)
    return own


def _tell(*lines: str) -> None:
    for line in lines:
        print(f"zeroshard: {line}", file=sys.stderr, flush=True)


def _in_one_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:2000]


def _where(thread: int | None) -> str:
    """Where a thread is: the innermost line that is not this engine's, torch's or Python's own."""
    frame = sys._current_frames().get(thread or 0)
    inner = ""
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return f"at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}{inner}"
        inner = inner or f" (waiting in {os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name})"
        frame = frame.f_back
    return "nowhere"


def _is_library(path: str) -> bool:
    standard = path.startswith(_STANDARD) and "-packages" not in path
    return (standard or path.startswith(_LIBRARIES)) and not path.startswith(_HERE + "train")


def _host() -> str:
    """Equal for processes that see each other's ids; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    """Whether the process runs (or stands still); one that has ended and that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
