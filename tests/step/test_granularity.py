"""Classes that look elementwise in a short trial and are not: their pieces would be updated in another way than whole
parameters, without an error.

Found with the classes of pytorch-optimizer 4.1.0: AdaNorm, AdaShift and AdamP trained differently under ZERO1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import LAST_BITS, PLANS, Job, Net, largest_difference, loss_of_tokens, make
from tests.parity.common import as_one_process
from tests.together import on_ranks
from zeroshard.optim import Lamb
from zeroshard.step.granularity import Granularity, granularity_of
from zeroshard.testing import run_ranks


class OfAGradient(torch.optim.Optimizer):
    """Each parameter is updated by `update(state, p, p.grad)`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(self.state[p], p, p.grad), alpha=group["lr"])

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        return grad.sign()


class Settles(OfAGradient):
    """As AdaNorm: gradients that are smaller than usual are made larger."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        norm = grad.norm().item()
        state["usual"] = max(norm, 0.9 * state.get("usual", 0.0))
        return grad * (state["usual"] / (norm + 1e-12))


class Waits(OfAGradient):
    """As AdaShift: nothing special happens in the first steps."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return grad if state["step"] < 6 else grad / grad.abs().max()


class Projects(OfAGradient):
    """As AdamP: only a gradient that is orthogonal to the weights is treated in another way."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        cosine = torch.nn.functional.cosine_similarity(p.flatten(), grad.flatten(), dim=0)
        return grad - p * (grad * p).sum() / (p * p).sum() if cosine.abs() < 1e-5 else grad


class Factors(OfAGradient):
    """As optimizers that factor the second moments of large matrices only."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        return grad if min(p.shape) < 128 else grad / grad.square().mean(0).add(1e-8).sqrt()


class BySize(OfAGradient):
    """As a class of one's own that treats large parameters in another way, element by element in both."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        return grad.sign() if p.numel() > 500 else grad


class OfTrained(OfAGradient):
    """Leaves out what is frozen, also where there is a gradient."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        scaled = grad if not self.whole else grad / grad.norm()
        return scaled if p.requires_grad else torch.zeros_like(grad)

    def __init__(self, params: Any, lr: float = 1e-2, whole: bool = False) -> None:
        super().__init__(params, lr)
        self.whole = whole


class Randomised(OfAGradient):
    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        return grad * torch.rand(())


