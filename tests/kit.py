"""Shared by the tests: small models with awkward sizes, data that differ on every rank, and training loops."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests import apart
from tests.grids import EVERYTHING
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.packets import PACKET
from zeroshard.placement import Plan
from zeroshard.ranks.mesh import Mesh
from zeroshard.reference import Reference
from zeroshard.step import control
from zeroshard.testing import run_ranks

PLANS = (zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO2, zeroshard.ZERO3)
VOCAB, WIDTH, HIDDEN, LENGTH = 23, 19, 37, 5

if os.environ.get("ZEROSHARD_TEST_DEVICE") == apart.NAME:
    apart.load()
DEVICE = torch.device(os.environ.get("ZEROSHARD_TEST_DEVICE", "cpu"))
"""The device of the models and inputs of this file. "cuda" is the current CUDA device of each rank; "apart" is that of
`tests/apart`. Outcomes are on the CPU."""

SMALL = 1280
"""Storages of at most so many bytes are not counted: they hold numbers, not parameters."""

LAST_BITS = 1e-5
"""Tolerance for weights of about 1 after some fp32 steps of SGD, where two programs round differently (sums in another
order, other kernels). The last bit is 1e-7."""
CANCELLED = 1e-4
"""The same tolerance for Adam at a learning rate of 1e-2. Adam divides a gradient by its own size. Where terms cancel,
the rounding error that is left becomes a visible part of a step. A real fault moves weights by whole steps."""

State = dict[str, Tensor]


def plans_of(number: int) -> tuple[Plan, ...]:
    """The plans of one of many cases: DDP and ZERO2, or ZERO1 and ZERO3, in turn. So each plan has half of the cases,
    and each case a plan with weights in full or gathered, and with gradients in full or sharded. With `make
    test-everything` each case has all plans."""
    return PLANS if EVERYTHING else PLANS[number % 2 :: 2]


def with_plans(cases: Iterable[Any]) -> list[tuple[Any, Plan]]:
    """Each case with each of its plans (`plans_of`)."""
    return [(case, plan) for number, case in enumerate(cases) for plan in plans_of(number)]


NUM_RANKS = (2, 3) if EVERYTHING else (3,)
"""For tests that hold the same on 2 ranks as on 3, the harder case: no power of two, shards of odd sizes."""


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, residual blocks, norm, head: sizes that no power of two divides. `tied`: the head is the embedding."""

    def __init__(self, *, tied: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Gated(Net):
    """Blocks with a parameter that a forward may skip while the other parameters of its unit are used."""

    class Inner(Block):
        open = True

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * self.gate if self.open else y

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(blocks))


class Counting(nn.Module):
    """A model whose gradients are small integers whatever the parameters' values are, so that all sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 17)
        self.left = nn.Linear(13, 29, bias=False)
        self.right = nn.Linear(29, 7)

    def forward(self, tokens: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.table(tokens).sum() + self.left(x).sum() + self.right(y).sum()


def is_uncounted(num_bytes: int) -> bool:
    """Whether a storage of so many bytes, created by the caller now, need not be counted: it is small, or it belongs to
    the control exchange of a step, whose size depends neither on the model nor on the number of ranks."""
    frame = sys._getframe(1) if SMALL < num_bytes <= 8 * PACKET else None
    while frame is not None and frame.f_code.co_filename != control.__file__:
        frame = frame.f_back
    return num_bytes <= SMALL or frame is not None


def make(model: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """On `DEVICE`, with the same values on every device."""
    torch.manual_seed(seed)
    return model() if DEVICE.type == "cpu" else model().to(DEVICE)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each next token."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def loss_of_tokens(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int = 1) -> Tensor:
    """Cross-entropy on data that no two (rank, micro-batch, step) share."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    tokens = torch.randint(VOCAB, (3, LENGTH + 1), generator=generator).to(DEVICE)
    return loss_of(model, tokens) / micro_batches


def loss_of_integers(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int = 1) -> Tensor:
    """A loss for `Counting`: inputs are integers from -3 to 3; not divided by `micro_batches`, so gradients are
    integers."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    tokens = torch.randint(31, (4,), generator=generator).to(DEVICE)
    x, y = (torch.randint(-3, 4, (4, width), generator=generator).float().to(DEVICE) for width in (13, 29))
    return model(tokens, x, y)


@contextmanager
def travelling(way: str) -> Iterator[None]:
    """Select the transport: shared memory, pairwise messages, or ("native") the backend's own collectives, as on
    NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "shared":
            patch.setattr(Collectives, "_try_to_share", lambda self: None)
        if way == "native":
            patch.setattr(Mesh, "is_pairwise", property(lambda self: False))
        yield


def transport_of(handle: zeroshard.Handle) -> Any:
    """What `plan_memory` has to be told in order to plan for the transport that these ranks use."""
    return handle.engine.collectives.transport.name


SCHEDULES = {"one": (1, False), "once per step": (3, False), "every micro-batch": (3, True)}
"""Number of micro-batches, and whether gradients are reduced after each of them."""


