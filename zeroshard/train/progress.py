"""Progress output of a run: a live line and a history on a terminal, plain lines elsewhere; the table of bytes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zeroshard.io.logger import LOGGER
from zeroshard.train.metrics import StepRecord, ValidationRecord

_BAR_WIDTH = 16
PERSISTENT = ("weights", "grads", "main", "state", "scalars")


class Progress:
    """An `Observer` that prints. On a terminal one line is redrawn, and every `log_seconds` a line stays above it;
    elsewhere every `log_every`-th step prints a line.

    In both cases each skipped step prints a line of its own, so that it stays visible. On a terminal no line is wider
    than the screen: `fitting` leaves out what matters least.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        log_every: int,
        log_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._log_seconds = log_seconds
        self._clock = clock
        self._shares, self._rates, self._flops = Smoothed(), Smoothed(), Smoothed()
        self._first: int | None = None
        self._next = clock() + log_seconds
        self._has_warned = False
        self._live = Live(console=console, refresh_per_second=8, transient=False) if console.is_terminal else None
        if self._live:
            self._live.start()

    def on_step(self, record: StepRecord) -> None:
        self._first = record.step if self._first is None else self._first
        is_first_or_last = record.step in (self._first, self._steps)
        parts = describe(self._smoothed(record), self._steps)
        if self._live:
            text = Text(live_line(parts, record.step / self._steps, self._console.width), no_wrap=True)
            self._live.update(text)
            is_due = self._clock() >= self._next
        else:
            is_due = record.step % self._log_every == 0 or is_first_or_last
        if is_due:
            self._next = self._clock() + self._log_seconds
        if is_due or not record.applied:
            tell(self._console, fitting(parts, self._console.width if self._live else None))
        self._compare(record)

    def _compare(self, record: StepRecord) -> None:
        """Print a warning, once, if the engine does not hold what was planned. (After a skipped step the optimizer may
        not have made its state yet.)"""
        if record.applied and record.engine_bytes != record.planned_bytes and not self._has_warned:
            self._has_warned = True
            found = f"the engine holds {record.engine_bytes:,} bytes, and {record.planned_bytes:,} were planned"
            tell(self._console, f"step {record.step}: WARNING: {found}: see the table at the end")

    def _smoothed(self, record: StepRecord) -> StepRecord:
        return replace(
            record,
            communication_share=self._shares(record.communication_share),
            tokens_per_second=self._rates(record.tokens_per_second),
            flops_per_second=self._flops(record.flops_per_second),
        )

    def on_validation(self, record: ValidationRecord) -> None:
        line = f"step {record.step}: validation loss {record.loss:.4f} nats, {record.bits_per_byte:.4f} bits per byte"
        tell(self._console, line)

    def close(self) -> None:
        if self._live:
            self._live.stop()


class Output:
    """A stream that a run may lose: its reader ends (`| head`), or the disk of its file is full. One line on stderr
    says so, and training goes on without it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable[..., object], *arguments: str) -> None:
        if self._is_lost:
            return
        try:
            function(*arguments)
        except OSError as error:
            self._is_lost = True
            LOGGER.warning("the output is lost: %s; training goes on, and Control-C stops and saves", error.strerror)


class Smoothed:
    """A moving average: a new value counts a tenth, and older ones fade. Of the first values it is the mean (the bias
    of the start at zero is removed, as in Adam)."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def __call__(self, value: float) -> float:
        self._sum += (value - self._sum) / 10
        self._weight += (1 - self._weight) / 10
        return self._sum / self._weight


