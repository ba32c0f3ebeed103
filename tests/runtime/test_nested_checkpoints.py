"""Activation checkpoints inside calls of units, and inside one another, with units inside units.

The graph of a backward does not show what a reentrant checkpoint contains, so under ZeRO-3 a unit was reduced although
a checkpoint inside of its call still had gradients for it. The backward then raised. And where a checkpoint contained
nothing but another one, ranks with different graphs gathered units in different orders.
"""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import make, travelling
from tests.patience import HANG
from zeroshard.reference import Reference
from zeroshard.testing import run_ranks

KINDS = (None, False, True)
"""None: no checkpoint; else `use_reentrant`."""


def run(kind: bool | None, part: Any, x: Tensor) -> Any:
    return part(x) if kind is None else checkpoint(part, x, use_reentrant=kind)


class Part(nn.Module):
    """`inner`: a checkpoint around all but `before`, in its own forward; `last`: whether `before` runs after that."""

    def __init__(self, inner: bool | None, last: bool) -> None:
        super().__init__()
        self.before, self.norm, self.scale = nn.Linear(4, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))
        self.inner, self.last = inner, last

    def body(self, x: Tensor) -> Any:
        return self.norm(torch.tanh(x)) * self.scale

    def forward(self, x: Tensor) -> Any:
        y = run(self.inner, self.body, x if self.last else self.before(x))
        return x + y + self.before(x) if self.last else x + y


class Outer(Part):
    """`around`: a checkpoint around each part inside."""

    def __init__(self, inner: bool | None, around: bool | None, inner_of_parts: bool | None, last: bool) -> None:
        super().__init__(inner, last)
        self.parts, self.around = nn.ModuleList(Part(inner_of_parts, last) for _ in range(2)), around

    def body(self, x: Tensor) -> Any:
        for part in self.parts:
            x = run(self.around, part, x)
        return super().body(x)


class Outermost(Outer):
    """With another outer part inside, in a recomputation that comes before that of its other part."""

    def __init__(self, inner: bool | None, around: bool | None, inner_of_parts: bool | None, last: bool) -> None:
        super().__init__(inner_of_parts, None, None, last)
        self.parts = nn.ModuleList([Outer(inner, around, None, last), Part(inner, last)])


def build(of: type[Outer], kinds: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), of(*kinds), nn.Linear(4, 4))


def inputs_of(rank: int) -> Tensor:
    return torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(rank))


def in_one_process(num_ranks: int, of: type[Outer], kinds: Any) -> list[Tensor]:
    inputs = [inputs_of(rank) for rank in range(num_ranks)]
    reference = Reference(build(of, kinds), torch.optim.SGD, num_ranks=num_ranks, lr=0.1)
    for step in range(2):
        reference.step(lambda model, rank, _, step=step: model(inputs[rank][2 * step]).square().mean())
    return list(reference.state_dict().values())


