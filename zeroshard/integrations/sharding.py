"""`Sharding`: the user's choices, in one record for all frameworks; and helpers that the integrations share."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.errors import InvalidState, InvalidValue, NotInstalled
from zeroshard.full_model.materialize import Source
from zeroshard.handle import Handle, handle_of
from zeroshard.loss_scale import LossScalePolicy, as_policy
from zeroshard.model.casting import Precisions, Rules
from zeroshard.model.managed import Ignored, Managed
from zeroshard.model.paths import Modules, modules_of
from zeroshard.model.unit_policy import UnitPolicy, boundaries
from zeroshard.model.unit_spec import plain_name
from zeroshard.model.units import KeepGathered, kept_gathered
from zeroshard.optimizer import ShardedOptimizer, scaled_loss
from zeroshard.placement import SHARDED, Plan, as_plan
from zeroshard.precision import FLOATS, MixedPrecision, as_precision, precision_for
from zeroshard.runtime.claims import Claims
from zeroshard.shard import shard
from zeroshard.step.agreement import NonFinite
from zeroshard.step.taken_over import retire

_OF_THE_OPTIMIZER = ("loss_scale", "non_finite", "skip_norm_above")


@dataclass(frozen=True)
class Sharding:
    """How a framework shards the models that it prepares. Each field is the argument of that name of
    `zeroshard.shard`; the last three are arguments of `zeroshard.ShardedOptimizer`.

    Raises:
        ValueError: (from `of`) a key is not a field.
    """

    plan: Plan | str | int = "zero3"
    units: UnitPolicy | str | Sequence[str] = None
    precision: Precisions = None
    mesh: DeviceMesh | dist.ProcessGroup | None = None
    max_transient_bytes: int | None = None
    materialize: Source | None = None
    values: Literal["broadcast", "check"] = "broadcast"
    ignored: Ignored = ()
    keep_gathered: KeepGathered = ()
    loss_scale: LossScalePolicy | float | Literal["dynamic"] | None = None
    non_finite: NonFinite | None = None
    skip_norm_above: float | None = None
    _output: torch.dtype | None = field(default=None, repr=False)  # dtype of outputs, set by `in_precision`
    _scale: LossScalePolicy | None = field(default=None, repr=False)  # of a framework that scales anyway

    @classmethod
    def of(cls, found: Sharding | Mapping[str, Any] | Plan | str | int) -> Sharding:
        """From a record, a dict of its fields, or a plan."""
        if isinstance(found, Sharding):
            return found
        if not isinstance(found, Mapping):
            return cls(plan=found)
        known = _arguments()
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise InvalidValue(f"sharding: unknown keys {unknown}; expected some of {known}")
        return cls(**found)

    def in_precision(self, name: str | None, argument: str, output: torch.dtype | None = torch.float32) -> Sharding:
        """The record with the precision of the framework's own argument (None or "no": unchanged). A `MixedPrecision`
        with weights of the same dtype says more than the argument, and stays. `output`: the dtype to which the
        framework converts what the model returns; losses are computed from it.

        Raises:
            ValueError: both set a precision.
        """
        if name in (None, "no"):
            return self
        own, asked = self.precision, as_precision(name)
        if isinstance(own, MixedPrecision) and asked is not None and own.param == asked.param:
            return replace(self, _output=output)
        if own is not None:
            raise InvalidValue(
                f"{argument} asks for {name!r}, and sharding for precision={own!r}: leave out one of the two"
            )
        return replace(self, precision=name, _output=output)

    def shard(self, model: nn.Module) -> Handle:
        """Shard the model, unless it is sharded already, and return its handle. Collective.

        Raises:
            ValueError: it is sharded already, and not so; or some of its parameters are, as those of another model.
            RuntimeError: it is sharded already, and has got parameters since.
        """
        handle = handle_of_model(model)
        if handle is not None:
            handle.engine.expect_known_parameters()  # new modules may be the reason why the units are others
            path_in(handle, model)
            if others := [f"{name}={getattr(self, name)!r}" for name in self._other_than(handle)]:
                raise InvalidValue(
                    f"this {type(model).__name__} is sharded already, and not as asked for ({', '.join(others)}) but "
                    f"so: {handle}. Call close() of its handle first, or ask for the same"
                )
            _gather_to_generate(handle)
            return handle
        options = {name: value for name, value in self._values() if name not in _OF_THE_OPTIMIZER}
        record = as_precision(self.precision) if isinstance(self.precision, (str, MixedPrecision)) else None
        if record is not None and record.output is None and self._output is not None:
            options["precision"] = replace(record, output=self._output)
        handle = shard(model, **options)
        _gather_to_generate(handle)
        return handle

    def _other_than(self, handle: Handle) -> Iterator[str]:
        """The fields that ask for something else than what the model of the handle has. Those that are left out (except
        the plan) ask for nothing."""
        modules, specs = modules_of(handle.model), [unit.spec for unit in handle.engine.units]
        mesh = handle.engine.collectives.mesh
        if handle.plan != as_plan(self.plan, has_replicas=mesh.has_replicas):
            yield "plan"
        if self.units is not None and boundaries(self.units, modules) != handle.boundaries:
            yield "units"
        if self.precision is not None and not _is_in(self.precision, handle, modules):
            yield "precision"
        if self.mesh is not None and not mesh.is_of(self.mesh):
            yield "mesh"
        if self.keep_gathered != () and kept_gathered(modules, specs, self.keep_gathered) != specs:
            yield "keep_gathered"
        if self.max_transient_bytes not in (None, handle.engine.pool.limit):
            yield "max_transient_bytes"
        ignored = Managed.without(handle.model, self.ignored).ignored
        if self.ignored != () and set(map(plain_name, ignored)) != handle.engine.plain.ignored:
            yield "ignored"

    def take_over(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        """Take over a plain optimizer over parameters of a sharded model, as a ShardedOptimizer. The one that has had
        these parameters before (in an earlier fit, for example) is out of use then; after an error it goes on. One that
        has been taken over already stays as it is. Collective.

        Raises:
            ValueError: parameters are not sharded, or belong to several models; or it is a ShardedOptimizer, and one
                of the record's fields is for it.
        """
        if isinstance(optimizer, ShardedOptimizer):
            asked = [name for name in ("non_finite", "skip_norm_above") if getattr(self, name) is not None]
            if self._scales_otherwise(optimizer):
                asked.insert(0, "loss_scale")
            if asked:
                raise InvalidValue(
                    f"this optimizer is a ShardedOptimizer already: pass {' and '.join(asked)} to it, and leave it out "
                    "of Sharding"
                )
            return optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        handles = {id(handle): handle for handle in map(handle_of, parameters)}
        handle = next(iter(handles.values()), None)
        if len(handles) != 1 or handle is None:
            found, remedy = "parameters of several models", "one optimizer for each model, or one module that has both"
            if not parameters:
                found = "no parameters to train"
                remedy = "call requires_grad_(True) for what is to be trained, before it is made"
            if strangers := sum(handle_of(parameter) is None for parameter in parameters):
                found = f"{strangers} parameters that belong to no sharded model"
                remedy = "prepare (set up) the model before its optimizer or together with it"
            if strangers and len(handles) > 1:
                remedy += ". If they are those of a loss, make the module that has them a part of the model"
            raise InvalidValue(f"{type(optimizer).__name__} has {found}: {remedy}")
        claims = handle.engine.claims
        owners = {id(owner): owner for owner in map(claims.owner_of, parameters) if isinstance(owner, ShardedOptimizer)}
        for owner in owners.values():
            if owner.param_groups is optimizer.param_groups:
                return owner
        options = {name: value for name, value in self._values() if name in _OF_THE_OPTIMIZER}
        if self.loss_scale is None:
            options["loss_scale"] = self._scale
        with _replaced(claims, owners.values()):
            return ShardedOptimizer.from_optimizer(handle, optimizer, **options)

    def _scales_otherwise(self, optimizer: ShardedOptimizer) -> bool:
        """Whether another loss scale is asked for than the optimizer has."""
        if self.loss_scale is None:
            return False
        own = optimizer.scaling.default
        return as_policy(self.loss_scale, has_fp16=False) != (None if own is None else own.policy)

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Fields and values. (`asdict` would copy a mesh.)"""
        return ((name, getattr(self, name)) for name in _arguments())


