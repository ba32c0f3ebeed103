"""User hooks that read weights, registered before and after `shard`.

Weights are gathered before, and hidden after, all user hooks. `nn.utils.spectral_norm` and `weight_norm`, which compute
the weight in a hook before forward, once gave NaN under ZERO3, as their hook ran before the one that gathers.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import (
    PLANS,
    Job,
    Outcome,
    State,
    beside_one_process,
    make,
    plans_of,
    same_bits,
    train,
    train_reference,
    travelling,
)
from tests.patience import HANG
from zeroshard.testing import run_ranks

WIDTH = 12


def normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old forms are deprecated, but in use
            layers = [wrap(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))

    return build


class Recurrent(nn.Module):
    """Its list of weights holds the one that was normed, until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = parametrizations.weight_norm(nn.LSTM(WIDTH, WIDTH), "weight_hh_l0")
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": normed(nn.utils.spectral_norm),
    "weight norm": normed(nn.utils.weight_norm),
    "parametrized: spectral norm": normed(parametrizations.spectral_norm),
    "parametrized: weight norm": normed(parametrizations.weight_norm),
    "parametrized: orthogonal": normed(parametrizations.orthogonal),
    "parametrized: weight norm of an LSTM": Recurrent,
}


def data(rank: int, micro_batch: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step))


