"""Half-open integer ranges: the only index arithmetic of the library."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.errors import InvalidValue


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """The elements `start <= i < stop` of a flat buffer or a flattened parameter. Empty when `start == stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise InvalidValue(f"an interval needs 0 <= start <= stop, found [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __and__(self, other: Interval) -> Interval:
        """The intersection; if there is none, an empty interval at the later start."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def __contains__(self, other: Interval) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def relative_to(self, origin: int) -> Interval:
        """The same elements counted from `origin`."""
        return Interval(self.start - origin, self.stop - origin)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
