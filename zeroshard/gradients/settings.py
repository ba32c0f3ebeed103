"""Settings that must be equal on every rank for a step: optimizer classes, hyper-parameters, clips, loss scales.

Each rank brings one digest of them to the control exchange. Only if the digests differ do the ranks exchange the
values, and all raise with what differs. (A common case: a scheduler that reads each rank's own loss. The shards of a
parameter would be stepped with different learning rates.)
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zeroshard.io.values import without_numpy

NOT_TOLD = -1
"""In place of a digest: this rank is a follower of a join and has no settings of its own (see `join.py`)."""

Items = tuple[tuple[str, Any], ...]
Words = dict[str, str]
"""Name of a setting -> its value, in words."""


@dataclass(frozen=True)
class Members:
    """The names of each param group's parameters."""

    names: tuple[tuple[str, ...], ...]

    @cached_property
    def digest(self) -> int:
        return zlib.crc32(repr([sorted(of_group) for of_group in self.names]).encode())


@dataclass(frozen=True)
class Settings:
    """The settings of one optimizer, as plain values.

    Attributes:
        groups: class and hyper-parameters of each param group.
        members: parameters of each param group.
        others: options of calls between backward and step.
        edits: changes made to gradients. (Another edit makes another comparison necessary.)
    """

    groups: tuple[Items, ...]
    members: Members
    others: Items
    edits: Items

    @cached_property
    def digest(self) -> int:
        groups = [sorted(items) for items in self.groups]
        return zlib.crc32(repr((groups, self.members.digest, self.others, self.edits)).encode())

    def words(self) -> Words:
        of_groups = {
            f"{key} of group {number}": repr(value) for number, items in enumerate(self.groups) for key, value in items
        }
        of_members = {
            f"the param group of {name}": str(number)
            for number, names in enumerate(self.members.names)
            for name in names
        }
        return of_groups | of_members | {key: repr(value) for key, value in self.others} | dict(self.edits)


@dataclass
class SettingsReport:
    """The settings that one optimizer reports in the control exchange: those of the current step, and those of earlier
    steps whose settings changed after the comparison (between `clip_grad_norm_` and `step`)."""

    compared: Settings | None = None
    _late: list[tuple[Settings, Settings]] = field(default_factory=list)  # compared, and stepped with
    _now: Settings | None = None

    def begin(self, now: Settings | None) -> None:
        """`now` is about to be compared; None: this rank has no settings to report."""
        if now is not None and now == self.compared:
            now = self.compared  # the object whose digest is cached
        self._now = now

    def went_on_with(self, now: Settings | None) -> None:
        """A step uses `now` without another exchange. If it has changed since the comparison, the next one reports
        it."""
        if now is not None and self.compared is not None and now != self.compared:
            self._late.append((self.compared, now))
            self.compared = now

    @property
    def digest(self) -> int:
        if self._now is None:
            return NOT_TOLD
        digest = self._now.digest
        for _, late in self._late:
            digest = zlib.crc32(f"{digest} {late.digest}".encode())
        return digest

    def words(self) -> Words:
        if self._now is None:
            return {}
        late = {
            f"{_LATE}{key}": value
            for before, after in self._late
            for key, value in after.words().items()
            if before.words().get(key) != value
        }
        return late | self._now.words()

    def end(self) -> None:
        """The settings have been compared, and are equal."""
        now, self._now = self._now, None
        self.compared = replace(now, edits=()) if now is not None and now.edits else now
        self._late.clear()


_LATE = "after clip_grad_norm_, "


_AS_THEY_ARE = frozenset({float, bool, str, type(None)})


def plain(value: Any) -> Any:
    """A value whose `repr` is equal on all ranks if the setting is equal: numbers as float, one-element tensors as
    their number. Objects that cannot be compared are replaced by the name of their type."""
    if type(value) in _AS_THEY_ARE:  # most of them: this is asked of each hyper-parameter in each step
        return value
    value = without_numpy(value)
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor):
        return plain(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), plain(one)) for key, one in value.items())
    return str(value) if isinstance(value, torch.dtype) else f"a {type(value).__name__}"


def difference(by_rank: Mapping[int, Words]) -> str:
    """The first setting that differs, with its value on each rank and advice, in words; "" if none differs.

    Args:
        by_rank: `SettingsReport.words` of each global rank.
    """
    telling = {rank: words for rank, words in by_rank.items() if words}
    keys = dict.fromkeys(key for words in telling.values() for key in words)
    for key in sorted(keys, key=lambda key: not key.startswith(_LATE)):
        ranks: dict[str, list[int]] = {}
        for rank, words in telling.items():
            ranks.setdefault(words.get(key, "as before" if key.startswith(_LATE) else "nothing"), []).append(rank)
        if len(ranks) > 1:
            return (
                f"{key}: {', '.join(f'{value} on {_ranks(where)}' for value, where in ranks.items())}. {_advice(key)}"
            )
    return ""


def _advice(key: str) -> str:
    done = "The previous step has used it: continue from a checkpoint" if key.startswith(_LATE) else _NOTHING
    if " of group " in key and "class" not in key:
        return (
            f"{done}. Every rank must step with the same hyper-parameters: give the scheduler the same number on every "
            "rank (average the loss over the ranks first). If the optimizer computes it from gradients, use the plan "
            '"ddp"'
        )
    return f"{done}. Every rank must build its optimizer alike, and do the same between backward and step"


_NOTHING = "Nothing has been updated"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {' and '.join(map(str, ranks))}"
