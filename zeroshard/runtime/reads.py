"""Reads of absent parameters that nobody is asked for.

What Python calls raises by itself (`absent.py`). C++ that is handed a parameter (`torch.tensor(p)`, a scripted module),
and a `torch.func` transform of it, find its NaN. A mode of torch that looks at the operands of every operation sees
these, too. It takes some ten microseconds an operation, so the user asks for it (`Handle.find_reads`).
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
    """Inside, on this thread, an operation on a parameter that is not here raises, with the name of the parameter, at
    the line of the reader. Shapes, dtypes and views may be taken."""

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
                index = unit.weights.absent_index(operand)
                if index is not None:
                    raise InvalidState(not_here(unit.layout.slots[index].name, unit.name))


_OF_THE_TENSOR = {"_has_compatible_shallow_copy_type", "set_data", "_version", "result_type", "size", "stride"}
"""Operations on the tensor itself, that inference mode lets through to here."""


def _takes_no_values(func: Any) -> bool:
    """Views, and operations that take a shape and a dtype from their operand."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(("new_", "sym_", "is_")) or name.endswith("_like") or name in _OF_THE_TENSOR:
        return True
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)
