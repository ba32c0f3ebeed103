"""Common memory: a full buffer in which the shards of all ranks of an axis lie side by side. A gather moves nothing.

[Note: two mappings] Each rank maps the segment twice. Its own shard is in a mapping that all ranks share: what a step
writes there, all ranks see. The full weights that a forward computes with are in a private mapping (MAP_PRIVATE). It
shows the same pages, and therefore what all ranks have written. But a write through it goes to a copy of the page that
only this process sees. So code of the user that writes to a parameter in a forward (also through `p.data`, which no
version counter shows) cannot change the values of any rank, as with weights that were copied to a buffer.

The copied page no longer shows what the ranks write: until it is given back, this process would compute with old
values. The page table tells whether there is one. A look at it is slow (0.3 ms for 7 MB), and a first write to a page
is a page fault. So `is_written` looks after each forward in which this process had a page fault, and in any case after
every 16th: that finds writes outside of a forward. On a system that does not show its page table, each gather gives all
pages back.

The segment has no descriptor and no name once all ranks have mapped it (`side_by_side.py`), and it lives as long as one
of them: the end of the rank that has created it changes nothing for the others.
"""

from __future__ import annotations

import ctypes
import os
import resource

import torch
from torch import Tensor

from zeroshard.errors import SystemRefused

_MADV_DONTNEED = 4  # of a private mapping of a file: drops the copied pages, and shows the file again
_IN_FILE = 0x20  # in the upper byte of an entry of the page table: a page of the file (or of shared memory), not a copy
_PRESENT_OR_SWAPPED = 0xC0
LOOKS_EVERY = 16
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Common:
    """One common full buffer, from the view of one rank. See [Note: two mappings].

    Attributes:
        address: of this rank's shard.
        own: uint8 [shard], this rank's shard; empty before `hold`. A storage of its own, of this size.
        full: uint8 [all shards], to read. What is written here is lost.
        everyone: uint8 [all shards], the memory that the ranks share. Callers must only read it.
    """

    def __init__(self, fd: int, num_bytes: int, own: slice) -> None:
        """`fd`: of the segment; not needed after this. `own`: the bytes of this rank's shard."""
        path = f"/proc/self/fd/{fd}"
        with torch.inference_mode(False):  # autograd refuses to save tensors that were made in inference mode
            self.everyone = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            self.full = torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)
        self.address, self._own_bytes = self.everyone.data_ptr() + own.start, own.stop - own.start
        self.own = _NOTHING
        self._tells = self._has_copied_pages() is not None
        self._forwards, self._faults = 0, -1

    def hold(self, num_bytes: int) -> Tensor:
        """The own shard, to be the storage of a `FlatBuffer` of that size. It takes memory when it is written to."""
        if not num_bytes:
            return _NOTHING
        assert num_bytes == self._own_bytes, "not the shard of this buffer"
        held = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        held.mapping = self.everyone  # type: ignore[attr-defined]  # unmapped when nobody needs it
        with torch.inference_mode(False):
            self.own = torch.frombuffer(held, dtype=torch.uint8)
        return self.own

    def free(self) -> None:
        """Forget the memory. It is unmapped when no other tensor needs it."""
        self.own = self.full = self.everyone = _NOTHING

    def begin(self) -> None:
        """A gather begins: from now on `full` must show what the ranks have written."""
        if not self._tells:
            self.renew()

    def watch(self) -> None:
        """A forward begins, and is over at the next `is_written`."""
        self._faults = _page_faults()

    def is_written(self) -> bool | None:
        """Whether this process has written other values to `full`, as far as can be seen: see the module's note. None:
        this system does not tell."""
        if not self._tells:
            return None
        self._forwards += 1
        if self._forwards % LOOKS_EVERY and _page_faults() == self._faults:
            return False
        if not self._has_copied_pages():
            return False
        differs = not torch.equal(self.full, self.everyone)
        if not differs:
            self.renew()
        return differs

    def renew(self) -> None:
        """Let `full` show what the ranks have written: what this process has written to it is lost."""
        size = ctypes.c_size_t(self.full.nbytes)
        if ctypes.CDLL(None).madvise(ctypes.c_void_p(self.full.data_ptr()), size, _MADV_DONTNEED):
            raise SystemRefused("the system does not give back private pages of shared memory (madvise)")

    def _has_copied_pages(self) -> bool | None:
        # proc_pid_pagemap(5): 64 bits for each page, the upper three: present, swapped, page of a file.
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = self.full.data_ptr() // page, -(-(self.full.data_ptr() + self.full.nbytes) // page)
        try:
            fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            entries = os.pread(fd, 8 * (last - first), 8 * first)
        except OSError:
            return None
        finally:
            os.close(fd)
        if len(entries) < 8 * (last - first):
            return None
        return any(bits & _PRESENT_OR_SWAPPED and not bits & _IN_FILE for bits in set(entries[7::8]))


def _page_faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
    return used.ru_minflt + used.ru_majflt
