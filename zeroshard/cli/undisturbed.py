"""Runs code of others inside a command: what it logs, prints and asks for stays out of the output of the command."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from zeroshard.errors import InvalidState
from zeroshard.io.logger import LOGGER

LIBRARIES = ("torch", "torchao", "transformers")


@contextmanager
def quiet() -> Iterator[None]:
    """A scope in which the libraries log nothing. The command reports their errors itself, in one line."""
    with ExitStack() as stack:
        for logger in map(logging.getLogger, LIBRARIES):
            stack.callback(logger.setLevel, logger.level)
        hush()
        yield


def hush() -> None:
    """To be called again in the scope `quiet` behind the import of a library that sets its own level."""
    for logger in map(logging.getLogger, LIBRARIES):
        logger.setLevel(logging.CRITICAL + 1)


@contextmanager
def undisturbed(name: str) -> Iterator[None]:
    """A scope for the user's model. What it prints is left out, and a warning says so; where it reads from standard
    input, it gets an error, as nobody is there to answer."""
    printed, before = io.StringIO(), sys.stdin
    sys.stdin = _NobodyThere()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        sys.stdin = before
    lines = printed.getvalue().strip().splitlines()
    if lines:
        LOGGER.warning(
            "%s prints while it is planned, and this is left out: %.60r (lines: %d)", name, lines[0], len(lines)
        )


class _NobodyThere(io.StringIO):
    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # typeshed: of two base classes
        raise InvalidState("it reads from standard input, which a command does not pass on")

    read = readline
