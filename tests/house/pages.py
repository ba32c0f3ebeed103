"""The pages of the project, and the blocks of code in them.

Every block of code is run (`tests/documents/test_pages.py`), or has a line above it that says why not:

    <!-- not run: needs a cluster -->          the block is not run
    <!-- run: after; apex is not there -->     of a diff, only the new side is run

The examples of some pages (`CONTINUES`) run after the README's five lines. The examples of all other pages start in an
empty namespace.

Commands are indented lines, or lines behind `$ ` in a block of `console`, which shows what they print. Each is in
`COMMANDS`, with the test that runs it or the reason why none does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
CONTINUES = {"README.md": 2, "docs/guide.md": 2, "docs/memory.md": 2, "docs/checkpoints.md": 1}
"""The pages whose Python examples run after the README's, and on how many ranks."""
NOT_CODE = ("text", "diff")
"""`text` blocks show output without the commands. The only diff outside of docs/moving is the README's, with tests
of its own."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `mark` is the comment above it: "", "not run: ..." or "run: ..."."""

    page: str
    language: str
    text: str
    mark: str

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run: ")


FENCE = re.compile(r"(?:<!-- ((?:not )?run: [^>]+) -->\n)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str, *languages: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [Block(page, language, body, mark or "") for mark, language, body in FENCE.findall(text)]
    return [block for block in found if not languages or block.language in languages]


def names_of_pages(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix() for page in pages]


COMMANDS = {
    r"README\.md: pip install .*": "tests/cli/test_installed.py",
    r"docs/install\.md: (?!torchrun .* examples/).*": "tests/cli/test_installed.py",
    r"(README|docs/install)\.md: (python|torchrun .*) examples/train_\w+\.py.*": "tests/documents/test_examples.py",
    r"docs/(tutorial|moving/fsdp)\.md: zeroshard .*": "tests/documents/test_pages.py",
    r"docs/will-it-fit\.md: zeroshard plan .*": "tests/documents/test_will_it_fit.py",
    r"docs/will-it-fit\.md: python benchmarks/plan_time\.py": "tests/documents/test_will_it_fit.py",
    r"docs/memory\.md: zeroshard plan --compare .*": "tests/cli/test_plan_command.py",
    r"docs/(memory|report)\.md: zeroshard (plan [^-]|report plan\.).*": "tests/documents/test_commands_of_pages.py",
    r"docs/report\.md: zeroshard report runs/books": "tests/train/test_loop.py",
    r"docs/train\.md: zeroshard train .*": "tests/cli/test_cli.py",
    r"docs/train\.md: torchrun .*": "tests/cli/test_cli.py",
    r"docs/train\.md: zeroshard tokenizer .*": "tests/cli/test_cli.py",
    r"CONTRIBUTING\.md: make test-gpu.*": "not run: needs a GPU; its pieces run on CPUs in `make test`",
    r"docs/log\.md: .*": "not run: what was measured at the time",
    r"docs/numerics\.md: python benchmarks/precision_curves\.py .*": "not run: takes minutes",
}
"""Page and command -> the test that runs it (of long runs, of the trainer and of pip: the same command with other
values), or the reason why none does."""
PROGRAMS = r"(?:sudo |[A-Z_]+=\S+ )*(?:zeroshard|python|pip|torchrun|make|pytest|accelerate)\b"


def commands(page: str) -> list[str]:
    """The indented lines that begin with a program, without comments. (`zeroshard: ...` is output.)"""
    text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"))
    return [line.partition(" #")[0].strip() for line in re.findall(rf"^    ({PROGRAMS}(?!:).*)$", text, re.MULTILINE)]


def transcript(page: str) -> list[tuple[str, list[str]]]:
    """The commands of the page's console blocks that are run, each with the lines that it prints."""
    text = "".join(block.text for block in blocks(page, "console") if block.is_run)
    typed = [part.splitlines() for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    return [(command, shown) for command, *shown in typed]


def sides(diff: str) -> tuple[list[str], list[str]]:
    """The lines of the old version, and those of the new one."""
    lines = diff.splitlines()
    return tuple([line[1:] for line in lines if line[:1] in (mark, " ", "")] for mark in "-+")  # type: ignore[return-value]


def sides_of_the_readmes_diff() -> tuple[list[str], list[str]]:
    (diff,) = blocks("README.md", "diff")
    return sides(diff.text)


OWN = [page for page in names_of_pages(PAGES) if page not in CONTINUES and page != "CONTRIBUTING.md"]
OWN = [page for page in OWN if any(block.is_run for block in blocks(page, "python", "diff"))]
"""The pages whose examples start in an empty namespace."""
