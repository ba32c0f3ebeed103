"""torch: test/distributed/_composable/fsdp/test_fully_shard_mixed_precision.py, test_fully_shard_grad_dtype.py and
test_fully_shard_grad_scaler.py.

`MixedPrecisionPolicy(param_dtype=P, reduce_dtype=R)` over fp32 parameters is `MixedPrecision(param=P, grad=G, reduce=R,
main=torch.float32)`. The reference is a loop by hand that computes with 16-bit weights and steps fp32 ones.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import plans_of
from tests.outside.common import MLP, PLANS, expect_same_bits, numbers
from tests.together import in_turn, on_ranks
from zeroshard.testing import run_ranks

Adam, bf16, fp16, fp32 = torch.optim.Adam, torch.bfloat16, torch.float16, torch.float32
MixedPrecision = zeroshard.MixedPrecision


def stack(width: int = 16, count: int = 3) -> nn.Sequential:
    torch.manual_seed(42)
    return nn.Sequential(*(MLP(width) for _ in range(count)))


class ByHand:
    """fp32 weights for the optimizer, and copies in the compute dtype for forward and backward."""

    def __init__(self, model: nn.Module, param: torch.dtype, *, grad: torch.dtype, wire: torch.dtype) -> None:
        self.main, self.compute = model, copy.deepcopy(model).to(param)
        self.grad, self.wire = grad, wire
        self.optimizer = Adam(self.main.parameters(), lr=1e-2, foreach=False)
        self.totals: list[Tensor | None] = [None for _ in model.parameters()]

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for i, parameter in enumerate(self.compute.parameters()):
            assert parameter.grad is not None
            total, gradient = self.totals[i], parameter.grad.to(self.grad)
            self.totals[i] = gradient if total is None else total + gradient
            parameter.grad = None

    def step(self) -> None:
        for main, total in zip(self.main.parameters(), self.totals, strict=True):
            assert total is not None
            parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, total)
            summed = parts[0].to(self.wire)
            for part in parts[1:]:
                summed = summed + part.to(self.wire)
            main.grad = summed.to(self.grad).float() / len(parts)
        self.optimizer.step()
        self.totals = [None] * len(self.totals)
        with torch.no_grad():
            for main, compute in zip(self.main.parameters(), self.compute.parameters(), strict=True):
                compute.copy_(main)


@on_ranks(2)
def test_compute_and_reduction_each_in_their_dtype(rank: int) -> None:
    """test_compute_dtype, test_reduce_dtype (fp32 reduction), test_default_gradient_dtype: losses and fp32 weights
    equal those of the loop by hand, and the bytes sent are those of the chosen wire dtype."""

    def check(rank: int, param: torch.dtype, grad: torch.dtype, wire: torch.dtype, plans: Any) -> None:
        states = []
        for plan in plans:
            model = stack()
            by_hand = ByHand(copy.deepcopy(model), param, grad=grad, wire=wire)
            precision = MixedPrecision(param=param, grad=grad, reduce=wire, main=fp32)
            handle = zeroshard.shard(model, plan, units=MLP, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2, foreach=False, loss_scale=1)
            for step in range(3):
                x = numbers(16, rank, step).to(param)
                expected, loss = by_hand.compute(x).sum(), model(x).sum()
                assert loss.dtype == param
                torch.testing.assert_close(loss, expected)
                by_hand.backward(expected), loss.backward()
                by_hand.step(), optimizer.step()
            main = handle.full_state_dict(main=True)
            for name, value in by_hand.main.state_dict().items():
                assert main[name].dtype == fp32
                torch.testing.assert_close(main[name], value, rtol=1e-2, atol=1e-4)
            states.append(main)
        expect_same_bits(states)

    cases = [(bf16, bf16, bf16), (fp16, fp16, fp16), (bf16, fp32, fp32), (bf16, bf16, fp32), (fp32, fp32, fp32)]
    in_turn(check, [(*case, plans_of(number)) for number, case in enumerate(cases)])(rank)


@on_ranks(2)
def test_a_reduction_narrower_than_the_gradients(rank: int) -> None:
    """test_reduce_dtype (bf16 reduction of fp32 gradients), test_clamp_reduce_dtype: half the bytes, sums in fp32."""
    sent = {}
    for wire in (fp32, bf16):
        model = stack()
        handle = zeroshard.shard(model, "zero2", precision=MixedPrecision(fp32, fp32, wire, fp32))
        optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2)
        handle.comm_log.clear()
        model(numbers(16, rank)).sum().backward()
        sent[wire] = handle.comm_log.bytes("reduce_scatter")
        gradient = handle.gradient("0.in_proj.weight")
        plain = stack()
        plain(numbers(16, rank)).sum().backward()
        expected = plain[0].in_proj.weight.grad
        dist.all_reduce(expected)
        torch.testing.assert_close(gradient, expected / 2, rtol=1e-5 if wire is fp32 else 2e-2, atol=1e-3)
        optimizer.step()
    assert sent[bf16] * 2 == sent[fp32]


@on_ranks(2)
def test_a_model_built_in_bf16(rank: int) -> None:
    """test_clamp_reduce_dtype: 16-bit weights from the start; gradients stay bf16 where that is asked for."""
    for plan in PLANS:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(bf16)
        handle = zeroshard.shard(model, plan, precision=MixedPrecision(bf16, bf16, bf16, bf16))
        optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2)
        model(numbers(32, rank).to(bf16)).sum().backward()
        assert handle.gradient("0.weight").dtype == bf16
        optimizer.step()
        assert all(value.dtype == bf16 for value in handle.full_state_dict(main=True).values())


@on_ranks(2)
def test_trained_after_a_first_forward_with_everything_frozen(rank: int) -> None:
    """test_reduce_dtype_after_frozen_first_forward: beside a frozen parameter of integers; gradients are fp32."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            self.integers = nn.Parameter(torch.ones(16, dtype=torch.int64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    for plan in PLANS:
        torch.manual_seed(0)
        model = Model()
        handle = zeroshard.shard(model, plan, precision=MixedPrecision(bf16, fp32, None, fp32))
        model.requires_grad_(False)
        with torch.no_grad():
            model(numbers(16, rank))
        model.layers.requires_grad_(True)
        optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2)
        model(numbers(16, rank)).sum().backward()
        assert all(handle.gradient(f"layers.{i}.weight").dtype == fp32 for i in (0, 1))
        assert optimizer.step().applied


