"""Reading a parameter whose values are not on this rank raises an error at the line that reads it.

Such reads once gave NaN: in a loss, for which `step()` could only guess the reason; in evaluation, on a branch that the
first call had not taken, without an error; in an average of the weights (`AveragedModel`), in a `DataLoader` worker, a
thread or a hook. Only `handle.find_reads()` could find the line.
"""

from __future__ import annotations

import copy
import pickle
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, from_dlpack, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import Block, Job, Net, State, loss_of_tokens, make, plans_of, same_bits, train, travelling
from tests.together import in_turn, on_ranks
from zeroshard.model.absent import is_absent
from zeroshard.testing import run_ranks


class Reads(Net):
    """Reads a weight of another unit on request."""

    reads: Callable[[Any], Any] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        if self.reads is not None:
            out = out + self.reads(self)
        return out


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: model.blocks[1].up.weight.norm(),
    "data": lambda model: model.blocks[1].up.weight.data.mean(),
    "view": lambda model: model.blocks[1].up.weight.t()[3].sum(),
    "transposed": lambda model: model.blocks[1].up.weight.mT.sum(),
    "detach": lambda model: model.blocks[1].up.weight.detach().sum(),
    "function": lambda model: nn.functional.linear(torch.ones(19), model.blocks[1].up.weight).sum(),
    "list": lambda model: torch._foreach_norm([model.blocks[1].up.weight])[0],
    "stack": lambda model: torch.stack([torch.zeros(37, 19), model.blocks[1].up.weight]).sum(),
    "clone": lambda model: model.blocks[1].up.weight.clone().sum(),
    "item": lambda model: model.blocks[1].up.weight[0, 0].item(),
    "other operand": lambda model: torch.zeros(37, 19).add_(model.blocks[1].up.weight).sum(),
    "comparison": lambda model: (model.blocks[1].up.weight == 0).sum(),
    "cast": lambda model: model.blocks[1].up.weight.double().float().sum(),
    "numpy": lambda model: float(model.blocks[1].up.weight.detach().numpy().sum()),
    "exchanged": lambda model: from_dlpack(model.blocks[1].up.weight.detach()).sum(),
    "address": lambda model: model.blocks[1].up.weight.data_ptr() * 0,
    "vector": lambda model: parameters_to_vector([model.blocks[1].up.weight]).sum(),
    "copy": lambda model: copy.deepcopy(model.blocks[1].up.weight).sum(),
    "state of a part": lambda model: model.blocks[1].up.state_dict()["weight"].sum(),
    "new parameter": lambda model: nn.Parameter(model.blocks[1].up.weight).sum(),
}
DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda model: model.blocks[1].up.weight.shape[0],
    "strides": lambda model: model.blocks[1].up.weight.stride()[0] + model.blocks[1].up.weight.is_contiguous(),
    "like": lambda model: torch.ones_like(model.blocks[1].up.weight).sum(),
    "new": lambda model: model.blocks[1].up.weight.new_ones(1),
    "as": lambda model: torch.ones(703).view_as(model.blocks[1].up.weight).to(model.blocks[1].up.weight).sum(),
    "numel": lambda model: sum(p.numel() * p.element_size() for p in model.parameters()),
    "length": lambda model: len(model.blocks[1].up.weight),
    "dtype": lambda model: next(model.parameters()).dtype.itemsize,
    "device": lambda model: str(next(model.parameters()).device) == "cpu",
    "gradient": lambda model: model.blocks[1].up.weight.grad is None,
    "leaf": lambda model: model.blocks[1].up.weight.is_leaf and model.blocks[1].up.weight.grad_fn is None,
    "requires_grad": lambda model: model.blocks[1].up.weight.requires_grad_(True).requires_grad,
    "nothing to move": lambda model: model.to("cpu").float() is model,
    "nothing to cast": lambda model: model.blocks[1].up.weight.to(torch.float32) is model.blocks[1].up.weight,
    "node": lambda model: bool(model.blocks[1].up.weight.expand_as(model.blocks[1].up.weight).grad_fn.next_functions),
    "hook": lambda model: bool(model.blocks[1].up.weight.register_hook(print).remove() or True),
    "in a dictionary": lambda model: dict.fromkeys(model.parameters(), 1.0)[model.blocks[1].up.weight],
    "is a parameter": lambda model: isinstance(model.blocks[1].up.weight, nn.Parameter),
}
MESSAGE = r"parameter blocks\.1\.up\.weight are not here, as no module of its unit runs \(unit blocks\.1\)"
TOKENS = torch.zeros(1, 2, dtype=torch.long)


