"""What `p.grad` contains after backward, and how changes of it take effect.

After backward `p.grad` once was None under every plan. So `model.zero_grad()` did not discard the gradients of a bad
batch; `torch.nn.utils.clip_grad_norm_` returned 0 and clipped nothing (weights moved by 4000 instead of 0.89); and
`p.grad.mul_()`, `p.grad = None` and gradients set by hand were ignored, all without an error.

Each loop below is written as for plain torch. It runs in one process on the mean of all ranks' losses, and on ranks
under two plans, each rank with its own losses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.grids import EVERYTHING, grid
from tests.kit import DEVICE, Gated, largest_difference, loss_of_tokens, make, same_bits, with_plans
from tests.together import in_turn, on_ranks
from zeroshard.comm.comm_log import CommLog
from zeroshard.gradients import origins
from zeroshard.gradients.visible import VisibleGradients
from zeroshard.placement import Plan
from zeroshard.testing import expect_same_logs, run_ranks

PLANS = ("ddp", "zero1", "zero2", "zero3")
NUM_RANKS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def under(plans: Sequence[str], check: Callable[[int, str], Any]) -> Callable[[int], list[Any]]:
    """A function for `run_ranks` that calls `check(rank, plan)` for one plan after the other on the same ranks."""

    def run(rank: int) -> list[Any]:
        results = []
        for plan in plans:
            try:
                results.append(check(rank, plan))
            except Exception as error:
                error.add_note(f"under {plan}")
                raise
        return results

    return run


class Run:
    """A model and its optimizer, plain (all ranks in one process) or sharded, with the same interface for the loops."""

    def __init__(self, rank: int | None, plan: str | Plan, **options: Any) -> None:
        self.model = build()
        self.rank = rank
        self.handle = None if rank is None else zeroshard.shard(self.model, plan, units=nn.Linear)
        if self.handle is None:
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        else:
            self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.SGD, lr=0.1, momentum=0.9, **options)

    def loss(self, step: int) -> Tensor:
        if self.rank is not None:
            return self.model(batch(self.rank, step)).square().mean()
        return torch.stack([self.model(batch(rank, step)).square().mean() for rank in range(NUM_RANKS)]).mean()

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict() if self.handle is None else self.handle.full_state_dict()


def clip_the_norm(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        (1000 * run.loss(step)).backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()


def clip_groups_and_values(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        (1000 * run.loss(step)).backward()
        torch.nn.utils.clip_grad_norm_(run.model[0].parameters(), 0.3, norm_type=torch.inf)
        torch.nn.utils.clip_grad_norm_(run.model[2].parameters(), 0.2, norm_type=1.0, foreach=False)
        torch.nn.utils.clip_grad_value_(run.model[4].parameters(), 0.1)
        run.optimizer.step()


def edit_in_place(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        for p in run.model[0].parameters():
            p.grad.mul_(0.5)
        for p in run.model[2].parameters():
            p.grad.data.div_(torch.tensor(4.0))
            p.grad.clamp_(-0.01, 0.01)
        run.optimizer.step()


def discard_a_bad_batch(run: Run) -> None:
    run.loss(0).backward()
    run.model.zero_grad()
    run.loss(1).backward()
    run.optimizer.step()
    run.model.zero_grad()
    (1e6 * run.loss(2)).backward()
    for p in run.model.parameters():
        p.grad = None
    run.loss(3).backward()
    run.optimizer.step()


def discard_a_part(run: Run) -> None:
    for step in range(3):
        run.model.zero_grad(set_to_none=True)
        run.loss(step).backward()
        for p in run.model[2].parameters():
            p.grad = None
        if step == 1:
            for p in run.model[4].parameters():
                p.grad.zero_()
        run.optimizer.step()


def zero_in_place(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=False)
        run.loss(step).backward()
        run.model.zero_grad(set_to_none=False)
        run.loss(step + 10).backward()
        run.optimizer.step()


def discard_between_micro_batches(run: Run) -> None:
    """Accumulate two micro-batches, and discard one between them."""
    for step in range(2):
        run.optimizer.zero_grad()
        run.loss(3 * step).backward()
        for p in run.model[0].parameters():
            p.grad = None
        run.loss(3 * step + 1).backward()
        run.loss(3 * step + 2).backward()
        run.optimizer.step()


def discard_what_is_not_reduced_yet(run: Run) -> None:
    """A module discards its gradients in forward (flair's `self.rnn.zero_grad()`). The step left out what the next
    micro-batch gave for them, in silence: the parameters were not trained."""
    for step in range(2):
        run.optimizer.zero_grad()
        with nullcontext() if run.handle is None else run.handle.no_sync():
            run.loss(2 * step).backward()
        run.model[0].weight.grad = None
        run.loss(2 * step + 1).backward()
        assert all(p.grad is not None for p in run.model.parameters())
        run.optimizer.step()


def set_by_hand(run: Run) -> None:
    """A step without any backward, as in pipelines with delayed weight gradients."""
    for step in range(3):
        run.optimizer.zero_grad()
        if step == 1:
            run.loss(step).backward()
        for number, p in enumerate(run.model.parameters()):
            if step != 1 or number % 2:
                ranks = range(NUM_RANKS) if run.rank is None else [run.rank]
                p.grad = torch.stack([torch.full(p.shape, 0.1 * (r + number), dtype=p.dtype) for r in ranks]).mean(0)
        run.optimizer.step()


def add_to_what_was_set(run: Run) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        for number, p in enumerate(run.model.parameters()):
            ranks = range(NUM_RANKS) if run.rank is None else [run.rank]
            p.grad = torch.stack([torch.full(p.shape, 0.1 * (r + number), dtype=p.dtype) for r in ranks]).mean(0)
        run.loss(step).backward()
        run.optimizer.step()


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None, "a hook after shard() sees the gradient that has been accumulated"
    parameter.grad.mul_(2)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad / 2


def drop(parameter: Tensor) -> None:
    parameter.grad = None


def post_accumulate_hooks(run: Run) -> None:
    for p in run.model[0].parameters():
        p.register_post_accumulate_grad_hook(double)
    for p in run.model[2].parameters():
        p.register_post_accumulate_grad_hook(halve)
    run.model[4].bias.register_post_accumulate_grad_hook(drop)
    for step in range(3):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def gradients_of_their_own(run: Run) -> None:
    """`torch.autograd.grad` neither sets `p.grad` nor contributes to the step."""
    for step in range(2):
        run.optimizer.zero_grad()
        x = batch(run.rank or 0, step).requires_grad_()
        (of_x,) = torch.autograd.grad(run.model(x).square().mean(), x)
        assert of_x.shape == x.shape and bool(of_x.any())
        run.loss(step).backward()
        run.optimizer.step()


def a_failed_backward(run: Run) -> None:
    """`model.zero_grad()` discards the gradients of a backward that raised half way, as in plain torch."""
    for step in range(2):
        hook = run.model[0].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            (1e6 * run.loss(step)).backward()
        hook.remove()
        run.model.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def failed_gradients_of_their_own(run: Run) -> None:
    """A `torch.autograd.grad` that raises takes no gradients of earlier backwards along, as in plain torch."""
    for step in range(2):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        x = batch(run.rank or 0, step).requires_grad_()
        (out := run.model(x)).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(out.square().mean(), x)
        run.loss(step + 2).backward()
        run.optimizer.step()


def fail(_: Tensor) -> None:
    raise ZeroDivisionError


LOOPS: list[Callable[[Run], None]] = [
    clip_the_norm,
    clip_groups_and_values,
    edit_in_place,
    discard_a_bad_batch,
    discard_a_part,
    zero_in_place,
    discard_between_micro_batches,
    set_by_hand,
    add_to_what_was_set,
    post_accumulate_hooks,
    gradients_of_their_own,
    failed_gradients_of_their_own,
    a_failed_backward,
    discard_what_is_not_reduced_yet,
]


def plain(rank: int) -> list[dict[str, Tensor]]:
    results = []
    for loop in LOOPS:
        run = Run(None, "")
        loop(run)
        results.append(run.weights())
    return results


def sharded(rank: int, loop: Callable[[Run], None], plan: Plan) -> tuple[dict[str, Tensor], CommLog]:
    run = Run(rank, plan)
    loop(run)
    assert run.handle is not None
    return run.weights(), run.handle.comm_log


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Tensor]]:
    return run_ranks(plain, 1)[0]


def test_loops_of_plain_torch_do_the_same(expected: list[dict[str, Tensor]]) -> None:
    """By default each loop under one plan, in turn."""
    in_turn_alone = [(loop, PLANS[number % 4]) for number, loop in enumerate(LOOPS)]
    cases, of_loop = with_plans(LOOPS) if EVERYTHING else in_turn_alone, dict(zip(LOOPS, expected, strict=True))
    found = run_ranks(in_turn(sharded, cases), NUM_RANKS)
    for (loop, plan), results in zip(cases, zip(*found, strict=True), strict=True):
        expect_same_logs([log for _, log in results])
        for weights, _ in results:
            difference = largest_difference(weights, of_loop[loop])
            assert difference < 1e-10, f"{loop.__name__} under {plan}: weights differ by {difference}"


@on_ranks(4)
def test_a_gradient_set_by_hand_is_averaged_over_a_mesh_of_two_axes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for plan in PLANS:
        model = build()
        handle = zeroshard.shard(model, plan, units=nn.Linear, mesh=mesh)
        before = handle.full_state_dict()
        for p in model.parameters():
            p.grad = torch.full(p.shape, float(rank), dtype=p.dtype)
        zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0).step()
        for name, after in handle.full_state_dict().items():
            torch.testing.assert_close(before[name] - after, torch.full(after.shape, 1.5, dtype=after.dtype))


@on_ranks(2)
def test_a_gradient_that_is_set_after_a_discarded_loss_has_not_its_weight(rank: int) -> None:
    """The model has discarded its gradients, or its backward has raised. What was set was divided by the weight."""
    for plan, raises in itertools.product(PLANS, (False, True)):
        run = Run(rank, plan)
        assert run.handle is not None
        before, hooks = run.weights(), [run.model[0].weight.register_hook(fail)] if raises else []
        with pytest.raises(ZeroDivisionError) if raises else nullcontext():
            run.optimizer.backward(run.loss(0), weight=2.0)
        for hook in hooks:
            hook.remove()
        run.model.zero_grad()
        run.handle.set_gradient("0.weight", torch.ones(16, 6, dtype=torch.float64))
        run.optimizer.step()
        for name, after in run.weights().items():
            moved = 0.1 if name == "0.weight" else 0.0
            torch.testing.assert_close(before[name] - after, torch.full_like(after, moved))


def _ones_by_hand(run: Run) -> None:
    run.model[0].weight.grad = torch.ones(16, 6, dtype=torch.float64)


@on_ranks(2)
def test_a_gradient_set_by_hand_after_discarded_losses_has_no_factors_of_theirs(rank: int) -> None:
    """It was divided by the weight, in silence."""
    for plan, weight, scale in grid(PLANS, (None, 4.0), (1.0, 1024.0)):
        run = Run(rank, plan, loss_scale=scale)
        before = run.weights()
        run.optimizer.backward(run.loss(0), weight=weight)
        run.model.zero_grad()
        _ones_by_hand(run)
        run.optimizer.step()
        for name, after in run.weights().items():
            moved = 0.1 if name == "0.weight" else 0.0
            torch.testing.assert_close(before[name] - after, torch.full_like(after, moved), msg=f"{plan} {weight}")


@on_ranks(2)
def test_a_gradient_set_by_hand_beside_scaled_or_weighted_losses_is_refused(rank: int) -> None:
    """It was divided by scale and weights, and what was made of the terms under `no_sync` was not divided by the scale.
    Afterwards training goes on with the bits of a run without the error."""

    def replaced(run: Run, weight: float | None) -> None:
        run.optimizer.backward(run.loss(0), weight=weight)
        _ones_by_hand(run)
        run.optimizer.step()

    def other_memory(run: Run, weight: float | None) -> None:
        run.optimizer.backward(run.loss(0), weight=weight)
        run.model[0].weight.grad.data = torch.ones(16, 6, dtype=torch.float64)
        run.optimizer.step()

    def before_backward(run: Run, weight: float | None) -> None:
        _ones_by_hand(run)
        run.optimizer.backward(run.loss(0), weight=weight)

    def made_of_terms(run: Run, weight: float | None) -> None:
        assert run.handle is not None
        with run.handle.no_sync():
            run.optimizer.backward(run.loss(0), weight=weight)
        run.model[0].weight.grad = run.model[0].weight.grad * 0.5
        run.loss(1).backward()

    ways = (replaced, other_memory, before_backward, made_of_terms)
    for (plan, (weight, scale)), of_both in itertools.groupby(
        sorted(grid(PLANS, ((4.0, 1.0), (None, 1024.0)), range(len(ways))), key=str), lambda case: case[:2]
    ):
        expected = None
        for way in (None, *(ways[number] for *_, number in of_both)):
            run = Run(rank, plan, loss_scale=scale)
            if way is not None:
                said = r"no rank holds it in full" if way is made_of_terms else r"set by hand.* optimizer.zero_grad\(\)"
                with pytest.raises(RuntimeError, match=said):
                    way(run, weight)
                run.model.zero_grad()
                run.optimizer.zero_grad()
            run.optimizer.backward(run.loss(2), weight=weight)
            run.optimizer.step()
            expected = expected or run.weights()
            assert same_bits(run.weights(), expected), (plan, way)


@on_ranks(2)
def test_a_gradient_set_by_hand_can_be_read_and_clipped_as_one_of_a_backward(rank: int) -> None:
    """`handle.gradient` was zero, as the mean is known only after an exchange. After the optimizer's clip `p.grad` was
    None: a second clip, torch's, left it out, and `p.grad = None` did not discard it."""
    for plan in PLANS:
        run = Run(rank, plan)
        assert run.handle is not None
        weight, start = run.model[0].weight, run.weights()["0.weight"]
        for has_backward, sets in ((True, (0, 1)), (False, (0, 1)), (False, (1,))):
            if has_backward:
                run.loss(0).backward()
            if rank in sets:
                weight.grad = torch.full(weight.shape, 1.0 + rank, dtype=torch.float64)
            mean = torch.full(weight.shape, sum(1.0 + other for other in sets) / 2, dtype=torch.float64)
            torch.testing.assert_close(run.handle.gradient("0.weight"), mean)
            run.optimizer.zero_grad()
            if has_backward:
                run.loss(0).backward()
            if rank in sets:
                weight.grad = torch.full(weight.shape, 1.0 + rank, dtype=torch.float64)
            run.optimizer.clip_grad_norm_(1e-3)
            assert weight.grad is not None
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
            torch.testing.assert_close(norm, norm.new_tensor(1e-3), rtol=1e-2, atol=0.0)
            weight.grad = None
            run.optimizer.step()
            assert torch.equal(run.weights()["0.weight"], start), (plan, has_backward, sets)


@on_ranks(2)
def test_a_gradient_set_by_hand_is_not_read_where_losses_are_weighted(rank: int) -> None:
    for plan in PLANS:
        run = Run(rank, plan)
        assert run.handle is not None
        run.optimizer.backward(run.loss(0), weight=4.0)
        if rank == 1:
            _ones_by_hand(run)
        with pytest.raises(zeroshard.Error, match=r"gradient: p.grad of 0.weight was set by hand"):
            run.handle.gradient("0.weight")
        run.optimizer.zero_grad()


@on_ranks(2)
def test_gradients_of_two_parameters_that_are_swapped(rank: int) -> None:
    """In full each is copied. Elsewhere it is no tensor of values, and the step says what to write."""
    for plan in PLANS:
        run = Run(rank, plan)
        run.loss(0).backward()
        one, other = (run.model[index].bias for index in (0, 2))
        one.grad, other.grad = other.grad, one.grad
        if plan == "ddp":
            assert run.optimizer.step().applied
        else:
            with pytest.raises(zeroshard.Error, match=r"has been a p.grad before \(.* or of another parameter\)"):
                run.optimizer.step()
            run.optimizer.zero_grad()


@on_ranks(2)
def test_an_error_on_one_rank_when_all_is_reduced_is_forgotten_with_the_gradients(rank: int) -> None:
    """That rank dropped weights that the others kept for the next forward, and no forward worked any more."""
    for plan in PLANS:
        found = []
        for fails in (False, True):
            run = Run(rank, plan)
            run.loss(0).backward()
            run.optimizer.step()
            if fails:
                raised: Any = nullcontext() if rank else pytest.raises(ZeroDivisionError)
                with pytest.MonkeyPatch.context() as patch, raised:
                    if not rank:
                        patch.setattr(VisibleGradients, "show", fail)
                    run.loss(1).backward()
                run.optimizer.zero_grad()
            run.loss(2).backward()
            run.optimizer.step()
            found.append(run.weights())
        assert same_bits(*found), plan


@on_ranks(2)
def test_a_step_after_a_backward_that_raised_says_so(rank: int) -> None:
    """It blamed `no_sync`. After `zero_grad` training goes on with the bits of a run without the error."""
    for plan in PLANS:
        found = []
        for fails, micro_batches, clips in ((False, 0, False), *itertools.product([True], (0, 1), (False, True))):
            run = Run(rank, plan)
            if fails:
                for step in range(micro_batches):
                    run.loss(step).backward()
                hook = run.model[2].weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    run.loss(1).backward()
                hook.remove()
                with pytest.raises(RuntimeError, match=r"on rank 0, 1: the last backward has raised.*zero_grad"):
                    run.optimizer.clip_grad_norm_(1.0) if clips else run.optimizer.step()
                run.optimizer.zero_grad()
            run.loss(2).backward()
            run.optimizer.step()
            found.append(run.weights())
            assert same_bits(found[0], found[-1]), (plan, micro_batches, clips)


@on_ranks(2)
def test_a_loss_whose_backward_raised_does_not_count_for_one_computed_before(rank: int) -> None:
    for plan in PLANS:
        found = []
        for fails in (False, True):
            run = Run(rank, plan)
            losses = run.loss(0), run.loss(1)
            if fails:
                hook = run.model[0].weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    run.optimizer.backward(losses[0], weight=3.0)
                hook.remove()
            run.optimizer.backward(losses[1], weight=1.0)
            run.optimizer.step()
            found.append(run.weights())
        assert same_bits(*found), plan


class Unused(nn.Module):
    """With parameters that no rank uses: they have no `p.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_a_loss_that_the_model_discards_leaves_nothing(rank: int, num_ranks: int) -> None:
    """`model.zero_grad()` cannot see the zeros of what no rank has used. With them the loss would keep its weight."""

    def trained(rank: int, plan: str, weight: float | None, *, discards: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Unused().double()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        if discards:
            optimizer.backward(model(batch(rank, 0)).square().mean(), weight=weight and 3 * weight)
            model.zero_grad()
            assert not handle.engine.has_gradients()
        optimizer.backward(model(batch(rank, 1)).square().mean(), weight=weight)
        optimizer.step()
        return handle.full_state_dict()

    for plan, weight in itertools.product(PLANS, (None, 0.5)):
        found = [trained(rank, plan, weight, discards=discards) for discards in (False, True)]
        assert same_bits(*found), (plan, weight)


class Deaf(Run):
    """In one process. A step uses what backward has computed since the last step, whatever was done to `p.grad`."""

    def __init__(self) -> None:
        super().__init__(None, "")
        self._sums: dict[Tensor, Tensor] = {}
        for p in self.model.parameters():
            p.register_hook(partial(self._add, p))
        self.optimizer.register_step_pre_hook(self._restore)

    def _add(self, p: Tensor, grad: Tensor) -> None:
        self._sums[p] = self._sums.get(p, 0) + grad

    def _restore(self, *_: Any) -> None:
        for p in self.model.parameters():
            p.grad = self._sums.pop(p, None)


def deaf(rank: int) -> list[dict[str, Tensor]]:
    results = []
    for loop in LOOPS:
        run = Deaf()
        loop(run)
        results.append(run.weights())
    return results


def test_the_loops_are_sensitive(expected: list[dict[str, Tensor]]) -> None:
    """Negative control: a loop whose actions are ignored ends with other weights. (Two loops have none.)"""
    for loop, wanted, found in zip(LOOPS, expected, run_ranks(deaf, 1)[0], strict=True):
        difference = largest_difference(found, wanted)
        acts = loop not in (gradients_of_their_own, failed_gradients_of_their_own)
        assert difference > 1e-4 if acts else difference < 1e-10, (loop, difference)


# What it is, and what it is not ---------------------------------------------------------------------------------------


def as_torch_ddp(rank: int) -> None:
    plain_model = nn.parallel.DistributedDataParallel(build(), gradient_as_bucket_view=True)
    plain_model(batch(rank, 0)).square().mean().backward()
    run = Run(rank, "ddp")
    run.loss(0).backward()
    for ours, theirs in zip(run.model.parameters(), plain_model.parameters(), strict=True):
        assert type(ours.grad) is Tensor
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert run.model[0].weight.grad.untyped_storage().data_ptr() == run.model[0].bias.grad.untyped_storage().data_ptr()
    run.optimizer.step()
    assert all("a step has used it" in repr(p.grad) for p in run.model.parameters())


@on_ranks(3)
def test_under_ddp_it_is_the_mean_as_torch_ddp_leaves_it(rank: int) -> None:

    as_torch_ddp(rank)


def local_terms(rank: int, plan: str) -> None:
    run = Run(rank, plan)
    plain_model = build()
    for step in range(2):
        plain_model(batch(rank, step)).square().mean().backward()
    assert run.handle is not None
    with run.handle.no_sync():
        run.loss(0).backward()
        run.loss(1).backward()
    for ours, theirs in zip(run.model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    run.model.zero_grad()
    assert not run.handle.engine.has_gradients()


@on_ranks(2)
def test_it_is_detached_and_zeroed_as_older_scripts_do(rank: int) -> None:
    for plan in PLANS:
        run = Run(rank, plan)
        run.loss(1).backward()
        handle: Any = run.handle
        expected = handle.gradient("0.weight")
        run.optimizer.zero_grad()
        run.loss(0).backward()
        for p in run.model.parameters():
            assert p.grad is not None
            p.grad.detach_()
            p.grad.zero_()
        run.loss(1).backward()
        torch.testing.assert_close(handle.gradient("0.weight"), expected, rtol=1e-12, atol=1e-14)
        assert run.optimizer.step().applied


@on_ranks(2)
def test_under_no_sync_it_is_this_ranks_own(rank: int) -> None:
    under(PLANS, local_terms)(rank)


def speaks_up(rank: int, plan: str) -> None:
    run = Run(rank, plan)
    run.loss(0).backward()
    grad = run.model[0].weight.grad
    assert "handle.gradient" in repr(grad)
    readers: list[Callable[[], object]] = [
        lambda: grad + 1,
        lambda: grad.clone(),
        lambda: grad.abs().max().item(),
        lambda: grad.mul_(torch.ones(16, 6)),
        lambda: grad.add_(torch.ones(())),
        lambda: grad.apply_(lambda value: 0.5 * value),
        lambda: grad.map_(torch.ones(16, 6), lambda value, other: value * other),
    ]
    for read in readers:
        with pytest.raises(RuntimeError, match=r"no rank holds it in full.*handle\.gradient\('.*handle\.set_gradient"):
            read()
    averages: list[Callable[[], object]] = [lambda: grad.view(-1)]  # by hand, as loops for torch have it
    if dist.get_backend() == "gloo":  # others look at the strides before anything is read
        averages.append(lambda: dist.all_reduce(grad))
    for average in averages:
        with pytest.raises(RuntimeError, match=r"averaged over the ranks already: leave out .*all_reduce"):
            average()
    for kind in (torch.optim.SGD, torch.optim.Adam):
        said = rf"step of a plain {kind.__name__} over .*ShardedOptimizer\(handle, {kind.__name__}"
        with pytest.raises(RuntimeError, match=said):
            kind(run.model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"no rank holds it in full"):
        run.optimizer.step(lambda: run.model[0].weight.grad + 1)
    run.optimizer.step()


@on_ranks(2)
def test_elsewhere_reading_it_says_what_to_write(rank: int) -> None:
    under(PLANS[1:], speaks_up)(rank)


def scaled(rank: int, plan: str) -> None:
    run = Run(rank, plan, loss_scale=1024.0)
    run.optimizer.backward(run.loss(0))
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0),
        lambda: run.model[0].weight.grad.mul_(2),
    ):
        with pytest.raises(RuntimeError, match=r"scaled or weighted.*optimizer\.clip_grad_norm_"):
            use()
    # Under DDP a read was told that no rank holds the gradient in full.
    why = r"scaled or weighted.*handle\.gradient\('0\.weight'\)" if plan is PLANS[0] else "no rank holds it in full"
    with pytest.raises(RuntimeError, match=rf"clone on the gradient of 0\.weight: .*{why}"):
        run.model[0].weight.grad.clone()
    kept = run.model[0].weight.grad
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight: its memory is freed by a step or zero_grad"):
        kept.sum()
    run = Run(rank, plan)
    run.optimizer.backward(run.loss(0), weight=float(rank + 1))
    with pytest.raises(RuntimeError, match=r"scaled or weighted"):
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.loss(1).backward()  # the next step's losses are neither
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    with run.handle.no_sync():
        run.optimizer.backward(run.loss(2), weight=2.0)
    with pytest.raises(RuntimeError, match="partial"):  # as long as these terms have factors that the step takes out
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.backward(run.loss(3), weight=2.0)
    run.optimizer.step()


@on_ranks(2)
def test_a_scaled_gradient_is_not_clipped_at_the_wrong_size(rank: int) -> None:
    under(PLANS, scaled)(rank)


def written_through_the_handle(rank: int, plan: str) -> dict[str, Tensor]:
    run = Run(rank, plan)
    handle = run.handle
    assert handle is not None
    run.loss(0).backward()
    handle.set_gradient("2.weight", 3 * handle.gradient("2.weight"))
    with pytest.raises(ValueError, match="has the shape"):
        handle.set_gradient("2.weight", torch.zeros(2))
    with pytest.raises(ValueError, match="no trainable parameter"):
        handle.set_gradient("nothing", torch.zeros(2))
    assert isinstance(run.optimizer.clip_grad_norm_(1e9), Tensor)  # computes the norm of the present gradients
    handle.set_gradient("4.bias", torch.ones(3, dtype=torch.float64))
    run.optimizer.step()
    return run.weights()


def written_in_plain_torch(rank: int) -> dict[str, Tensor]:
    run = Run(None, "")
    run.loss(0).backward()
    run.model[2].weight.grad.mul_(3)
    run.model[4].bias.grad.fill_(1)
    run.optimizer.step()
    return run.weights()


def test_a_reduced_gradient_is_written_through_the_handle() -> None:
    wanted = run_ranks(written_in_plain_torch, 1)[0]
    for of_rank in run_ranks(under(PLANS, written_through_the_handle), NUM_RANKS):
        for weights in of_rank:
            torch.testing.assert_close(weights, wanted, rtol=1e-9, atol=1e-11)


def on_one_rank_only(rank: int, plan: str) -> None:
    run = Run(rank, plan)
    run.loss(0).backward()
    if rank == 0:
        run.model.zero_grad()
    with pytest.raises(RuntimeError, match="not issued the same collectives: discard gradients"):
        run.optimizer.step()


@on_ranks(2)
def test_discarding_on_one_rank_only_is_an_error_everywhere(rank: int) -> None:

    on_one_rank_only(rank, "zero2")


# Other ways to get gradients ------------------------------------------------------------------------------------------


def asked_for(rank: int, plan: str) -> None:
    """`torch.autograd.grad` of parameters gives this rank's own gradients, and the step does not use them."""
    plain_model, run = build(), Run(rank, plan)
    wanted = torch.autograd.grad(plain_model(batch(rank, 0)).square().mean(), list(plain_model.parameters()))
    found = torch.autograd.grad(run.loss(0), list(run.model.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert run.handle is not None and not run.handle.engine.has_gradients()
    assert not run.optimizer.step().applied
    run.loss(1).backward()
    assert run.optimizer.step().applied


@on_ranks(2)
def test_gradients_that_were_asked_for_are_this_ranks_own(rank: int) -> None:
    under(PLANS, asked_for)(rank)


def without_an_optimizer(rank: int, plan: str) -> None:
    """Two backwards under no_sync work. (They once were refused with "gradients have been reduced", which was
    wrong.)"""
    run = Run(rank, plan)
    run.optimizer = None
    assert run.handle is not None
    with run.handle.no_sync():
        run.loss(0).backward()
        run.loss(1).backward()
    run.model.zero_grad()
    run.loss(2).backward()
    with pytest.raises(RuntimeError, match=r"no optimizer uses them: build a zeroshard\.ShardedOptimizer"):
        run.loss(3)
    run.model.zero_grad()  # discarding gradients needs no optimizer
    run.loss(4).backward()
    run.model.zero_grad()


@on_ranks(2)
def test_gradients_without_an_optimizer(rank: int) -> None:
    under(["ddp", "zero2"], without_an_optimizer)(rank)


def pipeline(rank: int, plan: str) -> Any:
    """Each rank is a pipeline of one stage. At the end torch divides `p.grad` by the number of micro-batches."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages = [dist.new_group([rank], timeout=None, use_local_synchronization=True) for _ in range(1)]
    run = Run(rank, plan)
    stage = PipelineStage(run.model, 0, 1, DEVICE, group=stages[0])
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda output, target: output.square().mean())
    x = torch.cat([batch(rank, step) for step in range(4)])
    schedule.step(x, target=torch.zeros(16, 3))
    run.optimizer.step()
    return run.weights()


def test_a_pipeline_scales_gradients_by_its_micro_batches() -> None:
    """Gradients once were 4 times too large without an error: torch divides `p.grad`, which was None."""

    def wanted(rank: int) -> Any:
        run = Run(None, "")
        (sum(run.loss(step) for step in range(4)) / 4).backward()
        run.optimizer.step()
        return run.weights()

    expected = run_ranks(wanted, 1)[0]
    for of_rank in run_ranks(under(PLANS, pipeline), NUM_RANKS):
        for weights in of_rank:
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-11)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a value of a tensor: on a GPU it would wait."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_gradients_that_only_other_ranks_have_take_one_read() -> None:
    """There once was one for each parameter that this rank's loss does not use."""

    def check(rank: int) -> None:
        model = make(Gated)
        handle = zeroshard.shard(model, "ddp", units=Gated.Inner)
        for number, block in enumerate(model.blocks):
            block.open = (rank, number) == (1, 0)
        loss, to_list = loss_of_tokens(model, rank, 0, 0), Tensor.tolist
        with Reads() as reads, pytest.MonkeyPatch.context() as patch:
            patch.setattr(origins, "_is_surely_finite", lambda full: False)  # as on a GPU
            patch.setattr(
                Tensor, "tolist", lambda tensor: (setattr(reads, "count", reads.count + 1), to_list(tensor))[1]
            )
            loss.backward()
        assert [block.gate.grad is not None for block in model.blocks] == [True, False, False]
        assert reads.count == 1, reads.count
        handle.close()

    run_ranks(check, 2)
