"""Shared by the parity tests: a small model, jobs with every option, and comparisons with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests import kit
from tests.grids import EVERYTHING
from tests.kit import PLANS, Net, Outcome, beside_one_process, same_bits, train, train_reference
from zeroshard.comm.comm_log import CommLog
from zeroshard.placement import Plan
from zeroshard.precision import MixedPrecision
from zeroshard.testing import expect_same_logs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "fp32, 16-bit gradients": MixedPrecision(FP32, BF16, None, FP32),
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
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
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
"""Every elementwise class of torch.optim, with options that make it keep its less common state."""


@dataclass(frozen=True)
class Job(kit.Job):
    """A job with a small model, as these tests have many jobs. Its outcome includes main."""

    model: Callable[[], nn.Module] = lambda: Net(blocks=1)
    steps: int = 4 if EVERYTHING else 2
    main: bool = True


def all_plans(rank: int, jobs: Sequence[Job]) -> list[list[Outcome]]:
    return [[train(job, plan, rank) for plan in PLANS] for job in jobs]


def all_references(rank: int, num_ranks: int, jobs: Sequence[Job]) -> list[list[Outcome]]:
    return [train_reference(job, num_ranks) for job in jobs]


def expect_identical(by_plan: Sequence[Outcome], what: object = "") -> None:
    """Weights, main, losses and skips of all plans are equal, bit for bit."""
    for plan, outcome in zip(PLANS[1:], by_plan[1:], strict=True):
        assert same_bits(outcome.weights, by_plan[0].weights), f"{plan} has other weights than DDP: {what}"
        assert same_bits(outcome.main, by_plan[0].main), f"{plan} has another main than DDP: {what}"
        assert (outcome.losses, outcome.applied) == (by_plan[0].losses, by_plan[0].applied), f"{plan}: {what}"


def as_one_process(runs: Sequence[tuple[Job, Plan]], num_ranks: int, names: Sequence[object] = ()) -> list[Outcome]:
    """Train each job under its plan, all in the same ranks. Every rank must have the losses, skips, scales and bits of
    one process, and all ranks the same log. A job in several runs has one reference. Returns rank 0's outcomes."""
    jobs = list({id(job): job for job, _ in runs}.values())
    references, found = beside_one_process(
        lambda: all_references(0, num_ranks, jobs),
        lambda rank: [train(job, plan, rank) for job, plan in runs],
        num_ranks,
    )
    expected = {id(job): of_ranks for job, of_ranks in zip(jobs, references, strict=True)}
    for index, (job, plan) in enumerate(runs):
        what = (plan, names[index] if names else job)
        for rank in range(num_ranks):
            one, truth = found[rank][index], expected[id(job)][rank]
            assert (one.applied, one.scales, one.losses) == (truth.applied, truth.scales, truth.losses), what
            assert same_bits(one.weights, truth.weights), what
            assert same_bits(one.main, truth.main), what
        expect_equal_logs([of_rank[index].log for of_rank in found])
    return found[0]


def expect_equal_logs(logs: Sequence[CommLog]) -> None:
    """Like `expect_same_logs`, but the sizes of all-to-all messages may differ between ranks."""
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
