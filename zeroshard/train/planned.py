"""Plans a run from its configuration: the model on the meta device, one micro-batch, the facts of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from zeroshard.comm.transport import TransportName
from zeroshard.errors import InvalidValue
from zeroshard.placement import PLANS
from zeroshard.planning import Configuration, Workload, plan
from zeroshard.planning.once import traced_once
from zeroshard.report import Facts, facts_of
from zeroshard.train.config import Config, UserError
from zeroshard.train.language import Language, build_language, has_decay
from zeroshard.train.tokenizer import tokenizer_of


def language_of(config: Config) -> Language:
    """The model without values.

    Raises:
        ValueError: its configuration or the tokenizer cannot be read, or they do not go together.
    """
    try:
        with torch.device("meta"):
            return build_language(config.model, tokenizer_of(config.data).vocabulary)
    except UserError as error:
        raise InvalidValue(str(error)) from error


def by_dimensions(name: str, parameter: nn.Parameter) -> bool:
    """The trainer's param group of a parameter (`run.make_optimizer`), as `plan` asks for it."""
    return has_decay(parameter)


def workload_of(config: Config, language: Language, sequences: int, tokens: int | None = None) -> Workload:
    """One micro-batch of so many sequences; `tokens`: of each, None: as many as the model takes."""
    shape = sequences, tokens or config.model.context

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    recompute, num_tokens = config.parallel.recompute, math.prod(shape)
    return Workload(inputs, lambda model, given: language.loss(*given), recompute, num_tokens)


@dataclass(frozen=True)
class Place:
    """Where a run's ranks are. `device`: "cpu" or "cuda"; `transport`: how they exchange buffers, None: as is usual for
    that device."""

    ranks: int
    device: str
    transport: TransportName | None = None


def configuration_of(config: Config, language: Language, place: Place) -> Configuration:
    """The run at that place, with its micro-batch."""
    batch, parallel = config.batch, config.parallel
    sequences = batch.sequences // (place.ranks * batch.micro_batches)
    return Configuration(
        plan=parallel.plan,
        ranks=place.ranks,
        precision=parallel.precision,
        group_of=by_dimensions,
        units=language.units,
        micro_batches=batch.micro_batches,
        reduce_every_micro_batch=batch.reduce_every_micro_batch,
        loss_scales=None if config.optimizer.loss_scale is None else 1,
        device=place.device,
        transport=place.transport,
        workload=workload_of(config, language, max(1, sequences)),
    )


@traced_once()
def facts_of_run(config: Config, place: Place, name: str) -> Facts:
    """The facts of a run's page: its own plan first, then the others for comparison.

    Raises:
        ValueError: as `language_of`.
    """
    language = language_of(config)
    own = configuration_of(config, language, place)
    others = [name for name in PLANS if name != config.parallel.plan]
    forecasts = [plan(language.model, replace(own, plan=chosen)) for chosen in (config.parallel.plan, *others)]
    return facts_of(name, forecasts, "cpu" if place.device == "cpu" else "node")
