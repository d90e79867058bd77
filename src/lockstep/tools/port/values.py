"""What an expression of a script may hold: the rank, a device, a loader, a replica.

Note [Values of a script]
~~~~~~~~~~~~~~~~~~~~~~~~~
A value is a kind and the expression that makes it, such as one call of ``DataLoader``. Values flow along assignments,
arguments, what functions return, attributes of ``self`` and fields of other objects, whatever the order of the
statements (a points-to analysis after Andersen, "Program Analysis and Specialization for the C Programming Language",
1994, without contexts). So a variable holds at most what its set says, and ``Kind.OTHER`` stands for all other values;
a variable that holds one kind *alone* has no other values. A parameter of a function that the script itself never calls
holds OTHER.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import Assignment

from lockstep.tools.port.script import Script, argument, constant


class Kind(enum.Enum):
    """The kind of a value."""

    RANK = enum.auto()
    LOCAL_RANK = enum.auto()
    WORLD_SIZE = enum.auto()
    #: An accelerator: "cuda", torch.device(f"cuda:{rank}").
    DEVICE = enum.auto()
    CPU = enum.auto()
    #: A whole number that is written there: ``.to(0)`` means an accelerator.
    NUMBER = enum.auto()
    LOADER = enum.auto()
    SAMPLER = enum.auto()
    REPLICA = enum.auto()
    OPTIMIZER = enum.auto()
    SCHEDULER = enum.auto()
    ACCELERATOR = enum.auto()
    FABRIC = enum.auto()
    ARGUMENTS = enum.auto()
    NONE = enum.auto()
    FUNCTION = enum.auto()
    CLASS = enum.auto()
    INSTANCE = enum.auto()
    TUPLE = enum.auto()
    #: The value that any other call returns; its site tells two of them apart.
    CALL = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True)
class Value:
    """A value: its kind, and the expression or definition that it comes from, which is compared by identity."""

    kind: Kind
    site: cst.CSTNode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.kind is other.kind and self.site is other.site

    def __hash__(self) -> int:
        return hash((self.kind, id(self.site)))


Values = frozenset[Value]
_NOTHING: Values = frozenset()

_DDP = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}
DATA_PARALLEL = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel"}
DISTRIBUTED_SAMPLER = {
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
}
DATA_LOADER = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
FABRICS = {"lightning.fabric.Fabric", "lightning.Fabric", "lightning_fabric.Fabric", "lightning.fabric.fabric.Fabric"}
#: Full name -> the kind of what a call of it returns.
_MADE: dict[str, Kind] = {
    **dict.fromkeys(_DDP | DATA_PARALLEL, Kind.REPLICA),
    **dict.fromkeys(DISTRIBUTED_SAMPLER, Kind.SAMPLER),
    **dict.fromkeys(DATA_LOADER, Kind.LOADER),
    **dict.fromkeys(FABRICS, Kind.FABRIC),
    "accelerate.Accelerator": Kind.ACCELERATOR,
    "accelerate.accelerator.Accelerator": Kind.ACCELERATOR,
    "torch.distributed.get_rank": Kind.RANK,
    "torch.distributed.get_world_size": Kind.WORLD_SIZE,
    "horovod.torch.rank": Kind.RANK,
    "horovod.torch.local_rank": Kind.LOCAL_RANK,
    "horovod.torch.size": Kind.WORLD_SIZE,
    "torch.accelerator.current_accelerator": Kind.DEVICE,
}
_VARIABLES = {"RANK": Kind.RANK, "LOCAL_RANK": Kind.LOCAL_RANK, "WORLD_SIZE": Kind.WORLD_SIZE}
#: Methods of modules and loaders that return what they are called on.
_SAME = {"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "double", "requires_grad_"}
#: Methods that return their arguments, made ready -> whose they are.
_PREPARING = {
    **dict.fromkeys(
        ("prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer", "unwrap_model"), Kind.ACCELERATOR
    ),
    **dict.fromkeys(("setup", "setup_module", "setup_optimizers", "setup_dataloaders"), Kind.FABRIC),
}
#: Arguments of a call that wrap what a loop is over.
WRAPPERS = {"enumerate", "tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.std.tqdm", "tqdm", "iter", "itertools.islice", "zip"}


@dataclass
class Loop:
    """A ``for`` over the batches of loaders."""

    node: cst.For
    loaders: list[cst.Call]
    trains: bool


class ScriptValues:
    """The values of a script's expressions; see Note [Values of a script]."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._held: dict[Hashable, Values] = defaultdict(lambda: _NOTHING)
        #: The places that values flow to: an expression, whose key may not be known before others have settled, or a
        #: key.
        self._flows: list[tuple[cst.CSTNode | Hashable, Callable[[], Values]]] = []
        #: Calls of functions of the script itself, by the function.
        self.calls: dict[int, list[cst.Call]] = defaultdict(list)
        self._bound: set[int] = set()
        self._known: dict[int, Values] | None = None
        self._collect()
        self._settle()
        self._known = {}
        self.loops = [loop for node in script.all(cst.For) if (loop := self._loop(node)) is not None]

    # Questions.

    def of(self, node: cst.BaseExpression) -> Values:
        """Return what an expression may hold."""
        if self._known is None:  # values still flow
            return self._values(node)
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = self._values(node)
        return found

    def alone(self, node: cst.BaseExpression, *kinds: Kind) -> bool:
        """Return whether an expression holds values of these kinds and no others."""
        found = self.of(node)
        return bool(found) and all(each.kind in kinds for each in found)

    def may(self, node: cst.BaseExpression, kind: Kind) -> bool:
        """Return whether an expression may hold a value of this kind."""
        return any(each.kind is kind for each in self.of(node))

    def sites(self, node: cst.BaseExpression, kind: Kind) -> list[cst.Call]:
        """Return the calls that made what an expression may hold, of one kind."""
        return [each.site for each in self.of(node) if each.kind is kind and isinstance(each.site, cst.Call)]

    def functions(self, call: cst.Call) -> list[cst.FunctionDef]:
        """Return the functions of the script that a call may run; a class's is its ``__init__``."""
        found: list[cst.FunctionDef] = []
        for each in self.of(call.func):
            if each.kind is Kind.FUNCTION and isinstance(each.site, cst.FunctionDef):
                found.append(each.site)
            if each.kind is Kind.CLASS and isinstance(each.site, cst.ClassDef):
                found += [own for own in _methods(each.site) if own.name.value == "__init__"]
        return found

    def trains(self, node: cst.CSTNode, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether a backward runs in ``node``, or in functions of the script that it calls."""
        for call in self._script.all(cst.Call, node):
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward":
                return True
            for function in self.functions(call):
                if id(function) not in seen and self.trains(function.body, seen | {id(function)}):
                    return True
        return False

    def looped_over(self, iterated: cst.BaseExpression) -> list[cst.Call]:
        """Return the loaders that a loop over ``iterated`` takes batches of."""
        if isinstance(iterated, cst.Call) and self._script.full_name(iterated.func) in WRAPPERS:
            return [site for each in iterated.args for site in self.looped_over(each.value)]
        return self.sites(iterated, Kind.LOADER)

    def _loop(self, node: cst.For) -> Loop | None:
        loaders = self.looped_over(node.iter)
        return Loop(node, loaders, self.trains(node.body)) if loaders else None

    # Where values flow.

    def _collect(self) -> None:
        for node in self._script.nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._assign(target.target, node.value)
            elif isinstance(node, cst.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, cst.AugAssign):
                self._flow(node.target, self._other(node))
            elif isinstance(node, cst.NamedExpr):
                self._assign(node.target, node.value)
            elif isinstance(node, (cst.For, cst.CompFor)):
                self._unknown(node.target, node)
            elif isinstance(node, cst.WithItem) and node.asname is not None:
                self._unknown(node.asname.name, node)
            elif isinstance(node, cst.Return) and node.value is not None:
                function = self._script.function(node)
                if function is not None:
                    value = node.value
                    self._flow(("returned", id(function)), lambda value=value: self._values(value))  # type: ignore[misc]
            elif isinstance(node, cst.FunctionDef):
                self._define(node)

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for position, element in enumerate(target.elements):
                self._flow_to(element.value, lambda position=position: self._element(value, position))  # type: ignore[misc]
            return
        self._flow_to(target, lambda: self._values(value))

    def _flow_to(self, target: cst.BaseExpression, values: Callable[[], Values]) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            self._unknown(target, target)
            return
        self._flow(target, values)

    def _unknown(self, target: cst.CSTNode, site: cst.CSTNode) -> None:
        for name in self._script.all(cst.Name, target):
            self._flow(name, self._other(site))

    def _other(self, site: cst.CSTNode) -> Callable[[], Values]:
        return lambda: frozenset({Value(Kind.OTHER, site)})

    def _flow(self, target: cst.CSTNode | Hashable, values: Callable[[], Values]) -> None:
        self._flows.append((target, values))

    def _define(self, function: cst.FunctionDef) -> None:
        """Seed ``self`` of methods with instances of their class, and take defaults."""
        owner = self._owner(function)
        parameters = function.params.params
        if owner is not None and parameters:
            self._flow(parameters[0].name, lambda: frozenset({Value(Kind.INSTANCE, owner)}))
        for each in (*parameters, *function.params.kwonly_params):
            default = each.default
            if default is not None:
                self._flow(each.name, lambda default=default: self._values(default))  # type: ignore[misc]

    def _settle(self) -> None:
        """Let values flow until nothing changes."""
        changed = True
        while changed:
            changed = False
            for call in self._script.all(cst.Call):
                self._bind(call)
            for target, values in self._flows:
                key = self._key(target) if isinstance(target, cst.CSTNode) else target
                if key is None:
                    continue
                more = self._held[key] | values()
                if more != self._held[key]:
                    self._held[key] = more
                    changed = True
            if not changed:
                changed = self._open_uncalled()

    def _open_uncalled(self) -> bool:
        """Let parameters of functions that are never called in the script hold anything; return whether that is new."""
        changed = False
        for function in self._script.all(cst.FunctionDef):
            owner = self._owner(function)
            for each in function.params.params[0 if owner is None else 1 :]:
                key = self._key(each.name)
                if not self._held[key]:
                    self._held[key] = frozenset({Value(Kind.OTHER, each)})
                    changed = True
        return changed

    def _bind(self, call: cst.Call) -> None:
        """Let arguments flow to the parameters of the functions that a call runs, once for each pair."""
        spawned = self._script.full_name(call.func) == "torch.multiprocessing.spawn"
        if spawned and id(call) not in self._bound:
            self._bound.add(id(call))
            self._bind_spawned(call)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "launch" and call.args:
            self._bind_launched(call, call.func.value)
        for function in self.functions(call):
            pair = hash((id(call), id(function)))
            if pair in self._bound:
                continue
            self._bound.add(pair)
            self.calls[id(function)].append(call)
            parameters = function.params.params
            if self._owner(function) is not None:
                parameters = parameters[1:]
            names = {each.name.value: each.name for each in (*parameters, *function.params.kwonly_params)}
            for position, given in enumerate(call.args):
                name = names.get(given.keyword.value) if given.keyword is not None else None
                if name is None and given.keyword is None and not given.star and position < len(parameters):
                    name = parameters[position].name
                if name is not None:
                    self._flow(name, lambda given=given: self._values(given.value))  # type: ignore[misc]

    def _bind_launched(self, call: cst.Call, owner: cst.BaseExpression) -> None:
        """Do so for ``fabric.launch(function, …)``: the first parameter is the Fabric."""
        if not any(each.kind is Kind.FABRIC for each in self._values(owner)):
            return
        for each in self._values(call.args[0].value):
            pair = hash((id(call), id(each.site)))
            if pair in self._bound or not isinstance(each.site, cst.FunctionDef) or not each.site.params.params:
                continue
            self._bound.add(pair)
            self.calls[id(each.site)].append(call)
            parameters = each.site.params.params
            self._flow(parameters[0].name, lambda: self._values(owner))
            names = {one.name.value: one.name for one in (*parameters, *each.site.params.kwonly_params)}
            for position, given in enumerate(call.args[1:], 1):
                name = names.get(given.keyword.value) if given.keyword is not None else None
                if given.keyword is None and not given.star and position < len(parameters):
                    name = parameters[position].name
                if name is not None:
                    self._flow(name, lambda given=given: self._values(given.value))  # type: ignore[misc]

    def _bind_spawned(self, call: cst.Call) -> None:
        """Do so for ``spawn(function, args=(…))``: the first parameter is the rank."""
        first, given = argument(call, "fn", 0), argument(call, "args", 1)
        number = argument(call, "nprocs", 2)
        if number is not None and isinstance(number.value, cst.Name):
            size = number.value
            self._flow(size, lambda: frozenset({Value(Kind.WORLD_SIZE, size)}))
        for each in self._values(first.value) if first is not None else ():
            if not isinstance(each.site, cst.FunctionDef) or not each.site.params.params:
                continue
            self.calls[id(each.site)].append(call)
            rank, *others = each.site.params.params
            self._flow(rank.name, lambda rank=rank: frozenset({Value(Kind.LOCAL_RANK, rank)}))  # type: ignore[misc]
            if given is not None and isinstance(given.value, (cst.Tuple, cst.List)):
                for parameter, element in zip(others, given.value.elements, strict=False):
                    value = element.value
                    self._flow(parameter.name, lambda value=value: self._values(value))  # type: ignore[misc]

    def _owner(self, function: cst.FunctionDef) -> cst.ClassDef | None:
        """Return the class whose method a function is."""
        block = self._script.parent(function)
        owner = self._script.parent(block)
        is_static = any(
            self._script.source(each.decorator) in ("staticmethod", "classmethod") for each in function.decorators
        )
        return owner if isinstance(owner, cst.ClassDef) and not is_static else None

    def _key(self, target: cst.CSTNode) -> Hashable | None:
        """Return the key of a variable, an attribute or a field; None for an expression without a name."""
        if isinstance(target, cst.Name):
            scope = self._script.scope(target)
            for each in scope[target.value] if scope is not None else ():
                return ("name", id(each.scope), target.value)
            return None
        if isinstance(target, cst.Attribute):
            for value in self._values(target.value):
                if value.kind is Kind.INSTANCE:
                    return ("attribute", id(value.site), target.attr.value)
            base = self._key(target.value)
            return None if base is None else ("field", base, target.attr.value)
        return None

    # What an expression holds.

    def _element(self, node: cst.BaseExpression, position: int) -> Values:
        """Return what a tuple holds at a position."""
        found: set[Value] = set()
        for value in self._values(node):
            if value.kind is Kind.TUPLE and isinstance(value.site, (cst.Tuple, cst.List)):
                elements = value.site.elements
                if position < len(elements):
                    found |= self._values(elements[position].value)
            elif value.kind is Kind.CALL and isinstance(value.site, cst.Call):
                found |= self._prepared(value.site, position)
            else:
                found.add(Value(Kind.OTHER, value.site))
        return frozenset(found)

    def _prepared(self, call: cst.Call, position: int) -> Values:
        """Return what ``prepare`` and ``setup`` return at a position: the argument that stands there."""
        if _prepares(self, call) and position < len(call.args):
            return self._values(call.args[position].value)
        return frozenset({Value(Kind.OTHER, call)})

    def _values(self, node: cst.BaseExpression) -> Values:
        if isinstance(node, cst.Name):
            return self._of_name(node)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if isinstance(node, cst.IfExp):
            return self._values(node.body) | self._values(node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self._values(node.left) | self._values(node.right)
        if isinstance(node, (cst.Tuple, cst.List)):
            return frozenset({Value(Kind.TUPLE, node)})
        if isinstance(node, cst.Subscript):
            return self._of_subscript(node)
        if isinstance(node, cst.Integer):
            return frozenset({Value(Kind.NUMBER, node)})
        if isinstance(node, (cst.SimpleString, cst.FormattedString, cst.BinaryOperation)):
            return frozenset({Value(self._kind_of_text(node), node)})
        return frozenset({Value(Kind.OTHER, node)})

    def _of_name(self, node: cst.Name) -> Values:
        if node.value == "None":
            return frozenset({Value(Kind.NONE, node)})
        scope = self._script.scope(node)
        if scope is None or node.value not in scope:
            return frozenset({Value(Kind.OTHER, node)})
        found: set[Value] = set()
        for each in scope[node.value]:
            defined = each.node if isinstance(each, Assignment) else None
            if isinstance(defined, cst.FunctionDef):
                found.add(Value(Kind.FUNCTION, defined))
            elif isinstance(defined, cst.ClassDef):
                found.add(Value(Kind.CLASS, defined))
        return frozenset(found) | self._held[self._key(node)]

    def _of_attribute(self, node: cst.Attribute) -> Values:
        found: set[Value] = set()
        for value in self._values(node.value):
            if value.kind is Kind.INSTANCE and isinstance(value.site, cst.ClassDef):
                found |= {
                    Value(Kind.FUNCTION, own) for own in _methods(value.site) if own.name.value == node.attr.value
                }
            if value.kind is Kind.REPLICA and node.attr.value == "module" and isinstance(value.site, cst.Call):
                found |= wrapped(self, value.site)
            foreign = {Kind.ACCELERATOR: _ACCELERATORS, Kind.FABRIC: _FABRICS}.get(value.kind, {})
            if node.attr.value in foreign:
                found.add(Value(foreign[node.attr.value], node))
        key = self._key(node)
        held = self._held[key] if key is not None else _NOTHING
        if node.attr.value == "local_rank" and self.may(node.value, Kind.ARGUMENTS):
            found.add(Value(Kind.LOCAL_RANK, node))
        return (frozenset(found) | held) or frozenset({Value(Kind.OTHER, node)})

    def _of_call(self, node: cst.Call) -> Values:
        name = self._script.full_name(node.func)
        if name in _MADE:
            return frozenset({Value(_MADE[name], node)})
        if name in ("int", "str") and node.args:
            return self._values(node.args[0].value)
        if name == "torch.device" and node.args:
            return frozenset({Value(self._kind_of_device(node.args[0].value), node)})
        if name == "torch.compile" and node.args:
            return self._values(node.args[0].value)
        if name == "horovod.torch.DistributedOptimizer" and node.args:
            return self._values(node.args[0].value)
        if name.startswith("torch.optim.lr_scheduler.") or "schedule" in name.rpartition(".")[2]:
            return frozenset({Value(Kind.SCHEDULER, node)})
        if name.startswith("torch.optim.") and name.count(".") == 2:
            return frozenset({Value(Kind.OPTIMIZER, node)})
        if name in ("os.environ.get", "os.getenv") and node.args:
            kind = _VARIABLES.get(constant(node.args[0].value) or "", Kind.OTHER)
            return frozenset({Value(kind, node)})
        if isinstance(node.func, cst.Attribute):
            method, receiver = node.func.attr.value, node.func.value
            if method in ("parse_args", "parse_known_args"):
                return frozenset({Value(Kind.ARGUMENTS, node)})
            if method in _SAME:
                return self._values(receiver)
            if method in _PREPARING and not self._values(receiver):
                return _NOTHING  # its object has not flowed here yet, and what it returns would be any call's
        functions = self.functions(node)
        if functions and not self._makes_instance(node):
            return frozenset({each for one in functions for each in self._held["returned", id(one)]})
        classes = [each for each in self._values(node.func) if each.kind is Kind.CLASS]
        if classes:
            return frozenset({Value(Kind.INSTANCE, each.site) for each in classes} | {Value(Kind.CALL, node)})
        if _prepares(self, node) and len(node.args) == 1:
            return self._values(node.args[0].value)
        return frozenset({Value(Kind.CALL, node)})

    def _makes_instance(self, node: cst.Call) -> bool:
        return any(each.kind is Kind.CLASS for each in self._values(node.func))

    def _of_subscript(self, node: cst.Subscript) -> Values:
        index = node.slice[0].slice
        if len(node.slice) == 1 and isinstance(index, cst.Index):
            if self._script.full_name(node.value) == "os.environ":
                return frozenset({Value(_VARIABLES.get(constant(index.value) or "", Kind.OTHER), node)})
            if isinstance(index.value, cst.Integer):
                return self._element(node.value, int(index.value.value))
        return frozenset({Value(Kind.OTHER, node)})

    def _kind_of_device(self, node: cst.BaseExpression) -> Kind:
        """Return the kind of ``torch.device(node, …)``."""
        if constant(node) == "cpu":
            return Kind.CPU
        kinds = {each.kind for each in self._values(node)}
        return Kind.DEVICE if kinds & {Kind.DEVICE, Kind.LOCAL_RANK, Kind.RANK, Kind.NUMBER} else Kind.OTHER

    def _kind_of_text(self, node: cst.BaseExpression) -> Kind:
        text = self._script.source(node).lstrip("rbuf").strip("\"'")
        if text == "cpu":
            return Kind.CPU
        own = text in ("cuda", "cuda:0", "mps", "xpu")
        return Kind.DEVICE if own or text.startswith("cuda:") else Kind.OTHER


#: Attribute of an Accelerator, and of a Fabric -> what it holds.
_ACCELERATORS = {
    "device": Kind.DEVICE,
    "process_index": Kind.RANK,
    "local_process_index": Kind.LOCAL_RANK,
    "num_processes": Kind.WORLD_SIZE,
}
_FABRICS = {
    "device": Kind.DEVICE,
    "global_rank": Kind.RANK,
    "local_rank": Kind.LOCAL_RANK,
    "world_size": Kind.WORLD_SIZE,
}


def wrapped(values: ScriptValues, call: cst.Call) -> Values:
    """Return the module that a DistributedDataParallel or DataParallel was made of."""
    given = argument(call, "module", 0)
    return values.of(given.value) if given is not None else _NOTHING


def _prepares(values: ScriptValues, call: cst.Call) -> bool:
    """Return whether a call returns its arguments, made ready: Accelerate's and Fabric's."""
    if not isinstance(call.func, cst.Attribute):
        return False
    method, receiver = call.func.attr.value, call.func.value
    return method in _PREPARING and values.may(receiver, _PREPARING[method])


def _methods(owner: cst.ClassDef) -> Iterable[cst.FunctionDef]:
    return [each for each in owner.body.body if isinstance(each, cst.FunctionDef)]
