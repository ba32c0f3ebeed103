"""Requirements of Accelerate's own tests and examples (`docs/compatibility.md`): what the plain Accelerator does, ours
does, or says what to write instead."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.common import as_launched
from tests.integrations.versions import is_older
from tests.late import once
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once("accelerate", "datasets", "zeroshard.integrations.accelerate")  # Accelerate looks at data sets


def accelerator_of(plan: Any, **options: Any) -> Any:
    """An Accelerator, as in a new process. `plan`: None for Accelerate's own."""
    import accelerate
    from accelerate.state import AcceleratorState

    from zeroshard.integrations.accelerate import Accelerator

    AcceleratorState._reset_state()
    return accelerate.Accelerator(**options) if plan is None else Accelerator(sharding=plan, **options)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of_batch(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x).square().mean()


def state_of(accelerator: Any, model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in accelerator.get_state_dict(model).values()]


def test_a_step_without_gradients_is_not_a_skipped_one() -> None:
    """`test_scheduler.py::test_accumulation`. The scheduler stood still, and a second optimizer's, whose turn it was
    not."""

    def check(rank: int) -> None:
        as_launched(rank, 2)
        found = []
        for plan in (None, "ddp", "zero3"):
            accelerator, model = accelerator_of(plan), net()
            first, last = (torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 4))
            rates = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (first, last)]
            model, *prepared = accelerator.prepare(model, first, last, *rates)
            (first, last), rates, skipped = prepared[:2], prepared[2:], []
            for step in range(3):
                if step:  # in the first step no rank has a gradient
                    accelerator.backward(loss_of_batch(model, rank, step))
                first.step(), last.step()
                skipped.append(accelerator.optimizer_step_was_skipped)
                for rate in rates:
                    rate.step()
                first.zero_grad(), last.zero_grad()
            found.append((skipped, [rate.get_last_lr() for rate in rates]))
        assert found[0] == ([False] * 3, [[0.1 * 0.5**6]] * 2)
        assert found[1:] == found[:1] * 2

    run_ranks(check, 2)


def test_the_last_backward_reduces_also_inside_of_no_sync() -> None:
    """`test_sync.py::test_distributed_sync_multiple_fwd`, with all backwards in the block. `trigger_sync_in_backward`
    did nothing, and the step raised."""

    def check(rank: int) -> None:
        as_launched(rank, 2)
        found = []
        for plan in (None, "ddp", "zero1", "zero3"):
            accelerator, model = accelerator_of(plan), net()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(2):
                with accelerator.no_sync(model):
                    losses = [loss_of_batch(model, rank, 3 * step + number) for number in range(3)]
                    accelerator.backward(losses[0]), accelerator.backward(losses[1])
                    with accelerator.trigger_sync_in_backward(model):
                        accelerator.backward(losses[2])
                    if plan is not None:  # the block is as it was
                        assert accelerator.handle_of(model).engine.reducer.local
                optimizer.step(), optimizer.zero_grad()
            found.append(state_of(accelerator, model))
        truth, *ours = found
        for state in ours:
            assert all(torch.equal(*pair) for pair in zip(state, ours[0], strict=True))
            if rank == 0:
                assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(state, truth, strict=True))
        with accelerator.no_sync(nn.MSELoss()), accelerator.trigger_sync_in_backward(nn.MSELoss()):
            pass  # a loss without weights, as in Accelerate: it said that it was not sharded

    run_ranks(check, 2)


