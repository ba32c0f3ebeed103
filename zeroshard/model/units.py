"""Divides a model into units: parameters that are gathered, reduced and released together.

It uses only names, shapes and dtypes, so it also runs on the meta device, for the planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import InvalidValue
from zeroshard.model.absent import as_tensors
from zeroshard.model.batch_norms import expect_kept
from zeroshard.model.casting import Pattern, Precisions, Region, Rules, matches
from zeroshard.model.paths import Modules, modules_of, parent
from zeroshard.model.readers import readers, takes_hooks
from zeroshard.model.unit_policy import DEFAULT_UNIT_BYTES, UnitPolicy, modules_by_unit
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.precision import FLOATS, MixedPrecision, precision_for

KeepGathered = bool | Pattern | Sequence[Pattern]
PART_BYTES = DEFAULT_UNIT_BYTES
"""An embedding or a head that the policy leaves to the root unit is a unit of its own, a root part, if its own
parameters are larger."""


def choose_units(
    model: nn.Module,
    policy: UnitPolicy,
    precision: Precisions,
    parameters: Mapping[str, nn.Parameter] | None = None,
    keep_gathered: KeepGathered = (),
) -> list[UnitSpec]:
    """Divide the parameters of the model into units, in registration order; the remaining ones form the root unit.

    Args:
        policy: a module class, or its name, or several (each instance is a unit), and among them groups of modules or
            names (each group is one unit); a callable `module -> bool`; a number of bytes (neighbouring modules are
            grouped up to that size; a module that fits is not divided); or None (a default number of bytes).
        parameters: those that are divided, by their first names; None: all.
        keep_gathered: patterns of units (classes, or names with `*` and `?`) that keep their weights from forward to
            backward; True: all units.

    A parameter belongs to the unit of the module that reads it (`readers.py`). The parameters of a container without a
    forward belong to the unit of the module around it. No unit begins inside a module that reads the parameters of its
    submodules without calling them: if the policy names a submodule of such a module, the whole module is the unit.
    A parameter that several units use belongs to the root unit. A large embedding or head that the policy leaves to
    the root unit is a unit of its own, a root part: its weights are gathered apart, and stay as long as those of the
    root unit. A unit whose parameters differ in dtype, precision or being frozen becomes several, of the same modules.

    Raises:
        ValueError: the policy matches no module (the message lists the classes); a flat buffer cannot hold a
            parameter; or a batch norm cannot compute in its precision.
        TypeError: a policy of another type.
    """
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    for name, parameter in parameters.items():
        refuse_unsupported(name, parameter)
    if not parameters:
        return []
    modules = modules_of(model)
    expect_kept(modules, precision, parameters.values())
    division, regions = Division.by(policy, modules), Rules.of(precision).parameters(modules)
    place = {name: number for number, name in enumerate(parameters)}
    members: dict[tuple[str, torch.dtype, bool, Region], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        key = division.owner[id(parameter)], parameter.dtype, parameter.requires_grad, regions[id(parameter)]
        members.setdefault(key, {})[name] = parameter
    parts, specs, names = Counter(unit for unit, *_ in members), list[UnitSpec](), Counter[str]()
    for (unit, dtype, trainable, region), mine in sorted(members.items(), key=lambda item: division.order[item[0][0]]):
        needing = division.modules(unit, mine.values())
        spec = UnitSpec(
            name=_apart(_one_of_several(unit, dtype, trainable, region) if parts[unit] > 1 else unit or "root", names),
            names=tuple(mine),
            shapes=tuple(tuple(parameter.shape) for parameter in mine.values()),
            dtype=dtype,
            precision=precision_for(dtype, region.precision) if trainable or dtype in FLOATS else MixedPrecision(),
            trainable=trainable,
            modules=needing,
            outer=division.runs_around_others(unit, needing) or division.is_apart(unit),
            calls=division.calls(unit),
            gathered_by=division.gathered_by(unit, mine.values()),
            places=(min(map(place.__getitem__, mine)), max(map(place.__getitem__, mine))),
        )
        specs.append(spec)
    return kept_gathered(modules, specs, keep_gathered)


def _one_of_several(unit: str, dtype: torch.dtype, trainable: bool, region: Region) -> str:
    """The name of one of the units that the same modules form."""
    marks = [str(dtype).removeprefix("torch."), *["frozen"] * (not trainable), region.label]
    return f"{unit or 'root'} ({', '.join(filter(None, marks))})"


def _apart(name: str, names: Counter[str]) -> str:
    """The name, with a number if another unit has it: a module may be called "root", and two classes alike."""
    names[name] += 1
    return name if names[name] == 1 else f"{name} ({names[name]})"


class Division:
    """The modules and parameters of each unit of a model.

    Attributes:
        owner: id of a parameter -> its unit ("" is the root unit, which also has parameters that several units use), or
            its root part.
    """

    def __init__(
        self, modules: Modules, groups: dict[str, str], whole: dict[str, list[str]], read_by: dict[str, str]
    ) -> None:
        """`groups`, `whole`: see `modules_by_unit`."""
        self._groups, self._whole = groups, whole
        self.owner: dict[int, str] = {}
        self._users: dict[int, list[str]] = {}  # id of parameter -> modules that use it directly
        self._parameters: dict[int, nn.Parameter] = {}  # by id, in the order of `model.parameters()`
        for path, module in modules.items():
            unit, users = groups[path], [path] if takes_hooks(module) else []
            if read_by[path] != path:
                users.append(read_by[path])
            for parameter in module._parameters.values():
                if parameter is not None:
                    number = id(parameter)
                    if number not in self._parameters:
                        self._parameters[number], self.owner[number], self._users[number] = parameter, unit, [*users]
                    else:  # shared
                        self.owner[number] = unit if self.owner[number] == unit else ""
                        self._users[number] += users
        self._parts: set[str] = set()  # the root parts
        self._inside: dict[str, set[str]] = {path: set() for path in groups}  # units of all modules inside each
        for path, unit in groups.items():
            while path:
                path = parent(path)
                self._inside[path].add(unit)

    @classmethod
    def by(cls, policy: UnitPolicy, modules: Modules) -> Self:
        """Divide the model as `choose_units` says."""
        read_by = readers(modules)
        division = cls(modules, *modules_by_unit(modules, policy, read_by), read_by)
        if policy is not None and not isinstance(policy, int):  # by size, a module that fits is not divided
            division.divide_root(_size_of_vocabulary(modules), read_by)
        return division

    def divide_root(self, vocabulary: int | None, read_by: dict[str, str]) -> None:
        """Make root parts of the large modules in the root unit, of those parameters that no other module uses."""
        # [Note: which modules may be root parts]
        # Ranks gather a root part at one place, and one of them may not use it at all. Used before that place, it would
        # be gathered in another order. Modules in front of all other units are gathered when the model is called.
        # Behind others a module may be used earlier than it is registered (a projector for images), but not a head: it
        # has as many rows as the vocabulary.
        found: dict[str, list[nn.Parameter]] = {}
        rest, is_in_front = 0, True
        for number, parameter in self._parameters.items():
            if self.owner[number] != "":
                is_in_front = False
                continue
            using = {read_by[path] for path in self._users[number]}
            if len(using) == 1 and using != {""} and (is_in_front or parameter.shape[:1] == (vocabulary,)):
                found.setdefault(using.pop(), []).append(parameter)
            else:
                rest += 1
        if len(found) == 1 and not rest:
            return  # that module is the whole root unit
        for path, own in found.items():
            if sum(p.numel() * p.element_size() for p in own) > PART_BYTES:
                self._parts.add(path)
                self.owner.update(dict.fromkeys(map(id, own), path))

    @cached_property
    def order(self) -> dict[str, int]:
        """Unit -> its number."""
        units = [path if path in self._parts else unit for path, unit in self._groups.items()]
        return {unit: number for number, unit in enumerate(dict.fromkeys([*units, ""]))}

    def modules(self, unit: str, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """The modules whose forward needs these parameters of the unit."""
        of_root = not unit or unit in self._parts
        return tuple(dict.fromkeys([*self._whole.get(unit, ()), *[""] * of_root, *self._using(parameters)]))

    def gathered_by(self, unit: str, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """See `UnitSpec.gathered_by`."""
        return tuple(dict.fromkeys(self._using(parameters))) if unit in self._parts else ()

    def _using(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        return [path for parameter in parameters for path in self._users[id(parameter)]]

    def calls(self, unit: str) -> tuple[str, ...]:
        """The modules that form the unit."""
        of_root = not unit or unit in self._parts
        return tuple(self._whole.get(unit, ())) or ("",) * of_root

    def is_apart(self, unit: str) -> bool:
        """Whether modules of other units lie between those of the unit (a group of modules that are not neighbours).
        They run while its values are needed. Not the root unit: the model's call needs it, around all others."""
        if not unit or len(self._whole.get(unit, ())) < 2:
            return False
        places = self._places[unit]
        return places[-1] - places[0] >= len(places)

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """Unit -> numbers of its modules, among the modules of all units but the root unit."""
        places: dict[str, list[int]] = {}
        for number, unit in enumerate(filter(None, self._groups.values())):
            places.setdefault(unit, []).append(number)
        return places

    def runs_around_others(self, unit: str, modules: Iterable[str]) -> bool:
        """Whether a module that needs the unit has descendants in another one."""
        return any(self._inside[path] - {unit} for path in modules)


