"""`load`: a committed step into any plan, on any number of ranks, in any format of main; `verify`: every byte of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.items import Extra, Optimizers, as_list, names_of, set_random_state
from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.meeting import Meeting, Stopped
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.save import together
from zeroshard.checkpoint.values import decode
from zeroshard.flat_step import FlatStep
from zeroshard.interval import Interval
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.optimizer_state import Elementwise, load_state
from zeroshard.owner_step import OwnerStep
from zeroshard.shard import Handle
from zeroshard.unit import Unit


@dataclass(frozen=True)
class Loaded:
    """What a load did. `missing`: not in the checkpoint, and as before; `unexpected`: in it, and not used; both empty
    when strict. `bytes_read`: by this rank."""

    step: int
    path: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@dataclass(frozen=True)
class StateName:
    """One entry of an optimizer's state: `kind` is "optimizer", "scalar" or "number" (see `items.py`)."""

    kind: str
    key: str
    name: str


@torch.no_grad()
def load(
    directory: Path | str,
    handle: Handle,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Extra = None,
    strict: bool = True,
    allow_rounding: bool = False,
) -> Loaded:
    """Take the state of `directory/step-N`. Collective, between a step and the next backward.

    Each rank reads the blocks that hold its own intervals, a block (1 MiB) at a time, and checks the digest of each
    before anything of it is used. Random numbers are those of the same rank at the time of the save, where there was
    such a rank.

    Args:
        optimizer: those that were given to `save`, in that order; None leaves optimizers as they are.
        step: None for the latest.
        extra: the objects that were given to `save`; None leaves them as they are.
        strict: raise where names or optimizer classes differ (nothing has been changed then); else take what fits.
        allow_rounding: values may be rounded to a narrower dtype (fp32 main to bf16 weights that are their own main).

    Raises:
        CheckpointError: on every rank: no such step; names, shapes or dtypes that do not fit (nothing has been
            changed); a damaged file, with its name (what has been read so far stays: load another step first).
        RuntimeError: gradients are waiting for a step.
    """
    handle.check_open("load")
    handle.finish_background()
    with ExitStack() as stack:
        # 1. One step, one manifest; whatever does not fit is found before anything is touched.
        directory = Path(directory).absolute()
        rank = handle.collectives.mesh.world.rank

        def find() -> list[str] | None:
            handle.expect_no_gradients("load")
            return [folders.find(directory, step).name, folders.new_id()] if rank == 0 else None

        found = together(handle, "load", find, (RuntimeError,))
        path, unique = directory / found[0][0], found[0][1]
        taking: list[Taking] = []

        def check() -> list[str]:
            taking.append(Taking(stack.enter_context(Reader(path)), handle, as_list(optimizer), extra, rank))
            taking[0].check(strict, allow_rounding)
            return [taking[0].manifest.id]

        ids = together(handle, "load", check)
        if any(of_rank != ids[0] for of_rank in ids):
            raise CheckpointError(f"load: the ranks see different folders under the name {path}")
        # 2. Every rank reads what it needs. A failure lets the others stop.
        take, meeting = taking[0], Meeting(handle.collectives, unique)

        def read() -> None:
            try:
                take.sharded(meeting)
            except Stopped:
                return
            except BaseException:
                meeting.stop()
                raise

        try:
            together(handle, "load", read)
        finally:
            if rank == 0:
                meeting.forget()
        # 3. Weights follow main.
        for unit in handle.units:
            unit.edits += 1
            handle.gatherer.updated(unit)
        handle.gatherer.settle()
        together(handle, "load", take.unsharded)
        manifest = take.manifest
        return Loaded(manifest.step, path, tuple(take.missing), tuple(take.unexpected), take.reader.num_bytes)


def verify(path: Path | str) -> Manifest:
    """Check every byte of a step folder (`.../step-12`) against its digests. Not collective; needs no model.

    Raises:
        CheckpointError: what is damaged, in which files.
    """
    with Reader(Path(path)) as reader:
        reader.check_everything()
        return reader.manifest


