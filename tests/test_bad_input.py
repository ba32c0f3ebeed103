"""Mistakes of a user: every rank soon raises one clear error, and no hook or buffer stays attached to the model."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import NUM_RANKS, WIDTH, Block, Job, Net, loss_of_tokens, make, plans_of, same_bits, train, with_plans
from tests.together import in_turn, on_ranks
from zeroshard.failures.lost import LostPeer
from zeroshard.failures.notices import Cause
from zeroshard.placement import REPLICATED, SHARDED, Plan
from zeroshard.precision import MixedPrecision
from zeroshard.testing import RankError, run_ranks


def every_error(kind: type[zeroshard.Error] = zeroshard.Error) -> Iterator[type[zeroshard.Error]]:
    yield kind
    for one in kind.__subclasses__():
        yield from every_error(one)


def test_errors_can_be_sent_to_other_processes() -> None:
    """What a worker of a process pool raises is pickled, and the pool breaks if it cannot be read."""
    made = [kind.__new__(kind, "a text") for kind in every_error()]
    assert len(made) > 15
    lost = LostPeer("a text", Cause(1, "has ended"), ["rank 2 waits"])
    lost.add_note("a note")
    for error in (*made, lost, RankError(1, "a text")):
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)


def hooks(model: nn.Module) -> int:
    """The number of hooks on the modules and parameters of the model."""
    of_modules = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    )
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def state(model: nn.Module) -> Any:
    """All that `shard` changes: the address and values of each parameter, and the number of hooks."""
    parameters = {name: (p.data_ptr(), p.shape, p.dtype, id(p)) for name, p in model.named_parameters()}
    return parameters, {name: value.clone() for name, value in model.state_dict().items()}, hooks(model)


def expect_plain(model: nn.Module, before: Any, *, moved: bool = False) -> None:
    """`moved`: parameters may lie elsewhere, each in a storage of its own."""
    after = state(model)
    if moved:
        assert {name: found[1:] for name, found in after[0].items()} == {n: was[1:] for n, was in before[0].items()}
        assert all(p.untyped_storage().nbytes() == p.nbytes and p.is_contiguous() for p in model.parameters())
    else:
        assert after[0] == before[0]
    assert same_bits(after[1], before[1])
    assert after[2] == before[2]


def expect_trainable(model: nn.Module, rank: int) -> None:
    handle = zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    optimizer.backward(loss_of_tokens(model, rank, 0, 0))
    assert optimizer.step().applied
    handle.close()


def raises_on_one(module: nn.Module) -> bool:
    if torch.distributed.get_rank() == 1:
        raise KeyError("a mistake in the user's function")
    return isinstance(module, Block)


def with_complex() -> nn.Module:
    model = Net()
    model.extra = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


def with_buffer(buffer: Tensor) -> nn.Module:
    model = Net()
    model.register_buffer("kept", buffer)
    return model


def frozen_on(rank: int, last: int) -> nn.Module:
    model = Net()
    model.norm.weight.requires_grad_(rank != last)
    return model


def renamed(rank: int, last: int) -> nn.Module:
    model = Net()
    if rank == last:
        model.tail = model.norm
        del model.norm
        model.norm = nn.Identity()
    return model


def half_on(rank: int, last: int) -> nn.Module:
    model = Net()
    model.head.to(torch.bfloat16 if rank == last else torch.float32)
    return model


Case = tuple[Callable[[int, int], nn.Module], Callable[[int, int], dict[str, Any]], str]
"""(rank, last rank) -> model; (rank, last rank) -> arguments of `shard`; a pattern of the message."""


def same(**arguments: Any) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, last: {"plan": "zero2", "units": Block, **arguments}


def net(rank: int, last: int) -> nn.Module:
    return Net()


CASES: dict[str, Case] = {
    "unknown plan": (net, same(plan="zero4"), r"unknown plan 'zero4': expected one of 'ddp', .*did you mean 'zero"),
    "a stage that is none": (net, same(plan=4), "unknown plan 4: expected one of"),
    "a plan that is no plan": (net, same(plan=True), "unknown plan True: expected one of"),
    "a plan that is a mesh": (net, same(plan="HYBRID_SHARD"), "a mesh of two axes: shard\\(model, 'zero3', mesh="),
    "a dtype of integers": (net, same(precision=torch.int8), "unknown precision torch.int8: expected one of"),
    "unknown plan on one rank": (
        net,
        lambda rank, last: {"plan": "zero5" if rank == last else "zero2"},
        r"\(on rank \d\): unknown plan 'zero5'",
    ),
    "a plan for optimizers": (
        net,
        same(plan=zeroshard.OPTIMIZER_ONLY),
        "pass model.parameters\\(\\) to ShardedOptimizer",
    ),
    "a class that matches nothing": (
        net,
        same(units=nn.Conv2d),
        "Conv2d.* matches no module of Net; its modules are of the classes Block, Embedding, LayerNorm, Linear",
    ),
    "a callable that matches nothing": (net, same(units=lambda module: False), "matches no module of Net"),
    "classes of which none matches": (net, same(units=[nn.Conv1d, nn.Conv2d]), "matches no module of Net"),
    "a name of no class": (net, same(units="Blok"), "Net has no module of a class 'Blok'; .*; did you mean 'Block'"),
    "units as a fraction": (net, same(units=0.5), "a callable or a number of bytes, found 0.5"),
    "units as a truth value": (net, same(units=True), "or their names, a callable or a number of bytes"),
    "units of no bytes": (net, same(units=0), "must be positive, found 0"),
    "a callable that raises on one rank": (net, same(units=raises_on_one), r"\(on rank 1\): .*a mistake in the user's"),
    "unknown precision": (net, same(precision="bf61"), "unknown precision 'bf61'.*did you mean 'bf16'"),
    "too little room": (
        net,
        same(plan="zero3", max_transient_bytes=100),
        r"max_transient_bytes=100: .* need \d+ bytes",
    ),
    "complex parameters": (lambda rank, last: with_complex(), same(), "parameter extra is torch.complex64"),
    "on the meta device": (lambda rank, last: Net().to("meta"), same(), "is on the meta device: pass materialize="),
    "another size on one rank": (
        lambda rank, last: Net(blocks=2 if rank == last else 3),
        same(),
        r"different models: rank 0 has 'blocks.2.norm.weight \(19,\).* where rank \d has 'norm.weight",
    ),
    "another name on one rank": (renamed, same(), r"rank 0 has 'norm.weight .* where rank \d has 'head.weight"),
    "another dtype on one rank": (half_on, same(), r"rank 0 has .*float32.* where rank \d has .*bfloat16"),
    "frozen on one rank": (
        frozen_on,
        same(),
        "rank 0 has 'norm.weight .*=True' where rank . has 'norm.weight .*=False'",
    ),
    "another plan on one rank": (
        net,
        lambda rank, last: {"plan": "zero1" if rank == last else "ddp"},
        r"rank 0 has 'plan ddp' where rank \d has 'plan zero1'",
    ),
    "another plan of the same name on one rank": (
        net,
        lambda rank, last: {"plan": Plan("mine", REPLICATED, SHARDED if rank == last else REPLICATED, SHARDED)},
        r"rank 0 has 'placements replicated, replicated, sharded' where rank \d has 'placements replicated, sharded",
    ),
    "a plan of names": (
        net,
        same(plan=Plan("mine", "replicated", "sharded", "sharded")),  # type: ignore[arg-type]
        "plan 'mine': expected three members of zeroshard.placement.Placement, found .'replicated', 'sharded'",
    ),
    "a longer buffer on one rank": (
        lambda rank, last: with_buffer(torch.zeros(4 if rank == last else 3)),
        same(),
        r"rank 0 has 'buffer kept \(3,\) torch.float32' where rank \d has 'buffer kept \(4,\) torch.float32'",
    ),
    "integers in a buffer on one rank": (
        lambda rank, last: with_buffer(torch.zeros(3, dtype=torch.int32 if rank == last else torch.float32)),
        same(),
        r"rank 0 has 'buffer kept \(3,\) torch.float32' where rank \d has 'buffer kept \(3,\) torch.int32'",
    ),
    "other values= on one rank": (
        net,
        lambda rank, last: {"plan": "zero1", "values": "check" if rank == last else "broadcast"},
        "rank 0 has \"values='broadcast'\" where rank . has \"values='check'\"",
    ),
    "other units on one rank": (
        net,
        lambda rank, last: {"plan": "ddp", "units": nn.Linear if rank == last else Block},
        "different models: rank 0 has 'unit .*' where rank . has 'unit",
    ),
    "another precision on one rank": (
        net,
        lambda rank, last: {"plan": "ddp", "units": Block, "precision": "bf16" if rank == last else None},
        "rank 0 has 'unit .*float32.* where rank . has 'unit .*bfloat16",
    ),
}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_shard_refuses_on_every_rank_and_leaves_the_model_plain(num_ranks: int) -> None:
    def check(rank: int) -> None:
        for name, (make_model, arguments, message) in CASES.items():
            torch.manual_seed(rank)  # other values on every rank: a failed `shard` must not overwrite them
            model = make_model(rank, num_ranks - 1)
            on_meta = name == "on the meta device"
            before = None if on_meta else state(model)
            with pytest.raises(ValueError, match=message):
                zeroshard.shard(model, **arguments(rank, num_ranks - 1))
            if not on_meta:
                expect_plain(model, before)
        model = make(Net)
        with pytest.raises(ValueError, match="unknown plan"):
            zeroshard.shard(model, "zeor3")
        expect_trainable(model, rank)

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_ranks_of_which_one_has_no_values_yet_are_told(rank: int) -> None:
    """Rank 0 sent its values while the other one called `materialize`: they waited for each other."""
    model = Net() if rank == 0 else Net().to("meta")
    materialize = None if rank == 0 else lambda module: module.reset_parameters()
    with pytest.raises(ValueError, match="rank 0 has 'its values' where rank 1 has 'no values, on the meta device'"):
        zeroshard.shard(model, "zero3", units=Block, materialize=materialize)


@on_ranks(2)
def test_a_sparse_buffer_is_refused_or_left_alone(rank: int) -> None:
    model = with_buffer(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"buffer kept is of torch\.sparse_coo: only dense ones are sent"):
        zeroshard.shard(model, "zero2", units=Block)
    zeroshard.shard(model, "zero2", units=Block, ignored="kept").close()


@on_ranks(2)
def test_an_expanded_buffer_is_refused_by_name_where_it_would_be_written_to(rank: int) -> None:
    """torch's error about "a single memory location" named none."""
    model = with_buffer(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match=r"buffer kept is expanded.*register a copy \(\.clone\(\)\)"):
        zeroshard.shard(model, "zero2", units=Block)
    zeroshard.shard(model, "zero2", units=Block, ignored="kept").close()
    handle = zeroshard.shard(model, "zero2", units=Block, values="check")
    with pytest.raises(ValueError, match="buffer kept is expanded"):
        handle.average_buffers()
    handle.close()


