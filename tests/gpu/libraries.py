"""Pieces of `make test-gpu` for other libraries: small models train in the loop of each, with zeroshard and without it,
on one device, and the losses are compared. The library joins the group of the one rank, as under torchrun."""

from __future__ import annotations

import gc
import importlib
import math
import shutil
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.accelerated import MAX_NORM, MICRO_BATCHES, AcceleratedLoop
from tests.gpu.checks import ROOT, Checks, Setting, Skip, read_rows, run_python
from tests.gpu.worlds import exchanging_alone, one_rank
from tests.kit import DEVICE, WIDTH, Block, Net, loss_of, make

STEPS, HALF, LR = 4, 2, 1e-2
CLOSE = {"fp32": 2e-4, "bf16": 3e-2, "fp16": 1e-2}
"""By how much a loss may differ from the plain library's, as a share. A plain library keeps fp32 weights and casts them
in every operation; here the weights are 16-bit, with an fp32 main copy."""


class Cases:
    """The cases of a piece. What a case raises is one failed check, and the next case follows."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError as error:
            if _is_ours(error):
                self._failed(what, error)
            else:
                self.checks.note(what, f"left out: the package {error.name} is not installed")
        except Exception as error:
            self._failed(what, error)
        finally:
            gc.collect()

    def _failed(self, what: str, error: Exception) -> None:
        self.checks.expect(what, False, f"{type(error).__name__}: {error} ({_innermost(error)})")
        self.checks.text(what, "".join(traceback.format_exception(error)))

    def expect_near(self, what: str, found: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
        """The numbers are finite, as many as expected, and near."""
        by = furthest(found, expected)
        self.checks.expect(what, by <= tolerance, f"they differ by {by:.1e}, at most {tolerance:.0e} is allowed")

    def expect_far(self, what: str, found: Sequence[float], expected: Sequence[float]) -> None:
        """A control: other numbers, by more than any tolerance of fp32."""
        by = furthest(found, expected)
        self.checks.expect(what, CLOSE["fp32"] < by < math.inf, f"they differ by {by:.1e}")


def furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference, as a share; infinite if a number is missing or not finite."""
    if len(found) != len(expected) or not found or not all(map(math.isfinite, [*found, *expected])):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected, strict=True))


def _is_ours(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] in ("", "zeroshard", "tests", "torch")


def _innermost(error: BaseException) -> str:
    """The innermost line of zeroshard in a traceback; without one, the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{Path(zeroshard.__file__).parent}/" in frame.filename]
    return ", line ".join(str(part) for part in ((own or frames)[-1].filename, (own or frames)[-1].lineno))


@contextmanager
def launched(setting: Setting) -> Iterator[None]:
    """The environment of torchrun for one rank. The library joins the ranks, as it usually does."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as environment:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        names = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
        for name, value in {**names, **address}.items():
            environment.setenv(name, str(value))
        if setting.device != "cuda":
            environment.setenv("ACCELERATE_USE_CPU", "true")
        # The library makes the group, of NCCL. On CPUs gloo would exchange with peers that are not there.
        with _left(), nullcontext() if setting.device == "cuda" else one_rank(setting.device):
            yield
            gc.collect()  # gathers in flight, of models that are gone, wait as long as there is a group


@contextmanager
def _left() -> Iterator[None]:
    """A block at whose end the group that the library has made is left."""
    try:
        yield
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def needing(setting: Setting, *packages: str) -> None:
    """Import the packages of a piece. Raises `ModuleNotFoundError`, and `Skip` on a device that they do not know."""
    if setting.device not in ("cpu", "cuda"):
        raise Skip(f"what it tests knows no device {setting.device!r}")
    warnings.simplefilter("ignore")  # those of other libraries
    for package in packages:
        importlib.import_module(package)


def switched(exchanges: bool) -> Any:
    return exchanging_alone() if exchanges else nullcontext()


def _said(plan: str, precision: str, exchanges: bool) -> str:
    return f"{plan}, {precision}{', with exchanges' if exchanges else ''}"


def tokens_of(number: int, vocabulary: int = 23, rows: int = 2, length: int = 9) -> Tensor:
    """The batch of that number, on the host."""
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(number), device="cpu")


# transformers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of tokens, some of whose labels are ignored."""

    first: int = 0

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tokens_of(self.first + index, 37)[0]
        return {"input_ids": ids, "labels": ids.clone().index_fill_(0, torch.arange(index % 3, device="cpu"), -100)}


