"""DataLoaders: a batch size per rank becomes that of all ranks, a DistributedSampler becomes the loader's own order."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.script import argument, constant, has_stars
from lockstep.tools.port.values import Kind

#: Names of functions by which scripts average over ranks.
_REDUCTIONS = {"all_reduce", "reduce", "allreduce"}
_BY_HAND = "write the DataLoader for one process, with the batch size of all ranks, and put it into lockstep.shard()"


def multiply_batch(porting: Porting, loader: cst.Call) -> bool:
    """Multiply the batch size of a loader, which is per rank, by the number of ranks; return whether that could be."""
    script = porting.script
    if id(loader) in porting.multiplied_loaders:
        return True
    given = argument(loader, "batch_size", 1)
    if given is None and (has_stars(loader) or argument(loader, "batch_sampler") is not None):
        return False
    porting.multiplied_loaders.add(id(loader))
    if given is not None:
        porting.multiplied(given.value)
        what = f"{porting.short(given.value)} * {porting.size(loader)}"
    else:
        script.add_argument(loader, lambda: f"batch_size={porting.size(loader)}")
        what = f"batch_size={porting.size(loader)}"
    porting.changed(
        given.value if given is not None else loader,
        what,
        "the batch size was that of each rank, and is that of all ranks together now: the same batches on as many "
        "ranks. Write the product itself for the same training on any number of ranks",
    )
    return True


def shard_sampled(porting: Porting) -> None:
    """Shard the loaders that have a DistributedSampler, and remove it; where that is not the same, leave both."""
    for loader in porting.script.all(cst.Call):
        given = argument(loader, "sampler", 3)
        if given is None or not porting.values.may(loader, Kind.LOADER):
            continue
        samplers = porting.values.sites(given.value, Kind.SAMPLER)
        if not samplers:
            continue
        why = _why_kept(porting, loader, given, samplers)
        if why:
            porting.left(
                loader,
                "DistributedSampler",
                f"{why}, so the loader stays as it is: it divides the data as before",
                _BY_HAND,
            )
        else:
            _shard(porting, loader, given, samplers[0])


def _why_kept(porting: Porting, loader: cst.Call, given: cst.Arg, samplers: list[cst.Call]) -> str:
    """Return why a loader keeps its sampler; empty if it need not."""
    values, script = porting.values, porting.script
    if porting.init is None or porting.init.conditional:
        return "the script trains without a process group as well"
    if len(samplers) != 1 or not values.alone(given.value, Kind.SAMPLER):
        return "its sampler is a DistributedSampler in some cases only"
    if not porting.runs_after_init(loader):
        return "it is made before the process group"
    sampler = samplers[0]
    if has_stars(sampler) or has_stars(loader):
        return "some of its arguments are not written out (**)"
    for keyword, position, kind in (("num_replicas", 1, Kind.WORLD_SIZE), ("rank", 2, Kind.RANK)):
        place = argument(sampler, keyword, position)
        kinds = (kind, Kind.LOCAL_RANK) if kind is Kind.RANK else (kind,)
        if place is not None and not values.alone(place.value, *kinds):
            return f"{keyword}={porting.short(place.value)} may not be that of all ranks"
    data, sampled = argument(loader, "dataset", 0), argument(sampler, "dataset", 0)
    if data is None or sampled is None or script.source(data.value) != script.source(sampled.value):
        return "its sampler is of another data set"
    if argument(loader, "batch_sampler") is not None:
        return "it has a batch sampler"
    order = argument(sampler, "shuffle", 3)
    if order is not None and constant(order.value) is None and script.function(sampler) is not script.function(loader):
        return "the sampler's shuffle= is not known where the loader is made"
    return _other_use(porting, sampler)


def _other_use(porting: Porting, sampler: cst.Call) -> str:
    """Return what else the script does with a sampler; empty if it only calls set_epoch."""
    script, values = porting.script, porting.values
    for node in [*script.all(cst.Name), *script.all(cst.Attribute)]:
        holds = any(each is sampler for each in values.sites(node, Kind.SAMPLER)) or _is_sampler_of(
            porting, node, sampler
        )
        if not holds or _is_target(script.parent(node)):
            continue
        outer = script.parent(node)
        if isinstance(outer, cst.Attribute) and outer.attr is node:
            continue
        if isinstance(outer, cst.Attribute) and outer.attr.value == "set_epoch":
            continue
        if isinstance(outer, cst.Arg) and outer.keyword is not None and outer.keyword.value == "sampler":
            continue
        call = script.parent(outer)
        if isinstance(outer, cst.Arg) and isinstance(call, cst.Call) and values.functions(call):
            continue  # what the function does with it is looked at there
        if isinstance(outer, cst.Param):
            continue
        if isinstance(outer, (cst.Element, cst.Return)):
            continue
        return f"line {script.line(node)} asks the sampler for more (`{porting.short(script.parent(outer))}`)"
    return ""


def _is_sampler_of(porting: Porting, node: cst.CSTNode, sampler: cst.Call) -> bool:
    """Return whether a node is ``loader.sampler`` of a loader that has this sampler."""
    if not isinstance(node, cst.Attribute) or node.attr.value != "sampler":
        return False
    for loader in porting.values.sites(node.value, Kind.LOADER):
        given = argument(loader, "sampler", 3)
        if given is not None and sampler in porting.values.sites(given.value, Kind.SAMPLER):
            return True
    return False


def _is_target(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.AssignTarget, cst.AnnAssign))


def _shard(porting: Porting, loader: cst.Call, given: cst.Arg, sampler: cst.Call) -> None:
    """Put a loader into ``lockstep.shard``."""
    script = porting.script
    if not multiply_batch(porting, loader):
        return
    shuffle = porting.keyword_text(sampler, "shuffle", 3, "True")
    own = argument(loader, "shuffle", 2)
    if own is not None:
        script.replace(own.value, shuffle)
        script.remove_argument(loader, given)
    elif shuffle == "False":
        script.remove_argument(loader, given)
    else:
        script.replace(given, f"shuffle={shuffle}")
    seed = argument(sampler, "seed", 4)
    more = [] if seed is None else [f"seed={script.source(seed.value)}"]
    porting.wrap_call(loader, "lockstep.shard", *more)
    if not isinstance(script.parent(sampler), cst.Arg):
        _remove_definition(porting, sampler)
    _remove_set_epoch(porting, sampler)
    order = "the order is shuffled anew for each epoch, otherwise than by the sampler" if shuffle != "False" else ""
    porting.differs(
        loader,
        "lockstep.shard",
        "; ".join(
            filter(None, [order, "the sampler repeated samples to give all ranks as many, and none is repeated now"])
        ),
    )
    means = [each for each in script.all(cst.Call) if script.full_name(each.func).rpartition(".")[2] in _REDUCTIONS]
    for each in means:
        porting.differs(
            each,
            porting.short(each),
            "in the last batch of an epoch some ranks may have fewer samples, or none, where the sampler gave all as "
            "many, and a mean over ranks counts them alike",
            "world.mean(value) in the loop is the mean over samples",
        )
    for source, text in ((sampler, "the sampler's"), (loader, "the loader's")):
        if not porting.is_constant(source, "drop_last", "False"):
            porting.differs(
                source,
                f"{text} drop_last",
                "what is dropped is counted over all ranks now; there may be a step more or less in an epoch",
            )


def _remove_definition(porting: Porting, sampler: cst.Call) -> None:
    statement = porting.script.statement(sampler)
    porting.script.remove(statement)
    porting.changed(statement, "DistributedSampler", "lockstep.shard() divides each batch among the ranks")


def _remove_set_epoch(porting: Porting, sampler: cst.Call) -> None:
    script, values = porting.script, porting.values
    for call in script.all(cst.Call):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "set_epoch":
            continue
        owner = call.func.value
        its = sampler in values.sites(owner, Kind.SAMPLER) or _is_sampler_of(porting, owner, sampler)
        statement = porting.expression_statement(call)
        if its and statement is not None:
            script.remove(statement)
            porting.changed(statement, "set_epoch", "a sharded loader begins the next epoch by itself")
