"""The checkpoint commands: inspect, verify, export, import, prune. They need one process and no process group."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch

from zeroshard import checkpoint, exchange
from zeroshard.checkpoint import CheckpointError, Reader, folders, pruning
from zeroshard.checkpoint.manifest import MANIFEST_NAME
from zeroshard.checkpoint.saved_state import saved_extra, saved_groups
from zeroshard.cli.terminal import Command, Damaged, Size, printable, say, table
from zeroshard.exchange.dcp_metadata import METADATA
from zeroshard.io.tensor_file import DTYPE_NAMES
from zeroshard.planning.optimizers import class_named

DTYPES = {"stored": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PATH = click.Path(path_type=Path)
_step = click.option("--step", type=click.IntRange(0), help="the step; by default the latest")
_force = click.option("--force", is_flag=True, help="replace what is there")
_model_key = click.option(
    "--model-key", default="model", show_default=True, help="dcp: where the model's state dict lies in it"
)
_optimizer_key = click.option(
    "--optimizer-key", default="optim", show_default=True, help="dcp: the same of the optimizer's"
)


def find(path: Path, step: int | None) -> Path:
    """The step folder at `path`: `path` itself, or the given (by default the latest) step in the directory `path`."""
    if (path / MANIFEST_NAME).exists() or (folders.step_of(path.name) is not None and not folders.steps(path)):
        if not path.is_dir():
            raise click.ClickException(f"there is no folder {path}")
        if step not in (None, folders.step_of(path.name)):
            raise click.ClickException(f"--step {step}: {path} is one step already")
        return path
    known = folders.steps(path)
    begun = known | folders.without_manifest(path)
    if not begun:
        raise click.ClickException(f"{path} is not a checkpoint, and contains none{_instead(path, 'a step, or ')}")
    if step is not None and step not in begun:
        raise click.ClickException(f"{path} holds no step {step}; it has the steps {sorted(known)}")
    return folders.find(path, step)


def _instead(path: Path, also: str = "") -> str:
    """What to name in place of a folder that has no steps, for the error message."""
    if not path.exists():
        return ": there is no such folder"
    runs = sorted(one for one in path.glob("*") if folders.steps(one))
    return f": expected {also}the folder of one run, such as {runs[0]}" if runs else ""


# inspect --------------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("path", type=PATH)
@_step
@click.option("--tensors", is_flag=True, help="list every tensor")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def inspect(path: Path, step: int | None, tensors: bool, as_json: bool) -> None:
    """Show what a step holds.

    By its manifest alone. PATH is a step folder, or the directory of steps.
    """
    with Reader(find(path, step)) as reader:
        found = summary(reader, tensors=tensors)
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        _print(found)


def summary(reader: Reader, *, tensors: bool) -> dict[str, Any]:
    """The content of a step as values for JSON. Reads no tensor data, so damage there is not found.

    Raises:
        CheckpointError: the manifest or a file's header is damaged.
    """
    manifest, values = reader.manifest, reader.manifest.values
    kinds: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, entry in manifest.tensors.items():
        kind = name.split("/")[0], DTYPE_NAMES[entry.dtype]
        kinds[kind] += 1
        sizes[kind] += entry.numel * entry.dtype.itemsize
    optimizers = values.get("optimizers")
    result: dict[str, Any] = {
        "path": str(reader.folder),
        "step": manifest.step,
        "id": manifest.id,
        "digest": reader.digest,
        "versions": manifest.versions,
        "world_size": values.get("world_size"),
        "files": [{"name": file.name, "bytes": file.num_bytes} for file in manifest.files],
        "kinds": [
            {"kind": kind, "dtype": dtype, "tensors": count, "bytes": sizes[kind, dtype]}
            for (kind, dtype), count in sorted(kinds.items())
        ],
        "optimizers": [
            [
                {"class": g["class"], "parameters": len(g["params"]), "options": g["options"]}
                for g in saved_groups(saved)
            ]
            for saved in (optimizers if isinstance(optimizers, list) else [])
        ],
        "extra": sorted(map(str, saved_extra(manifest))),
        "tied": manifest.tied,
    }
    if tensors:
        result["tensors"] = {
            name: {"dtype": DTYPE_NAMES[e.dtype], "shape": list(e.shape), "chunks": e.num_parts}
            for name, e in manifest.tensors.items()
        }
    return result


def _print(found: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    say(printable(f"{found['path']}: step {found['step']}, id {found['id']}, of {found['world_size']} ranks"))
    say(printable(f"written by {versions}; manifest {found['digest']}"))
    table(("file", "bytes"), [(file["name"], file["bytes"]) for file in found["files"]])
    rows = [(row["kind"], row["dtype"], row["tensors"], row["bytes"]) for row in found["kinds"]]
    table(("kind", "dtype", "tensors", "bytes"), rows)
    groups = [
        (
            number,
            group["class"],
            group["parameters"],
            group["options"].get("lr", ""),
            group["options"].get("weight_decay", ""),
        )
        for number, of_one in enumerate(found["optimizers"])
        for group in of_one
    ]
    if groups:
        table(("optimizer", "class", "parameters", "lr", "weight decay"), groups)
    for alias, name in found["tied"].items():
        say(printable(f"tied: {alias} is {name}"))
    if found["extra"]:
        say(printable(f"extra: {', '.join(found['extra'])}"))
    if "tensors" in found:
        rows = [(n, e["dtype"], str(tuple(e["shape"])), e["chunks"]) for n, e in found["tensors"].items()]
        table(("tensor", "dtype", "shape", "chunks"), rows)


# verify, prune --------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("path", type=PATH)
@_step
@click.option("--all", "every", is_flag=True, help="every step in the directory PATH")
def verify(path: Path, step: int | None, every: bool) -> None:
    """Check every byte of a step.

    PATH is a step folder, or the directory of steps.
    """
    damaged = []
    for folder in _every(path) if every else [find(path, step)]:
        try:
            manifest = checkpoint.verify(folder)
            num_bytes = sum(file.num_bytes for file in manifest.files)
            say(f"{folder}: whole; {len(manifest.tensors)} tensors, {num_bytes:,} bytes")
        except CheckpointError as error:
            damaged.append(folder.name)
            if not every:
                raise
            say(printable(f"{folder}: damaged; {error}"))
    if damaged:
        raise Damaged(f"{path}: {len(damaged)} damaged: {', '.join(damaged)}")


def _every(path: Path) -> list[Path]:
    """The folders of all steps, also of those that have lost their manifest."""
    _expect_no_step(path)
    found = [*folders.steps(path).items(), *folders.without_manifest(path).items()]
    if not found:
        raise click.ClickException(f"{path} holds no checkpoint{_instead(path)}")
    return [folder for _, folder in sorted(found)]


def _expect_no_step(path: Path) -> None:
    if folders.is_step(path) or (path.is_dir() and folders.step_of(path.name) is not None and not folders.steps(path)):
        raise click.ClickException(f"{path} is one step already: name its parent")


@click.command(cls=Command)
@click.argument("directory", type=PATH)
@click.option("--keep-last", type=click.IntRange(1), required=True, help="number of the newest steps that stay")
@click.option("--keep-every", type=click.IntRange(1), help="steps whose number is a multiple of it stay, too")
@click.option("--dry-run", is_flag=True, help="only print what would be removed")
def prune(directory: Path, keep_last: int, keep_every: int | None, dry_run: bool) -> None:
    """Remove old steps.

    DIRECTORY holds the folders step-N of a run. The newest steps stay (--keep-last), the step that the file `latest`
    names, and those whose number is a multiple of --keep-every. Files of saves that were interrupted are removed, too.
    """
    _expect_no_step(directory)
    if not folders.steps(directory):
        raise click.ClickException(f"{directory} holds no checkpoint{_instead(directory)}")
    work = pruning.to_prune if dry_run else pruning.prune
    gone = work(directory, keep_last=keep_last, keep_every=keep_every)
    say(f"{'would remove' if dry_run else 'removed'} {', '.join(map(folders.step_name, gone)) or 'nothing'}")


# Exchange -------------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("path", type=PATH)
@click.argument("out", type=PATH)
@_step
@click.option("--format", "kind", type=click.Choice(["safetensors", "dcp"]), default="safetensors", show_default=True)
@click.option("--dtype", type=click.Choice([*DTYPES]), default="stored", show_default=True, help="of the weights")
@click.option(
    "--max-file-size", type=Size(), help="safetensors: split into files of that size (5GB, say), and an index"
)
@click.option("--copies", is_flag=True, help="safetensors: write tied weights under each of their names")
@click.option("--no-optimizer", is_flag=True, help="dcp: the model alone")
@_model_key
@_optimizer_key
@_force
def export(path: Path, out: Path, step: int | None, kind: str, dtype: str, max_file_size: int | None, copies: bool,
           no_optimizer: bool, model_key: str, optimizer_key: str, force: bool) -> None:  # fmt: skip
    """Write files for other tools.

    Into the folder OUT: model.safetensors, as `from_pretrained` reads it, or a folder of torch.distributed.checkpoint.
    """
    if out.suffix == ".safetensors":
        raise click.ClickException(f"{out} looks like a file: expected a folder, in which model.safetensors will lie")
    folder, cast = find(path, step), DTYPES[dtype]
    if kind == "safetensors":
        if no_optimizer or (model_key, optimizer_key) != ("model", "optim"):
            raise click.ClickException("--no-optimizer, --model-key and --optimizer-key go with --format dcp")
        files = exchange.export(folder, out, max_file_bytes=max_file_size, dtype=cast, copies=copies, force=force)
    else:
        if copies or max_file_size:
            raise click.ClickException("--copies and --max-file-size go with --format safetensors")
        keys = {"model_key": model_key, "optimizer_key": optimizer_key}
        files = exchange.export_dcp(folder, out, optimizer=not no_optimizer, dtype=cast, force=force, **keys)
    for file in files:
        say(f"{file}: {file.stat().st_size:,} bytes")
    if kind == "safetensors" and not copies:
        with Reader(folder) as reader:
            tied = ", ".join(sorted(reader.manifest.tied))
        if tied:
            say(printable(f"tied to others, and written once (--copies writes each name): {tied}"))


@click.command("import", cls=Command)
@click.argument("source", type=PATH)
@click.argument("directory", type=PATH)
@click.option("--step", type=click.IntRange(0), required=True, help="the number of the new step")
@click.option("--allow-pickle", is_flag=True, help="dcp: read its pickles (as data: nothing in them is run)")
@click.option("--optimizer-class", help="dcp: whose state it is (SGD, mine.Own); by default AdamW")
@_model_key
@_optimizer_key
@click.option("--follow-links", is_flag=True, help="safetensors: the files may be links, as in the cache of a hub")
@_force
def import_(source: Path, directory: Path, step: int, allow_pickle: bool, optimizer_class: str | None,
            model_key: str, optimizer_key: str, follow_links: bool, force: bool) -> None:  # fmt: skip
    """Make a step from files of others.

    In DIRECTORY, from SOURCE: a safetensors file, a folder with model.safetensors or an index of several, or a folder
    of torch.distributed.checkpoint.
    """
    if not source.exists():
        raise click.ClickException(f"there is no {source}")
    if (source / METADATA).exists():
        if not allow_pickle:
            raise click.ClickException(
                f"{source} is a folder of torch.distributed.checkpoint, and holds pickles: with --allow-pickle they "
                "are read, as data (nothing in them is run)"
            )
        done = exchange.import_dcp(
            source,
            directory,
            step=step,
            optimizer_class=class_named(optimizer_class).__name__ if optimizer_class is not None else None,
            model_key=model_key,
            optimizer_key=optimizer_key,
            force=force,
        )
    else:
        done = exchange.import_model(source, directory, step=step, force=force, follow_links=follow_links)
    with Reader(done.path) as reader:
        kinds = Counter(name.split("/")[0] for name in reader.manifest.tensors)
    say(f"{done.path}: tensors: {printable(', '.join(f'{count} {kind}' for kind, count in kinds.items()))}")
    if done.left_out:
        more = f" and {len(done.left_out) - 10} more" if len(done.left_out) > 10 else ""
        say(printable(f"left out: {', '.join(done.left_out[:10])}{more}"))


COMMANDS = (inspect, verify, export, import_, prune)
