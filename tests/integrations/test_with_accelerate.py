"""Accelerate's loop over a sharded model has the bits of the plain zeroshard loop. It is saved and resumed, and ends
soon after a failure."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.accelerated import AcceleratedLoop
from tests.examples import run_example
from tests.grids import EVERYTHING
from tests.integrations.common import (
    HALF,
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
from tests.kit import Block, Net, State, make, same_bits
from tests.late import once
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once("accelerate", "datasets", "zeroshard.integrations.accelerate")  # Accelerate looks at data sets


def in_turns(number: int, rank: int, num_ranks: int) -> list[int]:
    """Accelerate distributes whole batches over the ranks in turn."""
    first = 2 * (number * num_ranks + rank)
    return [first, first + 1]


class Run(AcceleratedLoop):
    """Accelerate's loop, as in its documentation."""

    def __init__(self, plan: str, mixed_precision: str = "no", data: Any = None, **project: Any) -> None:
        from accelerate.state import AcceleratorState

        from zeroshard.integrations import Sharding
        from zeroshard.integrations.accelerate import Accelerator

        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            gradient_accumulation_steps=MICRO_BATCHES,
            mixed_precision=mixed_precision,
            sharding=Sharding(plan, units=Block),
            **project,
        )
        model = make(Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        # A prepared scheduler counts as many batches as one process would have.
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.9 ** (step // self.accelerator.num_processes)
        )
        loader = torch.utils.data.DataLoader(data or texts(), batch_size=2)
        self.optimizer, self.loader, self.model, self.scheduler = self.accelerator.prepare(
            optimizer, loader, model, scheduler
        )

    def weights(self) -> State:
        return self.accelerator.handle_of(self.model).full_state_dict(main=True)


def test_the_loop_has_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    """A run that is saved, and resumed under another plan, has the bits of one without interruption."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 3)
        project = {"project_config": automatic(tmp_path)}
        for plan, other, mixed in (("zero3", "zero2", "no"), ("ddp", "zero3", "bf16")):
            precision = None if mixed == "no" else mixed
            losses, weights = plain_loop(rank, 3, in_turns, precision)
            run = Run(plan, mixed, **project)
            assert run.train(HALF) == losses[: HALF * MICRO_BATCHES], plan
            run.accelerator.save_state()
            assert run.train(HALF, skip=HALF) == losses[HALF * MICRO_BATCHES :], plan
            assert same_bits(run.weights(), weights), plan
            expect_plain_state(run, weights, rank)
            resumed = Run(other, mixed, **project)
            resumed.accelerator.load_state()
            assert not same_bits(resumed.weights(), weights)
            assert resumed.train(HALF, skip=HALF) == losses[HALF * MICRO_BATCHES :], other
            assert same_bits(resumed.weights(), weights), other
            if precision is None:  # a control
                assert not same_bits(plain_loop(rank, 3, in_turns, max_norm=100.0)[1], weights)
            torch.distributed.barrier()
            if rank == 0:
                shutil.rmtree(tmp_path / "checkpoints")

    run_ranks(check, 3)


@pytest.mark.skipif(not EVERYTHING, reason="takes ten seconds: make test-everything")
def test_a_compiled_model_has_them_too() -> None:
    """Without generated kernels."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        losses, weights = plain_loop(rank, 2, in_turns)
        run = Run("zero3", dynamo_backend="eager")
        assert run.train(STEPS) == losses
        assert torch._dynamo.utils.counters["frames"]["ok"]
        assert same_bits(run.weights(), weights)
        assert run.accelerator.unwrap_model(run.model, keep_torch_compile=False) is run.model._orig_mod

    run_ranks(check, 2)


def test_outputs_and_losses_have_the_dtype_of_the_plain_accelerator() -> None:
    """A loss of bf16 has three digits."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        import accelerate
        from accelerate.state import AcceleratorState

        import zeroshard
        from zeroshard.integrations.accelerate import Accelerator

        as_launched(rank, 1)
        found = []
        for kind, is_sharded in ((accelerate.Accelerator, False), (Accelerator, False), (Accelerator, True)):
            AcceleratorState._reset_state()
            accelerator, model = kind(mixed_precision="bf16"), make(Net)
            if is_sharded:  # who shards the model before says how it returns its outputs
                zeroshard.shard(model, "zero3", precision="bf16")
            found.append(loss_of_outputs(accelerator.prepare(model)))
            accelerator.prepare(model)  # again: it is as asked for
        plain, ours, of_the_user = found
        assert ours[:2] == plain[:2] == (torch.float32, torch.float32)
        assert ours[2] == pytest.approx(plain[2], rel=1e-3) and ours[2] != torch.tensor(ours[2]).bfloat16().item()
        assert of_the_user[:2] == (torch.bfloat16, torch.bfloat16)  # a control

    run_ranks(check, 1)


def test_a_scheduler_does_not_warn_of_its_optimizer() -> None:
    """Torch warns if the optimizer that a scheduler was made for does not count its steps."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        from zeroshard.integrations.accelerate import Accelerator

        as_launched(rank, 1)
        accelerator, model = Accelerator(sharding="zero1"), make(Net)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rates = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, plain, rates)
        (tokens,) = texts().tensors
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                accelerator.backward(loss_of(model, tokens[:8]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert not [str(one.message) for one in seen if "scheduler" in str(one.message)]
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 4]

    run_ranks(check, 1)


def test_a_record_says_more_than_the_argument_of_the_precision() -> None:
    """The remedy that the message about batch norms names."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        from accelerate.state import AcceleratorState

        import zeroshard
        from zeroshard.integrations.accelerate import Accelerator

        as_launched(rank, 1)
        for precision in (None, zeroshard.MixedPrecision(param=torch.bfloat16, keep=(nn.BatchNorm1d,))):
            AcceleratorState._reset_state()
            accelerator = Accelerator(sharding={"precision": precision}, mixed_precision="bf16")
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
            if precision is None:
                with pytest.raises(ValueError, match="keep 1 in fp32, with precision=MixedPrecision"):
                    accelerator.prepare(model)
                continue
            model = accelerator.prepare(model)
            assert model(torch.randn(3, 4)).dtype == torch.float32
            dtypes = {unit.spec.weight_dtype for unit in accelerator.handle_of(model).engine.units}
            assert dtypes == {torch.bfloat16, torch.float32}
        AcceleratorState._reset_state()
        other = zeroshard.MixedPrecision(param=torch.float16)
        with pytest.raises(ValueError, match="leave out one of the two"):
            Accelerator(sharding={"precision": other}, mixed_precision="bf16")

    run_ranks(check, 1)


def automatic(folder: Path) -> Any:
    from accelerate.utils import ProjectConfiguration

    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)


def expect_plain_state(run: Run, weights: State, rank: int) -> None:
    """Check the results of Accelerate's functions that extract state from a prepared model."""
    state = run.accelerator.get_state_dict(run.model)
    assert same_bits(state, weights) if rank == 0 else state == {}
    assert run.accelerator.unwrap_model(run.model) is run.model
    assert type(run.model) is Net
    assert run.scheduler.get_last_lr() == [1e-2 * 0.9**STEPS]


def test_what_else_its_methods_do() -> None:
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        # If a step overflows, it is skipped, and so is the scheduler's step.
        run = Run("zero2", "fp16")
        for poison, skipped in ((1.0, False), (torch.inf if rank == 0 else 1.0, True), (1.0, False)):
            before, rate = run.weights(), run.scheduler.get_last_lr()
            with run.accelerator.no_sync(run.model):
                run.accelerator.backward(loss_of(run.model, texts().tensors[0][:2]))
            run.accelerator.backward(loss_of(run.model, texts().tensors[0][2:4]) * poison)
            run.optimizer.step(), run.scheduler.step(), run.optimizer.zero_grad()
            assert run.accelerator.optimizer_step_was_skipped is skipped
            assert same_bits(before, run.weights()) is skipped
            assert (rate == run.scheduler.get_last_lr()) is skipped
        # A part of the parameters cannot be clipped: their gradients are scaled.
        run.accelerator.backward(loss_of(run.model, texts().tensors[0][:2]))
        with pytest.raises(RuntimeError, match=r"losses were scaled or weighted.* optimizer.clip_grad_norm_"):
            run.accelerator.clip_grad_norm_(run.model.blocks[0].parameters(), 1.0)
        assert float(run.accelerator.clip_grad_norm_(run.model.parameters(), torch.inf)) > 1e-3
        run.accelerator.clip_grad_value_(run.model.parameters(), 1e-9)
        assert 0 < float(run.accelerator.clip_grad_norm_(run.model.parameters(), torch.inf)) < 1e-6
        clip_between_micro_batches(run)
        with pytest.raises(RuntimeError, match="register_for_checkpointing"):
            run.accelerator.register_save_state_pre_hook(print)
        uneven(rank)

    run_ranks(check, 2)


def test_the_state_of_a_part_has_the_names_and_values_of_that_part() -> None:
    """It was that of the whole model: a part that was saved by itself could not be loaded."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        run = Run("zero3")
        state = run.accelerator.get_state_dict(run.model.blocks)
        plain = make(Net).blocks.state_dict()
        assert same_bits(state, plain) if rank == 0 else state == {}

    run_ranks(check, 2)


def test_a_loss_without_parameters_is_prepared_and_saved(tmp_path: Path) -> None:
    """`save_state` said that it was not sharded yet. Its buffers are saved by Accelerate."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        run = Run("zero3")
        loss = run.accelerator.prepare(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])))
        with run.accelerator.accumulate(run.model, loss):
            run.accelerator.backward(loss_of(run.model, texts().tensors[0][:2]))
        run.model.zero_grad()
        run.accelerator.save_state(str(tmp_path))
        loss.weight.zero_()
        run.accelerator.load_state(str(tmp_path))
        assert loss.weight.tolist() == [1.0, 2.0]
        own = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-of-{rank}"))  # each rank on its own disk
        shutil.rmtree(own / "zeroshard") if rank == 1 else None
        with pytest.raises(RuntimeError, match=r"load_state \(on rank 1\): there is no folder .*-of-1.zeroshard\."):
            run.accelerator.load_state(str(own))
        dist.barrier()
        (tmp_path / "zeroshard").rename(tmp_path / "other") if rank == 0 else None
        dist.barrier()
        loss.weight.zero_()
        with pytest.raises(RuntimeError, match=r"load_state: there is no folder .*zeroshard\. save_state of zeroshard"):
            run.accelerator.load_state(str(tmp_path))
        assert not loss.weight.any()  # nothing has been loaded

    run_ranks(check, 2)