def transformers(checks: Checks, setting: Setting) -> None:
    """The Trainer of transformers."""
    needing(setting, "transformers", "accelerate")
    from tests.real_models.real import gpt2, llama

    cases, builds = Cases(checks), {"Llama": llama, "GPT-2": gpt2}
    precisions = ("fp32", "bf16") if setting.is_small else ("fp32", "bf16", "fp16")
    plain = {}
    for name, build in builds.items():
        for precision in precisions if not setting.is_small else precisions[name == "GPT-2" :][:1]:
            with cases.case(f"{name}, {precision}, without zeroshard"):
                plain[name, precision] = Trained(setting, build, None, precision)
                checks.note(f"{name}, {precision}, without zeroshard", plain[name, precision].losses)
    with launched(setting):
        grid = [(plan, exchanges) for exchanges in (False, True) for plan in ("zero1", "zero3")]
        for (name, precision), of_plain in plain.items():
            for plan, exchanges in grid[-1:] if setting.is_small else grid:
                what = f"{name}, {_said(plan, precision, exchanges)}"
                with cases.case(what), switched(exchanges):
                    run = Trained(setting, builds[name], plan, precision)
                    cases.expect_near(f"{what}: losses of the plain Trainer", run.losses, of_plain.losses, run.close)
                    cases.expect_near(f"{what}: its evaluation", run.evaluated, of_plain.evaluated, run.close)
                    if precision == "fp32":
                        checks.expect_equal(f"{what}: its texts", run.generated, of_plain.generated)
        if ("Llama", "fp32") in plain:
            _around_the_trainer(cases, setting, llama, plain["Llama", "fp32"])


