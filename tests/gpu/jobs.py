"""The jobs that `make test-gpu` trains, and the comparison with one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import zeroshard
from tests.gpu.checks import Checks
from tests.kit import PLANS, Counting, Job, Net, Outcome, loss_of_integers, same_bits, train, train_reference
from zeroshard.precision import MixedPrecision

BF16, FP32 = torch.bfloat16, torch.float32


class Matrices(nn.Module):
    """Matrices only, as Muon takes no vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 24)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((24, 40), (40, 24), (24, 23)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x)) if layer is not self.layers[-1] else layer(x)
        return x


def partly_frozen() -> nn.Module:
    """Every unit trains, but only in part, so that portions of it are gathered and reduced."""
    model = Net()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    return model


def partly_counting() -> nn.Module:
    """The same, for exact sums: over NCCL each portion has a `reduce` and a `broadcast` of its own."""
    model = Counting()
    model.left.requires_grad_(False)
    model.right.bias.requires_grad_(False)
    return model


JOBS: dict[str, Job] = {
    "fp32": Job(),
    "bf16, 3 micro-batches": Job(precision="bf16", micro_batches=3, main=True),
    "bf16 with remainder": Job(precision="bf16-remainder", main=True),
    "16-bit gradients summed in fp32": Job(precision=MixedPrecision(grad=BF16, reduce=FP32)),
    "fp16, scaled": Job(precision="fp16", scale=zeroshard.ConstantScale(2.0**10)),
    "whole parameters (Muon)": Job(torch.optim.Muon, {"lr": 0.02}, model=Matrices, units=nn.Linear),
    "partly frozen": Job(model=partly_frozen),
    "tied, SGD": Job(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, model=lambda: Net(tied=True)),
}
"""Each is compared with one process, bit for bit: with SGD in this order of sums, and norms that clip nothing."""

EXACT: dict[str, Job] = {
    f"{precision}, reduced 3 times": Job(
        model=Counting,
        loss_of=loss_of_integers,
        units=2000,
        precision=precision,
        micro_batches=3,
        reduce_every_micro_batch=True,
    )
    for precision in ("fp32", "bf16")
} | {"partly frozen, exact": Job(model=partly_counting, loss_of=loss_of_integers, units=1 << 20)}
"""Gradients are integers, so sums are exact in any order: NCCL may choose one."""

FEW = ("fp32", "bf16 with remainder", "whole parameters (Muon)")
"""The jobs that cover most code, where each takes long."""


def references(rank: int, jobs: Mapping[str, Job], num_ranks: int) -> dict[str, list[Outcome]]:
    """Job -> the outcome that each rank should have."""
    return {name: train_reference(job, num_ranks) for name, job in jobs.items()}


def under_all_plans(rank: int, jobs: Mapping[str, Job]) -> dict[str, list[Outcome]]:
    """Job -> the outcome under each plan. Collective."""
    return {name: [train(job, plan, rank) for plan in PLANS] for name, job in jobs.items()}


def compare(
    checks: Checks,
    where: str,
    found: Sequence[Mapping[str, Sequence[Outcome]]],
    expected: Mapping[str, Sequence[Outcome]],
) -> None:
    """Each job under each plan has the losses and the bits of one process, on every rank. `found`: by rank."""
    for name, of_ranks in expected.items():
        wrong = [
            f"{plan}, rank {rank}: {difference}"
            for rank, truth in enumerate(of_ranks)
            for plan, one in zip(PLANS, found[rank][name], strict=True)
            if (difference := difference_of(one, truth))
        ]
        checks.expect(f"{where}, {name}: {len(PLANS)} plans have the bits of one process", not wrong, "; ".join(wrong))


def difference_of(found: Outcome, truth: Outcome) -> str:
    """What differs, in words; "" if nothing does."""
    if found.losses != truth.losses:
        step = next(i for i, (a, b) in enumerate(zip(found.losses, truth.losses, strict=True)) if a != b)
        return f"loss {step} is {found.losses[step]!r} instead of {truth.losses[step]!r}"
    for what, mine, theirs in (("weights", found.weights, truth.weights), ("main", found.main, truth.main)):
        if not same_bits(mine, theirs):
            names = [name for name in theirs if not same_bits({name: mine[name]}, {name: theirs[name]})]
            worst = max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in names)
            return f"the {what} of {', '.join(names[:3])} differ, by up to {worst:.1e}"
    return ""
