"""`python -m zeroshard` and the `zeroshard` command."""

import codecs
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
    if "zeroshard.failures.watch" in sys.modules:
        sys.modules["zeroshard.failures.watch"].stop()
    with contextlib.suppress(OSError):  # whoever wrote this has noticed
        sys.stdout.flush()
    # Not sys.exit: a communication thread that releases a Python object while the interpreter shuts down aborts the
    # process ("terminate called without an active exception"; seen about once in 50 error exits).
    os._exit(code)


def _make_streams_usable() -> None:
    """Output goes nowhere where the caller has closed a stream (`>&-`); otherwise a file that the command opens would
    get its number."""
    codecs.register_error("zeroshard", _as_bytes_or_escaped)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the process ends
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="zeroshard")


def _as_bytes_or_escaped(error: UnicodeError) -> tuple[bytes, int]:
    """What the encoding of a terminal or a locale lacks: the bytes of a file's name as they are, so that the name can
    be used, and all else escaped."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start]
    way = "surrogateescape" if "\udc80" <= lacking <= "\udcff" else "backslashreplace"
    return lacking.encode("ascii", way), error.start + 1


if __name__ == "__main__":
    main()