@contextmanager
def _replaced(claims: Claims, owners: Collection[ShardedOptimizer]) -> Iterator[None]:
    """A block that gives the parameters of these to another optimizer. If it raises, they keep them."""
    for owner in owners:
        claims.release(owner)
    try:
        yield
    except BaseException:
        for owner in owners:
            for other in filter(None, map(claims.owner_of, owner.groups.parameters())):
                claims.release(other)
            claims.claim(owner.groups.parameters(), owner)
        raise
    for owner in owners:
        retire(owner)


def is_retired(optimizer: ShardedOptimizer) -> bool:
    """Whether it is out of use since `take_over` has given its parameters to another one."""
    claims = optimizer.engine.claims
    return all(claims.owner_of(p) is not optimizer for group in optimizer.param_groups for p in group["params"])


def _arguments() -> list[str]:
    """The fields that users set."""
    return [one.name for one in fields(Sharding) if not one.name.startswith("_")]


def _is_in(precision: Precisions, handle: Handle, modules: Modules) -> bool:
    """Whether the sharded model has the units that `shard` would give it in this precision."""
    regions = Rules.of(precision).parameters(modules)
    return all(
        _is_same(unit.spec.precision, precision_for(unit.spec.dtype, regions[id(parameter)].precision))
        for unit in handle.engine.units
        if unit.spec.dtype in FLOATS  # others are quantised, and have no precision
        for parameter in unit.parameters
    )


