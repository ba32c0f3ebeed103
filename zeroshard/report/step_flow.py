"""Draws the flow of a step: what each rank holds of weights, gradients and main in each phase, and what it sends.

    between steps   rank 0 |█··|  rank 1 |·█·|  ...      11.8 GB
         ↓ all-gather weights: 33 messages, 11.8 GB sent
    forward         rank 0 |███|  rank 1 |███|  ...      15.8 GB

The states follow from the placements of the plan, the numbers are those of the forecast. (It is the picture that FSDP's
documentation has, for any plan and the user's own model.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeroshard.placement import PARTIAL, REPLICATED, SHARDED
from zeroshard.planning.in_words import in_units
from zeroshard.report.facts import Message, Planned
from zeroshard.report.svg import element, label, picture, rect

DRAWN = 4
"""The most ranks that are drawn; the others are like them."""

WORDS = {
    ("all_gather", "forward"): "all-gather weights for forward",
    ("all_gather", "step"): "all-gather the new weights",
    ("reduce_scatter", "backward"): "reduce-scatter gradients",
    ("reduce_replicas", "backward"): "reduce gradients among replicas",
    ("all_to_all", "step"): "whole parameters to their owners, and back",
    ("exchange", "step"): "control: norms, overflows, loss scale",
}


@dataclass(frozen=True)
class State:
    """A phase, and how much of each buffer a rank holds: "full", "lent" (full, for one unit at a time), "shard", "sum"
    (full, terms of a sum) or "". `num_bytes`: held by the engine at most in this phase."""

    phase: str
    weights: str
    grads: str
    main: str
    num_bytes: int


@dataclass(frozen=True)
class Move:
    """The messages between two phases of one kind: how many, and the bytes that the rank sends in all of them."""

    words: str
    times: int
    num_bytes: int


def flow(planned: Planned) -> list[State | Move]:
    """States and moves of a step, in order."""
    lent = "lent" if planned.weights == SHARDED.value else "full"
    rests = "shard" if planned.weights == SHARDED.value else "full"
    main = "shard" if planned.main == SHARDED.value else "full"
    before = {REPLICATED.value: "full", PARTIAL.value: "full", SHARDED.value: ""}[planned.grads]
    reduced = "shard" if planned.grads == SHARDED.value else "full"
    if planned.external_gradients:
        before = reduced = ""

    def state(phase: str, weights: str, grads: str) -> State:
        return State(phase, weights, grads, main, planned.in_phase(phase).sum)

    summed = "" if planned.external_gradients else "sum"
    return [
        state("between steps", rests, before),
        *_moves(planned, "forward"),
        state("forward", lent, before),
        *(move for move in _moves(planned, "backward") if "for backward" in move.words),
        state("backward", lent, summed),
        *(move for move in _moves(planned, "backward") if "for backward" not in move.words),
        state("step", rests, reduced),
        *_moves(planned, "step"),
    ]


def _moves(planned: Planned, phase: str) -> Iterator[Move]:
    """The messages of a phase, by kind, in the order of their first one."""
    kinds: dict[str, list[Message]] = {}
    for message in planned.messages:
        if message.phase == phase:
            kinds.setdefault(_words(planned, message), []).append(message)
    for words, of_kind in kinds.items():
        yield Move(words, sum(m.times for m in of_kind), sum(m.times * m.num_bytes for m in of_kind))


def _words(planned: Planned, message: Message) -> str:
    if (message.op, message.phase) == ("all_gather", "backward"):
        whose = "weights for backward" if planned.weights == SHARDED.value else "the mean of gradients"
        return f"all-gather {whose}"
    return WORDS.get((message.op, message.phase), f"{message.op} ({message.phase})")


# The picture ----------------------------------------------------------------------------------------------------------

_STATE, _MOVE, _BAR = 64, 40, 13
_HELD = {"full": ("", True), "lent": (" lent", True), "sum": (" sum", True), "shard": ("", False)}


def draw(planned: Planned, width: int) -> str:
    """The picture, `width` pixels wide; time runs down."""
    is_wide = width > 600
    left, drawn = (150 if is_wide else 4), min(planned.num_shards, DRAWN)
    place = _Ranks(left, (width - left - (120 if is_wide else 4)) / drawn, drawn)
    y = 52.0 if is_wide else 66.0
    body = [_legend(left, is_wide=is_wide)]
    centres = [left + (rank + 0.5) * place.pitch - 3 for rank in range(drawn)]
    body += [label(x, y - 7, f"rank {rank}", "middle quiet") for rank, x in enumerate(centres)]
    for part in flow(planned):
        if isinstance(part, State):
            if not is_wide:
                y += 20
            body += _state(part, place, y, width, is_wide=is_wide)
            y += _STATE
        else:
            body += _move(part, left, y, width)
            y += _MOVE
    return picture(width, y + 4, body, f"the flow of a step under {planned.plan}", class_="flow")


@dataclass(frozen=True)
class _Ranks:
    left: float
    pitch: float
    number: int


def _legend(left: float, *, is_wide: bool) -> str:
    parts, x, y = [], left, 8
    kinds = [("weights", "weights"), ("grads", "gradients"), ("main", "main weights and optimizer state")]
    for kind, words in kinds:
        if kind == "main" and not is_wide:
            x, y = left, 28
        parts += [rect(x, y, 12, 12, f"k-{kind}"), label(x + 17, y + 10.5, words, "quiet")]
        x += 36 + 7 * len(words)
    return element("g", *parts)


def _state(state: State, ranks: _Ranks, y: float, width: int, *, is_wide: bool) -> Iterator[str]:
    held = in_units(state.num_bytes)
    if is_wide:
        yield label(4, y + 24, state.phase, "strong")
        yield label(width - 4, y + 24, held, "strong end")
        yield label(width - 4, y + 42, "held at most", "quiet end")
    else:
        yield label(4, y - 5, state.phase, "strong")
        yield label(width - 4, y - 5, f"{held} held at most", "end")
    for rank in range(ranks.number):
        x = ranks.left + rank * ranks.pitch
        size = ranks.pitch - 14
        yield rect(x, y, ranks.pitch - 6, _STATE - 8, "frame", rx=4)
        for number, kind in enumerate(("weights", "grads", "main")):
            yield from _buffer(
                kind, getattr(state, kind), rank, ranks.number, (x + 4, y + 5 + number * (_BAR + 3), size)
            )


def _buffer(kind: str, held: str, rank: int, shards: int, place: tuple[float, float, float]) -> Iterator[str]:
    """One buffer of one rank, cut into shards; shards that the rank does not hold are dashed frames."""
    x, y, size = place
    for shard in range(shards):
        extra, in_full = _HELD.get(held, ("", False))
        holds = in_full or (held == "shard" and shard == rank)
        class_ = f"k-{kind}{extra if shard != rank or extra == ' sum' else ''}" if holds else "absent"
        yield rect(x + shard * size / shards, y, size / shards - 2, _BAR, f"part {class_}")


def _move(move: Move, left: float, y: float, width: int) -> Iterator[str]:
    """An arrow down, and what is sent."""
    x = left + 10 if left > 100 else 14
    yield element("path", d=f"M{x} {y - 4:g} V{y + _MOVE - 14:g}", class_="arrow")
    yield element("path", d=f"M{x - 4:g} {y + _MOVE - 18:g} h8 l-4 7 z", class_="head")
    times = f"{move.times:,} message{'s' * (move.times != 1)}"
    if width > 600:
        yield label(x + 16, y + 18, f"{move.words}: {times}, {in_units(move.num_bytes)} sent by each rank")
    else:
        yield label(x + 14, y + 11, move.words)
        yield label(x + 14, y + 26, f"{times}, {in_units(move.num_bytes)} sent", "quiet")


def caption(planned: Planned) -> str:
    """What the picture leaves out, in words."""
    drawn = min(planned.num_shards, DRAWN)
    words = [f"{drawn} of {planned.num_shards} shards are drawn." if drawn < planned.num_shards else ""]
    if planned.replicas > 1:
        words.append(f"{planned.replicas} replicas hold the same.")
    if planned.weights == SHARDED.value:
        words.append("Pale weights are lent: they are held for one unit at a time, in buffers that units share.")
    if not planned.external_gradients:
        words.append("Hatched gradients are terms of a sum over the ranks.")
    if planned.micro_batches > 1:
        words.append(f"The messages are those of all {planned.micro_batches} micro-batches.")
    return " ".join(filter(None, words))