@dataclass(frozen=True)
class Job:
    """What to train and how, without the plan. `groups(model)` returns param groups; `scale` is the loss scale's
    policy; `main`: whether the outcome contains the main weights. Two steps are enough where nothing else is said: the
    second has optimizer state, the order of units, and buffers that the first has used and released."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    defaults: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "foreach": False})
    precision: Any = None
    model: Callable[[], nn.Module] = Net
    loss_of: Callable[..., Tensor] = loss_of_tokens
    units: Any = Block
    steps: int = 3 if EVERYTHING or DEVICE.type == "cuda" else 2
    micro_batches: int = 1
    reduce_every_micro_batch: bool = False
    max_norm: float | None = None
    scale: Any = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    main: bool = False

    def loss(self, model: nn.Module, rank: int, micro_batch: int, step: int) -> Tensor:
        return self.loss_of(model, rank, micro_batch, step, self.micro_batches)

    def micro_scopes(self, handle: zeroshard.Handle) -> Iterator[Any]:
        """One context per micro-batch. Gradients are reduced after each one, or after the last one only."""
        for micro_batch in range(self.micro_batches):
            local = not self.reduce_every_micro_batch and micro_batch < self.micro_batches - 1
            yield handle.no_sync() if local else nullcontext()


@dataclass
class Outcome:
    """The results of a run on one rank: losses, full weights, the communication log. `applied`: for each step, whether
    it was applied (not skipped); `scales`: its loss scale."""

    losses: list[float]
    weights: State
    log: CommLog
    norms: list[float] = field(default_factory=list)
    main: State = field(default_factory=dict)
    applied: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def train(job: Job, plan: Plan, rank: int, mesh: Any = None) -> Outcome:
    """Train with zeroshard under `plan`. Collective."""
    model = make(job.model)
    handle = zeroshard.shard(model, plan, units=job.units, precision=job.precision, mesh=mesh)
    target = handle if job.groups is None else job.groups(model)
    optimizer = zeroshard.ShardedOptimizer(target, job.optimizer, loss_scale=job.scale, **job.defaults)
    losses, norms, applied, scales = [], [], [], []
    for step in range(job.steps):
        optimizer.zero_grad()
        for micro_batch, scope in enumerate(job.micro_scopes(handle)):
            with scope:
                loss = job.loss(model, rank, micro_batch, step)
                optimizer.backward(loss)
            losses.append(loss.item())
        clipped = None if job.max_norm is None else optimizer.clip_grad_norm_(job.max_norm).item()
        result = optimizer.step()
        norms.append(result.grad_norm if clipped is None else clipped)
        applied.append(result.applied)
        scales.append(result.loss_scale)
    weights = _on_cpu(handle.full_state_dict())
    main = _on_cpu(handle.full_state_dict(main=True)) if job.main else {}
    return Outcome(losses, weights, handle.comm_log, norms, main, applied, scales)


class ScaledReference(Reference):
    """`Reference` with a loss scale: the loss is multiplied by the scale; a non-finite gradient skips the step."""

    scaler: zeroshard.LossScaler | None = None
    applied = True

    def _update(self, sums: dict[nn.Parameter, Tensor], factor: float) -> None:
        self.applied = all(bool(torch.isfinite(total).all()) for total in sums.values())
        if self.applied:
            super()._update(sums, factor / self.scale)  # exact: scales are powers of two here
        if self.scaler is not None:
            self.scaler.update(not self.applied)

    @property
    def scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else loss.float() * self.scale


def train_reference(job: Job, num_ranks: int) -> list[Outcome]:
    """Train the same job in one process; returns the outcome that each rank should have."""
    model = make(job.model)
    params = None if job.groups is None else job.groups(model)
    reference = ScaledReference(
        model, job.optimizer, num_ranks=num_ranks, precision=job.precision, params=params, **job.defaults
    )
    reference.scaler = None if job.scale is None else zeroshard.LossScaler(job.scale)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    norms, applied, scales = [], [], []
    for step in range(job.steps):
        scale = reference.scale
        result = reference.step(
            lambda model, rank, micro_batch, step=step: reference.scaled(job.loss(model, rank, micro_batch, step)),
            micro_batches=job.micro_batches,
            reduce_every_micro_batch=job.reduce_every_micro_batch,
            max_norm=job.max_norm,
        )
        norms.append(result.grad_norm)
        applied.append(reference.applied)
        scales.append(scale)
        for rank, of_rank in enumerate(result.losses):
            losses[rank] += [loss / scale for loss in of_rank]
    weights, parameters = _on_cpu(reference.state_dict()), model.state_dict(keep_vars=True)
    main = _on_cpu({name: reference.main[p].detach().clone() for name, p in parameters.items()}) if job.main else {}
    return [Outcome(of_rank, weights, CommLog(), norms, main, applied, scales) for of_rank in losses]


def beside_one_process(
    one_process: Callable[[], Any], of_rank: Callable[[int], Any], num_ranks: int
) -> tuple[Any, list[Any]]:
    """What one process computes, and what each rank does. Rank 0 is that process, before it begins: a start of its own
    would take as long as a short training."""

    def both(rank: int) -> tuple[Any, Any]:
        return one_process() if rank == 0 else None, of_rank(rank)

    results = run_ranks(both, num_ranks)
    return results[0][0], [found for _, found in results]


def _on_cpu(state: State) -> State:
    """A process that has not used CUDA can then unpickle it, and fork further ranks."""
    return {name: value.cpu() for name, value in state.items()}


def same_bits(a: State, b: State) -> bool:
    """Whether two state dicts have the same names, dtypes, shapes and bits (NaN equals itself)."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(_bits(a[name].cpu()), _bits(b[name].cpu()))
        for name in a
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def largest_difference(a: State, b: State) -> float:
    return max(float((a[name].cpu().double() - b[name].cpu().double()).abs().max()) for name in a)


def logs(outcomes: Sequence[Outcome]) -> list[CommLog]:
    return [outcome.log for outcome in outcomes]
