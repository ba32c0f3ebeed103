"""Gradients of 16-bit weights that one use makes go into the fp32 bucket without a temporary; several uses within one
backward still add up in fp32, with the same bits as if every gradient was cast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.kit import PLANS, loss_of_tokens, make, same_bits, with_plans
from tests.kit import Block as KitBlock
from tests.kit import Net as KitNet
from tests.together import on_ranks
from zeroshard.runtime import single_uses
from zeroshard.storage.gradients import Gradients
from zeroshard.testing import RankError, run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 24


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Net(nn.Module):
    """`way` decides how `shared`, and the whole model, are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor, way: str = "once") -> Tensor:
        x = torch.tanh(self.first(self.embed(tokens)))
        if way == "checkpoint":
            return self.last(checkpoint(self.shared, x, use_reentrant=False))
        if way == "checkpoint twice":
            return self.last(checkpoint(lambda x: self.shared(torch.tanh(self.shared(x))), x, use_reentrant=False))
        if way == "reentrant":
            return self.last(checkpoint(lambda x: self.shared(torch.tanh(self.shared(x))), x, use_reentrant=True))
        x = self.shared(x)
        if way == "twice":
            x = self.shared(torch.tanh(x))
        if way == "beside its call":
            x = x + nn.functional.linear(x, self.shared.weight)
        if way == "a function in Python":
            x = Double.apply(x)
        return self.last(x)


def loss_of(model: nn.Module, rank: int, step: int, way: str) -> Tensor:
    tokens = (torch.arange(12).view(3, 4) * (5 + rank) + 3 * step) % 11
    return model(tokens, way=way).float().square().mean()


@dataclass
class Seen:
    """Parameter -> the dtype of what the bucket was given, in the last backward."""

    of: dict[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def watching(cls, patch: pytest.MonkeyPatch) -> Seen:
        seen, accumulate = cls(), Gradients.accumulate

        def watched(self: Gradients, index: int, grad: Tensor) -> None:
            seen.of[self.buffer.layout.slots[index].name] = grad.dtype
            accumulate(self, index, grad)

        patch.setattr(Gradients, "accumulate", watched)
        return seen

    def cast(self) -> set[str]:
        return {name for name, dtype in self.of.items() if dtype == FP32}


Backward = Callable[[zeroshard.ShardedOptimizer, Tensor], None]
DIRECT: Backward = zeroshard.ShardedOptimizer.backward
PLAIN: Backward = lambda optimizer, loss: loss.backward()  # noqa: E731


def trained(
    rank: int,
    plan: Any,
    ways: list[str],
    backward: Backward,
    seen: Seen,
    precision: Any = "bf16",
    micro_batches: int = 1,
    compiles: Callable[[Net], None] = lambda model: None,
) -> tuple[dict[str, Tensor], list[set[str]]]:
    """main after a step for each way, and the parameters whose gradients were cast in each."""
    torch.manual_seed(0)
    model = Net()
    compiles(model)
    handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5, momentum=0.9)
    found = []
    for step, way in enumerate(ways):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            seen.of.clear()
            backward(optimizer, loss_of(model, rank, 10 * step + micro_batch, way))
        found.append(seen.cast())
        assert all(p.grad_dtype == FP32 for p in model.parameters())
        optimizer.step()
    return handle.full_state_dict(main=True), found


EVERYTHING = {
    "embed.weight",
    *(f"{name}.{kind}" for name in ("first", "shared", "last") for kind in ("weight", "bias")),
}
SHARED = {"shared.weight", "shared.bias"}
CAST = {
    "once": set[str](),
    "twice": SHARED,
    "beside its call": {"shared.weight"},
    "checkpoint": set[str](),
    "checkpoint twice": SHARED,
    "a function in Python": EVERYTHING,
    "reentrant": EVERYTHING,
}
"""Way -> the parameters whose gradients are cast."""


