"""Modules that read parameters of submodules without calling these.

Under ZERO3, `nn.ParameterList`s above 32 MiB that the module around them reads once gave NaN in forward. So did
`nn.MultiheadAttention`, which passes `out_proj.weight` to a function, under `units=nn.Linear` or at a width of 1,450;
in evaluation there was no error. The cause: a unit boundary inside of a module that reads all these parameters at once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Job, Outcome, beside_one_process, same_bits, train, train_reference
from tests.together import in_turn, on_ranks
from zeroshard.model.absent import is_absent
from zeroshard.model.paths import modules_of
from zeroshard.model.readers import is_whole, readers
from zeroshard.model.units import choose_units
from zeroshard.placement import Plan
from zeroshard.testing import expect_same_logs

WIDTH, HEADS, CLASSES = 12, 2, 21


class Lists(nn.Module):
    """Parameters in lists and tables that are never called, next to layers that are."""

    class Table(nn.Module):
        """A module of which only methods are called."""

        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(7, WIDTH))

        def look_up(self, index: int) -> Tensor:
            return self.rows[index]

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.second = nn.Linear(WIDTH, WIDTH)
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)})
        self.nested = nn.ModuleList([nn.ParameterList([torch.randn(WIDTH)]), nn.Linear(WIDTH, WIDTH)])
        self.table = self.Table()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scales[0] + self.scales[2]
        x = self.second(x) @ self.named["a"] + self.named["b"]
        return self.nested[1](torch.tanh(x) * self.nested[0][0]) + self.table.look_up(3)


class Stack(nn.Module):
    """A sequence of modules of one class."""

    def __init__(self, part: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(part() for _ in range(count))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for part in self.parts:
            x = part(x)
        return self.after(x)


class Attends(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **arguments)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    """Torch's encoder, with its fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.encoder(x))


class Adapted(nn.Linear):
    """A layer with submodules of its own base class."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.up.weight @ self.down.weight, self.bias)


class Classes(nn.Module):
    """The targets of the batch decide which clusters run, so that ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, [3, 9], div_value=2.0)

    def forward(self, x: Tensor) -> Tensor:
        targets = (x[:, 0, 0] * 1000).long().abs() % CLASSES
        return self.loss(self.before(x[:, 0]), targets).loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[:, 0]
        for column in self.lstm(x)[0].unbind(1):
            hidden = self.cell(column, hidden)
        out: Tensor = self.last(hidden)
        return out


class Scripted(nn.Module):
    """torch runs no hooks around calls of the scripted part, nor inside the traced one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.scripted = torch.jit.script(parts[0])
            self.traced = torch.jit.trace(parts[1], torch.zeros(2, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.jit.optimized_execution(False):  # else kernels change after some calls, and ranks call less often
            out: Tensor = self.traced(self.scripted(self.first(x)))
        return out


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * step))


def loss_of(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    out: Tensor = model(data(rank, 100 * micro_batch + step))
    return (out.square().mean() if out.dim() else out) / micro_batches


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "lists": (Lists, (1, 600, nn.Linear, (nn.Linear, nn.ParameterList), Lists.Table)),
    "attention": (lambda: Stack(Attends), (1, nn.Linear, nn.MultiheadAttention)),
    "attention, other keys": (lambda: Stack(lambda: Attends(add_bias_kv=True, bias=False)), (1, nn.Linear)),
    "encoder layer": (lambda: Stack(layer), (1, nn.Linear, (nn.Linear, nn.LayerNorm), nn.MultiheadAttention)),
    "encoder": (Encoder, (1, nn.Linear)),
    "derived layer": (lambda: Stack(Adapted), (1, nn.Linear)),
    "adaptive softmax": (Classes, (1, nn.Linear)),
    "recurrent": (Recurrent, (1, nn.Linear)),
    "scripted and traced": (Scripted, (1, nn.Linear, [("first", "scripted")])),
}


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, Tensor]
    evaluated: Tensor
    log: Any


def job(name: str, units: Any = None) -> Job:
    return Job(model=CASES[name][0], units=units, loss_of=loss_of, steps=2, micro_batches=2 if EVERYTHING else 1)


def settings(name: str) -> list[tuple[Any, Plan]]:
    """All plans, or one with full weights and one without, with a model's first policy of units. The other policies
    only under ZERO3: where weights are there in full, a forward reads them whatever the units are."""
    first, *others = CASES[name][1]
    plans = PLANS if EVERYTHING else (zeroshard.ZERO1, zeroshard.ZERO3)
    return [(first, plan) for plan in plans] + [(units, zeroshard.ZERO3) for units in others]


def run(rank: int, name: str, units: Any, plan: Plan) -> Result:
    trained = train(job(name, units), plan, rank)
    plain = CASES[name][0]()
    plain.load_state_dict(trained.weights)
    handle = zeroshard.shard(plain.eval(), plan, units=units)
    with torch.no_grad():
        evaluated = plain(data(rank, 7))
    return Result(trained.losses, trained.weights, evaluated, handle.comm_log)


def run_plain(name: str) -> list[tuple[Outcome, Tensor]]:
    """The plain model's results, for each rank."""
    outcomes = train_reference(job(name), 2)
    plain = CASES[name][0]()
    plain.load_state_dict(outcomes[0].weights)
    plain.eval()
    with torch.no_grad():
        return [(outcome, plain(data(of_rank, 7))) for of_rank, outcome in enumerate(outcomes)]