@pytest.fixture(scope="module", autouse=True)
def workers_that_raise_are_waited_for_briefly() -> Iterator[None]:
    """torch waits five seconds for a `DataLoader` worker that has raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
        yield


def line_of(error: BaseException) -> str:
    """The innermost line of this file in the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return frames[-1].line or ""


def expect_read(read: Callable[[], object], name: object = "") -> None:
    with pytest.raises(RuntimeError, match=MESSAGE) as error:
        read()
    assert "blocks[1].up" in line_of(error.value), name


@pytest.mark.by_cpu
@on_ranks(2)
def test_a_forward_that_reads_what_is_not_there_raises_at_its_line(rank: int) -> None:
    """In the first call, and on a branch that only a later call takes."""

    def check(rank: int, how: str) -> None:
        model = make(Reads)
        handle = zeroshard.shard(model.train(how == "training"), "zero3", units=Block)
        before = handle.full_state_dict()
        with {"training": torch.enable_grad, "evaluation": torch.no_grad, "inference": torch.inference_mode}[how]():
            for name, reads in READS.items():
                model.reads = reads
                expect_read(lambda: model(TOKENS), name)
                model.reads = None
                assert model(TOKENS).isfinite().all()
        assert same_bits(handle.full_state_dict(), before)

    in_turn(check, ["training", "evaluation", "inference"])(rank)


@on_ranks(2)
def test_code_in_cpp_that_exchanges_tensors_has_to_ask(rank: int) -> None:
    """Libraries of kernels look for this attribute of the class. They got NaN; without it they call `__dlpack__`."""
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    weight, name = model.blocks[1].up.weight, "__dlpack_c_exchange_api__"
    assert not hasattr(type(weight), name) and not hasattr(weight, name)
    with handle.unsharded():
        assert hasattr(type(weight), name) == hasattr(Tensor, name)


@on_ranks(3)
def test_so_does_a_read_outside_of_forward(rank: int) -> None:
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for step in range(2):
        for name, reads in READS.items():
            expect_read(lambda reads=reads: reads(model), name)
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        expect_read(lambda: READS["norm"](model), "between backward and step")
        optimizer.step()
    handle.close()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert READS["norm"](model).isfinite()


@pytest.mark.by_cpu
@on_ranks(2)
def test_what_is_here_is_read_as_in_plain_torch(rank: int) -> None:
    """The negative control: where every rank holds the weights, and inside `unsharded`."""

    @torch.no_grad()
    def check(rank: int) -> None:
        plain = make(Net)
        expected = {name: float(reads(plain)) for name, reads in READS.items()}
        for plan in plans_of(1):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            if plan is not zeroshard.ZERO3:
                assert {name: float(reads(model)) for name, reads in READS.items()} == expected
            with handle.unsharded("blocks.1"):
                assert {name: float(reads(model)) for name, reads in READS.items()} == expected
                assert not is_absent(model.blocks[1].up.weight)
                assert is_absent(model.blocks[0].up.weight) is (plan is zeroshard.ZERO3)
            if plan is zeroshard.ZERO3:
                expect_read(lambda model=model: READS["norm"](model))

    check(rank)