def _size_of_vocabulary(modules: Modules) -> int | None:
    return max((one.num_embeddings for one in modules.values() if isinstance(one, nn.Embedding)), default=None)


def kept_gathered(modules: Modules, specs: Sequence[UnitSpec], keep: KeepGathered) -> list[UnitSpec]:
    """The same units, with `stays` set for those that keep their weights from forward to backward.

    Raises:
        ValueError: a pattern that is none, or matches no unit.
    """
    if isinstance(keep, bool):
        return [replace(spec, stays=keep) for spec in specs]
    result = list(specs)
    patterns = [keep] if isinstance(keep, (str, type)) else list(keep) if isinstance(keep, Iterable) else [keep]
    for pattern in patterns:
        if not isinstance(pattern, (str, type)):
            raise InvalidValue(
                "keep_gathered takes classes and names of units, or True for all of them (weights over a smaller mesh, "
                f"as FSDP has them, are a mesh of replicas); found an object of type {type(pattern).__name__}"
            )
        matching = [
            any(matches(pattern, path, modules[path]) for path in (*spec.calls, *spec.gathered_by)) for spec in result
        ]
        if not any(matching):
            raise InvalidValue(f"keep_gathered: {pattern!r} matches no unit; units are {[spec.name for spec in specs]}")
        result = [replace(spec, stays=spec.stays or hit) for spec, hit in zip(result, matching, strict=True)]
    return result


