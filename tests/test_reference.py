"""`Reference`, which the engine is compared to, is itself compared to plain torch and to arithmetic by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit import Counting, Job, Net, largest_difference, loss_of_integers, make, same_bits, train_reference
from tests.together import on_ranks
from zeroshard.precision import MixedPrecision
from zeroshard.reference import Reference, nearest_bf16_ties_away

ADAMW = {"lr": 1e-2, "foreach": False}
SGD = {"lr": 2**-4, "momentum": 0.5, "foreach": False}


def plain(job: Job, num_ranks: int) -> tuple[list[float], dict[str, Any]]:
    """The obvious loop: one process adds up the gradients of all micro-batches of all ranks, and divides by the
    ranks."""
    model = make(job.model)
    optimizer = job.optimizer(model.parameters(), **job.defaults)
    losses = []
    for step in range(job.steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(num_ranks):
            for micro_batch in range(job.micro_batches):
                loss = job.loss(model, rank, micro_batch, step)
                loss.backward()
                total += loss.item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= num_ranks
        if job.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def expect_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal up to the last bits (1.3e-6 relative, or 1e-5 absolute), for gradients that are added in another order. The
    optimizer must be linear in the gradients. Adam is not: where terms cancel, it turns the rounding error that is left
    into a whole step, and the size of that error depends on the CPU's kernels."""
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1.3e-6, atol=1e-5)


def per_step(job: Job, num_ranks: int) -> list[float]:
    """The reference's losses, added up in the order of `plain`."""
    outcomes = train_reference(job, num_ranks)
    k = job.micro_batches
    return [sum(sum(o.losses[step * k : (step + 1) * k]) for o in outcomes) for step in range(job.steps)]


@on_ranks(1)
def test_one_rank_is_a_plain_loop_bit_for_bit(rank: int) -> None:
    for optimizer, defaults in ((torch.optim.AdamW, ADAMW), (torch.optim.SGD, SGD)):
        for k in (1, 3):
            job = Job(optimizer=optimizer, defaults=defaults, steps=5, micro_batches=k)
            losses, weights = plain(job, 1)
            assert same_bits(train_reference(job, 1)[0].weights, weights)
            assert per_step(job, 1) == losses


@pytest.mark.by_cpu
@on_ranks(1)
def test_several_ranks_are_the_whole_batch_to_rounding_and_exactly_where_sums_are_exact(rank: int) -> None:
    for num_ranks, k in ((2, 1), (3, 1), (3, 3), (4, 2)):
        job = Job(optimizer=torch.optim.SGD, defaults=SGD, steps=5, micro_batches=k)
        _, weights = plain(job, num_ranks)
        expect_close(train_reference(job, num_ranks)[0].weights, weights)
        for every in (False, True):
            exact = Job(model=Counting, loss_of=loss_of_integers, defaults=ADAMW, steps=5, micro_batches=k,
                        reduce_every_micro_batch=every)  # fmt: skip
            _, weights = plain(exact, num_ranks)
            found = train_reference(exact, num_ranks)[0].weights
            if num_ranks in (2, 4):  # dividing by 3 and multiplying by 1/3 round differently
                assert same_bits(found, weights)
            expect_close(found, weights)


@pytest.mark.by_cpu
@on_ranks(1)
def test_one_rank_less_is_seen(rank: int) -> None:
    """The negative control of the two above."""
    job = Job(optimizer=torch.optim.SGD, defaults=SGD, steps=5)
    _, weights = plain(job, 3)
    assert largest_difference(train_reference(job, 2)[0].weights, weights) > 1e-3


@pytest.mark.by_cpu
@on_ranks(1)
def test_clipping_is_torchs(rank: int) -> None:
    for max_norm in (1e-2, 1e9):
        job = Job(optimizer=torch.optim.SGD, defaults=SGD, steps=4, max_norm=max_norm)
        _, weights = plain(job, 3)
        expect_close(train_reference(job, 3)[0].weights, weights)  # norms are summed in another order
    loose = train_reference(Job(optimizer=torch.optim.SGD, defaults=SGD, steps=4), 3)[0]
    tight = train_reference(Job(optimizer=torch.optim.SGD, defaults=SGD, steps=4, max_norm=1e-2), 3)[0]
    assert largest_difference(loose.weights, tight.weights) > 1e-3
    assert loose.norms[0] == pytest.approx(tight.norms[0]) and loose.norms[0] > 0.1


