"""The hooks on modules and parameters of the user's model. (While a timeline is recorded, `stretches.py` adds some.)

| hook                                  | where                              | does                                    |
|---------------------------------------|------------------------------------|-----------------------------------------|
| forward pre-hook, forward hook        | modules that need a unit's weights | gather and show, before any other hook; |
|                                       |                                    | hide, after all others. Taken off while |
|                                       |                                    | a call around gathers the same units    |
| gradient hook on outputs              | the outermost of those calls       | gather and show for backward            |
| hooks around forward                  | the model, units, other precisions | cast inputs and outputs (`casting.py`)  |
| gradient hook on outputs              | the model                          | mark the start of backward              |
| gradient hook                         | trainable parameters               | mark the start of backward              |
| post-accumulate-grad hook, grad_dtype | trainable parameters               | move the gradient into its bucket       |
| in place of `zero_grad`               | the model                          | raise inside of a backward              |

Module hooks hold a strong reference to the schedule. Parameter hooks hold a weak one: a parameter that outlives the
model must not keep it alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import InvalidState, InvalidType
from zeroshard.gradients.sharded_gradient import ShardedGradient
from zeroshard.model.absent import NotCopied, as_tensors
from zeroshard.model.casting import Cast, Inputs, attach_casts, cast
from zeroshard.model.outside_graphs import OutsideGraphs, called_by_torch, outside_graphs
from zeroshard.model.paths import Modules, parent
from zeroshard.model.readers import looked_at
from zeroshard.model.right_call import expect_no_ddp_around
from zeroshard.model.room import with_room
from zeroshard.model.transforms import in_plain_torch, under_transform
from zeroshard.runtime.needs import Around, Needed
from zeroshard.runtime.schedule import Schedule, expect_no_transform, refuse_inside_of_backward
from zeroshard.runtime.seen_by_hooks import SeenByHooks
from zeroshard.storage.unit import Unit


class Hooks(NotCopied):
    """The hooks on one model."""

    def __init__(self, schedule: Schedule) -> None:
        """`schedule`: they call it."""
        self._schedule = schedule
        self._removers: list[Callable[[], None]] = []
        self._needs: dict[nn.Module, Needed] = {}
        self._first: list[Around] = []  # of modules inside the model, whose own hooks already run in `come_first`
        self._casts: dict[nn.Module, Cast] = {}

    def attach(self, modules: Modules, casts: Mapping[nn.Module, Cast], begin: Callable[[], None]) -> None:
        """Install all hooks.

        Args:
            modules: of the model.
            casts: see `casting.py`; their hooks run inside the hooks that gather and hide.
            begin: called before each call of the whole model.
        """
        model, first = modules[""], RemovableHandle.next_id
        # First, so that copying the model raises before anything else of it is copied (`NotCopied`).
        self._removers.append(model.register_forward_hook(OutsideGraphs(self._schedule.after_model)).remove)
        self._needs[model] = Needed()  # also without units of its own: the hooks around it tell whether it runs
        for unit in self._schedule.gatherer.units:
            for path in unit.spec.modules:
                self._needs.setdefault(modules[path], Needed()).add(unit, path)
        self._schedule.num_modules = len(self._needs)
        self._casts = dict(casts)
        # [Note: order of hooks]
        # From outermost to innermost: gather, casts, the user's hooks, forward; afterwards in reverse. torch runs hooks
        # in the order of registration, except with `prepend=True`. So casts are registered first, gathers are
        # prepended, and the hooks that hide are moved to the end before each call, behind the user's newer hooks.
        self._removers += attach_casts(casts)
        for hooks in _around_lookers(self._schedule, modules, self._needs):
            self._removers.append(hooks.remove)
            hooks.attach()
        around = dict[nn.Module, Around]()
        for module, needed in self._needs.items():
            # `begin` is not stored here, as its object may own this schedule.
            before = _before(self._schedule, needed, begin if module is model else None)
            around[module] = Around(module, before, _after(self._schedule, needed), is_whole=module is model)
            self._removers.append(around[module].remove)
            around[module].attach()
        self._first = [hooks for module, hooks in around.items() if module is not model]
        for path, module in modules.items():
            if module not in around:
                continue
            needed = self._needs[module]
            needed.hooks = around[module]
            inside = [*_reached(module, needed, self._needs)]
            needed.reached = [one for one in inside if not type(one).__module__.startswith("torch.nn.")]
            needed.seen = SeenByHooks(inside, range(first, RemovableHandle.next_id))  # torch counts all hooks
            for outer in _around(self._needs, modules, path):
                if outer.covers(needed):
                    outer.inside[module] = around[module]
        self.hook_parameters(self._schedule.reducer.order)
        if "zero_grad" not in vars(model):
            self.replace(model, "zero_grad", _zero_grad(self._schedule, model))

    def hook_parameters(self, units: Sequence[Unit]) -> None:
        """Install the parameter hooks of units that train."""
        with as_tensors():
            for unit in units:
                for index, parameter in enumerate(unit.parameters):
                    self._removers += _hook_parameter(weakref.ref(self._schedule), unit, index, parameter)

    def wrap(self, module: nn.Module, name: str, begin: Callable[[], None] | None) -> None:
        """Make a method of a module gather the module's units and cast inputs and outputs, as a call of the module
        does.

        Args:
            begin: called before the method, if the module is the whole model.
        """
        if not isinstance(module, nn.Module):
            raise InvalidType(f"register_forward_method takes a module and the name of its method, found {module!r}")
        needed, casts = self._needs.get(module, Needed()), self._casts.get(module, Cast())
        method = getattr(module, name)
        before, inside = _before(self._schedule, needed, begin), _before(self._schedule, needed, None)
        after = _after(self._schedule, needed)

        # What torch.compile has set on a compiled method is about that one: torch would look past the wrapper.
        is_compiled = hasattr(method, "_torchdynamo_orig_callable")

        @functools.wraps(method, updated=() if is_compiled else functools.WRAPPER_UPDATES)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            output, inputs = None, Inputs(casts.into)
            try:
                (inside if self._schedule.running else before)(module, args, kwargs)
                cast_args, cast_kwargs = inputs.cast(module, args, kwargs)
                output = cast(method(*cast_args, **cast_kwargs), casts.out)
            finally:  # also if a hook or a cast has raised, as around a call of the module
                inputs.give_back(module, args, kwargs, output)
                replaced = after(module, args, kwargs, output)
            return output if replaced is None else replaced

        self.replace(module, name, wrapper if begin is None else with_room(wrapper))

    def describe(self, model: nn.Module, words: Callable[[], str]) -> None:
        """Make `print(model)` show these words, before the inner modules."""
        own = model.extra_repr
        self.replace(model, "extra_repr", lambda: "\n".join(filter(None, [own(), words()])))

    def replace(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of this module, until `detach`."""
        own = vars(module).get(name)  # the user's, set on this instance
        self._removers.append(partial(_reset, module, name, own))
        vars(module)[name] = method  # not by `setattr`: a module made by torch.compile forwards that to the one inside

    def come_first(self) -> None:
        """Move the hooks that gather to the front."""
        for hooks in self._first:
            if len(hooks.of_before) > 1:
                hooks.gather_first()

    def detach(self) -> None:
        """Remove all hooks."""
        while self._removers:  # each may be called twice, if the first call was interrupted
            self._removers[-1]()
            self._removers.pop()
        self._first.clear()
        for needed in self._needs.values():  # a call may be running, and would put them back
            needed.inside.clear()
            needed.seen.end()
        self._needs.clear()


