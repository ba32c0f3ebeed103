"""One backward through two models, or three, where a rank leaves out a unit, or all of a model.

That rank comes to the unit later than its peers: at another visit, or at the end of the backward. It was then at the
other model and waited there for peers that waited for it here, until the timeout. Without shared memory ZeRO-1 and 2
once took the gradients of one model for those of the other, in silence.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import travelling
from tests.patience import HANG
from zeroshard.runtime import one_backward
from zeroshard.testing import RankError, run_ranks

TRANSPORTS = ("shared", "pairwise", "native")
PLANS = ("ddp", "zero1", "zero2", "zero3")


class Layer(nn.Linear):
    def forward(self, x: Tensor, used: bool | None = True) -> Tensor:
        return x if used is None else torch.tanh(super().forward(x) if used else x * 1)


class Layers(nn.Module):
    """`between`: called in the middle. `scaled`: whether the parameter of the root is used. `passed`: layers from this
    number on return what they are given. `again`: the number of a layer in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.ones(6)), nn.ModuleList(Layer(6, 6) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        *left_out: int | None,
        between: Any = None,
        scaled: bool = True,
        passed: int = 4,
        again: int | None = None,
    ) -> Tensor:
        for number, layer in enumerate(self.layers):
            used = number not in left_out if number < passed else None
            x = x if between is None or number != 2 else between(x)
            x = checkpoint(layer, x, used, use_reentrant=True) if number == again else layer(x, used)
        return x * self.scale if scaled else x


def leaf(x: Tensor) -> Tensor:
    """With a gradient, which a reentrant checkpoint wants of an input."""
    return x.clone().requires_grad_()


def none_of(model: Any, x: Tensor, out: int | None, **options: Any) -> Tensor:
    """The last rank uses no parameter of this model."""
    return model(x, *(() if out is None else range(4)), scaled=out is None, **options)


KEPT: list[Tensor] = []


def of_several(a: Any, b: Any, x: Tensor, out: int | None) -> Tensor:
    """The loss uses two of three forwards, and the third could still come."""
    first, kept, last = (a(x, left_out, between=b) for left_out in (None, None, out))
    KEPT[:] = [kept]
    return first + last


NEWER: dict[str, Any] = {
    "behind, roots unused": lambda a, b, c, x, out: b(a(x, out, scaled=False), scaled=False),
    "behind, a root used on some ranks": lambda a, b, c, x, out: b(a(x, out), scaled=out is None),
    "inside, of several forwards": lambda a, b, c, x, out: of_several(a, b, x, out),
}
WAYS = {
    "behind, left out of the last": lambda a, b, c, x, out: b(a(x), out),
    "behind, left out of the first": lambda a, b, c, x, out: b(a(x, out)),
    "side by side": lambda a, b, c, x, out: b(x, out) + a(x),
    "side by side, left out of the newest": lambda a, b, c, x, out: b(x) + a(x, out),
    "inside, left out around": lambda a, b, c, x, out: a(x, out, between=b),
    "inside, left out of all": lambda a, b, c, x, out: b(b(x, out, 1, 3, between=lambda y: a(y, out)), out, 1, 3),
    "inside, left out inside": lambda a, b, c, x, out: a(x, between=lambda y: b(y, out)),
    "twice": lambda a, b, c, x, out: a(b(a(x), out)),
    "three": lambda a, b, c, x, out: c(b(a(x), out)),
    "retained, left out of both": lambda a, b, c, x, out: a(b(a(x, out)), out),
    "three, inside": lambda a, b, c, x, out: a(b(x), between=lambda y: c(y, out)),
    **NEWER,
}


def passed_on(model: Any, out: int | None, begin: int) -> Tensor:
    """The last rank gets what one model has made as the output of another one. The loss uses the first of two forwards,
    and the second could still come."""
    made, kept = (model(scaled=False, passed=begin if one is not None else 4) for one in (out, None))
    KEPT[:] = [kept]
    return made


