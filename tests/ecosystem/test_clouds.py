"""Runs whose checkpoints are in Google's store or Azure's: what is tested of S3, and what these two do their way."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep import knobs
from tests.ecosystem.clouds import Azure, Google
from tests.launching import LIMIT, run
from tests.ranks import test_store_checkpoints as of_s3
from tests.ranks.test_store_checkpoints import _on_ranks, _parts
from tests.stores import Served

_KINDS: dict[str, Callable[[Path], Served]] = {"gs": Google, "az": Azure}


@pytest.fixture(scope="module", params=[*_KINDS])
def kind(request: pytest.FixtureRequest) -> Callable[[Path], Served]:
    found: Callable[[Path], Served] = _KINDS[request.param]
    return found


@pytest.fixture(scope="module")
def server(kind: Callable[[Path], Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = kind(tmp_path_factory.mktemp("store"))
    yield running
    running.close()


@pytest.fixture
def fresh(kind: Callable[[Path], Served], tmp_path: Path) -> Iterator[Served]:
    """A server for one test."""
    running = kind(tmp_path)
    yield running
    running.close()


store = of_s3.store

test_resumed = of_s3.test_a_run_resumes_from_a_store_with_the_same_bits
test_commands = of_s3.test_commands_look_at_a_store_as_at_a_disk
test_one_owner = of_s3.test_a_run_in_a_store_has_one_owner
test_one_creates = of_s3.test_of_ranks_that_create_one_object_one_does
test_failing = of_s3.test_a_store_that_refuses_is_full_or_slow_is_an_error_on_every_rank_or_none
test_killed_server = of_s3.test_a_server_that_is_killed_in_the_middle_of_a_save_loses_nothing
test_end = of_s3.test_a_process_that_ends_waits_for_its_save_to_a_store_and_lets_go
test_killed_owner = of_s3.test_a_job_goes_on_at_once_after_its_owner_was_killed


# Requests.


def _requests(scheme: str) -> dict[str, object]:
    from lockstep.checkpoint.object_store import ObjectStore

    store = ObjectStore.opened(scheme)
    content = bytes(range(256)) * 2**10
    said: dict[str, object] = {
        "created": [store.create("bucket/run/a", word) for word in (b"1", b"2", b"1")],
        "read": store.get("bucket/run/a"),
        "empty": [store.create("bucket/run/b/manifest.json", word) for word in (b"", b"x")],
    }
    store.put("bucket/run/b/c", content[1:])
    store.put("bucket/run/b/c", content)
    said["range"] = store.get_range("bucket/run/b/c", 250, 1030) == content[250:1030]
    said["whole"] = store.get("bucket/run/b/c") == content
    said["listed"] = [store.sizes(f"bucket/{prefix}") for prefix in ("run", "run/b", "ru", "run/a", "none")]
    store.remove(["bucket/run/a", "bucket/run/a", "bucket/run/none"])
    said["left"] = store.sizes("bucket/run")
    try:
        store.get("bucket/run/a")
    except FileNotFoundError:
        said["removed"] = True
    names = ("a b", "a#1", "a?x", "a%20b", "a+b", "\u00e4", "a&b=c")
    for name in names:
        store.create(f"bucket/{name}/x", name.encode())
    said["names"] = [store.get(f"bucket/{name}/x").decode() for name in names if store.sizes(f"bucket/{name}")]
    store.remove(f"bucket/{name}/x" for name in names)
    said["names left"] = [store.sizes(f"bucket/{name}") for name in names]
    return said


def test_each_request_does_what_it_says(store: Served) -> None:
    (said,) = _on_ranks(store, 1, _requests, store.scheme)
    inner = {"manifest.json": 0, "c": 2**18}
    below = {f"b/{name}": size for name, size in inner.items()}
    assert said == {
        "created": [True, False, True],
        "read": b"1",
        "empty": [True, False],
        "range": True,
        "whole": True,
        "listed": [{"a": 1, **below}, inner, {}, {}, {}],
        "left": below,
        "removed": True,
        "names": ["a b", "a#1", "a?x", "a%20b", "a+b", "\u00e4", "a&b=c"],
        "names left": [{}] * 7,
    }


# Errors.


def _refused(address: str, changes: dict[str, str]) -> str:
    """What a Checkpointer says; a variable that is changed to nothing is removed."""
    for name, value in changes.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    lockstep.init()
    with pytest.raises(lockstep.CheckpointError) as caught:
        lockstep.Checkpointer(address, model=_parts()[0])
    return str(caught.value)


def _same(said: list[str]) -> str:
    """What every rank said, without the rank that it names."""
    assert len({each.split("rank 0: ")[-1] for each in said}) == 1
    return said[0]


#: With these times a request that was sent again would take ten minutes.
_PATIENT = {knobs.TIMES: "1,outage=600"}


def test_a_bucket_that_is_missing_is_said_at_once(store: Served) -> None:
    said = _same(_on_ranks(store, 2, _refused, f"{store.scheme}://nowhere/run", _PATIENT))
    assert f"{store.scheme}://nowhere/run" in said
    assert "there is no such bucket: make it first" in said


def test_a_wrong_account_is_said_at_once(store: Served) -> None:
    if store.scheme == "gs":
        store.answer("nobody")
        said = _same(_on_ranks(store, 2, _refused, store.address, _PATIENT))
        assert "the store refuses it: Anonymous caller does not have access, 401 (gcsfs found no account" in said
    else:
        wrong = store.environment["AZURE_STORAGE_CONNECTION_STRING"].replace("AccountKey=Eby8", "AccountKey=Aby8")
        changes = _PATIENT | {"AZURE_STORAGE_CONNECTION_STRING": wrong}
        said = _same(_on_ranks(store, 2, _refused, store.address, changes))
        assert "the store refuses it: AuthorizationFailure: Server failed to authenticate the request." in said


def test_no_account_is_said_at_once(store: Served) -> None:
    if store.scheme == "gs":
        pytest.skip("gcsfs is nobody then, whom a bucket may know")
    said = _same(_on_ranks(store, 2, _refused, store.address, _PATIENT | {"AZURE_STORAGE_CONNECTION_STRING": "x"}))
    assert "az://: it can't be opened: " in said
    assert "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and" in said


def test_a_server_of_accounts_that_does_not_answer_is_not_waited_for_without_end(store: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = f"127.0.0.1:{silent.getsockname()[1]}"
        if store.scheme == "gs":
            asked = dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"), there)
            changes = asked | {"NO_GCE_CHECK": "false", knobs.TIMES: "1,outage=1,request=2"}
            words = "gs://: gcsfs.extended_gcsfs was not ready within 2.00 s: it asks for an account at a server"
        else:
            changes = {"AZURE_POD_IDENTITY_AUTHORITY_HOST": f"http://{there}", "AZURE_STORAGE_ACCOUNT_NAME": "nobody"}
            changes |= {"AZURE_STORAGE_CONNECTION_STRING": "", knobs.TIMES: "1,outage=1,request=2"}
            words = "the store did not do it, 1 attempt in .*TimeoutError: no answer within 2.00 s"
        assert re.search(words, _same(_on_ranks(store, 2, _refused, store.address, changes)))


# What is left.

_FORKS = """
import os, sys
from lockstep.checkpoint.object_store import ObjectStore

