"""``lockstep checkpoint``: look at a run's checkpoints, check them, remove what is not needed, hand one on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from lockstep.cli.terminal import LocalPath, errors, open_console
from lockstep.text import as_size, counted

if TYPE_CHECKING:
    from lockstep.checkpoint.inspect import CheckpointSummary

_FOLDER = click.argument("folder", type=LocalPath())
_STEP = click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step; the newest if not given.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoint() -> None:
    """Look at checkpoints, check them, remove old ones, export one.

    FOLDER is the folder of a run (given to lockstep.Checkpointer), or of one checkpoint (step-…).
    """


@checkpoint.command()
@_FOLDER
def ls(folder: Path) -> None:
    """List the checkpoints of a run, newest first. Only their manifests are read."""
    with errors("checkpoint ls"):
        from rich.table import Table

        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.locks import owner_of

        table = Table("step", "epoch", "metric", "ranks", "size", "saved", "folder", box=None, pad_edge=False)
        for column in table.columns[:5]:
            column.justify = "right"
        found = [inspect.glance(each) for each in inspect.find(folder)]
        for summary in found:
            table.add_row(*_row(summary))
        console = open_console(soft_wrap=True)
        console.print(table)
        for summary in found:
            if summary.damage is not None:
                console.print(f"damaged: {summary.damage}", markup=False)
            if summary.not_finite:
                console.print(f"not finite: {summary.not_finite}", markup=False)
        for path in inspect.leftovers(folder):
            console.print(f"unfinished: {path.name}", markup=False)
        owner = owner_of(folder)
        if owner is not None:
            console.print(f"the folder belongs to {owner}", markup=False)


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


@checkpoint.command()
@_FOLDER
@_STEP
def show(folder: Path, step: int | None) -> None:
    """Show what is in a checkpoint: where training was, its files, the model's tensors."""
    with errors("checkpoint show"):
        from rich.table import Table

        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.read import read_header

        summary = inspect.glance(inspect.find(folder, step=step)[0])
        if summary.manifest is None:
            raise _damage(summary.damage or "")
        manifest, console = summary.manifest, open_console(soft_wrap=True)
        table = Table(box=None, pad_edge=False, show_header=False)
        epoch = f"{manifest.epoch}, some of it done" if manifest.in_epoch else f"{manifest.epoch}"
        table.add_row("folder", str(summary.folder))
        table.add_row("step", str(manifest.step))
        table.add_row("resumes in epoch", epoch)
        table.add_row("metric", "none" if manifest.metric is None else repr(manifest.metric))
        table.add_row(
            "values", f"not finite: {summary.not_finite}" if summary.not_finite else "none known as not finite"
        )
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
        for tensor in read_header(summary.folder):
            shape = " × ".join(map(str, tensor.shape)) or "a number"
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.add_row(tensor.name, dtype, shape, as_size(tensor.stop - tensor.start))
        console.print(tensors)


@checkpoint.command()
@_FOLDER
@click.option("--step", type=click.IntRange(min=0), help="Only the checkpoint of this step.")
def verify(folder: Path, step: int | None) -> None:
    """Read every byte of a run's checkpoints and compare it with its digest. The exit code is 1 if one is damaged.

    A checkpoint that was saved with NaN or infinite values is not damaged; which ones it has is said.
    """
    with errors("checkpoint verify"):
        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.read import find_damage

        console, damaged = open_console(soft_wrap=True), 0
        for each in inspect.find(folder, step=step):
            wrong = find_damage(each)
            damaged += bool(wrong)
            console.print(f"{each.name}: {'damaged' if wrong else 'complete'}", markup=False)
            not_finite = inspect.glance(each).not_finite
            if not_finite:
                console.print(f"  not finite: {not_finite}", markup=False)
            for line in wrong:
                console.print(f"  {line}", markup=False)
    sys.exit(1 if damaged else 0)


@checkpoint.command()
@_FOLDER
@click.option("--last", type=click.IntRange(min=0), required=True, help="Keep those of this many most recent steps.")
@click.option("--every", type=click.IntRange(min=1), help="Keep those whose step is a multiple of this.")
@click.option("--best", type=click.IntRange(min=0), default=0, help="Keep this many of the best by their metric.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Which is best.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def prune(folder: Path, last: int, every: int | None, best: int, mode: Literal["min", "max"], dry_run: bool) -> None:
    """Remove the checkpoints of a run that no option keeps.

    The newest complete and finite one always stays, and so do newer ones, which are damaged or not finite; a checkpoint
    that someone is reading is left. A job may be training in the folder meanwhile.
    """
    with errors("checkpoint prune"):
        from lockstep.checkpoint import inspect
        from lockstep.checkpoint.retention import Pruned, Retention, remove

        console = open_console(soft_wrap=True)
        plan = inspect.plan_pruning(folder, Retention(last, every, best, mode))
        root = plan.newest.parent
        for line in plan.damaged:
            console.print(f"damaged, kept: {line}", markup=False)
        for line in plan.not_finite:
            console.print(f"not finite, kept: {line}", markup=False)
        if dry_run:
            done = Pruned(tuple(root / entry.name for entry in plan.superfluous))
        else:
            done = remove(root, plan.superfluous)
        for path in done.removed:
            console.print(f"{'would remove' if dry_run else 'removed'} {path.name}", markup=False)
        for path in done.being_read:
            console.print(f"left, being read: {path.name}", markup=False)
        for path, why in done.failed:
            console.print(f"not removed: {path.name}: {why}", markup=False)
        console.print(f"kept: {', '.join(entry.name for entry in plan.kept)}", markup=False)
    sys.exit(1 if done.failed else 0)


@checkpoint.command()
@_FOLDER
@click.argument("output", type=LocalPath(dir_okay=False))
@_STEP
@click.option("--format", "format_", type=click.Choice(["torch", "safetensors"]), help="By OUTPUT's suffix otherwise.")
@click.option("--extra", metavar="NAME", help="An object saved as extra= (weights' average …), in place of the model.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it is there.")
def export(folder: Path, output: Path, step: int | None, format_: Any, extra: str | None, force: bool) -> None:
    """Write a checkpoint's model into one file, OUTPUT.

    A .safetensors file, or a torch file (.pt, .pth) that torch.load(weights_only=True) reads. Every byte is verified on
    the way; without --step checkpoints that are damaged or not finite are skipped for the newest one that is neither,
    and named.
    """
    with errors("checkpoint export"):
        from lockstep.checkpoint import inspect
        from lockstep.errors import CheckpointError

        chosen = format_ or inspect.format_of(output)
        if chosen is None:
            raise CheckpointError(f"{output}: which format? Name the file .safetensors or .pt, or give --format")
        done = inspect.export(folder, output, format=chosen, step=step, extra=extra, overwrite=force)
        for line in done.skipped:
            click.echo(f"skipped, damaged: {line}", err=True)
        for line in done.not_finite:
            taken = line.startswith(f"{done.source.name} ")
            click.echo(f"{'exported, though' if taken else 'skipped, not finite:'} {line}", err=True)
        size = as_size(done.size)
        click.echo(f"{done.path}: {done.tensors} tensors of {done.source.name}, {size}, for {done.format}")


def _damage(text: str) -> Exception:
    from lockstep.errors import CheckpointCorrupt

    return CheckpointCorrupt(text)
