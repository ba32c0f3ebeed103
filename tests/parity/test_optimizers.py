"""Any optimizer class: unknown classes, param groups, changes during training, and torch's own interface."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import (
    CANCELLED,
    PLANS,
    Block,
    Net,
    State,
    beside_one_process,
    largest_difference,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
)
from tests.parity.common import (
    ELEMENTWISE,
    Job,
    all_plans,
    all_references,
    as_one_process,
    expect_equal_logs,
    expect_identical,
    expect_logs_of_ranks,
)
from tests.together import on_ranks
from zeroshard.comm.comm_log import CommLog
from zeroshard.layout import cuts
from zeroshard.optim import Lamb
from zeroshard.placement import Plan
from zeroshard.reference import Reference
from zeroshard.step.granularity import Granularity, granularity_of
from zeroshard.testing import run_ranks

ADAMW = {"lr": 1e-2, "foreach": False}


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), as users write it: one step count is a plain number in the state, another is in the
    group."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "warmed_up": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["warmed_up"] += 1
            factor = min(1.0, group["warmed_up"] / 4)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(p)
                state["count"] += 1
                beta1, beta2 = group["betas"]
                direction = (state["average"] * beta1 + p.grad * (1 - beta1)).sign()
                p.sub_(direction * (group["lr"] * factor / state["count"] ** 0.5))
                state["average"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class RowNormed(torch.optim.Optimizer):
    """Looks at whole parameters: each row of a gradient has length 1."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-8), alpha=group["lr"])


class GloballyNormed(torch.optim.Optimizer):
    """Looks at all parameters at once."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with_grad = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_grad]).norm()
        for p in with_grad:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class Distanced(torch.optim.Optimizer):
    """Keeps a number that it computes from all gradients of a group, as D-Adaptation and Prodigy do. In the first steps
    the number changes no parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "distance": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            group["distance"] += sum(1e-6 * p.grad.norm().item() for p in with_grad)
            for p in with_grad:
                p.sub_(p.grad, alpha=group["lr"] * max(1.0, group["distance"]))


