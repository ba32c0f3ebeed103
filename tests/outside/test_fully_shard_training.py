"""torch: test/distributed/_composable/fsdp/test_fully_shard_training.py and test_fully_shard_autograd.py, and the
training tests of test_fully_shard_compose.py, _extensions.py, _grad_acc.py and _shared_params.py.

`fully_shard` on each block and on the root is `shard(model, "zero3", units=Block)`. Where a test is about training,
every plan must give the same bits.
"""

from __future__ import annotations

import copy
import random
import time
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as recompute

import zeroshard
from tests.outside.common import (
    MLP,
    PLANS,
    VOCAB,
    Block,
    Transformer,
    Twins,
    average_gradients,
    expect_close,
    expect_same_bits,
    in_fp64,
    numbers,
    state_of,
    tokens,
)
from zeroshard.placement import Plan
from zeroshard.testing import expect_same_logs, run_ranks

Adam = torch.optim.Adam


def under_all_plans(train: Callable[[int, Plan], Any], num_ranks: int = 2) -> None:
    """`train(rank, plan)` returns weights; all plans give the same bits, and all ranks issue the same collectives."""

    @in_fp64
    def check(rank: int) -> None:
        states = []
        for plan in PLANS:
            torch.manual_seed(0)
            states.append(train(rank, plan))
        expect_same_bits(states)

    run_ranks(check, num_ranks)


# Inputs, and what parameters are outside of forward ------------------------------------------------------------------


def test_a_model_without_inputs() -> None:
    """TestFullyShardForwardInputs.test_root_no_forward_inputs."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    under_all_plans(lambda rank, plan: Twins(Square(), plan).train(lambda model, step: model().sum()))


@pytest.mark.parametrize("units", [None, nn.Linear])
def test_parameters_are_whole_where_the_plan_says_so(units: Any) -> None:
    """TestFullyShardRegisteredParams: after forward and after backward parameters are sharded again (here: read as NaN)
    under ZERO3, and whole, with their values, under the others; inside `unsharded` they are the original ones."""

    def check(rank: int) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            model = nn.Sequential(MLP(3), MLP(3))
            original = [p.detach().clone() for p in model.parameters()]
            handle = zeroshard.shard(model, plan, units=units)

            def expect_at_rest(model: nn.Module = model, plan: Plan = plan, original: Any = original) -> None:
                for parameter, value in zip(model.parameters(), original, strict=True):
                    assert isinstance(parameter, nn.Parameter) and parameter.shape == value.shape
                    if plan is zeroshard.ZERO3:
                        assert parameter.isnan().all()
                    else:
                        assert torch.equal(parameter.detach(), value)

            expect_at_rest()
            loss = model(numbers(3, rank)).sum()
            expect_at_rest()
            with handle.unsharded():
                for parameter, value in zip(model.parameters(), original, strict=True):
                    assert torch.equal(parameter.detach(), value)
            loss.backward()
            expect_at_rest()

    run_ranks(check, 3)


def test_a_cast_after_shard_is_refused_before_it_is_right() -> None:
    """TestFullyShardCastAfterInit.test_to_float64_after_init: `model.double()` belongs before `shard`."""

    def check(rank: int) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            model = MLP(4)
            zeroshard.shard(model, plan)
            model.to(torch.float64)
            with pytest.raises(RuntimeError, match="move and cast a model before shard"):
                model(numbers(4, rank).double())
        twins = Twins(MLP(4).to(torch.float64), plan)
        twins.train(lambda model, step: model(numbers(4, rank, step).double()).sum())
        assert all(value.dtype == torch.float64 for value in twins.handle.full_state_dict().values())

    run_ranks(check, 2)


# One unit, many units ------------------------------------------------------------------------------------------------

SHAPES = [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)], [(32, 16), (16, 8)]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_unit_of_uneven_shapes(num_ranks: int) -> None:
    """TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_dim0, ..._shard_largest_dim,
    TestFullyShardWorldSize1.test_train_parity_single_worldsize1, TestFullyShardShardPlacementFnMultiProcess: shards
    are cut from a flat buffer, so there is no dimension to choose. On one rank nothing is communicated."""

    def train(rank: int, plan: Plan) -> Any:
        result = {}
        for number, (first, second) in enumerate(SHAPES):
            twins = Twins(nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second)), plan)
            weights = twins.train(lambda model, step, f=first: model(numbers(f[0], rank, step)).sum(), steps=3)
            result.update({f"{number}.{name}": value for name, value in weights.items()})
            assert num_ranks > 1 or twins.handle.comm_log.total_bytes == 0
        return result

    under_all_plans(train, num_ranks)


def test_many_units_whatever_is_late() -> None:
    """test_train_parity_multi_group and its variants with CPU offload and asynchronous unshards,
    test_explicit_prefetching, test_post_optim_event, and HSDP's of the same names in
    test_fully_shard_extensions.py: ranks fall behind at random between forward, backward and step, and inside of
    forward. What arrives when is the engine's own affair."""

    class Late(Transformer):
        def forward(self, tokens: Tensor) -> Tensor:
            time.sleep(random.random() * 0.01)
            return super().forward(tokens)

    def train(rank: int, plan: Plan) -> Any:
        random.seed(rank)
        twins = Twins(Late(), plan, shard={"units": Block})
        for step in range(4):
            twins.backward(lambda model, s=step: model(tokens(rank, s)).sum())
            time.sleep(random.random() * 0.01)
            twins.step()
            time.sleep(random.random() * 0.01)
        twins.expect_equal()
        return twins.handle.full_state_dict()

    under_all_plans(train, 3)