def test_local_sgd_is_refused() -> None:
    """It ended with `'Net' object has no attribute 'no_sync'`."""

    def check(rank: int) -> None:
        from accelerate.local_sgd import LocalSGD

        as_launched(rank, 2)
        run = Run("zero2")
        told = r"accelerator\.no_sync\(model\).*LocalSGD is not supported"
        with pytest.raises(RuntimeError, match=told), LocalSGD(run.accelerator, run.model, 2):
            raise AssertionError("not entered")
        run.accelerator.prepare(run.model)  # once more
        run.accelerator.handle_of(run.model).close()
        assert not hasattr(run.model, "no_sync")

    run_ranks(check, 2)


def test_after_close_a_model_needs_a_new_optimizer() -> None:
    """It was told at the first step, as if `shard` had not been called."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 1)
        run = Run("zero3")
        run.train(1)
        run.accelerator.handle_of(run.model).close()
        with pytest.raises(
            RuntimeError, match=r"accelerator.prepare: the handle of this optimizer's model has been cl"
        ):
            run.accelerator.prepare(run.model, run.optimizer)
        run.accelerator.free_memory()
        run.model, run.optimizer = run.accelerator.prepare(run.model, torch.optim.AdamW(run.model.parameters()))
        before = run.weights()
        run.accelerator.backward(loss_of(run.model, texts().tensors[0][:4]))
        run.optimizer.step()
        assert not same_bits(before, run.weights())

    run_ranks(check, 1)


def test_after_another_prepare_the_old_optimizer_is_forgotten(tmp_path: Path) -> None:
    """A clip went to the old one, which raised; `load_state` could not load what `save_state` had saved; and its last
    step was told as a skipped one for ever."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        run = Run("zero3", "fp16")
        first, prepare = run.optimizer, run.accelerator.prepare
        run.accelerator.sync_gradients = True
        run.accelerator.backward(loss_of(run.model, texts().tensors[0][:4]) * torch.inf)
        first.step()
        assert run.accelerator.optimizer_step_was_skipped
        run.optimizer = prepare(torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9))
        run.accelerator.backward(loss_of(run.model, texts().tensors[0][:4]))
        assert float(run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)) > 0
        run.accelerator.clip_grad_value_(run.model.parameters(), 0.01)
        run.optimizer.step()
        assert not run.accelerator.optimizer_step_was_skipped
        before = run.weights()
        run.accelerator.save_state(str(tmp_path))
        run.accelerator.backward(loss_of(run.model, texts().tensors[0][:4]))
        run.optimizer.step()
        run.accelerator.load_state(str(tmp_path))
        assert same_bits(run.weights(), before)
        with pytest.raises(RuntimeError, match="this optimizer is out of use"):
            first.step()

    run_ranks(check, 2)