class Careful(OfAGradient):
    """Elementwise, with states, factories, views and numbers."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        if not state:
            state.update(step=torch.zeros(()), average=grad.new_zeros(grad.shape), past=[])
        state["step"] += 1
        average: Tensor = state["average"].lerp_(grad, 0.1)
        torch._foreach_mul_([average, state["step"]], 1.0)
        bound = grad.new_full((1,), 3.0 * float(state["step"]))
        return torch.where(average.view(-1) < bound, average.view(-1), bound).view_as(p)


class KeepsCount(OfAGradient):
    """As SPAM: a number beside the states of the parameters."""

    def step(self, closure: Any = None) -> None:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]
        super().step()


class Talks(OfAGradient):
    """As DeMo: its step exchanges what it has found."""

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


@pytest.mark.parametrize("of_class", [Settles, Waits, Projects, Factors])
def test_what_may_depend_on_a_whole_parameter_gets_whole_parameters(of_class: type[OfAGradient]) -> None:
    assert granularity_of(of_class, {"lr": 0.1}, None, sharded=True) is Granularity.PARAMETER
    assert granularity_of(of_class, {"lr": 0.1}, True, sharded=True) is Granularity.ELEMENT, "a declaration is believed"


LOOKS: dict[str, Callable[[Tensor], bool]] = {
    "shape": lambda p: p.shape[0] > 500,
    "equal": lambda p: p.shape == (7, 7),
    "square": lambda p: p.size(0) == p.size(-1),
    "all": lambda p: min(p.size()) > 500,
    "numel": lambda p: p.shape.numel() > 20000,
    "convolution": lambda p: p.ndim == 4,
    "dim": lambda p: p.dim() > 2,
    "len": lambda p: len(p) > 500 or len(p.shape) > 2,
    "stride": lambda p: p.stride()[0] > 500,
    "torch": lambda p: torch.numel(p) > 20000,
}


@pytest.mark.parametrize("way", LOOKS)
def test_a_class_that_looks_at_shapes_gets_whole_parameters(way: str) -> None:
    """What it does to a shape that the trial does not have, it would not do to pieces of it, in silence."""

    class Looks(OfAGradient):
        def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
            return grad.sign() if LOOKS[way](p) else grad

    class WhenBuilt(OfAGradient):
        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, lr)
            self.large = [LOOKS[way](p) for group in self.param_groups for p in group["params"]]

        def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
            return grad.sign() if any(self.large) else grad

    for of_class in (Looks, WhenBuilt):
        assert granularity_of(of_class, {"lr": 0.1}, None, sharded=True) is Granularity.PARAMETER


class ByList(OfAGradient):
    """A number for each parameter of a group, in a list of the group."""

    def __init__(self, params: Any, lr: float = 1e-2, of_each: Sequence[float] = ()) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "of_each": of_each})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                p.sub_(p.grad, alpha=group["lr"] * (group["of_each"][place] if group["of_each"] else 1.0))


class ByStack(torch.optim.Optimizer):
    """Steps all parameters of one shape as a stack, whose norm it divides by."""

    def __init__(self, params: Any, lr: float = 1e-2, each: bool = False) -> None:
        super().__init__(params, {"lr": lr, "each": each})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for shape in {p.shape for p in group["params"]}:
                alike = [p for p in group["params"] if p.shape == shape]
                stack = torch.stack([p.grad for p in alike if p.grad is not None])
                norm = stack.flatten(1).norm(dim=1) if group["each"] else stack.norm().expand(len(stack))
                for p, values, by in zip(alike, stack, norm, strict=True):
                    p.sub_(values / by, alpha=group["lr"])


def test_a_list_for_the_parameters_of_a_group_is_seen() -> None:
    """The trial has two parameters, and the first two numbers are equal: pieces had those of others, in silence."""
    for groups in ([{"of_each": [1.0, 1.0, 0.5]}], [{"of_each": (1.0, 1.0, 1.0)}, {"of_each": (1.0, 1.0, 0.5)}]):
        assert granularity_of(ByList, {}, None, groups=groups) is Granularity.PARAMETER
        with pytest.raises(ValueError, match="depends on the others"):
            granularity_of(ByList, {}, None, sharded=True, groups=groups)
    equal = [{"of_each": [0.5, 0.5, 0.5]}]
    assert granularity_of(ByList, {}, None, sharded=True, groups=equal) is Granularity.ELEMENT


def test_a_class_that_combines_parameters_of_one_shape_is_refused_where_no_rank_has_all() -> None:
    """The trial had matrices of different shapes only: each rank divided by the norm of its own, in silence."""
    with pytest.raises(ValueError, match="depends on the others"):
        granularity_of(ByStack, {}, None, sharded=True)
    assert granularity_of(ByStack, {}, None) is Granularity.PARAMETER
    assert granularity_of(ByStack, {"each": True}, None, sharded=True) is Granularity.PARAMETER


def test_large_parameters_are_stepped_as_on_one_process() -> None:
    job = Job(BySize, {"lr": 1e-2}, steps=3)
    as_one_process([(job, plan) for plan in (zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO3)], 2)


def test_what_is_stepped_requires_grad() -> None:
    """Classes that leave out frozen parameters left out everything, in silence."""
    jobs = [
        Job(OfTrained, {"lr": 1e-2, "whole": whole}, steps=3, precision=precision)
        for whole in (False, True)
        for precision in ("fp32", "bf16", "bf16-remainder")
    ]
    as_one_process([(job, plan) for job in jobs for plan in (zeroshard.DDP, zeroshard.ZERO3)], 2)


class Counting(torch.optim.AdamW):
    """torch labels each step of its classes in profiles, from the first instance on."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


@pytest.mark.parametrize("of_class", [OfAGradient, Careful, Counting])
def test_elementwise_classes_get_pieces(of_class: type[torch.optim.Optimizer]) -> None:
    assert granularity_of(of_class, {"lr": 0.1}, None, sharded=True) is Granularity.ELEMENT


def test_such_a_class_trains_as_on_one_process() -> None:
    job = Job(Waits, {"lr": 1e-2}, steps=7)
    as_one_process([(job, plan) for plan in (zeroshard.ZERO1, zeroshard.ZERO3)], 2)


