"""Wrong arguments are refused on every rank at once, with a ValueError that names the value and the remedy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import make, travelling
from tests.together import in_turn, on_ranks
from zeroshard.loss_scale import ConstantScale, DynamicScale, LossScaler
from zeroshard.model import right_call
from zeroshard.precision import MixedPrecision, as_precision
from zeroshard.storage.weights import Residency
from zeroshard.testing import run_ranks

SGD = torch.optim.SGD


def small() -> nn.Module:
    return make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def sharded() -> tuple[nn.Module, Any]:
    model = small()
    return model, zeroshard.shard(model, "zero2")


def backward_of_a_vector() -> None:
    model, handle = sharded()
    zeroshard.ShardedOptimizer(handle, SGD, lr=1.0).backward(model(torch.ones(2, 4)))


def with_weight(weight: float) -> Callable[[], None]:
    def call() -> None:
        model, handle = sharded()
        zeroshard.ShardedOptimizer(handle, SGD, lr=1.0).backward(model(torch.ones(2, 4)).sum(), weight=weight)

    return call


def weights_of_zero() -> None:
    model, handle = sharded()
    optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
    optimizer.backward(model(torch.ones(2, 4)).sum(), weight=0)
    optimizer.step()


def two_groups() -> None:
    model, _ = sharded()
    zeroshard.ShardedOptimizer([{"params": model.parameters()}, {"params": model[0].parameters()}], SGD, lr=1.0)


def two_optimizers() -> None:
    model, handle = sharded()
    first = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
    zeroshard.ShardedOptimizer(model[0].parameters(), SGD, lr=1.0)
    del first


def optimizer(**options: Any) -> Callable[[], None]:
    def call() -> None:
        _model, handle = sharded()
        zeroshard.ShardedOptimizer(handle, **{"optimizer_class": SGD, "lr": 1.0, **options})

    return call


def group(**options: Any) -> Callable[[], None]:
    def call() -> None:
        model, _handle = sharded()
        zeroshard.ShardedOptimizer([{"params": list(model.parameters()), **options}], SGD, lr=1.0)

    return call


def shard(**options: Any) -> Callable[[], None]:
    def call() -> None:
        zeroshard.shard(small(), "zero2", **options)

    return call


def clip(how: str, value: float) -> Callable[[], None]:
    def call() -> None:
        model, handle = sharded()
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        getattr(optimizer, how)(value)

    return call


def two_handles() -> None:
    (first, _a), (second, _b) = sharded(), sharded()
    zeroshard.ShardedOptimizer([*first.parameters(), *second.parameters()], SGD, lr=1.0)


F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16

CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "unknown precision": (shard(precision="bf17"), ("'bf17'", "did you mean 'bf16'?")),
    "unknown dtype": (lambda: MixedPrecision(param=torch.int8), ("torch.int8", "param must be one of")),
    "unknown main": (lambda: MixedPrecision(main="leftover"), ("'leftover'", "main must be one of")),
    "unknown wire": (lambda: MixedPrecision(reduce=torch.int32), ("torch.int32", "reduce must be one of")),
    "remainder for fp16": (
        lambda: MixedPrecision(F16, F32, None, "remainder"),
        ("weights are torch.float16", "main=torch.float32"),
    ),
    "remainder for fp32": (
        lambda: MixedPrecision(F32, F32, None, "remainder"),
        ("weights are torch.float32", "param=torch.bfloat16"),
    ),
    "main narrower than the weights": (
        lambda: MixedPrecision(F32, F32, None, BF16),
        ("torch.bfloat16", "use torch.float32"),
    ),
    "both kinds of 16 bits": (lambda: MixedPrecision(F16, F32, None, BF16), ("bfloat16 and float16",)),
    "both kinds of 16 bits, gradient": (lambda: MixedPrecision(BF16, F16), ("bfloat16 and float16",)),
    "no parameters": (lambda: zeroshard.ShardedOptimizer([], SGD, lr=1.0), ("empty parameter list",)),
    "a parameter in two groups": (two_groups, ("more than one parameter group",)),
    "a parameter in two optimizers": (two_optimizers, ("0.", "belongs to another ShardedOptimizer", "delete")),
    "two handles": (two_handles, ("different handles", "one ShardedOptimizer per handle")),
    "scale of zero": (optimizer(loss_scale=0.0), ("0.0", "Use 1.0 for no scaling")),
    "negative scale": (optimizer(loss_scale=-2.0), ("-2.0", "positive")),
    "scale of NaN": (optimizer(loss_scale=math.nan), ("nan", "positive")),
    "scale of inf": (optimizer(loss_scale=math.inf), ("inf", "finite")),
    "scale of what": (optimizer(loss_scale="large"), ("'large'", "'dynamic'")),
    "a scaler of zero": (lambda: LossScaler(ConstantScale(0.0)), ("0.0", "positive")),
    "a floor of zero": (lambda: DynamicScale(floor=0.0), ("floor", "0.0")),
    "backoff that grows": (lambda: DynamicScale(backoff_factor=2.0), ("2.0", "0.5 is usual")),
    "growth that shrinks": (lambda: DynamicScale(growth_factor=0.5), ("0.5", "2 is usual")),
    "unknown policy": (optimizer(non_finite="hope"), ("'hope'", "'raise', 'skip' or 'ignore'")),
    "a vector for a loss": (backward_of_a_vector, ("(2, 4)", "take its mean")),
    **{
        f"skip_norm_above of {value!r}": (optimizer(skip_norm_above=value), (repr(value), "above 0", "skips none"))
        for value in (math.nan, 0.0, -1.0, True, "5")
    },
    "loss_scale=True": (optimizer(loss_scale=True), ("True", "'dynamic'", "Use 1.0 for no scaling")),
    "negative weight": (with_weight(-1.0), ("-1.0", "from 0")),
    "weight of NaN": (with_weight(math.nan), ("nan", "finite")),
    "weights of zero": (weights_of_zero, ("weights of all losses", "0")),
    "learning rate of NaN": (optimizer(lr=math.nan), ("nan", "earning rate")),
    "negative learning rate": (optimizer(lr=-1.0), ("-1.0", "earning rate")),
    "learning rate of inf": (optimizer(lr=math.inf), ("inf", "learning rate", "finite")),
    "learning rate of NaN in a group": (group(lr=math.nan), ("nan", "learning rate", "from 0")),
    "differentiable": (optimizer(differentiable=True), ("differentiable=True", "leave")),
    "differentiable in a group": (group(differentiable=True), ("differentiable=True", "leave")),
    "LBFGS": (optimizer(optimizer_class=torch.optim.LBFGS), ("LBFGS", "cannot be sharded")),
    "max_norm of zero": (clip("clip_grad_norm_", 0.0), ("max_norm", "0.0")),
    "max_norm of NaN": (clip("clip_grad_norm_", math.nan), ("max_norm", "nan")),
    "negative clip_value": (clip("clip_grad_value_", -1.0), ("clip_value", "-1.0")),
    "process_group for a handle's parameters": (
        optimizer(process_group=torch.distributed.GroupMember),
        ("process_group", "mesh"),
    ),
}


def test_value_and_remedy_on_every_rank_and_nobody_waits() -> None:
    def check(rank: int) -> dict[str, str]:
        messages = {}
        for name, (call, parts) in CASES.items():
            with pytest.raises(ValueError) as error:
                call()
            messages[name] = str(error.value)
            for part in parts:
                assert part in messages[name], (name, part, messages[name])
        return messages

    first, *others = run_ranks(check, 3)
    assert all(other == first for other in others)


@on_ranks(2)
def test_calls_of_other_libraries_are_told_what_to_write(rank: int) -> None:
    """torch's and Python's errors said nothing about zeroshard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model, handle = sharded()
    with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer divides its .*ShardedOptimizer\(handle, torch.optim"):
        zeroshard.ShardedOptimizer(handle, ZeroRedundancyOptimizer, lr=0.1)
    optimizer: Any = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
    loss = model(torch.ones(2, 4)).sum()
    for scaler in (torch.amp.GradScaler("cpu"), 1024.0, DynamicScale()):
        with pytest.raises(TypeError, match=rf"of type {type(scaler).__name__}: write scaler=LossScaler\('dynamic'\)"):
            optimizer.backward(loss, scaler=scaler)
    optimizer.backward(loss)
    for name, remedy in (
        ("clip_norm", r"optimizer\.clip_grad_norm_\(1\.0\) before step"),
        ("max_norm", r"optimizer\.clip_grad_norm_\(1\.0\) before step"),
        ("clip_value", r"optimizer\.clip_grad_value_\(1\.0\) before step"),
        ("grad_scaler", r"ShardedOptimizer\(..., loss_scale='dynamic'\), and optimizer.backward"),
        ("lr", r"optimizer\.param_groups\[0\]\['lr'\]"),
    ):
        with pytest.raises(TypeError, match=rf"argument '{name}', which SGD does not take: write {remedy}"):
            optimizer.step(**{name: 1.0})
    with pytest.raises(TypeError, match=r"argument 'other', which SGD does not take$"):
        optimizer.step(other=1)
    for how, name in (("norm_", "max_norm"), ("value_", "clip_value")):
        for found in (model.parameters(), None, [*model.parameters()], model[0].weight):
            with pytest.raises(TypeError, match=rf"{name} must be a number, .*optimizer\.clip_grad_{how}\(1\.0\)"):
                getattr(optimizer, f"clip_grad_{how}")(found)
        getattr(optimizer, f"clip_grad_{how}")(torch.tensor(2.0))
    with pytest.raises(TypeError, match="norm_type must be a number"):
        optimizer.clip_grad_norm_(1.0, None)
    assert float(optimizer.clip_grad_norm_(1.0, "inf")) > 0
    assert optimizer.step().applied


@on_ranks(2)
def test_the_right_values_are_taken(rank: int) -> None:
    """The negative control: next to each refusal, what is allowed."""
    for precision in (None, "fp32", "bf16", "fp16", "bf16-remainder", MixedPrecision(reduce=BF16)):
        assert as_precision(precision) is None or zeroshard.shard(small(), "zero3", precision=precision)
    for options in (
        {"lr": 0.0},
        {"loss_scale": 2.0**-10},
        {"loss_scale": "dynamic"},
        {"non_finite": "skip"},
        {"skip_norm_above": 2},
    ):
        optimizer(**options)()
    group(lr=0.0)()
    with_weight(0.5)()
    with_weight(0)()
    clip("clip_grad_norm_", 1e-9)()
    clip("clip_grad_value_", math.inf)()
    model, handle = sharded()
    zeroshard.ShardedOptimizer(handle, SGD, lr=1.0).backward(model(torch.ones(1, 4))[0, :1])


@on_ranks(2)
def test_what_is_refused_leaves_the_model_as_it_was(rank: int) -> None:
    """A refused optimizer claims nothing: the next one takes the same parameters."""
    model, handle = sharded()
    before = handle.full_state_dict()
    for options in ({"lr": math.nan}, {"loss_scale": -1.0}, {"optimizer_class": torch.optim.LBFGS}):
        with pytest.raises(ValueError):
            zeroshard.ShardedOptimizer(handle, **{"optimizer_class": SGD, "lr": 1.0, **options})
    optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
    assert all(torch.equal(value, before[name]) for name, value in handle.full_state_dict().items())
    optimizer.backward(model(torch.ones(1, 4)).sum())
    assert optimizer.step().applied


@on_ranks(2)
def test_a_refused_group_leaves_the_optimizer_as_it_was(rank: int) -> None:
    model, handle = sharded()
    optimizer = zeroshard.ShardedOptimizer(model[0].parameters(), torch.optim.AdamW, lr=0.1)
    other = zeroshard.ShardedOptimizer([model[1].bias], torch.optim.AdamW, lr=0.1)
    for bad in ({"lr": math.nan, "params": [model[1].weight]}, {"params": [model[1].bias]}):
        with pytest.raises(ValueError):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == 1
    optimizer.backward(model(torch.ones(1, 4)).sum())
    assert optimizer.step().applied and other.step().applied
    assert len(optimizer.state_dict()["param_groups"]) == 1 and handle


@pytest.mark.by_cpu
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_recorded_weights_are_those_of_a_plain_model() -> None:
    """What torch.jit.trace records keeps the memory of the weights. Under ZERO3 other weights use it afterwards, so the
    recorded model computed something else, without an error."""
    x = torch.ones(2, 4)

    def record(rank: int, plan: str) -> tuple[list[str], bool]:
        model = small()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        said = []
        for way in (torch.jit.trace, torch.export.export):
            with handle.unsharded():
                expected = model(x)
                try:
                    recorded = way(model, (x,))
                except RuntimeError as error:
                    said.append(str(error))
        if plan == "zero3":
            with pytest.raises(RuntimeError, match="would record the memory of the weights"):  # it said: not here
                torch.export.export(model, (x,))
            plain = small()
            plain.load_state_dict(handle.full_state_dict())
            recorded = torch.jit.trace(plain, (x,))
        return said, torch.equal(recorded(x), expected)

    message = "torch.export and torch.jit.trace would record"
    for plan, refused in (("zero1", 1), ("zero3", 2)):
        for said, is_same in run_ranks(record, 2, plan):
            assert len(said) == refused and all(one.startswith(message) for one in said) and is_same


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_autograd_is_refused() -> None:
    """Nothing was called at the end of such a backward, and the step said that the backward had raised."""

    def train(rank: int, plan: str, by_optimizer: bool) -> str:
        torch._dynamo.reset()
        model = small()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)

        def backward() -> None:
            loss = model(torch.ones(2, 4)).sum()
            optimizer.backward(loss) if by_optimizer else loss.backward()

        with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(RuntimeError) as error:
            torch.compile(backward, backend="eager")()
        optimizer.zero_grad()
        backward()
        assert optimizer.step().applied
        return str(error.value)

    refused = "compiled_autograd=False"
    for said in run_ranks(in_turn(train, [("zero2", False), ("zero3", False), ("zero3", True)]), 2):
        assert refused in said[0].replace(" ", "")
        # It looks at what is saved before it calls a hook, and weights are hidden then.
        assert "modified by an inplace operation" in said[1]
        assert refused in said[2].replace(" ", "")


