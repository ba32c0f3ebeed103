"""Modules that return views of their weights: learned queries (`expand`), positions (a slice), a transposed table.

Under ZeRO-3 other units then use the memory of those weights, while the caller still reads the views, and autograd has
saved them. The losses were wrong, without an error, wherever ranks do not share memory. A weight itself (`return out,
self.bias`) raised when the caller used it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Job, beside_one_process, make, same_bits, train, train_reference, travelling
from tests.together import on_ranks
from zeroshard.runtime import schedule
from zeroshard.testing import run_ranks

WIDTH, BLOCKS = 8, 4


@dataclass(frozen=True)
class Result:
    value: Tensor


class Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


VIEWS: dict[str, Callable[[nn.Parameter], Any]] = {
    "a slice": lambda weight: weight[:4],
    "expanded": lambda weight: weight.unsqueeze(0).expand(4, -1, -1)[:, 1],
    "transposed": lambda weight: weight.t()[:4],
    "detached": lambda weight: weight.detach()[:4],
    "data": lambda weight: weight.data[:4],
    "in a tuple": lambda weight: (weight[0], weight[:4])[1:],
    "twice in a dict": lambda weight: dict.fromkeys("ab", weight[:4]),
    "in a dataclass": lambda weight: Result(weight[:4]),
    "itself": lambda weight: weight,
    "itself in a tuple": lambda weight: (weight,),
}


def tensor_in(result: Any) -> Tensor:
    if isinstance(result, dict):
        assert result["a"] is result["b"]
        return result["a"] + result["b"]
    return result.value if isinstance(result, (Result, Holder)) else result[0] if isinstance(result, tuple) else result


class Table(nn.Module):
    def __init__(self, view: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.view = view

    def forward(self) -> Any:
        return self.view(self.weight)

    def rows(self) -> Any:
        return self.view(self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """The first block saves the first view for backward; the second one is used behind every block."""

    def __init__(self, view: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.first, self.second = Table(view), Table(view)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        first, second = tensor_in(self.first())[:4], tensor_in(self.second())[:4]
        h = self.blocks[0](first)
        for block in self.blocks[1:]:
            h = block(h) * second
        return h * x


UNITS = (Block, Table)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * step))


def loss_of(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    out: Tensor = model(data(rank, step))
    return out.square().mean()


def job(name: str) -> Job:
    return Job(model=partial(Model, VIEWS[name]), units=UNITS, loss_of=loss_of)


@pytest.mark.by_cpu
def test_they_keep_their_values() -> None:
    """By default every third view under ZERO2 as well."""
    plans = {name: PLANS[2 if EVERYTHING or at % 3 == 0 else 3 :] for at, name in enumerate(VIEWS)}

    def of_rank(rank: int) -> Any:
        with travelling("pairwise"):
            return {name: [train(job(name), plan, rank) for plan in plans[name]] for name in VIEWS}

    truth, ranks = beside_one_process(lambda: {name: train_reference(job(name), 2) for name in VIEWS}, of_rank, 2)
    for name in VIEWS:
        for outcome, of_rank_found in zip(truth[name], ranks, strict=True):
            for plan, found in zip(plans[name], of_rank_found[name], strict=True):
                assert found.losses == outcome.losses, (name, plan)
                assert same_bits(found.weights, outcome.weights), (name, plan)


@pytest.mark.parametrize("view", ["a slice", "itself"])
@pytest.mark.parametrize("way", ["shared", "pairwise"])
@on_ranks(2)
def test_without_gradients_recomputed_and_by_a_method(rank: int, way: str, view: str) -> None:
    """Where the memory of the weights is the same for all ranks, too."""
    with travelling(way):
        model, plain = (make(partial(Model, VIEWS[view])) for _ in range(2))
        handle = zeroshard.shard(model, "zero3", units=UNITS)
        handle.register_forward_method(model.second, "rows")
        with torch.no_grad():
            assert torch.equal(model(data(rank, 0)), plain(data(rank, 0)))
            kept, expected = model.second.rows(), plain.second.rows()
            assert torch.equal(model(data(rank, 1)), plain(data(rank, 1)))
        assert torch.equal(kept, expected)
        for one in (model, plain):
            checkpoint(one, data(0, 0), use_reentrant=False).square().mean().backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(handle.gradient(name), parameter.grad), name


@on_ranks(2)
def test_one_that_cannot_be_replaced_raises(rank: int) -> None:
    model = Model(lambda weight: Holder(weight[:4]))
    zeroshard.shard(model, "zero3", units=UNITS)
    with pytest.raises(RuntimeError, match=r"unit first: its forward returns a view of a weight inside of an object"):
        model(data(rank, 0))


@on_ranks(2)
def test_no_copies_where_none_are_needed(rank: int) -> None:
    """Inside of a scope, and under plans that keep the weights in full; and of results that are no views."""
    returned: list[Tensor] = []

    def view(weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        returned.append(2 * weight)
        return weight[:4], returned[-1]

    for plan in ("zero2", "zero3"):
        model = Model(view)
        handle = zeroshard.shard(model, plan, units=UNITS)
        assert model.first()[1] is returned[-1]
        with handle.unsharded():
            assert model.first()[0].data_ptr() == model.first.weight.data_ptr()


def test_they_depend_on_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(rank: int) -> float:
        with travelling("pairwise"):
            model = make(partial(Model, VIEWS["a slice"]))
            zeroshard.shard(model, "zero3", units=UNITS)
            return loss_of(model, rank, 0, 0, 1).item()

    right = run_ranks(loss, 2)
    monkeypatch.setattr(schedule, "without_views", lambda output, units: output)
    assert run_ranks(loss, 2) != right


class Keeping(Table):
    def forward(self) -> dict[str, Tensor]:
        self.kept = {"rows": self.weight[:4]}
        return self.kept


@on_ranks(2)
def test_a_dict_that_the_module_keeps_stays_the_same_object(rank: int) -> None:
    """The caller got a copy of the dict, and what it added there was lost, in silence."""
    model = nn.ModuleDict({"table": Keeping(VIEWS["a slice"]), "block": Block()})
    zeroshard.shard(model, "zero3", units=UNITS)
    found = model["table"]()
    found["more"] = found["rows"] + 1
    assert model["table"].kept is found


DETACHED: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data[2:5],
    "transposed": lambda weight: weight.t().detach(),
    "in halves": lambda weight: weight.detach().view(torch.int16)[1:, 3:],
    "conjugate": lambda weight: torch.view_as_complex(weight.detach().view(-1, WIDTH // 2, 2))[1:].conj(),
    "negative": lambda weight: torch.view_as_complex(weight.detach().view(-1, WIDTH // 2, 2)).conj().imag,
}


class Shows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Keeps(Block):
    """Keeps a weight that autograd does not follow: in every forward, or in the first one."""

    kept: Any = None

    def __init__(self, how: str, where: str) -> None:
        super().__init__()
        self.view, self.where, self.shows = DETACHED[how], where, Shows()
        self.seen: list[Tensor] = []  # by a hook
        if where == "hook":
            self.shows.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor, into: dict[str, Tensor]) -> Tensor:
        view = self.view(self.linear.weight)
        if self.where == "input":
            into[str(len(into))] = view
        elif self.where == "hook":
            self.shows(view)
        elif self.where == "buffer":
            self.register_buffer("of_weight", view, persistent=False)
        elif self.where == "attribute" or self.kept is None:
            self.kept = [view]
        return super().forward(x)


def sum_of_cubes(view: Tensor) -> Tensor:
    return view.double().pow(3).sum() if not view.is_complex() else view.cdouble().pow(3).sum()


def losses_of_kept(plan: str, how: str, where: str, way: str) -> list[float]:
    with travelling(way):
        model = make(lambda: nn.ModuleList(Keeps(how, where) for _ in range(BLOCKS)))
        handle = zeroshard.shard(model, plan, units=Keeps)
        optimizer, losses = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1), []
        for step in range(2):
            x, into = data(0, step), dict[str, Tensor]()
            for block in model:
                x = block(x, into)
            kept = [*into.values()] or [(block.kept or block.seen[-1:] or [*block.buffers()])[0] for block in model]
            losses.append((x.square().mean() + sum(sum_of_cubes(one) for one in kept)).item())
            optimizer.backward(x.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return losses


def ways_of(number: int) -> list[tuple[str, str]]:
    """Plans and transports: of ZERO2, whose weights stay; of ZERO3 without shared memory; every third time with it."""
    return [("zero2", "pairwise"), ("zero3", "pairwise"), ("zero3", "shared")][
        : 3 if EVERYTHING or number % 3 == 0 else 2
    ]


KEPT_WHERE = ["attribute", "attribute, once", "buffer", "input", "hook"]


@pytest.mark.by_cpu
@pytest.mark.parametrize("where", KEPT_WHERE)
@on_ranks(2)
def test_kept_weights_that_autograd_does_not_follow(rank: int, where: str) -> None:
    """Where ranks share no memory, they had the values of other units, in silence; and those of the first step, if they
    are of another dtype, or negative."""
    for number, how in enumerate(DETACHED, KEPT_WHERE.index(where)):
        expected, *found = [losses_of_kept(plan, how, where, way) for plan, way in ways_of(number)]
        assert all(one == expected for one in found), how


MODES: dict[str, Callable[[], Any]] = {"without gradients": torch.no_grad, "in inference mode": torch.inference_mode}


class Evaluated(Block):
    """Keeps views of a weight, also of the first forward, which is an evaluation, for a training forward."""

    first: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = {"rows": [self.linear.weight[:3]]}
        if self.first is None:
            self.first = self.linear.weight.detach()[0]
        return super().forward(x) * self.first


class Acts(Block):
    """An actor: keeps the distribution of its actions, or returns it, whose scale is a view of a weight."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.scale, self.returns = nn.Parameter(torch.rand(WIDTH) + 1), returns

    def forward(self, x: Tensor) -> Any:
        self.actions = Independent(Normal(super().forward(x), self.scale), 1)
        return self.actions if self.returns else self.actions.mean.detach()


