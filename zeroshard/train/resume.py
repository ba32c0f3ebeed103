"""What a run keeps in its checkpoints beside the sharded state, and the step that a resumed run goes on from."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import newest_good, steps
from zeroshard.train.config import ScheduleConfig, UserError

KEY = "run"


@dataclass
class Position:
    """Where a run is, for `zeroshard.save(extra={KEY: position})`.

    Attributes:
        updates: steps that were applied: the position of the learning rate. (Steps done are the checkpoint's number.)
        text: digest of the text.
    """

    updates: int
    text: str

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.updates, self.text = int(state["updates"]), str(state["text"])


@dataclass(frozen=True)
class Found:
    """A step to go on from. `skipped`: why not from a newer one, a line for each."""

    folder: Path
    step: int
    skipped: tuple[str, ...]


def find(folder: Path, text: str, schedule: ScheduleConfig) -> Found:
    """The newest good step of a run; all its bytes have been verified. One rank does this.

    Raises:
        UserError: there is none; the run read other text; nothing is left to do.
    """
    if not steps(folder):
        raise UserError(f"nothing to resume in {folder}: expected a folder step-N")
    manifest, skipped = newest_good(folder)
    if manifest is None:
        raise UserError(f"no good step in {folder}: {'; '.join(skipped)}")
    try:
        position = Position(0, "")
        position.load_state_dict(manifest.values["extra"][KEY])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder} holds checkpoints that the trainer did not write") from None
    if position.text != text:
        raise UserError(
            f"the text is not the one that the saved run read: expected digest {position.text}, found {text}; "
            "pass the same --data"
        )
    if manifest.step >= schedule.steps:
        raise UserError(
            f"the saved run has done {manifest.step} steps: expected --steps larger than that, found {schedule.steps}"
        )
    return Found(folder, manifest.step, tuple(skipped))
