"""The configuration: refused values, the names in error messages, and round trips through a file."""

import errno
import os
from pathlib import Path

import pytest

from zeroshard.cli.main import _click_type
from zeroshard.io.whole import write_together, write_whole
from zeroshard.train.config import Config, ParallelConfig, UserError, check_divides, fields, resolve, with_values, write


def resolved(tmp_path: Path, text: str, **overrides: object) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return resolve([path], {key.replace("__", "."): value for key, value in overrides.items()})


def test_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    config = resolved(tmp_path, "[model]\nlayers = 2\nwidth = 64\n", model__layers=3)
    assert (config.model.layers, config.model.width) == (3, 64)
    assert config.optimizer == Config().optimizer


def test_later_files_win_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[model]\nlayers = 2\nwidth = 64")
    (tmp_path / "b.toml").write_text("[model]\nlayers = 5")
    config = resolve([tmp_path / "a.toml", tmp_path / "b.toml"], {})
    assert (config.model.layers, config.model.width) == (5, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nlayer = 3", "unknown configuration key 'model.layer'; did you mean 'model.layers'?"),
        ("layers = 3", "unknown configuration key 'layers'; did you mean 'model.layers'?"),
        ("[batch]\nwidth = 3", "unknown configuration key 'batch.width'; did you mean 'model.width'?"),
        ("[modle]\nlayers = 3", "unknown configuration key 'modle'; did you mean 'model'?"),
        ("[zzz]\nqqq = 3", "the sections are model, data,"),
        ("[model]\nlayers = '3'", "model.layers = '3': expected a valid integer"),
        ("[model]\nlayers = true", "model.layers = True: expected a valid integer"),
        ("[model]\nlayers = 0", "model.layers = 0: expected greater than or equal to 1"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan: expected a finite number"),
        ("[parallel]\nplan = 'zero4'", "parallel.plan = 'zero4': expected 'ddp', 'zero1', 'zero2' or 'zero3'"),
        ("[model]\nheads = 3", "model: width 256 does not split into 3 heads of even size: expected a multiple of 6"),
        ("[data]\nend_of_text = 'x'", "data: end_of_text is a token of the tokenizer, and the tokens are bytes"),
        (
            "[optimizer]\nloss_scale_growth = 9",
            "optimizer.loss_scale_growth = 9: there is no loss scale in fp32, unless",
        ),
        ("[run]\nkeep_every = 9", r"run.keep_every = 9: it keeps what is saved.*; set run.save_every"),
        ("model = 3", r"model = 3: expected a section, \[model\]"),
        ("[model", "is not TOML"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolved(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.toml")


def test_the_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[model]\nlayers = 0\n[run]\nseed = 1")
    (tmp_path / "b.toml").write_text("[run]\nseed = 2")
    (tmp_path / "c.toml").write_text("[model]\nwidth = 128\nheads = 5")
    for names, overrides, expected in (
        ("ab", {}, "a.toml: model.layers = 0: "),
        ("b", {"model.layers": 0}, "model.layers = 0: "),
        ("ab", {"model.layers": 0}, "model.layers = 0: "),
        ("bc", {}, "c.toml: model: width 128"),
        ("bc", {"model.heads": 3}, "model: width 128"),
    ):
        with pytest.raises(UserError) as caught:
            resolve([tmp_path / f"{name}.toml" for name in names], overrides)
        assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(expected)


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ('plan = "fsdp"', "plan", "zero3"),
        ("plan = 2", "plan", "zero2"),
        ('plan = "full_shard"', "plan", "zero3"),
        ('precision = "bf16-mixed"', "precision", "bf16"),
    ],
)
def test_names_of_other_libraries_are_known(tmp_path: Path, written: str, field: str, value: str) -> None:
    assert getattr(resolved(tmp_path, f"[parallel]\n{written}\n").parallel, field) == value
    on_the_command_line = _click_type(ParallelConfig.model_fields[field])
    assert on_the_command_line.convert(written.partition(" = ")[2].strip('"'), None, None) == value


@pytest.mark.parametrize("written", ['plan = "hybrid"', "plan = true", 'precision = "bf16-true"', "precision = 1.5"])
def test_other_names_are_refused_with_the_choices(tmp_path: Path, written: str) -> None:
    with pytest.raises(UserError, match=r"expected '(ddp|fp32)', "):
        resolved(tmp_path, f"[parallel]\n{written}\n")


def test_a_value_in_the_place_of_a_section_is_refused_beside_options(tmp_path: Path) -> None:
    """It was a TypeError, with its traceback."""
    with pytest.raises(UserError, match=r"config\.toml: run = 3: expected a section, \[run\]"):
        resolved(tmp_path, "run = 3", run__out="a")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the configuration .*: No such file"):
        resolve([tmp_path / "absent.toml"], {})


def test_written_configuration_gives_itself_back(tmp_path: Path) -> None:
    config = resolve([], {"parallel.nproc": 3, "model.tied": True, "evaluation.prompt": 'a "quoted"\nprompt'})
    write(config, tmp_path / "config.toml")
    assert resolve([tmp_path / "config.toml"], {}) == config
    assert list(tmp_path.iterdir()) == [tmp_path / "config.toml"]


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """The run's own configuration could not be written: it is UTF-8."""
    name = os.fsdecode(b"r\xff")
    for key in ("run.out", "data.path", "model.config"):
        with pytest.raises(UserError, match=rf"^{key}: expected text in UTF-8, found b'r\\xff': "):
            resolve([], {key: name})
    with pytest.raises(UserError, match=r"^run\.out: expected text in UTF-8"):
        with_values(resolve([], {}), run={"out": name})
    assert resolve([], {"run.out": "r\u00fc\U0001f600"}).run.out == "r\u00fc\U0001f600"


def test_a_configuration_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write(resolve([], {}), tmp_path / "config.toml")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_file_is_written_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page, a plan file or a tokenizer on a full disk was left in half, also where there had been a good one."""
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    write_whole(link, "one")
    assert link.is_symlink() and path.read_text() == "one"
    with pytest.raises(OSError, match="No space"):
        write_whole(Path("/dev/full"), "to a device it is written directly")
    assert not Path("/dev/full").is_file()
    reader, writer = os.pipe()
    write_whole(Path(f"/dev/fd/{writer}"), "one")
    assert os.read(reader, 10) == b"one"
    os.close(reader), os.close(writer)

    def fills_up(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(b"tw")
        if text == "two":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fills_up)
    with pytest.raises(OSError, match=f"'{path}'"):
        write_whole(path, "two")
    with pytest.raises(OSError, match=f"'{path}'"):  # and of several files none
        write_together({tmp_path / "another": "one", path: "two"})
    assert path.read_bytes() == b"one" and {*tmp_path.iterdir()} == {path, link}


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, the lines of metrics that a resumed run had kept could be an empty file."""
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, os.fstat(file).st_size)))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (synced.append((-1, 0)), replace(a, b)))
    write_together({tmp_path / "a": "one", tmp_path / "b": "other"})
    files = [(path.stat().st_ino, path.stat().st_size) for path in (tmp_path / "a", tmp_path / "b")]
    assert synced == [*files, (-1, 0), (-1, 0)] and [size for _, size in files] == [3, 5]


def test_every_field_has_help() -> None:
    assert [name for name, info in fields() if not info.description] == []


def test_batch_must_divide_over_ranks_and_micro_batches() -> None:
    config = resolve([], {"batch.sequences": 25, "batch.micro_batches": 3, "parallel.nproc": 2})
    with pytest.raises(UserError, match=r"does not divide over 2 ranks x 3 micro-batches.* multiple of 6.* 24 or 30"):
        check_divides(config)
    check_divides(with_values(config, batch={"sequences": 30}))