class Returns(OfAGradient):
    """Draws each parameter to its first value, which it reads when it is built."""

    def __init__(self, params: Any, lr: float = 1e-2, normed: bool = False) -> None:
        super().__init__(params, lr)
        self.normed = normed
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["first"] = p.detach().clone()

    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        pull = p - state["first"]
        return grad + pull / (pull.norm() + 1) if self.normed else grad + pull


def test_values_are_there_when_an_elementwise_class_is_built() -> None:
    job = Job(Returns, {"lr": 1e-2}, steps=3)
    as_one_process([(job, plan) for plan in (zeroshard.ZERO1, zeroshard.ZERO3)], 2)


@on_ranks(2)
def test_a_class_that_reads_what_is_not_there_yet_is_refused_on_every_rank(rank: int) -> None:
    for precision, options in (("fp32", {"normed": True}), ("bf16-remainder", {})):
        for plan in ("ddp", "zero1", "zero3"):
            handle = zeroshard.shard(make(Net), plan, precision=precision)
            with pytest.raises(ValueError, match=r"Returns cannot be sharded: it reads the values .*\(clone\)"):
                zeroshard.ShardedOptimizer(handle, Returns, **options)


class Outer(torch.optim.Optimizer):
    """Leaves the step to another optimizer, which has the momentum in a state of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()


class Around(torch.optim.Optimizer):
    """As OrthoGrad of pytorch-optimizer: what it has is what the optimizer inside of it has."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.base = torch.optim.SGD(params, lr=lr, momentum=0.9)
        self.defaults = self.base.defaults

    param_groups = property(lambda self: self.base.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.base.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.base.step()


class NoOptimizer:
    """As ScheduleFreeWrapper of schedulefree."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.base = torch.optim.SGD(params, lr=lr)

    def step(self) -> None:
        self.base.step()

    def zero_grad(self) -> None:
        self.base.zero_grad()


def test_an_optimizer_around_another_one_trains_where_they_share_their_state() -> None:
    """Its param groups could not be set, at the first step."""
    as_one_process([(Job(Around, {"lr": 1e-2}, steps=3), plan) for plan in (zeroshard.DDP, zeroshard.ZERO3)], 2)


@on_ranks(1)
def test_what_is_no_optimizer_is_refused(rank: int) -> None:
    handle = zeroshard.shard(make(Net), "zero1")
    with pytest.raises(TypeError, match=r"NoOptimizer cannot be sharded: it has no attribute 'defaults'"):
        zeroshard.ShardedOptimizer(handle, NoOptimizer, lr=0.1)  # type: ignore[arg-type]


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_on_every_rank(rank: int) -> None:
    handle = zeroshard.shard(make(Net), "zero1")
    told = {
        Outer: r"base is an optimizer inside of it whose state is not in optimizer\.state",
        Randomised: "it draws random numbers",
        KeepsCount: r"optimizer\.state\['count'\] belongs to no parameter",
    }
    with pytest.raises(ValueError, match=told[Randomised]):  # under ddp, too: the ranks would drift apart
        zeroshard.ShardedOptimizer(zeroshard.shard(make(Net), "ddp"), Randomised, lr=0.1)
    torch.manual_seed(5)
    for of_class, text in told.items():
        with pytest.raises(ValueError, match=f"{of_class.__name__} cannot be sharded: .*{text}"):
            zeroshard.ShardedOptimizer(handle, of_class, lr=0.1)
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3)), "the trial has used random numbers of the user"


class Estimates(torch.optim.Optimizer):
    """As Prodigy: the length of a step is a number that it computes from all parameters, and keeps in a param group."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "distance": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with_grad = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        distance = self.param_groups[0]["distance"] + sum(p.grad.norm().item() for p in with_grad)
        for group in self.param_groups:
            group["distance"] = distance
        for p in with_grad:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / distance)


def test_what_needs_all_parameters_trains_where_each_rank_has_them(tmp_path: Path) -> None:
    """It was refused under DDP, too, although its message under the other plans said to use that plan."""
    as_one_process([(Job(Estimates, {"lr": 1e-2}, steps=3), zeroshard.DDP)], 2)

    def check(rank: int) -> None:
        found = {}
        for resumed in (False, True):
            handle = zeroshard.shard(make(Net), "ddp")
            optimizer = zeroshard.ShardedOptimizer(handle, Estimates)
            for step in range(4):
                if step == 2:
                    zeroshard.save(tmp_path / f"{resumed}", handle, optimizer, step=2)
                    if resumed:
                        handle = zeroshard.shard(make(Net), "ddp")
                        optimizer = zeroshard.ShardedOptimizer(handle, Estimates)
                        zeroshard.load(tmp_path / "True", handle, optimizer)
                loss_of_tokens(handle.model, rank, 0, step).backward()
                optimizer.step()
            distance = torch.tensor(optimizer.param_groups[0]["distance"])
            found[resumed] = {**handle.full_state_dict(), "distance": distance}
        assert largest_difference(found[True], found[False]) == 0

    run_ranks(check, 2)


