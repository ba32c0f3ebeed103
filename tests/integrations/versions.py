"""What older versions of the libraries do otherwise (`make test-oldest`)."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch.utils.data import SequentialSampler


@cache
def is_older() -> bool:
    """transformers 4: counts the labels of all tokens of a loss, also the first, and logs a rounded loss."""
    import transformers as hf

    return "train_sampling_strategy" not in inspect.signature(hf.TrainingArguments).parameters


def in_order() -> dict[str, str]:
    """Options of a Trainer that reads its data in order."""
    if not is_older():
        return {"train_sampling_strategy": "sequential"}
    import transformers as hf

    hf.Trainer._get_train_sampler = lambda trainer, *_: SequentialSampler(trainer.train_dataset)
    return {}


def as_logged(loss: float) -> float:
    return round(loss, 4) if is_older() else loss


def of_any_kind() -> dict[str, Any]:
    """Options of Lightning for the load of a checkpoint that contains more than tensors."""
    import lightning

    takes = inspect.signature(lightning.Trainer.fit).parameters
    return {"weights_only": False} if "weights_only" in takes else {}
