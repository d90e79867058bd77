"""lockstep.Log and libraries that keep or make numbers, the real ones; make ecosystem has them all."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from tests.harness import run_ranks


def _needs(module: str, package: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not is_there, reason=f"needs {package} (pip install {package})")


def _log_three_lines(sink: Any) -> None:
    with lockstep.Log("run", every=2, sinks=[sink]) as log:
        for step in range(1, 7):
            log({"train/loss": torch.tensor(step / 8)}, phase="train", bad=float("nan") if step > 4 else 1.0)


def _log_to_tensorboard(folder: str) -> bool:
    import warnings

    warnings.simplefilter("ignore")  # tensorboard's own, and ours of the number that is not finite
    from torch.utils.tensorboard import SummaryWriter

    os.chdir(folder)
    world = lockstep.init()
    _log_three_lines(lambda: SummaryWriter("board"))
    return world.is_main


@_needs("tensorboard", "tensorboard")
def test_tensorboard_has_every_line(tmp_path: Path) -> None:
    run_ranks(_log_to_tensorboard, 2, str(tmp_path))
    assert len(list((tmp_path / "board").iterdir())) == 1, "rank 0 alone has a writer"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [
        (2, 0.1875),
        (4, 0.4375),
        (6, 0.6875),
    ]
    assert [str(event.value) for event in board.Scalars("bad")] == ["1.0", "1.0", "nan"]
    assert [event.step for event in board.Tensors("phase/text_summary")] == [2, 4, 6]


def _log_to_mlflow(folder: str) -> str | None:
    import warnings

    warnings.simplefilter("ignore")
    os.chdir(folder)
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_ENABLE_TELEMETRY": "false", "GIT_PYTHON_REFRESH": "quiet"}
    world = lockstep.init()

    def begin() -> Any:
        import mlflow

        mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
        mlflow.start_run()
        return mlflow

    _log_three_lines(begin)
    if not world.is_main:
        return None
    import mlflow

    run = mlflow.active_run()
    assert run is not None
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    mlflow.end_run()
    return repr([(each.step, each.value) for each in history])


@_needs("mlflow", "mlflow-skinny")
def test_mlflow_has_every_line(tmp_path: Path) -> None:
    said = run_ranks(_log_to_mlflow, 2, str(tmp_path))
    assert said == ["[(2, 0.1875), (4, 0.4375), (6, 0.6875)]", None]


def _log_metrics(folder: str, backend: str) -> None:
    """torchmetrics in an evaluation as docs/metrics.md shows it; some ranks have none of the last batch."""
    from torch.utils.data import DataLoader, TensorDataset
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

    lockstep.init(backend)
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(50, 4, generator=generator, dtype=torch.float64).softmax(1)
    data = TensorDataset(scores, torch.randint(0, 4, (50,), generator=generator))
    metrics = MetricCollection(
        {"accuracy": MulticlassAccuracy(4, average="micro"), "auroc": MulticlassAUROC(4), "f1": MulticlassF1Score(4)}
    ).set_dtype(torch.float64)
    mean = MeanMetric().set_dtype(torch.float64)
    with lockstep.Log(folder) as log, torch.no_grad():
        for outputs, targets in lockstep.shard(DataLoader(data, batch_size=7)):
            largest = outputs.amax(1)
            if len(targets):
                metrics.update(outputs, targets)
                mean.update(largest)
            log(largest=largest.mean())
        log.line()
        log({**metrics.compute(), "mean": mean.compute()})


@_needs("torchmetrics", "torchmetrics")
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_torchmetrics_and_the_log_count_each_sample_once(tmp_path: Path, backend: str) -> None:
    found = []
    for world_size in (1, 3):
        run_ranks(_log_metrics, world_size, str(tmp_path / str(world_size)), backend)
        lines = (tmp_path / str(world_size) / "metrics.jsonl").read_text().splitlines()
        first, second = (json.loads(line) for line in lines)
        found.append({**first, **second})
        assert second["mean"] == pytest.approx(first["largest"], rel=1e-12)
    one, three = ({key: value for key, value in each.items() if key != "time"} for each in found)
    assert sorted(one) == ["accuracy", "auroc", "f1", "largest", "mean", "step"]
    assert three == pytest.approx(one, rel=1e-12)