class ByPlace(torch.optim.Optimizer):
    """The later a parameter in its group, the smaller its steps; all are divided by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for place, p in enumerate(group["params"]):
                p.sub_(p.grad / norm, alpha=group["lr"] * 0.8**place)


@on_ranks(2)
def test_under_ddp_parameters_are_stepped_in_the_order_of_the_groups(rank: int) -> None:
    """They were in the order of the buffers: other places in their group, in silence, and other bits of a sum."""

    def build() -> tuple[nn.Sequential, list[dict[str, Any]]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(5, 1))
        first, *others = model.parameters()
        return model, [{"params": [first, others[2]]}, {"params": [*reversed(others[3:]), *others[:2]], "lr": 0.2}]

    model, groups = build()
    zeroshard.shard(model, "ddp", units=nn.Linear)
    plain, plain_groups = build()
    optimizers = zeroshard.ShardedOptimizer(groups, ByPlace, lr=0.1), ByPlace(plain_groups, lr=0.1)
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class OfManager(torch.optim.SGD):
    """As those of bitsandbytes: a manager outside of it has options of single parameters."""

    mng = SimpleNamespace(module_weight_config_triple=[], pid2config={}, index2config={})


@on_ranks(2)
def test_options_that_are_found_by_the_parameter_itself_are_refused(rank: int) -> None:
    """They were lost in silence: `StableEmbedding` of bitsandbytes asks for 32 bits like that."""
    OfManager.__module__ = "bitsandbytes.optim.sgd"
    for plan in PLANS:
        model = make(Net)
        name, parameter = next((name, p) for name, p in model.named_parameters() if p.dim() == 2)
        module = model.get_submodule(name.rpartition(".")[0])
        optimizer = zeroshard.ShardedOptimizer(zeroshard.shard(model, plan), OfManager, lr=0.1)
        loss_of_tokens(model, rank, 0, 0).backward()
        for found in (
            {"module_weight_config_triple": [(module, name.rpartition(".")[2], {"lr": 0.0})]},
            {"pid2config": {id(parameter): {"lr": 0.0}}},
            {"index2config": {(0, 1): {"lr": 0.0}}},
        ):
            OfManager.mng.__dict__.update({"module_weight_config_triple": [], "pid2config": {}, "index2config": {}})
            OfManager.mng.__dict__.update(found)
            place = "by their place" if "index2config" in found else re.escape(name)
            with pytest.raises(ValueError, match=rf"OfManager: .*options for single parameters \({place}\)"):
                optimizer.step()
        OfManager.mng.index2config = {}
        assert optimizer.step().applied


class Normalizes(OfAGradient):
    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Divides(Normalizes):
    """As the distributed Muon: each rank steps every n-th parameter, and they gather the results."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            padded = [*params, *(torch.empty_like(params[-1]) for _ in range(-len(params) % ranks))]
            for first in range(0, len(padded), ranks):
                if first + rank < len(params):
                    p = params[first + rank]
                    p.sub_(self.update(self.state[p], p, p.grad), alpha=group["lr"])
                dist.all_gather(padded[first : first + ranks], padded[first + rank])


class DividesState(Divides):
    def update(self, state: dict[str, Any], p: Tensor, grad: Tensor) -> Tensor:
        state["momentum"] = state.get("momentum", 0) + grad
        return super().update(state, p, state["momentum"])


@pytest.mark.by_gloo  # a group that is written in Python calls its collectives without torch's dispatcher
@on_ranks(2)
def test_a_class_that_communicates_is_refused_on_every_rank(rank: int) -> None:
    """Declared, the distributed Muon gathered parameters of which each rank had others, in silence."""
    handle = zeroshard.shard(make(Net), "zero1")
    for of_class in (Talks, Divides):
        for declared in (None, True, False):
            with pytest.raises(ValueError, match=rf"{of_class.__name__} cannot be sharded: .*communicates with other"):
                zeroshard.ShardedOptimizer(handle, of_class, lr=0.1, elementwise=declared)


