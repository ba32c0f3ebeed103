"""A training run of the trainer: how it is built, started, resumed and saved.

Beyond the sharded state, everything that a step needs follows from the configuration and two numbers. The number of
steps done gives the batch (`data.Batches`) and the random numbers (`loop.seed_of`). The number of updates, which is
that of steps not skipped, gives the learning rate (`learning_rate_factor`). So a checkpoint contains the sharded state
and these two numbers, and a resumed run continues exactly as the uninterrupted one would have.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from zeroshard.checkpoint import files
from zeroshard.io.logger import LOGGER
from zeroshard.io.refused import in_words
from zeroshard.loss_scale import DynamicScale
from zeroshard.model.recomputing import recompute, worth_recomputing
from zeroshard.planned.parts import OptimizerNeeds, Topology
from zeroshard.planned.training import Training
from zeroshard.train.config import (
    Config,
    ScheduleConfig,
    UserError,
    check_divides,
    fields,
    is_written,
    value_of,
    write,
)
from zeroshard.train.data import Batches, Corpus, open_corpus, prepare, validation_windows
from zeroshard.train.flops import peak_flops
from zeroshard.train.language import Language, build_language, has_decay
from zeroshard.train.metrics import METRICS, Earlier, earlier
from zeroshard.train.ranks import Ranks
from zeroshard.train.release import FOLDER, keep_config
from zeroshard.train.resume import KEY, Found, Position, find
from zeroshard.train.text import would_read
from zeroshard.train.tokenizer import Tokenizer, tokenizer_of

CONFIG = "config.toml"
"""The resolved configuration, in a run's folder."""

OF_A_HOST = ("model.config", "data.path", "data.tokenizer")
OF_RANK_0 = ("run.out", "run.report", "run.log_every", "run.log_seconds", "run.observers")
"""Fields in which ranks may differ: paths of what each host reads, and what only rank 0 uses."""


@dataclass(frozen=True)
class Run:
    """The objects that all steps of a run use. The state that changes is in the model, the optimizer and the scheduler
    (whose `last_epoch` is the number of updates); besides it there is only the step number, kept by the loop.

    Attributes:
        began: when training began, by `time.perf_counter`; earlier if earlier sessions took time.
        tokens_before: read by earlier sessions, which may have had other batches.
        peak_flops: operations per second that all devices together can do at most; None: not known.
    """

    config: Config
    ranks: Ranks
    folder: Path
    corpus: Corpus
    batches: Batches
    tokenizer: Tokenizer
    language: Language
    handle: zeroshard.Handle
    optimizer: zeroshard.ShardedOptimizer
    scheduler: LambdaLR
    planned_bytes: Mapping[str, int]
    numel: int
    peak_flops: float | None
    began: float
    tokens_before: int


