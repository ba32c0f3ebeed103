"""Checkpoints that are independent of world size, plan and format of main: see docs/checkpoints.md."""

from zeroshard.checkpoint.folders import steps as steps
from zeroshard.checkpoint.load import Loaded as Loaded
from zeroshard.checkpoint.load import load as load
from zeroshard.checkpoint.load import newest_good as newest_good
from zeroshard.checkpoint.load import verify as verify
from zeroshard.checkpoint.manifest import CheckpointError as CheckpointError
from zeroshard.checkpoint.pruning import prune as prune
from zeroshard.checkpoint.reader import Reader as Reader
from zeroshard.checkpoint.save import Saving as Saving
from zeroshard.checkpoint.save import save as save
