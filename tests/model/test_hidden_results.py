"""Modules that leave their result elsewhere than in what forward returns.

Backward gathers a unit when it reaches what the unit has made. For a unit that returned None, ZeRO-3 found nothing to
hook. If the unit was frozen, no gradient hook noticed that its values were gone: the gradients of the units before it
were wrong, without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Job, beside_one_process, same_bits, train, train_reference, travelling
from tests.together import on_ranks
from zeroshard.placement import Plan
from zeroshard.runtime.seen_by_hooks import SeenByHooks
from zeroshard.testing import run_ranks

WIDTH, BLOCKS = 8, 4


@dataclass
class Result:
    value: Tensor


class Nested:
    def __init__(self, value: Tensor) -> None:
        self.inner = [Result(value)]


class Block(nn.Module):
    """`how`: where the result is left."""

    def __init__(self, how: str, shared: list[Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how, self.shared = how, shared
        self.last: Any = None

    def forward(self, x: Tensor, into: list[Tensor]) -> Any:
        value = torch.tanh(self.second(torch.tanh(self.first(x))))
        if self.how == "object":
            return Nested(value)
        if self.how == "function":
            return lambda: value
        if self.how == "attribute":
            self.last = value
            return value.detach().sum()
        (into if self.how == "input" else self.shared).append(value)
        return None if self.how == "input" else x

    def result(self, x: Tensor) -> Tensor:
        into: list[Tensor] = []
        returned = self(x, into)
        if self.how == "object":
            return returned.inner[0].value
        if self.how == "function":
            return returned()
        return self.last if self.how == "attribute" else (into if self.how == "input" else self.shared).pop()


class Model(nn.Module):
    """The results of frozen blocks go through a trained layer to the next one."""

    def __init__(self, how: str, *, frozen: bool) -> None:
        super().__init__()
        shared: list[Tensor] = []
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(how, shared).requires_grad_(not frozen) for _ in range(BLOCKS))
        self.between = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block, layer in zip(self.blocks, self.between, strict=True):
            x = layer(block.result(x))
        return x


FOUND = [(how, frozen) for how in ("object", "attribute", "input", "list") for frozen in (True, False)]


def plans_of_each(cases: list[Any], every: int) -> dict[Any, tuple[Plan, ...]]:
    """ZERO3, where values go; each `every`-th case under another plan as well, in turn."""
    others = {case: PLANS[:3] if EVERYTHING else PLANS[at % 3 : at % 3 + 1] for at, case in enumerate(cases[::every])}
    return {case: (*others.get(case, ()), zeroshard.ZERO3) for case in cases}


PLANS_OF = plans_of_each(FOUND, 3)

UNITS = (Block, nn.Sequential)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * step))


def loss_of(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    out: Tensor = model(data(rank, step))
    return out.square().mean()


def job(how: str, frozen: bool) -> Job:
    model: Callable[[], nn.Module] = partial(Model, how, frozen=frozen)
    return Job(model=model, units=UNITS, loss_of=loss_of)


def test_gradients_go_through_results_that_forward_does_not_return() -> None:
    """Without shared memory, where values that are gone are overwritten by those of other units."""

    def of_rank(rank: int) -> Any:
        with travelling("pairwise"):
            return {case: [train(job(*case), plan, rank) for plan in plans] for case, plans in PLANS_OF.items()}

    truth, ranks = beside_one_process(lambda: {case: train_reference(job(*case), 2) for case in FOUND}, of_rank, 2)
    for case in FOUND:
        for outcome, of_rank_found in zip(truth[case], ranks, strict=True):
            for plan, found in zip(PLANS_OF[case], of_rank_found[case], strict=True):
                assert found.losses == outcome.losses, (case, plan)
                assert same_bits(found.weights, outcome.weights), (case, plan)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        gate = self.linear(x).softmax(-1)
        self.loss = gate.square().mean()
        return gate


class Routed(nn.Module):
    """Returns its result, and leaves the loss of its router elsewhere. `how`: where."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.linear, self.how = Router(), nn.Linear(WIDTH, 3 * WIDTH), how
        self.loss: Any = None

    def forward(self, x: Tensor, losses: list[Tensor], *, named: dict[str, Tensor]) -> Tensor:
        gate = self.router(x)
        x = x + (torch.tanh(self.linear(x)).view(-1, 3, WIDTH) * gate[..., None]).sum(1)
        if self.how == "attribute":
            self.loss = {"of the router": [self.router.loss]}
        elif self.how == "input":
            losses.append(self.router.loss)
        elif self.how == "keyword":
            named[f"loss {len(named)}"] = self.router.loss
        return x


