"""An update that is queued before the host knows the answer is the update that follows the answer, or none.

On a CPU nothing is queued. There these tests let the engine believe that it is, over the native transport.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.ahead_of_host import queued
from tests.kit import DEVICE, EVERYTHING, Block, Gated, Net, State, loss_of_tokens, make, same_bits, travelling
from tests.timed_backend import TIMINGS, timed_ranks
from tests.together import in_turn
from zeroshard.step import agreement, ahead, control
from zeroshard.step.ahead import is_fused
from zeroshard.step.steppers import Steppers
from zeroshard.testing import run_ranks

STEPS, AT = 5, 3
"""Steps of a run, and the one in which something happens: the second that goes ahead."""
AHEAD = ("update ahead", "read")
ADAMW = {"lr": 1e-2, "fused": True}


class Run(NamedTuple):
    """What a run has left. `found`: per step its results, or its error. `calls`: what the steps called, in order."""

    found: list[list[str]]
    state: State
    calls: list[list[str]]


class Training:
    """One run, on one rank. An event changes one of its steps."""

    def __init__(self, rank: int, plan: Any, event: Event) -> None:
        self.rank, self.event = rank, event
        self.model = make(event.model)
        self.handle = zeroshard.shard(self.model, plan, units=Block, precision=event.precision)
        options = {"lr": 1e-2, "momentum": 0.9, "fused": True} if event.optimizer is torch.optim.SGD else ADAMW
        self.optimizer = zeroshard.ShardedOptimizer(
            self.handle, event.optimizer, loss_scale=event.scale, **event.policy, **options
        )

    def backward(self, step: int) -> None:
        for micro_batch in range(self.event.micro_batches):
            last = micro_batch == self.event.micro_batches - 1
            with nullcontext() if last else self.handle.no_sync():
                loss = loss_of_tokens(self.model, self.rank, micro_batch, step)
                self.optimizer.backward(loss, weight=self.event.weight(self.rank, step))

    def clip(self) -> None:
        if self.event.max_norm is not None:
            norm = self.optimizer.clip_grad_norm_(self.event.max_norm)
            self.norms.append(norm.clone())
        if self.event.clip_value is not None:
            self.optimizer.clip_grad_value_(self.event.clip_value)

    def step(self) -> None:
        result = self.optimizer.step()
        self.found.append(repr((result.applied, result.grad_norm, result.group_norms, result.loss_scale)))

    def run(self) -> Run:
        found, calls = [], []
        for step in range(STEPS):
            self.norms: list[Tensor] = []
            self.found: list[str] = []
            with recorded() as called:
                try:
                    if step == AT:
                        self.event.happens(self, step)
                    else:
                        self.backward(step)
                        self.clip()
                        self.step()
                except (RuntimeError, ValueError) as error:
                    self.norms.clear()  # ahead of the host, `clip_grad_norm_` returns one, and `step` raises
                    self.found.append(f"{type(error).__name__}: {error}")
            found.append([*self.found, *(norm.item().hex() for norm in self.norms)])
            calls.append(called)
            self.optimizer.zero_grad()
        state = self.handle.full_state_dict() | {
            f"main {k}": v for k, v in self.handle.full_state_dict(main=True).items()
        }
        for number, of_parameter in self.optimizer.state_dict()["state"].items():
            state |= {f"{number} {key}": value for key, value in of_parameter.items()}
        return Run(found, state, calls)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Lists the updates, and the reads of what all ranks have agreed on."""
    called: list[str] = []
    step, take_part = Steppers.step, Steppers.take_part

    def stepped(self: Steppers, options: Any, active: Any, update: Any, arguments: Any) -> None:
        called.append("update" if update.is_void is None else "update ahead")
        step(self, options, active, update, arguments)

    def gathered(self: Steppers, active: Any) -> None:
        called.append("gathers")
        take_part(self, active)

    def asked(*arguments: Any) -> Any:
        unread = control.ask(*arguments)
        return dataclasses.replace(unread, read=lambda: (called.append("read"), unread.read())[1])

    def asked_again(*arguments: Any) -> Any:
        called.append("read")
        return control.exchange_norms(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steppers, "step", stepped)
        patch.setattr(Steppers, "take_part", gathered)
        patch.setattr(agreement, "ask", asked)
        patch.setattr(agreement, "exchange_norms", asked_again)
        yield called


