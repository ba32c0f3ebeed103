"""Where inputs and outputs are cast: at the model, at each unit, around modules of another precision.

`b(a(x).float())` once raised under `precision="bf16"` (a matrix product of fp32 and bf16). FSDP2 casts the inputs of
each unit, and zeroshard does so, too.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.kit import State, largest_difference, make, plans_of, same_bits, transport_of, travelling
from tests.together import in_turn, on_ranks
from zeroshard.planner import plan_memory
from zeroshard.precision import MixedPrecision
from zeroshard.reference import Reference

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """Returns fp32."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up = nn.Linear(width, 40)
        self.router = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 40))
        self.down = nn.Linear(40, width)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.up(x))
        gate = self.router(hidden)
        self.seen.update(x=x.dtype, hidden=hidden.dtype, gate=gate.dtype, weight=self.router[0].weight.dtype)
        return x + self.down(hidden * gate.to(hidden.dtype)).float() + (0 if bias is None else bias)


class Model(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 5)
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x, bias=torch.full((24,), 0.1))
            else:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.head(x.to(self.head.weight.dtype))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(9 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).float().square().mean()


def train(rank: int, plan: Any, precision: Any, units: Any = Block, **options: Any) -> tuple[State, Any, Any]:
    model = make(lambda: Model(**options))
    handle = zeroshard.shard(model, plan, units=units, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    for step in range(2):
        optimizer.backward(loss_of(model, rank, step))
        optimizer.step()
    return handle.full_state_dict(main=True), model, (handle.memory(), handle)


def reference(num_ranks: int, precision: Any, units: Any = Block, **options: Any) -> State:
    model = make(lambda: Model(**options))
    truth = Reference(
        model, torch.optim.AdamW, num_ranks=num_ranks, precision=precision, units=units, lr=1e-2, foreach=False
    )
    for step in range(2):
        truth.step(lambda model, rank, _, step=step: loss_of(model, rank, step))
    return {name: truth.main[parameter].detach() for name, parameter in model.named_parameters()}


PATTERNS: Any = {"blocks.*.router": "fp32", "head": "fp32", "*": "bf16"}


@pytest.mark.by_gloo
@pytest.mark.parametrize("way", ["pairwise", "native"])
@on_ranks(2)
def test_one_bucket_stays_although_the_last_two_units_are_open_at_once(rank: int, way: str) -> None:
    """Both are units of the first block, in two precisions. (In shared memory both buckets stay, as planned.)"""
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        with travelling(way):
            _, _, (memory, handle) = train(rank, plan, PATTERNS)
        options = {"units": Block, "precision": PATTERNS, "transport": transport_of(handle)}
        assert options["transport"] == way
        assert memory == plan_memory(make(Model), plan, 2, rank=rank, **options), plan


@pytest.mark.by_cpu
@pytest.mark.parametrize("precision", ["bf16", PATTERNS], ids=["bf16", "patterns"])
@on_ranks(2)
def test_inputs_are_cast_at_units_and_around_patterns(rank: int, precision: Any) -> list[Any]:
    expected, logs = reference(2, precision), []
    for plan in plans_of(precision is PATTERNS):
        state, model, (memory, handle) = train(rank, plan, precision)
        assert same_bits(state, expected), plan
        inside = FP32 if precision is PATTERNS else BF16
        for block in model.blocks:
            assert block.seen == {"x": BF16, "hidden": BF16, "gate": BF16, "weight": inside}, plan
        options = {"units": Block, "precision": precision, "transport": transport_of(handle)}
        assert memory == plan_memory(make(Model), plan, 2, rank=rank, **options), (plan, options)
        logs.append(handle.comm_log)
    return logs


@on_ranks(1)
def test_without_casts_it_raises_as_plain_torch_does(rank: int) -> None:
    """The control: a block with bf16 weights gets an fp32 input."""
    with pytest.raises(RuntimeError, match=r"must have the same dtype|expected .* to have the same dtype"):
        train(rank, "zero3", MixedPrecision(cast_inputs=False))


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_a_recomputed_block_sees_the_same_casts(rank: int, reentrant: bool) -> None:
    """Each block gets an fp32 input; hooks cast it again when backward recomputes the block."""
    expected = reference(2, PATTERNS, checkpointed=reentrant)
    for plan in (zeroshard.ZERO1, zeroshard.ZERO3):
        state, _, _ = train(rank, plan, PATTERNS, checkpointed=reentrant)
        assert same_bits(state, expected), plan


@on_ranks(1)
def test_classes_and_names_the_first_that_matches_counts(rank: int) -> None:
    def dtypes(rank: int, precision: Any) -> dict[str, torch.dtype]:
        model = make(Model)
        zeroshard.shard(model, "zero3", precision=precision)
        return {name: p.dtype for name, p in model.named_parameters() if "bias" in name and "blocks.0" in name}

    router = {"blocks.0.router.0.bias", "blocks.0.router.1.bias"}
    for precision, expected in (
        ({"*.router": "fp32", nn.Linear: "bf16"}, router),  # modules inside a router keep its precision
        ({nn.Linear: "bf16", "*.router": "fp32"}, set()),
        ({"*.router.0": "bf16", nn.Sequential: "fp32", "*": "bf16"}, {"blocks.0.router.1.bias"}),
        ({"blocks.?.up": "bf16"}, router | {"blocks.0.down.bias"}),  # other modules keep the model's dtype
    ):
        found = dtypes(rank, precision)
        assert {name for name, dtype in found.items() if dtype == FP32} == expected, precision


@on_ranks(2)
def test_output(rank: int) -> None:
    """The output dtype of the model, and of a module that a pattern names."""
    for precision, dtype in (("bf16", BF16), (MixedPrecision(output=FP32), FP32)):
        model = make(Model)
        zeroshard.shard(model, "zero3", units=Block, precision=precision)
        assert model(batch(rank, 0)).dtype == dtype
    model = make(Model)
    zeroshard.shard(model, "zero3", precision={"head": MixedPrecision(output=torch.float64), "*": "fp32"})
    out = model(batch(rank, 0))
    assert out.dtype == torch.float64 and model.head.weight.dtype == BF16


@pytest.mark.by_gloo  # DTensor finds no backend for the other one's groups
@on_ranks(2)
def test_the_casts_are_those_of_fsdp2(rank: int) -> None:
    """Outputs and gradients equal those of torch's own policy at the same modules, bit for bit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    theirs = make(Model)
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    ours = make(Model)
    handle = zeroshard.shard(ours, "zero3", units=Block, precision=MixedPrecision(output=FP32))
    outputs = [model(batch(rank, 0)) for model in (theirs, ours)]
    assert outputs[0].dtype == outputs[1].dtype == FP32
    assert torch.equal(*outputs)
    for out in outputs:
        out.square().mean().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(handle.gradient(name), parameter.grad.full_tensor())


class Again(Block):
    def again(self, x: Tensor, *, bias: Tensor) -> Tensor:
        return Block.forward(self, x, bias=bias)


class ByMethod(nn.Module):
    """Does the same as `Model`, but calls methods instead of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Again() for _ in range(3))
        self.head = nn.Linear(24, 5)

    def features(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for block in self.blocks:
            x = block.again(x, bias=torch.full((24,), 0.1))  # type: ignore[operator]
        return self.head(x.to(self.head.weight.dtype))


@on_ranks(2)
def test_methods_in_place_of_forward_cast_as_it_does(rank: int) -> None:
    """Inputs of methods that `register_forward_method` named once were not cast: "mat1 and mat2 must have the same
    dtype". And a method of the model that is called in place of forward notices parameters that were unfrozen, as a
    call does."""

    def check(rank: int, precision: Any) -> None:
        for plan in plans_of(precision == "bf16"):
            weights = []
            for by_method in (False, True):
                model: Any = make(ByMethod if by_method else Model)
                model.blocks[0].requires_grad_(False)
                handle = zeroshard.shard(model, plan, units=Block, precision=precision)
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
                if by_method:
                    handle.register_forward_method(model, "features")
                    for block in model.blocks:
                        handle.register_forward_method(block, "again")
                for step in range(2):
                    model.blocks[0].requires_grad_(step > 0)
                    out = model.features(batch(rank, step)) if by_method else model(batch(rank, step))
                    assert out.dtype == (BF16 if precision == "bf16" else FP32)
                    assert all(block.seen["x"] == BF16 for block in model.blocks)
                    out.float().square().mean().backward()
                    optimizer.step()
                weights.append(handle.full_state_dict(main=True))
            assert same_bits(*weights)
            fresh = make(Model)
            assert not torch.equal(weights[0]["blocks.0.up.weight"], fresh.state_dict()["blocks.0.up.weight"])

    in_turn(check, [{"*.router": "fp32", "*": MixedPrecision(output=FP32)}, "bf16"])(rank)


@dataclass
class Passed:
    hidden: Tensor
    losses: list[Tensor]


class Adding(nn.Module):
    """A block with a router, whose loss it appends to a list that it is given: alone, in a dict, or in a dataclass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.linear = nn.Linear(24, 8), nn.Linear(24, 24)
        self.how = how

    def forward(self, x: Tensor, into: Any = None) -> Any:
        loss = self.router(x).float().square().mean()
        x = x + torch.tanh(self.linear(x))
        if self.how == "returned":
            return x, loss
        if self.how == "dataclass":
            into.hidden = x
            into.losses.append(loss)
        elif self.how == "dict":
            into[f"loss {len(into)}"] = loss
        else:
            into.append(loss)
        return x


class WithLosses(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Adding(how) for _ in range(3)), how

    def forward(self, x: Tensor) -> Tensor:
        losses: Any = {"dict": OrderedDict, "deque": deque}.get(self.how, list)()
        state = Passed(x, [])
        for block in self.blocks:
            if self.how == "returned":
                x, loss = block(x)
                losses.append(loss)
            elif self.how == "method":
                x = block.again(x, losses)  # type: ignore[operator]
            elif self.how == "dataclass":
                block(x, state)
                x = state.hidden
            else:
                x = block(x, into=losses)
        found = state.losses if self.how == "dataclass" else list(losses.values() if self.how == "dict" else losses)
        assert [loss.dtype for loss in found] == [FP32] * 3
        return x.float().square().mean() + torch.stack(found).sum()


@on_ranks(2)
def test_what_a_block_adds_to_its_inputs_is_in_the_callers_objects(rank: int) -> None:
    """The block got a copy of each list, dict and dataclass, under fp32 as well: losses of routers that blocks append
    to a list, as mixtures of experts do, were not trained, in silence."""

    def check(rank: int, precision: str, how: str) -> None:
        found = []
        for one in ("returned", how):
            for plan in plans_of(precision == "bf16"):
                model: Any = make(partial(WithLosses, one))
                handle = zeroshard.shard(model, plan, units=Adding, precision=precision)
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
                for block in model.blocks if one == "method" else ():
                    block.again = block.forward
                    handle.register_forward_method(block, "again")
                for step in range(2):
                    loss = model(batch(rank, step))
                    optimizer.backward(loss)
                    optimizer.step()
                found.append({"loss": loss.detach()} | handle.full_state_dict(main=True))
        assert all(same_bits(one, found[0]) for one in found)
        fresh = make(partial(WithLosses, how)).state_dict()
        assert not torch.equal(found[0]["blocks.2.router.weight"], fresh["blocks.2.router.weight"])

    in_turn(check, list(product(("fp32", "bf16"), ("list", "deque", "dict", "dataclass", "method"))))(rank)


class Caching(nn.Module):
    """Writes to a tensor that it is given, and looks whether two of its inputs are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, cache: Tensor) -> Tensor:
        assert x is y
        cache[1] = self.linear(x)[0]
        return x


