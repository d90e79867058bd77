"""How a machine's cores lie, and to which of them its ranks are bound: on made-up trees of the kernel's files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lockstep.launch.binding import Bind, Binding, CoreFacts, decide, in_words
from lockstep.tools.doctor import checks, facts
from lockstep.tools.doctor.checks import CheckTask
from lockstep.topology import Core, Topology, format_cpus, parse_cpus


@dataclass(frozen=True)
class Machine:
    """A machine to be made up; cores are numbered through, and second hyper-threads come after all first ones."""

    #: Socket -> its nodes -> the number of cores below each L3 cache.
    sockets: tuple[tuple[tuple[int, ...], ...], ...]
    threads: int = 1
    offline: frozenset[int] = frozenset()
    #: The NUMA node of each GPU.
    gpus: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    cpuset: str = ""
    isolated: str = ""
    #: False: the kernel tells nothing of L3 caches.
    tells_caches: bool = True
    #: The GPUs whose device files are not in this container.
    hidden: frozenset[int] = field(default=frozenset())

    def build(self, root: Path) -> Path:
        """Write its files below ``root``, and return that."""
        count = sum(cores for socket in self.sockets for node in socket for cores in node)
        online = frozenset(range(count * self.threads)) - self.offline
        nodes: dict[int, set[int]] = {}
        core = node_number = 0
        for socket_number, socket in enumerate(self.sockets):
            for node in socket:
                for cores in node:
                    those = range(core, core + cores)
                    sharing = {cpu for one in those for cpu in self._siblings(one, count)} & online
                    nodes.setdefault(node_number, set()).update(sharing)
                    for one in those:
                        self._write_core(root, self._siblings(one, count) & online, sharing, socket_number)
                    core += cores
                node_number += 1
        for number, cpus in nodes.items():
            _write(root / f"sys/devices/system/node/node{number}/cpulist", format_cpus(cpus))
        _write(root / "sys/devices/system/cpu/online", format_cpus(online))
        _write(root / "sys/devices/system/cpu/isolated", self.isolated)
        _write(root / "proc/self/cgroup", "0::/jobs/this\n")
        if self.cpuset:
            _write(root / "sys/fs/cgroup/jobs/cpuset.cpus.effective", self.cpuset)
        for index, node_number in enumerate(self.gpus):
            self._write_gpu(root, index, node_number, nodes, online)
        return root

    def _siblings(self, core: int, count: int) -> set[int]:
        return {core + count * thread for thread in range(self.threads)}

    def _write_core(self, root: Path, siblings: set[int] | frozenset[int], sharing: set[int], socket: int) -> None:
        for cpu in siblings:
            folder = root / f"sys/devices/system/cpu/cpu{cpu}"
            _write(folder / "topology/thread_siblings_list", format_cpus(siblings))
            _write(folder / "topology/physical_package_id", str(socket))
            for index, (level, cpus) in enumerate([(1, siblings), (1, siblings), (2, siblings), (3, sharing)]):
                if level < 3 or self.tells_caches:
                    _write(folder / f"cache/index{index}/level", str(level))
                    _write(folder / f"cache/index{index}/shared_cpu_list", format_cpus(cpus))

    def _write_gpu(self, root: Path, index: int, node: int, nodes: dict[int, set[int]], online: frozenset[int]) -> None:
        address = f"0000:{16 * index + 11:02x}:00.0"
        model = self.models[index] if self.models else "H100"
        information = f"Model: \t\t {model}\nIRQ:   \t\t 7\nGPU UUID: \t GPU-{index}a1b2\nDevice Minor: \t {index}\n"
        _write(root / f"proc/driver/nvidia/gpus/{address}/information", information)
        _write(root / f"sys/bus/pci/devices/{address}/numa_node", str(node))
        _write(root / f"sys/bus/pci/devices/{address}/local_cpulist", format_cpus(nodes.get(node, online)))
        if index not in self.hidden:
            _write(root / f"dev/nvidia{index}", "")

    def cores(self, root: Path, allowed: str = "", **more: object) -> CoreFacts:
        """Build it and read it; ``allowed``: the affinity, by default what is given."""
        topology = Topology.read(self.build(root))
        env = {key: str(value) for key, value in more.items()}
        gpus = topology.visible_gpus(env)
        assert gpus is not None
        return CoreFacts(topology, parse_cpus(allowed) if allowed else topology.given, gpus=gpus)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n")


ONE_SOCKET = Machine((((8,),),))
#: As two sockets of which each is divided in two.
TWO_BY_TWO = Machine((((4,), (4,)), ((4,), (4,))), threads=2)
#: As an EPYC with four slices of L3 on one node.
SLICES = Machine((((4, 4, 4, 4),),))
#: As a server with eight GPUs on two sockets.
EIGHT_GPUS = Machine((((16,),), ((16,),)), gpus=(0, 0, 0, 0, 1, 1, 1, 1))


def shown(binding: Binding) -> list[str]:
    """The CPUs of each rank, as the kernel writes them."""
    return [format_cpus(cpus) for cpus in binding.cpus]


# What is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("(null)", set())])
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(cpus) == (text.strip() if cpus else "")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (ONE_SOCKET, "1 socket, 1 NUMA node, 1 L3 cache, 8 cores"),
        (TWO_BY_TWO, "2 sockets, 4 NUMA nodes, 4 L3 caches, 16 cores with 32 hyper-threads"),
        (SLICES, "1 socket, 1 NUMA node, 4 L3 caches, 16 cores"),
        (replace(ONE_SOCKET, offline=frozenset({3})), "1 socket, 1 NUMA node, 1 L3 cache, 7 cores"),
        (replace(ONE_SOCKET, tells_caches=False), "1 socket, 1 NUMA node, 8 cores"),
        # What a virtual machine makes up: each core a socket with an L3 cache of its own.
        (Machine((((1,),), ((1,),), ((1,),))), "3 sockets, 3 NUMA nodes, 3 cores"),
    ],
)
def test_a_machine_in_words(machine: Machine, words: str, tmp_path: Path) -> None:
    assert Topology.read(machine.build(tmp_path)).describe() == words


def test_hyper_threads_are_of_one_core(tmp_path: Path) -> None:
    cores = Topology.read(TWO_BY_TWO.build(tmp_path)).cores
    assert cores[0] == Core(0, 0, 0, (0, 16))
    assert cores[-1] == Core(1, 3, 12, (15, 31))
    half = Topology.read(replace(TWO_BY_TWO, offline=frozenset({16})).build(tmp_path)).cores
    assert half[0] == Core(0, 0, 0, (0,))


def test_a_sandbox_without_files_is_of_one_piece(tmp_path: Path) -> None:
    topology = Topology.read(tmp_path)
    assert len({(core.socket, core.node, core.cache) for core in topology.cores}) == 1
    assert topology.given == {cpu for core in topology.cores for cpu in core.cpus}
    assert topology.gpus == ()


def test_what_is_given_is_the_cgroups_or_of_one_above_without_isolated_cpus(tmp_path: Path) -> None:
    assert Topology.read(replace(ONE_SOCKET, cpuset="2-5").build(tmp_path)).given == {2, 3, 4, 5}
    assert Topology.read(replace(ONE_SOCKET, cpuset="2-5", isolated="5").build(tmp_path)).given == {2, 3, 4}
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n3:cpu,cpuset:/docker/abc\n0::/\n")
    _write(tmp_path / "sys/fs/cgroup/cpuset/cpuset.cpus", "0-1")  # version 1, in a container that sees its own group
    _write(tmp_path / "sys/devices/system/cpu/isolated", "")
    assert Topology.read(tmp_path).given == {0, 1}


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({}, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"CUDA_VISIBLE_DEVICES": "4,0"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-6a,GPU-1a1b2"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "7,9,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-6a"}, None),
    ],
)
def test_gpus_are_in_the_order_of_cuda(env: dict[str, str], nodes: list[int] | None, tmp_path: Path) -> None:
    visible = Topology.read(EIGHT_GPUS.build(tmp_path)).visible_gpus(env)
    assert (None if visible is None else [gpu.node for gpu in visible]) == nodes


def test_gpus_of_the_host_that_a_container_has_not_are_left_out(tmp_path: Path) -> None:
    gpus = Topology.read(replace(EIGHT_GPUS, hidden=frozenset({0, 1, 2, 3})).build(tmp_path)).gpus
    assert [gpu.address for gpu in gpus] == ["0000:4b:00.0", "0000:5b:00.0", "0000:6b:00.0", "0000:7b:00.0"]


def test_gpus_of_several_models_are_in_an_order_that_only_cuda_knows(tmp_path: Path) -> None:
    topology = Topology.read(replace(EIGHT_GPUS, gpus=(0, 1), models=("T4", "H100")).build(tmp_path))
    assert topology.visible_gpus({}) is None
    by_address = topology.visible_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert by_address is not None
    assert [gpu.model for gpu in by_address] == ["T4", "H100"]


# By itself ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "ranks", "cpus", "threads"),
    [
        (SLICES, 4, ["0-3", "4-7", "8-11", "12-15"], 4),
        (SLICES, 2, ["0-7", "8-15"], 8),
        (SLICES, 8, ["0-3", "0-3", "4-7", "4-7", "8-11", "8-11", "12-15", "12-15"], 2),
        (TWO_BY_TWO, 2, ["0-7,16-23", "8-15,24-31"], 16),
        (TWO_BY_TWO, 4, ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"], 8),
        # Three slices for two ranks of a node: they share the node.
        (Machine((((2, 2, 2),), ((2, 2, 2),))), 4, ["0-5", "0-5", "6-11", "6-11"], 3),
        (EIGHT_GPUS, 8, ["0-15"] * 4 + ["16-31"] * 4, 4),
        # More ranks than GPUs train on the CPU.
        (replace(EIGHT_GPUS, gpus=(0, 1)), 4, ["0-15", "0-15", "16-31", "16-31"], 8),
        (replace(SLICES, cpuset="4-11"), 2, ["4-7", "8-11"], 4),
    ],
)
def test_auto_binds_where_it_takes_nothing(
    machine: Machine, ranks: int, cpus: list[str], threads: int, tmp_path: Path
) -> None:
    binding = decide(Bind.AUTO, ranks, machine.cores(tmp_path))
    assert (shown(binding), binding.threads, binding.why_not) == (cpus, threads, "")


ALL_ALIKE = "of 1 socket, 1 NUMA node, 1 L3 cache, 8 cores {} can have {}"


@pytest.mark.parametrize(
    ("machine", "ranks", "why_not"),
    [
        (ONE_SOCKET, 1, ALL_ALIKE.format("1 rank", "all of them")),
        (ONE_SOCKET, 4, ALL_ALIKE.format("4 ranks", "no part of them for each")),
        (SLICES, 3, "of 1 socket, 1 NUMA node, 4 L3 caches, 16 cores 3 ranks can have no part of them for each"),
        (replace(SLICES, offline=frozenset({5})), 4, "some ranks would have more cores than others"),
        (Machine((((3,),), ((5,),))), 2, "some ranks would have more cores than others"),
        (EIGHT_GPUS, 2, "no rank's GPU is beside 16-31, which would be idle"),
        (EIGHT_GPUS, 5, "some ranks would have more cores than others"),
        (
            replace(EIGHT_GPUS, gpus=(0, -1)),
            2,
            "the kernel does not know which cores are beside the GPU of rank 1 (0000:1b:00.0)",
        ),
    ],
)
def test_auto_leaves_ranks_alone(machine: Machine, ranks: int, why_not: str, tmp_path: Path) -> None:
    binding = decide(Bind.AUTO, ranks, machine.cores(tmp_path))
    count = len(machine.cores(tmp_path).allowed)
    assert (binding.cpus, binding.why_not, binding.threads) == ((), why_not, count // ranks)


def test_auto_respects_what_others_have_said(tmp_path: Path) -> None:
    free = SLICES.cores(tmp_path)
    assert decide(Bind.AUTO, 2, free).cpus
    for found, why_not in (
        (replace(free, allowed=frozenset(range(8))), "the affinity is set already, to 0-7 of 0-15"),
        (replace(free, quota=8.0), "the container's quota is the time of 8 cores, not fixed ones"),
        (replace(free, openmp=("OMP_PROC_BIND",)), "OpenMP binds its threads itself, by OMP_PROC_BIND"),
        (
            replace(free, unknown="which of the GPUs is which only CUDA can tell"),
            "which of the GPUs is which only CUDA",
        ),
    ):
        binding = decide(Bind.AUTO, 2, found)
        assert not binding.cpus
        assert binding.why_not.startswith(why_not)
    assert decide(Bind.AUTO, 2, replace(free, quota=16.0)).cpus


# As the user asks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "how", "ranks", "cpus", "threads"),
    [
        (ONE_SOCKET, Bind.CORES, 2, ["0-3", "4-7"], 4),
        (ONE_SOCKET, Bind.CORES, 3, ["0-1", "2-3", "4-5"], 2),
        (ONE_SOCKET, Bind.NUMA, 3, ["0-7", "0-7", "0-7"], 2),
        (ONE_SOCKET, Bind.NUMA, 20, ["0-7"] * 20, 1),
        (replace(ONE_SOCKET, offline=frozenset({0, 5})), Bind.CORES, 2, ["1-3", "4,6-7"], 3),
        # Hyper-threads stay together.
        (Machine((((4,),),), threads=2), Bind.CORES, 3, ["0,4", "1,5", "2,6"], 2),
        (Machine((((3,),),), threads=2), Bind.CORES, 2, ["0,3", "1,4"], 2),
        # What is left over stays free on its node, and no rank is on two.
        (Machine((((9,),), ((9,),))), Bind.CORES, 4, ["0-3", "4-7", "9-12", "13-16"], 4),
        # A node with fewer cores than its part of the ranks: by cores alone.
        (Machine((((1,),), ((7,),))), Bind.CORES, 4, ["0-1", "2-3", "4-5", "6-7"], 2),
        (SLICES, Bind.CORES, 8, ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"], 2),
        (TWO_BY_TWO, Bind.NUMA, 3, ["0-3,16-19", "4-7,20-23", "8-15,24-31"], 8),
        (TWO_BY_TWO, Bind.NUMA, 6, ["0-3,16-19"] * 2 + ["4-7,20-23"] + ["8-11,24-27"] * 2 + ["12-15,28-31"], 4),
        (EIGHT_GPUS, Bind.NUMA, 2, ["0-15", "0-15"], 8),
        (EIGHT_GPUS, Bind.CORES, 5, ["0-3", "4-7", "8-11", "12-15", "16-31"], 4),
        # -1 on a machine with one node says that there is no other.
        (replace(ONE_SOCKET, gpus=(-1, -1)), Bind.CORES, 2, ["0-3", "4-7"], 4),
    ],
)
def test_binding_as_asked(
    machine: Machine, how: Bind, ranks: int, cpus: list[str], threads: int, tmp_path: Path
) -> None:
    binding = decide(how, ranks, machine.cores(tmp_path))
    assert (shown(binding), binding.threads) == (cpus, threads)


def test_binding_as_asked_stays_within_the_affinity_and_the_quota(tmp_path: Path) -> None:
    found = TWO_BY_TWO.cores(tmp_path, allowed="2-5,18-21")
    assert shown(decide(Bind.CORES, 2, found)) == ["2-3,18-19", "4-5,20-21"]
    assert shown(decide(Bind.NUMA, 2, found)) == ["2-3,18-19", "4-5,20-21"]
    one_thread_each = TWO_BY_TWO.cores(tmp_path, allowed="2-5")
    assert shown(decide(Bind.CORES, 4, one_thread_each)) == ["2", "3", "4", "5"]
    limited = decide(Bind.CORES, 2, replace(found, quota=2.5))
    assert (shown(limited), limited.threads, limited.cores) == (["2-3,18-19", "4-5,20-21"], 1, 3)


def test_what_can_not_be_is_refused_with_what_to_do(tmp_path: Path) -> None:
    found = ONE_SOCKET.cores(tmp_path / "one")
    gpus = EIGHT_GPUS.cores(tmp_path / "gpus")
    lost = replace(EIGHT_GPUS, gpus=(0, -1)).cores(tmp_path / "lost")
    for how, ranks, cores, text in (
        (Bind.CORES, 9, found, "--bind cores: 9 ranks and 8 cores for them (0-7): start fewer ranks with -n"),
        (Bind.CORES, 8, replace(gpus, allowed=frozenset({0, 1, 2, *range(16, 32)})), "4 ranks and 3 cores for them"),
        (Bind.NUMA, 2, replace(found, openmp=("OMP_PLACES", "KMP_AFFINITY")), "OMP_PLACES and KMP_AFFINITY would have"),
        (Bind.NUMA, 8, replace(gpus, allowed=frozenset(range(8))), "beside the GPU of rank 4 (0000:4b:00.0) are the"),
        (Bind.NUMA, 2, lost, "the kernel does not know which cores are beside the GPU of rank 1 (0000:1b:00.0); say"),
        (
            Bind.CORES,
            2,
            replace(found, unknown="only CUDA knows"),
            "--bind cores: only CUDA knows; say --bind none, or",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            decide(how, ranks, cores)
        assert text in str(caught.value)


def test_none_is_none(tmp_path: Path) -> None:
    binding = decide(Bind.NONE, 3, SLICES.cores(tmp_path))
    assert (binding.cpus, binding.of(2), binding.threads, binding.cores) == ((), None, 5, 16)
    assert binding.describe() == "no rank is bound: --bind none"


def test_a_binding_in_words(tmp_path: Path) -> None:
    assert decide(Bind.AUTO, 8, EIGHT_GPUS.cores(tmp_path)).describe() == "ranks 0 to 3 to 0-15, ranks 4 to 7 to 16-31"
    assert in_words({5: "1,3"}) == "rank 5 to 1,3"


def test_what_speaks_against_binding_is_found(tmp_path: Path) -> None:
    root = replace(EIGHT_GPUS, gpus=(0, 1)).build(tmp_path)
    found = CoreFacts.read({"OMP_PROC_BIND": "close", "OMP_PLACES": "", "KMP_AFFINITY": "none"}, root)
    assert (found.openmp, [gpu.node for gpu in found.gpus], found.unknown) == (("OMP_PROC_BIND",), [0, 1], "")
    assert (
        CoreFacts.read({"CUDA_VISIBLE_DEVICES": "MIG-1"}, root).unknown
        == "which of the GPUs is which only CUDA can tell"
    )
    _write(root / "dev/kfd", "")
    assert CoreFacts.read({}, root).unknown == "where AMD's GPUs are attached is not looked at"
    undescribed = ONE_SOCKET.build(tmp_path / "one")
    assert CoreFacts.read({}, undescribed).unknown == ""
    _write(undescribed / "dev/nvidia0", "")
    assert CoreFacts.read({}, undescribed).unknown.startswith("the driver does not tell")
    assert CoreFacts.read({"CUDA_VISIBLE_DEVICES": ""}, undescribed).unknown == ""


def test_the_doctor_says_what_auto_would_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = SLICES.cores(tmp_path)
    monkeypatch.setattr(checks, "bind_ranks", lambda how, ranks: decide(how, ranks, found))
    for ranks, said in ((2, True), (3, False)):
        words = [each.what for each in checks.check_cores(CheckTask(ranks, tmp_path)) if "for" in each.what]
        assert any("lockstep run binds rank" in text for text in words) is said, words
    monkeypatch.setattr(facts, "bind_ranks", lambda how, _ranks: decide(how, 4, found))
    assert facts.binding().startswith("rank 0 to 0-3, rank 1 to 4-7, rank 2 to 8-11, rank 3 to 12-15 (--bind auto, ")
