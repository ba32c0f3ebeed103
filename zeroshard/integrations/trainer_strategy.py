"""A sharded LightningModule in Lightning's Trainer, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from zeroshard.handle import Handle
from zeroshard.integrations.fabric_strategy import (
    ForEitherPackage,
    expect_no_ddp_options,
    in_precision_of,
    load_into,
    with_context_of,
)
from zeroshard.integrations.sharding import (
    Sharding,
    expect_handle_of,
    handle_of_model,
    in_own_names,
    is_movable,
    scaled_by,
    trained_state,
)
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.placement import Plan

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_Launcher: Any = object  # to type checkers they have all that those of Lightning have
_Plugin: Any = object
_OF_DDP = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class InTrainer(ForEitherPackage):
    """A `DDPStrategy` of the Trainer that shards."""

    of_precision: ClassVar[Any]
    """The class of the precision plugin."""
    of_launcher: ClassVar[Any]
    """The class of the launcher where Lightning itself starts the processes."""
    optimizers: list[Any]

    def __init__(self, sharding: Sharding | Mapping[str, Any] | Plan | str | int = "zero3", **kwargs: Any) -> None:
        self.sharding = Sharding.of(sharding)
        super().__init__(**kwargs)
        expect_no_ddp_options({**self._ddp_kwargs, **{name: kwargs[name] for name in _OF_DDP if name in kwargs}})

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled (programs keep the strategy with their settings): without a module that is sharded,
        and its optimizers, which cannot be."""
        state = dict(vars(self))
        if self._lightning_module is not None and handle_of_model(self._lightning_module) is not None:
            state.update(_lightning_module=None, _model=None, _launcher=None, _optimizers=[], _lightning_optimizers=[])
            state["lr_scheduler_configs"] = []
        return state

    @property
    def handle(self) -> Handle:
        """The handle of the LightningModule.

        Raises:
            ValueError: it is not sharded yet.
        """
        model = nn.Module() if self.lightning_module is None else self.lightning_module
        return expect_handle_of(model, "trainer.fit(model), or validate or test,")

    @property
    def precision_plugin(self) -> Any:
        """The requested precision, for other code of Lightning to read; the engine does the casts."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self.sharding = in_precision_of(self.sharding, plugin, self.library)
        self._precision_plugin = (
            None if plugin is None else with_context_of(self.of_precision(plugin.precision), plugin)
        )

    # Setting up, and down ----------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self.launcher
        if isinstance(launcher, self.library.strategies.launchers._MultiProcessingLauncher):
            self._launcher = self.of_launcher(self, launcher._start_method)

    def setup(self, trainer: Any) -> None:
        """Configure the optimizers over the plain module, shard it, and take the optimizers over. Collective."""
        self.accelerator.setup(trainer)
        is_fit, module = trainer.state.fn == self.library.trainer.states.TrainerFn.FITTING, self.lightning_module
        if is_fit and self._layer_sync and handle_of_model(module) is None:
            self.model = module = self._layer_sync.apply(module)
        if is_movable(module):
            self.model_to_device()
        self.optimizers = []
        if is_fit:
            self.setup_optimizers(trainer)
        is_new = handle_of_model(module) is None
        handle = self.sharding.shard(module)
        if is_new:
            for name in _STEPS[0 if module.automatic_optimization else 1 :]:  # a manual training_step contains steps
                if self.library.utilities.model_helpers.is_overridden(name, module):
                    handle.register_forward_method(module, name)
        unused = self.library.core.optimizer._MockOptimizer  # if `configure_optimizers` returns None
        self.optimizers = [one if isinstance(one, unused) else self.sharding.take_over(one) for one in self.optimizers]
        self.setup_precision_plugin()

    def on_exception(self, exception: BaseException) -> None:
        """Abandon the handle, so that this rank does not wait for other ranks any more."""
        handle = handle_of_model(self.lightning_module) if self.lightning_module is not None else None
        if handle is not None and handle.model is self.lightning_module:  # else it is another module's, which is well
            handle.abandon()

    def teardown(self) -> None:
        """Tear down, without moving the module to the CPU as Lightning would."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # The loop ----------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A block in which backward passes only accumulate."""
        with self.handle.no_sync():
            yield

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """A step. Where Lightning passes over the data without backward (to average the statistics of batch norms), it
        steps once all the same, and is to do nothing: a plain optimizer applies the last gradients again."""
        if self.lightning_module.trainer.fit_loop._skip_backward:
            optimizer.zero_grad()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """If there is no optimizer, nobody has used the gradients of the last step, and they end here."""
        without = not any(isinstance(one, ShardedOptimizer) for one in self.optimizers)
        if without and self.lightning_module.automatic_optimization and self.handle.engine.has_gradients(reduced=True):
            self.lightning_module.zero_grad()

    # Checkpoints: Lightning's own files, which rank 0 writes and every strategy can load --------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint waits for `setup`: there must be memory for its values. (Lightning forgets the argument
        `weights_only` then.)"""
        module = self.lightning_module
        return handle_of_model(module) is None and any(parameter.is_meta for parameter in module.parameters())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the plain module, on rank 0 only. Collective."""
        handle = handle_of_model(self.lightning_module)
        if handle is None:
            return dict(super().lightning_module_state_dict())
        return in_own_names(self.lightning_module, trained_state(handle, self.lightning_module))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        handle, module = handle_of_model(self.lightning_module), self.lightning_module
        if handle is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            load_into(handle, module, checkpoint["state_dict"], strict=strict, is_first=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state dict in the form of a plain optimizer of the class, on rank 0 only. Collective."""
        inner = _inner(optimizer, self.library)
        return {} if inner is None else inner.state_dict(rank0_only=True, device="cpu")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if (inner := _inner(optimizer, self.library)) is not None:
                inner.load_state_dict(state if self.is_global_zero else None, broadcast_from_rank0=True)


class ForkedRanks(_Launcher):
    """A launcher that forks or spawns the ranks (`start_method=`), as in a notebook."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        """The state dict of the module goes back to the parent process, so the module must be plain. Collective."""
        handle = handle_of_model(trainer.lightning_module)
        if handle is not None:
            handle.close(device="cpu")
        return super()._collect_rank_zero_results(trainer, results)


class EnginePrecision(_Plugin):
    """A precision plugin that casts nothing (the engine does), and clips and scales through the optimizer."""

    library: ClassVar[Any]

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """The module's own `backward` of the loss, scaled if there is a loss scale. A loss belongs to all optimizers
        of the module."""
        inner = [
            one
            for optimizer in model.trainer.strategy.optimizers
            if (one := _inner(optimizer, self.library)) is not None
        ]
        with scaled_by(next((one for one in inner if one.scaling.default), None), tensor, args, kwargs) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if (inner := _inner(optimizer, self.library)) is not None:
            inner.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        if (inner := _inner(optimizer, self.library)) is not None:
            inner.clip_grad_value_(float(clip_val))


def _inner(optimizer: Any, library: Any) -> ShardedOptimizer | None:
    """None: what Lightning uses if `configure_optimizers` returns None."""
    inner = optimizer.optimizer if isinstance(optimizer, library.core.optimizer.LightningOptimizer) else optimizer
    return inner if isinstance(inner, ShardedOptimizer) else None
