"""Unusual modules and calls (containers, methods, hooks, compilation) compute the same bits as one process."""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import (
    PLANS,
    WIDTH,
    Block,
    Job,
    Net,
    Outcome,
    State,
    beside_one_process,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train_reference,
    with_plans,
)
from tests.model.test_graphs import cross_entropy, data
from tests.together import Together, in_turn, on_ranks
from zeroshard.model.trees import replace_tensors, tensors_in, tensors_kept_by
from zeroshard.placement import Plan
from zeroshard.reference import Reference
from zeroshard.runtime.needs import Needed
from zeroshard.testing import RankError, run_ranks

CAN_COMPILE = shutil.which("g++") is not None and Path(sysconfig.get_paths()["include"], "Python.h").exists()


@dataclass
class Named:
    hidden: Tensor
    extra: dict[str, Any]


@dataclass(frozen=True)
class Frozen:
    inner: Named
    note: str = "text"


class Tuple(NamedTuple):
    hidden: Tensor
    others: list[Any]


class Slots:
    __slots__ = ("hidden", "owner")

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.owner = hidden, self


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.parts = {"hidden": hidden}


class Attributes(dict[str, Any]):
    """As several packages have it: its items are its attributes."""

    __getattr__ = dict.__getitem__


class Several(list[Any]):
    pass


WRAP: dict[str, tuple[Any, Any]] = {
    "dataclass": (lambda x: Named(x, {"mean": x.mean()}), lambda y: y.hidden),
    "nested dataclass": (lambda x: {"a": [Frozen(Named(x, {}))]}, lambda y: y["a"][0].inner.hidden),
    "named tuple": (lambda x: Tuple(x, [None, 3]), lambda y: y.hidden),
    "slots": (Slots, lambda y: y.hidden),
    "plain object": (Plain, lambda y: y.parts["hidden"]),
    "dict of another class": (lambda x: Attributes(hidden=x), lambda y: y.hidden),
    "list of another class": (lambda x: Several([x]), lambda y: y[0]),
    "generator": (lambda x: (one for one in [x]), next),
    "zip": (lambda x: zip([x], ["text"], strict=True), lambda y: next(y)[0]),
    "set": (lambda x: {x, "text"}, lambda y: next(one for one in y if isinstance(one, Tensor))),
}


class Wrapping(Net):
    """Blocks take and return a container."""

    class Inner(Block):
        kind = ""

        def forward(self, container: Any) -> Any:
            wrap, unwrap = WRAP[self.kind]
            return wrap(super().forward(unwrap(container)))

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(self.Inner() for _ in range(4))
        for block in self.blocks:
            block.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        wrap, unwrap = WRAP[self.kind]
        container = wrap(self.embed(tokens))
        for block in self.blocks:
            container = block(container)
        return self.head(self.norm(unwrap(container)))


class WrappingCheckpointed(Wrapping):
    def forward(self, tokens: Tensor) -> Tensor:
        wrap, unwrap = WRAP[self.kind]
        container = wrap(self.embed(tokens))
        for block in self.blocks:
            container = checkpoint(block, container, use_reentrant=False)
        return self.head(self.norm(unwrap(container)))


class Featured(Net):
    """Model and blocks are called by methods, which use parameters of the module itself."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def features(self, x: Tensor) -> Tensor:
            return self(x) * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward_features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block.features(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.forward_features(tokens))


def by_method(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    tokens = data(rank, micro_batch, step)
    return cross_entropy(model.head(model.forward_features(tokens)), tokens) / micro_batches


class Hooked(Net):
    """User hooks of each kind that change inputs, outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda module, args, output: output + 0.25)
            block.up.register_full_backward_hook(lambda module, grads_in, grads_out: (grads_in[0] * 0.5,))
            block.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
            block.down.weight.register_hook(lambda grad: grad * 3)


class Partial(Net):
    """Layers that are functools.partial objects, and a module without parameters that returns several things."""

    def __init__(self) -> None:
        super().__init__()
        self.squash = partial(torch.clamp, min=-1.0, max=1.0)
        self.split = nn.Identity()
        self.call = [partial(block.forward) for block in self.blocks[:0]]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.squash(self.embed(tokens))
        for block in self.blocks:
            x = partial(block)(self.split((x, None))[0])
        return self.head(self.norm(x))


