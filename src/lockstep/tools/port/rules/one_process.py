"""Scripts for one process, on one device or with DataParallel.

Note [A script for one process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On N ranks the whole script runs N times, so whatever it does has to be looked at:

- Loaders whose batches are trained on are sharded; their batch size is that of all ranks already. All others stay:
  every rank evaluates on all samples, with the same model, and finds the same figures.
- In the training loop each rank has its share of the batch. The loss's ``.item()`` becomes ``world.mean(loss)``; a sum
  over samples, or their number, becomes ``world.all_reduce`` of it, in figures that are added up or printed. What else
  is made of a batch there is left with a remark, since it is of this rank's share.
- What is printed, saved or downloaded is done once.
"""

from __future__ import annotations

import sys

import libcst as cst

from lockstep.text import in_one_line
from lockstep.tools.port.porting import SEEDING, Porting
from lockstep.tools.port.rules.devices import PLACES, port_devices
from lockstep.tools.port.rules.losses import in_training, makes_loss, say_weighed_losses
from lockstep.tools.port.script import Statement, argument, constant, is_cuda
from lockstep.tools.port.values import DATA_PARALLEL, Kind, Loop

#: Methods that a library calls, perhaps in a worker process, where there is no World.
_CALLED_ELSEWHERE = {"forward", "__getitem__", "__iter__", "__len__", "__call__", "__getitems__"}
#: A call that every rank would make at once -> what to do instead.
_ONCE = {
    "torch.utils.tensorboard.SummaryWriter": "make it on rank 0 only, or log by lockstep.Log with a sink",
    "tensorboardX.SummaryWriter": "make it on rank 0 only, or log by lockstep.Log with a sink",
    "wandb.init": "call it on rank 0 only, or log by lockstep.Log with a sink",
    "numpy.save": "put it under `if world.is_main:`",
    "pickle.dump": "put it under `if world.is_main:`",
    "json.dump": "put it under `if world.is_main:`",
    "matplotlib.pyplot.savefig": "put it under `if world.is_main:`",
    "torchvision.utils.save_image": "put it under `if world.is_main:`",
    "shutil.copyfile": "put it under `if world.is_main:`",
    "shutil.copy": "put it under `if world.is_main:`",
    "os.remove": "put it under `if world.is_main:`",
    "os.mkdir": "use os.makedirs(folder, exist_ok=True)",
}
#: Beginnings of the names of functions that draw random numbers.
_DRAWING = (
    "torch.rand",
    "torch.normal",
    "torch.bernoulli",
    "torch.nn.",
    "torch.utils.data.random_split",
    "numpy.random",
)
#: Modules whose functions draw none, or only what a script seeds by their own.
_KNOWN = frozenset(sys.stdlib_module_names - {"random"}) | {"numpy", "torchvision", "tqdm", "argparse", "yaml"}
_BY_HAND = "port the loop by hand (docs/migrating.md)"


class OneProcessScript:
    """Ports a script that trains in one process."""

    def matches(self, porting: Porting) -> bool:
        """Return whether the script trains."""
        return porting.values.trains(porting.script.module)

    def port(self, porting: Porting) -> None:
        """Record the edits."""
        values = porting.values
        training = [loop for loop in values.loops if loop.trains]
        if not training:
            porting.refused(
                None,
                "no loop over a DataLoader",
                "lockstep divides the batches of a DataLoader among the ranks, and none is known to be trained on",
                "take the batches from a DataLoader, then port again",
            )
            return
        models = _models(porting)
        if models is None:
            return
        if _sums(porting, training):
            return
        loaders = _loaders(porting, training)
        if loaders is None or not _initialise(porting, loaders, models):
            return
        for loader in loaders:
            porting.wrap_call(loader, "lockstep.shard")
            porting.changed(
                loader, "lockstep.shard", "its batch size is that of all ranks; each gets a share of every batch"
            )
            porting.differs(
                loader, "lockstep.shard", "a shuffled order is another one, the same on any number of ranks"
            )
        for loop in values.loops:
            if not loop.trains:
                porting.differs(
                    loop.node, "the loop", "each rank goes through all samples here, and has the same figures"
                )
        _remove_data_parallel(porting)
        if not _replicate(porting, models):
            return
        port_devices(porting)
        done: set[int] = set()
        for loop in training:
            _Figures(porting, loop, done).port()
        say_weighed_losses(porting, training)
        _do_once(porting)
        _say_first_batches(porting, loaders)