class Experts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Routed(how) for _ in range(4)), how

    def losses_of(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        losses: list[Tensor] = []
        named: dict[str, Tensor] = {}
        for block in self.blocks:
            x = block(x, losses, named=named)
        if self.how == "attribute":
            losses = [block.loss["of the router"][0] for block in self.blocks]  # type: ignore[union-attr, index]
        elif self.how == "inner attribute":
            losses = [block.router.loss for block in self.blocks]  # type: ignore[union-attr]
        return x, losses + list(named.values())

    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.losses_of(x)
        assert len(losses) == len(self.blocks)
        return x.square().mean() + torch.stack(losses).sum()


def test_losses_that_modules_leave_beside_their_outputs() -> None:
    """Backward comes to them before it comes to the outputs: under ZeRO-3 the weights were not here, and it raised."""
    ways = ["attribute", "inner attribute", "input", "keyword"]
    plans_of_way = plans_of_each(ways, 1)

    def of(how: str) -> Job:
        return Job(model=partial(Experts, how), units=Routed, loss_of=lambda model, *at: model(data(at[0], at[2])))

    def of_rank(rank: int) -> Any:
        with travelling("pairwise"):
            return {how: [train(of(how), plan, rank) for plan in plans_of_way[how]] for how in ways}

    truth, ranks = beside_one_process(lambda: {how: train_reference(of(how), 2) for how in ways}, of_rank, 2)
    for how in ways:
        for outcome, of_rank_found in zip(truth[how], ranks, strict=True):
            for plan, found in zip(plans_of_way[how], of_rank_found[how], strict=True):
                assert found.losses == outcome.losses, (how, plan)
                assert same_bits(found.weights, outcome.weights), (how, plan)


GONE = "modified by an inplace operation"


@on_ranks(2)
def test_what_cannot_be_found_raises(rank: int) -> None:
    """By autograd's comparison of versions. `ShardedOptimizer.backward` adds what that means."""
    for frozen in (True, False):
        model = Model("function", frozen=frozen)
        handle = zeroshard.shard(model, "zero3", units=UNITS)
        with pytest.raises(RuntimeError, match=GONE):
            model(data(rank, 0)).sum().backward()
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError, match=GONE) as raised:
            optimizer.backward(model(data(rank, 0)).sum())
        assert "that its modules' forward does not return" in raised.value.__notes__[0]


def inner(model: nn.Module, how: str) -> list[nn.Module]:
    """Modules that lie inside of a unit, or the units."""
    kind = {"linear": nn.Linear, "without parameters": nn.Tanh, "units": nn.Sequential}[how]
    return [module for module in model.modules() if type(module) is kind]


