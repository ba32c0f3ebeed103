"""Finds reads of absent parameters that bypass `__torch_function__`.

Operations called from Python raise by themselves (`absent.py`). C++ code that is passed a parameter
(`torch.tensor(p)`, a scripted module) and `torch.func` transforms silently read its NaN. A dispatch mode, which sees
the operands of every operation, finds these as well. It takes about ten microseconds per operation, so it is on only
by request (`Handle.find_reads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.errors import InvalidState
from zeroshard.model.absent import not_here
from zeroshard.storage.unit import Unit


class ReadsRaise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, on this thread, an operation that reads an absent parameter raises with the parameter's name, at the line
    that reads it. Shapes, dtypes and views may be taken."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _takes_no_values(func):
            self._expect_present(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return func(*args, **kwargs)

    def _expect_present(self, operands: Iterable[Tensor]) -> None:
        for operand in operands:
            for unit in self._units:
                index = unit.weights.absent.index_of(operand)
                if index is not None:
                    raise InvalidState(not_here(unit.layout.slots[index].name, unit.name))


_OF_THE_TENSOR = {"_has_compatible_shallow_copy_type", "set_data", "_version", "result_type", "size", "stride"}
"""Operations on the tensor object that read no values, and that reach the mode under inference mode."""


def _takes_no_values(func: Any) -> bool:
    """Whether the operation is a view, or takes only shape and dtype from its operand."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(("new_", "sym_", "is_")) or name.endswith("_like") or name in _OF_THE_TENSOR:
        return True
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)
