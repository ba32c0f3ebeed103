"""Divides a model into units: parameters that are gathered, reduced and released together.

It uses only names, shapes and dtypes, so it also runs on the meta device, for the planner. (A unit's memory:
`storage/unit.py`.)
"""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.comm.transport import Transport
from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.layout.layout import BufferLayout
from zeroshard.layout.pool_plan import Request
from zeroshard.model.absent import as_tensors
from zeroshard.model.batch_norms import expect_kept
from zeroshard.model.casting import Pattern, Precisions, Region, Rules, matches
from zeroshard.model.paths import Modules, first_paths, modules_of, parent
from zeroshard.model.readers import has_forward, is_whole, readers, takes_hooks
from zeroshard.precision import FLOATS, MixedPrecision, precision_for

Group = Sequence[nn.Module | str]
UnitPolicy = type[nn.Module] | str | Sequence[type[nn.Module] | str | Group] | Callable[[nn.Module], bool] | int | None
KeepGathered = bool | Pattern | Sequence[Pattern]
DEFAULT_UNIT_BYTES = 32 << 20
PART_BYTES = DEFAULT_UNIT_BYTES
"""An embedding or a head that the policy leaves to the root unit is a unit of its own, a root part, if its own
parameters are larger."""


@dataclass(frozen=True)
class UnitSpec:
    """One unit, before anything is allocated. All its parameters have one dtype and are all trainable or all frozen.

    Attributes:
        names: parameter names in registration order, as the model has them now (slots have plain names).
        modules: dotted paths of the modules whose forward needs the weights.
        calls: those of `modules` that form the unit; their inputs are cast.
        stays: whether the weights are kept from forward to backward; then the unit has a pool buffer of its own.
        outer: whether other units run while this one is in use (the root unit, a unit around units, a group of modules
            around modules of other units); then it has a pool buffer of its own, while the others take turns.
        gathered_by: of a root part: the calls of `modules` that gather the weights. The call of the model only keeps
            them, from then on until it ends.
        places: numbers of its first and last parameter, in registration order. Backward comes to the last one first.
    """

    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    precision: MixedPrecision
    trainable: bool
    modules: tuple[str, ...]
    outer: bool
    calls: tuple[str, ...] = ()
    stays: bool = False
    gathered_by: tuple[str, ...] = ()
    places: tuple[int, int] = (0, 0)

    @property
    def is_part(self) -> bool:
        """Whether it is a root part: a large module that the policy leaves to the root unit, as a unit of its own."""
        return bool(self.gathered_by)

    @property
    def of_root(self) -> bool:
        """Whether the call of the whole model keeps the weights: the root unit, and root parts."""
        return "" in self.modules

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weights. Frozen weights are cast like others (a forward computes in one dtype), except
        quantised ones."""
        return self.precision.param if self.trainable or self.dtype in FLOATS else self.dtype

    @property
    def widens_gradients(self) -> bool:
        """Whether gradients are accumulated in a wider dtype than that of the weights, in which autograd makes them."""
        return self.precision.grad.itemsize > self.weight_dtype.itemsize

    def weight_request(self, numel: int, *, in_common: bool = False) -> Request:
        """The request for a full-size buffer to gather into. Units that differ in dtype, trainability or precision may
        be needed at the same time (several units of one module), so they have different queues.

        Args:
            in_common: whether the shards lie side by side: the buffer then needs no memory. The unit still takes turns,
                so that the same units are gathered at the same times under every transport.
        """
        queue = (self.weight_dtype, self.trainable, self.precision)
        num_bytes = 0 if in_common else numel * self.weight_dtype.itemsize
        return Request(self.name, queue, num_bytes, self.outer or self.stays)

    def bucket_request(self, numel: int) -> Request:
        """The request for a full-size bucket to accumulate into."""
        precision = self.precision.grad
        return Request(self.name, precision, numel * precision.itemsize, self.outer, self.places)

    def reduce_scratch(
        self, transport: type[Transport], num_shards: int, num_replicas: int, *, in_place: bool
    ) -> tuple[int, int]:
        """Scratch bytes of a reduction: of the sum over shards, and of the sum over replicas. `in_place`: no unit
        borrows its bucket."""
        numel, sizes = self.layout(num_shards, num_replicas).numel, (num_shards, num_replicas)
        return transport.scratch_of_each(numel, self.precision.grad, self.precision.wire, *sizes, in_place=in_place)

    def layout(self, num_shards: int, num_replicas: int = 1) -> BufferLayout:
        """The layout of the full buffer: parameters in reverse registration order, so that backward fills the buffer
        from the front."""
        found = self._layouts.get((num_shards, num_replicas))
        if found is None:
            shapes = [(plain_name(name), shape) for name, shape in zip(self.names, self.shapes, strict=True)][::-1]
            found = BufferLayout.pack(shapes, num_shards, num_replicas=num_replicas)
            self._layouts[num_shards, num_replicas] = found
        return found

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], BufferLayout]:
        return {}


class HasSpec(Protocol):
    @property
    def spec(self) -> UnitSpec: ...


T = TypeVar("T", bound=HasSpec)


def in_order_of_reduction(units: Sequence[T]) -> list[T]:
    """The units in the order in which they are reduced: the last one first; but modules of the root that come behind
    other units (a head) only before the last of these. So they are reduced while the first block computes."""
    # [Note: the root in the order of reduction]
    # A rank may leave out a module of the root, and then holds up the reductions behind that of the module until the
    # end of its backward. Its peers must not wait for these while it waits for a gather that they have not begun. So
    # inside of a backward a rank starts the reductions of the root, and those behind the first of them, only when it
    # has begun all gathers, and if it need not wait for one of them (`Reducer._may_start`). Only one unit that takes
    # turns is behind them, so that no bucket is waited for. (docs/design.md: "The root unit and its parts")
    first = next((number for number, unit in enumerate(units) if not unit.spec.of_root), len(units) - 1)
    early = [unit for unit in units[:first:-1] if unit.spec.of_root]
    others = [unit for unit in units[:first:-1] if not unit.spec.of_root]
    return [*others, *early, *units[first::-1]] if units else []


def plain_name(name: str) -> str:
    """The name of a parameter in the original model, without the prefixes of torch.compile and of torch's checkpoint
    wrapper."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


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
        """`groups`, `whole`: see `_modules_by_unit`."""
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
        division = cls(modules, *_modules_by_unit(modules, policy, read_by), read_by)
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


