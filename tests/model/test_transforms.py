"""`functional_call` and the transforms of `torch.func` on a sharded model.

They work where the weights rest in full. Under ZERO3 the error says what to do, and the handle stays usable. (Once
every plan raised internal errors: "parameter ... has come into the model", "Cannot access data pointer of Tensor that
doesn't have storage".)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.fx
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import zeroshard
from tests.kit import (
    PLANS,
    VOCAB,
    WIDTH,
    Block,
    Job,
    Net,
    beside_one_process,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train,
    train_reference,
)
from tests.together import in_turn, on_ranks
from zeroshard.model import trees

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # raised by torch when it loads forward mode
Values = dict[str, Tensor]


def tokens(rank: int) -> Tensor:
    return torch.randint(VOCAB, (3, 5), generator=torch.Generator().manual_seed(rank))


def loss(model: nn.Module, values: Values, batch: Tensor) -> Tensor:
    logits = functional_call(model, values, (batch,))
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def values_of(model: nn.Module) -> Values:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def ones_like(values: Values) -> Values:
    return {name: torch.ones(value.shape) for name, value in values.items()}


def per_sample(model: nn.Module, values: Values, batch: Tensor) -> Any:
    return vmap(grad(lambda v, one: loss(model, v, one[None])), (None, 0))(values, batch)


def dual(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model.blocks[0](forward_ad.make_dual(x, torch.ones_like(x))))[1]


def changed_inside(model: Any, values: Values, batch: Tensor) -> Values:
    """A step of an inner loop, as in MAML; returns the gradient through it."""

    def after_a_step(v: Values) -> Tensor:
        slopes = grad(lambda w: loss(model, w, batch))(v)
        return loss(model, {name: v[name] - 0.1 * slopes[name] for name in v}, batch)

    return grad(after_a_step)(values)


X = torch.linspace(-1, 1, WIDTH)
OF_VALUES: dict[str, Callable[[Any, Values, Tensor], Any]] = {
    "grad": lambda model, v, batch: grad(lambda w: loss(model, w, batch))(v),
    "per sample": per_sample,
    "vjp": lambda model, v, batch: vjp(lambda w: loss(model, w, batch), v)[1](torch.tensor(2.0)),
    "jvp": lambda model, v, batch: jvp(lambda w: loss(model, w, batch), (v,), (ones_like(v),)),
    "grad of grad": changed_inside,
}
OF_INPUTS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda model: grad(lambda x: model.blocks[0](x).sum())(X),
    "jvp": lambda model: jvp(model.blocks[0], (X,), (X,)),
    "jacrev": lambda model: jacrev(model.blocks[1])(X),
    "jacfwd": lambda model: jacfwd(model.blocks[1])(X),
    "hessian": lambda model: hessian(lambda x: model.blocks[-1](x).sum())(X),
    "vmap": lambda model: vmap(lambda one: model(one[None]))(tokens(0)),
    "grad of vmap": lambda model: grad(lambda x: vmap(model.blocks[0])(x).sum())(torch.stack([X, 2 * X])),
}


def same(a: Any, b: Any) -> bool:
    leaves = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return all(torch.equal(x.detach(), y.detach()) for x, y in leaves)


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """The first `jvp` of a process imports this, which takes half a second: once, before ranks are forked."""
    importlib.import_module("torch._decomp.decompositions_for_jvp")


@pytest.mark.by_cpu
@on_ranks(2)
def test_where_weights_are_here_transforms_are_those_of_the_plain_model(rank: int) -> list[Any]:
    """Under ZERO3 they work inside `unsharded()`. The transforms do not affect later training."""

    def check(rank: int, plan: Any) -> Any:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        batch = tokens(rank)
        for step in range(2):
            plain = make(Net)
            plain.load_state_dict(handle.full_state_dict())
            with handle.unsharded() if plan is zeroshard.ZERO3 else nullcontext():
                model(batch)  # under ZERO1 and ZERO2 the weights of the last step have arrived
                for name, of_values in OF_VALUES.items():
                    expected = of_values(plain, values_of(plain), batch)
                    assert same(of_values(model, values_of(model), batch), expected), name
                for name, of_inputs in OF_INPUTS.items():
                    assert same(of_inputs(model), of_inputs(plain)), name
            full = handle.full_state_dict()
            halved = {name: value / 2 for name, value in full.items()}
            assert same(functional_call(model, halved, (batch,)), functional_call(plain, halved, (batch,)))
            assert same(functional_call(model, dict(model.named_parameters()), (batch,)), plain(batch))
            assert same(dual(model, X), dual(plain, X))
            optimizer.zero_grad()
            optimizer.backward(loss_of_tokens(model, rank, 0, step))
            optimizer.step()
        assert same_bits(handle.full_state_dict(), train(Job(steps=2), plan, rank).weights)
        return handle.comm_log

    return in_turn(check, plans_of(1))(rank)


@pytest.mark.by_cpu
@on_ranks(2)
def test_between_step_and_forward_transforms_wait_for_the_weights(rank: int) -> None:
    """Under ZERO1, the weights of each unit are still arriving when the transform calls it."""
    model = make(Net)
    handle = zeroshard.shard(model, "zero1", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    for step, (name, of_inputs) in enumerate(OF_INPUTS.items()):
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
        found = of_inputs(model)
        plain = make(Net)
        plain.load_state_dict(handle.full_state_dict())
        assert same(found, of_inputs(plain)), name


@on_ranks(2)
def test_elsewhere_the_error_says_what_to_do_and_the_handle_lives(rank: int) -> None:
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    batch = tokens(rank)
    full = handle.full_state_dict()
    for step in range(2):
        for of_values in OF_VALUES.values():
            with pytest.raises(RuntimeError, match=r"inside a torch.func transform .*unsharded\(\)"):
                of_values(model, full, batch)
        for of_inputs in OF_INPUTS.values():
            with pytest.raises(RuntimeError, match=r"inside a torch.func transform .*unsharded\(\)"):
                of_inputs(model)
        with pytest.raises(RuntimeError, match=r"head\.bias are not here.*unsharded\(\)"):
            functional_call(model, {"head.bias": model.head.bias.detach()}, (batch,))
        with pytest.raises(RuntimeError, match=r"head.bias has come into the model .* not Parameters"):
            functional_call(model, {"head.bias": nn.Parameter(full["head.bias"])}, (batch,))
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
    assert same_bits(handle.full_state_dict(), train(Job(steps=2), zeroshard.ZERO3, rank).weights)


@pytest.mark.by_cpu
@on_ranks(2)
def test_without_gradients_forward_transforms_work_under_every_plan(rank: int) -> None:
    plain = make(Net)
    for plan in PLANS:
        model = make(Net)
        zeroshard.shard(model, plan, units=Block)
        with torch.no_grad():
            for name in ("vmap", "jvp", "jacfwd"):
                assert same(OF_INPUTS[name](model), OF_INPUTS[name](plain)), (plan, name)


@pytest.mark.by_cpu
@on_ranks(2)
def test_a_loss_on_a_forward_derivative(rank: int) -> None:
    """Its backward passes the tangents, beside the outputs. Under ZERO3 it failed, with a message about storages."""

    def loss_of(model: Any, rank: int, *, with_primal: bool) -> Tensor:
        x = torch.stack([X, 2 * X]) + rank
        with forward_ad.dual_level():
            output = forward_ad.make_dual(x, torch.ones_like(x))
            for block in model.blocks:
                output = block(output)
            primal, tangent = forward_ad.unpack_dual(model.head(output))
            return tangent.square().mean() + (primal.mean() if with_primal else 0)

    for plan, with_primal in product(plans_of(1), (True, False)):
        plain, model = make(Net), make(Net)
        sum(loss_of(plain, other, with_primal=with_primal) / 2 for other in range(2)).backward()
        handle = zeroshard.shard(model, plan, units=Block)
        loss_of(model, rank, with_primal=with_primal).backward()
        for name, parameter in plain.named_parameters():
            found, expected = handle.gradient(name), parameter.grad
            assert expected is None or (found is not None and torch.allclose(found, expected, atol=1e-6)), name


class Into(torch.fx.Tracer):
    """Traces into all modules, and keeps a tensor, and modules of Python (as that of torchvision's extractors)."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.kept, self.library = list[Any](), torch.ones(1), torch

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        self.made.append(super().create_proxy(*args, **kwargs))
        return self.made[-1]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Parameter(torch.ones(4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.gate


@on_ranks(2)
def test_a_trace_of_torch_fx(rank: int) -> None:
    """Hooks of units looked for tensors in all that a proxy leads to: a RecursionError in torchvision's extractors."""
    x = torch.ones(2, 4) * (rank + 1)
    model = make(lambda: nn.Sequential(Gated(), Gated()))
    handle = zeroshard.shard(model, "zero3", units=Gated)
    tracer = Into()
    graph = tracer.trace(model)
    assert not trees.tensors_in(tracer.made)
    traced = torch.fx.GraphModule(model, graph)
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"not here, as no module .* inside `with handle.unsharded"):
        traced(x)
    with handle.unsharded():
        assert torch.equal(traced(x), expected)
    model(x).sum().backward()
    of_calls = handle.gradient("0.gate")
    model.zero_grad()
    with handle.unsharded():
        traced(x).sum().backward()
    assert torch.equal(handle.gradient("0.gate"), of_calls)


class Branches(Block):
    """Branches of `torch.cond`, which does not take two weights of one memory: copies, unless `alias`."""

    alias = False

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up.weight, self.down.weight
        if not self.alias:
            up, down = up.clone(), down.clone()
        x = self.norm(x) + self.up.bias.sum()

        def one(x: Tensor) -> Tensor:
            return torch.tanh(x @ up.t()) @ down.t()

        return x + torch.cond(x.sum() > 0, one, lambda x: one(x) * 2, (x,))


class Branching(Net):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks = nn.ModuleList(Branches() for _ in range(2))


@pytest.mark.by_cpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # raised by torch, which looks at all inputs
def test_branches_of_torch_cond(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take copies of the weights, as docs/troubleshooting.md says; without copies torch raises."""
    job = Job(model=Branching)

    def of_rank(rank: int) -> Any:
        found = train(job, zeroshard.ZERO3, rank)
        monkeypatch.setattr(Branches, "alias", True)
        model = make(Branching)
        zeroshard.shard(model, "zero3", units=Block)
        with pytest.raises(RuntimeError, match="Higher order ops do not support aliasing"):
            model(tokens(rank))
        return found

    truth, found = beside_one_process(lambda: train_reference(job, 2), of_rank, 2)
    for expected, mine in zip(truth, found, strict=True):
        assert same_bits(mine.weights, expected.weights) and mine.losses == expected.losses
