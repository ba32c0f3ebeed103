"""Optimizers that torch lacks: plain `torch.optim.Optimizer` classes, which know nothing about shards.

torch has the elementwise optimizers, and Muon and Adafactor, which need whole matrices; use those. The two classes here
scale each parameter's step by a ratio of norms (the trust ratio), and need whole parameters as well.
"""

from zeroshard.optim.lamb import Lamb
from zeroshard.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
