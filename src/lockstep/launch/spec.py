"""Check the user's request: the program, the number of ranks and of nodes, the port, the output that is shown."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib.machinery
import importlib.util
import itertools
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep import knobs
from lockstep._files import local_path
from lockstep.errors import EnvironmentMismatch
from lockstep.launch.binding import Bind
from lockstep.launch.on_hang import HangAction, OnHang
from lockstep.rendezvous.messages import Options, Round
from lockstep.schedulers.place import node as scheduler_node
from lockstep.text import counted, joined

#: torch.distributed.launch's default port, which the nodes of a job must agree on without communication.
DEFAULT_MASTER_PORT = 29500
DEFAULT_GRACE = 10.0
DEFAULT_JOIN_TIMEOUT = 600.0
DEFAULT_REGROUP_AFTER = 60.0


class Output(enum.Enum):
    """The ranks whose output is on the terminal."""

    #: Show the first rank's output, unchanged; the other ranks' output goes to their logs.
    FIRST = "first"
    #: Show all ranks' output, line by line, with a prefix except for the first rank; and write the logs.
    ALL = "all"
    #: Show all ranks' output, unchanged, as torch.distributed.launch does; no logs unless a folder is given.
    SHARED = "shared"


@dataclass(frozen=True)
class Program:
    """The program that every rank runs: a script, or a module as ``python -m`` would."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    #: The script's text, if no file that the ranks can read has it; see :meth:`read`.
    text: bytes | None = None

    @classmethod
    def read(cls, target: str, args: tuple[str, ...] = (), is_module: bool = False) -> Program:
        """Return the program that a command line names; one that comes through a pipe is read here, and only here.

        ``-``, ``/dev/stdin``, ``<(…)`` and a named pipe can be read once, and each rank is to run the same text.

        Raises:
            ValueError: it is a terminal, a device or too long, or can't be read.
        """
        text = None if is_module or not is_read_once(target) else _read_once(target)
        return cls(target, args, is_module, text)

    @property
    def words(self) -> list[str]:
        """The words after the options of ``lockstep run``."""
        return [*(["-m"] if self.is_module else []), self.target, *self.args]

    @property
    def name(self) -> str:
        """A short word for it, fit for a folder's name."""
        stem = self.target if self.is_module else Path("stdin" if self.text is not None else self.target).stem
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)[:60]


