"""Log messages, by Python's logging under the name `zeroshard`.

(Lines about ranks that have failed go to stderr: `comm/watch.py`.)
"""

from __future__ import annotations

import logging
from typing import Any

LOGGER = logging.getLogger("zeroshard")


def tell(rank: int, message: str, *args: Any) -> None:
    """Log a message that all ranks have: rank 0 at the level INFO, the others at DEBUG."""
    LOGGER.log(logging.DEBUG if rank else logging.INFO, message, *args)