def _is_same(found: MixedPrecision, asked: MixedPrecision) -> bool:
    """Whether they are equal, apart from the dtype of outputs if none is asked for."""
    return asked == (found if asked.output is not None else replace(found, output=None))


def _gather_to_generate(handle: Handle) -> None:
    """Make `generate` of models of transformers gather the weights once. Sequences end at a different length on each
    rank, so the ranks run forward a different number of times; loops call it as if that were no matter."""
    library = sys.modules.get("transformers.generation.utils")
    for module in handle.model.modules() if library is not None and handle.plan.weights is SHARDED else ():
        if isinstance(module, library.GenerationMixin) and "generate" not in vars(module):  # type: ignore[union-attr]
            handle.engine.hooks.replace(module, "generate", _gathering(module))


def _gathering(module: Any) -> MethodType:
    own, of_class = weakref.ref(module), type(module).generate

    @functools.wraps(of_class)
    def generate(_: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        model: Any = own()
        with nullcontext() if synced_gpus else expect_handle_of(model, "shard").unsharded():
            return of_class(model, *args, synced_gpus=synced_gpus, **kwargs)

    return MethodType(generate, weakref.proxy(module))  # without a cycle of references


def handle_of_model(model: nn.Module) -> Handle | None:
    """The handle of a model; None if it is not sharded."""
    return next((handle for handle in map(handle_of, model.parameters()) if handle is not None), None)


def expect_handle_of(model: nn.Module, what: str) -> Handle:
    """Raises:
    ValueError: the model is not sharded. `what`: the framework's call that shards it, for the message."""
    handle = handle_of_model(model)
    if handle is None:
        raise InvalidValue(f"this {type(model).__name__} is not sharded yet: {what} first")
    return handle


def path_in(handle: Handle, module: nn.Module) -> str:
    """Before the names in a module that is the sharded model ("") or a part of it ("encoder.").

    Raises:
        ValueError: it is neither, and only has parameters of it."""
    module = getattr(module, "_orig_mod", module)
    for path, one in handle.model.named_modules(remove_duplicate=False):
        if one is module:
            return plain_name(f"{path}.") if path else ""
    whole = type(handle.model).__name__
    raise InvalidValue(
        f"this {type(module).__name__} has parameters of a {whole} that is sharded already, and is no part of it: "
        f"close() the handle of that {whole} first; or pass that {whole}"
    )


def is_movable(model: nn.Module) -> bool:
    """Whether `model.to(device)` is allowed: not of a sharded model; `shard` itself moves one on the meta device."""
    return handle_of_model(model) is None and not any(parameter.is_meta for parameter in model.parameters())


def trained_state(handle: Handle, module: nn.Module) -> dict[str, Tensor]:
    """Names and full values of the plain model, or of a part of it, on the CPU, on rank 0: main's values in the dtypes
    from before `shard`, as the framework would find them in a plain model. The other ranks get an empty dict.
    Collective.

    Raises:
        ValueError: the module has parameters of the sharded model, and is no part of it."""
    path = path_in(handle, module)
    units = {id(parameter): unit for unit in handle.engine.units for parameter in unit.parameters}
    named = {plain_name(name): p for name, p in handle.model.named_parameters(remove_duplicate=False)}
    full = handle.full_state_dict(main=True, rank0_only=True, device="cpu")
    state = {name: value for name, value in full.items() if name.startswith(path)}
    cast: dict[int, Tensor] = {}  # tied names must share one tensor, as before the cast
    for name, value in state.items():
        unit = units.get(id(named.get(name)))
        if unit is not None and value.dtype == unit.main.dtype:  # else a `state_dict()` of the model's own has cast it
            state[name] = cast.setdefault(id(value), value.to(unit.spec.dtype))
    return {name.removeprefix(path): value for name, value in state.items()}


def in_own_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under the names of `model.state_dict()`, which has `_orig_mod` where modules inside are compiled."""
    paths = [f"{path}." for path, _ in getattr(model, "_orig_mod", model).named_modules(remove_duplicate=False)]
    own = {plain_name(path): path.replace("_checkpoint_wrapped_module.", "") for path in paths}
    split = {name: name.rpartition(".") for name in state}
    return {own.get(path + dot, path + dot) + leaf: state[name] for name, (path, dot, leaf) in split.items()}


def optimizer_of(parameters: Iterable[nn.Parameter], optimizers: Iterable[ShardedOptimizer]) -> ShardedOptimizer | None:
    """The optimizer whose parameters are exactly these, apart from frozen ones; None if there is none."""
    asked = {id(parameter) for parameter in parameters if parameter.requires_grad}
    for optimizer in optimizers:
        if asked == {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}:
            return optimizer
    return None


def scaling_optimizer(
    optimizers: Callable[[], Iterable[ShardedOptimizer]], call: str, instead: str
) -> ShardedOptimizer | None:
    """The optimizer that scales a loss; None: none of these does. `optimizers` finds those that are alive; `call`,
    `instead`: for the message.

    Raises:
        RuntimeError: optimizers of several models do.
    """

    def found() -> dict[int, ShardedOptimizer]:
        return {id(one.handle): one for one in optimizers() if one.scaling.default is not None}

    scaled = found()
    if len(scaled) > 1:
        scaled.clear()
        gc.collect()  # a model that the program has dropped may still be in a cycle of references
        scaled = found()
    if len(scaled) > 1:
        raise InvalidState(f"{call}: several models have a loss scale, and a loss does not say whose it is: {instead}")
    return next(iter(scaled.values()), None)


def scaled_by(
    optimizer: ShardedOptimizer | None, loss: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AbstractContextManager[Tensor]:
    """Around `backward(*args, **kwargs)` of the tensor that it yields: the loss, scaled as the optimizer does it."""
    if optimizer is None:
        return nullcontext(loss)
    return scaled_loss(optimizer, loss, arguments={"gradient": args[0], **kwargs} if args else kwargs)


@contextmanager
def needing(package: str, extra: str) -> Iterator[None]:
    """Around the imports of a framework.

    Raises:
        NotInstalled: it is not installed; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"zeroshard.integrations.{package} needs {package} ({error.name} is missing): pip install "
            f"'zeroshard[{extra}]'",
            name=error.name,
        ) from error
