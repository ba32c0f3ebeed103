"""What these tests share: a small model, jobs with every option, the truth with a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.core.models import PLANS, Block, Net, State, loss_of_tokens, make, same_bits
from zeroshard.comm_log import CommLog
from zeroshard.placement import Plan
from zeroshard.precision import MixedPrecision
from zeroshard.reference import Reference
from zeroshard.testing import expect_same_logs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "bf16, 16-bit gradients": MixedPrecision(grad=BF16),
    "bf16, 16-bit gradients summed in fp32": MixedPrecision(grad=BF16, reduce=FP32),
    "fp16": "fp16",
    "fp16, 16-bit gradients": MixedPrecision(FP16, FP16, None, FP32),
    "bf16-remainder": "bf16-remainder",
    "bf16-remainder, 16-bit gradients": MixedPrecision(grad=BF16, main="remainder"),
}

ELEMENTWISE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2, "t0": 2}),
}
"""Every elementwise class of torch.optim, with options that bring its less usual state into being."""

SCHEDULES = {"one": (1, False), "once per step": (3, False), "every micro-batch": (3, True)}


@dataclass(frozen=True)
class Job:
    """What to train and how, but for the plan. `groups(model)`: param groups; `scale`: the loss scale's policy."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    defaults: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "foreach": False})
    precision: Any = "fp32"
    model: Callable[[], nn.Module] = lambda: Net(blocks=1)
    loss_of: Callable[..., Tensor] = loss_of_tokens
    units: Any = Block
    steps: int = 4
    micro_batches: int = 1
    reduce_every_micro_batch: bool = False
    scale: Any = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None

    def loss(self, model: nn.Module, rank: int, micro_batch: int, step: int) -> Tensor:
        return self.loss_of(model, rank, micro_batch, step, self.micro_batches)

    def scopes(self, handle: zeroshard.Handle) -> list[Any]:
        local = [not self.reduce_every_micro_batch and m < self.micro_batches - 1 for m in range(self.micro_batches)]
        return [handle.no_sync() if is_local else nullcontext() for is_local in local]


@dataclass
class Outcome:
    """What a run leaves. `applied`: which steps were not skipped; `scales`: the loss scale of each."""

    losses: list[float]
    weights: State
    main: State
    applied: list[bool]
    scales: list[float]
    log: CommLog
    norms: list[float] = field(default_factory=list)


def train(job: Job, plan: Plan, rank: int, mesh: Any = None) -> Outcome:
    """Under the engine. Collective."""
    model = make(job.model)
    handle = zeroshard.shard(model, plan, units=job.units, precision=job.precision, mesh=mesh)
    what = handle if job.groups is None else job.groups(model)
    optimizer = zeroshard.ShardedOptimizer(what, job.optimizer, loss_scale=job.scale, **job.defaults)
    losses, applied, scales, norms = [], [], [], []
    for step in range(job.steps):
        optimizer.zero_grad()
        for micro_batch, scope in enumerate(job.scopes(handle)):
            with scope:
                loss = job.loss(model, rank, micro_batch, step)
                optimizer.backward(loss)
            losses.append(loss.item())
        result = optimizer.step()
        applied.append(result.applied)
        scales.append(result.loss_scale)
        norms.append(result.grad_norm)
    weights, main = handle.full_state_dict(), handle.full_state_dict(main=True)
    return Outcome(losses, weights, main, applied, scales, handle.comm_log, norms)


class ScaledReference(Reference):
    """The truth with a loss scale: gradients are those of the loss times the scale; one that is not finite skips."""

    scaler: zeroshard.LossScaler | None = None
    applied = True

    def _update(self, sums: dict[nn.Parameter, Tensor], factor: float) -> None:
        scale = self.scaler.scale if self.scaler is not None else 1.0
        self.applied = all(bool(torch.isfinite(total).all()) for total in sums.values())
        if self.applied:
            super()._update(sums, factor / scale)  # a scale is a power of two here: divided exactly
        if self.scaler is not None:
            self.scaler.update(not self.applied)


def train_reference(job: Job, num_ranks: int) -> list[Outcome]:
    """In one process: what each rank should have seen."""
    model = make(job.model)
    params = None if job.groups is None else job.groups(model)
    reference = ScaledReference(
        model, job.optimizer, num_ranks=num_ranks, precision=job.precision, params=params, **job.defaults
    )
    reference.scaler = zeroshard.LossScaler(job.scale) if job.scale is not None else None
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    applied, scales = [], []
    for step in range(job.steps):
        scale = reference.scaler.scale if reference.scaler is not None else 1.0
        result = reference.step(
            lambda model, rank, m, step=step, scale=scale: job.loss(model, rank, m, step).float() * scale,
            micro_batches=job.micro_batches,
            reduce_every_micro_batch=job.reduce_every_micro_batch,
        )
        applied.append(reference.applied)
        scales.append(scale)
        for rank, of_rank in enumerate(result.losses):
            losses[rank] += [loss / scale for loss in of_rank]
    main = {name: reference.main[p].detach().clone() for name, p in model.state_dict(keep_vars=True).items()}
    return [Outcome(of_rank, reference.state_dict(), main, applied, scales, CommLog()) for of_rank in losses]


def all_plans(rank: int, jobs: Sequence[Job]) -> list[list[Outcome]]:
    return [[train(job, plan, rank) for plan in PLANS] for job in jobs]


def all_references(rank: int, num_ranks: int, jobs: Sequence[Job]) -> list[list[Outcome]]:
    return [train_reference(job, num_ranks) for job in jobs]


def expect_identical(by_plan: Sequence[Outcome], what: object = "") -> None:
    """Weights, main, losses and skips of all plans, bit for bit."""
    for plan, outcome in zip(PLANS[1:], by_plan[1:], strict=True):
        assert same_bits(outcome.weights, by_plan[0].weights), f"{plan} has other weights than DDP: {what}"
        assert same_bits(outcome.main, by_plan[0].main), f"{plan} has another main than DDP: {what}"
        assert (outcome.losses, outcome.applied) == (by_plan[0].losses, by_plan[0].applied), f"{plan}: {what}"


def expect_equal_logs(logs: Sequence[CommLog]) -> None:
    """As `expect_same_logs`; all-to-all messages may differ in size between ranks, but not in number and place."""
    expect_same_logs([_without_sizes(log) for log in logs])


def _without_sizes(log: CommLog) -> CommLog:
    uneven = ("all_to_all",)
    result = CommLog()
    result.entries.extend(e._replace(bytes=0) if e.op in uneven else e for e in log.entries)
    return result


def expect_logs_of_ranks(found: Sequence[Sequence[Sequence[Outcome]]]) -> None:
    """`found[rank][job][plan]`."""
    for of_jobs in zip(*found, strict=True):
        for of_plan in zip(*of_jobs, strict=True):
            expect_equal_logs([outcome.log for outcome in of_plan])


def largest_difference(a: State, b: State) -> float:
    """Relative to the largest value of each tensor, which for these models is about 1."""
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
