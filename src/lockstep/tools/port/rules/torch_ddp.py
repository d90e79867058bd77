"""Scripts for torch's own DistributedDataParallel: process group, ranks, spawned functions."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.rules.devices import port_devices
from lockstep.tools.port.rules.loaders import shard_sampled
from lockstep.tools.port.rules.replicas import port_replicas
from lockstep.tools.port.script import argument, constant, has_stars
from lockstep.tools.port.values import Kind

_INIT = "torch.distributed.init_process_group"
_SPAWN = "torch.multiprocessing.spawn"
#: Function of torch.distributed -> attribute of the World.
_RANKS = {"torch.distributed.get_rank": "rank", "torch.distributed.get_world_size": "world_size"}
_FROM_ENVIRONMENT = {Kind.RANK: "rank", Kind.LOCAL_RANK: "local_rank", Kind.WORLD_SIZE: "world_size"}
_ADDRESSES = {"MASTER_ADDR", "MASTER_PORT"}


class TorchDdp:
    """Ports a script that opens a process group, or wraps a model in DistributedDataParallel."""

    def matches(self, porting: Porting) -> bool:
        """Return whether the script is one of these."""
        script = porting.script
        called = {script.full_name(each.func) for each in script.all(cst.Call)}
        return _INIT in called or any(name.endswith(".DistributedDataParallel") for name in called)

    def port(self, porting: Porting) -> None:
        """Record the edits."""
        script = porting.script
        opens = [each for each in script.all(cst.Call) if script.full_name(each.func) == _INIT]
        if not opens:
            porting.refused(
                None,
                "no init_process_group",
                "the process group is opened in another file",
                "port the file that opens it, or call lockstep.init() there",
            )
            return
        spawned = [each for each in script.all(cst.Call) if script.full_name(each.func) == _SPAWN]
        direct = len(spawned) == 1 and len(opens) == 1 and _call_directly(porting, spawned[0], opens[0])
        if not direct:
            _open(porting, opens)
            for each in spawned:
                script.replace(each.func, "lockstep.spawn")
                porting.changed(each, "lockstep.spawn", "the same arguments; the ranks need no address and no port")
        _port_ranks(porting)
        _port_local_rank_option(porting)
        shard_sampled(porting)
        port_devices(porting)
        port_replicas(porting)
        _close(porting)


def _open(porting: Porting, opens: list[cst.Call]) -> None:
    """Initialise lockstep where the script opens its process group."""
    script = porting.script
    for each in opens:
        if porting.expression_statement(each) is None:
            porting.refused(
                each, "init_process_group", "it is part of another expression", "put it on a line of its own"
            )
            return
    porting.set_init(list(opens))
    kept = [each for each in opens if _computes_place(porting, each)]
    for each in opens:
        statement = porting.expression_statement(each)
        assert statement is not None
        if each in kept:
            _open_after(porting, each)
            continue
        given = _options(porting, each)
        text = porting.init_call(statement, *given)
        script.replace(each, text)
        porting.changed(
            each, text, "opens the process group, takes the rank's device and its part of the cores; needs no address"
        )
    if not kept:
        _remove_addresses(porting)
    if porting.init is not None and porting.init.conditional:
        porting.differs(
            opens[0], "lockstep.init()", "it stays in its condition: without a launcher the script trains as before"
        )


def _computes_place(porting: Porting, call: cst.Call) -> bool:
    """Return whether the script computes the rank or the number of ranks itself, perhaps over several machines."""
    given = (
        (argument(call, "rank", 4), (Kind.RANK, Kind.LOCAL_RANK)),
        (argument(call, "world_size", 3), (Kind.WORLD_SIZE,)),
    )
    return any(each is not None and not porting.values.alone(each.value, *kinds) for each, kinds in given)


def _open_after(porting: Porting, call: cst.Call) -> None:
    """Keep a process group that the script opens with a rank of its own, and let lockstep use it."""
    script = porting.script
    statement = script.statement(call)
    text = porting.init_call(statement)
    script.replace(call, lambda: f"{script.inner(call)}\n{script.indent(statement)}{text}")
    porting.left(
        call,
        "init_process_group",
        "the script computes its rank and the number of ranks itself, so the call stays, and lockstep uses its group",
        "let `lockstep run` say them, on several machines as well: `lockstep.init()` alone",
    )


def _options(porting: Porting, call: cst.Call) -> list[str]:
    """Return what ``lockstep.init`` takes of the arguments of ``init_process_group``."""
    backend, timeout = argument(call, "backend", 0), argument(call, "timeout", 2)
    given = []
    is_nccl = backend is not None and (
        (constant(backend.value) or "").lower() == "nccl"
        or porting.script.source(backend.value).endswith("Backend.NCCL")
    )
    if backend is not None and not is_nccl:
        given.append(porting.script.source(backend.value))
    if timeout is not None:
        given.append(f"timeout={porting.script.source(timeout.value)}")
    return given


def _remove_addresses(porting: Porting) -> None:
    """Remove ``os.environ["MASTER_ADDR"] = …``."""
    script = porting.script
    for assigned in script.all(cst.Assign):
        target = assigned.targets[0].target
        if not isinstance(target, cst.Subscript) or script.full_name(target.value) != "os.environ":
            continue
        index = target.slice[0].slice
        if isinstance(index, cst.Index) and constant(index.value) in _ADDRESSES:
            statement = script.statement(assigned)
            script.remove(statement)
            porting.changed(
                statement, porting.short(target), "ranks meet without an address; between machines lockstep run has it"
            )


def _call_directly(porting: Porting, spawn: cst.Call, opened: cst.Call) -> bool:
    """Call the spawned function once on each rank of ``lockstep run``; return whether that is the same.

    It is where the number of processes is that of the devices, or a number written there, and where all that stands
    before the call only reads arguments.
    """
    script = porting.script
    function, given = argument(spawn, "fn", 0), argument(spawn, "args", 1)
    number = argument(spawn, "nprocs", 2)
    statement, at = porting.expression_statement(spawn), porting.expression_statement(opened)
    if function is None or number is None or statement is None or at is None or has_stars(spawn):
        return False
    counted = _count(porting, number.value)
    if counted is None or not _only_reads(porting, statement):
        return False
    elements = given.value.elements if given is not None and isinstance(given.value, (cst.Tuple, cst.List)) else ()
    if given is not None and not isinstance(given.value, (cst.Tuple, cst.List)):
        return False
    size = script.source(number.value)
    first = script.statement(counted) if script.function(counted) is script.function(statement) else statement
    porting.set_init([first], inserted=True)
    begin = first if counted is not number.value else statement
    call = porting.init_call(begin, *_options(porting, opened))
    script.insert_before(begin, lambda: call)
    script.remove(at)
    porting.changed(opened, "init_process_group", f"`{call}` has done it")
    if counted is not number.value:
        script.replace(counted, lambda: f"{porting.world(spawn)}.world_size")

    def make() -> str:
        world = porting.world(spawn)
        same = [
            f"{world}.world_size"
            if counted is number.value and script.source(each.value) == size
            else script.render(each.value)
            for each in elements
        ]
        return f"{script.render(function.value)}({', '.join([f'{world}.rank', *same])})"

    script.replace(spawn, make)
    porting.changed(
        spawn,
        "a call in place of mp.spawn",
        "`lockstep run -n N` starts the ranks, and each calls the function itself; the number of ranks is that of -n",
    )
    _remove_addresses(porting)
    return True


def _count(porting: Porting, number: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the expression that counts the devices or is a number: itself, or what its variable was assigned."""
    script = porting.script
    if _counts(porting, number):
        return number
    if not isinstance(number, cst.Name):
        return None
    assigned = [
        each.value
        for each in script.all(cst.Assign)
        if script.source(each.targets[0].target) == number.value and script.function(each) is script.function(number)
    ]
    return assigned[0] if len(assigned) == 1 and _counts(porting, assigned[0]) else None


