"""Several losses, each with its own scaler; several optimizers over one model; two models in one loop."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import grid
from tests.kit import CANCELLED, NUM_RANKS, PLANS, State, largest_difference, make, plans_of, same_bits
from tests.parity.common import FP16, FP32, expect_equal_logs
from tests.together import on_ranks
from zeroshard.loss_scale import ConstantScale, DynamicScale, LossScaler
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

SGD = {"lr": 0.125, "momentum": 0.5, "foreach": False}
PURE_FP16 = MixedPrecision(FP16, FP16, None, FP32)


class TwoHeads(nn.Module):
    """A shared trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 40), nn.Linear(40, 4), nn.Linear(40, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.a(x).float().square().mean(), self.b(x).float().abs().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def scaler(init: float, **options: Any) -> LossScaler:
    return LossScaler(DynamicScale(init=init, growth_interval=1000, **options))


def backward_both(optimizer: Any, losses: tuple[Tensor, Tensor], scalers: Any) -> None:
    optimizer.backward(losses[0], scaler=scalers[0], retain_graph=True)
    optimizer.backward(losses[1], scaler=scalers[1])


# Several losses over shared parameters --------------------------------------------------------------------------------


PRECISIONS = ("fp32", "fp16", "bf16-remainder", PURE_FP16)
SCALES = ((2.0**4, 2.0**9), (2.0**9, 2.0**4), (2.0**3, 3 * 2.0**3))
SCALE_CASES = grid(range(len(PRECISIONS)), PLANS, SCALES, apart=(0, 1))


def test_scales_of_two_losses_cancel_out() -> None:
    """Powers of two change nothing in fp32. fp16 rounds numbers below 2^-14 differently after scaling, so weights of
    about 1 differ by less than 1e-3."""

    def run(rank: int, plan: Any, precision: Any, scales: tuple[float, float]) -> tuple[State, Any]:
        model = make(TwoHeads)
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
        scalers = [scaler(scale) for scale in scales]
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, loss_scale=1.0, **SGD)
        for step in range(2):
            backward_both(optimizer, model(batch(rank, step)), scalers)
            assert optimizer.step().applied
        return handle.full_state_dict(main=True), handle.comm_log

    def check(rank: int) -> list[Any]:
        unscaled = [run(rank, zeroshard.ZERO2, precision, (1.0, 1.0))[0] for precision in PRECISIONS]
        logs = []
        for number, plan, scales in SCALE_CASES:
            found, log = run(rank, plan, PRECISIONS[number], scales)
            case = (PRECISIONS[number], plan, scales)
            if PRECISIONS[number] == "fp32" and scales in SCALES[:2]:
                assert same_bits(unscaled[number], found), case
            assert largest_difference(unscaled[number], found) < 1e-3, case
            logs.append(log)
        return logs

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_equal_logs(logs)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_each_scaler_adjusts_on_its_own_overflow(num_ranks: int) -> None:
    """If one of two losses overflows on any rank, all ranks skip the step, and on all ranks only that loss's scaler
    backs off. The first one may be the optimizer's: it once backed off together with the others, or not at all."""

    def check(rank: int) -> list[Any]:
        logs = []
        for plan, has_default in product(plans_of(num_ranks), (False, True)):
            model = make(TwoHeads)
            handle = zeroshard.shard(model, plan, units=nn.Linear, precision="fp16")
            policy = DynamicScale(init=2.0**8, growth_interval=1000) if has_default else 1.0
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, loss_scale=policy, **SGD)
            scalers = [optimizer.scaling.default or scaler(2.0**8), scaler(2.0**4)]
            named = [None if has_default else scalers[0], scalers[1]]
            expected = [2.0**8, 2.0**4]
            for step, guilty in enumerate([(), (0,), (1,), (), (0, 1), (1,), (0,)]):
                before = handle.full_state_dict(main=True)
                losses = list(model(batch(rank, step)))
                for index in guilty:
                    expected[index] /= 2
                    if rank == step % num_ranks:
                        losses[index] = losses[index] * torch.inf
                backward_both(optimizer, tuple(losses), named)
                assert optimizer.step().applied is (not guilty)
                assert [one.scale for one in scalers] == expected, (plan, has_default, step)
                assert same_bits(before, handle.full_state_dict(main=True)) is bool(guilty)
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_equal_logs(logs)


