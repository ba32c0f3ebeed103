"""Edits that plain torch takes: they work as there, or raise, and never pass in silence."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS
from tests.patience import HANG
from tests.together import on_ranks
from zeroshard.testing import RankError, run_ranks

Edit = Callable[[Any], object]


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(sizes)))


def data(rank: int, batch: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * batch + rank))


def loss_of(model: nn.Module, rank: int, batch: int = 0) -> Tensor:
    return model(data(rank, batch)).square().mean()


# Lists of parameters --------------------------------------------------------------------------------------------------


def move(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop())


def append(optimizer: Any) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})


EDITS: dict[str, tuple[int, Edit]] = {
    "moved": (0, move),
    "removed": (1, lambda optimizer: optimizer.param_groups[1]["params"].pop()),
    "assigned": (0, lambda optimizer: optimizer.param_groups[0].update(params=[])),
    "a group removed": (0, lambda optimizer: optimizer.param_groups.pop(0)),
    "a group appended": (2, append),
    "in another order": (0, lambda optimizer: optimizer.param_groups[0]["params"].reverse()),
}


@on_ranks(2)
def test_edited_lists_of_parameters_raise_before_anything_is_updated(rank: int) -> None:
    for plan in PLANS:
        for number, edit in EDITS.values():
            model = model_of(4, 4, 4)
            handle = zeroshard.shard(model, plan)
            groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 1.0}]
            optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.SGD, lr=0.1)
            optimizer.backward(loss_of(model, rank))
            optimizer.step()
            optimizer.backward(loss_of(model, rank))
            before = handle.full_state_dict()
            edit(optimizer)
            with pytest.raises(zeroshard.Error, match=f"the parameters of param group {number} have been edited"):
                optimizer.step()
            after = handle.full_state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_lists_that_the_optimizer_edits_itself_pass(rank: int) -> None:
    model = model_of(4, 4, 4, 4)
    model[2].requires_grad_(False)
    handle = zeroshard.shard(model, zeroshard.ZERO2)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for turn in range(3):
        optimizer.backward(loss_of(model, rank))
        assert optimizer.step().applied
        model[2].requires_grad_(turn == 0)
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.param_groups[0]["params"]) == 6


# Gradients that are kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discard", ["zero_grad", "by hand", "step"])
@on_ranks(2)
def test_a_gradient_that_was_kept_by_reference_is_not_taken_for_the_new_one(rank: int, discard: str) -> None:
    for plan in PLANS:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(loss_of(model, rank))
        kept = [p.grad for p in model.parameters()]
        if discard == "zero_grad":
            optimizer.zero_grad()
        elif discard == "step":
            optimizer.step()
        else:
            model.zero_grad()
        optimizer.backward(loss_of(model, rank, 1))
        for parameter, grad in zip(model.parameters(), kept, strict=True):
            parameter.grad = grad
        with pytest.raises(zeroshard.Error, match=r"is a tensor that has been a p\.grad before"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, rank, 1))
        assert optimizer.step().applied


@on_ranks(2)
def test_a_copy_of_a_kept_gradient_and_the_same_gradient_assigned_again(rank: int) -> None:
    """The mean of batch 0, which is trained, in place of that of batch 1."""

    def train(rank: int, plan: Any, *, again: bool) -> dict[str, Tensor]:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(loss_of(model, rank))
        if again:
            for parameter in model.parameters():
                parameter.grad = parameter.grad
        else:
            kept = [handle.gradient(name).clone() for name, _ in model.named_parameters()]
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, rank, 1))
            for parameter, grad in zip(model.parameters(), kept, strict=True):
                parameter.grad = grad
        optimizer.step()
        return handle.full_state_dict()

    for plan in PLANS:
        copied, same = (train(rank, plan, again=again) for again in (False, True))
        for name, value in same.items():
            assert torch.allclose(copied[name], value, atol=1e-7), (plan, name)


@on_ranks(2)
def test_gradients_of_two_parameters_can_be_swapped(rank: int) -> None:
    """Under DDP, where `p.grad` has values: the views lie in the bucket into which they are then written."""

    def trained(rank: int, assigned: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, zeroshard.DDP)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(loss_of(model, rank))
        one, other = (layer.weight for layer in model)
        if assigned is not None:
            one.grad, other.grad = assigned(other.grad), assigned(one.grad)
        optimizer.step()
        return handle.full_state_dict()

    hows = (None, lambda grad: grad, Tensor.detach, Tensor.clone)
    plain, same, views, copies = (trained(rank, how) for how in hows)
    assert all(torch.equal(same[name], copies[name]) and torch.equal(views[name], copies[name]) for name in views)
    assert not torch.equal(views["0.weight"], plain["0.weight"])


def by_data(parameter: Any, values: Tensor) -> None:
    parameter.grad.data = values


def by_set(parameter: Any, values: Tensor) -> None:
    parameter.grad.set_(values)


def by_name(parameter: Any, values: Tensor) -> None:
    parameter.grad = values


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_values_given_to_the_data_of_a_gradient_are_those_of_the_step(rank: int, num_ranks: int) -> None:
    """`p.grad.data = values` on some parameters, other values on each rank; a backward and more steps follow."""

    def trained(rank: int, plan: zeroshard.Plan, replace: Callable[[Any, Tensor], None]) -> list[dict[str, Tensor]]:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, momentum=0.9)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            for micro_batch in range(1 + step % 2):
                optimizer.backward(loss_of(model, rank, step + micro_batch))
                replace(model[0].weight, torch.full((4, 4), 1.0 + rank))
                replace(model[1].bias, torch.arange(4.0) * (1 + rank))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            found.append(handle.full_state_dict())
        return found

    for plan in PLANS:
        expected, plain = trained(rank, plan, by_name), trained(rank, plan, lambda *_: None)
        for replace in (by_data, by_set) if plan is zeroshard.DDP else (by_data,):
            for one, other in zip(trained(rank, plan, replace), expected, strict=True):
                assert all(torch.equal(one[name], value) for name, value in other.items()), plan
        assert not torch.equal(plain[0]["0.weight"], expected[0]["0.weight"])


@on_ranks(2)
def test_the_data_of_two_gradients_can_be_swapped(rank: int) -> None:
    def trained(rank: int, how: Callable[[Any, Tensor], None]) -> dict[str, Tensor]:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, zeroshard.DDP)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(loss_of(model, rank))
        one, other = (layer.weight for layer in model)
        both = one.grad.data, other.grad.data
        how(one, both[1])
        how(other, both[0])
        optimizer.step()
        return handle.full_state_dict()

    expected = trained(rank, by_name)
    assert all(torch.equal(trained(rank, by_data)[name], value) for name, value in expected.items())


def test_a_zero_norm_counts_elements() -> None:
    def check(rank: int) -> list[float]:
        found = []
        for plan in PLANS:
            model = model_of(4, 4, 4)
            handle = zeroshard.shard(model, plan)
            loss_of(model, rank).backward()
            found += [float(p.grad.norm(0)) for p in model[1].parameters() if p.grad is not None]
            handle.close()
        return found

    assert run_ranks(check, 2) == [[16.0, 4.0] * len(PLANS)] * 2


@on_ranks(2)
def test_norms_of_a_gradient_have_the_shape_and_dtype_of_torchs(rank: int) -> None:
    """`keepdim` and `dtype` had no effect under ZeRO, in silence, and the -inf-norm was 1."""

    def norms(grad: Tensor) -> list[Tensor]:
        return [
            grad.norm(3, keepdim=True),
            grad.norm(dtype=torch.float64),
            torch.linalg.vector_norm(grad, 1, (0, 1), True, dtype=torch.float64),
            grad.norm(-1),
            *torch._foreach_norm([grad], 2, torch.float64),
            *torch._foreach_norm([grad]),
        ]

    for plan in PLANS:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, plan)
        loss_of(model, rank).backward()
        weight = model[0].weight
        assert weight.grad is not None
        for found, expected in zip(norms(weight.grad), norms(handle.gradient("0.weight")), strict=True):
            assert torch.allclose(found, expected) and found.shape == expected.shape and found.dtype == expected.dtype
        if plan is not zeroshard.DDP:
            with pytest.raises(zeroshard.Error, match="norm of type -inf"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.01, float("-inf"))


@on_ranks(2)
def test_a_gradient_that_leaves_torch_is_told_of_the_full_values(rank: int) -> None:
    """For a histogram or a file. torch's own messages are about subclasses, and about pickling weak references."""
    model = model_of(4, 4, 4)
    zeroshard.shard(model, "zero1")
    loss_of(model, rank).backward()
    weight: Any = model[0].weight
    grad = weight.grad
    for leave in (grad.numpy, grad.tolist, lambda: np.asarray(grad), lambda: torch.save(grad, io.BytesIO())):
        with pytest.raises(zeroshard.Error, match=r"handle\.gradient\('0\.weight'\)"):
            leave()


