"""Optimizer classes that go by the parameter itself: its class, attributes that it has, or whether it is in a list of
theirs. Other tensors are stepped in its place, so it once was stepped like any other, in silence and under every plan.

Found with geoopt 0.5.1: points on manifolds left them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import LAST_BITS, PLANS, largest_difference
from tests.together import on_ranks
from zeroshard.step.granularity import Granularity, granularity_of


class OnASphere(nn.Parameter):
    """Rows of a length, which is an attribute."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = OnASphere(nn.functional.normalize(torch.randn(5, 3), dim=1) * 2)
        self.rows.radius = 2.0  # type: ignore[attr-defined]
        self.inner, self.outer = nn.Linear(3, 7), nn.Linear(7, 1)
        self.inner.weight.lr_scale = 0.1  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.inner(x @ self.rows).tanh())
        return found


class ByClass(torch.optim.Optimizer):
    """As geoopt's: some parameters are brought back to where they belong."""

    def __init__(self, params: Any, lr: float = 0.1, slow: Any = ()) -> None:
        super().__init__(params, {"lr": lr})
        self.slow = {id(parameter) for parameter in slow}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = p.grad + 0.5 * state.get("mean", torch.zeros_like(p.grad))
                p.sub_(state["mean"], alpha=group["lr"] * self.scale(p))
                if isinstance(p, OnASphere):
                    p.mul_(p.radius / p.norm(dim=1, keepdim=True))  # type: ignore[attr-defined]

    def scale(self, p: Tensor) -> float:
        return 1.0


class ByAttribute(ByClass):
    def scale(self, p: Tensor) -> float:
        scale: float = getattr(p, "lr_scale", 1.0)
        return scale


def trained(rank: int, plan: str | None, of_class: type[ByClass]) -> dict[str, Tensor]:
    model = Model()
    handle = None if plan is None else zeroshard.shard(model, plan)
    optimizer: Any = (
        of_class(model.parameters()) if handle is None else zeroshard.ShardedOptimizer(handle, of_class, lr=0.1)
    )
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        for parameter in model.parameters() if handle is None else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
        model.inner.weight.lr_scale = 0.2  # type: ignore[assignment]
    if handle is not None:  # what stands in for a parameter is not what the user sees
        assert {type(key) for key in optimizer.state_dict()["state"][0].values()} == {Tensor}
    return model.state_dict() if handle is None else handle.full_state_dict()


@on_ranks(2)
def test_a_class_that_goes_by_the_parameter_steps_as_the_plain_one(rank: int) -> None:
    for of_class in (ByClass, ByAttribute):
        expected = trained(rank, None, of_class)
        for plan in ("ddp", "zero1", "zero2", "zero3"):
            found = trained(rank, plan, of_class)
            assert largest_difference(found, expected) < LAST_BITS, (of_class, plan)
            assert torch.allclose(found["rows"].norm(dim=1), torch.tensor(2.0))


def test_only_what_it_looks_at_takes_whole_parameters() -> None:
    model = Model()
    rows, scaled, others = model.rows, model.inner.weight, [model.outer.weight]
    for of_class, parameters, expected in (
        (ByClass, [rows], Granularity.PARAMETER),
        (ByClass, [scaled], Granularity.ELEMENT),  # it has an attribute that the class does not ask for
        (ByAttribute, [scaled], Granularity.PARAMETER),
        (ByAttribute, others, Granularity.ELEMENT),
        (torch.optim.AdamW, [rows, scaled], Granularity.ELEMENT),
    ):
        assert granularity_of(of_class, {}, None, parameters=parameters) is expected, (of_class, expected)
    with pytest.raises(ValueError, match=r"elementwise=True, and ByAttribute looks at attributes .*\(lr_scale\)"):
        granularity_of(ByAttribute, {}, True, parameters=[scaled])


class Sometimes(torch.optim.Optimizer):
    """Looks at an attribute where `where` says so."""

    def __init__(self, params: Any, lr: float = 0.1, where: str = "") -> None:
        super().__init__(params, {"lr": lr, "by_layer": False})
        self.where = where

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = number = self.state[p].get("step", 0) + 1
                    looks = {
                        "group": group["by_layer"],
                        "vector": self.where == "vector" and p.ndim == 1,
                        "late": number > 2,
                    }.get(self.where, True)
                    scale = 1.0
                    if self.where == "in":
                        scale = p.__dict__["lr_scale"] if "lr_scale" in p.__dict__ else 1.0  # noqa: SIM401
                    elif self.where == "item":
                        with suppress(KeyError):
                            scale = p.__dict__["lr_scale"]
                    elif self.where in ("vars", "dict"):
                        scale = (vars(p) if self.where == "vars" else p.__dict__).get("lr_scale", 1.0)
                    elif looks:
                        scale = getattr(p, "lr_scale", 1.0)
                    p.sub_(p.grad, alpha=group["lr"] * scale)


SOMETIMES = ("group", "vector", "late", "vars", "dict", "in", "item")


