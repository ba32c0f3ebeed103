"""The training loop of one rank. Every rank runs this same program; only rank 0 prints and records metrics.

join the ranks -> text, model, optimizer, a saved step        (run.start_run)
for each step:   micro-batches, reduce, clip, step, schedule   (train_step)
                 exchange loss and requests                    (Ranks.sum)
                 evaluate, save, stop                          (fit)
save -> evaluate -> sample -> table of bytes
"""

import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn, Self, cast

import psutil
import torch
from rich.console import Console

import zeroshard
from zeroshard import starting
from zeroshard.comm.packets import to_device
from zeroshard.errors import NotFinite
from zeroshard.failures import watch
from zeroshard.io.logger import LOGGER
from zeroshard.io.refused import in_words
from zeroshard.train.config import Config, UserError
from zeroshard.train.data import read_windows, validation_windows
from zeroshard.train.metrics import Observers, StepRecord, ValidationRecord
from zeroshard.train.progress import Output
from zeroshard.train.ranks import Ranks, joined
from zeroshard.train.run import Occupation, Run, save_run, start_run
from zeroshard.train.telling import conclude, introduce, observers
from zeroshard.train.trackers import expect_observers


@dataclass(frozen=True)
class Outcome:
    step: int
    validation_loss: float | None  # None: the run was stopped before its last step
    folder: Path


