"""Compares a checkpoint with the model, the optimizers and the `extra` objects, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.contents import Extra
from zeroshard.checkpoint.manifest import CheckpointError, Manifest, TensorEntry
from zeroshard.checkpoint.rank_state import own_buffers
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.saved_state import (
    SavedEntry,
    names_of,
    saved_entries,
    saved_extra,
    saved_groups,
    saved_optimizers,
    saved_options,
)
from zeroshard.errors import InvalidValue
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.runtime.engine import Engine
from zeroshard.step.assignment import Options
from zeroshard.step.inner import small
from zeroshard.step.steppers import expect_to_step

Pairs = Sequence[tuple[ShardedOptimizer, dict[str, Any]]]
"""Pairs of an optimizer and its values in the manifest."""


@dataclass(frozen=True)
class Compatibility:
    """The differences. `missing`: names that the checkpoint lacks; `unexpected`: names that only the checkpoint has;
    `problems`: shapes and dtypes that do not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def expect(self, where: str, *, strict: bool) -> None:
        """Raises:
        CheckpointError: there are problems; or, if `strict`, names are missing or unexpected."""
        problems = list(self.problems)
        if strict:
            problems += [f"missing: {_listed(self.missing)}"] if self.missing else []
            problems += [f"unexpected: {_listed(self.unexpected)}"] if self.unexpected else []
        if problems:
            is_of_extra = all(name.startswith("extra '") for name in (*self.problems, *self.missing, *self.unexpected))
            hint = ". Pass the objects that were saved; with strict=False the others keep their state" * is_of_extra
            raise CheckpointError(f"{where} does not fit: {'; '.join(problems[:10])}{hint}")

    def note_names(self, expected: Iterable[str], found: Iterable[str], label: str = "{}") -> None:
        """Note names that only one side has."""
        expected, found = dict.fromkeys(expected), dict.fromkeys(found)
        self.missing.extend(label.format(name) for name in expected if name not in found)
        self.unexpected.extend(label.format(name) for name in found if name not in expected)


def compare(
    manifest: Manifest, engine: Engine, optimizers: Sequence[ShardedOptimizer], extra: Extra, allow_rounding: bool
) -> Compatibility:
    """Compare names, shapes, dtypes and classes. `optimizers` and `extra`: what is to be loaded; if they are empty, the
    checkpoint's are ignored."""
    result = Compatibility()
    expected = model_entries(engine)
    result.note_names(expected, manifest.of_model)
    of_any_shape = engine.plain.extra_states()
    for name, (shape, dtype) in expected.items():
        entry = None if name in of_any_shape else manifest.tensors.get(f"model/{name}")
        if entry is not None and entry.shape != shape:
            result.problems.append(f"{name}: expected the shape {shape}, found {entry.shape}")
        elif entry is not None and not _holds(entry.dtype, dtype, allow_rounding):
            hint = "would be rounded to" if _floats(entry.dtype, dtype) else "cannot become"
            result.problems.append(f"{name}: {entry.dtype} {hint} {dtype} (see allow_rounding)")
    if optimizers:
        num_saved = len(saved_optimizers(manifest))
        # A run is often fine-tuned from weights that were saved alone.
        hint = " (pass as many as were saved, in a list)"
        if not num_saved:
            hint = " (no optimizer was saved: leave it out of the load, and it starts anew)"
        result.note_names(map(str, range(len(optimizers))), map(str, range(num_saved)), "optimizer number {}" + hint)
    for optimizer, saved in pairs_of(manifest, optimizers):
        _compare_optimizer(result, manifest, optimizer, saved)
    if extra:
        result.note_names(extra, saved_extra(manifest), "extra '{}'")
    return result


def under_names_here(reader: Reader, engine: Engine) -> Manifest:
    """The manifest of an open step, with this rank's own buffers in the place of rank 0's (if the number of ranks is
    the same), and with tied parameters under the engine's names. A parameter with several names may be stored under any
    or all of them.

    Raises:
        CheckpointError: names that are one parameter here have different values in the checkpoint.
    """
    here, manifest, world = engine.tied(), reader.manifest, engine.collectives.mesh.world
    tensors, values = dict(manifest.tensors), manifest.values
    if values.get("world_size") == world.size and (own := own_buffers(reader, world.rank)) is not None:
        for name in own_buffers(reader, 0) or ():
            tensors.pop(f"model/{name}", None)
        tensors |= {f"model/{name}": entry for name, entry in own.items()}
    if not here:
        return replace(manifest, tensors=tensors)
    state = saved_entries(manifest)
    for alias, name in here.items():
        prefixes = ["model", *(f"{one.kind}/{one.key}" for one in state.get(alias, []))]
        for prefix in prefixes:
            moved = tensors.pop(f"{prefix}/{alias}", None)
            if moved is not None and not _same(reader, tensors.setdefault(f"{prefix}/{name}", moved), moved):
                raise CheckpointError(
                    f"{alias} and {name} are one parameter here, and two different ones in {reader.folder}"
                )
    if optimizers := saved_optimizers(manifest):
        renamed = [
            {**saved, "groups": [{**g, "params": [here.get(n, n) for n in g["params"]]} for g in saved_groups(saved)]}
            for saved in optimizers
        ]
        values = {**values, "optimizers": renamed}
    return replace(manifest, tensors=tensors, values=values)