class Trained:
    """A run of the Trainer. It evaluates and generates after each half. `plan`: None for the plain Trainer."""

    def __init__(
        self,
        setting: Setting,
        build: Callable[[], nn.Module],
        plan: str | None,
        precision: str = "fp32",
        resume: Path | None = None,
        **options: Any,
    ) -> None:
        import transformers as hf

        self.generated: list[list[int]] = []
        self.close = CLOSE[precision]
        folder = setting.folder / f"trainer-{plan}-{precision}"
        trainer = self._made(hf, make(build), self._arguments(hf, setting, folder, precision, options), plan)
        if "torch_compile" not in options:  # each length of a text would be compiled
            trainer.add_callback(self._writing(hf))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        history = trainer.state.log_history
        self.losses = [line["loss"] for line in history if "loss" in line]
        self.evaluated = [line["eval_loss"] for line in history if "eval_loss" in line]
        self.checkpoint, self.last = (folder / f"checkpoint-{step}" for step in (HALF, STEPS))

    def _arguments(self, hf: Any, setting: Setting, folder: Path, precision: str, options: dict[str, Any]) -> Any:
        usual = {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "max_steps": STEPS,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "eval_strategy": "steps",
            "eval_steps": HALF,
            "learning_rate": LR,
            "weight_decay": 0.1,
            "max_grad_norm": MAX_NORM,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": setting.device != "cuda",
        }
        cast = {} if precision == "fp32" else {precision: True}
        arguments = hf.TrainingArguments(str(folder), **usual | cast | options)
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # without a launcher the plain Trainer would use all GPUs, by DataParallel
        return arguments

    def _made(self, hf: Any, model: nn.Module, arguments: Any, plan: str | None) -> Any:
        data = {"train_dataset": Texts(), "eval_dataset": Texts(100)}
        if plan is None:
            return hf.Trainer(model, arguments, **data)
        from zeroshard.integrations import Sharding
        from zeroshard.integrations.transformers import ShardedTrainer

        blocks = "GPT2Block" if "GPT2" in type(model).__name__ else "LlamaDecoderLayer"
        return ShardedTrainer(model, arguments, sharding=Sharding(plan, units=blocks), **data)

    def _writing(self, hf: Any) -> Any:
        class Writing(hf.TrainerCallback):
            def on_step_end(_, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
                if state.global_step == HALF:
                    prompt = tokens_of(0, 37, length=3).to(args.device)
                    written = model.generate(
                        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
                    )
                    self.generated += written.tolist()

        return Writing()


def _around_the_trainer(cases: Cases, setting: Setting, build: Callable[[], nn.Module], plain: Trained) -> None:
    """Saving, resuming, recomputation, compilation; and the control."""
    close = CLOSE["fp32"]
    with cases.case("saved under zero3, resumed under zero1"):
        with exchanging_alone():
            saved = Trained(setting, build, "zero3", save_strategy="steps", save_steps=HALF)
        resumed = Trained(setting, build, "zero1", resume=saved.checkpoint)
        cases.expect_near("saved under zero3 and resumed under zero1", resumed.losses, plain.losses, close)
        import transformers as hf

        loaded = hf.LlamaForCausalLM.from_pretrained(saved.last).to(DEVICE)
        cases.expect_near("saved, and loaded by from_pretrained", [_evaluated(loaded)], plain.evaluated[-1:], close)
    with cases.case("gradient checkpointing"):
        with exchanging_alone():
            run = Trained(setting, build, "zero3", gradient_checkpointing=True, eval_strategy="no")
        cases.expect_near("gradient checkpointing, zero3: the same losses", run.losses, plain.losses, close)
    with cases.case("another learning rate (control)"):
        run = Trained(setting, build, "zero1", learning_rate=LR / 2, eval_strategy="no")
        cases.expect_far("another learning rate, other losses (control)", run.losses, plain.losses)
    if not setting.is_small and shutil.which("cc") is None:
        cases.checks.note("torch_compile=True", "left out: there is no C compiler")
    elif not setting.is_small:
        with cases.case("torch_compile=True, zero3"), exchanging_alone():
            run = Trained(setting, build, "zero3", torch_compile=True, eval_strategy="no")
            cases.expect_near("torch_compile=True, zero3: the losses without", run.losses, plain.losses, CLOSE["bf16"])


@torch.no_grad()
def _evaluated(model: Any) -> float:
    """The loss of a plain model over the data set for evaluation, as the Trainer averages it: by samples."""
    model.eval()
    samples, losses = Texts(100), []
    for first in range(0, len(samples), 8):  # the Trainer's batch
        batch = [samples[index] for index in range(first, min(first + 8, len(samples)))]
        loss = model(**{name: torch.stack([one[name] for one in batch]).to(DEVICE) for name in batch[0]}).loss
        losses += [loss.item()] * len(batch)
    return sum(losses) / len(losses)


# Accelerate -----------------------------------------------------------------------------------------------------------


def accelerate(checks: Checks, setting: Setting) -> None:
    """Accelerate's loop."""
    needing(setting, "accelerate")
    cases = Cases(checks)
    precisions = ("no", "bf16") if setting.is_small else ("no", "bf16", "fp16")
    plain = {}
    for precision in precisions:
        with cases.case(f"{precision}, without zeroshard"):
            plain[precision] = Accelerated(setting, None, precision).train(STEPS)
    with cases.case("without a launcher"), _left():
        found = Accelerated(setting, "zero3").train(STEPS)
        cases.expect_near("zero3, without a launcher: losses of plain Accelerate", found, plain["no"], CLOSE["fp32"])
    with launched(setting):
        grid = [(plan, exchanges) for exchanges in (False, True) for plan in ("zero1", "zero3")]
        for precision, losses in plain.items():
            for plan, exchanges in grid[-1:] if setting.is_small else grid:
                what = _said(plan, precision, exchanges)
                with cases.case(what), switched(exchanges):
                    found = Accelerated(setting, plan, precision).train(STEPS)
                    close = CLOSE["fp32" if precision == "no" else precision]
                    cases.expect_near(f"{what}: losses of plain Accelerate", found, losses, close)
        if "no" in plain:
            _around_accelerate(cases, setting, plain["no"])


def _around_accelerate(cases: Cases, setting: Setting, plain: list[float]) -> None:
    with cases.case("saved under zero3, resumed under zero1"):
        with exchanging_alone():
            saved = Accelerated(setting, "zero3")
            saved.train(HALF)
            saved.accelerator.save_state(str(setting.folder / "state"))
            state = saved.accelerator.get_state_dict(saved.model)
            cases.checks.expect("get_state_dict: on the CPU", all(one.device.type == "cpu" for one in state.values()))
            gathered = saved.accelerator.gather_for_metrics(torch.ones(3, device=saved.accelerator.device))
            cases.checks.expect_equal("gather_for_metrics", gathered.tolist(), [1.0] * 3)
        resumed = Accelerated(setting, "zero1")
        resumed.accelerator.load_state(str(setting.folder / "state"))
        found = resumed.train(STEPS - HALF, skip=HALF)
        cases.expect_near("saved under zero3, resumed under zero1", found, plain[HALF * MICRO_BATCHES :], CLOSE["fp32"])
    with cases.case("another learning rate (control)"):
        found = Accelerated(setting, "zero1", lr=LR / 2).train(STEPS)
        cases.expect_far("another learning rate, other losses (control)", found, plain)


class Accelerated(AcceleratedLoop):
    """Accelerate's loop, as in its documentation. `plan`: None for the plain library."""

    def __init__(self, setting: Setting, plan: str | None, precision: str = "no", lr: float = LR) -> None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        options = {"gradient_accumulation_steps": MICRO_BATCHES, "mixed_precision": precision}
        if plan is None:
            from accelerate import Accelerator as Plain

            self.accelerator: Any = Plain(cpu=setting.device != "cuda", **options)
        else:
            from zeroshard.integrations import Sharding
            from zeroshard.integrations.accelerate import Accelerator

            self.accelerator = Accelerator(sharding=Sharding(plan, units=Block), **options)
        torch.manual_seed(0)
        model = Net()  # on the host: `prepare` moves it
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        rows = torch.cat([tokens_of(number) for number in range(STEPS * MICRO_BATCHES)])
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )


