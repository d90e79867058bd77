"""Save a run as a checkpoint: all ranks agree on it, write it together, and it is complete or absent."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from lockstep import callsite, knobs
from lockstep._torch import ignored_by_ddp
from lockstep.checkpoint import finite
from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.manifest import FileEntry, Manifest
from lockstep.checkpoint.match import bare, plain_names
from lockstep.checkpoint.plan import Outline, StateLayout, WritePlan, Written, plan_writes, text
from lockstep.checkpoint.run_folder import DraftCheckpoint, run_folder
from lockstep.checkpoint.state import Moment, RunState
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.stored import Stored
from lockstep.checkpoint.together import together
from lockstep.comm.peers import Peers
from lockstep.comm.world import World
from lockstep.errors import CheckpointError
from lockstep.text import which_ranks
from lockstep.version import __version__

# First all ranks agree on what to write, and on which rank writes it.


@dataclass(frozen=True)
class Announcement:
    """The record that each rank sends to the others before a save."""

    step: int
    #: The states of its random number generators.
    rng: dict[str, Any]
    #: The state of its loader, encoded; None: it has no loader.
    loader: Any
    outline: Outline

    def to_json(self) -> dict[str, Any]:
        """Return the announcement in JSON types."""
        return {**vars(self), "outline": self.outline.to_json()}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Announcement:
        """Read back what :meth:`to_json` returned."""
        return cls(**{**record, "outline": Outline.from_json(record["outline"])})


def prepare(
    run: RunState,
    world: World,
    *,
    step: int,
    before: Callable[[], None],
    meant: finite.Meant = finite.NOTHING_MEANT,
    peers: Peers | None = None,
    settle: Callable[[Sequence[dict[str, Any]]], Sequence[dict[str, Any]]] = list,
) -> WritePlan:
    """**Collective.** Decide what this rank is to write of a checkpoint at ``step``; nothing is copied yet.

    Args:
        before: run on each rank first; what it raises is raised on all.
        meant: names the tensors that need not be finite (:meth:`RunState.meant`).
        peers: the ranks, and the way they talk; None: over the world's process group.
        settle: makes of the states of all ranks' generators, in order of rank, what is saved.

    Raises:
        CheckpointError: a rank's state can't be written down, or the ranks are not at the same step.
    """

    def announce() -> tuple[StateLayout, Announcement]:
        before()
        layout = _lay_out(run, world, meant)
        loader = None if run.loader is None else encode(run.loader_state(), None, where="loader")
        return layout, Announcement(step, run.generators(world.device).to_json(), loader, layout.outline())

    (layout, _), records = together(peers or world, announce, lambda both: both[1].to_json())
    ranks = [Announcement.from_json(record) for record in records]
    if any(rank.step != step for rank in ranks):
        raise CheckpointError(
            "the ranks are not at the same step, so their states do not belong together; by rank: "
            f"{[rank.step for rank in ranks]}"
        )
    texts = {}
    if world.is_main:
        texts["rng.json"] = text([*settle([rank.rng for rank in ranks])])
        if run.loader is not None:  # the states are kept once if they are all the same
            loaders = [rank.loader for rank in ranks]
            texts["loader.json"] = text(loaders[:1] if all(one == loaders[0] for one in loaders) else loaders)
    return plan_writes(layout, [rank.outline for rank in ranks], rank=world.rank, texts=texts)


def _lay_out(run: RunState, world: World, meant: finite.Meant) -> StateLayout:
    model = bare(run.model)
    plain = plain_names(model)
    parameters = frozenset(plain(name) for name, _ in model.named_parameters(remove_duplicate=False))
    common = run.common_trees()
    ignored = _ignored(model)
    return StateLayout.of(
        run.model_state(),
        run.trees() if world.is_main else common,
        parameters=parameters,
        is_main=world.is_main,
        alike=frozenset(common),
        own=run.own_tree(),
        world_size=world.world_size,
        in_model=run.judged_in_model(),
        judge=run.judge_of_parts(),
        meant=run.without_trained(meant),
        ignored=frozenset(map(plain, ignored)),
        ignored_in_parts=_ignored_by_optimizer(model, run.optimizer, ignored),
    )


def _ignored_by_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ignored: frozenset[str]
) -> tuple[str, ...]:
    """Return what the names of the tensors begin with that an optimizer keeps for parameters that replicas leave
    alone."""
    if not ignored or optimizer is None or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return ()
    named = model.named_parameters(remove_duplicate=False)
    own = {id(parameter) for name, parameter in named if name in ignored}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return tuple(
        f"optimizer.state.state.{number}." for number, parameter in enumerate(parameters) if id(parameter) in own
    )


def _ignored(model: nn.Module) -> frozenset[str]:
    """Return what replicas leave alone: of the model, or of a part of it that is replicated by itself."""
    return frozenset(
        f"{path}.{name}" if path else name for path, module in model.named_modules() for name in ignored_by_ddp(module)
    )


def words_on_drift(plan: WritePlan) -> str:
    """Return a warning if replicas differ; empty if they do not."""
    if not plan.apart:
        return ""
    then = (
        "No checkpoint in which no difference was seen is removed for this one, and a run resumes from the newest of "
        "those: stop this run and start it again to do so"
        if plan.parameters_apart
        else "An earlier checkpoint may hold what all ranks had: lockstep checkpoint rewind goes back to it"
    )
    where = "; ".join(f"{file} on {which_ranks(ranks)}" for file, ranks in plan.apart.items())
    return (
        "the replicas have drifted apart: other ranks hold other values, or other tensors, than rank 0, so rank 0's "
        f"are saved, and a resumed run will not repeat this one bit for bit ({where}). {then}"
    )


# Then the ranks write it, at once or in the background.


def write(
    root: PurePath,
    plan: WritePlan,
    moment: Moment,
    *,
    peers: Peers,
    check: Callable[[], None],
    tidy: Callable[[PurePath, Manifest], None],
    on: Storage = POSIX,
    after_reading: Callable[[], None] | None = None,
) -> Saved:
    """**Collective.** Write a checkpoint into ``root``, completely or not at all.

    It talks to the other ranks by ``peers`` alone and touches no live state if ``plan`` was copied, so it may run in a
    thread beside training. Before the commit, rank 0 calls ``check``, which raises if the folder is not this job's any
    more; when the checkpoint is safe, it calls ``tidy`` to remove older ones. What there is to warn of by then is left
    to the caller, who does so when no rank waits for it. Each rank calls ``after_reading``, if there is one, when it
    has written its part; what it raises is raised on all.

    Raises:
        CheckpointError: it could not be written; the same error on every rank, and nothing is left of it.
    """
    folder = run_folder(root, on)
    draft: DraftCheckpoint | None = None

    def begin() -> str:
        nonlocal draft
        if plan.files is None:
            return ""
        draft = folder.draft(moment.step, plan.files)
        return draft.token

    def write_part(draft: str) -> Written:
        written = folder.write(draft, peers.rank, plan.contents())
        if after_reading is not None:
            after_reading()
        return written

    def finish(written: list[Written]) -> tuple[str, bool]:
        if draft is None or plan.files is None:
            return "", False
        check()
        entries = plan.entries([own.digests for own in written])
        not_finite = plan.not_finite([own.beyond for own in written])
        apart = list(plan.parameters_apart) or None
        stored = draft.stored(plan.files)
        manifest = _manifest(moment, peers.world_size, entries, not_finite=not_finite, apart=apart, stored=stored)
        path = draft.commit(manifest)
        tidy(path, manifest)
        if not_finite:
            callsite.warn(_words_on_not_finite(path, not_finite), RuntimeWarning)
        return path.name, manifest.is_sound

    try:
        _, drafts = together(peers, begin, lambda name: name)
        _, written = together(peers, lambda: write_part(str(drafts[0])), lambda own: own)
        with callsite.holding_warnings() as held:
            _, told = together(peers, lambda: finish([Written(*own) for own in written]), lambda saved: saved)
    except CheckpointError:  # on every rank: none continues, and reads the folder, before rank 0 has cleaned up
        if draft is not None:
            draft.discard()
        peers.gather(None)
        raise
    except BaseException:  # an interrupt must not leave a draft either
        if draft is not None:
            draft.discard()
        raise
    name, is_sound = told[0]
    return Saved(root / str(name), is_sound=bool(is_sound), warnings=tuple(held))


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been written; the same on every rank, but for the warnings."""

    folder: PurePath
    #: The ``is_sound`` of its manifest.
    is_sound: bool
    #: What rank 0 has to warn of.
    warnings: tuple[callsite.HeldWarning, ...] = ()


def _words_on_not_finite(path: PurePath, not_finite: dict[str, list[str]]) -> str:
    return (
        f"the checkpoint {path.name} holds values that are NaN or infinite, in {finite.in_words(not_finite)}: no "
        f"sound checkpoint in {path.parent} is removed for it, and a run resumes from the newest sound one; stop "
        "this run and start it again to do so (with check_finite='step', the default of lockstep.replicate, a gradient "
        "that is not finite is named by rank and parameter)"
    )


def _manifest(
    moment: Moment,
    world_size: int,
    files: dict[str, FileEntry],
    *,
    not_finite: dict[str, list[str]] | None,
    apart: list[int] | None,
    stored: Stored | None,
) -> Manifest:
    return Manifest(
        step=moment.step,
        epoch=moment.epoch,
        in_epoch=moment.in_epoch,
        world_size=world_size,
        metric=moment.metric,
        round=None if (found := knobs.round_()) is None else found[1],
        hosts=moment.hosts,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={
            "lockstep": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **moment.conditions,
        },
        files=dict(sorted(files.items())),
        not_finite=not_finite,
        apart=apart,
        stored=stored,
    )