store = ObjectStore.opened(sys.argv[1])
store.create("bucket/fork/parent", b"1")
child = os.fork()
if not child:
    ObjectStore.opened(sys.argv[1]).create("bucket/fork/child", b"1")
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sorted(store.sizes("bucket/fork")))
"""


def test_a_forked_process_uses_the_store_and_ends(store: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS, store.scheme],
        env=os.environ | store.environment | {knobs.TIMES: "1,outage=1,request=20"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0 ['child', 'parent']\n", "")


_WORKS = """
import sys
import torch, lockstep
from torch.utils.data import DataLoader, TensorDataset

world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(3, 1))
loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(16, 3)), 4, num_workers=2))
saved = lockstep.Checkpointer(sys.argv[1], model=model, loader=loader)
for epoch in saved.epochs(2):
    for (rows,) in loader:
        model(rows).sum().backward()
    saved.save()
world.print("trained")
"""


def test_a_job_with_workers_leaves_nothing_and_says_nothing(store: Served, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WORKS)
    command = ["lockstep", "run", "-n", "2", "train.py", f"{store.address}-works"]
    done = run(command, tmp_path, torch=True, **store.environment)
    assert (done.code, done.out, done.err) == (0, "trained\n", "")
    assert '"released": true' in store.read("run-works/owner-00000001.json")


_KILLED = """
import hashlib, os, signal, sys
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world = lockstep.init()
torch.manual_seed(3)
model = lockstep.replicate(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = torch.arange(160.0).reshape(40, 4)
loader = lockstep.shard(DataLoader(TensorDataset(rows.sin(), rows.sum(1, keepdim=True).cos()), 8, shuffle=True))
saved = lockstep.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, loader=loader)
for epoch in saved.epochs(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if saved.step == 7 and sys.argv[2:] == ["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if saved.step % 3 == 0:
            saved.async_save()
saved.wait()
values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
world.print(saved.step, hashlib.sha256(values.numpy().tobytes()).hexdigest())
"""


def test_a_job_that_is_killed_resumes_with_the_same_bits(store: Served, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_KILLED)
    command, address = ["lockstep", "run", "-n", "2", "train.py"], f"{store.address}-killed"

    def job(*args: str) -> tuple[int, str]:
        done = run([*command, *args], tmp_path, torch=True, **store.environment)
        return done.code, done.out

    killed, _ = job(address, "dies")
    assert killed != 0
    assert "run-killed/step-00000003/manifest.json" in store.objects(), "and that of step 6 if it was soon enough"
    straight = job(f"{address}-not")
    assert straight[0] == 0
    assert straight[1].startswith("10 ")
    assert job(address) == straight
    assert '"released": true' in store.read("run-killed/owner-00000002.json")