# The parts.


def _models(porting: Porting) -> list[cst.BaseExpression] | None:
    """Return what optimizers take parameters of; None, and refuse, where that is not seen."""
    script, values = porting.script, porting.values
    found: dict[str, cst.BaseExpression] = {}
    optimizers = [
        each for each in script.all(cst.Call) if any(value == each for value in values.sites(each, Kind.OPTIMIZER))
    ]
    for optimizer in optimizers:
        own = [
            call.func.value
            for call in script.all(cst.Call, optimizer)
            if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("parameters", "named_parameters")
        ]
        if not own or not all(isinstance(each, (cst.Name, cst.Attribute)) for each in own):
            porting.refused(optimizer, porting.short(optimizer), "it is not known which model it trains", _BY_HAND)
            return None
        for each in own:
            found.setdefault(script.source(each), each)
    if not optimizers:
        porting.refused(None, "no optimizer of torch.optim", "it is not known which model is trained", _BY_HAND)
        return None
    return list(found.values())


def _sums(porting: Porting, training: list[Loop]) -> bool:
    """Refuse, and return True, where a loss may be a sum over the batch: lockstep takes the mean over samples."""
    script = porting.script
    for call in script.all(cst.Call):
        reduction, old = argument(call, "reduction"), argument(call, "size_average")
        is_sum = reduction is not None and constant(reduction.value) == "sum"
        if not is_sum and (old is None or constant(old.value) != "False"):
            continue
        called = makes_loss(porting, call) or in_training(porting, call, training)
        if called:
            porting.refused(
                call,
                porting.short(call),
                "a loss that is a sum over the batch; lockstep takes the mean over samples",
                "divide it by the number of samples, or see docs/weights.md, then port again",
            )
            return True
    return False


def _loaders(porting: Porting, training: list[Loop]) -> list[cst.Call] | None:
    """Return the loaders that are trained on; None, and refuse, where one is evaluated on as well."""
    trained = list({id(each): each for loop in training for each in loop.loaders}.values())
    for loop in porting.values.loops:
        for loader in loop.loaders:
            if not loop.trains and loader in trained:
                porting.refused(
                    loop.node,
                    f"the DataLoader of line {porting.script.line(loader)}",
                    "it is trained on in one loop and gone through without a backward in this one, of which each rank "
                    "would have a part",
                    "make a DataLoader for each, then port again",
                )
                return None
    return trained


