"""torch: test/distributed/_composable/fsdp/test_fully_shard_training.py (the rest of it is in
`test_fully_shard_compose.py`), and the training tests of test_fully_shard_extensions.py, _grad_acc.py.

`fully_shard` on each block and on the root is `shard(model, "zero3", units=Block)`. Where a test is about training,
every plan must give the same bits.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.outside.common import (
    MLP,
    PLANS,
    Block,
    Transformer,
    Twins,
    numbers,
    tokens,
    under_all_plans,
)
from tests.together import in_turn, on_ranks
from zeroshard.model.absent import is_absent
from zeroshard.placement import Plan

# Inputs, and the state of parameters outside of forward --------------------------------------------------------------


@on_ranks(2)
def test_a_model_without_inputs(rank: int) -> None:
    """TestFullyShardForwardInputs.test_root_no_forward_inputs."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    under_all_plans(rank, lambda rank, plan: Twins(Square(), plan).train(lambda model, step: model().sum()))


@on_ranks(3)
def test_parameters_are_whole_where_the_plan_says_so(rank: int) -> None:
    """TestFullyShardRegisteredParams: after forward and after backward parameters are sharded again (here: absent)
    under ZERO3, and whole, with their values, under the others; inside `unsharded` they are the original ones."""

    def check(rank: int, units: Any) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            model = nn.Sequential(MLP(3), MLP(3))
            original = [p.detach().clone() for p in model.parameters()]
            handle = zeroshard.shard(model, plan, units=units)

            def expect_at_rest(model: nn.Module = model, plan: Plan = plan, original: Any = original) -> None:
                for parameter, value in zip(model.parameters(), original, strict=True):
                    assert isinstance(parameter, nn.Parameter) and parameter.shape == value.shape
                    if plan is zeroshard.ZERO3:
                        assert is_absent(parameter)
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

    in_turn(check, [None, nn.Linear])(rank)


@on_ranks(2)
def test_a_cast_after_shard_is_refused_before_it_is_right(rank: int) -> None:
    """TestFullyShardCastAfterInit.test_to_float64_after_init: `model.double()` must be called before `shard`."""
    for plan in PLANS:
        torch.manual_seed(0)
        model = MLP(4)
        zeroshard.shard(model, plan)
        with pytest.raises(RuntimeError, match="move and cast a model before shard"):
            model.to(torch.float64)(numbers(4, rank).double())
    twins = Twins(MLP(4).to(torch.float64), plan)
    twins.train(lambda model, step: model(numbers(4, rank, step).double()).sum())
    assert all(value.dtype == torch.float64 for value in twins.handle.full_state_dict().values())


# One unit, many units ------------------------------------------------------------------------------------------------

SHAPES = [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)], [(32, 16), (16, 8)]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_one_unit_of_uneven_shapes(rank: int, num_ranks: int) -> None:
    """TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_dim0, ..._shard_largest_dim,
    TestFullyShardWorldSize1.test_train_parity_single_worldsize1, TestFullyShardShardPlacementFnMultiProcess: shards
    are cut from a flat buffer, so there is no dimension to choose. On one rank nothing is communicated."""

    def train(rank: int, plan: Plan) -> Any:
        result = {}
        for number, (first, second) in enumerate(SHAPES):
            twins = Twins(nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second)), plan)
            weights = twins.train(lambda model, step, f=first: model(numbers(f[0], rank, step)).sum(), steps=2)
            result.update({f"{number}.{name}": value for name, value in weights.items()})
            assert num_ranks > 1 or twins.handle.comm_log.total_bytes == 0
        return result

    under_all_plans(rank, train, num_ranks)


@on_ranks(3)
def test_many_units_whatever_is_late(rank: int) -> None:
    """test_train_parity_multi_group and its variants with CPU offload and asynchronous unshards,
    test_explicit_prefetching, test_post_optim_event, and HSDP's of the same names in
    test_fully_shard_extensions.py: ranks fall behind at random between forward, backward and step, and inside of
    forward. The results do not depend on these delays."""

    class Late(Transformer):
        def forward(self, tokens: Tensor) -> Tensor:
            time.sleep(random.random() * 0.01)
            return super().forward(tokens)

    def train(rank: int, plan: Plan) -> Any:
        random.seed(rank)
        twins = Twins(Late(), plan, shard={"units": Block})
        for step in range(3):
            twins.backward(lambda model, s=step: model(tokens(rank, s)).sum())
            time.sleep(random.random() * 0.01)
            twins.step()
            time.sleep(random.random() * 0.01)
        return twins.expect_equal()

    under_all_plans(rank, train, 3)