# Lightning ------------------------------------------------------------------------------------------------------------


def lightning(checks: Checks, setting: Setting) -> None:
    """Lightning's Trainer and Fabric."""
    needing(setting, "lightning")
    cases = Cases(checks)
    mixed = ("bf16-mixed",) if setting.is_small else ("bf16-mixed", "16-mixed", "bf16-true")
    plain = {}
    for loop in (Fitted, Fabricated):
        for precision in ("32-true", *mixed):
            with cases.case(f"{loop.name}, {precision}, without zeroshard"):
                plain[loop, precision] = loop(setting, None, precision).losses
    with launched(setting):
        grid = [(plan, exchanges) for exchanges in (False, True) for plan in ("zero1", "zero3")]
        for (loop, precision), losses in plain.items():
            for plan, exchanges in grid[-1:] if setting.is_small else grid:
                what = f"{loop.name}, {_said(plan, precision, exchanges)}"
                with cases.case(what), switched(exchanges):
                    close = 0.1 if precision == "bf16-true" else CLOSE[_short(precision)]
                    cases.expect_near(
                        f"{what}: losses of plain Lightning", loop(setting, plan, precision).losses, losses, close
                    )
        for loop in (Fitted, Fabricated):
            if (loop, "32-true") in plain:
                _around_lightning(cases, setting, loop, "32-true", plain[loop, "32-true"])
            if (loop, "16-mixed") in plain:
                _around_lightning(cases, setting, loop, "16-mixed", plain[loop, "16-mixed"])
        if not setting.is_small:
            with cases.case("sync_batchnorm=True"):
                without = Fitted(setting, "zero3", build=Normed)
                run = Fitted(setting, "zero3", build=Normed, sync_batchnorm=True)
                cases.expect_near("sync_batchnorm=True, one rank", run.losses, without.losses, CLOSE["fp32"])


def _short(precision: str) -> str:
    return {"32": "fp32", "16": "fp16"}.get(precision.partition("-")[0], "bf16")


def _around_lightning(cases: Cases, setting: Setting, loop: Any, precision: str, plain: list[float]) -> None:
    what = f"{loop.name}, {precision}"
    with cases.case(f"{what}: saved under zero3, resumed under zero1"):
        with exchanging_alone():
            path = loop(setting, "zero3", precision, saves=True).path
        found, left = loop(setting, "zero1", precision, resume=path).losses, plain[HALF * MICRO_BATCHES :]
        cases.expect_near(f"{what}: saved under zero3, resumed under zero1", found, left, CLOSE[_short(precision)])
    with cases.case(f"{what}: another learning rate (control)"):
        found = loop(setting, "zero1", precision, lr=LR / 2).losses
        cases.expect_far(f"{what}: another learning rate, other losses (control)", found, plain)