def _initialise(porting: Porting, loaders: list[cst.Call], models: list[cst.BaseExpression]) -> bool:
    """Insert ``lockstep.init()`` before everything that needs it; return False, and refuse, where that is not seen."""
    script, values = porting.script, porting.values
    made = [each for model in models for each in values.sites(model, Kind.CALL)]
    anchors: list[cst.CSTNode] = [*loaders, *models, *made]
    on_device = False
    for call in script.all(cst.Call):
        name = script.full_name(call.func)
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        device = name in ("torch.device", "torch.accelerator.current_accelerator") and values.may(call, Kind.DEVICE)
        moves = is_cuda(call) and not name
        on_device = on_device or device or moves or (method == "to" and _names_device(porting, call))
        downloads = constant(given.value) == "True" if (given := argument(call, "download")) is not None else False
        at_top = script.function(call) is None and script.around(call, cst.ClassDef) is None
        if device or moves or name in SEEDING or downloads or (at_top and _may_draw(porting, call)):
            anchors.append(call)
    statement = _first(porting, anchors)
    if statement is not None and (function := script.function(statement)) is not None:
        # in a function, what draws random numbers before counts as well
        anchors += [each for each in script.all(cst.Call, function.body) if _may_draw(porting, each)]
        statement = _first(porting, anchors)
    if statement is None:
        porting.refused(
            None,
            "lockstep.init()",
            "no line is known to run before everything that needs it",
            "put the program into a main()",
        )
        return False
    porting.set_init([statement], inserted=True)
    arguments = [] if on_device else ['"gloo"']
    text = porting.init_call(statement, *arguments)
    script.insert_before(statement, lambda: text)
    porting.changed(statement, text, "joins the job; alone it is a world of one")
    if not on_device:
        porting.changed(statement, '"gloo"', "the script trains on the CPU, and so do the ranks")
    return True


def _may_draw(porting: Porting, call: cst.Call) -> bool:
    """Return whether a call may draw random numbers, which have to be the same on all ranks: data, first weights."""
    name = porting.script.full_name(call.func)
    if name.startswith(_DRAWING):
        return True
    unknown = name and "." in name and name.split(".")[0] not in _KNOWN and not name.startswith("torch.")
    made = any(each.kind is Kind.CLASS for each in porting.values.of(call.func))
    return bool(unknown) or made


def _names_device(porting: Porting, call: cst.Call) -> bool:
    given = argument(call, "device", 0)
    if given is None:
        return False
    return porting.values.may(given.value, Kind.DEVICE) or porting.values.alone(given.value, *PLACES)


def _first(porting: Porting, anchors: list[cst.CSTNode]) -> Statement | None:
    """Return the first statement of a block that runs once and has all of ``anchors`` in it, or calls what has."""
    script = porting.script
    functions = {id(function): function for each in anchors if (function := script.function(each)) is not None}
    at_top = [each for each in anchors if script.function(each) is None]
    if not at_top and len(functions) == 1:
        function = next(iter(functions.values()))
        if len(porting.values.calls[id(function)]) == 1 and isinstance(function.body, cst.IndentedBlock):
            return _holding(porting, function.body, anchors)
    guards = [each for each in script.module.body if isinstance(each, cst.If) and porting.is_main_guard(each)]
    if not at_top and len(guards) == 1 and isinstance(guards[0].body, cst.IndentedBlock):
        return _calling(porting, guards[0].body)
    inside = bool(guards) and all(script.inside(each, guards[0]) for each in at_top)
    block = guards[0].body if inside else script.module
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return None
    first = _holding(porting, block, at_top)
    calling = _calling(porting, block)
    both = [each for each in (first, calling) if each is not None]
    return min(both, key=script.begin) if both else None


def _holding(porting: Porting, block: cst.IndentedBlock | cst.Module, anchors: list[cst.CSTNode]) -> Statement | None:
    for each in block.body:
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            continue
        if any(porting.script.inside(anchor, each) for anchor in anchors):
            return each  # type: ignore[return-value]
    return None


def _calling(porting: Porting, block: cst.IndentedBlock | cst.Module) -> Statement | None:
    """Return the first statement that calls a function of the script."""
    for each in block.body:
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            continue
        if any(porting.values.functions(call) for call in porting.script.all(cst.Call, each)):
            return each  # type: ignore[return-value]
    return None


