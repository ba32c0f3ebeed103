"""DeepSpeed: tests/unit/runtime/zero/test_zero.py.

`zero_optimization: {"stage": 1, 2, 3}` are the plans; `zero.Init` is the meta device and `materialize=`;
`GatheredParameters` is `handle.unsharded`; gradient accumulation is `no_sync`. Offloading to the CPU (`offload_*`) and
the tuning of buckets have no counterpart: see docs/compatibility.md.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.grids import grid
from tests.outside.common import (
    PLANS,
    Twins,
    expect_same_bits,
    in_fp64,
)
from tests.together import in_turn, on_ranks
from zeroshard.exchange import export
from zeroshard.model.absent import is_absent
from zeroshard.testing import run_ranks

SGD, Adam = torch.optim.SGD, torch.optim.Adam


class Layers(nn.Module):
    """A sequence of linear layers, and cross-entropy."""

    def __init__(self, width: int, count: int = 1) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        return nn.functional.cross_entropy(x.float(), y)


def batch(width: int, rank: int, step: int, micro_batch: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3 + rank + 10 * micro_batch + 100 * step)
    return torch.randn(2, width, generator=generator), torch.randint(width, (2,), generator=generator)


@on_ranks(2)
@in_fp64
def test_parameters_that_train_in_turns_within_one_step(rank: int) -> None:
    """TestZeroUnbalancedGradients: each of two micro-batches trains every other parameter; all are unfrozen
    afterwards."""
    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        twins = Twins(Layers(4, 3), plan, Adam, lr=1e-3)
        for step in range(4):
            for micro_batch in range(2):
                for model in (twins.model, twins.plain):
                    for i, parameter in enumerate(model.parameters()):
                        parameter.requires_grad = i % 2 == micro_batch
                x, y = batch(4, rank, step, micro_batch)
                twins.backward(lambda model, x=x, y=y: model(x, y), reduced=micro_batch == 1)
                for model in (twins.model, twins.plain):
                    model.requires_grad_(True)
            twins.step()
            twins.expect_equal()
        weights.append(twins.handle.full_state_dict())
    expect_same_bits(weights)


class Albert(nn.Module):
    """One layer that runs three times."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.linear(x)
        return nn.functional.cross_entropy(x, y)


