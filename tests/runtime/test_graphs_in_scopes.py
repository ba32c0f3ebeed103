"""A graph that is built inside `handle.unsharded()`, and its backward outside of it.

Autograd saves a parameter as it is, not its values. So such a backward once read the placeholders of parameters that
are sharded again: all gradients were NaN, and with `non_finite="skip"` no step was made, without a word.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.kit import DEVICE, WIDTH, Block, Net, State, loss_of_tokens, make, plans_of, same_bits
from tests.together import on_ranks


def start(plan: Any) -> tuple[Any, Any, Any]:
    model = make(lambda: Net(blocks=3))
    handle = zeroshard.shard(model, plan, units=Block)
    return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)


def gradients(model: Any, handle: Any) -> State:
    return {name: handle.gradient(name) for name, _ in model.named_parameters()}


@on_ranks(3)
def test_backward_may_run_after_the_scope(rank: int) -> None:
    for plan in (zeroshard.ZERO3, plans_of(0)[-1]):
        model, handle, optimizer = start(plan)
        loss_of_tokens(model, rank, 0, 0).backward()
        expected = gradients(model, handle)
        optimizer.zero_grad()

        parts: tuple[tuple[str, ...], ...] = ((), ("blocks.1",), ("blocks.0", "norm"))
        for names in parts:
            with handle.unsharded(*names):
                if not names and rank == 1:  # a rank may run the model alone; nobody comes back to this graph
                    loss_of_tokens(model, rank, 3, 0)
                loss = loss_of_tokens(model, rank, 0, 0)
            loss.backward()
            assert same_bits(gradients(model, handle), expected)
            optimizer.zero_grad()

        with handle.unsharded():
            loss = loss_of_tokens(model, rank, 0, 0)
            loss.backward()
        assert same_bits(gradients(model, handle), expected)
        assert optimizer.step().applied


@on_ranks(2)
def test_a_graph_without_a_backward_goes_with_its_loss(rank: int) -> None:
    """A node that saves its own result, as those of `exp` and of a norm do, held that result, and so itself: an
    evaluation with gradients stayed in memory, and the weights that it had used. `p.data = F.normalize(p)`, as
    embeddings of graphs are kept on the sphere, raised then that something shares the memory of the old data."""
    for plan in (zeroshard.ZERO3, plans_of(0)[-1]):
        model, handle, _ = start(plan)
        kept = []
        with handle.unsharded():
            for power in (model.embed.weight.exp(), model.embed.weight.exp() * torch.zeros(1, requires_grad=True)):
                (torch.softmax(power, 1) + power.norm(dim=1, keepdim=True)).sum()
                kept.append(weakref.ref(power))
            del power
        gc.collect()
        assert [one() for one in kept] == [None, None]
        with handle.unsharded(write=True):
            expected = nn.functional.normalize(model.embed.weight).detach()
            model.embed.weight.data = nn.functional.normalize(model.embed.weight)
        assert torch.equal(handle.full_state_dict()["embed.weight"], expected)


@on_ranks(2)
def test_one_backward_for_forwards_inside_and_outside(rank: int) -> None:
    found = []
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        model, handle, optimizer = start(plan)
        for _ in range(2):  # the second time in the order that has been recorded
            first = loss_of_tokens(model, rank, 0, 0)
            with handle.unsharded():
                second = loss_of_tokens(model, rank, 1, 0)
            third = loss_of_tokens(model, rank, 2, 0)
            (first + second + third).backward()
            found.append(gradients(model, handle))
            assert optimizer.step().applied
    assert same_bits(found[0], found[2]) and same_bits(found[1], found[3])


class Penalised(Net):
    """Opens a block in its forward, or in that of a block, and uses weights of other units and of the root there."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.around()) if hasattr(self, "around") else super().forward(x)

    def __init__(self, where: str) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))
        self.where, self.handle = where, [Any]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.where == "unit":
            self.blocks[1].around = self.penalty
        logits = super().forward(tokens)
        return logits if self.where == "unit" else logits * (1 + self.penalty())

    def penalty(self) -> Tensor:
        first, last = self.blocks[0], self.blocks[2]
        with self.handle[0].unsharded():
            found = first.up.weight.clamp(-0.1, 0.1).square().sum() + last(first(torch.ones(1, WIDTH))).square().mean()
            found = found + self.norm.weight.square().sum() + self.blocks[1].up.weight.abs().sum()
            return 1e-3 * (found + nn.functional.linear(last.up.weight.t(), last.down.weight).square().sum())


