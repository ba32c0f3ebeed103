"""Which stepper steps which param groups."""

from __future__ import annotations

from typing import Protocol

from zeroshard.collectives import Collectives
from zeroshard.flat_step import FlatStep
from zeroshard.inner import OptimizerClass, Options
from zeroshard.kinds import Kind
from zeroshard.owner_step import OwnerStep
from zeroshard.stepper import Groups, Stepper


class StepperClass(Protocol):
    def __call__(
        self,
        optimizer_class: OptimizerClass,
        options: dict[int, Options],
        defaults: Options,
        groups: Groups,
        collectives: Collectives,
        /,
    ) -> Stepper:
        """
        Args:
            options: the hyper-parameters of each param group that is this stepper's, by its index.
            defaults: what the class is built with.
        """


STEPPERS: dict[Kind, StepperClass] = {Kind.WHOLE: OwnerStep, Kind.ELEMENTWISE: FlatStep}