class Layers(nn.Module):
    """`frozen`: but for what is before its units."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(BLOCKS)]
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(*three) for three in layers)).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.before(x))
        return out


def features(model: nn.Module, x: Tensor, how: str, kind: str) -> list[Tensor]:
    """What forward hooks keep. `kind`: of hook."""
    kept: list[Tensor] = []

    def keep_output(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)

    def replace_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept.append(output)
        return output.detach()  # a gradient comes to the inner value alone

    def keep_input(module: nn.Module, args: Any) -> None:
        kept.append(args[0])

    def keep_any(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if module not in inside:
            return None
        kept.append(output)
        return output.detach() if kind == "global, replaced" else None

    inside = inner(model, how)
    by_kind: dict[str, Any] = {"output": keep_output, "replaced": replace_output}
    removers = [
        module.register_forward_pre_hook(keep_input) if kind == "input" else module.register_forward_hook(by_kind[kind])
        for module in inside
        if not kind.startswith("global")
    ]
    if kind.startswith("global"):
        removers.append(nn.modules.module.register_module_forward_hook(keep_any))
    model(x)
    for remover in removers:
        remover.remove()
    return kept


HOOKS = [
    (how, kind, frozen)
    for how in ("linear", "without parameters")
    for kind in ("output", "input")
    for frozen in (False, True)
]
HOOKS += [("linear", kind, False) for kind in ("replaced", "global", "global, replaced")]
HOOKS += [("units", kind, False) for kind in ("replaced", "global, replaced")]
begin = SeenByHooks.begin


def test_what_hooks_of_the_user_keep_from_inside_of_a_unit() -> None:
    """A loss of features alone: its backward comes to no output of the last units."""

    def of(how: str, kind: str, frozen: bool) -> Job:
        def loss_of(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
            kept = features(model, data(rank, step), how, kind)
            use = kept if kind.endswith("replaced") else kept[2 : len(kept) - 1]
            return sum((one.square().mean() for one in use), torch.zeros(()))

        return Job(model=partial(Layers, frozen=frozen), units=nn.Sequential, loss_of=loss_of)

    plans_of_case = plans_of_each(HOOKS, 3)

    def of_rank(rank: int) -> Any:
        with travelling("pairwise"):
            return {case: [train(of(*case), plan, rank) for plan in plans] for case, plans in plans_of_case.items()}

    truth, ranks = beside_one_process(lambda: {case: train_reference(of(*case), 2) for case in HOOKS}, of_rank, 2)
    for case in HOOKS:
        for outcome, of_rank_found in zip(truth[case], ranks, strict=True):
            for plan, found in zip(plans_of_case[case], of_rank_found[case], strict=True):
                assert found.losses == outcome.losses, (case, plan)
                assert same_bits(found.weights, outcome.weights), (case, plan)


@on_ranks(2)
def test_without_noting_them_they_raise(rank: int) -> None:
    """The control."""
    SeenByHooks.begin = lambda self, running: None  # type: ignore[method-assign]
    try:
        model = Layers(frozen=False)
        zeroshard.shard(model, "zero3", units=nn.Sequential)
        with pytest.raises(RuntimeError, match=GONE):
            features(model, data(rank, 0), "linear", "output")[-2].sum().backward()
    finally:
        SeenByHooks.begin = begin  # type: ignore[method-assign]


@on_ranks(2)
def test_global_hooks_beside_a_scripted_part(rank: int) -> None:
    """torch registers no hooks on it: the forward raised."""
    model = Layers(frozen=False)
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        for block in model.blocks:
            block[1] = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))  # type: ignore[index]
    zeroshard.shard(model, "zero3", units=nn.Sequential)
    assert len(features(model, data(rank, 0), "linear", "global")) >= 2 * BLOCKS
    assert list(nn.modules.module._global_forward_hooks) == []


@on_ranks(2)
def test_gradients_with_respect_to_inputs_of_what_hooks_keep(rank: int) -> None:
    """No gradient hook of a parameter runs: before, what had taken the place of the weights was read."""
    for how, kind in (("linear", "output"), ("linear", "input"), ("without parameters", "output")):
        model = Layers(frozen=False)
        handle = zeroshard.shard(model, "zero3", units=nn.Sequential)
        x = data(rank, 0).requires_grad_()

        def gradient(x: Tensor = x, how: str = how, kind: str = kind, model: nn.Module = model) -> Tensor:
            return torch.autograd.grad(features(model, x, how, kind)[-2].sum(), x)[0]

        with handle.unsharded():
            expected = gradient()
        assert torch.equal(gradient(), expected)
        assert all(not one._forward_hooks and not one._forward_pre_hooks for one in inner(model, "without parameters"))


@on_ranks(2)
def test_a_gradient_of_the_input_alone_raises_as_well(rank: int) -> None:
    """No gradient hook runs in `torch.autograd.grad`, so versions are compared in trained units, too."""
    model = Model("function", frozen=False)
    zeroshard.shard(model, "zero3", units=UNITS)
    x = data(rank, 0).requires_grad_()
    with pytest.raises(RuntimeError, match=GONE):
        torch.autograd.grad(model(x).sum(), x)


@on_ranks(2)
def test_versions_are_as_before_where_values_are_here(rank: int) -> None:
    """Also where weights are written."""
    model = Model("object", frozen=True)
    handle = zeroshard.shard(model, "zero3", units=UNITS)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    frozen = model.blocks[0].first.weight
    with handle.unsharded():
        before = frozen._version
    for step in range(2):
        optimizer.backward(loss_of(model, rank, 0, step, 1))
        optimizer.step()
        optimizer.zero_grad()
    with handle.unsharded(write=True), torch.no_grad():
        assert frozen._version == before
        frozen.mul_(2)
    with handle.unsharded():
        assert frozen._version == before + 1


def test_the_error_depends_on_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, gradients are wrong and nothing is said."""

    def gradient(rank: int, how: str) -> Tensor:
        with travelling("pairwise"):
            torch.manual_seed(0)
            model = Model(how, frozen=True)
            handle = zeroshard.shard(model, "zero3", units=UNITS)
            model(data(rank, 0)).square().mean().backward()
            return handle.gradient("before.weight")

    monkeypatch.setattr("zeroshard.storage.versions.Versions.guard", lambda self: None)
    right, wrong = (run_ranks(gradient, 2, how)[0] for how in ("object", "function"))
    assert not torch.allclose(right, wrong)


@on_ranks(2)
def test_without_hooks_of_the_user_nothing_is_noted(rank: int) -> None:
    """Those of the engine (casts, the whole model) do not count; one from before `shard` does."""
    for precision, hooked in (("fp32", False), ("bf16", False), ("bf16", True)):
        model = Layers(frozen=False)
        if hooked:
            model.blocks[1][1].register_forward_hook(lambda *_: None)  # type: ignore[index]
        handle = zeroshard.shard(model, "zero3", units=nn.Sequential, precision=precision)
        added = list[nn.Module]()
        register = nn.Module.register_forward_hook

        def counting(
            self: nn.Module, *args: Any, added: list[nn.Module] = added, register: Any = register, **kwargs: Any
        ) -> Any:
            added.append(self)
            return register(self, *args, **kwargs)

        nn.Module.register_forward_hook = counting  # type: ignore[assignment, method-assign]
        try:
            model(data(rank, 0)).sum().backward()
        finally:
            nn.Module.register_forward_hook = register  # type: ignore[method-assign]
        assert added == ([model.blocks[1][1]] if hooked else []), precision  # type: ignore[index]
        handle.close()