def losses_of_evaluated(plan: str, way: str, block: Callable[[], nn.Module], mode: str) -> list[float]:
    """Of evaluations, of what they left in attributes, and of training steps."""
    with travelling(way):
        model = make(lambda: nn.ModuleList(block() for _ in range(BLOCKS)))
        handle = zeroshard.shard(model, plan, units=type(model[0]))
        optimizer, losses = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1), []
        for step in range(2):
            with MODES[mode]():
                losses += [value.item() for value in values_left(model, data(0, step))]
            loss = sum(values_left(model, data(0, step)), torch.zeros(()))
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses


def values_left(model: Any, x: Tensor) -> list[Tensor]:
    for one in model:
        found = one(x)
        x = found if isinstance(found, Tensor) else found.mean
    if isinstance(model[0], Acts):
        return [-one.actions.log_prob(torch.ones(WIDTH)).mean() for one in model]
    return [x.square().mean(), *(one.kept["rows"][0].square().sum() for one in model)]


@pytest.mark.by_cpu
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_what_an_evaluation_leaves_in_attributes(rank: int, mode: str) -> None:
    """Views had the values of other units, in silence; distributions also in training, where backward raised."""
    blocks = (Evaluated, partial(Acts, returns=False), partial(Acts, returns=True))
    for number, block in enumerate(blocks, [*MODES].index(mode)):
        expected, *found = [losses_of_evaluated(plan, way, block, mode) for plan, way in ways_of(number)]
        assert all(one == expected for one in found), block