def _reset(module: nn.Module, name: str, own: object) -> None:
    """Let the attribute be `own` again; None: that of the class."""
    vars(module).pop(name, None)
    vars(module).update({name: own} if own is not None else {})


_TAKEN = (
    "a {name} has taken the place of a module that is sharded, with a copy of its hooks (as torch.ao.quantization's "
    "prepare_qat and convert do): replace modules before shard(), or close() the handle, replace them, and shard() anew"
)


def _before(
    schedule: Schedule, needed: Needed, begin: Callable[[], None] | None
) -> Callable[[nn.Module, Any, Any], None]:
    """The pre-hook that gathers. `begin`: called before, if this is a call of the whole model."""

    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if kwargs is None:
            raise InvalidState(_TAKEN.format(name=type(module).__name__))
        if needed.hooks is not None:
            needed.hooks.hide_last()
        expect_no_ddp_around(parameter for unit in needed.units for parameter in unit.parameters)
        if begin is not None:
            schedule.running.expect_alone(schedule.gatherer.units)
            with schedule.running.lock:
                begin()
                schedule.begin_trail()
        expect_no_transform(needed.units)
        with schedule.running.lock, in_plain_torch():
            schedule.before_module(module, needed, (args, kwargs))

    return hook


def _after(schedule: Schedule, needed: Needed) -> Callable[[nn.Module, Any, Any, Any], Any]:
    """The hook that hides. It returns the output if that has been replaced (`without_views`)."""

    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        transformed = under_transform()
        with schedule.running.lock, in_plain_torch():
            found = schedule.after_module(module, needed, (args, kwargs), output, transformed=transformed)
        return None if found is output else found

    return hook


def _zero_grad(schedule: Schedule, model: nn.Module) -> Callable[..., None]:
    """In place of `model.zero_grad`, which finds no gradient in `p.grad` inside of a backward, and after one that has
    raised."""
    own = model.zero_grad

    @outside_graphs
    @functools.wraps(own)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if schedule.is_in_backward:
            refuse_inside_of_backward("model.zero_grad")
        schedule.running.expect_whole("model.zero_grad")
        schedule.abandon_backward()
        own(*args, **kwargs)

    return zero_grad


def _around(needs: Mapping[nn.Module, Needed], modules: Modules, path: str) -> Iterator[Needed]:
    """What the modules around the one at `path` need."""
    while path:
        path = parent(path)
        if modules[path] in needs:
            yield needs[modules[path]]


