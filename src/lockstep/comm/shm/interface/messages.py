"""Operations between two ranks: send and receive."""

from __future__ import annotations

from lockstep.comm.shm import tensors
from lockstep.comm.shm.interface.base import Operations, Tensors, finish, recorded, single
from lockstep.comm.shm.work import ShmWork


class Messages(Operations):
    """Send, and receive from one rank or from any."""

    def send(self, tensors_: Tensors, to: int, tag: int = 0) -> ShmWork:
        tensor = single("send", tensors_)
        tensors.check("send", tensors_)
        self._shm_group.check("send")
        self._partner("send", to)
        flat = tensors.source(tensor)
        with recorded("send"):
            return self._shm_group.mail.send(flat, to=to, tag=tag, timeout=self._shm_group.timeout, result=tensors_)

    def recv(self, tensors_: Tensors, source: int, tag: int = 0) -> ShmWork:
        return self._receive("recv", tensors_, self._partner("recv", source), tag)

    def recv_anysource(self, tensors_: Tensors, tag: int = 0) -> ShmWork:
        return self._receive("recv_anysource", tensors_, None, tag)

    def _partner(self, name: str, rank: int) -> int:
        if not 0 <= rank < self._shm_size:
            raise RuntimeError(f"ProcessGroupShm::{name}: there is no rank {rank} in a group of {self._shm_size}")
        return rank

    def _receive(self, name: str, tensors_: Tensors, source: int | None, tag: int) -> ShmWork:
        tensor = single(name, tensors_)
        tensors.check(name, tensors_)
        self._shm_group.check(name)
        finishes: list[tensors.Finish] = []
        flat = tensors.target(tensor, finishes)
        with recorded("recvAnySource" if source is None else name):  # (as gloo calls it)
            return self._shm_group.mail.receive(
                flat,
                source=source,
                tag=tag,
                timeout=self._shm_group.timeout,
                finish=lambda: finish(finishes),
                result=tensors_,
            )