class Event(NamedTuple):
    """What is trained, and what happens in step AT. `ahead`: what that step calls on rank 0; `ddp`: under DDP, where
    clips act at once. `error`: a part of its message."""

    happens: Callable[[Training, int], None]
    ahead: tuple[str, ...] = AHEAD
    error: str = ""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    model: Callable[[], torch.nn.Module] = partial(Net, blocks=2)
    precision: Any = None
    scale: Any = None
    policy: Any = MappingProxyType({})
    max_norm: float | None = 0.7
    clip_value: float | None = None
    weight: Callable[[int, int], float | None] = lambda rank, step: None
    micro_batches: int = 1
    ddp: tuple[str, ...] | None = None


def plain(training: Training, step: int) -> None:
    training.backward(step)
    training.clip()
    training.step()


def spoiled(value: float) -> Callable[[Training, int], None]:
    def happens(training: Training, step: int) -> None:
        parameter = next(training.model.parameters())
        hook = parameter.register_hook(lambda grad: grad + value if training.rank == 0 else grad)
        try:
            training.backward(step)
        finally:
            hook.remove()
        training.clip()
        training.step()

    return happens


def other_settings(training: Training, step: int) -> None:
    (group,) = training.optimizer.param_groups
    group["lr"] = 1e-2 if training.rank else 2e-2
    try:
        plain(training, step)
    finally:
        group["lr"] = 1e-2


def mended_settings(*, forgets: bool) -> Callable[[Training, int], None]:
    """After an error the same gradients are stepped with: a void update has not changed them, and the clip stays. (On
    the host the clip has raised.) `forgets`: the second step does not go ahead."""

    def happens(training: Training, step: int) -> None:
        try:
            other_settings(training, step)
        except RuntimeError:
            if not training.norms:
                training.clip()
            if forgets:
                training.optimizer.agreement.ahead.forget()
            training.step()

    return happens


def later_settings(training: Training, step: int) -> None:
    """They differ only after the comparison, and the next one finds it."""
    training.backward(step)
    training.clip()
    (group,) = training.optimizer.param_groups
    group["lr"] = 1e-2 if training.rank else 2e-2
    training.step()
    group["lr"] = 1e-2


def discarded(training: Training, step: int) -> None:
    training.backward(step)
    if training.rank == 0:
        training.optimizer.zero_grad()
    training.clip()
    training.step()


def nothing(training: Training, step: int) -> None:
    training.step()


def other_slots(training: Training, step: int) -> None:
    try:
        Gated.Inner.open = training.rank == 1
        plain(training, step)
    finally:
        Gated.Inner.open = True


def state_between(training: Training, step: int) -> None:
    """A rank that cannot go ahead takes part in gathers where the others gather: in the step, not in the clip."""
    try:
        Gated.Inner.open = training.rank == 1
        training.backward(step)
    finally:
        Gated.Inner.open = True
    training.clip()
    training.optimizer.state_dict()
    training.step()


def no_slots(training: Training, step: int) -> None:
    try:
        Gated.Inner.open = False
        plain(training, step)
    finally:
        Gated.Inner.open = True


def by_hand(on_all: bool) -> Callable[[Training, int], None]:
    def happens(training: Training, step: int) -> None:
        training.backward(step)
        training.optimizer.zero_grad()
        parameter = next(training.model.parameters())
        if on_all or training.rank == 0:
            parameter.grad = torch.full(parameter.shape, 0.01 * (1 + training.rank), device=DEVICE)
        norm = training.optimizer.clip_grad_norm_(0.02)
        assert norm.isnan() or norm > 0.02, "ahead of the host: not that of the gradients before"
        training.step()

    return happens


def frozen_before(training: Training, step: int) -> None:
    training.model.blocks[1].requires_grad_(False)
    plain(training, step)
    training.model.blocks[1].requires_grad_(True)


