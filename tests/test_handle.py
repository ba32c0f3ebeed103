"""The handle: full weights in and out, `close`, local accumulation; the model keeps its class, names and parameters."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import (
    WIDTH,
    Block,
    Job,
    Net,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train,
    train_reference,
    travelling,
    with_plans,
)
from tests.patience import give_up_after
from tests.together import in_turn, on_ranks
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.model.absent import as_tensors, is_absent
from zeroshard.ranks.mesh import Mesh
from zeroshard.testing import run_ranks


class WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__(tied=True)
        self.batch_norm = nn.BatchNorm1d(7)
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.embed.weight.requires_grad_(False)


def started(plan: Any, rank: int, model: nn.Module, precision: Any = None, steps: int = 2) -> tuple[Any, Any]:
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
    return handle, optimizer


# The model stays itself -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_model_keeps_its_class_names_and_parameters(rank: int) -> None:
    for plan in (zeroshard.DDP, zeroshard.ZERO3):
        model = make(Net)
        before = {name: (id(p), p.shape, p.requires_grad) for name, p in model.named_parameters()}
        modules = [type(module) for module in model.modules()]
        handle, _ = started(plan, rank, model)
        assert {name: (id(p), p.shape, p.requires_grad) for name, p in model.named_parameters()} == before
        assert [type(module) for module in model.modules()] == modules
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        with handle.unsharded():
            assert all(type(p) is nn.Parameter for p in model.parameters())
        own = {"extra_repr", "zero_grad"}  # for print(model), and hooks
        own |= {"_call_impl"}  # for calls that are interrupted
        assert vars(model).keys() == vars(make(Net)).keys() | own
        assert handle.model is model


@on_ranks(3)
def test_a_parameter_that_is_elsewhere_can_be_neither_read_nor_written(rank: int) -> None:
    model = make(Net)
    handle, _ = started(zeroshard.ZERO3, rank, model)
    for parameter in model.parameters():
        with pytest.raises(RuntimeError, match=r"isnan: the values of parameter .* are not here"):
            parameter.isnan()
        with pytest.raises(RuntimeError, match=r"add_: the values of parameter .* are not here"), torch.no_grad():
            parameter.add_(1.0)
        with as_tensors():
            assert parameter.untyped_storage().nbytes() < 64  # one number for each parameter of the unit
    assert not any(value.isnan().any() for value in handle.full_state_dict().values())


@pytest.mark.by_cpu
def test_rank_0_gives_the_first_values() -> None:
    def check(rank: int) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(rank)
        model = WithBuffers()
        model.batch_norm.running_mean += rank
        handle = zeroshard.shard(model, "zero3", units=Block)
        return handle.full_state_dict(), model.hidden

    torch.manual_seed(0)
    first = WithBuffers()
    for weights, hidden in run_ranks(check, 3):
        assert same_bits(weights, dict(first.state_dict()))
        assert torch.equal(hidden, first.hidden)


# Weights in and out ---------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_full_state_dict_has_the_plain_models_names_and_values(rank: int) -> list[Any]:
    logs = []
    for plan in plans_of(0):
        model = make(WithBuffers)
        plain = {name: value.clone() for name, value in model.state_dict().items()}
        handle = zeroshard.shard(model, plan, units=Block)
        found = handle.full_state_dict()
        assert list(found) == list(plain) and "hidden" not in found
        assert same_bits(found, plain)
        found["head.weight"].zero_()  # a copy
        assert same_bits(handle.full_state_dict(), plain)
        model(torch.zeros(1, 2, dtype=torch.long))
        logs.append(handle.comm_log)
    return logs


def test_main_values_are_the_references() -> None:
    """`full_state_dict(main=True)` is fp32 in every precision, and the weights are these values, rounded."""
    jobs = {precision: Job(precision=precision, steps=2, units=Block) for precision in ("bf16", "bf16-remainder")}
    expected = run_ranks(lambda rank: {p: train_reference(job, 3)[0].weights for p, job in jobs.items()}, 1)[0]

    def check(rank: int) -> Any:
        mains = {}
        for precision, plan in with_plans((*jobs, "fp16")):
            model = make(Net)
            handle, _ = started(plan, rank, model, precision)
            weights, main = handle.full_state_dict(), handle.full_state_dict(main=True)
            assert all(value.dtype == torch.float32 for value in main.values())
            largest = max(float((main[name] - weights[name].float()).abs().max()) for name in main)
            assert 0 < largest < 2**-8 * 4, (plan, precision)
            if precision in jobs:  # fp16's loss is scaled
                assert same_bits(weights, expected[precision]), (plan, precision)
            assert same_bits(main, mains.setdefault(precision, main)), (plan, precision)
        return mains

    mains = run_ranks(check, 3)
    for other, precision in itertools.product(mains[1:], mains[0]):
        assert same_bits(mains[0][precision], other[precision]), precision


@on_ranks(2)
def test_loaded_weights_are_what_training_goes_on_with(rank: int) -> None:
    for precision, plan in with_plans((None, "bf16", "bf16-remainder")):
        what = (precision, plan)
        source, target = make(Net), make(Net, 1)
        expected, _ = started(plan, rank, source, precision, steps=1)
        handle = zeroshard.shard(target, plan, units=Block, precision=precision)
        main = expected.full_state_dict(main=True)
        handle.load_full_state_dict(main)
        assert same_bits(handle.full_state_dict(), expected.full_state_dict()), what
        assert same_bits(handle.full_state_dict(main=True), main), what
        sgd = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        sgd.backward(loss_of_tokens(target, rank, 0, 5))
        sgd.step()
        assert not same_bits(handle.full_state_dict(main=True), main), what


@on_ranks(3)
def test_unsharded_shows_everything_and_writes_only_when_asked(rank: int) -> Any:
    log = []
    for precision, plan in with_plans((None, "bf16", "bf16-remainder")):
        model = make(Net)
        handle, optimizer = started(plan, rank, model, precision, steps=1)
        weights = handle.full_state_dict()
        with handle.unsharded():
            inside = {name: value.clone() for name, value in model.state_dict().items()}
            loss_of_tokens(model, rank, 0, 3)
        assert same_bits(inside, weights)
        assert same_bits(handle.full_state_dict(), weights)
        with handle.unsharded(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        doubled = {name: 2 * value for name, value in weights.items()}
        assert same_bits(handle.full_state_dict(), doubled)
        main = handle.full_state_dict(main=True)
        assert all(torch.equal(main[name], doubled[name].float()) for name in main)
        with pytest.raises(KeyError), handle.unsharded():
            raise KeyError("in the user's code")
        optimizer.backward(loss_of_tokens(model, rank, 0, 3))
        assert optimizer.step().applied
        if plan is zeroshard.ZERO3:
            assert is_absent(next(model.parameters()))
        log.append(handle.comm_log)
    return log


@on_ranks(3)
def test_inside_unsharded_ranks_may_run_what_each_likes(rank: int) -> Any:
    """A forward inside the scope used to hide the weights at its end: they were absent for the rest of the scope."""

    def run(rank: int, model: nn.Module, handle: Any) -> None:
        with handle.unsharded():
            for step in range(rank):  # rank 0 calls nothing
                loss_of_tokens(model, rank, 0, step)
                with torch.no_grad():
                    assert loss_of_tokens(model, rank, 0, step).isfinite()
                assert not any(parameter.isnan().any() for parameter in model.parameters())
            with handle.unsharded(write=True), torch.no_grad():
                model.norm.weight.mul_(2)
            model.blocks[0](torch.zeros(1, WIDTH)).sum().backward()
            assert not any(parameter.isnan().any() for parameter in model.parameters())
            model.state_dict()

    log = []
    for plan in plans_of(1):
        model = make(Net)
        handle, optimizer = started(plan, rank, model, steps=1)
        expected = handle.full_state_dict()
        before = len(handle.comm_log.entries)
        run(rank, model, handle)
        events = list(handle.comm_log.entries)[before:]
        gathers = [event for event in events if event.op == "all_gather" and event.phase == "unshard"]
        assert len(gathers) == (len(handle.engine.units) if plan is zeroshard.ZERO3 else 0)
        optimizer.zero_grad()
        assert same_bits(handle.full_state_dict(), {**expected, "norm.weight": 2 * expected["norm.weight"]})
        optimizer.backward(loss_of_tokens(model, rank, 0, 3))
        assert optimizer.step().applied
        if plan is zeroshard.ZERO3:
            assert is_absent(next(model.parameters()))
        log.append(handle.comm_log)
    return log


def test_without_unsharded_a_rank_that_runs_more_waits_and_says_so(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = make(Net)
        started("zero3", rank, model)
        loss_of_tokens(model, rank, 0, 0)
        dist.barrier()
        if rank == 1:
            give_up_after(0.2)
            with pytest.raises(RuntimeError, match=r"unit .*: its weights have not all arrived(.|\n)*handle.unsharded"):
                loss_of_tokens(model, rank, 0, 1)
            (tmp_path / "told").touch()

    run_ranks(check, 2)
    assert (tmp_path / "told").exists()


class WithScale(Net):
    """Has a parameter of its own, which is copied before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@on_ranks(2)