def test_a_cuda_graph_contains_no_sharded_forward_with_work_on_the_host() -> None:
    """A replay would compute with weights that are no longer there, and its gradients would not be reduced."""

    def capture(rank: int, plan: str) -> list[str]:
        model = small()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
        said = []
        for grad in (True, False):
            with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(grad):
                patch.setattr(right_call, "is_captured", lambda: True)
                try:
                    model(torch.ones(2, 4))
                except RuntimeError as error:
                    said.append(str(error))
        optimizer.backward(model(torch.ones(2, 4)).sum())  # nothing has been changed
        assert optimizer.step().applied
        return said

    for plan, refused in (("zero2", 1), ("zero3", 2)):
        for said in run_ranks(capture, 2, plan):
            assert len(said) == refused and all(one.startswith("a CUDA graph would record") for one in said), plan


def test_weights_that_a_cuda_graph_reads_have_arrived_after_a_step() -> None:
    """A replay runs no hook that would wait for their gathers."""

    def states(rank: int) -> list[set[Residency]]:
        model = small()
        handle = zeroshard.shard(model, "zero2", units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1.0)
        found = []
        for recorded in (False, True):
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                patch.setattr(right_call, "is_captured", lambda recorded=recorded: recorded)
                model(torch.ones(2, 4))
            optimizer.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            found.append({unit.weights.state for unit in handle.engine.units})
        handle.close()
        return found

    with travelling("native"):
        for before, after in run_ranks(states, 2):
            assert before == {Residency.GATHERING} and after == {Residency.RESIDENT}


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _all_code(const)


@on_ranks(2)
def test_a_module_that_is_a_cuda_graph_is_not_sharded(rank: int) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    # What torch's function puts there; without CUDA, it can only be read.
    names = [const.co_qualname for const in _all_code(torch.cuda.make_graphed_callables.__code__)]
    (forward.__qualname__,) = (name for name in names if name.endswith(".new_fwd"))
    model = small()
    model[1].forward = forward
    with pytest.raises(ValueError, match=r"1 is a CUDA graph .* shard a model that has not been captured"):
        zeroshard.shard(model, "ddp")
    model[1].requires_grad_(False)
    zeroshard.shard(model, "ddp", ignored=[model[1]])
