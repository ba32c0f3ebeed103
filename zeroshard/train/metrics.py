"""Metrics of a run: writes `metrics.jsonl` always, and TensorBoard event files if tensorboard is installed."""

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses in nats per byte, averaged over the global batch; bytes are of rank 0."""

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
    engine_bytes: int  # live buffers of the sharding engine
    seconds: float
    eta_seconds: float

    @property
    def bits_per_byte(self) -> float:
        return bits(self.loss)


@dataclass(frozen=True)
class ValidationRecord:
    step: int
    loss: float  # nats per byte

    @property
    def bits_per_byte(self) -> float:
        return bits(self.loss)


def bits(nats: float) -> float:
    return nats / math.log(2)


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
        for observer in self._observers:
            observer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonLines:
    """Writes one JSON object per line and flushes each line. On resume, lines of steps after `first_step` are removed:
    the interrupted run did these steps after its last checkpoint, and they are done again."""

    def __init__(self, path: Path, first_step: int) -> None:
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines(True) if _step(line) <= first_step]
            path.write_text("".join(kept), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def on_step(self, record: StepRecord) -> None:
        self._write({"kind": "step", **asdict(record), "bits_per_byte": record.bits_per_byte})

    def on_validation(self, record: ValidationRecord) -> None:
        self._write({"kind": "validation", **asdict(record), "bits_per_byte": record.bits_per_byte})

    def close(self) -> None:
        self._file.close()

    def _write(self, values: Mapping[str, object]) -> None:
        # JSON has no NaN and no infinity; json.dumps would write them, and strict parsers would reject the file.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()


class TensorBoard:
    """The same numbers as TensorBoard scalars, under `<run>/tensorboard`."""

    SCALARS = (
        "loss",
        "bits_per_byte",
        "lr",
        "grad_norm",
        "loss_scale",
        "tokens_per_second",
        "communication_share",
        "memory_bytes",
    )

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("tensorboard") is not None

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def on_step(self, record: StepRecord) -> None:
        for name in self.SCALARS:
            self._writer.add_scalar(f"train/{name}", getattr(record, name), record.step)

    def on_validation(self, record: ValidationRecord) -> None:
        for name in ("loss", "bits_per_byte"):
            value = getattr(record, name)
            self._writer.add_scalar(f"validation/{name}", value, record.step)

    def close(self) -> None:
        self._writer.close()


def _step(line: str) -> float:
    """The step of a line; infinite for a line that was cut off while it was being written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
