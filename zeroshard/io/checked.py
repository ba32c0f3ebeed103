"""Checks numbers, strings and JSON from files that may be damaged or malicious: valid, or a CheckpointError."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from zeroshard.errors import Error, InvalidValue

MAX_DIMS = 64
MAX_NUMEL = 1 << 48


class CheckpointError(Error, RuntimeError):
    """A checkpoint cannot be saved, or is damaged; the message says what was expected and found, in which file."""


class NotWritten(CheckpointError):
    """The system refused to write a checkpoint (no space, no permission); nothing is damaged."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises:
    CheckpointError: in place of an OSError inside; the message names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


@contextmanager
def checking(path: Path) -> Iterator[None]:
    """Like `reading`, and a CheckpointError raised inside gets the name of the file."""
    with reading(path):
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from None


def refuse(problem: str) -> NoReturn:
    raise CheckpointError(problem)


def typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        refuse(f"{what} must be of type {kind.__name__}, found {short(value)}")
    return value


def integer(value: Any, what: str, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        refuse(f"{what} must be an integer from 0 to {limit}, found {short(value)}")
    return int(value)


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """A shape of at most MAX_DIMS dimensions and MAX_NUMEL elements."""
    shape = tuple(integer(n, f"a size of {what}", MAX_NUMEL) for n in typed(value, list, "shape"))
    if len(shape) > MAX_DIMS or math.prod(n for n in shape if n) > MAX_NUMEL:
        refuse(f"{what} has the shape {short(shape)}, which is too large")
    return shape


def parse_json(text: bytes | bytearray) -> Any:
    """Parse JSON; refuses duplicate names in an object, NaN and infinity."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {str(error)[:200]}") from None


def short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, tuple)) or value is None else type(value).__name__
    return text if len(text) <= 100 else f"{text[:100]}..."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise InvalidValue("a name twice in one object")
    return dict(pairs)


def _no_constant(text: str) -> NoReturn:
    raise InvalidValue(f"{text} is not JSON")
