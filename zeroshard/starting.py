"""Comes before all imports: whether this system will do, and signals while the command starts. (Its imports take
seconds, and would print an interrupt or swallow it; other signals would end a run that is to stop or save.)"""

import os
import signal
import sys
import threading
from itertools import pairwise
from types import FrameType

from zeroshard.errors import NotInstalled

if os.name != "posix":  # modules of Python that only POSIX has are imported
    raise NotInstalled(
        "zeroshard runs on Linux and macOS. On Windows, install it in WSL, the Windows Subsystem for Linux"
    )

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes of the command."""

told: set[int] = set()
"""The signals that came before a rank of `zeroshard train` could act on them: `train.loop.Requests` does."""


def begun() -> None:
    """From here on an interrupt and a SIGTERM are exceptions, so that files which are being written are removed."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def exit_code() -> int:
    """Of a command that was interrupted."""
    return 128 + signal.SIGTERM if signal.SIGTERM in told else INTERRUPTED


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait
    told.add(number)
    raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    # No exception: a library that is being imported would turn it into one of its own.
    try:
        os.write(2, b"\ninterrupted\n")  # the terminal has printed ^C
    finally:  # nobody may read it any longer
        os._exit(INTERRUPTED)


def _note(number: int, frame: FrameType | None) -> None:
    told.add(number)


def _is_command() -> bool:
    """Whether this process is the `zeroshard` command or `python -m zeroshard`, not a program that imports the library.
    While a package is being imported for -m, the name of the program is "-m"."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", []) else ""
    return program == "zeroshard" or (program == "-m" and ("-m", "zeroshard") in pairwise(sys.orig_argv))


_is_ours = _is_command() and threading.current_thread() is threading.main_thread()
if _is_ours:
    # Ranks do not leave one by one: the others would wait for them, and the launcher would report a failure.
    is_rank = "RANK" in os.environ
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of a job that ignores it
        signal.signal(signal.SIGINT, _note if is_rank else _leave)
    if is_rank and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _note)
    if "train" in sys.orig_argv and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _note)  # also of a run of one rank, and of the process that will start the ranks
