"""What a run tells: its observers, the lines before its first step and after its last one, the sample and the page."""

import os
from shlex import quote

import torch
from rich.console import Console

from zeroshard.checkpoint import steps
from zeroshard.comm.transport import TransportName
from zeroshard.io.logger import LOGGER
from zeroshard.io.refused import in_words
from zeroshard.io.whole import write_whole
from zeroshard.train.config import fields, value_of
from zeroshard.train.language import continue_text
from zeroshard.train.launch import times_restarted
from zeroshard.train.metrics import METRICS, JsonLines, Observer, StartRecord, TensorBoard
from zeroshard.train.progress import Progress, bytes_table, sample_panel, si, tell
from zeroshard.train.release import release
from zeroshard.train.resume import Found
from zeroshard.train.run import Run
from zeroshard.train.summary import Summary
from zeroshard.train.trackers import Guarded, RunInfo, attach


def observers(run: Run, first_step: int, console: Console) -> tuple[Summary, list[Observer]]:
    """The summary of the session, and all observers (this one included) in the order in which they get a record. On
    ranks other than 0 there are none."""
    if run.ranks.rank != 0:
        return Summary(), []
    settings = run.config.run
    about = RunInfo(run.folder, {key: value_of(run.config, key) for key, _ in fields()}, first_step)
    trackers = attach(settings.observers, about)  # before any record: if one can't be started, this is no run yet
    json_lines = JsonLines(run.folder / METRICS, first_step)
    json_lines.on_start(start_record(run, first_step))
    summary = Summary(json_lines.validations)
    watching: list[Observer] = [json_lines, summary, *trackers]
    if TensorBoard.installed():
        watching.append(Guarded("tensorboard", TensorBoard(run.folder / "tensorboard", first_step)))
    progress = Progress(console, run.config.schedule.steps, settings.log_every, settings.log_seconds)
    return summary, [*watching, progress]


def start_record(run: Run, first_step: int) -> StartRecord:
    parallel, where = run.config.parallel, (run.ranks.world_size, run.ranks.device.type, transport_of(run))
    batch, what = run.config.batch.model_dump(), (first_step, parallel.plan, parallel.precision)
    return StartRecord(*what, *where, times_restarted(), batch, parallel.recompute)


def transport_of(run: Run) -> TransportName:
    """How the ranks of this run exchange buffers."""
    return run.handle.engine.collectives.transport.name


def introduce(run: Run, found: Found | None, console: Console) -> None:
    """Print what is about to run, where its folder is and which signals it obeys."""
    parallel, ranks = run.config.parallel, run.ranks
    tell(
        console,
        f"{si(run.numel)} parameters, {parallel.plan}, {parallel.precision}, {ranks.world_size} x {ranks.device.type}",
    )
    corpus, tokens = run.corpus, run.tokenizer.vocabulary
    tell(
        console,
        f"text: {si(len(corpus.train))} tokens to train ({corpus.bytes_per_token['train']:.2f} bytes each), "
        f"{si(len(corpus.validation))} to validate",
    )
    if run.language.hf_config is not None and (known := run.language.hf_config.vocab_size) >= 2 * tokens:
        tell(console, f"the model has {known:,} tokens, the text only {tokens:,}: --data.tokenizer names a tokenizer")
    tell(console, f"run folder {run.folder}")
    tell(console, f"Control-C stops and saves, kill -USR1 {os.getpid()} saves")
    for problem in () if found is None else found.skipped:
        tell(console, f"SKIPPED a damaged checkpoint: {problem}")
    if found is not None:
        tell(console, f"resumed after step {found.step} of {found.folder}")
    timeline, last = run.config.run.timeline, run.config.schedule.steps
    if found is not None and 0 < timeline <= found.step:
        tell(console, f"NO timeline in this session: step {timeline} of run.timeline is done already")
    elif timeline > last:  # A configuration of a longer run, with --steps.
        tell(console, f"NO timeline: step {timeline} of run.timeline comes after the last step, {last}")


def conclude(run: Run, step: int, summary: Summary, console: Console) -> None:
    """Print how the run went: after the last step with a sample and the table of bytes, after an earlier one with the
    command that continues it. Collective."""
    is_complete = step == run.config.schedule.steps
    if is_complete:
        show_model(run, console)
    for line in summary.lines():
        tell(console, line)
    if skipped := step - run.scheduler.last_epoch:
        tell(console, f"{skipped} of {step} steps were skipped: a gradient overflowed at the loss scale of the time")
    if not is_complete:
        command = f"zeroshard train --resume {quote(str(run.folder))}"
        tell(console, f"stopped after step {step} and saved; continue with: {command}")
        return
    tell(console, f"saved in {run.folder}, with {METRICS}")
    if run.language.hf_config is not None:
        saved = steps(run.folder)[step]
        folder = run.ranks.first_does(lambda: release(saved, run.folder, run.language, run.tokenizer))
        tell(console, f"for from_pretrained: {folder}")
    if run.config.run.report and run.ranks.rank == 0:
        tell(console, written_report(run))


def written_report(run: Run) -> str:
    """Write the run's page. Returns a line that names it, or that says why there is none: the run itself is saved, and
    no defect of a picture may end it with an error."""
    from zeroshard.report import PAGE, Report, read_run
    from zeroshard.train.planned import Place, facts_of_run

    try:
        place = Place(run.ranks.world_size, run.ranks.device.type, transport_of(run))
        facts = facts_of_run(run.config, place, str(run.folder))
        return f"report {Report(facts, read_run(run.folder)).write(run.folder / PAGE)}"
    except Exception as error:
        return f"NO report was written ({type(error).__name__}: {error}); try zeroshard report {run.folder}"


def show_model(run: Run, console: Console) -> None:
    """Print a sample of text, and the table of bytes. Collective."""
    if run.config.evaluation.sample_tokens:
        text, path = sample(run), run.folder / "sample.txt"
        console.print(sample_panel(text))
        if run.ranks.rank == 0:
            try:
                write_whole(path, text)
            except OSError as error:  # the run itself is saved
                LOGGER.warning("NO sample.txt was written: %s", in_words(error))
    title = f"{run.config.parallel.plan}, {run.config.parallel.precision}, {run.ranks.world_size} ranks"
    console.print(bytes_table(title, run.numel, run.planned_bytes, run.handle.memory(), console.width))


def sample(run: Run) -> str:
    """Text that the model writes. Collective: every rank generates, with the same seed, in the same number of calls."""
    evaluation = run.config.evaluation
    generator = torch.Generator(run.ranks.device).manual_seed(run.config.run.seed)
    prompt = run.tokenizer.encode(evaluation.prompt.encode()).tolist() or [run.tokenizer.separator]
    run.language.model.eval()
    tokens = continue_text(
        run.language.logits,
        torch.tensor([prompt], device=run.ranks.device),
        evaluation.sample_tokens,
        context=run.config.model.context,
        temperature=evaluation.temperature,
        top_k=evaluation.top_k,
        generator=generator,
    )
    run.language.model.train()
    text = run.tokenizer.decode(tokens[0].tolist())
    # An untrained model emits any bytes, also escape sequences that would reprogram the terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
