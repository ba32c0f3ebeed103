"""`ShardedTrainer`: the Trainer of transformers with a sharded model; and the mixin for any other Trainer class.

trainer = ShardedTrainer(model, args, train_dataset=data, sharding=Sharding("zero3", units=LlamaDecoderLayer))

class ShardedSFTTrainer(ShardedTrainerMixin, trl.SFTTrainer): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import load, save
from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.handle import Handle
from zeroshard.integrations.accelerate import FOLDER, Accelerator, expect_alone
from zeroshard.integrations.sharding import Sharding, expect_handle_of, handle_of_model, is_movable, needing
from zeroshard.model.unit_spec import plain_name
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.placement import Plan

with needing("transformers", "transformers"):
    import transformers


@dataclass
class ZeroshardArguments:
    """`Sharding` as options of a command line: `HfArgumentParser((TrainingArguments, ZeroshardArguments))`."""

    plan: str = field(default="zero3", metadata={"help": "what is sharded: ddp, zero1, zero2 or zero3"})
    units: list[str] | None = field(
        default=None, metadata={"help": "names of the classes of modules that are gathered together: LlamaDecoderLayer"}
    )
    precision: str | None = field(
        default=None, metadata={"help": "fp32, bf16, fp16 or bf16-remainder; or leave it out and use --bf16 or --fp16"}
    )
    keep_gathered: list[str] | None = field(
        default=None, metadata={"help": "names of units (with *) that keep their weights from forward to backward"}
    )
    max_transient_bytes: int | None = field(
        default=None, metadata={"help": "the most that full-size buffers may take on one rank"}
    )
    skip_norm_above: float | None = field(
        default=None, metadata={"help": "skip steps whose gradient norm is larger than this"}
    )

    def sharding(self) -> Sharding:
        """The options as a `Sharding`."""
        return Sharding(
            plan=self.plan,
            units=self.units,
            precision=self.precision,
            keep_gathered=self.keep_gathered or (),
            max_transient_bytes=self.max_transient_bytes,
            skip_norm_above=self.skip_norm_above,
        )


class ShardedTrainerMixin:
    """A mixin for Trainer classes; put it first in the list of bases. The model is sharded in place when training or
    evaluation begins; the Trainer's optimizer is taken over.

    Args:
        sharding: a `Sharding`, a plan ("zero3"), a dict of the fields of `Sharding`, or `ZeroshardArguments`.
        args, kwargs: of the Trainer. `bf16=True` and `fp16=True` become the `precision` of `shard`.

    Raises:
        ValueError: an argument of the Trainer does not work with sharding; the message says what to write instead.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Accelerator
    state: Any
    callback_handler: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1 : cls.__mro__.index(ShardedTrainerMixin)]
        if any(issubclass(one, transformers.Trainer) and not issubclass(one, ShardedTrainerMixin) for one in before):
            raise InvalidType(
                f"{cls.__name__}: ShardedTrainerMixin comes behind a Trainer, which would train without it: write "
                f"class {cls.__name__}(ShardedTrainerMixin, Trainer)"
            )

    def __init__(
        self,
        *args: Any,
        sharding: Sharding | ZeroshardArguments | Mapping[str, Any] | Plan | str | int = "zero3",
        **kwargs: Any,
    ) -> None:
        self.sharding = sharding.sharding() if isinstance(sharding, ZeroshardArguments) else Sharding.of(sharding)
        self._accelerator_arguments: dict[str, Any] = {}
        super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks
        callbacks[:] = [_StopTogether(one) if getattr(one, "jit_manager", None) else one for one in callbacks]

    @property
    def handle(self) -> Handle:
        """The handle of the model.

        Raises:
            ValueError: it is not sharded yet.
        """
        return expect_handle_of(self.model, "call trainer.train(), or trainer.evaluate(),")

    # Accelerate does most of the work ----------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        self._accelerator_arguments = arguments
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the Trainer's accelerator by one of our class, with the same arguments. What is not supported is
        refused before: the Trainer's own would set itself up for it, for the rest of the process."""
        expect_supported(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = Accelerator(sharding=self.sharding, **self._accelerator_arguments)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback. TRL's `SyncRefModelCallback` gets both models with their weights in full."""
        if isinstance(callback, transformers.TrainerCallback) and hasattr(callback, "sync_target_model"):
            callback.sync_target_model = partial(_in_full, callback.sync_target_model)
        super().add_callback(callback)  # type: ignore[misc]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if is_movable(model):  # else it is there, by `shard` or an earlier Trainer; or `shard` gives it values there
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. An evaluator of sentence-transformers calls the model as often as a rank has texts, so the weights
        are gathered once."""
        handle = handle_of_model(self.model) if getattr(self, "evaluator", None) is not None else None
        with nullcontext() if handle is None else handle.unsharded():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    # Saving ------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `save_pretrained` does, on rank 0, in the dtype from before sharding. Collective."""
        if handle_of_model(self.model) is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        state = self.accelerator.get_state_dict(self.model)
        with self._read_by_a_save():
            if self.args.should_save:
                with _showing(self.model, state):
                    self._save(folder, state_dict=state)  # type: ignore[attr-defined]  # it empties `state`
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _read_by_a_save(self) -> Any:
        """A block in which one rank may save. PEFT reads the names in `state_dict()` of each of `modules_to_save`, and
        prompts by a forward of their encoder. A Trainer with a `_save` of its own may call the model: that of
        sentence-transformers shows an example on its model card. Collective."""
        if type(self)._save is not transformers.Trainer._save:  # type: ignore[attr-defined]
            return self.handle.unsharded()
        parts: list[Any] = [module for module in self.model.modules() if hasattr(module, "adapter_state_dict")]
        parts += [module.prompt_encoder for module in self.model.modules() if hasattr(module, "prompt_encoder")]
        return self.handle.unsharded(*parts) if parts else nullcontext()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save weights, optimizer and scheduler, each rank its part, in the subfolder `zeroshard`."""
        extra = {"scheduler": self.lr_scheduler}
        save(Path(output_dir) / FOLDER, self.handle, self._sharded(), step=self.state.global_step, extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights, unless the subfolder `zeroshard` exists: then they are loaded with the optimizer."""
        if (Path(resume_from_checkpoint) / FOLDER).is_dir():
            return
        given = () if model is None else (model,)  # not every Trainer takes it
        with _writable(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, *given)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "") / FOLDER
        if checkpoint is None or not folder.is_dir():  # saved by a plain Trainer
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load(folder, self.handle, self._sharded(), extra={"scheduler": self.lr_scheduler})

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Go on with the loss scale of a plain Trainer's GradScaler. (Ours is in the subfolder `zeroshard`.)"""
        file, scaler = Path(checkpoint or "") / "scaler.pt", self._sharded().scaling.default
        if checkpoint is None or scaler is None or (Path(checkpoint) / FOLDER).is_dir() or not file.is_file():
            return
        found = torch.load(file, weights_only=True)  # {} of a GradScaler that is not enabled
        if found:
            state = scaler.policy.initial_state()
            scaler.state = scaler.policy.adopt(
                replace(state, scale=found["scale"], growth_tracker=found["_growth_tracker"])
            )

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint) / FOLDER
        if folder.is_dir():
            load(folder, self.handle)
            return
        with _writable(self.model):
            super()._load_best_model()  # type: ignore[misc]

    def _sharded(self) -> ShardedOptimizer:
        optimizer: ShardedOptimizer = self.optimizer.optimizer
        return optimizer