def boundaries(policy: UnitPolicy, modules: Modules) -> Hashable:
    """Where the policy draws the boundaries of units: the unit of each module, or a number of bytes. Two policies with
    equal boundaries divide a model alike. It refers to no module, so a handle may keep it."""
    if policy is None or isinstance(policy, int):
        return DEFAULT_UNIT_BYTES if policy is None else policy
    if all(parameter is None for module in modules.values() for parameter in module._parameters.values()):
        return ()  # nothing to divide, and a class that is named may match nothing
    return tuple(_modules_by_unit(modules, policy, readers(modules))[0].items())


def _size_of_vocabulary(modules: Modules) -> int | None:
    return max((one.num_embeddings for one in modules.values() if isinstance(one, nn.Embedding)), default=None)


def _modules_by_unit(
    modules: Modules, policy: UnitPolicy, read_by: dict[str, str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Path of each module -> the unit of its own parameters ("" is the root unit); and unit -> paths of the modules
    whose call needs the whole unit."""
    if isinstance(policy, bool):
        raise InvalidType("units must be module classes or their names, a callable or a number of bytes, found a bool")
    if policy is None or isinstance(policy, int):
        return _modules_by_size(modules, DEFAULT_UNIT_BYTES if policy is None else policy, read_by)
    policy = _with_classes(policy, modules)
    matches = _matcher(policy)
    of_group = _groups(modules, policy, read_by)
    groups: dict[str, str] = {}
    any_matches = False
    for path, module in modules.items():
        reader = read_by[path]
        if reader != path and (is_whole(modules[reader]) or not takes_hooks(module)):
            groups[path] = groups[reader]
            continue
        if module in of_group:
            groups[path], any_matches = of_group[module], True
            continue
        matching = any(map(matches, module.modules())) if module._modules and is_whole(module) else matches(module)
        any_matches |= matching
        groups[path] = path if path and matching else groups[parent(path)] if path else ""
    if not any_matches:
        raise InvalidValue(
            f"units={policy!r} matches no module of {type(modules['']).__name__}; its modules are of the classes "
            f"{', '.join(_classes_in(modules)) or '(none)'}"
        )
    grouped = set(of_group.values())
    whole = {unit: [unit] for unit in groups.values() if unit not in grouped}
    for module, path in first_paths(modules).items() if of_group else ():
        if module in of_group:
            whole.setdefault(of_group[module], []).extend(_outermost_called(path, module))
    return groups, whole


def _classes_in(modules: Modules) -> list[str]:
    """The names of the classes of all modules inside the model, for messages."""
    return sorted({type(module).__name__ for path, module in modules.items() if path})


def _with_classes(policy: UnitPolicy, modules: Modules) -> UnitPolicy:
    """The policy with classes in place of class names, and lists in place of other sequences. A name may be that of a
    class in the model or of one of its base classes, may have its Python module in front, and may be a list separated
    by commas.

    Raises:
        ValueError: there is no class of that name; the message suggests the nearest one.
    """
    if isinstance(policy, str):
        return _classes_named(policy, modules)
    if isinstance(policy, Sequence):  # of any class: a ListConfig of omegaconf is no list
        lists = [list(item) if isinstance(item, Sequence) and not isinstance(item, str) else item for item in policy]
        named = [_classes_named(item, modules) if isinstance(item, str) else [item] for item in lists]
        return [item for items in named for item in items]
    return policy


def _classes_named(text: str, modules: Modules) -> list[type[nn.Module]]:
    kinds = dict.fromkeys(kind for of in dict.fromkeys(map(type, modules.values())) for kind in of.__mro__)
    classes = [kind for kind in kinds if issubclass(kind, nn.Module) and kind is not nn.Module]
    found: list[type[nn.Module]] = []
    for name in (part.strip() for part in text.split(",")):
        matching = [kind for kind in classes if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]
        if not matching:
            known, model = _classes_in(modules), type(modules[""]).__name__
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name in modules:
                hint = f". To name a module, and not its class: units=[({name!r},)]"
            elif name[:1].isdigit():
                hint = ". A number of bytes is an int: units=64 * 2**20"
            raise InvalidValue(
                f"units={text!r}: {model} has no module of a class {name!r}; its modules are of the "
                f"classes {', '.join(known) or '(none)'}{hint}"
            )
        found += matching
    return found


def _matcher(policy: object) -> Callable[[nn.Module], bool]:
    """A test for modules that are units by themselves."""
    items = policy if isinstance(policy, (list, tuple)) else [policy]
    if found := next((type(item).__name__ for item in items if isinstance(item, nn.Module)), None):
        raise InvalidType(
            f"units: found a module ({found}), expected its class: units={found}. Modules that form one unit are a "
            f"group inside a list: units=[{found}, (model.norm, model.head)]"
        )
    classes = tuple(item for item in items if isinstance(item, type))
    rest = [item for item in items if not isinstance(item, type)]
    if items and all(isinstance(item, (list, tuple)) for item in rest):
        return lambda module: isinstance(module, classes)
    if isinstance(policy, (list, tuple)) or not callable(policy):
        raise InvalidType(
            "units must be module classes or their names, groups of modules or names, a callable or a number of bytes, "
            f"found {policy!r}"
        )
    try:
        inspect.signature(policy).bind(None)
    except (TypeError, ValueError):
        raise InvalidType(
            f"units: a function is called with each module, and says whether it is a unit; found {policy!r}. In place "
            "of a policy of FSDP: the classes that it wraps, units=Block, or a number of bytes"
        ) from None
    return policy


def _groups(modules: Modules, policy: object, read_by: dict[str, str]) -> dict[nn.Module, str]:
    """Each module in a group -> the name of the unit.

    Raises:
        ValueError: an empty group; a module that is not in the model, or that is in two groups.
    """
    found: dict[nn.Module, str] = {}
    groups = [one for one in policy if not isinstance(one, type)] if isinstance(policy, (list, tuple)) else []
    paths = first_paths(modules) if groups else {}
    for group in groups:
        members = []
        for one in group:
            path = one if isinstance(one, str) else paths.get(one, "") if isinstance(one, nn.Module) else ""
            if not path or path not in modules:
                shown = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
                raise InvalidValue(f"units: {shown} in a group is no module inside {type(modules['']).__name__}")
            members.append(read_by[path])  # a submodule of a whole module stands for all of it
        if not members:
            raise InvalidValue("units: a group without modules")
        for path in members:
            if found.setdefault(modules[path], " + ".join(members)) != " + ".join(members):
                raise InvalidValue(f"units: {path} is in two groups")
    return found


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


def _modules_by_size(
    modules: Modules, unit_bytes: int, read_by: dict[str, str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Group neighbouring modules, in registration order, until the next one would exceed `unit_bytes`.

    A module that fits is not divided: it may use the weights of its submodules without calling them (in a fused kernel;
    or a head that uses an embedding). Undivided, all its weights are gathered when it is called.

    Returns:
        Path of each module -> its unit; and unit -> the undivided modules in it.
    """
    if unit_bytes <= 0:
        raise InvalidValue(f"units as a number of bytes must be positive, found {unit_bytes}")
    own, inside = _bytes_by_module(modules, read_by)
    groups: dict[str, str] = {}
    undivided: dict[str, list[str]] = {}
    current, size = "", 0

    def visit(path: str, module: nn.Module) -> None:
        nonlocal current, size
        fits = inside[path] <= unit_bytes or (bool(path) and is_whole(module))
        num_bytes = inside[path] if fits else own[path]
        if num_bytes and path and (not current or size + num_bytes > unit_bytes):
            current, size = f"{path}..", 0
        size += num_bytes if path else 0
        groups[path] = (current or f"{path}..") if path else ""
        if fits:
            if inside[path]:
                undivided.setdefault(groups[path], []).extend(_outermost_called(path, module))
            nested = [name for name, _ in module.named_modules(prefix=path, remove_duplicate=False)]
            groups.update(dict.fromkeys(nested, groups[path]))
        else:
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)

    visit("", modules[""])
    by_module = {modules[path]: group for path, group in groups.items()}
    for path, module in modules.items():  # further paths of a shared module: its one unit
        groups.setdefault(path, by_module.get(module, ""))
    held = {path: read_by[path] for path, module in modules.items() if module._parameters}
    return groups | {path: groups[reader] for path, reader in held.items()}, undivided


def _bytes_by_module(modules: Modules, read_by: dict[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """Path -> bytes of the parameters that the module reads; and path -> bytes of all parameters inside it. A shared
    parameter counts at its first place."""
    own = dict.fromkeys(read_by, 0)
    seen: set[int] = set()
    for path, module in modules.items():
        first = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen.update(map(id, first))
        own[read_by[path]] += sum(p.numel() * p.element_size() for p in first)
    inside = dict.fromkeys(own, 0)
    for path, num_bytes in own.items():
        inside[""] += num_bytes
        while path:
            inside[path] += num_bytes
            path = parent(path)
    return own, inside


def _outermost_called(path: str, module: nn.Module) -> Iterator[str]:
    """The path of the module itself; or, if it has no forward (a list), of the outermost modules in it that have."""
    if has_forward(module):
        yield path
        return
    for name, child in module.named_children():
        yield from _outermost_called(f"{path}.{name}" if path else name, child)


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
