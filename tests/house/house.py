"""The structure of the package, read from its files: rooms (sub-packages), imports, sizes.

python -m tests.house.house        rewrites the table of files in docs/design.md
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zeroshard"
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- files: begin -->\n", "<!-- files: end -->\n"
FACE = "zeroshard"
"""The room of the files that lie in no sub-package."""
ROOMS = [
    "layout",
    "io",
    "optim",
    "ranks",
    "failures",
    "comm",
    "model",
    "storage",
    "gradients",
    "runtime",
    "full_model",
    "step",
    "planned",
    FACE,
    "checkpoint",
    "exchange",
    "planning",
    "report",
    "integrations",
    "train",
    "cli",
]
"""A file imports from its own room and from rooms earlier in this list. (`zeroshard/__init__.py` names what is
public.)"""
LEAVES = {"errors", "placement", "precision", "loss_scale", "step_result", "starting"}
"""Files at the top of the package that every room may import: types that users pass in or get back, and what runs
before all."""


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else FACE

    @property
    def purpose(self) -> str:
        """The first sentence of the module's docstring."""
        text = " ".join((ast.get_docstring(self.tree) or "").partition("\n\n")[0].split())
        return text.partition(". ")[0].rstrip(".:")


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(name, path, ast.parse(path.read_text()))
    return found


def is_leaf(module: Module) -> bool:
    return module.room == FACE and module.path.stem in LEAVES


def imports(module: Module) -> set[str]:
    """The modules of the package that `module` imports, including imports inside functions and for annotations only."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules() else node.module)
    return {name for name in found if name in modules() and name != module.name}


def in_order() -> list[str]:
    """Module names in an order in which each one follows the modules that it imports.

    Raises:
        graphlib.CycleError: modules import each other, so there is no such order.
    """
    return list(TopologicalSorter({name: sorted(imports(m)) for name, m in modules().items()}).static_order())


def rooms_in_order() -> list[str]:
    """Rooms in an order in which each one follows the rooms that its files import. The package's `__init__.py` is left
    out.

    Raises:
        graphlib.CycleError: two rooms import each other.
    """
    needs: dict[str, set[str]] = {}
    for module in modules().values():
        if module.name not in (FACE, f"{FACE}.__main__"):
            others = {modules()[name].room for name in imports(module) if not is_leaf(modules()[name])} - {module.room}
            needs.setdefault(module.room, set()).update(others)
    return list(TopologicalSorter({room: sorted(needs[room]) for room in sorted(needs)}).static_order())


def table() -> str:
    """A Markdown table of the files in the order to read them, with the first sentence of each file's docstring."""
    order = in_order()
    lines = []
    for room in ROOMS:
        lines += [f"\n**`{room}/`**\n", "| file | what |", "|---|---|"]
        for name in order:
            module = modules()[name]
            if module.room == room and module.name not in (FACE, f"{FACE}.{room}"):
                lines.append(f"| `{module.path.name}` | {module.purpose} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def with_table(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