@on_ranks(2)
def test_micro_batches_add_up_in_fp32(rank: int) -> None:
    """test_grad_acc_with_reduce_dtype, test_native_accumulation_dtypes, test_fp32_gradient ("no_sync"): 256 + 1 -
    256 is 1 in fp32 and 0 in bf16."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    for plan in PLANS:
        for grad, expected in ((fp32, 1.0), (bf16, 0.0)):
            model = Scale()
            handle = zeroshard.shard(model, plan, precision=MixedPrecision(bf16, grad, None, fp32))
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
            for value in (256.0, 1.0):
                with handle.no_sync():
                    model(torch.tensor(value)).sum().backward()
            model(torch.tensor(-256.0)).sum().backward()
            assert handle.gradient("weight").eq(expected).all()
            optimizer.step()
            assert handle.full_state_dict(main=True)["weight"].eq(-expected).all()


# Structures ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Inner:
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Outer:
    inner: Inner
    z: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def structure(kind: str, x: Tensor, y: Tensor, z: Tensor) -> Any:
    return Outer(Inner(x, y), z) if kind == "nested" else Inner(x, y) if kind == "dataclass" else Pair(x, y)


def parts(value: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (value.inner.x, value.inner.y, value.z) if isinstance(value, Outer) else (value.x, value.y, value.y)


class Into(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return structure(self.kind, x, x.clone(), x.clone())


class Between(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(8, 8)

    def forward(self, value: Any) -> Any:
        return structure(self.kind, *map(self.layer, parts(value)))


class Out(nn.Module):
    def forward(self, value: Any) -> Tensor:
        x, y, z = parts(value)
        return x + y + z


@on_ranks(2)
def test_structures_between_units(rank: int) -> None:
    """test_structured_input_output."""

    def check(rank: int, precision: str, kind: str, plans: Any) -> None:
        param = bf16 if precision == "bf16" else fp32
        states = []
        for plan in plans:
            torch.manual_seed(0)
            model = nn.Sequential(Into(kind), Between(kind), Between(kind), Out())
            by_hand = ByHand(copy.deepcopy(model), param, grad=fp32, wire=fp32)
            for parameter in by_hand.compute.parameters():
                parameter.grad_dtype = fp32  # uses of a weight within one backward add up in fp32
            handle = zeroshard.shard(model, plan, units=Between, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2, foreach=False)
            for step in range(2):
                x = numbers(8, rank, step)
                expected, loss = by_hand.compute(x.to(param)).sum(), model(x).sum()
                torch.testing.assert_close(loss, expected)
                by_hand.backward(expected), loss.backward()
                by_hand.step(), optimizer.step()
            main = handle.full_state_dict(main=True)
            for name, value in by_hand.main.state_dict().items():
                torch.testing.assert_close(main[name], value, rtol=1e-3, atol=1e-5)
            states.append(main)
        expect_same_bits(states)

    cases = itertools.product(["fp32", "bf16"], ["dataclass", "nested", "namedtuple"])
    in_turn(check, [(*case, plans_of(number)) for number, case in enumerate(cases)])(rank)


# Norms ---------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_norms_in_16_bits_or_kept_in_fp32(rank: int) -> None:
    """test_norm_modules_bf16, test_norm_modules_fp16: layer norm, batch norm of 1 and 2 dimensions."""

    def check(rank: int, param: torch.dtype) -> None:
        models: list[tuple[nn.Module, Tensor, tuple[type[nn.Module], ...]]] = [
            (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)), numbers(32, rank), ()),
            (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)), numbers(32, rank), (nn.LayerNorm,)),
            (
                nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)),
                numbers(32, rank),
                (nn.BatchNorm1d,),
            ),
            (
                nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)),
                numbers(81, rank).view(4, 1, 9, 9),
                (nn.BatchNorm2d,),
            ),
        ]
        for model, x, keep in models:
            handle = zeroshard.shard(model, "zero3", precision=MixedPrecision(param, fp32, None, fp32, keep=keep))
            optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2, loss_scale=1)
            z = model(x)
            assert z.dtype == param
            optimizer.backward(z.float().square().sum())
            assert optimizer.step().applied
            handle.close()

    in_turn(check, [bf16, fp16])(rank)


# Scaling -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_scaler_skips_where_one_rank_overflows(rank: int) -> None:
    """TestFullyShardGradientScaler.test_gradient_scaler: torch's GradScaler is refused, and says what to use; then an
    infinity on rank 1 alone skips the step on all ranks and halves the scale, and without it nothing is skipped."""

    def check(rank: int, overflow: bool) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
            handle = zeroshard.shard(model, plan)
            policy = zeroshard.DynamicScale(init=2.0)
            optimizer = zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2, loss_scale=policy)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale(torch.ones(()))
            with pytest.raises(RuntimeError, match="GradScaler"):
                scaler.step(optimizer)
            before = handle.full_state_dict()
            factor = torch.inf if overflow and rank == 1 else 1.0
            optimizer.backward(model(numbers(4, rank)).sum() * factor)
            result = optimizer.step()
            after = handle.full_state_dict()
            assert result.applied is not overflow and result.loss_scale == 2.0
            assert all(torch.equal(before[name], after[name]) is overflow for name in before)
            assert bool(optimizer.state_dict()["state"]) is not overflow
            assert optimizer.scaling.default is not None
            assert optimizer.scaling.default.scale == (1.0 if overflow else 2.0)

    in_turn(check, [False, True])(rank)


# Forward-mode derivatives --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # raised by torch when it loads forward mode
def test_a_forward_derivative_beside_sharded_layers() -> None:
    """TestFullyShardMixedPrecisionJVP.test_no_warmup_jvp_reshard_after_forward_false: the derivative of a function with
    respect to an input that it does not use; under ZERO3 inside `unsharded`."""

    def check(rank: int) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            encoder, decoder = nn.Linear(8, 16, bias=False), nn.Linear(16, 12, bias=False)
            handles = [zeroshard.shard(layer, plan, precision="bf16") for layer in (encoder, decoder)]
            primal, tangent = torch.randn(2, 12, dtype=bf16)
            e = encoder(numbers(8, rank))
            with handles[0].unsharded(), handles[1].unsharded():
                output, derivative = torch.func.jvp(lambda unused, layer=decoder, e=e: layer(e), (primal,), (tangent,))
            assert output.shape == (4, 12) and output.dtype == bf16
            assert torch.equal(derivative, torch.zeros_like(output))

    run_ranks(check, 2)
