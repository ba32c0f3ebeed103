"""No phase holds memory that it does not need: the bounds of FSDP2's own test, phase by phase.

Pool buffers for weights, buckets and scratch once were held from `shard` on. With few large blocks that was most of the
memory: a model of 3 blocks of 28 MB, under ZERO3 on 2 ranks, held 228 MB in forward and backward and 313 MB at rest.
The bounds of torch's `test_fully_shard_memory.py` for FSDP2 are 144, 187 and 160 MB.

Bytes are counted without the engine's own records: all storages behind all tensors, including activations and
autograd's temporaries, at every torch operation.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import zeroshard
from tests.grids import EVERYTHING
from zeroshard.comm import native_transport
from zeroshard.comm.collectives import Collectives
from zeroshard.layout import cuts, pool_plan
from zeroshard.model.absent import as_tensors
from zeroshard.planner import plan_memory
from zeroshard.planning import Configuration
from zeroshard.planning.whole_model import sharding
from zeroshard.ranks.mesh import Mesh
from zeroshard.storage import pool
from zeroshard.testing import run_ranks

MB = 10**6
WIDTH = 768  # of torch's test; for smaller widths the bounds are scaled
STEPS = 3 if EVERYTHING else 2
"""The second step has optimizer state."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + self.down(torch.relu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int = 3) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(32, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Live(TorchDispatchMode):
    """Bytes of all storages of this process that are new since the start: now, and the maximum since `restart`.
    Storages of peers are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._refs: dict[int, StorageWeakRef] = {}
        self.shared: Any = None
        self.most = 0
        self._before = set(map(_ref, _tensors_of_python()))

    def look(self) -> None:
        """Add all tensors that Python can reach."""
        gc.collect()
        self._add(_tensors_of_python())
        self.restart()

    def restart(self) -> None:
        self.most = self.now()

    def now(self) -> int:
        foreign = {tensor.untyped_storage()._cdata for tensor in self.shared.mapped()} if self.shared else set()
        total, counted = 0, set[int]()  # several storages may stand for the same memory
        for key, ref in list(self._refs.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key]
            elif storage._cdata not in foreign and storage.data_ptr() not in counted:
                total += storage.nbytes()
                counted.update([storage.data_ptr()] if storage.nbytes() else [])
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(tensor for tensor in pytree.tree_leaves((args, kwargs, result)) if isinstance(tensor, Tensor))
        if func is not torch.ops.aten.from_file.default:  # `shared.mapped()` lists it only after the call
            self.most = max(self.most, self.now())
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            with as_tensors():
                key, num_bytes = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
            # An absent parameter has many bytes, and its storage few.
            if key not in self._refs and min(tensor.nbytes, num_bytes) >= 1024 and _ref(tensor) not in self._before:
                self._refs[key] = _ref(tensor)


def _ref(tensor: Tensor) -> StorageWeakRef:
    with as_tensors():
        return StorageWeakRef(tensor.untyped_storage())


def _tensors_of_python() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and not thing.is_meta]


def bounds(model: nn.Module, num_ranks: int) -> Callable[[int], dict[str, float]]:
    """Number of a step, from 0 -> phase -> bytes, by the formulas of torch's test for `reshard_after_forward=True`.
    That test ends with the first step; the bounds of later steps include the optimizer's state."""
    whole = 4 * sum(p.numel() for p in model.parameters())
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    rest = whole - 4 * sum(p.numel() for p in model.blocks.parameters())
    sharded, buffer = whole / num_ranks, 16 * MB * (block / (28.3 * MB))

    def of_step(step: int) -> dict[str, float]:
        state = 2 * sharded * (step > 0)
        return {
            "init": sharded + block,
            "forward": sharded + 3 * block + rest + buffer + state,
            "backward": 2 * sharded + 3 * block + rest + buffer + state,
            "step": 4 * sharded + buffer,
            "rest": 3 * sharded + 2 * buffer,
        }

    return of_step


def choose(transport: str) -> None:
    """Select the transport, in a forked rank."""
    if transport != "shared":
        Collectives._try_to_share = lambda self: None  # type: ignore[method-assign]
    if transport == "native":  # run on gloo, which copies whole buffers; NCCL does not
        Mesh.is_pairwise = property(lambda self: False)  # type: ignore[method-assign,assignment]
        for name in ("_reduce_scatter", "_all_gather"):
            setattr(native_transport, name, partial(Unseen, getattr(native_transport, name)))


