"""Runs the user's optimizer class inside a stepper: its options, its step without hooks, and its state.

Hooks on `step` (torch's global ones, too) run once, around `ShardedOptimizer.step`, and not around each of the inner
steps that it consists of.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.comm.together import tell_together
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.model.absent import as_tensors
from zeroshard.model.right_call import beside_step
from zeroshard.model.trees import tensors_in
from zeroshard.step.assignment import NAMES, Assignment, Member, OptimizerClass, Options, common_options_in, options_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
READING = "optimizer.state, optimizer.state_dict(), or what reads them"
"""The purpose of exchanges that read the state, in error messages."""


class Inner:
    """The inner optimizer: an instance of the user's class over the tensors that a stepper gives it.

    Attributes:
        optimizer: the instance.
        groups: index of the user's param group -> the inner optimizer's own group, with the hyper-parameters.
    """

    def __init__(
        self,
        assignment: Assignment,
        tensors_of: Callable[[int], list[Tensor]],
        places_of: Callable[[int], list[int]] | None = None,
    ) -> None:
        """`tensors_of`: the tensors that stand for the parameters of a group on this rank; `places_of`: the places of
        their parameters in the user's group. None: these are pieces, which have no names."""
        options = assignment.options
        self._places = {index: places_of(index) for index in options} if places_of else {}
        own_groups = [
            {**self._own_options(index, of_group), "params": tensors_of(index)} for index, of_group in options.items()
        ]
        self.optimizer = assignment.optimizer_class(own_groups, **assignment.defaults)
        self.groups: dict[int, Options] = dict(zip(options, self.optimizer.param_groups, strict=True))
        self._assignment = assignment
        self._elementwise: dict[int, dict[str, bool]] = {}

    @contextmanager
    def with_options(self, options: Sequence[Options]) -> Iterator[None]:
        """Around a step, or another method of the class: copy the hyper-parameters of the user's param groups in, and
        copy changes by the class back."""
        self.read_options(options)
        yield
        self.write_options(options)

    def read_options(self, options: Sequence[Options], indices: Collection[int] | None = None) -> None:
        """Copy the hyper-parameters of the user's param groups (None: of all) into the inner groups."""
        for index in self.groups if indices is None else indices:
            group = self.groups[index]
            for key, value in self._own_options(index, options[index]).items():
                if isinstance(group.get(key), Tensor) and isinstance(value, (int, float)):
                    # Not `fill_`: torch gives one tensor to all groups that take an option from the defaults.
                    group[key] = torch.full_like(group[key], value)  # a class that keeps a tensor expects one
                else:
                    group[key] = value

    def _own_options(self, index: int, options: Options) -> Options:
        """The options of the user's param group `index`, with the names of those parameters that are here."""
        own = common_options_in(options)
        if NAMES in options and self._places:
            own[NAMES] = [options[NAMES][place] for place in self._places[index]]
        return own

    def write_options(self, options: Sequence[Options]) -> None:
        """Copy the inner groups' values back to the user's: some classes keep counts in their groups."""
        for index, group in self.groups.items():
            options[index].update(common_options_in(group))

    def elementwise(self, group: int) -> dict[str, bool]:
        """See `is_elementwise_state`."""
        if group not in self._elementwise:
            of_class, defaults = self._assignment.optimizer_class, self._assignment.defaults
            self._elementwise[group] = is_elementwise_state(of_class, self.groups[group], defaults)
        return self._elementwise[group]

    def state_of(self, tensor: Tensor) -> dict[str, Any]:
        """The state of a tensor; empty before the first step."""
        return self.optimizer.state.get(tensor) or {}

    def set_state(self, tensor: Tensor, state: dict[str, Any]) -> None:
        """Set the state of a tensor, without copying it. An empty dict removes the state."""
        self.optimizer.state.pop(tensor, None)
        if state:
            self.optimizer.state[tensor] = state

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors of the state, by kind: "state", and "scalars" (0-d tensors: step counts)."""
        kinds: dict[str, list[Tensor]] = {"state": [], "scalars": []}
        expect_state_of_tensors(self.optimizer)
        for value in chain.from_iterable(state.values() for state in self.optimizer.state.values()):
            if isinstance(value, Tensor):
                kinds["state" if value.dim() else "scalars"].append(value)
        return kinds


def where_torch_puts(key: str, value: Tensor, options: Options, device: torch.device) -> Tensor:
    """A loaded tensor of one number, where `torch.optim.Optimizer.load_state_dict` puts it: on the device of its
    parameter. Step counts stay on the CPU, unless a fused or capturable kernel reads them on the device."""
    stays = key == "step" and not (options.get("fused") or options.get("capturable"))
    return value if stays else value.to(device)


def bring_up_to_date(optimizer: Any) -> None:
    """What `torch.optim.Optimizer.load_state_dict` does last: the class converts state that older versions of it have
    saved (step counts that were no tensors)."""
    if hasattr(optimizer, "__setstate__"):
        with suppress(KeyError, TypeError):  # an item is missing, or is no number: a step raises
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


# Stepping -------------------------------------------------------------------------------------------------------------


def run_method(optimizer: Any, name: str, arguments: Arguments, with_gradient: Iterable[Tensor]) -> Any:
    """Call a method other than `step`. `with_gradient`: tensors whose parameters have gradients, which stay where they
    are: the method finds that there is one, and raises if it reads it."""
    what = f"{name} of {type(optimizer).__name__}"
    shown = [(tensor, _elsewhere(tensor, what)) for tensor in with_gradient]
    try:
        for tensor, gradient in shown:
            tensor.grad = gradient
        return getattr(optimizer, name)(*arguments[0], **arguments[1])
    finally:
        for tensor, _ in shown:
            tensor.grad = None


class _Elsewhere(Tensor):
    """A gradient for a method other than `step`. (With None in its place, the method would go on without, in silence.)

    Attributes:
        method: for the message."""

    method: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_SHAPE:
            with as_tensors():
                return func(*args, **(kwargs or {}))
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Elsewhere))
        raise InvalidState(
            f"{found.method} reads a gradient, and a method other than step() gets none here. Let the class do this in "
            "its step(); or do it in the loop, with handle.gradient(name), and `with handle.unsharded(write=True):` to "
            "set weights"
        )


_OF_THE_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_sparse", "layout", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel),
}


def _elsewhere(tensor: Tensor, method: str) -> Tensor:
    nan = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    gradient = Tensor._make_subclass(_Elsewhere, nan)
    gradient.method = method
    return gradient


def run_step(optimizer: torch.optim.Optimizer, arguments: Options | None = None, is_void: Tensor | None = None) -> None:
    """`optimizer.step(**arguments)` without hooks. `is_void`: 0-d float32 on the device: a fused class changes nothing
    if it is 1, as for `torch.amp.GradScaler`, which sets the same attributes."""
    step = partial(_step_of(type(optimizer)), optimizer, **(arguments or {}))
    if is_void is None:
        for _ in _calls(optimizer):
            step()
        return
    optimizer.grad_scale, optimizer.found_inf = None, is_void  # type: ignore[attr-defined]
    try:
        step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _calls(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Mostly one. torch's fused SGD takes tensors that all have their momentum, or that all have none: other ones are
    in its param groups during one call each. (Whether a rank has both depends on where pieces are cut.)"""
    groups, state = optimizer.param_groups, optimizer.state
    if _step_of(type(optimizer)) is _step_of(torch.optim.SGD) and any(one["fused"] for one in groups):
        of_groups = [one["params"] for one in groups]
        has = {one: state.get(one, {}).get("momentum_buffer") is not None for params in of_groups for one in params}
        if len({*has.values()}) == 2:
            try:
                for kind in (True, False):
                    for group, params in zip(groups, of_groups, strict=True):
                        group["params"] = [one for one in params if has[one] is kind]
                    yield
            finally:
                for group, params in zip(groups, of_groups, strict=True):
                    group["params"] = params
            return
    yield