@on_ranks(2)
def test_one_layer_in_a_loop(rank: int) -> None:
    """TestZero3RepeatForwardLoop; with `mics`, which shards within groups only: a mesh of replicas."""

    @in_fp64
    def check(rank: int, shard_size: int) -> None:
        mesh = init_device_mesh("cpu", (2 // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        twins = Twins(Albert(), zeroshard.ZERO3, Adam, shard={"units": nn.Linear, "mesh": mesh}, lr=1e-3)
        for step in range(4):
            for micro_batch in range(2):
                x, y = batch(4, rank, step, micro_batch)
                twins.backward(lambda model, x=x, y=y: model(x, y), reduced=micro_batch == 1)
            twins.step()
            twins.expect_equal()

    in_turn(check, [2, 1])(rank)


class Uneven(Layers):
    """53 trainable numbers, 5 of which forward does not use."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(3, 4)
        self.classifier = nn.Linear(4, 1)
        if frozen:
            self.linears[0].requires_grad_(False)


def test_a_checkpoint_gives_the_fp32_weights(tmp_path: Path) -> None:
    """TestZeroToFP32.test_1_param_group, test_2_param_groups: bf16 weights, two micro-batches, one or two groups; the
    weights exported from the checkpoint are the optimizer's main, and the model's weights are main, rounded."""

    def of(model: nn.Module, groups: int) -> list[dict[str, Any]]:
        trained = [p for p in model.parameters() if p.requires_grad]
        if groups == 1:
            return [{"params": trained}]
        return [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]

    def check(rank: int) -> None:
        for plan, frozen, groups in grid([plan for plan in PLANS if plan is not zeroshard.DDP], (False, True), (1, 2)):
            torch.manual_seed(0)
            model = Uneven(frozen)
            handle = zeroshard.shard(model, plan, precision="bf16")
            optimizer = zeroshard.ShardedOptimizer(of(model, groups), SGD, lr=0.1)
            for step in range(3):
                with handle.no_sync():
                    model(*batch(3, rank, step, 0)).backward()
                model(*batch(3, rank, step, 1)).backward()
                optimizer.step()
            folder = tmp_path / f"{plan.name} {frozen} {groups}"
            zeroshard.save(folder, handle, optimizer, step=1)
            main, weights = handle.full_state_dict(main=True), handle.full_state_dict()
            if rank == 0:
                (file,) = export(folder / "step-1", folder / "out")
                plain = Uneven(frozen)
                plain.load_state_dict(load_file(file))
                for name, value in plain.state_dict().items():
                    assert value.dtype == torch.float32
                    assert torch.equal(value.bfloat16(), weights[name].bfloat16())
                    if main[name].dtype == torch.float32:
                        assert torch.equal(value, main[name])

    run_ranks(check, 2)


@on_ranks(3)
def test_every_rank_starts_at_an_aligned_address(rank: int) -> None:
    """TestPartitionNcclAlignment; TestIncorectAllgatherBucketSize has no counterpart: users set no size that would have
    to be a multiple of something."""
    for plan in PLANS:
        model = Layers(5, 3)
        handle = zeroshard.shard(model, plan)
        for unit in handle.engine.units:
            assert unit.own_shard().start % 256 == 0 and unit.own_shard().numel % 256 == 0
            assert unit.weights.own().data_ptr() % 16 == 0


# Outputs of every kind, gradients that add up ------------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: Tensor
    y: Tensor


pair = namedtuple("pair", ["hidden", "y"])
"""The untyped kind of named tuple."""

CONTAINERS: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda h, y: {"hidden": h, "y": y, "one": 1, "none": None},
    Pair,
    pair,
    lambda h, y: (h, y),
    lambda h, y: [h, y],
)


class Product(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        assert not is_absent(self.weight)
        return self.weight * x


class Products(nn.Module):
    def __init__(self, container: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Product(torch.zeros(3, 5)) for _ in range(3))
        self.container = container

    def forward(self, x: Tensor) -> Any:
        assert all(is_absent(layer.weight) for layer in self.layers)  # absent before their use
        hidden = self.layers[1](self.layers[0](x))
        return self.container(hidden, self.layers[2](hidden))


def second(outputs: Any) -> Tensor:
    return outputs["y"] if isinstance(outputs, dict) else outputs[1]


PRECISIONS = ("fp32", "bf16", "fp16")
OUTPUT_CASES = grid(PRECISIONS, CONTAINERS, (False, True))


@on_ranks(2)
def test_outputs_of_every_kind_and_gradients_that_add_up(rank: int) -> None:
    """TestZero3ParamPartitioningBase (all of its tests except offload) and ...BaseBF16 (skipped there, "not working"):
    ranks with different initial values, activations and gradients that are known numbers, with and without zero_grad in
    between, outputs in five containers. Reading an absent parameter raises before, between and after passes."""
    for precision, container, zero_grad in OUTPUT_CASES:
        model = Products(container)
        handle = zeroshard.shard(model, "zero3", units=Product, precision=precision)
        with handle.unsharded(write=True), torch.no_grad():
            for number, layer in enumerate(model.layers, 1):
                layer.weight.view(-1)[:8] = number
                layer.weight.view(-1)[8:] = 2 * number
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=0.0, loss_scale=1)
        rows = [torch.tensor([a] * 8 + [b] * 7).view(3, 5) for a, b in ((2.0, 8.0), (6.0, 48.0))]
        for number in range(1, 4):
            outputs = model(torch.ones(3, 5))
            assert torch.equal(second(outputs).float(), rows[1])
            if isinstance(outputs, dict):
                assert outputs["one"] == 1 and outputs["none"] is None
            (second(outputs).float() * (rank + 1)).sum().backward()  # a mean of 1.5
            assert all(is_absent(layer.weight) for layer in model.layers)
            times = 1.5 * (1 if zero_grad else number)
            found = [handle.gradient(f"layers.{i}.weight").view(-1) for i in range(3)]
            expected = [(6.0, 24.0), (3.0, 12.0), (2.0, 8.0)]
            for gradient, (a, b) in zip(found, expected, strict=True):
                assert gradient[:8].eq(a * times).all() and gradient[8:].eq(b * times).all()
            if zero_grad:
                optimizer.zero_grad()
        if not zero_grad:
            assert optimizer.step().grad_norm > 0
        assert all(is_absent(layer.weight) for layer in model.layers)


class Vector(nn.Module):
    def __init__(self, size: int = 8100) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.param


@on_ranks(4)
def test_one_large_parameter_on_four_ranks(rank: int) -> None:
    """TestZero3ParamPartitioningLargeParam: all ranks get rank 0's values, and backwards without a reduction add up."""

    def check(rank: int, on_meta: bool) -> None:
        values = torch.arange(8100) // 2025 if rank == 0 else torch.full((8100,), -1)

        def init(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                parameter.copy_(values)

        with torch.device("meta" if on_meta else "cpu"):
            model = Vector()
        if not on_meta:
            with torch.no_grad():
                init(model)
        handle = zeroshard.shard(model, "zero3", materialize=init if on_meta else None)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
        for number in range(1, 4):
            out = model(torch.ones(8100))
            assert torch.equal(out, torch.arange(8100) // 2025 * 1.0)
            out.sum().backward()
            assert handle.gradient("param").eq(number).all()
        optimizer.step()
        with handle.unsharded():
            assert torch.equal(model.param.detach(), torch.arange(8100) // 2025 - 3.0)

    in_turn(check, [False, True])(rank)


@on_ranks(2)
def test_many_parameters_and_a_list_of_activations(rank: int) -> None:
    """TestZero3ParamPartitioningManyParams."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Product(torch.full((100,), 1.0 + number % 2)) for number in range(40))

        def forward(self, x: Tensor) -> list[Tensor]:
            activations = []
            for layer in self.layers:
                x = layer(x) / 2
                activations.append(x)
            return activations

    def check(rank: int, on_meta: bool) -> None:
        model = Many()
        if on_meta:
            values = {id(layer): layer.weight.detach()[0].item() for layer in model.layers}
            model.to("meta")

            def init(module: nn.Module) -> None:
                if isinstance(module, Product):
                    module.weight.fill_(values[id(module)])

        handle = zeroshard.shard(model, "zero3", units=Product, materialize=init if on_meta else None)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=0.0)
        for _ in range(3):
            activations = model(torch.ones(100))
            assert len(activations) == 40
            assert all(a.eq(2.0 ** -((n + 2) // 2)).all() for n, a in enumerate(activations))
            activations[-1].sum().backward()
            assert handle.gradient("layers.39.weight").eq(2.0**-21).all()
            optimizer.step()

    in_turn(check, [False, True])(rank)


def test_a_parent_that_fills_its_childs_weights() -> None:
    """TestZero3InitForParentWeightInitialization: ranks fill different values; rank 0's are used, and each keeps its
    shard."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1200, 1)

    def check(rank: int) -> int:
        with torch.device("meta"):
            model = Parent()

        def fill(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.fill_(1 + rank), module.bias.fill_(1 + rank)

        handle = zeroshard.shard(model, "zero3", materialize=fill)
        with handle.unsharded():
            assert model.linear.weight.eq(1).all() and model.linear.bias.eq(1).all()
        return handle.memory()["weights"]

    held = run_ranks(check, 4)
    assert len(set(held)) == 1 and held[0] < 4 * (1201 / 4 + 256 + 64)


@on_ranks(2)
@in_fp64
def test_modules_built_by_skip_init(rank: int) -> None:
    """TestParamPartitioningSkipInit: uninitialized submodules, dropout, a list as output."""

    class Sub(nn.Module):
        def __init__(self, a: int, b: int, device: Any = None) -> None:
            super().__init__()
            self.linear = nn.Linear(a, b, device=device)
            self.dropout = nn.Dropout(0.5)
            self.more = nn.ModuleList([nn.Linear(a, b, device=device)])

        def forward(self, x: Tensor) -> Tensor:
            return self.more[0](self.dropout(self.linear(x)))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = nn.utils.skip_init(nn.Linear, 10, 10)
            self.l2 = nn.utils.skip_init(Sub, 10, 10)
            self.l3 = nn.Linear(10, 10)

        def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
            x = self.l3(self.l2(self.l1(x)))
            return [x, nn.functional.cross_entropy(x, y)]

    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        model = Whole()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        twins = Twins(model, plan, Adam, lr=1e-4)

        def loss(model: nn.Module, step: int) -> Tensor:
            torch.manual_seed(step)  # for dropout
            return model(*batch(10, rank, step))[1]

        weights.append(twins.train(loss, steps=3))
    expect_same_bits(weights)


@pytest.mark.parametrize("container", [tuple, list, dict])
@on_ranks(1)
def test_a_loss_in_a_container(rank: int, container: type) -> None:
    """TestZero3DictFwd: the model is built on the meta device and returns its loss with other things."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = nn.Linear(10, 10)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            x = self.l1(x)
            loss = nn.functional.cross_entropy(x, y)
            return {"a": x, "loss": loss, "b": 1, "c": None} if container is dict else container((x, loss))

    with torch.device("meta"):
        model = Model()
    torch.manual_seed(0)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    handle = zeroshard.shard(model, "zero3", materialize=init)
    optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-1)
    losses = []
    for _ in range(8):
        outputs = model(*batch(10, rank, 0))
        loss = outputs["loss"] if container is dict else outputs[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# The optimizer -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_every_parameter_has_made_as_many_steps_as_the_run(rank: int) -> None:
    """TestZeroAdamOptimizerStepCount: two micro-batches per step."""
    for plan in PLANS:
        model = Layers(4, 4)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-3)
        for step in range(3):
            with handle.no_sync():
                model(*batch(4, rank, step, 0)).backward()
            model(*batch(4, rank, step, 1)).backward()
            optimizer.step()
            counts = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
            assert counts == {step + 1}


@on_ranks(2)
@in_fp64
def test_frozen_weights_between_trained_ones(rank: int) -> None:
    """TestZeroFrozenWeights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2 = nn.Linear(10, 10), nn.Linear(10, 10)
            self.l2.requires_grad_(False)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x = self.l2(torch.relu(self.l1(x)))
            return x, nn.functional.cross_entropy(x, y)

    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        twins = Twins(Model(), plan, Adam, lr=1e-3)
        weights.append(twins.train(lambda model, step: model(*batch(10, rank, step))[1]))
    expect_same_bits(weights)


@on_ranks(2)
def test_nothing_of_full_size_is_held_between_two_phases(rank: int) -> None:
    """TestZeroPartitionCache: `empty_partition_cache()` there, `park()` here. Also for a model without an optimizer."""

    def check(rank: int, training: bool) -> None:
        model = Layers(10, 2)
        handle = zeroshard.shard(model, "zero3")
        if training:
            optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-3)
        for step in range(3):
            loss = model(*batch(10, rank, step))
            if training:
                loss.backward()
                optimizer.step()
        handle.park()
        memory = handle.memory()
        assert memory["ring"] == memory["buckets"] == memory["scratch"] == 0
        handle.unpark()
        assert torch.isfinite(model(*batch(10, rank, 3)))

    in_turn(check, [True, False])(rank)


@on_ranks(2)
def test_a_param_group_may_be_empty(rank: int) -> None:
    """TestEmptyParameterGroup."""
    for plan, precision, empty in grid(PLANS, PRECISIONS, ("weights", "biases")):
        model = Layers(4, 4)
        handle = zeroshard.shard(model, plan, precision=precision)
        biases, weights = ([p for p in model.parameters() if p.dim() == dim] for dim in (1, 2))
        groups = [
            {"params": [] if empty == "weights" else weights, "weight_decay": 0.01},
            {"params": [] if empty == "biases" else biases, "weight_decay": 0.0},
        ]
        optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1)
        before = handle.full_state_dict()
        optimizer.backward(model(*batch(4, rank, 0)))
        optimizer.step()
        after = handle.full_state_dict()
        trained = "weight" if empty == "biases" else "bias"
        unchanged = {name for name in before if torch.equal(before[name], after[name])}
        assert unchanged == {name for name in before if trained not in name}, (plan, precision, empty)


@on_ranks(2)
@in_fp64
def test_between_training_and_evaluation(rank: int) -> None:
    """TestZero3SwitchModes: three epochs of training and evaluation in turn."""
    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        twins = Twins(Layers(10, 3), plan, Adam, shard={"units": nn.Linear}, lr=1e-3)
        for epoch in range(3):
            twins.model.train(), twins.plain.train()
            weights.append(twins.train(lambda model, step, e=epoch: model(*batch(10, rank, step, e)), steps=2))
            twins.model.eval(), twins.plain.eval()
            with torch.no_grad():
                for step in range(2):
                    found, expected = (model(*batch(10, rank, step, 9)) for model in (twins.model, twins.plain))
                    torch.testing.assert_close(found, expected)
    expect_same_bits(weights[2::3])


@on_ranks(2)
def test_a_module_may_have_an_attribute_called_id(rank: int) -> None:
    """TestZero3ClientModuleID: `shard` sets no attributes on modules, except one of torch, and on the model one
    for a line of `print(model)` and `zero_grad`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.id = 3
            self.fc = nn.Linear(8, 8)

    for plan in PLANS:
        model = Model()
        before = {name: set(vars(module)) for name, module in model.named_modules()}
        before[""] |= {"extra_repr", "zero_grad"}
        zeroshard.shard(model, plan)
        assert model.id == 3
        after = {name: set(vars(module)) - {"_call_impl"} for name, module in model.named_modules()}
        assert after == before