def vector_loss(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """Like `out.backward(g)` with a vector."""
    tokens = data(rank, micro_batch, step)
    return (model(tokens).float() * torch.linspace(-1, 1, 23)).sum() / micro_batches


JOBS: dict[str, Job] = {
    **{f"containers: {kind}": Job(model=partial(Wrapping, kind)) for kind in WRAP},
    "containers, dict of another class, bf16": Job(model=partial(Wrapping, "dict of another class"), precision="bf16"),
    "containers, bf16": Job(model=partial(Wrapping, "nested dataclass"), precision="bf16"),
    "hooks of the user": Job(model=Hooked),
    "functools.partial": Job(model=Partial),
    "containers, checkpointed": Job(model=partial(WrappingCheckpointed, "dataclass")),
}
UNUSUAL = Together(JOBS, on_three=["containers, bf16", "hooks of the user"])


@pytest.mark.parametrize("name", JOBS)
def test_unusual_modules_train_as_in_one_process(name: str) -> None:
    UNUSUAL.expect_reference(name)


def test_methods_in_place_of_forward() -> None:
    """Methods that use parameters of their own module need `register_forward_method`."""
    job = Job(model=Featured, loss_of=by_method)

    def registered(rank: int) -> list[Outcome]:
        results = []
        for plan in plans_of(1):
            model = make(Featured)
            handle = zeroshard.shard(model, plan, units=Block)
            handle.register_forward_method(model, "forward_features")
            for block in model.blocks:
                handle.register_forward_method(block, "features")
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            losses = []
            for step in range(job.steps):
                loss = by_method(model, rank, 0, step, 1)
                losses.append(loss.item())
                optimizer.backward(loss)
                optimizer.step()
            results.append(Outcome(losses, handle.full_state_dict(), handle.comm_log))
            handle.close()
            assert "forward_features" not in vars(model)  # the class's method again
        unregistered = make(Featured)  # the negative control
        unregistered.act = nn.ReLU()
        handle = zeroshard.shard(unregistered, "zero3", units=Block)
        handle.register_forward_method(unregistered.act, "forward")  # of a module that needs no unit
        assert unregistered.act.forward(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
        with pytest.raises(TypeError, match=r"takes a module and the name of its method, found 'blocks\.0'"):
            handle.register_forward_method("blocks.0", "features")  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"register the method .* with handle.register_forward_method"):
            by_method(unregistered, rank, 0, 0, 1)
        return results

    expected, found = beside_one_process(lambda: train_reference(job, 2), registered, 2)
    for rank, of_rank in enumerate(found):
        for outcome in of_rank:
            assert outcome.losses == expected[rank].losses
            assert same_bits(outcome.weights, expected[rank].weights)


@on_ranks(2)
def test_backward_of_something_that_is_no_scalar(rank: int) -> None:
    expected = train_reference(Job(loss_of=vector_loss, steps=2), 2)[0].weights
    for through, plan in with_plans(["optimizer", "tensor"]):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        for step in range(2):
            out = model(data(rank, 0, step))
            grad = torch.linspace(-1, 1, 23).expand(out.shape)
            if through == "optimizer":
                optimizer.backward(out, gradient=grad)
            else:
                out.backward(grad)
            optimizer.step()
        assert same_bits(handle.full_state_dict(), expected), (plan, through)


# Gradients of gradients -----------------------------------------------------------------------------------------------


def with_penalty(model: Any, rank: int, step: int) -> Tensor:
    """The gradient penalty of WGAN-GP: the norm of the gradient with respect to the input is part of the loss."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 6, generator=generator).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with torch.set_grad_enabled(step == 1):
        model(x)  # between the two backwards
    if step == 1:
        out.mean().backward(retain_graph=True)  # leaves gradients, and is not the second backward
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


class Gate(nn.Module):
    """Autograd saves the parameter itself, and not a view of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(17))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def critic() -> nn.Module:
    ends = nn.Linear(17, 9), nn.Linear(9, 1)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.LayerNorm(17), Gate(), nn.Tanh(), *ends)