def test_a_loss_scale_of_the_arguments_is_for_fp16_alone() -> None:
    """Accelerate makes a scaler for fp16 only (`test_kwargs_handlers.py::test_grad_scaler_kwargs`). In fp32 and bf16
    losses were scaled, too, so two models raised."""

    def check(rank: int) -> None:
        from accelerate.utils import GradScalerKwargs

        as_launched(rank, 1)
        for precision, scale in (("no", None), ("bf16", None), ("fp16", 1024.0)):
            options = {"mixed_precision": precision, "kwargs_handlers": [GradScalerKwargs(init_scale=1024)]}
            accelerator, models = accelerator_of("zero1", **options), (net(), net())
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            *models, first, second = accelerator.prepare(*models, *optimizers)
            loss = loss_of_batch(models[0], 0, 0) + loss_of_batch(models[1], 0, 1)
            if scale is None:
                accelerator.backward(loss)
                assert first.step(), second.step()
            else:
                assert first.optimizer.scaling.default.state.scale == scale
                with pytest.raises(RuntimeError, match="several models have a loss scale"):
                    accelerator.backward(loss)
        accelerator, model = accelerator_of({"plan": "zero1", "loss_scale": 8.0}, **options), net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert optimizer.optimizer.scaling.default.state.scale == 8.0  # Sharding says more than the argument
        off = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(enabled=False)]}
        accelerator, model = accelerator_of("zero1", **off), net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert optimizer.optimizer.scaling.default is None

    run_ranks(check, 1)


def test_what_the_engine_does_not_do_is_refused() -> None:
    """Hooks of DDP (`test_ddp_comm_hook.py`) and AutocastKwargs(enabled=False) were ignored in silence."""

    def check(rank: int) -> None:
        from accelerate.utils import AutocastKwargs, DDPCommunicationHookType, DistributedDataParallelKwargs

        as_launched(rank, 1)
        kinds = DDPCommunicationHookType
        for names in ({"comm_hook": kinds.BF16}, {"comm_hook": kinds.POWER_SGD, "comm_wrapper": kinds.FP16}):
            for mixed_precision, dtypes in (("no", "param=torch.float32, reduce=torch.bfloat16"),
                                            ("fp16", "param=torch.float16, reduce=torch.float16")):  # fmt: skip
                options = [DistributedDataParallelKwargs(**names)]
                with pytest.raises(ValueError, match=rf"Sharding\(precision=MixedPrecision\({dtypes}\)\)"):
                    accelerator_of("ddp", mixed_precision=mixed_precision, kwargs_handlers=options)
        accelerator_of("ddp", kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        without = [AutocastKwargs(enabled=False)]
        with pytest.raises(ValueError, match=r"AutocastKwargs\(enabled=False\).*leave mixed_precision out"):
            accelerator_of("ddp", mixed_precision="bf16", kwargs_handlers=without)
        accelerator_of("ddp", kwargs_handlers=without)

    run_ranks(check, 1)


def test_after_a_refused_plugin_the_next_accelerator_works() -> None:
    """`accelerate launch` with a configuration of FSDP or DeepSpeed sets ACCELERATE_USE_...; a plugin that is passed
    does so for the rest of the process. DeepSpeed was to be installed first."""

    def check(rank: int) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin

        as_launched(rank, 2)
        for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            os.environ[f"ACCELERATE_USE_{name}"] = "true"
            with pytest.raises(ValueError, match=f"accelerate is set up for {name}: leave out its plugin"):
                accelerator_of("zero3")
            del os.environ[f"ACCELERATE_USE_{name}"]
        refused: Any
        for refused in ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, {"deepspeed_plugins": {"a": None}}):
            with pytest.raises(ValueError, match=r"accelerate is set up for (FSDP|DEEPSPEED): leave out its plugin"):
                accelerator_of("zero3", **refused)
            assert accelerator_of("zero3").num_processes == 2

    run_ranks(check, 2)


def test_what_is_refused_is_forgotten() -> None:
    """Accelerate keeps the precision and the parallelism for the process: an Accelerator that was made as the message
    says had them, or was refused for them."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        from accelerate.state import AcceleratorState
        from accelerate.utils import AutocastKwargs

        from zeroshard.integrations.accelerate import Accelerator

        as_launched(rank, 2)
        off = AutocastKwargs(enabled=False)
        with pytest.raises(ValueError, match="leave mixed_precision out to compute in fp32"):
            Accelerator(mixed_precision="bf16", kwargs_handlers=[off])
        assert Accelerator().mixed_precision == "no"
        with pytest.raises(ValueError, match="cannot be changed"):
            Accelerator(mixed_precision="bf16")
        assert Accelerator().mixed_precision == "no"  # what works stays
        AcceleratorState._reset_state()
        with pytest.raises(ValueError, match=r"parallelism_config is not supported: pass Sharding\(mesh="):
            Accelerator(parallelism_config=object())
        assert Accelerator().mixed_precision == "no"

    run_ranks(check, 2)


def test_optimizers_may_be_among_the_joinables() -> None:
    """As with torch's Join. It ended with `'_Optimizer' object has no attribute 'parameters'`."""

    def check(rank: int) -> None:
        as_launched(rank, 2)
        found = []
        for with_optimizer in (False, True):
            accelerator, model = accelerator_of("zero3"), net()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            joinables = [model, optimizer] if with_optimizer else [model]
            with accelerator.join_uneven_inputs(joinables, even_batches=False):
                for number in range(3 - rank):
                    accelerator.backward(loss_of_batch(model, rank, number))
                    optimizer.step(), optimizer.zero_grad()
            found.append(list(accelerator.handle_of(model).full_state_dict().values()))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))

    run_ranks(check, 2)


