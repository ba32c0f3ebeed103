"""Turns text files into one memory-mapped token file per split, and into batches that depend only on the position.

    files       a.py            b.py       c.py                 one token per byte, a NUL after each file
    split       train           train      validation           by a hash of the file's own path
    tokens     |aaaaaaaaaaaaaa0 bbbbbbbbb0|                      train.bin, uint8, memory-mapped
    windows    |0   |1   |2   |3   |4   |                       `context` tokens each, plus one to predict
    step s      sequences [s x n, (s + 1) x n) of a seeded permutation of the windows

There is no state between steps: the windows that rank r reads in micro-batch m of step s depend only on the seed, s, m,
r and the world size, so a resumed run continues with the next batch. The global batch of a step (of all ranks and
micro-batches together) does not depend on the world size.
"""

import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroshard.train.config import DataConfig, UserError

VOCABULARY = 256
_SEPARATOR = b"\0"
_FORMAT = "zeroshard tokens 1"
_OUTSIDE_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Tokens = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """The tokens of both splits, uint8 [numel], mapped from disk. `digest` names the text and its split."""

    digest: str
    train: Tokens
    validation: Tokens


def prepare(config: DataConfig) -> Path:
    """Write the token files into the cache, unless they are there, and return their folder.

    The folder is named by a digest of the text and gets its name by one rename, so several processes may do this at the
    same time. Raises `UserError` if there is no text at `config.path`, or if a single file is not UTF-8.
    """
    files = _standard_library() if not config.path else _files_at(Path(config.path))
    digest = hashlib.sha256(f"{_FORMAT} {config.validation_share!r}".encode())
    names = []
    for name, content in _texts(files):
        names.append(name)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    if not names:
        raise UserError(f"no UTF-8 text in {config.path or 'the standard library'}: expected a text file or a folder")
    cache = Path(config.cache) if config.cache else _user_cache()
    target = cache / digest.hexdigest()[:32]
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
        try:
            _write_tokens(files, names, config.validation_share, partial)
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process published the same bytes first
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write the tokens into {cache}: {error.strerror or error}") from None
    return target


def open_corpus(folder: Path) -> Corpus:
    """Map the token files that `prepare` wrote."""
    return Corpus(folder.name, _map(folder / "train.bin"), _map(folder / "validation.bin"))


@dataclass(frozen=True)
class Batches:
    """The batches of a run, each a function of its position. `tokens` is uint8 [numel]; `sequences` counts per step."""

    tokens: Tokens
    context: int
    sequences: int
    micro_batches: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_windows < self.sequences:
            raise UserError(
                f"the training text holds {self.num_windows} sequences of {self.context} tokens, "
                f"expected at least the {self.sequences} of one step: use more text or a smaller batch"
            )

    @property
    def num_windows(self) -> int:
        return count_windows(self.tokens, self.context)

    def windows(self, step: int, micro_batch: int, rank: int, world_size: int) -> list[int]:
        """The windows that one rank reads in one micro-batch: disjoint between ranks and micro-batches of a step.

        An epoch is one permutation, cut to whole steps, so that no step reads a window twice.
        """
        per_rank = self.sequences // (self.micro_batches * world_size)
        assert per_rank * self.micro_batches * world_size == self.sequences, "sequences must divide evenly"
        epoch, step_in_epoch = divmod(step, self.num_windows // self.sequences)
        first = step_in_epoch * self.sequences + (micro_batch * world_size + rank) * per_rank
        key = f"{self.seed} {epoch}"
        return [permuted(place, self.num_windows, key) for place in range(first, first + per_rank)]

    def read(self, step: int, micro_batch: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both int64 [sequences per rank, context]; targets are the tokens that follow."""
        return read_windows(self.tokens, self.windows(step, micro_batch, rank, world_size), self.context)


def count_windows(tokens: Tokens, context: int) -> int:
    """How many sequences of `context` tokens, each with a token to predict after its last, fit into `tokens`."""
    return max(0, len(tokens) - 1) // context


def validation_windows(tokens: Tokens, context: int, wanted: int, world_size: int) -> list[int]:
    """At most `wanted` windows spread evenly over the text, equally many per rank. `UserError` if too few."""
    available = count_windows(tokens, context)
    count = min(wanted, available) // world_size * world_size
    if count == 0:
        raise UserError(
            f"evaluation has {min(wanted, available)} sequences of {context} tokens for {world_size} ranks (the "
            f"validation text holds {available}, evaluation.windows = {wanted}): expected at least one for each rank; "
            f"use more text, a shorter model.context or a larger data.validation_share"
        )
    return [index * available // count for index in range(count)]


def read_windows(tokens: Tokens, windows: list[int], context: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the given windows, both int64 [len(windows), context]."""
    rows = np.stack([tokens[window * context : (window + 1) * context + 1] for window in windows])
    both = torch.from_numpy(rows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def permuted(place: int, size: int, key: str) -> int:
    """The image of `place` under the permutation of range(size) that `key` names, in constant time and memory.

    A Feistel network permutes the next even power of two. A value outside the range is permuted again until it is
    inside (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    assert 0 <= place < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for round_number in range(4):
            mixed = hashlib.blake2b(f"{key} {round_number} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        place = left << half_bits | right
        if place < size:
            return place


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [(name, path) for name, path in _walk(root, "*.py") if not _OUTSIDE_THE_LIBRARY & set(Path(name).parts)]


def _files_at(path: Path) -> list[tuple[str, Path]]:
    if path.is_dir():
        return [(name, file) for name, file in _walk(path, "*") if not any(p.startswith(".") for p in Path(name).parts)]
    if not path.is_file():
        raise UserError(f"no text at {path}: expected a UTF-8 file or a folder of them")
    try:
        content = path.read_bytes()
        content.decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    return [(path.name, path)]


def _walk(root: Path, pattern: str) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(root).as_posix(), path) for path in root.rglob(pattern) if path.is_file())


def _texts(files: list[tuple[str, Path]]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files that contain UTF-8 text; other files in a folder are skipped."""
    for name, path in files:
        try:
            content = path.read_bytes()
            content.decode()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            continue
        if content and _SEPARATOR not in content:
            yield name, content


def _write_tokens(files: list[tuple[str, Path]], names: list[str], share: float, folder: Path) -> None:
    validation_names = choose_validation(names, share)
    with open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as validation:
        for name, content in _texts(files):
            if len(names) == 1:  # a single file: its end is the validation split
                cut = len(content) - max(1, round(share * len(content)))
                train.write(content[:cut])
                validation.write(content[cut:])
            else:
                (validation if name in validation_names else train).write(content + _SEPARATOR)


def choose_validation(names: list[str], share: float) -> set[str]:
    """The files for validation: those whose path hashes below `share`, independent of the other files.

    If one of the splits would be empty, the file nearest to the border changes to it.
    """
    places = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64 for name in names}
    chosen = {name for name in names if places[name] < share}
    if not chosen:
        chosen = {min(names, key=places.__getitem__)}
    elif len(chosen) == len(names):
        chosen.remove(max(names, key=places.__getitem__))
    return chosen


def _map(path: Path) -> Tokens:
    # numpy cannot map an empty file.
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zeroshard"
