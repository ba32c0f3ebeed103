"""`get_extra_state` and `set_extra_state` of modules, and state dicts that hooks of the user have changed.

What `get_extra_state` returned was taken for a buffer: a tensor was saved, and on loading copied into a tensor that
nobody had any more (so the state was lost, without an error); another object failed with an error of Python's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS
from tests.together import on_ranks
from zeroshard.testing import run_ranks


class Counting(nn.Module):
    """Counts its calls. `kind`: of the object in which it gives the number away."""

    def __init__(self, kind: type = Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.kind = 0, kind

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)

    def get_extra_state(self) -> Any:
        if self.kind is dict:
            return {"calls": self.calls, "as tensors": [torch.tensor([self.calls])]}
        return torch.ones(self.calls) if self.kind is Tensor else None

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] if self.kind is dict else len(state) if self.kind is Tensor else 0
        assert self.kind is not dict or state["as tensors"][0].item() == self.calls


def called(plan: Any, kind: type = Tensor) -> tuple[nn.Sequential, zeroshard.Handle]:
    model = nn.Sequential(Counting(kind), nn.Linear(4, 1))
    handle = zeroshard.shard(model, plan)
    for _ in range(3):
        model(torch.ones(2, 4))
    return model, handle


@on_ranks(2)
def test_a_full_state_brings_them_back(rank: int) -> None:
    for plan in PLANS:
        for kind in (Tensor, dict):
            model, handle = called(plan, kind)
            state = handle.full_state_dict()
            assert list(state) == list(nn.Sequential(Counting(kind), nn.Linear(4, 1)).state_dict())
            model[0].calls = 7 + rank
            handle.load_full_state_dict(state)
            assert model[0].calls == 3
            model[0].calls = 7 + rank
            handle.load_full_state_dict(state if rank == 0 else None, broadcast_from_rank0=True)
            assert model[0].calls == 3
            plain = nn.Sequential(Counting(kind), nn.Linear(4, 1))
            plain.load_state_dict(state)
            assert plain[0].calls == 3


def test_a_checkpoint_brings_tensors_back(tmp_path: Path) -> None:
    """Each rank's own, and of another length than it has now."""

    def check(rank: int) -> None:
        for plan in PLANS:
            model, handle = called(plan)
            model[0].calls += rank
            zeroshard.save(tmp_path / plan.name, handle, step=1)
            model[0].calls = 0
            zeroshard.load(tmp_path / plan.name, handle)
            assert model[0].calls == 3 + rank
            _, handle = called(plan, type(None))
            zeroshard.save(tmp_path / plan.name, handle, step=2)
            _, handle = called(plan, dict)
            with pytest.raises(ValueError, match=r"0\._extra_state is a dict, and a checkpoint holds .* as a tensor"):
                zeroshard.save(tmp_path / plan.name, handle, step=3)

    run_ranks(check, 2)


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_before_anything_is_changed(rank: int) -> None:
    _model, handle = called("zero2", dict)
    before = handle.full_state_dict()
    wrong = {**before, "0.linear.weight": torch.zeros(4, 4), "0._extra_state": object()}
    with pytest.raises(ValueError, match=r"0\._extra_state is of type object"):
        handle.load_full_state_dict(wrong if rank == 0 else None, broadcast_from_rank0=True)
    assert torch.equal(handle.full_state_dict()["0.linear.weight"], before["0.linear.weight"])


class Transposed(nn.Module):
    """Its state dict has the weight transposed, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_state_dict_post_hook(self._transpose)
        self.register_load_state_dict_pre_hook(self._transpose_back)

    @staticmethod
    def _transpose(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}linear.weight").detach().t().contiguous()

    @staticmethod
    def _transpose_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}linear.weight"] = state.pop(f"{prefix}turned").t()


@on_ranks(2)
def test_what_a_hook_has_made_is_not_loaded_in_silence(rank: int) -> None:
    for plan in PLANS[:3]:
        model = nn.Sequential(Transposed())
        handle = zeroshard.shard(model, plan)
        state = handle.full_state_dict()
        handle.load_full_state_dict(state)  # it has these values
        doubled = {name: value * 2 for name, value in state.items()}
        with pytest.raises(ValueError, match=r"0\.turned is made by a hook of state_dict\(\), and cannot be set"):
            handle.load_full_state_dict(doubled)
        with handle.unsharded(write=True):
            model.load_state_dict(doubled)
        with handle.unsharded():
            assert torch.equal(model[0].linear.weight, doubled["0.turned"].t())


@on_ranks(2)
def test_a_number_that_a_hook_has_made_may_stay_as_it_is(rank: int) -> None:
    """A state dict that handle.full_state_dict() had returned was refused: "expected a dense tensor, found a int"."""
    model = nn.Linear(4, 4)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}version": 3}))
    handle = zeroshard.shard(model, "zero3")
    state = handle.full_state_dict()
    handle.load_full_state_dict({name: value * 2 if name != "version" else 3 for name, value in state.items()})
    assert torch.equal(handle.full_state_dict()["weight"], state["weight"] * 2)
    with pytest.raises(ValueError, match=r"version is made by a hook of state_dict\(\), and cannot be set"):
        handle.load_full_state_dict({**state, "version": 4})
    handle.load_full_state_dict(state, broadcast_from_rank0=True)
    assert torch.equal(handle.full_state_dict()["weight"], state["weight"])


class Raises(nn.Module):
    """`raises`: in which method."""

    raises = ""

    def get_extra_state(self) -> torch.Tensor:
        assert self.raises != "get", "epoch"
        return torch.ones(2)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert self.raises != "set", "epoch"


def test_an_extra_state_that_raises_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    """The error was the method's alone, on one rank; in a load the others waited for it."""

    def check(rank: int) -> None:
        handle = zeroshard.shard(nn.Sequential(nn.Linear(3, 3), extra := Raises()), "zero3", units=[nn.Linear])
        state, of_rank0 = handle.full_state_dict(), {"broadcast_from_rank0": True}
        for raises, call in (
            ("get", handle.full_state_dict),
            ("get", lambda: handle.load_full_state_dict(state)),
            ("get", lambda: zeroshard.save(tmp_path, handle, step=0)),
            ("set", lambda: handle.load_full_state_dict(state)),
            ("set", lambda: handle.load_full_state_dict(state, **of_rank0)),
        ):
            extra.raises = raises if rank == 1 else ""
            told = rf"\(on rank 1\): {raises}_extra_state\(\) for 1\._extra_state raised AssertionError: epoch"
            with pytest.raises(ValueError, match=told):
                call()

    run_ranks(check, 2)
