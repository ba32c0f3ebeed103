"""Segments of shared memory that are freed at an inconvenient moment: by a collection, or in another thread that had
the last reference (a profiler that looks at stacks)."""

from __future__ import annotations

import os
import weakref

import torch

from zeroshard.ranks.shared_memory import SharedMemory


def test_a_freed_segment_is_not_taken_for_the_next_one_at_its_address() -> None:
    memory = SharedMemory()
    first, second = memory.allocate(4096), memory.allocate(4096)
    found = memory.locate(second)
    (of_second,) = (one for one in memory._own.values() if found is not None and one[0] == found.segment)
    memory._own[first.data_ptr()] = of_second  # as if it had been mapped there, before the finalizer of the first
    address = first.data_ptr()
    del first
    assert memory._own[address] is of_second
    del memory._own[address], second
    assert not memory._own


def test_segments_that_are_listed_for_peers_stay_until_they_have_mapped_them() -> None:
    memory = SharedMemory()
    tensors = [memory.allocate(num_bytes) for num_bytes in (4096, 8192)]
    gone = weakref.ref(torch.empty(1))
    memory._own[0] = 99, 10**6, gone  # its tensor has died, and its finalizers have not run yet
    kept, rows = memory.own_segments()
    tensors.clear()
    assert [size for _, _, size in rows] == [4096, 8192]
    assert [os.fstat(fd).st_size for _, fd, _ in rows] == [4096, 8192]
    assert memory.locate(kept[0]) is not None
    kept.clear()
    assert list(memory._own) == [0]
