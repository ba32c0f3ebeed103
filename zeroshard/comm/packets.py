"""The packet that begins every exchange among all ranks: a digest of its purpose and row length, and numbers to sum.

    | digest of the head, as terms of a sum (`alike.py`) | numbers, as far as they fit |

All packets have the same size and are summed over the ranks. If ranks are in different exchanges (one rank asks for a
norm while the others step), the sum shows it, before bytes of one exchange are taken for bytes of another. Only then do
the ranks send each other their heads, for the error message:

    | purpose (text) | bytes of the row | digest of the name of the mesh |

Two handles of the same ranks have meshes of different names, and over some backends one order of exchanges: a rank that
steps them in another order than its peers is found, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zeroshard.comm.alike import BITS, WIDTH, are_alike, as_terms
from zeroshard.errors import Error

T = TypeVar("T")
_TEXT_BYTES, _SIZE_BYTES, _NAME_BYTES = 104, 8, 8
ROOM = 505
"""How many numbers fit into a packet: usually all numbers of a step. The rest follows in a second sum, once all ranks
are known to be in the same exchange."""
PACKET = WIDTH + ROOM
"""Length of a packet, in int64. A sum of 4 KiB takes no longer than a sum of one number."""
ROOM_BYTES = 192
"""How many bytes of a JSON object are sent in the first message, beside its size."""


class Elsewhere(Error, RuntimeError):
    """The ranks are in different exchanges."""


class Uneven(Error, RuntimeError):
    """The ranks are in the same exchange, with rows of different lengths. All ranks raise, and can go on."""


def pack(mesh: str, what: str, num_bytes: int, numbers: Tensor) -> Tensor:
    """A packet, [PACKET] int64, on the device of `numbers`.

    Args:
        mesh: its name.
        what: the purpose of the exchange.
        num_bytes: of the row that follows.
        numbers: int64 [n], n <= ROOM.
    """
    head = on_device(_terms(mesh, what, num_bytes), numbers.device)
    return torch.cat([head, numbers, numbers.new_zeros(ROOM - numbers.numel())])


def is_one_place(sums: Tensor) -> bool:
    """Whether all ranks are in the same exchange, by the sum of their packets, on the host."""
    return are_alike(sums[:WIDTH].tolist())


def numbers_in(sums: Tensor, count: int) -> Tensor:
    """The sums of the numbers in a sum of packets: the first `count`, or as many as there are."""
    return sums[WIDTH : WIDTH + count]


def packet_sizes(num_numbers: int) -> list[int]:
    """Bytes of each message in a sum of `num_numbers` numbers."""
    return [8 * PACKET, *([8 * (num_numbers - ROOM)] if num_numbers > ROOM else [])]


def on_device(numbers: list[int] | tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n] on the device. The host does not wait for the device's queued work."""
    return to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


def to_device(on_host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. The host does not wait: memory that is not pinned would make it."""
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


class Reading:
    """Numbers on their way from the device to the host. What is queued after this object was made, `wait` does not wait
    for.

    Attributes:
        on_device: the numbers; they must not be overwritten.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.on_device = self._copy = numbers
        self._copied: torch.Event | None = None
        if numbers.device.type != "cpu":
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._copied = torch.accelerator.current_stream(numbers.device).record_event()

    def wait(self) -> Tensor:
        """The numbers on the host; on a CPU, the tensor itself."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


@dataclass(frozen=True)
class Unread(Generic[T]):
    """Sums over all ranks, before the host has read them.

    Attributes:
        on_device: the sum of the packets (`numbers_in`); of a single rank, its numbers.
        read: waits for the device, returns what the sums say, and raises what `Collectives.add_up` raises.
    """

    on_device: Tensor
    read: Callable[[], T]


def to_host(numbers: Tensor) -> Tensor:
    """A copy on the host, for which the host waits; on a CPU, the tensor itself."""
    return Reading(numbers).wait()


def head_of(mesh: str, what: str, num_bytes: int) -> Tensor:
    """The head as uint8 [_TEXT_BYTES + _SIZE_BYTES + _NAME_BYTES]."""
    return torch.frombuffer(bytearray(_head(mesh, what, num_bytes)), dtype=torch.uint8)


def differences(packets: Tensor, ranks: tuple[int, ...]) -> Elsewhere | Uneven:
    """The error for ranks whose heads differ.

    Args:
        packets: uint8 [number of ranks, head size]: the heads of these global ranks, not all equal.
    """
    found = [_read(bytes(head)) for head in packets.tolist()]
    rank = next(rank for rank, head in enumerate(found) if head != found[0])
    (mine, my_bytes, my_mesh), (theirs, their_bytes, their_mesh) = found[0], found[rank]
    if my_mesh != their_mesh:
        return Elsewhere(
            f"the ranks are at the calls of different models: rank {ranks[0]} at {mine} of one, rank {ranks[rank]} at "
            f"{theirs} of another. Nothing has been updated. Every rank must call them in the same order"
        )
    if mine == theirs:
        return Uneven(
            f"{mine}: rank {ranks[0]} brings {my_bytes} bytes, rank {ranks[rank]} {their_bytes}. Every rank must call "
            "it with what all others call it with"
        )
    return Elsewhere(
        f"the ranks are at different places: rank {ranks[0]} at {mine}, rank {ranks[rank]} at {theirs}. Nothing has "
        "been updated. Both are collective: every rank must call them, in the same order (not under `if rank == 0:`; "
        "what one rank prints, all have to compute)"
    )


@lru_cache(maxsize=1024)
def _terms(mesh: str, what: str, num_bytes: int) -> tuple[int, ...]:
    digest = number_of(_head(mesh, what, num_bytes))
    return tuple(as_terms(torch.tensor([digest], device="cpu"))[0].tolist())


def number_of(data: bytes) -> int:
    """A digest of BITS bits, which ranks can compare (`alike.py`)."""
    return int.from_bytes(hashlib.sha256(data).digest()[: BITS // 8], "little")


@lru_cache(maxsize=1024)
def _head(mesh: str, what: str, num_bytes: int) -> bytes:
    text = what.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    return text + num_bytes.to_bytes(_SIZE_BYTES, "little") + hashlib.sha256(mesh.encode()).digest()[:_NAME_BYTES]


def _read(head: bytes) -> tuple[str, int, bytes]:
    size, name = head[_TEXT_BYTES:-_NAME_BYTES], head[-_NAME_BYTES:]
    return head[:_TEXT_BYTES].decode().rstrip(), int.from_bytes(size, "little"), name