@on_ranks(2)
def test_with_one_scaler_for_both_an_overflow_is_everybodys(rank: int) -> None:
    """The negative control: with one scaler for both losses, an overflow of either lowers their common scale."""
    model = make(TwoHeads)
    zeroshard.shard(model, "zero2", units=nn.Linear)
    shared = scaler(2.0**8)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, **SGD)
    a, b = model(batch(rank, 0))
    backward_both(optimizer, (a * torch.inf, b), [shared, shared])
    assert not optimizer.step().applied
    assert shared.scale == 2.0**7


@on_ranks(2)
def test_a_scaler_gives_up_on_its_own_overflows_alone(rank: int) -> None:
    """An overflow of the first loss and then one of the second are not two overflows in a row of the same loss."""
    model = make(TwoHeads)
    zeroshard.shard(model, "zero2", units=nn.Linear)
    scalers = [scaler(2.0**8, max_skips=2), scaler(2.0**8, max_skips=2)]
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, **SGD)
    for step, guilty in enumerate([0, 1, 0, 1, 1]):
        losses = list(model(batch(rank, step)))
        losses[guilty] = losses[guilty] * torch.inf
        backward_both(optimizer, tuple(losses), scalers)
        if step < 4:
            assert not optimizer.step().applied
    with pytest.raises(RuntimeError, match="2 times in a row"):
        optimizer.step()
    assert [one.skips_in_a_row for one in scalers] == [0, 1]


@on_ranks(2)
def test_a_pure_fp16_multi_task_run_with_two_scalers_follows_fp32(rank: int) -> None:
    """The first task's loss is 256 times as large, and overflows at a smaller scale. A skipped batch is repeated; after
    15 applied steps both losses are within 5% of the fp32 run's."""
    finals = {}
    for precision in ("fp32", PURE_FP16):
        model = make(TwoHeads)
        handle = zeroshard.shard(model, "zero3", units=nn.Linear, precision=precision)
        scalers = [LossScaler(DynamicScale(init=2.0**12, growth_interval=2, max_skips=None)) for _ in range(2)]
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.01, foreach=False, loss_scale=1.0)
        scales, skipped, applied = [], 0, 0
        while applied < 15:
            a, b = model(batch(rank, applied))
            backward_both(optimizer, (256 * a, b), scalers)
            done = optimizer.step().applied
            applied, skipped = applied + done, skipped + (not done)
            scales.append(tuple(one.scale for one in scalers))
        assert (skipped > 0) is (precision == PURE_FP16)
        if precision == PURE_FP16:
            assert scales[-1][0] < scales[-1][1], "each went its own way"
        with torch.no_grad():
            finals[str(precision)] = [float(loss) for loss in model(batch(0, 999))]
    full, half = finals.values()
    assert all(abs(a - b) < 0.05 * a for a, b in zip(full, half, strict=True)), (full, half)


# Several optimizers over one model ------------------------------------------------------------------------------------


