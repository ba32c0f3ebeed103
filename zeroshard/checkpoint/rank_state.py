"""Encodes and decodes values that are not sharded: trees with tensors in them, and the state of single ranks."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import CheckpointError, TensorEntry
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.writer import Item
from zeroshard.errors import InvalidValue
from zeroshard.io.tensor_file import bytes_of
from zeroshard.io.values import decode, encode
from zeroshard.layout.interval import Interval


def whole(name: str, value: Tensor) -> Item:
    """An item for a tensor that this rank writes completely."""
    flat = plain_values(value).reshape(-1)
    return Item(name, tuple(value.shape), value.dtype, Interval(0, value.numel()), lambda part: flat[part.slice])


def plain_values(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where its memory has other values: a view that conjugates or negates."""
    return tensor.detach().resolve_conj().resolve_neg()


def number(name: str, value: bool | int | float) -> Item:
    """An item for a Python number, stored as a tensor."""
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise InvalidValue(f"{name} is {value}, which needs more than 64 bits")
    return whole(name, torch.tensor(value, dtype=dtype, device="cpu"))


def blob(name: str, value: Any) -> Item:
    """An item for a JSON-able value, stored as a tensor of bytes."""
    return whole(name, torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8))


class EncodedState:
    """A value encoded as JSON, and the tensors inside it under names that begin with `prefix`."""

    def __init__(self, prefix: str, value: Any, where: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self.values = encode(value, self._store, where)

    def _store(self, tensor: Tensor) -> str:
        name = f"{self._prefix}/{len(self.tensors)}"
        self.tensors[name] = plain_values(tensor)
        return name

    def items(self) -> Iterator[Item]:
        for name, tensor in self.tensors.items():
            yield whole(name, tensor)

    def digest(self) -> str:
        """A digest of the value, independent of `prefix`."""
        total = hashlib.sha256(json.dumps(self.values).replace(self._prefix, "").encode())
        for tensor in self.tensors.values():
            total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(bytes_of(tensor.cpu().contiguous()))
        return total.hexdigest()


def read_blob(reader: Reader, name: str, what: str) -> Any:
    """The value that `blob` has stored under that name.

    Raises:
        CheckpointError: `what` is damaged.
    """
    with _damaged(what):
        return decode(_json(reader, name), reader.tensor)


def rank_state(reader: Reader, rank: int) -> dict[str, Any]:
    """The values that are stored for one rank, without its buffers; empty if there was no such rank."""
    with _damaged(f"the state of rank {rank}"):
        stored = {key: value for key, value in _of_rank(reader, rank).items() if key != "buffers"}
        return {key: decode(value, reader.tensor) for key, value in stored.items()}


def own_buffers(reader: Reader, rank: int) -> dict[str, TensorEntry] | None:
    """The tensors that have a rank's buffers and ignored parameters, by the names of these. None: they are those of
    rank 0, or of all ranks."""
    with _damaged(f"the state of rank {rank}"):
        stored = _of_rank(reader, rank).get("buffers")
        return None if stored is None else {name: decode(one, reader.entry) for name, one in stored.items()}


def _of_rank(reader: Reader, rank: int) -> dict[str, Any]:
    name = f"rank/{rank}/state"
    return dict(_json(reader, name)) if name in reader.manifest.tensors else {}


def _json(reader: Reader, name: str) -> Any:
    return json.loads(bytes(reader.tensor(name).tolist()))


@contextmanager
def _damaged(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{what} is damaged: {str(error)[:200]}") from None


def random_state() -> dict[str, Any]:
    """The random state of Python, of numpy (if it has been imported), and of torch on the CPU and this rank's
    accelerator."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state | {name: device.get_rng_state() for name, device in _accelerator() if device.is_initialized()}


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])
    for name, device in _accelerator():
        if name in state:
            device.set_rng_state(state[name])


def _accelerator() -> list[tuple[str, Any]]:
    """The type of this machine's accelerator, and torch's module for it: [("cuda", torch.cuda)] for example. Empty
    where there is none, or none with random numbers of its own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":  # torch.mps cannot say whether it is in use
        return []
    return [(found.type, torch.get_device_module(found))]