@on_ranks(2)
def test_gradients_of_unused_parameters_can_be_asked_for_as_zeros(rank: int) -> None:
    """torch replaces those that are missing by tensors like its inputs, and absent parameters were given as edges."""
    for plan in PLANS:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for _ in range(2):  # the second time behind a step
            loss = model[0](data(rank)).sum()
            found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
            assert found[1].tolist() == [3.0] * 4 and not found[2].any() and found[2].shape == (4, 4)
            optimizer.zero_grad()
            loss_of(model, rank).backward()
            optimizer.step()


# Weights after a step -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_writes_after_a_step_through_a_view_or_a_storage(rank: int) -> None:
    """`nn.init.orthogonal_` writes to `p.view_as(q)`: it raised that the values are not here, where they are to arrive.
    After `p.set_(values)` the next forward ended in a recursion."""

    def after_a_step(plan: Any) -> tuple[nn.Sequential, Any]:
        model = model_of(4, 4, 4)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(loss_of(model, rank))
        optimizer.step()
        torch.manual_seed(1)
        return model, handle

    expected = nn.init.orthogonal_(torch.empty(4, 4), generator=torch.Generator().manual_seed(1))
    for plan in PLANS[:3]:
        model, handle = after_a_step(plan)
        nn.init.orthogonal_(model[0].weight)
        loss_of(model, rank)
        assert torch.equal(handle.full_state_dict()["0.weight"], expected), plan
    for plan in PLANS:
        model, _ = after_a_step(plan)
        with torch.no_grad():
            model[0].weight.set_(torch.ones(4, 4))
        with pytest.raises(zeroshard.Error, match=r"the data of parameter 0\.weight have been replaced"):
            model(data(rank))


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@on_ranks(2)
def test_a_hook_on_the_step_that_writes_to_absent_weights_is_told_to_gather_them(rank: int, register: str) -> None:
    """It was told to replace its "plain ShardedOptimizer"."""
    model = model_of(4, 4, 4)
    handle = zeroshard.shard(model, "zero3")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    getattr(optimizer, register)(lambda *_: model[0].weight.data.clamp_(-1, 1) and None)
    optimizer.backward(loss_of(model, rank))
    with pytest.raises(zeroshard.Error, match=r"values of parameter 0\.weight are not here"):
        optimizer.step()


