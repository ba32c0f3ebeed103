"""Numbers of bytes, and seconds, for people."""

from __future__ import annotations


def in_units(num_bytes: int) -> str:
    """A number of bytes for people: three digits, in decimal units."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 999.5 or unit == "PB":
            break
        size /= 1000
    digits = 0 if unit == "B" or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:.{digits}f} {unit}"


def in_seconds(value: float) -> str:
    """A time for people: three digits, in seconds, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 0.9995 or unit == "µs":
            size = value * factor
            return f"{size:,.0f} {unit}" if size >= 999.5 else f"{size:.3g} {unit}" if value else "0"
    raise AssertionError
