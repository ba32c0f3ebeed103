"""Unusual parameters (shared, frozen, without a gradient, sparse, complex, late) train with the same bits as one
process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import DEVICE, PLANS, VOCAB, WIDTH, Block, Job, Net, loss_of_tokens, make, same_bits, with_plans
from tests.together import Together, on_ranks
from zeroshard.testing import run_ranks


class TiedInside(Net):
    """Two layers of a block share a matrix."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(*self.up.weight.shape[::-1])
            self.again.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.down(torch.sigmoid(self.again(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))


class TiedAcross(Net):
    """Units share a matrix, and embedding and head share another; the vocabulary does not divide by the number of
    ranks."""

    def __init__(self) -> None:
        super().__init__(tied=True, blocks=3)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].norm = self.blocks[0].norm


class Adapted(Net):
    """All parameters are frozen except two narrow matrices at each layer."""

    class Adapter(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer
            self.down = nn.Linear(layer.in_features, 2, bias=False)
            self.up = nn.Linear(2, layer.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.up(self.down(x))

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = self.Adapter(block.up)


class Unused(Net):
    """Has an unused unit, and unused parameters in another unit and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())
        self.blocks[1].spare = nn.Parameter(torch.randn(7, 3))
        self.spare = nn.Parameter(torch.randn(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks[:3]:
            x = block(x)
        return self.head(self.norm(x))


class SparseGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Single(Net):
    """Units with one parameter each, and one without any."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), nn.GELU(), Scale(), Scale()])


JOBS: dict[str, Job] = {
    "tied inside a unit": Job(model=TiedInside),
    "tied inside a unit, bf16": Job(model=TiedInside, precision="bf16"),
    "tied across units": Job(model=TiedAcross),
    "tied across units, units by size": Job(model=TiedAcross, units=4000),
    "tied across units, bf16-remainder": Job(model=TiedAcross, precision="bf16-remainder"),
    "adapters": Job(model=Adapted),
    "adapters, bf16": Job(model=Adapted, precision="bf16"),
    "unused on all ranks": Job(model=Unused),
    "sparse gradients": Job(model=SparseGradient),
    "sparse gradients, bf16": Job(model=SparseGradient, precision="bf16"),
    "units of one parameter": Job(model=Single, units=(Scale, nn.GELU)),
    "the whole model is one unit": Job(units=lambda module: isinstance(module, Net)),
    "units by functools.partial": Job(units=partial(lambda kind, module: isinstance(module, kind), Block)),
}


UNUSUAL = Together(
    JOBS,
    on_three=["tied across units", "tied across units, units by size", "unused on all ranks", "units of one parameter"],
)


@pytest.mark.by_cpu
@pytest.mark.parametrize("name", JOBS)
def test_unusual_parameters_train_as_in_one_process(name: str) -> None:
    UNUSUAL.expect_reference(name)


@on_ranks(2)
def test_what_nothing_uses_and_what_is_frozen_stays_as_it_was(rank: int) -> None:
    """The comparison with one process would also pass if both runs changed unused and frozen parameters."""
    cases = (
        (Unused, lambda name: "spare" not in name and "blocks.3" not in name),
        (Adapted, lambda name: "up.up" in name or "up.down" in name),
    )
    for (build, moving), plan in with_plans(cases):
        model = make(build)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
        before = handle.full_state_dict()
        for step in range(2):
            optimizer.backward(loss_of_tokens(model, rank, 0, step))
            optimizer.step()
        after = handle.full_state_dict()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if moving(name)}, (plan, build)


def test_non_contiguous_parameters() -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        large = torch.randn(64, 64)
        for plan in PLANS:
            model = nn.Linear(32, 32)
            model.weight = nn.Parameter(large[::2, 1::2].t())
            model.bias = nn.Parameter(large[3, 5:37])
            assert not model.weight.is_contiguous()
            handle = zeroshard.shard(model, plan)
            assert torch.equal(handle.full_state_dict()["weight"], large[::2, 1::2].t())
            assert torch.equal(model(torch.eye(32)), torch.eye(32) @ large[::2, 1::2] + large[3, 5:37])
            handle.close()
            assert torch.equal(model.weight, large[::2, 1::2].t())

    run_ranks(run, 3)


@pytest.mark.by_cpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64))), "view_as_real"),
        (lambda m: m.register_parameter("table", nn.Parameter(torch.eye(3).to_sparse())), "only dense parameters"),
    ],
)
def test_what_cannot_be_sharded_is_refused(change: Any, message: str) -> None:
    def check(rank: int) -> str:
        model = make(Net)
        change(model)
        before = {name: p.clone() for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=message) as error:
            zeroshard.shard(model, "zero3", units=Block)
        assert same_bits({n: p.to_dense() if p.is_sparse else torch.view_as_real(p) if p.is_complex() else p.data
                          for n, p in model.named_parameters()},
                         {n: p.to_dense() if p.is_sparse else torch.view_as_real(p) if p.is_complex() else p
                          for n, p in before.items()})  # fmt: skip
        return str(error.value)

    assert len(set(run_ranks(check, 2))) == 1