def tell(console: Console, line: str) -> None:
    """Print a line as it is: rich interprets no markup in it, colours nothing and does not wrap it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Part:
    """A part of a line. On a screen that is too narrow the parts of the largest `rank` are left out first."""

    text: str
    rank: int


def describe(record: StepRecord, steps: int) -> list[Part]:
    """One step, in the order of the line."""
    memory, peak, engine = (si(n, "B") for n in (record.memory_bytes, record.peak_memory_bytes, record.engine_bytes))
    is_scaled = record.loss_scale != 1
    return [
        Part(f"step {record.step:>{len(str(steps))}}/{steps}", 0),
        Part(f"loss {record.loss:.4f} nats", 1),
        Part(f"{record.bits_per_byte:.3f} bits/byte", 7),
        Part(f"{si(record.tokens_per_second)} tokens/s", 5),
        Part(per_second(record.flops_per_second, record.mfu), 9),
        Part(f"norm {record.grad_norm:.3f}", 8) if record.applied else Part("skipped", 2),
        *([Part(f"scale {record.loss_scale:,.0f}", 10 if record.applied else 3)] if is_scaled else []),
        Part(f"memory {memory} peak {peak} engine {engine}", 12),
        Part(f"comm {record.communication_share:.0%}", 6),
        Part(f"data {record.data_seconds / record.seconds:.0%}", 11),
        Part(f"eta {duration(record.eta_seconds)}", 4),
    ]


def fitting(parts: Sequence[Part], width: int | None) -> str:
    """The parts as one line of at most `width` columns (None: without a limit). The first part always stays."""
    kept = list(parts)
    while len(line := " | ".join(part.text for part in kept)) > (width or len(line)) and len(kept) > 1:
        kept.remove(max(kept, key=lambda part: part.rank))
    return line[:width]


def live_line(parts: Sequence[Part], share: float, width: int) -> str:
    """A bar and the parts that fit beside it."""
    drawn = bar(share, _BAR_WIDTH if width >= 120 else _BAR_WIDTH // 2)
    return f"{drawn} {fitting(parts, max(1, width - len(drawn) - 1))}"[:width]


def bar(share: float, width: int) -> str:
    filled = min(width, int(share * width))
    return "━" * filled + "╌" * (width - filled)


def per_second(flops: float, mfu: float | None) -> str:
    """FLOP/s, and the MFU where it is known."""
    return f"{si(flops, 'FLOP/s')}{'' if mfu is None else f' MFU {mfu:.0%}'}"


def si(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 15.3 k, 412 MB."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or prefix == "P":
            break
        value /= 1000
    digits = 0 if value >= 99.95 or not prefix else 1
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def bytes_table(title: str, numel: int, planned: Mapping[str, int], measured: Mapping[str, int], screen: int) -> Group:
    """Bytes of rank 0 by kind, in all and per parameter of the whole model: planned, and measured after the run. On a
    screen of less than 80 columns, in which it could cut numbers, this is two tables."""
    rows: list[tuple[str, int, int, bool]] = []

    def add(name: str, plan: int, found: int, *, last: bool = False) -> None:
        rows.append((name, plan, found, last))

    kinds = [*PERSISTENT, *(kind for kind in {**planned, **measured} if kind not in PERSISTENT)]
    for kind in PERSISTENT:
        add(kind, planned.get(kind, 0), measured.get(kind, 0), last=kind == PERSISTENT[-1])
    add("between steps", *(sum(held.get(kind, 0) for kind in PERSISTENT) for held in (planned, measured)), last=True)
    for kind in kinds[len(PERSISTENT) :]:
        add(f"{kind}, transient", planned.get(kind, 0), measured.get(kind, 0), last=kind == kinds[-1])
    add("total", sum(planned.values()), sum(measured.values()))
    columns: list[tuple[str, Callable[[int], str]]] = [
        ("bytes per\nparameter\n", lambda num_bytes: f"{num_bytes / numel:.3f}"),
        ("bytes\n", lambda num_bytes: f"{num_bytes:,}"),
    ]
    return Group(*(_table(title, rows, part) for part in ([columns] if screen >= 80 else ([one] for one in columns))))


def _table(
    title: str, rows: Sequence[tuple[str, int, int, bool]], columns: Sequence[tuple[str, Callable[[int], str]]]
) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    table.add_column("rank 0 holds", overflow="fold")  # a name goes on in the next line before a number is cut
    for heading, _ in columns:
        table.add_column(f"{heading}planned", justify="right", no_wrap=True)
        table.add_column("measured", justify="right", no_wrap=True)
    for name, plan, found, last in rows:
        numbers = (in_words(number) for _, in_words in columns for number in (plan, found))
        table.add_row(name, *numbers, end_section=last)
    return table


def sample_panel(text: str) -> Panel:
    return Panel(Text(text), title="sample", title_align="left")
