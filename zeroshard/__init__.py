"""zeroshard: sharded data-parallel training for PyTorch. One engine, in which a stage is data."""

from zeroshard import planner as planner
from zeroshard import testing as testing
from zeroshard.checkpoint import CheckpointError as CheckpointError
from zeroshard.checkpoint import load as load
from zeroshard.checkpoint import prune as prune
from zeroshard.checkpoint import save as save
from zeroshard.checkpoint import verify as verify
from zeroshard.comm.mesh import init as init
from zeroshard.comm.patience import wait_for_all as wait_for_all
from zeroshard.comm.watch import LostPeer as LostPeer
from zeroshard.comm.watch import abort as abort
from zeroshard.comm.watch import abort_on_error as abort_on_error
from zeroshard.handle import Handle as Handle
from zeroshard.loss_scale import ConstantScale as ConstantScale
from zeroshard.loss_scale import DynamicScale as DynamicScale
from zeroshard.loss_scale import LossScaler as LossScaler
from zeroshard.optimizer import ShardedOptimizer as ShardedOptimizer
from zeroshard.optimizer import StepResult as StepResult
from zeroshard.placement import DDP as DDP
from zeroshard.placement import OPTIMIZER_ONLY as OPTIMIZER_ONLY
from zeroshard.placement import ZERO1 as ZERO1
from zeroshard.placement import ZERO2 as ZERO2
from zeroshard.placement import ZERO3 as ZERO3
from zeroshard.placement import Plan as Plan
from zeroshard.planning import plan as plan
from zeroshard.precision import MixedPrecision as MixedPrecision
from zeroshard.shard import shard as shard

__version__ = "0.1.0"