class Taking:
    """One load, as one rank sees it: what fits (`check`), then the sharded part, then the rest."""

    def __init__(
        self, reader: Reader, handle: Handle, optimizers: list[ShardedOptimizer], extra: Extra, rank: int
    ) -> None:
        self.reader, self.manifest = reader, reader.manifest
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._handle, self._extra, self._rank = handle, dict(extra or {}), rank
        self._buffers = handle.unsharded_state()
        values = self.manifest.values
        saved = values.get("optimizers")
        self._optimizers = list(zip(optimizers, saved if isinstance(saved, list) else [], strict=False))
        self._num_optimizers = len(optimizers)
        self._same_ranks = values.get("world_size") == handle.collectives.mesh.world.size
        self._state_of: dict[str, list[StateName]] = {}
        for name in self.manifest.tensors:
            kind, *rest = name.split("/", 2)
            if kind in ("optimizer", "scalar", "number") and len(rest) == 2:
                self._state_of.setdefault(rest[1], []).append(StateName(kind, rest[0], name))

    # What fits ---------------------------------------------------------------------------------------------------

    def check(self, strict: bool, allow_rounding: bool) -> None:
        """Raises:
        CheckpointError: names (if strict), shapes or dtypes that do not fit."""
        problems: list[str] = []
        if not self.reader.folder.name.startswith(folders.step_name(self.manifest.step)):
            problems.append(f"its manifest is that of step {self.manifest.step}")
        for name, (shape, dtype) in self._expected().items():
            entry = self.manifest.tensors.get(f"model/{name}")
            if entry is None:
                self.missing.append(name)
            elif entry.shape != shape:
                problems.append(f"{name}: expected the shape {shape}, found {entry.shape}")
            elif not _holds(entry.dtype, dtype) and not (allow_rounding and _floats(entry.dtype, dtype)):
                problems.append(
                    f"{name}: {entry.dtype} would be rounded to {dtype}; pass allow_rounding=True if you want that"
                )
        expected = {f"model/{name}" for name in self._expected()}
        stored = [name for name in self.manifest.tensors if name.startswith("model/")]
        self.unexpected += [name.removeprefix("model/") for name in stored if name not in expected]
        problems += self._check_optimizers()
        if self._extra:
            stored_extra = self._saved_extra(from_own=False)
            self.missing += [f"extra {name!r}" for name in self._extra if name not in stored_extra]
            self.unexpected += [f"extra {name!r}" for name in stored_extra if name not in self._extra]
        if strict:
            problems += [f"missing: {_listed(self.missing)}"] if self.missing else []
            problems += [f"unexpected: {_listed(self.unexpected)}"] if self.unexpected else []
        if problems:
            raise CheckpointError(f"{self.reader.folder} does not fit: {'; '.join(problems[:10])}")

    def _expected(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype of what the model holds now."""
        expected = {name: (tuple(value.shape), value.dtype) for name, value in self._buffers.items()}
        for unit in self._handle.units:
            dtype = unit.main.dtype if unit.main is not None else unit.weights.buffer.dtype
            expected |= {slot.name: (slot.shape, dtype) for slot in unit.layout.slots}
        return expected

    def _check_optimizers(self) -> list[str]:
        """Names of the groups' parameters, classes, and shapes of elementwise state."""
        problems = []
        names = names_of(self._handle)
        if len(self._optimizers) < self._num_optimizers:
            self.missing.append(f"state of {self._num_optimizers - len(self._optimizers)} optimizer(s)")
        for optimizer, saved in self._optimizers:
            groups = _groups(saved)
            mine = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            theirs = [name for group in groups for name in group["params"]]
            self.missing += [f"optimizer state of {name}" for name in mine if name not in set(theirs)]
            self.unexpected += [f"optimizer state of {name}" for name in theirs if name not in set(mine)]
            class_of = {name: group["class"] for group in groups for name in group["params"]}
            for group, of_class in zip(optimizer.param_groups, optimizer.classes, strict=True):
                others = {class_of.get(names[id(p)], of_class.__name__) for p in group["params"]} - {of_class.__name__}
                self.unexpected += [f"state of {other} for {of_class.__name__}" for other in sorted(others)]
            for stepper in optimizer.steppers:
                if isinstance(stepper, FlatStep):
                    slots = [slot for unit in stepper.groups for slot in unit.layout.slots]
                    problems += [
                        f"{state.key} of {slot.name}: expected the shape {slot.shape}"
                        for slot in slots
                        for state in self._state_of.get(slot.name, [])
                        if state.kind == "optimizer" and self.manifest.tensors[state.name].shape != slot.shape
                    ]
        return problems

    # The sharded part --------------------------------------------------------------------------------------------

    def sharded(self, meeting: Meeting) -> None:
        """Main, frozen weights and optimizer state of this rank."""
        for unit in self._handle.units:
            interval = unit.own_shard() if unit.main is None else unit.main.interval
            for fragment in unit.layout.fragments_in(interval):
                if f"model/{fragment.slot.name}" in self.manifest.tensors:
                    take = partial(_take_weights, unit, fragment.slot.world.start, meeting)
                    self.reader.read(f"model/{fragment.slot.name}", fragment.param, take)
        for optimizer, _ in self._optimizers:
            for stepper in optimizer.steppers:
                if isinstance(stepper, FlatStep):
                    self._take_flat(stepper, optimizer, meeting)
                elif isinstance(stepper, OwnerStep):
                    for one, _ in list(stepper.owned()):
                        stepper.set_state(one, self._state(one.unit, one.index, one.group, optimizer, whole=True))
                        meeting.beat()

    def _take_flat(self, flat: FlatStep, optimizer: ShardedOptimizer, meeting: Meeting) -> None:
        state = {}
        for unit, groups in flat.groups.items():
            for index, group in enumerate(groups):
                if group is not None:
                    state[unit.parameters[index]] = self._state(unit, index, group, optimizer, whole=False)
                    meeting.beat()
        load_state(flat, state)

    def _state(self, unit: Unit, index: int, group: int, optimizer: ShardedOptimizer, *, whole: bool) -> dict[str, Any]:
        """The state of one parameter: whole, or with something to read it by in place of what is elementwise."""
        assert unit.main is not None
        slot, device = unit.layout.slots[index], unit.main.weights.device
        stored_as = self.manifest.tensors.get(f"model/{slot.name}")
        options = optimizer.param_groups[group]
        on_device = bool(options.get("capturable") or options.get("fused"))  # as torch keeps its counts of steps
        state: dict[str, Any] = {}
        for one in self._state_of.get(slot.name, []):
            dtype = self.manifest.tensors[one.name].dtype
            if stored_as is not None and dtype == stored_as.dtype and one.kind == "optimizer":
                dtype = unit.main.dtype  # moments are kept as main is
            if one.kind == "optimizer" and not whole:
                state[one.key] = Elementwise(dtype, partial(self._read_into, one.name))
                continue
            value = self.reader.tensor(one.name)
            if one.kind == "number":
                state[one.key] = value.item()
            else:
                state[one.key] = value.to(device, dtype) if one.kind == "optimizer" or on_device else value
        return state

    def _read_into(self, name: str, param: Interval, out: Tensor) -> None:
        def take(part: Interval, values: Tensor) -> None:
            out[part.relative_to(param.start).slice].copy_(values)

        self.reader.read(name, param, take)

    # The rest ----------------------------------------------------------------------------------------------------

    def unsharded(self) -> None:
        """Buffers, hyper-parameters, loss scales, `extra`, random numbers."""
        name = f"rank/{self._rank}/state"
        own: dict[str, Any] = {}
        if name in self.manifest.tensors:
            own = decode(_json(bytes(self.reader.tensor(name).tolist())), self.reader.tensor)
        same = own if self._same_ranks else {}
        for name, value in self._buffers.items():
            if f"model/{name}" in self.manifest.tensors:
                saved = same.get("buffers", {}).get(name)
                value.copy_(self.reader.tensor(f"model/{name}") if saved is None else saved)
        names = names_of(self._handle)
        for optimizer, values in self._optimizers:
            for group, saved_group in zip(optimizer.param_groups, _groups(values), strict=False):
                if [names[id(parameter)] for parameter in group["params"]] == saved_group["params"]:
                    _set_options(group, decode(saved_group["options"], self.reader.tensor))
            optimizer.scaling.load_state_dict(decode(values.get("loss_scale", {}), self.reader.tensor))
        saved_extra = same.get("extra") or self._saved_extra(from_own=True)
        for key, stateful in self._extra.items():
            if key in saved_extra:
                stateful.load_state_dict(saved_extra[key])
        if "random" in own:
            set_random_state(own["random"])

    def _saved_extra(self, *, from_own: bool) -> dict[str, Any]:
        """Name -> state, decoded if asked."""
        values = self.manifest.values.get("extra")
        if not isinstance(values, dict):
            return {}
        return dict(decode(values, self.reader.tensor)) if from_own else values


def _take_weights(unit: Unit, origin: int, meeting: Meeting, part: Interval, values: Tensor) -> None:
    unit.set_part(Interval(origin + part.start, origin + part.stop), values)
    meeting.beat()


def _groups(saved: Any) -> list[dict[str, Any]]:
    """The param groups of one optimizer in a manifest, checked."""
    groups = saved.get("groups") if isinstance(saved, dict) else None
    for group in groups if isinstance(groups, list) else [None]:
        if not isinstance(group, dict) or not (
            isinstance(group.get("class"), str)
            and isinstance(group.get("params"), list)
            and all(isinstance(name, str) for name in group["params"])
            and isinstance(group.get("options"), dict)
        ):
            raise CheckpointError("the manifest's param groups are damaged")
    assert isinstance(groups, list)
    return groups


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        now = group.get(key)
        if isinstance(now, Tensor):
            now.fill_(value)  # a learning rate that a class keeps as a tensor
        else:
            group[key] = value


def _holds(stored: torch.dtype, now: torch.dtype) -> bool:
    """Whether every value of the first is one of the second."""
    return stored == now or (_floats(stored, now) and torch.promote_types(stored, now) == now)


def _floats(*dtypes: torch.dtype) -> bool:
    return all(dtype.is_floating_point for dtype in dtypes)


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"a rank's state is not JSON: {str(error)[:200]}") from None