class ShardedTrainer(ShardedTrainerMixin, transformers.Trainer):
    """See `ShardedTrainerMixin`."""


class ShardedSeq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):
    """See `ShardedTrainerMixin`."""


class _StopTogether(transformers.TrainerCallback):
    """In place of the Trainer's callback for `enable_jit_checkpoint`, which saves when this rank has got SIGTERM. The
    signal reaches each rank at its own moment, and before an update gradients wait, which no checkpoint holds: so all
    ranks save after the step in which one has been asked."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = torch.tensor(float(self._own.jit_manager.is_checkpoint_requested), device=args.device)
        if self._own.trainer.accelerator.reduce(asked).item():
            self._own.jit_manager.is_checkpoint_requested = False
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._own.on_train_end(args, state, control, **kwargs)  # it gives SIGTERM back


def expect_supported(args: Any) -> None:
    """Check TrainingArguments.

    Raises:
        ValueError: an option is not supported: a single rank, or a single process, would act alone; or another library
            is to shard.
    """
    asked = {"fsdp_plugin": "fsdp", "deepspeed_plugin": "deepspeed", "parallelism_config": "parallelism_config"}
    expect_alone({argument: getattr(args, name, None) or None for argument, name in asked.items()})
    refused = {
        "auto_find_batch_size": "a rank that runs out of memory would try again alone: set per_device_train_batch_size",
        "bf16_full_eval": "a sharded model cannot be cast: it is evaluated in the precision that it trains in",
        "fp16_full_eval": "a sharded model cannot be cast: it is evaluated in the precision that it trains in",
        "save_on_each_node": "all ranks write into one folder: use a file system that all nodes see",
    }
    for name, reason in refused.items():
        if getattr(args, name, False):
            raise InvalidValue(f"TrainingArguments({name}=True) is not supported under zeroshard: {reason}")
    if args.optim in ("lomo", "adalomo"):
        raise InvalidValue(
            f"TrainingArguments(optim={args.optim.value!r}) is not supported under zeroshard: in backward it would "
            "step each rank's weights by that rank's gradient: use adafactor or another optim"
        )
    if args.n_gpu > 1:
        raise InvalidValue(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would use torch.nn.DataParallel: start one process "
            "for each, torchrun --nproc-per-node N script.py"
        )


def _in_full(sync: Callable[[nn.Module, nn.Module, float], None], model: nn.Module, target: Any, alpha: float) -> None:
    """Move the weights of the target towards those of the model. Collective."""
    with expect_handle_of(model, "trainer.train()").unsharded(), _writable(target):
        sync(model, target, alpha)


def _writable(model: nn.Module) -> Any:
    """A block in which `model.load_state_dict` is allowed."""
    handle = handle_of_model(model)
    return nullcontext() if handle is None else handle.unsharded(write=True)


@contextmanager
def _showing(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """A block in which `state_dict()` of the model, and of every module in it, has these values: a Trainer of
    sentence-transformers saves each module by itself, and not what it is passed. Nothing is collective."""
    dtype = next((value.dtype for value in state.values() if value.is_floating_point()), None)
    names_of: dict[str, list[str]] = {}
    for name in state:
        names_of.setdefault(name.rpartition(".")[0], []).append(name)
    replaced: list[tuple[nn.Module, str, Any]] = []

    def replace(module: nn.Module, name: str, by: Callable[..., Any]) -> None:
        replaced.append((module, name, vars(module).get(name)))
        vars(module)[name] = partial(by, module, getattr(module, name))

    def put(path: str, module: nn.Module, own: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        names = names_of.get(path, ())
        if any(name not in state for name in names):  # the caller has written it, and let go of it
            names = ()
        destination.update({prefix + name.rpartition(".")[2]: state[name] for name in names})
        if not names:
            own(destination, prefix, keep_vars)

    try:
        for path, module in model.named_modules():
            replace(module, "_save_to_state_dict", partial(put, plain_name(f"{path}.")[:-1]))
            if isinstance(module, transformers.PreTrainedModel) and dtype is not None:
                replace(module, "save_pretrained", partial(_save_pretrained, dtype))
        yield
    finally:
        for module, name, before in reversed(replaced):
            vars(module)[name] = before
            if before is None:
                del vars(module)[name]


def _save_pretrained(saved: torch.dtype, module: Any, own: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save, and set the dtype in config.json to that of the saved values. `from_pretrained` loads in that dtype, and
    `save_pretrained` writes the dtype of the weights in memory, which may be 16-bit while fp32 values were saved."""
    own(save_directory, *args, **kwargs)
    if saved != module.dtype:
        config = module.config
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", saved)  # (renamed in transformers 4.56)
        config.save_pretrained(save_directory)
