"""Rows are gathered from the tests and printed at the end; ``--write`` keeps the table with the benchmarks' results."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import warm
from tests.ecosystem.table import Row, markdown

#: No row may reach for the network, and no library may tell anybody that it was used.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

#: What takes seconds to import, once instead of in each rank.
_PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.optim",
    "torchmetrics.classification",
    "timm",
    "transformers.models.gpt2.modeling_gpt2",
    "peft",
    "datasets",
    "webdataset",
    "gcsfs",
    "adlfs",
    "azure.storage.blob.aio",
]

_ROWS: list[Row] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="keep the table under benchmarks/results")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ecosystem)
            item.add_marker(pytest.mark.timeout(360))  # after the harness has shown the stacks of ranks that hang


@pytest.fixture
def row() -> Callable[[str, str, str], Row]:
    """Begin a row: library, what is trained, over what."""

    def begin(library: str, what: str, over: str) -> Row:
        _ROWS.append(Row(library, what, over))
        return _ROWS[-1]

    return begin


@pytest.fixture(scope="session", autouse=True)
def libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Libraries are imported once, stay off the network, and keep their caches in a folder that is this run's."""
    folder = tmp_path_factory.mktemp("home")
    os.environ |= _OFFLINE
    os.environ |= {"HF_HOME": str(folder / "huggingface"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    warm.import_also(*_PRELOAD)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _ROWS:
        return
    from benchmarks.naming import machine_name
    from benchmarks.publishing import publish

    terminalreporter.ensure_newline()
    order = {library: number for number, library in enumerate(dict.fromkeys(row.library for row in _ROWS))}
    rows = sorted(_ROWS, key=lambda row: order[row.library])
    report = (
        "# Libraries on lockstep\n\n"
        f"{machine_name()}. Each row is ordinary code of the library on several ranks, against the same code in one\n"
        "process on the global batch; the difference is the greatest of all trained numbers. Made by\n"
        "`make ecosystem WRITE=--write`.\n\n"
        f"{markdown(rows)}\n"
    )
    publish(report, name=f"ecosystem-torch-{version('torch').split('+')[0]}", write=config.getoption("--write"))