class Yields(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield x @ self.weight


class Awaits(nn.Linear):
    async def forward(self, x: Tensor) -> Any:
        return x @ self.weight


@pytest.mark.by_cpu
@on_ranks(2)
def test_a_forward_that_runs_later_is_named(rank: int) -> None:
    """The message was that of any read outside of a forward."""
    for module, kind in ((Yields(3, 3), "generator"), (Awaits(3, 3), "coroutine")):
        zeroshard.shard(module, "zero3")
        with pytest.raises(RuntimeError, match=f"weight are not here, .* as it is in a {kind}: let forward be a plain"):
            module(torch.ones(2, 3)).send(None)


class Sums(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(weight.sum() for weight in self.parameters())


@on_ranks(2)
def test_a_generator_in_a_forward_is_not_taken_for_a_forward_that_runs_later(rank: int) -> None:
    """The advice was to return a list."""
    model = make(Sums)
    zeroshard.shard(model, "zero3", units=Block)
    with pytest.raises(RuntimeError, match=r"weight are not here, .* let units= name a block that contains all uses"):
        loss_of_tokens(model, rank, 0, 0)


@pytest.mark.by_cpu
@on_ranks(2)
def test_descriptions_are_those_of_the_plain_model(rank: int) -> None:
    plain = make(Reads)
    expected = {name: float(describes(plain)) for name, describes in DESCRIPTIONS.items()}
    model = make(Reads)
    zeroshard.shard(model.eval(), "zero3", units=Block)
    assert {name: float(describes(model)) for name, describes in DESCRIPTIONS.items()} == expected
    weight = model.blocks[1].up.weight
    first, own, *others = repr(model).splitlines()
    assert own.startswith("  sharded by zeroshard: zero3")
    assert [first, *others] == repr(plain.eval()).splitlines()
    text = r"parameter blocks.1.up.weight: shape \(37, 19\), torch.float32, on cpu; its values are not here"
    for shown in (repr(weight), str(weight), f"{weight}", str([weight])):
        assert re.search(text, shown), shown
    for describes in DESCRIPTIONS.values():
        model.reads = describes
        assert model(TOKENS).isfinite().all()
    model.reads = lambda model: torch.tensor(torch.nan)  # NaN of the user's own is no error
    assert model(TOKENS).isnan().all()


@pytest.mark.by_cpu
@on_ranks(2)
def test_what_would_move_cast_or_replace_a_model_raises(rank: int) -> None:
    """For example `model.half()` after `shard`, which would replace the values by NaN."""
    changes: dict[str, Callable[[Any], object]] = {
        "half": lambda part: part.half(),
        "to": lambda part: part.to(torch.float64),
        "meta": lambda part: part.to("meta"),
        "apply": lambda part: part.apply(lambda module: nn.init.normal_(module.weight)),
        "share": lambda part: part.share_memory(),
        "pickle": lambda part: pickle.dumps(part.weight),
        "data": lambda part: setattr(part.weight, "data", torch.ones(37, 19)),
        "load": lambda part: part.load_state_dict({"weight": torch.ones(37, 19), "bias": torch.ones(37)}),
    }

    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    before = handle.full_state_dict()
    for name, change in changes.items():
        moves = name in ("half", "to", "meta", "share")
        said = "is sharded cannot be moved or cast" if moves else r"parameter blocks\.1\.up\.\w+ are not here"
        with pytest.raises(RuntimeError, match=said):
            change(model.blocks[1].up)
    assert model(TOKENS).isfinite().all()
    assert same_bits(handle.full_state_dict(), before)


class Weights(Dataset[Tensor]):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        weight: Tensor = self.model.blocks[1].up.weight
        return weight.detach().mean()


@on_ranks(2)
def test_averages_threads_and_workers(rank: int) -> None:
    model = make(Net)
    averaged = AveragedModel(model)
    handle = zeroshard.shard(model, "zero3", units=Block)
    with pytest.raises(RuntimeError, match=r"the values of parameter .* are not here"):
        averaged.update_parameters(model)
    with handle.unsharded():
        averaged.update_parameters(model)
    assert averaged.module.head.bias.isfinite().all()
    with pytest.raises(TypeError, match="cannot be copied"):
        AveragedModel(model)

    errors: list[BaseException] = []

    def watch() -> None:
        try:
            READS["norm"](model)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "parameter blocks.1.up.weight" in str(errors[0])

    for workers in (0, 1):
        forked = "fork" if workers else None  # by default, Python 3.14 would pickle the model
        with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.up\.weight are not here"):
            list(DataLoader(Weights(model), num_workers=workers, multiprocessing_context=forked))


class Calls(Weights):
    """Calls a unit of the model."""

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            called: Tensor = self.model.blocks[1](torch.ones(1, 19))
        return called


@on_ranks(2)
def test_workers_that_call_a_unit(rank: int) -> None:
    """Without shared memory they waited for messages that never come to a copy of a rank."""

    def check(rank: int, way: str) -> None:
        with travelling(way):
            model = make(Net)
            handle = zeroshard.shard(model, "zero3", units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            for step in range(2):
                loss_of_tokens(model, rank, 0, step).backward()
                optimizer.step()
                with pytest.raises(RuntimeError, match="forked from a rank, and cannot exchange data"):
                    list(DataLoader(Calls(model), num_workers=1, multiprocessing_context="fork"))
            handle.close()

    in_turn(check, ["shared", "pairwise"])(rank)


@on_ranks(2)
def test_gradients_may_be_asked_for_by_parameters_that_are_not_here(rank: int) -> None:
    """`torch.autograd.grad` and `backward(inputs=...)` use a parameter's position in the graph, not its values."""
    plain, model = make(Net), make(Net)
    names = ["blocks.1.up.weight", "head.bias"]
    wanted = torch.autograd.grad(loss_of_tokens(plain, rank, 0, 0), [plain.get_parameter(name) for name in names])
    handle = zeroshard.shard(model, "zero3", units=Block)
    zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    inputs = [model.get_parameter(name) for name in names]
    loss = loss_of_tokens(model, rank, 0, 0)
    assert is_absent(inputs[0])
    found = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    loss_of_tokens(model, rank, 0, 0).backward(inputs=inputs)
    assert handle.gradient("head.bias").any()


class Marked(nn.Parameter):
    """A subclass of the user."""


@on_ranks(2)
def test_a_class_of_the_users_stays_what_it_is(rank: int) -> None:
    model = make(Net)
    model.head.bias = Marked(model.head.bias.detach())
    handle = zeroshard.shard(model, "zero3", units=Block)
    assert isinstance(model.head.bias, Marked) and is_absent(model.head.bias)
    with pytest.raises(RuntimeError, match=r"parameter head\.bias are not here"):
        model.head.bias.sum()
    with handle.unsharded():
        assert type(model.head.bias) is Marked
    handle.close()
    assert type(model.head.bias) is Marked


@pytest.mark.by_cpu
@pytest.mark.usefixtures("_compiler")
def test_compiled_models_raise_as_well() -> None:
    """By default one rank compiles, beside one that does not: compiling takes most of the time."""

    def check(rank: int, how: str) -> None:
        warnings.simplefilter("ignore")  # warnings of the compiler
        model = make(partial(Reads, blocks=2))
        handle = zeroshard.shard(model, "zero3", units=Block)
        called: Any = model
        if rank == (how == "model") and not EVERYTHING:
            pass  # uncompiled, beside the other one
        elif how == "model":
            model.compile(backend="eager")
        else:
            called = torch.compile(model, backend="eager")
        assert called(TOKENS).isfinite().all()
        model.reads = READS["norm"]
        with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.up\.weight are not here"):
            called(TOKENS)
        with handle.unsharded():
            assert called(TOKENS).isfinite().all()
        with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.up\.weight are not here"):
            called(TOKENS)

    run_ranks(in_turn(check, ["function", "model"] if EVERYTHING else ["function"]), 2)


@on_ranks(2)
def test_find_reads_sees_those_that_python_does_not(rank: int) -> None:
    """C++ code and transforms of `torch.func` that get such a parameter read NaN without an error; `find_reads` detects
    it."""
    unseen: dict[str, Callable[[Tensor], object]] = {
        "tensor": lambda weight: torch.tensor(weight),
        "vmap": lambda weight: torch.vmap(torch.sum)(weight),
    }

    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    for read in unseen.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends a clone
            read(model.blocks[1].up.weight)
            with handle.find_reads(), pytest.raises(RuntimeError, match=MESSAGE):
                read(model.blocks[1].up.weight)
            with handle.unsharded(), handle.find_reads():
                read(model.blocks[1].up.weight)


@on_ranks(2)
def test_being_watched_changes_nothing(rank: int) -> None:
    results: list[State] = []
    for plan in plans_of(1):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        for step in range(2):
            with handle.find_reads():
                loss = loss_of_tokens(model, rank, 0, step)
                loss.backward()
            optimizer.step()
        results.append(handle.full_state_dict())
        assert same_bits(results[-1], train(Job(steps=2), plan, rank).weights)
        assert not torch.utils._python_dispatch._len_torch_dispatch_stack()