def loss_of(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    out: Tensor = model(data(rank, micro_batch, step))
    return out.square().mean() / micro_batches


def same_data(model: nn.Module, rank: int, *args: int) -> Tensor:
    """All ranks use the same data, as buffers (the vector of the power iteration) are not synchronised."""
    return loss_of(model, 0, *args)


@functools.cache
def train_wrapped() -> tuple[dict[str, Outcome], list[dict[str, list[Outcome]]]]:
    """Results of one process, and of each rank, by name."""
    jobs = {name: Job(model=build, loss_of=same_data) for name, build in WRAPS.items()}
    ways = [(zeroshard.ZERO1, 1), *((zeroshard.ZERO3, units) for units in (nn.Linear, 1, 1 << 20))]

    def run(rank: int) -> dict[str, list[Outcome]]:
        return {name: [train(replace(job, units=u), plan, rank) for plan, u in ways] for name, job in jobs.items()}

    def truth() -> dict[str, Outcome]:
        return {name: train_reference(job, 1)[0] for name, job in jobs.items()}

    return beside_one_process(truth, run, 2)


@pytest.mark.parametrize("name", WRAPS)
def test_weights_computed_before_forward(name: str) -> None:
    expected, by_rank = train_wrapped()
    for found in by_rank:
        for outcome in found[name]:
            assert outcome.losses == expected[name].losses
            assert same_bits(outcome.weights, expected[name].weights)


class Reader(nn.Module):
    """Layers with each kind of hook that torch has; the hooks read the weight and change values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def read_before(module: Any, args: Any) -> Any:
    return (args[0] * module.weight.norm(),)


def read_before_by_name(module: Any, args: Any, kwargs: Any) -> Any:
    return (args[0] + module.bias, *args[1:]), kwargs


def read_after(module: Any, args: Any, output: Tensor) -> Tensor:
    return output + module.weight.mean() * module.bias


def read_in_backward(module: Any, grads_in: Any, grads_out: Any) -> Any:
    return (grads_in[0] * module.weight.detach().norm(),)


def add_hooks(model: nn.Module) -> None:
    for layer in model.get_submodule("layers").children():
        layer.register_forward_pre_hook(read_before)
        layer.register_forward_pre_hook(read_before_by_name, with_kwargs=True)
        layer.register_forward_hook(read_after)
        layer.register_forward_hook(read_after, always_call=True)
        layer.register_full_backward_hook(read_in_backward)
        layer.weight.register_hook(lambda grad, weight=layer.weight: grad + 0.1 * weight.detach())


@pytest.mark.parametrize("after_shard", [False, True])
def test_hooks_that_read_weights(after_shard: bool) -> None:
    def build() -> nn.Module:
        model = Reader()
        add_hooks(model)
        return model

    def truth() -> list[Outcome]:
        return train_reference(Job(model=build, loss_of=loss_of, micro_batches=2), 2)

    def run(rank: int) -> list[Any]:
        results = []
        for turn, plan in enumerate(PLANS if EVERYTHING else (PLANS[after_shard], zeroshard.ZERO3)):
            units = 1 if (turn + after_shard) % 2 else nn.Linear
            hooked: list[nn.Module] = []

            def late(model: nn.Module, *args: int, hooked: list[nn.Module] = hooked) -> Tensor:
                if not hooked:
                    add_hooks(model)
                    hooked.append(model)
                return loss_of(model, *args)

            job = Job(model=build, loss_of=loss_of, units=units, micro_batches=2)
            if after_shard:
                job = Job(model=Reader, loss_of=late, units=units, micro_batches=2)
            results.append(train(job, plan, rank))
        return results

    for of_rank, *found in zip(*beside_one_process(truth, run, 2), strict=True):
        for outcome in found[0]:
            assert outcome.losses == of_rank.losses
            assert same_bits(outcome.weights, of_rank.weights)


def test_a_hook_that_raises_before_ours_leaves_no_trace() -> None:
    """The engine's hook after forward runs even if the one before it did not. It once closed a unit that had not been
    opened, and from then on the unit's weights were hidden while in use."""

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("not now")

    def check(rank: int) -> None:
        model = Reader()
        plain = Reader()
        plain.load_state_dict(model.state_dict())
        zeroshard.shard(model, "zero3", units=nn.Linear)
        expected = plain(data(rank, 0, 0))
        for _ in range(3):
            removable = model.layers[1].register_forward_pre_hook(refuse, prepend=True)
            with pytest.raises(ValueError, match="not now"):
                model(data(rank, 0, 0))
            removable.remove()
            assert torch.equal(model(data(rank, 0, 0)), expected)

    torch.manual_seed(0)
    run_ranks(check, 1)


def test_hooks_that_want_to_be_first() -> None:
    """Hooks that are registered after `shard` with `prepend=True` once ran before the hook that gathers, and read NaN.
    Now a call of the model restores the order of its modules' hooks."""

    def run(rank: int) -> list[Any]:
        found = []
        for plan in plans_of(1):
            model = make(Reader)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            losses = []
            for step in range(3):
                if step in (0, 2):
                    for layer in model.get_submodule("layers").children():
                        layer.register_forward_pre_hook(read_before, prepend=True)
                loss = loss_of(model, rank, 0, step, 1)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            found.append((losses, handle.full_state_dict()))
        return found

    for of_rank in run_ranks(run, 2):
        assert all(math.isfinite(loss) for loss in of_rank[0][0])
        for losses, weights in of_rank:
            assert losses == of_rank[0][0] and same_bits(weights, of_rank[0][1])


def test_hooks_of_a_layer_that_is_called_alone() -> None:
    """While the call of a unit runs, the engine's hooks are off the layers inside. Afterwards they are around those of
    the user again."""

    @torch.no_grad()
    def run(rank: int) -> None:
        def results(model: Any) -> list[Tensor]:
            for layer in model.layers:
                layer.register_forward_pre_hook(read_before)
                layer.register_forward_hook(read_after)
            return [called(data(0, 0, 0)) for _ in range(2) for called in (model, model.layers[1])]

        expected = results(make(Reader))
        for plan in PLANS:
            model = make(Reader)
            handle = zeroshard.shard(model, plan, units=1 << 20)  # one unit
            assert all(map(torch.equal, results(model), expected))
            handle.close()

    run_ranks(run, 2)


class Written(nn.Module):
    """Of a parameter that autograd saves itself, and whose version is the number of writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(4))
        for _ in range(writes):
            nn.init.normal_(self.factors)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.factors)


def trained_with_changes(rank: int, plan: zeroshard.Plan, writes: int) -> State:
    model = make(lambda: nn.Sequential(*(nn.Sequential(Written(writes)) for _ in range(4))))
    handle = zeroshard.shard(model, plan, units=nn.Sequential)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for step in range(2):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.linspace(-1, 1, 8).view(2, 4) * (rank + step + 1)
            loss = model(x).square().sum()
            x.zero_()
            loss.backward()
        optimizer.step()
    return handle.full_state_dict()


def test_saved_tensors_may_be_changed_where_torch_keeps_their_values() -> None:
    """torch took the gather of a unit for a write to a saved parameter of another one, by address and version, and
    tried to clone it: one rank raised, while the other waited for it."""

    def check(rank: int) -> None:
        for way in ("shared", "pairwise", "native"):
            with travelling(way):
                for writes in range(3):
                    expected, found = (
                        trained_with_changes(rank, plan, writes) for plan in (zeroshard.ZERO2, zeroshard.ZERO3)
                    )
                    assert same_bits(found, expected), (way, writes)

    run_ranks(check, 2, collective_timeout=HANG)


def test_hooks_on_gradients_of_a_model_without_values_yet() -> None:
    """Those of a model on the meta device were never called, without an error."""

    def check(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        called = []
        model.weight.register_hook(lambda grad: called.append("gradient"))
        handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
        zeroshard.shard(model, "zero3", materialize=nn.Linear.reset_parameters)
        model(torch.ones(2, 4)).sum().backward()
        assert called == ["gradient", "accumulated"]
        handle.remove()  # type: ignore[no-untyped-call]
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert called == ["gradient", "accumulated", "gradient"]

    run_ranks(check, 2)
