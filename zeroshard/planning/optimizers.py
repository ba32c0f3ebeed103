"""Finds the optimizer class and the optimizer state of each parameter, for classes given as such or by name."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zeroshard import optim
from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.io.named import in_one_line, named
from zeroshard.layout.layout import Slot
from zeroshard.model.unit_spec import plain_name
from zeroshard.planned.parts import Bytes, OptimizerNeeds, PlannedUnit
from zeroshard.planning.state import Entry, OptimizerKind
from zeroshard.step.assignment import OptimizerClass, Options
from zeroshard.step.granularity import Granularity, granularity_of

Optimizer = OptimizerClass | str | tuple[OptimizerClass | str, Mapping[str, Any]]
"""An optimizer class; its name, "AdamW" or "SGD:momentum=0.9"; or (class or name, options)."""
Optimizers = Optimizer | Sequence[Optimizer]
"""With several, each parameter belongs to the first one that accepts it: "Muon+AdamW". In "SGD[embed.*]+Muon+AdamW",
SGD accepts parameters with such names."""
GroupOf = Callable[[str, nn.Parameter], Hashable]


@dataclass(frozen=True, eq=False)
class Needs(OptimizerNeeds):
    """The needs of these optimizers, for the planner.

    Attributes:
        kinds: the classes.
        kind_of: parameter name -> index of its class.
        steps_whole: for each class, whether it steps whole parameters.
        key: the one key of the state that is counted; None: all keys.
    """

    kinds: tuple[OptimizerKind, ...] = ()
    kind_of: Mapping[str, int] = field(default_factory=dict)
    steps_whole: tuple[bool, ...] = ()
    key: str | None = None

    def only(self, key: str) -> Needs:
        """The same, counting only that key of the state."""
        return replace(self, key=key)

    def before_a_step(self) -> Needs:
        """The same, when the optimizer has been built and not yet stepped."""
        return replace(self, kinds=tuple(replace(kind, steps=False) for kind in self.kinds))

    def is_whole(self, name: str) -> bool:
        """Whether the parameter is stepped as a whole, at an owner."""
        return self.steps_whole[self.kind_of[name]]

    def entries(self, name: str, num_dims: int, main: torch.dtype) -> tuple[Entry, ...]:
        """The state of a parameter of `num_dims` dimensions, or (1) of the piece that contains it."""
        found = self.kinds[self.kind_of[name]].entries(num_dims, main)
        return tuple(entry for entry in found if self.key in (None, entry.key))

    def keys(self, units: Iterable[PlannedUnit]) -> list[str]:
        """The keys of the state of all parameters of these units."""
        slots = [(unit, slot) for unit in units if unit.spec.trainable for slot in unit.layout.slots]
        asked = {
            (self.kind_of[slot.name], len(slot.shape) if self.is_whole(slot.name) else 1, unit.main_dtype)
            for unit, slot in slots
        }
        found = [self.kinds[number].entries(num_dims, main) for number, num_dims, main in sorted(asked, key=str)]
        return list(dict.fromkeys(entry.key for entries in found for entry in entries))

    # As the planner asks ------------------------------------------------------------------------------------------

    def stepper_of(self, name: str) -> Hashable:
        return self.kind_of[name]

    def key_of(self, name: str) -> Hashable | None:
        return None if self.is_whole(name) else self.group_of(name)

    def piece_state(self, stepper: Hashable, numel: int, main: torch.dtype) -> Bytes:
        assert isinstance(stepper, int)
        of_piece = self.kinds[stepper].piece(numel, main)
        return Bytes.total([Bytes(), *(num_bytes for key, num_bytes in of_piece.items() if self.key in (None, key))])

    def whole_state(self, slot: Slot, main: torch.dtype) -> Bytes | None:
        if not self.is_whole(slot.name):
            return None
        entries = self.entries(slot.name, len(slot.shape), main)
        return Bytes.total([Bytes(), *(entry.bytes_of(slot.shape) for entry in entries)])


def needs_of(
    optimizers: Optimizers, parameters: Mapping[str, nn.Parameter], group_of: GroupOf, *, sharded: bool
) -> Needs:
    """Assign each of these parameters that trains to its class. `sharded`: whether no rank steps all of them.

    Raises:
        ValueError: a class that cannot be sharded; an unknown name; options that a class does not accept; a parameter
            that no class accepts; a class that is named twice, or whose pattern matches nothing.
    """
    kinds = tuple(map(_kind, _listed(optimizers)))
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    found = [
        granularity_of(kind.optimizer_class, kind.options, None, sharded=sharded, parameters=[*trainable.values()])
        for kind in kinds
    ]
    whole = tuple(granularity is Granularity.PARAMETER for granularity in found)
    if not kinds or len({kind.optimizer_class for kind in kinds}) < len(kinds):
        names = ", ".join(kind.name for kind in kinds)
        raise InvalidValue(f"expected one optimizer class, or several different ones, found {names or 'none'}")
    kind_of, groups = {}, {}
    for name, parameter in trainable.items():
        number = next((number for number, kind in enumerate(kinds) if kind.takes(name, parameter)), None)
        if number is None:
            known = [kind.name for kind in kinds]
            rest = next(one for one in ("AdamW", "SGD", "Adafactor", "the rest") if one not in known)
            raise InvalidValue(
                f"{known[-1]} does not take {name} of shape {tuple(parameter.shape)}: name an optimizer for the rest "
                f"as well, '{'+'.join([*known, rest])}' for example"
            )
        kind_of[plain_name(name)], groups[plain_name(name)] = number, (number, group_of(name, parameter))
    for kind in kinds:
        if parameters and not any(fnmatchcase(name, kind.pattern) for name in parameters):
            raise InvalidValue(
                f"{kind.name}[{kind.pattern}] matches no name of a parameter: they are as {next(iter(parameters))}"
            )
    return Needs(group_of=groups.__getitem__, kinds=kinds, kind_of=kind_of, steps_whole=whole)


def num_groups(needs: Needs) -> int:
    """The number of param groups."""
    return len({needs.group_of(name) for name in needs.kind_of})


def _listed(optimizers: Optimizers) -> Iterator[Optimizer]:
    if isinstance(optimizers, str):
        yield from re.split(r"\+(?!\d)", optimizers)  # not in 1e+3
    elif isinstance(optimizers, type) or (
        isinstance(optimizers, tuple) and optimizers and isinstance(optimizers[-1], Mapping)
    ):
        yield optimizers
    elif isinstance(optimizers, torch.optim.Optimizer):
        raise InvalidType(
            f"expected an optimizer class or its name, found a {type(optimizers).__name__} with parameters"
        )
    elif not isinstance(optimizers, Iterable):
        raise InvalidType(f"expected an optimizer class or its name, found {optimizers!r:.80}")
    else:
        yield from optimizers  # type: ignore[misc]


def _kind(optimizer: Optimizer) -> OptimizerKind:
    """
    Raises:
        ValueError: there is no such class, or it does not accept these options.
    """
    given, options = optimizer if isinstance(optimizer, tuple) else (optimizer, {})
    pattern = "*"
    if isinstance(given, str):
        match = re.fullmatch(r"\s*([\w.]*)(?:\[(.*)\])?(?::(.*))?", given)
        if match is None:
            raise InvalidValue(
                f"unknown optimizer {given!r}: expected a name, as in AdamW, SGD:momentum=0.9, SGD[embed.*]"
            )
        name, pattern, words = match[1], match[2] or "*", match[3] or ""
        found, options = class_named(name), _options(words) | dict(options)
    else:
        found = given
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise InvalidValue(f"expected a class of optimizers, or the name of one, found {given!r}")
    try:
        found([torch.empty(2, 2, device="meta")], **options)
    except TypeError as error:
        raise InvalidValue(f"{found.__name__} does not take these options: {error}") from error
    return OptimizerKind(found, dict(options), pattern)


def class_named(name: str) -> OptimizerClass:
    """The class of that name: of torch.optim, zeroshard.optim or torchao.optim, or with its module in front.

    Raises:
        ValueError: there is none; the message suggests the nearest one.
    """
    module_name, _, last = name.rpartition(".")
    if module_name:
        with in_one_line(f"optimizer {name!r} cannot be imported"):
            found: OptimizerClass = named(module_name, last)
        return found
    known = _classes_of(optim, torch.optim)
    if name.lower() not in known and importlib.util.find_spec("torchao") is not None:
        known |= _classes_of(importlib.import_module("torchao.optim"))  # slow to import
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {known[near[0]].__name__}?" if near else ""
    raise InvalidValue(
        f"unknown optimizer {name!r}: expected a class of torch.optim, zeroshard.optim or torchao.optim (pip install "
        f"'zeroshard[low-bit]'), or one with its module, as in mine.Optimizer{hint}"
    )


def _classes_of(*modules: ModuleType) -> dict[str, OptimizerClass]:
    return {
        key.lower(): value
        for module in modules
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def _options(words: str) -> Options:
    """ "momentum=0.9,betas=(0.9, 0.99)" as a dict: the arguments of a call, all by name, and plain values."""
    try:
        call = ast.parse(f"f({words})", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            given = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
            if "**" not in given:
                return given
    except (ValueError, TypeError, SyntaxError, RecursionError):
        pass
    raise InvalidValue(f"optimizer option {words!r}: expected name=value, as in SGD:momentum=0.9")