@on_ranks(2)
def test_a_part_of_the_model_runs_alone(rank: int) -> None:
    """test_non_root_forward_backward: the model, then its first layer alone, then the model."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(nn.Sequential(*(MLP(8) for _ in range(3))), plan, shard={"units": MLP})
        for part in (slice(None), 0, slice(None)):
            twins.backward(
                lambda model, part=part: (model if part == slice(None) else model[part])(numbers(8, rank)).sum()
            )
            twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train)


@on_ranks(2)
def test_a_module_that_runs_twice(rank: int) -> None:
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

    under_all_plans(rank, train)


@on_ranks(2)
def test_two_forwards_before_one_backward_with_nested_units(rank: int) -> None:
    """TestFullyShard1DTrainingCompose.test_double_forward_with_nested_fsdp_and_checkpoint: as in preference
    training; with and without recomputation."""

    def train(rank: int, plan: Plan) -> Any:
        result = {}
        for recomputed in (False, True):
            torch.manual_seed(0)
            twins = Twins(Transformer(layers=1), plan, shard={"units": (Block, nn.Linear)})
            if recomputed:
                for layer in twins.model.layers:
                    checkpoint(layer)

            def loss(model: nn.Module, step: int) -> Tensor:
                chosen, rejected = (model(tokens(rank, step, kind)).mean() for kind in (0, 1))
                return (chosen - rejected + 1).pow(2)

            weights = twins.train(loss, steps=2)
            result.update({f"{recomputed}.{name}": value for name, value in weights.items()})
        return result

    under_all_plans(rank, train)


# Accumulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "num_ranks"), [("one axis", 2), ("replicas", 4)])
@on_ranks("num_ranks")
def test_gradient_accumulation(rank: int, mesh: str, num_ranks: int) -> None:
    """TestFullyShardGradientAccumulation.test_gradient_accumulation, mode "all", and the same with a reduction in every
    micro-batch: equal gradients, and one reduction for each unit or one for each unit and micro-batch. HSDP as well."""

    def train(rank: int, plan: Plan) -> Any:
        shape = {"one axis": (2,), "replicas": (2, 2)}[mesh]
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = nn.Sequential(nn.Linear(8, 8), *(MLP(8) for _ in range(3)))
        twins = Twins(model, plan, shard={"units": MLP, "mesh": device_mesh})
        log = twins.handle.comm_log
        for step in range(2):
            log.clear()
            for micro_batch in range(3):
                reduced = micro_batch == 2 or step % 2 == 1
                twins.backward(
                    lambda model, s=step, m=micro_batch: model(numbers(8, rank, s, m)).sum(), reduced=reduced
                )
            reductions = [event for event in log.entries if event.op == "reduce_scatter"]
            assert len(reductions) == (3 if step % 2 else 1) * len(twins.handle.engine.units)
            twins.expect_equal_gradients()
            twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train, num_ranks)


@pytest.mark.parametrize("mode", ["root only", "some"])
@on_ranks(2)
def test_accumulation_in_a_part_of_the_model(rank: int, mode: str) -> None:
    """test_gradient_accumulation, modes "root_only" and "some_mlps"; test_requires_gradient_sync_ in
    test_fully_shard_grad_acc.py: some units are reduced after the last micro-batch only, the others after each one."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(nn.Sequential(nn.Linear(8, 8), *(MLP(8) for _ in range(3))), plan, shard={"units": MLP})
        local: list[Any] = ["0"] if mode == "root only" else [twins.model[1], twins.model[2]]
        for step in range(2):
            twins.handle.comm_log.clear()
            for micro_batch in range(3):
                twins.handle.set_requires_gradient_sync(micro_batch == 2, *local)
                twins.backward(lambda model, s=step, m=micro_batch: model(numbers(8, rank, s, m)).sum())
            reductions = [event for event in twins.handle.comm_log.entries if event.op == "reduce_scatter"]
            assert len(reductions) == 3 * 4 - 2 * len(local)
            twins.expect_equal_gradients()
            twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train)


@on_ranks(2)
def test_micro_batches_in_turn(rank: int) -> None:
    """test_1f1b_microbatching: forward and backward of each micro-batch, one reduction at the end."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Transformer(), plan, torch.optim.AdamW, shard={"units": Block})
        for micro_batch in range(3):
            twins.backward(lambda model, m=micro_batch: model(tokens(rank, 0, m)).sum(), reduced=micro_batch == 2)
        twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train)


# A mesh of replicas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced_each_time", [False, True])
@on_ranks(4)
def test_replicas_of_shards(rank: int, reduced_each_time: bool) -> None:
    """TestFullyShardHSDPTraining.test_train_parity_hsdp: with recomputation and three micro-batches, on 2 x 2 ranks."""

    def train(rank: int, plan: Plan) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.LayerNorm(17, bias=False), MLP(17, 3), MLP(17), MLP(17, 3))
        twins = Twins(model, plan, shard={"units": MLP, "mesh": mesh})
        for mlp in twins.model:
            checkpoint(mlp)
        for step in range(2):
            for micro_batch in range(2):
                twins.backward(
                    lambda model, s=step, m=micro_batch: model(numbers(17, rank, s, m)).sum(),
                    reduced=micro_batch == 1 or reduced_each_time,
                )
            twins.expect_equal_gradients()
            twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train, 4)


# A method in place of forward ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_method_that_is_called_in_place_of_forward(rank: int) -> None:
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

    under_all_plans(rank, train)