class Stubborn(torch.optim.Optimizer):
    def __init__(self, params: Any, table: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.table = table

    def step(self, closure: Any = None) -> None:
        raise KeyError("no table")


# Unknown classes ------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_unknown_classes_are_told_apart_by_trial(rank: int) -> None:
    assert granularity_of(Lion, {"lr": 0.1}, None) is Granularity.ELEMENT
    assert granularity_of(RowNormed, {}, None) is Granularity.PARAMETER
    assert granularity_of(RowNormed, {}, True) is Granularity.ELEMENT, "a declaration is believed"
    assert granularity_of(GloballyNormed, {}, None) is Granularity.PARAMETER, "each rank steps all of them"
    with pytest.raises(ValueError, match=r'GloballyNormed cannot be sharded: .*Use the plan "ddp"'):
        granularity_of(GloballyNormed, {}, None, sharded=True)
    with pytest.raises(ValueError, match=r"Stubborn is unknown.*elementwise=True"):
        granularity_of(Stubborn, {"table": 1}, None)
    with pytest.raises(ValueError, match="LBFGS cannot be sharded"):
        granularity_of(torch.optim.LBFGS, {}, None)
    with pytest.raises(ValueError, match="SparseAdam cannot be sharded"):
        granularity_of(torch.optim.SparseAdam, {}, None)


def test_a_number_that_is_computed_from_all_parameters_needs_them_all() -> None:
    """Each rank would compute another one. It was noticed at the first step, with advice about schedulers."""

    def check(rank: int, plan: str) -> list[float] | str:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        try:
            optimizer = zeroshard.ShardedOptimizer(handle, Distanced)
        except ValueError as error:
            return str(error)
        loss_of_tokens(model, rank, 0, 0).backward()
        optimizer.step()
        return [group["distance"] for group in optimizer.param_groups]

    for plan, num_ranks in (("zero1", 2), ("zero3", 3), ("zero3", 1), ("ddp", 2)):
        found = run_ranks(check, num_ranks, plan)
        if plan == "ddp" or num_ranks == 1:
            assert found == [found[0]] * num_ranks and found[0][0] > 1e-6
        else:
            assert found == [found[0]] * num_ranks
            assert "Distanced cannot be sharded: it computes 'distance' of a param group" in found[0]


@on_ranks(1)
def test_the_trial_agrees_with_what_is_listed(rank: int) -> None:
    """Subclasses are not in the list of known classes. The trial finds for each of them what the list says of its
    parent."""
    for optimizer_class, defaults in ELEMENTWISE.values():
        unknown = type("Unknown", (optimizer_class,), {})
        assert granularity_of(unknown, defaults, None) is Granularity.ELEMENT
    for optimizer_class in (torch.optim.Adafactor, torch.optim.Muon, Lamb):
        assert granularity_of(type("Unknown", (optimizer_class,), {}), {"lr": 0.1}, None) is Granularity.PARAMETER


UNKNOWN = grid((Lion, RowNormed), ("fp32", "bf16-remainder"), PLANS, (2, 3))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_unknown_classes_train_as_on_one_process(num_ranks: int) -> None:
    """Lion's step count in its param group advances once per step, also on ranks with an empty shard."""
    cases = at(UNKNOWN, num_ranks)
    jobs = {case[:2]: Job(case[0], {"lr": 1e-2}, case[1], steps=3) for case in cases}
    as_one_process([(jobs[case[:2]], case[2]) for case in cases], num_ranks, cases)


def test_counts_in_a_group_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts once advanced for each batch of pieces, and not at all on a rank without pieces."""
    monkeypatch.setitem(cuts.SIZES, "cpu", replace(cuts.SIZES["cpu"], batch=256, in_place=256))

    def check(rank: int) -> None:
        for make_model in (lambda: nn.Linear(40, 40), lambda: nn.Linear(4, 4)):
            for plan in plans_of(1):
                model = make(make_model)
                zeroshard.shard(model, plan)
                optimizer = zeroshard.ShardedOptimizer(model.parameters(), Lion, lr=0.1)
                for _ in range(2):
                    optimizer.backward(model(torch.ones(1, model.in_features)).sum())
                    optimizer.step()
                assert optimizer.param_groups[0]["warmed_up"] == 2
                state = optimizer.state_dict()
                assert [s["count"] for s in state["state"].values()] == [2, 2]
                assert all(type(s["count"]) is int for s in state["state"].values())
                plain = Lion(make(make_model).parameters(), lr=0.1)
                plain.load_state_dict(state)

    run_ranks(check, 3)


def small() -> Net:
    return Net(blocks=1)


# Param groups ---------------------------------------------------------------------------------------------------------


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3, "lr": 2e-2},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]


def test_groups_with_their_own_hyper_parameters() -> None:
    """With fused kernels, whose last bits differ from one process at the ends of vectors. All plans are bit-identical,
    as pieces are cut at the same places. (`tests/test_optimizer.py` compares param groups to one process.)"""
    fused = {"lr": 1e-2, "fused": True}
    job = Job(defaults=fused, groups=by_kind, steps=2)
    grouped, ungrouped = run_ranks(all_references, 1, 3, [job, replace(job, groups=None)])[0]
    found = run_ranks(all_plans, 3, [job])
    for rank, (by_plan,) in enumerate(found):
        expect_identical(by_plan)
        assert largest_difference(by_plan[0].weights, grouped[rank].weights) < CANCELLED
        assert largest_difference(by_plan[0].weights, ungrouped[rank].weights) > 10 * CANCELLED  # groups matter
    expect_logs_of_ranks(found)


ADDED_TO: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, ADAMW),
    (Lion, {"lr": 1e-2}),
    (Lamb, {"lr": 1e-2}),
    (torch.optim.ASGD, {"lr": 1e-2, "foreach": False}),
]
ADDED = grid(ADDED_TO, ("fp32", "bf16-remainder"), PLANS)


def test_a_param_group_added_after_the_start() -> None:
    """Existing state stays, bit for bit; the new parameters begin without state, as with torch in one process."""

    def first(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.head.parameters())}]

    def second(model: nn.Module) -> dict[str, Any]:
        return {"params": [*model.blocks.parameters(), *model.norm.parameters()], "lr": 3e-3}

    def references() -> list[State]:
        result = []
        for (optimizer_class, defaults), precision in itertools.product(ADDED_TO, ("fp32", "bf16-remainder")):
            model = make(small)
            reference = Reference(
                model, optimizer_class, num_ranks=2, precision=precision, params=first(model), **defaults
            )
            for step in range(2):
                if step == 1:
                    group = second(model)
                    reference.optimizer.add_param_group(
                        {**group, "params": [reference.main[p] for p in group["params"]]}
                    )
                reference.step(lambda model, rank, _, step=step: loss_of_tokens(model, rank, 0, step))
            result.append(reference.state_dict())
        return result

    def check(rank: int) -> list[tuple[State, Any]]:
        results = []
        for (optimizer_class, defaults), precision, plan in ADDED:
            model = make(small)
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(first(model), optimizer_class, **defaults)
            for step in range(2):
                if step == 1:
                    optimizer.add_param_group(second(model))
                optimizer.zero_grad()
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                optimizer.step()
                for unit in handle.engine.units:  # discard unused gradients, as model.zero_grad() would
                    unit.grads.consume(set(range(len(unit.parameters))))
            results.append((handle.full_state_dict(), handle.comm_log))
        return results

    expected, found = beside_one_process(references, check, 2)
    for (optimizer, precision, plan), *of_ranks in zip(ADDED, *found, strict=True):
        weights = expected[2 * ADDED_TO.index(optimizer) + (precision != "fp32")]
        assert all(same_bits(state, weights) for state, _ in of_ranks), (plan, precision, optimizer)
        expect_equal_logs([log for _, log in of_ranks])


@on_ranks(2)
def test_a_group_of_another_class_added_after_the_start(rank: int) -> None:
    results = []
    for plan in plans_of(1):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        optimizer = zeroshard.ShardedOptimizer(matrices, torch.optim.Muon, lr=0.02)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group(
                    {"params": list(model.head.parameters()), "optimizer_class": torch.optim.AdamW, **ADAMW}
                )
            optimizer.backward(loss_of_tokens(model, rank, 0, step))
            optimizer.step()
        steps = {float(s["step"]) for s in optimizer.state_dict()["state"].values() if "step" in s}
        assert steps == {2.0}
        results.append(handle.full_state_dict())
    assert all(same_bits(results[0], other) for other in results)


# Freezing -------------------------------------------------------------------------------------------------------------

FREEZABLE = {
    "one parameter": lambda model: [model.blocks[0].up.weight],
    "one module": lambda model: list(model.blocks[1].parameters()),
    "all but the head": lambda model: [p for name, p in model.named_parameters() if "head" not in name],
}


FREEZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {**ADAMW, "weight_decay": 0.5}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    (Lamb, {"lr": 1e-2}),
]
FREEZING = grid(("fp32", "bf16-remainder"), FREEZERS, PLANS, FREEZABLE)
FROZEN = (1, 2) if EVERYTHING else (1,)
"""The steps in which something is frozen; the step before and the one after them train all."""


def test_freezing_and_unfreezing_during_training() -> None:
    """Frozen parameters and their moments do not change, even with weight decay, and training continues from them
    later."""

    def train_and_freeze(model: nn.Module, what: str, one_step: Any) -> None:
        for step in range(len(FROZEN) + 2):
            for p in FREEZABLE[what](model):
                p.requires_grad_(step not in FROZEN)
            one_step(step)

    def references() -> list[State]:
        result = []
        for precision, (optimizer_class, defaults), _, what in FREEZING:
            model = make(lambda: Net(blocks=2))
            reference = Reference(model, optimizer_class, num_ranks=2, precision=precision, **defaults)

            def one_step(step: int, reference: Reference = reference) -> None:
                reference.step(lambda its_model, rank, _: loss_of_tokens(its_model, rank, 0, step))

            train_and_freeze(model, what, one_step)
            result.append(reference.state_dict())
        return result

    def check(rank: int) -> list[tuple[State, Any]]:
        results = []
        for precision, (optimizer_class, defaults), plan, what in FREEZING:
            model = make(lambda: Net(blocks=2))
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, **defaults)
            names = {id(p): name for name, p in model.named_parameters()}
            frozen = [names[id(p)] for p in FREEZABLE[what](model)]
            mains = [handle.full_state_dict(main=True)]

            def one_step(step: int, model=model, handle=handle, optimizer=optimizer, frozen=frozen, m=mains) -> None:
                optimizer.zero_grad()
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                optimizer.step()
                m.append(handle.full_state_dict(main=True))
                moved = any(not torch.equal(m[-2][name], m[-1][name]) for name in frozen)
                assert moved is (step not in FROZEN)

            train_and_freeze(model, what, one_step)
            results.append((handle.full_state_dict(), handle.comm_log))
        return results

    expected, found = beside_one_process(references, check, 2)
    for case, weights, *of_ranks in zip(FREEZING, expected, *found, strict=True):
        assert all(same_bits(state, weights) for state, _ in of_ranks), case
        expect_equal_logs([log for _, log in of_ranks])


class Skips(nn.Sequential):
    """Three layers; the second one is left out at first."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(150, 150, bias=False) for _ in range(3)))

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        y: torch.Tensor = self[2](self[1](self[0](x)) if step else self[0](x))
        return y.square().mean()


@on_ranks(3)
def test_fused_momentum_may_begin_later_for_some_parameters(rank: int) -> None:
    """torch's fused kernel takes tensors that all have momentum, or none: a rank that had both raised alone."""
    x, options = torch.ones(2, 150), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}
    plain = make(Skips)
    one = torch.optim.SGD(plain.parameters(), **options)
    for step in range(3):
        one.zero_grad()
        plain(x, step).backward()
        one.step()
    for plan in PLANS:
        model = make(Skips)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, fused=True, **options)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(x, step))
            optimizer.step()
        for name, value in handle.full_state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        momentum = optimizer.state[model[1].weight]["momentum_buffer"]
        torch.testing.assert_close(momentum, one.state[plain[1].weight]["momentum_buffer"])
        handle.close()


