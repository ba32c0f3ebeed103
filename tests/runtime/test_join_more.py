"""Ranks that run out of inputs in loops with several models (a GAN), with loss scales, and with accumulation.

`handle.join()` once supported one model and no loss scale.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING, grid
from tests.kit import NUM_RANKS, PLANS, Block, Net, loss_of_tokens, make, plans_of, same_bits, with_plans
from tests.patience import HANG
from tests.together import in_turn, on_ranks
from zeroshard.loss_scale import DynamicScale, LossScaler
from zeroshard.precision import MixedPrecision
from zeroshard.testing import expect_same_logs, run_ranks

STEPS = (2, 5, 0)
GAN_STEPS = STEPS if EVERYTHING else (1, 3, 0)
ADAMW = {"lr": 1e-2, "foreach": False}


# Several models -------------------------------------------------------------------------------------------------------


def generator_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))


def discriminator_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=random), torch.randn(6, 8, generator=random) * 0.5 + 1


def softplus(x: Tensor) -> Tensor:
    return nn.functional.softplus(x).mean()


def plain_gan() -> dict[str, Tensor]:
    """In one process: a rank without inputs adds nothing to the sum, which is divided by the number of all ranks."""
    models = {"d": make(discriminator_net, 2), "g": make(generator_net, 1)}
    d, g = models.values()
    optimizers = {name: torch.optim.AdamW(model.parameters(), **ADAMW) for name, model in models.items()}
    for step in range(max(GAN_STEPS)):
        for which, model in models.items():
            sums: dict[nn.Parameter, Tensor] = {}
            for rank in (rank for rank in range(3) if step < GAN_STEPS[rank]):
                z, real = data(rank, step)
                g.zero_grad(), d.zero_grad()
                loss = softplus(-d(real)) + softplus(d(g(z).detach())) if which == "d" else softplus(-d(g(z)))
                loss.backward()
                for p in model.parameters():
                    assert p.grad is not None
                    sums[p] = p.grad if p not in sums else sums[p] + p.grad
            for p, total in sums.items():
                p.grad = total / 3
            optimizers[which].step()
    return {f"{name}.{key}": v.clone() for name, model in models.items() for key, v in model.state_dict().items()}


def sharded_gan(rank: int, plan: Any, loss_scale: Any = None) -> tuple[dict[str, Tensor], list[Any]]:
    models = make(discriminator_net, 2), make(generator_net, 1)
    d, g = models
    handles = [zeroshard.shard(model, plan, units=nn.Linear) for model in models]
    optimizers = [
        zeroshard.ShardedOptimizer(h, torch.optim.AdamW, loss_scale=loss_scale, **ADAMW)  # type: ignore[arg-type]
        for h in handles
    ]
    with handles[0].join(handles[1]):
        for step in range(GAN_STEPS[rank]):
            z, real = data(rank, step)
            optimizers[0].zero_grad()
            optimizers[0].backward(softplus(-d(real)) + softplus(d(g(z).detach())))
            optimizers[0].clip_grad_norm_(1e6)
            assert optimizers[0].step().applied
            optimizers[1].zero_grad()
            optimizers[1].backward(softplus(-d(g(z))))  # leaves gradients in the discriminator, too
            assert optimizers[1].step().applied
            optimizers[0].zero_grad()
            assert not optimizers[0].step().applied  # no gradients are left
    weights = {f"{n}.{key}": v for n, h in zip("dg", handles, strict=True) for key, v in h.full_state_dict().items()}
    return weights, [handle.comm_log for handle in handles]


def test_a_gan_is_two_plain_optimizers_bit_for_bit() -> None:
    """Also with loss scales: scaling by a power of two is exact in fp32."""

    def check(rank: int) -> list[Any]:
        expected, logs = plain_gan(), []
        for loss_scale, plan in with_plans((None, "dynamic")):
            weights, found = sharded_gan(rank, plan, loss_scale)
            assert same_bits(weights, expected), (plan, loss_scale)
            logs += found
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


@on_ranks(2)
def test_what_cannot_be_joined_together(rank: int) -> None:
    first, second = (zeroshard.shard(make(Net), "zero2", units=Block) for _ in range(2))
    with pytest.raises(ValueError, match="the same handle twice"), first.join(first):
        pass
    with pytest.raises(RuntimeError, match="inside of another"), first.join(second), second.join():
        pass
    optimizer = zeroshard.ShardedOptimizer(first, torch.optim.SGD)
    optimizer.param_groups[0]["of mine"] = object()
    with pytest.raises(ValueError, match="join: the hyper-parameter 'of mine' is a object"), first.join():
        pass
    del optimizer.param_groups[0]["of mine"]
    groups = [torch.distributed.new_group([one]) for one in range(2)]
    alone = zeroshard.shard(make(Net), "zero2", mesh=groups[rank])
    with pytest.raises(ValueError, match="different ranks"), first.join(alone):
        pass


# Scaled losses --------------------------------------------------------------------------------------------------------

PURE_FP16 = MixedPrecision(torch.float16, torch.float16, None, torch.float16)


def scaled(
    rank: int, plan: Any, *, precision: Any = None, scale: Any = 1.0, bad_step: int = -1, micro_batches: int = 1
) -> tuple[dict[str, Tensor], list[Any], Any]:
    model = make(Net)
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, loss_scale=scale, eps=1e-4, **ADAMW)
    history = []
    with handle.join():
        for step in range(STEPS[rank]):
            optimizer.zero_grad()
            for micro_batch in range(micro_batches):
                with nullcontext() if micro_batch == micro_batches - 1 else handle.no_sync():
                    loss = loss_of_tokens(model, rank, micro_batch, step, micro_batches)
                    optimizer.backward(loss * (torch.inf if step == bad_step else 1.0))
            optimizer.clip_grad_norm_(0.5)
            optimizer.clip_grad_value_(0.01)
            result = optimizer.step()
            history.append((result.applied, result.loss_scale, optimizer.scaling.state_dict()))
    return handle.full_state_dict(main=True), history, optimizer.scaling.state_dict()


SCALED_CASES = grid(PLANS, (1, 2), (-1, 3)) if EVERYTHING else [*zip(PLANS, (1, 2, 2, 1), (3, -1, 3, -1), strict=True)]
"""Plan, micro-batches, and the step that overflows on the last rank with inputs (-1: none)."""


def test_a_rank_without_inputs_scales_as_the_others() -> None:
    """After an overflow on one rank, all ranks skip the step and halve the scale."""
    policy = DynamicScale(init=2.0**8, growth_interval=2)

    def check(rank: int) -> list[Any]:
        unscaled = {num: scaled(rank, zeroshard.DDP, micro_batches=num)[0] for num in (1, 2)}
        ends = []
        for plan, num, bad_step in SCALED_CASES:
            weights, history, end = scaled(rank, plan, scale=policy, bad_step=bad_step, micro_batches=num)
            assert [one[0] for one in history] == [step != bad_step for step in range(STEPS[rank])], (plan, num)
            if bad_step < 0:
                assert same_bits(weights, unscaled[num]), (plan, num)
                scales = [2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**10]
                assert [one[1] for one in history] == scales[: STEPS[rank]], (plan, num)
            ends.append(end)
        return ends

    found = run_ranks(check, 3)
    assert found[0] == found[1] == found[2]


def test_fp16_under_every_plan() -> None:
    def check(rank: int) -> Any:
        plans = PLANS if EVERYTHING else PLANS[::3]
        runs = [scaled(rank, plan, precision=PURE_FP16, scale=None, bad_step=4) for plan in plans]
        assert all(same_bits(run[0], runs[0][0]) and run[1:] == runs[0][1:] for run in runs)
        return runs[0][0], runs[0][2]

    found = run_ranks(check, 3)
    assert all(same_bits(weights, found[0][0]) and state == found[0][1] for weights, state in found)


@on_ranks(2)
def test_a_scaler_of_the_loss_alone_is_refused(rank: int) -> None:
    """It was refused once a rank had run out of inputs, at the end of an epoch perhaps."""
    model = make(Net)
    handle = zeroshard.shard(model, "zero2", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, loss_scale=2.0)
    scaler = LossScaler(DynamicScale())
    with handle.join():
        with pytest.raises(RuntimeError, match="join: a loss has a scaler of its own"):
            optimizer.backward(loss_of_tokens(model, rank, 0, 0), scaler=scaler)
        optimizer.zero_grad()
        optimizer.backward(loss_of_tokens(model, rank, 0, 0), scaler=optimizer.scaling.default)
        optimizer.step()
    optimizer.backward(loss_of_tokens(model, rank, 0, 0), scaler=scaler)
    optimizer.step()


SCALE = 2.0**8


def scalers_of_two_optimizers(rank: int, plan: Any, steps: int, overflows_at: int) -> list[float]:
    """A model with two optimizers, each with its own loss scaler and one loss in every step. The second loss overflows
    once."""
    model = make(Net)
    handle = zeroshard.shard(model, plan, units=Block)
    parameters, policy = list(model.parameters()), DynamicScale(init=SCALE)
    optimizers = [
        zeroshard.ShardedOptimizer(half, torch.optim.AdamW, loss_scale=policy, **ADAMW)  # type: ignore[arg-type]
        for half in (parameters[::2], parameters[1::2])
    ]
    scalers = [optimizer.scaling.default for optimizer in optimizers]
    with handle.join():
        for step in range(steps):
            for number, scaler in enumerate(scalers):
                loss = loss_of_tokens(model, rank, number, step)
                overflows = step == overflows_at and number == 1
                optimizers[0].backward(loss * (torch.inf if overflows else 1.0), scaler=scaler)
            assert [optimizer.step().applied for optimizer in optimizers] == [step != overflows_at] * 2
    return [scaler.scale for scaler in scalers if scaler is not None]


@pytest.mark.parametrize("steps", [(1, 4), (2, 4, 0)])
def test_a_rank_without_inputs_lowers_the_scale_of_the_loss_that_has_overflowed(steps: tuple[int, ...]) -> None:
    """Such a rank once lowered all scales, so that ranks scaled the same loss by different factors."""

    def check(rank: int) -> list[list[float]]:
        return [scalers_of_two_optimizers(rank, plan, steps[rank], overflows_at=3) for plan in plans]

    plans = plans_of(len(steps))
    for found in run_ranks(check, len(steps)):
        assert found == [[SCALE, SCALE / 2]] * len(plans)


@pytest.mark.parametrize("ranks", NUM_RANKS)
def test_a_loss_that_nobody_steps_with_lowers_no_scale(ranks: int) -> None:
    """The last rank runs out of inputs after a loss that overflows, and the others discard the gradients. The last rank
    once still reported the overflow at the next step."""

    def check(rank: int) -> float:
        model = make(Net)
        handle = zeroshard.shard(model, "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, loss_scale=DynamicScale(init=SCALE), **ADAMW)
        scaler, is_last = optimizer.scaling.default, rank == ranks - 1
        assert scaler is not None
        with handle.join():
            loss = loss_of_tokens(model, rank, 0, 0)
            optimizer.backward(loss * (torch.inf if is_last else 1.0), scaler=scaler)
            if not is_last:
                optimizer.zero_grad()
                optimizer.backward(loss_of_tokens(model, rank, 0, 1), scaler=scaler)
                assert optimizer.step().applied
        return scaler.scale

    assert run_ranks(check, ranks) == [SCALE] * ranks


# What came before -----------------------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        raise ValueError("backward")


def raise_in_backward(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="backward"):
        model[2](Raises.apply(model[:2](torch.ones(1, 4)))).sum().backward()
    for parameter in model.parameters():  # unlike `model.zero_grad`, this is not seen
        parameter.grad = None


def joined_after(rank: int, plan: Any, before: str) -> dict[str, Tensor]:
    model = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW)
    if before == "raised":
        raise_in_backward(model)
    else:
        model[0].requires_grad_(False)
    start = model[0].weight if before == "frozen" else None
    with handle.join():
        for step in range(STEPS[rank]):
            model(data(rank, step)[0]).square().mean().backward()
            assert optimizer.step().applied
    assert start is None or not start.requires_grad
    return handle.full_state_dict()


def test_a_rank_without_inputs_after_a_backward_that_raised_or_after_freezing() -> None:
    """That rank calls no forward, where the others discard what has been left, and agree on what is frozen."""

    def check(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for before in ("raised", "frozen"):
            results = [joined_after(rank, plan, before) for plan in PLANS]
            assert all(same_bits(one, results[0]) for one in results), before
            found.append(results[0])
        return found

    raised, frozen = run_ranks(check, 3, collective_timeout=HANG)[0]
    started = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).state_dict()
    for name, value in started.items():
        value = value.cpu()
        assert torch.equal(frozen[name], value) == name.startswith("0."), name
        assert not torch.equal(raised[name], value), name


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def test_after_a_join_all_ranks_gather_ahead_alike() -> None:
    """A rank without inputs did not learn in which order the layers run now. After the join it gathered others ahead
    than its peers, and they waited for each other until the timeout. Nor did it forget a forward without a backward."""

    def check(rank: int, skips: bool) -> dict[str, Tensor]:
        model = make(Ordered)
        handle = zeroshard.shard(model, zeroshard.ZERO3, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.01)

        def step(*order: int) -> None:
            model(torch.ones(3, 6) * rank, order).sum().backward()
            optimizer.step()

        step(0, 1, 2, 3, 4, 5)
        with handle.join():
            if skips:
                model(torch.ones(3, 6), (3, 4))
            for _ in range(rank if skips else 1 + rank):
                step(0, 2, 1, 2, 3, 5, 4)
        step(0, 2, 1, 2, 3, 5, 4)
        step(0, 2, 1, 2, 3, 5, 4)
        return handle.full_state_dict()

    for of_case in zip(*run_ranks(in_turn(check, [False, True]), 2, collective_timeout=HANG), strict=True):
        assert same_bits(*of_case)


@on_ranks(2)
def test_a_backward_that_raised_leaves_nothing_that_a_save_or_parking_would_miss(rank: int) -> None:
    for plan in PLANS:
        model = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW)
        raise_in_backward(model)
        handle.park()
        handle.unpark()
        raise_in_backward(model)
        handle.engine.expect_no_gradients("save")
        model(torch.ones(1, 4)).sum().backward()
        raise_in_backward(model)
        with pytest.raises(RuntimeError, match="with its gradients those of earlier micro-batches are discarded"):
            handle.park()
        optimizer.zero_grad()
        handle.park()
        handle.unpark()


class Rooted(nn.Module):
    """A module called as the root unit is; norms of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.root = nn.Linear(4, 4), nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.root(self.inner(x))  # type: ignore[no-any-return]


