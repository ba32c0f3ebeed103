"""`zeroshard plan --compare RUN`: prints the planned bytes of a run beside the bytes that it has recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.cli.runs import ranks_that_saved, saved_bytes, saved_run
from zeroshard.cli.terminal import say, table
from zeroshard.planning import Forecast
from zeroshard.planning import plan as plan_one
from zeroshard.planning.in_words import in_units


def compare(folder: Path, *, as_json: bool) -> None:
    """Print planned and recorded bytes at the last step of a run of `zeroshard train`.

    Raises:
        ValueError: the folder contains no such run, a damaged one, or one that has not done a step yet.
    """
    run = saved_run(folder, timeline=False)
    from zeroshard.train.planned import configuration_of, language_of

    language = language_of(run.config)
    forecast = saved = plan_one(language.model, configuration_of(run.config, language, run.place))
    if run.step is not None and (ranks := ranks_that_saved(run.step)) != run.place.ranks:
        of_them = configuration_of(run.config, language, replace(run.place, ranks=ranks))
        saved = plan_one(language.model, replace(of_them, workload=None))
    last, parallel = run.record.last, run.config.parallel
    rows = list(_rows(forecast, saved, last, run.step))
    if as_json:
        found = [{"what": name, "planned": planned, "measured": measured} for name, planned, measured in rows]
        say(json.dumps({"step": last["step"], "of_rank_0": found}, indent=2))
        return
    say(f"{folder}, step {last['step']}: {parallel.plan}, {parallel.precision}, {run.place.ranks} ranks")
    table(("of rank 0", "planned", "measured", "difference"), [(n, *map(in_units, (p, m, m - p))) for n, p, m in rows])
    if run.place.device == "cpu":
        say("The process has Python and its libraries, too, which are not planned: some 300 to 500 MB.")


def _rows(
    forecast: Forecast, saved: Forecast, record: Mapping[str, Any], step: Path | None
) -> list[tuple[str, int, int]]:
    """`saved`: for the ranks that have written the checkpoint `step`."""
    rows = [
        ("the engine, between steps", forecast.at_rest.sum, record["engine_bytes"]),
        ("the process at most", forecast.whole_peak, record["peak_memory_bytes"]),
    ]
    if step is not None:
        rows.append(("files of a checkpoint, all ranks", saved.checkpoint_bytes, saved_bytes(step)))
    return rows
