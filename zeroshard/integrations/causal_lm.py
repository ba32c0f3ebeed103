"""Builds a language model of transformers from its `config.json`, with random weights; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import InvalidValue
from zeroshard.integrations.sharding import needing


def read_config(path: Path) -> Any:
    """The configuration of a model.

    Args:
        path: a `config.json`, or the folder that contains it.

    Raises:
        ValueError: there is no such file, or transformers does not read it.
        ModuleNotFoundError: transformers is not installed.
    """
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise InvalidValue(f"there is no file {path}")
    with needing("transformers", "transformers"):
        import transformers
    library: Any = transformers  # its classes are not typed
    try:
        return library.AutoConfig.from_pretrained(path, local_files_only=True)
    except ImportError as error:
        raise InvalidValue(f"transformers cannot import what {path} needs: {_reason(error)}") from error
    except Exception as error:  # each kind of wrong value has a class of its own
        raise InvalidValue(f"{path} is not a config that transformers reads: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Its class, and its first line (and the second, where the first one announces it)."""
    first, *others = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: " + (f"{first} {others[0].strip()}" if first.endswith(":") else first)


def build(config: Any) -> nn.Module:
    """The causal language model of a configuration, in fp32, whatever dtype the configuration names.

    Raises:
        ValueError: it is the configuration of another kind of model.
    """
    import transformers

    library: Any = transformers
    try:
        model: nn.Module = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise InvalidValue(f"{config.model_type} is no causal language model: transformers has none for it") from error
    return model


def units_of(model: nn.Module) -> tuple[type[nn.Module], ...] | None:
    """The classes of the model's blocks, as transformers names them; None: it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    return tuple(sorted(classes, key=lambda one: one.__name__)) or None