def _remove_data_parallel(porting: Porting) -> None:
    """Leave DataParallel out: a rank has one device."""
    script, values = porting.script, porting.values
    for call in script.all(cst.Call):
        if script.full_name(call.func) not in DATA_PARALLEL:
            continue
        model, assigned = argument(call, "module", 0), script.parent(call)
        if model is None:
            continue
        same = isinstance(assigned, cst.Assign) and script.source(assigned.targets[0].target) == script.source(
            model.value
        )
        if same:
            script.remove(script.statement(call))
        else:
            script.replace(call, lambda model=model: script.render(model.value))  # type: ignore[misc]
        porting.changed(call, "DataParallel", "each rank has one device, and a process of its own")
        porting.differs(
            call,
            "DataParallel",
            "the names in a state_dict have no `module.` in front; lockstep.load_weights takes both",
        )
    for node in script.all(cst.Attribute):
        if node.attr.value == "module" and values.may(node.value, Kind.REPLICA):
            script.replace(node, lambda node=node: script.render(node.value))  # type: ignore[misc]


def _replicate(porting: Porting, models: list[cst.BaseExpression]) -> bool:
    """Make each model a replica where it is moved to its device, or else before its optimizer is made."""
    script, values = porting.script, porting.values
    for model in models:
        _say_unseen(porting, model)
        its = {each for each in values.of(model) if each.kind in (Kind.CALL, Kind.INSTANCE)}
        moves = [
            call
            for call in script.all(cst.Call)
            if isinstance(call.func, cst.Attribute)
            and (call.func.attr.value == "to" or is_cuda(call))
            and its & values.of(call.func.value)
            and porting.runs_after_init(call)
        ]
        if len(moves) == 1 and not _conditional(porting, moves[0]):
            call = moves[0]
            _wrap_moved(porting, call)
        else:
            statement = script.statement(model)
            early = all(script.begin(each) < script.begin(model) for each in moves)
            same = all(script.function(each) is script.function(model) for each in moves)
            if not (early and same and porting.runs_after_init(model)):
                porting.refused(
                    model,
                    porting.short(model),
                    "it is moved to a device in several places, or after its optimizer is made",
                    _BY_HAND,
                )
                return False
            text = f"lockstep.replicate({_with_statistics(porting, script.source(model))})"
            script.insert_before(statement, lambda text=text: text)  # type: ignore[misc]
            porting.changed(statement, "lockstep.replicate", "averages the gradients over the ranks, by sample")
    return True


def _with_statistics(porting: Porting, text: str) -> str:
    """Let batch norms, where the script has any, take the statistics of the whole batch."""
    return f"lockstep.convert_sync_batchnorm({text})" if _has_batch_norm(porting) else text


def _wrap_moved(porting: Porting, call: cst.Call) -> None:
    """Put the call that moves a model into ``lockstep.replicate``; a ``.cuda()`` is ported with it."""
    script = porting.script
    function = call.func
    assert isinstance(function, cst.Attribute)

    def make() -> str:
        owner = script.render(function.value)
        if is_cuda(call):
            return f"lockstep.replicate({_with_statistics(porting, f'{owner}.to({porting.world(call)}.device)')})"
        given = argument(call, "device", 0)
        is_device = given is not None and len(call.args) == 1 and porting.values.alone(given.value, *PLACES)
        if is_device:
            return f"lockstep.replicate({_with_statistics(porting, f'{owner}.to({porting.world(call)}.device)')})"
        return f"lockstep.replicate({_with_statistics(porting, script.inner(call))})"

    script.replace(call, make)
    porting.changed(call, "lockstep.replicate", "averages the gradients over the ranks, by sample")


def _conditional(porting: Porting, node: cst.CSTNode) -> bool:
    """Return whether a node runs in some cases only, within its function."""
    inner = porting.script.around(node, cst.If, cst.IfExp, cst.Try, cst.For, cst.While)
    function = porting.script.function(node)
    if inner is None or (function is not None and not porting.script.inside(inner, function)):
        return False
    return not (isinstance(inner, cst.If) and porting.is_main_guard(inner))


