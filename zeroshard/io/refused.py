"""What the operating system refuses, in plain words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def in_words(error: OSError) -> str:
    """An error of the system in plain words. One of zeroshard, which names no file beside its text, keeps its text."""
    if not isinstance(error.filename, (str, bytes)):
        return error.strerror or str(error)
    path = Path(os.fsdecode(error.filename))
    match error:
        case FileExistsError() | NotADirectoryError():
            file = next((one for one in (path, *path.parents) if one.is_file()), None)
            return f"{path} exists already" if file is None else f"{file} is a file: expected a folder"
        case IsADirectoryError():
            return f"{path} is a folder: expected a file"
        case FileNotFoundError():
            return f"there is no {path if path.parent.is_dir() else path.parent}"
        case PermissionError():
            return f"no permission to read or write {path}"
    return f"{path}: {error.strerror}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises:
    OSError: one inside, which may have named no file (a full disk), or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else one of zeroshard
            error.filename = str(path)
        raise
