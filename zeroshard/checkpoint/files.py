"""The file system calls that write checkpoints, each in one function, so that tests can make any of them fail."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.io.tensor_file import fill as fill
from zeroshard.layout.interval import round_up


def make_folder(path: Path) -> None:
    os.mkdir(path)


def create(path: Path) -> int:
    """A descriptor of a new file; raises if the path exists, also as a link."""
    # O_EXCL and O_NOFOLLOW: never write to an existing file, or to the target of a link.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write(file: int, data: bytes | memoryview) -> int:
    """Write, and return the number of bytes written, which may be less than given."""
    return os.write(file, data)


def sync(file: int) -> None:
    os.fsync(file)


def close(file: int) -> None:
    os.close(file)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def remove_file(path: Path) -> None:
    os.unlink(path)


def remove_empty_folder(path: Path) -> None:
    os.rmdir(path)


# Made of these --------------------------------------------------------------------------------------------------------


def write_all(file: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[write(file, rest) :]


def write_new(path: Path, data: bytes) -> None:
    """Write a new file; it is durable when this returns."""
    file = create(path)
    try:
        write_all(file, data)
        sync(file)
    finally:
        close(file)


def make_folders(path: Path) -> None:
    """Make the folder and missing parents; each is durable when this returns. No effect if it exists."""
    for one in reversed(_missing(path)):
        try:
            make_folder(one)
        except FileExistsError:  # another process has made it in the meantime
            if not one.is_dir():
                raise
        sync_folder(one.parent)


def _missing(path: Path) -> list[Path]:
    """The folder and its parents, as far as they do not exist."""
    return [one for one in (path, *path.parents) if not one.is_dir()]


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """A block that fills a folder, which is made with missing parents. If the block raises, those of them that are
    empty are removed again."""
    missing = _missing(folder)
    try:
        make_folders(folder)
        yield
    except BaseException:
        for one in missing:
            with suppress(OSError):  # it has files
                remove_empty_folder(one)
        raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (renames and new files in it), as far as its file system can."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): it has no fsync of folders (that of a virtual machine's host)
            raise
    finally:
        close(file)


def remove_folder(path: Path) -> None:
    """Remove a folder and everything in it; links are removed, not followed. Another process may do the same."""
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(path)):
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    remove_folder(Path(entry.path))
                else:
                    remove_file(Path(entry.path))
        remove_empty_folder(path)


class Lock:
    """Locks a folder until `unlock`, or until this object or the process is gone. An interrupt may come between any two
    lines, also right before `unlock`: then the error's frames go, and this object with them.

    Attributes:
        file: a descriptor of the folder.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self._is_open, self._process = True, os.getpid()

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                # A close alone gives it back only when a worker that was forked meanwhile (a DataLoader's) has ended,
                # too. The copy of this object in such a worker must not give it back.
                if os.getpid() == self._process:
                    fcntl.flock(self.file, fcntl.LOCK_UN)
            except OSError:
                pass  # a file system without locks
            finally:
                os.close(self.file)

    __del__ = release


def lock_folder(path: Path) -> Lock | None:
    """Lock the folder; None if another process has locked it."""
    lock = Lock(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    try:
        # The system releases this lock however the process ends; a lock file would survive a kill.
        fcntl.flock(lock.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.release()
        return None
    except OSError:
        pass  # a file system without locks
    except BaseException:  # an interrupt
        lock.release()
        raise
    return lock


def has_locks(lock: Lock) -> bool:
    """Whether the lock of `lock_folder` keeps others away: not every file system has locks (Lustre as it is often
    mounted)."""
    try:
        fcntl.flock(lock.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no effect: it is locked already
    except OSError:
        return False
    return True


def seconds_since_change(folder: Path) -> float:
    """Since the folder or a file in it was last written to or renamed."""
    found = [path.stat() for path in (folder, *folder.iterdir())]
    return now(folder.parent) - max(max(one.st_mtime, one.st_ctime) for one in found)


def now(folder: Path) -> float:
    """The time by the clock of the file system, which other hosts use as well: this host's may be hours ahead."""
    try:
        with tempfile.TemporaryFile(dir=folder) as new:
            return os.fstat(new.fileno()).st_mtime
    except OSError:  # it is full, for example
        return time.time()


def unlock(lock: Lock) -> None:
    """Give back the lock of `lock_folder`, and close the descriptor."""
    lock.release()


def free_bytes(path: Path) -> int | None:
    """Bytes that a user without privileges can still write there; None if the file system does not tell."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize if status.f_blocks else None  # FUSE: all zeros if it has no statfs


def bytes_on_disk(path: Path, num_bytes: int) -> int:
    """Bytes that a file of that size takes there, in whole blocks."""
    return round_up(num_bytes, os.statvfs(path).f_frsize or 1)
