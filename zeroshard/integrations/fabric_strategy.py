"""Sharded models in Lightning's Fabric, of the package `lightning` or `lightning_fabric`; and the common parts of all
strategies for Lightning."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard.comm.joining import init
from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.handle import Handle
from zeroshard.integrations.sharding import (
    Sharding,
    expect_handle_of,
    handle_of_model,
    in_own_names,
    is_movable,
    path_in,
    scaled_by,
    scaling_optimizer,
    trained_state,
)
from zeroshard.loss_scale import DynamicScale
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.placement import Plan

NAMES = {"zeroshard": "zero3", **{f"zeroshard_{plan}": plan for plan in ("ddp", "zero1", "zero2", "zero3")}}
"""Names of strategies -> plan."""


_PLAIN = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
_OTHER = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_Strategy: Any = object  # to type checkers it has all that a strategy of Lightning has


class ForEitherPackage(_Strategy):
    """What strategies for the Trainer and for Fabric share. It comes before a `DDPStrategy` of a package."""

    library: ClassVar[Any]
    """The package's module for the Trainer or for Fabric."""

    def __repr__(self) -> str:
        """(Lightning shows it when it refuses the object: one that was made for the other package.)"""
        own, name = self.library.__name__, "FabricStrategy" if isinstance(self, InFabric) else "ShardedStrategy"
        other = {**_OTHER, **{value: key for key, value in _OTHER.items()}}[own]
        module = "lightning" if other in _OTHER else "pytorch_lightning"
        return f"<{type(self).__name__} for {own}; the one for {other} is zeroshard.integrations.{module}.{name}>"

    def setup_environment(self) -> None:
        super().setup_environment()
        init()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, plan in NAMES.items():
            strategy_registry.register(name, cls, description=f"zeroshard, plan {plan}", override=True, sharding=plan)


