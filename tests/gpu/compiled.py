"""The piece `compiled` of `make test-gpu`: torch.compile and CUDA graphs, with and without zeroshard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.gpu.beside_plain import (
    FEW_PLANS,
    KERNELS,
    ON_CUDA,
    SMALL_PLANS,
    SWITCHES,
    WIDTH,
    Case,
    Training,
    batch,
    compare,
    difference,
    expect_words,
    guarded,
    mean_square,
    told,
)
from tests.gpu.checks import Checks, Setting
from tests.gpu.worlds import Sleeps, one_rank
from tests.kit import DEVICE, State
from zeroshard.placement import Plan


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Parts(nn.Module):
    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs


def _rows(model: Any, number: int) -> Tensor:
    return mean_square(model(batch(number, 8, WIDTH)))


def _lengths(model: Any, number: int) -> Tensor:
    return mean_square(model(batch(number, 4, 5 + 2 * number, WIDTH)))


CASE = Case(Parts, _rows, units=Part, optimizer=torch.optim.SGD, defaults={"lr": 0.3}, steps=6)
"""SGD: Adam makes of a difference in a last bit a whole step."""

_RECOMPILED = 3
"""The step from which on nothing is compiled."""


class _Compiled(Training):
    """A model, or each of its blocks, is compiled.

    Attributes:
        graphs: how many graphs were compiled, after each step.
    """

    def __init__(self, case: Case, plan: Plan | None, whole: bool, options: dict[str, Any]) -> None:
        torch._dynamo.reset()
        _counters().clear()
        super().__init__(case, plan)
        if whole:
            self.called = torch.compile(self.model, **options)
        else:
            for block in self.model.blocks:  # type: ignore[union-attr]
                block.compile(**options)
        self.graphs: list[int] = []
        self._others: list[Tensor] = []

    def step(self, number: int) -> None:
        super().step(number)
        self.graphs.append(_counters()["stats"]["unique_graphs"])
        if ON_CUDA:
            # What the step has freed holds NaN, and the next forward takes its buffers elsewhere.
            self._others = [torch.full((size,), torch.nan, device=DEVICE) for size in (1 << 10, 1 << 13, 1 << 15) * 3]

    def words(self) -> str:
        counters = _counters()
        words = f"{self.graphs[-1]} graphs, {sum(counters['graph_break'].values())} breaks"
        if ON_CUDA:
            words += f", {_recorded()} CUDA graphs, {counters['inductor']['cudagraph_skips']} skipped"
        return words


def _counters() -> Any:
    from torch._dynamo.utils import counters  # slow to import

    return counters


def _recorded() -> str:
    """How many CUDA graphs torch has recorded for compiled code."""
    try:
        from torch._inductor import cudagraph_trees

        manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        return "0" if manager is None else str(next(manager.graph_counter))
    except Exception as error:
        return f"? ({type(error).__name__})"


class _Accumulating(_Compiled):
    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for micro in range(2):
            loss = self.backward(2 * number + micro)
            self.losses.append(loss.item())
        self.optimizer.step()


_BACKEND: dict[str, Any] = {} if ON_CUDA else {"backend": "aot_eager"}
WAYS: dict[str, tuple[bool, dict[str, Any], Case]] = {
    "the whole model": (True, _BACKEND, CASE),
    "blocks": (False, _BACKEND, CASE),
    "blocks, fullgraph": (False, {"fullgraph": True, **_BACKEND}, CASE),
    "dynamic": (
        True,
        {"dynamic": True, **_BACKEND},
        Case(Parts, _lengths, Part, torch.optim.SGD, {"lr": 0.3}, steps=6),
    ),
}
WITH_GRAPHS: dict[str, tuple[bool, dict[str, Any], Case]] = {
    "the whole model, reduce-overhead": (True, {"mode": "reduce-overhead"}, CASE),
    "blocks, reduce-overhead": (False, {"mode": "reduce-overhead"}, CASE),
}


def compiled(checks: Checks, setting: Setting) -> None:
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    ways = (
        {**WAYS, **WITH_GRAPHS} if ON_CUDA else {what: WAYS[what] for what in ("the whole model", "blocks, fullgraph")}
    )
    with one_rank(setting.device):
        expected = {}
        for what, (whole, options, case) in ways.items():
            with guarded(checks, f"{what}, plain torch"):
                training = _Compiled(case, None, whole, options)
                expected[what] = training.trained()
                checks.note(f"{what}, plain torch", training.words())
        full, short = (Training(replace(CASE, steps=steps), None).trained() for steps in (CASE.steps, CASE.steps - 1))
        control = difference({**short, "losses": full["losses"]}, full)
        checks.expect("one step less, other values (control)", control > 5 * KERNELS, control)
        for exchanges, switch in SWITCHES.items():
            plans: tuple[Plan, ...] = SMALL_PLANS if exchanges != "alone" else SMALL_PLANS[-1:]
            with switch():
                for what in expected:
                    is_long = what in WITH_GRAPHS and exchanges != "alone"
                    _compare(checks, what, exchanges, FEW_PLANS if is_long else plans, expected[what])
                for group in (_accumulation, _autotuned, _graphs) if ON_CUDA else ():
                    with guarded(checks, f"{group.__name__[1:]}, {exchanges}"):
                        group(checks, exchanges, setting)


def _compare(checks: Checks, what: str, exchanges: str, plans: tuple[Plan, ...], expected: State) -> None:
    whole, options, case = {**WAYS, **WITH_GRAPHS}[what]
    told: dict[str, str] = {}
    late: dict[str, list[int]] = {}

    def run(plan: Plan | None) -> State:
        training = _Compiled(case, plan, whole, options)
        found = training.trained()
        told[str(plan)] = training.words()
        if training.graphs[_RECOMPILED:] != training.graphs[-1:] * (case.steps - _RECOMPILED):
            late[str(plan)] = training.graphs
        return found

    what = f"{what}, {exchanges}"
    compare(checks, what, run, plans=plans, tolerance=KERNELS, expected=expected)
    checks.expect(f"{what}: nothing is compiled from step {_RECOMPILED} on", not late, late or "")
    checks.note(f"{what}: graphs", "; ".join(f"{plan} {words}" for plan, words in told.items()))


def _accumulation(checks: Checks, exchanges: str, setting: Setting) -> None:
    """Two micro-batches: gradients of the first lie in the memory of a CUDA graph when the second runs."""
    what, options = f"reduce-overhead, two micro-batches, {exchanges}", {"mode": "reduce-overhead"}
    case = replace(CASE, steps=4)
    by_kernels = _Accumulating(case, None, False, {}).trained()
    try:
        off = difference(_Accumulating(case, None, False, options).trained(), by_kernels)
        checks.note(f"{what}: plain torch", f"within {off:.1e}")
    except Exception as error:
        checks.note(f"{what}: plain torch", told(error))
    for plan in SMALL_PLANS:
        try:
            off = difference(_Accumulating(case, plan, False, options).trained(), by_kernels)
            checks.expect(f"{what}, {plan}: right, or an error", off <= KERNELS, f"within {off:.1e}")
        except RuntimeError as error:
            checks.expect(f"{what}, {plan}: right, or an error", "CUDAGraphs" in str(error), told(error))


def _autotuned(checks: Checks, exchanges: str, setting: Setting) -> None:
    if exchanges == "alone":
        return
    case, options = replace(CASE, steps=3), {"mode": "max-autotune-no-cudagraphs"}
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN"):  # trying all others takes a minute
        run: Callable[[Plan | None], State] = lambda plan: _Compiled(case, plan, False, options).trained()  # noqa: E731
        compare(checks, f"blocks, max-autotune, {exchanges}", run, plans=SMALL_PLANS[-1:], tolerance=KERNELS)


# CUDA graphs of the user ----------------------------------------------------------------------------------------------


def _graphs(checks: Checks, exchanges: str, setting: Setting) -> None:
    _graphed_callables(checks, exchanges)
    _graphed_parts(checks, exchanges)
    for plan in FEW_PLANS:
        with guarded(checks, f"{plan}, {exchanges}: a step captured"):
            _captured_step(checks, plan, exchanges)
        sleeps = nullcontext() if exchanges == "alone" else Sleeps(setting.device, 0, only_collectives=True).installed()
        what = f"{plan}, {exchanges}: an evaluation captured"
        with guarded(checks, what), sleeps:
            _captured_evaluation(checks, plan, what)


def _graphed_callables(checks: Checks, exchanges: str) -> None:
    rows = torch.randn(8, WIDTH, device=DEVICE, requires_grad=True)
    model = Parts().to(DEVICE)
    block: Any = model.blocks[0]
    torch.cuda.make_graphed_callables(block, (rows,))
    what = f"a graphed block, {exchanges}: shard"
    expect_words(checks, what, lambda: zeroshard.shard(model, zeroshard.ZERO3, units=Part), "is a CUDA graph")
    for plan in FEW_PLANS:
        training = Training(CASE, plan)
        graph: Any = partial(torch.cuda.make_graphed_callables, training.model, (rows,))
        what = f"{plan}, {exchanges}: make_graphed_callables after shard"
        expect_words(checks, what, graph, "hooks", "a CUDA graph would record")
        with guarded(checks, what):
            _is_as_before(checks, what, training)


def _graphed_parts(checks: Checks, exchanges: str) -> None:
    """A module inside of a unit. Those with weights have hooks, and torch makes no graphs of modules with hooks."""
    for plan in FEW_PLANS:
        training = Training(CASE, plan)
        part: Any = training.model.blocks[0].up  # type: ignore[union-attr,index]
        rows = torch.randn(8, WIDTH, device=DEVICE, requires_grad=True)
        what = f"{plan}, {exchanges}: make_graphed_callables of a part of a unit"
        graph: Any = partial(torch.cuda.make_graphed_callables, part, (rows,))
        expect_words(checks, what, graph, "must not have hooks")
        with guarded(checks, what):
            _is_as_before(checks, what, training)


def _is_as_before(checks: Checks, what: str, training: Training) -> None:
    off = difference(training.trained(), Training(CASE, None).trained())
    checks.expect(f"{what}: then it trains as plain torch", off <= KERNELS, f"within {off:.1e}")


def _captured_step(checks: Checks, plan: Plan, exchanges: str) -> None:
    training = Training(CASE, plan)
    rows, graph = torch.randn(8, WIDTH, device=DEVICE), torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            training.optimizer.zero_grad()
            mean_square(training.model(rows)).backward()
            training.optimizer.step()

    what = f"{plan}, {exchanges}: torch.cuda.graph of a step"
    expect_words(checks, what, capture, "a CUDA graph would record")
    _is_as_before(checks, what, training)


def _captured_evaluation(checks: Checks, plan: Plan, what: str) -> None:
    """A forward without gradients, of weights that stay where they are. It is replayed after a step, whose gathers may
    be under way."""
    training, plain = Training(CASE, plan), Training(CASE, None)
    rows, graph = torch.randn(8, WIDTH, device=DEVICE), torch.cuda.CUDAGraph()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            training.model(rows)
        torch.cuda.current_stream().wait_stream(side)

        def capture() -> Tensor:
            with torch.cuda.graph(graph):
                outputs: Tensor = training.model(rows)
            return outputs

        if plan is zeroshard.ZERO3 and "with exchanges" in what:
            expect_words(checks, what, capture, "a CUDA graph would record")
            return
        outputs = capture()
    for number in range(3):
        graph.replay()
        found = outputs.clone()
        with torch.no_grad():
            off = float((found - plain.model(rows)).abs().max())
        checks.expect(f"{what}, replayed after {number} steps", off <= KERNELS, f"within {off:.1e}")
        for each in (training, plain):
            each.step(number)
