"""The errors of zeroshard: each is an `Error`, and also the class of Python's own that tells the kind of mistake."""


class Error(Exception):
    """Base of every error that zeroshard raises. Those of torch, of the system and of your own code pass through as
    they are."""


class InvalidValue(Error, ValueError):
    """An argument, a model or a setting that cannot be used, or that differs between ranks."""


class InvalidType(Error, TypeError):
    """An object of another kind than the call takes."""


class InvalidState(Error, RuntimeError):
    """A call that is not possible now: another one has to come first, or something has failed."""


class InvalidKey(Error, KeyError):
    """A key that is not there."""


class AlreadyExists(Error, FileExistsError):
    """A file or folder that would be overwritten."""


class SystemRefused(Error, OSError):
    """Something that the operating system did not do."""


class TookTooLong(Error, TimeoutError):
    """Ranks that had not ended in time."""


class NotInstalled(Error, ModuleNotFoundError):
    """A library that something here is for."""
