"""The one control exchange of a step: every rank learns the same few numbers, and so takes the same decision.

Each rank contributes one row of float64 (`Row`), and reads those of all. (An all-gather of rows rather than an
all-reduce: sums are taken in rank order on every rank, so they are bit-equal there and under every plan; maxima and a
rank's name come for free.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import Uneven
from zeroshard.comm.samples import first_difference
from zeroshard.comm.settings import SettingsReport, differ, difference
from zeroshard.step.gradient_norms import norms_of_terms
from zeroshard.step.same_gradients import SameGradients

_WORD_BITS = 48
CONTROL = "a step (optimizer.step, optimizer.clip_grad_norm_)"
_RECENT = 2000
"""Collectives of each name that ranks compare when they have not issued the same."""


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


@dataclass(frozen=True)
class Contribution:
    """What one rank says of the step at hand.

    Attributes:
        weight: of its batches.
        norm_terms: [param groups] float64, see `gradient_norms.norm_terms`; p is `norm_type`.
        present: for each slot, whether it got a gradient; and whatever else all ranks are to know if one says so.
    """

    status: Status
    weight: float
    norm_terms: Tensor
    norm_type: float
    present: Sequence[bool]


Field = TypeVar("Field")
Numbers = Sequence[float] | Tensor
"""Of one rank: on the host, or [n] float64 on the device, where they stay: nothing waits for them before they are
sent."""


class Row(NamedTuple, Generic[Field]):
    """The layout of a row: these fields, one after the other. Written by one rank (`Row[Numbers]`), and read of all
    (`Row[Tensor]`, each field [ranks, n] on the host)."""

    status: Field
    weight: Field
    collectives: Field
    """Digest of what has been issued since the start."""
    settings: Field
    """Digest of what is stepped with."""
    samples: Field
    """Digest of what has been gathered since the last step."""
    gradients: Field
    """Digest of gradients that every rank has in full; 0 where none has."""
    norm_terms: Field
    present: Field
    """Flags, 48 to a number."""


def row_bytes(num_groups: int, num_flags: int) -> int:
    """Of one rank. Planned, before there is any."""
    single = len(Row._fields) - 2  # all but the last two
    return 8 * (single + num_groups + len(_as_numbers([False] * num_flags)))


def _pack(row: Row[Numbers], device: torch.device) -> Tensor:
    """[n] float64 on the device."""
    on_host = [[0.0] * len(field) if isinstance(field, Tensor) else field for field in row]
    packed = torch.tensor([number for field in on_host for number in field], dtype=torch.float64, device=device)
    for field, place in zip(row, _fields(row, packed), strict=True):
        if isinstance(field, Tensor):
            place.copy_(field)
    return packed


def _fields(row: Row[Numbers], packed: Tensor) -> Row[Tensor]:
    """The places of each field of `row` in [..., n]."""
    return Row(*torch.split(packed, [len(field) for field in row], dim=-1))


def exchange_control(
    collectives: Collectives, own: Contribution, settings: SettingsReport, same: SameGradients | None
) -> Control:
    """Contribute this rank's row and read all of them. Collective.

    Args:
        settings: which this rank steps with.
        same: samples of the gradients, where every rank has them in full.

    Raises:
        RuntimeError: ranks step with different settings or gradients (with what differs), have not issued the same
            collectives since the start (with the ranks that differ), or have found other values in what they gathered.
    """
    row: Row[Numbers] = Row(
        status=[own.status],
        weight=[own.weight],
        collectives=[collectives.log.digest],
        settings=[settings.digest],
        samples=collectives.samples.digest().view(1),
        gradients=[0.0] if same is None else same.digest().view(1),
        norm_terms=own.norm_terms,
        present=_as_numbers(own.present),
    )
    try:
        packed = collectives.exchange(_pack(row, collectives.device), CONTROL)
    except Uneven:
        _expect_same_settings(collectives, settings)
        raise
    rows = _fields(row, packed.cpu())
    _expect_agreement(collectives, rows, settings, same)
    return Control(
        status=tuple(Status(int(status)) for [status] in rows.status.tolist()),
        weight=sum(rows.weight[:, 0].tolist()),
        group_norms=norms_of_terms(rows.norm_terms[collectives.mesh.one_of_each_shard], own.norm_type),
        norm_type=own.norm_type,
        finite=bool(torch.isfinite(rows.norm_terms).all()),
        present=_of_any(rows.present, len(own.present)),
    )


def _expect_agreement(
    collectives: Collectives, rows: Row[Tensor], settings: SettingsReport, same: SameGradients | None
) -> None:
    """What all ranks must have done alike, they have done alike. Collective where a digest says that they have not: one
    more exchange finds out what differs.

    Raises:
        RuntimeError: as above.
    """
    if not _differs(rows.status) and differ(rows.settings[:, 0].tolist()):  # else the caller raises for the status
        _expect_same_settings(collectives, settings)
    settings.end()
    if _differs(rows.collectives):
        raise RuntimeError(_first_difference(collectives))
    if _differs(rows.samples):
        _expect_same_samples(collectives)
    collectives.samples.forget()
    if same is not None:
        if bool((rows.status == Status.READY).all()) and _differs(rows.gradients):
            same.expect_same(CONTROL)
        same.forget()


def _differs(field: Tensor) -> bool:
    """Whether ranks have other numbers, [ranks, 1], than the first one."""
    return not bool((field == field[0]).all())


def _as_numbers(flags: Sequence[bool]) -> list[float]:
    """`_WORD_BITS` flags in each: so many bits a float64 holds."""
    words = [flags[start : start + _WORD_BITS] for start in range(0, len(flags), _WORD_BITS)]
    return [float(sum(1 << bit for bit, flag in enumerate(word) if flag)) for word in words]


def _of_any(numbers: Tensor, count: int) -> tuple[bool, ...]:
    """The flags that any rank has set; `numbers` [ranks, n]: `_as_numbers` of each."""
    words = [0] * numbers.shape[1]
    for of_rank in set(map(tuple, numbers.tolist())):  # few differ
        words = [word | int(number) for word, number in zip(words, of_rank, strict=True)]
    return tuple(bool(words[i // _WORD_BITS] >> (i % _WORD_BITS) & 1) for i in range(count))


def _first_difference(collectives: Collectives) -> str:
    """Where the ranks' logs part: one more exchange, on the way out. Those of one name keep their order."""
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
