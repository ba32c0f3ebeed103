"""How long tests wait. They wait for events, without a limit of their own, as the machine may be busy.

Where no rank should wait for one that never arrives, a test gives collectives the long `TIMEOUT` of `run_ranks` and
checks that everything was over within `AT_ONCE`. A rank that had waited for the timeout would have needed twice as
long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch.distributed as dist

from tests.grids import EVERYTHING
from tests.queueing import IS_COUNTED
from zeroshard.ranks.trial import connected

AT_ONCE = 5.0 if os.environ.get("ZEROSHARD_FAULTS") == "full" else 60.0
"""Seconds. `make test-faults`, whose figures the documents record, needs an idle machine and has the stricter limit."""

OUT = 3.0 if IS_COUNTED else AT_ONCE
"""Seconds in which all ranks are out after one has failed, without those in which some process had no processor. (What
is promised is 10 s; here it takes less than one.) A busy machine does not lengthen them: it takes off more than the
ranks have waited, so that the limit finds a wait of 12 s on a busy machine, too."""

HANG = 1800.0 if EVERYTHING else 120.0
"""Seconds of a collective in a test of something that once waited for ever. They pass only if it does so again: where
all is right, a rank waits as long as its peers need on a busy machine, which is longer where it has many more cases."""


def wait_until(happened: Callable[[], object]) -> None:
    """Wait until `happened()` is true. pytest's timeout ends a test that waits for ever."""
    while not happened():
        time.sleep(0.01)


def give_up_after(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """From now on this rank waits only so long for a message of the group (None: the default group). For a rank that
    waits in vain: a short timeout of the group itself would also count while the ranks of a busy machine start. Without
    pipes the group's timeout stays."""
    found = connected(dist.group.WORLD if group is None else group)
    if found is not None:
        found._timeout = seconds