def trained(rank: int, units: Any, of: type[Outer], kinds: Any) -> list[Tensor]:
    model = build(of, kinds)
    handle = zeroshard.shard(model, "zero3", units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    inputs = inputs_of(rank)
    for step in range(2):
        model(inputs[2 * step]).square().mean().backward()
        with torch.no_grad():  # an evaluation, which no backward comes to
            model(inputs[2 * step + 1])
        optimizer.step()
        optimizer.zero_grad()
    return list(handle.full_state_dict().values())


class Directly(nn.Module):
    """A checkpoint that contains nothing but another one, in front of parts whose results one rank may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.behind = (nn.ModuleList(nn.Linear(4, 4) for _ in range(n)) for n in (1, 2, 3))

    def body(self, x: Tensor, depth: int) -> Any:
        if depth:
            return checkpoint(self.body, x, depth - 1, use_reentrant=True)
        for part in self.inside:
            x = torch.tanh(part(x))
        return x

    def forward(self, x: Tensor, *, uses_all: bool) -> Any:
        x = y = self.body(self.first[0](x), 2)
        for part in self.behind:
            y = torch.tanh(part(y))
        return y if uses_all else x


def of_ranks_that_differ(rank: int, plan: str) -> list[Tensor]:
    torch.manual_seed(0)
    handle = zeroshard.shard(model := Directly(), plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    inputs = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        model(inputs[step], uses_all=step == 1 or rank == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(handle.full_state_dict().values())


def selected(ranks: int) -> list[tuple[Any, ...]]:
    """The cases for so many ranks: all ways in which checkpoints contain one another, each on two ranks or on three,
    and with `before` in front or behind. (`make test-everything`: both, and both.)"""
    every = [case for case in product(KINDS, KINDS, KINDS, (False, True)) if True in case[:3]]
    if EVERYTHING:
        return every
    chosen = [case for case in every if sum(map(KINDS.index, case[:3])) % 2 == case[3]]
    return [case for number, case in enumerate(chosen) if number // 2 % 2 == ranks % 2]


def check(rank: int, ranks: int) -> list[list[Tensor]]:
    """The weights, which are those of one process."""
    results = []
    # A checkpoint inside of a reentrant one is first called without grad.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    units = (Outer,), (Part,), (Outer, Part), (Outer, nn.Linear)
    for number, kinds in enumerate(selected(ranks)):
        models = ((Outer, units[number // 2 % 4]), (Outermost, (Outer, Part)))
        for of, chosen in models if EVERYTHING or ranks == 2 else models[number % 2 :][:1]:  # on three: in turn
            with travelling("pairwise" if number % 3 else "shared"):
                results.append(trained(rank, chosen, of, kinds))
            if rank == 0:
                assert all(map(torch.equal, results[-1], in_one_process(ranks, of, kinds))), (of, chosen, kinds)
    expected = of_ranks_that_differ(rank, "ddp")
    for way in ("shared", "pairwise"):
        # A rank that has not come to the last parts visits them before the recomputation, as its peers have.
        with travelling(way):
            assert all(map(torch.equal, of_ranks_that_differ(rank, "zero3"), expected)), way
    return results


def test_checkpoints_inside_units_and_inside_one_another() -> None:
    for ranks in (2, 3):
        first, *others = run_ranks(check, ranks, ranks, collective_timeout=HANG)
        assert all(all(map(torch.equal, *both)) for found in others for both in zip(found, first, strict=True))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Half(), Half()

    def forward(self, x: Tensor) -> Any:
        return Both.apply(x, self)


class Both(torch.autograd.Function):
    """Computes the input of a reversible layer from its output, and runs both halves again, in two backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Reversible) -> Tensor:
        a, b = x.chunk(2, -1)
        c = a + layer.f(b)
        ctx.layer, ctx.y = layer, torch.cat((c, b + layer.g(c)), -1)
        return torch.cat((ctx.y,))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (c, d), (of_c, of_d) = ctx.y.chunk(2, -1), grad.chunk(2, -1)
        with torch.enable_grad():
            c = c.detach().requires_grad_()
            (out := ctx.layer.g(c)).backward(of_d)
        b, of_c = d - out.detach(), of_c + c.grad
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            ctx.layer.f(b).backward(of_c)
        return torch.cat((of_c, of_d + b.grad), -1), None


def test_a_unit_with_parts_of_two_halves_of_a_reversible_layer() -> None:
    """The error named checkpoints only, and its remedy is the class of the layer."""

    def train(rank: int, units: Any) -> bool:
        same = []
        model, plain = (make(lambda: nn.Sequential(nn.Linear(8, 8), Reversible())) for _ in range(2))
        handle = zeroshard.shard(model, "zero3", units=units)
        for one in (model, plain):
            one(torch.ones(2, 8)).square().sum().backward()
        for name, parameter in plain.named_parameters():
            same.append(torch.equal(handle.gradient(name), parameter.grad))  # type: ignore[arg-type]
        return all(same)

    assert all(run_ranks(train, 2, Reversible))
    with pytest.raises(RuntimeError, match=r"in parts of a reversible layer.* class of the modules that are"):
        run_ranks(train, 2, [("1.f.linear", "1.g.norm"), ("1.f.norm", "1.g.linear")])
