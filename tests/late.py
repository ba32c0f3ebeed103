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


def late(namespace: dict[str, Any], names: Mapping[str, str]) -> Callable[[], None]:
    """A fixture for a test module with this namespace. `names`: module -> names in it, separated by spaces."""

    @pytest.fixture(autouse=True, scope="module")
    def _late() -> None:
        for module, wanted in names.items():
            namespace.update({name: getattr(importlib.import_module(module), name) for name in wanted.split()})

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