@on_ranks(2)
def test_weights_that_are_used_in_a_scope_inside_of_a_forward(rank: int) -> None:
    """Where backward read the placeholders, gradients were NaN, or of comparisons with NaN: 0, in silence."""
    for where in ("unit", "root"):
        found = []
        for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
            model = make(lambda where=where: Penalised(where))
            handle = zeroshard.shard(model, plan, units=Block)
            model.handle = [handle]
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            for step in range(2):
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                found.append(gradients(model, handle))
                assert optimizer.step().applied
        assert same_bits(found[0], found[2]) and same_bits(found[1], found[3]), where


@on_ranks(2)
def test_what_is_saved_in_such_a_scope_is_checked_as_by_autograd(rank: int) -> None:
    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            with model.handle[0].unsharded():
                y = torch.tanh(model.blocks[0].norm.weight * x.exp())
                y.add_(1.0)  # tanh has saved it
            return super().forward(y)

    model: Any = make(lambda: Net(blocks=2))
    model.blocks[1].__class__ = Inner
    model.handle = [zeroshard.shard(model, zeroshard.ZERO3, units=Block)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of_tokens(model, rank, 0, 0).backward()


TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda weight: weight.square().sum(),
    "clamp": lambda weight: weight.clamp(min=0).sum(),
    "views": lambda weight: (weight @ weight.t()).abs().sum(),
    "nothing is saved": lambda weight: (weight - 1).square().sum(),
}
"""Uses of a weight outside of its module."""


@pytest.mark.parametrize("where", ["inside", "before", "after", "none", "write", "partly", "no_grad"])
@on_ranks(2)
def test_weights_that_are_used_in_a_scope_outside_of_a_forward(rank: int, where: str) -> None:
    """`where`: the forward. Backward once read the placeholders: NaN, or of comparisons with NaN: 0, in silence."""
    for index, term in enumerate(TERMS.values()):
        found = []
        for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
            model = make(lambda: Net(blocks=3))
            # By classes, and the whole model as one unit.
            handle = zeroshard.shard(model, plan, **({"units": Block} if (index + len(where)) % 2 else {}))
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            loss: Any = 0
            if where == "before":
                loss = loss_of_tokens(model, rank, 0, 0)
            parts = ("blocks.1",) if where == "partly" else ()
            with torch.set_grad_enabled(where != "no_grad"), handle.unsharded(*parts, write=where == "write"):
                with torch.enable_grad(), handle.unsharded("blocks.1"):
                    loss = loss + term(model.blocks[1].up.weight)
                with torch.enable_grad():
                    loss = loss + (loss_of_tokens(model, rank, 0, 0) if where in ("inside", "write", "partly") else 0)
                    loss = loss + term(model.blocks[1].norm.weight[None])
            if where == "after":
                loss = loss + loss_of_tokens(model, rank, 0, 0)
            loss.backward()
            alone = ("blocks.1.up.weight", "blocks.1.norm.weight") if where in ("none", "no_grad") else ()
            found.append({name: handle.gradient(name) for name in alone or dict(model.named_parameters())})
            optimizer.zero_grad()
        assert same_bits(*found), index


@on_ranks(2)
def test_what_a_scope_keeps_is_as_new_as_the_weights(rank: int) -> None:
    """As plain torch raises in a backward that has saved a weight which a step has changed since."""
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        model, handle, optimizer = start(plan)
        weight = model.blocks[1].up.weight
        with handle.unsharded():
            term, products = weight.square().sum(), (weight @ weight.t()).sum()
        assert torch.equal(*torch.autograd.grad(term, weight, retain_graph=True), 2 * full_weight(handle, weight))
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        assert optimizer.step().applied
        for loss in (term, products):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, weight)


def full_weight(handle: Any, weight: Tensor) -> Tensor:
    with handle.unsharded(), torch.no_grad():
        return weight.clone()


@on_ranks(2)
def test_scopes_with_other_hooks_on_what_is_saved(rank: int) -> None:
    """Checkpoints and `save_on_cpu` inside of the scope and around it, and second derivatives after it."""

    def checkpointed(model: Any, handle: Any) -> Tensor:
        x = torch.ones(2, WIDTH, requires_grad=True)
        with handle.unsharded():
            y = checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=False)
            return y.square().mean() + model.blocks[2].up.weight.abs().sum()

    def on_cpu(model: Any, handle: Any) -> Tensor:
        with save_on_cpu(), handle.unsharded():
            return loss_of_tokens(model, rank, 1, 0) + model.blocks[2].up.weight.square().sum()

    def second(model: Any, handle: Any) -> Tensor:
        weights = model.blocks[1].up.weight, model.blocks[2].up.weight
        with handle.unsharded():
            loss = weights[0].square().sum() + (weights[0].tanh() @ weights[1].t()).square().sum()
        return sum((grad.square().sum() for grad in torch.autograd.grad(loss, weights, create_graph=True)), loss)

    for of_graph in (checkpointed, on_cpu, second):
        found = []
        for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
            model, handle, _ = start(plan)
            (of_graph(model, handle) + loss_of_tokens(model, rank, 0, 0)).backward()
            found.append(gradients(model, handle))
        assert same_bits(*found), of_graph.__name__


