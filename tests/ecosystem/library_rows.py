"""Libraries on ranks, with lockstep's own replicas and loaders: what their users write, in one function each."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.ecosystem.ranks import Arrays, arrays, join, net, part, weights


def metrics(backend: str | None) -> Arrays:
    """torchmetrics over the sharded loader's batches; the last one has fewer samples than there are ranks."""
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

    join(backend)
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(50, 4, generator=generator, dtype=torch.float64).softmax(1)
    data = TensorDataset(scores, torch.randint(0, 4, (50,), generator=generator))
    loader: Any = DataLoader(data, batch_size=7)
    if backend is not None:
        loader = lockstep.shard(loader)
    collection = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(4, average="micro"),
            "macro": MulticlassAccuracy(4),
            "auroc": MulticlassAUROC(4),
            "auroc by thresholds": MulticlassAUROC(4, thresholds=20),
            "confusion": MulticlassConfusionMatrix(4),
        }
    ).set_dtype(torch.float64)
    mean = MeanMetric().set_dtype(torch.float64)
    for probabilities, classes in loader:
        if not len(classes):  # this rank has none of a batch that is smaller than the world; most metrics refuse that
            continue
        collection.update(probabilities, classes)
        mean.update(-probabilities[torch.arange(len(classes)), classes].log())
    return arrays([*collection.compute().items(), ("mean", mean.compute())])


def lora(backend: str | None) -> Arrays:
    """peft: adapters on a small GPT-2; all else is frozen."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import GPT2Config, GPT2LMHeadModel

    rank, size = join(backend)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = get_peft_model(
        GPT2LMHeadModel(config),
        LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    ).double()
    if backend is not None:
        model = lockstep.replicate(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(0, 64, (6, 16), generator=generator).tensor_split(size)[rank]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return arrays(get_peft_model_state_dict(model).items())


def pictures(backend: str | None, name: str) -> Arrays:
    """timm: a convolutional network or a transformer, with its moving average of the weights."""
    import timm
    from timm.utils import ModelEmaV2

    rank, size = join(backend)
    torch.manual_seed(0)
    if name == "resnet10t":
        model = timm.create_model("resnet10t", pretrained=False, num_classes=10)
    else:
        small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **small)
    model = model.double().train()
    if backend is not None:
        model = lockstep.replicate(lockstep.convert_sync_batchnorm(model))
    average = ModelEmaV2(model, decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = (
            torch.randn(6, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(0, 10, (6,), generator=generator),
        )
        inputs, targets = part(batch, rank, size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        average.update(model)
    return weights(model) | {f"average {key}": each for key, each in weights(average.module).items()}


def write_shards(folder: Path) -> str:
    """Two archives of 25 samples, as webdataset reads them; returns the pattern of their names."""
    folder.mkdir()
    generator = np.random.default_rng(5)
    write_archives(folder, [25, 25], lambda number: {"x": generator.standard_normal(12), "y": number % 25 % 4})
    return f"{folder}/data-{{0..1}}.tar"


def write_archives(folder: Path, sizes: list[int], row_at: Callable[[int], dict[str, Any]]) -> None:
    """Archives ``data-0.tar`` and so on, of as many samples as ``sizes`` says."""
    number = 0
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"data-{shard}.tar", "w") as archive:
            for _ in range(size):
                row, buffer = row_at(number), BytesIO()
                np.save(buffer, row["x"])
                for ending, content in (("npy", buffer.getvalue()), ("cls", str(row["y"]).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
                number += 1


def stream(backend: str | None, shards: str) -> Arrays:
    """webdataset through lockstep.shard: every rank reads the stream and keeps its share of each batch."""
    import webdataset

    join(backend)
    everything = lambda urls: urls  # noqa: E731
    data = (
        webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=everything, workersplitter=everything)
        .decode()
        .to_tuple("npy", "cls")
    )
    loader: Any = DataLoader(data, batch_size=7)
    return _fit(backend, loader)


def _fit(backend: str | None, loader: Any) -> Arrays:
    """Train a net on a loader's batches, which lockstep shares out if there is a backend."""
    model = net()
    if backend is not None:
        model, loader = lockstep.replicate(model), lockstep.shard(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in _pairs(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def _pairs(loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for batch in loader:
        yield (batch["x"], batch["y"]) if isinstance(batch, dict) else tuple(batch)


def _table(rows: int) -> Any:
    from datasets import Dataset

    generator = np.random.default_rng(5)
    columns = {"x": generator.standard_normal((rows, 12)), "y": generator.integers(0, 4, rows)}
    return Dataset.from_dict(columns).with_format("torch", dtype=torch.float64)


def rows_of_a_table(backend: str | None) -> Arrays:
    """datasets: a table through a DataLoader, its labels made whole numbers by a transform of the batch."""
    join(backend)

    def collate(rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows]).long()

    return _fit(backend, DataLoader(_table(50), batch_size=7, collate_fn=collate))


def reading_times(rows: int) -> tuple[float, float]:
    """Seconds of a processor that a pass over a table takes by the plain loader and the sharded one, on one rank."""
    lockstep.init("shm")
    data = _table(rows)
    plain: Any = DataLoader(data, batch_size=100, shuffle=True)
    sharded: Any = lockstep.shard(DataLoader(data, batch_size=100, shuffle=True))
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(4):
        for which, loader in enumerate((plain, sharded)):
            begun = time.process_time()
            for _batch in loader:
                pass
            times[which].append(time.process_time() - begun)
    return min(times[0]), min(times[1])