def test_what_was_frozen_when_it_was_sharded_trains_once_it_requires_grad() -> None:
    """As in torch, the parameters are in the optimizer from the start, or are added with `add_param_group`. The first
    linear layer is frozen for one step, its bias for one more."""

    def unfreeze(model: nn.Module, optimizer: Any, step: int, by_group: bool) -> None:
        for name, when in (("weight", 1), ("bias", 2)):
            if step == when:
                parameter = getattr(model[0], name).requires_grad_(True)
                if by_group:
                    optimizer.add_param_group({"params": [parameter], "lr": 0.05})

    def groups(model: nn.Module, by_group: bool) -> list[dict[str, Any]]:
        return [{"params": list((model[1] if by_group else model).parameters())}]

    def build() -> nn.Module:
        model = make(lambda: nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 16)))
        model[0].requires_grad_(False)
        return model

    def batch(rank: int, step: int) -> Tensor:
        return torch.randn(3, 40, generator=torch.Generator().manual_seed(7 * step + rank))

    def run(rank: int, plan: Plan, precision: str, by_group: bool) -> tuple[State, CommLog]:
        model = build()
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(groups(model, by_group), torch.optim.AdamW, lr=0.1, foreach=False)
        after = handle.full_state_dict(main=True)
        for step in range(4):
            unfreeze(model, optimizer, step, by_group)
            before = after
            optimizer.backward(model(batch(rank, step)).float().square().mean())
            assert optimizer.step().applied
            after = handle.full_state_dict(main=True)
            moved = [name for name in before if not torch.equal(before[name], after[name])]
            assert moved == [n for n in before if n[0] == "1" or step >= (1 if n == "0.weight" else 2)], (plan, step)
        assert len(optimizer.state_dict()["state"]) == 4
        return handle.full_state_dict(main=True), handle.comm_log

    def plain(by_group: bool) -> State:
        main = build()
        optimizer = torch.optim.AdamW(groups(main, by_group), lr=0.1, foreach=False)
        for step in range(4):
            unfreeze(main, optimizer, step, by_group)
            for rank in range(2):
                (main(batch(rank, step)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return main.state_dict()

    def check(rank: int) -> list[Any]:
        logs = []
        for number, (precision, by_group) in enumerate(itertools.product(("fp32", "bf16-remainder"), (False, True))):
            runs = {plan: run(rank, plan, precision, by_group) for plan in plans_of(number + (precision == "fp32"))}
            first = next(iter(runs.values()))[0]
            for plan, (state, log) in runs.items():
                assert same_bits(state, first), (plan, precision, by_group)
                logs.append(log)
            if precision == "fp32":
                for name, value in plain(by_group).items():
                    torch.testing.assert_close(first[name], value, rtol=1e-4, atol=10 * CANCELLED)  # at ten times lr
        return logs

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_equal_logs(logs)


def test_what_begins_to_train_at_the_wrong_time_is_refused() -> None:
    def check(rank: int) -> str:
        model = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[0].requires_grad_(False)
        zeroshard.shard(model, "zero2")
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        optimizer.backward(model(torch.ones(1, 4)).sum())
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"between a step .* and the next forward"):  # gradients are waiting
            model(torch.ones(1, 4))
        optimizer.step()
        optimizer.backward(model[1](model[0](torch.ones(1, 4))).sum())  # without a call of the model itself
        with pytest.raises(RuntimeError, match="was frozen when the model was called last") as error:
            optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, 4)).sum())
        assert optimizer.step().applied
        return str(error.value)

    assert len(set(run_ranks(check, 2))) == 1


