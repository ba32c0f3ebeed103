"""Optimizer classes that are built over param groups only, whose options say how each group is stepped.

`SingleDeviceMuonWithAuxAdam` of the package muon is one: its groups need `use_muon`, and those with True are stepped by
another rule than those with False. So each kind of group gets a class of its own, which can be built over a list of
parameters, and is tried, stepped and saved as any other class: matrices whole, the rest in pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.step.assignment import OptimizerClass, Options, options_in

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""What schedulers put into param groups: some classes refuse a group with options that they do not know."""


def over_group(
    optimizer_class: OptimizerClass, arguments: Options, of_group: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An instance over a small matrix in a param group with these options, as a trial. Raises what the class raises."""
    group = {key: value for key, value in options_in(of_group).items() if key not in _OF_SCHEDULERS}
    params = [torch.zeros(2, 2, device="cpu")]
    return optimizer_class([{**copy.deepcopy(group), "params": params}], **copy.deepcopy(arguments))


def filled_up(optimizer_class: OptimizerClass, arguments: Options, of_group: Mapping[str, Any]) -> Options:
    """The options of a param group, filled up by the class. Raises what the class raises."""
    return options_in(over_group(optimizer_class, arguments, of_group).param_groups[0])


def class_of_kind(optimizer_class: OptimizerClass, arguments: Options, options: Options) -> OptimizerClass:
    """The class, built with these arguments, for param groups with these options (as `filled_up` returns them)."""

    class OfKind(optimizer_class):  # type: ignore[misc, valid-type]
        def __init__(self, params: Sequence[Any]) -> None:
            groups = [*params]
            if not isinstance(groups[0], dict):
                groups = [{"params": groups}]
            known = {"params", *options}
            super().__init__(
                [{**options, **{key: group[key] for key in group if key in known}} for group in groups], **arguments
            )
            for mine, group in zip(self.param_groups, groups, strict=True):
                mine.update({key: value for key, value in group.items() if key not in known})
            for key, value in options.items():
                self.defaults.setdefault(key, value)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(OfKind, name, getattr(optimizer_class, name))
    return OfKind