def test_what_a_class_looks_at_only_sometimes_is_found() -> None:
    model = Model()
    model.inner.bias.lr_scale = 0.1  # type: ignore[assignment]
    scaled = [model.inner.weight, model.inner.bias]
    for where in SOMETIMES:
        groups = [{"lr": 0.1, "by_layer": True}] if where == "group" else []
        found = granularity_of(Sometimes, {"where": where}, None, groups=groups, parameters=scaled)
        assert found is Granularity.PARAMETER, where
    assert granularity_of(Sometimes, {"where": "group"}, None, parameters=scaled) is Granularity.ELEMENT
    with pytest.raises(ValueError, match="looks at attributes"):  # of parameters with one dimension, as the bias
        granularity_of(Sometimes, {"where": "vector"}, True, parameters=scaled)
    assert granularity_of(Sometimes, {"where": "vector"}, True, parameters=scaled[:1]) is Granularity.ELEMENT


@on_ranks(2)
def test_an_attribute_that_is_set_later_is_refused_or_has_no_meaning(rank: int) -> None:
    """Plain torch looks there in each step. (A class that looks at shapes has whole parameters.)"""
    for where in ("", *(way for way in SOMETIMES if way != "vector")):
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))
        handle = zeroshard.shard(model, "zero2")
        optimizer = zeroshard.ShardedOptimizer(handle, Sometimes, lr=0.1, where=where)
        model[0].weight.of_no_meaning = 0.5  # type: ignore[assignment]

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()

        step()
        model[0].bias.lr_scale = 0.5  # type: ignore[assignment]
        if where == "group":
            step()
            optimizer.param_groups[0]["by_layer"] = True
        with pytest.raises(ValueError, match=r"Sometimes looks at attributes .*\(lr_scale\) and steps them in pieces"):
            step()


@on_ranks(2)
def test_parameters_in_the_arguments_of_a_class_are_refused(rank: int) -> None:
    for plan in PLANS:
        model = Model()
        slow = model.outer.weight
        plain = ByClass(model.parameters(), slow=[slow])
        handle = zeroshard.shard(model, plan)
        for found in ({"slow": [slow]}, {"slow": {slow: 0.1}}):
            with pytest.raises(ValueError, match=r"ByClass: there are parameters in slow=.* Give them a param group"):
                zeroshard.ShardedOptimizer(handle, ByClass, **found)
        with pytest.raises(ValueError, match="ByClass: there are parameters in anchors="):
            zeroshard.ShardedOptimizer([{"params": [*model.parameters()], "anchors": [slow]}], ByClass)
        with pytest.raises(ValueError, match="from_optimizer: the attribute slow is"):
            zeroshard.ShardedOptimizer.from_optimizer(handle, plain)
        assert zeroshard.ShardedOptimizer(handle, ByClass).param_groups


class ByName(ByClass):
    """`late`: it takes the names when it is built, else in each step."""

    def __init__(self, params: Any, lr: float = 0.1, late: bool = False) -> None:
        super().__init__(params, lr)
        self.late = late
        self.of_each = None if late else [[*zip(g["params"], g["param_names"], strict=True)] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        of_each = self.of_each or [zip(g["params"], g["param_names"], strict=True) for g in self.param_groups]
        for group, named in zip(self.param_groups, of_each, strict=True):
            for p, name in named:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (0.1 if "bias" in name else 1.0 + len(name)))


class TakesNames(ByClass):
    """And does not look at them."""


def named_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [*model.named_parameters()]
    return [{"params": named[::-2]}, {"params": named[-2::-2], "lr": 0.05}]


@on_ranks(2)
def test_a_class_that_goes_by_names_finds_those_of_its_parameters(rank: int) -> None:
    """Once a rank had the names of the whole group beside its own parameters, in silence, and the trial of the class a
    KeyError."""
    for of_class, late in ((ByName, False), (ByName, True), (TakesNames, None)):
        options = {} if late is None else {"late": late}
        plain = Model()
        twin = of_class(named_groups(plain), **options)
        for plan in PLANS:
            plain.load_state_dict(Model().state_dict())
            twin.state.clear()
            model = Model()
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(named_groups(model), of_class, **options)
            for step in range(4):
                if step == 2 and late:  # torch takes the names of a state_dict
                    for one in (twin, optimizer):
                        state = one.state_dict()
                        state["param_groups"][0]["param_names"] = [*"abc"]
                        one.load_state_dict(state)
                torch.manual_seed(10 * step)
                x = torch.randn(4, 5)
                for net, one in ((plain, twin), (model, optimizer)):
                    one.zero_grad()
                    net(x).square().mean().backward()
                    one.step()
            assert largest_difference(handle.full_state_dict(), plain.state_dict()) < LAST_BITS, (of_class, plan)
            assert [g["param_names"] for g in optimizer.param_groups] == [g["param_names"] for g in twin.param_groups]
            if late:
                for one in (twin, optimizer):
                    one.param_groups[0]["param_names"] = [name for name, _ in named_groups(model)[0]["params"]]
            handle.close()


def test_names_alone_do_not_make_parameters_whole() -> None:
    parameters, groups = [*Model().parameters()], [{"param_names": ["rows", "inner.weight"]}]
    found = [granularity_of(one, {}, None, groups=groups, parameters=parameters[1:]) for one in (TakesNames, ByName)]
    assert found == [Granularity.ELEMENT, Granularity.PARAMETER]
    with pytest.raises(ValueError, match=r"elementwise=True, and ByName looks at attributes .*\(param_names\)"):
        granularity_of(ByName, {}, True, groups=groups, parameters=parameters[1:])
