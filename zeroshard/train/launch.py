"""Start the ranks: `zeroshard train --nproc N` becomes N processes of the same command under torch's elastic launcher.

    zeroshard train --nproc 2 ...                     this process: waits, passes signals on
      └ torch.distributed.launcher (standalone, c10d)
          ├ python -m zeroshard train --nproc 2 ...   RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ...
          └ python -m zeroshard train --nproc 2 ...   RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 ...

`torchrun` sets the same environment, so a rank cannot tell the two apart, and need not.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeroshard.train.ranks import cores

BAD_INPUT = 2
INTERRUPTED = 130
_PROBLEM_FOLDER = "ZEROSHARD_PROBLEM_FOLDER"


def under_launcher() -> bool:
    """Whether this process is a rank that torchrun or `start_ranks` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def times_restarted() -> int:
    """How often the launcher has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if under_launcher() else 0


def refuse(problem: str) -> int:
    """Report bad input as one line and return the exit code. Ranks of `start_ranks` leave the word to their starter."""
    line = " ".join(problem.split())
    if folder := os.environ.get(_PROBLEM_FOLDER):
        Path(folder, os.environ["RANK"]).write_text(line, encoding="utf-8")
    else:
        rank = f" (rank {os.environ['RANK']})" if under_launcher() else ""
        print(f"zeroshard: error{rank}: {line}", file=sys.stderr)
    return BAD_INPUT


def already_refused() -> bool:
    """Whether bad input has been reported: then there is no use in starting again."""
    folder = os.environ.get(_PROBLEM_FOLDER)
    return bool(folder) and times_restarted() > 0 and any(Path(str(folder)).iterdir())


def start_ranks(nproc: int, arguments: list[str], max_restarts: int = 0) -> int:
    """Run `python -m zeroshard <arguments>` in `nproc` ranks on this machine and wait; the exit code of the whole.

    When a rank fails, all are started again, at most `max_restarts` times. The first SIGINT or SIGTERM is passed on as
    a request to stop after the current step; a second one kills.
    """
    _quiet_elastic_logs()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    pass_on = _PassOn()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as folder:
        problems, logs = Path(folder, "problems"), Path(folder, "logs")
        problems.mkdir()
        os.environ[_PROBLEM_FOLDER] = str(problems)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"timeout": 60},
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on
        )
        try:
            elastic_launch(config, sys.executable)("-m", "zeroshard", *arguments)
        except ChildFailedError as error:
            return _explain_failure(*error.get_first_failure(), problems)
    return 0


def _explain_failure(rank: int, failure: ProcessFailure, problems: Path) -> int:
    """Say once what the ranks reported, or which rank failed first; the exit code."""
    said = sorted({file.read_text(encoding="utf-8") for file in problems.iterdir()})
    for problem in said:
        print(f"zeroshard: error: {problem}", file=sys.stderr)
    if said:
        return BAD_INPUT
    if failure.exitcode != INTERRUPTED:
        what = f"died of {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "failed"
        print(f"zeroshard: error: rank {rank} {what}; the other ranks were stopped", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 1


class _PassOn:
    """Signal handler of the waiting process: requests go to the ranks, a second SIGINT or SIGTERM ends them."""

    def __init__(self) -> None:
        self._stopping = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        if number != signal.SIGUSR1 and (self._stopping or not ranks):
            for rank in ranks:
                rank.kill()
            raise KeyboardInterrupt
        self._stopping |= number != signal.SIGUSR1
        for rank in ranks:
            rank.send_signal(number)


def _quiet_elastic_logs() -> None:
    """Its errors repeat at length what the failed rank has printed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
