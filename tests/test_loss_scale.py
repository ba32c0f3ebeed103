"""The loss scale against torch's scaler, against a restatement of Megatron-LM's rule, and by its own invariants."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.loss_scale import FP32_MAX, ConstantScale, DynamicScale, LossScaler, ScaleState

WIDE = {"floor": 2.0**-120, "max_scale": 2.0**120}  # bounds that 60 steps do not reach, as torch's scaler has none
HISTORIES = st.lists(st.booleans(), max_size=60)
FACTORS = st.sampled_from([(2.0, 0.5), (1.5, 0.7), (1.1, 0.9), (3.0, 0.1)])


def trajectory(policy: ConstantScale | DynamicScale, history: list[bool]) -> list[ScaleState]:
    """The state after each step."""
    states = [policy.initial_state()]
    for found_inf in history:
        states.append(policy.next_state(states[-1], found_inf))
    return states[1:]


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


# torch ---------------------------------------------------------------------------------------------------------------


def torch_scales(policy: DynamicScale, history: list[bool]) -> list[tuple[float, int]]:
    """(scale, growth tracker) after each step of torch's own kernel."""
    scale, tracker = torch.tensor(policy.init), torch.tensor(0, dtype=torch.int32)
    result = []
    for found_inf in history:
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(found_inf)),
            policy.growth_factor, policy.backoff_factor, policy.growth_interval,
        )  # fmt: skip
        result.append((scale.item(), int(tracker)))
    return result


@given(HISTORIES, FACTORS, st.integers(1, 5), st.sampled_from([2.0**16, 3.0, 1000.1]))
def test_with_hysteresis_one_it_is_torchs_update(
    history: list[bool], factors: tuple[float, float], interval: int, init: float
) -> None:
    policy = DynamicScale(init, *factors, growth_interval=interval, **WIDE)
    assert [(s.scale, s.growth_tracker) for s in trajectory(policy, history)] == torch_scales(policy, history)


def test_with_hysteresis_two_it_is_not_torchs_update() -> None:
    """Negative control of the comparison above."""
    policy = DynamicScale(hysteresis=2, growth_interval=3, **WIDE)
    history = [False, True, False]
    assert [(s.scale, s.growth_tracker) for s in trajectory(policy, history)] != torch_scales(policy, history)


def test_the_whole_grad_scaler_gives_the_same_scales() -> None:
    """torch.amp.GradScaler around an optimizer, with gradients that overflow at random."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=4)
    ours = LossScaler(DynamicScale(256.0, 1.7, 0.3, 4, **WIDE))
    scales = set()
    for _ in range(200):
        found_inf = torch.rand((), generator=generator).item() < 0.2
        theirs.scale(weight.sum()).backward()
        assert weight.grad is not None
        if found_inf:
            weight.grad[1] = math.inf
        theirs.step(sgd)
        theirs.update()
        sgd.zero_grad()
        ours.update(found_inf)
        assert ours.scale == theirs.get_scale()
        scales.add(ours.scale)
    assert len(scales) > 20


# Megatron-LM ---------------------------------------------------------------------------------------------------------


def rule_by_rule(policy: DynamicScale, history: list[bool]) -> list[float]:
    """Megatron-LM's DynamicGradScaler, written as a rule over the history instead of with counters.

    A step grows if it ends `growth_interval` finite steps in a row, counted from the last growth. An overflow backs off
    unless fewer than `hysteresis` overflows, itself included, have happened since the last growth.
    """
    scale, growth, scales = policy.init, 0, []
    for step, found_inf in enumerate(history, start=1):
        epoch = history[growth:step]
        if found_inf and sum(epoch) >= policy.hysteresis:
            scale = max(fp32(scale * policy.backoff_factor), policy.floor)
        elif len(epoch) >= policy.growth_interval and not any(epoch[-policy.growth_interval :]):
            scale, growth = min(fp32(scale * policy.growth_factor), policy.max_scale), step
        scales.append(scale)
    return scales


@given(HISTORIES, st.integers(1, 4), st.integers(1, 4))
def test_hysteresis_is_megatrons(history: list[bool], interval: int, hysteresis: int) -> None:
    policy = DynamicScale(2.0**4, growth_interval=interval, hysteresis=hysteresis, floor=2.0, max_scale=2.0**6)
    assert [s.scale for s in trajectory(policy, history)] == rule_by_rule(policy, history)


def test_hysteresis_in_one_example() -> None:
    """Two overflows do not back off, in a row or not; the third and all later ones do, until the next growth."""
    policy = DynamicScale(64.0, growth_interval=2, hysteresis=3)
    x, o = True, False
    #          forgiven   backs off  grows    forgiven   backs off
    history = [x, o, x, x, x, o, o, x, o, x, x]
    scales = [64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 32.0, 32.0, 16.0]
    assert [s.scale for s in trajectory(policy, history)] == scales


@pytest.mark.parametrize(
    "mutant", ["refill credit after a backoff", "refill credit on a finite step", "keep the tracker on an overflow"]
)
def test_the_rule_tells_near_misses_apart(mutant: str) -> None:
    """Negative control: the comparison with Megatron's rule detects each of three plausible mistakes."""
    policy = DynamicScale(2.0**10, growth_interval=3, hysteresis=2, **WIDE)
    generator = torch.Generator().manual_seed(1)
    history = (torch.rand(60, generator=generator) < 0.4).tolist()
    state, scales = policy.initial_state(), []
    for found_inf in history:
        before, state = state, policy.next_state(state, found_inf)
        if mutant == "refill credit after a backoff" and state.scale < before.scale:
            state = dataclasses.replace(state, hysteresis_left=policy.hysteresis)
        if mutant == "refill credit on a finite step" and not found_inf:
            state = dataclasses.replace(state, hysteresis_left=policy.hysteresis)
        if mutant == "keep the tracker on an overflow" and found_inf:
            state = dataclasses.replace(state, growth_tracker=before.growth_tracker)
        scales.append(state.scale)
    assert scales != rule_by_rule(policy, history)


