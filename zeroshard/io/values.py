"""Encodes the values of state dicts as JSON and tensors: numbers, strings, lists, dicts, tuples, sets, counters,
dtypes, tensors.

JSON has no tuples, no infinity, no tensors, and only strings as keys. These values become objects with one entry:

    (1, 2) -> {"$tuple": [1, 2]}    {3: "x"} -> {"$dict": [[3, "x"]]}    inf -> {"$float": "inf"}
    {2, 1} -> {"$set": [1, 2]}      frozenset({1}) -> {"$frozenset": [1]}    Counter({3: 1}) -> {"$counter": [[3, 1]]}
    torch.int8 -> {"$dtype": "torch.int8"}    tensor -> {"$tensor": "<name under which it is stored>"}

Scalars of numpy, which its functions return in the place of Python's numbers, are stored as those.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import InvalidValue
from zeroshard.io.checked import CheckpointError
from zeroshard.io.tensor_file import DTYPE_NAMES

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def without_numpy(value: Any) -> Any:
    """A scalar of numpy as Python's own number or text; anything else as it is."""
    numpy = sys.modules.get("numpy")  # without it there are none
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def encode(value: Any, store: Callable[[Tensor], str], where: str) -> Any:
    """`value` as JSON. `store` is called with each tensor, and returns a name for it.

    Raises:
        ValueError: a value of another type (objects and code are never stored), or a sparse or quantised tensor.
    """
    value = without_numpy(value)
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int) and type(value) is int:
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise InvalidValue(
                f"{where} is a {type(value).__name__} of layout {value.layout}: only dense, plain tensors"
            )
        if value.dtype not in DTYPE_NAMES:
            raise InvalidValue(f"{where} has the dtype {value.dtype}, which safetensors files do not have")
        return {"$tensor": store(value.detach())}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value)}
    if isinstance(value, dict):
        items = [[without_numpy(key), encode(item, store, f"{where}[{key!r}]")] for key, item in value.items()]
        if not all(_can_be_key(key) for key, _ in items):
            raise InvalidValue(f"{where} has keys that are neither texts nor finite numbers")
        if isinstance(value, Counter):
            return {"$counter": items}
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": items}
    if type(value) in (list, tuple):
        if all(type(item) is int for item in value):  # the state of `random` has hundreds
            items = list(value)
        else:
            items = [encode(item, store, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if type(value) in (set, frozenset):  # in the same order on every rank
        return {f"${type(value).__name__}": sorted((encode(item, store, where) for item in value), key=json.dumps)}
    raise InvalidValue(
        f"{where} is of type {type(value).__name__}: a checkpoint holds numbers, texts, lists, tuples, sets, dicts, "
        "dtypes and tensors; let the state_dict(), or the param group, hold these"
    )


def _can_be_key(value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, (str, int, type(None)))


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`. `tensor`: name -> tensor, or what is to be in its place.

    Raises:
        CheckpointError: the JSON cannot be the result of `encode`.
    """
    if isinstance(value, list):
        return value if all(type(item) is int for item in value) else [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    (kind, content), *_ = value.items()
    try:
        if kind == "$tensor":
            return tensor(content)
        if kind == "$float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
        if kind == "$dtype":
            return _DTYPES[content]
        if kind in ("$set", "$frozenset"):
            items = (decode(item, tensor) for item in content)
            return set(items) if kind == "$set" else frozenset(items)
        if kind == "$tuple":
            return tuple(decode(item, tensor) for item in content)
        if kind == "$dict":
            return {key: decode(item, tensor) for key, item in content}
        if kind == "$counter":
            return Counter({key: decode(item, tensor) for key, item in content})
    except (TypeError, ValueError, KeyError, RecursionError):
        pass
    raise CheckpointError(f"holds a value of the unknown kind {kind[:20]!r}, or a damaged one")


def no_tensors(value: Tensor) -> str:
    raise InvalidValue(f"a tensor of shape {tuple(value.shape)} where a plain number is expected")