class Unseen:
    """A collective of torch whose internal allocations are not counted."""

    def __init__(self, start: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            self._work = start(*args, **kwargs)

    def wait(self) -> None:
        with _disable_current_modes():
            self._work.wait()


def adam(before: Callable[[], None]) -> type[torch.optim.Adam]:
    """`before` is called when the step begins to update."""

    class Adam(torch.optim.Adam):
        begun = False

        def step(self, closure: Any = None) -> Any:
            if not self.begun:
                before()
            self.begun = True
            return super().step(closure)

    return Adam


def found(rank: int, num_ranks: int, width: int, transport: str, steps: int = STEPS) -> tuple[list[Any], list[Any]]:
    """(phase, bytes, the bound) of each phase of each step; (phase, counted by the engine, planned)."""
    choose(transport)
    pool_plan.KEPT_BYTES = pool_plan.KEPT_BYTES * width**2 // WIDTH**2
    pool.KEPT_IN_STEP = pool.KEPT_IN_STEP * width**2 // WIDTH**2
    sizes = (numel * width**2 // WIDTH**2 for numel in astuple(cuts.SIZES["cpu"]))
    cuts.SIZES["cpu"] = cuts.Sizes(*sizes)  # Adam allocates temporaries for each piece
    with torch.device("meta"):
        on_meta = Model(width)
    bound = bounds(on_meta, num_ranks)
    live = Live()
    torch.manual_seed(0)
    model = Model(width)
    live.look()
    noted: list[int] = []
    map_peers = Collectives.map_peers
    # Before memory of peers is mapped, which would be counted.
    Collectives.map_peers = lambda self: (noted.append(live.most), map_peers(self))[1]  # type: ignore[method-assign]
    init = Collectives.__init__

    def notice(self: Collectives, *args: Any) -> None:
        init(self, *args)
        live.shared = getattr(self.transport, "memory", None)  # maps common memory while units are built

    Collectives.__init__ = notice  # type: ignore[method-assign]
    broadcast = Collectives.broadcast

    def released(self: Collectives, *args: Any, **kwargs: Any) -> None:
        before = live.now()
        broadcast(self, *args, **kwargs)
        while live.now() > before:  # a thread of gloo drops the last message when it runs again, after the wait for it
            os.sched_yield()

    Collectives.broadcast = released  # type: ignore[method-assign]
    with live:
        handle = zeroshard.shard(model, "zero3", units=Block)
    assert num_ranks == 1 or handle.engine.collectives.transport.name == transport
    besides = live.now() - sum(handle.memory().values())  # samples of gathered values
    optimizer = zeroshard.ShardedOptimizer(handle, adam(before=live.restart), lr=1e-2, foreach=False)
    phases = []
    live.look()
    phases.append(("init", live.most, bound(0)["init"]))
    with live:
        for step in range(steps):

            def note(phase: str, step: int = step) -> None:
                phases.append((phase, live.most, bound(step)[phase]))
                live.restart()

            loss = model(torch.randint(0, 32, (1, 4))).sum()
            note("forward")
            loss.backward()
            del loss
            note("backward")
            for stepper in optimizer.steppers:
                stepper.optimizer.begun = False
            optimizer.step()
            note("step")
            optimizer.zero_grad()
            live.restart()
            note("rest")
    arguments: dict[str, Any] = {"units": Block, "rank": rank, "transport": transport}
    training = zeroshard.plan(on_meta, Configuration(plan="zero3", ranks=num_ranks, device="cpu", **arguments)).training
    # Exact in `tests/planning/test_whole_model.py`; here gloo's threads may release a row of numbers later.
    assert abs(noted[0] - besides - sharding(training)) <= 1 << 14
    return phases, [
        (handle.memory(), plan_memory(on_meta, "zero3", num_ranks, **arguments)),
        (handle.memory(peak=True), plan_memory(on_meta, "zero3", num_ranks, **arguments, peak=True)),
    ]


@pytest.mark.by_gloo
@pytest.mark.parametrize(("num_ranks", "transport"), [(1, "shared"), (3, "shared"), (2, "pairwise"), (2, "native")])
def test_no_phase_holds_more_than_fsdp2_may(num_ranks: int, transport: str) -> None:
    """With a smaller width, and the constant part of the bounds (16 MB for everything else) scaled down as well. (Two
    ranks that share memory are those of the next test.)
    (torch's test is for 2 ranks. On 3 ranks backward has two buckets and two pool buffers until its last unit, and may
    exceed the bound: by half a block with the pairwise transport, by less than a fifth with the native one.)"""
    for phases, counted in run_ranks(found, num_ranks, num_ranks, 256, transport):
        over = [(phase, most / MB, bound / MB) for phase, most, bound in phases if most > bound]
        assert not over, (over, phases)
        for measured, planned in counted:
            assert measured == planned


@pytest.mark.by_gloo
def test_the_numbers_of_torchs_test() -> None:
    """3 blocks of 28 MB on 2 ranks: at most 144 MB in forward, 187 in backward and in the step, 160 at rest; the
    second step, too. By default the bounds have these numbers, and what is measured is smaller."""
    with torch.device("meta"):
        of_torch = bounds(Model(WIDTH), 2)(0)
    assert {phase: round(bound / MB) for phase, bound in of_torch.items()} == {
        "init": 71, "forward": 144, "backward": 187, "step": 187, "rest": 160,
    }  # fmt: skip
    for phases, counted in run_ranks(found, 2, 2, WIDTH if EVERYTHING else 256, "shared"):
        assert all(most <= bound for _, most, bound in phases), phases
        assert all(measured == planned for measured, planned in counted)
