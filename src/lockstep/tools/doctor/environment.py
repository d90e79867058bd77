"""The facts that a bug report needs, as text to paste: versions, machine, variables; no secrets."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from lockstep.text import as_size
from lockstep.tools.doctor import child, facts
from lockstep.tools.doctor.disk import file_system
from lockstep.tools.doctor.trials import TORCH_LIMIT
from lockstep.tools.doctor.variables import telling, without_secrets

#: Facts that are left out of a bug report: names and addresses.
_OF_THIS_HOST = ("hostname", "place")


def describe() -> str:
    """Return the text of a bug report's environment."""
    found = facts.collect()
    packages = found["packages"]
    rows = [
        ("lockstep", found["lockstep"]),
        *((name, packages.get(name, "not installed")) for name in ("torch", "numpy")),
        ("others", ", ".join(f"{name} {packages[name]}" for name in packages if name not in ("torch", "numpy"))),
        ("Python", f"{found['python']} ({found['implementation']}) at {sys.executable}"),
        ("system", f"{found['system']}, Linux {found['kernel']}, {found['libc']}, {found['architecture']}"),
        ("processor", found["processor"]),
        ("cores", _cores(found)),
        ("topology", found["topology"]),
        ("binding", found["binding"]),
        ("memory", _memory(found)),
        ("/dev/shm", _shared()),
        ("GPUs", f"{found['visible_gpus']} visible of {found['gpus']}" if found["gpus"] else "none"),
        *([("driver", found["driver"])] if found["driver"] else []),
        *_torch(),
        ("folder", f"{os.getcwd()} ({file_system(Path.cwd())})"),
    ]
    variables = telling()
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {without_secrets(value)}" for name, value in rows]
    lines += ["", "variables:" if variables else "variables: none that influences a job"]
    lines += [f"  {name}={value if value.startswith('(') else shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(lines)


def as_json() -> dict[str, Any]:
    """Return the same in JSON's types, without secrets; sizes are bytes."""
    ended = child.run("lockstep.tools.doctor.torch_facts", limit=TORCH_LIMIT)
    told: dict[str, Any] = _without_secrets(
        {
            "facts": {name: value for name, value in facts.collect().items() if name not in _OF_THIS_HOST},
            "executable": sys.executable,
            "torch": json.loads(ended.out) if ended.code == 0 else None,
            "folder": os.getcwd(),
            "file_system": file_system(Path.cwd()),
        }
    )
    return {**told, "variables": telling()}


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def _cores(found: dict[str, Any]) -> str:
    quota = "" if found["quota"] is None else f", quota {found['quota']:g}"
    return f"{found['cores']} of {found['cores_of_the_machine']}{quota}"


def _memory(found: dict[str, Any]) -> str:
    limit = found["memory_limit"]
    total = "unknown" if found["memory"] is None else as_size(found["memory"])
    return total if limit is None else f"{total}, limit {as_size(limit)}"


def _shared() -> str:
    try:
        there = os.statvfs("/dev/shm")
    except OSError as error:
        return f"none ({error.strerror})"
    return f"{as_size(there.f_bavail * there.f_frsize)} free of {as_size(there.f_blocks * there.f_frsize)}"


def _torch() -> list[tuple[str, str]]:
    """Return torch's description of itself; it is imported in a separate process."""
    ended = child.run("lockstep.tools.doctor.torch_facts", limit=TORCH_LIMIT)
    if ended.code != 0:
        how = f"no answer within {TORCH_LIMIT:g} s" if ended.code is None else ended.last_words.splitlines()[-1]
        return [("torch says", how)]
    found = json.loads(ended.out)
    rows = [
        ("CUDA", f"{found['cuda'] or 'none'}, NCCL {found['nccl'] or 'none'}"),
        ("backends", ", ".join(found["backends"])),
    ]
    if found["kind"] and not found["cuda"]:
        rows.append(("accelerator", f"{found['kind']}, {found['backend'] or 'no backend for its tensors'}"))
    for index, device in enumerate(found["devices"]):
        capability = "" if device["capability"] is None else ", capability " + ".".join(map(str, device["capability"]))
        rows.append((f"GPU {index}", f"{device['name']}, {as_size(device['memory'])}{capability}"))
    return rows + [("torch warns", text.splitlines()[0]) for text in found["warnings"]]
