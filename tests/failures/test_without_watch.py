"""A program that makes its process group itself and never calls `zeroshard.init()` has no watch."""

from __future__ import annotations

import _thread
from contextlib import suppress

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import travelling
from zeroshard.testing import RankError, run_ranks


def gathers_alone(rank: int, way: str, watched: bool) -> None:
    if watched:
        zeroshard.init()
    with travelling(way):
        handle = zeroshard.shard(nn.Linear(4, 4), "zero3")
        if rank == 0:
            handle.full_state_dict()
        else:
            with suppress(RuntimeError):  # what is looked at is the error of the other rank
                torch.distributed.barrier()


@pytest.mark.by_gloo
@pytest.mark.parametrize("way", ["shared", "pairwise"])
def test_the_timeout_tells_how_to_have_a_watch(way: str) -> None:
    with pytest.raises(RankError, match=r"No watch runs here.*Call zeroshard\.init\(\) on every rank") as found:
        run_ranks(gathers_alone, 2, way, False, collective_timeout=3.0)
    assert found.value.text.count("No watch runs here") == 1
    with pytest.raises(RankError) as found:  # a control
        run_ranks(gathers_alone, 2, way, True, collective_timeout=6.0)
    assert "No watch" not in found.value.text and "deadlock" in found.value.text


def begins_with_other_threads(rank: int) -> list[str]:
    kept, said = _thread.start_new_thread, []
    _thread.start_new_thread = lambda *args: kept(*args)
    try:
        zeroshard.init()
    except RuntimeError as error:
        said.append(str(error))
    finally:
        _thread.start_new_thread = kept
    zeroshard.init()
    return said


def test_threads_that_gevent_has_replaced_are_refused() -> None:
    for (said,) in run_ranks(begins_with_other_threads, 2):
        assert said.startswith("init: tests has replaced Python's threads") and said.endswith("patch_all(thread=False)")
