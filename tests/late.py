"""Imports that few tests need, made when the first of these tests runs.

    if TYPE_CHECKING:
        from transformers import LlamaModel

    _late = late(globals(), {"transformers": "LlamaModel"})

Every rank is forked from a process with all that has been imported. With transformers a fork and its end take twice as
long as with torch alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest


def late(namespace: dict[str, Any], names: Mapping[str, str], *, autouse: bool = True) -> Callable[[], None]:
    """A fixture for a test module with this namespace, whose tests are skipped where a library is not installed.

    Args:
        names: module -> names in it, separated by spaces.
        autouse: whether all tests of the module need them; else those that ask for the fixture.
    """

    @pytest.fixture(autouse=autouse, scope="module")
    def _late() -> None:
        for module, wanted in names.items():
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] in ("tests", "zeroshard"):
                    raise
                pytest.skip(f"{error.name} is not installed")
            namespace.update({name: getattr(found, name) for name in wanted.split()})

    return _late


def once(*modules: str) -> Callable[[], None]:
    """A fixture for a test module whose ranks need these modules: they are imported before the ranks are forked, once
    instead of in each of them. One that is not installed is left out, as its tests are skipped."""

    @pytest.fixture(autouse=True, scope="module")
    def _once() -> None:
        with suppress(ModuleNotFoundError):
            for module in modules:
                importlib.import_module(module)

    return _once