def penalised(rank: int, plan: Any, units: Any, *, in_scope: bool = False) -> dict[str, Tensor]:
    model = make(critic)
    handle = zeroshard.shard(model, plan, units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, foreach=False)
    for step in range(2):
        with handle.unsharded() if in_scope else nullcontext():
            optimizer.backward(with_penalty(model, rank, step))
        optimizer.step()
    return handle.full_state_dict()


@on_ranks(2)
def test_gradients_of_gradients_where_weights_stay(rank: int) -> None:
    def plain(rank: int) -> dict[str, Tensor]:
        model = make(critic)
        for step in range(2):
            totals: list[list[Tensor]] = []
            for of_rank in range(2):
                model.zero_grad()
                with_penalty(model, of_rank, step).backward()
                totals.append([p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
            with torch.no_grad():
                for p, a, b in zip(model.parameters(), *totals, strict=True):
                    p.sub_(0.1 * ((a + b) * 0.5))
        return dict(model.state_dict())

    expected = plain(rank)
    ways = [(plan, nn.Linear, False) for plan in PLANS[:3]]
    ways += [
        (zeroshard.ZERO3, 1 << 20, False),
        (zeroshard.ZERO3, 1 << 20, True),
        (zeroshard.ZERO3, nn.Linear, True),
    ]
    for plan, units, in_scope in ways:
        found = penalised(rank, plan, units, in_scope=in_scope)
        for name, value in expected.items():
            torch.testing.assert_close(found[name].cpu(), value)


def test_gradients_of_gradients_are_refused_where_places_are_taken_in_turns() -> None:
    """With shared pool buffers they would be computed with the weights of another unit."""

    def check(rank: int) -> str:
        model = make(critic)
        handle = zeroshard.shard(model, "zero3", units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(model(torch.ones(1, 6)).sum())
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"create_graph.*replicated weights") as error:
            with_penalty(model, rank, 0)
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, 6)).sum())
        assert optimizer.step().applied
        return str(error.value)

    assert len(set(run_ranks(check, 2))) == 1


# A teacher ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_teacher_without_gradients_beside_a_student(rank: int) -> None:
    """The teacher is sharded only to save memory: its weights never change, and no gradient is reduced for it."""

    def distil(student: Any, teacher: Any, rank: int, step: int) -> Tensor:
        tokens = data(rank, 0, step)
        with torch.no_grad():
            target = teacher(tokens).softmax(-1)
        return nn.functional.cross_entropy(student(tokens).flatten(0, 1), target.flatten(0, 1))

    def run(rank: int, plan: Any) -> tuple[dict[str, Tensor], list[float]]:
        student, teacher = make(Net), make(partial(Net, blocks=2), seed=1)
        teacher.requires_grad_(False).eval()
        handle = zeroshard.shard(student, plan, units=Block)
        of_teacher = zeroshard.shard(teacher, "zero3" if plan is not None else "ddp", units=Block)
        before = of_teacher.full_state_dict()
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        losses = []
        for step in range(2):
            loss = distil(student, teacher, rank, step)
            losses.append(loss.item())
            optimizer.backward(loss)
            optimizer.step()
        assert same_bits(of_teacher.full_state_dict(), before)
        assert of_teacher.comm_log.bytes("reduce_scatter") == 0
        assert of_teacher.memory()["grads"] == of_teacher.memory()["main"] == of_teacher.memory()["buckets"] == 0
        assert not zeroshard.ShardedOptimizer(of_teacher, torch.optim.SGD, lr=0.1).step().applied  # as in torch
        return handle.full_state_dict(), losses

    results = [run(rank, plan) for plan in (PLANS if EVERYTHING else PLANS[::3])]
    for weights, losses in results[1:]:
        assert same_bits(weights, results[0][0]) and losses == results[0][1]


# Compilation ----------------------------------------------------------------------------------------------------------


SMALL = Net if EVERYTHING else partial(Net, blocks=2)
"""Each block is compiled by itself."""
STEPS = 3 if EVERYTHING else 2