def test_a_sharded_model_is_not_copied_nor_pickled(rank: int) -> None:
    for kind, plan in with_plans((Net, WithScale)):
        model = make(kind)
        handle, _ = started(plan, rank, model)
        for whole in (model, handle):
            with pytest.raises(TypeError, match=r"cannot be copied: copy it before shard\(\), or build a new one"):
                copy.deepcopy(whole)
            told = r"cannot be pickled: save handle.full_state_dict\(\) instead"
            with pytest.raises((TypeError, RuntimeError), match=told):
                torch.save(whole, os.devnull)
        handle.close()
        assert same_bits(copy.deepcopy(model).state_dict(), model.state_dict())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.factor)  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_shallow_copy_runs_itself(rank: int) -> None:
    """It shares the parameters, and has attributes of its own. A call of it ran the original."""
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for inner, plan in with_plans((False, True)):
        model = make(lambda: nn.Sequential(Scaled(), nn.Linear(WIDTH, 1)))
        truth = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan, units=Scaled)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(truth.parameters(), lr=0.1)
        other, of_truth = (copy.copy(one[0] if inner else one) for one in (model, truth))
        for one in (other, of_truth):
            changed: Any = one if inner else copy.copy(one[0])  # type: ignore[index]
            changed.factor = 3.0
            if not inner:
                one._modules = {**one._modules, "0": changed}
        for _ in range(2):
            losses = [one(x).square().sum() for one in (other, of_truth)]
            assert torch.equal(*losses)
            for loss in losses:
                torch.autograd.backward(loss)
            optimizer.step()
            plain.step()
            plain.zero_grad()
        assert same_bits(handle.full_state_dict(), truth.state_dict())
        handle.close()


