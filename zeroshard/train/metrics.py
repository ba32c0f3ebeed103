"""Metrics of a run: the records, the protocol of their observers, `metrics.jsonl`, and event files of TensorBoard."""

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from zeroshard.io.logger import LOGGER
from zeroshard.io.refused import in_words
from zeroshard.io.whole import write_whole
from zeroshard.train.config import UserError

METRICS = "metrics.jsonl"
"""The file in a run's folder."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses in nats per token, averaged over the global batch; bytes of memory are of rank 0."""

    step: int  # steps done, this one included
    loss: float
    lr: float
    grad_norm: float
    applied: bool  # False: a gradient overflowed; weights, optimizer state and learning rate schedule are unchanged
    loss_scale: float  # the factor that the loss was multiplied by before backward
    tokens_per_second: float  # over all ranks
    communication_share: float  # part of the step's time spent waiting in collectives, 0 to 1
    memory_bytes: int  # allocated on the GPU; on a CPU the resident memory of the process
    peak_memory_bytes: int
    engine_bytes: int  # live buffers of the sharding engine, measured after the step
    planned_bytes: int  # the same, as planned
    seconds: float
    eta_seconds: float
    data_seconds: float  # part of `seconds` in which rank 0 waited for its batches
    tokens: int  # read since the beginning of training, by all ranks; those of skipped steps are included
    wall_seconds: float  # since the beginning of training; evaluations, saves and earlier sessions are included
    flops_per_second: float  # of the model's matrix products, over all ranks: `flops.py`
    mfu: float | None  # `flops_per_second` as a share of what the devices can do at most; None: not known
    bytes_per_token: float = 1.0  # of the training text
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by the engine: phase -> kind -> bytes

    @property
    def bits_per_byte(self) -> float:
        return bits(self.loss) / self.bytes_per_token


@dataclass(frozen=True)
class StartRecord:
    """A start of the ranks: of a new run, of one that is resumed, and after a failure."""

    step: int  # steps done before it
    plan: str
    precision: str
    ranks: int
    device: str
    transport: str  # how the ranks exchange buffers: "shared", "pairwise" or "native"
    restarts: int  # how often the launcher had started the ranks again
    batch: Mapping[str, int]  # as configured: sequences, micro_batches, reduce_every_micro_batch
    recompute: bool


@dataclass(frozen=True)
class ValidationRecord:
    step: int
    loss: float  # nats per token
    bytes_per_token: float = 1.0  # of the validation text

    @property
    def bits_per_byte(self) -> float:
        return bits(self.loss) / self.bytes_per_token


def bits(nats: float) -> float:
    return nats / math.log(2)


_OF_A_STEP = (
    "loss",
    "bits_per_byte",
    "lr",
    "grad_norm",
    "loss_scale",
    "tokens",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
    "communication_share",
    "data_seconds",
    "seconds",
    "memory_bytes",
    "peak_memory_bytes",
    "engine_bytes",
    "planned_bytes",
)


