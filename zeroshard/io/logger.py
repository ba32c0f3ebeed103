"""Log messages, by Python's logging under the name `zeroshard`.

The logger has no handler: in a program that sets up no logging, Python prints warnings on stderr. (Lines about ranks
that have failed always go there: `failures/watch.py`.)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOGGER = logging.getLogger("zeroshard")


def tell(rank: int, message: str, *args: Any) -> None:
    """Log a message that all ranks have: rank 0 at the level INFO, the others at DEBUG."""
    LOGGER.log(logging.DEBUG if rank else logging.INFO, message, *args)


class _OneLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # sys.stderr of this moment: beside a live line `rich` replaces it by one that prints above that line.
        print(f"zeroshard: warning: {' '.join(record.getMessage().split())}", file=sys.stderr)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """In this block warnings go to stderr, one line each. A command is its own application, so it adds the handler."""
    handler = _OneLine(logging.WARNING)
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