class Fitted:
    """Lightning's Trainer. `plan`: None for the plain library."""

    name = "Trainer"

    def __init__(
        self,
        setting: Setting,
        plan: str | None,
        precision: str = "32-true",
        *,
        lr: float = LR,
        saves: bool = False,
        resume: Path | None = None,
        build: Callable[[], nn.Module] = Net,
        **options: Any,
    ) -> None:
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint

        module = _module(lr, build)
        folder = setting.folder / "lightning"
        self.losses: list[float] = module.losses
        self.path = folder / f"step={HALF}.ckpt"
        strategy: Any = "auto"
        if plan is not None:
            from zeroshard.integrations import Sharding
            from zeroshard.integrations.lightning import ShardedStrategy

            strategy = ShardedStrategy(Sharding(plan, units=Block))
        trainer = lightning.Trainer(
            accelerator=setting.device,
            devices=1,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
            default_root_dir=folder,
            max_steps=STEPS,
            accumulate_grad_batches=MICRO_BATCHES,
            gradient_clip_val=MAX_NORM,
            callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=HALF, save_top_k=-1)] if saves else [],
            enable_checkpointing=saves,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        batches = [tokens_of(number) for number in range(STEPS * MICRO_BATCHES)]
        first = HALF * MICRO_BATCHES if resume is not None else 0  # Lightning takes the batches that are left first
        rows = torch.utils.data.TensorDataset(torch.cat(batches[first:] + batches[:first]))
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=resume, weights_only=False)


class Normed(Net):
    """With a batch norm before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (2, -1)))


def _module(lr: float, build: Callable[[], nn.Module]) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        """Keeps the loss of every micro-batch."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.losses = build(), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.net, batch[0])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


class Fabricated:
    """A loop of Fabric. `plan`: None for the plain library."""

    name = "Fabric"

    def __init__(
        self,
        setting: Setting,
        plan: str | None,
        precision: str = "32-true",
        *,
        lr: float = LR,
        saves: bool = False,
        resume: Path | None = None,
    ) -> None:
        import lightning

        strategy: Any = "auto"
        if plan is not None:
            from zeroshard.integrations import Sharding
            from zeroshard.integrations.lightning import FabricStrategy

            strategy = FabricStrategy(Sharding(plan, units=Block))
        fabric: Any = lightning.Fabric(accelerator=setting.device, devices=1, strategy=strategy, precision=precision)
        fabric.launch()
        torch.manual_seed(0)
        plain = Net()
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=lr, weight_decay=0.1))
        self.path, self.losses, first = setting.folder / "fabric.ckpt", list[float](), 0
        if resume is not None:
            fabric.load(resume, {"model": model, "optimizer": optimizer}, weights_only=False)
            first = HALF * MICRO_BATCHES
        for number in range(first, STEPS * MICRO_BATCHES):
            loss = loss_of(model, fabric.to_device(tokens_of(number)))
            is_last = number % MICRO_BATCHES == MICRO_BATCHES - 1
            with fabric.no_backward_sync(model, enabled=not is_last) if plan else nullcontext():
                fabric.backward(loss / MICRO_BATCHES)
            self.losses.append(loss.item())
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            if saves and number + 1 == HALF * MICRO_BATCHES:
                fabric.save(self.path, {"model": model, "optimizer": optimizer})


# PEFT -----------------------------------------------------------------------------------------------------------------


def peft(checks: Checks, setting: Setting) -> None:
    """Adapters of PEFT on a base in bf16."""
    needing(replace(setting, device="cpu"), "peft", "transformers")  # plain loops, on any device
    import transformers as hf

    from tests.real_models.real import llama
    from zeroshard.integrations.sharding import handle_of_model

    cases = Cases(checks)

    def adapted(seed: int = 0) -> Any:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        base = make(llama).to(torch.bfloat16)
        torch.manual_seed(seed)
        return peft.get_peft_model(base, config)

    def trained(model: Any, plan: str | None) -> list[float]:
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if plan is not None:
            handle = zeroshard.shard(model, plan, units="LlamaDecoderLayer")
            optimizer: Any = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=LR)
        else:
            optimizer = torch.optim.AdamW(adapters, lr=LR)
        losses = []
        for step in range(STEPS):
            ids = tokens_of(step, 37).to(DEVICE)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = trained(model, None)
    with one_rank(setting.device):
        for plan, exchanges in [("zero1", False), ("zero3", False), ("zero3", True)]:
            what = f"LoRA, {plan}, base in bf16{', with exchanges' if exchanges else ''}"
            with cases.case(what), switched(exchanges):
                model = adapted()
                cases.expect_near(f"{what}: losses of plain torch", trained(model, plan), losses, CLOSE["fp32"])
                handle: Any = handle_of_model(model)
                after = handle.full_state_dict()
                changed = {name for name in before if not torch.equal(before[name], after[name].to(DEVICE))}
                checks.expect_equal(f"{what}: what has changed", changed, {name for name in before if "lora_" in name})
        with cases.case("other adapters (control)"):
            cases.expect_far("other adapters, other losses (control)", trained(adapted(1), "zero3"), losses)
    if setting.device == "apart":
        return
    with launched(setting), cases.case("LoRA in the Trainer, bf16=True"), exchanging_alone():
        run = Trained(setting, adapted, "zero3", "bf16", save_strategy="steps", save_steps=HALF)
        names = {file.name for file in run.checkpoint.iterdir()}
        checks.expect("LoRA in the Trainer, zero3, bf16=True: losses", all(map(math.isfinite, run.losses)), run.losses)
        checks.expect("its checkpoint has the adapters", "adapter_model.safetensors" in names, sorted(names))
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(make(llama).to(torch.bfloat16), run.checkpoint)
        checks.expect("which PEFT loads", isinstance(loaded.base_model.model, hf.LlamaForCausalLM))