def frozen_after_forward(training: Training, step: int) -> None:
    training.backward(step)
    training.model.blocks[1].requires_grad_(False)
    training.clip()
    training.step()


def twice_clipped(training: Training, step: int) -> None:
    training.backward(step)
    training.clip()
    training.optimizer.clip_grad_norm_(0.1)
    training.step()


def clipped_for_a_look(training: Training, step: int) -> None:
    training.backward(step)
    training.clip()
    training.optimizer.zero_grad()
    training.backward(step + 100)
    training.clip()
    training.step()


def clipped_between(training: Training, step: int) -> None:
    """The second backward adds to gradients that have been clipped: a clip is of what is there when it is called."""
    training.backward(step)
    training.clip()
    training.backward(step + 100)
    training.step()


def clipped_and_read(training: Training, step: int) -> None:
    training.backward(step)
    training.clip()
    training.norms.append(training.handle.gradient("embed.weight").norm())
    training.step()


def clipped_and_seen(training: Training, step: int) -> None:
    """In a view of the bucket; elsewhere a look waits for the host."""
    training.backward(step)
    training.clip()
    training.norms.append(training.model.embed.weight.grad.norm())
    training.step()


def other_norm(training: Training, step: int) -> None:
    training.backward(step)
    training.norms.append(training.optimizer.clip_grad_norm_(0.2, norm_type=3.0))
    training.step()


def stops_on_nan(training: Training, step: int) -> None:
    training.backward(step)
    training.norms.append(training.optimizer.clip_grad_norm_(0.2, error_if_nonfinite=True))
    training.step()


def other_clip(training: Training, step: int) -> None:
    training.backward(step)
    training.norms.append(training.optimizer.clip_grad_norm_(0.2 if training.rank else 0.3))
    training.step()


def norm_changed(training: Training, step: int) -> None:
    """The norm that a clip has returned is the caller's."""
    training.backward(step)
    training.optimizer.clip_grad_norm_(0.1).mul_(1e-3)
    training.step()