# Invariants ----------------------------------------------------------------------------------------------------------


@given(HISTORIES, FACTORS, st.integers(1, 4), st.integers(1, 4))
def test_invariants(history: list[bool], factors: tuple[float, float], interval: int, hysteresis: int) -> None:
    policy = DynamicScale(2.0**8, *factors, interval, hysteresis, floor=2.0**5, max_scale=2.0**10)
    before = policy.initial_state()
    for step, found_inf in enumerate(history):
        kept = dataclasses.replace(before)
        state = policy.next_state(before, found_inf)
        assert before == kept and state == policy.next_state(before, found_inf), "pure"
        assert policy.floor <= state.scale <= policy.max_scale
        assert state.scale == fp32(state.scale)
        assert state.scale <= before.scale if found_inf else state.scale >= before.scale
        assert 0 <= state.growth_tracker < interval and 0 <= state.hysteresis_left <= hysteresis
        last_finite = max((i for i in range(step + 1) if not history[i]), default=-1)
        assert state.skips_in_a_row == step - last_finite
        before = state


@given(HISTORIES, HISTORIES)
def test_a_saved_scaler_goes_on_as_if_nothing_had_happened(first: list[bool], second: list[bool]) -> None:
    policy = DynamicScale(1.0, 1.3, 0.7, growth_interval=3, hysteresis=2, floor=0.01)
    running = LossScaler(policy)
    for found_inf in first:
        running.update(found_inf)
    resumed = LossScaler(policy)
    resumed.load_state_dict(running.state_dict())
    for found_inf in second:
        running.update(found_inf)
        resumed.update(found_inf)
        assert resumed.state == running.state


def test_a_scaler_takes_what_the_optimizer_takes() -> None:
    assert LossScaler().policy == LossScaler("dynamic").policy == DynamicScale()
    assert LossScaler(8).policy == ConstantScale(8.0)
    with pytest.raises(ValueError, match="loss_scale must be a policy, a number, 'dynamic' or None, found 'dynamc'"):
        LossScaler("dynamc")  # type: ignore[arg-type]


def test_the_state_is_four_plain_numbers() -> None:
    scaler = LossScaler(DynamicScale(8.0, hysteresis=2))
    scaler.update(True)
    scaler.update(False)
    assert scaler.state_dict() == {"scale": 8.0, "growth_tracker": 1, "hysteresis_left": 1, "skips_in_a_row": 0}
    assert [type(value) for value in scaler.state_dict().values()] == [float, int, int, int]


def test_the_bounds_hold_where_the_scale_starts_on_them() -> None:
    policy = DynamicScale(4.0, growth_interval=1, floor=4.0, max_scale=4.0)
    assert [s.scale for s in trajectory(policy, [True, False, False])] == [4.0, 4.0, 4.0]


def test_the_largest_scale_does_not_grow_to_infinity() -> None:
    """torch refuses a growth beyond the largest fp32 number; here `max_scale` cannot exceed that number."""
    policy = DynamicScale(FP32_MAX, growth_interval=1, max_scale=FP32_MAX)
    assert policy.next_state(policy.initial_state(), False).scale == FP32_MAX == torch.finfo(torch.float32).max
    assert torch_scales(policy, [False]) == [(FP32_MAX, 0)]


@pytest.mark.parametrize("policy", [ConstantScale(3.0, max_skips=3), DynamicScale(max_skips=3)])
def test_exhausted_after_max_skips_in_a_row(policy: ConstantScale | DynamicScale) -> None:
    scaler = LossScaler(policy)
    for found_inf, skips, exhausted in [
        (True, 1, False), (True, 2, False), (False, 0, False),
        (True, 1, False), (True, 2, False), (True, 3, True), (True, 4, True), (False, 0, False),
    ]:  # fmt: skip
        scaler.update(found_inf)
        assert (scaler.skips_in_a_row, scaler.exhausted) == (skips, exhausted)


def test_the_default_gives_up_only_after_the_whole_range_has_been_tried() -> None:
    scaler = LossScaler(DynamicScale(init=2.0**24))
    while scaler.scale > 1.0:
        scaler.update(True)
        assert not scaler.exhausted


