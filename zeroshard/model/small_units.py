"""Merges units that are too small for many ranks: a full buffer is padded, so that each rank gets whole blocks of it.

    16,384 ranks, blocks of 256 elements: a full buffer is a multiple of 4.2 M elements
    norms of one layer (fp32), 32 k elements         padded to 4.2 M, in each of 126 layers
    norms of all layers, one unit of 4.1 M elements  padded to 4.2 M, once

Only neighbours of one kind are merged: the same dtype, precision and trainability, and no other unit inside them. They
are gathered when the first of their modules is called. The place of a merged unit is that of its first module: in
backward all of its gradients are there when those of that module are, so it holds up no other reduction.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from zeroshard.model.unit_spec import UnitSpec

NEGLIGIBLE = 1 << 16
"""If full buffers are multiples of at most this many elements (up to 256 ranks), units stay as they are: a message of
256 KB takes little longer than an empty one."""

LEAST_MULTIPLES = 16
"""A unit with fewer multiples is small. So at most a sixteenth of a unit's full buffer is padding at its end."""


def with_small_ones_merged(specs: Sequence[UnitSpec], multiple: int) -> list[UnitSpec]:
    """
    Args:
        multiple: full buffers are padded to a multiple of this many elements (`layout.numel_multiple`).

    Returns:
        The units, in the order of their first modules. Those of a kind whose elements are all together too few for one
        unit that is not small are one small unit.
    """
    if multiple <= NEGLIGIBLE:
        return list(specs)
    place = {spec.name: number for number, spec in enumerate(specs)}
    kinds: dict[Hashable, list[UnitSpec]] = {}
    for spec in specs:
        kinds.setdefault(_kind(spec), []).append(spec)
    merged = []
    for of_kind in kinds.values():
        groups = list(_groups(of_kind, LEAST_MULTIPLES * multiple))
        for group in groups:
            first, last = place[group[0].name], place[group[-1].name]
            # It is in use, or accumulates, while all the units between its parts come and go: in a buffer of its own it
            # is gathered once, and they still have two in which to take turns.
            is_around = len(groups) == 1 and last - first >= len(group)
            merged.append((first, _merged(group, is_around=is_around)))
    return [spec for _, spec in sorted(merged, key=lambda pair: pair[0])]


def _kind(spec: UnitSpec) -> Hashable:
    """Units with equal keys may be merged. An outer unit is not merged: it has a pool buffer of its own."""
    return spec.name if spec.outer else ("", spec.dtype, spec.precision, spec.trainable, spec.stays)


def _groups(specs: Iterable[UnitSpec], least: int) -> Iterator[list[UnitSpec]]:
    """Neighbours, together at least `least` elements; a small rest goes with the last group."""
    found: list[list[UnitSpec]] = []
    numel = least
    for spec in specs:
        if numel >= least:
            found.append([])
            numel = 0
        found[-1].append(spec)
        numel += _numel(spec)
    if numel < least and len(found) > 1:
        rest = found.pop()
        found[-1] += rest
    yield from found


def _merged(specs: Sequence[UnitSpec], *, is_around: bool) -> UnitSpec:
    if len(specs) == 1:
        return specs[0]
    first, last = specs[0], specs[-1]
    return replace(
        first,
        name=f"{first.name} {'+' if len(specs) == 2 else 'to'} {last.name}",
        names=tuple(chain.from_iterable(spec.names for spec in specs)),
        shapes=tuple(chain.from_iterable(spec.shapes for spec in specs)),
        modules=tuple(dict.fromkeys(chain.from_iterable(spec.modules for spec in specs))),
        outer=first.outer or is_around,
        calls=tuple(dict.fromkeys(chain.from_iterable(spec.calls for spec in specs))),
        places=(min(spec.places[0] for spec in specs), max(spec.places[1] for spec in specs)),
    )


def _numel(spec: UnitSpec) -> int:
    return sum(math.prod(shape) for shape in spec.shapes)
