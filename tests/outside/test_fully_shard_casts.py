"""torch: test/distributed/_composable/fsdp/test_fully_shard_mixed_precision.py, class
TestFullyShardMixedPrecisionCasts, test_checkpoint_and_fully_shard of test_fully_shard_compose.py,
test_grouped_module_cast_forward_inputs of test_fully_shard_training.py; and test_fully_shard_ignore_params.py: parts of
a model with their own precision, and ignored parts.

`fully_shard(model.c2, mp_policy=...)` is a pattern: `precision={"c2": ..., "*": ...}`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

import zeroshard
from tests.outside.common import PLANS, expect_close, in_fp64, numbers, state_of
from tests.together import on_ranks
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks

fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
MixedPrecision = zeroshard.MixedPrecision

Seen = dict[str, torch.dtype]


class Seeing(nn.Module):
    """A layer that records the dtype of its input. `own_cast`: it casts its input to the dtype of its weight."""

    def __init__(self, name: str, seen: Seen, own_cast: bool) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.name, self.seen, self.own_cast = name, seen, own_cast

    def forward(self, x: Tensor) -> Tensor:
        self.seen[self.name] = x.dtype
        return self.l(x.to(self.l.weight.dtype) if self.own_cast else x)


class Chain(nn.Module):
    """c1, then c2."""

    def __init__(self, own_cast: bool = False) -> None:
        super().__init__()
        self.seen: Seen = {}
        self.c1, self.c2 = Seeing("c1", self.seen, own_cast), Seeing("c2", self.seen, own_cast)

    def forward(self, x: Tensor) -> Tensor:
        self.seen["model"] = x.dtype
        return self.c2(self.c1(x))


def on_all_plans(check: Callable[[int, Plan], None]) -> None:
    def run(rank: int) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            check(rank, plan)

    run_ranks(run, 2)


def test_one_submodule_in_16_bits() -> None:
    """test_float16_on_one_submodule: the second in fp16; the second with a cast of its own; the first, with fp32
    outputs."""

    def check(rank: int, plan: Plan) -> None:
        cases = [
            (False, {"c2": MixedPrecision(fp16)}, (fp32, fp32, fp16)),
            (True, {"c2": MixedPrecision(fp16, cast_inputs=False)}, (fp32, fp32, fp32)),
            (False, {"c1": MixedPrecision(fp16, output=fp32)}, (fp32, fp16, fp32)),
        ]
        for own_cast, precision, expected in cases:
            model = Chain(own_cast)
            zeroshard.shard(model, plan, precision=precision)
            model(torch.zeros(2, 8)).sum().backward()
            assert tuple(model.seen[name] for name in ("model", "c1", "c2")) == expected

    on_all_plans(check)


@pytest.mark.parametrize("cast_inputs", [True, False])
def test_an_input_from_outside_is_cast_where_a_unit_begins(cast_inputs: bool) -> None:
    """test_submodules_with_external_inputs: an fp32 tensor that forward creates and passes to a unit."""

    class Inner(nn.Module):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.l, self.seen = nn.Linear(8, 8), seen

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.seen.update(x=x.dtype, y=y.dtype)
            return self.l(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Seen = {}
            self.l1, self.l2 = nn.Linear(8, 8), Inner(self.seen)

        def forward(self, x: Tensor) -> Tensor:
            self.seen["model"] = x.dtype
            return self.l2(self.l1(x), torch.ones(2, 8))

    def check(rank: int, plan: Plan) -> None:
        model = Outer()
        precision = {"l2*": MixedPrecision(fp16, cast_inputs=cast_inputs), "*": MixedPrecision(fp16)}
        zeroshard.shard(model, plan, units=Inner, precision=precision)
        model(torch.zeros(2, 8)).sum().backward()
        assert model.seen == {"model": fp16, "x": fp16, "y": fp16 if cast_inputs else fp32}

    on_all_plans(check)


def test_fp32_between_two_units_of_bf16() -> None:
    """test_grouped_module_cast_forward_inputs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).float())

    def check(rank: int, plan: Plan) -> None:
        model = Model()
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision="bf16")
        out = model(numbers(8, rank))
        assert out.dtype == bf16
        out.sum().backward()
        assert all(handle.gradient(name).any() for name in ("a.weight", "b.weight"))

    on_all_plans(check)


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_recomputation_sees_the_same_casts(which: str) -> None:
    """test_checkpoint_recompute_casts_forward_inputs, ..._outputs: both runs of a layer have the same dtypes."""

    class Noting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            self.dtypes.append(x.dtype)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Noting()
            self.outputs: list[torch.dtype] = []

        def run(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            self.outputs.append(x.dtype)
            return x

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(fp32 if which == "inputs" else bf16)
            return recompute(self.run, x, use_reentrant=False, early_stop=False).float().sum()

    def check(rank: int, plan: Plan) -> None:
        model = Model()
        if which == "inputs":
            precision = {"*": MixedPrecision(bf16)}
        else:
            precision = {"linear": MixedPrecision(bf16, output=fp32, cast_inputs=False), "*": "fp32"}
        zeroshard.shard(model, plan, units=Noting, precision=precision)
        model(numbers(1, rank)).backward()
        if which == "inputs":
            assert model.linear.dtypes == [bf16, bf16]
        else:
            assert model.outputs == [fp32, fp32]

    on_all_plans(check)


@pytest.mark.parametrize("inner", [False, True])
def test_recomputation_of_a_part_in_its_own_precision(inner: bool) -> None:
    """test_checkpoint_and_fully_shard: of the part itself, or of the layer inside it."""

    def check(rank: int, plan: Plan) -> None:
        model = Chain()
        checkpoint(model.c2.l if inner else model.c2)
        zeroshard.shard(model, plan, precision={"c2": MixedPrecision(fp16), "*": "fp32"})
        model(torch.zeros(2, 8)).sum().backward()
        assert model.seen == {"model": fp32, "c1": fp32, "c2": fp16}

    on_all_plans(check)


# Ignored parts -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_part_of_the_model_belongs_to_torch_ddp(rank: int) -> None:
    """TestFullyShardIgnoreParams.test_ddp_A_fsdp_B_ddp_C: the middle is sharded, except a part inside of it. torch DDP
    has that part and the outer layers. A plain optimizer steps the ignored parameters."""

    class C(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin_c = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin_c(x)

    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin_b, self.module_c = nn.Linear(8, 8), C()
            self.subtrahend = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.lin_b(self.module_c(x)) - self.subtrahend

    class A(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module_b = B()
            self.addend = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (self.module_b(x) + self.addend).square().sum()

    @in_fp64
    def check(rank: int) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            plain = DistributedDataParallel(A())
            model = copy.deepcopy(plain.module)
            handle = zeroshard.shard(model.module_b, plan, ignored=["module_c"])
            sharded = [f"module_b.{name}" for name in ("subtrahend", "lin_b.weight", "lin_b.bias")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
            ddp = DistributedDataParallel(model)
            outside = [p for name, p in model.named_parameters() if name not in sharded]
            optimizers = [
                zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2),
                torch.optim.Adam(outside, lr=1e-2),
            ]
            plain_optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
            for step in range(3):
                losses = [one(numbers(8, rank, step, rows=8)) for one in (ddp, plain)]
                torch.testing.assert_close(*losses)
                for loss in losses:
                    loss.backward()
                for optimizer in (*optimizers, plain_optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
            with handle.unsharded():
                expect_close(state_of(model), state_of(plain.module))

    check(rank)
