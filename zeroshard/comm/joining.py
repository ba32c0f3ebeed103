"""Joins the process group of the launcher, and starts the watch."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from zeroshard.errors import InvalidState, InvalidValue, TookTooLong
from zeroshard.failures import watch
from zeroshard.failures.bell import connection_of_its_own
from zeroshard.failures.found import has_one_launcher, is_refused, launcher_holds_store, stopped_of_this_job, wake
from zeroshard.failures.lost import LostPeer
from zeroshard.failures.processes import Who, descends_from
from zeroshard.io.logger import LOGGER, tell
from zeroshard.ranks.backends import DEFAULT_TIMEOUT, accelerator, device_for, shared_device, take_device
from zeroshard.ranks.groups import default_group
from zeroshard.ranks.names import NAMES, Answers, ask_for_name, new_name


def init(backend: str | None = None, timeout: float | timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Join the process group of the launcher (`torchrun` sets its environment); without a launcher, a world of one.

        device = zeroshard.init()
        model.to(device)

    Args:
        backend: "gloo" or "nccl"; by default gloo for CPU tensors and, if an accelerator is available, torch's backend
            for its tensors (NCCL for CUDA, XCCL for XPU).
        timeout: seconds (or a timedelta) after which a collective that cannot complete raises on the waiting ranks
            (gloo). With NCCL no call can raise: after nine tenths of it a rank that waits for its device in a step says
            which rank has not come, and all end. Where it waits in a line of the program (`loss.item()`), torch's
            watchdog ends its process after the timeout.

    If `torch.distributed` is initialised already, its group and timeout are kept. In both cases a watch starts: when a
    rank fails, the other ranks exit within seconds instead of waiting for the timeout.

    Returns:
        The device for this rank's model and data: the current one of the accelerator if the group has a backend for it,
        else the CPU. Unless the group existed before, `init` has made device LOCAL_RANK the current one; device 0 if
        the process sees only one. (Without LOCAL_RANK: what srun or mpirun tell, or RANK by the number of devices.)

    Raises:
        ValueError: a timeout that is not positive; a LOCAL_RANK for which there is no device; one GPU for two ranks; or
            as `launched`.
        TimeoutError: not all ranks have come within the timeout.
        RuntimeError: whoever holds the store of the group has ended; a rank has started this process, with its own
            environment; or the environment tells another rank than when this process joined its group.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise InvalidValue(f"timeout must be positive, found {timeout.total_seconds()} s")
    if is_new := not dist.is_initialized():
        _expect_no_copy()
        watch.stop()  # of a group that the program has left: it holds the store, with that group's keys
        _join(backend, timeout)
    else:
        _expect_same_place()
    _mark()
    watch.start(is_new=is_new)
    device = device_for(default_group(), None)
    rank, group = dist.get_rank(), dist.get_backend_config(default_group())
    tell(rank, "%d ranks by %s, each on its %s", dist.get_world_size(), group, device.type)
    return device


_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells a rank."""
_MARK = "ZEROSHARD_RANK_OF_PROCESS"
"""A rank tells the processes that it starts which rank it is: they inherit what it was told, too."""


_known: tuple[weakref.ref[dist.ProcessGroup], list[str]] | None = None
"""The group at the last call of `init`, and what was told then: to this process, or to the one that has forked it."""


def _mark() -> None:
    global _known
    _known = weakref.ref(default_group()), _told()
    if dist.get_world_size() > 1 and "RANK" in os.environ:
        os.environ[_MARK] = json.dumps([os.getpid(), _told()])


def _told() -> list[str]:
    return [os.environ.get(name, "") for name in _PLACE]


