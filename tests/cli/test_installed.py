"""The sdist and the wheel, in an environment that contains only the wheel and its requirements; and the transcript in
docs/install.md, from `pip install` to a trained model and a verified checkpoint."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.forked import Forked
from tests.house.pages import transcript

pytestmark = pytest.mark.long  # all of them, for one worker, as they share what is built

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"

FIVE_LINES = """
import sys
sys.modules.update(dict.fromkeys(["click", "pydantic", "rich", "psutil", "safetensors", "numpy"]))  # not importable

import torch, zeroshard
from torch import nn

zeroshard.init()
model = nn.Linear(32, 1)
handle = zeroshard.shard(model, "zero3")
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-3)
model(torch.randn(4, 32)).mean().backward()
optimizer.step()
zeroshard.save("steps", handle, optimizer, step=1)
print(zeroshard.__file__, zeroshard.load("steps", handle, optimizer).step)
torch.distributed.destroy_process_group()

class Asked:  # notes what somebody tries to import
    names = set()

    def find_spec(self, name, *_):
        self.names.add(name.partition(".")[0])

del sys.modules["click"], sys.modules["numpy"], sys.modules["pydantic"], sys.modules["rich"]
sys.meta_path.insert(0, Asked())
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from io import StringIO
from zeroshard.cli.main import run
with redirect_stdout(StringIO()) as said:
    assert run(["plan", "module:Net", "--json", "--plan", "zero3"]) == 0
    assert "module" in Asked.names and not {"pydantic", "rich", "tomli_w", "transformers"} & Asked.names
    for command in (["inspect", "steps"], ["export", "steps", "a"], ["export", "steps", "b", "--format", "dcp"],
                    ["import", "a", "run", "--step", "0"], ["import", "b", "run", "--step", "1", "--allow-pickle"],
                    ["prune", "run", "--keep-last", "1"], ["--help"], ["verify", "steps"]):
        assert run(command) == 0, command
