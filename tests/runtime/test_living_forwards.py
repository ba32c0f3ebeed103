"""Several forwards before their backwards, in any order, where each rank uses other parameters.

Under ZeRO-3 a backward of an older forward knew only its rank's own graph. A rank without a gradient for a unit reduced
it at the end, while its peers waited for that before the next gather: all waited until the timeout.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import travelling
from tests.patience import HANG
from zeroshard.testing import RankError, run_ranks


class Layer(nn.Module):
    """With a gate and a layer inside that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.gate = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.gated = self.used = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.map(x))
        return x if not self.used else y * self.gate if self.gated else y


class Net(nn.Module):
    """`times`: how often the layers run in one forward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.embed, self.layers, self.times = nn.Linear(4, 4), nn.ModuleList(Layer() for _ in range(5)), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in [*self.layers] * self.times:
            x = layer(x)
        return x


def forward(model: Any, rank: int, number: int, *, of_parts: bool = False) -> Tensor:
    chance = random.Random(f"{rank} {number}")
    for layer in model.layers:
        layer.gated, layer.used = chance.random() < 0.5, chance.random() < 0.7
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    for part in [model.embed, *model.layers] if of_parts else [model]:
        x = part(x)
    return x.square().mean()


ORDERS = [(0, 1), (1, 0), *permutations(range(3))] if EVERYTHING else [(1, 0), (0, 2, 1), (2, 0, 1)]
"""By default the newest of two first; of three, each is the first, the second or the last to go, beside others."""


def in_orders(model: Any, rank: int) -> None:
    for start, order in enumerate(ORDERS):
        losses = [forward(model, rank, 3 * start + number) for number in range(len(order))]
        for number in order:
            losses[number].backward()


def of_parts(model: Any, rank: int) -> None:
    losses = [forward(model, rank, number, of_parts=True) for number in range(2)]
    for loss in reversed(losses):
        loss.backward()


def retained(model: Any, rank: int) -> None:
    losses = [forward(model, rank, number) for number in range(3)]
    (losses[0] + losses[2]).backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()


def interleaved(model: Any, rank: int) -> None:
    """Each backward is that of the forward before the last one."""
    losses = [forward(model, rank, 0)]
    for number in range(1, 4):
        losses.append(forward(model, rank, number))
        losses.pop(0).backward()


def left_out(model: Any, rank: int) -> None:
    """The loss of one rank depends on one of the forwards only."""
    losses = [forward(model, rank, number) for number in range(3)]
    sum(loss if rank != 1 or number == 2 else loss.detach() for number, loss in enumerate(losses)).backward()  # type: ignore[union-attr]


def in_pairs(model: Any, rank: int) -> None:
    """A later backward comes to two forwards that had none, or to one and a new one."""
    losses = [forward(model, rank, number) for number in range(3)]
    losses[1].backward()
    (losses[0] + losses[2]).backward()
    losses = [forward(model, rank, number) for number in range(3, 6)]
    losses[2].backward()
    (losses[0] + forward(model, rank, 6)).backward()
    losses.append(forward(model, rank, 7))
    losses[1].backward()


def with_a_new_one(model: Any, rank: int) -> None:
    """A later backward comes to a new forward, and to one that has had a backward alone."""
    for number in (0, 2):
        first = forward(model, rank, number)
        for _ in range(1 + number // 2):
            first.backward(retain_graph=True)
        (first + forward(model, rank, number + 1)).backward(retain_graph=True)
        (first + forward(model, rank, number + 10)).backward()


LOOPS: tuple[Callable[[Any, int], None], ...] = (in_orders, of_parts, retained, interleaved, left_out)


def trained(rank: int, plan: str, loop: Callable[[Any, int], None], units: Any, times: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(times)
    handle = zeroshard.shard(model, plan, units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    loop(model, rank)
    optimizer.step()
    return list(handle.full_state_dict().values())


UNITS = (60, 200, nn.Linear, Layer, (Layer, nn.Linear))


def check(rank: int, ranks: int) -> None:
    """By default a third of the cases on two ranks; on three, every loop and every choice of units once."""
    for number, (loop, units) in enumerate(product(LOOPS, UNITS)):
        if not EVERYTHING and number % {2: 3, 3: 6}[ranks] != {2: 2, 3: 0}[ranks]:
            continue
        times = 1 + (units is Layer)
        expected = trained(rank, "ddp", loop, units, times)
        for plan in ("zero3", "zero2")[: 1 + (number % 5 == 0)]:
            with travelling("pairwise" if number % 2 else "shared"):
                found = trained(rank, plan, loop, units, times)
            assert all(map(torch.equal, found, expected)), (plan, loop.__name__, units)


def test_every_order_of_backwards_trains_as_with_whole_weights() -> None:
    for ranks in (2, 3):
        run_ranks(check, ranks, ranks, collective_timeout=HANG)


def test_a_later_backward_of_two_forwards() -> None:
    """It knew only the one that it had reached: what the other had to come was not waited for."""

    def check(rank: int, ranks: int) -> None:
        for loop in (in_pairs, with_a_new_one):
            expected = trained(rank, "ddp", loop, Layer, 1)
            for way in ("shared", "pairwise", "native"):
                with travelling(way):
                    assert all(map(torch.equal, trained(rank, "zero3", loop, Layer, 1), expected)), (way, loop)

    run_ranks(check, 2, 2, collective_timeout=HANG)


def retained_on_one(rank: int, news: int) -> None:
    zeroshard.init()
    handle = zeroshard.shard(model := Net(1), "zero3", units=Layer)
    _optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    forward(model, rank, 0).backward(retain_graph=rank == 0)
    losses = [forward(model, rank, number + 1) for number in range(news)]
    losses[0].backward()


@pytest.mark.by_gloo
@pytest.mark.parametrize("news", [1, 2])
def test_a_graph_that_one_rank_has_retained(news: int) -> None:
    """The ranks agree on what may come only if they know that any may: all of them have retained, or have several new
    forwards. They waited for each other, or it said that ranks bring different numbers of bytes."""
    with pytest.raises(RankError, match="after one with retain_graph=True, which all ranks must give") as found:
        run_ranks(retained_on_one, 2, news)  # the timeout is five minutes
    assert news == 2 or "add 0 * output.sum()" in found.value.text


class Ahead(nn.Module):
    """`last` runs behind the modules inside, and is reduced behind them, as it is registered before. Rank 1 leaves out
    what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.inside = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        for part in self.inside:
            x = x + part(x).tanh()
        y = x + self.last(x).tanh()
        return x if self.leaves_out else y


