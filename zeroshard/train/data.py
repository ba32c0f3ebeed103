"""Turns documents into one memory-mapped token file per split, and into batches that depend only on the position.

    documents   a.py            b.py       c.py                 one token per byte, or a tokenizer's; a separator
    split       train           train      validation           by a hash of the document's own name
    tokens     |aaaaaaaaaaaaaa0 bbbbbbbbb0|                      train.bin, uint8 to uint32, memory-mapped
    windows    |0   |1   |2   |3   |4   |                       `context` tokens each, plus one to predict
    step s      sequences [s x n, (s + 1) x n) of a seeded permutation of the windows

There is no state between steps: the windows that rank r reads in micro-batch m of step s depend only on the seed, s, m,
r and the world size, so a resumed run continues with the next batch. The global batch of a step (of all ranks and
micro-batches together) does not depend on the world size.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroshard.failures.processes import Who
from zeroshard.io.refused import in_words
from zeroshard.train.config import DataConfig, UserError
from zeroshard.train.text import Document, Split, Texts, texts_of, would_read
from zeroshard.train.tokenizer import Tokenizer, Tokens, tokenizer_of

_FORMAT = "zeroshard tokens 1"
_ABOUT = "about.json"


@dataclass(frozen=True)
class Corpus:
    """The tokens of both splits, unsigned [numel], mapped from disk. `digest` names the text, its split and the
    tokenizer. `bytes_per_token`: of each split."""

    digest: str
    train: Tokens
    validation: Tokens
    bytes_per_token: Mapping[Split, float]


def prepare(config: DataConfig) -> Path:
    """Write the token files into the cache, unless they are there, and return their folder.

    The folder is named by a digest of the text and gets its name by one rename, so several processes may do this at the
    same time. Raises `UserError` if there is no text at `config.path`, if a single file is not UTF-8, or for a
    tokenizer that cannot be used.
    """
    texts, tokenizer = texts_of(config), tokenizer_of(config)
    digest = hashlib.sha256(f"{_FORMAT} {config.validation_share!r}".encode())
    if tokenizer.digest:
        digest.update(f"{tokenizer.digest} {tokenizer.separator}".encode())
    again, names = digest.copy(), dict[str, Split | None]()
    for document in texts():
        names[document.name] = document.split
        _add(digest, document)
    cache = Path(config.cache) if config.cache else _user_cache()
    if would_read(config, cache):
        raise UserError(
            f"the cache {cache} lies in the text, --data {config.path}: the tokens would be text of the next run. "
            "Choose a folder outside of it by --data.cache, or one whose name begins with a dot"
        )
    target = cache / digest.hexdigest()[:32]
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = _new_folder(cache)
        try:
            _write_tokens(partial, _added(again, texts), names, config)
            if again.digest() != digest.digest():
                raise UserError(
                    f"the text {config.path} has changed while it was read: start again when nothing writes to "
                    "it, or with a copy"
                )
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process published the same bytes first
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write the tokens into {cache}: {in_words(error)}") from None
    return target


def _new_folder(cache: Path) -> Path:
    """A folder for tokens that are not complete, named by this process. Removes those that processes of this machine
    have left because they were killed. (Other machines may use the same cache.)"""
    me = Who.this()
    mark = f".partial-{hashlib.sha256(me.host.encode()).hexdigest()[:16]}"
    for left in cache.glob(f"{mark}-*") if me.host else ():
        pid, started = map(int, left.name.split("-")[2:4])
        if Who(me.host, pid, started, me.name).state == "ended":
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{mark}-{me.pid}-{me.started}-", dir=cache))


def open_corpus(folder: Path, tokenizer: Tokenizer) -> Corpus:
    """Map the token files that `prepare` wrote with this tokenizer."""
    rates: dict[Split, float] = {"train": 1.0, "validation": 1.0}
    if tokenizer.digest:
        rates = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["bytes_per_token"]
    train, validation = _map(folder / "train.bin", tokenizer), _map(folder / "validation.bin", tokenizer)
    return Corpus(folder.name, train, validation, rates)


@dataclass(frozen=True)
class Batches:
    """The batches of a run, each a function of its position. `tokens`: unsigned [numel]; `sequences` of one step."""

    tokens: Tokens
    context: int
    sequences: int
    micro_batches: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_windows < self.sequences:
            raise UserError(
                f"the training text holds {self.num_windows} sequences of {self.context} tokens, "
                f"expected at least the {self.sequences} of one step: use more text, or a smaller model.context or "
                "batch.sequences"
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


def _add(digest: Any, document: Document) -> None:
    digest.update(f"{document.name}\0{len(document.content)}\0".encode() + document.content)


def _added(digest: Any, texts: Texts) -> Texts:
    """The documents, each of which is added to the digest when it is read."""

    def documents() -> Iterator[Document]:
        for document in texts():
            _add(digest, document)
            yield document

    return documents


def _write_tokens(folder: Path, texts: Texts, names: Mapping[str, Split | None], config: DataConfig) -> None:
    """Write `train.bin`, `validation.bin`, and bytes per token of both into `about.json`."""
    tokenizer = tokenizer_of(config)
    chosen = choose_validation([name for name, split in names.items() if split is None], config.validation_share)
    chosen |= {name for name, split in names.items() if split == "validation"}
    end = np.array([tokenizer.separator], tokenizer.dtype)
    written = {"train": [0, 0], "validation": [0, 0]}  # split -> tokens, bytes
    with open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as validation:
        for document in texts():
            tokens = tokenizer.encode(document.content)
            if len(names) == 1:  # a single text: its end is the validation split
                cut = len(tokens) - max(1, round(config.validation_share * len(tokens)))
                parts = {"train": tokens[:cut], "validation": tokens[cut:]}
            else:
                parts = {"validation" if document.name in chosen else "train": np.concatenate((tokens, end))}
            for split, part in parts.items():
                (train if split == "train" else validation).write(part.tobytes())
                written[split][0] += len(part)
                # A separator counts as one byte, so that a token of bytes is one byte.
                written[split][1] += (len(document.content) + 1) * len(part) // (len(tokens) + 1)
    if tokenizer.digest:
        rates = {split: num_bytes / max(1, num_tokens) for split, (num_tokens, num_bytes) in written.items()}
        (folder / _ABOUT).write_text(json.dumps({"bytes_per_token": rates}), encoding="utf-8")


def choose_validation(names: list[str], share: float) -> set[str]:
    """The files for validation: those whose path hashes below `share`, independent of the other files.

    If one of the splits would be empty, the file nearest to the border changes to it.
    """
    places = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64 for name in names}
    chosen = {name for name in names if places[name] < share}
    if not chosen and names:
        chosen = {min(names, key=places.__getitem__)}
    elif chosen and len(chosen) == len(names):
        chosen.remove(max(names, key=places.__getitem__))
    return chosen


def _map(path: Path, tokenizer: Tokenizer) -> Tokens:
    # numpy cannot map an empty file.
    return np.memmap(path, tokenizer.dtype, mode="r") if path.stat().st_size else np.zeros(0, tokenizer.dtype)


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "zeroshard"
    except RuntimeError as error:  # no HOME, and the user of the process is not in the list of users
        raise UserError(f"no home folder to keep the tokens in: name another one by --data.cache ({error})") from None
