"""The one control exchange of a step: every rank learns the same few numbers, and so takes the same decision.

Each rank contributes one row of float64; every rank reads all rows, in rank order:

    | status | weight | digests: collectives, settings, samples, gradients | norm term per group ... | slots ... |

(An all-gather of rows rather than an all-reduce: sums are taken in rank order on every rank, so they are bit-equal
there and under every plan; maxima and a rank's name come for free.) Norms are those of the own shard under every plan,
also where gradients are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import Uneven
from zeroshard.comm.samples import first_difference
from zeroshard.comm.settings import SettingsReport, differ, difference
from zeroshard.layout.norms import norms_of_rows
from zeroshard.step.same_gradients import SameGradients

_HEAD = 6
"""Numbers before the norm terms."""
_WORD_BITS = 48
CONTROL = "a step (optimizer.step, optimizer.clip_grad_norm_)"
_RECENT = 2000
"""Collectives of each kind that ranks compare when they have not issued the same."""


class Status(IntEnum):
    """Whether a rank is ready to step."""

    READY = 0
    NO_GRADIENTS = 1
    NOT_REDUCED = 2
    UNFROZEN = 3
    HALF_DONE = 4
    USED_UP = 5
    BY_HAND = 6  # gradients have been set by hand: they are reduced first


@dataclass(frozen=True)
class Control:
    """What all ranks agree on before anything is updated.

    Attributes:
        status: per rank, in rank order.
        weight: sum over ranks of the weight of each rank's batch.
        group_norms: norm of the summed gradient, per param group, over all shards.
        norm_type: p of the p-norm (inf for the largest absolute value).
        finite: whether every element of the gradient is finite.
        present: slots (by position in the list that was contributed) with a gradient on at least one rank.
    """

    status: tuple[Status, ...]
    weight: float
    group_norms: tuple[float, ...]
    norm_type: float
    finite: bool
    present: tuple[bool, ...]

    @property
    def is_idle(self) -> bool:
        """No rank has any gradient: there is nothing to do."""
        return set(self.status) == {Status.NO_GRADIENTS}

    @property
    def norm(self) -> float:
        """Over all groups."""
        if math.isinf(self.norm_type):
            return max(self.group_norms, default=0.0)
        return float(sum(norm**self.norm_type for norm in self.group_norms) ** (1 / self.norm_type))


def exchange_control(
    collectives: Collectives,
    status: Status,
    weight: float,
    gradients: Sequence[tuple[int, Tensor]],
    num_groups: int,
    norm_type: float,
    present: Sequence[bool],
    settings: SettingsReport,
    same: SameGradients | None,
) -> Control:
    """Contribute this rank's row and read all of them. Collective.

    Args:
        gradients: (param group, piece of the own shard of the gradient), all groups together.
        present: for each slot, whether it got a gradient on this rank.
        settings: which this rank steps with.
        same: samples of the gradients, where every rank has them in full.

    Raises:
        RuntimeError: ranks step with different settings or gradients (with what differs), have not issued the same
            collectives since the start (with the ranks that differ), or have found other values in what they gathered.
    """
    terms = _norm_terms(gradients, num_groups, norm_type, collectives.device)
    numbers = [status, weight, collectives.log.digest, settings.digest]
    head = torch.tensor(numbers, dtype=torch.float64, device=terms.device)
    samples = collectives.samples.digest().view(1)
    of_gradients = same.digest().view(1) if same is not None else torch.zeros_like(samples)
    words = torch.tensor(_pack(present), dtype=torch.float64, device=terms.device)
    try:
        rows = collectives.exchange(torch.cat([head, samples, of_gradients, terms, words]), CONTROL).cpu()
    except Uneven:
        _expect_same_settings(collectives, settings)
        raise
    if len(set(rows[:, 0].tolist())) == 1 and differ(rows[:, 3].tolist()):  # else the caller raises for the status
        _expect_same_settings(collectives, settings)
    settings.end()
    if len(set(rows[:, 2].tolist())) > 1:
        raise RuntimeError(_first_difference(collectives))
    if len(set(rows[:, 4].tolist())) > 1:
        _expect_same_samples(collectives)
    collectives.samples.forget()
    if same is not None:
        if set(rows[:, 0].tolist()) == {Status.READY} and len(set(rows[:, 5].tolist())) > 1:
            same.expect_same(CONTROL)
        same.forget()
    sums = rows[collectives.mesh.one_of_each_shard, _HEAD : _HEAD + num_groups]
    if math.isinf(norm_type):
        norms = sums.amax(0).tolist()
    else:
        norms = [sum(column) ** (1 / norm_type) if all(map(math.isfinite, column)) else math.nan
                 for column in sums.t().tolist()]  # fmt: skip
    return Control(
        status=tuple(Status(int(value)) for value in rows[:, 0].tolist()),
        weight=sum(rows[:, 1].tolist()),
        group_norms=tuple(norms),
        norm_type=norm_type,
        finite=bool(torch.isfinite(rows[:, _HEAD : _HEAD + num_groups]).all()),
        present=_unpack(rows[:, _HEAD + num_groups :].tolist(), len(present)),
    )


def _norm_terms(
    gradients: Sequence[tuple[int, Tensor]], num_groups: int, norm_type: float, device: torch.device
) -> Tensor:
    """[num_groups] float64: per group the sum of |g|^p over the own shard (the maximum where p is inf)."""
    terms = torch.zeros(num_groups, dtype=torch.float64, device=device)
    pieces = [(group, piece) for group, piece in gradients if piece.numel()]
    if not pieces:
        return terms
    groups = torch.tensor([group for group, _ in pieces], device=device)
    norms = _norms([piece for _, piece in pieces], norm_type, torch.float32)
    if not bool(torch.isfinite(norms).all()):  # an element, or just the fp32 sum of squares
        norms = _norms([piece for _, piece in pieces], norm_type, torch.float64)
    if math.isinf(norm_type):
        return terms.scatter_reduce_(0, groups, norms, "amax")
    return terms.index_add_(0, groups, norms.pow_(norm_type))


def _norms(pieces: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """[pieces] float64. On a CPU by rows (see `norms.py`)."""
    for piece_dtype in {piece.dtype for piece in pieces}:
        dtype = torch.promote_types(dtype, piece_dtype)
    if pieces[0].is_cuda:
        return torch.stack(torch._foreach_norm(pieces, norm_type, dtype=dtype)).to(torch.float64)
    by_rows = [norms_of_rows(piece, norm_type, dtype) for piece in pieces]
    return torch.stack([vector_norm(rows, norm_type, dtype=torch.float64) for rows in by_rows])


def _pack(flags: Sequence[bool]) -> list[float]:
    words = [flags[start : start + _WORD_BITS] for start in range(0, len(flags), _WORD_BITS)]
    return [float(sum(1 << bit for bit, flag in enumerate(word) if flag)) for word in words]


def _unpack(rows: list[list[float]], count: int) -> tuple[bool, ...]:
    """The union over rows."""
    words = [0] * -(-count // _WORD_BITS)
    for row in rows:
        words = [word | int(value) for word, value in zip(words, row, strict=True)]
    return tuple(bool(words[i // _WORD_BITS] >> (i % _WORD_BITS) & 1) for i in range(count))


def _first_difference(collectives: Collectives) -> str:
    """Where the ranks' logs part: one more exchange, on the way out. Kinds of collectives may overtake one another."""
    lists: dict[str, list[str]] = {}
    for event in collectives.log.entries:
        lists.setdefault(event.op, []).append(f"unit {event.unit}")
    recent = {op: [len(units), units[-_RECENT:]] for op, units in lists.items()}
    found = collectives.exchange_objects(recent, CONTROL)
    where = "they issued them in another order, longer ago than the logs tell"
    for rank, theirs in enumerate(found[1:], start=1):
        pair = next((pair for op in sorted({*found[0], *theirs}) if (pair := _compare(op, found[0], theirs))), None)
        if pair is not None:
            where = f"{pair[0]}: rank 0 was at {pair[1]} where rank {rank} was at {pair[2]}"
            break
    return (
        f"the ranks have not issued the same collectives: {where}. Their forward or backward took another path through "
        "the units. Nothing has been updated. Every rank must run the same units in the same order"
    )


