"""Builds the model for `zeroshard plan` from a run's configuration, a transformers config or `module:factory`.

It is built on the meta device, so no weights are allocated, whatever the model's size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard.cli.undisturbed import hush
from zeroshard.errors import InvalidValue
from zeroshard.integrations.causal_lm import read_config, units_of
from zeroshard.io.logger import LOGGER
from zeroshard.io.named import in_one_line, named
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.planning.activations import Workload
from zeroshard.planning.optimizers import GroupOf

if TYPE_CHECKING:
    from zeroshard.train.config import Config


@dataclass(frozen=True)
class Described:
    """A model on the meta device, with the settings that its description contains.

    Attributes:
        units: how the trainer or transformers divides the model into units; None: by size.
        group_of: (name, parameter) -> param group of the trainer's optimizer.
        micro_batches: from the trainer's configuration.
        reduce_every_micro_batch: from the trainer's configuration.
        workload: (sequences, tokens of each; None: as many as the model takes) -> one micro-batch. None if the model's
            inputs are not known.
    """

    model: nn.Module
    units: UnitPolicy = None
    group_of: GroupOf = lambda name, parameter: 0
    micro_batches: int = 1
    reduce_every_micro_batch: bool = False
    workload: Callable[[int, int | None], Workload] | None = None


def describe(text: str, inputs: str | None = None) -> Described:
    """Build the model that `text` names, on the meta device.

    Args:
        text: a TOML file of the trainer or the folder of a run, a `config.json` of transformers or the folder that
            contains one, or `module:factory`, a function without arguments that builds the model.
        inputs: for `module:factory`: `module:function`, called with the number of sequences and the tokens of each,
            which returns the inputs of the model: a tensor, a tuple or a dict.

    Raises:
        ValueError: `text` is none of these, or the model cannot be built.
    """
    path = Path(text)
    if path.is_dir():
        path = _in_folder(path)
    if inputs is not None and path.suffix in (".toml", ".json"):
        raise InvalidValue(f"--inputs is for a model of module:factory; the inputs of {path} are known: leave it out")
    if path.suffix == ".toml":
        return _described_by_the_trainer(path)
    if path.suffix == ".json":
        return _of_transformers(path)
    if ":" in text:
        return Described(_on_meta(text, _imported(text)), workload=None if inputs is None else _workload_of(inputs))
    raise InvalidValue(
        f"{text}: expected the configuration of a run (.toml, or the run's folder), a transformers config "
        "(config.json, or its folder) or module:factory"
    )


def _in_folder(folder: Path) -> Path:
    for file in (folder / "config.json", folder / "config.toml"):
        if file.exists():
            return file
    raise InvalidValue(f"{folder}: expected config.toml, of a run, or config.json, of transformers, found neither")


def configuration_file(path: Path) -> Config:
    """A configuration file of the trainer.

    Raises:
        ValueError: the file is not such a configuration, or the extra `train` is not installed.
    """
    with _needing("the trainer's model", "zeroshard[train]"):
        from zeroshard.train.config import UserError, resolve
    try:
        return resolve([path], {})
    except UserError as error:
        raise InvalidValue(str(error)) from error


def _described_by_the_trainer(path: Path) -> Described:
    config = configuration_file(path)
    from zeroshard.train.planned import by_dimensions, language_of, workload_of

    language = language_of(config)
    accumulation = config.batch.micro_batches, config.batch.reduce_every_micro_batch
    workload = partial(workload_of, config, language)
    return Described(language.model, language.units, by_dimensions, *accumulation, workload)


def _of_transformers(path: Path) -> Described:
    if not path.exists():
        raise InvalidValue(f"there is no file {path}")
    with _needing("a transformers config", "transformers"):
        import transformers
    library: Any = transformers  # its classes are not typed
    hush()
    config = read_config(path)

    def build() -> Any:
        try:
            return library.AutoModelForCausalLM.from_config(config)
        except ValueError:  # no language model
            return library.AutoModel.from_config(config)

    model = _on_meta(str(path), build)

    def workload(sequences: int, tokens: int | None) -> Workload:
        most = getattr(config, "max_position_embeddings", None)
        if tokens and most and tokens > most:
            LOGGER.warning("--tokens %d: the config is for at most %d (max_position_embeddings)", tokens, most)
        shape = sequences, tokens or most or 1024
        taken = inspect.signature(model.forward).parameters
        if "input_ids" not in taken:
            raise InvalidValue(
                f"--batch: a {type(model).__name__} takes no tokens: name a module:factory that builds it, and its "
                "inputs by --inputs"
            )
        names = ["input_ids", *(name for name in ("labels", "decoder_input_ids") if name in taken)]

        def inputs() -> dict[str, torch.Tensor]:
            return dict.fromkeys(names[:2], torch.zeros(shape, dtype=torch.long))

        return Workload(inputs, _loss_of, num_tokens=math.prod(shape))

    return Described(model, units_of(model), workload=workload)


def _workload_of(text: str) -> Callable[[int, int | None], Workload]:
    inputs = _imported(text)
    _expect_call(f"--inputs {text}", inputs, 1, None)

    def workload(sequences: int, tokens: int | None) -> Workload:
        return Workload(partial(inputs, sequences, tokens), _loss_of, num_tokens=sequences * (tokens or 0))

    return workload


def _loss_of(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Call the model and return a scalar loss: its output's `loss`, or the mean of its first differentiable tensor."""
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    others = () if named else inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    _expect_call(f"{type(model).__name__}.forward", model.forward, *others, **named)
    output = model(*others, **named)
    loss = getattr(output, "loss", None)
    if loss is None:
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        loss = next(leaves, None)
    if loss is None:
        raise InvalidValue(f"the output of {type(model).__name__} has no loss and no tensor that requires grad")
    return loss if loss.numel() == 1 else loss.float().mean()


def _imported(text: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = text.partition(":")
    if module.endswith(".py"):
        dotted = ".".join(Path(module).with_suffix("").parts)
        raise InvalidValue(
            f"{text}: expected module:function, found a file in front of the colon: write {dotted}:{name}"
        )
    with in_one_line(f"{text}: cannot be imported"):
        found = named(module, name)
    if not callable(found):
        raise InvalidValue(f"{text}: expected a function, found a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _on_meta(where: str, build: Callable[[], Any]) -> nn.Module:
    _expect_call(where, build)
    with in_one_line(f"{where}: the model cannot be built on the meta device"), torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"{where}: expected a torch.nn.Module, found a {type(model).__name__}")
    return model


def _expect_call(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Raises:
    ValueError: the function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in function: not known
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        names, given = ", ".join(signature.parameters), len(arguments) + len(named)
        raise InvalidValue(f"{name}({names}) is called with {given} arguments: {error}") from error


@contextmanager
def _needing(what: str, package: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidValue(f"{what} needs the package {error.name}: pip install '{package}'") from error
