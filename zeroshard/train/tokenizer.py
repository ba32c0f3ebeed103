"""Text to tokens and back: bytes, or a file of the `tokenizers` library, which `zeroshard tokenizer` makes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zeroshard.train.config import DataConfig, UserError

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
PIECE = 1 << 20
"""Bytes of text that are tokenized at once: a tokenizer needs many times that much memory."""

Tokens = npt.NDArray[Any]


class Tokenizer(Protocol):
    """How a run reads and writes text.

    Attributes:
        vocabulary: the number of tokens.
        separator: the token that follows each document.
        digest: identifies the tokenizer; "" for bytes.
        dtype: of stored tokens.
    """

    @property
    def vocabulary(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def dtype(self) -> Any: ...

    def encode(self, text: bytes) -> Tokens: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Each byte is a token; NUL follows each document."""

    vocabulary, separator, digest = 256, 0, ""
    dtype: Any = np.uint8

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FromFile:
    """A tokenizer from a `tokenizer.json`.

    Args:
        path: the file, or the folder that contains it.
        end_of_text: the token that follows each document; "": the first of the usual ones that the tokenizer has.

    Raises:
        UserError: the file cannot be read, or has no such token; or the library is missing.
    """

    def __init__(self, path: Path, end_of_text: str = "") -> None:
        self.path = path / "tokenizer.json" if path.is_dir() else path
        library = _library()
        try:
            content = self.path.read_bytes()
            self._tokenizer = library.Tokenizer.from_buffer(content)
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {self.path}: {error.strerror}") from None
        except Exception as error:  # the library raises plain `Exception`s
            raise UserError(f"{self.path} is not a file of the tokenizers library: {error}") from None
        self.digest = hashlib.sha256(content).hexdigest()
        known = self._tokenizer.get_vocab()
        self.vocabulary = max(known.values()) + 1
        self.dtype: Any = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        candidates = (end_of_text,) if end_of_text else _ENDS
        found = [name for name in candidates if name in known]
        if not found:
            raise UserError(
                f"{self.path} has no token {' or '.join(candidates)}: name the one that ends a document by "
                "--data.end_of_text"
            )
        self.end_of_text, self.separator = found[0], known[found[0]]

    def encode(self, text: bytes) -> Tokens:
        rows = [self._tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces(text)]
        return np.fromiter(itertools.chain.from_iterable(rows), self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The tokenizer of a run: bytes, unless the configuration names a file."""
    return FromFile(Path(config.tokenizer), config.end_of_text) if config.tokenizer else Bytes()


def pieces(text: bytes) -> Iterator[str]:
    """The text in pieces of about `PIECE` bytes, which end at line breaks where there are any."""
    first = 0
    while first < len(text):
        end = first + PIECE
        if end < len(text):
            end = text.rfind(b"\n", first, end) + 1 or end
            while end < len(text) and text[end] & 0xC0 == 0x80:  # not inside of a character
                end += 1
        yield text[first:end].decode()
        first = end


def train_tokenizer(texts: Iterable[bytes], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer (as GPT-2's) of at most `vocabulary` tokens for these texts: a `tokenizers.Tokenizer`.

    Each text can be encoded and decoded without loss, as each single byte is a token.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError:
        raise UserError("tokenizers other than bytes need pip install 'zeroshard[tokenizers]'") from None
    return tokenizers
