"""Imports folders of `torch.distributed.checkpoint` (DCP) as a committed step."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.checkpoint.rank_state import blob, number
from zeroshard.checkpoint.saved_state import saved_groups
from zeroshard.checkpoint.writer import Item
from zeroshard.errors import InvalidValue
from zeroshard.exchange.dcp_folder import DcpFolder
from zeroshard.exchange.dcp_metadata import Box
from zeroshard.exchange.imported import Imported, commit_alone
from zeroshard.io.values import encode, no_tensors
from zeroshard.layout.interval import Interval

_BLOCK = 1 << 18
"""Elements that are read at a time to look for others than zeros."""


def import_dcp(
    source: Path | str,
    directory: Path | str,
    *,
    step: int,
    optimizer_class: str | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
    force: bool = False,
) -> Imported:
    """Write `directory/step-N` from a folder of `torch.distributed.checkpoint.save({model_key: ..., optimizer_key:
    ...})`, with the names of `torch.distributed.checkpoint.state_dict.get_state_dict` (flattened or not): weights,
    buffers, optimizer state by parameter, param groups. Not collective. Such folders contain pickles, which are read
    without unpickling them (see `dcp_folder.py`). It holds one block in memory at a time; of a tensor that is not
    sharded by rows, the whole tensor.

    Args:
        source: the folder.
        directory: of the steps.
        step: number of the new step.
        optimizer_class: name of the optimizer class, which DCP does not record, and `load` compares. None: AdamW.
        model_key: of the model's state dict; "" if that itself was saved.
        optimizer_key: of the optimizer's state dict.
        force: True: replace an existing step of that number.

    Raises:
        FileExistsError: there is such a step, and `force` is False.
        ValueError: the state is not AdamW's, and `optimizer_class` is None.
        CheckpointError: a file is damaged, or not written by DCP; there is no tensor under `model_key`.
    """
    with DcpFolder(Path(source)) as source_folder:
        found = _FromDcp(source_folder)
        found.take_model(model_key, optimizer_key)
        found.take_state(f"{optimizer_key}.state.")
        groups = found.take_groups(f"{optimizer_key}.param_groups.", optimizer_class or "AdamW")
        if optimizer_class is None:
            found.expect_adamw(groups)
        values = {"optimizers": [{"groups": groups, "loss_scale": {}}] if groups else [], "tied": found.tied}
        path = commit_alone(Path(directory), step, found.items, values, force=force)
        return Imported(path, found.left_out())


class _FromDcp:
    """Collects those values of a DCP folder that a step can contain.

    Attributes:
        items: to be written.
        keys: names in the optimizer's state.
        tied: further name of a parameter -> the name under which it is stored.
    """

    def __init__(self, folder: DcpFolder) -> None:
        self._folder = folder
        self._model: dict[str, str] = {}  # name in the step -> name in the folder
        self._used: set[str] = set()  # names in the folder
        self.items: list[Item] = []
        self.keys: set[str] = set()
        self.tied: dict[str, str] = {}

    def take_model(self, key: str, optimizer_key: str) -> None:
        """Take weights and buffers under that key. Tensors with the same bytes are one tied parameter.

        Raises:
            CheckpointError: there are none.
        """
        first: dict[tuple[Box, ...], str] = {}
        prefix = f"{key}." if key else ""
        for there, tensor in self._folder.tensors.items():
            if there.startswith(prefix) and (prefix or not there.startswith(f"{optimizer_key}.")):
                name = there.removeprefix(prefix)
                same = first.setdefault(tensor.boxes, name) if tensor.boxes else name
                if same == name:
                    self._model[name] = there
                    self._take(f"model/{name}", there)
                else:
                    self.tied[name] = same
                    self._used.add(there)
        if not self._model:
            has = [*self._folder.tensors][:5]
            raise CheckpointError(
                f"{self._folder.folder} has no tensor under {key!r}; it has {has}: name what stands before the names "
                'of the model by model_key= (--model-key), "" where nothing does'
            )

    def take_state(self, prefix: str) -> None:
        """Take the optimizer's state of each parameter, under the names of `saved_state.py`. A state that is blank (as
        `integrations.dcp` saves it before the first step) is none: a class may begin with other values than zeros."""
        states: dict[str, dict[str, str]] = {}  # parameter -> key of the state -> name in the folder
        for there in [*self._folder.tensors, *self._folder.values]:
            name, _, key = there.removeprefix(prefix).rpartition(".")
            if there.startswith(prefix) and self.tied.get(name, name) in self._model and "/" not in key:
                states.setdefault(name, {})[key] = there
        elementwise = self._elementwise_keys(prefix)
        for name, state in states.items():
            self.keys |= state.keys()
            if self._is_blank(state):
                self._used.update(state.values())
                continue
            for key, there in state.items():
                self._take_one(self.tied.get(name, name), key, there, is_elementwise=key in elementwise)

    def _is_blank(self, state: dict[str, str]) -> bool:
        """Whether it counts no step, or all of it is zero: as `integrations.dcp` decides it."""
        asked = [state["step"]] if "step" in state else state.values()
        return not any(map(self._has_other_than_zeros, asked))

    def _has_other_than_zeros(self, there: str) -> bool:
        if (tensor := self._folder.tensors.get(there)) is None:
            return bool(self._folder.value(there))
        parts = (Interval(at, min(at + _BLOCK, tensor.numel)) for at in range(0, tensor.numel, _BLOCK))
        return any(bool(self._folder.read(there, part).any()) for part in parts)

    def _take_one(self, name: str, key: str, there: str, *, is_elementwise: bool) -> None:
        if (tensor := self._folder.tensors.get(there)) is not None:
            is_scalar = tensor.numel == 1 and not tensor.shape and not is_elementwise
            self._take(f"{'scalar' if is_scalar else 'optimizer'}/{key}/{name}", there)
        else:
            with suppress(ValueError):  # an object
                self.items.append(_plain_item(self._folder, there, key, name))
                self._used.add(there)

    def _elementwise_keys(self, prefix: str) -> set[str]:
        """Keys of the state that have the parameter's shape for some parameter of many elements. For parameters of one
        element they are elementwise, too."""
        found, tensors = set(), self._folder.tensors
        for there, tensor in tensors.items():
            name, _, key = there.removeprefix(prefix).rpartition(".")
            in_model = there.startswith(prefix) and name in self._model
            if in_model and tensor.numel > 1 and tensor.shape == tensors[self._model[name]].shape:
                found.add(key)
        return found

    def take_groups(self, prefix: str, of_class: str) -> list[dict[str, Any]]:
        """Param groups in the form of `contents.optimizer_values`. In the folder they are stored by number, or option
        by option for each parameter."""
        found: dict[str, dict[str, Any]] = {}
        for there in [*self._folder.values, *self._folder.tensors]:
            owner, _, key = there.removeprefix(prefix).rpartition(".")
            if there.startswith(prefix):
                with suppress(ValueError):  # an object: `save` would not store it, either
                    found.setdefault(owner, {})[key] = _option(self._folder, there)
        numbered = sorted((owner for owner, options in found.items() if "params" in options), key=lambda n: n.zfill(9))
        owners = {*numbered, *self._model, *self.tied}  # the rest are options that are dicts, which DCP takes apart
        found = {owner: options for owner, options in found.items() if owner in owners}
        self._used |= {f"{prefix}{owner}.{key}" for owner, options in found.items() for key in options}
        if numbered:
            groups = [{"class": of_class, "params": found[n].pop("params"), "options": found[n]} for n in numbered]
        else:
            alike: dict[str, dict[str, Any]] = {}
            for name, options in found.items():
                mark = json.dumps(options, sort_keys=True)
                alike.setdefault(mark, {"class": of_class, "params": [], "options": options})["params"].append(name)
            groups = list(alike.values())
        return saved_groups({"groups": groups})

    def expect_adamw(self, groups: list[dict[str, Any]]) -> None:
        """Raises:
        ValueError: the state, or the hyper-parameters, have names that are not AdamW's."""
        foreign = self.keys - {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for options in (group["options"] for group in groups):
            foreign |= {"momentum"} & options.keys()
            foreign |= {"decoupled_weight_decay"} if options.get("decoupled_weight_decay") is False else set()
        if foreign:
            raise InvalidValue(
                f"{self._folder.folder} has {', '.join(sorted(foreign))}, as another optimizer than AdamW has it: name "
                'its class, --optimizer-class SGD, or optimizer_class="SGD" in Python'
            )

    def left_out(self) -> tuple[str, ...]:
        return tuple(sorted({*self._folder.tensors, *self._folder.values} - self._used))

    def _take(self, name: str, there: str) -> None:
        tensor = self._folder.tensors[there]
        read = partial(self._folder.read, there)
        self.items.append(Item(name, tensor.shape, tensor.dtype, Interval(0, tensor.numel), read))
        self._used.add(there)


def _plain_item(folder: DcpFolder, there: str, key: str, name: str) -> Item:
    """An item for a value of the state that is no tensor.

    Raises:
        ValueError: it is an object.
    """
    value = folder.value(there)
    if isinstance(value, (bool, int, float)):
        return number(f"number/{key}/{name}", value)
    return blob(f"value/{key}/{name}", _as_json(folder, there))


def _option(folder: DcpFolder, there: str) -> Any:
    """A hyper-parameter, as JSON.

    Raises:
        ValueError: it is an object.
    """
    if there in folder.tensors:
        if folder.tensors[there].numel != 1:
            raise InvalidValue("a tensor")
        return encode(folder.read(there, Interval(0, 1)).item(), no_tensors, there)
    return _as_json(folder, there)


def _as_json(folder: DcpFolder, there: str) -> Any:
    """A plain value as JSON.

    Raises:
        ValueError: it is an object.
    """
    try:
        return encode(folder.value(there), no_tensors, there)
    except RecursionError:
        raise InvalidValue("too deep") from None
