"""Progress output of a run: one live line on a terminal, plain lines elsewhere, and the table of bytes at the end."""

from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zeroshard.train.metrics import StepRecord, ValidationRecord

_BAR_WIDTH = 16
PERSISTENT = ("weights", "grads", "main", "state", "scalars")


class Progress:
    """An `Observer` that prints. On a terminal one line is redrawn; elsewhere every `log_every`-th step prints a line.

    In both cases each skipped step prints a line of its own, so that it stays visible.
    """

    def __init__(self, console: Console, steps: int, log_every: int) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._first: int | None = None
        self._live = Live(console=console, refresh_per_second=8, transient=False) if console.is_terminal else None
        if self._live:
            self._live.start()

    def on_step(self, record: StepRecord) -> None:
        self._first = record.step if self._first is None else self._first
        text = describe(record, self._steps)
        if self._live:
            self._live.update(Text(f"{bar(record.step / self._steps)} {text}"))
        regular = record.step % self._log_every == 0 or record.step in (self._first, self._steps)
        if not record.applied or (regular and not self._live):
            tell(self._console, text)

    def on_validation(self, record: ValidationRecord) -> None:
        line = f"step {record.step}: validation loss {record.loss:.4f} nats, {record.bits_per_byte:.4f} bits per byte"
        tell(self._console, line)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def tell(console: Console, line: str) -> None:
    """Print a line as it is: rich interprets no markup in it, colours nothing and does not wrap it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe(record: StepRecord, steps: int) -> str:
    """One step as one line."""
    memory, peak, engine = (si(n, "B") for n in (record.memory_bytes, record.peak_memory_bytes, record.engine_bytes))
    parts = [
        f"step {record.step:>{len(str(steps))}}/{steps}",
        f"loss {record.loss:.4f} nats {record.bits_per_byte:.3f} bits/byte",
        f"{si(record.tokens_per_second)} tokens/s",
        f"norm {record.grad_norm:.3f}" if record.applied else "skipped",
        *([f"scale {record.loss_scale:,.0f}"] if record.loss_scale != 1 else []),
        f"memory {memory} peak {peak} engine {engine}",
        f"comm {record.communication_share:.0%}",
        f"eta {duration(record.eta_seconds)}",
    ]
    return " | ".join(parts)


def bar(share: float) -> str:
    filled = min(_BAR_WIDTH, int(share * _BAR_WIDTH))
    return "━" * filled + "╌" * (_BAR_WIDTH - filled)


def si(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 15.3 k, 412 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5 or prefix == "T":
            break
        value /= 1000
    digits = 0 if value >= 99.95 or not prefix else 1
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def bytes_table(title: str, numel: int, planned: Mapping[str, int], measured: Mapping[str, int]) -> Table:
    """Bytes of rank 0 by kind, in all and per parameter of the whole model: planned, and measured after the run."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("rank 0 holds", no_wrap=True)
    for heading in ("bytes/parameter planned", "measured", "bytes planned", "measured"):
        table.add_column(heading, justify="right")

    def add(name: str, plan: int, found: int, *, last: bool = False) -> None:
        table.add_row(name, f"{plan / numel:.3f}", f"{found / numel:.3f}", f"{plan:,}", f"{found:,}", end_section=last)

    kinds = [*PERSISTENT, *(kind for kind in {**planned, **measured} if kind not in PERSISTENT)]
    for kind in PERSISTENT:
        add(kind, planned.get(kind, 0), measured.get(kind, 0), last=kind == PERSISTENT[-1])
    add("between steps", *(sum(held.get(kind, 0) for kind in PERSISTENT) for held in (planned, measured)), last=True)
    for kind in kinds[len(PERSISTENT) :]:
        add(f"{kind}, transient", planned.get(kind, 0), measured.get(kind, 0), last=kind == kinds[-1])
    add("total", sum(planned.values()), sum(measured.values()))
    return table


def sample_panel(text: str) -> Panel:
    return Panel(Text(text), title="sample", title_align="left")