@on_ranks(2)
def test_what_a_block_writes_to_a_tensor_that_it_is_given_is_there(rank: int) -> None:
    """A cache of keys in fp32: the block wrote to a copy in bf16, in silence. What it does not write keeps its bits."""
    for precision, plan in product(("fp32", "bf16"), ("zero1", "zero3")):
        model = nn.ModuleDict({"one": make(Caching)})
        handle = zeroshard.shard(model, plan, units=Caching, precision=precision)
        x, cache = torch.ones(1, 4), torch.full((3, 4), 1 / 3)
        before = cache.clone()
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.0)
        into = cache.clone()
        model["one"](x, x, into)
        assert into.requires_grad
        optimizer.backward(into.sum())
        assert optimizer.step().grad_norm > 0
        assert torch.equal(cache, before)
        with torch.no_grad():
            model["one"](x, x, cache)
        assert torch.equal(cache[[0, 2]], before[[0, 2]])
        assert not torch.equal(cache[1], before[1])
        assert torch.equal(x, torch.ones(1, 4))


class Named(NamedTuple):
    x: Tensor
    into: list[Tensor]


class ReadOnly(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("read-only")


class Knowing(nn.Module):
    """Has the list that it is given in an attribute, too, and adds to it in another call, and by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.known: list[Any] = []

    def forward(self, x: Tensor, losses: list[Tensor], also: dict[str, Any]) -> Tensor:
        assert losses is self.known[0]
        y: Tensor = self.linear(x)
        self.known[0].append(y.float().mean())
        assert len(losses) == len(self.known[0])
        assert losses[0].dtype == also["pair"][0].dtype == x.dtype and also["pair"][0] is losses[0]
        also["new"] = losses[0]
        also["named"].into.append(y.float().square().mean())
        assert also["named"].x.dtype == also["fixed"]["x"].dtype == x.dtype
        return y


@on_ranks(1)
def test_a_block_is_given_the_callers_own_lists_and_dicts(rank: int) -> None:
    """It got copies: what it added to them by another name, or a hook that was registered after `shard`, was lost in
    silence. Their tensors are cast for the time of the call, also if it raises."""
    model = nn.ModuleDict({"one": make(Knowing)})
    zeroshard.shard(model, "zero3", units=Knowing, precision="bf16")
    block: Any = model["one"]
    block.register_forward_hook(lambda module, args, output: args[1].append(output.float().sum()))
    first, frozen = torch.ones(1), Passed(torch.ones(1), [])
    inner = [first]
    also: dict[str, Any]
    losses, also = [first], {"pair": (first, 1), "frozen": frozen, "named": Named(first, inner)}
    also["fixed"] = ReadOnly(x=first)
    block.known.append(losses)
    block(torch.ones(2, 4), losses, also)
    assert len(losses) == 3 and losses[0] is first and losses[2].requires_grad
    assert also["pair"][0] is also["new"] is also["fixed"]["x"] is first and frozen.hidden.dtype == FP32
    assert len(inner) == 2 and inner[0] is first and inner[1].requires_grad and also["named"].into is inner
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.ones(2, 5), losses, also)
    assert len(losses) == 3 and losses[0] is also["pair"][0] is first
    interrupt = block.linear.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):  # torch calls no hooks then
        block(torch.ones(2, 4), losses, also)
    assert len(losses) == 3 and losses[0] is also["pair"][0] is also["fixed"]["x"] is first
    interrupt.remove()
    also["itself"], inner[1:] = (also, OrderedDict(also=also)), [inner]
    losses.append([losses])  # type: ignore[arg-type]
    block(torch.ones(2, 4), losses, also)
    assert losses[0] is also["pair"][0] is inner[0] is first and also["itself"][0] is also


class Encoder(nn.Module):
    """Adds to what it is given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: UserDict[str, Tensor]) -> UserDict[str, Tensor]:
        self.seen = given["x"].dtype
        given["y"] = self.linear(given["x"])
        return given


