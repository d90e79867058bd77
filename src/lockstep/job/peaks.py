"""What devices can do at most: FLOPs a second that their vendors publish, for dense matrices. Pure.

The figures are those of the vendors' data sheets, at the boost clock; where a sheet has them with sparsity only, half
of them. Sources:

- NVIDIA: the data sheets of V100 (2020), T4 (2019), A100 (2022), A30 (2022), A40 (2022), A10 (2021), L4 (2023),
  L40S (2023), H100 (2024; PCIe: 2022), H200 (2024) and HGX B200 (2025), and the white papers "NVIDIA Ampere GA102 GPU
  Architecture" (RTX 3090) and "NVIDIA Ada GPU Architecture" (RTX 4090; both: FP32 accumulation).
- AMD: the data sheet of the Instinct MI300X (2023).
"""

from __future__ import annotations

import re

_T = 1e12


def _tensor_cores(half: float, tf32: float, single: float) -> dict[str, float]:
    return {"float16": half * _T, "bfloat16": half * _T, "tf32": tf32 * _T, "float32": single * _T}


#: The whole name of a device, as its driver gives it -> what it does in a dtype. (The name of a part of a GPU, "… MIG
#: 1g.10gb", is none of these.)
_PEAKS: dict[str, dict[str, float]] = {
    r"Tesla V100-SXM[23].*": {"float16": 125 * _T, "float32": 15.7 * _T, "float64": 7.8 * _T},
    r"Tesla V100-PCIE.*": {"float16": 112 * _T, "float32": 14 * _T, "float64": 7 * _T},
    r"(Tesla|NVIDIA) T4": {"float16": 65 * _T, "float32": 8.1 * _T},
    r"NVIDIA A100(-SXM4-[48]0GB|-PCIE-40GB| 80GB PCIe)": _tensor_cores(312, 156, 19.5) | {"float64": 19.5 * _T},
    r"NVIDIA A30": _tensor_cores(165, 82, 10.3) | {"float64": 10.3 * _T},
    r"NVIDIA A40": _tensor_cores(149.7, 74.8, 37.4),
    r"NVIDIA A10": _tensor_cores(125, 62.5, 31.2),
    r"NVIDIA L4": _tensor_cores(121, 60, 30.3),
    r"NVIDIA L40S": _tensor_cores(362.05, 183, 91.6),
    r"NVIDIA H100 80GB HBM3": _tensor_cores(989.5, 494.5, 67) | {"float64": 67 * _T},
    r"NVIDIA H100 PCIe": _tensor_cores(756.5, 378, 51) | {"float64": 51 * _T},
    r"NVIDIA H100 NVL": _tensor_cores(835.5, 417.5, 60) | {"float64": 60 * _T},
    r"NVIDIA H200": _tensor_cores(989.5, 494.5, 67) | {"float64": 67 * _T},
    r"NVIDIA H200 NVL": _tensor_cores(835.5, 417.5, 60) | {"float64": 60 * _T},
    r"NVIDIA B200": _tensor_cores(2250, 1100, 75),
    r"NVIDIA GeForce RTX 3090": _tensor_cores(71, 35.6, 35.6),
    r"NVIDIA GeForce RTX 4090": _tensor_cores(165.2, 82.6, 82.6),
    r"AMD Instinct MI300X.*": {"float16": 1307.4 * _T, "bfloat16": 1307.4 * _T, "float32": 163.4 * _T},
}  # fmt: skip


def peak_of(device: str, dtype: str) -> float | None:
    """Return what a device does at most in a dtype, in FLOPs a second; None: not known here.

    Args:
        device: its name, as ``torch.cuda.get_device_name`` has it.
        dtype: the inputs' dtype, ``bfloat16`` for example; ``tf32``: float32 whose matrices may be multiplied in TF32.
    """
    if "MIG" in device:
        return None
    for name, peaks in _PEAKS.items():
        if re.fullmatch(name, device):
            return peaks.get(dtype)
    return None