class Leaves(Block):
    """Leaves a view of a weight of another module beside its output."""

    view: Any = None

    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> Tensor:
        view = self.linear.weight.t()[:3]
        if into is None:
            self.view = {"of the weight": [view]}
        else:
            into.append(view)
        return super().forward(x)


def gradients_through_views(plan: str, how: str, way: str) -> dict[str, Tensor]:
    with travelling(way):
        model = make(lambda: nn.ModuleList(Leaves() for _ in range(BLOCKS)))
        handle = zeroshard.shard(model, plan, units=Leaves)
        x, into = data(0, 0), list[Tensor]()
        if how.startswith("block"):
            with handle.unsharded():
                views = [one.linear.weight.t()[:3] for one in model]
        else:
            for one in model:
                x = one(x, into if how.startswith("input") else None)
            views = into or [one.view["of the weight"][0] for one in model]
            assert all(view._base is None for view in views) == (plan == "zero3")
        scales = torch.arange(1.0, WIDTH + 1)
        used = [view.square() * scales if how.endswith("saved") else view * scales for view in views]
        (torch.stack(used).sum() + x.sum() * 0).backward()
        return {name: handle.gradient(name) for name, _ in model.named_parameters() if name.endswith("linear.weight")}


WAYS_LEFT = [f"{where}{saved}" for where in ("attribute", "input", "block") for saved in ("", ", saved")]


