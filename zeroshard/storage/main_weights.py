"""Main: what the optimizer updates, in fp32, whatever the weights are held in.

| kind      | holds beside the weights   | read(piece)                    | write(piece)                              |
|-----------|----------------------------|--------------------------------|-------------------------------------------|
| alias     | nothing                    | a view of the weights          | nothing to do                             |
| master    | an fp32 copy of its range  | a view of the copy             | weights = the copy, rounded               |
| remainder | the low 16 bits (int16)    | joined into scratch            | split into weight and remainder           |

[Note: remainder] A bf16 number is the top half of an fp32 number. On the int32 bits m of the master:
`weight = (m + 0x8000) >> 16`, `remainder = int16(m & 0xffff)`, `m = (weight << 16) + remainder` with the remainder
signed. Lossless for every number; a NaN stays a NaN (there are more NaNs than pairs whose weight shows one). The
weight is the nearest bf16, exact ties going away from zero. (The idea is
apex's DistributedFusedAdam, `store_param_remainders`.)

[Note: written weights] Where a rank has all weights for good, a user may write to them in place (`p.clamp_(-c, c)`,
also through `p.data`, of which no counter tells). The weights are what everybody sees, so they win: an element of them
that is not main, rounded, becomes main. Beside a remainder any weight fits, and keeps the low half of the number that
was there: main is off by half of the weight's last bit at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval
from zeroshard.precision import MixedPrecision


def join_remainder(weight: Tensor, remainder: Tensor, out: Tensor) -> None:
    """fp32 `out` = the master behind bf16 `weight` and int16 `remainder`; all 1-D. See [Note: remainder]. What no split
    gives (0 with a negative remainder, infinity with a positive one) has been written, and is the weight alone."""
    bits = out.view(torch.int32)
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
    # Added, not joined by `|`: the remainder is signed, as rounding may have carried into the weight.
    bits.add_(remainder)
    # On a CPU a sum is cheaper than `where`. On a GPU to read it would wait for everything before it.
    if out.is_cuda or not math.isfinite(out.sum()):  # these would be NaN
        torch.where(out.isnan(), weight.to(out.dtype), out, out=out)


def split_remainder(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """bf16 `weight` and int16 `remainder` = fp32 `master`, which is overwritten. See [Note: remainder]."""
    master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)  # some NaNs would round to inf, or carry into 0
    bits = master.view(torch.int32)
    # First: the next line rounds the bits in place.
    remainder.copy_(bits)  # keeps the low 16 bits
    weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def follow_weights(
    main: Tensor, weights: Tensor, rounded: Callable[[Tensor], Tensor], held: Tensor | None = None
) -> None:
    """`main` = `weights` (of its shape) where they are not `rounded(main)`. See [Note: written weights]. `held`:
    scratch like `weights`."""
    held = rounded(main).to(weights.dtype) if held is None else held.copy_(main)
    if main.is_cuda or not torch.equal(held, weights):
        main.copy_(torch.where(held == weights, main, weights.to(main.dtype)))


class MainWeights:
    """Main of one unit over the world range `interval` (its shard, or everything). A frozen unit has an alias: what is
    set there from outside (a checkpoint, say) is set in its weights.

    Attributes:
        interval: world range that this rank updates.
        weights: [interval.numel] view of the weights it stands for.
        extra: the fp32 master, the int16 remainder, or None where the weights are main.
    """

    def __init__(
        self, interval: Interval, weights: Tensor, precision: MixedPrecision | None, *, exposed: bool = False
    ) -> None:
        """`precision`: None for the alias of a frozen unit, in any dtype. `exposed`: users may write to the weights."""
        self.interval = interval
        self._exposed = exposed
        self.weights = weights
        self.dtype = precision.main_dtype if precision is not None else weights.dtype
        self.extra: Tensor | None = None
        if precision is None:
            return
        if precision.main == "remainder":
            self.extra = torch.zeros(interval.numel, dtype=torch.int16, device=weights.device)
        elif not precision.weights_are_main:
            self.extra = torch.zeros(interval.numel, dtype=self.dtype, device=weights.device)

    def storages(self) -> list[Tensor]:
        """What is held beside the weights."""
        return [] if self.extra is None else [self.extra]

    @property
    def needs_scratch(self) -> bool:
        """Whether `read` has to build the value somewhere."""
        return self.extra is not None and self.extra.dtype == torch.int16

    @property
    def follows(self) -> bool:
        """Whether there is a master beside weights that a user may have written to."""
        return self._exposed and self.extra is not None and not self.needs_scratch

    def follow(self, piece: Interval, held: Tensor | None = None) -> None:
        """A master takes what has been written to the weights. `held`: scratch like the piece of the weights."""
        if self.follows and self.extra is not None:
            local = piece.relative_to(self.interval.start).slice
            follow_weights(self.extra[local], self.weights[local], self.rounded, held)

    def read(self, piece: Interval, scratch: Tensor | None = None) -> Tensor:
        """[piece.numel] in the main dtype, for the optimizer to update: a view, or joined in `scratch` of that size
        (None: a new tensor)."""
        local = piece.relative_to(self.interval.start).slice
        if self.extra is None:
            return self.weights[local]
        if not self.needs_scratch:
            self.follow(piece)
            return self.extra[local]
        if scratch is None:
            scratch = self.weights.new_empty(piece.numel, dtype=self.dtype)
        join_remainder(self.weights[local], self.extra[local], scratch)
        return scratch

    def write(self, piece: Interval, value: Tensor) -> None:
        """After an update of what `read` gave: weights (and remainder) follow. A joined `value` is overwritten."""
        local = piece.relative_to(self.interval.start).slice
        if self.extra is None:
            return
        if self.needs_scratch:
            split_remainder(value, self.weights[local], self.extra[local])
        else:
            self.weights[local].copy_(value)

    def rounded(self, value: Tensor) -> Tensor:
        """`value` (any shape) as weights beside a remainder hold it; unchanged where `copy_` rounds as main does."""
        if not self.needs_scratch:
            return value
        weight = torch.empty(value.numel(), dtype=torch.bfloat16, device=value.device)
        remainder = torch.empty(value.numel(), dtype=torch.int16, device=value.device)
        split_remainder(value.to(self.dtype, copy=True).reshape(-1), weight, remainder)
        return weight.view(value.shape)

    def set(self, piece: Interval, value: Tensor, *, spare: bool = False) -> None:
        """Main becomes `value` ([piece.numel], any float dtype), and the weights follow. `spare`: may overwrite it."""
        local = piece.relative_to(self.interval.start).slice
        if self.extra is None:
            self.weights[local].copy_(value)
        elif self.needs_scratch:
            split_remainder(value if spare else value.to(self.dtype, copy=True), self.weights[local], self.extra[local])
        else:
            self.extra[local].copy_(value)
            self.weights[local].copy_(value)
