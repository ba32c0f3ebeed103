"""Lightning's Trainer and Fabric over a sharded model have the bits of the plain zeroshard loop; checkpoints work in
both directions."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.examples import run_example
from tests.grids import EVERYTHING
from tests.integrations.common import (
    FAULTS,
    HALF,
    MAX_NORM,
    MICRO_BATCHES,
    STEPS,
    Fault,
    as_launched,
    expect_faults_to_end_all,
    loss_of,
    loss_of_outputs,
    plain_loop,
    texts,
)
from tests.integrations.versions import of_any_kind
from tests.kit import Block, Net, State, make, same_bits
from tests.late import once
from zeroshard.integrations.sharding import handle_of_model
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once(
    "lightning",
    "zeroshard.integrations.lightning",
    "pytorch_lightning",
    "zeroshard.integrations.pytorch_lightning",
)

LIBRARIES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
_used = {"package": "lightning"}
"""The package that the loops of this file use. Ranks are forked, and use it too."""


@pytest.fixture(params=LIBRARIES)
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets the test run with each of the two packages that Lightning is published as."""
    pytest.importorskip(request.param)
    monkeypatch.setitem(_used, "package", request.param)
    return str(request.param)


def pytorch() -> Any:
    """The package's module with the Trainer."""
    return importlib.import_module(LIBRARIES[_used["package"]][0])


def fabrics() -> Any:
    """The package's module with Fabric."""
    return importlib.import_module(LIBRARIES[_used["package"]][1])


def ours() -> Any:
    """Our module for the package."""
    return importlib.import_module(f"zeroshard.integrations.{_used['package']}")


def launched(rank: int, num_ranks: int) -> None:
    """Set torchrun's environment variables, so that Lightning starts no processes of its own."""
    as_launched(rank, num_ranks)
    os.environ.update(TORCHELASTIC_RUN_ID="none", MASTER_ADDR="localhost", MASTER_PORT="1", GROUP_RANK="0")


def strided(number: int, rank: int, num_ranks: int) -> list[int]:
    """The distribution of torch's DistributedSampler."""
    return [rank + num_ranks * (2 * number), rank + num_ranks * (2 * number + 1)]


def in_plain_names(state: State) -> State:
    return {name.removeprefix("net."): value for name, value in state.items()}


def module_of(build: Any = Net) -> Any:
    class Module(pytorch().LightningModule):
        """Keeps the loss of every micro-batch."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = make(build), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.net, batch[0])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", loss_of(self.net, batch[0]), sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def trainer(folder: Path, strategy: Any, num_ranks: int, **options: Any) -> Any:
    usual = {
        "max_steps": STEPS,
        "accumulate_grad_batches": MICRO_BATCHES,
        "gradient_clip_val": MAX_NORM,
        "use_distributed_sampler": False,
        "enable_checkpointing": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pytorch().Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, default_root_dir=folder, **{**usual, **options}
    )


def loader(rank: int, num_ranks: int, first: int = 0, data: Any = None) -> Any:
    """This rank's loader, starting at micro-batch `first`; the earlier ones follow. When Lightning resumes in the
    middle of an epoch, it takes the remaining batches from the loader and keeps counting."""
    count = STEPS * MICRO_BATCHES
    batches = [strided((first + number) % count, rank, num_ranks) for number in range(count)]
    return torch.utils.data.DataLoader(data or texts(), batch_sampler=batches)


def twice(folder: Path) -> Any:
    """Saves after half of the steps, and at the end."""
    return pytorch().callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=HALF, save_top_k=-1)


def test_the_trainer_of_lightning_has_the_bits_of_the_plain_loop(either: str, tmp_path: Path) -> None:
    """A run that is resumed under another plan has the bits of one without interruption. (`fabric_loop` is in fp32.)"""
    from zeroshard.integrations import Sharding

    ShardedStrategy = ours().ShardedStrategy

    def check(rank: int) -> None:
        launched(rank, 2)
        cases = [("zero3", "zero1", "bf16-mixed"), *[("ddp", "zero3", "32-true")] * EVERYTHING]
        for plan, other, precision in cases:
            kind = None if precision == "32-true" else "bf16"
            losses, weights = plain_loop(rank, 2, strided, kind)
            strategy, module = ShardedStrategy(Sharding(plan, units=Block)), module_of()
            saves = {"callbacks": [twice(tmp_path / plan)], "enable_checkpointing": True}
            run = trainer(tmp_path, strategy, 2, precision=precision, **saves)
            run.fit(module, loader(rank, 2))
            assert module.losses == losses
            assert same_bits(in_plain_names(strategy.handle.full_state_dict(main=True)), weights)
            strategy, of_resumed = ShardedStrategy(Sharding(other, units=Block)), module_of()
            left = loader(rank, 2, first=HALF * MICRO_BATCHES)
            resumed = trainer(tmp_path, strategy, 2, precision=precision)
            resumed.fit(of_resumed, left, ckpt_path=tmp_path / plan / f"step={HALF}.ckpt", **of_any_kind())
            assert of_resumed.losses == losses[HALF * MICRO_BATCHES :]
            assert same_bits(in_plain_names(resumed.strategy.handle.full_state_dict(main=True)), weights)
            assert not same_bits(plain_loop(rank, 2, strided, kind, max_norm=100.0)[1], weights)
            expect_plain_checkpoint(tmp_path / plan / f"step={STEPS}.ckpt", weights)
            evaluate(run, module, tmp_path / plan, loader(rank, 2))

    run_ranks(check, 2)


def expect_plain_checkpoint(path: Path, weights: State) -> None:
    """The checkpoint is in plain Lightning's format: a plain module and its optimizer load it."""
    found = torch.load(path, weights_only=False)
    module = module_of()
    module.load_state_dict(found["state_dict"])
    assert same_bits(dict(module.net.state_dict()), weights)
    optimizer = module.configure_optimizers()["optimizer"]
    [state] = found["optimizer_states"]
    optimizer.load_state_dict(state)
    assert {int(one["step"]) for one in optimizer.state.values()} == {STEPS}
    assert all(one["exp_avg"].shape == p.shape for p, one in optimizer.state.items())


