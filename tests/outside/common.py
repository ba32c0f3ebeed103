"""Shared by the ports of other libraries' tests: small models, and a plain twin whose gradients are averaged by hand.

The tests of this folder were written for this library. Each one requires what a test of another library requires, which
its docstring names. `docs/compatibility.md` lists all those tests, with ours or with the reason for a difference.
Results are compared to the plain twin in fp64 (`torch.testing.assert_close`: 1e-7), so that the order of sums does not
matter, and bit for bit between the plans.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import plans_of
from zeroshard.placement import Plan

PLANS = plans_of(1)
"""Of tests that do the same under each plan: by default one with weights and gradients in full, and one with both in
shards."""
VOCAB = 23

State = dict[str, Tensor]


class MLP(nn.Module):
    """in_proj, ReLU, out_proj, ReLU, as in most of FSDP2's tests."""

    def __init__(self, dim: int, factor: int = 4, *, bias: bool = True, with_buffer: bool = False) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, factor * dim, bias=bias)
        self.out_proj = nn.Linear(factor * dim, dim, bias=bias)
        if with_buffer:
            self.register_buffer("buffer", torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.out_proj(torch.relu(self.in_proj(x))))


class Block(nn.Module):
    """Attention and a feed-forward part, both with a residual connection."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embeddings, blocks, norm, output. `tied`: the output is the embedding."""

    def __init__(self, layers: int = 3, dim: int = 16, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.output.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def tokens(rank: int, step: int = 0, micro_batch: int = 0, length: int = 5) -> Tensor:
    """Random tokens, different on every rank, in every step and micro-batch."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    return torch.randint(VOCAB, (2, length), generator=generator)


def numbers(width: int, rank: int, step: int = 0, micro_batch: int = 0, rows: int = 4) -> Tensor:
    """Like `tokens`, but normally distributed numbers."""
    generator = torch.Generator().manual_seed(7 + rank + 10 * micro_batch + 100 * step)
    return torch.randn(rows, width, generator=generator)


def in_fp64(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a function that runs on a forked rank: new tensors are fp64 by default."""

    @wraps(fn)
    def run(rank: int, *args: Any, **named: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return fn(rank, *args, **named)

    return run


def average_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Set p.grad to the mean over ranks, as torch DDP does; None where no rank has a gradient."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    counts = torch.tensor([float(parameter.grad is not None) for parameter in trained])
    dist.all_reduce(counts, group=group)
    present = [parameter for parameter, count in zip(trained, counts.tolist(), strict=True) if count]
    for dtype in dict.fromkeys(parameter.dtype for parameter in present):
        alike = [parameter for parameter in present if parameter.dtype == dtype]
        terms = [torch.zeros_like(one) if one.grad is None else one.grad for one in alike]
        total = torch.cat([term.detach().reshape(-1) for term in terms])  # one exchange for all parameters
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)
        for parameter, mean in zip(alike, total.split([one.numel() for one in alike]), strict=True):
            parameter.grad = mean.view_as(parameter)


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def expect_close(found: State, expected: State) -> None:
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected)


def expect_same_bits(states: Iterable[State]) -> None:
    first, *others = states
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


def expect_same_on_all_ranks(state: State, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank has the same bits."""
    for name, value in state.items():
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value.contiguous(), group=group)
        assert all(torch.equal(part, value) for part in parts), name


class Twins:
    """A model under a plan, and a plain copy that trains as under torch DDP. The constructor is collective.

    Args:
        optimizer: the class; `defaults` are its arguments.
        shard: arguments of `zeroshard.shard` besides model and plan.
        groups: model -> param groups; None: all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
        *,
        shard: dict[str, Any] | None = None,
        groups: Callable[[nn.Module], Any] | None = None,
        **defaults: Any,
    ) -> None:
        defaults = defaults or {"lr": 1e-2}
        self.plain, self.model = copy.deepcopy(model), model
        self.handle = zeroshard.shard(model, plan, **(shard or {}))
        of = groups or (lambda model: model.parameters())
        self.plain_optimizer = optimizer(of(self.plain), **defaults)
        self.optimizer = zeroshard.ShardedOptimizer(of(model), optimizer, **defaults)

    def backward(self, loss_of: Callable[[nn.Module], Tensor], *, reduced: bool = True) -> None:
        """Backward of both models; both losses must agree. `reduced=False`: under `no_sync`."""
        expected = loss_of(self.plain)
        expected.backward()
        with nullcontext() if reduced else self.handle.no_sync():
            loss = loss_of(self.model)
            loss.backward()
        torch.testing.assert_close(loss, expected)

    def step(self) -> None:
        average_gradients(self.plain.parameters())
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, loss_of: Callable[[nn.Module, int], Tensor], steps: int = 3 if EVERYTHING else 2) -> State:
        """Train both for `steps` steps with `loss_of(model, step)`. Losses must be equal in each step, and weights at
        the end."""
        for step in range(steps):
            self.backward(lambda model, step=step: loss_of(model, step))
            self.step()
        return self.expect_equal()

    def expect_equal(self) -> State:
        """Check that the weights are equal; returns them."""
        weights = self.handle.full_state_dict()
        expect_close(weights, state_of(self.plain))
        return weights

    def expect_equal_gradients(self) -> None:
        """Check that the gradients before a step are equal; averages the plain ones."""
        average_gradients(self.plain.parameters())
        for name, parameter in self.plain.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(self.handle.gradient(name), parameter.grad)


def under_all_plans(
    rank: int, train: Callable[..., State], num_ranks: int = 2, cases: Iterable[tuple[Any, ...]] | None = None
) -> None:
    """Check that `train(rank, plan)`, in fp64, returns weights with the same bits under DDP and ZERO3, where everything
    is in full and where nothing is. On four ranks it runs under ZERO3 alone; with `make test-everything`, under all
    plans. With `cases`: `train(rank, plan, *case)` for each case, under the case's plans (`plans_of`)."""
    torch.set_default_dtype(torch.float64)
    plans = PLANS if EVERYTHING else (zeroshard.DDP, zeroshard.ZERO3) if num_ranks < 4 else (zeroshard.ZERO3,)
    runs = [((), plans)] if cases is None else [(case, plans_of(number)) for number, case in enumerate(cases)]
    for case, plans in runs:
        states = []
        for plan in plans:
            torch.manual_seed(0)
            states.append(train(rank, plan, *case))
        expect_same_bits(states)