def tried_step(
    optimizer: torch.optim.Optimizer, arguments: Options | None = None, is_void: Tensor | None = None
) -> Exception | None:
    """`run_step`, which may raise on this rank alone.

    Returns:
        What it has raised. The other ranks wait for what follows in the step, so this rank takes part, and raises then.
    """
    try:
        run_step(optimizer, arguments, is_void)
    except Exception as error:
        return error
    return None


@contextmanager
def trial() -> Iterator[None]:
    """Inside, a class is tried out: on the CPU, whatever the default device is, and without a change of the user's
    random numbers."""
    with torch.device("cpu"), torch.random.fork_rng(devices=()):
        yield


def for_trial(options: Options) -> Options:
    """These options, for the plain kernels: others do not take every device, or need a graph."""
    return {**options, **dict.fromkeys({"foreach", "fused", "capturable", "differentiable"} & options.keys(), False)}


def built_for_trial(
    optimizer_class: OptimizerClass,
    arguments: Options,
    tensors: list[Tensor],
    of_group: Options | None = None,
    names: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """An instance over these tensors that can step. `of_group`: the options of their param group; `names`: of the
    tensors, if they have any."""
    own = {NAMES: names} if names else {}
    params: list[Any] = tensors
    if of_group is not None or own:
        params = [{**copy.deepcopy(of_group or {}), **own, "params": tensors}]
    optimizer: Any = optimizer_class(params, **copy.deepcopy(arguments))
    if callable(getattr(optimizer, "train", None)):  # schedule-free classes step only in training mode
        optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def stepped_for_trial(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], steps: int) -> torch.optim.Optimizer:
    """Step an instance over these tensors, with gradients of ones. Returns it."""
    for _ in range(steps):
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        run_step(optimizer)
    return optimizer