def two_optimizers(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    trunk = zeroshard.ShardedOptimizer(model.trunk.parameters(), torch.optim.AdamW, lr=0.01, foreach=False, **options)
    heads = [*model.a.parameters(), *model.b.parameters()]
    return trunk, zeroshard.ShardedOptimizer(heads, torch.optim.SGD, **SGD, **options)


def plain_two(num_ranks: int, steps: int, weights: list[float]) -> dict[str, Tensor]:
    model = make(TwoHeads)
    optimizers = [
        torch.optim.AdamW(model.trunk.parameters(), lr=0.01, foreach=False),
        torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], **SGD),
    ]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(num_ranks):
            (weights[rank] * sum(model(batch(rank, step)))).backward()
        for parameter in model.parameters():
            parameter.grad /= num_ranks
            parameter.grad *= num_ranks / sum(weights[:num_ranks])
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("units", [nn.Linear, None], ids=["unit each", "one unit for all"])
def test_two_optimizers_over_disjoint_parameters(units: Any) -> None:
    """In fp32 with one loss: bit-equal to two plain optimizers, with sums in rank order."""

    def check(rank: int) -> list[Any]:
        expected = plain_two(3, 3, [1.0, 1.0, 1.0])
        logs = []
        for plan in plans_of(units is None):
            model = make(TwoHeads)
            handle = zeroshard.shard(model, plan, units=units)
            trunk, heads = two_optimizers(model)
            for step in range(3):
                sum(model(batch(rank, step))).backward()
                trunk.clip_grad_norm_(1e9)
                for optimizer in (trunk, heads) if step % 2 else (heads, trunk):
                    optimizer.step()
                for optimizer in (trunk, heads):
                    optimizer.zero_grad()
            assert same_bits(handle.full_state_dict(), expected), plan
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_equal_logs(logs)


@on_ranks(2)
def test_one_of_two_optimizers_steps_twice_as_often(rank: int) -> None:
    """Gradients of the slower optimizer are kept until its step, or discarded by its `zero_grad`."""
    for plan in plans_of(1):
        model = make(TwoHeads)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        trunk, heads = two_optimizers(model)
        reference = make(TwoHeads)
        plain = torch.optim.SGD([*reference.a.parameters(), *reference.b.parameters()], **SGD)
        plain_trunk = torch.optim.AdamW(reference.trunk.parameters(), lr=0.01, foreach=False)
        for step in range(4):
            sum(model(batch(0, step))).backward()  # the same batch on both ranks: their mean is exact
            sum(reference(batch(0, step))).backward()
            heads.step()
            plain.step()
            plain.zero_grad()
            if step % 2:
                trunk.step()
                plain_trunk.step()
                plain_trunk.zero_grad()
        assert largest_difference(handle.full_state_dict(), reference.state_dict()) < CANCELLED, plan


@on_ranks(2)
def test_a_weighted_loss_counts_for_both_optimizers(rank: int) -> None:
    """The loss is passed to the backward of one optimizer; its weight counts for both."""
    weights = [3.0, 5.0]

    expected = plain_two(2, 2, weights)
    for plan in plans_of(0):
        model = make(TwoHeads)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        trunk, heads = two_optimizers(model)
        for step in range(2):
            trunk.backward(sum(model(batch(rank, step))), weight=weights[rank])
            trunk.step()
            heads.step()
        assert largest_difference(handle.full_state_dict(), expected) < CANCELLED, plan


@on_ranks(2)
def test_two_optimizers_over_one_fp16_model_share_the_scale_of_a_loss(rank: int) -> None:
    """An overflow in the parameters of either optimizer lowers the scale of the loss once."""
    for plan in plans_of(1):
        model = make(TwoHeads)
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision="fp16")
        trunk, heads = two_optimizers(model)
        shared = scaler(2.0**8)
        for step in range(4):
            hook = None
            if step == 2 and rank == 1:
                hook = model.a.weight.register_hook(lambda grad: grad * torch.inf)
            trunk.backward(sum(model(batch(rank, step))), scaler=shared)
            if hook is not None:
                hook.remove()
            results = [trunk.step().applied, heads.step().applied]
            assert results == [True, step != 2], (plan, step)
            assert shared.scale == (2.0**8 if step < 2 else 2.0**7)
        assert all(torch.isfinite(value).all() for value in handle.full_state_dict(main=True).values())


# Two models in one loop -----------------------------------------------------------------------------------------------


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(4, 30), nn.Linear(30, 8)

    def forward(self, z: Tensor) -> Tensor:
        return self.out(torch.tanh(self.up(z)))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Linear(8, 30), nn.Linear(30, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.down(x))).float()


def softplus(x: Tensor) -> Tensor:
    return nn.functional.softplus(x).mean()


def gan_data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 8, generator=generator) * 0.5 + 1


