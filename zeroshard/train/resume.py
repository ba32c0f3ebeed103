"""The trainer's own values in a checkpoint, and the search for the step from which a resumed run continues."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import newest_good
from zeroshard.train.config import ScheduleConfig, UserError

KEY = "run"


@dataclass
class Position:
    """The position of a run, saved with `zeroshard.save(extra={KEY: position})`.

    Attributes:
        updates: steps that were applied (not skipped): the position in the learning rate schedule. The number of steps
            done is not here, because it is the checkpoint's step number.
        text: digest of the training text.
    """

    updates: int
    text: str

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.updates, self.text = int(state["updates"]), str(state["text"])


@dataclass(frozen=True)
class Found:
    """The step that a resumed run continues from. `skipped`: for each newer, damaged step one line that says why."""

    folder: Path
    step: int
    skipped: tuple[str, ...]


def find(folder: Path, text: str, schedule: ScheduleConfig) -> Found:
    """The newest undamaged step of a run; all its bytes are verified. Reads every file, so only one rank calls it.

    Raises:
        UserError: there is no such step; the run was trained on another text, or on other tokens; the run has done all
            its steps.
    """
    manifest, skipped = newest_good(folder)
    if manifest is None and not skipped:
        raise UserError(f"nothing to resume in {folder}: expected a folder step-N")
    if manifest is None:
        raise UserError(f"no good step in {folder}: {'; '.join(skipped)}")
    try:
        position = Position(0, "")
        position.load_state_dict(manifest.values["extra"][KEY])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder} holds checkpoints that the trainer did not write") from None
    if position.text != text:
        raise UserError(
            "the text, or its tokenizer, is not the one of the saved run: expected digest "
            f"{position.text}, found {text}; pass the same --data, --data.tokenizer, --data.end_of_text and "
            "--data.validation_share, with the same files"
        )
    if manifest.step >= schedule.steps:
        raise UserError(
            f"the saved run has done {manifest.step} steps: expected --steps larger than that, found {schedule.steps}"
        )
    return Found(folder, manifest.step, tuple(skipped))