def _counts(porting: Porting, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Integer):
        return True
    return isinstance(node, cst.Call) and porting.script.full_name(node.func) in (
        "torch.cuda.device_count",
        "torch.accelerator.device_count",
    )


def _only_reads(porting: Porting, statement: cst.CSTNode) -> bool:
    """Return whether what stands before a statement in its block may run on every rank: it reads arguments."""
    block = porting.script.parent(statement)
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return False
    for each in block.body:
        if each is statement:
            return True
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            continue
        for call in porting.script.all(cst.Call, each):
            name = porting.script.full_name(call.func)
            method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            reads = method in ("add_argument", "parse_args", "add_argument_group", "set_defaults", "is_available")
            if not reads and not name.startswith(("argparse.", "torch.cuda.device_count", "torch.accelerator.", "len")):
                return False
    return False


def _port_ranks(porting: Porting) -> None:
    """Ask the World for the rank and the number of ranks."""
    script, values = porting.script, porting.values
    init = porting.init
    if init is None or init.conditional:
        return
    for call in script.all(cst.Call):
        name = script.full_name(call.func)
        if name in _RANKS and porting.runs_after_init(call) and not call.args:
            attribute = _RANKS[name]
            text = porting.size_of(call) if attribute == "world_size" else f"{porting.world(call)}.{attribute}"
            script.replace(call, text)
            porting.changed(call, f"world.{attribute}", f"the same as {porting.short(call)}")
        elif name == "int" and call.args and porting.runs_after_init(call):
            inner = call.args[0].value
            kinds = {each.kind for each in values.of(inner)}
            read = script.full_name(inner.value) if isinstance(inner, cst.Subscript) else ""
            if read == "os.environ" and len(kinds) == 1 and (kind := kinds.pop()) in _FROM_ENVIRONMENT:
                attribute = _FROM_ENVIRONMENT[kind]
                script.replace(call, f"{porting.world(call)}.{attribute}")
                porting.changed(call, f"world.{attribute}", f"the same as {porting.short(call)}")


