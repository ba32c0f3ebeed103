"""docs/troubleshooting.md lists the first words of every error message of the package, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.pages import DOCS, ROOT

SHOWN_TO_NOBODY = {
    "AssertionError": "our own invariants",
    "AttributeError": "what Python says of any object",
    "TimeoutError": "of `testing.run_ranks`, with the ranks",
}
INTERNAL = (
    "zeroshard/layout/",
    "zeroshard/io/checked.py",
    "zeroshard/exchange/imported_dcp.py",
    "zeroshard/testing.py",
)
"""Files whose errors users do not see: internal arithmetic, and reasons that a longer message quotes."""


def template(node: ast.expr) -> str:
    """The text of a string expression, with "…" for each filled-in part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
        return re.sub(r"…(\s*…)+", "…", text.replace("`", ""))
    return ""


def messages() -> Iterator[tuple[str, str]]:
    """Place and template of each message that is written in a `raise` statement."""
    for path in sorted((ROOT / "zeroshard").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or not call.args or name.startswith(INTERNAL):
                continue
            if ast.unparse(call.func) not in SHOWN_TO_NOBODY:
                yield f"{name}:{node.lineno}", template(call.args[0])


def entries() -> list[str]:
    """The entries of the page's tables: the first words of messages."""
    page, _, _ = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## No message")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    return [entry.removesuffix("…").rstrip() for row in rows for entry in re.findall(r"`([^`]+)`", row)]


def test_each_message_is_on_the_page() -> None:
    on_page = tuple(entry for entry in entries() if entry)

    def is_there(text: str) -> bool:
        """Whether the message starts with an entry or, for a message with filled-in parts, an entry starts with it."""
        stem = text.rstrip("… :")
        return text.startswith(on_page) or any(entry.startswith(stem) for entry in on_page)

    said = [(place, text) for place, text in messages() if len(re.sub(r"[^a-z]", "", text)) >= 8]
    missing = [f"{place}: {text[:90]}" for place, text in said if not is_there(text)]
    assert len(said) > 150
    assert not missing, "give these a row, with cause and remedy:\n" + "\n".join(missing)
    assert not is_there("the moon is full: …")


def test_each_message_on_the_page_is_one_of_ours() -> None:
    written = []
    for path in (ROOT / "zeroshard").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        written += [text for node in nodes if isinstance(node, ast.expr) and (text := template(node))]
    everything = "\n".join(written).replace("`", "")
    gone = [entry for entry in entries() if not all(part.strip(" :") in everything for part in entry.split("…"))]
    assert not gone