def _same(reader: Reader, one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two entries have equal values, by their digests."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    digests = [[(chunk.interval, chunk.digests) for _, chunk in reader.chunks(entry)] for entry in (one, other)]
    return digests[0] == digests[1]


def model_entries(engine: Engine) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of all tensors that `save` would write for the model."""
    whole = {**engine.unsharded_state(), **engine.untaken}
    entries = {name: (tuple(value.shape), value.dtype) for name, value in whole.items()}
    for unit in engine.units:
        dtype = unit.main.dtype
        entries |= {slot.name: (slot.shape, dtype) for slot in unit.layout.slots}
    return entries


def pairs_of(manifest: Manifest, optimizers: Sequence[ShardedOptimizer]) -> Pairs:
    return list(zip(optimizers, saved_optimizers(manifest), strict=False))


def adopted(optimizer: ShardedOptimizer, saved: Any) -> list[nn.Parameter]:
    """Parameters without an optimizer (frozen ones) that the saved optimizer has in its first group."""
    names, groups = names_of(optimizer.engine), saved_groups(saved)
    first = set(groups[0]["params"]) if groups else set()
    return [parameter for parameter in optimizer.groups.adoptable() if names[id(parameter)] in first]


def _compare_optimizer(result: Compatibility, manifest: Manifest, optimizer: ShardedOptimizer, saved: Any) -> None:
    names, groups, state = names_of(optimizer.engine), saved_groups(saved), saved_entries(manifest)
    class_of = {name: group["class"] for group in groups for name in group["params"]}
    mine = [[names[id(p)] for p in params] for params in optimizer.groups.lists_with(adopted(optimizer, saved))]
    result.note_names([name for of_group in mine for name in of_group], class_of, "optimizer state of {}")
    if mine != [group["params"] for group in groups] and {*class_of} == {
        name for of_group in mine for name in of_group
    }:
        result.unexpected.append(
            "param groups that are divided in another way (divide them as they were saved; or pass strict=False, which "
            "loads the state of each parameter, and leaves the hyper-parameters of those groups as they are here)"
        )
    for of_group, of_class in zip(mine, optimizer.groups.classes.of_groups, strict=True):
        others = {class_of.get(name, of_class.__name__) for name in of_group} - {of_class.__name__}
        result.unexpected.extend(_of_another_class(other, of_class) for other in sorted(others))
    options, loaded = optimizer.groups.options(), optimizer.groups.options()
    for index, (params, saved_group) in enumerate(zip(mine, groups, strict=False)):
        if params == saved_group["params"]:
            loaded[index] |= _compare_options(result, manifest, optimizer, index, saved_group)
    for stepper in optimizer.steppers:
        for slot in (member.slot for member in stepper.assignment.members()):
            for entry in state.get(slot.name, []):
                shape = manifest.tensors[entry.tensor].shape
                if entry.kind == "optimizer" and not stepper.state.fits(slot, shape):
                    result.problems.append(f"{entry.key} of {slot.name}: expected the shape {slot.shape}")
    here: dict[Tensor, str] = {parameter: names[id(parameter)] for parameter in optimizer.groups.parameters()}
    found = {parameter: _examples(manifest, state.get(name, [])) for parameter, name in here.items()}
    try:
        expect_to_step(optimizer.steppers, found, options, loaded)
    except InvalidValue as error:
        result.problems.append(str(error))


def _examples(manifest: Manifest, entries: Iterable[SavedEntry]) -> dict[str, Any]:
    """The state of a parameter, with other values."""
    kinds = {"number": 1.0, "value": None}
    return {
        entry.key: kinds[entry.kind] if entry.kind in kinds else small(manifest.tensors[entry.tensor].shape)
        for entry in entries
    }


def _compare_options(
    result: Compatibility, manifest: Manifest, optimizer: ShardedOptimizer, index: int, saved_group: dict[str, Any]
) -> Options:
    """Returns the saved ones, with other values of tensors."""

    def example(name: str) -> Tensor:
        return small(manifest.tensors[name].shape)

    saved = saved_options(saved_group, optimizer.groups.classes.of_groups[index], example)
    for key, value in saved.items():
        now, number = optimizer.param_groups[index].get(key), (Tensor, int, float)
        if isinstance(now, number) and not isinstance(value, (*number, NoneType)):
            result.problems.append(f"the hyper-parameter {key} is {now!r} here, and {value!r:.100} in the checkpoint")
    return saved


def _of_another_class(saved: str, here: type) -> str:
    return (
        f"state of {saved} for {here.__name__} (make the optimizer of the class that was saved; or leave it out, "
        "load(directory, handle), for the weights alone)"
    )


def _holds(stored: torch.dtype, now: torch.dtype, allow_rounding: bool) -> bool:
    """Whether dtype `now` can represent all values of `stored`, or may round them (`allow_rounding`)."""
    return stored == now or (_floats(stored, now) and (allow_rounding or torch.promote_types(stored, now) == now))


def _floats(*dtypes: torch.dtype) -> bool:
    return all(dtype.is_floating_point for dtype in dtypes)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