def plain_gan(num_ranks: int, steps: int) -> dict[str, Tensor]:
    g, d = make(Generator, 1), make(Discriminator, 2)
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for name, m in (("g", g), ("d", d))}
    for step in range(steps):
        for which, model in (("d", d), ("g", g)):
            sums: dict[nn.Parameter, Tensor] = {}
            for rank in range(num_ranks):
                z, real = gan_data(rank, step)
                g.zero_grad(), d.zero_grad()
                loss = softplus(-d(real)) + softplus(d(g(z).detach())) if which == "d" else softplus(-d(g(z)))
                loss.backward()
                for p in model.parameters():
                    sums[p] = p.grad if p not in sums else sums[p] + p.grad
            for p, total in sums.items():
                p.grad = total / num_ranks
            optimizers[which].step()
    return {f"{n}.{key}": v.clone() for n, m in (("g", g), ("d", d)) for key, v in m.state_dict().items()}


def sharded_gan(rank: int, plan: Any, precision: Any, steps: int, bad_step: int = -1) -> tuple[Any, list[Any], Any]:
    g, d = make(Generator, 1), make(Discriminator, 2)
    handles = [zeroshard.shard(model, plan, units=nn.Linear, precision=precision) for model in (g, d)]
    scaled = precision != "fp32"
    opts = [
        zeroshard.ShardedOptimizer(
            handle,
            torch.optim.AdamW,
            lr=0.01,
            foreach=False,
            loss_scale=DynamicScale(init=2.0**10, growth_interval=5) if scaled else None,
        )
        for handle in handles
    ]
    history = []
    for step in range(steps):
        z, real = gan_data(rank, step)
        opts[1].zero_grad()
        loss = softplus(-d(real)) + softplus(d(g(z).detach()))
        opts[1].backward(loss * (torch.inf if step == bad_step and rank == 0 else 1.0))
        stepped_d = opts[1].step()
        opts[0].zero_grad()
        opts[0].backward(softplus(-d(g(z))))  # leaves gradients in the discriminator, too
        stepped_g = opts[0].step()
        opts[1].zero_grad()
        history.append((stepped_g.applied, stepped_d.applied, stepped_g.loss_scale, stepped_d.loss_scale))
    weights = {f"{n}.{key}": v for n, h in zip("gd", handles, strict=True) for key, v in h.full_state_dict().items()}
    return weights, history, [handle.comm_log for handle in handles]


def test_a_gan_is_two_plain_optimizers_bit_for_bit() -> None:
    def check(rank: int) -> list[Any]:
        expected = plain_gan(3, 2)
        logs = []
        for plan in plans_of(0):
            weights, _, found = sharded_gan(rank, plan, "fp32", 2)
            assert same_bits(weights, expected), plan
            logs += found
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_equal_logs(logs)


def test_a_pure_fp16_gan_with_a_scaler_each() -> None:
    """An overflow of the discriminator skips its step and halves its scale; the generator's steps are applied."""

    def check(rank: int) -> list[Any]:
        runs = [sharded_gan(rank, plan, PURE_FP16, 8, bad_step=3) for plan in plans_of(1)]
        for weights, history, _ in runs:
            assert same_bits(weights, runs[0][0]) and history == runs[0][1]
        history = runs[0][1]
        assert [d for _, d, _, _ in history] == [step != 3 for step in range(8)] and all(g for g, *_ in history)
        assert [scale for *_, scale in history] == [2.0**10] * 4 + [2.0**9] * 4
        assert [scale for _, _, scale, _ in history] == [2.0**10] * 5 + [2.0**11] * 3
        return [log for *_, logs in runs for log in logs]

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_equal_logs(logs)


