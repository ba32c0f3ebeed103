"""`make test-gpu`: everything that can only be tested on a GPU, in one command and one report.

    python -m tests.gpu.runner                                  every piece, on one GPU or several
    python -m tests.gpu.runner --pieces one-rank memory         some pieces
    python -m tests.gpu.runner --jobs 1                         one after another
    python -m tests.gpu.runner --device cpu                     small sizes without a GPU: tests the pieces themselves
    python -m tests.gpu.runner --device apart                   the same on the device of `tests/apart`

Each piece runs in a process of its own, with a time limit, so that a crash or a hang loses only that piece. The report
is rewritten after each piece. Exit status: 0 if nothing failed, 1 if a piece failed, 2 if there is no GPU.

Needs torch 2.11 or newer with CUDA, numpy and pytest, from the root of the repository; nothing has to be installed or
downloaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.checks import ROOT, read_rows
from tests.gpu.machine import gpu_names

REPORT = Path("build", "test-gpu", "report.md")
_LOG_LINES = 40
"""How many lines of a failed piece's output the report has. (All of it stays beside the report.)"""


@dataclass(frozen=True, eq=False)
class Piece:
    """`seconds`: its time limit. `is_timed`: it measures time, so nothing may run beside it. `variables`: of its
    environment on a GPU. `module`: has the function of that name."""

    name: str
    what: str
    seconds: float
    variables: Mapping[str, str] = field(default_factory=dict)
    is_timed: bool = False
    module: str = "tests.gpu.pieces"


PIECES = (
    Piece("versions", "torch, CUDA, NCCL and the GPUs", 120),
    Piece("examples", "the README's commands end, and plain and sharded training print the same loss", 180),
    Piece("one-rank", "one rank over NCCL that gathers and reduces as if it had peers: the bits of one process", 240),
    Piece("arithmetic", "what must be exact has the same bits on the GPU as on the host", 120),
    Piece("delays", "the same, with random sleeps before collectives and kernels; a dropped wait is found", 240),
    Piece("syncs", "the host waits for the GPU once in a step; set_sync_debug_mode('error') elsewhere", 180),
    Piece("norms", "the bits of a gradient's norm over 100 runs", 180),
    Piece("memory", "what the allocator holds, at rest and at the peak, is what was planned", 240),
    Piece("sharing", "two and three ranks on one GPU, which exchange by the host: the bits of one process", 300),
    Piece("several", "NCCL over several GPUs: the bits of one process where sums are exact", 300),
    Piece("several-values", "ranks that differ, owners without parameters, joins, checkpoints for fewer ranks", 420),
    Piece("several-ends", "ranks that fail, stop or go elsewhere over NCCL are named, and all end; GPUs of ranks", 420),
    Piece(
        "several-costs",
        "memory of communicators, rates of gathers and reductions over several GPUs",
        180,
        is_timed=True,
    ),
    Piece("checkpoint", "saved, also in the background, and loaded: trains on with the same bits", 180),
    Piece("park", "a parked model leaves the GPU's memory, and trains on with the same bits", 120),
    Piece("join", "two ranks on one GPU, of which one runs out of inputs", 240),
    Piece("transformers", "the Trainer of transformers: the losses without zeroshard; saved, resumed, generating", 300),
    Piece("accelerate", "Accelerate's loop: the losses without zeroshard; saved and resumed", 180),
    Piece("lightning", "Lightning's Trainer and Fabric: the losses without zeroshard; saved and resumed", 180),
    Piece("peft", "adapters on a base in bf16: the losses of plain torch, and a base that stays as it is", 180),
    Piece("vision", "convolutions in channels_last, batch norms, autocast: the losses of plain torch", 180),
    Piece("trainer", "`zeroshard train`: memory as planned, stopped by a signal, resumed with the same losses", 240),
    Piece(
        "sanitizer", "torch's CUDA sanitizer finds no race; a seeded one is found", 240, {"TORCH_CUDA_SANITIZER": "1"}
    ),
    Piece("profile", "kernels and microseconds of the host, per phase and unit", 180, is_timed=True),
    Piece(
        "large",
        "a GPT of about 1 B parameters in bf16: steps, tokens, MFU, peak memory against the plan",
        420,
        is_timed=True,
    ),
    Piece("step-time", "benchmarks/step_time.py against plain torch, DDP and FSDP2", 420, is_timed=True),
    Piece(
        "habits", "what users of plain torch do on a GPU, beside plain torch: the same bits, or an error in words", 300
    ),
    Piece("compiled", "torch.compile in its modes, and CUDA graphs: as in plain torch, or an error in words", 420),
    Piece("suites", "tests of the engine with models on the GPU, several ranks each", 900),
)


@dataclass
class Result:
    """How one piece ended. `verdict`: passed, failed, skipped, or what ended it early."""

    piece: Piece
    verdict: str
    seconds: float
    rows: list[dict[str, Any]]
    log: Path

    @property
    def is_bad(self) -> bool:
        return self.verdict not in ("passed", "skipped")

    @property
    def checks(self) -> str:
        """How many checks held, in words."""
        checks = [row["is_right"] for row in self.rows if row["kind"] == "check"]
        return f"{sum(checks)} of {len(checks)}" if checks else ""

    @property
    def remark(self) -> str:
        """Why it was skipped, or the first check that failed."""
        found = [row for row in self.rows if row["kind"] == "skip" or row.get("is_right") is False]
        return " ".join(f"{row['what']}: {row.get('found', '')}".rstrip(": ") for row in found[:1])


