"""Which modules form the units, by what the user passes as `units`: classes, names, groups, a function or a size."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import nn

from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.model.paths import Modules, first_paths, parent
from zeroshard.model.readers import has_forward, is_whole, readers, takes_hooks

Group = Sequence[nn.Module | str]
UnitPolicy = type[nn.Module] | str | Sequence[type[nn.Module] | str | Group] | Callable[[nn.Module], bool] | int | None
DEFAULT_UNIT_BYTES = 32 << 20


def boundaries(policy: UnitPolicy, modules: Modules) -> Hashable:
    """Where the policy draws the boundaries of units: the unit of each module, or a number of bytes. Two policies with
    equal boundaries divide a model alike. It refers to no module, so a handle may keep it."""
    if policy is None or isinstance(policy, int):
        return DEFAULT_UNIT_BYTES if policy is None else policy
    if all(parameter is None for module in modules.values() for parameter in module._parameters.values()):
        return ()  # nothing to divide, and a class that is named may match nothing
    return tuple(modules_by_unit(modules, policy, readers(modules))[0].items())


def modules_by_unit(
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