def test_one_clip_of_several_optimizers_and_of_a_part() -> None:
    """As with the plain Accelerator."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        import accelerate
        from accelerate.state import AcceleratorState

        from zeroshard.integrations.accelerate import Accelerator

        as_launched(rank, 2)
        found = []
        for build in (accelerate.Accelerator, Accelerator, partial(Accelerator, sharding="zero2")):
            AcceleratorState._reset_state()
            accelerator, model, norms = build(), make(Net), []
            blocks = [p for name, p in model.named_parameters() if name.startswith("blocks")]
            others = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
            model, *optimizers = accelerator.prepare(
                model, torch.optim.SGD(blocks, lr=0.1), torch.optim.AdamW(others, lr=1e-2)
            )
            for step in range(3):
                accelerator.backward(loss_of(model, texts().tensors[0][4 * step + 2 * rank :][:2]))
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                norms.append(float(accelerator.clip_grad_norm_(others[:1], 0.1, norm_type=torch.inf)))
                accelerator.clip_grad_value_(blocks[:3], 0.02)
                for optimizer in optimizers:
                    optimizer.step(), optimizer.zero_grad()
            found.append((norms, accelerator.get_state_dict(model)))
        (norms, state), *others = found
        for of_other, state_of_other in others:
            assert of_other == pytest.approx(norms, rel=1e-4)
            assert all(torch.allclose(value, state[name], atol=1e-5) for name, value in state_of_other.items())

    run_ranks(check, 2)


def clip_between_micro_batches(run: Run) -> None:
    """It raises, and leaves the step as it was."""
    run.optimizer.zero_grad()
    for number in range(MICRO_BATCHES):
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(loss_of(run.model, texts().tensors[0][:2]))
            for clip in (run.accelerator.clip_grad_norm_, run.accelerator.clip_grad_value_):
                if number + 1 < MICRO_BATCHES:
                    with pytest.raises(RuntimeError, match=r"more micro-batches .*`if accelerator\.sync_gradients:`"):
                        clip(run.model.parameters(), 1.0)
                else:
                    clip(run.model.parameters(), 1.0)
            run.optimizer.step()
    assert not run.accelerator.optimizer_step_was_skipped


def uneven(rank: int) -> None:
    """Rank 0 has one batch more. All ranks end with the same weights. Without the join block, rank 0 would wait for
    ever."""
    run = Run("zero3")
    loader = run.accelerator.prepare(torch.utils.data.DataLoader(texts(), batch_size=len(texts()) // 3))
    sizes = []
    with run.accelerator.join_uneven_inputs([run.model], even_batches=False):
        for (tokens,) in loader:
            sizes.append(len(tokens))
            run.optimizer.zero_grad()
            run.accelerator.backward(loss_of(run.model, tokens))
            run.optimizer.step()
    assert len(sizes) == (2, 1)[rank]
    assert all(one.batch_sampler.even_batches for one in run.accelerator._dataloaders)
    found = [None, None]
    torch.distributed.all_gather_object(found, {name: value.tolist() for name, value in run.weights().items()})
    assert found[0] == found[1]


def test_what_shards_too_is_refused() -> None:
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        from accelerate.state import AcceleratorState
        from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

        from zeroshard.integrations.accelerate import Accelerator

        as_launched(rank, 2)
        refused: list[tuple[str, dict[str, Any]]] = [
            (r"unknown keys \['unit'\]", {"sharding": {"plan": 3, "unit": Block}}),
            ("leave out one of the two", {"sharding": {"precision": "fp32"}, "mixed_precision": "bf16"}),
            ("write into one folder", {"project_config": ProjectConfiguration(save_on_each_node=True)}),
            ("zeroshard shards the model here", {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
        ]
        for reason, options in refused:
            AcceleratorState._reset_state()
            os.environ.pop("ACCELERATE_USE_FSDP", None)
            with pytest.raises(ValueError, match=reason):
                Accelerator(**options)
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        AcceleratorState._reset_state()
        accelerator = Accelerator()
        with pytest.raises(ValueError, match=r"is not sharded yet: accelerator.prepare\(model\) first"):
            accelerator.handle_of(make(Net))
        with pytest.raises(ValueError, match="parameters that belong to no sharded model: prepare"):
            accelerator.prepare(torch.optim.SGD(make(Net).parameters(), lr=1.0))

    run_ranks(check, 2)


def test_the_example_learns() -> None:
    """Micro-batches of a step belong together, so the loss falls at every second one: `examples/with_accelerate.py`."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> list[float]:
        as_launched(rank, 2)
        return list(run_example("with_accelerate")["losses"])

    first, second = run_ranks(check, 2)
    assert first == second and len(first) == 60
    assert sum(first[-6:]) < sum(first[:6]) / 4


def run_with_a_fault(rank: int, fault: Fault) -> None:
    as_launched(rank, 2)
    run = Run("zero3", data=fault.within(texts()))
    run.model.register_forward_pre_hook(fault.in_step)
    run.train(STEPS)


def test_one_rank_fails_and_all_leave_in_seconds() -> None:
    pytest.importorskip("accelerate")
    expect_faults_to_end_all(run_with_a_fault)
