"""From text to batches: which files are text, the split into training and validation, and the batches of each rank."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.train import data
from zeroshard.train.config import DataConfig, UserError
from zeroshard.train.data import (
    Batches,
    Corpus,
    choose_validation,
    open_corpus,
    permuted,
    prepare,
    validation_windows,
)
from zeroshard.train.tokenizer import Bytes, pieces, tokenizer_of, train_tokenizer


def data_at(path: Path | str, tmp_path: Path, **values: float) -> DataConfig:
    return DataConfig(path=str(path), cache=str(tmp_path / "cache"), **values)


def corpus_of(config: DataConfig) -> Corpus:
    return open_corpus(prepare(config), tokenizer_of(config))


def batches(numel: int = 4000, context: int = 8, sequences: int = 12, micro_batches: int = 2, seed: int = 0) -> Batches:
    tokens = np.arange(numel, dtype=np.uint32).view(np.uint8)[:numel]
    return Batches(tokens, context, sequences, micro_batches, seed)


def test_standard_library_is_the_default_text(tmp_path: Path) -> None:
    corpus = corpus_of(data_at("", tmp_path))
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.3
    assert isinstance(corpus.train, np.memmap)


def test_split_is_by_file_and_covers_all_text(text_folder: Path, tmp_path: Path) -> None:
    corpus = corpus_of(data_at(text_folder, tmp_path, validation_share=0.25))
    sides = [bytes(side).split(b"\0")[:-1] for side in (corpus.train, corpus.validation)]
    assert all(sides)
    found = sorted(text for side in sides for text in side)
    assert found == sorted(path.read_bytes() for path in text_folder.iterdir())


def test_split_of_a_file_does_not_depend_on_the_others() -> None:
    names = [f"file {index}" for index in range(200)]
    chosen = choose_validation(names, 0.1)
    assert 5 < len(chosen) < 45
    assert choose_validation(names[:150], 0.1) == chosen & set(names[:150])


@given(st.sets(st.text(max_size=8), min_size=2, max_size=9), st.floats(1e-9, 1, exclude_max=True))
def test_neither_side_is_empty(names: set[str], share: float) -> None:
    assert 0 < len(choose_validation(sorted(names), share)) < len(names)


def test_single_file_keeps_its_end_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    corpus = corpus_of(data_at(tmp_path / "a.txt", tmp_path, validation_share=0.1))
    assert bytes(corpus.train) == b"0123456789" * 9
    assert bytes(corpus.validation) == b"0123456789"


def test_folder_of_tokens_is_named_by_the_text(text_folder: Path, tmp_path: Path) -> None:
    config = data_at(text_folder, tmp_path)
    first = prepare(config)
    assert prepare(config) == first
    (text_folder / "module_00.py").write_text("changed\n")
    assert prepare(config) != first
    assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []


def test_what_is_not_text_is_left_out_of_a_folder(text_folder: Path, tmp_path: Path) -> None:
    first = corpus_of(data_at(text_folder, tmp_path))
    (text_folder / "picture.png").write_bytes(b"\x89PNG\r\n\xff\xfe")
    (text_folder / "zeros.bin").write_bytes(b"\0" * 100)
    (text_folder / ".hidden").write_text("hidden")
    (text_folder / "empty.txt").write_text("")
    assert corpus_of(data_at(text_folder, tmp_path)).digest == first.digest


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens were kept under the digest of the text before the change, and each later run trained on them."""
    text, write = tmp_path / "log.txt", data._write_tokens
    text.write_text("first line\n" * 100)

    def changed(*arguments: Any) -> None:
        text.write_text("other line\n" * 100)
        write(*arguments)

    config = DataConfig(path=str(text), cache=str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_tokens", changed)
        with pytest.raises(UserError, match=r"log\.txt has changed while it was read"):
            prepare(config)
    assert os.listdir(tmp_path / "cache") == []
    text.write_text("first line\n" * 100)
    assert bytes(open_corpus(prepare(config), Bytes()).train[:10]) == b"first line"


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed for good, as large as the text. What a process that runs is writing stays, and another machine's."""
    (tmp_path / "text").write_text("a text\n" * 100)
    config = DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))
    (tmp_path / "cache" / ".partial-of-another-machine").mkdir(parents=True)
    write = data._write_tokens
    if (child := os.fork()) == 0:
        monkeypatch.setattr(data, "_write_tokens", lambda *_: os._exit(7))
        try:
            prepare(config)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    def partial() -> list[str]:
        return sorted(path.name for path in (tmp_path / "cache").glob(".partial-*"))

    def write_beside(*arguments: Any) -> None:
        assert len(partial()) == 2, "that of the killed process is gone"
        monkeypatch.setattr(data, "_write_tokens", write)
        prepare(config)  # as another process may
        assert len(partial()) == 2
        write(*arguments)

    assert len(partial()) == 2
    monkeypatch.setattr(data, "_write_tokens", write_beside)
    prepare(config)
    assert partial() == [".partial-of-another-machine"]