@on_ranks(1)
def test_a_user_dict_is_cast_as_a_dict(rank: int) -> None:
    """What tokenizers of transformers return is one: `output=` did nothing there, in silence, and fp32 raised."""
    model = make(Encoder)
    zeroshard.shard(model, "zero3", precision=MixedPrecision(output=FP32))
    x = torch.ones(2, 4)
    given = UserDict(x=x)
    assert model(given) is given and model.seen == BF16
    assert given["x"] is x and given["y"].dtype == FP32 and given["y"].requires_grad


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


class Returning(nn.Module):
    """Returns containers that it keeps, and adds to them later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.all = nn.Linear(4, 4), [dict[str, Any]()]
        self.numbers: dict[str, Any] = {}

    def forward(self, x: Tensor, number: Tensor, into: dict[str, Tensor]) -> Any:
        self.seen = number.dtype, into["number"].dtype, into["one"].dtype
        y: Any = self.linear(x)
        y.label = "y"
        into["number"] = into["number"] + y.float().mean()
        self.all.append({"y": y})
        self.numbers.update(same=(y, y), number=number)
        return self.all, self.numbers, Passed(y, [y])


@on_ranks(1)
def test_what_a_module_returns_is_its_own_and_numbers_are_not_rounded(rank: int) -> None:
    """Lists and dicts that a module returned were copied where its outputs are cast: what it added later was lost. And
    a number (a temperature, a sum of losses) was rounded to 16 bits on its way in, and out."""
    number = torch.tensor(1 / 3)
    for precision, inside, out in (
        (MixedPrecision(output=FP32), BF16, FP32),
        ({Returning: "fp32", "*": "bf16"}, FP32, BF16),
        ("bf16", BF16, BF16),
    ):
        model = nn.ModuleDict({"one": make(Returning), "two": nn.Linear(1, 1)})
        called = block = model["one"]
        if out is FP32:
            model = called = nn.Sequential(block)
            called.forward = block.forward
        zeroshard.shard(model, "zero3", units=Returning, precision=precision)
        into = {"number": number, "one": torch.ones(1)}
        every, numbers, passed = called(torch.ones(2, 4), number, into)
        assert block.seen == (FP32, FP32, inside)
        assert every is block.all and numbers is block.numbers and numbers["number"] is number
        first, second = numbers["same"]
        assert first is second is every[1]["y"] is passed.hidden is passed.losses[0]
        assert first.dtype == out and first.label == "y"
        assert into["number"].dtype == FP32 and into["one"].dtype == FP32
        block.all.append({"later": torch.ones(1)})
        assert "later" in every[-1]


@on_ranks(1)
def test_a_compiled_block_is_given_them_too(rank: int) -> None:
    """Casts run outside of the graph of a unit. With a dict they raised, with `fullgraph=True`, or took minutes."""
    torch._dynamo.reset()
    model = nn.ModuleDict({how: make(partial(Adding, how)) for how in ("dict", "list")})
    zeroshard.shard(model, "zero3", units=Adding, precision="bf16")
    first = torch.ones(1)
    by_name, losses = {"first": first}, [first]
    for how, into in (("dict", by_name), ("list", losses)):
        model[how].compile(backend="eager", fullgraph=True)
        model[how](torch.ones(2, 24), into)
    assert by_name["first"] is losses[0] is first
    assert by_name["loss 1"].requires_grad and losses[1].requires_grad


class Inside(nn.Module):
    """Writes to its input, and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 1) -> None:
        scale = getattr(x, "scale", 1.0)
        x[:, 1:].add_(self.linear(x.clone())[:, 1:] * scale)
        x.scale = scale + 0.25  # type: ignore[attr-defined]
        if depth:
            self(x, depth - 1)


