"""torch: test/distributed/_composable/fsdp/test_fully_shard_frozen.py and test_fully_shard_clip_grad_norm_.py."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.kit import plans_of
from tests.outside.common import (
    MLP,
    PLANS,
    Block,
    Transformer,
    Twins,
    expect_same_bits,
    in_fp64,
    numbers,
    tokens,
    under_all_plans,
)
from tests.together import in_turn, on_ranks
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks


def biases_only(*models: nn.Module) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def reduced_bytes(handle: zeroshard.Handle) -> int:
    return handle.comm_log.bytes("reduce_scatter")


@pytest.mark.parametrize("recomputed", [False, True])
@on_ranks(2)
def test_only_biases_are_trained(rank: int, recomputed: bool) -> None:
    """test_train_mixed_requires_grad_per_group: only biases are reduced."""

    def train(rank: int, plan: Plan) -> Any:
        model = nn.Sequential(*(MLP(32) for _ in range(2)))
        biases_only(model)
        twins = Twins(model, plan, shard={"units": MLP}, groups=trained)
        if recomputed:
            for mlp in twins.model:
                checkpoint(mlp)
        twins.handle.comm_log.clear()
        weights = twins.train(lambda model, step: model(numbers(32, rank, step)).sum(), steps=2)
        of_biases = sum(unit.layout.numel for unit in twins.handle.engine.units if unit.trainable)
        assert reduced_bytes(twins.handle) == 2 * 8 * of_biases // 2
        assert of_biases < sum(p.numel() for p in twins.plain.parameters()) // 8
        return weights

    under_all_plans(rank, train)


@on_ranks(2)
def test_what_is_frozen_after_shard(rank: int) -> None:
    """test_train_mixed_requires_grad_per_group, `freeze_after_init`: a fully frozen unit is not reduced; of a unit
    whose biases train, only the biases are."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(nn.Sequential(*(MLP(32) for _ in range(2))), plan, shard={"units": MLP})
        for one in (twins.model, twins.plain):
            one[0].requires_grad_(False)
            biases_only(one[1])
        twins.handle.comm_log.clear()
        weights = twins.train(lambda model, step: model(numbers(32, rank, step)).sum(), steps=2)
        reduced = {event.unit for event in twins.handle.comm_log.entries if event.op == "reduce_scatter"}
        assert reduced == {"1"}
        by_both = sum(twins.handle.engine.collectives.exchange_objects(reduced_bytes(twins.handle)))
        assert by_both == 2 * 8 * (64 + 128)  # two steps; biases in multiples of 64
        return weights

    under_all_plans(rank, train)


@pytest.mark.parametrize("unfreeze", [False, True])
@on_ranks(2)
def test_frozen_layers_between_trained_ones(rank: int, unfreeze: bool) -> None:
    """test_train_mixed_requires_grad_across_groups: one iteration runs without gradients, and frozen layers may be
    unfrozen for the last."""

    def train(rank: int, plan: Plan) -> Any:
        model = nn.Sequential(*(module for _ in range(4) for module in (nn.Linear(8, 8), nn.ReLU())))
        twins = Twins(model, plan, shard={"units": nn.Linear})

        def freeze(frozen: bool) -> None:
            for one in (twins.model, twins.plain):
                for layer in one[::4]:
                    layer.requires_grad_(not frozen)

        freeze(True)
        for step in range(4):
            freeze(not (unfreeze and step == 3))
            if step == 1:
                with torch.no_grad():
                    found, expected = (one(numbers(8, rank)) for one in (twins.model, twins.plain))
                torch.testing.assert_close(found, expected)
            else:
                twins.backward(lambda model, s=step: model(numbers(8, rank, s)).sum())
                twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train)


@on_ranks(2)
def test_modules_that_run_often_with_and_without_gradients(rank: int) -> None:
    """test_multi_forward_mixed_requires_grad: a frozen one and a trained one, three times each, also under no_grad."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.frozen(torch.relu(self.trained(x)))
                with torch.no_grad():
                    extra = torch.relu(self.trained(x))
                x = x + extra
            return x

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Model(), plan, shard={"units": nn.Linear})
        return twins.train(lambda model, step: model(numbers(5, rank, step)).sum())

    under_all_plans(rank, train)


# Clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "norm_types"), [("one axis", (2.0, 1.0, math.inf)), ("replicas", (3.0,))])
def test_the_norm_is_torchs_and_so_is_the_step(mesh: str, norm_types: tuple[float, ...]) -> None:
    """TestClipGradNormWorldSize2.test_clip_grad_norm_1d, and on a mesh of replicas; one exchange of numbers."""

    @in_fp64
    def check(rank: int, norm_type: float, plans: tuple[Plan, ...]) -> None:
        states = []
        for plan in plans:
            torch.manual_seed(0)
            shape = (2,) if mesh == "one axis" else (2, 2)
            device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            shard = {"units": Block, "mesh": device_mesh}
            twins = Twins(Transformer(layers=1), plan, torch.optim.SGD, shard=shard, lr=0.1)
            for step in range(2):
                twins.backward(lambda model, s=step: model(tokens(rank, s)).square().sum())
                twins.expect_equal_gradients()
                expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 1.0, norm_type)
                assert expected > 1
                twins.handle.comm_log.clear()
                torch.testing.assert_close(twins.optimizer.clip_grad_norm_(1.0, norm_type), expected)
                assert {event.op for event in twins.handle.comm_log.entries} <= {"exchange"}
                twins.plain_optimizer.step(), twins.plain_optimizer.zero_grad()
                twins.optimizer.step(), twins.optimizer.zero_grad()
            states.append(twins.expect_equal())
        expect_same_bits(states)

    cases = [(norm_type, plans_of(1 + number)) for number, norm_type in enumerate(norm_types)]
    run_ranks(in_turn(check, cases), 2 if mesh == "one axis" else 4)


@on_ranks(2)
def test_torchs_own_utilities_clip(rank: int) -> None:
    """test_clip_grad_norm_1d calls `torch.nn.utils.clip_grad_norm_`, and so may a training loop here."""

    @in_fp64
    def check(rank: int, foreach: bool, plans: tuple[Plan, ...]) -> None:
        states = []
        for plan in plans:
            torch.manual_seed(0)
            twins = Twins(Transformer(layers=1), plan, torch.optim.SGD, shard={"units": Block}, lr=0.1)
            for step in range(2):
                twins.backward(lambda model, s=step: model(tokens(rank, s)).square().sum())
                twins.expect_equal_gradients()
                expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 1.0, foreach=foreach)
                found = nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0, foreach=foreach)
                assert expected > 1
                torch.testing.assert_close(torch.as_tensor(found), expected)
                twins.plain_optimizer.step(), twins.plain_optimizer.zero_grad()
                twins.optimizer.step(), twins.optimizer.zero_grad()
            states.append(twins.expect_equal())
        expect_same_bits(states)

    in_turn(check, [(False, plans_of(0)), (True, plans_of(1))])(rank)


@on_ranks(2)
def test_gradients_of_zero_are_left_alone(rank: int) -> None:
    """test_clip_grad_norm_1d, "for zero gradients, clipping has no effect"."""
    for plan in PLANS:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        before = copy.deepcopy(handle.full_state_dict())
        (model(torch.ones(2, 3)) * 0).sum().backward()
        assert optimizer.clip_grad_norm_(1.0) == 0
        optimizer.step()
        after = handle.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
