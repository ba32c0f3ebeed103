"""zeroshard itself imports none of the libraries. If a library is missing, the error names it and how to install it."""

from __future__ import annotations

import importlib
import sys

import pytest

from zeroshard.testing import run_ranks

NEEDED = {
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch_lightning",
}


def hide(*names: str) -> None:
    for name in names:
        sys.modules.pop(name, None)


def test_a_library_that_is_missing_is_named_with_the_line_that_installs_it() -> None:
    def check(rank: int) -> None:
        for module, library in NEEDED.items():
            hide("zeroshard.integrations.accelerate", f"zeroshard.integrations.{module}")
            hidden = [one for one in sys.modules if one.partition(".")[0] == library]
            with pytest.MonkeyPatch.context() as patch:
                for name in [*hidden, library]:  # as if it were not installed
                    patch.setitem(sys.modules, name, None)
                extra = library.removeprefix("pytorch_")
                with pytest.raises(
                    ModuleNotFoundError, match=rf"needs {library} .* pip install 'zeroshard\[{extra}\]'"
                ):
                    importlib.import_module(f"zeroshard.integrations.{module}")

    pytest.importorskip("accelerate")  # the Trainer's integration is built on it
    run_ranks(check, 1)


def test_the_package_imports_none_of_them() -> None:
    def check(rank: int) -> None:
        for name in [one for one in sys.modules if one.partition(".")[0] in (*NEEDED, "zeroshard")]:
            del sys.modules[name]
        zeroshard = importlib.import_module("zeroshard")
        assert "zeroshard.integrations" not in sys.modules
        assert zeroshard.integrations.Sharding(plan="zero1").plan == "zero1"
        assert zeroshard.integrations.dcp.stateful.__module__ == "zeroshard.integrations.dcp"
        with pytest.raises(AttributeError, match=r"'zeroshard\.integrations' has no attribute 'acelerate'"):
            _ = zeroshard.integrations.acelerate
        assert not [library for library in NEEDED if library in sys.modules]
        assert "zeroshard.integrations.sharding" in sys.modules

    run_ranks(check, 1)