def test_the_check_for_a_plain_model_sees_a_hook_a_pointer_and_a_value() -> None:
    model = Net()
    before = state(model)
    expect_plain(model, before)
    removable = model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(AssertionError):
        expect_plain(model, before)
    removable.remove()
    expect_plain(model, before)
    original = model.norm.weight.data
    model.norm.weight.data = original.clone()
    with pytest.raises(AssertionError):
        expect_plain(model, before)
    model.norm.weight.data = original
    model.norm.weight.data[3] += 1
    with pytest.raises(AssertionError):
        expect_plain(model, before)


def out_of_memory(patch: pytest.MonkeyPatch, unit: int, rank: int) -> None:
    """One rank runs out of memory while it builds that unit."""
    module = sys.modules["zeroshard.storage.unit"]
    build = module.Unit

    def build_or_fail(index: int, *args: Any) -> Any:
        if index == unit and torch.distributed.get_rank() == rank:
            raise MemoryError(f"no room for unit {unit}")
        return build(index, *args)

    patch.setattr(module, "Unit", build_or_fail)


def test_a_failure_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank runs out of memory while it builds unit 2: on all ranks, the units built before release their
    parameters. The other ranks have freed all parameters by then. They get the values of the first two units from the
    shards, and those of the others from the rank that has failed, which has them still."""

    def check(rank: int) -> None:
        for precision, plan in with_plans((None, "bf16", "bf16-remainder")):
            model = make(Net)
            before = state(model)
            with monkeypatch.context() as patch:
                out_of_memory(patch, 2, rank=1)
                with pytest.raises(
                    ValueError, match=r"shard \(on rank 1\): MemoryError\('no room for unit 2'\)"
                ) as error:
                    zeroshard.shard(model, plan, units=Block, precision=precision)
            assert not hasattr(error.value, "__notes__")
            expect_plain(model, before, moved=True)
            expect_trainable(model, rank)

    run_ranks(check, 3)


def test_what_main_cannot_hold_is_rounded_after_a_failure_and_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen fp32 unit rests in bf16, and nothing else has its values. Also the control for the test above: what is
    not restored differs."""

    def check(rank: int) -> None:
        for plan in plans_of(0):
            model = make(Net)
            model.blocks[0].requires_grad_(False)
            before = dict(make(Net).state_dict())
            with monkeypatch.context() as patch:
                out_of_memory(patch, 2, rank=1)
                with pytest.raises(ValueError, match="no room") as error:
                    zeroshard.shard(model, plan, units=Block, precision="bf16")
            (note,) = error.value.__notes__
            assert note.endswith("rounded to the dtype of main: ['blocks.0']")
            for name, value in model.state_dict().items():
                is_rounded = name.startswith("blocks.0.")
                assert torch.equal(value, before[name].bfloat16().float() if is_rounded else before[name]), name
            assert not torch.equal(model.blocks[0].up.weight, before["blocks.0.up.weight"])

    run_ranks(check, 2)


