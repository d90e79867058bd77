"""In a rank of an observed run: record the parts of each optimizer step, and end the run after enough steps.

The script is not changed. torch's global hooks tell the observer of optimizer steps and of modules' forwards; it takes
the losses where ``torch.autograd.backward`` is called. It draws from no generator of the script's and sends nothing to
other ranks, so that the script computes the same as without it.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import random
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import _torch, accelerator, callsite, trees
from lockstep.bits import hexdigest
from lockstep.comm.init import current_world
from lockstep.launch.spawn import SpawnContext
from lockstep.step import streams
from lockstep.tools.verify.alike import make_alike
from lockstep.tools.verify.records import (
    VERSION,
    Array,
    Assignment,
    ForwardRecord,
    Loss,
    NotesWriter,
    OptimizerNote,
    StepNote,
)

#: The most numbers of a sample that its signature is made of, and the most samples of a batch that have one.
_MOST_NUMBERS, _MOST_SAMPLES = 65_536, 65_536
#: The fewest numbers of each tensor that are kept.
_LEAST_KEPT = 64
#: The relative distance between neighbouring numbers to which a GPU's tensor cores round float32.
_TF32 = 2.0**-10
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: The prefixes of parameter names in wrapped modules.
_WRAPPINGS = ("module.", _torch.COMPILED_PREFIX)
_NOT_DETERMINISTIC = "does not have a deterministic implementation"

#: Audit event of a process that begins -> its name in messages.
_STARTS = {
    "subprocess.Popen": "subprocess",
    "os.system": "os.system",
    "os.posix_spawn": "os.posix_spawn",
    "os.fork": "os.fork",
}

#: Threads that are starting a process of multiprocessing.
_quiet: set[int] = set()

_generator = torch.default_generator


class Observer:
    """Watches one rank. A process has one observer.

    Args:
        assignment: the command's instructions.
        rank: this rank.
        world_size: the run's number of ranks.
    """

    def __init__(self, assignment: Assignment, *, rank: int, world_size: int) -> None:
        self._assignment = assignment
        self._rank = rank
        self._writer = NotesWriter(assignment.folder, rank=rank)
        self._thread = threading.get_ident()
        self._nudges = torch.Generator().manual_seed(20_261_122)
        self._weights: dict[tuple[int, int, torch.device], Tensor] = {}
        #: Modules with parameters that the script has called, their names, and the names of all modules in them.
        self._roots: list[ref[nn.Module]] = []
        self._root_names: dict[int, str] = {}
        self._spacing = 0.0
        self._labels: dict[int, str] = {}
        #: The nesting depth of the forwards under way; the outermost module, if it trains; the states of torch's
        #: generators when it began.
        self._depth = 0
        self._outermost: nn.Module | None = None
        self._found = _Draws()
        self._drew = self._drew_before = False
        #: The samples of the outermost forward; where it left torch's generator.
        self._samples = 0
        self._left: _Draws | None
        self._in_backward = False
        #: Optimizer -> its index; the number of optimizers that have a note; the nesting depth of the calls of step()
        #: under way.
        self._optimizers: dict[torch.optim.Optimizer, int] = {}
        #: The parameters of each that were named.
        self._held: dict[torch.optim.Optimizer, int] = {}
        self._in_steps = 0
        self._step = 0
        self._has_ended = False
        self._told: set[str] = set()
        self._reset()
        self._writer.add(
            "about",
            {
                "version": VERSION,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "rank": rank,
                "world_size": world_size,
                "generators": _generator_states(),
            },
        )

    def _reset(self) -> None:
        """Begin the notes of a step."""
        self._left = None
        self._losses: list[Loss] = []
        self._batches: list[ForwardRecord] = []
        self._states: dict[str, str] = {}
        self._norms: dict[str, None] = {}
        self._dropouts: dict[str, None] = {}
        self._gathers: dict[str, None] = {}
        self._sums: dict[str, None] = {}
        self._before: list[str] = []
        self._numbers: dict[str, Array] = {}
        self._gradients: list[str | None] = []

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self._step

    @property
    def samples_in_hand(self) -> int | None:
        """This rank's samples of the batch that is being computed; 0: not known how many; None: there is no batch."""
        if threading.get_ident() != self._thread:
            return None
        world = current_world()
        share = None if world is None else world.share
        if self._outermost is None:
            return None if share is None else int(share.local_samples)
        return self._samples or (0 if share is None else int(share.local_samples))

    # Forwards --------------------------------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        """Note that a module is called, and for the outermost one its samples and the generators' states."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1:
            self._outermost = None
            if not (torch.is_grad_enabled() and module.training and _has_parameters(module)):
                return
            self._outermost = module
            self._samples = next((each.shape[0] for each in _tensors(args)), 0)
            self._meet(module)
            if not self._states:
                self._states = _generator_states()
            self._found = _Draws()
            self._drew_before = self._found.of_this_rank()
        if self._outermost is not None and module.training:
            self._note_kind(module)

    def forward_ends(self) -> None:
        """Note that a call of a module is over, before the module's own hooks restore generators."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if not self._depth and self._outermost is not None:
            self._drew = self._found.have_moved()
            self._left = _Draws()

    def forward_was(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Write down the batch of a forward for training that is over."""
        if self._depth or module is not self._outermost or threading.get_ident() != self._thread:
            return
        self._outermost = None
        if _torch.original_of(module) is not None:  # what is compiled calls no hook
            for part in module.modules():
                if part.training:
                    self._note_kind(part)
        inputs = _tensors((args, kwargs))
        if not inputs:
            return
        count = inputs[0].shape[0]
        samples, size = self._signatures(inputs, count)
        made = _tensors(output)
        outputs, output_size = self._signatures(made, count)
        self._note_spacing_of(made)
        name, shape = self._root_names[id(module)], list(inputs[0].shape)
        self._batches.append(
            ForwardRecord(name, shape, samples, size, outputs, output_size, self._drew, self._drew_before)
        )

    def _meet(self, module: nn.Module) -> None:
        """Keep the names in a module that the script calls for the first time, and follow the ends of its forwards."""
        known = [each() for each in self._roots]
        if any(module is each for each in known):
            return
        self._roots.append(ref(module))
        self._root_names[id(module)] = f"{type(module).__name__} {len(self._roots)}"
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_hook(_after_root, with_kwargs=True)
        for name, part in module.named_modules():
            self._labels.setdefault(id(part), _plain(name) or type(part).__name__)
        self._note_spacing([torch.finfo(each.dtype).eps for each in module.parameters() if each.is_floating_point()])
        self._nudge(module.parameters())

    def _note_kind(self, module: nn.Module) -> None:
        """Note modules that make a batch's outputs depend on more than each sample."""
        if isinstance(module, _torch.batch_norm()):
            if "SyncBatchNorm" not in type(module).__name__:
                self._norms[self._label(module)] = None
        elif isinstance(module, _DROPOUTS) and module.p > 0:
            self._dropouts[self._label(module)] = None

    def _label(self, module: nn.Module) -> str:
        """Return a module's name and class."""
        kind = type(module).__name__
        name = self._labels.get(id(module), kind)
        return kind if name == kind else f"{name} ({kind})"

    def _note_spacing_of(self, outputs: Sequence[Tensor]) -> None:
        found = [torch.finfo(each.dtype).eps for each in outputs if each.is_floating_point()]
        for kind in {each.device.type for each in outputs}:
            if torch.is_autocast_enabled(kind):
                found.append(torch.finfo(torch.get_autocast_dtype(kind)).eps)
            if accelerator.cudnn_rounds_to_tf32(kind):
                found.append(_TF32)
        self._note_spacing(found)

    def _note_spacing(self, found: Sequence[float]) -> None:
        """Note how coarse the numbers are that the model computes with."""
        if max(found, default=0.0) > self._spacing:
            self._spacing = max(found)
            self._writer.add("spacing", {"spacing": self._spacing})

    def _signatures(self, tensors: Sequence[Tensor], count: int) -> tuple[list[float], float]:
        """Return a number for each of ``count`` samples, and the typical size of such a number.

        A sample's number is the sum of all that it holds, in float64, with weights between -1 and 1 that are the same
        in every run: two samples with the same number are the same sample, however a batch is cut and ordered, and
        samples that differ by rounding have numbers that differ by rounding.
        """
        total, square = torch.zeros(count, dtype=torch.float64, device="cpu"), 0.0
        found = [each for each in tensors if each.shape[0] == count]
        if not found or not 0 < count <= _MOST_SAMPLES:
            return [], 0.0
        with torch.no_grad():
            for place, tensor in enumerate(found):
                rows = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                rows = rows.detach().reshape(count, -1)
                rows = rows[:, :: math.ceil(max(rows.shape[1], 1) / _MOST_NUMBERS)].double()
                if rows.shape[1]:
                    total += (rows @ self._weights_of(place, rows)).cpu()
                    square += float((rows * rows).sum(1).mean()) / 3  # the mean square of the weights
        return total.tolist(), math.sqrt(square)

    def _weights_of(self, place: int, rows: Tensor) -> Tensor:
        key = (place, rows.shape[1], rows.device)
        if key not in self._weights:
            # (The first numbers are the same for any length, so that zeros at the end of a sample change nothing.)
            drawn = torch.Generator().manual_seed(place * 1_000_003 + 1)
            weights = torch.rand(rows.shape[1], generator=drawn, dtype=torch.float64) * 2 - 1
            self._weights[key] = weights.to(rows.device)
        return self._weights[key]

    # Backwards -------------------------------------------------------------------------------------------------------

    def backward(self, begin: Callable[..., None], tensors: Any, args: Any, kwargs: Any) -> None:
        """Write down the loss that a backward begins at, and run it."""
        if self._in_backward or threading.get_ident() != self._thread:
            begin(tensors, *args, **kwargs)
            return
        first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        value = float(first.detach()) if isinstance(first, Tensor) and first.numel() == 1 else None
        world = current_world()
        share = None if world is None else world.share
        local, whole = (None, None) if share is None else (share.local_samples, share.global_samples)
        spacing = torch.finfo(first.dtype).eps if isinstance(first, Tensor) and first.is_floating_point() else 0.0
        drew = self._left is not None and self._left.have_moved_within()
        self._losses.append(Loss(value, local, whole, spacing, drew))
        self._in_backward = True
        try:
            begin(tensors, *args, **kwargs)
        finally:
            self._in_backward = False

    # Steps -----------------------------------------------------------------------------------------------------------

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Write down the gradients that an optimizer is about to use."""
        if threading.get_ident() != self._thread:
            return
        if self._has_ended:  # the script has caught the end of the run
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._in_steps += 1
        if self._in_steps > 1:
            return
        if not self._states:
            self._states = _generator_states()
        params = list(_parameters(optimizer))
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = len(self._optimizers)
        if len(params) > self._held.get(optimizer, 0):  # its first step, or the one after add_param_group
            self._keep("b", params)
        self._before = [hexdigest(_plain_values(each)) for each in params]
        if not has_closure:
            self._take_gradients(params)

    def step_ends(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Write down the parameters after the step, and end the run if that was the last."""
        if threading.get_ident() != self._thread:
            self._say_once("remark", "a thread of the script's own takes optimizer steps, which are not seen")
            return
        self._in_steps -= 1
        if self._in_steps:
            return
        params = list(_parameters(optimizer))
        if has_closure:
            self._take_gradients(params)
        self._keep("p", params)
        if len(params) > self._held.get(optimizer, 0) or optimizer not in self._held:
            self._introduce(optimizer, params)
        self._step += 1
        note = StepNote(
            self._step,
            self._optimizers[optimizer],
            self._gradients,
            [hexdigest(_plain_values(each)) for each in params],
            self._before,
            [_options(group) for group in optimizer.param_groups],
            self._losses,
            self._batches,
            self._states,
            list(self._norms),
            list(self._dropouts),
            list(self._gathers),
            list(self._sums),
        )
        self._writer.add_step(note, self._numbers)
        self._reset()
        if self._step >= self._assignment.steps:
            self._writer.close()
            self._has_ended = True
            raise SystemExit(0)
        self._nudge(params)

    def _introduce(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Name the parameters, after the first step: a closure may have called the model in it for the first time."""
        left_out = sum(len(group["params"]) for group in optimizer.param_groups) - len(params)
        if left_out and optimizer not in self._held:
            text = f"{left_out} parameters of {type(optimizer).__name__} are held in parts, as FSDP does, and left out"
            self._writer.add("remark", {"text": text})
        names = _names([root for each in self._roots if (root := each()) is not None])
        called = [id(each) in names for each in params] if self._roots else []
        if any(id(each) not in names for each in params):
            names = _names([each for each in gc.get_objects() if issubclass(type(each), nn.Module)]) | names
        note = OptimizerNote(
            type(optimizer).__name__,
            [names.get(id(each), f"parameter {i} of {type(optimizer).__name__}") for i, each in enumerate(params)],
            [list(each.shape) for each in params],
            [torch.finfo(each.dtype).eps if each.is_floating_point() else 0.0 for each in params],
            called,
        )
        self._note_spacing(note.spacings)
        self._held[optimizer] = len(params)
        self._writer.add("optimizer", asdict(note) | {"index": self._optimizers[optimizer]})

    def _take_gradients(self, params: Sequence[Tensor]) -> None:
        gradients = [each.grad for each in params]
        self._gradients = [None if each is None else hexdigest(_plain_values(each)) for each in gradients]
        self._keep("g", gradients)

    def _keep(self, kind: str, tensors: Sequence[Tensor | None]) -> None:
        """Keep as many numbers of each tensor as the limit allows: see Note [What is kept of a step] in records.py."""
        if self._rank:
            return
        total = sum(each.numel() for each in tensors if each is not None)
        part = min(1.0, self._assignment.numbers / max(total, 1))
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                kept = max(_LEAST_KEPT, int(tensor.numel() * part))
                values = _plain_values(tensor).reshape(-1)[:: max(1, math.ceil(tensor.numel() / kept))]
                self._numbers[f"{kind}{i}"] = _as_array(values).copy()

    def _nudge(self, params: Iterator[nn.Parameter] | Sequence[Tensor]) -> None:
        """Change parameters as little as rounding does: see Note [Nudged runs] in compare.py."""
        if not self._assignment.nudge:
            return
        with torch.no_grad():
            for param in params:
                if param.is_floating_point() and param.requires_grad:
                    signs = torch.randint(0, 2, param.shape, generator=self._nudges).mul_(2).sub_(1)
                    param.mul_(1 + self._assignment.nudge * signs.to(param.device, torch.float64))

    # What else the script does ---------------------------------------------------------------------------------------

    def exchanges(self, tensor: Any, caller: FrameType, *, adds: bool) -> None:
        """Note that the script gathers outputs from all ranks, or ``adds`` them up."""
        if self._losses or self._depth or not self._batches or threading.get_ident() != self._thread:
            return
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and (tensor.numel() > 1 if adds else tensor.dim()):
            frame = callsite.user_frame(caller)
            if frame is not None:
                (self._sums if adds else self._gathers)[callsite.words(frame.f_code, frame.f_lineno)] = None

    def note_process(self, what: str, *, trains: bool) -> None:
        """Write down that the script starts a process, and whether that one trains."""
        self._say_once("spawned" if trains else "process", what)

    def _say_once(self, kind: str, text: str) -> None:
        if not self._has_ended and text not in self._told:
            self._told.add(text)
            self._writer.add(kind, {"text": text})

    def note_operation(self, text: str) -> None:
        """Write down an operation that torch calls not deterministic."""
        self._writer.add("operation", {"text": text})


class _Draws:
    """The states of torch's generators at one moment, which tell later whether numbers were drawn."""

    def __init__(self) -> None:
        self._seed = _generator.initial_seed()
        self._state = _generator.get_state()
        kind = accelerator.initialised()
        self._device = accelerator.CPU if kind is None else accelerator.current(kind)
        self._of_device = accelerator.rng_state(self._device)

    def of_this_rank(self) -> bool:
        """Return whether this rank draws from numbers of its own here, and has drawn some."""
        is_own = not torch.equal(self._state, streams.current.state)
        return is_own and not torch.equal(self._state, _fresh(self._seed))

    def have_moved(self) -> bool:
        """Return whether numbers were drawn since then; the rank may have begun to draw its own meanwhile."""
        seed = _generator.initial_seed()
        begun = self._state if seed == self._seed else _fresh(seed)
        moved = not torch.equal(begun, _generator.get_state())
        now = accelerator.rng_state(self._device)
        return moved or (self._of_device is not None and now is not None and not torch.equal(self._of_device, now))

    def have_moved_within(self) -> bool:
        """Return whether numbers were drawn since, in the same stretch: one that has ended tells nothing."""
        return _generator.initial_seed() == self._seed and self.have_moved()


def _fresh(seed: int) -> Tensor:
    """Return the state of torch's CPU generator right after it was seeded."""
    return torch.Generator().manual_seed(seed).get_state()


def _generator_states() -> dict[str, str]:
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()),
        "numpy": xxhash.xxh3_64_hexdigest(
            b"".join(np.asarray(value).tobytes() for value in numpy_state["state"].values())
        ),
        "torch": hexdigest(streams.current.state),
    }