class Listing(Net):
    """Has a parameter in a plain list, and lists it in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.unregistered = [nn.Parameter(torch.ones(3))]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from super().parameters(recurse)
        yield from self.unregistered


class ListingNames(Net):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(*args, **kwargs)
        yield "more", nn.Parameter(torch.ones(3))


@on_ranks(1)
def test_parameters_that_no_module_has_are_refused(rank: int) -> None:
    """A plain optimizer over `model.parameters()` trains them; here nobody did, in silence, or it was a KeyError."""
    for model in (Listing, ListingNames):
        with pytest.raises(ValueError, match=rf"{model.__name__}.parameters\(\) lists a parameter of shape \(3,\)"):
            zeroshard.shard(make(model), "zero2")


@on_ranks(2)
def test_a_parameter_that_comes_after_shard_is_refused_by_the_next_forward(rank: int) -> None:
    for plan in PLANS:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model.blocks[1].late = nn.Parameter(torch.ones(3))
        with pytest.raises(RuntimeError, match=r"blocks\.1\.late has come into the model after shard"):
            loss_of_tokens(model, rank, 0, 0)
        with torch.no_grad():
            loss_of_tokens(model, rank, 0, 0)  # evaluation needs no gradient
        with pytest.raises(RuntimeError, match=r"blocks\.1\.late has come into the model after shard"):
            zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)  # the model may be called by its parts alone
        with pytest.raises(RuntimeError, match=r"blocks\.1\.late has come into the model after shard"):
            optimizer.step()
        del model.blocks[1].late
        head, model.head = model.head, nn.Linear(WIDTH, VOCAB, device=DEVICE)  # as resize_token_embeddings does
        for grad in (True, False):  # under no_grad it once computed with weights that nobody trains
            with pytest.raises(RuntimeError, match=r"head\.\w+ has come"), torch.set_grad_enabled(grad):
                loss_of_tokens(model, rank, 0, 0)
        for call in (zeroshard.save, zeroshard.load):
            with pytest.raises(RuntimeError, match=r"head\.\w+ has come"):
                call(str(rank), handle, optimizer, step=1)
        model.head = head
        with torch.no_grad():
            given = {"head.bias": nn.Parameter(torch.zeros(VOCAB, device=DEVICE))}
            torch.func.functional_call(model, given, (torch.zeros(1, 2, dtype=torch.int64, device=DEVICE),))
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        assert optimizer.step().applied


@on_ranks(2)
def test_parameters_made_from_views_of_one_tensor(rank: int) -> None:
    """They share a version counter. Under ZERO3, in units of their own, a mark on one was taken for a write to the
    others: "2.weight has been written to in a forward"."""
    results = []
    for plan in PLANS:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(3)))
        for layer, part in zip(model, torch.randn(3 * WIDTH, WIDTH, device=DEVICE).chunk(3), strict=True):
            layer.weight = nn.Parameter(part)
        model[1].weight.requires_grad_(False)
        known = [*model.parameters()]
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        assert all(one is other for one, other in zip(known, model.parameters(), strict=True))
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, foreach=False)
        for step in range(2):
            generator = torch.Generator().manual_seed(2 * step + rank)
            model(torch.randn(3, WIDTH, generator=generator).to(DEVICE)).square().mean().backward()
            optimizer.step()
        results.append(handle.full_state_dict())
    assert all(same_bits(result, results[0]) for result in results)