def _port_local_rank_option(porting: Porting) -> None:
    """Take ``args.local_rank`` from the World and remove the option, where every use comes after the initialisation."""
    script, values = porting.script, porting.values
    if porting.init is None or porting.init.conditional:
        return
    options = [
        each
        for each in script.all(cst.Call)
        if isinstance(each.func, cst.Attribute)
        and each.func.attr.value == "add_argument"
        and each.args
        and constant(each.args[0].value) in ("--local_rank", "--local-rank")
    ]
    uses = [
        each
        for each in script.all(cst.Attribute)
        if each.attr.value == "local_rank" and values.may(each.value, Kind.ARGUMENTS)
    ]
    if not options:
        return
    settled = [each for each in uses if _goes(porting, each) or porting.runs_after_init(each)]
    statement = porting.expression_statement(options[0])
    if len(settled) < len(uses) or statement is None:
        porting.left(
            options[0],
            "--local_rank",
            "it is read before the process group is open",
            "start it with python -m lockstep.launch, which passes it, or read world.local_rank after lockstep.init()",
        )
        return
    script.remove(statement)
    porting.changed(statement, "--local_rank", "lockstep run does not pass it: the rank is world.local_rank")
    for each in uses:
        script.replace(each, lambda each=each: f"{porting.world(each)}.local_rank")  # type: ignore[misc]


def _goes(porting: Porting, node: cst.CSTNode) -> bool:
    """Return whether a node is in a line that is removed: set_device."""
    call = porting.script.around(node, cst.Call)
    names = ("torch.cuda.set_device", "torch.accelerator.set_device_index")
    return call is not None and isinstance(call, cst.Call) and porting.script.full_name(call.func) in names


def _close(porting: Porting) -> None:
    script = porting.script
    for call in script.all(cst.Call):
        if script.full_name(call.func) != "torch.distributed.destroy_process_group":
            continue
        statement = porting.expression_statement(call)
        function = script.function(call)
        if statement is not None and (function is None or len(function.body.body) > 1):
            script.remove(statement)
            porting.changed(call, "destroy_process_group", "lockstep closes the group at the end")
        else:
            script.replace(call, "lockstep.shutdown()")
            porting.changed(call, "lockstep.shutdown()", "closes the process group that lockstep.init() has opened")