PASSED: dict[str, Any] = {
    "inside, passed on around": lambda a, b, c, x, out: passed_on(partial(a, x, between=b), out, 2),
    "inside, passed on": lambda a, b, c, x, out: passed_on(lambda **how: a(x, between=partial(b, **how)), out, 0),
    "behind, passed on": lambda a, b, c, x, out: passed_on(lambda **how: b(a(x), **how), out, 0),
}
AGAIN: dict[str, Any] = {
    "behind a checkpoint": lambda a, b, c, x, out: b(a(leaf(x), again=3, scaled=False), out),
    "between checkpoints": lambda a, b, c, x, out: a(leaf(x), again=1, between=lambda y: b(y, out, again=2)),
}
FEATURE: dict[str, Any] = {
    "a feature": lambda a, b, c, x, out: b(a(x), 0) + b.layers[0](a(x), True if out is None else None),
}
UNUSED: dict[str, Any] = {
    "one": lambda a, b, c, x, out: none_of(a, leaf(x), out),
    "the first": lambda a, b, c, x, out: b(none_of(a, leaf(x), out)),
    "the last": lambda a, b, c, x, out: none_of(b, a(x), out),
    "inside": lambda a, b, c, x, out: a(x, between=lambda y: none_of(b, y, out)),
    "around": lambda a, b, c, x, out: none_of(a, leaf(x), out, between=b),
    "retained, of three": lambda a, b, c, x, out: c(none_of(b, none_of(a, leaf(x), out), out)),
}


def batches(rank: int, number: int = 4) -> Tensor:
    """A step is after every other one."""
    return torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(rank))[:number]


def models_of(way: str) -> list[Layers]:
    torch.manual_seed(0)
    return [Layers() for _ in range(3 if "three" in way else 1 if way == "one" else 2)]


def backward(way: str, models: Any, x: Tensor, left_out: int | None, factor: float = 1.0) -> None:
    """Of a loss; once more, if the graph is retained."""
    loss = (WAYS | UNUSED | PASSED | AGAIN | FEATURE)[way](
        *models, *[None] * (3 - len(models)), x, left_out
    ).square().mean() * factor
    loss.backward(retain_graph="retained" in way)
    if "retained" in way:
        loss.backward()


def trained(rank: int, ranks: int, plan: str, way: str, left_out: int, *, waits: bool = True) -> list[Tensor]:
    """The weights of all models. The last rank leaves out a layer. `waits`: the first model keeps the gradients of
    every other backward; else a single step, by default."""
    models = models_of(way)
    handles = [zeroshard.shard(model, plan, units=Layer) for model in models]
    optimizers = [zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1) for handle in handles]
    for number, x in enumerate(batches(rank, number_of_batches(waits))):
        handles[0].set_requires_gradient_sync(number % 2 == 1 or not waits)
        backward(way, models, x, left_out if rank == ranks - 1 else None)
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [weight for handle in handles for weight in handle.full_state_dict().values()]


def number_of_batches(waits: bool) -> int:
    return 4 if waits or EVERYTHING else 2


def plain(ranks: int, way: str, left_out: int, waits: bool) -> list[Tensor]:
    models = models_of(way)
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for number in range(number_of_batches(waits)):
        for rank in range(ranks):
            out = left_out if rank == ranks - 1 else None
            backward(way, models, batches(rank)[number], out, 1 / ranks)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [weight for model in models for weight in model.state_dict().values()]


