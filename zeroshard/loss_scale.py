"""Loss scaling: the factor on the loss that keeps small fp16 gradients from underflowing; policies are state machines.

    next_state(state, found_inf)      finite                                     not finite
    growth_tracker                    + 1; at growth_interval: 0, and            0
    scale                                 x growth_factor, at most max_scale     once hysteresis_left is 0:
                                                                                 x backoff_factor, at least floor
    hysteresis_left                       back to hysteresis                     - 1, down to 0
    skips_in_a_row                    0                                          + 1

With hysteresis 1 this is `torch.amp.GradScaler` (except for the two bounds). With a larger hysteresis it is
`DynamicGradScaler` of NVIDIA/Megatron-LM, megatron/core/optimizer/grad_scaler.py: the first `hysteresis - 1` overflows
since the last growth, in a row or not, do not change the scale; each further one multiplies it by `backoff_factor`,
until a growth resets the count.

Every scale is an fp32 number, so that the factor on an fp32 loss is exactly the number by which gradients are divided.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from zeroshard.errors import InvalidValue

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
FP32_MIN = 2.0**-149


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The state of a policy.

    Attributes:
        scale: the factor on the next loss.
        growth_tracker: finite steps since the last overflow or growth.
        hysteresis_left: how many overflows until the scale is reduced; at 0, each one reduces it.
        skips_in_a_row: overflows since the last finite step.

    Raises:
        ValueError: the scale is not a positive finite fp32 number; or a count is not an integer >= 0.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 0
    skips_in_a_row: int = 0

    def __post_init__(self) -> None:
        _expect_scale("scale", self.scale)
        for field in ("growth_tracker", "hysteresis_left", "skips_in_a_row"):
            _expect_count(field, getattr(self, field), at_least=0)


@dataclass(frozen=True, slots=True)
class ConstantScale:
    """A constant scale. `max_skips`: raise after this many overflows in a row; None: never.

    Raises:
        ValueError: `value` is not positive and finite in fp32; or `max_skips` is below 1.
    """

    value: float = 1.0
    max_skips: int | None = 50

    def __post_init__(self) -> None:
        _expect_scale("value", self.value)
        _expect_max_skips(self.max_skips)

    def initial_state(self) -> ScaleState:
        return ScaleState(_fp32(self.value))

    def next_state(self, state: ScaleState, found_inf: bool) -> ScaleState:
        return replace(state, skips_in_a_row=state.skips_in_a_row + 1 if found_inf else 0)

    def adopt(self, state: ScaleState) -> ScaleState:
        """Convert a state that another policy may have left into a state of this policy."""
        return replace(self.initial_state(), skips_in_a_row=state.skips_in_a_row)


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """A scale that grows while gradients stay finite, and shrinks on overflows: see the table at the top of this file.

    Attributes:
        init: the first scale.
        growth_factor: applied after `growth_interval` finite steps in a row.
        backoff_factor: applied on an overflow, once the overflows since the last growth have reached `hysteresis`.
        floor: lower bound of the scale.
        max_scale: upper bound of the scale.
        max_skips: raise after this many overflows in a row; None: never. The default is about twice the number of
            halvings from `max_scale` to `floor`.

    Raises:
        ValueError: a number is out of its range; the message has the range.
    """

    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    floor: float = 1.0
    max_scale: float = 2.0**24
    max_skips: int | None = 50

    def __post_init__(self) -> None:
        for field in ("init", "floor", "max_scale"):
            _expect_scale(field, getattr(self, field))
        if not self.floor <= self.init <= self.max_scale:
            raise InvalidValue(
                f"loss scale: expected floor <= init <= max_scale, found {self.floor} <= {self.init} <= "
                f"{self.max_scale}. Move init, or the bound that it crosses"
            )
        if not 1.0 < self.growth_factor < math.inf:
            raise InvalidValue(f"loss scale: growth_factor must be above 1 (2 is usual), found {self.growth_factor}")
        if not 0.0 < self.backoff_factor < 1.0:
            raise InvalidValue(
                f"loss scale: backoff_factor must lie between 0 and 1 (0.5 is usual), found {self.backoff_factor}"
            )
        _expect_count("growth_interval", self.growth_interval, at_least=1)
        _expect_count("hysteresis", self.hysteresis, at_least=1)
        _expect_max_skips(self.max_skips)

    def initial_state(self) -> ScaleState:
        return ScaleState(_fp32(self.init), hysteresis_left=self.hysteresis)

    def next_state(self, state: ScaleState, found_inf: bool) -> ScaleState:
        if found_inf:
            left = max(0, state.hysteresis_left - 1)
            scale = state.scale if left else self._bounded(state.scale * self.backoff_factor)
            return ScaleState(scale, 0, left, state.skips_in_a_row + 1)
        # Not `==`: a tracker loaded under a longer interval may lie past this one.
        if state.growth_tracker + 1 >= self.growth_interval:
            return ScaleState(self._bounded(state.scale * self.growth_factor), 0, self.hysteresis, 0)
        return replace(state, growth_tracker=state.growth_tracker + 1, skips_in_a_row=0)

    def adopt(self, state: ScaleState) -> ScaleState:
        """Convert a state that another policy may have left into a state of this policy, inside its bounds."""
        # Only a ConstantScale leaves all counts at 0: here, none are left behind an overflow alone.
        has_counted = state.growth_tracker or state.hysteresis_left or state.skips_in_a_row
        left = min(state.hysteresis_left, self.hysteresis) if has_counted else self.hysteresis
        return replace(state, scale=self._bounded(state.scale), hysteresis_left=left)

    def _bounded(self, scale: float) -> float:
        return _fp32(min(max(scale, self.floor), self.max_scale))


LossScalePolicy: TypeAlias = ConstantScale | DynamicScale


def as_policy(
    loss_scale: LossScalePolicy | float | Literal["dynamic"] | None, *, has_fp16: bool
) -> LossScalePolicy | None:
    """The policy for a user's `loss_scale` argument; None for no scaling. `has_fp16`: whether there are fp16 weights,
    for which the default is dynamic scaling.

    Raises:
        ValueError: the argument is none of these.
    """
    if loss_scale is None:
        return DynamicScale() if has_fp16 else None
    is_one = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool) and loss_scale == 1
    return None if is_one else _policy_of(loss_scale)


def _policy_of(loss_scale: LossScalePolicy | float | Literal["dynamic"]) -> LossScalePolicy:
    if loss_scale == "dynamic":
        return DynamicScale()
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return ConstantScale(float(loss_scale))
    if isinstance(loss_scale, (ConstantScale, DynamicScale)):
        return loss_scale
    raise InvalidValue(
        f"loss_scale must be a policy, a number, 'dynamic' or None, found {loss_scale!r}. Use 1.0 for no scaling"
    )


class LossScaler:
    """A policy and its current state, which is saved in checkpoints.

    Args:
        policy: a policy, a number, or "dynamic".
        state: None: the policy's initial state.

    Raises:
        ValueError: the policy is none of these.
    """

    def __init__(
        self, policy: LossScalePolicy | float | Literal["dynamic"] = "dynamic", state: ScaleState | None = None
    ) -> None:
        self.policy = _policy_of(policy)
        self.state = self.policy.initial_state() if state is None else state

    @property
    def scale(self) -> float:
        return self.state.scale

    @property
    def skips_in_a_row(self) -> int:
        return self.state.skips_in_a_row

    @property
    def exhausted(self) -> bool:
        """Whether the last `max_skips` steps have all overflowed: a smaller scale will not help any more."""
        return self.policy.max_skips is not None and self.skips_in_a_row >= self.policy.max_skips

    def update(self, found_inf: bool) -> None:
        """Advance the state. Call it once per step, with a `found_inf` that is the same on all ranks."""
        self.state = self.policy.next_state(self.state, found_inf)

    def state_dict(self) -> dict[str, Any]:
        """The four numbers of `ScaleState`. The policy is configuration, and not included."""
        return asdict(self.state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, within the bounds of this policy.

        Raises:
            ValueError: the keys are not those of `state_dict`; or a number is invalid.
        """
        expected = {field.name for field in fields(ScaleState)}
        if set(state_dict) != expected:
            raise InvalidValue(
                f"loss scale: a state has the keys {sorted(expected)}, found {sorted(map(str, state_dict))}. "
                "Pass what LossScaler.state_dict() returned"
            )
        self.state = self.policy.adopt(ScaleState(**state_dict))

    def __repr__(self) -> str:
        return f"LossScaler({self.policy}, {self.state})"


def _fp32(value: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _expect_scale(field: str, value: float) -> None:
    if not FP32_MIN <= value <= FP32_MAX:
        raise InvalidValue(
            f"loss scale: {field} must be positive and finite in fp32, found {value!r}. Use 1.0 for no scaling"
        )


def _expect_count(field: str, value: int, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise InvalidValue(f"loss scale: {field} must be an integer from {at_least}, found {value!r}")


def _expect_max_skips(max_skips: int | None) -> None:
    if max_skips is not None:
        _expect_count("max_skips", max_skips, at_least=1)