@on_ranks(2)
def test_a_parameter_has_one_handle(rank: int) -> None:
    model, other = make(Net), make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    other.head.weight = model.head.weight
    for again in (model, other):
        with pytest.raises(
            ValueError, match=r"parameter .* is sharded already, as Handle\(zero.*close\(\) that handle"
        ):
            zeroshard.shard(again, "ddp")
    assert hooks(other) <= 1  # what the first handle has attached to the parameter they share
    handle.close()
    handle.close()
    expect_trainable(model, rank)


@on_ranks(3)
def test_an_optimizer_has_parameters_of_one_handle_and_of_no_other_optimizer(rank: int) -> None:
    first, second, plain = make(Net), make(Net, 1), make(Net, 2)
    one, two = zeroshard.shard(first, "zero3", units=Block), zeroshard.shard(second, "zero2", units=Block)

    class Picky(torch.optim.SGD):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if param_group.get("momentum", 0.0) is None:
                raise TypeError("a momentum is missing")
            super().add_param_group(param_group)

    def build(*parameters: nn.Parameter) -> zeroshard.ShardedOptimizer:
        return zeroshard.ShardedOptimizer(list(parameters), Picky, lr=0.1, momentum=0.0)

    for others in (second.norm.weight, plain.norm.weight):
        with pytest.raises(
            ValueError, match=r"belong to different handles .*: build one .* per handle, or .* nn\.ModuleList"
        ):
            build(first.norm.weight, others)
    optimizer = zeroshard.ShardedOptimizer(one, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"parameter norm.weight belongs to another ShardedOptimizer: .* scheduler`"):
        build(first.norm.weight)
    with pytest.raises(ValueError, match="ShardedOptimizer got an empty parameter list"):
        build()
    with pytest.raises(ValueError, match="Invalid learning rate") as error:
        zeroshard.ShardedOptimizer(two, torch.optim.AdamW, lr=-1.0)
    optimizer.backward(loss_of_tokens(first, rank, 0, 0))
    optimizer.step()
    optimizer.itself = optimizer  # a cycle of references: only a collection frees it
    gc.disable()
    del optimizer
    again = build(first.norm.weight)
    gc.enable()
    again.backward(loss_of_tokens(first, rank, 0, 1))
    again.step()
    with pytest.raises(TypeError, match="a momentum is missing"):
        again.add_param_group({"params": [first.norm.bias], "momentum": None})
    assert len(again.param_groups) == 1
    for optimizer in (again, build(first.norm.bias)):  # which the first one has not kept
        optimizer.backward(loss_of_tokens(first, rank, 0, 2))
        optimizer.step()
    assert error.tb, "the failed optimizer lives on in the frames of its error"
    fresh = zeroshard.ShardedOptimizer(two, torch.optim.SGD, lr=0.1)
    fresh.backward(loss_of_tokens(second, rank, 0, 0))
    fresh.step()


