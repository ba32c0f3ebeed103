"""`make test-oldest` installs what pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib

from tests.house.house import ROOT


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    bounds = dict(match.groups() for one in asked if (match := re.fullmatch(r"([\w-]+)>=([\d.]+)", one)))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "oldest.txt").read_text(), re.MULTILINE))
    assert len(pinned) > 15
    for name, version in pinned.items():
        parts = version.split(".")
        bound = bounds.get(name, bounds.get("lightning") if name == "pytorch-lightning" else None)
        assert bound is not None and parts[: len(bound.split("."))] == bound.split("."), (name, version, bound)
        assert set(parts[len(bound.split(".")) :]) <= {"0"}, (name, version, bound)