def refuse_unsupported(name: str, parameter: Tensor) -> None:
    """Raises:
    ValueError: the values of the parameter cannot lie in a flat buffer."""
    if is_lazy(parameter):
        raise InvalidValue(f"parameter {name} has no shape yet: call the model once, with an input, before shard()")
    if hasattr(parameter, "device_mesh"):
        raise InvalidValue(
            f"parameter {name} is a DTensor, distributed already (by FSDP2's fully_shard, or for tensor parallelism): "
            "shard the plain model, or name the parameter in ignored= to leave it as it is"
        )
    with as_tensors():
        inner: Any = parameter.detach()  # a Parameter hides the tensor subclass that it was made of
    if is_traceable_wrapper_subclass(inner):
        raise InvalidValue(
            f"parameter {name} is a {type(inner).__name__}, made of several tensors (quantised, perhaps): "
            "only plain dense ones can be sharded; name it in ignored= to leave it as it is"
        )
    if parameter.is_complex():
        raise InvalidValue(
            f"parameter {name} is {parameter.dtype}: complex parameters are not supported; register "
            "torch.view_as_real(parameter) as the parameter and view it as complex in forward"
        )
    if parameter.is_sparse or parameter.layout is not torch.strided:
        raise InvalidValue(f"parameter {name} has layout {parameter.layout}: only dense parameters can be sharded")