# Vision ---------------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """A small model with batch norms, for where torchvision is not installed."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((3, 8), (8, 16), (16, 16))
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return self.head(images.mean((2, 3)))


def _resnet() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def _transformer() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=10)


def vision(checks: Checks, setting: Setting) -> None:
    """Images: convolutions in channels_last, batch norms, autocast."""
    needing(setting)
    cases = Cases(checks)
    # The bits of a kernel of cuDNN: the same in both runs.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = False
    keep = zeroshard.MixedPrecision(param=torch.bfloat16, keep=(nn.BatchNorm2d,))
    models = {"convolutions": (Convolutions, nn.Sequential), "resnet18": (_resnet, "BasicBlock")}
    models["vit_tiny"] = (_transformer, "Block")
    modes: list[tuple[str, bool, Any]] = [
        ("fp32", False, None),
        ("autocast to bf16", True, None),
        ("bf16", False, keep),
    ]
    with one_rank(setting.device):
        for name, (build, units) in models.items():
            for mode, autocasts, precision in modes[1:2] if setting.is_small and name != "convolutions" else modes:
                with cases.case(f"{name}, {mode}"):
                    cast = autocasts or precision is not None
                    expected = Seen(build, None, units, cast)  # autocast is the nearest that plain torch has
                    for plan, exchanges in [("zero1", False), ("zero3", True)][setting.is_small :]:
                        with switched(exchanges):
                            found = Seen(build, plan, units, autocasts, precision)
                        what = f"{name}, {mode}, {plan}{', with exchanges' if exchanges else ''}"
                        close = CLOSE["fp32"] if not cast else 5e-2 if precision is None else 0.1
                        cases.expect_near(f"{what}: losses of plain torch", found.losses, expected.losses, close)
                        cases.expect_near(f"{what}: running means", found.means, expected.means, close)
        with cases.case("another learning rate (control)"):
            found, expected = (Seen(Convolutions, "zero3", None, False, lr=lr) for lr in (LR, LR / 2))
            cases.expect_far("another learning rate, other losses (control)", found.losses, expected.losses)