@on_ranks(2)
def test_a_group_of_another_models_parameters_is_refused(rank: int) -> None:
    """Such parameters once were accepted and never stepped."""
    first, second, plain = (make(lambda: nn.Linear(4, 4)) for _ in range(3))
    for model in (first, second):
        zeroshard.shard(model, "zero2")
    optimizer = zeroshard.ShardedOptimizer([first.weight], torch.optim.SGD, lr=1.0)
    for other in (second, plain):
        with pytest.raises(ValueError, match="not of this optimizer's model"):
            optimizer.add_param_group({"params": [other.bias]})
    optimizer.add_param_group({"params": first.bias})
    assert len(optimizer.param_groups) == 2


# torch's interface ----------------------------------------------------------------------------------------------------


def test_options_of_the_classes() -> None:
    """A tensor as learning rate gives the same bits as a number. (foreach, amsgrad and nesterov:
    `test_precisions.py`.)"""
    jobs = {
        "maximize": Job(defaults={**ADAMW, "maximize": True}, steps=3),
        "tensor lr": Job(defaults={**ADAMW, "lr": torch.tensor(0.01)}, steps=3),
    }
    cases = grid(jobs, PLANS)
    up, *_, down = as_one_process([(jobs[name], plan) for name, plan in cases], 2, cases)
    assert not same_bits(up.weights, down.weights)


