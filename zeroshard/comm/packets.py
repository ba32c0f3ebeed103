"""What ranks say first in an exchange among all of them: what it is for, how long their row is, and the numbers to be
added up so far as they fit.

    | which exchange this is (`alike.py`) | numbers |

All packets have one size, and are added up over the ranks. So ranks that are in different exchanges (one alone asks for
a norm, the others step) find it out from the sum, before anybody takes the bytes of one thing for those of another.
Then, and only then, each tells the others its head:

    | what it is for (text) | bytes of the row |
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from zeroshard.comm.alike import BITS, WIDTH, are_alike, as_terms
from zeroshard.errors import Error

_TEXT_BYTES, _SIZE_BYTES = 104, 8
ROOM = 505
"""Numbers: those of a step fit, mostly. What is longer follows, once all are known to be at the same place."""
PACKET = WIDTH + ROOM
"""int64. Sums of 4 KiB take no longer than those of one number."""
ROOM_BYTES = 192
"""Of an object, beside its size."""


class Elsewhere(Error, RuntimeError):
    """The ranks are in different exchanges."""


class Uneven(Error, RuntimeError):
    """The ranks are in the same exchange, with rows of different lengths. All of them have heard so, and can go on."""


def pack(what: str, num_bytes: int, numbers: Tensor) -> Tensor:
    """[PACKET] int64, where the numbers are.

    Args:
        num_bytes: of the row.
        numbers: int64 [n], at most ROOM.
    """
    head = on_device(_terms(what, num_bytes), numbers.device)
    return torch.cat([head, numbers, numbers.new_zeros(ROOM - numbers.numel())])


def is_one_place(sums: Tensor) -> bool:
    """Whether all ranks are in the same exchange, by the sum of their packets, on the host."""
    return are_alike(sums[:WIDTH].tolist())


def packet_sizes(num_numbers: int) -> list[int]:
    """Bytes of each packet in a sum of so many numbers."""
    return [8 * PACKET, *([8 * (num_numbers - ROOM)] if num_numbers > ROOM else [])]


def on_device(numbers: list[int] | tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n]. Nothing waits for what the device has to do before."""
    on_host = torch.tensor(numbers, dtype=torch.int64)
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def head_of(what: str, num_bytes: int) -> Tensor:
    """uint8, all of one size."""
    return torch.frombuffer(bytearray(_head(what, num_bytes)), dtype=torch.uint8)


def differences(packets: Tensor, ranks: tuple[int, ...]) -> Elsewhere | Uneven:
    """What each is at.

    Args:
        packets: [ranks, ...], heads of these global ranks, which are not the same.
    """
    found = [_read(bytes(head)) for head in packets.tolist()]
    rank = next(rank for rank, head in enumerate(found) if head != found[0])
    (mine, my_bytes), (theirs, their_bytes) = found[0], found[rank]
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
def _terms(what: str, num_bytes: int) -> tuple[int, ...]:
    digest = number_of(_head(what, num_bytes))
    return tuple(as_terms(torch.tensor([digest]))[0].tolist())


def number_of(data: bytes) -> int:
    """A digest that ranks can compare (`alike.py`)."""
    return int.from_bytes(hashlib.sha256(data).digest()[: BITS // 8], "little")


@lru_cache(maxsize=1024)
def _head(what: str, num_bytes: int) -> bytes:
    text = what.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    return text + num_bytes.to_bytes(_SIZE_BYTES, "little")


def _read(head: bytes) -> tuple[str, int]:
    return head[:_TEXT_BYTES].decode().rstrip(), int.from_bytes(head[_TEXT_BYTES:], "little")