class InFabric(ForEitherPackage):
    """A `DDPStrategy` of Fabric that shards."""

    def __init__(self, sharding: Sharding | Mapping[str, Any] | Plan | str | int = "zero3", **kwargs: Any) -> None:
        self.sharding = Sharding.of(sharding)
        super().__init__(**kwargs)
        expect_no_ddp_options(self._ddp_kwargs)
        self._backward_sync_control = _NoSync()
        self._optimizers: list[weakref.ref[ShardedOptimizer]] = []

    @property
    def precision(self) -> Any:
        """The requested precision, for other code of Lightning to read; the engine does the casts."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        self.sharding = in_precision_of(self.sharding, precision, self.library)
        self._precision = None
        if precision is not None:
            self._precision = with_context_of(self.library.plugins.precision.Precision(), precision)
            self._precision.precision = precision.precision

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module, unless it is sharded, or on the meta device (`shard` moves it then)."""
        if is_movable(module):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module in place. Collective."""
        self.sharding.shard(module)
        return _Called(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        """Take the optimizer over, with its state. Collective."""
        sharded = self.sharding.take_over(optimizer)
        self._optimizers = [*(one for one in self._optimizers if one() is not None), weakref.ref(sharded)]
        return sharded

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward of the loss, scaled if there is a loss scale.

        Raises:
            RuntimeError: several models have a loss scale, and `module` is None.
        """
        handle = None if module is None else expect_handle_of(module, "fabric.setup(model)")

        def found() -> list[ShardedOptimizer]:
            living = [one for reference in self._optimizers if (one := reference()) is not None]
            return [one for one in living if handle is None or one.handle is handle]

        optimizer = scaling_optimizer(found, "fabric.backward", "fabric.backward(loss, model=model)")
        with scaled_by(optimizer, tensor, args, kwargs) as scaled:
            super().backward(scaled, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the norm of the next step's gradient. Collective."""
        return optimizer.clip_grad_norm_(float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: ShardedOptimizer, clip_val: float) -> None:
        """Clip the elements of the next step's gradient."""
        optimizer.clip_grad_value_(float(clip_val))

    # Checkpoints: Lightning's own files, which rank 0 writes ----------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state dict of the plain model, on rank 0 only. Collective."""
        module = _plain(module)
        handle = handle_of_model(module)
        if handle is None:
            return dict(super().get_module_state_dict(module))
        return in_own_names(module, trained_state(handle, module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        module = _plain(module)
        handle = handle_of_model(module)
        if handle is None:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            load_into(handle, module, state_dict, strict=strict, is_first=self.is_global_zero)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state dict in the form of a plain optimizer of the class, on rank 0 only. Collective."""
        if not isinstance(optimizer, ShardedOptimizer):  # one that has not been set up
            return dict(super().get_optimizer_state(optimizer))
        return optimizer.state_dict(rank0_only=True, device="cpu")


class _Called(nn.Module):
    """Another object than the module, and nothing else. Fabric then sends methods that are marked as forward methods
    (and the steps of a LightningModule) through a call of the module, where weights are gathered and outputs cast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _plain(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Called) else module


class _NoSync:
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return expect_handle_of(module, "fabric.setup(model)").no_sync() if enabled else nullcontext()


def expect_no_ddp_options(found: Mapping[str, Any]) -> None:
    """Raises:
    TypeError: options of DistributedDataParallel were given. (LightningCLI passes all of them, with their defaults.)"""
    usual = inspect.signature(DistributedDataParallel).parameters
    asked = [name for name, value in found.items() if value != getattr(usual.get(name), "default", None)]
    if asked:
        raise InvalidType(
            f"this strategy has no {', '.join(asked)}: there is no DistributedDataParallel under it; what is about "
            'sharding is a field of Sharding, as in strategy=ShardedStrategy(Sharding("zero3", units=Block))'
        )


def in_precision_of(sharding: Sharding, plugin: Any, library: Any) -> Sharding:
    """The sharding with the precision (and loss scale) of Lightning's plugin, which is not used itself.

    Raises:
        ValueError: a plugin that is not supported; or both the plugin and `sharding` set a precision.
    """
    known = [getattr(library.plugins.precision, name) for name in _PLAIN]
    if plugin is None or (type(plugin) in known and plugin.precision == "32-true"):
        return sharding
    if type(plugin) not in known:
        raise InvalidValue(
            f"the precision plugin {type(plugin).__name__} is not supported under zeroshard: use precision="
            "'bf16-mixed', '16-mixed', 'bf16-true', '16-true', '32-true' or '64-true', or Sharding(precision=...)"
        )
    sharding = sharding.in_precision(plugin.precision, "precision=", _output_of(plugin))
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or sharding.loss_scale is not None:
        return sharding
    scale = DynamicScale(
        init=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )
    # Lightning has the usual one without being asked.
    return replace(sharding, _scale=scale) if scale == DynamicScale() else replace(sharding, loss_scale=scale)


def with_context_of(engine: Any, plugin: Any) -> Any:
    """Lightning's plugins of the "true" precisions set torch's default dtype around a step, for tensors that the step
    makes (noise, masks). `engine`: the plugin that takes the place of `plugin`; it then does so, too."""
    if plugin.precision.endswith("-true"):
        engine.forward_context = plugin.forward_context
    return engine


def _output_of(plugin: Any) -> torch.dtype | None:
    """The dtype to which outputs are converted; None: they are not."""
    if plugin.precision.endswith("-mixed"):  # the Trainer's plugin converts nothing, but losses are fp32 under autocast
        return torch.float32
    converted: torch.dtype = plugin.convert_output(torch.empty(0, dtype=torch.float16, device="cpu")).dtype
    return None if converted == torch.float16 else converted


def load_into(handle: Handle, module: nn.Module, state: Mapping[str, Tensor], *, strict: bool, is_first: bool) -> None:
    """Load rank 0's state into the shards of all ranks. Collective.

    Raises:
        ValueError: the module is a part of the sharded model.
    """
    if path := path_in(handle, module):
        raise InvalidValue(
            f"the module {path[:-1]} is a part of a sharded {type(handle.model).__name__}, which is loaded as a whole: "
            "read the file, and call module.load_state_dict(state) of this part on every rank, inside `with "
            "zeroshard.handle.handle_of(next(module.parameters())).unsharded(write=True):`"
        )
    handle.load_full_state_dict(dict(state) if is_first else None, strict=strict, broadcast_from_rank0=True)