def _expect_same_place() -> None:
    """Raises:
    RuntimeError: since this process joined its group (or the one that has forked it), it was told another place."""
    if _known is None or _known[0]() is not default_group() or (told := _told()) == _known[1]:
        return
    has, place = (dist.get_rank(), dist.get_world_size()), told[:2] if any(told[:2]) else ["0", "1"]
    is_elsewhere = has[1] > 1 and all(_known[1]) and all(told)  # another address, or another port
    if not all(place) or (place == [*map(str, has)] and not is_elsewhere):  # one of the two alone tells no place
        return
    at = f" at {':'.join(told[2:])}" if all(told) else ""
    raise InvalidState(
        f"init: this process is rank {has[0]} of {has[1]} in a process group that it has joined before, and is told "
        f"now to be rank {place[0]} of {place[1]}{at}: call torch.distributed.destroy_process_group() first. (A forked "
        "process has the group of the one that has forked it: call it there, before the fork, or call init only in the "
        "processes that are started)"
    )


def _expect_no_copy() -> None:
    """Raises:
    RuntimeError: this process has what was told to a rank that has started it: both would be that rank."""
    pid, told = json.loads(os.environ.get(_MARK, "[0, []]"))
    if pid and told == _told() and descends_from(pid):
        raise InvalidState(
            f"init: rank {told[0]} (process {pid}) has started this process, which has inherited RANK and WORLD_SIZE: "
            "it would wait for ever, as a second one of that rank. Call init in the ranks only, under "
            'if __name__ == "__main__": in a script that other processes import. For a process that trains by itself: '
            'os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE"). Processes of all ranks that form a group of their '
            "own need another MASTER_PORT"
        )


def _join(backend: str | None, timeout: timedelta) -> None:
    kind, own = accelerator()
    # Both backends: a model that stays on the CPU of a machine with GPUs can be trained as well.
    backend = backend or (f"cpu:gloo,{kind}:{own}" if kind else "gloo")
    options: dict[str, Any] = {"timeout": timeout}
    if kind and own in backend:
        # Must come before the group is created: NCCL makes its communicator on the current device, which by default is
        # GPU 0 on every rank.
        take_device(kind)
        options |= _for_nccl(timeout) if own == "nccl" else {}
    if (given := launched()) is None:
        warn_of_other_tasks()
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        return
    rank, world_size = given
    if has_one_launcher(world_size) and is_refused(*_store_place()):
        # It has served the store since before it started this process; torch would try to connect for two timeouts.
        wake(stopped_of_this_job())
        raise LostPeer("the launcher has ended before all ranks had started", None, [])
    stopped, why = dict[int, Who](), "the store of the process group did not answer"
    try:
        with _waking(stopped, timeout.total_seconds()), _meeting(rank, world_size, timeout) as store:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
        if not stopped:
            return
    except RuntimeError as error:  # DistNetworkError, DistStoreError, DistBackendError
        wake(found := stopped_of_this_job())
        if problem := shared_device(error):
            raise InvalidValue(problem) from None
        if "EADDRINUSE" in str(error):
            raise InvalidState(
                f"init: port {_store_place()[1]} of this host is in use, where rank 0 holds the store of the process "
                "group: set another MASTER_PORT on all ranks. Another program has it, or a process that was rank 0 of "
                "a group which it has left: until it has deleted the handles and groups of that time"
            ) from None
        why = (str(error).splitlines() or [""])[0].rstrip(".")
        why = "timed out: rank 0 has not answered" if NAMES in why else why
        is_late = bool(stopped) or re.search(r"tim(ed|e) ?out", why, re.IGNORECASE)
        stopped |= found
        if not is_late:
            if isinstance(error, dist.DistNetworkError):
                error.add_note("rank 0 or the launcher, whichever holds the store of the process group, has ended")
            raise
    raise TookTooLong(_not_met(rank, world_size, timeout, why, stopped))


def _not_met(rank: int, world_size: int, timeout: timedelta, why: str, stopped: Mapping[int, Who] = {}) -> str:
    place, had = ":".join(map(str, _store_place())), " and ".join(f"rank {one} ({who})" for one, who in stopped.items())
    return (
        f"rank {rank} of {world_size} did not meet the others at {place} within the timeout of "
        f"{timeout.total_seconds():g} s: {why}. {f'{had} had been stopped by a signal. ' if had else ''}"
        "All ranks have to start within that time, init(timeout=...), and all by zeroshard.init(): those that call "
        "init_process_group wait elsewhere"
    )