@functools.cache
def run_all() -> tuple[dict[str, list[tuple[Outcome, Tensor]]], list[dict[str, list[Result]]]]:
    """Results of one process, and of each rank, by name."""
    return beside_one_process(
        lambda: {name: run_plain(name) for name in CASES},
        lambda rank: {name: [run(rank, name, *how) for how in settings(name)] for name in CASES},
        2,
    )


@pytest.mark.by_cpu
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_reads_is_there(name: str) -> None:
    """Training gives the bits of one process, and evaluating the result gives those of the plain model."""
    truth, found = run_all()
    for how, *results in zip(settings(name), *(of_rank[name] for of_rank in found), strict=True):
        expect_same_logs([result.log for result in results])
        for result, (outcome, evaluated) in zip(results, truth[name], strict=True):
            assert result.losses == outcome.losses, how
            assert same_bits(result.weights, outcome.weights), how
            assert torch.equal(result.evaluated, evaluated), how


class Padded(nn.Module):
    """Torch's encoder takes its fast path by the class of its first layer's parameters. It then sets padded places to
    zero."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer(), 3, norm=nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        out: Tensor = self.encoder(self.before(x), src_key_padding_mask=padding)
        return out


PADDED = [(plan, units) for plan in PLANS for units in (nn.TransformerEncoderLayer, 1, Padded)]


@pytest.mark.by_cpu
@on_ranks(2)
def test_padded_places_in_evaluation_are_those_of_the_plain_model(rank: int) -> None:
    """Also right after a step, when weights that rest in full are still arriving."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        in_turn(expect_plain_padded_places, PADDED)(rank)


def expect_plain_padded_places(rank: int, plan: Plan, units: Any) -> None:
    torch.manual_seed(0)
    model, plain, lengths = Padded(), Padded().eval(), torch.tensor([5, 3])
    handle = zeroshard.shard(model, plan, units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for step, scope in enumerate((torch.no_grad, torch.inference_mode)):
        model.train()(data(rank, step), lengths).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with scope():
            found = model.eval()(data(rank, 9), lengths)
        plain.load_state_dict(handle.full_state_dict())
        with scope():
            assert torch.equal(found, plain(data(rank, 9), lengths))
        model.encoder.layers[0].train()
        with torch.no_grad():
            slow = model(data(rank, 9), lengths)
        model.eval()
        assert not torch.equal(slow, found)  # the test can tell the two computations apart
    with pytest.raises(RuntimeError, match="Mask size"), torch.no_grad():  # raised before the first layer is called
        model.encoder(data(rank, 9), src_key_padding_mask=torch.ones(2, 4, dtype=torch.bool))
    assert is_absent(model.encoder.layers[0].linear1.weight) == (plan is zeroshard.ZERO3)


def test_default_units_at_a_size_where_a_module_is_divided() -> None:
    """At a width of 1,700, the attention and each of three lists are above 32 MiB."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lists = nn.ModuleList(nn.ParameterList([torch.empty(3000, 3000)]) for _ in range(3))
            self.attention = nn.MultiheadAttention(1700, 1)
            self.last = nn.Linear(4000, 4000)

        def forward(self) -> None: ...

    with torch.device("meta"):
        specs = choose_units(Large(), None, None)
    unit_of = {name: spec for spec in specs for name in spec.names}
    assert unit_of["attention.in_proj_weight"] is unit_of["attention.out_proj.weight"]
    assert unit_of["attention.in_proj_weight"].modules[0] == "attention"
    assert {unit_of[f"lists.{i}.0"].name for i in range(3)} == {"root"}
    assert unit_of["last.weight"] is not unit_of["attention.in_proj_weight"]


def test_who_reads_what() -> None:
    model = nn.Sequential(Lists(), Attends(), layer(), nn.TransformerDecoderLayer(WIDTH, HEADS))
    read_by = readers(modules_of(model))
    assert {path for path, reader in read_by.items() if path != reader} == {
        *(f"0.{name}" for name in ("scales", "named", "nested", "nested.0", "table")),
        "1.attention.out_proj",
        *(f"2.{name}" for name in ("self_attn", "self_attn.out_proj", "linear1", "dropout", "linear2")),
        *(f"2.{name}" for name in ("norm1", "norm2", "dropout1", "dropout2")),
        "3.self_attn.out_proj",
        "3.multihead_attn.out_proj",
    }
    assert read_by["2.self_attn.out_proj"] == "2"
    assert read_by["0.nested.0"] == "0"


def test_torch_has_no_other_modules_that_are_taken_to_be_whole_and_are_containers() -> None:
    """Torch classes whose submodules come from the user must be divisible into units; otherwise a whole model is one
    unit."""
    part = nn.Linear(2, 2)
    stacks = nn.Transformer(4, 2, 1, 1, 4, batch_first=True), Encoder().encoder
    for module in (nn.Sequential(part), nn.ModuleList([part]), nn.ModuleDict({"a": part}), *stacks):
        assert not is_whole(module)
    assert is_whole(Adapted())
    assert not is_whole(Lists())
