"""How long tests wait: for events, and then as long as it takes. A machine may be busy; no test says how busy.

Where nobody should have to wait for a rank that does not come, a test gives collectives the long `TIMEOUT` of
`run_ranks` and asks that everything was over in `AT_ONCE`: whoever had waited would have needed twice as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

AT_ONCE = 5.0 if os.environ.get("ZEROSHARD_FAULTS") == "full" else 60.0
"""Seconds. `make test-faults`, with the figures that the documents record, wants a quiet machine, and is strict."""


def wait_until(happened: Callable[[], object]) -> None:
    """Until it is so; pytest ends a test that waits for ever."""
    while not happened():
        time.sleep(0.01)