@on_ranks(2)
def test_step_and_state_hooks_run_once_each(rank: int) -> None:
    model = make(Net)
    zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    seen: list[str] = []

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        opt.param_groups[0]["lr"] = 0.0
        seen.append("before")

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        seen.append("after")

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    weights = model.blocks[0].up.bias.shape
    assert weights == (37,)
    loss_of_tokens(model, rank, 0, 0).backward()
    optimizer.step()
    assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()
    loss_of_tokens(model, rank, 0, 1).backward()
    optimizer.step()
    assert seen == ["before", "after"]

    def on_state(opt: Any, *args: Any) -> None:
        seen.append("state")

    optimizer.register_state_dict_pre_hook(on_state)
    optimizer.register_load_state_dict_post_hook(on_state)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2:] == ["state", "state"]


# State in torch's layout ----------------------------------------------------------------------------------------------

DIRECTIONS = ("to a plain one", "from a plain one")

STATE_CASES = [
    (direction, plan, name)
    for number, name in enumerate([*ELEMENTWISE, "lion"])
    for direction, plan in (
        itertools.product(DIRECTIONS, PLANS)
        if EVERYTHING
        else zip(DIRECTIONS, plans_of(number)[:: 1 if number % 4 < 2 else -1], strict=True)
    )
]
"""Each class in both directions, under the two plans of its number."""


