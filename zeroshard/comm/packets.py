"""What ranks say first in an exchange among all of them: what it is for, how long their row is, and the row so far as
it fits.

    | what it is for (text) | bytes of the row | the first bytes of the row |

All packets have one size. So ranks that are in different exchanges (one alone asks for a norm, the others step) find
it out from what they have received, before anybody takes the bytes of one thing for those of another.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_TEXT_BYTES, _SIZE_BYTES = 104, 8
HEAD_BYTES = _TEXT_BYTES + _SIZE_BYTES
ROOM_BYTES = 208
"""Of a row: that of a step fits, mostly. What is longer follows, once all are known to be at the same place."""


class Elsewhere(RuntimeError):
    """The ranks are in different exchanges."""


class Uneven(RuntimeError):
    """The ranks are in the same exchange, with rows of different lengths. All of them have heard so, and can go on."""


def pack(what: str, row: Tensor) -> Tensor:
    """[HEAD_BYTES + ROOM_BYTES] uint8, where the row is.

    Args:
        row: uint8 [n].
    """
    packet = torch.zeros(HEAD_BYTES + ROOM_BYTES, dtype=torch.uint8, device=row.device)
    packet[:HEAD_BYTES] = torch.frombuffer(bytearray(_head(what, row.numel())), dtype=torch.uint8).to(row.device)
    room = row[:ROOM_BYTES]
    packet[HEAD_BYTES : HEAD_BYTES + room.numel()] = room
    return packet


def packet_sizes(num_bytes: int) -> list[int]:
    """Bytes of each packet of one rank in an exchange of rows of so many."""
    return [HEAD_BYTES + ROOM_BYTES, *([num_bytes - ROOM_BYTES] if num_bytes > ROOM_BYTES else [])]


def expect_same(packets: Tensor, ranks: tuple[int, ...]) -> None:
    """Args:
        packets: [ranks, ...], of these global ranks.

    Raises:
        Elsewhere, Uneven: with what each is at.
    """
    heads = packets[:, :HEAD_BYTES]
    if bool((heads == heads[0]).all()):
        return
    found = [_read(bytes(head)) for head in heads.cpu().tolist()]
    rank = next(rank for rank, head in enumerate(found) if head != found[0])
    (mine, my_bytes), (theirs, their_bytes) = found[0], found[rank]
    if mine == theirs:
        raise Uneven(
            f"{mine}: rank {ranks[0]} brings {my_bytes} bytes, rank {ranks[rank]} {their_bytes}. Every rank must call "
            "it with what all others call it with"
        )
    raise Elsewhere(
        f"the ranks are at different places: rank {ranks[0]} at {mine}, rank {ranks[rank]} at {theirs}. Nothing has "
        "been updated. Both are collective: every rank must call them, in the same order (not under `if rank == 0:`; "
        "what one rank prints, all have to compute)"
    )


@lru_cache(maxsize=1024)
def _head(what: str, num_bytes: int) -> bytes:
    text = what.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    return text + num_bytes.to_bytes(_SIZE_BYTES, "little")


def _read(head: bytes) -> tuple[str, int]:
    return head[:_TEXT_BYTES].decode().rstrip(), int.from_bytes(head[_TEXT_BYTES:], "little")
