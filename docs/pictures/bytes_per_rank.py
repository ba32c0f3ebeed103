"""Draws bytes-per-rank.svg: what one rank holds of one model under each plan, in the planner's own numbers.

    python docs/pictures/bytes_per_rank.py                          write the picture
    python docs/pictures/bytes_per_rank.py out.svg --theme dark     one theme alone, for renderers without media queries

The model is built on the meta device: nothing is allocated. `tests/house/test_documents.py` checks that the
file is current.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from zeroshard.planner import plan_memory
from zeroshard.train.config import ModelConfig
from zeroshard.train.model import GPT, Block

MODEL = ModelConfig(layers=32, width=4096, heads=32, context=2048)
VOCABULARY, RANKS = 32_000, 8
PLANS = ("ddp", "zero1", "zero2", "zero3")

PARTS = {  # label -> the planner's kinds, class of the colour
    "weights, bf16": (("weights",), "a"),
    "gradients, fp32": (("grads",), "b"),
    "fp32 master": (("main",), "c"),
    "Adam's moments": (("state", "scalars"), "d"),
    "transient": (("ring", "buckets", "scratch"), "e"),
}

COLOURS = {  # distinguishable without colour vision, on white and on GitHub's dark grey
    "light": {"text": "#1f2328", "quiet": "#59636e", "line": "#818b98", "a": "#0072b2", "b": "#e69f00"},
    "dark": {"text": "#f0f6fc", "quiet": "#9198a1", "line": "#818b98", "a": "#56a5e0", "b": "#f0b53c"},
}
COLOURS["light"] |= {"c": "#009e73", "d": "#b5679a", "e": "#9aa4af"}
COLOURS["dark"] |= {"c": "#2dbb92", "d": "#d48cbd", "e": "#76808c"}

WIDTH, LEFT, RIGHT, TOP, BAR, STEP = 760, 70, 70, 66, 30, 46
LIMIT_GB = 80


def measure() -> tuple[int, dict[str, dict[str, float]]]:
    """The number of parameters; plan -> label -> GB on one rank, at the peak of a step."""
    with torch.device("meta"):
        model = GPT(MODEL, VOCABULARY)
    held = {}
    for plan in PLANS:
        kinds = plan_memory(
            model, plan, RANKS, units=Block, precision="bf16", transport="native", device_type="cuda", peak=True
        )
        held[plan] = {label: sum(kinds[kind] for kind in of) / 1e9 for label, (of, _) in PARTS.items()}
    return sum(p.numel() for p in model.parameters()), held


def draw(num_parameters: int, held: dict[str, dict[str, float]], theme: str | None = None) -> str:
    """The picture. `theme`: light or dark; None: what the reader's browser prefers."""
    bottom = TOP + STEP * len(held)
    scale = (WIDTH - LEFT - RIGHT) / max(sum(parts.values()) for parts in held.values())
    limit = LEFT + LIMIT_GB * scale
    title = f"GB on one of {RANKS} ranks, at the peak of a step; GPT, {num_parameters / 1e9:.1f} billion parameters"
    body = [
        text(LEFT, 20, title, "title"),
        *legend(),
        f'<path class="limit" d="M{limit:.1f} {TOP - 8} V{bottom - 4}"/>',
        text(limit + 5, bottom - 6, f"one {LIMIT_GB} GB GPU", "quiet"),
    ]
    for number, (plan, parts) in enumerate(held.items()):
        y = TOP + STEP * number
        body.append(text(LEFT - 10, y + BAR * 0.68, plan, "name"))
        x = float(LEFT)
        for label, gigabytes in parts.items():
            if gigabytes * scale >= 2:
                colour = PARTS[label][1]
                body.append(
                    f'<rect class="{colour}" x="{x:.1f}" y="{y}" width="{gigabytes * scale - 1:.1f}" height="{BAR}">'
                    f"<title>{plan}, {label}: {gigabytes:.1f} GB</title></rect>"
                )
                x += gigabytes * scale
        body.append(text(x + 7, y + BAR * 0.68, f"{sum(parts.values()):.1f}", "total"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 4}" role="img" font-size="14" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, style(theme), *body, "</svg>"]) + "\n"


def legend() -> list[str]:
    body, x = [], LEFT
    for label, (_, colour) in PARTS.items():
        body += [f'<rect class="{colour}" x="{x}" y="34" width="12" height="12"/>', text(x + 17, 45, label, "quiet")]
        x += 36 + 7 * len(label)
    return body


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def style(theme: str | None) -> str:
    def rules(colours: dict[str, str]) -> str:
        fills = "".join(f".{name}{{fill:{colours[name]}}}" for _, name in PARTS.values())
        return (
            f"text{{fill:{colours['text']}}}.quiet{{fill:{colours['quiet']}}}.limit{{stroke:{colours['line']}}}{fills}"
        )

    fixed = ".title,.total{font-weight:600}.name{text-anchor:end}.limit{stroke-dasharray:4 4}"
    if theme is not None:
        return f"<style>{fixed}{rules(COLOURS[theme])}</style>"
    dark = f"@media (prefers-color-scheme:dark){{{rules(COLOURS['dark'])}}}"
    return f"<style>{fixed}{rules(COLOURS['light'])}{dark}</style>"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).with_name("bytes-per-rank.svg"))
    parser.add_argument("--theme", choices=COLOURS)
    options = parser.parse_args()
    options.out.write_text(draw(*measure(), options.theme), encoding="utf-8")


if __name__ == "__main__":
    main()