def _tensors(tree: Any) -> list[Tensor]:
    """Return the plain tensors in inputs or outputs that have a first dimension."""
    found = [leaf for leaf in trees.leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    return [each for each in found if each.dim() and not each.is_nested and not _torch.is_made_of_tensors(each)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _names(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of parameters by identity, as the largest of ``roots`` that holds them calls them."""
    names: dict[int, str] = {}
    for root in sorted(roots, key=lambda root: -len(list(root.parameters()))):
        prefix = f"{type(root).__name__}." if names else ""
        for name, param in root.named_parameters():
            names.setdefault(id(param), prefix + _plain(name))
    return names


def _plain(name: str) -> str:
    for prefix in _WRAPPINGS:
        name = name.replace(f".{prefix}", ".") if prefix == _torch.COMPILED_PREFIX else name
    while name.startswith(_WRAPPINGS):
        name = name[name.index(".") + 1 :]
    return "" if name + "." in _WRAPPINGS else name


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not _torch.is_made_of_tensors(param):
                yield param


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an optimizer's group."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = float(value)
        elif isinstance(value, (bool, int, float)):
            found[name] = value
        elif isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
            found[name] = list(value)
    return found


def _plain_values(tensor: Tensor) -> Tensor:
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _as_array(values: Tensor) -> Array:
    """Return values as a NumPy array; dtypes that NumPy lacks become float32."""
    if values.is_floating_point() and values.dtype not in (torch.float32, torch.float64, torch.float16):
        values = values.float()
    array: Array = values.cpu().contiguous().numpy()
    return array


# torch's hooks: functions, because what is copied or saved with a module takes its hooks along -----------------------

_observer: Observer | None = None


def _before_forward(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and _observer is not None:
        _observer.forward_begins(module, args)


def _after_forward(*_: Any) -> None:
    if not torch.compiler.is_compiling() and _observer is not None:
        _observer.forward_ends()


def _after_root(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and _observer is not None:
        _observer.forward_was(module, args, kwargs, output)


def _has_closure(args: Any, kwargs: Any) -> bool:
    # (torch hands the optimizer over as the first of args as well)
    given = [each for each in args if not isinstance(each, torch.optim.Optimizer)]
    return any(callable(each) for each in given) or callable(kwargs.get("closure"))


def observe(assignment: Assignment, *, rank: int, world_size: int) -> Observer:
    """Watch this process from now on. Called once, before the script begins."""
    global _observer
    observer = _observer = Observer(assignment, rank=rank, world_size=world_size)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _observer is not None:
            _observer.step_begins(optimizer, has_closure=_has_closure(args, kwargs))

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _observer is not None:
            _observer.step_ends(optimizer, has_closure=_has_closure(args, kwargs))

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    register_module_forward_pre_hook(_before_forward)
    register_module_forward_hook(_after_forward, always_call=True)
    begin = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _observer is None:
            begin(tensors, *args, **kwargs)
        else:
            _observer.backward(begin, tensors, args, kwargs)

    torch.autograd.backward = backward
    os.register_at_fork(after_in_child=_leave)
    _watch_exchanges()
    _watch_processes()
    if assignment.names_operations:
        _listen_for_operations(observer)
    if assignment.numbers_alike:
        make_alike(observer)
    return observer


def _leave() -> None:
    """Stop observing in a process that the rank has forked: its notes would be taken for the rank's."""
    global _observer
    _observer = None


def _watch_exchanges() -> None:
    """Watch where the script gathers tensors or adds them up; lockstep's own collectives do not count."""
    for name, place in (("all_gather", 1), ("all_gather_into_tensor", 1), ("all_reduce", 0)):
        watched = _watched(getattr(distributed_c10d, name), place, adds=name == "all_reduce")
        for home in (dist, distributed_c10d):
            setattr(home, name, watched)


def _watched(collective: Callable[..., Any], place: int, *, adds: bool) -> Callable[..., Any]:
    @functools.wraps(collective)
    def watched(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        if _observer is not None and not str(caller.f_globals.get("__name__")).startswith("lockstep."):
            given = options.get("tensor", options.get("input_tensor"))
            _observer.exchanges(args[place] if len(args) > place else given, caller, adds=adds)
        return collective(*args, **options)

    return watched


def _watch_processes() -> None:
    """Watch which processes the script starts."""
    start, spawn = BaseProcess.start, SpawnContext.__init__

    def watched_start(self: Any) -> None:
        target = getattr(self, "_target", None)
        home = str(getattr(target, "__module__", ""))
        if _observer is not None and not home.startswith("torch.utils.data"):
            trains = home == "torch.multiprocessing.spawn"
            function = self._args[0] if trains else target
            way = "torch.multiprocessing.spawn" if trains else "multiprocessing"
            _observer.note_process(f"{way} of {_name_of(function)}", trains=trains)
        _quiet.add(threading.get_ident())  # (the fork or spawn that follows starts this same process)
        try:
            start(self)
        finally:
            _quiet.discard(threading.get_ident())

    def watched_spawn(self: Any, fn: Any, *args: Any, **options: Any) -> None:
        if _observer is not None:
            _observer.note_process(f"lockstep.spawn of {_name_of(fn)}", trains=True)
        spawn(self, fn, *args, **options)

    BaseProcess.start = watched_start  # type: ignore[method-assign]
    SpawnContext.__init__ = watched_spawn  # type: ignore[method-assign]

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS and _observer is not None and threading.get_ident() not in _quiet:
            words = args[1] if event == "subprocess.Popen" else args[0] if args else ()
            text = words if isinstance(words, str) else " ".join(map(str, words))
            _observer.note_process(f"{_STARTS[event]} {textwrap.shorten(text, 60)}".rstrip(), trains=False)

    sys.addaudithook(heard)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _listen_for_operations(observer: Observer) -> None:
    """Have torch report operations that are not deterministic, and record each with the line that calls it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    show, told = warnings.showwarning, set[str]()

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **others: Any) -> None:
        text = str(message)
        if _NOT_DETERMINISTIC not in text:
            show(message, category, filename, lineno, *rest, **others)
            return
        name = text.split()[0]
        where = f"{name} at {filename}:{lineno}"
        if where not in told:
            told.add(where)
            observer.note_operation(where)

    warnings.filterwarnings("always", message=f".*{_NOT_DETERMINISTIC}")
    warnings.showwarning = note
    sys.stdout.flush()
