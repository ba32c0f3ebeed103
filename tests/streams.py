"""Finds two accesses to the same bytes that no event orders: simulated streams, on a CPU, in one process.

On CUDA a collective runs on the stream of its group. It begins after what the current stream had queued at its issue,
and the current stream continues beside it until `wait`. Here every torch operation is an operation on the current
stream, which is MAIN except inside of a `SideStream`, and every collective of the native transport one on its group's
stream; `wait` is an event. Order is kept by the vector clocks of torch's CUDA sanitizer (`StreamSynchronizations`).
That sanitizer compares addresses of tensors. Here byte intervals of storages are compared, as most tensors of the
engine are parts of a few large storages.

Use it in a dry run: the order of accesses on one rank does not depend on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

MAIN = 0


class Access(NamedTuple):
    """Bytes [start, stop) of a storage, read or written by operation number `number`, which runs on `stream`."""

    start: int
    stop: int
    is_write: bool
    stream: int
    number: int
    what: str


class Streams(TorchDispatchMode):
    """Records what each operation reads and writes.

    Attributes:
        races: one line for each pair of accesses that conflict, and that nothing orders.
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
        # By storage. The weak reference keeps another storage from getting the same key.
        self._accesses: dict[int, tuple[StorageWeakRef, list[Access]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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

    def resize(self, storage: torch.UntypedStorage) -> None:
        """The memory of a storage is freed or replaced: as if all of it were written."""
        self._number += 1
        self._order.update_seq_num(self.current, self._number)
        self._access(storage, Access(0, max(storage.nbytes(), 1), True, self.current, self._number, "resize_"))

    def issue(self, group: Any, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Any) -> Waited:
        """A collective on the stream of its group."""
        self.num_collectives += 1
        stream = self.stream_of(group)
        self.record(self.current)(stream)
        self.run(stream, what, reads, writes)
        wait = self.record(stream)
        return Waited(work, lambda: wait(self.current))

    def stream_of(self, key: Any) -> int:
        return self._streams.setdefault(key, len(self._streams) + 1)

    def record(self, stream: int) -> Callable[[int], None]:
        """An event on a stream. Returns a function that makes another stream wait for it."""
        self._events += 1
        event = self._events
        self._order.record_state(event, stream)

        def wait(by: int) -> None:
            self.waits += by == MAIN
            self._order.stream_wait_for_event(by, event)

        return wait

    def _access(self, storage: torch.UntypedStorage, new: Access) -> None:
        ref, known = self._accesses.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        if ref.expired():
            ref, known = self._accesses[storage._cdata] = StorageWeakRef(storage), []
        kept = []
        for old in known:
            overlap = old.start < new.stop and new.start < old.stop
            is_ordered = self._order.is_ordered_after(new.stream, old.number, old.stream)
            if overlap and (old.is_write or new.is_write) and not is_ordered:
                self.races.append(f"{_in_words(new)}, and {_in_words(old)}, which is not waited for")
            # What is ordered after this access is ordered after those that it replaces.
            is_replaced = new.is_write or (not old.is_write and old.stream == new.stream)
            if not (is_replaced and new.start <= old.start and old.stop <= new.stop):
                kept.append(old)
        known[:] = [*kept, new]


class Waited:
    """A work of torch, with the event of its end."""

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


@contextmanager
def simulated_streams() -> Iterator[Streams]:
    """Inside, the collectives of the native transport run on streams of their own."""
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
        streams.resize(storage)
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_transport, "dist", SimpleNamespace(**names))
        patch.setattr(native_transport, "_all_gather", on_stream(native_transport._all_gather, _of_gather))
        patch.setattr(native_transport, "_reduce_scatter", on_stream(native_transport._reduce_scatter, _of_reduce))
        patch.setattr(torch.UntypedStorage, "resize_", resize_and_record)
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