def expect_state_of_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Raises:
    ValueError: the optimizer's state has entries that belong to no parameter, or it has an optimizer inside of it with
        a state of its own."""
    inside = {name: one for name, one in vars(optimizer).items() if isinstance(one, torch.optim.Optimizer)}
    for name, one in inside.items():
        if one.state and one.state is not optimizer.state:
            raise InvalidValue(
                f"{type(optimizer).__name__} cannot be sharded: {name} is an optimizer inside of it whose state is not "
                f"in optimizer.state, and would be in no checkpoint. Let both share it: self.state = self.{name}.state"
            )
    foreign = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if foreign:
        raise InvalidValue(
            f"{type(optimizer).__name__} cannot be sharded: optimizer.state[{foreign[0]!r}] belongs to no parameter, "
            "and would be in no checkpoint. Keep it in a param group, or in the state of each parameter"
        )


def expect_no_reads(
    optimizer_class: OptimizerClass, defaults: Options, tensors: Sequence[Tensor], names: Sequence[str] = ()
) -> None:
    """Build the class over these tensors on the meta device, as a trial. `names`: theirs, if they have any.

    Raises:
        ValueError: it reads their values. The tensors that a stepper builds it over get theirs in a step.
    """
    with _Reads(tensors) as reads:
        optimizer_class([*zip(names, tensors, strict=True)] if names else [*tensors], **defaults)
    if reads.found:
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot be sharded: it reads the values of parameters when it is built "
            f"({reads.found}), and they are brought together only in a step. Let it read them in its first step"
        )


def expect_no_overrides(optimizer: torch.optim.Optimizer, members: Iterable[Member]) -> None:
    """Before a step of a class of bitsandbytes, whose manager has options of single parameters. A class finds them by
    the parameter itself or its place in `param_groups`, and this one is over other tensors.

    Raises:
        ValueError: it has some for these parameters.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None or not type(optimizer).__module__.startswith("bitsandbytes."):
        return
    overridden = {id(getattr(module, name)) for module, name, _ in manager.module_weight_config_triple}
    overridden |= {*manager.pid2config}
    names = [member.slot.name for member in members if id(member.parameter) in overridden]
    if names or manager.index2config:
        raise InvalidValue(
            f"{type(optimizer).__name__}: bitsandbytes' GlobalOptimManager has options for single parameters "
            f"({', '.join(names[:5]) or 'by their place'}), which would be lost, as other tensors are stepped in their "
            "place. Call bitsandbytes.optim.GlobalOptimManager.get_instance().initialize() once the model is built, "
            'and give these parameters a param group: {"params": [p], "lr": 1e-3}, or {"params": [p], '
            '"optimizer_class": bitsandbytes.optim.Adam32bit} for 32 bits'
        )


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside: `found` is the first operation that reads the values of the tensors, "" if there is none."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self.found = [tensor.untyped_storage()._cdata for tensor in tensors], ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (self.found or func.is_view or name.endswith("_like") or name.startswith("new_")):
            inputs = [tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))]
            self.found = name if any(one in self._tensors for one in inputs) else ""
        return func(*args, **(kwargs or {}))


def _step_of(optimizer_class: OptimizerClass) -> Callable[..., Any]:
    """The class's own `step`, without the wrapper that torch puts around it once per class."""
    function: Any = optimizer_class.step
    # Through the wrapper, the user's hooks would run once for each batch of pieces instead of once per step.
    unwrapped: Callable[..., Any] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return unwrapped


def expect_no_closure(optimizer_class: OptimizerClass) -> None:
    """Raises:
    ValueError: `step` of the class needs arguments (a closure that evaluates the loss)."""
    try:
        inspect.signature(_step_of(optimizer_class)).bind(None)
    except TypeError as error:
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot be sharded: its step() needs arguments ({error}); one that evaluates "
            "the loss while it steps would do so on a part of the weights"
        ) from None


