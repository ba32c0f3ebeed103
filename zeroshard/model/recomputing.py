"""Recomputes modules in backward, instead of keeping what their forward saves (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

_SAVE_THEIR_INPUT = (nn.Linear, nn.Embedding)


def worth_recomputing(model: nn.Module, calls: Iterable[str]) -> tuple[str, ...]:
    """Of these modules, by path, those that save more than their input. Not the whole model either: all of it would be
    there at once in backward, as without recomputation."""
    return tuple(path for path in calls if path and type(model.get_submodule(path)) not in _SAVE_THEIR_INPUT)


def recompute(module: nn.Module) -> Callable[[], None]:
    """From now on keep the module's input, and run its forward again in backward: `torch.utils.checkpoint` (Chen et
    al., "Training deep nets with sublinear memory cost", 2016). Returns a function that undoes it.

    Inside of the module's hooks: under ZeRO-3 its weights are gathered once in backward, also for this forward.
    """
    from torch.utils.checkpoint import checkpoint

    own = vars(module).get("forward")
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo
