"""The states of a handle: the calls that change them, and the errors of calls that come too early or too late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.runtime.life import Life
from zeroshard.testing import run_ranks

CLOSED = r"{}: this handle is closed, and its model is a plain one again; call shard\(\) anew$"
PARKED = r"{}: this handle is parked; call unpark\(\) first$"

REFUSED = {
    (Life.CLOSING, "park"): r"park: close\(\) of this handle has been interrupted; call it again, or abandon\(\)$",
    (Life.PARKED, "park"): PARKED.format("park"),
    (Life.PARKED, "close"): PARKED.format("close"),
    (Life.CLOSED, "park"): CLOSED.format("park"),
    (Life.CLOSED, "close"): CLOSED.format("close"),
    (Life.ABANDONED, "close"): "close: this handle was abandoned; build and shard",
}


@pytest.mark.parametrize(("state", "what"), REFUSED)
def test_a_state_that_refuses_a_call_says_why(state: Life, what: Any) -> None:
    with pytest.raises(RuntimeError, match=f"^{REFUSED[state, what]}"):
        state.expect_open(what)


def calls(folder: Path, model: nn.Module, handle: Any, optimizer: Any) -> dict[str, Callable[[], Any]]:
    """Calls that need an open handle, by the name that the error message uses."""
    loss = torch.zeros((), requires_grad=True)
    return {
        "forward": lambda: model(torch.ones(2, 3)),
        "backward": lambda: optimizer.backward(loss),
        "optimizer.step": optimizer.step,
        "build an optimizer": lambda: zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1),
        "state": lambda: optimizer.state,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
        "save": lambda: zeroshard.save(folder, handle, optimizer, step=1),
        "load": lambda: zeroshard.load(folder, handle, optimizer),
        "set_requires_gradient_sync": lambda: handle.set_requires_gradient_sync(False),
        "join": handle.join,
        "unsharded": handle.unsharded,
        "gradient": lambda: handle.gradient("weight"),
        "set_gradient": lambda: handle.set_gradient("weight", torch.zeros(2, 3)),
        "main_parts": handle.main_parts,
        "set_main_parts": lambda: handle.set_main_parts([]),
        "average_buffers": handle.average_buffers,
        "register_forward_method": lambda: handle.register_forward_method(model, "forward"),
        "full_state_dict": handle.full_state_dict,
        "load_full_state_dict": lambda: handle.load_full_state_dict({}),
        "find_reads": handle.find_reads,
        "park": handle.park,
    }


def test_a_parked_and_a_closed_handle_refuse_every_call_with_its_name(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = nn.Linear(3, 2)
        handle = zeroshard.shard(model, "zero3")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        of_open = calls(tmp_path, model, handle, optimizer)
        handle.park()
        for name, call in {**of_open, "close": handle.close}.items():
            with pytest.raises(RuntimeError, match=f"^{PARKED.format(name)}"):
                call()
        assert handle.memory()["ring"] == 0
        handle.unpark()
        with pytest.raises(RuntimeError, match=r"^unpark: this handle is not parked$"):
            handle.unpark()
        handle.close()
        handle.close()  # a second time does nothing
        model(torch.ones(2, 3))  # a plain model
        del of_open["forward"]
        for name, call in {**of_open, "memory": handle.memory}.items():
            with pytest.raises(RuntimeError, match=f"^{CLOSED.format(name)}"):
                call()
        with pytest.raises(RuntimeError, match=r"^unpark: this handle is not parked$"):
            handle.unpark()

    run_ranks(check, 1)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_a_block_of_full_weights_refuses_what_takes_them_away(plan: str) -> None:
    """Where weights are sharded, the end of the block said that a backward had come too late, or AssertionError.
    `abandon` is for a teardown, and may come at any time."""

    def abandon_in(handle: Any, *, write: bool) -> None:
        with handle.unsharded(write=write):
            handle.abandon()
            raise KeyError("mine")

    def check(rank: int) -> None:
        for write in (False, True):
            model = nn.Linear(4, 4)
            handle = zeroshard.shard(model, plan)
            for call in (handle.close, handle.park):
                with pytest.raises(RuntimeError, match=rf"{call.__name__} in a block of handle.unsharded\(\)"):
                    with handle.unsharded(write=write):
                        call()
            model(torch.ones(2, 4))
            with handle.unsharded(write=write):
                handle.abandon()
            assert handle.engine.life is Life.ABANDONED
            handle = zeroshard.shard(nn.Linear(4, 4), plan)
            with pytest.raises(KeyError, match="mine"):
                abandon_in(handle, write=write)

    run_ranks(check, 2)


def test_a_block_that_runs_out_of_memory_keeps_nothing() -> None:
    """The units that it had gathered once stayed in full, for good."""

    def check(rank: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        handle = zeroshard.shard(model, "zero3", units=nn.Linear)
        *others, last = handle.engine.units
        before = handle.memory()
        last.apart.take = Mock(side_effect=MemoryError)  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            handle.unsharded().__enter__()
        del last.apart.take
        assert not any(unit.weights.in_use or unit.weights.scopes or unit.weights.shown for unit in others)
        assert handle.memory() == before
        with handle.unsharded():
            assert model[1].weight.isfinite().all()

    run_ranks(check, 2)
