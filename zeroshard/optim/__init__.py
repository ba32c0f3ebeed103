"""Optimizers that torch lacks. Plain `torch.optim.Optimizer`s on one process: they know nothing of shards.

torch has the elementwise ones, and Muon and Adafactor, which look at whole matrices; use those. Here are the two that
scale each parameter's step by a ratio of norms (the trust ratio), and so need whole parameters as well.
"""

from zeroshard.optim.lamb import Lamb
from zeroshard.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
