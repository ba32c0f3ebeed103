"""Starts commands as a shell would, without the three seconds that a new interpreter needs to import torch.

    process = Forked([sys.executable, "-m", "zeroshard", "train", ...], stdout=PIPE, text=True)

is `subprocess.Popen`, except that a fork of this process, which has imported everything, runs the module, program or
script in place of a new interpreter. The fork has its own standard streams, environment and process id, and default
signal handlers. A launcher's ranks are its children: forked in the same way, or, with `ranks=subprocess.Popen`,
interpreters.
What depends on an interpreter's start or end is tested with real ones
(`test_five_lines_and_the_command_in_an_empty_environment`, and one rank of
`test_it_is_finished_before_the_process_ends`, of `test_a_rank_that_dies_ends_the_run` and of
`test_ordinary_scripts_under_torchrun`).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous


class Forked(subprocess.Popen):
    """`args` begin with this interpreter, followed by `-m module`, `-c program` or a script, and its arguments.
    `ranks`: how torch's launcher starts its ranks; None: forked."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        ranks: type[subprocess.Popen[Any]] | None = None,
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        """`before`: called in the fork, before the program: what is not there when an interpreter starts."""
        interpreter, *rest = args
        while rest[:1] == ["-u"]:
            rest.pop(0)
        assert interpreter == sys.executable, args
        # preexec_fn runs between fork and exec. `become` never returns, so there is no exec.
        environment = dict(os.environ if env is None else env)
        program = partial(become, partial(_run, rest, ranks or Forked), environment, before=before)
        super().__init__(args, preexec_fn=program, restore_signals=False, **options)


class OneAnInterpreter(Forked):
    """A launcher's ranks: rank `number` is an interpreter, the others are forked."""

    number: int

    def __new__(cls, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        if env["RANK"] == str(cls.number):
            return subprocess.Popen(args, env=env, **options)
        return super().__new__(cls)


class FirstAnInterpreter(OneAnInterpreter):
    number = 0


class LastOfTwoAnInterpreter(OneAnInterpreter):
    number = 1


def become(
    program: Callable[[], int],
    environment: Mapping[str, str],
    *,
    before: Callable[[], None] | None = None,
    old_stdout: int = 1,
) -> NoReturn:
    """Run `program` in this forked process as if an interpreter had started for it; it returns the exit status.
    `before`: called before that. `old_stdout`: the descriptor to which the stdout object that was there before the fork
    writes now."""
    status = 1
    try:
        gc.freeze()
        _own_streams(old_stdout)
        os.environ.clear()
        os.environ.update(environment)
        _as_an_interpreter_starts()
        if before is not None:
            before()
        status = program()
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def _own_streams(old_stdout: int) -> None:
    """Make descriptors 0 to 2 this program's streams. The old stream objects (loggers hold them) write there, too."""
    kept = {0, 1, 2}
    for stream, number in ((sys.stdout, old_stdout), (sys.stderr, 2)):
        with suppress(AttributeError, OSError, ValueError, io.UnsupportedOperation):
            if stream.fileno() > 2:
                os.dup2(number, stream.fileno())
                kept.add(stream.fileno())
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with suppress(OSError):
                os.close(number)
    faulthandler.disable()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def _as_an_interpreter_starts() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    atexit._clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _print_warning
    random.seed()
    tempfile.tempdir = None  # found anew, from this program's TMPDIR
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _print_warning(message: Any, category: Any, filename: str, line: int, file: Any = None, text: Any = None) -> None:
    print(warnings.formatwarning(message, category, filename, line, text), end="", file=file or sys.stderr)


def _run(arguments: list[str], ranks: type[subprocess.Popen[Any]]) -> int:
    """Run the module or script; returns the exit status that the interpreter would return."""
    subprocess_handler.Popen = ranks
    # It searches all imported modules for the source of each frame, twice for each event that nobody reads. Here, where
    # all tests' modules are imported, that would take a second of each launcher's time.
    dynamic_rendezvous.get_method_name = lambda: "not looked up"
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            for name in (arguments[1], f"{arguments[1]}.__main__"):
                if name not in sys.modules or not hasattr(sys.modules[name], "__path__"):
                    sys.modules.pop(name, None)  # else runpy warns that the module is imported already
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))  # as an interpreter does, for its imports
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
