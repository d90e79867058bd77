"""Make ``torch.distributed.init_process_group("shm")`` work, without loading torch for those who do not use it."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """**Local.** Tell torch about the backend. A second call does nothing."""
    import torch.distributed as dist

    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    """**Collective.** What torch calls to make a group."""
    from lockstep import knobs
    from lockstep.comm.shm.process_group import ProcessGroupShm

    if backend_options is not None:
        raise ValueError('the backend "shm" takes no pg_options')
    return ProcessGroupShm(
        options.store,
        options.group_rank,
        options.group_size,
        timeout=options.timeout,
        chunk=knobs.shm_chunk(),
        name=options.group_id,
    )
