"""Several clips between backward and step, and what is done to gradients behind a clip: in the order of the calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, plans_of, travelling
from tests.together import on_ranks
from zeroshard.step.clipping import Clipping
from zeroshard.testing import RankError, run_ranks


class Steps:
    """What the sequences below call: for a sharded model, or for the plain one with the mean gradient of all ranks."""

    def __init__(self, rank: int, num_ranks: int, plan: zeroshard.Plan | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        self.rank, self.num_ranks, self.batch = rank, num_ranks, 0
        if plan is None:
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1.0)
        else:
            self.handle = zeroshard.shard(self.model, plan, units=nn.Linear)
            self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.SGD, lr=1.0, **options)
        self.is_plain = plan is None

    def _loss(self, rank: int) -> Tensor:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * self.batch + rank))
        return self.model(x).square().sum()

    def backward(self) -> None:
        for rank in range(self.num_ranks) if self.is_plain else [self.rank]:
            (self._loss(rank) / (self.num_ranks if self.is_plain else 1)).backward()
        self.batch += 1

    def norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        if self.is_plain:
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type).item()
        return float(self.optimizer.clip_grad_norm_(max_norm, norm_type))

    def value(self, bound: float) -> float:
        if self.is_plain:
            nn.utils.clip_grad_value_(self.model.parameters(), bound)
        else:
            self.optimizer.clip_grad_value_(bound)
        return 0.0

    def each(self, edit: Callable[[Any], object]) -> float:
        for parameter in self.model.parameters():
            edit(parameter.grad)
        return 0.0

    def seen(self) -> float:
        return float(sum(parameter.grad.norm() ** 2 for parameter in self.model.parameters()) ** 0.5)

    def again(self) -> float:
        self.backward()
        return 0.0

    def by_hand(self) -> float:
        self.model[0].bias.grad = torch.ones(6)
        return 0.0

    def read(self) -> float:
        grad = self.model[0].weight.grad if self.is_plain else self.handle.gradient("0.weight")
        return float(grad.sum())

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict()) if self.is_plain else self.handle.full_state_dict()


Sequence = Callable[[Steps], list[float]]

SEQUENCES: dict[str, Sequence] = {
    "no clip": lambda s: [],
    "one": lambda s: [s.norm(0.1)],
    "to log the norm after it": lambda s: [s.norm(0.1), s.norm(math.inf)],
    "smaller": lambda s: [s.norm(0.1), s.norm(0.05)],
    "another norm": lambda s: [s.norm(0.1), s.norm(0.01, math.inf), s.norm(0.01, 1.0)],
    "value, norm": lambda s: [s.value(0.01), s.norm(0.05)],
    "norm, value, norm": lambda s: [s.norm(9.0), s.value(0.01), s.norm(0.05)],
    "norm, value": lambda s: [s.norm(9.0), s.value(0.01)],
    "the smaller bound": lambda s: [s.value(0.01), s.value(1e9)],
    "norm, clamp": lambda s: [s.norm(0.1), s.each(lambda grad: grad.clamp_(-0.01, 0.01))],
    "norm, multiply": lambda s: [s.norm(0.1), s.each(lambda grad: grad.mul_(3.0)), s.norm(0.2)],
    "norm, multiply the data": lambda s: [s.norm(0.1), s.each(lambda grad: grad.data.mul_(3.0)), s.norm(0.2)],
    "value, multiply": lambda s: [s.value(0.01), s.each(lambda grad: grad.mul_(2.0))],
    "norm, a look": lambda s: [s.norm(0.1), s.seen(), s.read()],
    "norm, another backward": lambda s: [s.norm(0.1), s.again()],
    "value, another backward": lambda s: [s.value(0.01), s.again()],
    "norm, set by hand": lambda s: [s.norm(0.1), s.by_hand()],
    "by torch, and ours": lambda s: [
        s.norm(5.0),
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0).item(),
        s.norm(0.3),
    ],
}


def run(steps: Steps, sequence: Sequence) -> tuple[list[float], dict[str, Tensor]]:
    seen: list[float] = []
    for _ in range(2):  # a clip does not outlive its step
        steps.optimizer.zero_grad()
        steps.backward()
        seen += sequence(steps)
        steps.optimizer.step()
        assert steps.is_plain or steps.optimizer.agreement.clipping == Clipping()
    return seen, steps.weights()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_clips_and_edits_act_in_the_order_of_the_calls(num_ranks: int) -> None:
    def check(rank: int) -> None:
        found = {}
        for number, (name, sequence) in enumerate(SEQUENCES.items()):
            plans = plans_of(number + num_ranks) if num_ranks > 1 else PLANS  # on two ranks, and the others on three
            seen, weights = run(Steps(rank, num_ranks, None), sequence)
            of_plans = [run(Steps(rank, num_ranks, plan), sequence) for plan in plans]
            for plan, (also_seen, same) in zip(plans, of_plans, strict=True):
                assert also_seen == pytest.approx(seen, rel=1e-4, abs=1e-6), (name, plan)
                torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-5, msg=f"{name}, {plan}")
                if "torch" not in name:  # torch's norm is the engine's only where `p.grad` is no plain tensor
                    assert all(torch.equal(same[key], value) for key, value in of_plans[0][1].items()), (name, plan)
            found[name] = weights["0.weight"]
        assert len({float(weight.double().sum()) for weight in found.values()}) > len(found) / 2  # the control

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_a_discarded_gradient_takes_its_clip_along(rank: int) -> None:
    for plan in PLANS:
        clipped, plain = Steps(rank, 2, plan), Steps(rank, 2, plan)
        for steps in (clipped, plain):
            steps.backward()
            if steps is clipped:
                steps.norm(1e-3)
                steps.value(1e-4)
            steps.model.zero_grad()
            steps.backward()
            steps.optimizer.step()
        assert all(torch.equal(clipped.weights()[name], value) for name, value in plain.weights().items()), plan


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type: float) -> None:
    def check(rank: int) -> None:
        steps = Steps(rank, 2, zeroshard.ZERO2)
        steps.backward()
        steps.norm(1.0, norm_type)

    with pytest.raises(RankError, match="norm_type must be a positive number"):
        run_ranks(check, 2)


@on_ranks(2)
def test_clips_of_weighted_losses(rank: int) -> None:
    """The gradients are not the final ones until the step: its bound is known to a clip by norm, and to no backward."""
    for plan in PLANS:
        steps = Steps(rank, 2, plan)
        steps.optimizer.backward(steps._loss(rank), weight=10.0 + 10 * rank)
        first, second = steps.norm(0.1), steps.norm(0.05)
        assert first > 1 and second == pytest.approx(0.1, rel=1e-4)
        steps.value(0.01)
        left = steps.norm(1.0)
        assert 0.01 < left < 0.05
        steps.value(0.005)
        with pytest.raises(zeroshard.Error, match="between clip_grad_value_ and the step"):
            steps.read()
        before = {name: value.clone() for name, value in steps.weights().items()}
        steps.optimizer.step()
        moved = torch.cat([(steps.weights()[name] - value).view(-1) for name, value in before.items()])
        assert moved.norm() < left and 0.005 * 0.99 < moved.abs().max() <= 0.005 * 1.001


@on_ranks(2)
def test_clipped_gradients_are_rounded_to_mains_dtype_alone(rank: int) -> None:
    """Gradients of 16 bits times the factor would be rounded twice."""
    for plan in PLANS:
        torch.manual_seed(0)
        model = nn.Linear(8, 6)
        handle = zeroshard.shard(model, plan, precision=zeroshard.MixedPrecision(grad=torch.bfloat16))
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        before = handle.full_state_dict(main=True)
        model(torch.full((5, 8), 1.0 + rank)).square().sum().backward()
        gradients = {name: handle.gradient(name).float() for name in before}
        factor = 0.1 / optimizer.clip_grad_norm_(0.1).item()
        optimizer.step()
        for name, after in handle.full_state_dict(main=True).items():
            torch.testing.assert_close(before[name] - after, gradients[name] * factor, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_weights_that_are_read_between_a_clip_and_the_step_are_those_before_it(rank: int) -> None:
    """The ranks agree at the clip. A rank that then read its peers' memory found what they had stepped already."""

    def in_scope(steps: Steps) -> dict[str, Tensor]:
        with steps.handle.unsharded():
            return cloned(dict(steps.model.named_parameters()))

    def in_forward(steps: Steps) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"output": steps.model(torch.ones(5, 8))}

    def cloned(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in values.items()}

    for number in range(60 if EVERYTHING else 24):
        read = (lambda steps: cloned(steps.weights()), in_scope, in_forward)[number % 3]
        steps = Steps(rank, 2, zeroshard.ZERO3)
        expected = read(steps)
        steps.backward()
        steps.norm(0.1)
        found = read(steps)
        steps.optimizer.step()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), number
        assert not any(torch.equal(after, expected[name]) for name, after in read(steps).items())


