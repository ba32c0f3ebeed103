"""Finds, from the other ranks' heartbeats, which rank a timed-out wait was for, and why it did not come.

Reads neither the store nor the clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from zeroshard.failures.notices import Beat
from zeroshard.failures.positions import Position, counted
from zeroshard.failures.processes import Who

GIVING_UP = "giving up"
OUTSIDE = "outside of the program's own lines"
KILLED = "its processes were killed (often out of memory) or crashed, or the host was shut down"
_BEFORE_TIMEOUT = 0.75
"""The part of the timeout in which no wait that began with the silence has timed out: heartbeats come every eighth."""
_NAMED = 16
STILL_SECONDS = 1.5
"""A rank that has been asked for a heartbeat, and sends none for this long, has stopped, or cannot be reached."""
COLLECTIVE = (
    "Forward, backward, step, state_dict, save, load and whatever gathers weights are collective: every rank has to "
    "call them, in one order and equally often"
)
SAME_UNITS = (
    "Every rank must run the same units in the same order (modules of which each rank chooses its own, as experts, "
    "heads of tasks and layers that are dropped, belong inside of one unit, by units=; or take plan zero2)"
)
USE_THE_SAME = (
    "run each backward on every rank, under no_sync too; to a loss that leaves out what the loss of another rank uses, "
    "add 0 * output.sum(); with torch.utils.checkpoint, give shard(..., units=) the class of the modules that are "
    "checkpointed"
)
IN_BACKWARD = f"In a backward, ranks that use other parts of the models may wait for each other: {USE_THE_SAME}"
_LEFT = "reached the end of its program, or called sys.exit or destroy_process_group"
UNEVEN = "Where ranks have inputs for different numbers of steps, use `with handle.join():`"


@dataclass
class Seen:
    """What this rank knows of another rank.

    Attributes:
        beat: its last heartbeat.
        changed: the time (monotonic) at which a new heartbeat was last found.
        looked: the time of the last look.
        asked: the time at which it was last asked for a heartbeat.
    """

    beat: Beat
    changed: float
    looked: float
    asked: float = -math.inf

    def note(self, now: float, beat: Beat) -> None:
        # Silence counts only between two looks that are close together: if this rank has not looked for a minute, the
        # other one may have written heartbeats all the time.
        if beat.number != self.beat.number or now - self.looked > STILL_SECONDS:
            self.changed = now
        self.beat, self.looked = beat, now

    def where_since(self, number: int | None) -> str:
        """Where it is; "last seen at ..." if its last heartbeat has this number (None: none has come)."""
        is_old = number in (None, self.beat.number) and self.beat.where not in (OUTSIDE, GIVING_UP)
        return f"last seen {self.beat.where}" if is_old else self.beat.where

    @property
    def has_left(self) -> bool:
        """Whether it has ended its work without an error."""
        return self.beat.left is not None

    @property
    def silent_seconds(self) -> float:
        """Seconds without a new heartbeat."""
        return 0.0 if self.has_left else self.looked - self.changed

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered. (Without being asked, a rank may write a heartbeat only every ten seconds.)"""
        return not self.has_left and self.looked - max(self.changed, self.asked) >= STILL_SECONDS