@on_ranks(2)
def test_forgetting_to_discard_is_seen(rank: int) -> None:
    """The negative control: if the discriminator's gradients from the generator's loss are not discarded, results
    differ."""
    g, d = make(Generator, 1), make(Discriminator, 2)
    zeroshard.shard(g, "zero2", units=nn.Linear)
    handle = zeroshard.shard(d, "zero2", units=nn.Linear)
    opt_g = zeroshard.ShardedOptimizer(g.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    opt_d = zeroshard.ShardedOptimizer(d.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    for step in range(4):
        z, real = gan_data(rank, step)
        (softplus(-d(real)) + softplus(d(g(z).detach()))).backward()
        opt_d.step()
        softplus(-d(g(z))).backward()
        opt_g.step()
    expected = plain_gan(2, 4)
    found = {f"d.{key}": value for key, value in handle.full_state_dict().items()}
    assert not same_bits(found, {key: value for key, value in expected.items() if key.startswith("d.")})


@on_ranks(2)
def test_a_constant_scaler_never_moves(rank: int) -> None:
    model = make(TwoHeads)
    zeroshard.shard(model, "zero1", units=nn.Linear)
    constant = LossScaler(ConstantScale(2.0**5))
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, **SGD)
    for bad in (False, True, False):
        a, b = model(batch(rank, 0))
        optimizer.backward(a * (torch.inf if bad else 1.0) + b, scaler=constant)
        assert optimizer.step().applied is not bad
        assert constant.scale == 2.0**5


# Losses with weights --------------------------------------------------------------------------------------------------


class RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError("no room for the gradient of the loss")


@on_ranks(2)
def test_a_loss_whose_backward_has_raised_behind_the_model_does_not_count(rank: int) -> None:
    """Its weight once counted, and the step divided the gradients of all other losses by it as well."""
    for plan in plans_of(0):
        norms = []
        for fails in (False, True):
            model = make(TwoHeads)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, **SGD)
            with handle.no_sync(), handle.unsharded():  # one rank runs the model alone
                optimizer.backward(sum(model(batch(rank, 0))), weight=2.0)
                if fails and rank == 1:
                    with pytest.raises(MemoryError, match="no room"):
                        optimizer.backward(RunsOut.apply(sum(model(batch(rank, 1)))), weight=5.0)
            optimizer.backward(sum(model(batch(rank, 2))), weight=3.0)
            norms.append(optimizer.step().grad_norm)
        assert norms[0] == norms[1], plan


@on_ranks(2)
def test_a_plain_backward_beside_losses_with_weights_is_refused(rank: int) -> None:
    """The step once divided its gradient by the weights of the others."""
    for plan, first in product(plans_of(1), (True, False)):
        model = make(TwoHeads)
        optimizer = zeroshard.ShardedOptimizer(zeroshard.shard(model, plan, units=nn.Linear), torch.optim.SGD, **SGD)
        for step, has_weight in enumerate((first, not first)):
            loss = sum(model(batch(rank, step)))
            if step == 0:
                optimizer.backward(loss, weight=3.0) if has_weight else loss.backward()
                continue
            with pytest.raises(RuntimeError, match="either all losses of a step have a weight, or none has"):
                optimizer.backward(loss, weight=3.0) if has_weight else loss.backward()
        optimizer.zero_grad()
        sum(model(batch(rank, 2))).backward()
        assert optimizer.step().applied


@on_ranks(2)
def test_a_gradient_that_is_set_before_a_scaled_loss_is_not_divided_by_its_scale(rank: int) -> None:
    """The scale of the first loss counted for what had been set before it, too; and that of a loss with a weight for
    what was set behind it."""
    for plan in plans_of(0):
        weights = []
        for scale in (1.0, 2.0**10):
            model = make(TwoHeads)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, loss_scale=scale, **SGD)
            handle.set_gradient("a.weight", torch.ones(4, 40))
            with pytest.raises(RuntimeError, match="either all losses of a step have a weight, or none has"):
                optimizer.backward(sum(model(batch(rank, 0))), weight=2.0)
            optimizer.backward(sum(model(batch(rank, 1))))
            optimizer.step()
            weights.append(handle.full_state_dict(main=True))
            optimizer.backward(sum(model(batch(rank, 2))), weight=2.0)
            with pytest.raises(RuntimeError, match="set_gradient: this step's losses were weighted"):
                handle.set_gradient("a.weight", torch.ones(4, 40))
        assert same_bits(*weights), plan
