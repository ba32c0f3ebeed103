"""Models whose `state_dict()` is not torch's: a checkpoint has all weights and buffers, whatever it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import plans_of, same_bits
from tests.together import on_ranks
from zeroshard.integrations.sharding import trained_state
from zeroshard.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.norm(self.a(x))))


class WithoutArguments(Net):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


class InParts(Net):
    def state_dict(self, **kwargs: Any) -> Any:  # type: ignore[override]
        return {"a": self.a.state_dict(), "others": {"b": self.b.state_dict()}}


class OfCopies(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class CopiesOfBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._copy)

    @staticmethod
    def _copy(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["norm.running_mean"] = state["norm.running_mean"].clone()


def real_state(model: nn.Module, handle: Any) -> dict[str, Tensor]:
    with handle.unsharded():
        return {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.by_gloo
def test_a_checkpoint_has_everything_whatever_the_models_state_dict_returns(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for number, of_class in enumerate((WithoutArguments, InParts, OfCopies, CopiesOfBuffers)):
            for plan in plans_of(number):
                found = []
                for is_new in (True, False):
                    model = of_class()
                    handle = zeroshard.shard(model, plan, units=nn.Linear)
                    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=0.1)
                    folder = tmp_path / f"{of_class.__name__}-{plan}"
                    if is_new:
                        model(torch.randn(6, 4)).pow(2).mean().backward()
                        optimizer.step()
                        model.norm.running_mean.fill_(rank + 1.0)
                        zeroshard.save(folder, handle, optimizer, step=1)
                    else:
                        zeroshard.load(folder, handle, optimizer)
                    found.append(real_state(model, handle))
                assert same_bits(*found), (of_class, plan)
                assert found[0]["norm.running_mean"][0] == rank + 1

    run_ranks(check, 2)


class Renamed(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"net.{name}": value.half() * 2 for name, value in super().state_dict(*args, **kwargs).items()}


class InAnotherType(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.double() + 1 for name, value in super().state_dict(*args, **kwargs).items()}


class Filtered(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.cpu().clone() for name, value in super().state_dict().items() if name.startswith("a.")}


class WithOneInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inside = OfCopies()


class BothOfItsOwn(OfCopies):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name: value / 2 for name, value in state.items()}, *args, **kwargs)


class WithExtraState(Net):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def flat(state: Any) -> dict[str, Any]:
    found = {}
    for name, value in state.items():
        inner = flat(value) if isinstance(value, dict) else {"": value}
        found.update({f"{name}{key}": one for key, one in inner.items()})
    return found


@pytest.mark.by_gloo
@pytest.mark.parametrize(
    "of_class",
    [
        *(WithoutArguments, InParts, OfCopies, CopiesOfBuffers, Renamed, Filtered),
        *(InAnotherType, WithOneInside, BothOfItsOwn, WithExtraState),
    ],
)
@on_ranks(2)
def test_the_full_state_is_what_the_models_state_dict_makes_of_the_values(rank: int, of_class: type[Net]) -> None:
    """Also main's, and as integrations save it: under ZeRO-3 it raised, elsewhere main's were in 16 bits."""
    for plan in ("ddp", "zero1", "zero3"):
        torch.manual_seed(0)
        model, plain = of_class(), of_class()
        plain.load_state_dict(nn.Module.state_dict(model))
        if of_class is BothOfItsOwn:
            nn.Module.load_state_dict(plain, nn.Module.state_dict(model))
        expected = plain.state_dict()
        precision = zeroshard.MixedPrecision(param=torch.bfloat16, keep=(nn.BatchNorm1d,))
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
        for found in (handle.full_state_dict(main=True), handle.full_state_dict(main=True, rank0_only=True)):
            assert found == {} or same_state(found, expected), plan
            assert found or rank == 1
        saved = trained_state(handle, handle.model)
        assert rank == 1 or same_state(saved, expected), plan
        for linear in (plain.a, plain.b):
            linear.bfloat16()
        if of_class is WithOneInside:
            plain.inside.a.bfloat16(), plain.inside.b.bfloat16()
        assert same_state(handle.full_state_dict(), plain.state_dict()), plan
        assert all(isinstance(one, nn.Parameter) for one in model.parameters()) and len(handle.engine.units) > 1


def same_state(found: Any, expected: Any) -> bool:
    found, expected = flat(found), flat(expected)
    tensors = [{n: one for n, one in state.items() if isinstance(one, Tensor)} for state in (found, expected)]
    rest = [{n: one for n, one in state.items() if not isinstance(one, Tensor)} for state in (found, expected)]
    return list(found) == list(expected) and same_bits(*tensors) and rest[0] == rest[1]


@pytest.mark.by_gloo
@on_ranks(2)
def test_a_full_state_is_loaded_under_the_names_of_torch(rank: int) -> None:
    """A model with a `load_state_dict()` of its own as well is refused."""
    for of_class in (WithoutArguments, OfCopies, CopiesOfBuffers, Filtered):
        for plan in ("zero1", "zero3"):
            model, other = of_class(), of_class()
            state = {name: value.clone() for name, value in nn.Module.state_dict(other).items()}
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            handle.load_full_state_dict(state if rank == 0 else None, strict=False, broadcast_from_rank0=True)
            with handle.unsharded():
                assert torch.equal(model.a.weight, other.a.weight) or rank == 1
    handle = zeroshard.shard(BothOfItsOwn(), "zero3", units=nn.Linear)
    with pytest.raises(ValueError, match=r"BothOfItsOwn has a load_state_dict\(\) of its own"):
        handle.load_full_state_dict({})
