"""`python -m zeroshard` and the `zeroshard` command."""

import contextlib
import io
import os
import sys

_FROM_THE_EXTRA = {"psutil", "pydantic", "rich", "tomli_w"}


def main() -> None:
    _make_streams_usable()
    try:
        from zeroshard.cli.main import run

        code = run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if error.name in _FROM_THE_EXTRA:
            print(
                f"zeroshard: error: `zeroshard {sys.argv[1]}` needs the package {error.name}, which comes with the "
                "extra 'train': pip install 'zeroshard[train]'",
                file=sys.stderr,
            )
            code = 2
        else:
            raise
    if "zeroshard.comm.watch" in sys.modules:
        sys.modules["zeroshard.comm.watch"].stop()
    with contextlib.suppress(OSError):  # whoever wrote this has noticed
        sys.stdout.flush()
    # Not sys.exit: a communication thread that releases a Python object while the interpreter shuts down aborts the
    # process ("terminate called without an active exception"; seen about once in 50 error exits).
    os._exit(code)


def _make_streams_usable() -> None:
    """Output goes nowhere where the caller has closed a stream (`>&-`); otherwise a file that the command opens would
    get its number. What the encoding of a terminal or a locale lacks is escaped, as Python does on stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
