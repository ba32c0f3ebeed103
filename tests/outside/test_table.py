"""`docs/compatibility.md` and this folder name the same tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "compatibility.md"


def defined() -> set[str]:
    names = set()
    for path in HERE.glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        names |= {item.name for item in body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")}
    return names - set(globals())


def named() -> set[str]:
    """The tests that the second column of the tables names."""
    names = set()
    for line in DOCS.read_text().splitlines():
        cell = line.split(" | ")[1] if line.startswith("| ") and line.count(" | ") >= 2 else ""
        names |= set(re.findall(r"\b(test_\w+)(?!\w*\.py)", cell))
    return {name for name in names if not (HERE / f"{name}.py").exists()}


def test_every_test_that_the_table_names_is_here() -> None:
    elsewhere = {path.stem for path in HERE.parent.rglob("test_*.py")}
    assert named() - defined() - elsewhere == set()


def test_every_test_here_is_in_the_table() -> None:
    assert defined() - set(re.findall(r"\btest_\w+", DOCS.read_text())) == set()


def test_every_file_that_the_table_names_is_there() -> None:
    root = HERE.parent.parent
    rows = "".join(line for line in DOCS.read_text().splitlines() if line.startswith("|"))
    assert [path for path in re.findall(r"tests/\w+/\w+\.py", rows) if not (root / path).exists()] == []
