"""Train with Ray on a cluster of several raylets on this machine. Run as a program: ``ray_programs NAME FOLDER``.

The last line of its output is a JSON object with what was found.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.integrations.ray import LockstepTrainer, report, save_if_preempted
from tests.faults import jobs, training
from tests.launching import wait_for
from tests.schedulers import strike

#: Bytes of each raylet's store of objects, of which these programs need next to nothing.
_STORE = 80 << 20
#: Milliseconds that a node has when it is taken away.
_DEADLINE = 8_000
_STEPS = 200


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    nodes = {"places": [2, 1], "killed": [1, 1], "preempted": [1, 1, 1], "script": [1, 1]}[name]
    # Ray counts nodes by their addresses.
    address = {"num_cpus": nodes[0], "object_store_memory": _STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=address)
    try:
        others = [
            cluster.add_node(num_cpus=cpus, object_store_memory=_STORE, node_ip_address=f"127.0.0.{number}")
            for number, cpus in enumerate(nodes[1:], 2)
        ]
        ray.init(address=cluster.address, log_to_driver=True, logging_level="warning")
        programs = {"places": places, "killed": killed, "preempted": preempted, "script": script}
        found = programs[name](folder, cluster, others)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


def places(folder: Path, _cluster: Cluster, _others: list[Any]) -> dict[str, Any]:
    """Start three workers on nodes of two and one, and a second time two on one node."""
    for run, workers in (("uneven", 3), ("packed", 2)):
        options = {"placement_strategy": "PACK"} if run == "packed" else {}
        _fit(_say_place, folder / run, ScalingConfig(num_workers=workers, **options))
    return {
        run: sorted(json.loads(file.read_text()) for file in (folder / run).glob("rank-*"))
        for run in ("uneven", "packed")
    }


def _say_place(config: dict[str, str]) -> None:
    world = lockstep.init(timeout=60)
    mean = world.mean(float(world.rank))
    backend = torch.distributed.get_backend()
    place = [world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank, backend, mean]
    (Path(config["folder"]) / f"rank-{world.rank}").write_text(json.dumps(place))


def killed(folder: Path, _cluster: Cluster, _others: list[Any]) -> dict[str, Any]:
    """Kill a worker of the training in training.py; Ray starts both anew."""

    def strike() -> None:
        wait_for(lambda: len(jobs.lines(folder, 1)) > 12, "training")
        os.kill(int((folder / "pid-0-1").read_text()), signal.SIGKILL)

    error = _disturbed(strike, lambda: _fit(_train, folder, ScalingConfig(num_workers=2), max_failures=1))
    return {"error": error, "resumed": [line["resumed"] for line in jobs.lines(folder, 0) if "resumed" in line]}


def _train(config: dict[str, str]) -> None:
    folder = Path(config["folder"])
    sys.argv = ["training.py", str(folder), "--slow", "0.05", "--save-every", "5"]
    training.main()


def script(folder: Path, _cluster: Cluster, _others: list[Any]) -> None:
    """Run the README's script, as it stands there, in each worker."""
    _fit(_run_script, folder, ScalingConfig(num_workers=2), max_failures=1)


def _run_script(config: dict[str, str]) -> None:
    os.chdir(config["folder"])
    strike.plant(Path(config["folder"], "strike", "struck"))
    runpy.run_path(str(Path(jobs.SCRIPT).parents[2] / "examples" / "train.py"))


def preempted(folder: Path, cluster: Cluster, others: list[Any]) -> dict[str, Any]:
    """Take away the node of a worker, first with a word and then the node itself; there is a third."""

    def strike() -> None:
        wait_for(lambda: len(_steps(folder)) > 5, "training")
        (node,) = [each for each in others if each.node_id in (folder / "nodes").read_text().split()][:1]
        client = ray._raylet.GcsClient(address=cluster.address)
        reason, text = 2, "the test takes it away"  # 2: DRAIN_NODE_REASON_PREEMPTION
        accepted, why = client.drain_node(node.node_id, reason, text, int(time.time() * 1000) + _DEADLINE)
        assert accepted, why
        wait_for(lambda: (folder / "saved").exists(), "the save")
        cluster.remove_node(node, allow_graceful=False)

    result: list[Any] = []
    error = _disturbed(strike, lambda: result.append(_fit(_train_and_report, folder, ScalingConfig(num_workers=2))))
    return {
        "error": error,
        "saved": json.loads((folder / "saved").read_text()),
        "steps": _steps(folder),
        "checkpoint": result[0].checkpoint.path if result else None,
        "metrics": result[0].metrics if result else None,
    }


def _steps(folder: Path) -> list[int]:
    file = folder / "steps"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def _train_and_report(config: dict[str, str]) -> None:
    folder = Path(config["folder"])
    world = lockstep.init(timeout=60)
    model = lockstep.replicate(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(4 * _STEPS, 4)), batch_size=4, shuffle=True))
    run = Path(ray.train.get_context().get_storage().experiment_fs_path) / "checkpoints"
    checkpointer = lockstep.Checkpointer(run, model=model, optimizer=optimizer, loader=loader)
    with (folder / "nodes").open("a") as nodes:
        nodes.write(f"{ray.get_runtime_context().get_node_id()}\n")
    for _ in checkpointer.epochs(1):
        for (batch,) in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.1)
            if world.is_main:
                with (folder / "steps").open("a") as steps:
                    steps.write(f"{checkpointer.step}\n")
            saved = save_if_preempted(checkpointer)
            if saved is not None and world.is_main:
                (folder / "saving").write_text(json.dumps([checkpointer.step, str(saved)]))
                (folder / "saving").rename(folder / "saved")
        report({"step": checkpointer.step}, checkpointer.save())


def _fit(train: Callable[[dict[str, str]], None], folder: Path, scaling: ScalingConfig, max_failures: int = 0) -> Any:
    folder.mkdir(exist_ok=True)
    run = RunConfig(
        storage_path=str(folder / "ray"), name="run", failure_config=FailureConfig(max_failures=max_failures)
    )
    config = {"folder": str(folder)}
    return LockstepTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


def _disturbed(strike: Callable[[], None], fit: Callable[[], Any]) -> str | None:
    """Call ``fit`` while ``strike`` happens beside it; return what the latter found wrong."""
    wrong: list[str] = []

    def striking() -> None:
        try:
            strike()
        except Exception as error:  # noqa: BLE001  (a thread's error would be lost)
            wrong.append(repr(error))

    thread = threading.Thread(target=striking)
    thread.start()
    fit()
    thread.join()
    return wrong[0] if wrong else None


if __name__ == "__main__":
    main()