# A backward that raises -----------------------------------------------------------------------------------------------


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("a bad micro-batch")


class Last(nn.Module):
    raises = False

    def forward(self, x: Tensor) -> Tensor:
        return _Raises.apply(x) if self.raises else x  # type: ignore[no-any-return]


@pytest.mark.parametrize("cleared", [None, "model", "optimizer"])
@on_ranks(2)
def test_a_backward_that_raises_does_not_drop_earlier_micro_batches_in_silence(rank: int, cleared: str | None) -> None:
    for plan in PLANS:
        model = model_of(4, 4, 4).append(last := Last())
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        with handle.no_sync():
            optimizer.backward(loss_of(model, rank, 0))
        last.raises = True
        with pytest.raises(ArithmeticError):
            optimizer.backward(loss_of(model, rank, 1))
        last.raises = False
        if cleared is not None:
            {"model": model, "optimizer": optimizer}[cleared].zero_grad()
        else:
            with pytest.raises(zeroshard.Error, match="a backward has raised, and with its gradients"):
                model(data(rank, 2))
        optimizer.backward(loss_of(model, rank, 2))
        assert optimizer.step().applied


@on_ranks(2)
def test_a_first_backward_that_raises_needs_no_call(rank: int) -> None:
    model = model_of(4, 4, 4).append(last := Last())
    handle = zeroshard.shard(model, zeroshard.ZERO3)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    last.raises = True
    with pytest.raises(ArithmeticError):
        optimizer.backward(loss_of(model, rank))
    last.raises = False
    optimizer.backward(loss_of(model, rank, 2))
    assert optimizer.step().applied


class Gated(nn.Module):
    """A layer inside, which is a unit of its own, and a gate that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.is_open, self.raises = True, False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ArithmeticError
        y = torch.tanh(self.layer(x))
        return y * self.gate if self.is_open else y


def gated(rank: int, plan: Any, before: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Gated() for _ in range(4)])
    handle = zeroshard.shard(model, plan, units=(Gated, nn.Linear))
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    last: Any = model[-1]
    for step in range(3):
        last.is_open = True
        if before == "evaluated":
            model(data(rank, step + 10))  # without `no_grad`
        elif before == "raised":
            last.raises = True
            with pytest.raises(ArithmeticError):
                model(data(rank, step + 10))
            last.raises = False
        last.is_open = rank == step % 2
        loss_of(model, rank, step).backward()
        optimizer.step()
    return list(handle.full_state_dict().values())


def test_a_forward_without_a_backward_changes_nothing_where_ranks_use_other_parameters() -> None:
    """A unit without a gradient on one rank was expected to come once more, in the graph that is gone, and reduced
    later than on the others."""

    def check(rank: int) -> None:
        expected = gated(rank, "ddp", "nothing")
        for plan in ("zero2", "zero3"):
            for before in ("nothing", "evaluated", "raised"):
                found = gated(rank, plan, before)
                assert all(map(torch.equal, found, expected)), (plan, before)

    run_ranks(check, 2, collective_timeout=HANG)


def trained_beside(plan: Any, rank: int, before_step: Callable[[nn.Sequential, int], None]) -> list[Tensor]:
    """The weights after three steps. `before_step` is called with the model and the number of the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for step in range(3):
        before_step(model, step)
        loss_of(model, rank, step).backward()
        optimizer.step()
    return list(handle.full_state_dict().values())


