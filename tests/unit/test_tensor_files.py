"""Files of tensors: any tool reads them, and they come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep.checkpoint.plan import flat_bytes
from lockstep.checkpoint.read import read_tensors
from lockstep.checkpoint.safetensors import lay_out


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    laid_out = lay_out(path.name, tensors, where="test")
    path.write_bytes(laid_out.header + b"".join(flat_bytes(one).numpy().data for one in laid_out.tensors.values()))
    return path


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def test_every_dtype_is_read_back_by_us_and_by_the_package(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in _DTYPES}
    path = _write(tmp_path / "t.safetensors", tensors)
    for read in (read_tensors(path), load_file(path)):
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert read[name].shape == tensor.shape
            assert _bits(read[name]) == _bits(tensor)


def test_shapes_strides_and_special_values(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "stepped": torch.arange(10)[::3],
        "expanded": torch.tensor([[1.0]]).expand(3, 2),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "gradient": torch.ones(2, requires_grad=True),
        "unicode é": torch.tensor([1]),
    }
    read = read_tensors(_write(tmp_path / "t.safetensors", tensors))
    for name, tensor in tensors.items():
        assert read[name].shape == tensor.shape
        assert _bits(read[name]) == _bits(tensor.detach())
        assert not read[name].requires_grad


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1 + 2j, 3 - 4j]], dtype=dtype)
    read = read_tensors(_write(tmp_path / "t.safetensors", {"z": tensor, "conj": tensor.conj(), "0d": tensor[0, 0]}))
    assert torch.equal(read["z"], tensor)
    assert torch.equal(read["conj"], tensor.conj())
    assert torch.equal(read["0d"], tensor[0, 0])
    assert read["z"].dtype == dtype


def test_the_same_tensor_under_two_names_is_written_once(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    tensors = {"embed": weight, "head": weight, "half": weight[:500], "copy": weight.clone()}
    path = _write(tmp_path / "t.safetensors", tensors)
    assert path.stat().st_size < 4 * (1000 + 500 + 1000) + 1000
    read = read_tensors(path)
    assert read["embed"] is read["head"]
    assert torch.equal(read["half"], weight[:500])
    assert read["copy"].data_ptr() != read["embed"].data_ptr()
    assert set(load_file(path)) == {"embed", "half", "copy"}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu), "float8_e8m0fnu"),
    ],
)
def test_what_has_no_bytes_is_refused_by_name(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(lockstep.CheckpointError, match=rf"model: layer\.w .*{message}"):
        lay_out("model.safetensors", {"layer.w": tensor}, where="model")


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = _write(tmp_path / "t.safetensors", {"w": torch.arange(100.0)})
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-8], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(lockstep.CheckpointCorrupt, match=r"t\.safetensors: not a valid safetensors file"):
        read_tensors(path)


def test_what_is_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.safetensors", {"w": torch.arange(5000.0)})
    read = read_tensors(path)
    with open(path, "r+b") as file:
        file.truncate(0)  # a mapped tensor would end the process with SIGBUS when it is read
    assert read["w"].sum() == 4999 * 2500
