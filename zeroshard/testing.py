"""Runs a function on several ranks of one machine, for tests."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from zeroshard.comm.comm_log import CommLog
from zeroshard.errors import Error, InvalidType, InvalidValue, TookTooLong
from zeroshard.failures import watch
from zeroshard.failures.whereabouts import SAVES

BACKEND = "gloo"
"""The backend of the groups that `run_ranks` makes."""


_SHOW_STACKS: int | None = getattr(signal, "SIGRTMAX", None)
"""At this signal a rank writes where each of its threads is; None where the system has no such signals."""
_STACKS_SECONDS = 1.0
"""How long they have for that."""
_OTHERS_SECONDS = 5.0
"""How long the other ranks have to end after one has failed."""


class RankError(Error, RuntimeError):
    """A rank raised. The message contains its traceback, and in short what others raised. `rank`: its number; `text`:
    its traceback."""

    def __init__(self, rank: int, text: str, others: str = "") -> None:
        super().__init__(f"rank {rank} raised:\n{text}{others}")
        self.rank = rank
        self.text = text


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0, collective_timeout: float = 300.0
) -> list[Any]:
    """Call `fn(rank, *args)` on `world_size` forked gloo ranks, and return their results, which are pickled.

    Ranks are forked (0.05 s; a new interpreter would take seconds), each with one thread (or OMP_NUM_THREADS). Run
    torch code inside `fn`, not in the calling process. The process group uses a FileStore, so no port is taken.

    Args:
        fn: the function.
        world_size: number of ranks.
        args: further arguments of `fn`.
        timeout: seconds for everything; ranks that are still running then are killed.
        collective_timeout: seconds for one collective.

    Raises:
        RankError: for the first rank that raised, with its traceback, and in short the other errors of other ranks.
        TimeoutError: ranks were still running at the timeout.
        TypeError, ValueError: `fn` is not a function, or `world_size` not a number of ranks.
    """
    if not callable(fn) or not isinstance(world_size, int):
        raise InvalidType(
            "run_ranks: expected a function, the number of ranks, and then the arguments of the function, as in "
            f"run_ranks(fn, 2, 'zero3'); found a {type(fn).__name__} and a {type(world_size).__name__}"
        )
    if world_size < 1:
        raise InvalidValue(f"run_ranks: expected at least one rank, found {world_size}")
    importlib.import_module("torch._dynamo")  # optimizers import it: do so once before the forks
    with tempfile.TemporaryDirectory(prefix="zeroshard-ranks-") as folder:
        running, caller = dict[int, int](), os.getpid()
        all_done, done = (os.fdopen(file, mode) for file, mode in zip(os.pipe(), "rw", strict=True))
        try:
            for rank in range(world_size):
                sys.stdout.flush(), sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    _rank_main(fn, rank, world_size, Path(folder), collective_timeout, args, all_done, done)
                running[pid] = rank
            all_done.close(), done.close()
            _wait_for(running, Path(folder), time.monotonic() + timeout)
        finally:  # none is left behind, also if a test's time limit or Control-C ends the wait
            if os.getpid() == caller:
                _kill(running)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    timeout: float,
    args: Sequence[Any],
    all_done: IO[str],
    done: IO[str],
) -> None:
    status = 1
    os.register_at_fork(after_in_child=done.close)  # else a DataLoader worker would keep the pipe open
    gc.freeze()  # a garbage collection would write to the parent's pages, and copy them
    try:
        stacks = (folder / f"stacks-{rank}").open("w")
        if _SHOW_STACKS is not None:
            faulthandler.register(_SHOW_STACKS, stacks)
        _never_take_a_core_from_another_rank()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        store = FileStore(str(folder / "store"), world_size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, timeout=limit)
        result = fn(rank, *args)
        for thread in threading.enumerate():
            if thread.name.startswith(SAVES):  # as the interpreter does at its end
                thread.join()
        _write(folder / f"result-{rank}", _pickled(result))
        _leave_together(all_done, done)
        status = 0
    except BaseException as error:
        last = traceback.format_exception(error, limit=-1, chain=False)[1:]
        _write_error(folder, rank, traceback.format_exc(), "".join(last))
    finally:
        try:
            watch.stop()
            sys.stdout.flush(), sys.stderr.flush()
        finally:  # a rank must never go on in the caller's program
            os._exit(status)


def _leave_together(all_done: IO[str], done: IO[str]) -> None:
    """Wait until every other rank has come here or has ended, because an ending rank closes its connections. Each rank
    holds the writing end of one pipe; the read ends when the last of them is closed. (Not a collective: `fn` may have
    destroyed the group, or a rank may have failed, as `fn` expected.)"""
    done.close()
    all_done.read()


def _never_take_a_core_from_another_rank() -> None:
    """Use the scheduling class SCHED_BATCH, whose threads wait until a core is free. Otherwise an arriving message
    wakes a thread of gloo, which may preempt a sending thread that holds gloo's lock; other threads then wait for the
    lock in a busy loop (`Pair::handleEvents`). With more ranks than cores this costs a quarter of all time."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Pickler(pickle.Pickler):
    """Writes a tensor as its bytes. Tensors pickle themselves by `torch.save`, which takes ten times as long, and tests
    return thousands of small ones."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        plain = plain and not value.is_neg()  # the memory of such a view (`z.conj().imag`) has the other sign
        if not plain or value.requires_grad or value.is_complex() or value.is_quantized or not value.is_contiguous():
            return NotImplemented
        data = ctypes.string_at(value.data_ptr(), value.nbytes) if value.nbytes else b""
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)  # bytes cannot be written to


def _pickled(result: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(result)
    return file.getvalue()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"tmp-{path.name}")
    temporary.write_bytes(data)
    temporary.rename(path)


def _write_error(folder: Path, rank: int, text: str, in_short: str) -> None:
    # A message may name any file, which may be no Unicode.
    texts = [one.encode(errors="backslashreplace").decode() for one in (text, in_short)]
    _write(folder / f"error-{rank}-{time.monotonic_ns()}", pickle.dumps(texts))


def _wait_for(running: dict[int, int], folder: Path, deadline: float) -> None:
    """Reap all ranks (pid -> rank). The others of one that has failed are killed if they do not end soon."""
    while running and (ended := _wait_for_one(running, deadline)):
        for pid, status in ended.items():
            rank = running.pop(pid)
            text = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
            if not text and not (folder / f"result-{rank}").exists() and not any(folder.glob(f"error-{rank}-*")):
                text = (
                    f"ended with status {os.waitstatus_to_exitcode(status)}, without a result or an error: it called "
                    "os._exit, or could not write a file"
                )
            if text:
                _write_error(folder, rank, text, text)
            if status or text:
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
    stacks, killed = _stacks_of(running, folder), sorted(running.values())
    _kill(running)
    errors = sorted(folder.glob("error-*"), key=lambda path: int(path.name.split("-")[2]))
    if errors:
        raise RankError(*_told_by(errors, stacks))
    if killed:
        raise TookTooLong(f"ranks {killed} were still running at the timeout and have been killed{stacks}")


def _told_by(errors: Sequence[Path], stacks: str) -> tuple[int, str, str]:
    """What these files, the earliest first, say in a RankError. What several ranks have raised is shown once."""
    ranks_of, texts = dict[str, list[int]](), list[str]()
    for path in errors:
        text, in_short = pickle.loads(path.read_bytes())
        ranks_of.setdefault(in_short, []).append(int(path.name.split("-")[1]))
        texts.append(text)
    (_, (first, *_)), *others = ranks_of.items()
    also = "".join(f"\nrank {', '.join(map(str, ranks))} raised:\n{in_short}" for in_short, ranks in others)
    return first, texts[0], also + stacks


def _kill(running: dict[int, int]) -> None:
    while running:
        pid, _ = running.popitem()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _stacks_of(running: dict[int, int], folder: Path) -> str:
    """Where the threads of these ranks are, for a message. (A rank that a signal has stopped does not tell.)"""
    if _SHOW_STACKS is None or not running:
        return ""
    files = {rank: folder / f"stacks-{rank}" for rank in sorted(running.values())}
    for pid in running:
        os.kill(pid, _SHOW_STACKS)
    end = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < end and not all(file.exists() and file.stat().st_size for file in files.values()):
        time.sleep(0.01)
    time.sleep(0.1)  # a file has the first thread by now
    found = {rank: file.read_text() for rank, file in files.items() if file.exists()}
    return "".join(f"\nrank {rank} has been killed here:\n{text}" for rank, text in found.items() if text)


def _wait_for_one(pids: Iterable[int], deadline: float) -> dict[int, int]:
    """pid -> wait status, as soon as at least one has ended; empty at the deadline. Reaps only these processes."""
    with ExitStack() as stack:
        poller, is_told = select.poll(), False
        with suppress(OSError, AttributeError):  # there is none before Linux 5.3, and a sandbox may forbid it
            for pid in pids:
                file = os.pidfd_open(pid)
                stack.callback(os.close, file)
                poller.register(file, select.POLLIN)
            is_told = True
        while True:
            ended = {pid: status for pid in pids for done, status in [os.waitpid(pid, os.WNOHANG)] if done}
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            # Not a busy loop: polling every few milliseconds would preempt a rank, which may hold a lock of gloo.
            poller.poll(1000 * min(left, 60) if is_told else 10)


def expect_same_logs(logs: Sequence[CommLog]) -> None:
    """Check that all ranks have issued the same collectives, in the same order within each kind, on the same amount of
    data (of which ranks may send different parts)."""
    for rank, log in enumerate(logs):
        for op in {event.op for event in [*logs[0].entries, *log.entries]}:
            first = [event[:3] for event in logs[0].entries if event.op == op]
            other = [event[:3] for event in log.entries if event.op == op]
            if first != other or logs[0].digests.get(op) != log.digests.get(op):
                at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), "the end")
                raise AssertionError(f"rank {rank} differs from rank 0 in {op} number {at}")
