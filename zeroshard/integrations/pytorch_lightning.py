"""zeroshard in Lightning's Trainer and Fabric, of the packages `pytorch_lightning` and `lightning_fabric`. Importing
this file registers the names:

import zeroshard.integrations.pytorch_lightning
trainer = Trainer(strategy="zeroshard_zero3", devices=8)      # and Fabric(strategy="zeroshard_zero3")
"""

from __future__ import annotations

from zeroshard.integrations.fabric_strategy import InFabric
from zeroshard.integrations.sharding import needing
from zeroshard.integrations.trainer_strategy import EnginePrecision, ForkedRanks, InTrainer

with needing("pytorch_lightning", "lightning"):
    import lightning_fabric as fabric
    import pytorch_lightning as pytorch


class FabricStrategy(InFabric, fabric.strategies.DDPStrategy):
    """`zeroshard.integrations.lightning.FabricStrategy` for Fabric of `lightning_fabric`."""

    library = fabric


class _Precision(EnginePrecision, pytorch.plugins.precision.Precision):
    library = pytorch


class _Launcher(ForkedRanks, pytorch.strategies.launchers._MultiProcessingLauncher):
    pass


class ShardedStrategy(InTrainer, pytorch.strategies.DDPStrategy):
    """`zeroshard.integrations.lightning.ShardedStrategy` for the Trainer of `pytorch_lightning`."""

    library, of_precision, of_launcher = pytorch, _Precision, _Launcher


FabricStrategy.register_strategies(fabric.strategies.STRATEGY_REGISTRY)
ShardedStrategy.register_strategies(pytorch.strategies.StrategyRegistry)
