"""What the end of a run tells in a few lines: time, tokens per second, best validation loss, peak memory, FLOP/s."""

from collections.abc import Sequence

from zeroshard.train.metrics import StepRecord, ValidationRecord
from zeroshard.train.progress import duration, per_second, si


class Summary:
    """An `Observer` that adds up the steps of this session. The best validation loss is that of the whole run.

    Args:
        earlier: the evaluations of earlier sessions.
    """

    def __init__(self, earlier: Sequence[ValidationRecord] = ()) -> None:
        self._validations = list(earlier)
        self._last: StepRecord | None = None
        self._steps = 0
        self._tokens = self._flops = 0.0
        self._seconds = self._waited = self._for_data = 0.0

    def on_step(self, record: StepRecord) -> None:
        self._last = record
        self._steps += 1
        self._seconds += record.seconds
        self._tokens += record.tokens_per_second * record.seconds
        self._flops += record.flops_per_second * record.seconds
        self._waited += record.communication_share * record.seconds
        self._for_data += record.data_seconds

    def on_validation(self, record: ValidationRecord) -> None:
        self._validations.append(record)

    def close(self) -> None:
        pass

    def lines(self) -> list[str]:
        """The summary; no line is wider than 80 columns."""
        last, lines = self._last, []
        if last is None:
            return []
        lines.append(
            f"{last.step:,} steps, {si(last.tokens)} tokens in {duration(last.wall_seconds)}; "
            f"{self._steps:,} steps in this session took {duration(self._seconds)}"
        )
        share = 1 / self._seconds
        rate = per_second(self._flops * share, last.mfu and last.mfu * self._flops * share / last.flops_per_second)
        lines.append(
            f"on average {si(self._tokens * share)} tokens/s, {rate}, "
            f"{self._waited * share:.0%} in comm, {self._for_data * share:.0%} for data"
        )
        finite = [one for one in self._validations if one.loss == one.loss]
        if finite:
            best = min(finite, key=lambda one: one.loss)
            lines.append(
                f"best validation loss {best.loss:.4f} nats, {best.bits_per_byte:.4f} bits/byte, after step {best.step}"
            )
        lines.append(f"peak memory {si(last.peak_memory_bytes, 'B')} on rank 0")
        return lines
