"""The ranks' states become a save: what each of them holds, and which bytes of it each of them writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.checkpoint import rng
from lockstep.checkpoint.captured import Captured, Share, capture, divided, text
from lockstep.checkpoint.codec import encode
from lockstep.checkpoint.names import bare, plain_names, under_plain_names
from lockstep.checkpoint.together import together
from lockstep.checkpoint.training import Training
from lockstep.comm.world import World
from lockstep.errors import CheckpointError


def share_of(training: Training, world: World, *, step: int, before: Callable[[], None]) -> Share:
    """**Collective.** What this rank is to write of a checkpoint at ``step``, copied nowhere yet.

    Args:
        training: the run.
        world: its ranks.
        step: where this rank is.
        before: run on each rank first; what it raises is raised on all.

    Raises:
        CheckpointError: a rank's state can't be written down, or the ranks are not at the same step.
    """

    def own() -> tuple[Captured, dict[str, Any]]:
        before()
        captured = _capture(training, is_main=world.is_main)
        return captured, {
            "step": step,
            "rng": rng.capture(world.device),
            "loader": None if training.loader is None else encode(training.loader.state_dict(), None, where="loader"),
            "outline": captured.outline(),
        }

    (captured, _), records = together(world, own, lambda state: state[1])
    steps = [record["step"] for record in records]
    if any(other != step for other in steps):
        raise CheckpointError(
            f"the ranks are not at the same step, so their states do not belong together; by rank: {steps}"
        )
    share = divided(captured, [record["outline"] for record in records], rank=world.rank)
    if share.whole is None:
        return share
    loaders = [record["loader"] for record in records]
    texts = {"rng.json": text([record["rng"] for record in records])}
    if training.loader is not None:  # kept once if they are all the same
        texts["loader.json"] = text(loaders[:1] if all(state == loaders[0] for state in loaders) else loaders)
    return share.with_texts(texts)


def _capture(training: Training, *, is_main: bool) -> Captured:
    model = bare(training.model)
    plain = plain_names(model)
    parameters = frozenset(plain(name) for name, _ in model.named_parameters(remove_duplicate=False))
    parts = training.trees() if is_main else training.common_trees()
    return capture(under_plain_names(model, model.state_dict()), parts, parameters=parameters, is_main=is_main)


def words_on_drift(share: Share) -> str:
    """**Local.** What to tell of replicas that differ; empty if they do not."""
    if not share.apart:
        return ""
    return (
        "the replicas have drifted apart: other ranks hold other values, or other tensors, than rank 0, so rank 0's "
        f"are saved, and a resumed run will not repeat this one bit for bit; files and ranks: {share.apart}"
    )
