"""What a job is, before anything runs: ranks, environment, arguments, and programs that are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep import EnvironmentMismatch, knobs
from lockstep.identity import Identity
from lockstep.launch import __main__ as torchs_command
from lockstep.launch.spec import (
    JobSpec,
    NodeOptions,
    NodePlace,
    Program,
    check_program,
    local_rank_option,
    node_place,
    parse_nodes,
    parse_ranks,
    rank_environment,
    sources_of,
)
from lockstep.rendezvous.messages import Options, Round


@pytest.mark.parametrize(
    ("text", "cores", "gpus", "ranks"),
    [("3", 64, 8, 3), ("auto", 64, 8, 8), ("auto", 7, 0, 3), ("auto", 1, 0, 1), ("cpu", 6, 2, 6), ("gpu", 6, 2, 2)],
)
def test_the_number_of_ranks(text: str, cores: int, gpus: int, ranks: int) -> None:
    assert parse_ranks(text, cores=cores, gpus=gpus) == ranks


def test_torchs_launcher_has_one_rank_for_each_core_where_there_is_no_gpu() -> None:
    assert parse_ranks("auto", cores=6, gpus=0, auto=6) == 6
    with pytest.raises(ValueError, match="no GPU on this machine"):
        parse_ranks("gpu", cores=6, gpus=0)


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5"])
def test_a_number_of_ranks_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number of ranks, at least 1, or 'auto', 'gpu' or 'cpu'"):
        parse_ranks(text, cores=4, gpus=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nproc": 0}, "at least 1"),
        ({"nnodes": 0}, "--nnodes=0"),
        ({"node_rank": 2, "nnodes": 2}, "expected 0 to 1"),
        ({"node_rank": -1}, "expected 0 to 0"),
        ({"master_port": 0}, "--master_port=0"),
        ({"master_port": 70000}, "--master_port=70000"),
        ({"grace": -1.0}, "--grace=-1"),
        ({"max_time": 10.0}, r"--max-time=10 s: expected more than --grace=10 s"),
        ({"max_time": float("nan")}, "--max-time=nan s"),
        ({"grace": float("nan")}, "--grace=nan"),
    ],
)
def test_a_job_that_makes_no_sense(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JobSpec(Program("train.py"), **{"nproc": 2, **options})  # type: ignore[arg-type]


def test_every_node_gives_its_ranks_the_numbers_that_follow() -> None:
    spec = JobSpec(Program("train.py"), nproc=3, nnodes=2, node_rank=1)
    assert spec.round("node0", 1234).identity(2) == Identity(5, 6, 2, 3, 1, launched=True)


def test_machines_may_have_different_numbers_of_ranks() -> None:
    round_ = Round(node_rank=1, ranks=(3, 2, 4), address="node0", port=1234)
    assert (round_.world_size, list(round_.local_ranks)) == (9, [3, 4])
    assert round_.identity(1) == Identity(4, 9, 1, 2, 1, launched=True)


def test_the_local_rank_is_the_first_argument_if_asked_for() -> None:
    program = Program("train.py", ("--lr", "1"))
    assert JobSpec(program, nproc=2, local_rank_option="--local_rank").arguments(1) == ["--local_rank=1", "--lr", "1"]
    assert JobSpec(program, nproc=2).arguments(1) == ["--lr", "1"]


def test_what_a_rank_reads_is_what_the_launcher_wrote() -> None:
    round_ = Round(node_rank=1, ranks=(3, 3), address="node0", port=1234)
    env = rank_environment(round_, 2, folder="/job")
    assert Identity.from_environment({k: v for k, v in env.items() if v is not None}) == round_.identity(2)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node0", "1234")
    assert env[knobs.STORE] is None  # unset: the nodes meet at the port
    assert env[knobs.JOB_DIR] == "/job"
    assert env["TORCHELASTIC_RESTART_COUNT"] == env[knobs.RESTART] == "0"
    assert "GLOO_SOCKET_IFNAME" not in env
    assert "OMP_NUM_THREADS" not in env
    assert env[knobs.WORLD] is None  # unset: only a scheduler has a name for the job
    assert env[knobs.CORES] is None  # unset: a rank that starts a job of its own has been bound, and its ranks are not
    assert rank_environment(round_, 2, folder="/job", cores=96)[knobs.CORES] == "96"


def test_one_machine_meets_in_a_file_over_the_loopback_device() -> None:
    env = rank_environment(Round(0, (2,), "127.0.0.1", 1234), 0, folder="/job", interface="lo")
    assert env[knobs.STORE] == "/job/store"
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_of_a_schedulers_job_know_its_name() -> None:
    spec = JobSpec(Program("train.py"), nproc=2, nnodes=2, world="Slurm's job 7, step 0")
    assert rank_environment(spec.round("n0", 1234), 0, folder="/job")[knobs.WORLD] == "Slurm's job 7, step 0"


@pytest.mark.parametrize(
    ("target", "is_module", "word"), [("dir/train it.py", False, "train_it"), ("pkg.train", True, "pkg.train")]
)
def test_a_program_has_a_word_for_a_folder(target: str, is_module: bool, word: str) -> None:
    assert Program(target, is_module=is_module).name == word


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules that must not be run by looking for them."""
    for name in ("pkg/__init__.py", "pkg/train.py", "pkg/sub/__init__.py", "pkg/sub/__main__.py", "bare/script.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the launcher ran the user\\'s code')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["pkg.train", "pkg.sub", "pkg.sub.__main__", "bare.script", "json.tool", "this"])
def test_modules_are_found_without_running_them(packages: Path, name: str) -> None:
    before = set(sys.modules)
    check_program(Program(name, is_module=True))
    assert not {module for module in set(sys.modules) - before if module.startswith(("pkg", "bare"))}
    assert packages.exists()


@pytest.mark.parametrize(
    ("target", "is_module", "text"),
    [
        ("nosuch.py", False, "script not found: nosuch.py"),
        ("pkg.train", False, "to run the module pkg.train, say -m pkg.train"),
        ("pkg", False, "pkg is a folder"),
        ("nosuch", True, "module not found: nosuch"),
        ("pkg.nosuch", True, "module not found: pkg.nosuch"),
        ("pkg.train.deeper", True, "module not found: pkg.train.deeper"),
        ("pkg", True, "a package without a __main__ module"),
        ("train.py/", True, "not a module's name"),
    ],
)
def test_programs_that_are_not_there(packages: Path, target: str, is_module: bool, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_program(Program(target, is_module=is_module))
    assert packages.exists()


@pytest.mark.parametrize(
    ("sources", "option"),
    [
        ([], "--local-rank"),
        (["print('no parser')"], "--local-rank"),
        (["p.add_argument('--local_rank', type=int)"], "--local_rank"),
        (['p.add_argument("--local-rank")'], "--local-rank"),
        (['p.add_argument("--local_rank", "--local-rank")'], "--local-rank"),
        (
            ["from options import parser", 'p.add_argument("--local_rank")', 'p.add_argument("--local-rank")'],
            "--local_rank",
        ),
        (["# torch 1 passed --local_rank\np.add_argument('--local_rank_of_old')"], "--local-rank"),
    ],
)
def test_the_local_rank_is_spelled_as_the_script_knows_it(sources: list[str], option: str) -> None:
    assert local_rank_option(sources) == option


def test_a_programs_own_text_comes_before_its_neighbours(packages: Path) -> None:
    (packages / "pkg" / "train.py").write_text("own")
    (packages / "pkg" / ".hidden.d").mkdir()
    (packages / "pkg" / ".hidden.d" / "x.py").write_text("hidden")
    for target, is_module in (("pkg/train.py", False), ("pkg.train", True)):
        found = list(sources_of(Program(target, is_module=is_module)))
        assert (found[0], found.count("own"), "hidden" in found, len(found)) == ("own", 2, False, 5)


def test_the_data_beside_a_program_is_not_searched_for_ever(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"class-{number:03d}").mkdir()
        (tmp_path / f"class-{number:03d}" / "x.py").write_text(str(number))
    (tmp_path / "train.py").write_text("own")
    assert len(list(sources_of(Program(str(tmp_path / "train.py"), is_module=False)))) <= 102


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("3", (3, 3)), ("1:1", (1, 1)), ("2:4", (2, 4))])
def test_the_number_of_machines(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["two", ":", "3:2", "0:2", "0", "1:2:3", "-1"])
def test_a_number_of_machines_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_nodes(text)