def test_a_cache_in_the_text_is_refused(tmp_path: Path) -> None:
    """The tokens of a run were text of the next one, which was another text then, and could not be resumed."""
    text = tmp_path / "alone"
    text.mkdir()
    (text / "one.txt").write_text("some text\n" * 100)
    with pytest.raises(UserError, match="lies in the text"):
        prepare(DataConfig(path=str(text), cache=str(text / "cache")))
    hidden = DataConfig(path=str(text), cache=str(text / ".cache"))
    assert prepare(hidden) == prepare(hidden)
    assert sorted(os.listdir(text)) == [".cache", "one.txt"]


def test_a_user_without_a_home_names_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under any number: it ended with a traceback."""
    (tmp_path / "text").write_text("word " * 100)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)  # nobody's
    with pytest.raises(UserError, match="no home folder to keep the tokens in: name another one by"):
        prepare(DataConfig(path=str(tmp_path / "text")))
    assert prepare(DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))).is_dir()


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no text at .*absent: expected a UTF-8 file or a folder"):
        prepare(data_at(tmp_path / "absent", tmp_path))
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.txt is not UTF-8 text: byte 0xef at 2"):
        prepare(data_at(tmp_path / "latin.txt", tmp_path))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"no UTF-8 text in .*nothing"):
        prepare(data_at(tmp_path / "nothing", tmp_path))
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(UserError, match=r"cannot write the tokens into .*text.txt is a file: expected a folder"):
        prepare(DataConfig(path=str(tmp_path / "text.txt"), cache=str(tmp_path / "text.txt")))
    for path in ("", str(tmp_path / "text.txt")):  # the column was ignored
        with pytest.raises(UserError, match=r"data.column = 'body' is a column of a saved data set, which .* is not"):
            prepare(DataConfig(path=path, column="body", cache=str(tmp_path)))


def test_tokens_of_a_tokenizer_hold_the_same_text(text_folder: Path, tmp_path: Path) -> None:
    plain = data_at(text_folder, tmp_path, validation_share=0.25)
    texts = [path.read_bytes() for path in text_folder.iterdir()]
    train_tokenizer(texts, 400).save(str(tmp_path / "tokenizer.json"))
    config = plain.model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json")})
    tokenizer, corpus, of_bytes = tokenizer_of(config), corpus_of(config), corpus_of(plain)
    assert (tokenizer.vocabulary, corpus.train.dtype, corpus.digest != of_bytes.digest) == (400, np.uint16, True)
    assert of_bytes.bytes_per_token == {"train": 1.0, "validation": 1.0}
    for split, tokens, plain_tokens in (
        ("train", corpus.train, of_bytes.train),
        ("validation", corpus.validation, of_bytes.validation),
    ):
        whole = tokenizer.decode(tokens.tolist()).replace("<|endoftext|>", "\0")
        assert whole == bytes(plain_tokens).decode()
        assert len(tokens) < len(plain_tokens) / 2
        assert corpus.bytes_per_token[split] == pytest.approx(len(plain_tokens) / len(tokens), rel=1e-3)  # type: ignore[index]


def test_pieces_of_a_long_text_are_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.train.tokenizer.PIECE", 7)
    for text in ("one\ntwo\n\nthree four", "äöü" * 9, "", "\n"):
        found = list(pieces(text.encode()))
        assert "".join(found) == text
        assert all(0 < len(piece.encode()) <= 8 for piece in found)


def test_bad_tokenizers(tmp_path: Path) -> None:
    def refused(content: str | None, **values: str) -> str:
        path = tmp_path / "tokenizer.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError) as caught:
            tokenizer_of(DataConfig(tokenizer=str(path), **values))
        return str(caught.value)

    made = train_tokenizer([b"a text"], 257)
    assert "cannot read the tokenizer" in refused(None)
    assert "is not a file of the tokenizers library" in refused("{}")
    assert "has no token <end>: name the one" in refused(made.to_str(), end_of_text="<end>")
    unknown = made.to_str().replace("<|endoftext|>", "<unusual>")
    assert "has no token <|endoftext|> or " in refused(unknown)
    assert tokenizer_of(DataConfig(tokenizer=str(tmp_path), end_of_text="<unusual>")).separator == 0


@pytest.mark.filterwarnings("ignore")
def test_saved_data_sets(tmp_path: Path) -> None:
    """One with splits of its own, and one whose rows are divided by their numbers."""
    datasets = pytest.importorskip("datasets")
    rows = [f"text number {index}" for index in range(40)]
    one = datasets.Dataset.from_dict({"text": [*rows, "", "with\0zero", None], "label": list(range(43))})
    one.save_to_disk(str(tmp_path / "one"))
    parts = {"train": one.select(range(30)), "test": one.select(range(30, 35)), "validation": one.select(range(35, 40))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "parts"))
    del parts["train"]
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "untrained"))

    def both(name: str) -> list[list[str]]:
        corpus = corpus_of(data_at(tmp_path / name, tmp_path, validation_share=0.25))
        return [bytes(side).decode().split("\0")[:-1] for side in (corpus.train, corpus.validation)]

    train, validation = both("one")
    assert sorted(train + validation) == sorted(rows) and 2 < len(validation) < 20
    assert both("parts") == [rows[:30], rows[35:]]
    for name, values, message in (
        ("one", {"column": "label"}, "column 'label' has a int: expected text"),
        ("one", {"column": "texts"}, r"has no column 'texts': name one of \['text', 'label'\]"),
        ("untrained", {}, "has the splits test, validation: expected one that is called train"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(data_at(tmp_path / name, tmp_path).model_copy(update=values))


@given(st.integers(1, 300), st.integers(0, 5))
def test_permutation_is_one(size: int, key: int) -> None:
    assert sorted(permuted(place, size, str(key)) for place in range(size)) == list(range(size))


def test_permutation_depends_on_its_key_and_mixes() -> None:
    first, second = ([permuted(place, 1000, key) for place in range(1000)] for key in ("a", "b"))
    assert first != second
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(first))
    assert neighbours < 20


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_step_is_split_without_overlap_and_alike_for_every_world_size(
    world_size: int, micro_batches: int
) -> None:
    whole = batches(micro_batches=1)
    split = batches(micro_batches=micro_batches)
    for step in (0, 1, 40, 41, 42, 1000):
        parts = [split.windows(step, m, rank, world_size) for m in range(micro_batches) for rank in range(world_size)]
        flat = [window for part in parts for window in part]
        assert len(set(flat)) == len(flat) == 12
        assert flat == whole.windows(step, 0, 0, 1)


def test_an_epoch_meets_no_window_twice_and_the_next_has_another_order() -> None:
    data = batches()
    steps = data.num_windows // 12
    epochs = [[w for s in range(e * steps, (e + 1) * steps) for w in data.windows(s, 0, 0, 1)] for e in (0, 1)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != [w for s in range(steps) for w in batches(seed=1).windows(s, 0, 0, 1)]


def test_targets_are_the_tokens_that_follow() -> None:
    data = batches()
    tokens, targets = data.read(3, 1, 1, 2)
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for row, window in zip(targets, data.windows(3, 1, 1, 2), strict=True):
        assert row.tolist() == data.tokens[window * 8 + 1 : window * 8 + 9].tolist()


def test_too_little_text() -> None:
    few = r"the training text holds 11 sequences of 8 tokens, expected at least the 12 .*model\.context or"
    with pytest.raises(UserError, match=few):
        batches(numel=96)
    with pytest.raises(UserError, match=r"the validation text holds 2.*expected at least one for each rank"):
        validation_windows(np.zeros(20, np.uint8), context=8, wanted=5, world_size=3)


def test_validation_windows_are_spread_and_alike_for_every_world_size() -> None:
    tokens = np.zeros(8001, np.uint8)
    windows = validation_windows(tokens, context=8, wanted=12, world_size=1)
    assert windows == validation_windows(tokens, context=8, wanted=12, world_size=3)
    assert len(set(windows)) == 12
    assert windows[-1] > 900
    assert len(validation_windows(tokens, context=8, wanted=13, world_size=2)) == 12
