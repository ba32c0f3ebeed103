"""The optimizer state in a checkpoint: its names in the manifest, and reading it per parameter on demand.

optimizer/<state>/<parameter>   a tensor with a value per element
scalar/<state>/<parameter>      a tensor with one number for the whole parameter (step counts)
number/<state>/<parameter>      a Python number
value/<state>/<parameter>       None, a string, a list, ...: JSON as bytes
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
from zeroshard.io.tensor_file import DTYPES
from zeroshard.io.values import decode
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
    """One entry of a parameter's state: its kind (see the module's note), its key, and the name of its tensor in the
    manifest."""

    kind: str
    key: str
    tensor: str


def saved_entries(manifest: Manifest) -> dict[str, list[SavedEntry]]:
    """Parameter -> the entries of its state in the checkpoint."""
    found: dict[str, list[SavedEntry]] = {}
    for name in manifest.tensors:
        kind, *rest = name.split("/", 2)
        if kind in KINDS and len(rest) == 2:
            found.setdefault(rest[1], []).append(SavedEntry(kind, rest[0], name))
    return found


def saved_optimizers(manifest: Manifest) -> list[Any]:
    """The values of each optimizer in the manifest: see `contents.optimizer_values`."""
    saved = manifest.values.get("optimizers")
    return saved if isinstance(saved, list) else []


def saved_extra(manifest: Manifest) -> list[Any]:
    """The names of the objects in `extra`: mostly texts, but whatever the keys of a dict in a state may be.

    Raises:
        CheckpointError: they are damaged.
    """
    try:
        found = decode(manifest.values.get("extra", {}), lambda name: torch.empty(0, device="cpu"))
    except RecursionError:
        raise CheckpointError("the manifest's extra is damaged") from None
    return [*found] if isinstance(found, dict) else []


def saved_groups(saved: Any) -> list[dict[str, Any]]:
    """The param groups of one optimizer in a manifest.

    Raises:
        CheckpointError: they do not have the form of `contents.optimizer_values`.
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


def saved_options(group: dict[str, Any], of_class: type, tensor: Callable[[str], Tensor]) -> dict[str, Any]:
    """The hyper-parameters of a group of `saved_groups`.

    Args:
        of_class: that takes them. One that has not saved them gets tensors of one number as numbers: it may not take
            tensors.
        tensor: name in the manifest -> tensor.

    Raises:
        CheckpointError: they are damaged.
    """
    options = decode(group["options"], tensor)
    notes = group.get("tensors", {}) if group["class"] == of_class.__name__ else {}  # an import has none
    try:
        for key, (dtype, shape) in notes.items():
            options[key] = torch.tensor(options[key], dtype=DTYPES[dtype], device="cpu").view(shape)
        return dict(options)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        raise CheckpointError("the manifest's param groups are damaged") from None


def option_here(now: Any, saved: Any, device: torch.device) -> Any:
    """A saved hyper-parameter, in place of the present one.

    Args:
        device: of tensors where the present one is none. Single numbers stay on the CPU, as torch keeps step counts.
    """
    if isinstance(saved, Tensor):
        return saved.to(now.device if isinstance(now, Tensor) else device if saved.dim() else saved.device)
    if isinstance(now, Tensor) and now.numel() == 1 and isinstance(saved, (int, float)):
        return torch.full_like(now, saved)  # a new one, not `fill_`: groups may share the old one
    if type(saved) is type(now) is tuple and len(saved) == len(now):
        return tuple(map(option_here, now, saved, [device] * len(now)))
    return saved


def plain_value(reader: Reader, entry: SavedEntry) -> Any:
    """A value that is no tensor.

    Raises:
        CheckpointError: the bytes are no valid JSON.
    """
    if entry.kind == "number":
        return reader.tensor(entry.tensor).item()
    return read_blob(reader, entry.tensor, entry.tensor)


def names_of(engine: Engine) -> dict[int, str]:
    """id of each parameter of the engine or its optimizer -> its name."""
    return {id(parameter): name for name, parameter in engine.untaken.items()} | names_by_id(engine.units)


class StateKinds:
    """Which items of a parameter's state are elementwise (see `inner.is_elementwise_state`), also for frozen
    parameters."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._known: dict[int, dict[str, bool]] = {}

    def options(self, parameter: Tensor) -> dict[str, Any]:
        group: dict[str, Any] = self._optimizer.param_groups[self._groups[id(parameter)]]
        return group

    def __getitem__(self, parameter: Tensor) -> dict[str, bool]:
        group = self._groups[id(parameter)]
        if group not in self._known:
            classes = self._optimizer.groups.classes
            of_group, defaults = classes.of_groups[group], classes.options_of(group)
            self._known[group] = is_elementwise_state(of_group, self.options(parameter), defaults)
        return self._known[group]


class SavedOptimizer:
    """The saved state of the parameters of an optimizer, in the dtypes that the optimizer uses here."""

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
        on_device = bool(options.get("capturable") or options.get("fused"))  # where torch keeps step counts then
        state: dict[str, Any] = {}
        for entry in self._entries.get(name, []):
            if entry.kind in ("number", "value"):
                state[entry.key] = plain_value(self._reader, entry)
                continue
            stored = self._reader.manifest.tensors[entry.tensor]
            elementwise = entry.kind == "optimizer"
            if stored.numel == 1:  # the writer may not have known the form, so ask the class
                elementwise = kinds.get(entry.key, elementwise)
            if elementwise:  # moments that had main's dtype get main's dtype here
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
