"""Save and resume, the simple way: one safetensors file, written by rank 0, with no pickle in it.

    state.safetensors
        model.<parameter>              the plain model's state_dict()
        optimizer.<parameter>.<state>  the optimizer's state of that parameter, whole
        header                         step, updates, digest of the data, loss scaler, states that are plain numbers

The file knows neither plan nor world size. Hyper-parameters, the next batch and the random numbers are not in it: they
follow from the configuration and the step. The learning rate follows from the updates: steps that were not skipped.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .config import UserError

FILE_NAME = "state.safetensors"


@dataclass(frozen=True)
class Saved:
    """What `load` found.

    Attributes:
        step: steps done, with the skipped ones: the position in the data.
        updates: steps that were applied: the position of the learning rate.
        optimizer: parameter name -> state name -> value.
        loss_scale: the loss scaler's state (plain numbers); empty where there is none.
    """

    step: int
    updates: int
    data_digest: str
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    loss_scale: dict[str, Any]


def save(folder: Path, saved: Saved) -> None:
    """Replace the folder's state file in one move; a crash leaves the old one or the new one, whole."""
    tensors = {f"model.{name}": value for name, value in saved.model.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, states in saved.optimizer.items():
        for name, value in states.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter}.{name}"] = value
            else:
                numbers.setdefault(parameter, {})[name] = value
    header = {
        "step": saved.step,
        "updates": saved.updates,
        "data_digest": saved.data_digest,
        "loss_scale": saved.loss_scale,
        "numbers": numbers,
    }
    partial = folder / f".{FILE_NAME}.tmp-{os.getpid()}"
    try:
        cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(cpu, partial, metadata={"zeroshard": json.dumps(header)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, folder / FILE_NAME)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot save into {folder}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def load(folder: Path) -> Saved:
    """Read what `save` wrote. Raises `UserError` if there is nothing, or something else."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(f"nothing to resume in {folder}: expected {path}")
    model: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["zeroshard"])
            optimizer: dict[str, dict[str, Any]] = header["numbers"]
            for key in file.keys():  # noqa: SIM118  not a dict
                kind, _, name = key.partition(".")
                if kind == "model":
                    model[name] = file.get_tensor(key)
                else:
                    parameter, _, state = name.rpartition(".")
                    optimizer.setdefault(parameter, {})[state] = file.get_tensor(key)
        return Saved(
            int(header["step"]),
            int(header["updates"]),
            str(header["data_digest"]),
            model,
            optimizer,
            dict(header["loss_scale"]),
        )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not a state that zeroshard saved: {error}") from None


def by_name(
    state_dict: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """torch's optimizer state, numbered by parameter, under the parameters' names instead."""
    names = _numbered_names(model, optimizer)
    return {names[number]: states for number, states in state_dict["state"].items()}


def by_number(
    states: dict[str, dict[str, Any]], state_dict: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The inverse of `by_name`: torch's layout, with the param groups (hyper-parameters) of `state_dict`."""
    names = _numbered_names(model, optimizer)
    if unknown := set(states) - set(names):
        raise UserError(f"the saved optimizer has state for parameters that the model lacks: {sorted(unknown)}")
    numbered = {number: states[name] for number, name in enumerate(names) if name in states}
    return {"state": numbered, "param_groups": state_dict["param_groups"]}


def _numbered_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