class OneKernel(Net):
    """A block without matrices, whose operations are fused into one kernel. (g++ takes a second for each kernel.)"""

    class Inner(Block):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.norm, self.gain = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * torch.tanh(self.norm(x))

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList([self.Inner()])


def small(how: str, backend: str) -> Callable[[], nn.Module]:
    """The model to compile: with one block where the whole model is compiled, or kernels are generated."""
    if EVERYTHING:
        return SMALL
    return OneKernel if backend == "inductor" else SMALL if "blocks" in how else partial(Net, blocks=1)


def compiles(rank: int, turn: int) -> bool:
    """Whether this one of two ranks compiles its model: one does, in turn, and the other trains uncompiled beside it.
    (Compiling takes a hundred times as long as a step. Kernels that are not generated give the same bits either way, so
    nothing but the time depends on who compiles.) With `make test-everything` both compile."""
    return EVERYTHING or rank == turn % 2


COMPILED: dict[str, Any] = {
    "blocks in place": lambda model, backend: [block.compile(backend=backend) for block in model.blocks],
    "model in place": lambda model, backend: model.compile(backend=backend),
    "a function of the model": lambda model, backend: torch.compile(model, backend=backend),
}


def compiled(model: nn.Module, how: str, backend: str) -> Any:
    """Compile the model, or parts of it, as `how` says; returns the callable to use."""
    result = COMPILED[how](model, backend)
    return result if isinstance(result, nn.Module) else model


def train_compiled(rank: int, plan: Any, how: str, backend: str, before_shard: bool, *, compiling: bool) -> Outcome:
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # as happened when hooks were compiled for each class
    model = make(small(how, backend))
    called: Any = compiled(model, how, backend) if compiling and before_shard else model
    handle = zeroshard.shard(model, plan, units=Block)
    if compiling and not before_shard:
        called = compiled(model, how, backend)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        loss = loss_of_tokens(called, rank, 0, step)
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    return Outcome(losses, handle.full_state_dict(), handle.comm_log)


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")  # the tracer looks at the grad of tensors that are no leaves
@pytest.mark.parametrize(
    ("how", "before_shard"),
    [("blocks in place", True), ("model in place", False), ("a function of the model", True)]
    + [(how, before) for how in COMPILED for before in (True, False)] * EVERYTHING,
)
def test_compiled_models_train_as_they_do_uncompiled(how: str, before_shard: bool) -> None:
    """By default on one of the ranks, which communicates as the uncompiled one does: blocks under two plans (under the
    other two they train with generated kernels, see below), whole models under one."""
    plans: tuple[Plan, ...] = (zeroshard.ZERO1,) if before_shard else (zeroshard.ZERO3,)
    if "blocks" in how and CAN_COMPILE:
        plans = (zeroshard.DDP, zeroshard.ZERO2)
    if EVERYTHING or ("blocks" in how and not CAN_COMPILE):
        plans = PLANS

    def check(rank: int) -> None:
        plain = train_compiled(rank, zeroshard.DDP, how, "aot_eager", before_shard, compiling=False)
        for turn, plan in enumerate(plans):
            found = train_compiled(rank, plan, how, "aot_eager", before_shard, compiling=compiles(rank, turn))
            assert found.losses == plain.losses, (plan, found.losses, plain.losses)
            assert same_bits(found.weights, plain.weights), plan

    run_ranks(check, 2)


OPERATIONS_OF_A_BLOCK = 5  # norm, up, tanh, down, add
COMPILES_TORCH_MODULES = torch.__version__ >= (2, 12)
"""Whether a module of torch.nn that a frame calls after its graph has ended is compiled alone; torch 2.11 does not."""
ONE_GRAPH: dict[str, Any] = {
    "blocks": lambda model, **how: [
        setattr(model.blocks, str(i), torch.compile(block, fullgraph=True, **how))
        for i, block in enumerate(model.blocks)
    ],
    "blocks in place": lambda model, **how: [block.compile(fullgraph=True, **how) for block in model.blocks],
    "model in place": lambda model, **how: model.compile(**how),
}
BLOCKS = {how: len(SMALL().blocks) if EVERYTHING or how == "blocks" else 1 for how in ONE_GRAPH}
"""The number of blocks of the model that is compiled so."""


