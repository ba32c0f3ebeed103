"""The ranks of the trainer: joining the process group, rank and device of this process, and small exchanges."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

import zeroshard
from zeroshard.errors import TookTooLong
from zeroshard.failures import watch
from zeroshard.io.refused import in_words
from zeroshard.ranks.backends import local_rank, take_device
from zeroshard.train.config import ParallelConfig, UserError

T = TypeVar("T")
RANKS_PER_CORE = 4


@dataclass(frozen=True)
class Ranks:
    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    def sum(self, values: list[float]) -> list[float]:
        """Add up `values` over the ranks, in fp64: one small all-reduce. Collective."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def together(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank; if it raises `UserError`, `OSError` or `CheckpointError` on any rank, all ranks
        raise a `UserError` with that text. Collective.

        Without the exchange a rank whose disk is full would leave the others waiting in their next collective.
        """
        result, problem = None, None
        try:
            result = action()
        except (UserError, OSError, zeroshard.CheckpointError) as error:
            problem = in_words(error) if isinstance(error, OSError) else str(error)
        # all_gather_object has the timeout of the process group, and `action` (preparing a text, say) may take longer
        # than that on one rank. This wait goes on as long as the missing ranks send heartbeats.
        zeroshard.wait_for_all()
        problems: list[str | None] = [None] * self.world_size
        dist.all_gather_object(problems, problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise UserError(text if rank == 0 or text == problems[0] else f"rank {rank}: {text}")
        return cast(T, result)

    def first_does(self, action: Callable[[], T], *, per_node: bool = False) -> T:
        """Call `action` on rank 0 (`per_node`: on one rank of each node); every rank returns its result, or raises the
        same `UserError`. Collective.

        Raises:
            UserError: `action` failed, or nodes got different results.
        """
        acts = (self.local_rank if per_node else self.rank) == 0
        result = self.together(lambda: action() if acts else None)
        outcomes: list[tuple[bool, Any]] = [(False, None)] * self.world_size
        dist.all_gather_object(outcomes, (acts, result))
        results: list[T] = [outcome for acted, outcome in outcomes if acted]
        if any(outcome != results[0] for outcome in results):
            raise UserError(f"the nodes disagree: expected {results[0]} as on rank 0 everywhere, found {results}")
        return results[0]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_type(config: ParallelConfig) -> str:
    """ "cpu" or "cuda". Raises `UserError` if cuda is asked for and absent."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("parallel.device = 'cuda': expected a CUDA device, found none; use 'cpu' or 'auto'")
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def sensible_nproc(config: ParallelConfig) -> int:
    """The number of ranks to start on this machine. Raises `UserError` for more than it can sensibly run."""
    if device_type(config) == "cuda":
        devices = torch.cuda.device_count()
        if config.nproc is not None and config.nproc > devices:
            raise UserError(f"--nproc {config.nproc}: expected at most {devices}, one rank for each CUDA device")
        return config.nproc or devices
    most = RANKS_PER_CORE * cores()
    if config.nproc is not None and config.nproc > most:
        raise UserError(
            f"--nproc {config.nproc}: expected at most {most}, {RANKS_PER_CORE} ranks for each of {cores()} CPU cores"
        )
    return config.nproc or 1


@contextmanager
def joined(config: ParallelConfig) -> Iterator[Ranks]:
    """Join the process group (a world of one without a launcher) and leave it at the end, unless it existed before.

    If an exception leaves the block, the other ranks are told and stop too, instead of waiting in a collective. (A
    `UserError` is raised on every rank. A process group that existed before is as good as it was, for another run.)
    """
    kind = device_type(config)
    device = take_device(kind) if kind == "cuda" else torch.device("cpu")
    ours = not dist.is_initialized()
    # torch starts a thread for each core in each process, so several ranks on one machine would compete for the cores.
    if ours and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        zeroshard.init("nccl" if kind == "cuda" else "gloo", timeout=config.timeout)
    except TookTooLong as error:
        raise UserError(f"parallel.timeout = {config.timeout:g}: {error}") from None
    try:
        yield Ranks(dist.get_rank(), local_rank()[1], dist.get_world_size(), device)
    except BaseException as error:
        if ours or not isinstance(error, UserError):
            watch.abort(error, quiet=isinstance(error, UserError))
        else:
            watch.stop()
        raise
    watch.stop()  # tells the other ranks that this one has finished, so that they do not take its silence for a failure
    if ours:
        dist.destroy_process_group()
