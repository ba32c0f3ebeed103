"""A model for a plan, by what a command line can say: a run's configuration, `module:factory`, a transformers config.

It is built on the meta device: no weights, whatever its size.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.model.units import UnitPolicy
from zeroshard.planning.optimizers import GroupOf


@dataclass(frozen=True)
class Described:
    """A model, and what else its description says.

    Attributes:
        units: as the trainer, or transformers, divides it; None: by size.
        group_of: parameter -> param group of the trainer's optimizer.
        micro_batches: of the trainer's configuration.
    """

    model: nn.Module
    units: UnitPolicy = None
    group_of: GroupOf = lambda name, parameter: 0
    micro_batches: int = 1
    reduce_every_micro_batch: bool = False


def describe(text: str) -> Described:
    """
    Args:
        text: a TOML file of the trainer, a `config.json` of transformers or the folder that has one, or
            `module:factory`, a function without arguments that builds the model.

    Raises:
        ValueError: none of these, or it cannot be built.
    """
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".toml":
        return _of_the_trainer(path)
    if path.suffix == ".json":
        return _of_transformers(path)
    if ":" in text:
        return Described(_built_by(text))
    raise ValueError(
        f"{text}: expected the configuration of a run (.toml), a transformers config (config.json, or its folder) or "
        "module:factory"
    )


def _of_the_trainer(path: Path) -> Described:
    with _needing("the trainer's model", "zeroshard[train]"):
        from zeroshard.train.config import UserError, resolve
        from zeroshard.train.data import VOCABULARY
        from zeroshard.train.model import GPT, Block
    try:
        config = resolve([path], {})
    except UserError as error:
        raise ValueError(str(error)) from error
    model = _on_meta(str(path), lambda: GPT(config.model, VOCABULARY))
    batch = config.batch
    return Described(model, Block, _by_dimensions, batch.micro_batches, batch.reduce_every_micro_batch)


def _by_dimensions(name: str, parameter: nn.Parameter) -> bool:
    """As the trainer groups them: only matrices decay."""
    return parameter.dim() >= 2


def _of_transformers(path: Path) -> Described:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with _needing("a transformers config", "transformers"):
        import transformers
    library: Any = transformers  # its classes are not typed
    try:
        config = library.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a config that transformers reads: {_first_line(error)}") from error

    def build() -> Any:
        try:
            return library.AutoModelForCausalLM.from_config(config)
        except ValueError:  # no language model
            return library.AutoModel.from_config(config)

    model = _on_meta(str(path), build)
    names = set(getattr(model, "_no_split_modules", None) or ())
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    return Described(model, tuple(classes) or None)


def _built_by(text: str) -> nn.Module:
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(f"{text}: cannot be imported: {_first_line(error)}") from error
    if not callable(found):
        raise ValueError(f"{text}: expected a function that builds the model, found a {type(found).__name__}")
    return _on_meta(text, found)


def _on_meta(where: str, build: Callable[[], Any]) -> nn.Module:
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise ValueError(f"{where}: the model cannot be built on the meta device: {_first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where}: expected a torch.nn.Module, found a {type(model).__name__}")
    return model


@contextmanager
def _needing(what: str, package: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs the package {error.name}: pip install '{package}'") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
