"""What tests of Lightning require of a strategy, and programs that are close to them. Where the arithmetic is the same,
the bits are those of Lightning's own DDP."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.test_with_lightning import finetuning, in_plain_names, launched, loader, module_of, trainer
from tests.integrations.versions import of_any_kind
from tests.kit import Block, Net, make, same_bits
from tests.late import once
from zeroshard.integrations.sharding import handle_of_model
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once("lightning", "zeroshard.integrations.lightning")

DDP = "ddp_find_unused_parameters_true"
SIMPLE = {"accumulate_grad_batches": 1, "gradient_clip_val": None}


def weights_of(module: Any) -> dict[str, Tensor]:
    """The full weights of a module, sharded or plain, under names without those of torch.compile."""
    handle = handle_of_model(module)
    found = module.state_dict() if handle is None else handle.full_state_dict(main=True)
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in found.items()}


def optimizer_of(module: Any) -> Any:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad])


def compiled_inside() -> Any:
    """A module of which a part is compiled (with a backend that changes nothing)."""
    module = module_of()
    module.net.blocks[0] = torch.compile(module.net.blocks[0], backend="eager")
    return module


def test_without_an_optimizer_nothing_is_trained(tmp_path: Path) -> None:
    """`configure_optimizers` returns None: gradients are computed in every step, and nobody uses them."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        losses = []
        for strategy in (DDP, "zeroshard_zero1", "zeroshard_zero3"):
            module = module_of()
            module.configure_optimizers = lambda: None
            run = trainer(tmp_path, strategy, 2, gradient_clip_val=0.1)
            run.fit(module, loader(rank, 2), loader(rank, 2))
            run.save_checkpoint(path := tmp_path / f"{strategy}.ckpt")
            again = module_of()
            again.configure_optimizers = lambda: None
            trainer(tmp_path, strategy, 2, max_steps=4).fit(again, loader(rank, 2), ckpt_path=path)
            assert same_bits(in_plain_names(weights_of(again)), dict(make(Net).state_dict()))
            losses.append(module.losses)
        assert losses[0] == losses[1] == losses[2]

    run_ranks(check, 2)


def test_a_compiled_module_is_used_again_and_again(tmp_path: Path) -> None:
    """`trainer.test(compiled)` after `trainer.fit(compiled)` compiles the steps once more."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        found = []
        for strategy in (DDP, "zeroshard_zero3"):
            module, seen = module_of(), []

            def training_step(batch: Any, batch_idx: int, net: Any = module.net) -> Any:
                return net(batch[0]).pow(2).mean()

            def test_step(batch: Any, batch_idx: int, net: Any = module.net, seen: Any = seen) -> None:
                seen.append(net(batch[0]).sum())

            module.training_step, module.test_step = training_step, test_step
            compiled = torch.compile(module, backend="eager")
            run = trainer(tmp_path, strategy, 2, **SIMPLE)
            run.fit(compiled, loader(rank, 2))
            for _ in range(2):
                run.test(compiled, loader(rank, 2), verbose=False)
            found.append((weights_of(module), torch.stack(seen)))
        (plain, of_plain), (ours, of_ours) = found
        assert same_bits(plain, ours) and torch.equal(of_plain, of_ours)

    run_ranks(check, 2)


def test_checkpoints_of_a_module_with_a_compiled_part_go_both_ways(tmp_path: Path) -> None:
    """The names in them have `_orig_mod`, as those of the module's own state dict."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        paths = {}
        for strategy in (DDP, "zeroshard_zero3"):
            run, module = trainer(tmp_path, strategy, 2, **SIMPLE), compiled_inside()
            run.fit(module, loader(rank, 2))
            run.save_checkpoint(paths.setdefault(strategy, tmp_path / f"{strategy}.ckpt"))
        states = [torch.load(path, weights_only=False)["state_dict"] for path in paths.values()]
        assert list(states[0]) == list(states[1]) and same_bits(*states)
        assert any("_orig_mod" in name for name in states[0])
        found = []
        for strategy, other in (paths, list(paths)[::-1]):
            module = compiled_inside()
            trainer(tmp_path, strategy, 2, **SIMPLE, max_steps=4).fit(module, loader(rank, 2), ckpt_path=paths[other])
            found.append((module.losses, weights_of(module)))
        assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])

    run_ranks(check, 2)