def test_without_an_argument_the_accelerator_says_whether_ranks_are_joined() -> None:
    """As in Accelerate: `even_batches` of its DataLoaderConfiguration."""

    def check(rank: int) -> None:
        from accelerate.utils import DataLoaderConfiguration

        as_launched(rank, 2)
        counts = []
        for even in (True, False):
            accelerator, model = (
                accelerator_of("zero3", dataloader_config=DataLoaderConfiguration(even_batches=even)),
                net(),
            )
            data = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
            model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
            with accelerator.join_uneven_inputs([model]):
                for number, _ in enumerate(loader):
                    accelerator.backward(loss_of_batch(model, rank, number))
                    optimizer.step(), optimizer.zero_grad()
            counts.append(number + 1)
        assert counts == [2, 2 - rank]

    run_ranks(check, 2)


class Endless(torch.utils.data.IterableDataset[float]):
    def __iter__(self) -> Any:
        return iter([1.0] * 4)


def test_even_batches_of_iterable_data_are_warned_of() -> None:
    """`test_join_raises_warning_for_iterable_when_overriding_even_batches`. It was silent."""

    def check(rank: int) -> None:
        as_launched(rank, 2)
        accelerator, model = accelerator_of("zero3"), net()
        for data, number in ((torch.utils.data.TensorDataset(torch.zeros(4)), 0), (Endless(), 1)):
            model, _ = accelerator.prepare(model, torch.utils.data.DataLoader(data))
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                with accelerator.join_uneven_inputs([model], even_batches=False):
                    pass
            ours = [one for one in seen if "even_batches= is for map-style datasets" in str(one.message)]
            assert len(ours) == number and all(one.filename == __file__ for one in ours)

    run_ranks(check, 2)


def train_in_batches(accelerator: Any, rank: int, size: int, tried: list[int]) -> list[torch.Tensor]:
    """As `inner_training_loop` of `examples/by_feature/memory.py`: batches of more than 8 do not fit."""
    accelerator.free_memory()
    tried.append(size)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def too_large(*_: Any) -> None:
        if size > 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 TiB")

    inside = accelerator.unwrap_model(model)[2]
    if size > 12:
        inside.register_forward_pre_hook(too_large)
    else:
        inside.register_full_backward_hook(too_large)
    for step in range(2):
        accelerator.backward(loss_of_batch(model, rank, step))
        optimizer.step(), optimizer.zero_grad()
    return state_of(accelerator, model)


def test_a_batch_size_that_fits_is_found() -> None:
    """`find_executable_batch_size`: a forward, and then a backward, runs out of memory, and training begins again."""

    def check(rank: int) -> None:
        from accelerate.utils import find_executable_batch_size

        as_launched(rank, 2)
        found = []
        for plan in (None, "ddp", "zero3"):
            accelerator, tried = accelerator_of(plan), []
            train = partial(train_in_batches, accelerator, rank)

            @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=iter((12, 8)).__next__)
            def search(size: int, train: Any = train, tried: list[int] = tried) -> list[torch.Tensor]:
                return train(size, tried)

            found.append(search())
            assert tried == ([16, 14, 12, 10, 9, 8] if is_older() else [16, 12, 8])  # (has no such argument yet)
        for state in found[1:] if rank == 0 else ():
            assert all(torch.equal(*pair) for pair in zip(state, found[0], strict=True))

    run_ranks(check, 2)
