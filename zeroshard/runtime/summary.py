"""Describes a sharded model: in one line, and unit by unit in a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from zeroshard.precision import in_words
from zeroshard.runtime.engine import Engine
from zeroshard.storage.buffer import live_bytes
from zeroshard.storage.external_gradients import NoGradients
from zeroshard.storage.unit import Unit


class Table(str):
    """Lines of text that an interpreter and a notebook show as lines, also without `print`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_COLUMNS = ("unit", "parameters", "weights", "gradients", "main", "bytes here")


def in_one_line(engine: Engine) -> str:
    """Plan, units, parameters, ranks and precision; or "closed" or "abandoned"."""
    if engine.life.is_over:
        return engine.life.value
    units, mesh = engine.units, engine.collectives.mesh
    ranks = f"{mesh.world.size} rank{'s' * (mesh.world.size > 1)}"
    if mesh.replicate.size > 1:
        ranks += f" ({mesh.replicate.size} replicas of {mesh.shard.size} shards)"
    kinds = ", ".join(sorted({in_words(unit.spec.precision) for unit in units})) or "no parameters"
    how_many = f"{len(units)} unit{'s' * (len(units) != 1)}"
    numel = sum(unit.layout.slots_numel for unit in units)
    return f"{engine.plan.name}, {how_many}, {numel:,} parameters on {ranks}, {kinds}"


def table(engine: Engine) -> Table:
    """One row for each unit (its parameters, dtype and resting placement of its three buffers, bytes that this rank
    holds now), a row of totals, and the bytes on this rank by kind."""
    held = [live_bytes([t for kind in unit.tensors().values() for t in kind]) for unit in engine.units]
    rows = [(*_row(unit), f"{num_bytes:,}") for unit, num_bytes in zip(engine.units, held, strict=True)]
    numel = sum(unit.layout.slots_numel for unit in engine.units)
    total = ("all", f"{numel:,}", "", "", "", f"{sum(held):,}")
    kinds = ", ".join(f"{kind} {num_bytes:,}" for kind, num_bytes in engine.memory().items() if num_bytes)
    lines = [
        in_one_line(engine),
        "",
        *aligned([_COLUMNS, *rows, total], ("parameters", "bytes here")),
        "",
        f"bytes on this rank: {kinds or 'none'}",
    ]
    return Table("\n".join(lines))


def _row(unit: Unit) -> tuple[str, ...]:
    weights, grads, main = unit.plan.weights.value, unit.plan.grads.value, unit.plan.main.value
    name, numel = unit.name, f"{unit.layout.slots_numel:,}"
    shown = f"{_short(unit.weights.buffer.dtype)} {weights}"
    if isinstance(unit.grads, NoGradients):
        return name, numel, shown, "frozen", ""
    precision = unit.spec.precision
    kept = "the weights" if precision.weights_are_main else f"{_main(precision.main)} {main}"
    return name, numel, shown, f"{_short(precision.grad)} {grads}", kept


def _main(main: torch.dtype | str) -> str:
    return f"{main} (int16)" if isinstance(main, str) else _short(main)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(rows: Sequence[tuple[str, ...]], numbers: Collection[str]) -> list[str]:
    """The rows with aligned columns. The first row has their names; the columns `numbers` are aligned to the right."""
    columns = []
    for name, *cells in zip(*rows, strict=True):
        width = max(map(len, [name, *cells]))
        columns.append([cell.rjust(width) if name in numbers else cell.ljust(width) for cell in (name, *cells)])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