@dataclass(frozen=True)
class JobSpec:
    """One node's part of a job. With several nodes, each starts its own part and they meet at the master's port."""

    program: Program
    #: The number of ranks on this node.
    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    #: The scheduler's name for the job's ranks, by which they know each other at that port; empty: it has none.
    world: str = ""
    #: The option that passes the local rank as the first argument, as torch.distributed.launch does, or None.
    local_rank_option: str | None = None
    #: The user's folder for the logs; None: the default folder.
    log_dir: Path | None = None
    output: Output = Output.FIRST
    #: Seconds between asking the ranks to stop and killing them.
    grace: float = DEFAULT_GRACE
    #: Seconds by which the ranks have saved and the job ends; None: no limit.
    max_time: float | None = None
    #: The action about ranks that hold up the others, besides the report.
    on_hang: OnHang = field(default_factory=OnHang)
    #: The shell command that is run at events of the job; None if there is none.
    notify: str | None = None
    #: True if the summary at the end is left out.
    quiet: bool = field(default_factory=knobs.quiet)
    #: The price of a node per hour, from which the summary computes the cost; None: not known.
    price: float | None = None
    #: The number of traced steps, and of the steps before them; None: no step is traced.
    trace: tuple[int, int] | None = field(default_factory=knobs.trace)
    #: To which cores the ranks are bound.
    bind: Bind = field(default_factory=lambda: Bind(knobs.bind()))
    #: True if the FLOPs of a step are counted; the FLOPs a second of a rank's device at its peak, None: as published.
    flops: bool = field(default_factory=knobs.flops)
    peak_flops: float | None = field(default_factory=knobs.peak_flops)
    #: The limit on restarts of all ranks after one failed.
    max_restarts: int = 0
    #: The rendezvous with other machines' launchers; None: the machines are known beforehand.
    rendezvous: Options | None = None
    #: The minimum seconds of a round before machines that want to join may end it.
    regroup_after: float = DEFAULT_REGROUP_AFTER
    #: True if the output of all machines' launchers is shown in one place, so that the job has one first rank.
    one_terminal: bool = False
    #: True if the first rank that fails is held in its frame for a debugger.
    hold: bool = False

    def __post_init__(self) -> None:
        if self.log_dir is not None:
            local_path(self.log_dir, "--log-dir")
        if self.nproc < 1:
            raise ValueError(f"{self.nproc} ranks: expected at least 1")
        if self.nnodes < 1:
            raise ValueError(f"--nnodes={self.nnodes}: expected at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node_rank={self.node_rank} does not fit --nnodes={self.nnodes}: expected 0 to {self.nnodes - 1}"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise ValueError(f"--master_port={self.master_port}: expected 1 to 65535")
        if not (math.isfinite(self.grace) and self.grace >= 0):
            raise ValueError(f"--grace={self.grace}: expected a number of seconds, 0 or more")
        if self.max_time is not None and not (math.isfinite(self.max_time) and self.max_time > self.grace):
            raise ValueError(
                f"--max-time={self.max_time:g} s: expected more than --grace={self.grace:g} s, since the ranks are "
                "asked to save that long before its end"
            )
        if self.notify is not None and not self.notify.strip():
            raise ValueError(f"--notify={self.notify!r}: expected a command, which a shell runs")
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts={self.max_restarts}: expected 0 or more")
        if self.on_hang.action is HangAction.RESTART and not self.max_restarts:
            raise ValueError(
                "--on-hang=restart starts the ranks again as after a failure, which --max-restarts allows: give both"
            )
        if self.max_restarts and self.nnodes > 1:
            raise ValueError(
                f"--max-restarts={self.max_restarts} with --nnodes={self.nnodes}: the launchers of several machines "
                "can restart together only if they find each other: give --rdzv HOST on each, HOST being the name of "
                "one of them"
            )
        if not (math.isfinite(self.regroup_after) and self.regroup_after >= 0):
            raise ValueError(f"--regroup-after={self.regroup_after}: expected a number of seconds, 0 or more")

    @property
    def measures(self) -> dict[str, str | None]:
        """The variables that set what ranks measure; None means unset."""
        return {
            knobs.TRACE: None if self.trace is None else f"{self.trace[0]}:{self.trace[1]}",
            knobs.FLOPS: "1" if self.flops else None,
            knobs.PEAK_FLOPS: None if self.peak_flops is None else str(self.peak_flops),
        }

    def round(self, address: str, port: int, *, number: int = 0) -> Round:
        """Return this node's place where the machines are known beforehand.

        Args:
            address: with ``port``, where the ranks meet.
            port: see there.
            number: the number of starts before this one.
        """
        return Round(self.node_rank, (self.nproc,) * self.nnodes, address, port, number=number, world=self.world)

    def meeting(self) -> Options:
        """Return the options of the rendezvous."""
        assert self.rendezvous is not None, "it was asked for"
        return replace(self.rendezvous, backend=knobs.backend() or "")

    def alike(self) -> dict[str, str]:
        """Return the facts that should be the same on all machines, as they are now: name in messages -> value."""
        args = self.program.args
        program = f"-m {self.program.target}" if self.program.is_module else os.path.basename(self.program.target)
        return {
            "what they run": f"{program} ({_text_of(self.program)})",
            # Not what they are: a secret among them is not for the store.
            "the arguments of what they run": (
                f"{len(args)} of them ({_digest(chr(0).join(args).encode(errors='surrogateescape'))})"
            ),
            "--max-restarts": str(self.max_restarts),
        }

    def arguments(self, local_rank: int) -> list[str]:
        """Return the words after the program's name in this rank's ``sys.argv``."""
        own = [f"{self.local_rank_option}={local_rank}"] if self.local_rank_option is not None else []
        return [*own, *self.program.args]


def _digest(content: bytes) -> str:
    return f"digest {hashlib.sha256(content).hexdigest()[:8]}"


def _text_of(program: Program) -> str:
    """Return the digest of the text in a program's own file, wherever that lies: a start runs what is there by then."""
    if program.text is not None:
        return _digest(program.text)
    try:
        path = _find_module(program.target) if program.is_module else program.target
        return "its file is not known" if path is None else _digest(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        return f"can't be read: {error}"


def rank_environment(
    round_: Round,
    local_rank: int,
    *,
    folder: str,
    interface: str | None = None,
    measures: Mapping[str, str | None] | None = None,
    cores: int | None = None,
) -> dict[str, str | None]:
    """Return the variables that one rank sees changed; None means unset.

    Args:
        round_: the machines that start together.
        local_rank: which rank of this machine.
        folder: the private folder of this start of the job.
        interface: the network device that gloo is to use, whatever the host's name resolves to; None: it chooses.
        measures: what the rank measures, as :attr:`JobSpec.measures` has it; None: nothing.
        cores: those that the ranks of this machine share, if each is bound to some of them.
    """
    env: dict[str, str | None] = dict(round_.identity(local_rank).to_environment())
    env["MASTER_ADDR"], env["MASTER_PORT"] = round_.address, str(round_.port)
    env[knobs.JOB_DIR] = folder
    env[knobs.RESTART] = env["TORCHELASTIC_RESTART_COUNT"] = str(round_.number)  # the latter is what torchrun sets
    env[knobs.STORE] = f"{folder}/store" if len(round_.ranks) == 1 else None
    env |= dict.fromkeys((knobs.TRACE, knobs.FLOPS, knobs.PEAK_FLOPS)) | dict(measures or {})
    env[knobs.CORES] = None if cores is None else str(cores)
    env[knobs.ROUND] = f"{round_.job} {round_.number}" if round_.job else None
    env[knobs.WORLD] = round_.world or None
    if round_.served:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's env:// rendezvous reads it: no rank serves the store
    if interface is not None:
        env["GLOO_SOCKET_IFNAME"] = interface
    return env


def parse_ranks(text: str, *, cores: int, gpus: int, option: str = "-n", auto: int | None = None) -> int:
    """Return how many ranks ``option`` asks for: a number, ``gpu`` or ``cpu`` (one for each), or ``auto``.

    Args:
        text: what the user wrote.
        cores: of this machine.
        gpus: of this machine.
        option: the option's name, for messages.
        auto: the number that ``auto`` gives without a GPU. None: one rank for two cores, at least one.

    Raises:
        ValueError: ``text`` is none of these, or asks for GPUs on a machine without any.
    """
    if text == "auto":
        return gpus or (max(1, cores // 2) if auto is None else auto)
    if text == "cpu":
        return cores
    if text == "gpu":
        if not gpus:
            raise ValueError(f"{option} gpu: there is no GPU on this machine, or CUDA_VISIBLE_DEVICES hides it")
        return gpus
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"{option} {text}: expected a whole number of ranks, at least 1, or 'auto', 'gpu' or 'cpu'")
    return count


def parse_nodes(text: str, *, standalone: bool = False, option: str = "--nnodes") -> tuple[int, int]:
    """Return how many machines the job takes at least and at most: ``N``, or ``MIN:MAX``.

    Args:
        text: what the user wrote.
        standalone: the user also said that the job takes one machine.
        option: the option before it, for messages.

    Raises:
        ValueError: ``text`` is neither, or contradicts ``standalone``.
    """
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 0 < int(least) <= int(most or least):
        raise ValueError(f"{option}={text}: expected a whole number of machines, or MIN:MAX")
    if standalone and int(most or least) > 1:
        raise ValueError(f"--standalone is for jobs on one machine, and {option}={text}: drop one of them")
    return int(least), int(most or least)


@dataclass(frozen=True)
class NodeOptions:
    """The user's options on this machine's place among those of the job; None: not given."""

    nnodes: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    #: True if the user has said that the job has one machine.
    standalone: bool = False
    rdzv: str | None = None
    rdzv_id: str | None = None
    local_addr: str | None = None
    join_timeout: float = DEFAULT_JOIN_TIMEOUT


@dataclass(frozen=True)
class NodePlace:
    """This machine's place among those of the job."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    #: Ranks on each machine, as for ``-n``, if the scheduler tells.
    ranks: str | None = None
    #: The machines' rendezvous, without its number of ranks; None: the machines are known beforehand.
    rendezvous: Options | None = None
    #: The limit on restarts of all ranks after one failed, if the scheduler tells.
    restarts: int | None = None
    #: The scheduler's name for the job's ranks, as :class:`LauncherPlace` has it.
    world: str = ""


def node_place(options: NodeOptions, env: Mapping[str, str] = os.environ) -> NodePlace:
    """Work out this machine's place: as the user has said, else as the scheduler that started this launcher says.

    Raises:
        ValueError: an option is invalid.
        EnvironmentMismatch: the scheduler's variables are incomplete, contradict each other or the options, or several
            launchers were started where each would start the whole job.
    """
    if options.rdzv is not None:
        return _meeting(options, options.rdzv, env)
    if env.get("PET_RDZV_BACKEND") == "c10d" and options.node_rank is None and not options.standalone:
        return _meeting_of_pods(options, env)
    nnodes = None if options.nnodes is None else _fixed(options.nnodes, standalone=options.standalone)
    if options.node_rank is not None:
        return NodePlace(nnodes or 1, options.node_rank, options.master_addr, options.master_port)
    _refuse_in_a_rank(env)
    found = scheduler_node(env)
    if found is None:
        return NodePlace(nnodes or 1, 0, options.master_addr, options.master_port)
    if options.standalone:
        nnodes = 1
    count = found.count if nnodes is None else nnodes
    if count is None:
        raise EnvironmentMismatch(
            f"{found.scheduler} says that this is machine {found.rank} of the job, but not of how many: pass --nnodes "
            "and --master-addr (or say --standalone if each machine is to run a job of its own)"
        )
    if found.count is not None and found.count != count:
        raise EnvironmentMismatch(
            f"this launcher is to start a job on {counted(count, 'machine')}, but {found.scheduler} "
            f"started it on {found.count}, of which this is number {found.rank}: drop --nnodes (or --standalone), or "
            "pass both --nnodes and --node-rank; for a job of its own on each machine, start it without the "
            "scheduler's variables"
        )
    if options.standalone or count == 1:
        return NodePlace(1, 0, options.master_addr, options.master_port, found.ranks)
    address = options.master_addr or found.address or env.get("MASTER_ADDR")
    if address is None:
        raise EnvironmentMismatch(
            f"{found.scheduler} says that this is machine {found.rank} of {count}, but not where they meet: pass "
            "--master-addr, the name of machine 0"
        )
    port = options.master_port or found.port
    return NodePlace(count, found.rank, address, port, found.ranks, world=found.world)


def _fixed(text: str, *, standalone: bool) -> int:
    least, most = parse_nodes(text, standalone=standalone)
    if least != most:
        raise ValueError(
            f"--nnodes={text}: the number of machines can change only if the launchers find each other: give --rdzv "
            "HOST on each, HOST being the name of one of them"
        )
    return least


def _meeting(options: NodeOptions, endpoint: str, env: Mapping[str, str]) -> NodePlace:
    for name, value in (("--node-rank", options.node_rank), ("--master-addr", options.master_addr)):
        if value is not None:
            raise ValueError(f"{name}={value} with --rdzv={endpoint}: the machines number themselves; drop {name}")
    if options.standalone:
        raise ValueError(f"--standalone is for jobs on one machine, and --rdzv={endpoint}: drop one of them")
    if options.nnodes is None:
        raise ValueError(f"--rdzv={endpoint}: say how many machines there are, --nnodes N or --nnodes MIN:MAX")
    _refuse_in_a_rank(env)
    kind, _, path = endpoint.partition(":")
    if kind == "file":
        # Two jobs must not meet in one file.
        folder = local_path(path, "--rdzv=file").absolute()
        if not folder.is_dir():
            raise ValueError(f"--rdzv={endpoint}: not a folder; name one on a disk that all machines share")
        endpoint = f"file:{folder / (options.rdzv_id or 'lockstep')}.rendezvous"
    elif not _ENDPOINT.fullmatch(endpoint):
        raise ValueError(f"--rdzv={endpoint}: expected HOST, HOST:PORT or file:FOLDER")
    least, most = parse_nodes(options.nnodes)
    if not (math.isfinite(options.join_timeout) and options.join_timeout > 0):
        raise ValueError(f"--join-timeout={options.join_timeout:g}: expected a positive number of seconds")
    found = Options(
        endpoint,
        options.rdzv_id or "lockstep",
        least,
        most,
        ranks=0,
        join_timeout=options.join_timeout,
        local_addr=options.local_addr,
        key=knobs.key(env),
    )
    return NodePlace(rendezvous=found)


def _meeting_of_pods(options: NodeOptions, env: Mapping[str, str]) -> NodePlace:
    """Read the variables of torchrun that an elastic PyTorchJob of Kubeflow sets; the user's options take
    precedence."""
    missing = [name for name in ("PET_RDZV_ENDPOINT", "PET_NNODES") if not env.get(name)]
    if missing:
        raise EnvironmentMismatch(f"PET_RDZV_BACKEND=c10d is set but {joined(missing)} is not")
    asked = replace(
        options, nnodes=options.nnodes or env["PET_NNODES"], rdzv_id=options.rdzv_id or env.get("PET_RDZV_ID")
    )
    place = _meeting(asked, env["PET_RDZV_ENDPOINT"], env)
    restarts = env.get("PET_MAX_RESTARTS", "")
    return replace(place, ranks=env.get("PET_NPROC_PER_NODE"), restarts=int(restarts) if restarts.isdecimal() else None)


#: A name or an address (in brackets if it has colons), with an optional port.
_ENDPOINT = re.compile(r"([^\s:\[\]]+|\[[0-9a-fA-F:.%\w]+\])(:\d{1,5})?")


def _refuse_in_a_rank(env: Mapping[str, str]) -> None:
    """Refuse to start a job in each rank of another one."""
    world_size = env.get("WORLD_SIZE", "1")
    if world_size == "1" or "RANK" not in env:
        return
    if knobs.JOB_DIR in env:
        raise EnvironmentMismatch(
            f"this launcher was started by rank {env['RANK']} of a job of {world_size}, and each rank would start a "
            "job of its own: let lockstep run start the program itself; if this rank alone is to start another job: "
            "env -u RANK lockstep run ..."
        )
    if "TORCHELASTIC_RUN_ID" in env:
        raise EnvironmentMismatch(
            f"torchrun has started {world_size} of this launcher, and each would start a job of its own: let torchrun "
            "start the program itself, or start lockstep run without torchrun, once on each machine"
        )


def local_rank_option(sources: Iterable[str]) -> str:
    """Return the option that a program's parser knows: ``--local_rank`` (torch 1) if that is all it names, else
    ``--local-rank``, which torch passes today.

    Args:
        sources: the program's text, then that of the files around it, where its parser may be; the first that names
            either decides.
    """
    for text in sources:
        named = set(re.findall(r"[\"'](--local[-_]rank)\b", text))
        if named:
            return "--local-rank" if "--local-rank" in named else "--local_rank"
    return "--local-rank"


# Whether a program can be run at all, and what it says, without running a line of it ---------------------------------

#: The most files and folders around a program that are searched: its data may lie beside it.
_MOST_FILES, _MOST_FOLDERS = 300, 100


def check_program(program: Program) -> None:
    """Refuse a program that does not exist.

    Raises:
        ValueError: the script is missing, a folder or not readable, or the module does not exist.
    """
    if program.is_module:
        _find_module(program.target)
    elif program.text is None:
        _check_script(program.target)


def sources_of(program: Program) -> Iterator[str]:
    """Yield the text of a program's own file, then of the Python files in its folder and below.

    Files that can't be read are left out, and after some hundred files or folders it ends: it serves to guess which
    options a program knows.
    """
    if program.text is not None:
        yield program.text.decode(errors="replace")
        return
    path = _find_module(program.target) if program.is_module else program.target
    if path is None:
        return
    yield from _texts([path])
    yield from _texts(itertools.islice(_beside(path), _MOST_FILES))


#: Names that mean a descriptor of the process that opens them: in a rank, another file or none.
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|thread-self|\d+)/(task/\d+/)?fd/\d+")
#: The most bytes of a program that is read from a pipe.
_LONGEST = 1 << 26


def is_read_once(path: str) -> bool:
    """Return whether a script's path can be read by one process only, and once: a pipe, or a descriptor."""
    if path == "-" or _DESCRIPTOR.fullmatch(os.path.abspath(path)):
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path)
    except OSError:
        return False  # not there: said when the program is checked


def _read_once(path: str) -> bytes:
    shown = "standard input" if path == "-" else path
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            if file.isatty():
                raise ValueError(f"the program is to come from {shown}, which is a terminal: name a Python script")
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise ValueError(f"the program can't be read from {shown}: {error.strerror or error}") from error
    if len(text) > _LONGEST:
        raise ValueError(f"the program from {shown} is longer than {_LONGEST >> 20} MiB: is it a script?")
    return text


def _beside(path: str) -> Iterator[str]:
    walk = os.walk(os.path.dirname(path) or ".")
    for folder, folders, files in itertools.islice(walk, _MOST_FOLDERS):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name not in ("site-packages", "node_modules")
        )
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


def _texts(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield Path(path).read_text(errors="replace")


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: name a Python script, or a module with -m")
    if not os.path.exists(path):
        if path == "-":
            raise ValueError(
                "this command needs the program more than once, so not from standard input: save it to a file"
            )
        hint = f"; to run the module {path}, say -m {path}" if _looks_like_module(path) else ""
        raise ValueError(f"script not found: {path} (looked in {os.getcwd()}){hint}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"script not readable: {path}")
    if is_read_once(path):
        raise ValueError(f"{path} is a pipe, and this command needs the program more than once: save it to a file")


def _looks_like_module(name: str) -> bool:
    return "/" not in name and not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))


def _find_module(name: str) -> str | None:
    """Return the file that ``-m name`` runs; None: only the ranks can tell.

    Follows the packages down without importing them: importing runs the user's code, and often torch.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"-m {name}: not a module's name (for a script, drop -m)")
    search: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(parts):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None and depth == 0:
            spec = importlib.util.find_spec(part)  # built in, frozen, or an editable install's own finder
        if spec is None:
            raise ValueError(f"module not found: {name} (no {part} in {parts[depth - 1] if depth else 'sys.path'})")
        if spec.submodule_search_locations is None:
            search = []
            continue
        try:
            search = list(spec.submodule_search_locations)
        except KeyError:
            return None  # a namespace package inside one knows its place only once imported; the ranks will tell
    if search:
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", search)
        if spec is None:
            raise ValueError(f"-m {name}: a package without a __main__ module can't be run")
    return spec.origin if spec is not None and spec.has_location else None