class Occupation:
    """Rank 0's lock on the folder of its run, for the time of the block. A system releases it, too, when the process
    ends. Some network file systems have no such locks: there it has no effect."""

    def __init__(self) -> None:
        self._lock: files.Lock | None = None

    def take(self, folder: Path) -> None:
        """No effect if there is no such folder, or it is taken already.

        Raises:
            UserError: another process trains there.
        """
        if self._lock is not None or not folder.is_dir():
            return
        self._lock = files.lock_folder(folder)
        if self._lock is None:
            raise UserError(
                f"{folder} is in use: another process is training there, and both would write its steps and "
                f"{METRICS}. Wait for its end or stop it, or choose another --out"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            files.unlock(self._lock)


def start_run(
    config: Config, ranks: Ranks, resume: Path | None, occupation: Occupation, *, occupied: bool
) -> tuple[Run, Found | None]:
    """Open the text, build and shard the model, load the saved state if `resume` is given. Collective.

    Args:
        occupation: takes the folder of the run.

    Returns:
        The run, and the step from which it continues (None for a new run).

    Raises:
        UserError: on every rank.
    """
    expect_alike(config, ranks)
    check_divides(config)
    folder_of_tokens = ranks.first_does(lambda: prepare(config.data), per_node=True)
    tokenizer, corpus, batches = ranks.together(lambda: open_text(config, folder_of_tokens, ranks.world_size))
    found = ranks.first_does(partial(take_and_find, config, resume, corpus.digest, occupation))
    torch.manual_seed(config.run.seed)
    language = ranks.together(lambda: build_language(config.model, tokenizer.vocabulary))
    model = language.model.to(ranks.device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    handle, optimizer = shard_model(config, language)
    peak = peak_flops(ranks.device, config.parallel.precision, config.run.peak_tflops)
    position = Position(0, corpus.digest) if found is None else load_run(handle, optimizer, found)
    # Not from the checkpoint: two runs that do the same steps save the same bytes.
    before = Earlier()
    if found is not None:
        recorded = found.folder / METRICS
        before = ranks.first_does(partial(earlier, recorded, found.step, config.tokens_per_step))
    run = Run(
        config=config,
        ranks=ranks,
        folder=ranks.first_does(lambda: make_folder(config, resume, occupied, occupation)),
        corpus=corpus,
        batches=batches,
        tokenizer=tokenizer,
        language=language,
        handle=handle,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, config.schedule, position.updates),
        planned_bytes=planned_bytes(config, handle),
        numel=numel,
        peak_flops=peak and peak * ranks.world_size,
        began=time.perf_counter() - before.wall_seconds,
        tokens_before=before.tokens,
    )
    return run, found


def expect_alike(config: Config, ranks: Ranks) -> None:
    """Check that all ranks have the same configuration, apart from paths, and from what rank 0 alone uses. Collective.

    Raises:
        UserError: they have not. They would read overlapping batches, say, or wait for each other.
    """
    mine = {key: value_of(config, key) for key, _ in fields() if key not in OF_A_HOST + OF_RANK_0}
    first = ranks.first_does(lambda: mine)

    def compare() -> None:
        if key := next((key for key in mine if mine[key] != first[key]), None):
            raise UserError(
                f"{key} = {mine[key]!r}, and {first[key]!r} on rank 0: start all ranks with the same options and files "
                "(--config) of the same content"
            )

    ranks.together(compare)


def open_text(config: Config, folder_of_tokens: Path, world_size: int) -> tuple[Tokenizer, Corpus, Batches]:
    """Raises `UserError`: there is no such tokenizer, or the text is too short."""
    tokenizer, context = tokenizer_of(config.data), config.model.context
    corpus = open_corpus(folder_of_tokens, tokenizer)
    batches = Batches(corpus.train, context, config.batch.sequences, config.batch.micro_batches, config.run.seed)
    # The result is not used: a validation text that is too short must be refused now, not after hours of training.
    validation_windows(corpus.validation, context, config.evaluation.windows, world_size)
    return tokenizer, corpus, batches


def take_and_find(config: Config, resume: Path | None, text: str, occupation: Occupation) -> Found | None:
    """Take the folder of the run, and find the step to continue from; None for a new run. Raises as both."""
    if config.run.out:  # first: a run that trains there would remove the step while it is loaded
        occupation.take(Path(config.run.out))
    return None if resume is None else find(resume, text, config.schedule)


def shard_model(config: Config, language: Language) -> tuple[zeroshard.Handle, zeroshard.ShardedOptimizer]:
    """Shard the model as the configuration says. Collective.

    Raises:
        UserError: the model, the plan, the precision or the optimizer's settings do not go together.
    """
    model, parallel = language.model, config.parallel
    try:
        handle = zeroshard.shard(
            model,
            parallel.plan,
            units=language.units,
            precision=parallel.precision,
            max_transient_bytes=parallel.max_transient_bytes,
        )
        optimizer = make_optimizer(config, model)
    except ValueError as error:
        raise UserError(str(error)) from error
    blocks = worth_recomputing(model, (path for unit in handle.engine.units for path in unit.spec.calls))
    for block in map(model.get_submodule, blocks):
        if parallel.recompute:
            recompute(block)
        if parallel.compile:
            block.compile()
    return handle, optimizer


def planned_bytes(config: Config, handle: zeroshard.Handle) -> dict[str, int]:
    """The bytes of each kind that this rank will hold between steps. Planned after `shard`, because only the ranks know
    whether they can read each other's memory."""
    engine, batch = handle.engine, config.batch
    needs = OptimizerNeeds(group_of=lambda name: has_decay(handle.model.get_parameter(name)))
    topology = Topology.of(engine.collectives)
    specs = [unit.spec for unit in engine.units]
    training = Training.of(specs, handle.plan, topology, needs, engine.collectives.mesh.shard.rank)
    return asdict(training.held(no_sync=batch.micro_batches > 1 and not batch.reduce_every_micro_batch))


def load_run(handle: zeroshard.Handle, optimizer: zeroshard.ShardedOptimizer, found: Found) -> Position:
    """Load the state of a saved step, but keep the hyper-parameters of this run's configuration. Collective.

    Returns:
        What the saved run had done.
    """
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    position = Position(0, "")
    try:
        zeroshard.load(found.folder, handle, optimizer, step=found.step, extra={KEY: position})
    except zeroshard.CheckpointError as error:
        raise UserError(str(error)) from error
    # `load` has put the saved lr, betas, ... into the groups; values changed on the command line must win.
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return position


def save_run(run: Run, step: int, *, background: bool = False) -> None:
    """Save the state after `step` steps into the run's folder, and remove old steps as `run.keep_last` and
    `run.keep_every` say. Collective. `background`: return while the files are still being written. If the save before
    has failed in the background, a warning says so, and this one is done before the return.

    Raises:
        UserError: on every rank: this step cannot be written.
    """
    keep = run.config.run
    position = Position(run.scheduler.last_epoch, run.corpus.digest)

    def prune() -> None:
        try:
            zeroshard.prune(run.folder, keep_last=keep.keep_last, keep_every=keep.keep_every)
        except (OSError, zeroshard.CheckpointError) as error:  # the next save tries again
            LOGGER.warning("old steps are not removed: %s", in_words(error) if isinstance(error, OSError) else error)

    try:
        # Before pruning: the step that is being written in the background is not in the folder yet and would not count.
        # Together, as a rank may have given up waiting for a verdict that the others have got.
        run.ranks.together(run.handle.finish_background)
    except UserError as error:  # the disk may have room again: this step is not to be lost with it
        background = False
        if run.ranks.rank == 0:
            LOGGER.warning("%s; step %d is saved now", error, step)
    try:
        if background:  # the save below returns before its step is in the folder, so pruning after it would not see it
            run.ranks.first_does(prune)
        zeroshard.save(run.folder, run.handle, run.optimizer, step=step, extra={KEY: position}, background=background)
    except zeroshard.CheckpointError as error:
        raise UserError(str(error)) from error
    if not background:
        run.ranks.first_does(prune)


def make_optimizer(config: Config, model: nn.Module) -> zeroshard.ShardedOptimizer:
    """AdamW; weight decay for matrices only."""
    settings = config.optimizer
    groups = [
        {"params": [p for p in model.parameters() if has_decay(p)], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if not has_decay(p)], "weight_decay": 0.0},
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
    """Warm-up and cosine decay, at the position after `updates` updates. The peak learning rate is that of this run's
    configuration, also after a resume."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # a loaded group has that of the saved run
    return LambdaLR(optimizer, lambda now: learning_rate_factor(now, schedule), last_epoch=updates - 1)


def learning_rate_factor(updates: int, schedule: ScheduleConfig) -> float:
    """The factor of the peak learning rate after `updates` updates: rises linearly over the warm-up, then falls as
    half a cosine to `final_share`."""
    if updates < schedule.warmup:
        return (updates + 1) / schedule.warmup
    progress = min(1.0, (updates - schedule.warmup) / max(1, schedule.steps - schedule.warmup))
    return schedule.final_share + (1 - schedule.final_share) * (1 + math.cos(math.pi * progress)) / 2


def make_folder(config: Config, resume: Path | None, occupied: bool, occupation: Occupation) -> Path:
    """Create the run's folder, take it, and write the resolved configuration into it.

    Raises:
        UserError: the folder contains another run (and neither `occupied` nor `resume` allows that), or files of the
            user that the run would replace; it is in use, lies in the text, or cannot be written.
    """
    folder = Path(config.run.out or default_folder())
    lived_in = (folder / METRICS).exists() or bool(zeroshard.checkpoint.steps(folder))
    is_new = resume is None or folder.resolve() != resume.resolve()
    if lived_in and not occupied and is_new:
        same = f"continue it with --resume {quote(str(folder))}, or choose another --out"
        raise UserError(f"{folder} already holds a run: {same}")
    if is_new and not is_written(folder / CONFIG):
        for name in (CONFIG, *((FOLDER,) if config.model.config else ())):
            if (folder / name).exists():
                raise UserError(f"{folder / name} is of no run, and this one would write its own: choose another --out")
    if would_read(config.data, folder):
        raise UserError(
            f"{folder} lies in the text, --data {config.data.path}: what the run writes there would be text of the run "
            "that continues it, which is refused then. Choose a folder outside of it by --out, or one whose name "
            "begins with a dot"
        )
    try:
        with files.made(folder):
            occupation.take(folder)
            write(config, folder / CONFIG)
            if config.model.config:
                keep_config(folder, Path(config.model.config))
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {in_words(error)}") from None
    return folder


def default_folder() -> str:
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"
