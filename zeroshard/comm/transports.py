"""The three transports, by the names that `plan_memory` takes.

| name | used with | what is sent |
|---|---|---|
| shared | gloo, all ranks on one host | messages: where a buffer lies, that it may be read, that it has been read |
| pairwise | gloo | messages, and slices of the buffers |
| native | NCCL and others | the backend's own collectives |
"""

from __future__ import annotations

from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.comm.transport import Transport, TransportName
from zeroshard.errors import InvalidValue

TRANSPORTS: dict[TransportName, type[Transport]] = {
    transport.name: transport for transport in (SharedTransport, PairwiseTransport, NativeTransport)
}


def transport_named(name: TransportName) -> type[Transport]:
    """The transport class of that name, for the planner, which has no process group.

    Raises:
        ValueError: there is no transport of that name.
    """
    if name not in TRANSPORTS:
        raise InvalidValue(f"transport must be one of {', '.join(TRANSPORTS)}, found {name!r}")
    return TRANSPORTS[name]