@on_ranks(2)
def test_what_a_block_writes_to_an_activation_is_there_with_its_gradient(rank: int) -> None:
    """The activation is fp32, and the block writes to its cast copy: this was lost, in silence. So were attributes of
    the tensor."""

    def trained(plan: str, precision: str) -> State:
        model = nn.ModuleDict({"one": make(Inside), "two": make(Inside)})
        handle = zeroshard.shard(model, plan, units=Inside, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.01)
        for step in range(2):
            leaf = batch(rank, step)[:, :4].clone().requires_grad_()
            x: Any = leaf * 1.0
            before, x.scale = x.detach().clone(), 0.25
            for block in model.values():
                block(x)
            assert x.dtype == FP32 and x.scale == 1.25
            assert torch.equal(x[:, 0], before[:, 0]) and not torch.equal(x[:, 1:], before[:, 1:])
            optimizer.backward(x.square().mean())
            assert optimizer.step().applied and leaf.grad is not None
        with pytest.raises(RuntimeError, match="leaf") if precision == "fp32" else nullcontext():
            model["one"](leaf)
        return handle.full_state_dict(main=True)

    exact, *rounded = (trained(*one) for one in (("zero1", "fp32"), ("zero1", "bf16"), ("zero3", "bf16")))
    assert same_bits(*rounded)
    assert 0 < largest_difference(exact, rounded[0]) < 1e-2