def test_state_goes_to_a_plain_optimizer_and_back() -> None:
    """One sharded step then a plain one, and the reverse, give the bits of two plain steps. The groups have
    different options (amsgrad), so that the keys of state differ between parameters."""

    def build(name: str, of: Any, model: nn.Module) -> Any:
        optimizer_class, options = ELEMENTWISE.get(name, (Lion, {"lr": 1e-2}))
        matrices: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() > 1]}
        vectors: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() < 2]}
        if name in ("adam", "adamw"):
            matrices["amsgrad"] = True
            vectors["amsgrad"] = False
        if name == "sgd":
            vectors["momentum"] = 0.0
        return of([matrices, vectors], optimizer_class, **options, **({} if name == "lion" else {"foreach": False}))

    def plain(name: str, model: nn.Module, state: Any, steps: range) -> Any:
        optimizer = build(name, lambda groups, optimizer_class, **options: optimizer_class(groups, **options), model)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in steps:
            optimizer.zero_grad()
            loss_of_tokens(model, 0, 0, step).backward()
            optimizer.step()
        return optimizer

    def sharded(name: str, model: nn.Module, plan: Any, weights: Any, state: Any, steps: range) -> Any:
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = build(name, zeroshard.ShardedOptimizer, model)
        if state is not None:
            handle.load_full_state_dict(weights)
            optimizer.load_state_dict(state)
        for step in steps:
            optimizer.backward(loss_of_tokens(model, 0, 0, step))  # one batch for both ranks: their mean is exact
            optimizer.step()
        return handle, optimizer

    @functools.cache
    def plain_steps(name: str) -> tuple[State, Any]:
        truth = make(small)
        optimizer = plain(name, truth, None, range(2))
        return dict(truth.state_dict()), optimizer.state_dict()

    def check(rank: int) -> list[Any]:
        logs = []
        for direction, plan, name in STATE_CASES:
            first, (truth, last) = make(small), plain_steps(name)
            if direction == "to a plain one":
                handle, optimizer = sharded(name, first, plan, None, None, range(1))
                other = make(small)
                other.load_state_dict(handle.full_state_dict())
                plain(name, other, optimizer.state_dict(), range(1, 2))
                assert same_bits(dict(other.state_dict()), truth), (plan, direction, name)
            else:
                saved = plain(name, first, None, range(1)).state_dict()
                second = make(small, seed=3)
                handle, optimizer = sharded(name, second, plan, first.state_dict(), saved, range(1, 2))
                assert same_bits(handle.full_state_dict(), truth), (plan, direction, name)
                expect_same_state(optimizer.state_dict(), last, name)
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_equal_logs(logs)


