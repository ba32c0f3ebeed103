"""The same training in every precision, compared to fp32: validation losses, skipped steps, and how large the noise is.

    python benchmarks/precision_curves.py                            # half an hour on two CPU cores
    python benchmarks/precision_curves.py --steps 1000 --plan zero1 --svg curves.svg

Each run is one `zeroshard train` with `configs/small.toml`. Runs with the same seed have the same initial weights
(rounded to the precision) and the same batches. More runs in fp32 show which differences are noise:

- "other sums": the same seed, more micro-batches. The only difference is the order in which numbers are added.
- "seed 1" to "seed 3": other initial weights, another order of the data. Every precision is compared to fp32 of its
  seed.

"fp16, skipping" starts from a loss scale that is too large and grows often, so that steps are skipped all along.

The runs are done one after the other. A run that has finished in `--out` is read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]
CONFIG = Path(__file__).parents[1] / "configs" / "small.toml"


@dataclass(frozen=True)
class Contender:
    """One run. `against`: the name of the run that it is compared to."""

    name: str
    precision: str
    against: str
    colour: str
    seed: int = 0
    options: tuple[str, ...] = ()


REFERENCE = "fp32"
PRECISIONS = {"fp32": "#000000", "fp16": "#d55e00", "bf16": "#0072b2", "bf16-remainder": "#009e73"}
DASHES = ("none", "6 3", "2 2", "8 2 2 2")  # by seed
SKIPPING = ("--optimizer.loss_scale=16777216", "--optimizer.loss_scale_growth=25")
CONTENDERS = [
    *(Contender(name, name, REFERENCE, colour) for name, colour in PRECISIONS.items()),
    Contender("fp32, other sums (2)", "fp32", REFERENCE, "#999999", 0, ("--batch.micro_batches=2",)),
    Contender("fp32, other sums (4)", "fp32", REFERENCE, "#999999", 0, ("--batch.micro_batches=4",)),
    Contender("fp16, skipping", "fp16", REFERENCE, "#cc79a7", 0, SKIPPING),
    *(
        Contender(f"{name}, seed {seed}", name, REFERENCE if name == "fp32" else f"fp32, seed {seed}", colour, seed)
        for seed in (1, 2, 3)
        for name, colour in PRECISIONS.items()
    ),
]


@dataclass(frozen=True)
class Curve:
    """What one run has written. `steps` and `validations`: rows of its `metrics.jsonl`."""

    contender: Contender
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]

    def validation(self, step: int) -> float:
        return next(_number(row["loss"]) for row in self.validations if row["step"] == step)

    @property
    def losses(self) -> list[float]:
        return [_number(row["loss"]) for row in self.steps]

    @property
    def skipped(self) -> list[int]:
        return [row["step"] for row in self.steps if not row["applied"]]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def main() -> None:
    options = _arguments()
    curves = [run(contender, options) for contender in CONTENDERS]
    print(report(curves))
    if options.svg:
        options.svg.write_text(draw(curves), encoding="utf-8")


def run(contender: Contender, options: argparse.Namespace) -> Curve:
    """Train, unless the run has finished before, and read what it has written."""
    folder = options.out / re.sub("[^a-z0-9-]+", "-", contender.name).strip("-")
    path = folder / "metrics.jsonl"
    if not path.exists() or not _read(contender, path, options.steps):
        command = [sys.executable, "-m", "zeroshard", "train", f"--config={CONFIG}", f"--out={folder}"]
        command += [f"--precision={contender.precision}", f"--run.seed={contender.seed}", *contender.options]
        command += [f"--plan={options.plan}", f"--nproc={options.ranks}", f"--parallel.device={options.device}"]
        command += [
            f"--steps={options.steps}",
            f"--evaluation.every={options.every}",
            "--evaluation.sample_tokens=0",
            "--run.timeline=0",
        ]
        command += [f"--data={options.data}"] if options.data else []
        print("$", " ".join(["zeroshard", *command[3:]]), flush=True)
        subprocess.run(command, check=True)
    curve = _read(contender, path, options.steps)
    assert curve is not None
    return curve


def _read(contender: Contender, path: Path, steps: int) -> Curve | None:
    """None where the run has not finished."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    validations = [row for row in rows if row["kind"] == "validation"]
    if not validations or validations[-1]["step"] != steps:
        return None
    return Curve(contender, [row for row in rows if row["kind"] == "step"], validations)