def test_the_example_learns() -> None:
    """`examples/with_lightning.py`"""
    pytest.importorskip("lightning")

    def check(rank: int) -> list[float]:
        launched(rank, 2)
        return list(run_example("with_lightning")["module"].losses)

    first, second = run_ranks(check, 2)
    assert first != second, "each rank has batches of its own"
    for losses in (first, second):
        assert len(losses) == 60 and sum(losses[-6:]) < sum(losses[:6]) / 4


def evaluate(run: Any, module: Any, folder: Path, loader: Any) -> None:
    """Evaluate after training, evaluate a checkpoint, and train again, all with the module that is already sharded."""
    [of_last] = run.validate(module, loader, verbose=False)
    assert run.test(module, loader, verbose=False) == [of_last]
    early = folder / f"step={HALF}.ckpt"
    [of_early] = run.validate(module, loader, ckpt_path=early, verbose=False, **of_any_kind())
    assert of_early["val"] > of_last["val"]
    more, once_more = (
        trainer(folder, type(run.strategy)(run.strategy.sharding), run.num_devices, max_steps=1) for _ in range(2)
    )
    more.fit(module, loader)
    once_more.fit(module, loader)
    [after] = more.validate(module, loader, verbose=False)
    assert after["val"] != of_early["val"]
    with pytest.raises(ValueError, match=r"sharded already, and not as asked for \(precision="):
        trainer(folder, type(run.strategy)(run.strategy.sharding.plan), 2, precision="64-true").validate(module, loader)


def manual(rank: int, folder: Path) -> None:
    """A LightningModule with manual optimization and a loss scale: a step that overflows is skipped."""
    from zeroshard.integrations import Sharding

    module = module_of()
    module.automatic_optimization = False
    seen = []

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer, weights = module.optimizers(), module.trainer.strategy.handle.full_state_dict()
        optimizer.zero_grad()
        poison = torch.inf if batch_idx == 1 and rank == 0 else 1.0
        module.manual_backward(loss_of(module.net, batch[0]) * poison)
        optimizer.clip_grad_norm_(0.1)
        seen.append(optimizer.step().applied)
        assert same_bits(weights, module.trainer.strategy.handle.full_state_dict()) is not seen[-1]

    module.training_step = training_step
    sharding = Sharding("zero2", units=Block, precision="fp16", loss_scale="dynamic")
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 3}
    trainer(folder, ours().ShardedStrategy(sharding), 2, **options).fit(module, loader(rank, 2))
    assert seen == [True, False, True]


