"""Which files a function opens. An audit hook notes it. Python cannot remove such a hook, and each call of it takes
time, 3 % in all later tests. So tests that look at opened files run in a process of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

from zeroshard.testing import run_ranks


def in_its_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run by a rank that is alone."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_ranks(lambda rank: test(*args, **kwargs), 1)

    return run


def opened_by(work: Callable[[], Any]) -> list[str]:
    """The paths that were opened during `work`."""
    assert dist.is_initialized(), "expected a test that runs `in_its_own_process`"
    opened = _opened()
    before = len(opened)
    work()
    return opened[before:]


@cache
def _opened() -> list[str]:
    """Grows from now on with each path that is opened."""
    paths: list[str] = []
    sys.addaudithook(lambda event, args: paths.append(str(args[0])) if event == "open" else None)
    return paths
