"""The commands of pages that need only a model's configuration: plans, and pictures of plans. (`make test-everything`
runs them for the model of the page, and compares the table.)"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.test_commands import said
from tests.documents.test_will_it_fit import configuration
from tests.grids import EVERYTHING
from tests.house.pages import COMMANDS, ROOT, commands

OWN_MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))

def inputs(sequences, tokens):
    return torch.zeros(sequences, tokens or 7, dtype=torch.long)
"""


@pytest.mark.filterwarnings("ignore")  # warnings of transformers
@pytest.mark.parametrize("page", ["docs/memory.md", "docs/report.md"])
def test_the_commands_run(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("config.json").write_text(configuration())
    Path("mine.py").write_text(OWN_MODEL)
    (pattern,) = (
        pattern for pattern, where in COMMANDS.items() if where == "tests/documents/test_commands_of_pages.py"
    )
    of_page = [command for command in commands(page) if re.fullmatch(pattern, f"{page}: {command}")]
    assert len(of_page) >= 3
    for command in of_page:
        found = said(capsys, *shlex.split(command)[1:])
        assert found, command
    if page.endswith("report.md"):
        assert "<svg" in Path("plan.html").read_text() and list(Path("pictures").glob("*.svg"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not EVERYTHING, reason="takes ten seconds: make test-everything")
def test_the_table_of_the_page_about_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the table in two parts, and the line below it in several."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(configuration())
    page = (ROOT / "docs/memory.md").read_text()
    pattern = r"    zeroshard (plan config\.json --ranks 8 --precision bf16)\n\n(.*?)\n\n\S"
    [(command, shown)] = re.findall(pattern, page, re.DOTALL)
    found = [line.split() for line in said(capsys, *command.split()).splitlines()]
    lines = [line.split() for line in shown.splitlines() if line.startswith("    ")]
    first, left, right, outside = lines[0], lines[1:6], lines[6:11], lines[11:]
    both = [[*a[:-1], *b[1:]] for a, b in zip(left, right, strict=True)]
    assert [first, *both, [word for line in outside for word in line]] == [line for line in found if line]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not EVERYTHING, reason="takes ten seconds: make test-everything")
def test_the_hint_of_the_page_about_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(configuration())
    page = (ROOT / "docs/plans.md").read_text()
    [(command, shown)] = re.findall(
        r"`zeroshard (plan config\.json [^`]*)` ends with:\n\n```text\n(.*?)```", page, re.DOTALL
    )
    assert shown.split() == said(capsys, *command.split()).splitlines()[-1].split()
