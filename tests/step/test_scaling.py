"""Loss scaling: all ranks skip a step that overflows, nothing changes, and errors name the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of, same_bits, train, with_plans
from tests.parity.common import FP16, FP32, Job, expect_equal_logs
from tests.together import in_turn, on_ranks
from zeroshard.loss_scale import ConstantScale, DynamicScale
from zeroshard.optim import Lamb
from zeroshard.placement import Plan
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

PER_PLAN = 25 if EVERYTHING else 4
ADAMW = {"lr": 1e-2, "foreach": False}


def snapshot(handle: Any, optimizer: Any) -> dict[str, Tensor]:
    """Copies of everything in this rank's memory that a step may change: weights, main, moments, step counts."""
    kinds: dict[str, Tensor] = {}
    for unit in handle.engine.units:
        kinds[f"{unit.name} weights"] = unit.weights.buffer.shard
        if unit.main.extra is not None:
            kinds[f"{unit.name} main"] = unit.main.extra
    for at, stepper in enumerate(optimizer.steppers):
        for number, state in enumerate(stepper.optimizer.state.values()):
            kinds |= {f"{at} {number} {key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {key: value.detach().clone() for key, value in kinds.items()}


def poisoned(model: nn.Module, parameter: nn.Parameter, value: float, element: int) -> Any:
    """Set one element of the parameter's gradient to `value` in backward."""

    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.reshape(-1)[element % grad.numel()] = value
        return grad

    return parameter.register_hook(hook)


class WithEmptyShards(nn.Module):
    """Small units next to a larger one: with shards padded to 256 elements, most ranks hold only padding of the small
    ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 40), nn.Linear(40, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 3, generator=generator)).float().square().mean()


CASES = [
    ("fp16", torch.optim.AdamW, ADAMW),
    ("bf16-remainder", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (MixedPrecision(FP16, FP16, None, FP32), Lamb, {"lr": 1e-2}),
]


def test_overflows_change_nothing_on_any_rank() -> None:
    """inf and NaN on each rank, in each of five parameters, also in units of which a rank has only padding: 3
    optimizers, 2 plans each, 4 overflows each (4 plans and 25, or 300 in all, with `make test-everything`), with finite
    steps in between. Value, rank and parameter of number n are n // 3 % 3, n % 3 and n % 5, so that 15 in a row have
    each parameter on each rank, and 45 are all combinations."""

    def check(rank: int) -> list[Any]:
        logs, overflows = [], 0
        cases = with_plans(CASES)
        for (precision, optimizer_class, defaults), plan in cases:
            model = make(WithEmptyShards)
            handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
            empty = [unit.name for unit in handle.engine.units if not unit.layout.fragments(rank)]
            assert bool(empty) == (rank > 0)
            policy = DynamicScale(init=2.0**12, growth_interval=1000, max_skips=None)
            optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, loss_scale=policy, **defaults)
            parameters = list(model.parameters())
            optimizer.backward(loss_of(model, rank, 0))
            assert optimizer.step().applied
            scale = optimizer.scaling.default.scale
            for number in range(overflows, overflows + PER_PLAN):
                hook = None
                if rank == number % 3:
                    value = (torch.inf, -torch.inf, torch.nan)[number // 3 % 3]
                    hook = poisoned(model, parameters[number % len(parameters)], value, 7 * number)
                before = snapshot(handle, optimizer)
                optimizer.backward(loss_of(model, rank, 2 + number))
                result = optimizer.step()
                assert not result.applied and result.loss_scale == scale
                after = snapshot(handle, optimizer)
                assert same_bits(before, after), (plan, number)
                scale = max(1.0, scale / 2)
                assert optimizer.scaling.default.scale == scale
                if hook is not None:
                    hook.remove()
                if number % 5 == 4:
                    optimizer.backward(loss_of(model, rank, 100 + number))
                    assert optimizer.step().applied
                    assert not same_bits(before, snapshot(handle, optimizer)) or empty
            assert all(torch.isfinite(value).all() for value in handle.full_state_dict(main=True).values())
            logs.append(handle.comm_log)
            overflows += PER_PLAN
        assert overflows == len(cases) * PER_PLAN >= 15
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_equal_logs(logs)


def test_without_the_check_an_overflow_destroys_the_weights() -> None:
    """The negative control: the same fault under `non_finite="ignore"`."""

    def check(rank: int) -> None:
        for plan in plans_of(0):
            model = make(WithEmptyShards)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore", **ADAMW)
            if rank == 1:
                poisoned(model, model.second.weight, torch.inf, 0)
            before = snapshot(handle, optimizer)
            optimizer.backward(loss_of(model, rank, 0))
            assert optimizer.step().applied
            assert not same_bits(before, snapshot(handle, optimizer)) or rank > 0
            values = handle.full_state_dict().values()
            assert sum(int((~torch.isfinite(value)).sum()) for value in values) >= 1

    run_ranks(check, 3)


@on_ranks(2)
def test_random_numbers_are_not_drawn_by_a_skipped_step(rank: int) -> None:
    model = make(WithEmptyShards)
    zeroshard_handle = zeroshard.shard(model, "zero2", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(zeroshard_handle, torch.optim.AdamW, loss_scale="dynamic", **ADAMW)
    optimizer.backward(loss_of(model, rank, 0) * torch.inf)
    state = torch.get_rng_state()
    assert not optimizer.step().applied
    assert torch.equal(state, torch.get_rng_state())


# Growth, saving -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_scale_grows_and_backs_off_as_torchs_scaler_on_one_process(rank: int) -> None:
    """Under fp16 the history of scales is that of GradScaler with the same sequence of overflows."""
    options = {"growth_interval": 3, "growth_factor": 2.0, "backoff_factor": 0.5}
    for plan in PLANS if EVERYTHING else [zeroshard.ZERO2]:  # the scale is in the same code under all
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block, precision=MixedPrecision(FP16, FP16, None, FP32))
        policy = DynamicScale(init=2.0**17, **options)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.01, loss_scale=policy)
        found, applied = [], []
        for step in range(24):
            optimizer.backward(loss_of_tokens(model, rank, 0, step))
            result = optimizer.step()
            found.append(result.loss_scale)
            applied.append(result.applied)
        assert not all(applied) and sum(applied) > 12
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, **options)
        weight = nn.Parameter(torch.zeros(3))
        plain = torch.optim.SGD([weight], lr=0.01)
        expected = []
        for ok in applied:
            expected.append(scaler.get_scale())
            scaler.scale((weight * (1.0 if ok else torch.inf)).sum()).backward()
            scaler.step(plain)
            scaler.update()
            plain.zero_grad()
        assert found == expected


@on_ranks(2)
def test_the_scale_is_saved_with_the_optimizer_and_goes_on(rank: int) -> None:
    def build() -> tuple[nn.Module, Any, Any]:
        model = make(Net)
        handle = zeroshard.shard(model, "zero3", units=Block, precision="fp16")
        policy = DynamicScale(init=2.0**20, growth_interval=2)
        return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, loss_scale=policy, **ADAMW)

    def run(model: nn.Module, optimizer: Any, steps: range) -> list[tuple[float, bool]]:
        history = []
        for step in steps:
            optimizer.backward(loss_of_tokens(model, rank, 0, step))
            result = optimizer.step()
            history.append((result.loss_scale, result.applied))
        return history

    model, handle, optimizer = build()
    run(model, optimizer, range(7))
    weights, state = handle.full_state_dict(main=True), optimizer.state_dict()
    assert set(state["loss_scale"]) == {"scale", "growth_tracker", "hysteresis_left", "skips_in_a_row"}
    expected = run(model, optimizer, range(7, 14))
    other, other_handle, resumed = build()
    other_handle.load_full_state_dict(weights)
    resumed.load_state_dict(state)
    assert run(other, resumed, range(7, 14)) == expected
    assert same_bits(other_handle.full_state_dict(main=True), handle.full_state_dict(main=True))
    fresh, fresh_handle, forgot = build()
    fresh_handle.load_full_state_dict(weights)
    forgot.load_state_dict({key: value for key, value in state.items() if key != "loss_scale"})
    assert run(fresh, forgot, range(7, 14)) != expected  # the negative control
    torch.optim.AdamW(make(Net).parameters()).load_state_dict(state)  # a plain optimizer can load it, too


@on_ranks(2)
def test_powers_of_two_do_not_change_an_fp32_run(rank: int) -> None:
    """Scaling by a power of two is exact; another scale rounds (the negative control)."""
    plain = train(Job(), zeroshard.ZERO2, rank)
    for policy in (ConstantScale(2.0**10), DynamicScale(growth_interval=1)):
        assert same_bits(train(Job(scale=policy), zeroshard.ZERO2, rank).weights, plain.weights)
    odd = train(Job(scale=ConstantScale(1000.0)), zeroshard.ZERO2, rank)
    assert not same_bits(odd.weights, plain.weights)


# Giving up ------------------------------------------------------------------------------------------------------------


def test_too_many_skips_name_parameter_rank_and_micro_batch() -> None:
    def check(rank: int, plan: Any) -> str:
        model = make(WithEmptyShards)
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision="fp16")
        policy = DynamicScale(max_skips=4)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, loss_scale=policy, **ADAMW)
        before = snapshot(handle, optimizer)
        for number in range(4):
            for micro_batch in range(3):
                hook = None
                if (rank, micro_batch) == (2, 1):
                    hook = poisoned(model, model.second.bias, torch.nan, 3)
                with handle.no_sync() if micro_batch < 2 else torch.enable_grad():
                    optimizer.backward(loss_of(model, rank, 3 * number + micro_batch))
                if hook is not None:
                    hook.remove()
            if number < 3:
                assert not optimizer.step().applied
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        assert same_bits(before, snapshot(handle, optimizer))
        return str(error.value)

    messages, *others = run_ranks(in_turn(check, plans_of(1)), 3)
    assert all(other == messages for other in others)
    for message in messages:
        for part in ("4 times in a row", "second.bias (micro-batch 1) on rank 2", "Nothing has been updated"):
            assert part in message
        assert "first" not in message and "on rank 0" not in message


@on_ranks(2)
def test_a_finite_step_in_between_starts_the_count_anew(rank: int) -> None:
    model = make(WithEmptyShards)
    zeroshard.shard(model, "zero2", units=nn.Linear)
    policy = ConstantScale(4.0, max_skips=2)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, loss_scale=policy, **ADAMW)
    for bad in (True, False, True, False, True):
        optimizer.backward(loss_of(model, rank, 0) * (torch.nan if bad else 1.0))
        assert optimizer.step().applied is not bad
    optimizer.backward(loss_of(model, rank, 0) * torch.nan)
    with pytest.raises(RuntimeError, match="2 times in a row"):
        optimizer.step()


# Without a scale ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_raise_skip_and_ignore_without_a_scale(rank: int) -> None:
    def check(rank: int, precision: str, plan: Plan) -> None:
        for choice in (None, "raise", "skip", "ignore"):
            model = make(WithEmptyShards)
            handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite=choice, **ADAMW)
            before = snapshot(handle, optimizer)
            if rank == 1:
                poisoned(model, model.first.weight, torch.inf, 2)
            optimizer.backward(loss_of(model, rank, 0))
            if choice != "ignore":
                assert not optimizer.clip_grad_norm_(1.0).isfinite()  # the step deals with it
                with pytest.raises(RuntimeError, match="error_if_nonfinite"):
                    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
            if choice in (None, "raise"):
                with pytest.raises(RuntimeError, match=r"not finite.*first\.weight"):
                    optimizer.step()
            else:
                result = optimizer.step()
                assert result.applied is (choice == "ignore") and not result.grad_norm < torch.inf
            same = same_bits(before, snapshot(handle, optimizer))
            assert same is (choice != "ignore") or rank > 0

    in_turn(check, with_plans(["fp32", "bf16", "bf16-remainder"]))(rank)


@on_ranks(2)
def test_a_step_after_the_error_goes_on(rank: int) -> None:
    model = make(WithEmptyShards)
    zeroshard.shard(model, "zero3", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    optimizer.backward(loss_of(model, rank, 0) * torch.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, rank, 1))
    assert optimizer.step().applied


@on_ranks(2)
def test_a_scheduler_can_tell(rank: int) -> None:
    """`step()` returns whether it was applied, so a scheduler can step only then."""
    model = make(WithEmptyShards)
    zeroshard.shard(model, "zero2", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, loss_scale="dynamic")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for bad in (False, True, True, False):
        optimizer.backward(loss_of(model, rank, 0) * (torch.inf if bad else 1.0))
        if optimizer.step().applied:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


# torch.amp.GradScaler -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_torchs_grad_scaler_is_refused_with_the_way_to_do_it(rank: int) -> None:
    for unscale_first in (False, True):
        model = make(WithEmptyShards)
        zeroshard.shard(model, "zero2", units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, rank, 0)).backward()
        with pytest.raises(RuntimeError, match=r"loss_scale='dynamic'.*optimizer.backward\(loss\)"):
            scaler.unscale_(optimizer) if unscale_first else scaler.step(optimizer)
        optimizer.zero_grad()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(loss_of(model, rank, 0)).backward()
    assert disabled.step(optimizer).applied


@on_ranks(2)
def test_a_scaled_optimizer_wants_scaled_losses(rank: int) -> None:
    model = make(WithEmptyShards)
    zeroshard.shard(model, "zero2", units=nn.Linear, precision="fp16")
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for step in range(2):
        loss_of(model, rank, step).backward()
        with pytest.raises(RuntimeError, match=r"optimizer.backward\(loss\)"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, rank, step))
        assert optimizer.step().applied  # that loss says nothing about the next one, also without a `zero_grad`


@on_ranks(2)
def test_16_bit_losses_are_scaled_in_fp32(rank: int) -> None:
    """An fp16 loss of about 100 times a scale of 2^10 exceeds the range of fp16."""
    model = make(lambda: nn.Linear(4, 1, bias=False))
    handle = zeroshard.shard(model, "zero2", precision=MixedPrecision(FP16, FP32, None, FP32))
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0, loss_scale=2.0**10)
    before = handle.full_state_dict(main=True)["weight"]
    loss = model(torch.full((1, 4), 8.0)).sum() + 100
    assert loss.dtype == FP16 and not torch.isfinite(loss * 2.0**10)
    optimizer.backward(loss)
    assert optimizer.step().applied
    assert torch.equal(before - handle.full_state_dict(main=True)["weight"], torch.full((1, 4), 8.0))