def test_a_loss_that_one_rank_alone_has_kept() -> None:
    """The others had dropped theirs, and reduced each unit at its first visit in the next backward. The rank with the
    loss reduced it behind the last one, and they waited for each other."""

    def train(rank: int, plan: Any, keeps: int) -> list[Tensor]:
        log = []

        def keep(model: nn.Sequential, step: int) -> None:
            loss = loss_of(model, rank, step + 10)
            if rank == keeps:
                log.append(loss)  # without `detach`

        return trained_beside(plan, rank, keep)

    def check(rank: int) -> None:
        expected = train(rank, "ddp", -1)
        for keeps in range(3):
            assert all(map(torch.equal, train(rank, "zero3", keeps), expected)), keeps

    run_ranks(check, 2, collective_timeout=HANG)


def test_a_forward_that_raised_on_one_rank_alone() -> None:
    """In its last layer. All ranks give that batch up, and the others still have its graph."""

    def stop(*_: Any) -> None:
        raise ArithmeticError

    def train(rank: int, plan: Any, raises: int) -> list[Tensor]:
        kept = []

        def raise_or_keep(model: nn.Sequential, step: int) -> None:
            hook = model[-1].register_forward_hook(stop) if rank == raises else None
            with pytest.raises(ArithmeticError) if hook else nullcontext():
                kept.append(loss_of(model, rank, step + 10))
            if hook:
                hook.remove()

        return trained_beside(plan, rank, raise_or_keep)

    def check(rank: int) -> None:
        expected = train(rank, "ddp", -1)
        for raises in range(2):
            assert all(map(torch.equal, train(rank, "zero3", raises), expected)), raises

    run_ranks(check, 2, collective_timeout=HANG)


# Memory that two tensors share ----------------------------------------------------------------------------------------


class Shares(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        base = torch.randn(32)
        if how == "the same":
            self.b.weight.data = self.a.weight.data
        elif how == "transposed":
            self.b.weight = nn.Parameter(self.a.weight.data.t())
        elif how == "in part":
            self.a.weight, self.b.weight = (nn.Parameter(base[i : i + 16].view(4, 4)) for i in (0, 15))
        elif how == "a buffer":
            self.register_buffer("view", self.a.weight.data[1:3])
        elif how == "side by side":
            self.a.weight, self.b.weight = (nn.Parameter(base[i : i + 16].view(4, 4)) for i in (0, 16))
        elif how == "in turn":
            self.a.weight, self.b.weight = (nn.Parameter(base.view(16, 2)[:, i].view(4, 4)) for i in (0, 1))
        elif how == "tied":
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["the same", "transposed", "in part", "a buffer"])
def test_parameters_with_common_memory_are_refused(how: str) -> None:
    def check(rank: int) -> None:
        zeroshard.shard(Shares(how), "zero2")

    with pytest.raises(RankError, match=r"a\.weight .*have the same memory, and would be trained apart"):
        run_ranks(check, 2)


@pytest.mark.parametrize("how", ["tensor", "list", "column", "graph"])
@on_ranks(2)
def test_views_of_parameters_in_attributes_are_refused(rank: int, how: str) -> None:
    """They kept the values of before shard, in silence."""
    model = Shares("tied")
    weight, inner = model.a.weight, model.b
    view = {"tensor": weight.data, "list": [3, weight.detach()], "column": weight.data[:, 1], "graph": weight.t()}
    inner.kept = view[how]
    with pytest.raises(ValueError, match=r"the attribute b\.kept is a view of parameter a\.weight: "):
        zeroshard.shard(model, "zero1")
    inner.kept = [weight, weight.detach().clone()]
    zeroshard.shard(model, "zero1").close()
    normed = nn.utils.spectral_norm(nn.Linear(4, 4))
    zeroshard.shard(normed, "zero1")
    assert normed(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("how", ["side by side", "in turn", "tied"])
@on_ranks(2)
def test_parameters_with_memory_of_their_own_in_one_storage_are_taken(rank: int, how: str) -> None:
    zeroshard.shard(Shares(how), "zero2").close()
