"""Main: the values that the optimizer updates, in the main dtype, whatever the dtype of the weights.

| kind      | holds beside the weights   | read(piece)                    | write(piece)                              |
|-----------|----------------------------|--------------------------------|-------------------------------------------|
| alias     | nothing                    | a view of the weights          | no effect                                 |
| master    | an fp32 copy of its range  | a view of the copy             | weights = the copy, rounded               |
| remainder | the low 16 bits (int16)    | joined into scratch            | split into weight and remainder           |

[Note: remainder] A bf16 number is the top half of an fp32 number. On the int32 bits m of the master:
`weight = (m + 0x8000) >> 16`, `remainder = int16(m & 0xffff)`, `m = (weight << 16) + remainder` with the remainder
signed. This is lossless for every number; a NaN stays a NaN, but may get other bits. The weight is the nearest bf16,
exact ties rounded away from zero. (The idea is from apex's DistributedFusedAdam, `store_param_remainders`.)

[Note: written weights] If weights rest in full, a user may write to them in place (`p.clamp_(-c, c)`, also through
`p.data`, which no version counter shows). Then the weights win: where a weight differs from main, rounded, it becomes
main. With a remainder, a written weight is joined with the old remainder: main then differs from the weight by at most
half of the weight's last bit. The comparison reads all of main. So a step leaves marks of the weights that it writes
(`marks.py`), and the next step compares only where the marks differ.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval
from zeroshard.precision import MixedPrecision
from zeroshard.storage.marks import Marks

AT_ONCE = 1 << 18
"""How many elements are rounded, split or joined at once where whole parameters or shards pass through. The temporaries
then take a few MB, and not several times the largest parameter."""


def join_remainder(weight: Tensor, remainder: Tensor, out: Tensor) -> None:
    """fp32 `out` = the master behind bf16 `weight` and int16 `remainder`; all 1-D. See [Note: remainder]. A pair that
    no split produces (0 with a negative remainder, infinity with a positive one) means that the user has written the
    weight: `out` is then the weight alone."""
    bits = out.view(torch.int32)
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
    # Added, not `|`: the remainder is signed, as rounding may have carried into the weight.
    bits.add_(remainder)
    # Such pairs give NaN. On a CPU a sum is a cheaper test than `where`; on a GPU reading the sum would make the host
    # wait.
    if not out.is_cpu or not math.isfinite(out.sum()):
        torch.where(out.isnan(), weight.to(out.dtype), out, out=out)


def split_remainder(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """bf16 `weight` and int16 `remainder` = fp32 `master`, which is overwritten. See [Note: remainder]."""
    master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)  # else some NaNs round to inf or 0
    bits = master.view(torch.int32)
    # Before the next line, which rounds the bits in place. The cast to int16 keeps the low 16 bits.
    remainder.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def follow_weights(
    main: Tensor, weights: Tensor, rounded: Callable[[Tensor], Tensor], held: Tensor | None = None
) -> bool:
    """Set `main` to `weights` (of the same shape) where they differ from `rounded(main)`. See [Note: written weights].
    Returns False if they differ nowhere. `held`: scratch like `weights`."""
    held = rounded(main).to(weights.dtype) if held is None else held.copy_(main)
    if main.is_cpu and have_same_bits(held, weights):
        return False
    torch.where(held == weights, main, weights.to(main.dtype), out=main)
    return True


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype, on one device, have the same bits. (NaN then is the same as NaN, and
    0.0 is not -0.0.)"""
    a, b = a.reshape(-1), b.reshape(-1)
    if a.device.type == "cpu" and _memcmp is not None:  # a third of the time of torch.equal
        return _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's; None where it is not found, as on systems that do not link all of it into a process."""
    try:
        function = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found


_memcmp = _find_memcmp()