def scalars(record: StepRecord | ValidationRecord) -> dict[str, float]:
    """The numbers of a record by the names that trackers show: "train/loss", "validation/loss", ..."""
    section, names = ("train", _OF_A_STEP) if isinstance(record, StepRecord) else ("validation", _OF_A_STEP[:2])
    values = {f"{section}/{name}": getattr(record, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


class Observer(Protocol):
    """Receives the records of a run on rank 0. Other ranks have no observers."""

    def on_step(self, record: StepRecord) -> None: ...
    def on_validation(self, record: ValidationRecord) -> None: ...
    def close(self) -> None: ...


class Observers:
    """Several observers as one; closes them all."""

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers

    def on_step(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.on_step(record)

    def on_validation(self, record: ValidationRecord) -> None:
        for observer in self._observers:
            observer.on_validation(record)

    def close(self) -> None:
        """Close all of them, also if one of them raises."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises:
    UserError: in place of an OSError inside; the message names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


class JsonLines:
    """Writes one JSON object per line, each at once. On resume, lines of steps after `first_step` are removed: the
    interrupted run did these steps after its last checkpoint, and they are done again.

    What cannot be written (the disk is full) is kept and tried again with the next line, as no line is worth the run.

    Attributes:
        validations: the evaluations of earlier sessions that were kept.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.validations: list[ValidationRecord] = []
        self._path = path
        if path.exists():
            kept = _until(path, first_step)
            write_whole(path, "".join(f"{line}\n" for line in kept))
            self.validations = [one for line in kept if (one := _validation(line))]
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self._left = b""
        self._has_warned = False
        self._held: Mapping[str, object] = {}

    def on_start(self, record: StartRecord) -> None:
        self._write({"kind": "start", **asdict(record)})

    def on_step(self, record: StepRecord) -> None:
        values = {"kind": "step", **asdict(record), "bits_per_byte": record.bits_per_byte}
        held = values.pop("held")
        self._write(values)
        if held != self._held:  # seldom: from the second step on a rank holds the same
            self._held = held
            self._write({"kind": "memory", "step": record.step, "held": held})

    def on_validation(self, record: ValidationRecord) -> None:
        self._write({"kind": "validation", **asdict(record), "bits_per_byte": record.bits_per_byte})

    def close(self) -> None:
        """Lines that still cannot be written are lost: a warning says so, as the run itself is saved."""
        with self._file:
            try:
                self._write_what_is_left()
            except OSError as error:
                LOGGER.warning("cannot write %s: %s; its last lines are lost", self._path, in_words(error))

    def _write(self, values: Mapping[str, object]) -> None:
        # JSON has no NaN and no infinity; json.dumps would write them, and strict parsers would reject the file.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._left += json.dumps(finite).encode() + b"\n"
        try:
            self._write_what_is_left()
        except OSError as error:
            if not self._has_warned:
                LOGGER.warning(
                    "cannot write %s: %s; training goes on, and it is tried again", self._path, in_words(error)
                )
            self._has_warned = True

    def _write_what_is_left(self) -> None:
        while self._left:
            self._left = self._left[self._file.write(self._left) :]


class TensorBoard:
    """The same numbers as TensorBoard scalars, under `<run>/tensorboard`."""

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("tensorboard") is not None

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def on_step(self, record: StepRecord | ValidationRecord) -> None:
        with writing(self._folder):
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, record.step)

    on_validation = on_step

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


@dataclass(frozen=True)
class Earlier:
    """What the earlier sessions of a run have taken and read, until the step from which it continues."""

    wall_seconds: float = 0.0
    tokens: int = 0


def earlier(path: Path, step: int, tokens_per_step: int) -> Earlier:
    """As recorded in `path`. Steps that are not recorded there take no time, and read as many tokens as a step of
    this session."""
    rows = [json.loads(line) for line in _until(path, step)]
    seconds = [row["wall_seconds"] for row in rows if isinstance(row.get("wall_seconds"), (int, float))]
    known = [(row["step"], row["tokens"]) for row in rows if isinstance(row.get("tokens"), int)]
    last, tokens = known[-1] if known else (0, 0)
    return Earlier(float(max(seconds, default=0.0)), tokens + (step - last) * tokens_per_step)


def _until(path: Path, step: int) -> list[str]:
    """The lines up to that step, without those that are damaged."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if _step(line) <= step]


def _validation(line: str) -> ValidationRecord | None:
    """The evaluation that a line records; None for other lines, and where the loss was not finite."""
    row = json.loads(line)
    if row.get("kind") != "validation" or row.get("loss") is None:
        return None
    return ValidationRecord(row["step"], row["loss"], row.get("bytes_per_token", 1.0))


def _step(line: str) -> float:
    """The step of a line; infinite for a line that was cut off while it was being written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