def test_a_part_of_the_model_runs_alone() -> None:
    """test_non_root_forward_backward: the model, then its first layer alone, then the model."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(nn.Sequential(*(MLP(8) for _ in range(3))), plan, shard={"units": MLP})
        for part in (slice(None), 0, slice(None)):
            twins.backward(
                lambda model, part=part: (model if part == slice(None) else model[part])(numbers(8, rank)).sum()
            )
            twins.step()
            twins.expect_equal()
        return twins.handle.full_state_dict()

    under_all_plans(train)


def test_a_module_that_runs_twice() -> None:
    """test_multi_forward_module."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x) + self.inner(x))

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Twice(), plan, shard={"units": nn.Linear})
        return twins.train(lambda model, step: model(numbers(4, rank, step)).sum())

    under_all_plans(train)


def test_two_forwards_before_one_backward_with_nested_units() -> None:
    """TestFullyShard1DTrainingCompose.test_double_forward_with_nested_fsdp_and_checkpoint: as in preference
    training; with and without recomputation."""

    def train(rank: int, plan: Plan) -> Any:
        result = {}
        for recomputed in (False, True):
            torch.manual_seed(0)
            model = Transformer(layers=2)
            twins = Twins(model, plan, shard={"units": (Block, nn.Linear)})
            if recomputed:
                for layer in twins.model.layers:
                    checkpoint(layer)

            def loss(model: nn.Module, step: int) -> Tensor:
                chosen, rejected = (model(tokens(rank, step, kind)).mean() for kind in (0, 1))
                return (chosen - rejected + 1).pow(2)

            weights = twins.train(loss, steps=3)
            result.update({f"{recomputed}.{name}": value for name, value in weights.items()})
        return result

    under_all_plans(train)


# Recomputation -------------------------------------------------------------------------------------------------------


