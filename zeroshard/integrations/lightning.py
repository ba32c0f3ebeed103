"""zeroshard in Lightning's Trainer and Fabric, of the package `lightning`. Importing this file registers the names:

import zeroshard.integrations.lightning
trainer = Trainer(strategy="zeroshard_zero3", devices=8)      # and Fabric(strategy="zeroshard_zero3")
"""

from __future__ import annotations

from zeroshard.integrations.fabric_strategy import InFabric
from zeroshard.integrations.sharding import needing
from zeroshard.integrations.trainer_strategy import EnginePrecision, ForkedRanks, InTrainer

with needing("lightning", "lightning"):
    import lightning.fabric as fabric
    import lightning.pytorch as pytorch


class FabricStrategy(InFabric, fabric.strategies.DDPStrategy):
    """`Fabric(strategy="zeroshard_zero3")`, or `Fabric(strategy=FabricStrategy(Sharding(plan="zero3", units=Block)))`.
    `fabric.setup` shards the model in place, and takes over its optimizers.

    Args:
        sharding: a `Sharding`, a plan, or a dict of the fields of `Sharding`.
        kwargs: those of Lightning's `DDPStrategy` that control how processes start and find each other.
    """

    library = fabric


class _Precision(EnginePrecision, pytorch.plugins.precision.Precision):
    library = pytorch


class _Launcher(ForkedRanks, pytorch.strategies.launchers._MultiProcessingLauncher):
    pass


class ShardedStrategy(InTrainer, pytorch.strategies.DDPStrategy):
    """`Trainer(strategy=ShardedStrategy(Sharding(plan="zero3", units=Block)))`, or by a registered name.

    The LightningModule is sharded in place after `configure_model` and `configure_optimizers`, and stays sharded after
    `fit`, also for later calls of the trainer. `trainer.strategy.handle.close()` makes it a plain module again.

    Args:
        sharding: a `Sharding`, a plan, or a dict of the fields of `Sharding`.
        kwargs: those of Lightning's `DDPStrategy` that control how processes start and find each other.
    """

    library, of_precision, of_launcher = pytorch, _Precision, _Launcher


FabricStrategy.register_strategies(fabric.strategies.STRATEGY_REGISTRY)
ShardedStrategy.register_strategies(pytorch.strategies.StrategyRegistry)
