"""Draws three pictures of the pages: one step under ZeRO-3, a checkpoint on two and on three ranks, a 2-D mesh.

    python docs/pictures/explained.py               write zero3-step.svg, checkpoint.svg and mesh.svg

`tests/house/test_documents.py` checks that the files are current.
"""

from __future__ import annotations

from pathlib import Path

STYLE = (
    "text{fill:#1f2328}.quiet{fill:#59636e}.name{font-weight:600;text-anchor:end}.in{fill:#fff;text-anchor:middle}"
    ".middle{text-anchor:middle}.a{fill:#0072b2}.b{fill:#b35900}.c{fill:#00765a}.d{fill:#8f4a78}.frame{fill:none;stroke:#818b98}"
    "@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.quiet{fill:#9198a1}}"
)
UNIT = 56


def picture(width: int, height: int, body: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="14" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def box(x: float, y: float, width: float, words: str, kind: str, height: int = 26) -> list[str]:
    shape = f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3"/>'
    return [shape, text(x + width / 2, y + height / 2 + 5, words, "in" if kind in "abcd" else "quiet middle")]


def zero3_step() -> str:
    """Time runs to the right: one row for what the rank computes, one for each kind of exchange."""
    left, units = 150, 4
    order = [*range(units), *reversed(range(units))]
    rows = {"gather weights": 44, "compute": 80, "reduce gradients": 116, "full weights held": 160}
    body = [text(left, 20, "One step of a rank under ZeRO-3, units 0 to 3; time runs to the right", "quiet")]
    body += [text(left - 12, y + 18, name, "name") for name, y in rows.items()]
    step_at = left + (len(order) + 2) * UNIT
    for place, unit in enumerate(order):
        x = left + (place + 1) * UNIT
        backward = place >= units
        body += box(x, rows["compute"], UNIT - 3, f"{'B' if backward else 'F'}{unit}", "a")
        if place not in (units, units + 1):  # two buffers: the last two units of forward are still there
            body += box(x - UNIT, rows["gather weights"], UNIT - 3, f"{unit}", "b")
        if backward:
            body += box(x + UNIT, rows["reduce gradients"], UNIT - 3, f"{unit}", "c")
        held = {unit, order[place + 1]} if place + 1 < len(order) else {unit}
        if place in (units - 1, units):
            held = {units - 2, units - 1}
        words = " ".join(map(str, sorted(held)))
        body += box(x, rows["full weights held"], UNIT - 3, words, "frame")
    body += box(step_at, rows["compute"], UNIT + 24, "step", "a")
    return picture(step_at + UNIT + 40, 200, body)


def checkpoint() -> str:
    """The same three parameters in the files of two ranks, and read by three."""
    left, width = 110, 480
    parameters = (("embed", 0.0, 0.45, "a"), ("up", 0.45, 0.75, "b"), ("down", 0.75, 1.0, "c"))
    body = [text(left, 20, "Names and intervals are stored, not ranks: what two ranks save, three can load", "quiet")]
    for row, (y, ranks, words) in enumerate(((40, 2, "saved by 2"), (120, 3, "loaded by 3"))):
        body.append(text(left - 12, y + 18, words, "name"))
        for name, start, stop, kind in parameters:
            body += box(left + start * width, y, (stop - start) * width - 1, name, kind)
        for rank in range(ranks):
            label = f"rank-0000{rank}.safetensors" if row == 0 else f"rank {rank}"
            body += box(left + rank * width / ranks, y + 30, width / ranks - 3, label, "frame")
    return picture(left + width + 20, 200, body)


def mesh() -> str:
    """Two machines of four GPUs: shards in a row, replicas in a column."""
    left, size = 110, 84
    body = [
        text(
            left,
            20,
            "mesh axes (replicate, shard) = (2, 4): weights travel in rows, gradients also in columns",
            "quiet",
        )
    ]
    for machine in range(2):
        y = 36 + machine * 76
        body.append(text(left - 12, y + 34, f"machine {machine}", "name"))
        body.append(f'<rect class="frame" x="{left - 4}" y="{y}" width="{4 * size + 4}" height="58" rx="5"/>')
        for shard in range(4):
            body += box(left + shard * size, y + 6, size - 4, f"shard {shard}", "abcd"[shard], height=46)
    return picture(left + 4 * size + 170, 190, body)


PICTURES = {"zero3-step.svg": zero3_step, "checkpoint.svg": checkpoint, "mesh.svg": mesh}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