@on_ranks(1)
def test_bad_precisions(rank: int) -> None:
    for wrong, told in (
        ({"blocks.*.rooter": "fp32"}, r"'blocks\.\*\.rooter' matches no module of Model"),
        ({3: "fp32"}, "a pattern is a text or a class of modules, found 3"),
        ({int: "fp32"}, "a pattern is a text or a class of modules"),
        ({"*": "bf17"}, "unknown precision 'bf17'"),
        ({"*": MixedPrecision(keep=(nn.LayerNorm,))}, "by a pattern of its own, in front"),
    ):
        with pytest.raises(ValueError, match=told):
            zeroshard.shard(make(Model), "zero3", precision=wrong)
    with pytest.raises(ValueError, match="output must be one of"):
        MixedPrecision(output=torch.int8)


def with_spectral_norm(rank: int, plan: Any, precision: Any) -> tuple[State, list[float]]:
    model = make(lambda: nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(24, 24)) for _ in range(2))))
    handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        assert model(batch(rank, step)).dtype == (FP32 if precision is None else BF16)
        losses.append(loss.item())
    return handle.full_state_dict(main=True), losses


@on_ranks(2)
def test_parametrizations_with_buffers_are_kept_in_fp32(rank: int) -> None:
    """As docs/models.md says. Control: without `keep`, torch multiplies a buffer in fp32 by a weight in bf16."""
    keep = MixedPrecision(keep=(nn.utils.parametrize.ParametrizationList,))
    (first, losses), *others = [with_spectral_norm(rank, plan, keep) for plan in ("ddp", "zero1", "zero3")]
    assert all(same_bits(state, first) and found == losses for state, found in others)
    assert torch.allclose(torch.tensor(losses), torch.tensor(with_spectral_norm(rank, "ddp", None)[1]), rtol=0.02)
    with pytest.raises(RuntimeError, match="same dtype"):
        with_spectral_norm(rank, "ddp", "bf16")
