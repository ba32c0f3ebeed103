"""Plan files: the facts of a plan as JSON, written by `zeroshard plan --save`, with the version of their format."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from zeroshard.errors import InvalidValue
from zeroshard.io.whole import write_whole
from zeroshard.report.facts import Facts

KEY, VERSION = "zeroshard plan", 1
MOST = 1 << 63
"""No number of a plan is larger: bytes, counts and seconds."""


def write_plan(facts: Facts, path: Path) -> None:
    write_whole(path, json.dumps({KEY: VERSION, **asdict(facts)}) + "\n")


def read_plan(path: Path) -> Facts:
    """The facts in a plan file.

    Raises:
        ValueError: there is no such file; it is no plan file, one of another version, or damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is not a plan file: it is not JSON ({error})") from None
    if not isinstance(found, dict) or KEY not in found:
        raise InvalidValue(f"{path} is not a plan file: write one with zeroshard plan MODEL --save plan.json")
    if found[KEY] != VERSION:
        raise InvalidValue(
            f"{path} is a plan file of version {found[KEY]!r}, and this zeroshard reads version {VERSION}: write it "
            "again with zeroshard plan MODEL --save plan.json"
        )
    facts: Facts = _decoded(Facts, {key: value for key, value in found.items() if key != KEY}, str(path))
    for name in ("planned", "curves"):
        if not getattr(facts, name):
            raise InvalidValue(f"{path}, {name} is damaged: it has no entry")
    return facts


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """`value`, which comes from JSON, as a `kind`: a record, a tuple, an optional value, a number or a text."""
    if isinstance(kind, types.UnionType):
        (given,) = (one for one in get_args(kind) if one is not types.NoneType)
        return None if value is None else _decoded(given, value, where)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return _record(kind, value, where)
    if get_origin(kind) is tuple and isinstance(value, list):
        (of, *_) = get_args(kind)
        return tuple(_decoded(of, item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(kind, type) or type(value) is not kind:
        raise InvalidValue(f"{where} is damaged: expected {_kind(kind)}, found {str(value)[:60]!r}")
    if isinstance(value, (int, float)) and not 0 <= value <= MOST:  # NaN is not, either
        raise InvalidValue(f"{where} is damaged: expected a number from 0 to 2**63, found {str(value)[:60]!r}")
    return value


def _kind(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(kind, "an object")


def _record(kind: type, value: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if names != value.keys():
        differing = ", ".join(sorted(names ^ value.keys()))
        raise InvalidValue(f"{where} is damaged: these keys are missing or unknown: {differing}")
    values = {name: _decoded(hints[name], value[name], f"{where}, {name}") for name in value}
    try:
        return kind(**values)
    except ValueError as error:
        raise InvalidValue(f"{where} is damaged: {error}") from error