def graphs_of(rank: int, plan: Any, how: str, before_shard: bool) -> list[int]:
    """The number of operations in each graph that is compiled during some steps."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    model = make(partial(Net, blocks=BLOCKS[how]))
    if before_shard:
        ONE_GRAPH[how](model, backend=backend)
    handle = zeroshard.shard(model, plan, units=Block)
    if not before_shard:
        ONE_GRAPH[how](model, backend=backend)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False, non_finite="ignore")
    for step in range(STEPS):
        loss_of_tokens(model, rank, 0, step).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss_of_tokens(model, rank, 0, step)
        model.train()
    return graphs


GRAPH_CASES = [
    case
    for case in itertools.product((zeroshard.ZERO1, zeroshard.ZERO3), ONE_GRAPH, (True, False))
    if EVERYTHING or (case[0] is zeroshard.ZERO3) == case[2]  # each case under one of two plans
]


def one_of_two() -> None:
    """Make this process rank 0 of 2. Nothing is sent, and the values are wrong, but all code of a step runs."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    zeroshard.init()


@functools.cache
def all_graphs() -> list[dict[tuple[Plan, str, bool], list[int]]]:
    """For each rank, the results of `graphs_of` by its arguments. By default rank 0 alone, with a group that sends
    nothing: it compiles what both would compile."""

    def check(rank: int) -> dict[tuple[Plan, str, bool], list[int]]:
        if not EVERYTHING:
            one_of_two()
        return {case: graphs_of(rank, *case) for case in GRAPH_CASES}

    return run_ranks(check, 2 if EVERYTHING else 1)


@pytest.mark.by_cpu
@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ONE_GRAPH)
@pytest.mark.parametrize("before_shard", [True, False])
def test_a_unit_is_one_graph(how: str, before_shard: bool) -> None:
    """zeroshard's hooks do not break the graph inside a unit: blocks may be compiled with `fullgraph=True`."""
    for of_rank in all_graphs():
        for plan, *_ in [case for case in GRAPH_CASES if case[1:] == (how, before_shard)]:
            found = of_rank[plan, how, before_shard]
            of_blocks = [count for count in found if count == OPERATIONS_OF_A_BLOCK]
            assert len(of_blocks) == 2  # with gradients and without: equal blocks share a graph
            others = 2 * 3 if how == "model in place" and COMPILES_TORCH_MODULES else 0  # embedding, norm, head
            assert sum(found) - sum(of_blocks) == others


@pytest.mark.by_cpu
@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")
def test_hooks_that_end_graphs_are_seen() -> None:
    """A control: if modules inside a unit keep their hooks, `fullgraph=True` raises."""

    def check(rank: int) -> None:
        Needed.begin = lambda self, running: None  # type: ignore[method-assign]
        one_of_two()
        graphs_of(rank, zeroshard.ZERO3, "blocks", True)

    with pytest.raises(RankError, match="disable"):
        run_ranks(check, 1)


