"""Plain optimizers over sharded parameters: a step of theirs that would train nothing, in silence, raises.

A plain optimizer skips a parameter whose `p.grad` is None. A sharded one has None there in a hook that comes before its
gradient has been reduced (an optimizer in backward, `torch.distributed.optim`), and after the step or `zero_grad` of a
ShardedOptimizer, which discards the gradients of parameters that no ShardedOptimizer has.

(A gradient that is there raises when a plain optimizer reads it, unless this rank has it in full.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeroshard.errors import InvalidState
from zeroshard.model.absent import as_tensors
from zeroshard.model.outside_graphs import outside_graphs
from zeroshard.ranks.living import Living
from zeroshard.runtime.gather import in_backward

_ENGINES: Living[Any] = Living()
_HOOKS: list[object] = []


def expect_none_silent(engine: Any) -> None:
    """From now on, steps of plain optimizers over the engine's parameters raise where they would train nothing."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(outside_graphs(_before_step)))
    _ENGINES.add(engine)


def _before_step(optimizer: torch.optim.Optimizer, _: Sequence[Any], __: Mapping[str, Any]) -> None:
    """Called before each step of any optimizer of the process.

    Raises:
        RuntimeError: it would skip a parameter that plain torch would train.
    """
    inside = in_backward()
    engines = [engine for engine in _ENGINES.all() if (inside or engine.ledger.discarded) and not engine.life.is_over]
    others = [engine for engine in engines if all(optimizer is not owner for owner in engine.claims.owners())]
    if not others:
        return
    with as_tensors():
        skipped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is None]
    for engine in others:
        for parameter in skipped:
            if id(parameter) in engine.ledger.discarded:
                raise InvalidState(_told(optimizer, engine.name_of(parameter), _DISCARDED))
            if inside and parameter.requires_grad and _reduces(engine, parameter):
                raise InvalidState(_told(optimizer, engine.name_of(parameter), _TOO_EARLY))


_DISCARDED = (
    "a ShardedOptimizer that has not this parameter has discarded its gradient, in its step or zero_grad. Give the "
    "parameter to a ShardedOptimizer, the same or one of its own"
)
_TOO_EARLY = (
    "inside of backward there is only this rank's gradient. Step a zeroshard.ShardedOptimizer after the backward; its "
    "step updates unit by unit"
)


def _reduces(engine: Any, parameter: Tensor) -> bool:
    return any(parameter is mine for unit in engine.reducer.grads for mine in unit.parameters)


def _told(optimizer: torch.optim.Optimizer, name: str, why: str) -> str:
    return f"step of a plain {type(optimizer).__name__} would not train {name}: {why}"
