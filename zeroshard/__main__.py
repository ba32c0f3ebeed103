"""`python -m zeroshard` and the `zeroshard` command."""

import sys

_FROM_THE_EXTRA = {"click", "numpy", "psutil", "pydantic", "rich", "safetensors", "tomli_w"}


def main() -> None:
    try:
        from .cli import run
    except ModuleNotFoundError as error:
        if error.name in _FROM_THE_EXTRA:
            sys.exit(f"zeroshard: the command line needs {error.name}: pip install 'zeroshard[train]'")
        raise
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