def recomputed(model: Transformer, kind: str) -> Transformer:
    if kind == "composable":
        for layer in model.layers:
            checkpoint(layer)
    elif kind == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    else:
        for layer in model.layers:
            layer.forward = partial(recompute, layer.forward, use_reentrant=kind == "reentrant")
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["composable", "wrapper", "utils", "reentrant"])
def test_activation_checkpointing(kind: str, tied: bool) -> None:
    """test_train_parity_with_activation_checkpointing, blocks as units; TestFullyShardSharedParams.
    test_train_parity_with_shared_params."""

    def train(rank: int, plan: Plan) -> Any:
        plain = Transformer(tied=tied)
        model = recomputed(copy.deepcopy(plain), kind)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer, plain_optimizer = (
            zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2),
            Adam(plain.parameters(), lr=1e-2),
        )
        for step in range(3):
            losses = [one(tokens(rank, step)).sum() for one in (model, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            average_gradients(plain.parameters())
            for one in (optimizer, plain_optimizer):
                one.step(), one.zero_grad()
            expect_close(handle.full_state_dict(), state_of(plain))
        return handle.full_state_dict()

    under_all_plans(train)


# Tied weights --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, rows: int = 13, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.output = nn.Linear(width, rows, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.embed(ids))


@pytest.mark.parametrize("units", [None, (nn.Embedding, nn.Linear)])
def test_a_tied_weight_whose_rows_no_number_of_ranks_divides(units: Any) -> None:
    """test_train_shared_params_uneven_shard; test_shared_params_separate_fsdp_groups_error: there an error when the two
    modules are sharded one by one, here the weight belongs to the unit that comes first."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Tied(), plan, torch.optim.AdamW, shard={"units": units})
        before = twins.handle.full_state_dict()["embed.weight"]
        after = twins.train(
            lambda model, step: nn.functional.cross_entropy(
                model(torch.arange(13)), (torch.arange(13) * 3 + rank + step) % 13
            )
        )
        assert (before != after["embed.weight"]).any(1).all()  # every row, the last rank's too
        return after

    under_all_plans(train, 3)


def test_layer_after_layer() -> None:
    """test_layer_by_layer_shard_no_false_positive, TestFullyShardShareCommContext.test_share_comm_context: layers
    that are made, and sharded, one after the other, each with a handle of its own."""

    def train(rank: int, plan: Plan) -> Any:
        layers, plain, optimizers = nn.Sequential(), nn.Sequential(), []
        for _ in range(3):
            layer = MLP(8)
            plain.append(copy.deepcopy(layer))
            handle = zeroshard.shard(layer, plan)
            layers.append(layer)
            optimizers.append(zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2))
        plain_optimizer = Adam(plain.parameters(), lr=1e-2)
        for step in range(3):
            losses = [one(numbers(8, rank, step)).sum() for one in (layers, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            average_gradients(plain.parameters())
            for one in (*optimizers, plain_optimizer):
                one.step(), one.zero_grad()
        found = {f"{i}.{n}": v for i, one in enumerate(optimizers) for n, v in one.handle.full_state_dict().items()}
        expect_close(found, state_of(plain))
        return found

    under_all_plans(train)


# A head that runs in chunks ------------------------------------------------------------------------------------------


class ChunkedHead(nn.Module):
    """embed, body, norm, head; the caller may leave the head out, and call it piece by piece."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.body = nn.Linear(16, 16, bias=False)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, skip_head: bool = False) -> Tensor:
        h = self.norm(self.body(self.embed(tokens)))
        return h if skip_head else self.head(h)


def chunked_backward(model: nn.Module, ids: Tensor, chunks: int = 4) -> Tensor:
    """Backward of the head chunk by chunk, then of the rest. Returns the sum of the losses."""
    h = model(ids, skip_head=True)
    gradients, total = [], torch.zeros(())
    for chunk in torch.chunk(h.detach(), chunks, dim=1):
        piece = chunk.contiguous().requires_grad_()
        loss = model.head(piece).square().sum()
        total += loss.detach()
        loss.backward()
        gradients.append(piece.grad)
    h.backward(torch.cat(gradients, dim=1))
    return total


@pytest.mark.parametrize("units", [None, nn.Linear, (nn.Embedding, nn.Linear, nn.RMSNorm)])
@pytest.mark.parametrize("tie", [False, True])
def test_a_head_that_runs_alone_chunk_by_chunk(tie: bool, units: Any) -> None:
    """test_partial_group_forward_then_standalone, ..._grad_accum_chunked, test_partial_group_reshard_toggle: every
    chunk counts, with and without reduction in between, whatever is a unit of its own."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(ChunkedHead(tie), plan, shard={"units": units})
        for step in range(3):
            for micro_batch in range(2):
                ids = tokens(rank, step, micro_batch, length=8)
                expected = chunked_backward(twins.plain, ids)
                if micro_batch:
                    found = chunked_backward(twins.model, ids)
                else:
                    with twins.handle.no_sync():
                        found = chunked_backward(twins.model, ids)
                torch.testing.assert_close(found, expected)
            twins.expect_equal_gradients()
            twins.step()
            twins.expect_equal()
        return twins.handle.full_state_dict()

    under_all_plans(train)


def test_two_partial_forwards_before_one_backward() -> None:
    """test_double_partial_forward_then_backward: the head, used by neither, has no gradient and is not updated."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(ChunkedHead(), plan, shard={"units": nn.Linear})
        before = twins.handle.full_state_dict()["head.weight"]
        twins.train(
            lambda model, step: sum(model(tokens(rank, step, kind), skip_head=True).square().sum() for kind in (0, 1))
        )
        after = twins.handle.full_state_dict()
        assert torch.equal(before, after["head.weight"])
        return after

    under_all_plans(train)


def test_after_an_exception_in_forward_training_goes_on() -> None:
    """test_reset_iter_state_after_exception: there `reset_iter_state()` must be called; here nothing."""

    class Raising(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self.wrapped, self.armed = wrapped, False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise RuntimeError("boom")
            return self.wrapped(x)

    def train(rank: int, plan: Plan) -> Any:
        model = ChunkedHead()
        model.body = Raising(model.body)
        twins = Twins(model, plan, shard={"units": nn.Linear})
        for step in range(3):
            twins.model.body.armed = True
            with pytest.raises(RuntimeError, match="boom"):
                twins.model(tokens(rank, step))
            twins.model.body.armed = False
            twins.backward(lambda model, s=step: model(tokens(rank, s)).sum())
            twins.step()
            twins.expect_equal()
        return twins.handle.full_state_dict()

    under_all_plans(train)


# Accumulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["one axis", "replicas"])
def test_gradient_accumulation(mesh: str) -> None:
    """TestFullyShardGradientAccumulation.test_gradient_accumulation, mode "all", and the same with a reduction in every
    micro-batch: equal gradients, and one reduction for each unit or one for each unit and micro-batch. HSDP as well."""
    num_ranks = 4 if mesh == "replicas" else 2

    def train(rank: int, plan: Plan) -> Any:
        shape = {"one axis": (2,), "replicas": (2, 2)}[mesh]
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = nn.Sequential(nn.Linear(8, 8), *(MLP(8) for _ in range(3)))
        twins = Twins(model, plan, shard={"units": MLP, "mesh": device_mesh})
        log = twins.handle.comm_log
        for step in range(4):
            log.clear()
            for micro_batch in range(3):
                reduced = micro_batch == 2 or step % 2 == 1
                twins.backward(
                    lambda model, s=step, m=micro_batch: model(numbers(8, rank, s, m)).sum(), reduced=reduced
                )
            reductions = [event for event in log.entries if event.op == "reduce_scatter"]
            assert len(reductions) == (3 if step % 2 else 1) * len(twins.handle.units)
            twins.expect_equal_gradients()
            twins.step()
            twins.expect_equal()
        return twins.handle.full_state_dict()

    under_all_plans(train, num_ranks)


def test_micro_batches_in_turn() -> None:
    """test_1f1b_microbatching: forward and backward of each micro-batch, one reduction at the end."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Transformer(), plan, torch.optim.AdamW, shard={"units": Block})
        for micro_batch in range(3):
            twins.backward(lambda model, m=micro_batch: model(tokens(rank, 0, m)).sum(), reduced=micro_batch == 2)
        twins.step()
        twins.expect_equal()
        return twins.handle.full_state_dict()

    under_all_plans(train)


# A mesh of replicas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced_each_time", [False, True])
def test_replicas_of_shards(reduced_each_time: bool) -> None:
    """TestFullyShardHSDPTraining.test_train_parity_hsdp: with recomputation and three micro-batches, on 2 x 2 ranks."""

    def train(rank: int, plan: Plan) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        result = {}
        for width in (17,):
            model = nn.Sequential(nn.LayerNorm(width, bias=False), MLP(width, 3), MLP(width), MLP(width, 3))
            twins = Twins(model, plan, shard={"units": MLP, "mesh": mesh})
            for mlp in twins.model:
                checkpoint(mlp)
            for step in range(2):
                for micro_batch in range(3):
                    twins.backward(
                        lambda model, s=step, m=micro_batch, w=width: model(numbers(w, rank, s, m, rows=8)).sum(),
                        reduced=micro_batch == 2 or reduced_each_time,
                    )
                twins.expect_equal_gradients()
                twins.step()
                twins.expect_equal()
            result.update({f"{width}.{n}": v for n, v in twins.handle.full_state_dict().items()})
        return result

    under_all_plans(train, 4)


# A method in place of forward ----------------------------------------------------------------------------------------


def test_a_method_that_is_called_in_place_of_forward() -> None:
    """TestFullyShardCustomForwardMethod.test_register_fsdp_forward_method."""

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(16))
            self.project = nn.Conv2d(3, 16, kernel_size=4, stride=4)

        def features(self, images: Tensor) -> Tensor:
            return self.project(images).flatten(2).transpose(1, 2) + self.position

        def forward(self, images: Tensor) -> Tensor:
            return self.features(images).sum(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.head = Vision(), nn.Linear(16, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.vision.features(images))

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Model(), plan, shard={"units": (Vision, nn.Linear)})
        twins.handle.register_forward_method(twins.model.vision, "features")
        return twins.train(lambda model, step: model(numbers(12, rank, step, rows=24).view(2, 3, 12, 4)).sum())

    under_all_plans(train)


# What a loss leaves out, and what activations come in ----------------------------------------------------------------


class TwoLinear(nn.Module):
    """Two layers side by side; `second`: whether the second's output is returned."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.lin1, self.lin2, self.second = nn.Linear(8, 8), nn.Linear(8, 8), second

    def forward(self, x: Tensor) -> Any:
        if self.second:
            return torch.relu(self.lin1(x)), torch.relu(self.lin2(x))
        return torch.relu(self.lin1(x))


def test_an_output_that_the_loss_leaves_out() -> None:
    """TestFullyShardAutograd.test_unused_forward_output: both outputs at first, then the first alone."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(TwoLinear(True), plan, shard={"units": nn.Linear})

        def loss(model: nn.Module, step: int) -> Tensor:
            first, second = model(numbers(8, rank, step))
            return (first * second).sum() if step < 2 else first.sum()

        return twins.train(loss, steps=5)

    under_all_plans(train)


def test_a_module_that_forward_does_not_use() -> None:
    """TestFullyShardAutograd.test_unused_forward_module."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(TwoLinear(False), plan, shard={"units": nn.Linear})
        return twins.train(lambda model, step: model(numbers(8, rank, step)).sum())

    under_all_plans(train)


Two = namedtuple("Two", ["x", "y"])


@pytest.mark.parametrize("kind", [list, tuple, dict, Two])
def test_activations_in_containers(kind: Any) -> None:
    """TestFullyShardAutograd.test_nontensor_activations."""

    class Into(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x} if kind is dict else Two(x, torch.ones_like(x)) if kind is Two else kind((x,))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, value: Any) -> Any:
            x = value["x"] if kind is dict else value[0]
            x = torch.relu(self.lin2(torch.relu(self.lin1(x))))
            return {"x": x} if kind is dict else Two(x, value[1]) if kind is Two else kind((x,))

    class Out(nn.Module):
        def forward(self, value: Any) -> Tensor:
            return value["x"] if kind is dict else value[0]

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(nn.Sequential(Into(), Inside(), Inside(), Inside(), Out()), plan, shard={"units": Inside})
        return twins.train(lambda model, step: model(numbers(8, rank, step)).sum())

    under_all_plans(train)


def test_all_ranks_issue_the_same_collectives() -> None:
    """The control of the tests above that count or time nothing: the logs of the ranks are equal."""

    @in_fp64
    def check(rank: int) -> Any:
        torch.manual_seed(0)
        twins = Twins(Transformer(), zeroshard.ZERO3, shard={"units": Block})
        twins.train(lambda model, step: model(tokens(rank, step)).sum())
        assert dist.get_world_size() == 3
        return twins.handle.comm_log

    expect_same_logs(run_ranks(check, 3))