def arguments_for(optimizer_class: OptimizerClass, arguments: Options) -> Options:
    """The keyword arguments that the `step` of a class takes."""
    if not arguments:
        return {}
    parameters = inspect.signature(_step_of(optimizer_class)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def expect_arguments(classes: Sequence[OptimizerClass], arguments: Options) -> None:
    """Raises:
    TypeError: a keyword argument of `step` that no class takes.
    ValueError: an argument holds tensors of many elements (values per parameter would not fit the pieces)."""
    for name, value in arguments.items():
        takers = [one for one in classes if name in arguments_for(one, arguments)]
        if not takers:
            names = ", ".join(one.__name__ for one in dict.fromkeys(classes))
            raise InvalidType(
                f"step() got an unexpected keyword argument {name!r}, which {names} does not take{beside_step(name)}"
            )
        if any(isinstance(leaf, Tensor) and leaf.numel() != 1 for leaf in tree_leaves(value)):
            raise InvalidValue(f"step({name}=...) holds tensors of many elements: only numbers can be passed on")


# State ----------------------------------------------------------------------------------------------------------------


def describe_together(assignment: Assignment, describe: Callable[[], list[Any]]) -> list[Any]:
    """The lists that `describe` returns (JSON-able descriptions of state), of all ranks that step together,
    concatenated. Collective.

    Raises:
        ValueError: on every rank: a rank's state cannot be described.
    """
    _, of_ranks = tell_together(assignment.collectives, READING, lambda: (None, describe()))
    return list(chain.from_iterable(of_ranks))


def step_raises(
    assignment: Assignment, options: Options, saved: Options, state: Options, shape: tuple[int, ...]
) -> str:
    """What the class raises in a step with loaded state and options: items that it needs may be missing. (Only the
    ranks that hold a part of the parameter would raise.) "": nothing, or it does not step here.

    Args:
        options: of the param group, as it is now; saved: the ones that are loaded, in their place.
        state: of one parameter, of that shape.
    """
    with trial(), torch.no_grad():
        tiny = small(shape).requires_grad_()
        of_class, defaults = assignment.optimizer_class, assignment.defaults
        try:
            made = stepped_for_trial(built_for_trial(of_class, defaults, [tiny], for_trial(options)), [tiny], 2)
        except Exception:
            return ""
        has_all_state = not state or made.state.get(tiny, {}).keys() <= state.keys()
        if has_all_state and made.param_groups[0].keys() <= {*saved, "params"}:
            return ""
        # Options that were not saved stay as they are here. In torch they are gone, and a step tells of another class.
        # (A state of an older version of the class lacks some as well, but it has no others.)
        for loaded in (options | saved, *([saved] if saved.keys() - made.param_groups[0].keys() else [])):
            made = built_for_trial(of_class, defaults, [tiny], for_trial(options))
            if state:
                made.state[tiny] = {key: _tiny(value) for key, value in state.items()}
            made.param_groups[0] = {"params": [tiny], **for_trial({key: _tiny(one) for key, one in loaded.items()})}
            try:
                bring_up_to_date(made)
                if callable(train := getattr(made, "train", None)):
                    train()
                stepped_for_trial(made, [tiny], 1)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""


def _tiny(value: Any) -> Any:
    """A small tensor of this kind, on the CPU: ones, but a single number is the same. Other values are copied."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", dtype, copy=True) if value.numel() == 1 else small(value.shape, dtype)


def small(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of ones for trials, of a shape like this one."""
    return torch.ones([min(size, 3) for size in shape], dtype=dtype, device="cpu")


def is_elementwise_state(optimizer_class: OptimizerClass, options: Options, defaults: Options) -> dict[str, bool]:
    """For each key of the state: whether it has a value for every element of the parameter, or one value for all. For a
    parameter of one element the shape does not tell, so the class steps a small matrix here. Keys that it does not
    create for that matrix are left out; all keys, if it cannot step a matrix.

    Args:
        options: a param group; defaults: what the class was built with.
    """
    with trial(), torch.no_grad():
        parameter = torch.zeros(2, 3, device="cpu", requires_grad=True)
        try:
            optimizer = built_for_trial(optimizer_class, defaults, [parameter], for_trial(options_in(options)))
            stepped_for_trial(optimizer, [parameter], 2)
        except Exception:
            return {}
    tensors = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
    return {key: value.shape == parameter.shape for key, value in tensors.items()}