def of_bf16(training: Training, step: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain(training, step)
    finally:
        torch.set_default_dtype(torch.float32)


def fewer_samples(training: Training, step: int) -> None:
    """A rank that has completed fewer gathers has fewer samples. Their digests differ, and nothing else does."""
    if training.rank:
        training.handle.engine.collectives.samples.forget()
    plain(training, step)


def not_fused(training: Training, step: int) -> None:
    (group,) = training.optimizer.param_groups
    group["fused"] = False  # as a state dict that was saved without `fused` does
    plain(training, step)
    group["fused"] = True


def without_state(training: Training, step: int) -> None:
    training.optimizer.state.clear()
    spoiled(math.nan)(training, step)


def sparse_by_hand(training: Training, step: int) -> None:
    training.backward(step)
    training.optimizer.zero_grad()
    parameter = next(training.model.parameters())
    parameter.grad = torch.full(parameter.shape, 0.01, device=DEVICE).to_sparse()
    training.optimizer.clip_grad_norm_(0.02)
    training.step()


GATED = partial(Gated, blocks=2)
TOKENS = lambda rank, step: 3.7 + rank + step / 3  # noqa: E731
EVENTS = {
    "nothing": Event(plain),
    "not clipped": Event(plain, max_norm=None),
    "sgd": Event(plain, optimizer=torch.optim.SGD),
    "sgd, a NaN, skipped": Event(
        spoiled(math.nan), (*AHEAD, "read"), optimizer=torch.optim.SGD, policy={"non_finite": "skip"}
    ),
    "bf16": Event(plain, precision="bf16"),
    "bf16 with remainder": Event(plain, precision="bf16-remainder", clip_value=1e-3, ddp=("gathers", "read", *AHEAD)),
    "weighted": Event(plain, weight=TOKENS, micro_batches=2),
    "weighted, not clipped": Event(plain, weight=TOKENS, max_norm=None),
    "scaled": Event(plain, precision="fp16", scale=zeroshard.DynamicScale(init=2.0**10, growth_interval=3)),
    "values clipped": Event(plain, clip_value=1e-3, ddp=("gathers", "read", *AHEAD)),
    "values clipped, norm is not": Event(plain, clip_value=1e-3, max_norm=None),
    "a NaN, raised": Event(spoiled(math.nan), (*AHEAD, "read"), "the gradient was not finite"),
    "an infinity, skipped": Event(spoiled(math.inf), (*AHEAD, "read"), policy={"non_finite": "skip"}),
    "a NaN, ignored": Event(spoiled(math.nan), (*AHEAD, "read", "update"), policy={"non_finite": "ignore"}),
    "an overflow": Event(
        spoiled(math.inf), (*AHEAD, "read"), precision="fp16", scale=zeroshard.DynamicScale(init=2.0**10)
    ),
    "squares overflow in fp32": Event(spoiled(1e30), (*AHEAD, "read", "update"), max_norm=None),
    "another clip on rank 0": Event(other_clip, AHEAD, "different settings. clip_grad_norm_"),
    "another learning rate": Event(other_settings, AHEAD, "different settings. lr"),
    "another learning rate, then the same": Event(mended_settings(forgets=False), (*AHEAD, *AHEAD)),
    "another learning rate, then the same, not ahead": Event(mended_settings(forgets=True), (*AHEAD, "read", "update")),
    "another learning rate after the clip": Event(later_settings),
    "no gradients on rank 0": Event(discarded, ("gathers", "read"), "step on rank 0: no gradients"),
    "no backward at all": Event(nothing, ("gathers", "read")),
    "clipped, and seen": Event(clipped_and_seen, ("gathers", "read", "update"), ddp=AHEAD),
    "other slots": Event(other_slots, ("gathers", "read", "update"), model=GATED),
    "other slots, and a read of the state": Event(state_between, ("gathers", "read", "update"), model=GATED),
    "no gate anywhere": Event(no_slots, ("gathers", "read", "update"), model=GATED),
    "gradients by hand": Event(by_hand(True), ("gathers", "read", "read", "update")),
    "a gradient by hand on rank 0": Event(by_hand(False), ("gathers", "read", "read", "update")),
    "frozen before": Event(frozen_before, ("read", "update")),
    "frozen after the forward": Event(frozen_after_forward),
    "clipped twice": Event(twice_clipped, ("gathers", "read", "gathers", "read", "update")),
    "clipped, and discarded": Event(clipped_for_a_look),
    "clipped, and read": Event(clipped_and_read, ("gathers", "read", "update")),
    "clipped between two backwards": Event(clipped_between, ("gathers", "read", *AHEAD)),
    "another norm": Event(other_norm, ("gathers", "read", "update")),
    "the host is asked for the norm": Event(stops_on_nan, ("gathers", "read", "update")),
    "no weight": Event(plain, AHEAD, "are 0", weight=lambda rank, step: 0.0 if step == AT else 1.0),
    "large norms are skipped": Event(plain, ("read", "update"), policy={"skip_norm_above": 1e6}),
    "its norm is changed": Event(norm_changed),
    "another default dtype": Event(of_bf16, max_norm=None, clip_value=1e-3),
    "another default dtype, scaled": Event(of_bf16, max_norm=None, scale=3.0),
    "fewer samples on rank 1": Event(fewer_samples, (*AHEAD, "update")),
    "no longer fused": Event(not_fused, ("gathers", "read", "update")),
    "without its state": Event(
        without_state, ("gathers", "read", "read"), optimizer=torch.optim.SGD, policy={"non_finite": "skip"}
    ),
    "adamw without its state": Event(without_state, ("gathers", "read", "read"), policy={"non_finite": "skip"}),
    "a sparse gradient by hand": Event(sparse_by_hand, ("gathers", "read", "read", "update")),
}


def run_of(rank: int, plan: Any, event: str, is_ahead: bool) -> Run:
    with queued(is_ahead=is_ahead), travelling("native"):
        training = Training(rank, plan, EVENTS[event])
        run = training.run()
        training.handle.close()
        return run


def both(rank: int, plan: Any, event: str) -> tuple[Run, Run]:
    return run_of(rank, plan, event, True), run_of(rank, plan, event, False)


def differences(num_ranks: int, plan: Any, event: str) -> list[str]:
    """What differs between runs that go ahead and runs that wait for each answer, and from what the event expects."""
    return differences_in(run_ranks(both, num_ranks, plan, event), plan, event)


def differences_in(found: list[tuple[Run, Run]], plan: Any, event: str) -> list[str]:
    lines = []
    for rank, (of_ahead, of_host) in enumerate(found):
        for step, (mine, expected) in enumerate(zip(of_ahead.found, of_host.found, strict=True)):
            lines += [f"rank {rank}, step {step}: {mine}, expected {expected}"] * (mine != expected)
        lines += [f"rank {rank}: state"] * (not same_bits(of_ahead.state, of_host.state))
        assert {name for calls in of_host.calls for name in calls} <= {"read", "update"}
    (of_ahead, of_host), expected = found[0], EVENTS[event]
    error = next((line for line in of_host.found[AT] if line.startswith(("Invalid", "NotFinite"))), "")
    lines += [f"error: {error!r}"] * (expected.error not in error or bool(error) != bool(expected.error))
    calls = expected.ddp if plan == "ddp" and expected.ddp is not None else expected.ahead
    lines += [f"calls: {of_ahead.calls[AT]}"] * (of_ahead.calls[AT] != list(calls))
    return lines


PLANS = ("ddp", "zero1", "zero2", "zero3")


AT_ONCE = 8
"""Events that share a start of the ranks, and so a timing and the number of ranks."""


@cache
def of_events(start: int) -> dict[tuple[str, str], list[str]]:
    """The differences of the events from this one on, by event and plan."""
    numbers = range(start, min(start + AT_ONCE, len(EVENTS)))
    cases = [
        (plan, [*EVENTS][number]) for number in numbers for plan in (PLANS if EVERYTHING else [PLANS[(number + 1) % 4]])
    ]
    group = start // AT_ONCE
    with timed_ranks(TIMINGS[group % len(TIMINGS)]):
        by_rank = run_ranks(in_turn(both, cases), 2 + group % 2)
    by_case = zip(*by_rank, strict=True)
    return {
        (event, plan): differences_in(list(found), plan, event)
        for (plan, event), found in zip(cases, by_case, strict=True)
    }


@pytest.mark.by_cpu
@pytest.mark.parametrize("event", EVENTS)
def test_what_goes_ahead_is_what_follows_the_answer(event: str) -> None:
    start = [*EVENTS].index(event) // AT_ONCE * AT_ONCE
    found = {plan: lines for (of, plan), lines in of_events(start).items() if of == event}
    assert found and not any(found.values()), found


def clips_on_the_host(rank: int) -> list[list[str]]:
    with queued(), travelling("native"):
        training = Training(rank, "zero1", EVENTS["not clipped"])
        found = []
        for step in range(4):
            training.backward(step)
            with recorded() as called:
                training.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
                training.optimizer.step()
            found.append(called)
        return found


def test_a_clip_that_needs_the_host_costs_no_gathers() -> None:
    with timed_ranks("late"):
        assert run_ranks(clips_on_the_host, 2) == [[["read", "update"]] * 4] * 2


def clipped_beside_a_gradient_by_hand(rank: int) -> None:
    with queued(), travelling("native"):
        training = Training(rank, "ddp", EVENTS["nothing"])
        for step in range(AT + 1):
            training.optimizer.zero_grad()
            training.backward(step)
            if (rank, step) == (0, AT):
                parameter = next(training.model.parameters())
                parameter.grad = torch.full_like(parameter, 2.0)
            norm = training.optimizer.clip_grad_norm_(0.7)
            if step == AT:
                assert norm.isnan(), "not that of the gradients before"
                training.backward(step)
                with pytest.raises(RuntimeError, match="have changed since clip_grad_norm_"):
                    training.optimizer.step()
            else:
                training.optimizer.step()


def test_a_clip_that_the_device_could_not_make_is_not_lost_in_a_later_backward() -> None:
    """The host makes it behind the reduction of what was set by hand, but not once a backward has added to it."""
    with timed_ranks("late"):
        run_ranks(clipped_beside_a_gradient_by_hand, 2)


def two_that_clip_beside_a_gradient_by_hand(
    rank: int, plan: str, of_second: bool, is_read: bool
) -> tuple[list[list[str]], State]:
    """The second of two optimizers clips what the first one reduces by hand in its step."""
    with queued(), travelling("native"):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        parameters = [*model.parameters()]
        optimizers = [
            zeroshard.ShardedOptimizer(parameters[at::2], torch.optim.SGD, lr=0.1, fused=True) for at in range(2)
        ]
        found = []
        for step in range(AT + 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of_tokens(model, rank, 0, step).backward()
            if step == AT:
                parameter = parameters[of_second]
                parameter.grad = torch.full(parameter.shape, 1.0 + rank, device=DEVICE)
            for optimizer in optimizers:
                optimizer.clip_grad_norm_(0.1)
            if is_read and step == AT:
                handle.gradient([name for name, _ in model.named_parameters()][of_second])
            with recorded() as called:
                for optimizer in optimizers:
                    optimizer.step()
            found.append(called)
        return found, handle.full_state_dict()


def clipped_in_plain_torch(rank: int, of_second: bool) -> State:
    model = make(Net)
    parameters = [*model.parameters()]
    optimizers = [torch.optim.SGD(parameters[at::2], lr=0.1) for at in range(2)]
    for step in range(AT + 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of_tokens(model, rank, 0, step).backward()
        for parameter in parameters:
            if step == AT and parameter is parameters[of_second]:
                parameter.grad = torch.full(parameter.shape, 1.0 + rank, device=DEVICE)
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        for at, optimizer in enumerate(optimizers):
            torch.nn.utils.clip_grad_norm_(parameters[at::2], 0.1)
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("of_second", [False, True])
def test_a_gradient_by_hand_is_clipped_by_the_second_of_two_optimizers(of_second: bool, is_read: bool) -> None:
    """The reduction of the first one, or of `handle.gradient`, wrote it once more, behind the clip, in silence."""
    (expected, _) = run_ranks(clipped_in_plain_torch, 2, of_second)
    for plan in ("ddp", "zero2"):
        with timed_ranks("late"):
            ((calls, state), _) = run_ranks(two_that_clip_beside_a_gradient_by_hand, 2, plan, of_second, is_read)
        assert calls[AT - 1].count("update ahead") == 2
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=f"{plan} {name}")


ALONE = ("nothing", "weighted", "scaled", "a NaN, raised", "an overflow", "no weight", "no gate anywhere")


def test_a_single_rank_goes_ahead_of_its_device() -> None:
    for number, event in enumerate(ALONE):
        with timed_ranks("late"):
            assert not differences(1, PLANS[number % 4], event), event


def test_replicas_go_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = zeroshard.shard
    mesh = {"mesh": None}

    def on_mesh(*args: Any, **options: Any) -> Any:
        mesh["mesh"] = mesh["mesh"] or init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        return shard(*args, **options, **mesh)

    monkeypatch.setattr(zeroshard, "shard", on_mesh)
    for plan in ("zero1", "zero3") if EVERYTHING else ("zero3",):
        with timed_ranks("random"):
            assert not differences(4, plan, "a NaN, raised"), plan


@pytest.mark.parametrize("event", ["a NaN, raised", "another learning rate"])
def test_an_update_that_is_not_void_is_found(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    init = ahead.Verdict.__init__

    def never_void(self: ahead.Verdict, *args: Any) -> None:
        init(self, *args)
        self.is_void = torch.zeros_like(self.is_void)

    monkeypatch.setattr(ahead.Verdict, "__init__", never_void)
    with timed_ranks("early"):
        assert any("state" in line for line in differences(2, "zero1", event))


def after_a_join(rank: int, is_ahead: bool) -> Run:
    """In the join, and in the first step after it, the gradient is not finite."""
    with queued(is_ahead=is_ahead), travelling("native"):
        training = Training(rank, "zero1", Event(plain, policy={"non_finite": "skip"}))
        training.norms, training.found, calls = [], [], []
        for step in range(4):
            plain(training, step)
        with training.handle.join():
            if rank == 0:
                spoiled(math.nan)(training, 4)
        training.found.clear()
        for step in range(5, 8):
            with recorded() as called:
                (spoiled(math.nan) if step == 5 else plain)(training, step)
            calls.append(called)
        run = Run([training.found], training.handle.full_state_dict(), calls)
        training.handle.close()
        return run


def both_after_a_join(rank: int) -> tuple[Run, Run]:
    return after_a_join(rank, True), after_a_join(rank, False)


def test_after_a_join_all_ranks_go_ahead_or_none() -> None:
    with timed_ranks("early"):
        for of_ahead, of_host in run_ranks(both_after_a_join, 2):
            assert of_ahead.calls == [["read", "read"], ["read", "update"], list(AHEAD)]
            assert of_ahead.found == of_host.found
            assert same_bits(of_ahead.state, of_host.state)


def is_freed(rank: int) -> bool:
    with queued(), travelling("native"):
        training = Training(rank, "zero1", EVENTS["nothing"])
        training.norms, training.found = [], []
        for step in range(3):
            plain(training, step)
        (stepper,) = training.optimizer.steppers
        state = weakref.ref(stepper)
        del stepper
        training.handle.close()
        gc.collect()
        return state() is None


def test_what_is_remembered_does_not_keep_the_state() -> None:
    with timed_ranks("early"):
        assert run_ranks(is_freed, 2) == [True, True]


def two_optimizers(rank: int, is_ahead: bool) -> tuple[list[float], State]:
    """Both clip before either steps, without effect. Rank 0 cannot go ahead with the first one in step AT."""
    with queued(is_ahead=is_ahead), travelling("native"):
        model = make(Gated)
        handle = zeroshard.shard(model, "ddp", units=Block)
        blocks = list(model.blocks.parameters())
        rest = [one for one in model.parameters() if all(one is not other for other in blocks)]
        both = [zeroshard.ShardedOptimizer(some, torch.optim.AdamW, **ADAMW) for some in (blocks, rest)]
        norms = []
        for step in range(STEPS):
            Gated.Inner.open = rank == 1 or step != AT
            loss_of_tokens(model, rank, 0, step).backward()
            Gated.Inner.open = True
            found = [optimizer.clip_grad_norm_(1e6) for optimizer in both]
            for optimizer in both:
                optimizer.step()
            norms += [norm.item() for norm in found]
        state = handle.full_state_dict()
        handle.close()
        return norms, state


def both_of_two(rank: int) -> Any:
    return two_optimizers(rank, True), two_optimizers(rank, False)


def test_two_optimizers_ask_alike_on_all_ranks() -> None:
    with timed_ranks("random"):
        for (norms, state), (norms_of_host, state_of_host) in run_ranks(both_of_two, 2):
            assert norms == norms_of_host
            assert same_bits(state, state_of_host)


class Own(torch.optim.AdamW):
    """Its `step` may do anything."""


def with_a_step_that_can_be_void(rank: int) -> list[tuple[bool, bool]]:
    found = []
    for optimizer_class, fused in ((torch.optim.AdamW, True), (torch.optim.AdamW, None), (Own, True)):
        model = make(Net)
        zeroshard.shard(model, "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), optimizer_class, lr=1e-2, fused=fused)
        stepper: Any = optimizer.steppers[0]
        before = is_fused(stepper, optimizer.param_groups)
        loss_of_tokens(model, rank, 0, 0).backward()
        optimizer.step()
        found.append((before, is_fused(stepper, optimizer.param_groups)))
    return found


def test_only_torchs_own_fused_steps_with_state_can_be_void() -> None:
    assert run_ranks(with_a_step_that_can_be_void, 1)[0] == [(False, True), (False, False), (False, False)]
