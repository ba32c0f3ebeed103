"""Where the text comes from: a file, a folder, the standard library, or a data set that `datasets` has saved."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zeroshard.train.config import DataConfig, UserError

SEPARATOR = b"\0"
_OUTSIDE_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION = ("validation", "valid", "val", "dev")

Split = Literal["train", "validation"]
Files = list[tuple[str, Path]]


@dataclass(frozen=True)
class Document:
    """A text in UTF-8. `split`: where the data set itself puts it; None: that is still to be chosen."""

    name: str
    content: bytes
    split: Split | None = None


Texts = Callable[[], Iterator[Document]]
"""The documents; each call begins again."""


def texts_of(config: DataConfig) -> Texts:
    """The documents at `config.path`; without a path, the files of the standard library.

    Raises:
        UserError: there is nothing to read, or a single file is not UTF-8. By the documents: none of them has text.
    """
    texts = _texts_at(config)

    def documents() -> Iterator[Document]:
        number = 0
        for number, document in enumerate(texts(), 1):  # noqa: B007
            yield document
        if not number:
            where = config.path or "the standard library"
            raise UserError(f"no UTF-8 text in {where}: expected a text file or a folder")

    return documents


def _texts_at(config: DataConfig) -> Texts:
    path = Path(config.path)
    if config.path and is_saved_dataset(path):
        return _saved_dataset(path, config.column)
    if config.column != DataConfig().column:
        where = config.path or "the standard library"
        raise UserError(f"data.column = {config.column!r} is a column of a saved data set, which {where} is not")
    files = _files_at(path) if config.path else _standard_library()
    return lambda: _documents(files)


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder is one that `save_to_disk` of `datasets` has written."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def would_read(config: DataConfig, folder: Path) -> bool:
    """Whether files in `folder` belong to the documents."""
    path = Path(config.path)
    if not config.path or not path.is_dir() or is_saved_dataset(path):
        return False
    inner, outer = folder.resolve(), path.resolve()
    return inner.is_relative_to(outer) and not _is_hidden(inner.relative_to(outer))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _standard_library() -> Files:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [(name, path) for name, path in _walk(root, "*.py") if not _OUTSIDE_THE_LIBRARY & set(Path(name).parts)]


def _files_at(path: Path) -> Files:
    if path.is_dir():
        return [(name, file) for name, file in _walk(path, "*") if not _is_hidden(Path(name))]
    if not path.is_file():
        raise UserError(f"no text at {path}: expected a UTF-8 file or a folder of them")
    try:
        _text_in(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    return [(path.name, path)]


def _walk(root: Path, pattern: str) -> Files:
    return sorted((path.relative_to(root).as_posix(), path) for path in root.rglob(pattern) if path.is_file())


def _documents(files: Files) -> Iterator[Document]:
    """The files that contain UTF-8 text; other files in a folder are skipped."""
    for name, path in files:
        try:
            content = _text_in(path)
        except UnicodeDecodeError:
            continue
        if content and SEPARATOR not in content:
            yield Document(name, content)


def _text_in(path: Path) -> bytes:
    """Raises:
    UserError: the file cannot be read.
    UnicodeDecodeError: it is not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    content.decode()
    return content


def _saved_dataset(path: Path, column: str) -> Texts:
    """The rows of a column, each a document. With splits: `train`, and `validation` where there is one."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(f"{path} is a saved data set: reading it needs pip install 'zeroshard[datasets]'") from None
    try:
        found: Any = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"{path} is no data set that `datasets` can load: {error}") from error
    parts = _splits(path, found)
    for part, _ in parts.values():
        if column not in part.column_names:
            raise UserError(f"{path} has no column {column!r}: name one of {part.column_names} by --data.column")

    def documents() -> Iterator[Document]:
        for name, (part, split) in parts.items():
            first = 0
            for batch in part.select_columns([column]).iter(batch_size=1000):
                for index, text in enumerate(batch[column], first):
                    if not isinstance(text, str | None):
                        raise UserError(f"{path}: column {column!r} has a {type(text).__name__}: expected text")
                    if text and "\0" not in text:
                        yield Document(f"{name}/{index}", text.encode(errors="replace"), split)
                first += len(batch[column])

    return documents


def _splits(path: Path, found: Any) -> dict[str, tuple[Any, Split | None]]:
    """Name -> a part of the data set, and the split that it belongs to."""
    if not isinstance(found, dict):  # DatasetDict is a dict
        return {"row": (found, None)}
    if "train" not in found:
        raise UserError(f"{path} has the splits {', '.join(found)}: expected one that is called train")
    validation = next((name for name in _VALIDATION if name in found), None)
    if validation is None:
        return {"train": (found["train"], None)}
    return {"train": (found["train"], "train"), validation: (found[validation], "validation")}
