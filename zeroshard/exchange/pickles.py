"""Reads pickles as data: nothing is imported, looked up or called, whatever a pickle contains.

A pickle is a program for a small stack machine. This machine supports only the instructions that build numbers,
strings, lists, tuples and dicts. A class or function becomes a `Name`, and only if the caller has allowed it. A call
becomes a `Recipe`: the name, the arguments, and the state that the object would have had. A member of an enum is the
call of its class; Python 3.11.0 to 3.11.3 write `getattr(class, name)` instead, which is read as the same.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from zeroshard.io.checked import CheckpointError, refuse, short


@dataclass(frozen=True)
class Name:
    """A class or a function, never looked up: `module.name`."""

    text: str


@dataclass(eq=False)
class Recipe:
    """The object that `of(*args)` would have made, with the state that would have been set."""

    of: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class Persistent:
    """A reference to an object outside the pickle."""

    id: Any


def read_pickle(data: bytes, allowed: Set[str]) -> Any:
    """The value in a pickle.

    Raises:
        CheckpointError: a name is not in `allowed`; an instruction is not supported; or it is no valid pickle.
    """
    machine = _Machine(allowed)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name == "STOP":
                return machine.result()
            machine.step(instruction.name, argument)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"is not a valid pickle, or has been cut off: {str(error)[:100]}") from None
    refuse("is a pickle without an end")


_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_MARK = object()
_GETATTR = "builtins.getattr"


@dataclass
class _Machine:
    allowed: Set[str]
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def result(self) -> Any:
        (value,) = self.stack
        return value

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            pass
        elif name in _PUSHED:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._pop(int(name[-1]))))
        elif name in ("APPEND", "APPENDS"):
            values = self._pop(1) if name == "APPEND" else self._since_mark()
            _expect(stack[-1], list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self._pop(2) if name == "SETITEM" else self._since_mark()
            target = _expect(stack[-1], dict)
            for key, value in zip(values[::2], values[1::2], strict=True):
                if not isinstance(key, (str, int, Recipe)):  # hashing a deeply nested tuple could exhaust the stack
                    refuse(f"has a dict with a key of type {type(key).__name__}")
                target[key] = value
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ") if name == "GLOBAL" else self._pop(2)
            stack.append(self._name(".".join(_expect(part, str) for part in parts)))
        elif name in ("REDUCE", "NEWOBJ"):
            of, args = self._pop(2)
            stack.append(_recipe(_expect(of, Name), _expect(args, tuple)))
        elif name == "BUILD":
            (state,) = self._pop(1)
            _expect(stack[-1], Recipe).state = state
        elif name == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        else:
            refuse(f"is a pickle with the instruction {name}, which no such file needs")

    def _name(self, text: str) -> Name:
        if text not in self.allowed and text != _GETATTR:
            refuse(f"names {short(text)}, which no such file needs: it may be an attack, and nothing of it was run")
        return Name(text)

    def _pop(self, count: int) -> list[Any]:
        values = self.stack[len(self.stack) - count :] if count <= len(self.stack) else []
        if len(values) != count or any(value is _MARK for value in values):
            refuse("is not a valid pickle: it takes what is not there")
        del self.stack[-count:]
        return values

    def _since_mark(self) -> list[Any]:
        at = next((i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK), None)
        if at is None:
            refuse("is not a valid pickle: it takes what is not there")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values


def _recipe(of: Name, args: tuple[Any, ...]) -> Recipe:
    if of.text != _GETATTR:
        return Recipe(of.text, args)
    if not (len(args) == 2 and isinstance(args[0], Name) and isinstance(args[1], str)):
        refuse(f"calls {_GETATTR!r}, but not with a class and a name: it may be an attack, and nothing was run")
    return Recipe(args[0].text, args[1:])


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        refuse(f"is not a valid pickle: a {kind.__name__} is expected, found {type(value).__name__}")
    return value