class _Figures:
    """Figures that a training loop makes of its batches."""

    def __init__(self, porting: Porting, loop: Loop, done: set[int]) -> None:
        self._porting = porting
        self._script = porting.script
        self._loop = loop
        self._done = done
        #: Names of what is made of a rank's share of the batch, by function.
        self._local: set[tuple[int, str]] = set()
        self._losses: set[tuple[int, str]] = set()

    def port(self) -> None:
        """Make figures those of the whole batch, or say that they are not."""
        for name in self._script.all(cst.Name, self._loop.node.target):
            if not self._is_counter(name):
                self._local.add(self._key(name, name.value))
        self._go_through(self._loop.node.body)
        self._look_after()

    def _look_after(self) -> None:
        """Say what is told, after the loop, of what the loop left of this rank's share."""
        script, loop = self._script, self._loop.node
        inside = {id(each) for each in script.within(loop)}
        for node in script.all(cst.Call, script.function(loop) or script.module):
            told = script.full_name(node.func) == "print" or isinstance(script.parent(node), cst.Return)
            later = id(node) not in inside and script.begin(node) > script.begin(loop)
            if told and later and script.function(node) is script.function(loop) and self._is_local(node):
                self._left(node, "take world.mean or world.all_reduce of it in the loop, while the batch is in hand")

    def _is_counter(self, name: cst.Name) -> bool:
        """Return whether a name is the number that ``enumerate`` gives."""
        iterated, target = self._loop.node.iter, self._loop.node.target
        counts = isinstance(iterated, cst.Call) and self._script.full_name(iterated.func) == "enumerate"
        return counts and isinstance(target, cst.Tuple) and target.elements[0].value is name

    def _key(self, at: cst.CSTNode, name: str) -> tuple[int, str]:
        return (id(self._script.function(at)), name)

    def _go_through(self, body: cst.CSTNode) -> None:
        if id(body) in self._done:
            return
        self._done.add(id(body))
        for call in self._script.all(cst.Call, body):
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward":
                for name in self._script.all(cst.Name, call.func.value):
                    self._losses.add(self._key(name, name.value))
        for node in self._script.within(body):
            if isinstance(node, cst.Assign):
                self._assign(node)
            elif isinstance(node, cst.AugAssign):
                if not self._make_whole(node.value):
                    self._left(node)
            elif isinstance(node, cst.If) and self._is_local(node.test) and not self._make_whole(node.test):
                self._left(node.test, "ranks may decide differently: let them agree by world.any or world.mean")
            elif isinstance(node, cst.Call):
                self._call(node)

    def _assign(self, node: cst.Assign) -> None:
        if self._is_local(node.value):
            # A loss is told; a number of samples may as well be what the next tensor of this rank is made of.
            if isinstance(node.value, cst.Call) and self._as_whole(node.value) == "mean":
                self._make_whole(node.value)
                return
            for target in node.targets:
                for name in self._script.all(cst.Name, target):
                    self._local.add(self._key(name, name.value))

    def _call(self, node: cst.Call) -> None:
        name = self._script.full_name(node.func)
        if name.startswith(("torch.rand", "torch.normal", "torch.bernoulli", "numpy.random.", "random.")):
            self._porting.differs(
                node,
                self._porting.short(node),
                "each rank draws numbers of its own here, for its share of the batch, and so others than one process",
            )
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if name == "print" or method in (
            "append",
            "set_postfix",
            "set_description",
            "add_scalar",
            "info",
            "write",
            "update",
        ):
            for each in node.args:
                if not self._make_whole(each.value):
                    self._left(node)
                    return
            if method == "append":
                for each in node.args:
                    if self._is_local(each.value) and not self._script.is_replaced(each.value):
                        return
        for function in self._porting.values.functions(node):
            parameters = [each.name.value for each in function.params.params]
            if parameters and parameters[0] == "self":
                parameters = parameters[1:]
            for parameter, given in zip(parameters, node.args, strict=False):
                if self._is_local(given.value):
                    self._local.add((id(function), parameter))
            self._go_through(function.body)

    def _is_local(self, node: cst.CSTNode) -> bool:
        """Return whether a value is made of a rank's share of the batch."""
        names = (each for each in self._script.all(cst.Name, node) if not self._is_field(each))
        return any(self._key(each, each.value) in self._local | self._losses for each in names)

    def _is_field(self, name: cst.Name) -> bool:
        outer = self._script.parent(name)
        if isinstance(outer, cst.Attribute) and outer.attr is name:
            return True
        return isinstance(outer, cst.Arg) and outer.keyword is name

    def _make_whole(self, node: cst.CSTNode) -> bool:
        """Make figures in an expression those of the whole batch; return whether that could be for all of them."""
        if not self._is_local(node):
            return True
        if isinstance(node, cst.Call):
            text = self._as_whole(node)
            if text is not None:
                self._replace(node, text)
                return True
        if isinstance(node, cst.Name):
            return False
        if isinstance(node, cst.Subscript) and self._size(node):
            self._replace(node, "all_reduce")
            return True
        found = [self._make_whole(each) for each in self._script.children(node)]  # also after one that is not
        return all(found)

    def _as_whole(self, call: cst.Call) -> str | None:
        """Return the method of World that makes a figure of this rank one of the whole batch."""
        if self._size(call):
            return "all_reduce"
        if not isinstance(call.func, cst.Attribute) or call.args:
            return None
        method, owner = call.func.attr.value, call.func.value
        if method == "sum":
            return "all_reduce"
        if method != "item":
            return None
        while isinstance(owner, cst.Call) and isinstance(owner.func, cst.Attribute) and not owner.args:
            if owner.func.attr.value == "sum":
                return "all_reduce"
            if owner.func.attr.value not in ("detach", "cpu", "float", "double"):
                return None
            owner = owner.func.value
        is_loss = isinstance(owner, cst.Name) and self._key(owner, owner.value) in self._losses
        return "mean" if is_loss else None

    def _size(self, node: cst.CSTNode) -> bool:
        """Return whether it is the number of samples: ``len(x)``, ``x.size(0)``, ``x.shape[0]``."""
        if isinstance(node, cst.Call) and self._script.full_name(node.func) == "len":
            return isinstance(node.args[0].value, cst.Name)
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "size":
            return len(node.args) == 1 and constant(node.args[0].value) == "0" and isinstance(node.func.value, cst.Name)
        if (
            isinstance(node, cst.Subscript)
            and isinstance(node.value, cst.Attribute)
            and node.value.attr.value == "shape"
        ):
            index = node.slice[0].slice
            return isinstance(index, cst.Index) and constant(index.value) == "0"
        return False

    def _replace(self, node: cst.BaseExpression, method: str) -> None:
        script, porting = self._script, self._porting
        owner: cst.BaseExpression = node
        if method == "mean":
            while isinstance(owner, cst.Call) and isinstance(owner.func, cst.Attribute):
                owner = owner.func.value
        script.replace(
            node,
            lambda: f"{porting.world(node)}.{method}({script.inner(node) if owner is node else script.render(owner)})",
        )
        porting.changed(
            node, f"world.{method}", "of the whole batch, where this rank has its share; every rank takes part"
        )

    def _left(self, node: cst.CSTNode, advice: str = "") -> None:
        self._porting.left(
            node,
            self._porting.short(node),
            "it is made of this rank's share of the batch",
            advice or "make it one of the whole batch: world.mean for a mean over samples, world.all_reduce for a sum",
        )


