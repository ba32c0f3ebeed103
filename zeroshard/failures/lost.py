"""Tells errors that another rank has caused from those of this rank; and `LostPeer`, which names the other rank."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

from zeroshard.errors import Error
from zeroshard.failures.frames import current_error
from zeroshard.failures.notices import Cause
from zeroshard.failures.whereabouts import came_from_program

_OF_OTHERS = re.compile(
    r"clos|reset|broken pipe|tim(ed?|ing)[ -]?out|abort|refused|remote|no heartbeat|gone", re.IGNORECASE
)
"""Matches messages of errors that another rank's end may have caused."""

_OF_RANKS = ("zeroshard.ranks.", "zeroshard.failures.", "zeroshard.comm.")


class LostPeer(Error, RuntimeError):
    """This rank waited for another rank that did not come; the message says for which rank, and why.

    Attributes:
        cause: why all ranks leave, if it is known.
        found: otherwise, where the other ranks are, one line each.
    """

    def __init__(self, text: str, cause: Cause | None, found: Sequence[str]) -> None:
        super().__init__(text)
        self.cause, self.found = cause, list(found)

    @classmethod
    def because(cls, cause: Cause) -> LostPeer:
        return cls(str(cause), cause, [])


def is_of_others(error: BaseException) -> bool:
    """Whether another rank may have caused this error."""
    return isinstance(error, RuntimeError) and (isinstance(error, LostPeer) or bool(_OF_OTHERS.search(str(error))))


def own_error(error: BaseException | None) -> BaseException | None:
    """The last error of this chain of contexts that came from the program's own lines, and is this rank's alone."""
    while error is not None and (is_of_others(error) or _is_of_ranks(error) or not came_from_program(error)):
        error = error.__context__
    return error


def _is_of_ranks(error: BaseException) -> bool:
    return type(error).__module__.startswith(_OF_RANKS)  # LostPeer, OutOfOrder, ...: it names the others itself


def handles_error(thread: int | None) -> bool:
    """Whether a thread handles any error: in an `except`, a `finally`, an `__exit__`."""
    return current_error(thread) is not None


def handled_error(thread: int | None) -> BaseException | None:
    """The error of this rank's own that a thread handles."""
    return own_error(current_error(thread))


def in_one_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:2000]