def expect_same_state(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        mine = found["state"][index]
        assert mine.keys() == {key for key, value in values.items() if value is not None}
        for key, value in mine.items():
            if isinstance(value, Tensor):
                assert value.dtype == values[key].dtype and torch.equal(value, values[key]), (what, index, key)
            else:
                assert value == values[key], (what, index, key)
    assert [group["params"] for group in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]


@on_ranks(2)
def test_a_state_of_another_shape_or_other_groups_is_refused(rank: int) -> None:
    model = make(Net)
    zeroshard.shard(model, "zero2", units=Block)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    loss_of_tokens(model, rank, 0, 0).backward()
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="param groups"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    state["state"][3]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.load_state_dict(state)


# Low-bit state --------------------------------------------------------------------------------------------------------


def two_matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


def low_bit_steps(rank: int, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.backward(model(torch.randn(4, 128, generator=generator)).square().mean())
        optimizer.step()


@pytest.fixture
def low_bit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchao's optimizers; their kernel is not compiled (compiling takes a minute)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        module = pytest.importorskip("torchao.optim")
    if not os.environ.get("ZEROSHARD_TEST_EVERYTHING"):
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return module


@pytest.mark.filterwarnings("ignore")
def test_low_bit_state_is_the_same_in_every_plan_and_as_small_as_it_says(low_bit: Any) -> None:
    """Blocks of elements share a scale. Shards are multiples of 256 elements, so no block is cut, and the plans agree
    bit for bit. State of 8 bits takes 2 x 1 byte per element, and 2 x 4 bytes per block of 256."""

    def check_class(rank: int, name: str) -> None:
        results = []
        for plan in PLANS:
            model = make(two_matrices)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, getattr(low_bit, name), lr=1e-2)
            low_bit_steps(rank, model, optimizer, range(2))
            results.append(handle.full_state_dict())
            pieces = [piece for piece in optimizer.steppers[0].state.pieces if piece.world.numel >= 4096]
            codes = sum(2 * piece.world.numel + 2 * 4 * piece.world.numel // 256 for piece in pieces)
            tables = 2 * 256 * 4 * len(pieces)  # the codebook of each quantised tensor; short ones stay in fp32
            short = sum(piece.world.numel for piece in optimizer.steppers[0].state.pieces if piece.world.numel < 4096)
            if "8bit" in name:
                assert pieces and handle.memory()["state"] == codes + tables + 8 * short, (name, plan)
            assert pieces and handle.memory()["state"] <= codes + tables + 8 * short, (name, plan)
        assert all(same_bits(results[0], other) for other in results), name

    def check(rank: int) -> None:
        for name in ("AdamW8bit", "AdamW4bit", "Adam8bit"):
            check_class(rank, name)

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore")
def test_low_bit_state_is_saved_loaded_and_cut_without_growing(low_bit: Any) -> None:
    """State is saved as fp32 values and quantised again when it is loaded; training continues with the same bits.
    Freezing one of the biases cuts a piece, and its state as well."""

    def run(rank: int, plan: Plan, interrupted: bool) -> State:
        model = make(two_matrices)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, low_bit.AdamW8bit, lr=1e-2)
        low_bit_steps(rank, model, optimizer, range(2))
        held = handle.memory()["state"]
        if interrupted:
            state, weights = optimizer.state_dict(), handle.full_state_dict()
            model = make(two_matrices)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, low_bit.AdamW8bit, lr=1e-2)
            optimizer.load_state_dict(state)
            handle.load_full_state_dict(weights)
            assert handle.memory()["state"] == held
        low_bit_steps(rank, model, optimizer, range(2, 3))
        model[0].bias.requires_grad_(False)
        low_bit_steps(rank, model, optimizer, range(3, 4))
        assert handle.memory()["state"] < 1.2 * held + 8 * 2 * 512
        return handle.full_state_dict()

    def check(rank: int) -> None:
        expected = run(rank, zeroshard.ZERO2, interrupted=False)
        for plan in plans_of(1):
            assert same_bits(run(rank, plan, interrupted=True), expected), plan

    run_ranks(check, 2)
