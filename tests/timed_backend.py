"""A CPU backend with the collectives of NCCL that reads inputs and writes outputs at the worst legal moment.

A collective may read its inputs at any time after its issue, and write its outputs at any time until `wait` returns.
gloo does both almost at once; on a GPU the moment depends on streams, on the network and on the peers. This backend
exposes a program that is right only because gloo is quick:

- "early": inputs are read at the issue; a thread writes outputs as soon as all peers have issued the collective.
- "late": inputs are read, and outputs written, when the program waits. Until then the outputs hold NaN.
- "apart": inputs are read at the issue; outputs hold NaN until the program waits.
- "between": inputs are read when one to three later collectives of the group have been issued, and outputs hold NaN
  until one to three later ones have been waited for; or at the wait, if that comes first. A seeded generator draws.
- "random": one of these four for each collective, drawn in the same way.

The group's name is neither gloo nor nccl. Copies of the inputs are sent by gloo; sums are taken in rank order. It
has the rules of NCCL: see `tests/nccl_rules.py`.

Tensors of an accelerator take part as with NCCL: a stream of the group reads and writes them, from what the program had
queued at the issue on, and `wait` makes the current stream wait for it. The data pass through the host. So several
ranks can use one GPU, which NCCL refuses.

    ZEROSHARD_TEST_BACKEND=late pytest tests/...        for every group that the tests create
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit import DEVICE, SMALL
from tests.nccl_rules import Rules, Told, overlap

KINDS: dict[str, Callable[[random.Random], When]] = {
    "early": lambda draw: When(0, math.inf, on_arrival=True),
    "late": lambda draw: When(math.inf, math.inf),
    "apart": lambda draw: When(0, math.inf),
    "between": lambda draw: When(draw.randint(1, 3), draw.randint(1, 3)),
}
TIMINGS = (*KINDS, "random")
NAME = "timed"
"""The backend's name for `init_process_group`."""
_UNREAD = 0.1
"""Seconds after which inputs are read without a wait: a peer may wait for a collective that this rank never waits
for."""


@dataclass
class When:
    """The moments of one collective, unless the program waits for it before.

    Attributes:
        reads: the number of later collectives of the group at whose issue it reads its inputs.
        writes: the number of later ones that have been waited for when it writes its outputs.
        on_arrival: it writes them as soon as the data are there.
    """

    reads: float
    writes: float
    on_arrival: bool = False

    @property
    def writes_unasked(self) -> bool:
        return self.on_arrival or self.writes < math.inf