def _expect_same_settings(collectives: Collectives, settings: SettingsReport) -> None:
    """One more exchange, as a digest says that they are not the same."""
    found = difference(collectives.exchange_objects(settings.words(), CONTROL))
    settings.end()
    if found:
        raise RuntimeError(f"the ranks step with different settings. {found}")


def _expect_same_samples(collectives: Collectives) -> None:
    """One more exchange, as a digest says that ranks have not seen the same."""
    difference = first_difference(collectives.exchange_objects(collectives.samples.listing(), CONTROL))
    if difference is not None:
        collectives.samples.forget()
        rank, unit = difference
        raise RuntimeError(
            f"the ranks have diverged: unit {unit} has other values on rank {rank} than on rank 0, and they must "
            "be equal. Nothing has been updated by this step. Have weights been written on one rank alone (outside of "
            "`with handle.unsharded(write=True):`), or does the optimizer draw random numbers? If not, what is sent "
            "between the ranks does not arrive as it was. Continue from a checkpoint"
        )


def _compare(op: str, mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str, str] | None:
    (my_count, my_units), (their_count, their_units) = mine.get(op, [0, []]), theirs.get(op, [0, []])
    first = max(my_count - len(my_units), their_count - len(their_units))
    for index in range(first, max(my_count, their_count)):
        pair = [
            units[index - (count - len(units))] if index < count else "nothing more"
            for count, units in ((my_count, my_units), (their_count, their_units))
        ]
        if pair[0] != pair[1]:
            return op, pair[0], pair[1]
    return None