class MainWeights:
    """Main of one unit over `interval` of the full buffer (its shard, or everything). A frozen unit has an alias: a
    value set there (by a checkpoint, for example) is set in its weights.

    Attributes:
        interval: the interval of the full buffer that this rank updates.
        weights: [interval.numel], view of the weights of that interval.
        extra: the master in the main dtype, the int16 remainder, or None if the weights are main.
    """

    def __init__(
        self, interval: Interval, weights: Tensor, precision: MixedPrecision | None, *, exposed: bool = False
    ) -> None:
        """`precision`: None for the alias of a frozen unit, in any dtype. `exposed`: users may write to the weights."""
        self.interval = interval
        self._exposed = exposed
        self.weights = weights
        self._marks = Marks()  # of the weights, as steps have written them
        self.dtype = precision.main_dtype if precision is not None else weights.dtype
        self.extra: Tensor | None = None
        if precision is None:
            return
        if precision.main == "remainder":
            self.extra = torch.zeros(interval.numel, dtype=torch.int16, device=weights.device)
        elif not precision.weights_are_main:
            self.extra = torch.zeros(interval.numel, dtype=self.dtype, device=weights.device)

    def storages(self) -> list[Tensor]:
        """The storage that is held beside the weights."""
        return [] if self.extra is None else [self.extra]

    @property
    def needs_scratch(self) -> bool:
        """Whether `read` needs scratch: main is joined from weight and remainder."""
        return self.extra is not None and self.extra.dtype == torch.int16

    @property
    def follows(self) -> bool:
        """Whether there is a master, and users may write to the weights."""
        return self._exposed and self.extra is not None and not self.needs_scratch

    def follow(self, piece: Interval, held: Tensor | None = None) -> None:
        """Copy what the user has written to the weights into the master. `held`: scratch of the weights' dtype, for so
        many elements at once; None: in new memory, AT_ONCE."""
        if not self.follows or self.extra is None:
            return
        start = self.interval.start
        if self._marks.are_same(piece, self.weights[piece.relative_to(start).slice]):
            return
        for part in in_parts(piece, None if held is None else held.numel()):
            local = part.relative_to(start).slice
            room = None if held is None else held[: part.numel]
            if follow_weights(self.extra[local], self.weights[local], self.rounded, room):
                self._marks.forget()  # main has changed: weights as before would not be those of main any more

    def read(self, piece: Interval, scratch: Tensor | None = None) -> Tensor:
        """[piece.numel] in the main dtype, for the optimizer to update: a view, or with a remainder, a joined copy in
        `scratch` of that size (None: in a new tensor)."""
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

    def write(
        self, piece: Interval, value: Tensor | None = None, *, at_once: int | None = None, in_step: bool = False
    ) -> None:
        """After the optimizer has updated what `read` returned: set weights (and remainder) from it.

        Args:
            value: what `read` has returned; a joined copy is overwritten. None: the view.
            at_once: the most elements of one operation; None: all.
            in_step: the next step will `follow` the same piece.
        """
        if self.extra is None:
            return
        start = self.interval.start
        for part in in_parts(piece, at_once or piece.numel):
            local = part.relative_to(start).slice
            given = None if value is None else value[part.relative_to(piece.start).slice]
            if self.needs_scratch:
                assert given is not None, "a joined copy"
                split_remainder(given, self.weights[local], self.extra[local])
            else:
                self.weights[local].copy_(self.extra[local] if given is None else given)
        if in_step and self.follows:
            self._marks.set(piece, self.weights[piece.relative_to(start).slice])
        else:
            self._marks.forget()

    def copy_to(self, out: Tensor) -> None:
        """Copy all of main to `out` [interval.numel], in any float dtype."""
        for part in in_parts(self.interval):
            target = out[part.relative_to(self.interval.start).slice]
            target.copy_(self.read(part, target if target.dtype == self.dtype else None))

    def round_into(self, view: Tensor, value: Tensor) -> None:
        """Copy `value` to `view` (part of the weights, of the same shape), rounded as `set` rounds it."""
        if not self.needs_scratch:
            view.copy_(value)  # rounds in the same way
            return
        source, target = value.reshape(-1), view.view(-1)
        for part in in_parts(Interval(0, source.numel())):
            target[part.slice].copy_(self.rounded(source[part.slice]))

    def rounded(self, value: Tensor) -> Tensor:
        """`value` (any shape), rounded as `split_remainder` rounds weights. Without a remainder `value` itself: `copy_`
        then rounds in the same way."""
        if not self.needs_scratch:
            return value
        weight = torch.empty(value.numel(), dtype=torch.bfloat16, device=value.device)
        remainder = torch.empty(value.numel(), dtype=torch.int16, device=value.device)
        split_remainder(value.to(self.dtype, copy=True).reshape(-1), weight, remainder)
        return weight.view(value.shape)

    def set(self, piece: Interval, value: Tensor, *, spare: bool = False) -> None:
        """Set main to `value` ([piece.numel], any float dtype), and the weights with it. `spare`: `value` may be
        overwritten."""
        self._marks.forget()
        local = piece.relative_to(self.interval.start)
        weights = self.weights[local.slice]
        if self.extra is None:
            weights.copy_(value)
        elif self.needs_scratch:
            extra = self.extra[local.slice]
            for part in [Interval(0, local.numel)] if spare else in_parts(Interval(0, local.numel)):
                master = value[part.slice] if spare else value[part.slice].to(self.dtype, copy=True)
                split_remainder(master, weights[part.slice], extra[part.slice])
        else:
            self.extra[local.slice].copy_(value)
            weights.copy_(value)

    def free(self) -> None:
        """Free what is held beside the weights, and the view of the weights. Nothing may be read any more."""
        self.extra, self.weights = None, self.weights.new_empty(0)


def in_parts(interval: Interval, numel: int | None = None) -> Iterator[Interval]:
    """The interval in parts of at most `numel` elements; None: AT_ONCE."""
    numel = numel or AT_ONCE
    for start in range(interval.start, interval.stop, numel):
        yield Interval(start, min(start + numel, interval.stop))
