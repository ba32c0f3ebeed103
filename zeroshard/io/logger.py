"""Messages that are no errors: by Python's logging, under the name `zeroshard`. (Lines about ranks that have failed go
to stderr: `comm/watch.py`.)"""

from __future__ import annotations

import logging
from typing import Any

LOGGER = logging.getLogger("zeroshard")


def tell(rank: int, message: str, *args: Any) -> None:
    """Something that all ranks know: rank 0 says so at the level INFO, the others at DEBUG."""
    LOGGER.log(logging.DEBUG if rank else logging.INFO, message, *args)