@on_ranks(1)
def test_a_16_bit_model_steps_its_fp32_master(rank: int) -> None:
    """By hand, for one parameter: cast gradients to fp32, add, divide, step the master, round it to nearest-even."""
    for precision, rounded in (
        ("bf16", lambda master: master.bfloat16()),
        ("bf16-remainder", nearest_bf16_ties_away),
        ("fp16", lambda master: master.half()),
    ):
        dtype = rounded(torch.zeros(1)).dtype
        torch.manual_seed(0)
        model = nn.Linear(6, 4, bias=False)
        master = nn.Parameter(model.weight.detach().clone())
        reference = Reference(model, torch.optim.AdamW, num_ranks=2, precision=precision, **ADAMW)
        plain = torch.optim.AdamW([master], **ADAMW)
        inputs = torch.randn(2, 3, 6)
        for _ in range(8):
            weight = rounded(master.detach()).requires_grad_()
            assert torch.equal(model.weight, weight) and model.weight.dtype == dtype
            grads = []
            for x in inputs:
                (loss,) = torch.autograd.grad(nn.functional.linear(x.to(dtype), weight).float().square().sum(), weight)
                grads.append(loss.float())
            master.grad = (grads[0] + grads[1]) / 2
            plain.step()
            reference.step(lambda model, rank, _, inputs=inputs: model(inputs[rank]).float().square().sum())
        assert torch.equal(reference.main[model.weight], master)


def nearest_by_fractions(value: float, ties_away: bool) -> float:
    """The nearest number with 8 significant bits (bf16), by exact arithmetic."""
    exact = Fraction(value)
    if not exact:
        return 0.0
    exponent = math.frexp(abs(value))[1]
    unit = Fraction(2) ** (exponent - 8)
    low = abs(exact) // unit
    rest = abs(exact) / unit - low
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and (ties_away or low % 2 == 1))
    return math.copysign(float((low + up) * unit), value)


def test_rounding_is_to_nearest_and_differs_from_torchs_in_ties_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(300, generator=generator)
    ties = (torch.randn(300, generator=generator).view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    for values in (numbers, ties, torch.tensor([0.0, 1.0, -1.0, 255.5, -255.5])):
        away = nearest_bf16_ties_away(values).double().tolist()
        assert away == [nearest_by_fractions(v, ties_away=True) for v in values.tolist()]
        even = values.bfloat16().double().tolist()
        assert even == [nearest_by_fractions(v, ties_away=False) for v in values.tolist()]
    assert torch.equal(nearest_bf16_ties_away(numbers), numbers.bfloat16())
    assert not torch.equal(nearest_bf16_ties_away(ties), ties.bfloat16())


@on_ranks(1)
def test_a_parameter_without_gradient_on_any_rank_is_left_alone(rank: int) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "sometimes": nn.Linear(3, 3), "never": nn.Linear(3, 3)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = Reference(model, torch.optim.AdamW, num_ranks=2, **ADAMW)

    def loss_of(model: nn.Module, rank: int, micro_batch: int) -> torch.Tensor:
        x = model["used"](torch.ones(3))
        return (model["sometimes"](x) if rank == 1 else x).sum()

    reference.step(loss_of)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"used.weight", "used.bias", "sometimes.weight", "sometimes.bias"}


@on_ranks(1)
def test_param_groups_are_honoured(rank: int) -> None:
    model, other = make(Net), make(Net)
    split = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]]
    groups = [{"params": split[0], "weight_decay": 0.5}, {"params": split[1], "weight_decay": 0.0}]
    reference = Reference(model, torch.optim.AdamW, num_ranks=1, params=groups, **ADAMW)
    matching = [[p for p in other.parameters() if p.dim() > 1], [p for p in other.parameters() if p.dim() < 2]]
    optimizer = torch.optim.AdamW(
        [{"params": matching[0], "weight_decay": 0.5}, {"params": matching[1], "weight_decay": 0.0}], **ADAMW
    )
    job = Job()
    for step in range(3):
        reference.step(lambda model, rank, micro_batch, step=step: job.loss(model, rank, micro_batch, step))
        optimizer.zero_grad()
        job.loss(other, 0, 0, step).backward()
        optimizer.step()
    assert same_bits(model.state_dict(), other.state_dict())


def test_a_wire_narrower_than_the_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="narrower than the gradient"):
        Reference(nn.Linear(2, 2), torch.optim.SGD, num_ranks=2, precision=MixedPrecision(reduce=torch.bfloat16))