assert "removed step-0" in said.getvalue() and "\\nsteps/step-1: whole; " in said.getvalue()
assert zeroshard.verify("run/step-1").step == 1
assert not torch.distributed.is_initialized()
assert not [name for name in sys.modules if name.startswith("zeroshard.train")]
(command,) = entry_points(group="console_scripts", name="zeroshard")
sys.argv = ["zeroshard", "train", "--steps", "1"]
command.load()()  # exits
"""

LACKING = (
    "zeroshard: error: `zeroshard train` needs the package tomli_w, which comes with the extra 'train': "
    "pip install 'zeroshard[train]'"
)


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an "sdist" or a "wheel" of the source tree as pip does, with the installed setuptools."""
    command = [sys.executable, "-c", BUILD.format(kind), str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it alone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT / "zeroshard", source / "zeroshard", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    sdist = build("sdist", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # 3.11.4 has it
    return sdist, build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def requirements(lines: list[str], extra: str = "") -> set[str]:
    parsed = [Requirement(line) for line in lines]
    return {one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": extra})}


def link(name: str, python: Path, seen: set[str]) -> None:
    """Link an installed distribution and its requirements into another environment, and write its commands."""
    if name in seen:
        return
    seen.add(name)
    found = distribution(name)
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    for entry in found.entry_points.select(group="console_scripts"):
        script = python.parent / entry.name
        script.write_text(f"#!{python}\nfrom {entry.module} import {entry.attr}\n{entry.attr}()\n")
        script.chmod(0o755)
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        target = Path(str(found.locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target)
    for required in requirements(found.requires or []):
        try:
            link(required, python, seen)
        except PackageNotFoundError:
            continue  # not installed here either, and torch runs without it


def metadata_of(wheel: Path) -> Parser:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())  # type: ignore[return-value]


def install(wheel: Path, python: Path) -> None:
    """Install the wheel without a network: what it requires is linked."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    link_requirements(wheel, python)


def link_requirements(wheel: Path, python: Path, extra: str = "") -> None:
    seen: set[str] = set()
    for name in requirements(metadata_of(wheel).get_all("Requires-Dist"), extra):
        link(name, python, seen)


def empty_environment(folder: Path) -> Path:
    """The interpreter of a new environment."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it requires. Read only: tests share it, and copy it to add to it."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    install(built[1], empty_environment(folder))
    return folder


def test_what_is_packed(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zeroshard").rglob("*.py")} | {"zeroshard/py.typed"}
    files |= {f"zeroshard/report/{name}" for name in ("page.css", "page.js", "picture.css")}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        notes = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    assert packed == files
    assert {"licenses/LICENSE", "entry_points.txt"} <= notes
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files | {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml"} <= names
    assert not any(name.startswith(("tests", "docs", "benchmarks")) for name in names)


def test_what_the_metadata_says(built: tuple[Path, Path]) -> None:
    metadata = metadata_of(built[1])
    assert (metadata["Name"], metadata["Author"]) == ("zeroshard", "the zeroshard authors")
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert not {"Home-page", "Project-URL", "Download-URL"} & set(metadata.keys())
    assert requirements(metadata.get_all("Requires-Dist")) == {"click", "numpy", "torch"}


def test_five_lines_and_the_command_in_an_empty_environment(bare: Path, tmp_path: Path) -> None:
    """Training, saving and loading need torch alone, the command its requirements: it starts neither the trainer nor a
    process group, and `plan` does not even try to import what they need. `train` names the extra that it needs."""
    (tmp_path / "module.py").write_text("import torch\n\n\ndef Net():\n    return torch.nn.Linear(3, 4)\n")
    python = bare / "bin" / "python"
    (site,) = bare.glob("lib/python*/site-packages")
    assert not {"pydantic", "rich", "psutil"} & {path.name for path in site.iterdir()}

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    command = [str(python), "-W", "ignore", "-c", FIVE_LINES]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"{LACKING}\n")
    (first,) = done.stdout.splitlines()
    assert str(site) in first and first.endswith(" 1")
    script = python.parent / "zeroshard"
    assert os.access(script, os.X_OK) and script.read_text().startswith(f"#!{python}\n")


MODULES = {"torchrun": ["-m", "torch.distributed.run"], "zeroshard": ["-m", "zeroshard"]}


def typed(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What a command of the page does in the folder: by the shell, or in a fork if it starts one of the `MODULES`."""
    program, *arguments = shlex.split(command)
    if program not in MODULES:
        return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, text=True, capture_output=True)
    options: Any = {
        "cwd": folder,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with Forked([sys.executable, *MODULES[program], *arguments], **options) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_the_transcript_of_the_page(built: tuple[Path, Path], bare: Path, tmp_path: Path) -> None:
    """Each command prints what the page shows. They run in forks of this process, which has imported torch. That the
    extra brings all that `zeroshard train` needs is seen in the page's own environment, in one step."""
    wheel, python = built[1], tmp_path / "env" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = []
    for command, shown in transcript("docs/install.md"):
        if command.startswith("python3 -m venv "):
            shutil.copytree(bare, tmp_path / "env", symlinks=True)
        elif command.startswith("pip wheel "):
            assert wheel.name == "zeroshard-0.1.0-py3-none-any.whl"
        elif command.startswith("pip install "):
            if command.endswith("[train]'"):
                link_requirements(wheel, python, extra="train")
                small = ["--steps=1", "--layers=1", "--width=32", "--context=32", f"--out={tmp_path / 'small'}"]
                subprocess.run([python, python.parent / "zeroshard", "train", *small], env=environment, check=True)
        elif command == "zeroshard train":
            assert shown == [LACKING], "as in the environment of the test above"
        else:
            command = command.replace("path/to/zeroshard", str(ROOT))
            done = typed(command, tmp_path, environment)
            text = re.sub(r"(?=step \d+ loss)", "\n", done.stdout)  # a rank prints between another's line and its end
            said = (text + done.stderr).splitlines()
            problem = differs(shown, said)
            assert not problem, f"$ {command}\n{problem}; it printed:\n" + "\n".join(said)
            assert done.returncode == (2 if "zeroshard: error: " in done.stderr else 0), done.stderr
            ran.append(" ".join(command.split()[:2]))
    assert ran[2:4] == ["torchrun --nproc-per-node", "zeroshard verify"]
    assert ran[-2:] == ["zeroshard train", "zeroshard verify"]


VARIES = re.compile(r"(id|torch|python|manifest) [\w.+]+|peak memory \d+ MB")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def same(*lines: str) -> bool:
    """Losses differ with the kernels, and with the version of the library whose source is the text."""
    shown, said = (VARIES.sub(r"\1", line).replace(",", "") for line in lines)
    numbers = zip(NUMBER.findall(shown), NUMBER.findall(said), strict=False)
    return NUMBER.split(shown) == NUMBER.split(said) and all(
        float(one) == pytest.approx(float(other), rel=0.05 if "." in one else 0.01) for one, other in numbers
    )


def differs(shown: list[str], said: list[str]) -> str:
    """What is wrong with what a command has said. Each line that is shown is among it; no other is, unless `...` is
    shown."""
    left = [line for line in said if line.strip()]
    for line in shown:
        if line.strip() in ("", "..."):
            continue
        found = next((one for one in left if same(line, one)), None)
        if found is None:
            return f"the page shows {line!r}"
        left.remove(found)
    return "" if "..." in shown else "".join(f"the page does not show {line!r}" for line in left[:1])


@pytest.mark.parametrize(
    ("shown", "said", "problem"),
    [
        ("...\nloss 1.70\nloss 1.80", "W1125 text\nloss 1.801\nloss 1.699", ""),
        ("loss 1.70", "W1125 text\nloss 1.70", "the page does not show"),
        ("...\nloss 1.70", "loss 1.80", "the page shows 'loss 1.70'"),
        ("...\nloss 1.70\nloss 1.70", "loss 1.70", "the page shows 'loss 1.70'"),
        ("whole; 28 tensors, 3,403,867 bytes", "whole; 27 tensors, 3,403,867 bytes", "the page shows 'whole; 28"),
        ("step 100, id 79fa7819, of 2 ranks", "step 100, id 0a123456, of 2 ranks", ""),
    ],
)
def test_a_line_that_has_changed_is_found(shown: str, said: str, problem: str) -> None:
    found = differs(shown.splitlines(), said.splitlines())
    assert found.startswith(problem) and bool(found) == bool(problem)
