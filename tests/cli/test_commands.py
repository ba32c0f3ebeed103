"""The commands for checkpoints. (`test_installed.py` runs them without the packages that only the trainer needs.)"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.checkpoint.common import Awkward, Kind, Run, muon_and_adamw, read_all, same_bits, seed_all
from zeroshard.checkpoint import CheckpointError, newest_good
from zeroshard.cli.main import run
from zeroshard.cli.terminal import table
from zeroshard.errors import AlreadyExists
from zeroshard.exchange import export
from zeroshard.io.refused import in_words
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1, 2 and 3 of two ranks."""
    directory = tmp_path_factory.mktemp("saved")

    def check(rank: int) -> None:
        seed_all(rank)
        one = Run(rank, "zero3", "fp32", Kind(Awkward, groups=muon_and_adamw))
        for step in range(3):
            one.train(range(step, step + 1)).save(directory, step + 1)

    run_ranks(check, 2)
    return directory


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run the command; returns its output or, where `code` is not 0, its error, which must be one line."""
    found = run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert found == code, f"{found}: {out}{err}"
    if not code:
        assert err == ""
        return out
    assert err.startswith("zeroshard: error: ") and err.count("\n") == 1
    return err


def test_inspect(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "inspect", saved)
    assert f"{saved}/step-3: step 3, id " in text and "of 2 ranks" in text
    for words in ("rank-00001.safetensors", "Muon", "AdamW", "tied: head.weight is embed.weight", "extra: scheduler"):
        assert words in text
    assert "model/embed.weight" not in text and "model/embed.weight" in said(capsys, "inspect", saved, "--tensors")
    found = json.loads(said(capsys, "inspect", saved / "step-2", "--json", "--tensors"))
    manifest = json.loads((saved / "step-2" / "manifest.json").read_text())
    assert (found["step"], found["digest"]) == (2, manifest["digest"]) and found["world_size"] == 2
    assert [group["class"] for group in found["optimizers"][0]] == ["Muon", "AdamW", "AdamW"]
    assert found["optimizers"][0][0]["options"]["lr"] == pytest.approx(0.007)  # the scheduler's
    assert (
        sum(kind["tensors"] for kind in found["kinds"]) == len(found["tensors"]) == len(manifest["manifest"]["tensors"])
    )
    values = read_all(saved / "step-2")
    of_model = sum(kind["bytes"] for kind in found["kinds"] if kind["kind"] == "model")
    assert of_model == sum(value.nbytes for name, value in values.items() if name.startswith("model/"))
    assert found["tensors"]["model/embed.weight"]["shape"] == list(values["model/embed.weight"].shape)
    assert json.loads(said(capsys, "inspect", saved, "--step", 1, "--json"))["step"] == 1


def test_verify(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shutil.copytree(saved, tmp_path / "run")
    assert "step-3: whole" in said(capsys, "verify", directory)
    assert said(capsys, "verify", directory, "--all").count(": whole; ") == 3
    with pytest.raises(CheckpointError, match=r"does not exist: .* directory of the steps \[1, 2, 3\]: name .*/step-3"):
        export(directory, tmp_path / "out")
    path = directory / "step-2" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said(capsys, "verify", directory)
    assert "rank-00001.safetensors is damaged" in said(capsys, "verify", directory, "--step", 2, code=1)
    assert run(["verify", str(directory), "--all"]) == 1
    out, err = capsys.readouterr()
    assert out.count(": whole; ") == 2 and "step-2: damaged; " in out and "1 damaged: step-2" in err
    (directory / "step-1" / "manifest.json").write_text("{}")
    for command in (["inspect", directory, "--step", 1], ["verify", directory / "step-1"],
                    ["export", directory / "step-1", tmp_path / "out"]):  # fmt: skip
        assert "step-1/manifest.json is not a manifest that zeroshard wrote" in said(capsys, *command, code=1)
    (directory / "latest").write_text("step-3 x\n")
    assert "latest is damaged" in said(capsys, "inspect", directory, code=1)


def test_a_step_without_its_manifest_is_damaged(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify --all` did not mention it, and the latest step was silently another one."""
    directory = shutil.copytree(saved, tmp_path / "run")
    (directory / "step-3" / "manifest.json").unlink()
    assert run(["verify", str(directory), "--all"]) == 1
    out, err = capsys.readouterr()
    assert out.count(": whole; ") == 2 and "step-3: damaged; " in out and "1 damaged: step-3" in err
    assert "latest names step-3, which has no manifest.json" in said(capsys, "inspect", directory, code=1)
    for command in (["inspect", directory / "step-3"], ["verify", directory / "step-3"]):
        assert "step-3/manifest.json does not exist, and the step cannot be read" in said(capsys, *command, code=1)
    told = "holds no step 3 (its folder has no manifest.json); it has the steps [1, 2]"
    assert told in said(capsys, "inspect", directory, "--step", 3, code=1)
    assert said(capsys, "prune", directory, "--keep-last", 1, "--dry-run") == "would remove step-1\n"
    manifest, problems = newest_good(directory)
    assert manifest is not None and manifest.step == 2 and len(problems) == 1
    (directory / "latest").unlink()  # as in the middle of a copy
    assert newest_good(directory)[1] == problems
    for step in (1, 2):
        (directory / f"step-{step}" / "manifest.json").unlink()
    for command in (["inspect", directory], ["verify", directory], ["export", directory, tmp_path / "out"]):
        assert "holds no checkpoint: step-3 has no manifest.json" in said(capsys, *command, code=1)
    assert len(newest_good(directory)[1]) == 3
    assert run(["verify", str(directory), "--all"]) == 1
    assert "3 damaged: step-1, step-2, step-3" in capsys.readouterr().err
    for command in (["verify", directory / "step-3", "--all"], ["prune", directory / "step-3", "--keep-last", 1]):
        assert "step-3 is one step already: name its parent" in said(capsys, *command, code=2)


