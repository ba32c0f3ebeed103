"""The errors of zeroshard: each is an `Error`, and also a subclass of the matching built-in exception."""

from __future__ import annotations

import copyreg
from typing import Any


class Error(Exception):
    """Base class of all errors that zeroshard raises. Errors of torch, of the system and of your own code are passed
    through unchanged. They can be pickled, as process pools and Ray do with what their workers raise."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by `__init__`, which may have other arguments. The attributes include the notes.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class InvalidValue(Error, ValueError):
    """An argument, a model or a setting that cannot be used, or that differs between ranks."""


class NeedsFP32(InvalidValue):
    """Modules that cannot compute in the 16-bit precision that they were given."""


class InvalidType(Error, TypeError):
    """An argument of the wrong type."""


class InvalidState(Error, RuntimeError):
    """A call that is not possible in the current state: another call must come first, or something has failed."""


class NotFinite(InvalidState):
    """The gradient of a step is not finite, on every rank; the step has changed nothing."""


class InvalidKey(Error, KeyError):
    """A key that does not exist."""


class AlreadyExists(Error, FileExistsError):
    """A file or folder that would be overwritten."""


class SystemRefused(Error, OSError):
    """An operation that the operating system refused."""


class TookTooLong(Error, TimeoutError):
    """Ranks did not end in time."""


class NotInstalled(Error, ModuleNotFoundError):
    """What is needed is not installed: an optional library, or modules of Python that this system does not have."""