def _reached(module: nn.Module, needed: Needed, needs: Mapping[nn.Module, Needed]) -> Iterator[nn.Module]:
    """The module, and all inside of it but for those that need something else."""
    yield module
    for child in module.children():
        if child not in needs or needed.covers(needs[child]):
            yield from _reached(child, needed, needs)


def _around_lookers(schedule: Schedule, modules: Modules, needs: Mapping[nn.Module, Needed]) -> Iterator[Around]:
    """Hooks around modules that look at the parameters of a submodule (`looked_at`), unless a call around has gathered
    them."""
    for path, module in modules.items():
        looked = looked_at(module)
        if looked is None:
            continue
        first = f"{path}.{looked}".lstrip(".")
        inside = [needs[one] for name, one in modules.items() if f"{name}.".startswith(f"{first}.") and one in needs]
        units = list(dict.fromkeys(unit for needed in inside for unit in needed.gathers))
        if not any(set(units) <= set(outer.gathers) for outer in _around(needs, modules, first)):
            yield _around_looker(schedule, module, modules[first], units)


def _around_looker(schedule: Schedule, looker: nn.Module, first: nn.Module, units: Sequence[Unit]) -> Around:
    """`units`: those that the submodule `first` needs."""

    @OutsideGraphs
    def show_ahead(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not first.training:
            with schedule.running.lock, in_plain_torch():
                schedule.gatherer.show_ahead(units)

    @OutsideGraphs
    def put_away(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # They are still shown if the module has raised before it called the submodule.
        with schedule.running.lock, in_plain_torch():
            schedule.gatherer.put_away(units)

    return Around(looker, show_ahead, put_away)


def _hook_parameter(
    schedule: weakref.ref[Schedule], unit: Unit, index: int, parameter: nn.Parameter
) -> Iterator[Callable[[], None]]:
    """Both hooks hold weak references: else a parameter would keep the model alive after `del`."""
    if frozen := not parameter.requires_grad:  # torch then refuses hooks, and it may train later
        parameter.requires_grad_(True)
    hooks = parameter._post_accumulate_grad_hooks
    earlier = list(hooks or ())
    try:
        yield parameter.register_post_accumulate_grad_hook(_on_gradient(schedule, unit, index)).remove  # type: ignore[no-untyped-call]
        for number in earlier:  # of the user, from before shard(): they run after this one, as later ones do
            hooks[number] = hooks.pop(number)
        yield parameter.register_hook(_before_gradient(schedule, unit, parameter)).remove  # type: ignore[no-untyped-call]
    finally:
        if frozen:
            parameter.requires_grad_(False)
    # Autograd then also sums several uses of a parameter in it. See [Note: sums within one backward].
    if unit.spec.widens_gradients:
        parameter.grad_dtype = unit.spec.precision.grad
        yield partial(_narrow_gradients, parameter)


@torch.no_grad()
def _narrow_gradients(parameter: nn.Parameter) -> None:
    """Let gradients have the dtype of the parameter again, also one that has not been used."""
    with as_tensors():
        grad, parameter.grad, dtype = parameter.grad, None, parameter.dtype
        parameter.grad_dtype = dtype
        if grad is not None:
            parameter.grad = grad.in_dtype(dtype) if isinstance(grad, ShardedGradient) else grad.to(dtype)


def _before_gradient(schedule: weakref.ref[Schedule], unit: Unit, parameter: Tensor) -> Callable[[Tensor], None]:
    """The gradient hook of a parameter. Its argument is the gradient."""
    of_parameter, of_unit = weakref.ref(parameter), weakref.ref(unit)

    @called_by_torch
    def hook(grad: Tensor) -> None:
        alive, its_unit = schedule(), of_unit()
        if alive is None or its_unit is None:
            return
        # Usually there is nothing to do, and this runs for every gradient.
        is_shown = its_unit.weights.shown
        if is_shown and alive.accumulates and not alive.reducer.single_uses.uncast:
            return
        target = of_parameter()
        if target is not None:
            if not is_shown:
                # A step of other parameters of the unit may have come before: its weights are on their way.
                if its_unit.weights.buffer.rests_in_full:
                    alive.gatherer.bring(its_unit)
                its_unit.weights.expect_shown(target)
            alive.before_gradient(target)

    return hook


def _on_gradient(schedule: weakref.ref[Schedule], unit: Unit, index: int) -> Callable[[nn.Parameter], None]:
    """The post-accumulate-grad hook of a parameter. Its argument is the parameter, not the gradient: code that confuses
    the two averages weights."""
    unit_ref = weakref.ref(unit)

    @called_by_torch
    def hook(parameter: nn.Parameter) -> None:
        alive, of_unit = schedule(), unit_ref()
        if alive is not None and of_unit is not None:
            alive.reducer.collectives.come()
            if not alive.accumulates:
                alive.begin_backward(accumulates=True)
            alive.reducer.accumulate(of_unit, index, parameter)

    return hook
