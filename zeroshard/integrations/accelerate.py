"""`Accelerator`: a subclass of Accelerate's that shards models with zeroshard.

accelerator = Accelerator(sharding=Sharding(plan="zero3", units=Block))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from zeroshard.checkpoint import CheckpointError, load, save
from zeroshard.comm.joining import init
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.handle import Handle, handle_of
from zeroshard.integrations.sharding import (
    Sharding,
    expect_handle_of,
    handle_of_model,
    is_movable,
    is_retired,
    needing,
    optimizer_of,
    scaling_optimizer,
    trained_state,
)
from zeroshard.loss_scale import DynamicScale
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.placement import Plan

with needing("accelerate", "accelerate"):
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState
    from accelerate.utils import DDPCommunicationHookType, DistributedType

FOLDER = "zeroshard"
"""The subfolders that `save_state` adds, one for each model: zeroshard, zeroshard_1, ..."""


_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """Accelerate's class with these differences: `prepare` shards models in place and takes over their optimizers;
    zeroshard reduces, clips and scales gradients; in `save_state` every rank writes its part.

    Args:
        sharding: a `Sharding`, a plan ("zero3"), or a dict of the fields of `Sharding`.
        args, kwargs: of Accelerate's class. `mixed_precision` "bf16" or "fp16" becomes the `precision` of `shard`:
            16-bit weights with an fp32 master, without autocast.

    Raises:
        ValueError: another sharding plugin is configured (FSDP, DeepSpeed, Megatron-LM, tensor parallelism); fp8; a
            device other than CPU and CUDA; a communication hook of DDP; autocast that is disabled.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, sharding: Sharding | Mapping[str, Any] | Plan | str | int = "zero3", **kwargs: Any):
        sharding = Sharding.of(sharding)
        expect_alone(kwargs)  # before accelerate keeps the plugin for the process, and asks for its package
        with _forgotten_if_refused():
            super().__init__(*args, **kwargs)
            expect_alone(kwargs, self.distributed_type)
            if self.mixed_precision not in ("no", "bf16", "fp16"):
                raise InvalidValue(
                    f"Accelerator: mixed_precision must be 'no', 'bf16' or 'fp16', found {self.mixed_precision!r}"
                )
            _expect_known(self)
            _expect_one_folder(self)
            self.sharding = sharding.in_precision(self.mixed_precision, "mixed_precision= (a Trainer's bf16=, fp16=)")
        init()
        self.scaler, self.native_amp = None, False  # the engine casts, and scales losses

    def handle_of(self, model: nn.Module) -> Handle:
        """The handle of a prepared model.

        Raises:
            ValueError: the model has not been prepared.
        """
        return expect_handle_of(model, "accelerator.prepare(model)")

    # Preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like Accelerate's; the arguments may be in any order. Collective."""
        models_first = sorted(range(len(args)), key=lambda index: not isinstance(args[index], nn.Module))
        places = None if device_placement is None else [device_placement[index] for index in models_first]
        result = super().prepare(*[args[index] for index in models_first], device_placement=places)
        if len(args) == 1:
            return result
        return tuple(result[models_first.index(index)] for index in range(len(args)))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move the model to its device, compile it if requested, and shard it (also for evaluation, as it may be too
        large for one rank). Collective."""
        if not is_movable(model):
            device_placement = False
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        sharded = self.unwrap_model(prepared, keep_torch_compile=False)
        handle = self.sharding.shard(sharded)
        if not hasattr(sharded, "no_sync"):
            handle.engine.hooks.replace(sharded, "no_sync", _refuse_no_sync)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Take the optimizer over, with its state. One that has had these parameters before is out of use, and is
        forgotten. Collective.

        Raises:
            RuntimeError: it has been prepared before, and the handle of its model has been closed since.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            if isinstance(optimizer, _Optimizer) and optimizer.optimizer.engine.life.is_over:
                raise InvalidState(
                    "accelerator.prepare: the handle of this optimizer's model has been closed, and its state is gone: "
                    "make a new one (a Trainer does if its `optimizer` and `lr_scheduler` are set to None before)"
                )
            return super().prepare_optimizer(optimizer)
        sharded = self._sharding_of(optimizer).take_over(optimizer)
        for known in self._optimizers:
            if known.optimizer is sharded:
                return known
        prepared = _Optimizer(sharded, optimizer)
        self._optimizers[:] = [*(one for one in self._optimizers if not is_retired(one.optimizer)), prepared]
        return prepared

    def _sharding_of(self, optimizer: torch.optim.Optimizer) -> Sharding:
        """The sharding, with the loss scale of GradScalerKwargs if there are fp16 weights: else Accelerate has none."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if self.scaler_handler is None or self.sharding.loss_scale is not None:
            return self.sharding
        has_fp16 = any(parameter.dtype == torch.float16 for parameter in parameters)
        return _scaled_by(self.sharding, self.scaler_handler.to_kwargs()) if has_fp16 else self.sharding

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler: it steps when its optimizer has stepped."""
        own = getattr(scheduler, "optimizer", None)
        for optimizer in self._optimizers:
            if own is not None and own is optimizer.taken_over:
                scheduler.optimizer = optimizer.optimizer  # so that Accelerate finds it among the prepared ones
        prepared = super().prepare_scheduler(scheduler)
        if own is not None:
            scheduler.optimizer = own  # which counts its steps; torch warns of an optimizer that does not
        return prepared

    # The loop ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of the loss, divided by the number of micro-batches, and scaled if there is a loss scale.

        Raises:
            RuntimeError: several models have a loss scale.
        """
        instead = "call optimizer.optimizer.backward(loss) of that model's optimizer"
        optimizer = scaling_optimizer(self._sharded_optimizers, "accelerator.backward", instead)
        loss = loss / self.gradient_accumulation_steps
        if optimizer is not None:
            optimizer.backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A block in which backward passes only accumulate: `handle.no_sync()`."""
        with self.handle_of(model).no_sync() if _has_weights(model) else nullcontext():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """A block in which backward passes reduce, with what was accumulated before, also inside of `no_sync`."""
        if not _has_weights(model):  # a loss, for example
            yield
            return
        reducer = expect_handle_of(model, "accelerator.prepare(model)").engine.reducer
        before = reducer.local
        reducer.accumulate_locally(frozenset())
        try:
            yield
        finally:
            reducer.local = before

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the gradient norm of these parameters: of one prepared optimizer, of several, or a part. Collective.

        Raises:
            RuntimeError: between the micro-batches of one step; or losses are scaled, and these are not all parameters
                of one optimizer.
        """
        parameters = _listed(parameters)
        optimizer = self._clipped(parameters, "clip_grad_norm_")
        if optimizer is None:
            norm: Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        return optimizer.clip_grad_norm_(float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip the gradient elements of these parameters; errors as of `clip_grad_norm_`."""
        parameters = _listed(parameters)
        optimizer = self._clipped(parameters, "clip_grad_value_")
        if optimizer is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            optimizer.clip_grad_value_(float(clip_value))

    def _clipped(self, parameters: list[Any], what: str) -> ShardedOptimizer | None:
        """The optimizer of these parameters, whose gradients are complete. None: torch clips them, in `p.grad`."""
        if not self.sync_gradients and any(handle_of(parameter) is not None for parameter in parameters):
            raise InvalidState(
                f"accelerator.{what}: more micro-batches of this step follow, and its gradients are not reduced yet: "
                "write `if accelerator.sync_gradients:` before it"
            )
        return optimizer_of(parameters, self._sharded_optimizers())

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """`handle.join()` of the models if `even_batches` is False; loaders of map-style datasets then yield uneven
        batches. `joinables` may contain their optimizers, too."""
        loaders = [one for one in self._dataloaders if hasattr(getattr(one, "batch_sampler", None), "even_batches")]
        before = [loader.batch_sampler.even_batches for loader in loaders]
        even = self.even_batches if even_batches is None else even_batches
        if even_batches is not None and any(isinstance(one.dataset, IterableDataset) for one in self._dataloaders):
            words = "even_batches= is for map-style datasets: loaders of iterable ones yield the batches that they did"
            warnings.warn(f"join_uneven_inputs: {words}", stacklevel=3)
        try:
            for loader in loaders:
                loader.batch_sampler.even_batches = even
            with _joined({} if even else {id(one): one for one in map(self._handle_to_join, joinables)}):
                yield
        finally:
            for loader, value in zip(loaders, before, strict=True):
                loader.batch_sampler.even_batches = value

    def _handle_to_join(self, joinable: Any) -> Handle:
        return joinable.optimizer.handle if isinstance(joinable, _Optimizer) else self.handle_of(joinable)

    # Saving ------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The state of the plain model, or of a module in it, on rank 0, on the CPU, in the dtypes from before
        `prepare`; empty on the other ranks. Collective."""
        if (handle := handle_of_model(model)) is not None:
            return trained_state(handle, model)
        state: dict[str, Tensor] = super().get_state_dict(model, unwrap)
        return state

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save schedulers, samplers, random state and registered objects as Accelerate does, and models and optimizers
        in the subfolder `zeroshard`, which can be loaded under any plan and number of ranks. Collective."""
        _expect_one_folder(self)  # again: a script may have set it since
        with self._without_models() as parts:
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (handle, optimizers) in enumerate(parts):
            save(_folder(location, number), handle, optimizers, step=0)
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` has saved, on any number of ranks. Collective.

        Raises:
            CheckpointError: the folder was not saved by this class.
        """
        found: list[str] = []
        if load_kwargs is not None:  # (there since Accelerate 1.7)
            kwargs["load_kwargs"] = load_kwargs
        with self._without_models() as parts:

            def begins(models: object, folder: str) -> None:
                expect = partial(_expect_parts, folder, len(parts))
                for handle, _ in parts[:1]:  # a rank that raised alone would leave the others waiting in `load`
                    together(handle.engine.collectives, "load_state", expect, errors=(CheckpointError,))
                found.append(folder)

            hook = super().register_load_state_pre_hook(begins)
            try:
                super().load_state(input_dir, **kwargs)
            finally:
                hook.remove()
        for number, (handle, optimizers) in enumerate(parts):
            load(_folder(found[0], number), handle, optimizers)

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        raise InvalidState(
            "hooks of save_state get the full weights of the models, which nobody holds here: save what the hook "
            "saves in an object of its own, by register_for_checkpointing"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    @contextmanager
    def _without_models(self) -> Iterator[list[tuple[Handle, list[ShardedOptimizer]]]]:
        """A scope in which Accelerate has no models (but those without parameters, losses for example) and no
        optimizers. Yields (handle, optimizers) of each model."""
        models, optimizers = list(self._models), list(self._optimizers)
        handles = {id(handle): handle for handle in map(self.handle_of, filter(_has_weights, models))}
        own = self._sharded_optimizers()
        self._models, self._optimizers = [model for model in models if not _has_weights(model)], []
        try:
            yield [(handle, [one for one in own if one.handle is handle]) for handle in handles.values()]
        finally:
            self._models, self._optimizers = models, optimizers

    def _sharded_optimizers(self) -> list[ShardedOptimizer]:
        return [optimizer.optimizer for optimizer in self._optimizers]


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around a ShardedOptimizer. `taken_over`: the plain optimizer that it has replaced."""

    def __init__(self, optimizer: ShardedOptimizer, taken_over: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)  # its state must stay on main's device
        self.taken_over = taken_over

    def step(self, closure: Any = None) -> Any:
        """Step, except between the micro-batches of one step. `step_was_skipped` is then the same on all ranks."""
        if not self.gradient_state.sync_gradients:
            return None
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._is_overflow = not result.applied and result.grad_norm != 0.0  # 0: no gradients, which skips nothing
        return result


def _has_weights(model: nn.Module) -> bool:
    return any(True for _ in model.parameters())


def _refuse_no_sync() -> NoReturn:
    """The method that DistributedDataParallel has, and that LocalSGD calls."""
    raise InvalidState(
        "model.no_sync(): this model is not wrapped in DistributedDataParallel: write `with "
        "accelerator.no_sync(model):`, or accumulate(model). accelerate.LocalSGD is not supported, as the weights of "
        "its ranks differ: leave it out (enabled=False)"
    )


@contextmanager
def _forgotten_if_refused() -> Iterator[None]:
    """A block that sets accelerate up. After an error it forgets the precision and the like, which it keeps for the
    process: else an Accelerator that is made as the message says would have them, or be refused for them."""
    was_set_up = bool(AcceleratorState._shared_state)
    try:
        yield
    except BaseException:
        if not was_set_up:
            AcceleratorState._reset_state()
        raise


def expect_alone(arguments: Mapping[str, Any], kind: DistributedType | None = None) -> None:
    """Check the arguments of an Accelerator, and what `accelerate launch` has left in the environment.

    Raises:
        ValueError: accelerate is to shard, or has set itself up for it (`kind`).
    """
    others = [
        name
        for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM")
        if _is_asked_for(name)
        or any(arguments.get(f"{name.lower()}_{plugin}") is not None for plugin in ("plugin", "plugins"))
    ]
    if others or kind not in (None, *_KINDS):
        raise InvalidValue(
            "Accelerator: zeroshard shards the model here, and accelerate is set up for "
            f"{', '.join(others) or kind}: leave out its plugin (the argument, "
            "ACCELERATE_USE_... in the environment, the configuration file)"
        )
    if arguments.get("parallelism_config") is not None or _is_asked_for("PARALLELISM_CONFIG"):
        raise InvalidValue("Accelerator: parallelism_config is not supported: pass Sharding(mesh=...)")


def _is_asked_for(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


_WEIGHTS_AND_WIRE = {"no": ("float32", "bfloat16"), "bf16": ("bfloat16", "bfloat16"), "fp16": ("float16", "float16")}
"""`mixed_precision` -> dtypes of the weights, and of gradients that are sent in 16 bits."""


def _expect_known(accelerator: accelerate.Accelerator) -> None:
    """Raises:
    ValueError: Accelerate's handlers ask for what the engine does not do."""
    ddp, autocast = accelerator.ddp_handler, accelerator.autocast_handler
    if ddp is not None and not ddp.comm_hook == ddp.comm_wrapper == DDPCommunicationHookType.NO:
        weights, sent = _WEIGHTS_AND_WIRE[accelerator.mixed_precision]
        raise InvalidValue(
            f"Accelerator: DistributedDataParallelKwargs(comm_hook={str(ddp.comm_hook)!r}): the engine reduces "
            "gradients, without hooks: to reduce them in 16 bits pass "
            f"Sharding(precision=MixedPrecision(param=torch.{weights}, reduce=torch.{sent}))"
        )
    if autocast is not None and not autocast.enabled and accelerator.mixed_precision != "no":
        raise InvalidValue(
            f"Accelerator: mixed_precision={accelerator.mixed_precision!r} with AutocastKwargs(enabled=False): 16-bit "
            "weights take the place of autocast: leave mixed_precision out to compute in fp32"
        )


def _expect_one_folder(accelerator: accelerate.Accelerator) -> None:
    """Raises:
    ValueError: each node is to have a checkpoint of its own."""
    if accelerator.project_configuration.save_on_each_node:
        raise InvalidValue(
            "Accelerator: ProjectConfiguration(save_on_each_node=True) is not supported under zeroshard: all ranks "
            "write into one folder: use a file system that all nodes see"
        )


def _joined(handles: Mapping[int, Handle]) -> AbstractContextManager[None]:
    first, *others = handles.values() or [None]
    return nullcontext() if first is None else first.join(*others)


def _folder(location: str | Path, number: int) -> Path:
    return Path(location) / (FOLDER if number == 0 else f"{FOLDER}_{number}")


def _expect_parts(location: str, count: int) -> None:
    """Raises:
    CheckpointError: a folder of `save_state` is not there; nothing has been loaded yet."""
    if missing := [_folder(location, number) for number in range(count) if not _folder(location, number).is_dir()]:
        raise CheckpointError(
            f"load_state: there is no folder {missing[0]}. save_state of zeroshard's Accelerator writes one for each "
            f"prepared model (here {count}): prepare the models that were saved. Of a folder of plain Accelerate load "
            "the weights: accelerator.handle_of(model).load_full_state_dict(state), with state = "
            "safetensors.torch.load_file('.../model.safetensors')"
        )


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _scaled_by(sharding: Sharding, options: Mapping[str, Any]) -> Sharding:
    """The sharding with the loss scale of Accelerate's GradScalerKwargs."""
    if not options.get("enabled", True):
        return replace(sharding, loss_scale=1.0)
    names = {"init": "init_scale", **{name: name for name in ("growth_factor", "backoff_factor", "growth_interval")}}
    found = {ours: options[theirs] for ours, theirs in names.items() if theirs in options}
    return replace(sharding, loss_scale=DynamicScale(**found))