class Requests:
    """Turns signals into requests that are honoured after the current step: SIGINT and SIGTERM stop, SIGUSR1 saves.

    On a second stop signal the process tells the other ranks and exits at once. A second signal within `SAME_SECONDS`
    does not count: a scheduler may signal both the ranks and their launcher, and the launcher passes the signal on.
    """

    SAME_SECONDS = 1.0

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        self._told = 0.0
        self._previous: dict[signal.Signals, signal.Handlers | None] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only sets flags: Python runs signal handlers between any two bytecodes, so a collective or a save from here
        # could start in the middle of another one.
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.stop:
            self.stop, self._told = True, time.monotonic()
        elif time.monotonic() - self._told > self.SAME_SECONDS:
            watch.abort(KeyboardInterrupt(f"told to stop twice ({signal.Signals(number).name})"), quiet=True)
            # Not sys.exit: it would unwind through code that may be waiting in a collective for the other ranks.
            os._exit(128 + number)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._note)  # type: ignore[assignment]
        for early in starting.told:
            self._note(early, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def train(config: Config, *, resume: Path | None = None, occupied: bool = False, stop_at: int | None = None) -> Outcome:
    """Train as `config` says, on this rank; collective.

    Args:
        resume: the folder of a saved run to continue.
        occupied: the folder may contain a run that has saved nothing yet; that run is replaced.
        stop_at: stop after this many steps, as Control-C would, without changing the learning rate schedule.

    Raises:
        UserError: on every rank, for a problem that the user can fix: options, files, folders.
    """
    with Requests() as requests, joined(config.parallel) as ranks, Occupation() as occupation:
        console = Console(file=cast(IO[str], Output(sys.stdout)), quiet=ranks.rank != 0)
        ranks.first_does(lambda: expect_observers(config.run.observers))
        run, found = start_run(config, ranks, resume, occupation, occupied=occupied)
        first_step = 0 if found is None else found.step
        introduce(run, found, console)
        summary, watching = ranks.together(lambda: observers(run, first_step, console))
        with Observers(watching) as watchers:
            step = fit(run, first_step, requests, watchers, max(first_step, stop_at or config.schedule.steps))
            save_run(run, step)
            loss = evaluate(run) if step == config.schedule.steps else None
            if loss is not None:
                watchers.on_validation(validation_record(run, step, loss))
        # What rank 0 does alone may take longer than a collective waits: observers send what they have left, and then
        # a page is drawn.
        zeroshard.wait_for_all()
        conclude(run, step, summary, console)
        zeroshard.wait_for_all()
        run.handle.close()
    return Outcome(step, loss, run.folder)


def fit(run: Run, first_step: int, requests: Requests, watchers: Observers, last_step: int) -> int:
    """Run the steps [first_step, last_step), or fewer if any rank is asked to stop. Returns the number of steps done
    since the beginning of training. Collective."""
    config, ranks = run.config, run.ranks
    tokens_per_step = config.tokens_per_step
    began = time.perf_counter()
    for step in range(first_step, last_step):
        step_began, waited = time.perf_counter(), run.handle.comm_log.wait_seconds
        lr = float(run.scheduler.get_last_lr()[0])
        try:
            with recorded(run, step):
                loss, result, data_seconds, held = train_step(run, step)
        except NotFinite as error:
            end_before(run, step, error, is_saved=step == first_step)
        if result.applied:
            run.scheduler.step()

        asked, requests.save = requests.save, False  # a signal from here on counts for the next step
        # A signal reaches one rank at its own moment, so the ranks add up their requests. Branching on `requests.stop`
        # itself would make one rank leave while the others wait for it in the next collective.
        loss, stop, save_now = ranks.sum([loss / ranks.world_size, requests.stop, asked])
        now, done = time.perf_counter(), step + 1
        flops = tokens_per_step / (now - step_began) * run.language.flops_per_token
        memory, peak = process_memory(ranks)
        record = StepRecord(
            step=done,
            loss=loss,
            lr=lr,
            grad_norm=result.grad_norm,
            applied=result.applied,
            loss_scale=result.loss_scale,
            tokens_per_second=tokens_per_step / (now - step_began),
            communication_share=(run.handle.comm_log.wait_seconds - waited) / (now - step_began),
            memory_bytes=memory,
            peak_memory_bytes=peak,
            engine_bytes=sum(held["between steps"].values()),
            planned_bytes=sum(run.planned_bytes.values()),
            held=held,
            seconds=now - step_began,
            eta_seconds=(now - began) / (done - first_step) * (config.schedule.steps - done),
            data_seconds=data_seconds,
            tokens=run.tokens_before + (done - first_step) * tokens_per_step,
            wall_seconds=now - run.began,
            flops_per_second=flops,
            mfu=run.peak_flops and flops / run.peak_flops,
            bytes_per_token=run.corpus.bytes_per_token["train"],
        )
        watchers.on_step(record)

        if stop or done == last_step:
            return done
        if done % config.evaluation.every == 0:
            watchers.on_validation(validation_record(run, done, evaluate(run)))
        if save_now or (config.run.save_every and done % config.run.save_every == 0):
            save_run(run, done, background=True)
    return last_step


def end_before(run: Run, step: int, error: NotFinite, *, is_saved: bool) -> NoReturn:
    """Save the `step` steps that were done, and end the run. Collective.

    Raises:
        UserError: on every rank.
    """
    run.optimizer.zero_grad()
    if not is_saved:
        save_run(run, step)
    hint = f"Step {step} is saved: continue it" if step else "Begin"
    raise UserError(f"step {step + 1}: {error}. {hint} with another --lr, --seed or --precision") from error


@contextmanager
def recorded(run: Run, step: int) -> Iterator[None]:
    """A block around a step. If its timeline was asked for, each rank writes its own into the run's folder."""
    if step + 1 != run.config.run.timeline:
        yield
        return
    with run.handle.timeline() as timeline:
        yield
    path = run.folder / f"timeline-{run.ranks.rank}.json.gz"
    try:
        timeline.export_chrome_trace(path)
    except OSError as error:  # no picture is worth the run
        with suppress(OSError):
            path.unlink()
        LOGGER.warning("NO timeline of rank %d was written: %s", run.ranks.rank, in_words(error))


def train_step(run: Run, step: int) -> tuple[float, zeroshard.StepResult, float, dict[str, dict[str, int]]]:
    """One optimizer step on this rank's part of the global batch.

    Returns:
        The mean loss of that part in nats; the result of the step; the seconds spent waiting for data; the bytes that
        the engine holds at the end of "forward" and "backward" and "between steps", and the most so far ("at most").
    """
    config, ranks, optimizer = run.config, run.ranks, run.optimizer
    torch.manual_seed(seed_of(config.run.seed, step, ranks.rank))
    optimizer.zero_grad()
    total, data_seconds, held = torch.zeros((), device=ranks.device), 0.0, dict[str, dict[str, int]]()
    for micro_batch in range(config.batch.micro_batches):
        before = time.perf_counter()
        tokens, targets = run.batches.read(step, micro_batch, ranks.rank, ranks.world_size)
        # `Tensor.to` from memory that is not pinned would wait for all that the device has queued.
        tokens, targets = to_device(tokens, ranks.device), to_device(targets, ranks.device)
        data_seconds += time.perf_counter() - before
        loss = run.language.loss(tokens, targets) / config.batch.micro_batches
        last = micro_batch == config.batch.micro_batches - 1
        if last:
            held["forward"] = run.handle.memory()
        with nullcontext() if last or config.batch.reduce_every_micro_batch else run.handle.no_sync():
            optimizer.backward(loss)
        total += loss.detach()
    held["backward"] = run.handle.memory()
    if config.optimizer.clip:
        optimizer.clip_grad_norm_(config.optimizer.clip)
    result = optimizer.step()
    held |= {"between steps": run.handle.memory(), "at most": run.handle.memory(peak=True)}
    return total.item(), result, data_seconds, held


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss over the evaluation windows, in nats; each rank reads every world_size-th. Collective."""
    config, ranks = run.config, run.ranks
    tokens, context = run.corpus.validation, config.model.context
    mine = validation_windows(tokens, context, config.evaluation.windows, ranks.world_size)[
        ranks.rank :: ranks.world_size
    ]
    size = run.batches.sequences // (run.batches.micro_batches * ranks.world_size)
    run.language.model.eval()
    total = 0.0
    for first in range(0, len(mine), size):
        windows = mine[first : first + size]
        inputs, targets = read_windows(tokens, windows, context)
        total += run.language.loss(inputs.to(ranks.device), targets.to(ranks.device)).item() * len(windows)
    run.language.model.train()
    return ranks.sum([total / len(mine) / ranks.world_size])[0]


def validation_record(run: Run, step: int, loss: float) -> ValidationRecord:
    return ValidationRecord(step, loss, run.corpus.bytes_per_token["validation"])


def seed_of(seed: int, step: int, rank: int) -> int:
    """The seed of a step's random numbers on one rank. It depends only on (seed, step, rank), so a resumed run draws
    the same numbers as an uninterrupted one."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "little")


def process_memory(ranks: Ranks) -> tuple[int, int]:
    """Bytes now and at the peak: allocated by torch on the GPU, or the resident memory of the process on a CPU."""
    if ranks.device.type == "cuda":
        return torch.cuda.memory_allocated(ranks.device), torch.cuda.max_memory_allocated(ranks.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        now = psutil.Process().memory_info().rss
    except psutil.Error:  # no /proc (a chroot)
        now = peak
    return now, max(now, peak)
