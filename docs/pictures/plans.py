"""Draws plans.svg: which of weights, gradients and optimizer state each of four ranks holds, and what a step sends.

    python docs/pictures/plans.py                   write the picture

`tests/house/test_documents.py` checks that the file is current.
"""

from __future__ import annotations

from pathlib import Path

from zeroshard.placement import DDP, SHARDED, ZERO1, ZERO2, ZERO3, Plan

RANKS, CELL, HEIGHT, GAP, LEFT, TOP, STEP = 4, 34, 13, 26, 78, 52, 66
PARTS = (("weights", "a"), ("grads", "b"), ("main", "c"))
SENT = {DDP: "2Ψ", ZERO1: "2Ψ", ZERO2: "2Ψ", ZERO3: "at most 3Ψ"}
WIDTH = LEFT + RANKS * (RANKS * CELL // 2 + GAP) + 90

STYLE = (
    "text{fill:#1f2328}.quiet{fill:#59636e}.name{font-weight:600;text-anchor:end}"
    ".a{fill:#0072b2}.b{fill:#e69f00}.c{fill:#009e73}.none{fill:none;stroke:#818b98;stroke-width:.6}"
    "@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.quiet{fill:#9198a1}"
    ".a{fill:#56a5e0}.b{fill:#f0b53c}.c{fill:#2dbb92}}"
)


def draw() -> str:
    """One row for each plan, one block for each rank; in it weights, gradients and optimizer state, cut in shards."""
    body = [text(LEFT, 18, "What each of 4 ranks holds between backward and step, and what it sends", "")]
    x = LEFT
    for (_, colour), label in zip(PARTS, ("weights", "gradients", "optimizer state, master weights"), strict=True):
        body.append(f'<rect class="{colour}" x="{x}" y="30" width="12" height="12"/>')
        body.append(text(x + 17, 41, label, "quiet"))
        x += 40 + 7 * len(label)
    for row, plan in enumerate(SENT):
        y = TOP + STEP * row
        body.append(text(LEFT - 12, y + 1.9 * HEIGHT, plan.name.lower(), "name"))
        for rank in range(RANKS):
            body += block(plan, rank, LEFT + rank * (RANKS * CELL // 2 + GAP), y)
        body.append(text(WIDTH - 84, y + 1.9 * HEIGHT, SENT[plan], "quiet"))
    height = TOP + STEP * len(SENT)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-size="14" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def block(plan: Plan, rank: int, x: int, y: int) -> list[str]:
    """Three bars, one for each tensor; a shard that this rank does not hold is an empty frame."""
    shapes = []
    for number, (part, colour) in enumerate(PARTS):
        for shard in range(RANKS):
            held = getattr(plan, part) is not SHARDED or shard == rank
            place = f'x="{x + shard * CELL // 2}" y="{y + number * (HEIGHT + 3)}"'
            kind = colour if held else "none"
            shapes.append(f'<rect class="{kind}" {place} width="{CELL // 2 - 2}" height="{HEIGHT}"/>')
    return shapes


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("plans.svg").write_text(draw(), encoding="utf-8")