def is_tried(ranks: int, case: int, plan: int, by: int) -> bool:
    """ZERO3, which waits inside of a backward, by one transport; so does ZERO2, for half of the ways on two ranks and
    for the others on three. DDP and ZERO1 have some of the ways."""
    chosen = plan == 3 or (plan == 2 and case // 4 % 2 == 3 - ranks)
    return EVERYTHING or (by == (case // 2 + plan) % 3 and (chosen or plan == case // 4 % 3 < 2))


def check(rank: int, ranks: int) -> None:
    """A quarter of the cases on two ranks, another one on three, under some of the plans. (`make test-everything`: all
    of them.)"""
    for case, (way, left_out) in enumerate(product(WAYS, range(4))):
        if not EVERYTHING and (case + case // 4) % 4 != {2: 1, 3: 0}[ranks]:
            continue
        expected = plain(ranks, way, left_out, case % 3 == 0)
        before = None
        for number, (plan, by) in enumerate(product(PLANS, TRANSPORTS)):
            if not is_tried(ranks, case, *divmod(number, 3)):
                continue
            with travelling(by):
                found = trained(rank, ranks, plan, way, left_out, waits=case % 3 == 0)
            for one, right in zip(found, expected, strict=True):
                torch.testing.assert_close(one, right, msg=lambda m, at=(way, left_out, plan, by): f"{at}: {m}")
            if by != "native":  # gloo sums in another order
                assert before is None or all(map(torch.equal, found, before)), (way, left_out, plan, by)
                before = found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_leaves_out_a_unit(ranks: int) -> None:
    run_ranks(check, ranks, ranks, collective_timeout=HANG)


def check_newer(rank: int) -> None:
    """Over native backends each way twice, by the other transports once."""
    for case, (way, left_out, by) in enumerate(product(NEWER, (0, 3), TRANSPORTS)):
        if not EVERYTHING and case % 6 in (1, 3):  # each of these once
            continue
        expected = plain(2, way, left_out, False)
        with travelling(by):
            found = trained(rank, 2, "zero3", way, left_out, waits=False)
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right, msg=lambda m, at=(way, left_out, by): f"{at}: {m}")


def test_what_is_left_of_one_model_comes_between_what_is_left_of_others() -> None:
    """Over native backends two models took each other's gradients: the weights were wrong, in silence."""
    run_ranks(check_newer, 2, collective_timeout=HANG)


def check_passed_on(rank: int) -> None:
    for case, (way, plan) in enumerate(product(PASSED, PLANS)):
        expected = plain(2, way, 0, False)
        for by in TRANSPORTS if EVERYTHING else dict.fromkeys((TRANSPORTS[(case + case // 4) % 3], "native")):
            with travelling(by):
                found = trained(rank, 2, plan, way, 0, waits=False)
            for one, right in zip(found, expected, strict=True):
                torch.testing.assert_close(one, right, msg=lambda m, at=(way, plan, by): f"{at}: {m}")


def test_a_model_returns_what_another_one_has_made() -> None:
    """On one rank, as it leaves out the layers behind it. There it came to the models in another order than its peers:
    under ZeRO-1 and 2 over native backends, they took the gradients of one model for those of the other, in silence."""
    run_ranks(check_passed_on, 2, collective_timeout=HANG)


def check_again(rank: int) -> None:
    for case, (way, left_out) in enumerate(product(AGAIN, (0, 1))):
        expected = plain(2, way, left_out, False)
        for plan, by in product(("zero2", "zero3"), TRANSPORTS):
            if plan == "zero3" or EVERYTHING or case % 3 == TRANSPORTS.index(by):
                with travelling(by):
                    found = trained(rank, 2, plan, way, left_out, waits=False)
                for one, right in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, right, msg=lambda m, at=(way, left_out, plan, by): f"{at}: {m}")


def test_a_checkpoint_that_recomputes_comes_to_newer_models_first() -> None:
    """A rank that left out what came behind the checkpoint, in another model, recomputed it first: under ZeRO-3 the
    ranks waited for each other."""
    run_ranks(check_again, 2, collective_timeout=HANG)


def of_a_feature(rank: int) -> None:
    for plan in ("zero1", "zero2"):
        with travelling("native"), pytest.raises(RuntimeError, match="came to several models of one backward"):
            trained(rank, 2, plan, "a feature", 0, waits=False)


@pytest.mark.by_gloo  # with results that come late, ranks wait for each other
def test_a_feature_that_is_an_input_on_one_rank_raises_over_native_backends() -> None:
    """That rank comes to the models in another order. The ranks added up gradients of two models, in silence."""
    run_ranks(of_a_feature, 2, collective_timeout=HANG)


def check_unused(rank: int) -> None:
    for case, (way, plan) in enumerate(product(UNUSED, PLANS)):
        if not EVERYTHING and case % 8 in (1, 4):  # DDP and ZeRO-1 in turn
            continue
        expected = plain(2, way, 0, case % 2 == 0)
        for by in TRANSPORTS if EVERYTHING else (TRANSPORTS[(case + case // 4) % 3],):
            with travelling(by):
                found = trained(rank, 2, plan, way, 0, waits=case % 2 == 0)
            for one, right in zip(found, expected, strict=True):
                torch.testing.assert_close(one, right, msg=lambda m, at=(way, plan, by): f"{at}: {m}")


def test_a_rank_uses_no_parameter_of_a_model() -> None:
    """Gradients of its peers went through the model to another model, or to an input. This rank took its backward for
    one that accumulates nothing, and its peers waited for it in their reductions."""
    run_ranks(check_unused, 2, collective_timeout=HANG)


def check_kept(rank: int) -> None:
    for plan, is_leaf in product(("zero2", "zero3"), (True, False)):
        model = models_of("one")[0]
        handle = zeroshard.shard(model, plan, units=Layer)
        leaf = batches(rank)[0].requires_grad_()
        x = leaf if is_leaf else leaf * 2
        (grad,) = torch.autograd.grad(none_of(model, x, 0 if rank else None).sum(), x)
        assert bool(grad.all())
        with pytest.raises(RuntimeError, match="is empty; call backward"):
            handle.gradient("scale")
        none_of(model, leaf * 2, 0 if rank else None).sum().backward()
        assert bool(handle.gradient("scale").any())
        handle.close()


def test_a_gradient_of_an_input_alone_reduces_nothing() -> None:
    """Also where the graph of one rank has no parameter that could tell."""
    run_ranks(check_kept, 2, collective_timeout=HANG)


def check_given(rank: int) -> None:
    for plan, is_alone, in_scope in product(PLANS, (False, True), (False, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        before = handle.full_state_dict()
        given = {name: value.clone().requires_grad_() for name, value in before.items()}
        with handle.unsharded() if in_scope else nullcontext():
            if not is_alone or rank == 0:
                torch.func.functional_call(model, given, torch.randn(2, 6)).sum().backward()
                assert all(value.grad is not None for value in given.values())
        assert all(parameter.grad is None for parameter in model.parameters()), (plan, is_alone, in_scope)
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in handle.full_state_dict().items())
        handle.close()


def test_a_gradient_of_tensors_in_place_of_parameters_reduces_nothing() -> None:
    """`functional_call`, also by one rank alone."""
    run_ranks(check_given, 2, collective_timeout=HANG)


def control(rank: int, plan: str, by: str, way: str, left_out: int) -> None:
    with travelling(by):
        trained(rank, 2, plan, way, left_out, waits=False)


@pytest.mark.by_gloo
@pytest.mark.parametrize(
    ("plan", "by", "way", "left_out", "without"),
    [
        ("zero2", "shared", "behind, left out of the last", 3, "begin"),
        ("zero2", "pairwise", "behind, left out of the last", 3, "begin"),
        ("zero3", "shared", "side by side", 0, "visit_rest"),
        ("zero3", "native", "behind, left out of the last", 0, "come_to"),
        ("zero3", "native", "inside, left out of all", 0, "visit_rest"),
    ],
)
def test_ranks_wait_for_each_other_without_one_order(
    plan: str, by: str, way: str, left_out: int, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: Any = {
        "begin": lambda schedule, task: None,
        "come_to": lambda schedule, number: None,
        "visit_rest": lambda schedule, task: schedule.walk.visit_from(0),
    }
    monkeypatch.setattr(one_backward, without, replaced[without])
    with pytest.raises(RankError):
        run_ranks(control, 2, plan, by, way, left_out, collective_timeout=4.0)