class Timed(dist.Work):
    """One collective. `read` copies the inputs and starts to send them; `write` fills the outputs."""

    def __init__(self, group: TimedGroup, inputs: Sequence[Tensor], outputs: Sequence[Tensor], when: When) -> None:
        super().__init__()
        self.group, self.inputs, self.outputs, self.when = group, inputs, outputs, when
        self.spoiled: Sequence[Tensor] = ()  # tensors that `write` fills with NaN
        self.issued = time.monotonic()
        self.start: Callable[[list[Tensor]], tuple[Any, Callable[[], list[Tensor]]]]
        self.name = ""
        self._work: Any = None
        self._told: Told | None = None
        self._take: Callable[[], list[Tensor]] | None = None
        self.is_written = False
        self._future: Any = None
        device = (*inputs, *outputs)[0].device
        self._stream = group.stream(device) if device.type != "cpu" else None
        self._begin = torch.accelerator.current_stream(device).record_event() if self._stream is not None else None
        self._end: Any = None

    def on_stream(self) -> AbstractContextManager[Any]:
        """Inside, operations run on the group's stream, after what the program had queued at the issue."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(self._begin)
        return cast(AbstractContextManager[Any], self._stream)

    def get_future(self) -> Any:
        """For torch DDP, which waits for the future without calling `wait`: outputs are written once the data have
        arrived."""
        with ALL.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self.when.on_arrival = True
                if self.is_written:
                    self._future.set_result(list(self.outputs))
                elif self not in ALL.waiting:
                    ALL.waiting.append(self)
        return self._future

    @property
    def is_read(self) -> bool:
        return self._take is not None

    def read(self) -> None:
        with self.on_stream():
            copies = [_bytes(tensor).to("cpu", copy=True) for tensor in self.inputs]
        self._told = self.group.rules.tell(self.name)
        self._work, self._take = self.start(copies)

    def arrive(self) -> None:
        """Wait for the data.

        Raises:
            BrokenRule: a peer is in another collective.
        """
        assert self._told is not None
        self._told.compare()
        self._work.wait()

    def has_arrived(self) -> bool:
        return self.is_read and bool(self._work.is_completed())

    def write(self) -> None:
        """Copy the received data into the outputs, except into parts that are also the input (in place)."""
        assert self._take is not None
        self._work.wait()
        if self.is_written:
            return
        self.is_written = True
        with self.on_stream():
            for output, value in zip(self.outputs, self._take(), strict=True):
                _bytes(output).copy_(value)
            for tensor in self.spoiled:
                _spoil(tensor)
        if self._stream is not None:
            self._end = self._stream.record_event()
        if self._future is not None:
            self._future.set_result(list(self.outputs))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        ALL.read_everything()
        self.arrive()
        before = ALL.due_with(self)
        for other in before:
            other.arrive()  # without the lock: its peers may not have issued it yet
        with ALL.lock:
            for work in (*before, self):
                work.write()
            if ALL.latest is self:
                ALL.latest = None
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self.is_written

    def synchronize(self) -> None:
        self.wait()


class Everything:
    """All collectives of this process that may still be waited for, in the order of their issue."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waiting: list[Timed] = []
        # torch DDP asks for a future right after the issue or, for small ones in a join, some collectives later. The
        # object must live until then: C++ keeps only its own half of it, without `get_future`.
        self.latest: Timed | None = None
        self.small: deque[Timed] = deque(maxlen=16)
        self._reads = False
        self._thread: threading.Thread | None = None
        self._process = 0

    def add(self, work: Timed) -> None:
        with self.lock:
            self._start()
            of_group = [other for other in self.waiting if other.group is work.group]
            for other in of_group:
                other.when.reads -= 1
            self.waiting.append(work)
            self.latest = work
            if sum(tensor.nbytes for tensor in work.outputs) <= SMALL:
                self.small.append(work)
            if any(one.when.reads <= 0 and not one.is_read for one in (*of_group, work)):
                self.read_everything(work.group)  # the collectives of a group begin in the order of their issue

    def read_everything(self, group: TimedGroup | None = None) -> None:
        with self.lock:
            # The lock lets its own thread in: garbage collection can drop a collective in the middle of an issue, and
            # the engine then waits for it. gloo would see that rank's collectives in another order, or twice.
            if self._reads:
                raise RuntimeError("a wait began in the middle of an issue of the same thread")
            self._reads = True
            try:
                for work in self.waiting:
                    if not work.is_read and (group is None or work.group is group):
                        work.read()
            finally:
                self._reads = False
            self.waiting = [
                work for work in self.waiting if not work.is_read or (work.when.writes_unasked and not work.is_written)
            ]

    def due_with(self, awaited: Timed) -> list[Timed]:
        """Collectives of the same group that were issued before, and write their outputs when this one is waited
        for."""
        with self.lock:
            before = [
                work
                for work in self.waiting
                if work.group is awaited.group and work.issued < awaited.issued and not work.is_written
            ]
            for work in before:
                work.when.writes -= 1
            return [work for work in before if work.when.writes <= 0]

    def _start(self) -> None:
        if self._process != os.getpid():
            self._process, self.waiting = os.getpid(), []
            self._thread = threading.Thread(target=self._go_on, daemon=True, name="timed collectives")
            self._thread.start()

    def _go_on(self) -> None:
        """A thread of its own writes early results, as on a GPU."""
        while True:
            time.sleep(0.005)
            with self.lock:
                if any(not work.is_read and time.monotonic() - work.issued > _UNREAD for work in self.waiting):
                    self.read_everything()
                for work in self.waiting:
                    if work.when.on_arrival and not work.is_written and work.has_arrived():
                        work.write()