_RDZV: dict[str, Any] = {"rdzv": "host0", "nnodes": "2"}


def test_machines_that_find_each_other() -> None:
    place = node_place(NodeOptions(rdzv="host0:1234", rdzv_id="a", nnodes="1:3", local_addr="10.0.0.1"), {})
    assert place.rendezvous == Options("host0:1234", "a", 1, 3, ranks=0, join_timeout=600.0, local_addr="10.0.0.1")
    assert node_place(NodeOptions(**_RDZV), _SRUN).rendezvous is not None, "what the user says comes first"


def test_pods_of_an_elastic_job_find_each_other() -> None:
    env = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "1:4"}
    place = node_place(NodeOptions(), {**env, "PET_MAX_RESTARTS": "5", "PET_NPROC_PER_NODE": "2"})
    found = place.rendezvous
    assert found is not None
    assert (found.endpoint, found.min_nodes, found.max_nodes) == ("job-worker-0:23456", 1, 4)
    assert (place.ranks, place.restarts) == ("2", 5)
    assert node_place(NodeOptions(standalone=True), {**env, "PET_NNODES": "1"}) == NodePlace()
    with pytest.raises(EnvironmentMismatch, match="PET_RDZV_BACKEND=c10d is set but PET_RDZV_ENDPOINT is not"):
        node_place(NodeOptions(), {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2"})


def test_such_a_pod_may_start_torchs_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a job of its own on each."""
    says = {"RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": "job-worker-0:23456", "NNODES": "2", "MAX_RESTARTS": "5"}
    for name, value in says.items():
        monkeypatch.setenv(f"PET_{name}", value)
    asked: list[JobSpec] = []

    def run(spec: JobSpec) -> int:
        asked.append(spec)
        return 0

    monkeypatch.setattr(torchs_command, "run", run)
    done = CliRunner().invoke(torchs_command.main, ["--nproc_per_node=2", "--use_env", __file__])
    assert done.exit_code == 0, done.output
    found = asked[0].rendezvous
    assert found is not None
    assert (found.endpoint, found.min_nodes, found.ranks) == ("job-worker-0:23456", 2, 2)
    assert asked[0].max_restarts == 5


def test_a_shared_folder_is_a_rendezvous(tmp_path: Path) -> None:
    place = node_place(NodeOptions(rdzv=f"file:{tmp_path}", nnodes="2", rdzv_id="a"), {})
    assert place.rendezvous is not None
    assert place.rendezvous.endpoint == f"file:{tmp_path}/a.rendezvous"


#: What a rank of a job finds, and with it a launcher that it starts.
_RANK = {"LOCKSTEP_JOB_DIR": "/tmp/x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_a_rank_can_start_a_job_of_its_own() -> None:
    alone = {name: value for name, value in _RANK.items() if name != "RANK"}
    assert node_place(NodeOptions(), alone) == node_place(NodeOptions(), {})
    assert node_place(NodeOptions(), {**_RANK, "RANK": "0", "WORLD_SIZE": "1"}) == node_place(NodeOptions(), {})


@pytest.mark.parametrize(
    ("options", "env", "text"),
    [
        ({"nnodes": "1:2"}, {}, "--nnodes=1:2: the number of machines can change only if .* give --rdzv HOST"),
        ({"rdzv": "host0"}, {}, "say how many machines there are"),
        ({**_RDZV, "node_rank": 1}, {}, "the machines number themselves; drop --node-rank"),
        ({**_RDZV, "master_addr": "x"}, {}, "drop --master-addr"),
        ({**_RDZV, "standalone": True}, {}, "--standalone is for jobs on one machine"),
        ({**_RDZV, "rdzv": "a:b:c"}, {}, "expected HOST, HOST:PORT or file:FOLDER"),
        ({**_RDZV, "rdzv": "file:/nowhere"}, {}, "not a folder"),
        ({**_RDZV, "join_timeout": 0.0}, {}, "--join-timeout=0: expected a positive number"),
        (_RDZV, {"LOCKSTEP_KEY": "/nowhere"}, "LOCKSTEP_KEY is neither 64 hexadecimal digits nor a file"),
        (_RDZV, {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started 2"),
        (_RDZV, _RANK, "started by rank 1 of a job of 2"),
    ],
)
def test_a_rendezvous_that_makes_no_sense_is_refused(options: dict[str, Any], env: dict[str, str], text: str) -> None:
    with pytest.raises((ValueError, EnvironmentMismatch), match=text):
        node_place(NodeOptions(**options), env)


def test_a_key_is_read_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ab" * 32 + "\n")
    (tmp_path / "key").chmod(0o600)
    place = node_place(NodeOptions(**_RDZV), {"LOCKSTEP_KEY": str(tmp_path / "key")})
    assert place.rendezvous is not None
    assert place.rendezvous.key == "ab" * 32
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(EnvironmentMismatch, match="others can read it"):
        node_place(NodeOptions(**_RDZV), {"LOCKSTEP_KEY": str(tmp_path / "key")})


_SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
_TRAINER = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0",
    "PET_MASTER_PORT": "29400",
}
_POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    ("options", "env", "place"),
    [
        ({}, {}, NodePlace()),
        ({"nnodes": "2", "node_rank": 1, "master_addr": "n0"}, {}, NodePlace(2, 1, "n0")),
        ({"nnodes": "2", "node_rank": 1, "master_addr": "n0"}, _SRUN, NodePlace(2, 1, "n0")),
        (
            {},
            {**_SRUN, "MASTER_ADDR": "fast0", "MASTER_PORT": "1234"},
            NodePlace(2, 1, "fast0", 1234, world="Slurm's job 7, step 0"),
        ),
        ({}, _TRAINER, NodePlace(3, 1, "train-node-0", 29400, "2")),
        ({}, {**_SRUN, **_TRAINER}, NodePlace(3, 1, "train-node-0", 29400, "2")),
        ({"nnodes": "3", "master_port": 1234}, _TRAINER, NodePlace(3, 1, "train-node-0", 1234, "2")),
        ({}, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu"}, NodePlace(1, 0, None, None, "gpu")),
        ({"nnodes": "2", "master_addr": "j-0.s"}, {"JOB_COMPLETION_INDEX": "1"}, NodePlace(2, 1, "j-0.s")),
        ({"nnodes": "2"}, {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "j-0.s"}, NodePlace(2, 1, "j-0.s")),
        ({"standalone": True}, {"JOB_COMPLETION_INDEX": "1"}, NodePlace()),
        ({"master_addr": "n0"}, {**_SRUN, **_MPIRUN}, NodePlace(2, 1, "n0")),
        (
            {"master_addr": "fast0", "master_port": 1234},
            _SRUN,
            NodePlace(2, 1, "fast0", 1234, world="Slurm's job 7, step 0"),
        ),
        ({}, _POD, NodePlace(3, 2, "train-master-0", 23456)),
        ({}, {**_POD, **_TRAINER}, NodePlace(3, 1, "train-node-0", 29400, "2")),
        ({}, {**_POD, "WORLD_SIZE": "1", "RANK": "0"}, NodePlace()),
        ({}, {**_POD, "LOCAL_RANK": "0"}, NodePlace()),
    ],
)
def test_a_machines_place_is_the_users_or_the_schedulers(
    options: dict[str, Any], env: dict[str, str], place: NodePlace
) -> None:
    assert node_place(NodeOptions(**options), env) == place


def test_machines_of_a_step_of_slurm_meet_at_its_first() -> None:
    place = node_place(NodeOptions(), _SRUN)
    assert (place.nnodes, place.node_rank, place.master_addr) == (2, 1, "n1")
    other = node_place(NodeOptions(), {**_SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert (other.node_rank, other.master_port) == (0, place.master_port)


@pytest.mark.parametrize(
    ("options", "env", "text"),
    [
        ({"nnodes": "1"}, _SRUN, "a job on 1 machine, but srun started it on 2, of which this is number 1"),
        ({"nnodes": "3"}, _SRUN, "a job on 3 machines, but srun started it on 2"),
        ({"standalone": True}, _SRUN, "a job on 1 machine, but srun started it on 2"),
        ({}, {**_SRUN, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1",
              "SLURM_LOCALID": "1"}, "srun started 2 tasks, 2 of them on one machine"),
        ({}, {"PET_NNODES": "2"}, "PET_NODE_RANK is not"),
        ({}, {"PET_NNODES": "1:4"}, "PET_NNODES=1:4: the number of machines can change only"),
        ({}, {"JOB_COMPLETION_INDEX": "1"}, "this is machine 1 of the job, but not of how many: pass --nnodes"),
        ({"nnodes": "2"}, {"JOB_COMPLETION_INDEX": "1"}, "machine 1 of 2, but not where they meet: pass --master-addr"),
        ({}, {**_MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun started 2 launchers on this machine"),
        ({}, {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started 2 of this launcher"),
        ({}, _RANK, "each rank would start a job of its own: .* if this rank alone .* env -u RANK lockstep run"),
    ],
)  # fmt: skip
def test_a_place_that_makes_no_sense_is_refused(options: dict[str, Any], env: dict[str, str], text: str) -> None:
    with pytest.raises(EnvironmentMismatch, match=text):
        node_place(NodeOptions(**options), env)


def test_what_should_be_alike_has_the_text_of_the_program_and_not_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def what_runs(program: Program) -> str:
        return JobSpec(program, nproc=2).alike()["what they run"]

    for folder, text in (("a", "raise SystemExit\n"), ("b", "raise SystemExit\n"), ("c", "raise SystemExit(1)\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "once.py").write_text(text)
    first, same, other = (what_runs(Program(str(tmp_path / folder / "once.py"))) for folder in "abc")
    assert re.fullmatch(r"once\.py \(digest [0-9a-f]{8}\)", first)
    assert first == same != other
    monkeypatch.chdir(tmp_path / "c")
    assert what_runs(Program("once", is_module=True)) == f"-m once{other.removeprefix('once.py')}"
    assert "once" not in sys.modules, "it is not imported"
    (tmp_path / "c" / "once.py").write_text("raise SystemExit\n")
    assert what_runs(Program("once.py")) == first, "as it is now, since a start runs what is there by then"
    assert what_runs(Program("-", text=b"raise SystemExit\n")) == f"-{first.removeprefix('once.py')}"
    (tmp_path / "c" / "once.py").unlink()
    assert what_runs(Program("once.py")).startswith("once.py (can't be read: ")
    assert what_runs(Program("once", is_module=True)).startswith("-m once (can't be read: ")
