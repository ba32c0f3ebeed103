"""Finds two accesses to the same bytes that no event orders: simulated streams, on a CPU, in one process.

On CUDA a collective runs on the stream of its group. It begins after what the current stream had queued at its issue,
and the current stream continues beside it until `wait`. Here every torch operation is an operation on the current
stream, which is MAIN except inside of a `SideStream`, and every collective of the native transport one on its group's
stream; `wait` is an event. Order is kept by the vector clocks of torch's CUDA sanitizer (`StreamSynchronizations`).
That sanitizer compares addresses of tensors. Here byte intervals of storages are compared, as most tensors of the
engine are parts of a few large storages.

Memory is freed as by the caching allocator of CUDA: on the host, at once, and only the stream on which it was allocated
gets it again. That stream may write to it before another stream, for which it has not waited, has read it. A work of
NCCL keeps its tensors until somebody waits for it, on whatever stream (`Waited`).

Use it in a dry run: the order of accesses on one rank does not depend on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, StreamSynchronizations, zip_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zeroshard.comm import native_transport
from zeroshard.layout.sums import in_shards
from zeroshard.model.absent import as_tensors
from zeroshard.storage import buffer, pool

MAIN = 0


class Access(NamedTuple):
    """Bytes [start, stop) of a storage, read or written by operation number `number`, which runs on `stream`."""

    start: int
    stop: int
    is_write: bool
    stream: int
    number: int
    what: str


@dataclass
class Memory:
    """The memory of a storage.

    Attributes:
        ref: weak, and keeps another storage from getting the same key.
        stream: where it was allocated.
    """

    ref: StorageWeakRef
    stream: int
    accesses: list[Access] = field(default_factory=list)


class Streams(TorchDispatchMode):
    """Records what each operation reads and writes.

    Attributes:
        races: one line for each pair of accesses that conflict, and that nothing orders; a new use of freed memory is a
            write.
        num_collectives: how many were issued.
        current: the stream of operations.
        waits: how often stream MAIN has waited for a collective, or for an event of a `Side`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.num_collectives = 0
        self.current = MAIN
        self.waits = 0
        self._events = 0
        self._order = StreamSynchronizations()
        self._number = 0
        self._streams: dict[Any, int] = {}
        self._memory: dict[int, Memory] = {}  # by storage
        self._same: dict[int, tuple[StorageWeakRef, int]] = {}  # another storage for the memory of this one
        self._elsewhere: set[int] = set()  # storages that another stream has used than the one that allocated them
        self._freed: list[tuple[int, list[Access]]] = []  # of these, when freed: stream, and what others may still do
        self._kept: list[list[Tensor]] = []  # tensors of collectives that nobody has waited for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look_for_freed()
        result = func(*args, **kwargs)
        if func.namespace != "c10d":  # a collective: `issue` records it
            self.run(self.current, str(func), *_accessed(func, args, kwargs, result))
        return result

    def run(self, stream: int, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An operation that is queued on a stream."""
        self._number += 1
        self._order.update_seq_num(stream, self._number)
        for is_write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                with as_tensors():
                    storage, (start, stop) = tensor.untyped_storage(), _bytes_of(tensor)
                self._access(storage, Access(start, stop, is_write, stream, self._number, what))

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """The memory of a storage is freed or replaced: as if all of it were written. The new memory is allocated on
        the current stream."""
        self._look_for_freed()
        self._number += 1
        self._order.update_seq_num(self.current, self._number)
        new = Access(0, max(storage.nbytes(), 1), True, self.current, self._number, "resize_")
        self._access(storage, new)
        before = self._memory.pop(storage._cdata)
        self._elsewhere.discard(storage._cdata)
        self._free(before)
        self._memory[storage._cdata] = Memory(before.ref, self.current, [new])
        if num_bytes:
            self._use_freed(new)

    def is_same(self, other: Tensor, one: Tensor) -> None:
        """The storage of `other` stands for the memory of that of `one`, which was there before."""
        first, second = one.untyped_storage(), other.untyped_storage()
        if first._cdata != second._cdata:
            self._same[second._cdata] = StorageWeakRef(second), first._cdata

    def issue(self, group: Any, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Any) -> Waited:
        """A collective on the stream of its group."""
        self.num_collectives += 1
        stream = self.stream_of(group)
        self.record(self.current)(stream)
        self.run(stream, what, reads, writes)
        wait, kept = self.record(stream), [*reads, *writes]
        self._kept.append(kept)  # torch keeps what nobody waits for until it is over

        def wait_and_drop() -> None:
            wait(self.current)
            kept.clear()

        return Waited(work, wait_and_drop)

    def stream_of(self, key: Any) -> int:
        return self._streams.setdefault(key, len(self._streams) + 1)

    def record(self, stream: int) -> Callable[[int], None]:
        """An event on a stream. Returns a function that makes another stream wait for it."""
        self._events += 1
        event = self._events
        self._order.record_state(event, stream)

        def wait(by: int) -> None:
            self._look_for_freed()
            self.waits += by == MAIN
            self._order.stream_wait_for_event(by, event)

        return wait

    def _access(self, storage: torch.UntypedStorage, new: Access) -> None:
        _, key = self._same.get(storage._cdata, (None, storage._cdata))
        memory = self._memory.get(key)
        if memory is None or memory.ref.expired():
            memory = self._memory[key] = Memory(StorageWeakRef(storage), self.current)
            self._use_freed(new)
        if new.stream != memory.stream:
            self._elsewhere.add(key)
        kept = []
        for old in memory.accesses:
            overlap = old.start < new.stop and new.start < old.stop
            if overlap and (old.is_write or new.is_write) and not self._is_known_to(new.stream, old):
                self.races.append(f"{_in_words(new)}, and {_in_words(old)}, which is not waited for")
            # What is ordered after this access is ordered after those that it replaces.
            is_replaced = new.is_write or (not old.is_write and old.stream == new.stream)
            if not (is_replaced and new.start <= old.start and old.stop <= new.stop):
                kept.append(old)
        memory.accesses[:] = [*kept, new]

    def _is_known_to(self, stream: int, access: Access) -> bool:
        return self._order.is_ordered_after(stream, access.number, access.stream)

    def _look_for_freed(self) -> None:
        """Find the storages that have been freed since the last call."""
        for key in [key for key in self._elsewhere if self._memory[key].ref.expired()]:
            self._elsewhere.discard(key)
            self._free(self._memory.pop(key))

    def _free(self, memory: Memory) -> None:
        """The stream that has allocated memory may get it again."""
        in_flight = [access for access in memory.accesses if not self._is_known_to(memory.stream, access)]
        if in_flight:
            self._freed.append((memory.stream, in_flight))

    def _use_freed(self, new: Access) -> None:
        """The current stream allocates memory: it may be any that it has freed."""
        mine = [accesses for stream, accesses in self._freed if stream == self.current]
        self._freed = [(stream, accesses) for stream, accesses in self._freed if stream != self.current]
        for old in (access for accesses in mine for access in accesses if not self._is_known_to(self.current, access)):
            self.races.append(f"{new.what} may get freed memory: {_in_words(old)}, which is not waited for")


class Waited:
    """A work of torch, with the event of its end. (NCCL's keeps its tensors until the first wait, by any stream.)"""

    def __init__(self, work: Any, event: Callable[[], None]) -> None:
        self._work, self._event = work, event

    def wait(self) -> None:
        self._event()
        self._work.wait()


class Side:
    """In place of a `SideStream`: one of the simulated streams.

    Args:
        begins: whether it continues after what the stream outside has queued, as it must.
    """

    def __init__(self, streams: Streams, begins: bool = True) -> None:
        self._streams, self._begins = streams, begins
        self.stream = streams.stream_of(self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        streams, before = self._streams, self._streams.current
        if self._begins:
            streams.record(before)(self.stream)
        streams.current = self.stream
        try:
            yield
        finally:
            streams.current = before

    def event(self) -> Any:
        wait = self._streams.record(self.stream)
        return SimpleNamespace(wait=lambda: wait(self._streams.current))


@dataclass(frozen=True)
class Simulated:
    """What the engine may ask of a stream."""

    number: int
    _streams: Streams = field(compare=False, repr=False)

    def wait_stream(self, other: Simulated) -> None:
        self._streams.record(other.number)(self.number)


@contextmanager
def simulated_streams() -> Iterator[Streams]:
    """Inside, the collectives of the native transport run on streams of their own, and pool buffers are freed in every
    step, as on an accelerator."""
    streams = Streams()
    # Their outputs, into which torch 2.11's fake backend writes nothing, become 0: what is there may not be finite.
    left_alone = (dist.all_to_all_single, native_transport._reduce_scatter)

    def on_stream(function: Callable[..., Any], accesses: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        def call(*tensors: Any, group: Any, async_op: bool, **options: Any) -> Waited:
            with _disable_current_modes():
                if function in left_alone:
                    tensors[0].zero_()
                work = function(*tensors, group=group, async_op=async_op, **options)
            reads, writes = accesses(*tensors[:2], rank=dist.get_rank(group), **options)
            return streams.issue(group, function.__name__, reads, writes, work)

        return call

    others = {
        "broadcast": lambda part, rank, group_src: ([part], []) if rank == group_src else ([], [part]),
        "reduce": lambda part, rank, group_dst: ([part], [part]),
        "all_reduce": lambda numbers, rank: ([numbers], [numbers]),
        "all_to_all_single": lambda into, sent, rank: ([sent], [into]),
    }
    names = {name: on_stream(getattr(dist, name), accesses) for name, accesses in others.items()}
    resize = torch.UntypedStorage.resize_

    def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
        streams.resize(storage, size)
        return resize(storage, size)

    make_another = buffer._as_another_storage

    def as_another_storage(tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            other = make_another(tensor)
        streams.is_same(other, tensor)
        return other

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_transport, "dist", SimpleNamespace(**names))
        patch.setattr(native_transport, "_all_gather", on_stream(native_transport._all_gather, _of_gather))
        patch.setattr(native_transport, "_reduce_scatter", on_stream(native_transport._reduce_scatter, _of_reduce))
        patch.setattr(torch.UntypedStorage, "resize_", resize_and_record)
        patch.setattr(pool, "kept", lambda sizes: [False for _ in sizes])
        patch.setattr(buffer, "_as_another_storage", as_another_storage)
        with streams:
            yield streams


def _of_gather(full: Tensor, own: Tensor, rank: int) -> tuple[Any, Any]:
    """The own part of `full` is read alone, where `own` lies inside of it."""
    shards = in_shards(full, full.numel() // own.numel())
    return [own], [shard for shard in shards if shard.data_ptr() != own.data_ptr()]


def _of_reduce(own: Tensor, terms: Tensor, rank: int) -> tuple[Any, Any]:
    """In place, NCCL may leave partial sums in all of `terms`."""
    is_in_place = own.untyped_storage()._cdata == terms.untyped_storage()._cdata
    return [terms], [terms] if is_in_place else [own]


def _accessed(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What an operation reads and writes. Views, and operations that need only a shape, read nothing."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_factory = bool(FACTORY_FUNCTION_REGEX.match(func._schema.name.rpartition("::")[2]))
    for argument, value in zip_arguments(func._schema, args, kwargs):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes += _tensors(value)
        elif alias is None and not is_factory:
            reads += _tensors(value)
    returns = func._schema.returns
    for returned, value in zip(returns, [result] if len(returns) == 1 else result or [], strict=True):
        if returned.alias_info is None:
            writes += _tensors(value)
    return reads, writes


def _tensors(tree: Any) -> list[Tensor]:
    found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_meta]
    return [tensor for tensor in found if torch._C._has_storage(tensor)]


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The interval of the storage from the first to the last element."""
    first = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _in_words(access: Access) -> str:
    verb = "writes" if access.is_write else "reads"
    where = "" if access.stream == MAIN else f" on stream {access.stream}"
    return f"{access.what} {verb} bytes {access.start} to {access.stop}{where}"
