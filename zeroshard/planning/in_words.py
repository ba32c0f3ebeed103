"""Numbers of bytes for people."""

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