def of_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))


@pytest.mark.by_gloo
@on_ranks(2)
def test_under_ddp_the_state_may_not_be_on_other_ranks(rank: int) -> None:
    """A checkpoint left it out, in silence, and `optimizer.state_dict()` raised a KeyError."""
    handle = zeroshard.shard(of_three(), "ddp")
    for declared in (None, False):
        with pytest.raises(ValueError, match=r"DividesState cannot be sharded: .*the state of a parameter on one rank"):
            zeroshard.ShardedOptimizer(handle, DividesState, lr=0.1, elementwise=declared)


@pytest.mark.by_gloo
@on_ranks(2)
def test_under_ddp_a_class_that_communicates_has_all_parameters(rank: int) -> None:
    """A trial on matrices of two shapes failed in its collective, and the message was about graphs of gradients."""

    def trained(optimizer_class: type[OfAGradient]) -> dict[str, Tensor]:
        model = of_three()
        handle = zeroshard.shard(model, "ddp")
        optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, lr=0.1)
        for step in range(2):
            model(torch.full((2, 6), 1.0 + rank + step)).square().sum().backward()
            optimizer.step()
        return handle.full_state_dict()

    assert largest_difference(trained(Divides), trained(Normalizes)) == 0


class ByGroup(torch.optim.Optimizer):
    """As GaLore, whose projection is an option of a param group: the others are stepped element by element."""

    def __init__(self, params: Any, lr: float = 1e-2, normalized: bool = False) -> None:
        super().__init__(params, {"lr": lr, "normalized": normalized})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "rank" in group and p.dim() != 2:
                    raise IndexError("a matrix")
                if p.grad is not None:
                    by = p.grad.norm() if group["normalized"] or "rank" in group else 1.0
                    p.sub_(p.grad / by, alpha=group["lr"])


def test_an_option_of_a_group_may_need_whole_parameters() -> None:
    def of(*groups: dict[str, Any]) -> Granularity:
        return granularity_of(ByGroup, {"lr": 0.1}, None, groups=groups)

    plain = {"lr": 0.1, "normalized": False}
    assert of(plain, {**plain, "lr": 0.3, "initial_lr": 0.3}) is Granularity.ELEMENT
    assert of(plain, {**plain, "normalized": True}) is Granularity.PARAMETER
    assert of(plain, {**plain, "rank": 4}) is Granularity.PARAMETER
    assert granularity_of(ByGroup, {"normalized": True}, None, groups=[plain]) is Granularity.PARAMETER


@on_ranks(2)
def test_such_a_group_is_stepped_as_by_the_plain_class(rank: int) -> None:
    """Its pieces once were normalized one by one, in silence, also under DDP."""
    option: dict[str, Any]
    for option in ({"normalized": True}, {"rank": 4}):
        results = []
        for plan in (None, *PLANS):
            model = make(Net)
            handle = None if plan is None else zeroshard.shard(model, plan)
            matrices = [p for p in model.parameters() if p.dim() == 2]
            others = [p for p in model.parameters() if p.dim() != 2]
            groups = [{"params": others}, {"params": matrices, **option}]
            optimizer: Any = ByGroup(groups) if handle is None else zeroshard.ShardedOptimizer(groups, ByGroup)
            for step in range(2):
                optimizer.zero_grad()
                loss_of_tokens(model, rank, 0, step).backward()
                for parameter in model.parameters() if handle is None else ():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2
                optimizer.step()
            results.append(model.state_dict() if handle is None else handle.full_state_dict())
        for found in results[1:]:
            assert largest_difference(found, results[0]) < LAST_BITS


@on_ranks(2)
def test_an_option_that_changes_while_training_may_need_whole_parameters(rank: int) -> None:
    """The pieces were then normalized one by one, in silence."""
    for plan in PLANS:
        model = make(Net)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, ByGroup)
        loss_of_tokens(model, rank, 0, 0).backward()
        optimizer.step()
        before = handle.full_state_dict()
        loss_of_tokens(model, rank, 0, 1).backward()
        optimizer.param_groups[0].update(normalized=True, lr=0.1)
        for _ in range(2):
            with pytest.raises(ValueError, match="with the new value of normalized ByGroup may need whole parameters"):
                optimizer.step()
        assert largest_difference(handle.full_state_dict(), before) == 0
        optimizer.param_groups[0]["normalized"] = False
        assert optimizer.step().applied