def fabric_loop(rank: int, folder: Path) -> None:
    from zeroshard.integrations import Sharding

    losses, weights = plain_loop(rank, 2, strided)
    for begin, plan in ((0, "zero3"), (HALF, "zero1")):
        strategy = ours().FabricStrategy(Sharding(plan, units=Block))
        fabric = fabrics().Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        plain = make(Net)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
        model, optimizer = fabric.setup(plain, optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if begin:
            fabric.load(folder / "half.ckpt", state, **of_any_kind())
        found = []
        batches = list(fabric.setup_dataloaders(loader(rank, 2), use_distributed_sampler=False))
        for number, (tokens,) in list(enumerate(batches))[begin * MICRO_BATCHES : STEPS * MICRO_BATCHES]:
            last = number % MICRO_BATCHES == MICRO_BATCHES - 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = loss_of(model, tokens)
                fabric.backward(loss / MICRO_BATCHES)
            found.append(loss.item())
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if number + 1 == HALF * MICRO_BATCHES:
                    fabric.save(folder / "half.ckpt", state)
        other = fabric.setup_optimizers(torch.optim.SGD(plain.parameters(), lr=1.0))
        with pytest.raises(RuntimeError, match="this optimizer is out of use"):
            optimizer.step()
        assert other.param_groups[0]["lr"] == 1.0
        assert found == losses[begin * MICRO_BATCHES :]
        assert same_bits(handle_of_model(plain).full_state_dict(), weights)


def test_loops_of_the_user_with_lightning(either: str, tmp_path: Path) -> None:
    def check(rank: int) -> None:
        launched(rank, 2)
        fabric_loop(rank, tmp_path)
        manual(rank, tmp_path)

    run_ranks(check, 2)


def test_a_part_of_a_model_in_fabric(tmp_path: Path) -> None:
    """A part was saved as the whole model. It was loaded in silence, and without effect, if `strict` was False."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        fabric = fabrics().Fabric(accelerator="cpu", devices=2, strategy=ours().FabricStrategy("zero3"))
        fabric.launch()
        model = fabric.setup(make(Net))
        plain = make(Net)
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)  # not set up
        fabric.save(tmp_path / "part", {"blocks": model.blocks, "optimizer": optimizer})
        found = torch.load(tmp_path / "part")
        assert same_bits(found["blocks"], plain.blocks.state_dict())
        assert found["optimizer"] == optimizer.state_dict()
        with pytest.raises(ValueError, match=r"the module blocks is a part of a sharded Net, which is loaded as a who"):
            fabric.load(tmp_path / "part", {"blocks": model.blocks}, strict=False)
        with handle_of_model(model).unsharded(write=True):
            model.blocks.load_state_dict({name: value + 1 for name, value in found["blocks"].items()})
        fabric.save(tmp_path / "part", {"blocks": model.blocks})
        assert same_bits(torch.load(tmp_path / "part")["blocks"], {k: v + 1 for k, v in found["blocks"].items()})

    run_ranks(check, 2)


def test_a_refused_module_does_not_end_the_handle_of_another(tmp_path: Path) -> None:
    """A module that took over a part of a trained one: the handle of that was abandoned, with its weights."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        first, second = module_of(), module_of()
        run = trainer(tmp_path, ours().ShardedStrategy("zero3"), 2)
        run.fit(first, loader(rank, 2))
        second.net = first.net
        with pytest.raises(ValueError, match=r"has parameters of a .* that is sharded already, and is no part of it"):
            trainer(tmp_path, ours().ShardedStrategy("zero3"), 2).fit(second, loader(rank, 2))
        assert run.strategy.handle.full_state_dict()

    run_ranks(check, 2)


def test_outputs_and_losses_have_the_dtypes_of_plain_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 1)
        for precision in ("bf16-mixed", "bf16-true", "64-true"):
            plain, ours = (of_fabric(precision, strategy) for strategy in ("auto", "zeroshard_zero3"))
            assert ours[:2] == plain[:2] == (torch.float32, torch.float32), precision
            assert ours[2] == pytest.approx(plain[2], rel=2e-3), precision
        assert ours[2] != torch.tensor(ours[2]).bfloat16().item()
        for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
            plain, ours = (of_trainer(tmp_path, precision, strategy) for strategy in ("auto", "zeroshard_zero3"))
            assert ours[:2] == (dtype, dtype) and plain[1] == dtype, precision
            assert ours[2] == pytest.approx(plain[2], rel=1e-3 if dtype == torch.float32 else 1e-2), precision

    run_ranks(check, 1)


