"""`MixedPrecision`: the dtypes of a unit's three buffers, as one frozen record.

[Note: precisions]
- `param`: the dtype in which forward and backward compute.
- `grad`: the dtype of the gradient buffer, in which micro-batches and ranks are summed.
- `reduce`: the dtype on the wire of the reduction; None means `grad`. A narrower wire still sums in `grad`, a wider
  one sums in `reduce` and rounds to `grad` once.
- `main`: the values that the optimizer updates. If the dtype equals `param`, the weights are main; fp32 with 16-bit
  weights is a master copy; "remainder" keeps the low 16 bits of that master beside the bf16 weight (together they are
  the fp32 number, bit for bit, with 2 bytes less per element).
- `keep`: classes of modules that stay in fp32 with all modules inside them (norms, for example). Their inputs are cast
  to fp32, their outputs to `param`. Their parameters are units of their own.
- `output`: the dtype to which outputs of the model (or of a module that a pattern names) are cast; None: the model's
  output is not cast.
- `cast_inputs`: whether floating-point inputs of the model, and of the modules that are units, are cast to `param`
  (tensors without dimensions are not rounded).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from zeroshard.errors import InvalidValue

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """See [Note: precisions].

    Raises:
        ValueError: a dtype is not floating point; both bf16 and fp16 are used; main is narrower than the weights;
            "remainder" with weights that are not bf16; an item of `keep` is not a class of modules.
    """

    param: torch.dtype = torch.bfloat16
    grad: torch.dtype = torch.float32
    reduce: torch.dtype | None = None
    main: torch.dtype | Literal["remainder"] = torch.float32
    keep: tuple[type[nn.Module], ...] = ()
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param", "grad", "reduce", "main", "output"):
            value = getattr(self, field)
            optional = (field in ("reduce", "output") and value is None) or (field == "main" and value == "remainder")
            if not optional and value not in FLOATS:
                raise InvalidValue(f"precision: {field} must be one of {', '.join(map(str, FLOATS))}, found {value!r}")
        for item in self.keep:
            if not (isinstance(item, type) and issubclass(item, nn.Module)):
                raise InvalidValue(f"precision: keep takes classes of modules, found {item!r}")
        if self.main == "remainder" and self.param != torch.bfloat16:
            raise InvalidValue(
                f"precision: the 16-bit remainder completes bf16 weights to fp32; weights are {self.param}. "
                "Use param=torch.bfloat16, or main=torch.float32"
            )
        halves = {dtype for dtype in (self.param, self.grad, self.reduce, self.main) if dtype in HALVES}
        if len(halves) > 1:
            raise InvalidValue(f"precision: bfloat16 and float16 hold different numbers, found both in {self}")
        if isinstance(self.main, torch.dtype) and self.main.itemsize < self.param.itemsize:
            raise InvalidValue(
                f"precision: main {self.main} is narrower than the weights {self.param}; use {self.param}"
            )

    @property
    def wire(self) -> torch.dtype:
        return self.reduce or self.grad

    @property
    def is_sent_narrow(self) -> bool:
        """Whether terms are sent in another dtype than the one in which they are summed."""
        return self.wire != self.grad and self.wire.itemsize <= self.grad.itemsize

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype that the optimizer sees."""
        return self.main if isinstance(self.main, torch.dtype) else torch.float32

    @property
    def weights_are_main(self) -> bool:
        return self.main == self.param

    @property
    def steps_in_place(self) -> bool:
        """Whether gradients, main and weights have one dtype: a step then needs no scratch."""
        return self.grad == self.main == self.param


NAMED = {
    "fp32": MixedPrecision(torch.float32, torch.float32, None, torch.float32),
    "bf16": MixedPrecision(),
    "fp16": MixedPrecision(torch.float16, torch.float32, None, torch.float32),
    "bf16-remainder": MixedPrecision(main="remainder"),
}

_AS_WRITTEN_ELSEWHERE = {
    "bf16-mixed": NAMED["bf16"],
    "bfloat16": NAMED["bf16"],
    "fp16-mixed": NAMED["fp16"],
    "16-mixed": NAMED["fp16"],
    "float16": NAMED["fp16"],
    "half": NAMED["fp16"],
    "32-true": NAMED["fp32"],
    "32": NAMED["fp32"],
    "float32": NAMED["fp32"],
    "no": NAMED["fp32"],
    "bf16-true": MixedPrecision(torch.bfloat16, torch.bfloat16, None, torch.bfloat16),
    "16-true": MixedPrecision(torch.float16, torch.float16, None, torch.float16),
    "64-true": MixedPrecision(torch.float64, torch.float64, None, torch.float64),
    "float64": MixedPrecision(torch.float64, torch.float64, None, torch.float64),
}
"""Names used by Lightning, Accelerate and torch. "true": no master weights."""


def in_words(precision: MixedPrecision) -> str:
    """Its name, or the dtypes of the three buffers."""
    plain = replace(precision, keep=(), output=None, cast_inputs=True)
    for name, named in NAMED.items():
        if plain == named:
            return name
    kinds = {"weights": plain.param, "gradients": plain.grad, "main": plain.main}
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {kind}" for kind, dtype in kinds.items())


def as_precision(precision: MixedPrecision | str | torch.dtype | None) -> MixedPrecision | None:
    """The record for an argument: a record; a name ("bf16", "bf16-mixed"); a dtype (torch.bfloat16: with fp32 master
    weights); or None (the model's own dtypes, see `precision_for`).

    Raises:
        ValueError: an unknown name (the message suggests the nearest one), or a dtype in which no model trains.
    """
    if precision is None or isinstance(precision, MixedPrecision):
        return precision
    name = str(precision).removeprefix("torch.") if isinstance(precision, torch.dtype) else precision
    known = {**NAMED, **_AS_WRITTEN_ELSEWHERE}
    if isinstance(name, str) and name in known:
        return known[name]
    near = difflib.get_close_matches(str(precision), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidValue(f"unknown precision {precision!r}: expected one of {', '.join(map(repr, NAMED))}{hint}")


def precision_for(parameter_dtype: torch.dtype, precision: MixedPrecision | None) -> MixedPrecision:
    """The record under which a parameter of that dtype trains.

    None keeps the model's dtype: fp32 and fp64 parameters are their own main; 16-bit parameters get fp32 gradients and
    an fp32 master (in 16 bits, small updates would be lost by rounding).
    """
    if precision is not None:
        return precision
    if parameter_dtype in HALVES:
        return MixedPrecision(parameter_dtype, torch.float32, None, torch.float32)
    return MixedPrecision(parameter_dtype, parameter_dtype, None, parameter_dtype)
