"""``python -m lockstep.launch`` means what ``python -m torch.distributed.launch`` means."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lockstep.launch.ports import free_port
from tests.launching import run, start

_LOCAL_RANK = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', default=-1, type=int,
                    help='node rank for distributed training')
args, rest = parser.parse_known_args()
print(args.local_rank, rest)
"""


@pytest.mark.parametrize("option", ["--nproc_per_node=3", "--nproc-per-node=3"])
def test_each_rank_gets_its_local_rank_as_an_argument(tmp_path: Path, option: str) -> None:
    (tmp_path / "test.py").write_text(_LOCAL_RANK)
    done = run(["lockstep.launch", option, "test.py", "--lr", "1"], tmp_path)
    assert sorted(done.out.splitlines()) == [f"{rank} ['--lr', '1']" for rank in range(3)], done


def test_the_argument_is_spelled_as_torch_does_today_or_as_the_script_knows_it(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "dash.py").write_text(_LOCAL_RANK.replace("--local_rank", "--local-rank"))
    options = ["--standalone", "--nnodes=1:1", "--nproc_per_node=cpu"]
    cores = len(os.sched_getaffinity(0))
    done = run(["lockstep.launch", *options, "dash.py"], tmp_path)
    assert sorted(done.out.splitlines()) == [f"{rank} []" for rank in range(cores)], done
    (tmp_path / "alone").mkdir()
    (tmp_path / "none.py").rename(tmp_path / "alone" / "none.py")
    assert run(["lockstep.launch", "alone/none.py"], tmp_path).out == "['--local-rank=0']\n"
    assert run(["lockstep.launch", "--use-env", "alone/none.py"], tmp_path).out == "[]\n"
    style = "--local-rank-style=underscore"
    assert run(["lockstep.launch", style, "alone/none.py"], tmp_path).out == "['--local_rank=0']\n"


def test_a_script_without_a_launcher_sees_its_own_default(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(_LOCAL_RANK)
    assert run(["test"], tmp_path).out == "-1 []\n"


_ENVIRONMENT = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
print(*[os.environ[name] for name in names], sys.argv[1:], "LOCKSTEP_STORE" in os.environ)
"""


def test_the_environment_of_the_second_of_two_machines(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(_ENVIRONMENT)
    nodes = ["--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=1234"]
    done = run(["lockstep.launch", "--nproc_per_node=2", *nodes, "--use_env", "test.py"], tmp_path)
    assert sorted(done.out.splitlines()) == [
        "2 0 4 2 1 node0 1234 [] False",
        "3 1 4 2 1 node0 1234 [] False",
    ], done


def test_several_machines_agree_on_a_port_without_talking(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(_ENVIRONMENT)
    done = run(["lockstep.launch", "--nnodes=2", "--node_rank=1", "--use_env", "test.py"], tmp_path)
    assert done.out == "1 0 2 1 1 127.0.0.1 29500 [] False\n", done


def test_modules(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(_LOCAL_RANK)
    assert run(["lockstep.launch", "-m", "test"], tmp_path).out == "0 []\n"


_WORLD = """
import sys, torch, torch.distributed as dist
if "torch" in sys.argv: dist.init_process_group("gloo")
else:
    import lockstep; lockstep.init()
total = torch.tensor([10 ** dist.get_rank()])
dist.all_reduce(total)
print(dist.get_rank(), total.item())
"""


@pytest.mark.parametrize("api", ["torch", "lockstep"])
def test_two_invocations_make_one_world(tmp_path: Path, api: str) -> None:
    (tmp_path / "train.py").write_text(_WORLD)
    port = free_port()
    command = ["lockstep.launch", "--nproc_per_node=2", "--nnodes=2", f"--master_port={port}", "--use_env"]
    other_node = [*command, "--node_rank=1"]
    if api == "lockstep":  # what the other command starts is a part of the same world
        meeting = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", f"{port}"]
        other_node = ["lockstep", "run", "-n", "2", *meeting, "--log-dir", "logs", "--all-output"]
    with start([*other_node, "train.py", api], tmp_path, torch=True) as second:
        first = run([*command, "--node_rank=0", "train.py", api], tmp_path, torch=True)
        other = second.finish()
    others = other.out.replace("[3] ", "")
    assert sorted(first.out.splitlines() + others.splitlines()) == [f"{rank} 1111" for rank in range(4)], (
        first,
        other,
    )
    assert (first.code, other.code) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc_per_node=0", "test.py"], "--nproc_per_node 0: expected a whole number of ranks"),
        (["--nnodes=2", "--node_rank=2", "test.py"], "--node_rank=2 does not fit --nnodes=2"),
        (["--nnodes=1:2", "test.py"], "the number of machines can change only if the launchers find each other"),
        (["--nnodes=2", "--standalone", "test.py"], "--standalone is for jobs on one machine"),
        (["--no_python", "./program"], "--no_python: the ranks are forked from a Python process"),
        (["nosuch.py"], "script not found: nosuch.py"),
        (["--nosuch", "test.py"], "No such option"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "test.py").write_text(_LOCAL_RANK)
    done = run(["lockstep.launch", *arguments], tmp_path)
    assert done.code == 2, done
    assert text in done.err.splitlines()[-1]


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text("open('started', 'w')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run(["lockstep.launch", f"--master_port={port}", "test.py"], tmp_path)
    assert done.code == 2
    assert done.err == f"lockstep.launch: port {port} is in use on this machine: choose another with --master_port\n"
    assert not (tmp_path / "started").exists()


def test_another_machines_port_is_not_ours_to_check(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(_LOCAL_RANK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = ["--nnodes=2", "--node_rank=1", f"--master_port={server.getsockname()[1]}"]
        assert run(["lockstep.launch", *options, "test.py"], tmp_path).code == 0


def test_a_failing_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('no')\n")
    done = run(["lockstep.launch", "--nproc_per_node=2", "test.py"], tmp_path)
    assert done.code == 1
    assert "lockstep: rank 1 of 2 failed: exit code 1\nValueError: no (its traceback is above)" in done.err
