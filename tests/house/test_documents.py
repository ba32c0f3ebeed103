"""What README and the pages link to or name exists. Every block of code is run by a test, or is marked with the reason
why not."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import zeroshard
from tests.house import pages
from tests.house.pages import (
    COMMANDS,
    CONTINUES,
    DOCS,
    NOT_CODE,
    OWN,
    PAGES,
    ROOT,
    blocks,
    commands,
    names_of_pages,
    sides_of_the_readmes_diff,
    transcript,
)


def test_every_block_is_run_or_says_why_not() -> None:
    run = {"README.md", "CONTRIBUTING.md", *CONTINUES, *OWN}
    for page in names_of_pages(PAGES):
        for block in blocks(page):
            where = f"{page}: {block.text[:60]!r}"
            assert block.language, f"{where} has no language"
            if re.search(r"^\$ ", block.text, re.MULTILINE):
                assert block.language == "console", f"{where} shows commands: its language is console"
                continue  # its commands are found below
            if block.language == "python" or (block.language == "diff" and page.startswith("docs/moving")):
                assert page in run or not block.is_run, where
            elif block.language not in NOT_CODE:
                assert not block.is_run, f"{where}: a block of {block.language} is not run here: say why, in a mark"
        text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"))
        assert "```" not in text, f"{page}: a block inside of something else is not found, and not run"


def test_every_command_is_run_or_says_why_not() -> None:
    unused = set(COMMANDS)
    for page in names_of_pages(PAGES):
        for command in [*commands(page), *(command for command, _ in transcript(page))]:
            found = [pattern for pattern in COMMANDS if re.fullmatch(pattern, f"{page}: {command}")]
            assert len(found) == 1, (
                f"{page}: {command!r} is in {len(found)} lines of COMMANDS, see tests/house/pages.py"
            )
            unused -= {*found}
    assert not unused, f"no page has these commands any more: {unused}"
    for where in COMMANDS.values():
        assert where.startswith("not run: ") or (ROOT / where).exists(), where


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nprint()\n```\n", ""),
        ("```\nprint()\n```\n", "has no language"),
        ("```bash\ntorchrun a.py\n```\n", "a block of bash is not run here: say why, in a mark"),
        ("<!-- not run: needs a cluster -->\n```bash\ntorchrun a.py\n```\n", ""),
        ("```text\n$ torchrun a.py\nloss 3\n```\n", "shows commands: its language is console"),
        ("```console\n$ torchrun a.py\nloss 3\n```\n", "is in 0 lines of COMMANDS"),
        ("<!-- not run: needs a cluster -->\n```console\n$ torchrun a.py\nloss 3\n```\n", ""),
        ("1. A list\n\n   ```python\n   print()\n   ```\n", "a block inside of something else is not found"),
        ("Write\n\n    zeroshard train --help\n", "is in 0 lines of COMMANDS"),
        ("Write\n\n    sudo make test-hosts\n", "is in 0 lines of COMMANDS"),
        ("It says\n\n    zeroshard: rank 1 of 3 failed first:\n", ""),
    ],
)
def test_a_new_block_or_command_that_nothing_runs_is_found(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = importlib.import_module(__name__)
    (tmp_path / "README.md").write_text(text)
    for module in (here, pages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(here, "PAGES", [tmp_path / "README.md"])
    monkeypatch.setattr(here, "COMMANDS", {})
    said = []
    for check in (test_every_block_is_run_or_says_why_not, test_every_command_is_run_or_says_why_not):
        try:
            check()
        except AssertionError as error:
            said.append(str(error))
    assert bool(said) == bool(problem) and problem in "".join(said), said


def test_commands_and_their_options_exist() -> None:
    click = pytest.importorskip("click")
    main = importlib.import_module("zeroshard.cli.main").main
    for page in names_of_pages(PAGES):
        for line in [*commands(page), *(command for command, _ in transcript(page))]:
            program, *words = shlex.split(line)
            if program == "zeroshard":
                command = main.commands[words[0]]
                command.make_context(words[0], words[1:], parent=click.Context(main), resilient_parsing=False)


def test_the_five_lines_are_those_of_the_examples() -> None:
    for side, name in zip(sides_of_the_readmes_diff(), ("train_plain", "train_sharded"), strict=True):
        program = [line for line in (ROOT / f"examples/{name}.py").read_text().splitlines() if line]
        assert [line for line in side if line] == program[1:-2]  # without docstring and printing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"`[^`]*`", "code", prose)
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", prose):
        if path.startswith("http"):
            continue
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name}: {path}"
        assert is_on_site(found) or not is_on_site(page), f"{page.name}: {path} is not on the site: name it, no link"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in anchors, f"{page.name}: {path}{anchor}"


def is_on_site(path: Path) -> bool:
    return path.resolve().is_relative_to(DOCS) or path.resolve() in {ROOT / name for name in ("README.md", *MADE)}


MADE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "LICENSE": "license.md"}
"""Files outside of docs/ -> pages of the site (`docs/site/pages.py`); README.md is its first page."""


def test_every_page_is_in_the_navigation() -> None:
    """(`mkdocs build --strict` checks more, but needs packages that these tests do not.)"""
    navigation = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert navigation == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | {
        "index.md",
        *MADE.values(),
    }


def test_the_api_pages_have_everything_that_is_public() -> None:
    listed = set()
    for page in (DOCS / "api").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            if name.startswith("zeroshard.integrations."):  # see the next test
                continue
            module, _, attribute = name.rpartition(".")
            found = importlib.import_module(name) if name == "zeroshard.reference" else None
            listed.add(id(found or getattr(importlib.import_module(module), attribute)))
    plain = (zeroshard.Plan, type(zeroshard), str)  # the plans are named in a sentence, modules by their members
    public = {name: getattr(zeroshard, name) for name in zeroshard.__all__}
    missing = [name for name, value in public.items() if not isinstance(value, plain) and id(value) not in listed]
    assert not missing


def test_the_api_pages_have_the_classes_of_the_integrations() -> None:
    """By their source: the libraries need not be installed. The halves from which the strategies for both packages of
    Lightning are made are not for users."""
    page = (DOCS / "api/integrations.md").read_text()
    listed = re.findall(r"^::: zeroshard\.integrations\.([\w.]+)$", page, re.MULTILINE)
    defined = [
        f"{path.stem}.{node.name}"
        for path in (ROOT / "zeroshard/integrations").glob("*.py")
        if not path.stem.endswith("_strategy")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(listed) == sorted([*defined, "dcp.stateful"])


@pytest.mark.parametrize(("page", "owner"), [("handle", zeroshard.Handle), ("optimizer", zeroshard.ShardedOptimizer)])
def test_the_members_that_an_api_page_chooses_exist(page: str, owner: type) -> None:
    (chosen,) = re.findall(r"members: \[([^]]*)\]", (DOCS / f"api/{page}.md").read_text())
    assert not [name for name in re.findall(r"\w+", chosen) if not hasattr(owner, name)]


def test_no_line_of_prose_in_the_readme_is_long() -> None:
    prose = [line for line in (ROOT / "README.md").read_text().splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, prose)) <= 110


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:zeroshard|tests|docs|benchmarks)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_every_dependency_has_its_reason_and_every_reason_its_dependency() -> None:
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = file["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *file["build-system"]["requires"],
        *(line for of in extras.values() for line in of),
    ]
    packages = {re.split(r"[\[<>=]", line)[0] for line in lines} - {"zeroshard"}
    needed, _, by_hand = (DOCS / "dependencies.md").read_text().partition("## Made by hand")
    listed, named = (cells_of(needed, column) for column in ("package", "extra"))
    assert {re.sub(r" >= .*", "", name) for name in listed} == packages
    assert {name.strip("`") for name in named} == extras.keys() - {"train", "test", "dev"}  # these have headings
    assert {name.replace(" ", "") for name in listed if ">=" in name} <= {*project["dependencies"]}
    for name in cells_of(by_hand, "where"):
        assert any((ROOT / folder / name.strip("`")).exists() for folder in ("", "zeroshard")), name


def cells_of(text: str, column: str) -> set[str]:
    """The names in that column of the tables that have it, separated by commas."""
    names: set[str] = set()
    for table in re.findall(r"^\|.*\n\|---.*\n(?:\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
        if column in head:
            names |= {name for row in rows for name in row[head.index(column)].split(", ")}
    return names


def script_of(name: str) -> Any:
    """Import a script of docs/pictures as a module."""
    script = DOCS / "pictures" / name
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(name: str) -> str:
    return (DOCS / "pictures" / name).read_text(encoding="utf-8")


def test_the_picture_shows_what_the_planner_says() -> None:
    script = script_of("bytes_per_rank.py")
    assert script.draw(*script.measure()) == drawn("bytes-per-rank.svg"), "run bytes_per_rank.py again"


@pytest.mark.parametrize("path", sorted((DOCS / "pictures").rglob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_small_and_follow_the_readers_colours(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 50_000
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme:dark" in text


def test_the_other_pictures_are_those_of_their_scripts() -> None:
    assert script_of("plans.py").draw() == drawn("plans.svg"), "run plans.py again"
    assert script_of("buffer_map.py").picture() == drawn("buffer-map.svg"), "run buffer_map.py again"
    for name, draw in script_of("explained.py").PICTURES.items():
        assert draw() == drawn(name), "run explained.py again"
