"""Text files that are written as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from zeroshard.io.refused import naming


def write_whole(path: Path, text: str) -> None:
    """Write a text file. If that fails, what was there before stays, and the error names the file."""
    if path.exists() and not path.is_file():  # a pipe or a device, which is not replaced; a folder raises
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        with naming(path):
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
