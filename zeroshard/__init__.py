"""zeroshard: sharded data-parallel training for PyTorch. One engine for all ZeRO stages, each described by a `Plan`."""

from zeroshard import starting  # noqa: F401 - first, as the others take seconds to import

# isort: split

import importlib
from typing import TYPE_CHECKING, Any

from zeroshard import checkpoint, errors, planner, planning, testing
from zeroshard.checkpoint import CheckpointError, load, prune, save, verify
from zeroshard.comm.joining import init
from zeroshard.errors import Error
from zeroshard.failures.lost import LostPeer
from zeroshard.failures.watch import abort, abort_on_error, wait_for_all
from zeroshard.handle import Handle
from zeroshard.loss_scale import ConstantScale, DynamicScale, LossScaler
from zeroshard.optimizer import ShardedOptimizer, StepResult
from zeroshard.placement import DDP, OPTIMIZER_ONLY, ZERO1, ZERO2, ZERO3, Plan
from zeroshard.planning import plan
from zeroshard.precision import MixedPrecision
from zeroshard.runtime.timeline import Timeline
from zeroshard.shard import shard
from zeroshard.version import VERSION as __version__

__all__ = [
    "DDP",
    "OPTIMIZER_ONLY",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "CheckpointError",
    "ConstantScale",
    "DynamicScale",
    "Error",
    "Handle",
    "LossScaler",
    "LostPeer",
    "MixedPrecision",
    "Plan",
    "ShardedOptimizer",
    "StepResult",
    "Timeline",
    "__version__",
    "abort",
    "abort_on_error",
    "checkpoint",
    "errors",
    "exchange",
    "init",
    "integrations",
    "load",
    "optim",
    "plan",
    "planner",
    "planning",
    "prune",
    "reference",
    "save",
    "shard",
    "testing",
    "verify",
    "wait_for_all",
]

_IMPORTED_WHEN_ASKED_FOR = ("exchange", "integrations", "optim", "reference")


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # so that type checkers still find misspelt names

    def __getattr__(name: str) -> Any:
        if name in _IMPORTED_WHEN_ASKED_FOR:
            return importlib.import_module(f"zeroshard.{name}")
        raise AttributeError(f"module 'zeroshard' has no attribute {name!r}")