def _download_first(porting: Porting, call: cst.Call, whole: Statement) -> None:
    """Download in a statement of its own, before one in which all ranks do something together."""
    script = porting.script
    deeper = script.indent(whole) + script.module.default_indent
    text = in_one_line(script.source(call))
    script.insert_before(whole, lambda: f"with {porting.world(call)}.main_first():\n{deeper}{text}")
    porting.changed(call, "world.main_first", "rank 0 downloads before the others look for the files")


def _do_once(porting: Porting) -> None:
    """Print, save and download on one rank."""
    script, values = porting.script, porting.values
    for call in script.all(cst.Call):
        name, function = script.full_name(call.func), script.function(call)
        elsewhere = function is not None and (
            function.name.value in _CALLED_ELSEWHERE
            or not (_holds_init(porting, function) or porting.values.calls[id(function)])
        )
        if not porting.runs_after_init(call) or (elsewhere and name != "torch.save"):
            continue
        statement = porting.expression_statement(call)
        if name == "print":
            script.replace(call.func, lambda call=call: f"{porting.world(call)}.print")  # type: ignore[misc]
        elif name == "torch.save" and statement is not None:
            _guard(porting, call, statement)
        elif name == "torch.save":
            porting.left(
                call,
                porting.short(call),
                "every rank does this",
                "put it on a line of its own under `if world.is_main:`",
            )
        elif (given := argument(call, "download")) is not None and constant(given.value) == "True":
            whole = script.statement(call)
            collective = any(
                values.may(each, Kind.LOADER) or values.functions(each) for each in script.all(cst.Call, whole)
            )
            if collective:
                _download_first(porting, call, whole)
            elif isinstance(whole, cst.SimpleStatementLine):
                script.wrap(whole, lambda call=call: f"with {porting.world(call)}.main_first():")  # type: ignore[misc]
                porting.changed(call, "world.main_first", "rank 0 downloads, and the others read what it has")
        elif name in _ONCE or _writes(porting, call):
            porting.left(
                call, porting.short(call), "every rank does this", _ONCE.get(name, "put it under `if world.is_main:`")
            )