def same_name(kind: type[nn.Module]) -> type[nn.Module]:
    return type("Norm", (kind,), {})


@on_ranks(2)
def test_orders_of_a_join_reach_the_unit_that_is_meant(rank: int) -> None:
    """Units were found by names that others had, too."""
    rms, layer = same_name(nn.RMSNorm), same_name(nn.LayerNorm)
    cases: list[tuple[Any, Any]] = [
        (nn.Sequential, None),
        (None, MixedPrecision(torch.bfloat16, keep=(rms, layer))),
        (None, {rms: "fp32", layer: "fp32", "*": "bf16"}),
    ]
    for plan in PLANS:
        for units, precision in cases:
            model = make(Rooted)
            model.root[0], model.root[2] = rms(4), layer(4)
            handle = zeroshard.shard(model, plan, units=units, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.01)
            with handle.join():
                for _ in range(1 + rank):
                    model(torch.ones(3, 4)).sum().backward()
                    optimizer.step()
            names = [unit.name for unit in handle.engine.units]
            assert len(names) == len(set(names)), names


@on_ranks(2)
def test_a_join_that_is_refused_leaves_no_handle_inside(rank: int) -> None:
    """If the second handle was refused, the first one stayed in the join for good."""
    generator, discriminator = make(generator_net), make(discriminator_net)
    handles = [zeroshard.shard(model, "zero3") for model in (generator, discriminator)]
    optimizers = [zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1) for handle in handles]
    optimizers[1].param_groups[0]["note"] = object()
    with pytest.raises(ValueError, match="hyper-parameter 'note'"), handles[0].join(handles[1]):
        pass
    del optimizers[1].param_groups[0]["note"]
    with handles[0].join(handles[1]):
        for _ in range(1 + rank):
            discriminator(generator(torch.ones(2, 4))).sum().backward()
            assert all(optimizer.step().applied for optimizer in optimizers)