class Fast(nn.Module):
    """As higher makes it of a module: a copy of its attributes, with weights of its own that are no parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules"):
                setattr(self, name, value)
        self.of_class = type(module)
        self.own = {name: value.clone() for name, value in module._parameters.items() if value is not None}
        for name, child in module.named_children():
            self.add_module(name, Fast(child))

    def forward(self, *args: Any) -> Any:
        vars(self).update(self.own)
        return self.of_class.forward(self, *args)  # type: ignore[arg-type]

    def take(self, factor: float, loss: Tensor) -> None:
        owners = [(one.own, name) for one in self.modules() if isinstance(one, Fast) for name in one.own]
        gradients = torch.autograd.grad(loss, [own[name] for own, name in owners], create_graph=True)
        for (own, name), gradient in zip(owners, gradients, strict=True):
            own[name] = own[name] - factor * gradient


@on_ranks(2)
def test_a_copy_of_the_attributes_runs_itself(rank: int) -> None:
    """Two inner steps of higher's kind. A call of such a copy ran the original, with the original's weights."""
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for units, plan in with_plans((Scaled, nn.Linear)):
        model = make(Scaled)
        truth = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan, units=units)
        losses = []
        for one in (model, truth):
            with handle.unsharded():
                fast = Fast(one)
                for _ in range(2):
                    fast.take(0.1, fast(x).square().sum())
                losses.append(fast(x).square().sum())
                losses[-1].backward()
        assert torch.equal(*losses)
        for name, parameter in truth.named_parameters():
            assert torch.equal(handle.gradient(name), parameter.grad), (name, plan)  # type: ignore[arg-type]


@on_ranks(2)
def test_evaluation_needs_no_ceremony(rank: int) -> None:
    """Forward under no_grad and inference_mode in either order, of the whole model and of parts, before and between
    steps.

    (Tensors that an evaluation under inference_mode had allocated could not be written to by the training after it.)
    """
    both = (torch.no_grad, torch.inference_mode)

    for modes, plan in with_plans((both, both[::-1])):
        model, plain = make(Net), make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
        tokens = torch.arange(6).view(2, 3)
        for seed in (7, 8):
            for mode in modes:
                with mode():
                    expected = plain(tokens)
                    assert torch.equal(model(tokens), expected)
                    part = model.blocks[1](model.embed(tokens))
                    assert torch.equal(part, plain.blocks[1](plain.embed(tokens)))
            assert torch.equal(model(tokens).detach(), expected)
            optimizer.backward(loss_of_tokens(model, rank, 0, seed))
            optimizer.step()
            with modes[0]():
                assert not torch.equal(model(tokens), expected)
                plain.load_state_dict(handle.full_state_dict())


# A plain model back ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_close_gives_frozen_units_back_that_took_turns_in_a_place(rank: int) -> None:
    """As with adapters on a frozen model. close() once gathered the third unit into the pool buffer that still held the
    first unit's parameters."""
    for plan in plans_of(1):
        model = make(lambda: Net(blocks=4))
        model.blocks.requires_grad_(False)
        handle = zeroshard.shard(model, plan, units=Block)
        before = handle.full_state_dict()
        assert len([unit for unit in handle.engine.units if not unit.spec.trainable]) == 4
        handle.close()
        assert same_bits(dict(model.state_dict()), before)
        loss_of_tokens(model, rank, 0, 0).backward()