def _holds_init(porting: Porting, function: cst.FunctionDef) -> bool:
    return porting.init is not None and porting.script.function(porting.init.node) is function


def _guard(porting: Porting, call: cst.Call, statement: Statement) -> None:
    script = porting.script
    indent = script.indent(statement) + script.module.default_indent
    script.replace(call, lambda: f"if {porting.world(call)}.is_main:\n{indent}{script.inner(call)}")
    porting.changed(call, "torch.save on rank 0", "all ranks hold the same, and one writes the file")


def _writes(porting: Porting, call: cst.Call) -> bool:
    if porting.script.full_name(call.func) != "open":
        return False
    mode = argument(call, "mode", 1)
    return mode is not None and (constant(mode.value) or "")[:1] in ("w", "a", "x")


def _say_first_batches(porting: Porting, loaders: list[cst.Call]) -> None:
    """Say where a single batch is taken of a sharded loader: it is this rank's share."""
    script, values = porting.script, porting.values
    for call in script.all(cst.Call):
        if script.full_name(call.func) == "next" and call.args:
            inner = call.args[0].value
            if any(each in loaders for each in values.looped_over(inner)):
                porting.left(
                    call,
                    porting.short(call),
                    "it is this rank's share of a batch, and begins a pass of its own",
                    "take a sample of the data set instead, or ask world.all_reduce(len(...))",
                )


def _has_batch_norm(porting: Porting) -> bool:
    return any("BatchNorm" in porting.script.full_name(each.func) for each in porting.script.all(cst.Call))


def _say_unseen(porting: Porting, model: cst.BaseExpression) -> None:
    """Say of a model whose layers are in another file that its batch norms are not seen."""
    classes = [each for each in porting.values.of(model) if each.kind is Kind.INSTANCE]
    made = [each for each in porting.values.sites(model, Kind.CALL) if porting.script.full_name(each.func)]
    layers = [each for each in made if not porting.script.full_name(each.func).startswith("torch.nn.")]
    if not classes and (layers or not made):
        porting.left(
            model,
            porting.short(model),
            "its layers are in another file: a batch norm would take the statistics of the rank's share of the batch",
            "lockstep.convert_sync_batchnorm(model) takes those of the whole batch, and changes nothing without one",
        )