def test_errors_of_the_system_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for call, expected in (
        (lambda: (tmp_path / "file").mkdir(), f"{tmp_path}/file is a file: expected a folder"),
        (lambda: (tmp_path / "file" / "a").write_text("x"), f"{tmp_path}/file is a file: expected a folder"),
        (lambda: (tmp_path / "folder").mkdir(), f"{tmp_path}/folder exists already"),
        (lambda: (tmp_path / "folder").read_text(), f"{tmp_path}/folder is a folder: expected a file"),
        (lambda: (tmp_path / "none").read_text(), f"there is no {tmp_path}/none"),
        (lambda: (tmp_path / "none" / "a").write_text("x"), f"there is no {tmp_path}/none"),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert in_words(caught.value) == expected
    refused = PermissionError(errno.EACCES, "Permission denied", "x")
    assert in_words(refused) == "no permission to read or write x"
    assert in_words(OSError(errno.EIO, "Input/output error", "x")) == "x: Input/output error"
    assert in_words(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert in_words(AlreadyExists("run holds step 7 already")) == "run holds step 7 already"


def test_export_and_import_again(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    text = said(capsys, "export", saved, out, "--step", 2)
    assert text == (
        f"{out}/model.safetensors: {(out / 'model.safetensors').stat().st_size:,} bytes\n"
        "tied to others, and written once (--copies writes each name): head.weight\n"
    )
    state = {name[6:]: value for name, value in read_all(saved / "step-2").items() if name.startswith("model/")}
    assert same_bits(load_file(out / "model.safetensors"), state)
    assert "holds model.safetensors already (--force" in said(capsys, "export", saved, out, code=2)
    save_file({"big": torch.tensor([1e6])}, tmp_path / "big.safetensors")
    said(capsys, "import", tmp_path / "big.safetensors", tmp_path / "big", "--step", 0)
    assert "too large" in said(capsys, "export", tmp_path / "big", tmp_path / "half", "--dtype", "fp16", code=2)
    split = said(capsys, "export", saved, out, "--force", "--max-file-size", "1kb", "--dtype", "bf16", "--copies")
    assert "model-00002-of-0" in split and split.endswith(
        f"{(out / 'model.safetensors.index.json').stat().st_size:,} bytes\n"
    )
    text = said(capsys, "import", out, tmp_path / "run", "--step", 7)
    assert re.fullmatch(rf"{tmp_path}/run/step-7: tensors: \d+ model\n", text)
    assert "holds step 7 already" in said(capsys, "import", out, tmp_path / "run", "--step", 7, code=2)
    said(capsys, "export", saved, out, "--force")
    said(capsys, "import", out / "model.safetensors", tmp_path / "run", "--step", 7, "--force")
    assert "step-7: whole" in said(capsys, "verify", tmp_path / "run")
    (out / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "no safetensors file" in said(capsys, "import", out, tmp_path / "run", "--step", 8, code=1)


def test_files_that_have_been_cut_off_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, whole = tmp_path / "model.safetensors", tmp_path / "whole"
    save_file({"a": torch.ones(100, 10), "b": torch.ones(50)}, source)
    data = source.read_bytes()
    dcp.save({"model": {"a": torch.ones(100, 10)}}, checkpoint_id=whole, no_dist=True)
    for size in (0, 4, 50, 400, len(data) - 1):
        source.write_bytes(data[:size])
        text = said(capsys, "import", source, tmp_path / "run", "--step", 1, code=1)
        assert f"at byte {size}" in text and "it has been cut off" in text
    for name, sizes in ((".metadata", (0, 100)), ("__0_0.distcp", (0, 100, 2000))):
        for size in sizes:
            folder = tmp_path / f"{name}-{size}"
            shutil.copytree(whole, folder)
            os.truncate(folder / name, size)
            command = ["import", folder, tmp_path / "run", "--step", 1, "--allow-pickle"]
            assert "has been cut off" in said(capsys, *command, code=1)
    source.write_bytes(data)
    said(capsys, "import", source, tmp_path / "run", "--step", 1)  # whole again


def test_writes_that_fail_are_no_damage(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, source)
    command = ["import", source, tmp_path / "run", "--step", 1]
    (tmp_path / "file").write_text("x")
    text = said(capsys, "import", source, tmp_path / "file" / "run", "--step", 1, code=2)
    assert f"{tmp_path}/file is a file: expected a folder" in text
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.checkpoint.files.free_bytes", lambda folder: 0)
        assert "has 0 bytes free" in said(capsys, *command, code=2)
    assert not (tmp_path / "run").exists()
    for call in ("zeroshard.checkpoint.commit.write_with_index", "zeroshard.checkpoint.files.write_new"):
        with monkeypatch.context() as patch:
            patch.setattr(call, _is_full)
            assert "step 1 was not saved: " in said(capsys, *command, code=2)
    assert not (tmp_path / "run").exists()
    for kind in ("safetensors", "dcp"):
        out = tmp_path / "new" / kind
        with monkeypatch.context() as patch:
            patch.setattr("zeroshard.checkpoint.files.write", _is_full)
            text = said(capsys, "export", saved, out, "--format", kind, code=2)
        assert f"error: {out}/" in text and text.endswith(": No space left on device\n")
        assert not out.parent.exists()
    made = tmp_path / "made" / "t.json"
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.cli.tokenizer.write_whole", _is_full)
        said(capsys, "tokenizer", made, "--data", __file__, "--vocabulary", 257, code=2)
    said(capsys, "plan", "tests.kit:Net", "--save", tmp_path / "plan.json")
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.report.page.write_together", _is_full)
        said(capsys, "report", tmp_path / "plan.json", "--svg", made.parent, code=2)
    assert not made.parent.exists()
    if os.geteuid() or Path("/proc").is_dir():
        assert "there is no /proc/none" in said(capsys, "tokenizer", "/proc/none/t.json", "--data", __file__, code=2)


def _is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_dcp_needs_a_word(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "export", saved, tmp_path / "dcp", "--format", "dcp")
    found = {"model": {"embed.weight": torch.zeros_like(read_all(saved / "step-3")["model/embed.weight"])}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(found["model"]["embed.weight"], read_all(saved / "step-3")["model/embed.weight"])
    command = ["import", tmp_path / "dcp", tmp_path / "run", "--step", 0]
    assert "with --allow-pickle" in said(capsys, *command, code=2)
    assert not (tmp_path / "run").exists()
    misspelt = said(capsys, *command, "--allow-pickle", "--optimizer-class", "AdmaW", code=2)
    assert "unknown optimizer 'AdmaW'" in misspelt and "did you mean AdamW?" in misspelt
    assert not (tmp_path / "run").exists()
    text = said(capsys, *command, "--allow-pickle", "--optimizer-class", "muon")
    groups = json.loads(said(capsys, "inspect", tmp_path / "run", "--json"))["optimizers"][0]
    assert {group["class"] for group in groups} == {"Muon"}
    assert "optimizer" in text and "left out" not in text
    said(capsys, "export", saved, tmp_path / "bare", "--format", "dcp", "--no-optimizer", "--model-key", "")
    again = ["import", tmp_path / "bare", tmp_path / "run", "--step", 1, "--allow-pickle"]
    text = said(capsys, *again, code=1)
    assert "has no tensor under 'model'" in text and "(--model-key)" in text
    said(capsys, *again, "--model-key", "")
    first, second = (read_all(tmp_path / "run" / f"step-{step}") for step in (0, 1))
    assert same_bits({k: v for k, v in first.items() if k.startswith("model/")}, second)
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x04cposix\nsystem\n.")
    assert "names 'posix.system'" in said(capsys, *command, "--allow-pickle", "--force", code=1)


def test_a_narrow_terminal_breaks_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    rows = [
        ("zero3", 1_000_000, "12.3 GB", "too much"),
        ("a name that is long", 2, "4 GB", "a reason in several words"),
    ]
    table(("plan", "elements", "in all", "why"), rows)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "plan         elements  in all",
        "zero3       1,000,000  12.3 GB",
        "a name              2  4 GB",
        "that is",
        "long",
        "",
        "plan        why",
        "zero3       too much",
        "a name      a reason in",
        "that is     several words",
        "long",
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    table(("plan", "elements", "in all", "why"), rows)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_names_do_not_reach_the_terminal_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a\x1b]0;owned\x07\n[red]b": torch.ones(1)}, tmp_path / "model.safetensors")
    said(capsys, "import", tmp_path, tmp_path / "run", "--step", 0)
    text = said(capsys, "inspect", tmp_path / "run", "--tensors")
    assert r"model/a\x1b]0;owned\x07\n[red]b" in text and "\x1b" not in text
    (tmp_path / "run" / "step-0" / "rank-00000.safetensors").unlink()
    assert "\x1b" not in said(capsys, "export", tmp_path / "run", tmp_path / "out", code=1)


def test_prune(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shutil.copytree(saved, tmp_path / "run")
    (directory / "step-9.tmp-0123abcd").mkdir()
    before = sorted(os.listdir(directory))
    options = ["--keep-last", 1, "--keep-every", 2]
    assert said(capsys, "prune", directory, *options, "--dry-run") == "would remove step-1\n"
    assert sorted(os.listdir(directory)) == before
    assert said(capsys, "prune", directory, *options) == "removed step-1\n"
    assert sorted(os.listdir(directory)) == ["latest", "step-2", "step-3"]
    assert said(capsys, "prune", directory, *options) == "removed nothing\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect /nowhere", "/nowhere is not a checkpoint, and contains none: there is no such folder"),
        ("verify {}/.. --all", "holds no checkpoint: expected the folder of one run, such as {}/../"),
        ("prune {}/.. --keep-last 1", "holds no checkpoint: expected the folder of one run, such as {}/../"),
        ("inspect {}/..", "and contains none: expected a step, or the folder of one run, such as {}/../"),
        ("inspect /nowhere/step-3", "there is no folder /nowhere/step-3"),
        ("verify {} --step 9", "holds no step 9; it has the steps [1, 2, 3]"),
        ("verify {}/step-2 --step 1", "--step 1: {}/step-2 is one step already"),
        ("verify /nowhere --all", "/nowhere holds no checkpoint: there is no such folder"),
        ("verify {}/step-2 --all", "{}/step-2 is one step already: name its parent"),
        ("prune {}/step-2 --keep-last 1", "{}/step-2 is one step already: name its parent"),
        ("export {} {}/step-2", "{}/step-2 holds checkpoints: name another folder"),
        ("export {} {} --format dcp", "{} holds checkpoints: name another folder"),
        ("export {} {}/latest/out", "{}/latest is a file: expected a folder"),
        ("inspect {} --tensor", "unknown option --tensor; did you mean --tensors?"),
        ("export {} /proc/none", "there is no /proc/none"),
        ("export {} /tmp/x --max-file-size many", "'many' is not a size"),
        ("export {} /tmp/x --max-file-size 0", "'0' is not a size"),
        ("export {} /tmp/x/model.safetensors", "looks like a file: expected a folder"),
        ("export {} /tmp/x --no-optimizer", "go with --format dcp"),
        ("export {} /tmp/x --format dcp --copies", "go with --format safetensors"),
        ("export {} /tmp/x --dtype int8", "'int8' is not one of 'stored', 'fp32', 'bf16', 'fp16'"),
        ("import /nowhere {}", "Missing option '--step'"),
        ("import /nowhere {} --step 1", "there is no /nowhere"),
        ("import {} {} --step -1", "-1 is not in the range x>=0"),
        ("prune {}", "Missing option '--keep-last'"),
        ("prune {} --keep-last 0", "0 is not in the range x>=1"),
        ("prune /nowhere --keep-last 1", "/nowhere holds no checkpoint: there is no such folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    saved: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert message.replace("{}", str(saved)) in said(capsys, *arguments.replace("{}", str(saved)).split(), code=2)
