"""`python -m zeroshard` and the `zeroshard` command."""

import contextlib
import os
import sys

_FROM_THE_EXTRA = {"psutil", "pydantic", "rich", "tomli_w"}


def main() -> None:
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
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    # Not sys.exit: a communication thread that releases a Python object while the interpreter shuts down aborts the
    # process ("terminate called without an active exception"; seen about once in 50 error exits).
    os._exit(code)


if __name__ == "__main__":
    main()
