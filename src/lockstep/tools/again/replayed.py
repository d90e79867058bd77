"""In a program that runs again: continue from the newest checkpoint before a step, and stop in that step.

Note [A step replayed]
~~~~~~~~~~~~~~~~~~~~~~
The program is not changed. Its Checkpointers write to a folder of this process's own, which holds the newest
checkpoints before the step: links to the run's files, or copies where links are not possible or the run is in a store.
So the program resumes as it would, and nothing reaches the run's folder, neither a lock nor a line of a log.

Before the step nothing is recorded. In the step, hooks note the batch in hand, where a value first was not finite, and
the losses; before the optimizer takes its step, the gradients. A value that is not finite is told with the samples
whose rows it is in, if the tensor has a row for each sample of the batch.

With slices one process computes what the ranks did, bit by bit. Without, it computes each global batch whole, which is
the same up to rounding. With a rank named, this process draws random numbers as that rank did, and in the step itself
it gets that rank's part of the batch and nothing else: its forward and backward are that rank's own, to the bit if the
checkpoint is that of the step before. The other ranks' contributions are missing from the gradients then.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pdb
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import optimizer as optimizers

from lockstep import _torch, callsite
from lockstep._files import redirected, run_path, write_whole
from lockstep.checkpoint import folders
from lockstep.checkpoint.api import Checkpointer
from lockstep.checkpoint.locks import CheckpointGone, reading
from lockstep.checkpoint.read import copy_to_disk
from lockstep.checkpoint.run_folder import run_folder
from lockstep.data.batches import EpochBatches
from lockstep.data.fetch import BatchKey, Fetched, FetchingDataset
from lockstep.data.loader import ShardedLoader
from lockstep.data.mixing import mix
from lockstep.data.steps import Step
from lockstep.errors import CheckpointCorrupt, named
from lockstep.job import flight
from lockstep.step import loss_scale
from lockstep.step.streams import RandomStreams
from lockstep.tools.again.samples import Part, Wanted, parts_of
from lockstep.trees import parts_of as tree_parts
from lockstep.trees import to_device

#: Checkpoints before the step that are laid out: the newest may be damaged.
_CHECKPOINTS = 2
#: The most names and samples that are told of one finding, and findings.
_MOST = 100


def run(request: Mapping[str, Any], program: Callable[[], None]) -> None:
    """Run the program up to the step that a request names, and answer what was seen in it.

    Args:
        request: ``replay`` with ``step``, ``rank``, ``world_size``, ``debug`` and ``wanted``; and ``folder``.
        program: becomes the program.
    """
    watch = _StepWatch(request)
    watch.listen()
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        if watch.is_in_step:
            watch.answer(raised=named(error))
            if watch.debugs:
                traceback.print_exc()
                pdb.post_mortem(error.__traceback__)
        raise


class _StepWatch:
    """Looks at one step of this process."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        asked = request["replay"]
        self._folder = Path(request["folder"])
        self._step: int = asked["step"]
        self._rank: int | None = asked["rank"]
        self._world_size: int = asked["world_size"]
        self.debugs: bool = asked["debug"]
        self._wanted = [Wanted(**each) for each in asked["wanted"]]
        self._resumed: int | None = None
        self._batches: list[dict[str, Any]] = []
        self._findings: list[dict[str, Any]] = []
        self._losses: list[float] = []
        #: The samples whose rows the tensors in hand have, in order; empty: it is not known.
        self._rows: list[dict[str, Any]] = []
        self._depth = 0
        self._names: dict[int, str] = {}
        self._params: dict[int, str] = {}

    @property
    def is_in_step(self) -> bool:
        """Whether the step under way is the one that is looked at."""
        return flight.current.step == self._step

    @property
    def _looks(self) -> bool:
        """Whether a forward is looked at: one of the step that trains."""
        return self.is_in_step and torch.is_grad_enabled()

    def listen(self) -> None:
        """Set all hooks, in this process alone."""
        self._lay_out_checkpoints()
        self._follow_batches()
        if self._rank is not None:
            _draw_as(self._rank, self._world_size)
        flight.watch_optimizers(optimizers)  # without a launcher steps are not counted
        register_module_forward_pre_hook(self._forward_begins)
        register_module_forward_hook(self._forward_was, always_call=True)
        optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def noting(tensors: Any, *args: Any, **options: Any) -> None:
            self._note_losses(tensors)
            backward(tensors, *args, **options)

        torch.autograd.backward = noting

    # Where it begins --------------------------------------------------------------------------------------------------

    def _lay_out_checkpoints(self) -> None:
        begin, restore = Checkpointer.__init__, Checkpointer.restore

        @functools.wraps(begin)
        def init(saved: Checkpointer, folder: Any, **options: Any) -> None:
            if isinstance(folder, (str, os.PathLike)):
                original = run_path(folder, "folder")
                _lay_out(original, redirected(self._folder / "saved", folder), before=self._step)
            begin(saved, folder, **options)

        @functools.wraps(restore)
        def noting(saved: Checkpointer, **options: Any) -> Any:
            found = restore(saved, **options)
            self._resumed = None if found is None else found.step
            return found

        _replace(Checkpointer, __init__=init, restore=noting)

    # What is in hand --------------------------------------------------------------------------------------------------

    def _follow_batches(self) -> None:
        whole, sliced, steps = ShardedLoader._hand_out, ShardedLoader._hand_out_step, Step.__iter__

        def hand_out(loader: ShardedLoader, fetched: Fetched) -> Iterator[Any]:
            if self.is_in_step:
                fetched = self._got(loader, fetched)
            yield from whole(loader, fetched)

        def hand_out_step(loader: ShardedLoader, fetched: Fetched) -> Iterator[Step]:
            if self.is_in_step:
                self._got(loader, fetched)
            yield from sliced(loader, fetched)

        def slices(step: Step) -> Iterator[Any]:
            parts = {part["slice"]: part["samples"] for each in self._batches for part in each["parts"]}
            known = {id(batch): number for number, batch in step._batches}
            for batch in steps(step):
                self._rows = parts.get(known.get(id(batch)), [])
                self._look_at_batch(batch)
                yield batch

        _replace(ShardedLoader, _hand_out=hand_out, _hand_out_step=hand_out_step)
        _replace(Step, __iter__=slices)

    def _got(self, loader: ShardedLoader, fetched: Fetched) -> Fetched:
        """Note a batch of the step; return what the loop gets of it: all, or the part of the rank that is named."""
        cursor, now = loader._cursor, loader._now
        wanted = next((each for each in self._wanted if each.settings["loader"] == loader._number), None)
        if wanted is None:
            return fetched  # of a loader that took no part in the step, as in an evaluation before it
        assert isinstance(now, EpochBatches)  # streams are refused before the program is run
        parts = parts_of(now.batch(cursor.batches), wanted)
        told = [{"slice": part.slice, "rank": part.rank, "samples": _samples(part)} for part in parts]
        place = {"loader": loader._number, "epoch": cursor.epoch, "batch": cursor.batches}
        self._batches.append({**place, "parts": told})
        if loader.slices is not None:
            return fetched
        if self._rank is not None:
            parts = [part for part in parts if part.rank == self._rank]
            fetched = _refetched(loader, parts[0], epoch_key=mix(loader.seed, cursor.epoch))
        self._rows = sorted((each for part in parts for each in _samples(part)), key=lambda each: each["position"])
        self._look_at_batch(fetched.batch)
        return fetched

    def _look_at_batch(self, batch: Any) -> None:
        for path, tensor in _tensors(batch, ""):
            self._look(tensor, f"the batch{path and f' ({path})'}", "batch")

    # What is computed -------------------------------------------------------------------------------------------------

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self._looks and id(module) not in self._names:
            self._names |= {id(each): name or type(module).__name__ for name, each in module.named_modules()}
            self._params |= {id(each): name for name, each in module.named_parameters()}
            for name, param in module.named_parameters():
                self._look(param, f"the parameter {name}, before the step", "parameter", rows=False)
        if self._depth == 1 and self._looks:
            for path, tensor in _tensors(args, ""):
                self._look(tensor, f"the model's input{path and f' {path}'}", "input")

    def _forward_was(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        self._depth -= 1
        if self._looks and not any(each["kind"] == "output" for each in self._findings):
            name = self._names.get(id(module), type(module).__name__)
            for path, tensor in _tensors(output, ""):
                self._look(tensor, f"the output of {name} ({type(module).__name__}){path and f' {path}'}", "output")

    def _note_losses(self, tensors: Any) -> None:
        if not self.is_in_step:
            return
        scale = loss_scale.in_force()  # (of precision="fp16": every backward is of a loss that is multiplied by it)
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            if tensor.numel() == 1:
                self._losses.append(float(tensor.detach()) / (1.0 if scale is None else scale.scale))
            self._look(tensor, "the loss", "loss", rows=tensor.ndim > 0)

    @torch.no_grad()
    def _look(self, tensor: Tensor, what: str, kind: str, *, rows: bool = True) -> None:
        """Note whether something is not finite, and of which samples."""
        if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
            return
        bad = ~tensor.detach().isfinite()
        count = int(bad.sum())
        if not count or len(self._findings) >= _MOST:
            return
        samples: list[dict[str, Any]] = []
        if rows and tensor.ndim and tensor.shape[0] == len(self._rows):
            flags = bad.reshape(bad.shape[0], -1).any(1).tolist()
            samples = [sample for sample, is_bad in zip(self._rows, flags, strict=True) if is_bad]
        found = {"kind": kind, "what": what, "numbers": count, "of": tensor.numel(), "samples": samples[:_MOST]}
        if found not in self._findings:
            self._findings.append(found)

    # Where it ends ----------------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_in_step or _torch.is_inner_step(optimizer):
            return
        self._rows = []
        gradients = []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.grad is None:
                continue
            name = self._params.get(id(param), "a parameter")
            self._look(param.grad, f"the gradient of {name}", "gradient", rows=False)
            gradients.append((name, float(torch.linalg.vector_norm(param.grad.detach().to(torch.float64)))))
        told = self.answer(gradients=gradients)
        if self.debugs:
            from lockstep.tools.again.replay import in_words

            print(in_words(told), flush=True)
            frame = callsite.user_frame(sys._getframe(1))
            debugger = pdb.Pdb()
            debugger.reset()
            debugger.interaction(frame, None)
        raise SystemExit(0)

    def answer(self, *, gradients: Sequence[tuple[str, float]] = (), raised: str | None = None) -> dict[str, Any]:
        """Write down what was seen of the step."""
        frame = callsite.user_frame(sys._getframe(1))
        told = {
            "resumed_from": self._resumed,
            "batches": [{name: each[name] for name in ("loader", "epoch", "batch")} for each in self._batches],
            "losses": self._losses,
            "gradient_norm": math.sqrt(sum(norm * norm for _, norm in gradients)) if gradients else None,
            "gradients": [{"name": name, "norm": norm} for name, norm in gradients],
            "findings": self._findings,
            "at": None if frame is None else callsite.words(frame.f_code, frame.f_lineno),
            "raised": raised,
        }
        write_whole(self._folder / "answer.json", json.dumps(told))
        return told


def _replace(owner: type, **functions: Callable[..., Any]) -> None:
    """Put functions in the place of a class's own, in this process alone."""
    for name, function in functions.items():
        setattr(owner, name, function)


def _draw_as(rank: int, world_size: int) -> None:
    """Let this process draw random numbers as a rank of several does: Note [Random numbers of a rank] in
    ``step/streams.py``."""
    begin = RandomStreams.__init__

    def init(self: RandomStreams, **_: Any) -> None:
        begin(self, rank=rank, world_size=world_size)

    _replace(RandomStreams, __init__=init)


def _lay_out(original: PurePath, target: Path, *, before: int) -> None:
    """Put the newest checkpoints before a step where this process looks for them."""
    root = run_folder(original)
    if target.exists() or not root.exists():
        return
    target.mkdir(mode=0o700, parents=True)
    there = [each for each in root.checkpoints() if folders.step_of(each) < before]
    lay = _link if isinstance(original, Path) else copy_to_disk
    laid = 0
    for folder in there:
        if laid == _CHECKPOINTS:
            return
        try:
            lay(folder, target / folder.name)
            laid += 1
        except CheckpointGone:  # a run that goes on may remove it: then an older one is taken
            continue
        except CheckpointCorrupt as error:
            print(f"lockstep replay: {error}; an older checkpoint is used", file=sys.stderr, flush=True)


def _link(folder: PurePath, target: Path) -> None:
    """Put a checkpoint's files into a new folder on the same machine, without reading them if that is possible."""
    original = Path(folder)
    with reading(original):
        target.mkdir(mode=0o700)
        for file in original.iterdir():
            try:
                os.link(file, target / file.name)
            except OSError:  # another file system, or another user's files
                shutil.copyfile(file, target / file.name)


def _refetched(loader: ShardedLoader, part: Part, *, epoch_key: int) -> Fetched:
    """Return a rank's part of a batch as that rank had it; it has samples."""
    dataset, samples = loader._inner.dataset, len(part.indices)
    assert isinstance(dataset, FetchingDataset)  # as above
    fetched = dataset[BatchKey(part.indices, part.positions, samples, samples, epoch_key)]
    return fetched if loader._device is None else fetched._replace(batch=to_device(fetched.batch, loader._device))


def _samples(part: Part) -> list[dict[str, Any]]:
    return [
        {"index": index, "position": position, "rank": part.rank, "slice": part.slice}
        for position, index in zip(part.positions, part.indices, strict=True)
    ]


def _tensors(tree: Any, path: str) -> Iterable[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
        return
    parts = None if isinstance(tree, (str, bytes)) else tree_parts(tree)
    for key, part in (parts or {}).items():
        yield from _tensors(part, f"{path}.{key}" if path else str(key))