class Experts(nn.Module):
    """`names`: the experts that a call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(12))
        self.bias = nn.Parameter(torch.zeros(1))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, names: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for name in names:
            x = x + self.experts[name](x)
        return x + self.bias + self.nothing.sum() if 0 in names else x


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_whose_gradients_are_zero_clips_as_the_others(num_ranks: int) -> None:
    """Rank 0 has no data, and multiplies its loss by 0. Under `ddp` it once had gradients of zero in `p.grad` that the
    other ranks did not have there, as no reduced element told them of it: torch added up another list of norms, and in
    7 of 20 runs the factors of the clip differed in the last bits."""

    def loss(model: nn.Module, rank: int, zero: float) -> Tensor:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        names = ((1, 2, 7, 0), (3, 5, 8), (3, 9))[rank]
        return model(x, names).square().sum() * (1.0 if rank else zero)

    def step(rank: int, plan: zeroshard.Plan | None, seed: int, zero: float) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        model = Experts()
        if plan is None:
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        else:
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        for _ in range(2):  # two micro-batches: the first sum is a part of the second
            if plan is None:
                for each in range(num_ranks):
                    (loss(model, each, zero) / num_ranks).backward()
            else:
                loss(model, rank, zero).backward()
        if plan in (None, zeroshard.DDP):
            unused = {"experts.4", "experts.6", "experts.10", "experts.11"} | (
                {"experts.9"} if num_ranks == 2 else set()
            )
            without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
            assert {name.rpartition(".")[0] for name in without} == unused, without
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return handle.full_state_dict() if plan is not None else model.state_dict()

    def check(rank: int) -> None:
        for seed in range(10 if EVERYTHING else 6):
            zero, way = (0.0, -0.0)[seed % 2], ("shared", "pairwise", "native")[seed % 3]
            expected = step(rank, None, seed, zero)
            with travelling(way):
                for plan in PLANS if seed < 2 else [zeroshard.DDP]:
                    torch.testing.assert_close(step(rank, plan, seed, zero), expected, rtol=1e-4, atol=1e-6, msg=way)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_bound_does_not_change_what_a_step_reports_and_skips(num_ranks: int) -> None:
    """Under DDP (and on one rank) the bound is applied at once. The step found the norm of what it had left: it skipped
    another step by `skip_norm_above` than the other plans, and updated with an infinite gradient. The same after a clip
    by norm, if weights were read before the step."""

    def check(rank: int) -> None:
        found: dict[str, set[str]] = {}
        for plan in PLANS:
            for case in ("", "norm", "read", "skip", "inf"):
                steps = Steps(rank, num_ranks, plan, skip_norm_above=1.0 if case == "skip" else None)
                if case == "inf":
                    steps.model[1].bias.register_hook(lambda gradient: gradient * math.inf)
                steps.backward()
                if case in ("norm", "read"):
                    steps.norm(0.5)
                if case == "read":
                    steps.handle.full_state_dict()
                else:
                    steps.value(0.1)
                try:
                    result = str(steps.optimizer.step())
                except RuntimeError as error:
                    result = str(error).partition(":")[0]
                found.setdefault(case, set()).add(result)
        assert all(len(results) == 1 for results in found.values()), found
        assert "applied=False" in str(found["skip"]) and "was not finite" in str(found["inf"])
        assert found["norm"] == found["read"] == found[""]

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_a_bound_for_gradients_set_by_hand(rank: int) -> None:
    """They were not bounded, in silence: their mean is found in the step, and bounds were applied before."""
    for plan in PLANS:
        steps = Steps(rank, 2, plan)
        before = steps.weights()
        steps.backward()
        steps.model[1].bias.grad = torch.full((4,), 3.0 + rank)
        with pytest.raises(RuntimeError, match="gradients have been set by hand"):
            steps.value(0.1)
        steps.norm(math.inf)
        steps.value(0.1)
        steps.optimizer.step()
        torch.testing.assert_close(before["1.bias"] - steps.weights()["1.bias"], torch.full((4,), 0.1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_bound_before_a_norm_hides_no_overflow(num_ranks: int) -> None:
    """The norm was that of the bounded gradient, which is finite: the step updated with it, also where losses are
    scaled. With non_finite="ignore" it still does."""

    def check(rank: int) -> None:
        for kind in (1.0, 2.0, math.inf):
            for scale, policy in ((None, "skip"), (None, None), (8.0, None), (None, "ignore")):
                for plan in PLANS:
                    steps = Steps(rank, num_ranks, plan, loss_scale=scale, non_finite=policy)
                    steps.model[1].bias.register_hook(lambda gradient: gradient * math.inf)
                    steps.optimizer.backward(steps.model(torch.ones(2, 8)).square().sum())
                    steps.value(0.1)
                    norm = steps.norm(1.0, kind)
                    assert math.isnan(norm) == (policy != "ignore"), (plan, norm)
                    if policy is None and scale is None:
                        with pytest.raises(RuntimeError, match="the gradient was not finite"):
                            steps.optimizer.step()
                    else:
                        result = steps.optimizer.step()
                        assert result.applied == (policy == "ignore")
                        assert math.isnan(result.grad_norm) == (policy != "ignore")

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_a_resumed_run_has_the_norms_of_one_that_goes_on(rank: int) -> None:
    """Main is cut where some parameters have no gradient in a step, and by a new optimizer where step counts differ:
    the last bits of norms depended on it, and of what is clipped by them."""

    def new() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(4)))
        handle = zeroshard.shard(model, "zero1")
        return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.01, foreach=False)

    def step(model: Any, optimizer: Any, layers: slice, seed: int) -> str:
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(10 * seed + rank))
        model[layers](x).square().sum().backward()
        optimizer.clip_grad_norm_(0.1)
        return str(optimizer.step())

    model, handle, optimizer = new()
    for number, layers in enumerate((slice(4), slice(1), slice(1, 2))):
        step(model, optimizer, layers, number)
    other_model, other_handle, other = new()
    other_handle.load_full_state_dict(handle.full_state_dict())
    other.load_state_dict(optimizer.state_dict())
    for number in range(3, 6):
        assert step(model, optimizer, slice(4), number) == step(other_model, other, slice(4), number)
    ends = handle.full_state_dict(), other_handle.full_state_dict()
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