def test_a_checkpoint_is_loaded_into_the_plain_module(tmp_path: Path) -> None:
    """`on_load_checkpoint` comes before `configure_optimizers`, and may replace layers; `weights_only=False` holds."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        found = []
        for strategy in (DDP, "zeroshard_zero3"):
            module, path = module_of(), tmp_path / f"{strategy}.ckpt"
            module.on_save_checkpoint = lambda checkpoint: checkpoint.update(kind=Block)
            run = trainer(tmp_path, strategy, 2, **SIMPLE)
            run.fit(module, loader(rank, 2))
            run.save_checkpoint(path)
            loaded = module_of()
            loaded.net.head = None

            def on_load_checkpoint(checkpoint: Any, loaded: Any = loaded) -> None:
                assert checkpoint["kind"] is Block
                rows, columns = checkpoint["state_dict"]["net.head.weight"].shape
                loaded.net.head = nn.Linear(columns, rows)

            loaded.on_load_checkpoint = on_load_checkpoint
            again = trainer(tmp_path, strategy, 2, **SIMPLE, max_steps=4)
            again.fit(loaded, loader(rank, 2), ckpt_path=path, **of_any_kind())
            found.append((loaded.losses, weights_of(loaded)))
        assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])

    run_ranks(check, 2)


def test_the_modules_own_backward_gets_the_scaled_loss(tmp_path: Path) -> None:
    """A LightningModule that overrides `backward`, and a gradient that is passed to it by position."""
    pytest.importorskip("lightning")
    from zeroshard.integrations import Sharding
    from zeroshard.integrations.lightning import FabricStrategy, ShardedStrategy

    def check(rank: int) -> None:
        import lightning

        launched(rank, 2)
        sharding = Sharding("zero3", units=Block, precision="fp16", loss_scale=64.0)
        module, seen = module_of(), []

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            seen.append(loss.item())
            loss.backward(*args, **kwargs)

        module.backward = backward
        trainer(tmp_path, ShardedStrategy(sharding), 2, **SIMPLE).fit(module, loader(rank, 2))
        assert seen == [loss * 64.0 for loss in module.losses] and len(seen) > 1

        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(sharding))
        fabric.launch()
        weights = []
        gc.disable()  # the first model is dropped, and only a collection frees it
        for given in (True, False):
            plain = make(Net)
            model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
            output = model(next(iter(loader(rank, 2)))[0])
            if given:
                fabric.backward(output, torch.full_like(output, 0.125))
            else:
                fabric.backward((output * 0.125).sum())
            optimizer.step()
            weights.append(weights_of(plain))
            optimizer.itself = optimizer
        assert same_bits(*weights) and not same_bits(weights[0], dict(make(Net).state_dict()))

    run_ranks(check, 2)


def test_a_callback_that_unfreezes_is_resumed(tmp_path: Path) -> None:
    """It assigns `optimizer.param_groups`, with the groups that it had added before."""
    pytest.importorskip("lightning")

    def check(rank: int) -> None:
        launched(rank, 2)
        found = []
        for strategy in ("zeroshard_ddp", "zeroshard_zero3"):
            for begin, end in ((0, 2), (2, 3)):
                module = module_of()
                module.configure_optimizers = partial(optimizer_of, module)
                run = trainer(tmp_path, strategy, 2, callbacks=[finetuning()], max_epochs=end, max_steps=-1)
                path = tmp_path / f"{strategy}.ckpt"
                run.fit(module, loader(rank, 2), ckpt_path=path if begin else None)
                run.save_checkpoint(path)
            groups = run.optimizers[0].param_groups
            assert len(groups) > 1 and {group["lr"] for group in groups[1:]} >= {0.1}
            found.append(weights_of(module))
        assert same_bits(*found)

    run_ranks(check, 2)


def test_averaged_weights_stay_while_batch_norms_are_updated(tmp_path: Path) -> None:
    """`StochasticWeightAveraging` passes over the data once more, without backward. Lightning steps once in it."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    def check(rank: int) -> None:
        launched(rank, 2)
        found = []
        for strategy in ("zeroshard_ddp", "zeroshard_zero1"):
            module, averaging = module_of(), StochasticWeightAveraging(0.01, swa_epoch_start=1)
            module.norm = nn.BatchNorm1d(1)
            options = {**SIMPLE, "callbacks": [averaging], "max_epochs": 3, "max_steps": -1, "limit_train_batches": 2}
            trainer(tmp_path, strategy, 2, **options).fit(module, loader(rank, 2))
            weights = weights_of(module)
            found.append({name.removeprefix("net."): weights[name] for name in weights if name.startswith("net.")})
            assert same_bits(found[-1], weights_of(averaging._average_model.net)) and len(module.losses) == 4 * 2
        assert same_bits(*found) and not same_bits(found[0], dict(make(Net).state_dict()))

    run_ranks(check, 2)


def test_param_groups_are_added_through_the_wrappers(tmp_path: Path) -> None:
    """The optimizers that users of Lightning and Fabric have inherit from the class of the one inside."""
    pytest.importorskip("lightning")
    import lightning

    def of_fabric(rank: int, strategy: str) -> dict[str, Tensor]:
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        plain = make(Net)
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.head.parameters(), lr=0.1))
        for number, (tokens,) in enumerate(loader(rank, 2)):
            if number == 1:
                optimizer.add_param_group({"params": list(plain.blocks.parameters()), "lr": 0.05})
            plain.zero_grad()
            fabric.backward(model(tokens).pow(2).mean())
            optimizer.step()
        return weights_of(plain)

    def of_trainer(rank: int, strategy: str) -> dict[str, Tensor]:
        module = module_of()
        module.automatic_optimization = False
        module.configure_optimizers = lambda: torch.optim.SGD(module.net.head.parameters(), lr=0.1)

        def training_step(batch: Any, batch_idx: int) -> None:
            optimizer = module.optimizers()
            if batch_idx == 1:
                optimizer.add_param_group({"params": list(module.net.blocks.parameters()), "lr": 0.05})
            optimizer.zero_grad()
            module.manual_backward(module.net(batch[0]).pow(2).mean())
            optimizer.step()

        module.training_step = training_step
        trainer(tmp_path, strategy, 2, **SIMPLE, max_steps=3).fit(module, loader(rank, 2))
        return weights_of(module)

    def check(rank: int) -> None:
        launched(rank, 2)
        for run in (of_fabric, of_trainer):
            plain, ours = run(rank, "ddp" if run is of_fabric else DDP), run(rank, "zeroshard_zero3")
            assert same_bits(plain, ours), run.__name__

    run_ranks(check, 2)


def test_options_of_lightnings_ddp_are_refused() -> None:
    pytest.importorskip("lightning")
    from zeroshard.integrations.lightning import ShardedStrategy

    with pytest.raises(TypeError, match="no ddp_comm_hook: there is no DistributedDataParallel"):
        ShardedStrategy(ddp_comm_hook=print)
    with pytest.raises(TypeError, match="no model_averaging_period"):
        ShardedStrategy(model_averaging_period=4)
    assert ShardedStrategy(ddp_comm_hook=None).sharding.plan == "zero3"
