"""LAMB and LARS compared to the papers' formulas in numpy (fp64), and to the torch optimizers that they are based
on."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zeroshard.optim import Lamb, Lars
from zeroshard.optim.layerwise import norm, trust_ratio

BOTH = pytest.mark.parametrize("cls", [Lamb, Lars])
SHAPES = [(7, 5), (11,), (2, 3, 4), ()]


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def set_grads(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (factor * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, **kwargs: Any) -> list[Tensor]:
    for step in range(steps):
        set_grads(params, step, **kwargs)
        optimizer.step()
    return [p.detach().clone() for p in params]


# The papers' formulas ------------------------------------------------------------------------------------------------


def lamb_paper(x: np.ndarray, grads: list[np.ndarray], lr: float, b1: float, b2: float, eps: float, decay: float):
    """Algorithm 2 of the LAMB paper, with the moments written as sums."""
    for t in range(1, len(grads) + 1):
        m = sum((1 - b1) * b1 ** (t - i) * grads[i - 1] for i in range(1, t + 1)) / (1 - b1**t)
        v = sum((1 - b2) * b2 ** (t - i) * grads[i - 1] ** 2 for i in range(1, t + 1)) / (1 - b2**t)
        r = m / (np.sqrt(v) + eps) + decay * x
        x = x - lr * np.sqrt((x**2).sum()) / np.sqrt((r**2).sum()) * r
    return x


def lars_paper(x: np.ndarray, grads: list[np.ndarray], lrs: list[float], eta: float, momentum: float, decay: float):
    """Algorithm 1 of the LARS paper: the learning rate is part of the momentum."""
    v = np.zeros_like(x)
    for g, lr in zip(grads, lrs, strict=True):
        local = eta * np.sqrt((x**2).sum()) / (np.sqrt((g**2).sum()) + decay * np.sqrt((x**2).sum()))
        v = momentum * v + lr * local * (g + decay * x)
        x = x - v
    return x


def recorded(params: list[nn.Parameter], steps: int) -> list[list[np.ndarray]]:
    """Gradients by parameter, then by step."""
    result: list[list[np.ndarray]] = [[] for _ in params]
    for step in range(steps):
        set_grads(params, step)
        for grads, p in zip(result, params, strict=True):
            assert p.grad is not None
            grads.append(p.grad.double().numpy().copy())
    return result


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # 12 steps of rounding


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_the_papers(dtype: torch.dtype, decay: float) -> None:
    params = parameters(dtype)
    start, grads = [p.detach().double().numpy().copy() for p in params], recorded(params, 12)
    ends = run(Lamb(params, 0.02, (0.8, 0.95), 1e-6, decay), params, 12)
    for x, g, end in zip(start, grads, ends, strict=True):
        expected = lamb_paper(x, g, 0.02, 0.8, 0.95, 1e-6, decay)
        np.testing.assert_allclose(end.double().numpy(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_the_papers_at_a_constant_learning_rate(dtype: torch.dtype, decay: float) -> None:
    params = parameters(dtype)
    start, grads = [p.detach().double().numpy().copy() for p in params], recorded(params, 12)
    ends = run(Lars(params, 2.0, 0.9, decay, trust_coefficient=0.02, eps=0.0), params, 12)
    for x, g, end in zip(start, grads, ends, strict=True):
        expected = lars_paper(x, g, [2.0] * 12, 0.02, 0.9, decay)
        np.testing.assert_allclose(end.double().numpy(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_lars_under_a_schedule_is_sgds_and_not_the_papers() -> None:
    """The documented difference, and a negative control: the comparison above detects where the learning rate is
    applied."""
    params = parameters(torch.float64)
    start, grads = [p.detach().numpy().copy() for p in params], recorded(params, 4)
    lrs = [2.0, 1.0, 0.5, 0.25]
    optimizer = Lars(params, trust_coefficient=0.02, eps=0.0)
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        set_grads(params, step)
        optimizer.step()
    expected = lars_paper(start[0], grads[0], lrs, 0.02, 0.9, 0.0)
    assert not np.allclose(params[0].detach().numpy(), expected, rtol=1e-3)


# What they contain ---------------------------------------------------------------------------------------------------


def test_lamb_without_the_ratio_is_adamw() -> None:
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    a = run(Lamb(mine, adapt=False, **options), mine, 10)
    b = run(torch.optim.AdamW(theirs, **options), theirs, 10)
    # AdamW decays first and steps from there: its update is (1 - lr λ) x - lr u, the same up to rounding.
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    adapted = parameters(torch.float64)
    c = run(Lamb(adapted, **options), adapted, 10)
    assert not torch.allclose(c[0], b[0], rtol=1e-3), "negative control: the ratio makes a difference"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_without_the_ratio_is_sgd(momentum: float) -> None:
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    options: dict[str, Any] = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1}
    a = run(Lars(mine, adapt=False, **options), mine, 10)
    b = run(torch.optim.SGD(theirs, **options), theirs, 10)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_lambs_state_is_adamws_and_goes_on_in_it() -> None:
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    lamb, adamw = Lamb(mine, 0.01, eps=1e-8, adapt=False), torch.optim.AdamW(theirs, 0.01, weight_decay=0.0)
    run(lamb, mine, 3)
    run(adamw, theirs, 3)
    assert {k: v.shape for k, v in lamb.state[mine[0]].items()} == {
        k: v.shape for k, v in adamw.state[theirs[0]].items()
    }
    assert {k: v.dtype for k, v in lamb.state[mine[0]].items()} == {
        k: v.dtype for k, v in adamw.state[theirs[0]].items()
    }
    swapped = {**adamw.state_dict(), "state": copy.deepcopy(lamb.state_dict()["state"])}
    with torch.no_grad():
        for p, q in zip(theirs, mine, strict=True):
            p.copy_(q)
    adamw.load_state_dict(swapped)
    for x, y in zip(run(lamb, mine, 3), run(adamw, theirs, 3), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_lars_state_is_sgds() -> None:
    params = parameters(torch.float32)
    optimizer = Lars(params)
    run(optimizer, params, 1)
    assert {p: set(optimizer.state[p]) for p in params} == {p: {"momentum_buffer"} for p in params}
    without = Lars(parameters(torch.float32), momentum=0.0)
    run(without, without.param_groups[0]["params"], 1)
    assert not any(without.state.values())


# What the ratio means ------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1.0), st.integers(0, 100))
def test_a_step_of_lamb_is_lr_times_as_long_as_the_parameter(lr: float, seed: int) -> None:
    before, params = parameters(torch.float64, seed), parameters(torch.float64, seed)
    after = run(Lamb(params, lr, weight_decay=0.1), params, 1)
    for x, y in zip(before, after, strict=True):
        assert (y - x).norm().item() == pytest.approx(lr * x.norm().item(), rel=1e-9)


@BOTH
def test_the_scale_of_the_gradient_does_not_matter_but_for_eps(cls: Any) -> None:
    """Scaling by 2^10 is exact in fp32, so only eps makes a difference. Without the ratio, LARS follows the scale."""
    small, large, plain = (parameters(torch.float32) for _ in range(3))
    a = run(cls(small, 0.5, eps=1e-15), small, 5)
    b = run(cls(large, 0.5, eps=1e-15), large, 5, factor=2.0**10)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    c = run(Lars(plain, 0.5, adapt=False), plain, 5, factor=2.0**10)
    assert not torch.allclose(a[0], c[0], rtol=0.1)


@BOTH
def test_the_ratio_belongs_to_the_whole_parameter(cls: Any) -> None:
    """Stepping the two halves of a matrix gives another result: these optimizers cannot run on slices."""
    whole = parameters(torch.float64)[0]
    before = whole.detach().clone()
    halves = [nn.Parameter(part.detach().clone()) for part in whole.chunk(2)]
    whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for half, grad in zip(halves, whole.grad.chunk(2), strict=True):
        half.grad = grad.clone()
    for params in ([whole], halves):
        cls(params, 0.1).step()
    together, apart = whole.detach() - before, torch.cat([half.detach() for half in halves]) - before
    assert not torch.allclose(together, apart, rtol=1e-2)
    assert torch.equal(together.sign(), apart.sign())


@BOTH
def test_weights_that_start_at_zero_move(cls: Any) -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
    cls([p], 0.1).step()
    assert torch.equal(p.detach().sign(), -p.grad.sign())


@BOTH
def test_zero_gradients_leave_weights_where_they_are(cls: Any) -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.zeros(4)
    cls([p], 0.1).step()
    assert torch.equal(p.detach(), torch.ones(4))


@pytest.mark.parametrize("value", [1e-30, 1e-42])
def test_lars_does_not_overflow_on_a_vanishing_gradient(value: float) -> None:
    for eps, survives in ((1e-8, True), (0.0, value > 1e-40)):  # eps=0 is the negative control
        p = nn.Parameter(torch.ones(1))
        p.grad = torch.full((1,), value)
        Lars([p], eps=eps, trust_coefficient=1.0).step()
        assert bool(p.isfinite().all()) == survives


# The norm ------------------------------------------------------------------------------------------------------------


@given(st.sampled_from([0, 1, 1023, 1024, 1025, 2048, 5000, 1 << 17, (1 << 20) + 1]), st.integers(0, 3))
def test_the_norm_is_that_of_fp64(numel: int, seed: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    assert norm(x).item() == pytest.approx(x.double().norm().item(), rel=1e-6)
    assert norm(x.double()).item() == pytest.approx(x.double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["normal", "constant", "spikes"])
def test_the_norm_does_not_drift_with_the_size(kind: str) -> None:
    """The error of a running sum in fp32 grows with the size (last line), which is why `norm` adds up rows."""
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    if kind != "normal":
        x = torch.full_like(x, 0.1 if kind == "constant" else 1e-3)
    if kind == "spikes":
        x.view(-1)[::7] = -0.3
    exact = x.double().norm().item()
    assert abs(norm(x).item() / exact - 1) < 1e-6
    assert abs(norm(x.t()).item() / exact - 1) < 1e-6  # not contiguous
    assert abs(np.sqrt(np.cumsum(x.view(-1).numpy() ** 2)[-1]) / exact - 1) > 1e-5


def test_trust_ratio() -> None:
    zero, two, four = torch.tensor(0.0), torch.tensor(2.0), torch.tensor(4.0)
    assert [trust_ratio(a, b).item() for a, b in ((two, four), (zero, four), (two, zero), (zero, zero))] == [
        0.5,
        1,
        1,
        1,
    ]


# As torch's optimizers behave ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3), torch.tensor([0.3])])
def test_they_learn(cls: Any, lr: float | Tensor) -> None:
    """Least squares with a deep linear model; a learning rate may be a number or a tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    inputs, true = torch.randn(64, 8), torch.randn(8, 4)
    lr = lr.clone() if isinstance(lr, Tensor) else lr  # the schedule changes it in place
    optimizer = cls(model.parameters(), lr, **({"trust_coefficient": 0.02} if cls is Lars else {}))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=200)
    losses = []
    for _ in range(200):
        loss = (model(inputs) - inputs @ true).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 100


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_saved_state_goes_on_bit_for_bit(cls: Any, dtype: torch.dtype) -> None:
    running = parameters(dtype)
    first = cls(running, 0.1, weight_decay=0.1)
    run(first, running, 3)
    resumed = [nn.Parameter(p.detach().clone()) for p in running]
    second = cls(resumed, 0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # otherwise torch would share the tensors
    for x, y in zip(run(first, running, 3), run(second, resumed, 3), strict=True):
        assert torch.equal(x, y)


@BOTH
def test_sixteen_bit_parameters_are_stepped_in_fp32_and_rounded_once(cls: Any) -> None:
    narrow = parameters(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    set_grads(narrow, 0)
    for p, q in zip(narrow, wide, strict=True):
        assert p.grad is not None
        q.grad = p.grad.float()
    for params in (narrow, wide):
        cls(params, 0.3, weight_decay=0.1).step()
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(p.detach(), q.detach().bfloat16())


@BOTH
def test_the_gradient_is_left_alone_and_its_layout_does_not_matter(cls: Any) -> None:
    straight, turned = (parameters(torch.float32)[0] for _ in range(2))
    turned.data = turned.detach().t().contiguous().t()
    grad = torch.randn(7, 5)
    straight.grad, turned.grad = grad.clone(), grad.t().contiguous().t()
    for p in (straight, turned):
        cls([p], 0.1, weight_decay=0.1).step()
        assert p.grad is not None and torch.equal(p.grad, grad)
    torch.testing.assert_close(straight, turned)  # not bit-equal: the norm adds up in another order


@BOTH
def test_maximize_is_the_same_as_the_gradient_negated(cls: Any) -> None:
    down, up = parameters(torch.float32), parameters(torch.float32)
    a = run(cls(down, 0.1, weight_decay=0.1), down, 3)
    b = run(cls(up, 0.1, weight_decay=0.1, maximize=True), up, 3, factor=-1.0)
    assert all(map(torch.equal, a, b))


@BOTH
def test_closure_groups_and_missing_gradients(cls: Any) -> None:
    a, b, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = cls([{"params": [a]}, {"params": [b], "lr": 0.0}], 0.1)
    optimizer.add_param_group({"params": [frozen]})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (a + b).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.0
    assert not torch.equal(a, torch.ones(3))
    assert torch.equal(b, torch.ones(3)) and b in optimizer.state
    assert torch.equal(frozen, torch.ones(3)) and frozen not in optimizer.state


@BOTH
def test_an_empty_parameter_is_no_trouble(cls: Any) -> None:
    """The parameters after it are stepped as without it."""
    p = nn.Parameter(torch.empty(0, 4))
    p.grad = torch.empty(0, 4)
    mine, alone = parameters(torch.float32), parameters(torch.float32)
    for x, y in zip(run(cls([p, *mine]), mine, 2), run(cls(alone), alone, 2), strict=True):
        assert torch.equal(x, y)
    assert p.shape == (0, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Lamb(p, lr=-1.0), "lr must be at least 0 and finite, found -1.0"),
        (lambda p: Lamb(p, lr=math.nan), "lr must be at least 0 and finite, found nan"),
        (lambda p: Lars(p, lr=math.inf), "lr must be at least 0 and finite, found inf"),
        (lambda p: Lars(p, lr=torch.ones(2)), "lr must be one number, found a tensor of shape .2,."),
        (lambda p: Lamb(p, betas=(1.0, 0.9)), r"betas\[0\] must be at least 0 and below 1, found 1.0"),
        (lambda p: Lamb(p, betas=(0.9, -0.1)), r"betas\[1\] must be at least 0 and below 1, found -0.1"),
        (lambda p: Lamb(p, eps=-1e-8), "eps must be at least 0"),
        (lambda p: Lamb(p, weight_decay=-0.1), "weight_decay must be at least 0"),
        (lambda p: Lars(p, weight_decay=math.nan), "weight_decay must be at least 0 and finite, found nan"),
        (lambda p: Lars(p, momentum=1.0), "momentum must be at least 0 and below 1, found 1.0"),
        (lambda p: Lars(p, trust_coefficient=-1.0), "trust_coefficient must be at least 0"),
        (lambda p: Lars(p, eps=-1.0), "eps must be at least 0"),
        (lambda p: Lars([{"params": p, "lr": -2.0}]), "lr must be at least 0 and finite, found -2.0"),
        (lambda p: Lamb([]), "empty parameter list"),
    ],
)
def test_bad_hyper_parameters_are_refused(make: Callable[[list[nn.Parameter]], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(parameters(torch.float32))


@BOTH
def test_what_has_no_norm_here_is_refused(cls: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="does not support sparse gradients"):
        cls(table.parameters()).step()
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="does not support complex parameters"):
        cls([p]).step()
