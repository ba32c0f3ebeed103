"""The one control exchange of a step: every rank learns the same few numbers, and so takes the same decision.

Everything is a sum of integers over the ranks (`Row`), in one exchange whose size does not grow with the number of
ranks: how many ranks have which status, whether all have the same digests (`comm/alike.py`), and norms and weights,
which are added exactly (`layout/exact.py`). If something differs, one more exchange finds the rank, before all raise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from zeroshard.comm import alike
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import Uneven, Unread, on_device
from zeroshard.errors import InvalidState
from zeroshard.failures.blame import SAME_UNITS
from zeroshard.gradients.settings import SettingsReport, difference
from zeroshard.layout import exact
from zeroshard.step.gradient_norms import (
    largest,
    norm_terms,
    norm_to_clip,
    norm_to_clip_alone,
    norms_alone,
    norms_of_sums,
    powers_of,
)
from zeroshard.step.same_gradients import SameGradients
from zeroshard.step.same_weights import SameWeights

CONTROL = "a step (optimizer.step, optimizer.clip_grad_norm_)"
_RECENT = 2000
"""How many recent collectives of each name ranks compare, if they have not issued the same."""


class Status(IntEnum):
    """Whether a rank is ready to step."""

    READY = 0
    NO_GRADIENTS = 1
    NOT_REDUCED = 2
    UNFROZEN = 3
    HALF_DONE = 4
    USED_UP = 5
    BY_HAND = 6  # gradients have been set by hand: they are reduced first
    NOT_AHEAD = 7  # ready, but no rank may update anything before it knows the answer (`ahead.py`)
    RAISED = 8  # the last backward has raised
    DOUBTFUL = 9  # it is unknown whether a gradient set by hand has the factors of the losses (`visible.py`)
    CHANGED = 10  # a clip waits for the step, and other code has changed its gradients since


@dataclass(frozen=True)
class Control:
    """What all ranks agree on before anything is updated.

    Attributes:
        status: status -> number of ranks that have it, without those that no rank has; READY includes NOT_AHEAD.
        weight: sum over ranks of the weight of each rank's batch.
        group_norms: norm of the gradient in the buffers, per param group, over all shards.
        norm_to_clip: the norm over all groups that a device computes, too (`gradient_norms.py`); None if p is not 2.
        norm_type: p of the p-norm (inf for the largest absolute value).
        finite: whether every element of the gradient is finite.
        present: slots (by position in the list that was contributed) with a gradient on at least one rank.
        holds_ahead: whether an update that was queued before the answer has taken effect (`ahead.py`).
    """

    status: Mapping[Status, int]
    weight: float
    group_norms: tuple[float, ...]
    norm_to_clip: float | None
    norm_type: float
    finite: bool
    present: tuple[bool, ...]
    holds_ahead: bool

    @property
    def num_ranks(self) -> int:
        return sum(self.status.values())

    @property
    def norm(self) -> float:
        """The norm over all groups."""
        if any(map(math.isnan, self.group_norms)):  # which `max` passes over
            return math.nan
        if math.isinf(self.norm_type):
            return max(self.group_norms, default=0.0)
        return float(sum(norm**self.norm_type for norm in self.group_norms) ** (1 / self.norm_type))

    @property
    def is_idle(self) -> bool:
        """Whether no rank has any gradient."""
        return set(self.status) == {Status.NO_GRADIENTS}


@dataclass(frozen=True)
class Norms:
    """Norms of the gradients in the own shard.

    Attributes:
        of_pieces: [n] float64, on the device: p-norms with p = `kind` (`gradient_norms.norms_of_pieces`).
        groups: the param group of each.
        num_groups: number of param groups of the optimizer.
    """

    of_pieces: Tensor
    groups: Sequence[int]
    num_groups: int
    kind: float


@dataclass(frozen=True)
class Contribution:
    """What one rank contributes to the control exchange.

    Attributes:
        weight: the sum of the weights of its losses.
        present: for each slot, whether it got a gradient; then further flags, which are set if any rank sets them.
        settings: of this rank's step.
        on_device: bool [n], on the device: sets the last n flags as well.
        same: samples of the gradients, if every rank has them in full.
        weights: those that every rank has in full.
    """

    status: Status
    weight: float
    norms: Norms
    present: Sequence[bool]
    settings: SettingsReport
    on_device: Tensor | None = None
    same: SameGradients | None = None
    weights: SameWeights | None = None


Numbers = TypeVar("Numbers", Sequence[int], Tensor)


class Row(NamedTuple, Generic[Numbers]):
    """The fields of a row, concatenated: of one rank, or summed over all ranks; on the host, or on the device.

    Attributes:
        status: for each status, how many ranks have it.
        digests: of the collectives issued since the start; of the settings of this step; of samples of gathered weights
            since the last step; of samples of gradients that every rank has in full. Each as terms of `alike.py`.
        norm_terms: `gradient_norms.norm_terms`, per param group.
        weight: exact, in the form of a norm term.
        present: how many ranks have set each flag; several counts are packed into one number.
    """

    status: Numbers
    digests: Numbers
    norm_terms: Numbers
    weight: Numbers
    present: Numbers

    @classmethod
    def read(cls, numbers: Numbers, num_groups: int) -> Row[Numbers]:
        ends: list[int] = [0, *accumulate(_sizes(num_groups)), len(numbers)]
        return Row(*(numbers[start:end] for start, end in pairwise(ends)))


def _sizes(num_groups: int) -> list[int]:
    """The sizes of all fields of a row but the last."""
    return [len(Status), 4 * alike.WIDTH, num_groups * exact.WIDTH, exact.WIDTH]


def row_numbers(num_groups: int, num_flags: int, num_ranks: int) -> int:
    """How many int64 numbers a row has, for the planner."""
    return sum(_sizes(num_groups)) + len(_as_counts([False] * num_flags, num_ranks))


def ask(collectives: Collectives, own: Contribution) -> Unread[Control]:
    """Begin the control exchange: contribute this rank's row to the sum of all. Collective; the host does not wait for
    the device before it reads what all ranks agree on. On the device are the sums of the packets; of a single rank, the
    powers of its norms.

    Raises (the read does; one more exchange finds what differs, and on which ranks):
        RuntimeError: on all ranks: they step with different settings or gradients, have not issued the same collectives
            since the start, or have gathered different values.
    """
    return _ask_oneself(collectives, own) if collectives.mesh.world.size == 1 else _ask_all(collectives, own)


def _ask_all(collectives: Collectives, own: Contribution) -> Unread[Control]:
    """`ask`, by an exchange."""
    norms, world = own.norms, collectives.mesh.world
    sums = collectives.begin_sum(_pack(collectives, own), CONTROL)

    def answer() -> Control:
        try:
            row = Row.read(sums.read().tolist(), norms.num_groups)
        except Uneven:
            _expect_same_settings(collectives, own.settings)
            raise
        status, all_alike = _merged(row.status), _expect_agreement(collectives, own, row)
        of_groups = [row.norm_terms[at : at + exact.WIDTH] for at in range(0, len(row.norm_terms), exact.WIDTH)]
        weight, found = exact.nearly(row.weight), _found(collectives, norms, of_groups)
        is_ready = row.status[Status.READY] == world.size and all_alike
        return Control(
            status=status,
            weight=weight,
            norm_type=norms.kind,
            **found,
            present=_of_any(row.present, len(own.present), world.size),
            holds_ahead=is_ready and found["finite"] and weight > 0,
        )

    return Unread(sums.on_device, answer)


def _merged(counts: Sequence[int]) -> dict[Status, int]:
    """Number of ranks by status, from those of a row."""
    status = {status: counts[status] for status in Status if counts[status]}
    if late := status.pop(Status.NOT_AHEAD, 0):
        status[Status.READY] = status.get(Status.READY, 0) + late
    return status


def _ask_oneself(collectives: Collectives, own: Contribution) -> Unread[Control]:
    """`ask` of a single rank, which has nothing to compare."""
    norms, flags = own.norms, own.on_device
    powers = powers_of(norms.of_pieces, norms.kind)
    mine = collectives.begin_alone(powers if flags is None else torch.cat([powers, flags.to(powers)]), CONTROL)

    def answer() -> Control:
        numbers = mine.read().tolist()
        own.settings.end()
        collectives.samples.compared()
        of_pieces, seen = numbers[: len(norms.groups)], numbers[len(norms.groups) :]
        present = [*own.present]
        for place, flag in enumerate(seen, start=len(present) - len(seen)):
            present[place] |= bool(flag)
        weight, finite = own.weight if math.isfinite(own.weight) else math.nan, all(map(math.isfinite, of_pieces))
        return Control(
            status=_merged([int(own.status is one) for one in Status]),
            weight=weight,
            group_norms=norms_alone(of_pieces, norms.groups, norms.num_groups, norms.kind),
            norm_to_clip=norm_to_clip_alone(of_pieces) if norms.kind == 2 else None,
            norm_type=norms.kind,
            finite=finite,
            present=tuple(present),
            holds_ahead=own.status is Status.READY and finite and weight > 0,
        )

    return Unread(mine.on_device, answer)


def exchange_norms(collectives: Collectives, control: Control, norms: Norms) -> Control:
    """`control` with norms that have been computed again. Collective."""
    sums = collectives.add_up(_norm_terms(collectives, norms).view(-1), CONTROL).view(-1, exact.WIDTH).tolist()
    return replace(control, **_found(collectives, norms, sums))


def _pack(collectives: Collectives, own: Contribution) -> Tensor:
    """This rank's row, on the device."""
    # Nothing here may read a device value: the one wait of a step is that for the answer.
    counts = _as_counts(own.present, collectives.mesh.world.size)
    digests = [collectives.log.digest, own.settings.digest, -1]
    on_host = [*(int(own.status is one) for one in Status), *exact.alone(own.weight), *counts, *digests]
    sizes = [len(Status), exact.WIDTH, len(counts), len(digests)]
    status, weight, flags, known = on_device(on_host, collectives.device).split_with_sizes(sizes)
    gradients = known[2:] if own.same is None else own.same.digest().view(1)
    return torch.cat(
        [
            status,
            alike.as_terms(torch.cat([known[:2], collectives.samples.digest().view(1), gradients])).view(-1),
            _norm_terms(collectives, own.norms).view(-1),
            weight,
            _with_flags(flags, own, collectives.mesh.world.size),
        ]
    )