# The order of calls ---------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_calls_in_a_wrong_order_raise_on_every_rank_and_training_goes_on(rank: int) -> list[Any]:
    def check(rank: int, plan: Any) -> Any:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)

        def loss(step: int = 0) -> Tensor:
            return loss_of_tokens(model, rank, 0, step)

        start = handle.full_state_dict()
        for _ in range(2):
            assert not optimizer.step().applied
            assert optimizer.clip_grad_norm_(1.0).item() == 0.0
        with handle.no_sync():
            optimizer.backward(loss())
        with pytest.raises(RuntimeError, match=r"accumulated under no_sync\(\) and never reduced"):
            optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.step().applied
        first = loss()
        optimizer.backward(first)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            optimizer.backward(first)
        optimizer.zero_grad()
        with torch.no_grad(), pytest.raises(RuntimeError, match="the loss has no graph"):
            optimizer.backward(loss())
        with pytest.raises(ValueError, match=r"the loss must be a scalar, found shape \(3, 23\)"):
            optimizer.backward(model(torch.zeros(3, 1, dtype=torch.long))[:, 0])
        for bad in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="max_norm must be positive, found"):
                optimizer.clip_grad_norm_(bad)
        assert same_bits(handle.full_state_dict(), start)
        optimizer.zero_grad()

        # None of these errors has left a trace: training gives the same result as without them.
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(loss(step))
            optimizer.step()
        fresh = train(Job(steps=2), plan, rank)
        assert same_bits(handle.full_state_dict(), fresh.weights)

        handle.close()
        for call in (
            lambda: handle.no_sync().__enter__(),
            handle.memory,
            handle.full_state_dict,
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.backward(loss()),
            lambda: zeroshard.ShardedOptimizer(handle, torch.optim.SGD),
            lambda: handle.unsharded().__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"this handle is closed.*call shard\(\) anew"):
                call()
        loss().backward()  # the model is a plain one
        assert all(p.grad is not None for p in model.parameters())
        return handle.comm_log

    return in_turn(check, plans_of(1))(rank)