def blame(
    rank: int,
    who: Mapping[int, Who],
    others: Mapping[int, Seen],
    absent: Mapping[int, Who | None] | None = None,
    *,
    awaited: Collection[int] | None = None,
    stopped: Collection[int] = (),
    closed: bool = False,
    timeout: float = math.inf,
) -> list[str]:
    """A line for each rank that has left, ended or stopped, and for each host without heartbeats; if there is none, a
    line for each rank that says where it is.

    Args:
        rank: this rank.
        absent: ranks that have not told who they are: their processes, if they are found, and are stopped.
        awaited: the ranks that may have held this one up, which alone get lines; None: all.
        stopped: ranks of this host that are, or were a moment ago, stopped by a signal.
        closed: whether the wait of this rank ended because a connection was closed. That is what a host does for a
            process that has ended. A host that is off, or cut off, does not do it.
        timeout: of collectives, in seconds. A rank whose wait times out closes its connections, to all ranks: so soon
            before the timeout or after it, a closed connection tells nothing about a silent host.
    """
    me, lines, elsewhere, unheard = who[rank], [], [], dict[tuple[str, str], list[int]]()
    for other, seen in others.items():
        if awaited is not None and other not in awaited:
            continue
        theirs, at = who[other], seen.beat.where
        name = f"rank {other} ({theirs})"
        state = theirs.state if theirs.is_neighbour_of(me) else "unknown"
        if seen.has_left:
            lines.append(f"{name} has {_LEFT}{_last_seen(at)}. {COLLECTIVE}. {UNEVEN}")
        elif state == "ended":
            lines.append(f"{name} has ended{_last_seen(at)}")
        elif seen.is_silent and state == "unknown" and _is_whole_host_silent(theirs, who, others):
            unheard.setdefault((theirs.host, theirs.name), []).append(other)
        elif seen.is_silent or other in stopped:
            lines.append(f"{name} has stopped (no heartbeat){_last_seen(at).replace('; it was', ',')}")
        elif at != GIVING_UP:
            elsewhere.append(f"{name} is {at}")
    absent = absent or {}
    lines += [f"rank {one} ({process}) has stopped, in zeroshard.init()" for one, process in absent.items() if process]
    if unknown := [one for one, process in absent.items() if process is None]:
        elsewhere.append(f"no watch of {_ranks(unknown)}: ended in zeroshard.init(), or has not called it")
    for (_, name), ranks in unheard.items():
        seconds = min(others[one].silent_seconds for one in ranks)
        heard = f"no heartbeat from {name} ({_ranks(ranks)}) for {seconds:.0f} s"
        network = f"the network between {me.name} and {name}, or {name} itself, is the likely cause, not a process"
        is_killed = closed and seconds < _BEFORE_TIMEOUT * timeout
        lines.append(f"{heard}, and a connection was closed: {KILLED}" if is_killed else f"{heard}: {network}")
    return lines or elsewhere


def _last_seen(where: str) -> str:
    return f"; it was last seen {where}" if where not in (OUTSIDE, GIVING_UP) else ""


def _is_whole_host_silent(host: Who, who: Mapping[int, Who], others: Mapping[int, Seen]) -> bool:
    there = [rank for rank, one in who.items() if (one.host, one.name) == (host.host, host.name)]
    return all(rank in others and (others[rank].is_silent or others[rank].has_left) for rank in there)


def describe_knot(ranks: Sequence[int], positions: Mapping[int, Position], where: Mapping[int, str]) -> str:
    """The message for ranks that wait for each other without end: what each waits for, and where it is."""
    sentences, some_left = [], False
    for rank in ranks:
        if rank in positions:
            sentences.append(f"rank {rank} waits in {positions[rank].wait.text}, {where[rank]}")
        else:
            some_left = True
            sentences.append(f"rank {rank} has {_LEFT}{_last_seen(where[rank])}")
    there = {rank: positions[rank] for rank in ranks if rank in positions}
    if len({(position.wait.key, position.wait.number) for position in there.values()}) == 1 < len(there):
        for kind in counted(next(iter(there.values()))):
            had = {rank: counted(position)[kind] for rank, position in there.items()}
            if len(set(had.values())) > 1:
                words = ", ".join(f"rank {rank} has begun {count}" for rank, count in had.items())
                sentences.append(f"they have come there after different collectives ({kind}: {words})")
    text = f"ranks wait for each other (deadlock): {'; '.join(sentences)}. {COLLECTIVE}"
    if any("backward" in position.wait.text for position in there.values()):
        text = f"{text}. {IN_BACKWARD}"
    return f"{text}. {UNEVEN}" if some_left else text


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"