@contextmanager
def _waking(stopped: dict[int, Who], seconds: float) -> Iterator[None]:
    """If the block takes longer, the other ranks of this host that a signal has stopped are woken, and added to
    `stopped`: where one of them holds the store, torch waits for its answers without limit."""
    is_over = threading.Event()

    def wake_late() -> None:
        while not is_over.wait(seconds):
            stopped.update(found := stopped_of_this_job())
            wake(found)

    threading.Thread(target=wake_late, name="zeroshard joins", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _store_place() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def launched() -> tuple[int, int] | None:
    """(rank, number of ranks) that a launcher has given to this process by its environment; None: there is no launcher.

    Raises:
        ValueError: what it has given is no such pair, or does not tell where rank 0 is.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    given = dict(zip(_PLACE, _told(), strict=True))
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        rank, world_size = 0, 0
    if not (0 <= rank < world_size and all(given.values())):
        found = ", ".join(f"{name}={value}" for name, value in given.items())
        raise InvalidValue(
            "the environment of a rank: expected a RANK below WORLD_SIZE, and the MASTER_ADDR and MASTER_PORT of rank "
            f"0, found {found}. Start with torchrun, or set all four; without a launcher unset RANK and WORLD_SIZE"
        )
    return rank, world_size


_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where srun, and mpirun or mpiexec of Open MPI and MPICH, tell a process how many of them they have started."""


def warn_of_other_tasks() -> None:
    """Warn where these ranks are a world of their own, and a launcher that does not set RANK has started several."""
    for name in _TASKS:
        if os.environ.get(name, "1") not in ("0", "1"):
            LOGGER.warning(
                "%s is %s, and RANK and WORLD_SIZE are not set: each of these processes trains alone, on all of the "
                "data. Start them with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
                name, os.environ[name],
            )  # fmt: skip
            return


def _for_nccl(timeout: timedelta) -> dict[str, Any]:
    """Options of the default group: bound to the current device, so that its communicator is created at once; and with
    streams of high priority, as it gathers: a forward waits for gathers. (Reductions have a group of their own.)"""
    if not hasattr(dist, "ProcessGroupNCCL"):
        return {}  # torch says what its build lacks
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout  # torch warns if it is another one than `timeout=`
    return {"pg_options": options, "device_id": torch.device("cuda", torch.cuda.current_device())}


_PAUSE = 0.05
_last_name = ""


@contextmanager
def _meeting(rank: int, world_size: int, timeout: timedelta) -> Iterator[Store]:
    """The store of the launcher, with a name in front of its keys that these ranks have for this group only. Rank 0
    answers inside of the block: the others may come while it waits for them.

    Raises:
        TookTooLong: not all have come. (A backend that connects later does not wait for them.)
    """
    global _last_name
    end, answers = time.monotonic() + timeout.total_seconds(), None
    if rank > 0:
        store, name = _asked(rank, end)
    else:
        store, name = _launchers_store(timeout), new_name()
        if world_size > 1:
            answers = Answers(connection_of_its_own(store), world_size, name)
    store.set_timeout(timeout)
    try:
        yield PrefixStore(f"zeroshard/{name}", store)
        if answers is not None and not answers.wait(max(1.0, end - time.monotonic())):
            raise TookTooLong(_not_met(rank, world_size, timeout, "timed out: not all ranks have come"))
    finally:
        if answers is not None:
            answers.close()
    _last_name = name


def _asked(rank: int, end: float) -> tuple[Store, str]:
    """The store and the name, on a rank other than 0, until the time `end`."""
    while True:
        left = timedelta(seconds=max(1.0, end - time.monotonic()))
        try:
            return (store := _launchers_store(left)), ask_for_name(store, rank, _last_name)
        except dist.DistNetworkError:
            # Rank 0 has held it for an earlier group, which it has left only now. It comes with another one.
            if launcher_holds_store() or time.monotonic() > end:
                raise
            time.sleep(_PAUSE)


def _launchers_store(timeout: timedelta) -> Store:
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store
