"""Text files that are written as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zeroshard.io.refused import naming


def write_whole(path: Path, text: str) -> None:
    """Write a text file. If that fails, what was there before stays, and the error names the file."""
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write several text files. If one cannot be written, which the error names, none has changed. (An interrupt, or an
    error in a rename, may leave some of them new and some as they were.)"""
    partial: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with naming(path):
                if path.exists() and not path.is_file():  # a pipe or a device, which is not replaced; a folder raises
                    path.write_text(text, encoding="utf-8")
                    continue
                target = Path(os.path.realpath(path))
                partial[path] = target.with_name(f".{target.name}.tmp-{os.getpid()}")
                partial[path].write_text(text, encoding="utf-8")
                with open(partial[path], "rb") as file:
                    os.fsync(file.fileno())  # before the rename: else a power failure may leave an empty file
        for path, written in partial.items():
            with naming(path):
                os.replace(written, os.path.realpath(path))
    finally:
        for written in partial.values():
            written.unlink(missing_ok=True)