ALL = Everything()


class TimedGroup(dist.ProcessGroup):
    """Ranks that exchange through a gloo group of their own.

    Args:
        timing: one of `TIMINGS`.
        seed: of what is drawn.
        rules: of NCCL.
    """

    def __init__(self, inner: Any, rank: int, size: int, timing: str, seed: int, rules: Rules) -> None:
        super().__init__(rank, size)
        self.inner, self.timing, self.rules = inner, timing, rules
        self._rank, self._size = rank, size
        self._random = random.Random(seed + rank)
        self._stream: Any = None

    def stream(self, device: torch.device) -> Any:
        """A stream on which the collectives of this group read and write."""
        if self._stream is None:
            self._stream = torch.Stream(device)
        return self._stream

    def getBackendName(self) -> str:
        return NAME

    @cached_property  # also asked for when torch has forgotten the group
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def abort(self) -> None:
        assert self.group_name, "kept for torch"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _issue(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[list[Tensor]], tuple[Any, Callable[[], list[Tensor]]]],
        name: str,
    ) -> Timed:
        """
        Args:
            start: takes copies of the inputs as bytes; returns the gloo work, and a function that gives the outputs'
            bytes.
            name: of the collective, as `Rules.check` returns it.
        """
        kind = self._random.choice([*KINDS]) if self.timing == "random" else self.timing
        work = Timed(self, list(inputs), list(outputs), KINDS[kind](self._random))
        work.start, work.name = start, name
        if not work.when.on_arrival:
            with work.on_stream():
                for output in outputs:
                    if not any(overlap(output, tensor) for tensor in inputs):
                        _spoil(output)
        ALL.add(work)
        return work

    # The collectives -------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Timed:
        name = self.rules.check("all_gather", [input], [output], None)
        parts = list(output.view(-1).chunk(self._size))
        others = [part for rank, part in enumerate(parts) if rank != self._rank or not overlap(part, input)]
        keep = [rank for rank in range(self._size) if rank != self._rank or not overlap(parts[rank], input)]

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            received = [torch.empty_like(copies[0]) for _ in range(self._size)]
            return self.inner.allgather([received], copies), lambda: [received[rank] for rank in keep]

        return self._issue([input], others, start, name)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Timed:
        name = self.rules.check("all_gather of a list", inputs, outputs[0], None)

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            received = [torch.empty_like(copies[0]) for _ in range(self._size)]
            return self.inner.allgather([received], copies), lambda: received

        return self._issue(inputs, outputs[0], start, name)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Timed:
        name = self.rules.check("reduce_scatter", [input], [output], None)

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            terms = torch.empty_like(copies[0])
            work = self.inner.alltoall_base(terms, copies[0], [], [])
            return work, lambda: [_bytes(_sum(terms.view(input.dtype).chunk(self._size)))]

        issued = self._issue([input], [output], start, name)
        if overlap(input, output):  # in place: the contract says nothing about the other ranks' shards afterwards
            issued.spoiled = [part for part in input.view(-1).chunk(self._size) if not overlap(part, output)]
        return issued

    def all_to_all_single(
        self, output: Tensor, input: Tensor, to: list[int] | None, of: list[int] | None, opts: Any = None
    ) -> Timed:
        name = self.rules.check("all_to_all", [input], [output], None)

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            received = _room_for(output)
            into, sent = (_in_bytes(sizes, tensor) for sizes, tensor in ((to, output), (of, input)))
            return self.inner.alltoall_base(received, copies[0], into, sent), lambda: [received]

        return self._issue([input], [output], start, name)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Timed:
        root = opts.rootRank if opts is not None else 0
        is_root, name = root == self._rank, self.rules.check("broadcast", tensors, [], root)

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            values = copies if is_root else [_room_for(tensor) for tensor in tensors]
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            return self.inner.broadcast(values, options), lambda: [] if is_root else values

        return self._issue(tensors if is_root else [], [] if is_root else tensors, start, name)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Timed:
        (tensor,) = tensors
        is_root, name = opts.rootRank == self._rank, self.rules.check("reduce", tensors, [], opts.rootRank)

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            terms = [torch.empty_like(copies[0]) for _ in range(self._size)] if is_root else []
            options = dist.GatherOptions()
            options.rootRank = opts.rootRank
            work = self.inner.gather([terms] if is_root else [], copies, options)
            return work, lambda: [_bytes(_sum([term.view(tensor.dtype) for term in terms]))] if is_root else []

        return self._issue(tensors, tensors if is_root else [], start, name)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Timed:
        (tensor,) = tensors
        operation, name = _operation(opts), self.rules.check("all_reduce", tensors, [], None)

        def start(copies: list[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
            terms = [torch.empty_like(copies[0]) for _ in range(self._size)]
            work = self.inner.allgather([terms], copies)
            return work, lambda: [_bytes(operation([term.view(tensor.dtype) for term in terms]))]

        return self._issue(tensors, tensors, start, name)

    def barrier(self, opts: Any = None) -> Timed:
        return self.allreduce([torch.zeros(1, device="cpu")])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single


def _bytes(tensor: Tensor) -> Tensor:
    """
    Raises:
        RuntimeError: it is not contiguous, as a backend demands.
    """
    return tensor.detach().view(-1).view(torch.uint8)


def _room_for(tensor: Tensor) -> Tensor:
    """Its bytes on the host, uninitialised."""
    return torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device="cpu")


def _in_bytes(sizes: list[int] | None, tensor: Tensor) -> list[int]:
    of_one = tensor.element_size() * (tensor.numel() // max(tensor.shape[0], 1))
    return [size * of_one for size in sizes or []]


def _spoil(tensor: Tensor) -> None:
    """NaN, for any dtype of floats."""
    _bytes(tensor).fill_(255)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _operation(opts: Any) -> Callable[[Sequence[Tensor]], Tensor]:
    operation = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    if operation == dist.ReduceOp.SUM:
        return _sum
    if operation == dist.ReduceOp.AVG:
        return lambda terms: _sum(terms) / len(terms)
    if operation == dist.ReduceOp.MAX:
        return lambda terms: torch.stack(list(terms)).amax(0)
    if operation == dist.ReduceOp.MIN:
        return lambda terms: torch.stack(list(terms)).amin(0)
    raise NotImplementedError(str(operation))


def _create(options: Any, _: Any) -> TimedGroup:
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    timing, _, seed = os.environ.get("ZEROSHARD_TEST_BACKEND", "late").partition("-")
    inner = dist.ProcessGroupGloo(dist.PrefixStore("data", options.store), rank, size, timeout)  # type: ignore[call-arg]
    rules = Rules(options.store, rank, size, timeout, options.global_ranks_in_group)
    return TimedGroup(inner, rank, size, timing, int(seed or 0), rules)


def register() -> None:
    """Once in a process, before ranks are forked."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list({"cpu", DEVICE.type}))


@contextmanager
def timed_ranks(timing: str) -> Iterator[None]:
    """Inside the context, `run_ranks` creates groups of this backend. `timing`: as above; "random-7" has the seed 7."""
    if timing.partition("-")[0] not in TIMINGS:
        raise ValueError(f"ZEROSHARD_TEST_BACKEND: expected one of {', '.join(TIMINGS)}, found {timing!r}")
    register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSHARD_TEST_BACKEND", timing)
        patch.setattr("zeroshard.testing.BACKEND", NAME)
        if DEVICE.type != "cpu":
            patch.setattr("zeroshard.ranks.backends._hardware", lambda device: "")  # ranks may share a GPU
        yield
