"""The engine of the backend ``"mpi4py"``: the verbs over MPI, for ranks that mpirun started. Needs mpi4py.

MPI moves bytes and nothing else. Elements are combined here, in order of rank, as over shared memory: so the bits are
the same on every rank, and those of ``"shm"``, whatever algorithm MPI takes for a size and a network.

MPI's waits have no limits, so every one is a loop of tests. Ranks tell each other by the store that the group was
opened with what is wrong, as between hosts (Note [Waiting for another host] in ``hosts/between.py``): why the group has
ended; and who waits, when a rank that has no time left asks. A rank whose process dies is named by the ranks of its
host. On another host, and by default everywhere, mpirun ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.group.engine import Engine, Tensors
from lockstep.comm.group.failures import again, dumps, loads
from lockstep.comm.group.fingerprint import HEADER, KEY, describe
from lockstep.comm.group.meeting import Whereabouts, say_and_hear
from lockstep.comm.group.reduction import Reduction
from lockstep.comm.group.tensors import part
from lockstep.comm.group.work import GroupWork
from lockstep.comm.hosts.between import Wait
from lockstep.comm.hosts.messages import Messages
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost, RendezvousError
from lockstep.job import files, flight
from lockstep.text import which_ranks

#: Bytes that go with a header: a tensor that is no larger needs no exchange of its own.
EAGER = 4096
#: Tests before a waiting rank offers its core to others.
_TESTS = 60
#: Seconds for which it offers its core before it sleeps between tests, and after which another rank must be late, so
#: that it sleeps longer. (MPI moves nothing while no thread tests: a rank that sleeps soon slows its own transfers
#: down.)
_YIELDING, _LASTING = 0.1, 2.0
#: The lengths of both sleeps, in seconds.
_NAP, _SLEEP = 50e-6, 1e-3
#: Seconds between two looks at the processes and the store, and for an answer of the other ranks.
_SLICE = 0.05
_ASKING = 0.25
_ANSWER = 1.0

#: What was not complete when an error came. MPI goes on with it for as long as the process lives, and reads and writes
#: the memory that each of these keeps.
_unfinished: list[Any] = []


class MpiEngine(Engine):
    """Ranks that are processes of one MPI job."""

    backend = "mpi4py"

    def __init__(self, store: Store, *, rank: int, size: int, timeout: float) -> None:
        """**Collective.** Make a communicator of the group's ranks.

        Args:
            store: where the ranks meet; kept.
            rank: of the group.
            size: ranks of the group.
            timeout: seconds to wait for the other ranks.

        Raises:
            RendezvousError: a rank did not come, or does not belong to this MPI job, or MPI accepts calls from one
                thread only.
        """
        super().__init__(rank=rank, size=size)
        mpi: Any = importlib.import_module("mpi4py.MPI")
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise RendezvousError(
                f"rank {rank} of {size}: this MPI accepts calls from one thread only, and lockstep sends messages from "
                "threads of their own: use an MPI that was built for several threads (MPI_THREAD_MULTIPLE), and do not "
                "set mpi4py.rc.thread_level"
            )
        self._mpi = mpi
        self._store = store
        self._meeting = store.add(f"mpi/meetings/{rank}", 1)
        where = Whereabouts.mine()
        job = mpi.COMM_WORLD
        told = say_and_hear(store, self._key("ranks"), [job.Get_rank(), asdict(where)], rank, size, timeout)
        numbers = [number for number, _ in told]
        if len(set(numbers)) < size:
            raise RendezvousError(
                f"rank {rank} of {size}: MPI knows {job.Get_size()} ranks, of which this group's are {numbers}: start "
                "all ranks with one mpirun, and with the mpirun of the MPI that mpi4py was built for"
            )
        places = {peer: Whereabouts(**place) for peer, (_, place) in enumerate(told) if peer != rank}
        self._here = {peer: place for peer, place in places.items() if where.why_apart(place) is None}
        self._comm: Any = job.Create_group(job.group.Incl(numbers))
        self._mail: Any = self._comm.Dup()
        self._messages = Messages(self, self)
        self._known: LockstepError | None = None
        self._sequence = 0
        self._header = bytes(HEADER)
        self._timeout = timeout
        self._fresh = False
        self._looked = self._asked_store = 0.0
        atexit.register(self._part)  # before MPI's own end, in which this process waits for the others

    def _key(self, name: str) -> str:
        return f"mpi/{self._meeting}/{name}"

    # --- the group -------------------------------------------------------------------------------------------------

    def begin(self, body: bytes, *, timeout: float) -> None:
        """See :class:`Engine`."""
        self._sequence += 1
        self._header = self._sequence.to_bytes(8, "little") + body
        self._timeout = timeout
        self._fresh = True

    @property
    def number(self) -> int:
        """See :class:`Engine`."""
        return self._sequence

    def known(self) -> LockstepError | None:
        """See :class:`Engine`."""
        return self._known

    def end(self, error: LockstepError) -> LockstepError:
        """See :class:`Engine`."""
        if self._known is None:
            with contextlib.suppress(RuntimeError):  # the store's host is gone: all ranks notice
                error = loads(self._store.compare_set(self._key("ended"), "", dumps(error)))
            self._known = error
        return again(self._known)

    def _part(self) -> None:
        """Tell the others, which would wait for this rank, that an error ends it."""
        error = getattr(sys, "last_value", None)
        if error is not None and self._known is None:
            self.end(PeerLost(f"rank {self.rank} ended with {type(error).__name__}: {error}"))

    def disagree(self, what: str) -> LockstepError:
        """See :class:`Engine`."""
        said = f"rank {self.rank} in {describe(self._header)}: {what}; nothing was moved"
        return self.end(CollectiveMismatch(said))

    def close(self, timeout: float) -> None:
        """See :class:`Engine`."""
        atexit.unregister(self._part)
        self._messages.close(timeout)
        if self._known is None:
            self._known = LockstepError(f"rank {self.rank} destroyed the process group")
            self._mail.Free()
            self._comm.Free()

    # --- combined elements -----------------------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, how: Reduction) -> None:
        """See :class:`Engine`. All elements of a small tensor go to every rank; of a larger one each rank combines a
        part."""
        if how.factor != 1:
            flat.mul_(how.factor)
        if flat.nbytes <= EAGER and self._fresh:
            rows = self._compare(flat.view(torch.uint8))
            inputs = [row[: flat.nbytes].clone().view(flat.dtype) for row in rows]
            how.over(inputs, inputs[0])
            flat.copy_(inputs[0])
            return
        self._begin()
        bounds = [part(flat.numel(), rank, self.size) for rank in range(self.size)]
        pieces = [flat[first:end] for first, end in bounds]
        mine = pieces[self.rank]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._exchange(rows, pieces)
        if mine.numel():
            how.over(rows, rows[0])
        counts = [piece.nbytes for piece in pieces]
        self._wait(self._comm.Iallgatherv(_bytes(rows[0]), [_bytes(flat), counts]))

    def reduce_scatter(self, flat: torch.Tensor, inputs: Tensors, how: Reduction) -> None:
        """See :class:`Engine`."""
        self._begin()
        rows = [torch.empty_like(flat) for _ in range(self.size)]
        self._exchange(rows, [each * how.factor for each in inputs] if how.factor != 1 else inputs)
        how.over(rows, rows[0])
        flat.copy_(rows[0])

    # --- elements as they are --------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """See :class:`Engine`."""
        self._compare(None)

    def broadcast(self, flat: torch.Tensor, *, root: int) -> None:
        """See :class:`Engine`."""
        self._begin()
        self._wait(self._comm.Ibcast(_bytes(flat), root=root))

    def gather(
        self, outputs: Tensors, flat: torch.Tensor, *, root: int | None = None, longest: int | None = None
    ) -> None:
        """See :class:`Engine`."""
        self._begin()
        count = flat.numel() if longest is None else longest
        if flat.numel() < count:
            flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
        rows = flat.new_empty(self.size, count) if root in (None, self.rank) else flat.new_empty(0, count)
        whole = _bytes(rows.view(-1))
        if root is None:
            self._wait(self._comm.Iallgather(_bytes(flat), whole))
        else:
            self._wait(self._comm.Igather(_bytes(flat), whole if root == self.rank else None, root=root))
        for output, row in zip(outputs, rows, strict=False):
            output.copy_(row[: output.numel()])

    def scatter(self, flat: torch.Tensor, inputs: Tensors, *, root: int) -> None:
        """See :class:`Engine`."""
        self._begin()
        whole = _bytes(torch.cat(list(inputs))) if self.rank == root else None
        self._wait(self._comm.Iscatter(whole, _bytes(flat), root=root))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, sizes: Sequence[Sequence[int]]) -> None:  # noqa: ARG002
        """See :class:`Engine`."""
        self._exchange(outputs, inputs)

    # --- messages --------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, *, to: int, tag: int, timeout: float) -> GroupWork:
        """See :class:`Engine`."""
        return self._messages.send(tensor, to=to, tag=tag, timeout=timeout)

    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> GroupWork:
        """See :class:`Engine`."""
        return self._messages.receive(tensor, source=source, tag=tag, timeout=timeout)

    @property
    def numbers(self) -> int:
        """See :class:`Transport`. MPI promises the tags to 32767 only; most have more."""
        return int(self._mail.Get_attr(self._mpi.TAG_UB)) + 1

    def message(self, content: torch.Tensor, number: int, *, to: int | None = None, source: int | None = None) -> Any:
        """Begin to send bytes, or to receive them; see :class:`Messages`."""
        if to is not None:
            return _Request(self._mail.Isend(_bytes(content), dest=to, tag=number), self._mpi)
        whom = self._mpi.ANY_SOURCE if source is None else source
        return _Request(self._mail.Irecv(_bytes(content), source=whom, tag=number), self._mpi)

    def wait_as(self, wait: Wait, works: Sequence[Any]) -> None:
        """Wait for what :meth:`message` began; see :class:`Messages`."""
        with flight.waiting(wait.what):
            for number, work in enumerate(works):
                try:
                    self._wait_for(work, wait)
                except BaseException:
                    _unfinished.extend(works[number:])
                    raise

    def _wait_for(self, work: _Request, wait: Wait) -> None:
        while not work.test():
            time.sleep(_NAP if time.monotonic() - wait.begun < _LASTING else _SLEEP)
            self._look(wait.what)
            waited = time.monotonic() - wait.begun
            if wait.limit is not None and waited >= wait.limit:
                raise self.end(
                    CollectiveTimeout(
                        f"{which_ranks(wait.ranks)} did not come: rank {self.rank} timed out after {waited:.3g} s in "
                        f"{wait.what}. Find out what keeps it, or allow more time." + files.told()
                    )
                )

    # --- moving bytes ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """**Collective.** Compare fingerprints, once in a collective."""
        if self._fresh:
            self._compare(None)

    def _compare(self, payload: torch.Tensor | None) -> list[torch.Tensor]:
        """**Collective.** Exchange headers, with the bytes of a small tensor, and compare them; return the bytes.

        Raises:
            CollectiveMismatch: the ranks are in different collectives.
        """
        mine = torch.zeros(HEADER + EAGER, dtype=torch.uint8, device="cpu")
        mine[:HEADER] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        if payload is not None:
            mine[HEADER : HEADER + payload.numel()] = payload
        rows = torch.empty(self.size, HEADER + EAGER, dtype=torch.uint8, device="cpu")
        self._wait(self._comm.Iallgather(_bytes(mine), _bytes(rows.view(-1))))
        self._fresh = False
        said = [bytes(row[:HEADER].numpy()) for row in rows]
        if any(theirs[:KEY] != self._header[:KEY] for theirs in said):
            lines = "".join(f"  rank {rank}: {describe(header)}\n" for rank, header in enumerate(said))
            raise self.end(
                CollectiveMismatch(
                    f"rank {self.rank}: the ranks are in different collectives, or in one with different arguments; "
                    f"nothing was moved:\n{lines}"
                    "Every rank must issue the same collectives in the same order, with tensors of equal size and "
                    "dtype."
                )
            )
        return [row[HEADER:] for row in rows]

    def _exchange(self, outputs: Tensors, inputs: Tensors) -> None:
        """**Collective.** Put each rank's ``inputs[r]`` into ``outputs[rank]`` of rank r."""
        sent = torch.cat(list(inputs))
        came = sent.new_empty(sum(output.numel() for output in outputs))
        counts = [each.nbytes for each in inputs], [each.nbytes for each in outputs]
        self._wait(self._comm.Ialltoallv([_bytes(sent), counts[0]], [_bytes(came), counts[1]]))
        for output, row in zip(outputs, came.split([output.numel() for output in outputs]), strict=True):
            output.copy_(row)

    def _wait(self, request: Any) -> None:
        """Wait for a collective of MPI's.

        Raises:
            LockstepError: the group has ended; the message names the rank to blame.
        """
        try:
            self._wait_while(request.Test)
        except BaseException:
            _unfinished.append(request)  # with its memory
            raise

    def _wait_while(self, test: Callable[[], bool]) -> None:
        for _ in range(_TESTS):
            if test():
                return
        begun = time.monotonic()
        while time.monotonic() - begun < _YIELDING:
            os.sched_yield()
            if test():
                return
        what = describe(self._header)
        asked = False
        with flight.waiting(what):
            while not test():
                time.sleep(_NAP if time.monotonic() - begun < _LASTING else _SLEEP)
                self._look(what)
                waited = time.monotonic() - begun
                if waited < self._timeout:
                    continue
                if not asked:
                    asked = True
                    with contextlib.suppress(RuntimeError):
                        self._store.set(self._key("asked"), "")
                elif waited >= self._timeout + _ANSWER:
                    raise self.end(self._late(what, waited))

    # --- what is wrong ---------------------------------------------------------------------------------------------

    def _look(self, what: str) -> None:
        """Look, once in ``_SLICE`` seconds, whether the group or a process has ended, or a rank asks who waits."""
        now = time.monotonic()
        if now - self._looked < _SLICE:
            return
        self._looked = now
        self.check()
        gone = [peer for peer, place in self._here.items() if place.is_gone]
        if gone or now - self._asked_store >= _ASKING:
            self._asked_store = now
            self._ask()
        if gone:
            raise self.end(
                PeerLost(
                    f"rank {self.rank} waits in {what}, and {which_ranks(gone)} ended. The error to look for is that "
                    "rank's own; this group can't be used any more."
                )
            )

    def _ask(self) -> None:
        """Ask the store whether the group has ended, and whether a rank wants to know who waits."""
        with contextlib.suppress(RuntimeError):  # the store's host is gone: all ranks notice
            if self._store.check([self._key("ended")]):
                self._known = loads(self._store.get(self._key("ended")))
            if self._store.check([self._key("asked")]):
                self._store.set(self._key(f"here/{self.rank}"), "")
        self.check()

    def _late(self, what: str, waited: float) -> CollectiveTimeout:
        others = [rank for rank in range(self.size) if rank != self.rank]
        missing = others
        with contextlib.suppress(RuntimeError):
            missing = [rank for rank in others if not self._store.check([self._key(f"here/{rank}")])]
        who = which_ranks(missing) if missing else "some rank"
        return CollectiveTimeout(
            f"{who} did not come: rank {self.rank} timed out after {waited:.3g} s in {what}. Find out what keeps the "
            "late rank, or allow more time (timeout=… of init_process_group or lockstep.init)." + files.told()
        )


class _Request:
    """A message of MPI's."""

    def __init__(self, request: Any, mpi: Any) -> None:
        self._request = request
        self._status = mpi.Status()

    def test(self) -> bool:
        """Return whether it is complete."""
        return bool(self._request.Test(self._status))

    def _source_rank(self) -> int:
        return int(self._status.Get_source())


def _bytes(flat: torch.Tensor) -> Any:
    """Return the memory of a flat tensor, as MPI takes it."""
    return flat.view(torch.uint8).numpy()