def test_tensors_that_a_step_makes_have_the_dtype_of_plain_lightning(either: str, tmp_path: Path) -> None:
    """Noise, or a mask. It was fp32, and the module's first matrix product raised."""

    class Noisy(nn.Linear):
        def forward(self, _: Any) -> Any:
            return super().forward(torch.ones(2, 4))

    def check(rank: int) -> None:
        launched(rank, 1)
        for precision, dtype in (("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)):
            module = module_of(partial(nn.Linear, 4, 1))
            module.training_step = lambda batch, batch_idx: module.net(torch.ones(2, 4)).sum()  # noqa: B023
            options = {"max_steps": 1, "accumulate_grad_batches": 1, "precision": precision}
            trainer(tmp_path, "zeroshard_zero3", 1, **options).fit(module, loader(0, 1))
            fabric = fabrics().Fabric(accelerator="cpu", devices=1, strategy="zeroshard_zero3", precision=precision)
            fabric.launch()
            model = Noisy(4, 1)
            fabric.setup_module(model)(torch.ones(1))
            assert module.net.weight.dtype == model.weight.dtype == dtype
            assert torch.get_default_dtype() == torch.float32

    run_ranks(check, 1)


def test_ranks_that_lightning_forks_give_the_weights_back(either: str, tmp_path: Path) -> None:
    """The launcher takes the module's state dict when all is done, and the parent process loads it. Strategies can be
    pickled, so that ranks can be spawned, too; one that has been used, as without the module (darts saves it so)."""
    FabricStrategy, ShardedStrategy = ours().FabricStrategy, ours().ShardedStrategy

    def check(rank: int) -> None:
        launched(rank, 2)
        for kind in (FabricStrategy, ShardedStrategy):
            assert pickle.loads(pickle.dumps(kind("zero2"))).sharding.plan == "zero2"
        run, module = trainer(tmp_path, ShardedStrategy("zero3"), 2, max_steps=1), module_of()
        run.fit(module, loader(rank, 2))
        weights = run.strategy.handle.full_state_dict()
        for twin in (pickle.loads(pickle.dumps(run.strategy)), copy.deepcopy(run.strategy)):
            assert twin.sharding == run.strategy.sharding and twin.lightning_module is None and not twin.optimizers
        run.strategy._start_method = "fork"
        run.strategy._configure_launcher()
        result = run.strategy.launcher._collect_rank_zero_results(run, None)
        if rank == 0:
            assert same_bits(torch.load(result.weights_path), weights)
        assert handle_of_model(module) is None

    run_ranks(check, 2)


def of_fabric(precision: Any, strategy: str) -> tuple[torch.dtype, torch.dtype, float]:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
    fabric.launch()
    return loss_of_outputs(fabric.setup_module(make(Net)))


def test_marked_methods_and_steps_run_as_in_plain_fabric() -> None:
    """They use parameters of the model itself, and return what `forward` would: without a call of the model the weights
    were absent under ZeRO-3, and outputs in 16 bits."""
    pytest.importorskip("lightning")
    import lightning

    from zeroshard.integrations.lightning import FabricStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = make(Net), nn.Parameter(torch.ones(3))

        def forward(self, tokens: Any) -> Any:
            return self.net(tokens)

        def scaled(self, tokens: Any) -> Any:
            return self(tokens) * self.scale.mean() + self.net.head.bias

        def training_step(self, tokens: Any) -> Any:
            return nn.functional.cross_entropy(self(tokens[:, :-1])[:, -1], tokens[:, -1]) * self.scale.mean()

    def check(rank: int) -> None:
        launched(rank, 2)
        (tokens,) = texts().tensors
        for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", None)):
            found = []
            for strategy in ("ddp", FabricStrategy("zero3")):
                fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
                fabric.launch()
                model = Module()
                wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
                assert wrapped.module is model
                wrapped.mark_forward_method("scaled")
                for number in range(2):
                    loss = wrapped.training_step(tokens[4 * number + 2 * rank :][:2])
                    fabric.backward(loss)
                    optimizer.step(), optimizer.zero_grad()
                found.append((wrapped.scaled(tokens[:2]), loss))
            for plain, ours in zip(*found, strict=True):
                assert plain.dtype == ours.dtype and dtype in (None, ours.dtype), precision
                assert torch.allclose(plain, ours, atol=1e-5 if precision == "32-true" else 5e-2), precision

    run_ranks(check, 2)


def of_trainer(folder: Path, precision: Any, strategy: str) -> tuple[torch.dtype, torch.dtype, float]:
    """What the module's `forward` returns in `training_step`; the loss that `training_step` has returned."""
    module, seen = module_of(), []
    module.forward = module.net.forward

    def training_step(batch: Any, batch_idx: int) -> Any:
        logits = module(batch[0][:, :-1])
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def on_train_batch_end(outputs: Any, *_: Any) -> None:
        seen.extend((outputs["loss"].dtype, outputs["loss"].item()))

    module.training_step, module.on_train_batch_end = training_step, on_train_batch_end
    options = {"max_steps": 1, "accumulate_grad_batches": 1, "precision": precision}
    trainer(folder, strategy, 1, **options).fit(module, loader(0, 1))
    dtype, dtype_of_loss, loss = seen
    return dtype, dtype_of_loss, loss


def finetuning() -> Any:
    """A callback that freezes the first block, and lets it train from the second epoch on."""
    from lightning.pytorch.callbacks import BaseFinetuning

    class Finetuning(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net.blocks[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                with module.trainer.strategy.handle.unsharded():
                    self.unfreeze_and_add_param_group(module.net.blocks[0], optimizer, lr=0.1)

    return Finetuning()


def test_a_callback_unfreezes_a_part_of_the_module(tmp_path: Path) -> None:
    """The parts that were frozen train as under a plan that replicates the weights."""
    pytest.importorskip("lightning")

    def trained(rank: int, strategy: str, max_epochs: int) -> State:
        module = module_of()
        module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad])
        options = {"callbacks": [finetuning()], "max_epochs": max_epochs, "max_steps": -1}
        run = trainer(tmp_path, strategy, 2, **options)
        run.fit(module, loader(rank, 2))
        return in_plain_names(run.strategy.handle.full_state_dict())

    def check(rank: int) -> None:
        launched(rank, 2)
        replicated, sharded, frozen = (
            trained(rank, *how) for how in (("zeroshard_ddp", 2), ("zeroshard_zero3", 2), ("zeroshard_zero3", 1))
        )
        assert same_bits(sharded, replicated)
        name = "blocks.0.up.weight"
        assert not torch.equal(sharded[name], frozen[name])
        assert torch.equal(frozen[name], make(Net).state_dict()[name])

    run_ranks(check, 2)


def test_what_lightning_cannot_have_here_is_refused() -> None:
    pytest.importorskip("lightning")
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision
    from lightning.pytorch.strategies import StrategyRegistry

    from zeroshard.integrations import Sharding
    from zeroshard.integrations.lightning import FabricStrategy, ShardedStrategy

    with pytest.raises(TypeError, match="no find_unused_parameters: there is no DistributedDataParallel"):
        ShardedStrategy(find_unused_parameters=True)
    with pytest.raises(TypeError, match="no static_graph"):
        FabricStrategy("zero1", static_graph=True)
    with pytest.raises(TypeError, match="no bucket_cap: there"):
        ShardedStrategy(bucket_cap=25)
    # LightningCLI passes every option of DistributedDataParallel with its default.
    of_ddp = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters.values())
    usual = {one.name: one.default for one in of_ddp if one.name not in ("module", "device_ids")}
    assert usual["find_unused_parameters"] is False and usual["bucket_cap_mb"] is None
    assert ShardedStrategy("zero1", **usual).sharding == FabricStrategy("zero1", **usual).sharding == Sharding("zero1")
    with pytest.raises(ValueError, match="plugin DeepSpeedPrecision is not supported"):
        ShardedStrategy().precision_plugin = DeepSpeedPrecision("32-true")
    with pytest.raises(ValueError, match="leave out one of the two"):
        ShardedStrategy(Sharding(precision="fp32")).precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(ValueError, match=r"unknown keys \['stage'\]"):
        ShardedStrategy({"stage": 3})
    assert StrategyRegistry.get("zeroshard_zero1").sharding == Sharding("zero1")
    assert STRATEGY_REGISTRY.get("zeroshard").sharding == Sharding("zero3")
    strategy = ShardedStrategy()
    with pytest.raises(ValueError, match=r"is not sharded yet: trainer.fit\(model\)"):
        strategy.handle  # noqa: B018  which raises
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
    assert strategy.sharding.precision == "16-mixed"
    assert (strategy.sharding.loss_scale.init, strategy.sharding.loss_scale.growth_interval) == (8.0, 7)


def fit_with_a_fault(rank: int, fault: Fault, folder: Path) -> None:
    launched(rank, 2)
    module = module_of()
    module.net.register_forward_pre_hook(fault.in_step)
    trainer(folder, "zeroshard_zero3", 2).fit(module, loader(rank, 2, data=fault.within(texts())))


def fabric_with_a_fault(rank: int, fault: Fault, folder: Path) -> None:
    launched(rank, 2)
    fabric = fabrics().Fabric(accelerator="cpu", devices=2, strategy="zeroshard_zero3")
    fabric.launch()
    model = make(Net)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    model.register_forward_pre_hook(fault.in_step)
    batches = fabric.setup_dataloaders(loader(rank, 2, data=fault.within(texts())), use_distributed_sampler=False)
    for (tokens,) in batches:
        fabric.backward(loss_of(model, tokens))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("run", [fit_with_a_fault, fabric_with_a_fault])
def test_one_rank_of_lightning_fails_and_all_leave_in_seconds(either: str, run: Any, tmp_path: Path) -> None:
    """The failed rank's teardown must not wait for the other ranks. Fabric has none: by default it has one fault."""
    ours()  # registers the names of strategies
    kinds = FAULTS if EVERYTHING or (run is fit_with_a_fault and either == "lightning") else FAULTS[:1]
    expect_faults_to_end_all(run, tmp_path, kinds=kinds)


def test_a_checkpoint_of_one_package_is_loaded_with_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as without a change of the package, in both directions."""
    for package in LIBRARIES:
        pytest.importorskip(package)

    def weights(package: str, strategy: str, steps: int, rank: int, **options: Any) -> State:
        monkeypatch.setitem(_used, "package", package)
        ours()
        run, module = trainer(tmp_path, strategy, 2, accumulate_grad_batches=1, max_steps=steps), module_of()
        run.fit(module, loader(rank, 2), **options)
        run.save_checkpoint(tmp_path / f"{package}-{strategy}-{steps}.ckpt")
        return in_plain_names(run.strategy.handle.full_state_dict())

    def check(rank: int) -> None:
        launched(rank, 2)
        before = [weights(package, "zeroshard_zero3", 2, rank) for package in LIBRARIES]
        resumed = [
            weights(package, "zeroshard_zero1", 4, rank, ckpt_path=path, **of_any_kind())
            for path in (tmp_path / f"{of}-zeroshard_zero3-2.ckpt" for of in LIBRARIES)
            for package in LIBRARIES
        ]
        assert same_bits(*before) and not same_bits(before[0], resumed[0])
        assert all(same_bits(resumed[0], other) for other in resumed[1:])

    run_ranks(check, 2)


def test_a_strategy_for_the_other_package_is_refused_with_what_to_write() -> None:
    """Lightning's own error shows the object."""
    for package in LIBRARIES:
        pytest.importorskip(package)
    from zeroshard.integrations import lightning as one
    from zeroshard.integrations import pytorch_lightning as other

    for mine, strange in ((one, other), (other, one)):
        right = f"is {mine.__name__}.ShardedStrategy>".replace(".", r"\.")
        with pytest.raises(ValueError, match=right):
            mine.ShardedStrategy.library.Trainer(strategy=strange.ShardedStrategy("zero1"), accelerator="cpu")
        right = f"is {mine.__name__}.FabricStrategy>".replace(".", r"\.")
        with pytest.raises(ValueError, match=right):
            mine.FabricStrategy.library.Fabric(strategy=strange.FabricStrategy("zero1"), accelerator="cpu")