class Parts(nn.Module):
    """A module whose parts are called separately, one of them also from inside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh())

    def forward(self, x: Tensor, deep: bool = False) -> Tensor:
        return x + (self(self.one(x)) if deep else self.two(self.one(x)))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Parts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.two(part.one(part(x, deep=True)))  # with it, and without
        return checkpoint(self.parts[0].two, x, use_reentrant=False)


@on_ranks(2)
def test_modules_inside_a_unit_are_called_alone(rank: int) -> None:
    """The same results as in one process, also after a call that raised in the middle of a unit, or was interrupted:
    torch calls no hooks then, and the model took the call for running. It did not follow changes of what trains."""

    def check(rank: int, fails: type[BaseException] | None) -> None:
        torch.set_default_dtype(torch.float64)
        expected = make(Around)
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        models = {plan: make(Around) for plan in plans_of(fails is ZeroDivisionError)}
        handles = {plan: zeroshard.shard(model, plan, units=Parts) for plan, model in models.items()}
        optimizers = {plan: zeroshard.ShardedOptimizer(handles[plan], torch.optim.SGD, lr=0.1) for plan in models}
        for step in range(2):
            inputs = [torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
            for value in inputs:
                (expected(value).square().mean() / 2).backward()
            for plan, model in models.items():
                if fails:
                    hook = model.parts[1].two[0].register_forward_pre_hook(partial(raises, fails))
                    with pytest.raises(fails):
                        model(inputs[rank])
                    assert not handles[plan].engine.schedule.running
                    assert not any(unit.weights.in_use for unit in handles[plan].engine.units)
                    with torch.no_grad():  # the unit has raised, and its parts can be called
                        assert torch.equal(model.parts[1].one(inputs[0]), expected.parts[1].one(inputs[0])) or step
                    hook.remove()
                model(inputs[rank]).square().mean().backward()
                optimizers[plan].step()
                optimizers[plan].zero_grad()
            plain.step(), plain.zero_grad()
        for handle in handles.values():
            for name, value in handle.full_state_dict().items():
                torch.testing.assert_close(value, expected.state_dict()[name])

    in_turn(check, [None, ZeroDivisionError, KeyboardInterrupt])(rank)


def raises(kind: type[BaseException], *_: Any) -> None:
    raise kind


@pytest.mark.by_cpu
@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
@pytest.mark.skipif(not CAN_COMPILE, reason="generated kernels need g++ and the header files of this Python")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("how", "before_shard"),
    [("blocks in place", True)] + [(how, before) for how in COMPILED for before in (True, False)] * EVERYTHING,
)
def test_generated_kernels_give_the_same_bits_under_every_plan(
    how: str, before_shard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of one process compiled in the same way, not of the uncompiled model: fused kernels round
    differently. (By default rank 0 alone compiles, and the one process uses its kernels for the data of rank 0 alone.
    Two plans: one with permanently full weights and one that gathers and drops them.)"""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import torch._inductor.compile_fx  # slow: imported once, before ranks are forked

    # (When monkeypatch is undone, it deletes these settings.)
    settings = torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True})
    if not EVERYTHING:  # to try vector instructions, and to compile with them, would take half of the time
        monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", list)
    plans = PLANS if EVERYTHING else (zeroshard.ZERO1, zeroshard.ZERO3)

    def one_process(compiling: tuple[int, ...]) -> list[tuple[list[list[list[float]]], State]]:
        """Losses and weights with the data of both ranks. As controls, with other data, and without generated
        kernels."""
        torch._dynamo.reset()
        model = make(small(how, "inductor"))
        called, results = compiled(model, how, "inductor"), []
        for of, generated in (((0, 1), compiling), ((0, 2), compiling), ((0, 1), ())):
            model.load_state_dict(make(small(how, "inductor")).state_dict())
            reference = Reference(model, torch.optim.AdamW, num_ranks=2, lr=1e-2, foreach=False)

            losses = []
            for step in range(STEPS):

                def loss_of(_: Any, at: int, __: int, of: Any = of, made: Any = generated, step: int = step) -> Tensor:
                    with torch.compiler.set_stance("default" if of[at] in made else "force_eager"):
                        return loss_of_tokens(called, of[at], 0, step)

                losses.append(reference.step(loss_of).losses)
            results.append((losses, reference.state_dict()))
        return results

    def check(rank: int) -> tuple[list[Outcome], list[tuple[list[list[list[float]]], State]]]:
        """This rank's outcomes; on rank 0, also what they should be."""
        compiling = tuple(other for other in range(2) if compiles(other, 0))
        expected = one_process(compiling) if rank == 0 else []
        options = {"compiling": rank in compiling}
        return [train_compiled(rank, plan, how, "inductor", before_shard, **options) for plan in plans], expected

    with settings:
        by_rank = run_ranks(check, 2)
    (losses, weights), *others = by_rank[0][1]
    assert any(tmp_path.rglob("*.so"))
    assert not any(same_bits(other, weights) for _, other in others)
    for rank, (outcomes, _) in enumerate(by_rank):
        for plan, found in zip(plans, outcomes, strict=True):
            assert found.losses == [of_ranks[rank][0] for of_ranks in losses], (plan, rank)
            assert same_bits(found.weights, weights), (plan, rank)