@on_ranks(2)
def test_transforms_inside_of_a_scope_are_not_refused(rank: int) -> None:
    """`torch.func.grad` refuses hooks. What it saves is not kept: a backward after the scope raises."""
    model, handle, _ = start(zeroshard.ZERO3)
    weight = model.blocks[2].up.weight

    def value(x: Tensor) -> Tensor:
        return (weight.clamp(min=0) @ x).square().sum()

    before = loss_of_tokens(model, rank, 0, 0)
    with handle.unsharded():
        found = torch.func.grad(value)(torch.ones(WIDTH))
        assert torch.equal(found, *torch.autograd.grad(value(x := torch.ones(WIDTH, requires_grad=True)), x))
        term = weight.square().sum()
        with pytest.raises(RuntimeError, match="hooks"), saved_tensors_hooks(lambda x: x, lambda x: x):
            torch.func.grad(value)(torch.ones(WIDTH))  # hooks of the user, as in plain torch
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation|values of parameter blocks.2.up.weight are not"
    ):
        (before + found.sum()).backward()
    assert torch.equal(*torch.autograd.grad(term, weight), 2 * full_weight(handle, weight))
    with pytest.raises(RuntimeError, match="hooks"), saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.func.grad(value)(torch.ones(WIDTH))


@on_ranks(2)
def test_second_derivatives_inside_a_scope(rank: int) -> None:
    norms = []
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        model, handle, _ = start(plan)
        with handle.unsharded():
            loss = loss_of_tokens(model, rank, 0, 0)
            found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            torch.stack([grad.sum() for grad in found]).sum().backward()
        norms.append(gradients(model, handle))
    assert same_bits(*norms)


class Held(nn.Linear):
    """Uses its weight, and once more without a gradient for it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) + nn.functional.linear(x, self.weight.detach()))


@on_ranks(2)
def test_a_detached_weight_is_kept_as_the_weight_is(rank: int) -> None:
    """Its version is that of the parameter, which changes when the values are gone: backward saw a write."""
    found = []
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        model = make(lambda: nn.Sequential(*[Held(4, 4) for _ in range(3)]))
        handle = zeroshard.shard(model, plan, units=Held)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)

        def penalty(of_model: Any = model) -> Tensor:
            x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
            (grad,) = torch.autograd.grad(of_model(x).sum(), x, create_graph=True)
            return grad.square().sum()

        with handle.unsharded():
            loss, late = penalty(), penalty()
        loss.backward()
        found.append(gradients(model, handle))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
    assert all(torch.allclose(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.filterwarnings("ignore")  # the tracer looks at the grad of tensors that are no leaves
@on_ranks(2)
def test_compiled_blocks_save_weights_as_others_do(rank: int) -> None:
    """The compiler compiled what keeps a saved weight, and failed at a gradient that is not of the weight's dtype."""
    found = []
    for is_compiled in (False, True):
        model: Any = make(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
        handle = zeroshard.shard(model, zeroshard.ZERO3, units=nn.Linear, precision="bf16")
        x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
        with handle.no_sync():
            model(x).sum().backward()
        if is_compiled:
            model[0].compile(backend="eager")
        with handle.unsharded():
            loss = model(x).sum()
        loss.backward()
        found.append(gradients(model, handle))
    assert same_bits(*found)


class Clamps(nn.Module):
    """Replaces the data of its weights when it runs, as the learned filters of braindecode do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.clamp(self.scale, 2.0, 3.0)
        self.scale.data = scale + 0.5  # not at a bound: versions of torch differ there
        out: Tensor = self.linear(x) * scale
        return out


@on_ranks(2)
def test_a_backward_in_a_block_uses_the_data_that_its_forward_has_put_in_place(rank: int) -> None:
    """Autograd saves the parameter, whose mask of `clamp` is that of the new data; of the old ones, ZeRO-3 dropped the
    gradients, in silence."""
    x = torch.arange(12.0, device=DEVICE).reshape(3, 4) - 4
    states = []
    for plan in ("ddp", zeroshard.ZERO3):
        model = make(Clamps)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1e-3)
        with handle.unsharded(write=True):
            model(x + rank).square().mean().backward()
        optimizer.step()
        states.append(handle.full_state_dict())
    assert same_bits(*states)
    assert (states[0]["scale"] < 2.5).all()  # a mask of the old data would have stopped the step