def with_modules_ahead(rank: int, plan: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Ahead(), Ahead(), nn.Linear(4, 4), nn.Linear(4, 4))
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for step in range(3):
        for block in model[:2]:
            block.leaves_out = rank == 1 and step != 1
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    return list(handle.full_state_dict().values())


def test_a_rank_without_a_gradient_reads_what_a_bucket_of_its_peers_waits_for() -> None:
    """In shared memory its peers waited for that with the gradient, and it for their next gather."""

    def check(rank: int) -> None:
        expected = with_modules_ahead(rank, "ddp")
        for way in ("shared", "pairwise", "native"):
            with travelling(way):
                assert all(map(torch.equal, with_modules_ahead(rank, "zero3"), expected)), way

    run_ranks(check, 2, collective_timeout=HANG)


class Slow(nn.Linear):
    """Rank 1 comes late to it in backward."""

    used = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) if self.used else x * 1
        if torch.distributed.get_rank() == 1:
            y.register_hook(lambda grad: time.sleep(0.05))
        return y.tanh()


def with_a_local_micro_batch(rank: int, plan: str, *, recomputes: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList(Slow(4, 4) for _ in range(5))
    handle = zeroshard.shard(model, plan, units=Slow)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)

    def first(x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = model[index](x)
        return x.tanh()

    def backward(*order: int) -> None:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        x = checkpoint(first, x, order, use_reentrant=False) if recomputes else first(x, order)
        model[4](model[3](x)).square().mean().backward()

    for _ in range(2):
        model[3].used = rank == 0
        with handle.no_sync():
            backward(0, 1, 2)
        model[3].used = True
        backward(0, 2, 1)
        optimizer.step(), optimizer.zero_grad()
    return list(handle.full_state_dict().values())


def test_a_rank_with_a_gradient_of_an_earlier_micro_batch_reads_as_well() -> None:
    """It needs no bucket for it, and went on to a gather; a peer without one waited for a bucket that it had not
    read."""

    def check(rank: int) -> None:
        for recomputes in (False, True):
            expected = with_a_local_micro_batch(rank, "ddp", recomputes=recomputes)
            for way in ("shared", "pairwise", "native"):
                with travelling(way):
                    found = with_a_local_micro_batch(rank, "zero3", recomputes=recomputes)
                assert all(map(torch.equal, found, expected)), (way, recomputes)

    run_ranks(check, 2, collective_timeout=HANG)
