"""``lockstep checkpoint``: look at a run's checkpoints, check and remove them, make one now, go back."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import click

from lockstep.cli.options import AS_JSON, Commands, LocalPath, RunPath
from lockstep.cli.terminal import errors, open_console, print_json
from lockstep.text import as_size, counted

if TYPE_CHECKING:
    from lockstep.checkpoint.inspect import CheckpointSummary

_FOLDER = click.argument("folder", type=RunPath())
_STEP = click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Step of the checkpoint. [default: the newest]"
)


@click.group(cls=Commands, short_help="Look at a run's checkpoints.")
def checkpoint() -> None:
    """List, show, verify, save, prune, rewind and export checkpoints.

    FOLDER is the folder that a run gives to lockstep.Checkpointer, or the folder of one checkpoint (step-…); on a disk
    or, except for rewind, in an object store (s3://bucket/run).
    """


@checkpoint.command(short_help="List checkpoints, newest first.")
@_FOLDER
@AS_JSON
def ls(folder: PurePath, as_json: bool) -> None:
    """List the checkpoints of a run, newest first, without reading the tensors."""
    with errors():
        from lockstep.checkpoint import inspect

        found = [inspect.glance(each) for each in inspect.find(folder)]
        if as_json:
            told = {
                "folder": folder,
                "checkpoints": [_about(summary) for summary in found],
                "unfinished": [path.name for path in inspect.leftovers(folder)],
                "owner": None if (owner := inspect.owner(folder)) is None else str(owner),
            }
            print_json("checkpoint.ls", told)
            return
        from rich.table import Table

        table = Table("step", "epoch", "metric", "ranks", "size", "saved", "folder", box=None, pad_edge=False)
        for column in table.columns[:5]:
            column.justify = "right"
        for summary in found:
            table.add_row(*_row(summary))
        console = open_console(soft_wrap=True, markup=False)
        console.print(table)
        for summary in found:
            if summary.damage is not None:
                console.print(f"damaged: {summary.damage}")
            if summary.unsound:
                console.print(f"not sound: {summary.unsound}")
        for path in inspect.leftovers(folder):
            console.print(f"unfinished: {path.name}")
        owner = inspect.owner(folder)
        if owner is not None:
            console.print(f"the folder belongs to {owner}")


def _about(summary: CheckpointSummary) -> dict[str, Any]:
    """Return what is known of a checkpoint without reading its tensors, in JSON's types."""
    from lockstep.checkpoint import folders

    manifest = summary.manifest
    return {
        "name": summary.folder.name,
        "folder": summary.folder,
        "step": folders.step_of(summary.folder),
        "epoch": None if manifest is None else manifest.epoch,
        "in_epoch": None if manifest is None else manifest.in_epoch,
        "metric": None if manifest is None else manifest.metric,
        "ranks": None if manifest is None else manifest.world_size,
        "bytes": None if manifest is None else summary.size,
        "saved": None if manifest is None else manifest.written,
        "damage": summary.damage,
        "unsound": summary.unsound or None,
    }


def _row(summary: CheckpointSummary) -> list[str]:
    manifest = summary.manifest
    if manifest is None:
        return ["?", "?", "", "?", "?", "damaged", summary.folder.name]
    epoch = f"in {manifest.epoch}" if manifest.in_epoch else str(manifest.epoch)
    metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
    return [
        str(manifest.step), epoch, metric, str(manifest.world_size), as_size(summary.size), manifest.written,
        summary.folder.name,
    ]  # fmt: skip


@checkpoint.command(short_help="Show the contents of a checkpoint.")
@_FOLDER
@_STEP
@AS_JSON
def show(folder: PurePath, step: int | None, as_json: bool) -> None:
    """Show the contents of a checkpoint: the position in training, its files, the tensors of the model."""
    with errors():
        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.read import read_header

        summary = inspect.glance(inspect.find(folder, step=step)[0])
        if summary.manifest is None:
            raise _damage(summary.damage or "")
        manifest, header = summary.manifest, read_header(summary.folder)
        if as_json:
            told = {
                **_about(summary),
                "versions": manifest.versions,
                "files": [{"name": name, "bytes": entry.size} for name, entry in sorted(manifest.files.items())],
                "tensors": [
                    {
                        "name": tensor.name,
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "shape": tensor.shape,
                        "bytes": tensor.stop - tensor.start,
                    }
                    for tensor in header
                ],
            }
            print_json("checkpoint.show", told)
            return
        from rich.table import Table

        console = open_console(soft_wrap=True, markup=False)
        table = Table(box=None, pad_edge=False, show_header=False)
        epoch = f"{manifest.epoch}, some of it done" if manifest.in_epoch else f"{manifest.epoch}"
        table.add_row("folder", str(summary.folder))
        table.add_row("step", str(manifest.step))
        table.add_row("resumes in epoch", epoch)
        table.add_row("metric", "none" if manifest.metric is None else repr(manifest.metric))
        table.add_row("sound", f"no: {summary.unsound}" if summary.unsound else "as far as known")
        table.add_row("saved", f"{manifest.written} by {counted(manifest.world_size, 'rank')}")
        table.add_row("with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
        console.print(table)
        console.print()
        files = Table("file", "size", box=None, pad_edge=False)
        files.columns[1].justify = "right"
        for name, entry in sorted(manifest.files.items()):
            files.add_row(name, as_size(entry.size))
        console.print(files)
        console.print()
        tensors = Table("tensor of the model", "dtype", "shape", "size", box=None, pad_edge=False)
        tensors.columns[3].justify = "right"
        for tensor in header:
            shape = " × ".join(map(str, tensor.shape)) or "a number"
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.add_row(tensor.name, dtype, shape, as_size(tensor.stop - tensor.start))
        console.print(tensors)


@checkpoint.command(short_help="Find damaged checkpoints.")
@_FOLDER
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Verify only the checkpoint of step N.")
@AS_JSON
def verify(folder: PurePath, step: int | None, as_json: bool) -> None:
    """Read the checkpoints of a run completely and compare them with their digests.

    The exit code is 1 if a checkpoint is damaged. One that is not sound (NaN or infinite values, ranks that differed)
    is reported, but does not count as damaged.
    """
    with errors():
        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.read import find_damage

        console, damaged, told = open_console(soft_wrap=True, markup=False), 0, []
        for each in inspect.find(folder, step=step):
            wrong = find_damage(each)
            damaged += bool(wrong)
            if as_json:
                told.append({**_about(inspect.glance(each)), "complete": not wrong, "damage": wrong})
                continue
            console.print(f"{each.name}: {'damaged' if wrong else 'complete'}")
            unsound = inspect.glance(each).unsound
            if unsound:
                console.print(f"  not sound: {unsound}")
            for line in wrong:
                console.print(f"  {line}")
        if as_json:
            print_json("checkpoint.verify", {"folder": folder, "checkpoints": told, "damaged": damaged})
    sys.exit(1 if damaged else 0)


@checkpoint.command(short_help="Remove old checkpoints.")
@_FOLDER
@click.option("--last", type=click.IntRange(min=0), required=True, metavar="N", help="Keep the N newest checkpoints.")
@click.option(
    "--every", type=click.IntRange(min=1), metavar="N", help="Keep checkpoints whose step is a multiple of N."
)
@click.option(
    "--best",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Keep the N checkpoints with the best metric.",
)
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    default="min",
    show_default=True,
    help="Whether the lowest or the highest metric is best.",
)
@click.option(
    "--by",
    metavar="NAME",
    help="With --best: name of a number that lockstep evaluate has written, such as eval/accuracy.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, but remove nothing.")
@AS_JSON
def prune(
    folder: PurePath,
    last: int,
    every: int | None,
    best: int,
    mode: Literal["min", "max"],
    by: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove all checkpoints of a run except those that an option keeps.

    The newest complete and sound checkpoint is always kept, and so are newer ones and those that a process is reading.
    It is safe to prune while a job is training in the folder.
    """
    with errors(ValueError):
        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.retention import Pruned, Retention, remove

        console = open_console(soft_wrap=True, markup=False)
        plan = inspect.plan_pruning(folder, Retention(last, every, best, mode, by))
        root = plan.newest.parent
        for line in () if as_json else plan.damaged:
            console.print(f"damaged, kept: {line}")
        for line in () if as_json else plan.unsound:
            console.print(f"not sound, kept: {line}")
        if dry_run:
            done = Pruned(tuple(root / entry.name for entry in plan.superfluous))
        else:
            done = remove(root, plan.superfluous)
        if as_json:
            told = {
                "folder": root,
                "dry_run": dry_run,
                "removed": [path.name for path in done.removed],
                "being_read": [path.name for path in done.being_read],
                "failed": [{"name": path.name, "why": str(why)} for path, why in done.failed],
                "kept": [entry.name for entry in plan.kept],
                "damaged": plan.damaged,
                "unsound": plan.unsound,
            }
            print_json("checkpoint.prune", told)
            sys.exit(1 if done.failed else 0)
        for path in done.removed:
            console.print(f"{'would remove' if dry_run else 'removed'} {path.name}")
        for path in done.being_read:
            console.print(f"left, being read: {path.name}")
        for path, why in done.failed:
            console.print(f"not removed: {path.name}: {why}")
        console.print(f"kept: {', '.join(entry.name for entry in plan.kept)}")
    sys.exit(1 if done.failed else 0)


@checkpoint.command(short_help="Have a running job save now.")
@_FOLDER
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Time to wait for the checkpoint.",
)
@AS_JSON
def save(folder: PurePath, timeout: float, as_json: bool) -> None:
    """Have the job that trains in FOLDER save now, and print the checkpoint.

    The job saves after its next step, and continues. If its loop does not come to a step within a second, the state of
    its last step is saved from the side. Give the command on the machine of rank 0.
    """
    with errors():
        from lockstep.checkpoint.ask import save_now

        made = save_now(folder, limit=timeout)
        if as_json:
            print_json("checkpoint.save", {"folder": made.parent, "name": made.name})
        else:
            open_console(soft_wrap=True, markup=False).print(str(made))


@checkpoint.command(short_help="Go back to an earlier checkpoint.")
@click.argument("folder", type=LocalPath())
@click.option(
    "--to", "step", type=click.IntRange(min=0), required=True, metavar="STEP", help="The step to resume from."
)
@click.option("--dry-run", is_flag=True, help="Print what would be set aside, but move nothing.")
@AS_JSON
def rewind(folder: Path, step: int, dry_run: bool, as_json: bool) -> None:
    """Have a run resume from an earlier checkpoint: set the newer ones aside, in FOLDER/set-aside-1 and so on.

    Nothing is removed: moving them back undoes it. No job may be training in FOLDER.
    """
    with errors():
        from lockstep.checkpoint.rewind import rewind as set_aside

        done = set_aside(folder, step, dry_run=dry_run)
        if as_json:
            told = {
                "folder": done.target.parent,
                "dry_run": dry_run,
                "target": done.target.name,
                "aside": done.aside,
                "moved": list(done.moved),
            }
            print_json("checkpoint.rewind", told)
            return
        console = open_console(soft_wrap=True, markup=False)
        for name in done.moved:
            console.print(f"{'would set aside' if dry_run else 'set aside'} {name}")
        if done.aside is None:
            console.print(f"{done.target.name} is the newest already: nothing to set aside")
        elif dry_run:
            console.print(f"they would be in {done.aside}")
        else:
            console.print(f"they are in {done.aside}; a run resumes from {done.target.name} now")
            undo = shlex.join(["mv", *(str(done.aside / name) for name in done.moved), str(done.target.parent)])
            console.print(f"to undo it: {undo}")


@checkpoint.command(short_help="Export a model for other tools.")
@_FOLDER
@click.argument("output", type=LocalPath())
@_STEP
@click.option(
    "--format",
    "format_",
    type=click.Choice(["torch", "safetensors"]),
    help="Format of the file OUTPUT. [default: by its suffix]",
)
@click.option(
    "--shards",
    is_flag=True,
    help="Write a folder OUTPUT as from_pretrained() of Hugging Face's libraries reads it: files of safetensors and "
    "their index.",
)
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5,
    show_default=True,
    metavar="GIGABYTES",
    help="Maximum size of each file of --shards.",
)
@click.option(
    "--dcp", is_flag=True, help="Write a folder OUTPUT that torch.distributed.checkpoint reads, on any number of ranks."
)
@click.option(
    "--extra", metavar="NAME", help="Export the object NAME of extra= (such as averaged weights) instead of the model."
)
@click.option("--force", is_flag=True, help="Overwrite OUTPUT if it exists.")
def export(
    folder: PurePath,
    output: Path,
    step: int | None,
    format_: str | None,
    shards: bool,
    shard_size: float,
    dcp: bool,
    extra: str | None,
    force: bool,
) -> None:
    """Export the model of a checkpoint to OUTPUT, for other tools.

    OUTPUT is a .safetensors file, or a torch file (.pt, .pth) that torch.load(weights_only=True) reads; with --shards
    or --dcp it is a folder. Every byte is verified. Without --step, the newest checkpoint that is complete and sound is
    exported; newer ones that were skipped are named.
    """
    if shards + dcp + (format_ is not None) > 1:
        raise click.UsageError("--format, --shards and --dcp each say what OUTPUT is: give one of them")
    with errors():
        from lockstep.checkpoint import export as exporting
        from lockstep.errors import CheckpointError

        form: exporting.Form | None
        if shards:
            form = exporting.SafetensorsShards(round(shard_size * 1e9))
        elif dcp:
            form = exporting.DistributedCheckpoint()
        else:
            form = exporting.form_of(output, named=format_)
        if form is None:
            raise CheckpointError(
                f"{output}: which format? Name the file .safetensors or .pt, or give --format; for a folder --shards "
                "or --dcp"
            )
        done = exporting.export(folder, output, form=form, step=step, extra=extra, overwrite=force)
        for line in done.skipped:
            click.echo(f"skipped, damaged: {line}", err=True)
        for line in done.unsound:
            taken = line.startswith(f"{done.source.name} ")
            click.echo(f"{'exported, though' if taken else 'skipped, not sound:'} {line}", err=True)
        size = as_size(done.size)
        files = f" in {done.files} files" if done.files > 1 else ""
        click.echo(f"{done.path}: {done.tensors} tensors of {done.source.name}, {size}{files}, for {done.form.words}")


def _damage(text: str) -> Exception:
    from lockstep.errors import CheckpointCorrupt

    return CheckpointCorrupt(text)