def report(curves: list[Curve]) -> str:
    """A table in Markdown: validation losses in nats per byte, and the last one minus that of fp32."""
    steps = [row["step"] for row in curves[0].validations]
    rows = []
    for curve in curves:
        apart = dict(differences(curve, curves))[steps[-1]]
        losses = [f"{curve.validation(step):.4f}" for step in steps]
        skipped = f"{len(curve.skipped)}{f', the last at {curve.skipped[-1]}' if curve.skipped else ''}"
        first, last = (curve.steps[place]["loss_scale"] for place in (0, -1))
        scale = f"{last:,.0f}" if first == last else f"{first:,.0f} to {last:,.0f}"
        difference = "" if curve.contender.name == REFERENCE else f"{apart:+.4f}"
        rows.append([curve.contender.name, *losses, difference, skipped, scale])
    return _table(["run", *map(str, steps), f"{steps[-1]}: minus fp32", "skipped steps", "loss scale"], rows)


def differences(curve: Curve, curves: list[Curve]) -> Points:
    """Validation losses minus those of the run that this one is compared with."""
    other = next(one for one in curves if one.contender.name == curve.contender.against)
    return [(row["step"], curve.validation(row["step"]) - other.validation(row["step"])) for row in curve.validations]


def _table(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, ["---"] * len(headings), *rows])


WIDTH, HEIGHT, MARGIN = 460, 300, 60


def draw(curves: list[Curve]) -> str:
    """An SVG of two panels: training loss, mean of ten steps; validation loss minus that of fp32."""
    training: list[Points] = [
        [(first + 10.0, statistics.fmean(curve.losses[first : first + 10])) for first in range(0, len(curve.steps), 10)]
        for curve in curves
    ]
    apart = [differences(curve, curves) for curve in curves]
    most = max(map(abs, _bounds(apart)))
    strokes = [
        f'stroke="{curve.contender.colour}" stroke-dasharray="{DASHES[curve.contender.seed]}"' for curve in curves
    ]
    parts = [
        _panel(
            MARGIN, "training loss, nats per byte, mean of ten steps", training, strokes, _bounds(training), "{:.1f}"
        ),
        _panel(2 * MARGIN + WIDTH, "validation loss minus that of fp32", apart, strokes, (-most, most), "{:+.3f}"),
    ]
    for number, (curve, stroke) in enumerate(zip(curves, strokes, strict=True)):
        x, y = MARGIN + WIDTH - 180, MARGIN + 14 + 17 * number
        parts.append(f'<path d="M{x} {y - 4} h20" {stroke} stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">{curve.contender.name}</text>')
    size = f"0 0 {2 * WIDTH + 3 * MARGIN} {HEIGHT + 2 * MARGIN}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _bounds(lines: list[Points]) -> tuple[float, float]:
    values = [y for line in lines for _, y in line]
    return min(values), max(values)


def _panel(
    left: float, title: str, lines: list[Points], strokes: list[str], bounds: tuple[float, float], label: str
) -> str:
    """Axes with five labels each, and one line for each list of points. The first line is drawn last, on top."""
    (low, high), last = bounds, max(x for line in lines for x, _ in line)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / last * WIDTH, MARGIN + (high - y) / (high - low) * HEIGHT

    parts = [f'<text x="{left}" y="{MARGIN - 20}" font-weight="bold">{title}</text>']
    for part in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(part * last, low + part * (high - low))
        parts.append(f'<path d="M{left} {y:.1f} h{WIDTH}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label.format(low + part * (high - low))}</text>'
        )
        parts.append(f'<text x="{x:.1f}" y="{MARGIN + HEIGHT + 20}" text-anchor="middle">{part * last:.0f}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{MARGIN + HEIGHT + 42}" text-anchor="middle">step</text>')
    for line, stroke in reversed(list(zip(lines, strokes, strict=True))):
        path = " L".join("{:.1f} {:.1f}".format(*place(*point)) for point in line)
        parts.append(f'<path d="M{path}" fill="none" {stroke} stroke-width="1.5"/>')
    return "\n".join(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/precision-curves"), help="folder of the runs' folders")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--plan", default="zero3", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--data", default="", help="UTF-8 file or folder; default: the standard library's source")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
