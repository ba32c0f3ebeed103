"""One model trained by plain torch, and by zeroshard under the plans, on one device: what `habits` and `compiled`
compare."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.gpu.checks import Checks
from tests.gpu.worlds import exchanging_alone
from tests.kit import DEVICE, State, make, same_bits
from zeroshard.placement import Plan

WIDTH = 32
SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "alone": nullcontext,
    "with exchanges": exchanging_alone,
}
"""One rank as it is, and as if it had peers."""
FEW_PLANS = (zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO3)
SMALL_PLANS = (zeroshard.ZERO1, zeroshard.ZERO3)
KERNELS = 1e-3
"""Tolerance where two programs run other kernels, or a kernel adds in any order. A wrong weight is wrong by 1e-2."""

ON_CUDA = DEVICE.type == "cuda"


@dataclass(frozen=True)
class Case:
    """What to train and how, without the plan.

    Attributes:
        model: builds it on the host; `make` moves it.
        loss: of the model and the number of the step.
        units: of `shard`.
        around: a scope around forward and loss.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    units: Any = nn.Linear
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    defaults: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps: int = 3
    precision: Any = None
    loss_scale: Any = None


class Training:
    """A case under a plan (None: plain torch), a step at a time."""

    def __init__(self, case: Case, plan: Plan | None) -> None:
        self.case, self.plan = case, plan
        self.model: nn.Module = make(case.model)
        self.called: Any = self.model
        self.handle: zeroshard.Handle | None = None
        self.optimizer: Any
        if plan is None:
            self.optimizer = case.optimizer(self.model.parameters(), **case.defaults)
        else:
            self.handle = zeroshard.shard(self.model, plan, units=case.units, precision=case.precision)
            scale = {} if case.loss_scale is None else {"loss_scale": case.loss_scale}
            self.optimizer = zeroshard.ShardedOptimizer(self.handle, case.optimizer, **scale, **case.defaults)
        self.losses: list[float] = []
        torch.manual_seed(7)  # the masks of dropout, from here on

    def backward(self, number: int) -> Tensor:
        with self.case.around():
            loss = self.case.loss(self.called, number)
        loss.backward()
        return loss

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = self.backward(number)
        self.optimizer.step()
        self.losses.append(loss.item())

    def weights(self) -> State:
        state = self.model.state_dict() if self.handle is None else self.handle.full_state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def trained(self) -> State:
        """Train; the losses and the weights."""
        for number in range(self.case.steps):
            self.step(number)
        return self.outcome()

    def outcome(self) -> State:
        with torch.device("cpu"):
            return {"losses": torch.tensor(self.losses, dtype=torch.float64), **self.weights()}


Run = Callable[[Plan | None], State]


def of(case: Case) -> Run:
    return lambda plan: Training(case, plan).trained()


def batch(number: int, *shape: int) -> Tensor:
    """Inputs of that step, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)


def mean_square(outputs: Tensor) -> Tensor:
    return (outputs.float() - 0.5).square().mean()


def loss_of_rows(model: nn.Module, number: int) -> Tensor:
    return mean_square(model(batch(number, 8, WIDTH)))


def dense(dropout: float = 0.0) -> nn.Module:
    """Blocks that are no `nn.Linear` alone, and a head."""
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout))
        for _ in range(3)
    ]
    return nn.Sequential(*(layer for block in blocks for layer in (*block, nn.Linear(2 * WIDTH, WIDTH))))


# Comparing ------------------------------------------------------------------------------------------------------------


def difference(found: State, expected: State) -> float:
    """0 if all bits are equal; else the largest difference, relative to the largest value of its tensor."""
    if same_bits(found, expected):
        return 0.0
    if found.keys() != expected.keys():
        raise ValueError(f"other names: {sorted(found.keys() ^ expected.keys())}")
    worst = 1e-45  # of tensors that differ in a sign of zero, or in the bits of NaN
    for name, truth in expected.items():
        off = (found[name].double() - truth.double()).abs().max() if truth.numel() else torch.zeros(())
        largest = truth.double().abs().max().clamp(min=1e-2) if truth.numel() else torch.ones(())
        ratio = float(off / largest)
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def compare(
    checks: Checks,
    what: str,
    run: Run,
    *,
    plans: Sequence[Plan] = FEW_PLANS,
    tolerance: float = 0.0,
    expected: State | None = None,
) -> None:
    """A check: under each of the plans, the outcome is that of plain torch (or `expected`). Where plain torch raises
    (a kernel that this GPU lacks), there is only a note."""
    with guarded(checks, what):
        try:
            truth = run(None) if expected is None else expected
        except Exception as error:
            checks.note(f"{what}: plain torch raises", told(error))
            return
        off: dict[str, float] = {}
        errors: list[str] = []
        for plan in plans:
            try:
                off[str(plan)] = difference(run(plan), truth)
            except Exception as error:
                errors.append(f"{plan}: {told(error)}")
        finite = all(bool(value.isfinite().all()) for value in truth.values() if value.is_floating_point())
        is_right = finite and not errors and all(value <= tolerance for value in off.values())
        words = [f"{plan} {'the same bits' if not value else f'within {value:.1e}'}" for plan, value in off.items()]
        same = "the same bits" if not tolerance else f"within {tolerance:.0e}"
        checks.expect(f"{what}: {same}", is_right, "; ".join([*errors, *words]) + ("" if finite else "; not finite"))


@contextmanager
def guarded(checks: Checks, what: str) -> Iterator[None]:
    """An exception inside is one failed check, and the piece goes on."""
    try:
        yield
    except Exception as error:
        checks.expect(what, False, told(error))


def told(error: BaseException) -> str:
    """Class, message and the innermost line of zeroshard, else of the tests. The traceback is printed."""
    traceback.print_exception(error)
    of_engine = of_tests = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "zeroshard/" in frame.filename and "/tests/" not in frame.filename:
            of_engine = f"{frame.filename.rpartition('/zeroshard/')[2]}:{frame.lineno} in {frame.name}"
        elif "/tests/" in frame.filename:
            of_tests = f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({of_engine or of_tests})"


def expect_words(checks: Checks, what: str, action: Callable[[], object], *words: str) -> None:
    """A check: it raises, and the message (or one that it came from) has one of these words."""
    try:
        action()
    except Exception as error:
        said, each = [], error
        while each is not None:
            said.append(f"{type(each).__name__}: {each}")
            each = each.__cause__ or each.__context__  # type: ignore[assignment]
        text = " <- ".join(said)
        checks.expect(what, any(word in text for word in words), told(error) if len(said) == 1 else text[:600])
        return
    checks.expect(what, False, "nothing was raised")
