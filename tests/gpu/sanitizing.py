"""torch's CUDA sanitizer, with collectives on the streams where NCCL runs them.

The sanitizer takes each operator for a kernel of the stream that is current when the operator has returned. A
collective runs on a stream of NCCL's, which first waits for an event of the current stream, and at the end records
another one. Here its reads and writes are those of the stream that waits, between the two: so they race with whatever
does not wait for the second event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.cuda import _sanitizer as of_torch
from torch.utils._pytree import tree_leaves


@dataclass
class Collective:
    """A call. `reads`, `writes`: data pointers; `names`: data pointer -> names of arguments. `waiting`: the streams
    that have waited for an event since it began."""

    what: object
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    names: dict[int, list[str]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collective:
        found = cls(func._schema)
        for argument, value in of_torch.zip_arguments(func._schema, tuple(args), dict(kwargs)):
            is_output = argument.name.startswith("output") or argument.name == "tensors"
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.numel():
                    (found.writes if is_output else found.reads).add(leaf.data_ptr())
                    found.names.setdefault(leaf.data_ptr(), []).append(argument.name)
        return found


class Streams:
    """Gives collectives to the streams where they run. `num_seen`: how many had one of their own."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._call: Collective | None = None
        self._launch: Callable[[int], None] | None = None

    @contextmanager
    def installed(self) -> Iterator[Streams]:
        syncs, modes = of_torch.StreamSynchronizations, of_torch.CUDASanitizerDispatchMode
        wait, record, dispatch = syncs.stream_wait_for_event, syncs.record_state, modes.__torch_dispatch__

        def waits(self_: Any, stream: int, event: int) -> None:
            wait(self_, stream, event)
            if self._call is not None:
                self._call.waiting.add(stream)

        def records(self_: Any, event: int, stream: int) -> None:
            if self._call is not None and self._launch is not None and stream in self._call.waiting:
                self.num_seen += 1
                self._launch(stream)
            record(self_, event, stream)

        def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace != "c10d":
                return dispatch(mode, func, types, args, kwargs)
            call = Collective.of(func, args, kwargs or {})
            return self.run(mode.event_handler, call, lambda: func(*args, **(kwargs or {})))

        with (
            patch.object(syncs, "stream_wait_for_event", waits),
            patch.object(syncs, "record_state", records),
            patch.object(modes, "__torch_dispatch__", dispatched),
        ):
            yield self

    def run(self, handler: Any, call: Collective, function: Callable[[], Any]) -> Any:
        """Call the function, a collective that does these reads and writes."""
        errors: list[Any] = []

        def launch(stream: int) -> None:
            self._call = self._launch = None
            reads = call.reads - call.writes
            errors.extend(handler._handle_kernel_launch(stream, reads, call.writes, set(), call.what, call.names))

        self._call, self._launch = call, launch
        try:
            result = function()
            if self._launch is not None:  # it has run on the stream of the caller
                launch(torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0)
        finally:
            self._call = self._launch = None
        if errors:
            raise of_torch.CUDASanitizerErrors(errors)
        return result