class Noisy(ByGroup):
    """Adds noise where a param group asks for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"] if group.get("noisy") else ():
                p.add_(torch.randn_like(p))


@on_ranks(2)
def test_an_option_that_the_trial_refuses_is_refused_in_each_step(rank: int) -> None:
    """The second step went on with it, after a program had caught the error of the first one."""
    handle = zeroshard.shard(make(Net), "zero2")
    optimizer = zeroshard.ShardedOptimizer(handle, Noisy)
    loss_of_tokens(handle.model, rank, 0, 0).backward()
    optimizer.param_groups[0]["noisy"] = True
    before = handle.full_state_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match="Noisy cannot be sharded: it draws random numbers"):
            optimizer.step()
    assert largest_difference(handle.full_state_dict(), before) == 0
    optimizer.param_groups[0]["noisy"] = False
    assert optimizer.step().applied


class OfGraphs(torch.optim.SGD):
    """Differentiates the gradients, as AdaHessian and SophiaH."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            curvatures = torch.autograd.grad(sum(p.grad.sum() for p in parameters), parameters)
        for parameter, curvature in zip(parameters, curvatures, strict=True):
            parameter.data -= parameter.grad.detach() / (1 + curvature.abs())


@pytest.mark.parametrize("elementwise", [None, True, False])
def test_a_class_that_differentiates_gradients_is_told_as_that(elementwise: bool | None) -> None:
    """The message advised `elementwise=`, with which the first step raised."""
    with pytest.raises(ValueError, match=r"OfGraphs cannot be sharded.*create_graph=True"):
        granularity_of(OfGraphs, {"lr": 0.1}, elementwise)


@on_ranks(2)
def test_a_class_that_cannot_step_a_parameter_without_elements_is_refused_on_every_rank(rank: int) -> None:
    """As in plain torch its step raised, but on the owner of the parameter alone."""
    for plan in ("ddp", "zero2", "zero3"):
        model = nn.Linear(6, 6)
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
        handle = zeroshard.shard(model, plan)
        with pytest.raises(ValueError, match="Adafactor cannot step empty, which has no elements"):
            zeroshard.ShardedOptimizer(handle, torch.optim.Adafactor)
        zeroshard.ShardedOptimizer(handle, Lamb)


class WithAList(torch.optim.Optimizer):
    """Momentum in a list beside `self.state`, as textbooks do it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.velocities: Any = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def velocity(self, number: int, p: Tensor) -> Tensor:
        return self.velocities[number]  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.sub_(self.velocity(number, p).mul_(0.9).add_(p.grad), alpha=0.1)


class WithADict(WithAList):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.velocities = {}

    def velocity(self, number: int, p: Tensor) -> Tensor:
        return self.velocities.setdefault(p, torch.zeros_like(p))  # type: ignore[no-any-return]


@on_ranks(2)
def test_momentum_beside_the_state_is_refused_or_stepped_whole(rank: int) -> None:
    """In pieces, which are cut anew where a parameter is frozen, it began with a momentum of zeros, in silence."""

    def train(model: Any, optimizer: Any, loss_of: Any) -> Any:
        for step in range(4):
            model.blocks[0].up.weight.requires_grad_(step != 2)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    for of_class in (WithAList, WithADict):
        plain = make(Net)
        both = lambda model, step: sum(loss_of_tokens(model, r, 0, step) for r in range(2)) / 2  # noqa: E731
        train(plain, of_class(plain.parameters()), both)
        for plan in PLANS:
            model = make(Net)
            handle = zeroshard.shard(model, plan)
            for elementwise in (None, True):
                with pytest.raises(ValueError, match=r"'velocities', .*self.state\[p\]; or pass elementwise=False"):
                    zeroshard.ShardedOptimizer(handle, of_class, elementwise=elementwise)
            optimizer = zeroshard.ShardedOptimizer(handle, of_class, elementwise=False)
            train(model, optimizer, lambda model, step: loss_of_tokens(model, rank, 0, step))
            assert largest_difference(handle.full_state_dict(), plain.state_dict()) < LAST_BITS