def test_what_is_used_once_is_not_cast_and_the_bits_are_those_of_casting_everything() -> None:
    """Each step uses the shared layer in another way."""

    def check(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            seen = Seen.watching(patch)
            for precision, plan in with_plans(("bf16", "bf16-remainder")):
                ways = [*CAST]
                if plan is zeroshard.ZERO3:  # the weight is absent outside of the call
                    ways.remove("beside its call")
                expected, cast = trained(rank, plan, ways, PLAIN, seen, precision)
                assert cast == [EVERYTHING] * len(ways)
                found, cast = trained(rank, plan, ways, DIRECT, seen, precision)
                assert cast == [CAST[way] for way in ways]
                assert same_bits(found, expected), (precision, plan)

    run_ranks(check, 2)


@on_ranks(2)
def test_micro_batches_with_a_loss_scale(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen.watching(patch)
        for precision, plan in with_plans(("fp16", "bf16")):
            arguments = rank, plan, ["twice", "once"], DIRECT, seen, precision, 3
            found, cast = trained(*arguments)
            assert cast == [SHARED, set()]
            with pytest.MonkeyPatch.context() as everything:
                everything.setattr(single_uses, "_used_once", lambda root: [])
                expected, cast = trained(*arguments)
            assert cast == [EVERYTHING] * 2
            assert same_bits(found, expected), (precision, plan)


def test_edges_that_are_not_counted_are_seen() -> None:
    """The negative control: with all leaves taken for ones with a single edge, bits differ."""
    original = single_uses._used_once

    def careless(root: Any) -> list[Tensor]:
        found, seen, nodes = [], {root}, [root]
        while nodes:
            node = nodes.pop()
            found += [node.variable] if hasattr(node, "variable") else []
            fresh = [other for other, _ in node.next_functions if other is not None and other not in seen]
            seen.update(fresh)
            nodes += fresh
        return found

    assert original is not careless
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_uses, "_used_once", careless)
        with pytest.raises(RankError, match="assert"):
            test_what_is_used_once_is_not_cast_and_the_bits_are_those_of_casting_everything()


class UsedTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


def compile_layers(model: Net) -> None:
    for layer in (model.first, model.shared):
        layer.compile(backend="aot_eager")


def compile_layers_used_twice(model: Net) -> None:
    model.shared = UsedTwice(WIDTH, WIDTH)
    compile_layers(model)


def compile_the_model(model: Net) -> None:
    """Graphs end at units, so several uses of one are in several graphs."""
    model.compile(backend="aot_eager")


LAYERS = {"once": set[str](), "twice": SHARED, "checkpoint": set[str](), "a function in Python": EVERYTHING}
COMPILED: list[tuple[Callable[[Net], None], Any, dict[str, set[str]]]] = [
    (compile_layers, zeroshard.ZERO1, LAYERS),
    (compile_layers_used_twice, zeroshard.ZERO3, LAYERS),
    (compile_the_model, zeroshard.DDP, {"once": set(), "twice": SHARED, "a function in Python": set()}),
]
"""What is compiled, the plan, and way -> the parameters whose gradients are cast."""


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")  # the tracer looks at the grad of tensors that are no leaves
def test_a_compiled_graph_is_one_use() -> None:
    """However often it uses a parameter. The bits are those of casting everything, and a function that was not compiled
    still has everything cast."""

    def check(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            seen = Seen.watching(patch)
            for compiles, plan, of_way in COMPILED:
                torch._dynamo.reset()
                ways = [*of_way]
                expected, cast = trained(rank, plan, ways, PLAIN, seen, compiles=compiles)
                assert cast == [EVERYTHING] * len(ways)
                found, cast = trained(rank, plan, ways, DIRECT, seen, compiles=compiles)
                assert dict(zip(ways, cast, strict=True)) == of_way, plan
                assert same_bits(found, expected), plan

    run_ranks(check, 2)


@on_ranks(2)
def test_a_weight_in_the_loss_and_a_tied_one(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen.watching(patch)
        for plan in PLANS[:3:2]:  # under ZERO3 weights are absent outside of the model's call
            mains = []
            for backward in (DIRECT, PLAIN):
                model = make(partial(KitNet, tied=True))
                handle = zeroshard.shard(model, plan, units=KitBlock, precision="bf16")
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)
                for step in range(2):
                    optimizer.zero_grad()
                    loss = loss_of_tokens(model, rank, 0, step)
                    penalty = model.get_parameter("blocks.0.up.weight").square().sum()
                    backward(optimizer, loss.float() + penalty.float())
                    if backward is DIRECT:
                        assert seen.cast() == {"embed.weight", "blocks.0.up.weight"}
                    optimizer.step()
                mains.append(handle.full_state_dict(main=True))
            assert same_bits(*mains)


@pytest.mark.by_cpu
@on_ranks(2)
def test_rows_of_a_sparse_gradient_add_up_in_fp32(rank: int) -> None:
    values = []
    for backward in (DIRECT, PLAIN):
        model = nn.Sequential(nn.Embedding(3, WIDTH, sparse=True))
        with torch.no_grad():
            model[0].weight.zero_()
        handle = zeroshard.shard(model, "zero2", precision="bf16")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        parts = torch.tensor([1.0, *[1 / 512] * 4], dtype=BF16)
        backward(optimizer, (model(torch.zeros(5, dtype=torch.int64)) * parts[:, None]).sum())
        optimizer.step()
        values.append(-handle.full_state_dict(main=True)["0.weight"][0, 0].item())
    assert values == [1.0078125] * 2  # 1.0 if they are added in bf16


@on_ranks(2)
def test_hooks_of_the_user_see_fp32(rank: int) -> None:
    torch.manual_seed(0)
    model, kinds = Net(), dict[str, torch.dtype]()
    handle = zeroshard.shard(model, "zero2", units=nn.Linear, precision="bf16")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)
    model.first.weight.register_hook(lambda grad: kinds.update(tensor=grad.dtype))
    model.last.weight.register_post_accumulate_grad_hook(lambda p: kinds.update(after=p.grad.dtype))
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen.watching(patch)
        optimizer.backward(loss_of(model, rank, 0, "once"))
        assert kinds == {"tensor": FP32, "after": FP32}
        assert seen.cast() == {"first.weight", "last.weight"}
    assert all(p.grad is None or p.grad.dtype == FP32 for p in model.parameters())


@on_ranks(2)
def test_arguments_of_backward(rank: int) -> None:
    """With `inputs` everything is cast as before; `retain_graph` changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen.watching(patch)
        model = Net()
        handle = zeroshard.shard(model, "ddp", units=nn.Linear, precision="bf16")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)
        every = {"inputs": list(model.parameters())}
        for arguments, cast in (({"retain_graph": True}, set()), (every, EVERYTHING)):
            seen.of.clear()
            optimizer.backward(loss_of(model, rank, 0, "once"), **arguments)
            assert seen.cast() == cast
            optimizer.zero_grad()


class Failing(RuntimeError):
    pass


@on_ranks(1)
def test_a_backward_that_raises_leaves_parameters_as_they_were(rank: int) -> None:
    model = Net()
    handle = zeroshard.shard(model, "zero1", units=nn.Linear, precision="bf16")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)

    def fail(grad: Tensor) -> None:
        raise Failing

    hidden = model.first(torch.zeros(2, WIDTH))
    hidden.register_hook(fail)
    with pytest.raises(Failing):
        optimizer.backward(model.last(model.shared(hidden)).float().sum())
    assert all(p.grad_dtype == FP32 for p in model.parameters())
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, rank, 0, "twice"))
    optimizer.step()


@pytest.mark.parametrize("kind", ["backward", "grad"])
@on_ranks(1)
def test_a_backward_inside_of_it_is_refused(rank: int, kind: str) -> None:
    model = Net()
    handle = zeroshard.shard(model, "ddp", units=nn.Linear, precision="bf16")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)

    def inner(grad: Tensor) -> None:
        with torch.enable_grad():
            again = (model.first.weight * 3 + model.first.weight).sum()
            again.backward() if kind == "backward" else torch.autograd.grad(again, model.first.weight)

    x = torch.tanh(model.first(torch.ones(2, WIDTH)))
    x.register_hook(inner)
    with pytest.raises(RuntimeError, match="inside of optimizer"):
        optimizer.backward(model.last(x).float().sum())
    assert all(p.grad_dtype == FP32 for p in model.parameters())
