"""What a run is made of, how it starts, and how it is saved.

Beyond the sharded state, everything that a step needs follows from the configuration and two numbers. Steps done give
the batch (`data.Batches`) and the random numbers (`loop.seed_of`); updates, the steps that were not skipped, give the
learning rate (`learning_rate_factor`). So a checkpoint holds the sharded state and these numbers, and a resumed run
goes on exactly as the uninterrupted one would have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from zeroshard.loss_scale import DynamicScale
from zeroshard.planner import plan_memory
from zeroshard.train.config import Config, ScheduleConfig, UserError, check_divides, write
from zeroshard.train.data import VOCABULARY, Batches, Corpus, open_corpus, prepare, validation_windows
from zeroshard.train.model import GPT, Block
from zeroshard.train.ranks import Ranks
from zeroshard.train.resume import KEY, Found, Position, find


@dataclass(frozen=True)
class Run:
    """What the steps of a run share. What changes is inside the engine's objects and the scheduler, whose `last_epoch`
    counts the updates; the step number is all the rest."""

    config: Config
    ranks: Ranks
    folder: Path
    corpus: Corpus
    batches: Batches
    model: GPT
    handle: zeroshard.Handle
    optimizer: zeroshard.ShardedOptimizer
    scheduler: LambdaLR
    planned_bytes: Mapping[str, int]
    numel: int


def start_run(config: Config, ranks: Ranks, resume: Path | None, *, occupied: bool) -> tuple[Run, Found | None]:
    """Open the text, build and shard the model, load what was saved. Returns the run and where it goes on from."""
    check_divides(config)
    corpus = open_corpus(ranks.first_does(lambda: prepare(config.data), per_node=True))
    context = config.model.context
    batches = Batches(corpus.train, context, config.batch.sequences, config.batch.micro_batches, config.run.seed)
    validation_windows(corpus.validation, context, config.evaluation.windows, ranks.world_size)  # refuse now, not later
    found = None
    if resume is not None:
        folder = resume
        found = ranks.first_does(lambda: find(folder, corpus.digest, config.schedule))

    torch.manual_seed(config.run.seed)
    model = GPT(config.model, VOCABULARY).to(ranks.device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    parallel = config.parallel
    try:
        planned = plan_memory(
            model,
            parallel.plan,
            ranks.world_size,
            units=Block,
            precision=parallel.precision,
            transport="shared" if ranks.device.type == "cpu" else "native",
            device_type=ranks.device.type,
            group_of=lambda name: model.get_parameter(name).dim() >= 2,  # as in make_optimizer
            no_sync=config.batch.micro_batches > 1 and not config.batch.reduce_every_micro_batch,
        )
        handle = zeroshard.shard(
            model,
            parallel.plan,
            units=Block,
            precision=parallel.precision,
            max_transient_bytes=parallel.max_transient_bytes,
        )
        optimizer = make_optimizer(config, model)
    except ValueError as error:
        raise UserError(str(error)) from error
    updates = 0 if found is None else load_run(handle, optimizer, found)
    scheduler = make_scheduler(optimizer, config.schedule, updates)
    folder = ranks.first_does(lambda: make_folder(config, resume, occupied))
    return Run(config, ranks, folder, corpus, batches, model, handle, optimizer, scheduler, planned, numel), found


def load_run(handle: zeroshard.Handle, optimizer: zeroshard.ShardedOptimizer, found: Found) -> int:
    """Take the state of a saved step, and the hyper-parameters of this run's configuration. Returns the updates."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    position = Position(0, "")
    try:
        zeroshard.load(found.folder, handle, optimizer, step=found.step, extra={KEY: position})
    except zeroshard.CheckpointError as error:
        raise UserError(str(error)) from error
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return position.updates


def save_run(run: Run, step: int, *, background: bool = False) -> None:
    """Write the state after `step` steps into the run's folder, and remove the steps that are not kept. Collective."""
    keep = run.config.run
    position = Position(run.scheduler.last_epoch, run.corpus.digest)

    def prune() -> None:
        zeroshard.prune(run.folder, keep_last=keep.keep_last, keep_every=keep.keep_every)

    run.handle.finish_background()
    if background:  # what is written now is not there yet
        run.ranks.first_does(prune)
    zeroshard.save(run.folder, run.handle, run.optimizer, step=step, extra={KEY: position}, background=background)
    if not background:
        run.ranks.first_does(prune)


def make_optimizer(config: Config, model: GPT) -> zeroshard.ShardedOptimizer:
    """AdamW; only matrices decay."""
    settings = config.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    first_scale = settings.loss_scale
    if first_scale is None and config.parallel.precision == "fp16":
        first_scale = 2.0**16
    return zeroshard.ShardedOptimizer(
        groups,
        torch.optim.AdamW,
        loss_scale=first_scale and DynamicScale(first_scale, growth_interval=settings.loss_scale_growth),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        fused=settings.fused,
    )


def make_scheduler(optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, updates: int) -> LambdaLR:
    """Warm-up and cosine, after `updates` of them. The peak comes from the configuration, also after a resume."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return LambdaLR(optimizer, lambda now: learning_rate_factor(now, schedule), last_epoch=updates - 1)


def learning_rate_factor(updates: int, schedule: ScheduleConfig) -> float:
    """Part of the peak learning rate after `updates`: linear up over the warm-up, then half a cosine down."""
    if updates < schedule.warmup:
        return (updates + 1) / schedule.warmup
    progress = min(1.0, (updates - schedule.warmup) / max(1, schedule.steps - schedule.warmup))
    return schedule.final_share + (1 - schedule.final_share) * (1 + math.cos(math.pi * progress)) / 2


def make_folder(config: Config, resume: Path | None, occupied: bool) -> Path:
    """Create the run's folder with its resolved configuration. `UserError` if another run lives there, unless it may be
    `occupied`."""
    folder = Path(config.run.out or default_folder())
    lived_in = (folder / "metrics.jsonl").exists() or bool(zeroshard.checkpoint.steps(folder))
    if lived_in and not occupied and (resume is None or folder.resolve() != resume.resolve()):
        raise UserError(f"{folder} already holds a run: continue it with --resume {folder}, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(config, folder / "config.toml")
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from None
    return folder


def default_folder() -> str:
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"
