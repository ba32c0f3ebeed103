"""Starts the ranks: `zeroshard train --nproc N` runs N processes of the same command under torch's elastic launcher.

    zeroshard train --nproc 2 ...                     this process: waits, forwards signals
      └ torch.distributed.launcher (standalone, c10d)
          ├ python -m zeroshard train --nproc 2 ...   RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ...
          └ python -m zeroshard train --nproc 2 ...   RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 ...

`torchrun` sets the same environment: a rank behaves in the same way under both.
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
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeroshard.comm.joining import warn_of_other_tasks
from zeroshard.starting import BAD_INPUT, INTERRUPTED
from zeroshard.train.ranks import cores

_PROBLEM_FOLDER = "ZEROSHARD_PROBLEM_FOLDER"


def under_launcher() -> bool:
    """Whether this process is a rank that torchrun or `start_ranks` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_others() -> bool:
    """Whether another launcher than `start_ranks` has started this rank."""
    return under_launcher() and _PROBLEM_FOLDER not in os.environ


def times_restarted() -> int:
    """How often the launcher has restarted this rank."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if under_launcher() else 0


def refuse(problem: str) -> int:
    """Report bad input as one line, and return the exit code. Ranks of `start_ranks` write the line to a file, and the
    starting process prints it once."""
    line = " ".join(problem.split())
    if folder := os.environ.get(_PROBLEM_FOLDER):
        Path(folder, os.environ["RANK"]).write_text(line, encoding="utf-8")
    else:
        rank = f" (rank {os.environ['RANK']})" if under_launcher() else ""
        print(f"zeroshard: error{rank}: {line}", file=sys.stderr)
    return BAD_INPUT


def already_refused() -> bool:
    """Whether bad input has been reported in an earlier attempt: then a restart is useless."""
    folder = os.environ.get(_PROBLEM_FOLDER)
    return bool(folder) and times_restarted() > 0 and any(Path(str(folder)).iterdir())


def start_ranks(nproc: int, arguments: list[str], max_restarts: int = 0) -> int:
    """Run `python -m zeroshard <arguments>` in `nproc` ranks on this machine, wait for them, and return the exit code.

    If a rank fails, all ranks are restarted, at most `max_restarts` times. The first SIGINT or SIGTERM is forwarded to
    the ranks, which stop after the current step; a second one kills them.
    """
    warn_of_other_tasks()
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
            # The others are forwarded by `_PassOn`. Where SIGHUP is ignored (nohup), it stays ignored.
            signals_to_handle="SIGQUIT" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else "SIGHUP,SIGQUIT",
        )
        try:
            elastic_launch(config, sys.executable)("-m", "zeroshard", *arguments)
        except ChildFailedError as error:
            return _explain_failure(*error.get_first_failure(), problems)
        except SignalException as error:  # of `signals_to_handle`: torch has ended the ranks
            name = signal.Signals(error.sigval).name
            print(f"zeroshard: error: {name}: the ranks were stopped, without a save", file=sys.stderr)
            return 128 + error.sigval
    return 0


def _explain_failure(rank: int, failure: ProcessFailure, problems: Path) -> int:
    """Print what the ranks reported, once, or which rank failed first. Returns the exit code."""
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
    """Signal handler of the waiting process: forwards signals to the ranks; a second SIGINT or SIGTERM kills them."""

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
    """Silence the elastic launcher: its error logs repeat at length what the failed rank has printed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