@on_ranks(2)
def test_close_gives_a_plain_model_back(rank: int) -> None:
    for precision, plan in with_plans((None, "bf16", "bf16-remainder")):
        model = make(WithBuffers if precision is None else Net)
        names = {name: id(p) for name, p in model.named_parameters()}
        handle, optimizer = started(plan, rank, model, precision, steps=1)
        main = handle.full_state_dict(main=True)
        units = [weakref.ref(unit) for unit in handle.engine.units]
        handle.close()
        assert all(torch.equal(value, main[name]) for name, value in model.state_dict().items()), (
            precision,
            plan,
        )
        assert {name: id(p) for name, p in model.named_parameters()} == names
        assert all(p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters())
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == 4 * sum(p.numel() for p in model.parameters())
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        del optimizer
        gc.collect()
        assert [unit() for unit in units] == [None] * len(units)
        loss = loss_of_tokens(model, rank, 0, 5)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not same_bits(dict(model.state_dict()), main)
        again = zeroshard.shard(model, plan, units=Block)
        assert len(again.engine.units) == 4 + (1 if any(not p.requires_grad for p in model.parameters()) else 0)


def test_a_model_whose_handle_is_dropped_trains_on() -> None:
    def check(rank: int) -> Any:
        model = make(Net)
        optimizer = started(zeroshard.ZERO3, rank, model)[1]
        gc.collect()
        optimizer.backward(loss_of_tokens(model, rank, 0, 2))
        optimizer.step()
        return optimizer.handle.full_state_dict()

    expected = run_ranks(lambda rank: train_reference(Job(steps=3), 3)[0].weights, 1)[0]
    assert all(same_bits(found, expected) for found in run_ranks(check, 3))


@on_ranks(3)
def test_a_rank_that_is_done_and_lets_go_leaves_a_slower_one_alone(rank: int) -> None:
    """One rank may free its buffers while a slower rank has yet to read them."""
    for slow, plan in with_plans((0, 1, 2)):
        model = make(Net)
        handle, optimizer = started(plan, rank, model, steps=1)
        if rank == slow:
            time.sleep(0.05)
        weights = handle.full_state_dict()
        del model, handle, optimizer
        assert not any(value.isnan().any() for value in weights.values())
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        if rank == slow:
            time.sleep(0.05)
        assert same_bits(handle.full_state_dict(), dict(make(Net).state_dict()))
        handle.close()


# Local accumulation ---------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_no_sync_communicates_nothing_and_ends_with_its_block(rank: int) -> Any:
    logs = []
    for plan in plans_of(1):
        model = make(Net)
        handle, optimizer = started(plan, rank, model, steps=1)
        handle.engine.gatherer.settle()
        for _ in range(2):
            handle.comm_log.clear()
            with handle.no_sync(), handle.no_sync():
                optimizer.backward(loss_of_tokens(model, rank, 0, 3))
                with pytest.raises(KeyError), handle.no_sync():
                    raise KeyError("in the user's code")
                optimizer.backward(loss_of_tokens(model, rank, 1, 3))
            assert handle.comm_log.bytes("reduce_scatter") == 0
            if plan is not zeroshard.ZERO3:
                assert not handle.comm_log.entries
            optimizer.backward(loss_of_tokens(model, rank, 2, 3))
            assert [e.op for e in handle.comm_log.entries].count("reduce_scatter") == len(handle.engine.units)
            optimizer.step()
            handle.engine.gatherer.settle()
        logs.append(handle.comm_log)
    return logs


# Transports -----------------------------------------------------------------------------------------------------------


@pytest.mark.by_gloo
@pytest.mark.by_cpu
def test_messages_and_shared_memory_move_the_same_bits() -> None:
    jobs = [Job(steps=2), Job(precision="bf16", steps=1, micro_batches=2, reduce_every_micro_batch=True)]

    def run(rank: int, way: str) -> Any:
        with travelling(way):
            is_shared = Collectives(Mesh.of(None), CommLog()).transport.reads_peers
            assert is_shared == (way == "shared" and hasattr(os, "memfd_create"))
            return [train(job, plan, rank) for job, plan in with_plans(jobs)]

    shared, messages = zip(*run_ranks(in_turn(run, ["shared", "pairwise"]), 3), strict=True)
    for rank in range(3):
        for a, b in zip(shared[rank], messages[rank], strict=True):
            assert a.losses == b.losses and same_bits(a.weights, b.weights)
            for op in ("reduce_scatter", "all_gather"):  # each for itself: under DDP the two interleave differently
                moved = [[event for event in log.entries if event.op == op] for log in (a.log, b.log)]
                assert moved[0] == moved[1] and moved[0]