class Seen:
    """Steps of a model over images in channels_last. `plan`: None for plain torch.

    Attributes:
        means: for each batch norm, the size of its running means.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        plan: str | None,
        units: Any,
        autocasts: bool,
        precision: Any = None,
        lr: float = LR / 10,
    ) -> None:
        model: Any = make(build)
        if plan is not None:
            model.to(memory_format=torch.channels_last)  # `shard` makes weights contiguous; those of the other stay so
            handle = zeroshard.shard(model, plan, units=units, precision=precision)
            optimizer: Any = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=lr, momentum=0.9)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)  # Adam enlarges last bits
        self.losses = []
        for step in range(STEPS):
            random = torch.Generator().manual_seed(step)
            images = torch.randn(8, 3, 32, 32, generator=random, device="cpu")
            images = images.to(DEVICE, memory_format=torch.channels_last)
            classes = torch.randint(10, (8,), generator=random, device="cpu").to(DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocasts):
                logits = model(images)
            loss = nn.functional.cross_entropy(logits.float(), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.item())
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self.means = [1.0, *(float(norm.running_mean.float().norm()) for norm in norms)]


# The trainer ----------------------------------------------------------------------------------------------------------


def trainer(checks: Checks, setting: Setting) -> None:
    """`zeroshard train`: saved, stopped, resumed."""
    needing(setting, "click", "psutil", "pydantic", "rich", "tomli_w")
    cases = Cases(checks)
    text = setting.folder / "text"
    text.mkdir()
    for number, file in enumerate(sorted((ROOT / "zeroshard" / "step").glob("*.py"))):
        (text / f"{number}.py").write_bytes(file.read_bytes())
    with cases.case("bf16"):
        whole = Commanded(checks, setting, "whole", "bf16")
        whole.run()
        _expect_recorded(checks, setting, "bf16", whole)
        stopped = Commanded(checks, setting, "stopped", "bf16")
        stopped.run(stop=True)
        done = len(stopped.losses)
        checks.expect("SIGTERM stops it after a step", 0 < done < len(whole.losses), f"step {done}")
        stopped.run("--resume", str(stopped.folder))
        cases.expect_near("stopped, resumed: the same losses", stopped.losses, whole.losses, CLOSE["bf16"])
        checks.note("bit for bit", stopped.losses == whole.losses)
        anew = whole.losses[: len(whole.losses) - done]
        cases.expect_far("begun anew in place of resumed, other losses (control)", anew, whole.losses[done:])
    if not setting.is_small:
        with cases.case("fp16"):
            scaled = Commanded(checks, setting, "scaled", "fp16")
            scaled.run()
            _expect_recorded(checks, setting, "fp16", scaled)


def _expect_recorded(checks: Checks, setting: Setting, precision: str, run: Commanded) -> None:
    """What the run has recorded about itself."""
    start, steps = run.starts[0], run.steps
    on_gpu = setting.device == "cuda"
    checks.expect_equal(f"{precision}: device", start["device"], setting.device)
    if on_gpu:
        checks.expect_equal(f"{precision}: transport", start["transport"], "native")
        used = [step["memory_bytes"] > step["engine_bytes"] for step in steps]
        checks.expect(f"{precision}: memory of the GPU is more than the engine's", all(used))
        checks.note(f"{precision}: MFU, tokens/s of the last step", [steps[-1]["mfu"], steps[-1]["tokens_per_second"]])
    planned = {(step["engine_bytes"], step["planned_bytes"]) for step in steps}
    checks.expect(f"{precision}: planned bytes are those measured", all(a == b for a, b in planned), planned)
    checks.expect(f"{precision}: it learns", run.losses[-1] < run.losses[0] - 0.5, [run.losses[0], run.losses[-1]])
    files = {path.name for path in run.folder.iterdir()}
    wanted = {"config.toml", "metrics.jsonl", "latest", "sample.txt", "report.html"}
    checks.expect(f"{precision}: its folder", files >= wanted, sorted(files))


class Commanded:
    """A run of `zeroshard train` with one rank, as its metrics say it went."""

    def __init__(self, checks: Checks, setting: Setting, name: str, precision: str) -> None:
        self.checks, self.name, self.folder = checks, name, setting.folder / name
        size = {"layers": 2, "width": 64, "heads": 2, "context": 64}
        options = {
            **{f"model.{key}": value for key, value in size.items()},
            "batch.sequences": 8,
            "batch.micro_batches": 2,
            "schedule.steps": 40 if setting.is_small else 80,
            "schedule.warmup": 5,
            "evaluation.every": 20,
            "evaluation.windows": 8,
            "evaluation.sample_tokens": 8,
            "run.timeline": 0,
            "parallel.device": setting.device,
            "nproc": 1,
            "precision": precision,
            "data": setting.folder / "text",
            "data.cache": setting.folder / "cache",
            "out": self.folder,
        }
        self._arguments = ["--config", "configs/small.toml"]
        for key, value in options.items():
            self._arguments += [f"--{key}", str(value)]

    def run(self, *more: str, stop: bool = False) -> None:
        """`stop`: send SIGTERM after the first step."""
        command = ["-m", "zeroshard", "train", *self._arguments, *more]
        status, output = run_python(*command, during=self._stop if stop else None)
        self.checks.expect_equal(f"{self.name}: status of zeroshard train {' '.join(more)}".rstrip(), status, 0)
        if status:
            self.checks.text("its output", output)

    def _stop(self, process: Any) -> None:
        while process.poll() is None and not self.steps:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)

    @property
    def _records(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [record for record in self._records if record["kind"] == "start"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self._records if record["kind"] == "step"]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.steps]