@pytest.mark.by_cpu
@on_ranks(2)
def test_views_that_are_left_elsewhere_and_used_while_weights_are_hidden(rank: int) -> None:
    """In an attribute or an input they had the values of another unit, and behind a block no gradient, in silence."""

    for number, how in enumerate(WAYS_LEFT):
        expected, *found = [gradients_through_views(plan, how, way) for plan, way in ways_of(number // 2 + number % 2)]
        assert all(gradient.abs().sum() > 0 for gradient in expected.values()), how
        for one in found:
            assert all(torch.equal(one[name], expected[name]) for name in expected), how


KEPT: list[Tensor] = []
"""Not in an attribute or an input, where they would be found."""


class Rows(nn.Module):
    """Is called inside of a unit, and returns views of its weight."""

    def __init__(self, *, several: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, WIDTH))
        self.several = several

    def forward(self) -> tuple[Tensor, ...]:
        return self.weight.chunk(2) if self.several else (self.weight[:4],)


class Given(nn.Module):
    """A unit. `view`: of a weight of the model around it."""

    kept: Any = None
    kept_of_root: Any = None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.rows, self.same = Rows(several="several" in how), nn.Identity()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        row = self.same(self.rows()[0])[:4]
        if self.how.startswith("attribute") and self.kept is None:  # in the first step only
            self.kept = self.rows() if "several" in self.how else self.linear.weight.t()
        elif self.how == "left by the model":
            self.kept_of_root = view
        elif self.how == "list":
            KEPT.append(self.rows.weight[1:5])
        weight = self.kept if isinstance(self.kept, Tensor) else self.linear.weight.t()
        return torch.tanh(x @ weight + row) + self.same(view)


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Given(how) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.weight.t()[:4])
        return x


def keep_outputs(model: Around, how: str) -> Any:
    """By hooks of the user; returns what removes a global one."""
    if how == "hook of all modules":
        return nn.modules.module.register_module_forward_hook(
            lambda module, args, output: KEPT.append(output[0]) if isinstance(module, Rows) else None
        )
    for block in model.blocks if how.startswith("hook") else ():
        if how == "hook, input":
            block.same.register_forward_pre_hook(lambda module, args: KEPT.append(args[0]))
        else:
            block.rows.register_forward_hook(lambda module, args, output: KEPT.extend(output))
    return None


def steps_with_views(plan: str, how: str, way: str) -> list[Any]:
    """Losses and gradients."""
    found: list[Any] = []
    with travelling(way):
        model: Any = make(partial(Around, how))
        remover = keep_outputs(model, how)
        handle = zeroshard.shard(model, plan, units=Given)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for step in range(2):
            KEPT.clear()
            with handle.unsharded() if how.endswith("in a block") and step == 0 else nullcontext():
                loss = model(data(0, step)).square().mean()
            views = [*KEPT, *(block.kept_of_root for block in model.blocks if how == "left by the model")]
            # A list keeps the views themselves: their values are those of another unit.
            uses = [view * 3 if how == "list" else view * view.cos() for view in views]
            assert bool(uses) != how.startswith("attribute")
            loss = loss + sum((use.sum() for use in uses), torch.zeros(()))
            optimizer.backward(loss)
            found.append({name: handle.gradient(name) for name, _ in model.named_parameters()})
            found += [] if how == "list" else [{"loss": loss.detach()}]
            optimizer.step()
        if remover is not None:
            remover.remove()
    return found


WAYS_KEPT = ("hook", "hook, input", "hook, several", "hook of all modules", "attribute", "attribute, several")
WAYS_KEPT += ("attribute, in a block", "left by the model", "list")


@pytest.mark.by_cpu
@pytest.mark.parametrize("how", WAYS_KEPT)
@on_ranks(2)
def test_views_that_are_kept_have_their_values_and_gradients(rank: int, how: str) -> None:
    """`how`: by what. In silence they had the values of other units, or of an earlier step where a module looks at its
    weight once, or their gradients came to other elements; `chunk` raised."""
    ways = ways_of(WAYS_KEPT.index(how))
    expected, *found = [steps_with_views(plan, how, way) for plan, way in ways]
    for one in found:
        assert all(same_bits(*both) for both in zip(one, expected, strict=True))