def run(piece: Piece, device: str, num_gpus: int, folder: Path, popen: type[subprocess.Popen[Any]]) -> Result:
    """Run one piece in its own process, and end all of its processes with it."""
    rows, log = folder / f"{piece.name}.jsonl", folder / f"{piece.name}.log"
    rows.unlink(missing_ok=True)
    command = [sys.executable, "-m", piece.module, piece.name, device, str(num_gpus), str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "ZEROSHARD_TEST_DEVICE": device,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else `is_available()` makes later forks unable to use CUDA
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same bits on every stream
        **(piece.variables if device == "cuda" else {}),
    }
    began = time.monotonic()
    with log.open("w") as file:
        process = popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(piece.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
    return Result(piece, verdict(status, read_rows(rows)), time.monotonic() - began, read_rows(rows), log)


def _end_group(process: subprocess.Popen[Any]) -> None:
    """Kill the piece, and the ranks that it has left behind. (It leads a group of processes.)"""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(status: int | None, rows: Sequence[Mapping[str, Any]]) -> str:
    """`status`: of the process; None: it ran past its limit."""
    kinds = [row["kind"] for row in rows]
    if status is None:
        return "too long"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if "end" not in kinds or (status and all(row.get("is_right", True) for row in rows)):
        return f"ended with status {status}"
    if any(row.get("is_right") is False for row in rows):
        return "failed"
    return "skipped" if "skip" in kinds else "passed"


# The report -----------------------------------------------------------------------------------------------------------


def report_of(results: Sequence[Result], machine: str) -> str:
    """The report in Markdown."""
    lines = [
        "# GPU tests",
        "",
        f"{machine}. {time.strftime('%Y-%m-%d %H:%M:%S %Z')}, commit {_commit()}, Python {platform.python_version()}.",
        "",
        "| piece | result | checks | seconds | |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        cells = [result.piece.name, result.verdict, result.checks, f"{result.seconds:.0f}", _cell(result.remark)]
        lines.append(f"| {' | '.join(cells)} |")
    for result in results:
        lines += ["", f"## {result.piece.name}: {result.verdict}", "", f"{result.piece.what}.", "", *_rows(result.rows)]
        if result.is_bad:
            lines += ["", f"The end of its output ({result.log}):", "", "```", *_tail(result.log), "```"]
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if row["kind"] in ("check", "note"):
            mark = {True: "ok", False: "**FAILED**", None: "-"}[row.get("is_right")]
            lines.append(f"- {mark} {row['what']}{': ' if row['found'] else ''}{row['found']}")
        elif row["kind"] == "skip":
            lines.append(f"Skipped: {row['what']}.")
        elif row["kind"] == "text":
            lines += ["", f"{row['what']}:", "", "```", row["found"].rstrip(), "```", ""]
        elif row["kind"] == "table":
            cells = [row["header"], ["---"] * len(row["header"]), *row["rows"]]
            lines += ["", f"{row['what']}:", "", *(f"| {' | '.join(map(_cell, line))} |" for line in cells), ""]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []


def _commit() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


# The command ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None, popen: type[subprocess.Popen[Any]] = subprocess.Popen) -> int:
    """`popen`: starts the pieces."""
    options = _parse(arguments)
    names = gpu_names() if options.device == "cuda" else []
    if options.device == "cuda" and not names:
        print("make test-gpu: no GPU: the CUDA driver finds none here. `--device cpu` tests the pieces themselves.")
        return 2
    options.report.parent.mkdir(parents=True, exist_ok=True)
    folder = options.report.parent.resolve()
    machine = (
        " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or f"{options.device}, small sizes"
    )
    print(f"{machine}. Report and output: {folder}", flush=True)
    results: dict[Piece, Result] = {}
    for jobs, pieces in _turns(options.pieces, options.jobs):
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(run, piece, options.device, len(names), folder, popen) for piece in pieces]
            for future in as_completed(running):
                result = future.result()
                results[result.piece] = result
                words = [f"{result.verdict:<10}", f"{result.seconds:5.0f} s", f"{result.checks:>8}", result.remark]
                print(f"{result.piece.name:<12} {'  '.join(words)}".rstrip(), flush=True)
                report = report_of([results[piece] for piece in options.pieces if piece in results], machine)
                options.report.write_text(report)
        if any(result.is_bad and piece is PIECES[0] for piece, result in results.items()):
            print("The other pieces need what this one found missing.")
            break
    print(f"\n{report}\n{options.report.resolve()}")
    return int(any(result.is_bad for result in results.values()))


def _turns(pieces: Sequence[Piece], jobs: int) -> list[tuple[int, list[Piece]]]:
    """The pieces that run together, and how many at a time: the first alone, as the others need what it checks; those
    that measure time last, one by one."""
    first = [piece for piece in pieces if piece is PIECES[0]]
    timed = [piece for piece in pieces if piece.is_timed]
    others = [piece for piece in pieces if piece not in (*first, *timed)]
    return [(number, turn) for number, turn in ((1, first), (jobs, others), (1, timed)) if turn]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {piece.name: piece for piece in PIECES}
    every = "\n".join(f"{piece.name}: {piece.what}" for piece in PIECES)
    parser.add_argument("--pieces", nargs="+", choices=by_name, default=list(by_name), metavar="NAME", help=every)
    parser.add_argument("--device", choices=("cuda", "cpu", "apart"), default="cuda")
    jobs = max((os.cpu_count() or 1) // 4, 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="pieces side by side; those that measure time run alone")
    parser.add_argument("--report", type=Path, default=REPORT, help="the Markdown file; logs are written beside it")
    options = parser.parse_args(arguments)
    options.pieces = [by_name[name] for name in options.pieces]
    return options


if __name__ == "__main__":
    sys.exit(main())