# The module trees only ------------------------------------------------------------------------------------------------


def test_tensors_are_found_wherever_they_are() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    for wrap, unwrap in WRAP.values():
        assert [tensor is x for tensor in tensors_in(wrap(x))].count(True) == 1
        assert unwrap(wrap(x)) is x
    assert list(tensors_in([Frozen(Named(x, {"y": (y, "text", 3, None, Net)})), nn.Linear(2, 2)])) == [x, y]
    record = Frozen(Named(x, {"y": [y]}))
    assert replaced_in({"a": record})["a"] is record
    assert record.inner.hidden == 1 and record.inner.extra["y"][0] == 2 and record.note == "text"
    attributes = Attributes(hidden=x, note="text")
    assert replaced_in((attributes,))[0] is attributes and attributes == {"hidden": torch.ones(1), "note": "text"}
    same = (Named(x, {}),)
    assert replace_tensors(lambda tensor: tensor, same, lambda *_: None) is same and same[0].hidden is x


def replaced_in(tree: Any) -> Any:
    return replace_tensors(lambda tensor: tensor + 1, tree, lambda *_: None)


class Unreadable(dict[str, Tensor]):
    def items(self) -> Any:
        raise KeyError("unreadable")


@on_ranks(2)
def test_a_method_whose_inputs_cannot_be_cast_leaves_no_trace(rank: int) -> None:
    """Its call has begun by then, and once never ended: its weights stayed for good."""
    model = make(Featured)
    handle = zeroshard.shard(model, "zero3", units=Block, precision="bf16")
    handle.register_forward_method(model, "forward_features")
    with pytest.raises(KeyError, match="unreadable"):
        model.forward_features(Unreadable())
    assert not any(unit.weights.in_use for unit in handle.engine.units)
    assert not handle.engine.running


class Keeping(nn.Module):
    """Keeps containers of Python: one that contains itself, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tree: dict[str, Any] = {"children": [torch.ones(4)]}
        self.tree["parent"] = self.tree
        self.vocabulary = {f"word {number}": number for number in range(2000)}
        self.features: list[Any] = [*range(100)]

    def forward(self, x: Tensor) -> Tensor:
        self.features[50] = x = self.linear(x)
        return x


@on_ranks(2)
def test_containers_that_a_module_keeps(rank: int) -> None:
    """A container that contains itself was a RecursionError in `shard`, and each element of a vocabulary was looked at
    in each forward."""
    model = make(Keeping)
    found = [tensor for _, tensor in tensors_kept_by(model)]
    assert len(found) == 1 and found[0] is model.tree["children"][0]
    handle = zeroshard.shard(model, "zero3", units=nn.Linear)
    model(torch.ones(2, 4) * (rank + 1))
    model.features[50].sum().backward()
    assert handle.gradient("linear.weight").abs().sum() > 0


class OfTuple(nn.Module):
    """Takes a named tuple, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tuple) -> Tuple:
        return Tuple(self.linear(x.hidden), x.others)


def test_modules_of_python_are_not_looked_into() -> None:
    """An object that refers to one led to all modules that have been imported, in each forward: seconds, or a
    RecursionError."""
    batch = Slots(torch.ones(2, 4))
    found = tensors_in([batch, SimpleNamespace(library=sys.modules[__name__], backend=torch)])
    assert len(found) == 1 and found[0] is batch.hidden


@on_ranks(2)
def test_named_tuples_with_a_list_that_contains_itself(rank: int) -> None:
    """They were a RecursionError in the first forward of a unit."""
    others: list[Any] = ["text"]
    others.append(others)
    model, plain = make(OfTuple), make(OfTuple)
    handle = zeroshard.shard(model, "zero3", units=nn.Linear)
    for one in (model, plain):
        one(Tuple(torch.ones(2, 4), others)).hidden.sum().backward()
    assert torch.equal(handle.gradient("linear.weight"), plain.linear.weight.grad)