def _norm_terms(collectives: Collectives, norms: Norms) -> Tensor:
    """The norm terms of this rank. Of several replicas of a shard, only the first contributes."""
    of_pieces = norms.of_pieces.to(collectives.device)
    terms = norm_terms(of_pieces, on_device([*norms.groups], of_pieces.device), norms.num_groups, norms.kind)
    if collectives.mesh.replicate.rank:
        terms[:, : exact.LIMBS] = 0
    return terms


def _found(collectives: Collectives, norms: Norms, sums: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a `Control` says of the norms. `sums`: of the norm terms of all ranks, per param group. Collective."""
    return {
        "group_norms": _group_norms(collectives, norms, sums),
        "norm_to_clip": norm_to_clip(sums) if norms.kind == 2 else None,
        "finite": not any(of_group[exact.LIMBS] for of_group in sums),
    }


def _group_norms(collectives: Collectives, norms: Norms, sums: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """The norm of each group. Collective for inf-norms, which cannot be computed by a sum."""
    if not math.isinf(norms.kind):
        return norms_of_sums(sums, norms.kind)
    of_pieces = norms.of_pieces.to(collectives.device)
    own = largest(of_pieces, on_device([*norms.groups], of_pieces.device), norms.num_groups)
    found = collectives.exchange(own, CONTROL).amax(0).tolist()
    return tuple(norm if math.isfinite(norm) else math.nan for norm in found)


def _expect_agreement(collectives: Collectives, own: Contribution, row: Row[Sequence[int]]) -> bool:
    """Check that all digests are equal on all ranks. If one is not, one more exchange finds what differs: collective,
    as all ranks see the same sums.

    Returns:
        Whether all are equal. False also where nothing raises: a rank may have more samples than another one.

    Raises:
        RuntimeError: as `ask`.
    """
    status = _merged(row.status)
    are_alike = [alike.are_alike(row.digests[at : at + alike.WIDTH]) for at in range(0, 4 * alike.WIDTH, alike.WIDTH)]
    same_collectives, same_settings, same_samples, same_gradients = are_alike
    if len(status) == 1 and not same_settings:  # else the caller raises for the status
        _expect_same_settings(collectives, own.settings)
    own.settings.end()
    if not same_collectives:
        raise InvalidState(_first_difference(collectives))
    if not same_samples and own.weights is not None:
        own.weights.expect_same(CONTROL)
    collectives.samples.compared()  # not forgotten: a queued update may have taken further ones
    if own.same is not None:
        if set(status) == {Status.READY} and not same_gradients:
            own.same.expect_same(CONTROL)
        own.same.forget()
    return all(are_alike)


def _as_counts(flags: Sequence[bool], num_ranks: int) -> list[int]:
    """Flags packed for a sum over the ranks: each flag has as many bits as the count of `num_ranks` needs."""
    bits = num_ranks.bit_length()
    each = 63 // bits
    groups = [flags[start : start + each] for start in range(0, len(flags), each)]
    return [sum([1 << (bits * place) for place, flag in enumerate(group) if flag]) for group in groups]


def _with_flags(counts: Tensor, own: Contribution, num_ranks: int) -> Tensor:
    """`_as_counts`, on the device, with the flags that are known only there."""
    if own.on_device is None:
        return counts
    bits = num_ranks.bit_length()
    places = range(len(own.present) - own.on_device.numel(), len(own.present))
    words, shifts = zip(*(divmod(place, 63 // bits) for place in places), strict=True)
    terms = own.on_device.to(counts.device, torch.int64) << on_device([bits * shift for shift in shifts], counts.device)
    return counts.index_add(0, on_device(words, counts.device), terms)


def _of_any(counts: Sequence[int], num_flags: int, num_ranks: int) -> tuple[bool, ...]:
    """The flags that any rank has set, from the sum of all ranks' `_as_counts`."""
    bits = num_ranks.bit_length()
    each, mask = 63 // bits, (1 << bits) - 1
    return tuple([bool(counts[flag // each] >> (bits * (flag % each)) & mask) for flag in range(num_flags)])


def _first_difference(collectives: Collectives) -> str:
    """The first difference between the ranks' logs, in words. One more exchange, before the error. Logs are compared
    per name of collective, as only the order within a name is fixed."""
    lists: dict[str, list[str]] = {}
    for event in collectives.log.entries:
        lists.setdefault(event.op, []).append(f"unit {event.unit}")
    recent = {op: [*enumerate(units)][-_RECENT:] for op, units in lists.items()}
    found = collectives.by_rank(recent, CONTROL)
    first, *others = found
    where = (
        "they issued them in another order, longer ago than the logs tell, or came to several models of one backward "
        "in another order (add 0 * output.sum() of each of them to the loss)"
    )
    of_ranks = [(op, rank) for rank in others for op in sorted({*found[first], *found[rank]})]
    for op, rank in of_ranks:
        mine, theirs = dict(found[first].get(op, ())), dict(found[rank].get(op, ()))
        since = max(min(one, default=0) for one in (mine, theirs))  # from there on both tell
        differing = [at for at in {**mine, **theirs} if at >= since and mine.get(at) != theirs.get(at)]
        if differing:
            here, there = (one.get(min(differing), "nothing more") for one in (mine, theirs))
            where = f"{op}: rank {first} was at {here} where rank {rank} was at {there}"
            break
    return (
        f"the ranks have not issued the same collectives: {where}. Their forward or backward took another path through "
        f"the units. Nothing has been updated. {SAME_UNITS}"
    )


def _expect_same_settings(collectives: Collectives, settings: SettingsReport) -> None:
    """One more exchange, after digests have differed.

    Raises:
        RuntimeError: with the first setting that differs.
    """
    found = difference(collectives.by_rank(settings.words(), CONTROL))
    settings.end()
    if found:
        raise InvalidState(f"the ranks step with different settings. {found}")