@on_ranks(3)
def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_updated(rank: int) -> None:
    for plan in plans_of(1):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        optimizer.step()
        before, moments = handle.full_state_dict(), optimizer.state_dict()["state"]
        loss = loss_of_tokens(model, rank, 0, 1)
        optimizer.backward(loss * (float("nan") if rank == 1 else 1.0))
        with pytest.raises(RuntimeError, match=r"not finite.*weight.*Nothing has been updated"):
            optimizer.step()
        assert same_bits(handle.full_state_dict(), before)
        after = optimizer.state_dict()["state"]
        assert all(same_bits(after[i], moments[i]) for i in moments)
        optimizer.zero_grad()
        optimizer.backward(loss_of_tokens(model, rank, 0, 1))
        assert optimizer.step().applied


@pytest.mark.by_gloo  # whose ranks say beside each gather which unit it is of
@pytest.mark.by_cpu
@on_ranks(3)
def test_ranks_that_run_units_in_another_order_are_told_apart(rank: int) -> None:
    """Ranks that gather two units of equal size in different orders would get each other's weights without an error."""

    class Turned(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for index in (1, 0, 2) if torch.distributed.get_rank() == 1 else (0, 1, 2):
                x = self.blocks[index](x)
            return self.head(self.norm(x))

    model = make(Turned)
    handle = zeroshard.shard(model, "zero3", units=Block)
    own = [unit.weights.own().clone() for unit in handle.engine.units]
    with pytest.raises(RuntimeError, match=r"at unit blocks.[01], at test_.*; rank . is at unit blocks.[10].* Nothing"):
        loss_of_tokens(model, rank, 0, 0)
    assert all(torch.equal(unit.weights.own(), value) for unit, value in zip(handle.engine.units, own, strict=True))


@on_ranks(3)
def test_replaced_data_are_named(rank: int) -> None:
    """Earlier, under DDP, such a parameter kept computing with the replacement, which no step ever updated."""

    class Casts(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            self.head.to(torch.float32)
            return self.head(self.norm(self.blocks[0](self.embed(tokens))).float())

    class Sets(Net):
        """Sets weights in its first forward, by the activations there (ActNorm of normalising flows)."""

        is_set = False

        def forward(self, tokens: Tensor) -> Tensor:
            if not self.is_set:
                self.is_set, self.norm.bias.data = True, self.embed(tokens).detach().mean((0, 1))
            return super().forward(tokens)

    def cast_a_block(model: Any, handle: Any) -> None:
        model.blocks[1].to(torch.float64)

    def set_data(model: Any, handle: Any) -> None:
        model.norm.weight.data = torch.zeros(WIDTH)

    def nothing(model: Any, handle: Any) -> None:
        pass

    def run(rank: int, plan: Any, model: nn.Module, wrong: Callable[..., None], precision: Any = None) -> None:
        handle = zeroshard.shard(model, plan, units=Block, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        wrong(model, handle)
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        assert optimizer.step().applied

    for plan in (zeroshard.DDP, zeroshard.ZERO3):
        for model, wrong, precision, name in (
            (Net, cast_a_block, None, "blocks.1.down.weight"),  # the first in the unit's buffer
            (Net, set_data, None, "norm.weight"),
            (Casts, nothing, "bf16", "head.bias"),
            (Sets, nothing, None, "norm.bias"),
        ):
            said = f"the data of parameter {name} have been replaced"
            if plan is zeroshard.ZERO3 and wrong is cast_a_block:  # at once: there are no values
                said = r"a model that is sharded cannot be moved or cast.*before shard\(\)"
            elif plan is zeroshard.ZERO3 and wrong is set_data:
                said = r"the values of parameter \S+ are not here.*cast a model before shard\(\)"
            with pytest.raises(RuntimeError, match=said):
                run(rank, plan, make(model), wrong, precision)
        run(rank, plan, make(Net), nothing)
        # what the message proposes
        run(rank, plan, make(Casts), nothing, MixedPrecision(keep=(nn.Linear,)))
        once = make(Sets)
        loss_of_tokens(once, 0, 0, 0)
        run(rank, plan, once, nothing)


@on_ranks(2)
def test_data_that_are_turned_in_place_are_named(rank: int) -> None:
    """`p.data.t()` has the address and the shape of a square weight: the model computed with it, in silence."""
    for plan in (zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO2):
        model = make(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)))
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        weight = model[1].weight
        optimizer.backward(model(torch.ones(2, 5)).sum())
        values, weight.data = weight.data, weight.data.t()
        for call in (lambda model=model: model(torch.ones(2, 5)), optimizer.step):
            with pytest.raises(RuntimeError, match=r"1\.weight have been replaced \(found strides \(1, 3"):
                call()
        weight.data = values
        assert optimizer.step().applied


# State and precision --------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_state_that_does_not_fit_changes_nothing(rank: int) -> None:
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    before = handle.full_state_dict()
    last = rank == 2
    cases = {
        "missing head.bias": {name: v for name, v in before.items() if name != "head.bias"},
        "unexpected tail": {**before, "tail": torch.zeros(1)},
        r"head.bias: expected \(23,\), found \(22,\)": {**before, "head.bias": torch.zeros(22)},
    }
    for message, bad in cases.items():
        for given in (bad, bad if last else {name: value + 1 for name, value in before.items()}):
            with pytest.raises(ValueError, match=message):
                handle.load_full_state_dict(given)
            assert same_bits(handle.full_state_dict(), before)
    with pytest.raises(ValueError, match=r"found a str\. A folder .* is for zeroshard\.load\(directory, handle\)"):
        handle.load_full_state_dict("runs/a")  # type: ignore[arg-type]
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
    plain = torch.optim.AdamW([{"params": [p]} for p in Net().parameters()])
    with pytest.raises(ValueError, match="param groups of"):
        optimizer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"param": torch.int8}, "param must be one of .* found torch.int8"),
        ({"grad": None}, "grad must be one of .* found None"),
        ({"main": "master"}, "main must be one of .* found 'master'"),
        ({"param": torch.float16, "main": "remainder"}, "completes bf16 weights to fp32; weights are torch.float16"),
        ({"param": torch.float32, "main": torch.bfloat16}, "main torch.bfloat16 is narrower than the weights"),
    ],
)
def test_a_precision_is_checked_at_birth(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecision(**arguments)


def test_without_a_process_group_shard_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"not initialised: call zeroshard.init\(\) first"):
        zeroshard.shard(Net(), "zero1")
    with pytest.raises(ValueError, match="timeout must be positive, found -1"):
        zeroshard.init(timeout=-1)
