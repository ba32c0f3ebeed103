"""An optimizer's state as a manifest names it: what there is of each parameter, to be read when it is needed.

optimizer/<state>/<parameter>   a tensor of many elements, or the value for the only one
scalar/<state>/<parameter>      a tensor of one number for a parameter (counts of steps)
number/<state>/<parameter>      the same, as a plain Python number
value/<state>/<parameter>       None, a text, a list, ...: JSON as bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.rank_state import read_blob
from zeroshard.checkpoint.reader import Reader
from zeroshard.layout.interval import Interval
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.precision import precision_for
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.plain_model import names_by_id
from zeroshard.step.inner import is_elementwise_state
from zeroshard.step.stepper import SavedTensor

KINDS = ("optimizer", "scalar", "number", "value")


@dataclass(frozen=True)
class SavedEntry:
    """One entry of a parameter's state: its `kind` (see the module's note), and under which name it is stored."""

    kind: str
    key: str
    tensor: str


def saved_entries(manifest: Manifest) -> dict[str, list[SavedEntry]]:
    """Parameter -> the state that the checkpoint has of it."""
    found: dict[str, list[SavedEntry]] = {}
    for name in manifest.tensors:
        kind, *rest = name.split("/", 2)
        if kind in KINDS and len(rest) == 2:
            found.setdefault(rest[1], []).append(SavedEntry(kind, rest[0], name))
    return found


def saved_optimizers(manifest: Manifest) -> list[Any]:
    """What is stored of each: see `contents.optimizer_values`."""
    saved = manifest.values.get("optimizers")
    return saved if isinstance(saved, list) else []


def saved_groups(saved: Any) -> list[dict[str, Any]]:
    """The param groups of one optimizer in a manifest.

    Raises:
        CheckpointError: they are not what `contents.optimizer_values` gives.
    """
    groups = saved.get("groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError("the manifest's param groups are damaged")
    for group in groups:
        params = group.get("params")
        named = isinstance(params, list) and all(isinstance(name, str) for name in params)
        if not (named and isinstance(group.get("class"), str) and isinstance(group.get("options"), dict)):
            raise CheckpointError("the manifest's param groups are damaged")
    return groups


def plain_value(reader: Reader, entry: SavedEntry) -> Any:
    """What is no tensor.

    Raises:
        CheckpointError: bytes that are no JSON.
    """
    if entry.kind == "number":
        return reader.tensor(entry.tensor).item()
    return read_blob(reader, entry.tensor, entry.tensor)


def names_of(engine: Engine) -> dict[int, str]:
    """id of each parameter of the engine or its optimizer -> its name."""
    return {id(parameter): name for name, parameter in engine.untaken.items()} | names_by_id(engine.units)


class StateKinds:
    """What the state of a parameter is made of (see `inner.is_elementwise_state`), whether or not somebody steps it."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._known: dict[int, dict[str, bool]] = {}

    def options(self, parameter: Tensor) -> dict[str, Any]:
        group: dict[str, Any] = self._optimizer.param_groups[self._groups[id(parameter)]]
        return {key: value for key, value in group.items() if key != "params"}

    def __getitem__(self, parameter: Tensor) -> dict[str, bool]:
        group = self._groups[id(parameter)]
        if group not in self._known:
            classes = self._optimizer.groups.classes
            of_group, defaults = classes.of_groups[group], classes.options_of(group)
            self._known[group] = is_elementwise_state(of_group, self.options(parameter), defaults)
        return self._known[group]


class SavedOptimizer:
    """The state that a checkpoint has of the parameters of an optimizer, in the dtypes that they have here."""

    def __init__(self, reader: Reader, optimizer: ShardedOptimizer, tick: Callable[[], None]) -> None:
        """`tick`: called after each read, and may raise."""
        self._reader, self._tick = reader, tick
        self._entries, self._names = saved_entries(reader.manifest), names_of(optimizer.engine)
        self._kinds = StateKinds(optimizer)
        self._main_dtypes = {
            id(p): unit.spec.precision.main_dtype for unit in optimizer.engine.units for p in unit.parameters
        }

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Key -> `SavedTensor`, tensor of one number or plain value."""
        options, kinds, name = self._kinds.options(parameter), self._kinds[parameter], self._names[id(parameter)]
        main_dtype = self._main_dtypes.get(id(parameter)) or precision_for(parameter.dtype, None).main_dtype
        main = self._reader.manifest.tensors.get(f"model/{name}")
        on_device = bool(options.get("capturable") or options.get("fused"))  # as torch keeps its counts of steps
        state: dict[str, Any] = {}
        for entry in self._entries.get(name, []):
            if entry.kind in ("number", "value"):
                state[entry.key] = plain_value(self._reader, entry)
                continue
            stored = self._reader.manifest.tensors[entry.tensor]
            elementwise = entry.kind == "optimizer"
            if stored.numel == 1:  # whoever wrote it may not have known what it is
                elementwise = kinds.get(entry.key, elementwise)
            if elementwise:  # moments are kept as main is
                same = main is not None and stored.dtype == main.dtype
                state[entry.key] = self._tensor(entry, stored.shape, main_dtype if same else stored.dtype)
            else:
                value = self._reader.tensor(entry.tensor)
                state[entry.key] = value.to(parameter.device) if on_device else value
        self._tick()
        return state

    def _tensor(self, entry: SavedEntry, shape: tuple[int, ...], dtype: torch.dtype) -> SavedTensor:
        def read(interval: Interval, out: Tensor) -> None:
            self._reader.read_into(entry.tensor, interval, out)
            self._tick()

        return SavedTensor(shape, dtype, read)
