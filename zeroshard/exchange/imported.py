"""From the files of other tools to a committed step: written and published as `save` does it, by one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.commit import Job, file_name, open_folder, size_of_part, versions
from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.rank_state import blob, number
from zeroshard.checkpoint.saved_state import saved_groups
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.comm.together import in_words
from zeroshard.exchange.dcp_folder import Box, Foreign
from zeroshard.io.tensor_file import open_model
from zeroshard.io.values import encode, no_tensors
from zeroshard.layout.interval import Interval


@dataclass(frozen=True)
class Imported:
    """A step made of other files. `left_out`: names in them that a step has no place for."""

    path: Path
    left_out: tuple[str, ...] = ()


def import_model(
    source: Path | str, directory: Path | str, *, step: int, force: bool = False, follow_links: bool = False
) -> Imported:
    """`directory/step-N` with the weights and buffers of a safetensors file, or of a folder with an index of several:
    what `load` without `optimizer` takes. Not collective; a block (1 MiB) in memory at a time.

    Args:
        force: replace a step of that number.
        follow_links: the files may be links to somewhere else, as in the cache of a hub.

    Raises:
        FileExistsError: there is such a step, and not `force`.
        CheckpointError: files that are damaged, or not what the format says.
    """
    with ExitStack() as stack:
        found = open_model(Path(source), follow_links=follow_links)
        for file in set(found.values()):
            stack.callback(file.close)
        items: list[Item] = []
        tied: dict[str, str] = {}
        for name, file in found.items():
            stored = file.tensors[name]
            whole = Interval(0, stored.numel)
            items.append(Item(f"model/{name}", stored.shape, stored.dtype, whole, partial(file.read, name)))
        for file in set(found.values()):  # as `safetensors.torch.save_model` notes what it left out
            noted = ((alias, name) for alias, name in file.metadata.items() if alias != "format")
            tied |= {alias: name for alias, name in noted if alias not in found and name in found}
        values = {"optimizers": [], "tied": tied}
        return Imported(commit_alone(Path(directory), step, items, values, force=force))


def import_dcp(
    source: Path | str,
    directory: Path | str,
    *,
    step: int,
    optimizer_class: str = "AdamW",
    model_key: str = "model",
    optimizer_key: str = "optim",
    force: bool = False,
) -> Imported:
    """`directory/step-N` with what `torch.distributed.checkpoint.save({model_key: ..., optimizer_key: ...})` has
    written, as `get_state_dict` of `torch.distributed.checkpoint.state_dict` names it (flattened or not): weights,
    buffers, optimizer state by parameter, param groups. Not collective. Such folders hold pickles, which are read
    without unpickling them (see `dcp_folder.py`). Memory: a block, but for tensors that are not sharded by rows: one.

    Args:
        optimizer_class: DCP does not record it; `load` compares it.
        model_key: "" where the model's state dict is what was saved.

    Raises:
        FileExistsError: there is such a step, and not `force`.
        CheckpointError: files that are damaged, or not what DCP writes; no tensor under `model_key`.
    """
    with Foreign(Path(source)) as foreign:
        model: dict[str, str] = {}  # here -> there
        tied: dict[str, str] = {}
        first: dict[tuple[Box, ...], str] = {}
        prefix = f"{model_key}." if model_key else ""
        for there, tensor in foreign.tensors.items():
            name = there.removeprefix(prefix)
            if there.startswith(prefix) and (prefix or not there.startswith(f"{optimizer_key}.")):
                same = first.setdefault(tensor.boxes, name) if tensor.boxes else name
                if same == name:
                    model[name] = there
                else:
                    tied[name] = same
        if not model:
            raise CheckpointError(f"{source} has no tensor under {model_key!r}; it has {[*foreign.tensors][:5]}")
        items = [_item(foreign, f"model/{name}", there) for name, there in model.items()]
        used = {*model.values(), *(prefix + name for name in tied)}

        state = f"{optimizer_key}.state."
        elementwise = _elementwise_keys(foreign, state, model)
        for there in [*foreign.tensors, *foreign.values]:
            name, _, key = there.removeprefix(state).rpartition(".")
            name = tied.get(name, name)
            if there.startswith(state) and name in model and "/" not in key:
                if there in foreign.tensors:
                    tensor = foreign.tensors[there]
                    is_scalar = tensor.numel == 1 and key not in elementwise
                    kind = "scalar" if is_scalar and not tensor.shape else "optimizer"
                    items.append(_item(foreign, f"{kind}/{key}/{name}", there))
                else:
                    try:
                        items.append(_plain_item(foreign, there, key, name))
                    except ValueError:  # an object
                        continue
                used.add(there)
        groups = _groups(foreign, f"{optimizer_key}.param_groups.", optimizer_class, used)
        optimizers = [{"groups": groups, "loss_scale": {}}] if groups else []
        left_out = tuple(sorted({*foreign.tensors, *foreign.values} - used))
        values = {"optimizers": optimizers, "tied": tied}
        return Imported(commit_alone(Path(directory), step, items, values, force=force), left_out)


def _elementwise_keys(foreign: Foreign, state: str, model: dict[str, str]) -> set[str]:
    """Entries of the state that have the shape of a parameter of many elements: of one that has a single element, they
    are elementwise, too."""
    found = set()
    for there, tensor in foreign.tensors.items():
        name, _, key = there.removeprefix(state).rpartition(".")
        in_model = there.startswith(state) and name in model
        if in_model and tensor.numel > 1 and tensor.shape == foreign.tensors[model[name]].shape:
            found.add(key)
    return found


def _plain_item(foreign: Foreign, there: str, key: str, name: str) -> Item:
    """
    Raises:
        ValueError: it is an object.
    """
    value = foreign.value(there)
    if isinstance(value, (bool, int, float)):
        return number(f"number/{key}/{name}", value)
    return blob(f"value/{key}/{name}", _as_json(foreign, there))


def _item(foreign: Foreign, name: str, there: str) -> Item:
    tensor = foreign.tensors[there]
    return Item(name, tensor.shape, tensor.dtype, Interval(0, tensor.numel), partial(foreign.read, there))


def _groups(foreign: Foreign, prefix: str, of_class: str, used: set[str]) -> list[dict[str, Any]]:
    """Param groups as `contents.optimizer_values` gives them: there by number, or option by option for each parameter.
    Adds the names of what it takes to `used`."""
    found: dict[str, dict[str, Any]] = {}
    for there in [*foreign.values, *foreign.tensors]:
        owner, _, key = there.removeprefix(prefix).rpartition(".")
        if there.startswith(prefix):
            with suppress(ValueError):  # an object: not a hyper-parameter that `save` would keep, either
                found.setdefault(owner, {})[key] = _option(foreign, there)
                used.add(there)
    numbered = sorted(
        (owner for owner, options in found.items() if "params" in options), key=lambda text: text.zfill(9)
    )
    if numbered:
        groups = [{"class": of_class, "params": found[n].pop("params"), "options": found[n]} for n in numbered]
    else:
        together: dict[str, dict[str, Any]] = {}
        for name, options in found.items():
            mark = json.dumps(options, sort_keys=True)
            together.setdefault(mark, {"class": of_class, "params": [], "options": options})["params"].append(name)
        groups = list(together.values())
    return saved_groups({"groups": groups})


def _option(foreign: Foreign, there: str) -> Any:
    """A hyper-parameter, as JSON.

    Raises:
        ValueError: it is an object.
    """
    if there in foreign.tensors:
        tensor = foreign.tensors[there]
        if tensor.numel != 1:
            raise ValueError("a tensor")
        return encode(foreign.read(there, Interval(0, 1)).item(), no_tensors, there)
    return _as_json(foreign, there)


def _as_json(foreign: Foreign, there: str) -> Any:
    """
    Raises:
        ValueError: it is an object.
    """
    value = foreign.value(there)
    rest, count = [value], 0
    while rest:  # few bytes of a pickle may say the same list a million times
        one = rest.pop()
        inside = list(one.values()) if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else ()
        rest.extend(inside)
        count += len(inside)
        if count > 1_000_000:
            raise CheckpointError(f"{foreign.folder}: {there} is too large for a plain value")
    try:
        return encode(value, no_tensors, there)
    except RecursionError:
        raise ValueError("too deep") from None


def commit_alone(directory: Path, step: int, items: Sequence[Item], values: dict[str, Any], *, force: bool) -> Path:
    """One file of whole tensors, and its manifest, as a committed step.

    Raises:
        FileExistsError: there is such a step, and not `force`.
        CheckpointError: nothing has been written.
    """
    directory = directory.absolute()
    if isinstance(step, bool) or not 0 <= step < 10**15:
        raise ValueError(f"step must be an integer from 0, found {step!r}")
    if step in folders.steps(directory) and not force:
        raise FileExistsError(f"{directory} holds step {step} already (--force replaces it)")
    unique = folders.new_id()
    plan = FilePlan.of(items, 0, {"format": "pt", "zeroshard": f"step {step}, {unique}, {file_name(0)}"})
    base = Manifest(step, unique, (), {}, {**values, "extra": {}, "world_size": 1}, versions())
    try:
        sizes = [plan.num_bytes, len(base.encode()) + size_of_part(plan, 0)]
        lock = open_folder(directory, step, unique, sizes)
    except OSError as error:
        raise CheckpointError(f"{directory}: {in_words(error)}") from None
    Job(directory / folders.temporary_name(step, unique), plan, base, Meeting(None, unique), lock).run()
    return directory / folders.step_name(step)