def test_never_exhausted_without_a_limit() -> None:
    scaler = LossScaler(ConstantScale(max_skips=None))
    for _ in range(1000):
        scaler.update(True)
    assert not scaler.exhausted


@given(HISTORIES)
def test_a_constant_scale_is_constant(history: list[bool]) -> None:
    assert {s.scale for s in trajectory(ConstantScale(1024.0), history)} <= {1024.0}


def test_scales_are_fp32_numbers() -> None:
    for scaler in (LossScaler(ConstantScale(0.1)), LossScaler(DynamicScale(1.1))):
        assert scaler.scale == fp32(scaler.scale)
    assert fp32(0.1) != 0.1 and fp32(1.1) != 1.1  # so the assertions above are not trivial


# Loading under another policy ----------------------------------------------------------------------------------------


def test_a_loaded_scale_is_moved_inside_the_bounds() -> None:
    saved = LossScaler(DynamicScale(2.0**20, hysteresis=4)).state_dict()
    scaler = LossScaler(DynamicScale(2.0, max_scale=2.0**10, hysteresis=2))
    scaler.load_state_dict(saved)
    assert scaler.state == ScaleState(2.0**10, hysteresis_left=2)


def test_a_constant_scale_keeps_its_value_when_a_dynamic_state_is_loaded() -> None:
    dynamic = LossScaler(DynamicScale(2.0**20))
    dynamic.update(True)
    scaler = LossScaler(ConstantScale(128.0))
    scaler.load_state_dict(dynamic.state_dict())
    assert scaler.state == ScaleState(128.0, skips_in_a_row=1)


def test_a_dynamic_scale_behind_a_constant_one_has_all_its_hysteresis() -> None:
    """The first overflow reduced the scale, as a constant one counts none."""
    scaler = LossScaler(DynamicScale(hysteresis=3))
    scaler.load_state_dict(LossScaler(ConstantScale(128.0)).state_dict())
    assert scaler.state == ScaleState(128.0, hysteresis_left=3)
    for expected in (128.0, 128.0, 64.0, 32.0):
        scaler.update(True)
        assert scaler.scale == expected
    scaler.update(False)
    kept = scaler.state
    scaler.load_state_dict(scaler.state_dict())  # the control: one of its own with none left
    assert scaler.state == kept and kept.hysteresis_left == 0


def test_a_tracker_past_a_shortened_interval_still_grows() -> None:
    """With `==` in place of `>=`, the scale would never grow again."""
    scaler = LossScaler(DynamicScale(2.0, growth_interval=5))
    scaler.load_state_dict({"scale": 2.0, "growth_tracker": 1000, "hysteresis_left": 1, "skips_in_a_row": 0})
    scaler.update(False)
    assert scaler.scale == 4.0


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": 0.0}, "init must be positive and finite in fp32, found 0.0"),
        ({"init": -4.0}, "found -4.0"),
        ({"init": math.nan}, "found nan"),
        ({"init": math.inf}, "found inf"),
        ({"max_scale": 1e39}, "max_scale must be positive and finite in fp32, found 1e[+]39"),
        ({"floor": 0.0}, "floor must be positive"),
        ({"floor": 4.0, "init": 2.0}, "floor <= init <= max_scale, found 4.0 <= 2.0"),
        ({"init": 2.0**25}, "floor <= init <= max_scale"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1 .2 is usual., found 1.0"),
        ({"growth_factor": math.nan}, "growth_factor must be above 1"),
        ({"growth_factor": math.inf}, "growth_factor must be above 1"),
        ({"backoff_factor": 0.0}, "backoff_factor must lie between 0 and 1 .0.5 is usual., found 0.0"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"backoff_factor": math.nan}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval must be an integer from 1, found 0"),
        ({"growth_interval": 2.5}, "growth_interval must be an integer from 1, found 2.5"),
        ({"hysteresis": 0}, "hysteresis must be an integer from 1, found 0"),
        ({"hysteresis": True}, "hysteresis must be an integer from 1, found True"),
        ({"max_skips": 0}, "max_skips must be an integer from 1, found 0"),
    ],
)
def test_a_dynamic_scale_is_checked_at_birth(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DynamicScale(**options)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-60, 1e39])
def test_a_constant_scale_is_checked_at_birth(value: float) -> None:
    with pytest.raises(ValueError, match="value must be positive and finite"):
        ConstantScale(value)
    with pytest.raises(ValueError, match="max_skips"):
        ConstantScale(1.0, max_skips=-1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": math.nan}, "scale must be positive"),
        ({"growth_tracker": -1}, "growth_tracker must be an integer from 0, found -1"),
        ({"hysteresis_left": 0.5}, "hysteresis_left must be an integer"),
        ({"_growth_tracker": 3}, "a state has the keys .* Pass what"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(change: dict[str, Any], words: str) -> None:
    scaler = LossScaler(DynamicScale())
    before = scaler.state
    with pytest.raises(ValueError, match=words):
        scaler.load_state_dict({**scaler.state_dict(), **change})
    with pytest.raises(ValueError, match="a state has the keys"):
        scaler.load_state_dict({"scale": 2.0})
    assert scaler.state is before
