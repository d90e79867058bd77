"""The engine of a group that spans hosts: shared memory inside each, gloo between them.

Note [Two tiers]
~~~~~~~~~~~~~~~~
The ranks of a host combine their elements in shared memory, the hosts' leaders exchange the sums, and each host shares
the result out. So a host sends each element once, however many ranks it has; a ring of all ranks sends nearly two.

Large tensors go in chunks. A leader begins to send a chunk and turns to the next: the ranks of the host combine that
while the network carries the first. Two hosts exchange whole chunks, and each adds up for itself, in one trip. More
hosts, and operations that need not round alike everywhere (Note [Reduction order] in group/reduction.py), give each
leader a part of the chunk to combine, and then exchange the results: two trips, and as few bytes as can be.

*The same bits.* Elements are combined in order of rank inside each host, then in order of host; every element's result
is computed by one rank and copied, or by several with the same operator over the same elements. Which elements are
added first depends on who shares a host. So a run has the bits of any run with the same ranks on the same hosts, and
others if the ranks are distributed differently: a checkpoint records the distribution (World.hosts).

*Who says what.* Inside a host every rank compares fingerprints with the others; the leaders compare their hosts' in a
greeting, which goes out with the first bytes and carries all of a small tensor. Bytes of a size that the other end did
not agree to are never asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    PrefixStore,
    Store,
)

from lockstep.comm.group.engine import Engine, Tensors
from lockstep.comm.group.meeting import ApartError, say_and_hear
from lockstep.comm.group.reduction import Reduction
from lockstep.comm.group.tensors import part
from lockstep.comm.group.work import GroupWork
from lockstep.comm.hosts.between import EAGER, Between
from lockstep.comm.hosts.grouping import Hosts
from lockstep.comm.hosts.local import LocalEngine
from lockstep.comm.hosts.messages import Messages
from lockstep.errors import LockstepError

#: The most chunks on their way between hosts at a time.
_WINDOW = 8
#: Seconds by which a host's ranks wait longer for their leader than the leader waits for other hosts.
_LATER = 15.0


class HostsEngine(Engine):
    """Ranks on several hosts; those of one host share memory."""

    backend = "hierarchical"

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: float,
        chunk: int,
        host: str,
        members: Sequence[int] = (),
    ) -> None:
        """**Collective.** Map each host's memory, and connect the hosts.

        Args:
            store: where the ranks meet; kept.
            rank: of the group.
            size: ranks of the group.
            timeout: seconds to wait for the other ranks.
            chunk: bytes of a stage in shared memory.
            host: equal on ranks that share a host, and on no others.
            members: the ranks' numbers in the world, where they are known.

        Raises:
            ApartError: ranks of one host can't share memory; on all ranks.
            RendezvousError: a rank did not come.
        """
        super().__init__(rank=rank, size=size)
        # A store may be used again for a group of the same name (init, destroy, init).
        store = PrefixStore(f"hosts/{store.add(f'hosts/meetings/{rank}', 1)}", store)
        self.hosts = Hosts.of(say_and_hear(store, "host", host, rank, size, timeout), rank)
        self.grouping = self.hosts.members
        self._between = Between(store, self.hosts, timeout=timeout)
        refusal: str | None = None
        local: LocalEngine | None = None
        try:
            try:
                local = LocalEngine(
                    PrefixStore(f"inside/{self.hosts.host}", store),
                    self._between,
                    numbers=self.hosts.mine,
                    rank=self.hosts.local,
                    size=len(self.hosts.mine),
                    timeout=timeout,
                    chunk=chunk,
                    members=members,
                )
            except ApartError as error:
                refusal = str(error)
            refusals = say_and_hear(store, "inside", refusal, rank, size, timeout)
            if local is None or any(refusals):
                raise ApartError("\n".join(f"host of rank {peer}: {why}" for peer, why in enumerate(refusals) if why))
        except BaseException:
            if local is not None:
                local.close(timeout)
            self._between.close()
            raise
        self._local = local
        self._messages = Messages(self, self._between)
        self._limit = timeout

    # --- the group -------------------------------------------------------------------------------------------------

    def begin(self, body: bytes, *, timeout: float) -> None:
        """See :class:`Engine`."""
        self._limit = timeout
        self._local.begin(body, timeout=timeout)

    @property
    def number(self) -> int:
        """See :class:`Engine`."""
        return self._local.number

    def known(self) -> LockstepError | None:
        """See :class:`Engine`."""
        return self._local.known()

    def end(self, error: LockstepError) -> LockstepError:
        """See :class:`Engine`."""
        return self._local.end(error)

    def disagree(self, what: str) -> LockstepError:
        """See :class:`Engine`."""
        return self._local.disagree(what)

    def close(self, timeout: float) -> None:
        """See :class:`Engine`."""
        try:
            self._messages.close(timeout)
        finally:
            self._between.close()
            self._local.close(timeout)

    # --- combined elements -----------------------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, how: Reduction) -> None:
        """See :class:`Engine` and Note [Two tiers]."""
        local, hosts = self._local, self.hosts
        inside = replace(how, divisor=1)
        if flat.nbytes <= EAGER and how.exact:
            local.reduce(flat, inside, root=0)
            self._wait_longer()
            if hosts.leads:
                self._exchange_greetings(flat, inside)
            self._share(flat, 0)
        else:
            _InChunks(self, flat, inside).run()
        if how.divisor != 1:
            how.divide(flat)

    def _exchange_greetings(self, flat: torch.Tensor, how: Reduction) -> None:
        """**Leaders.** Combine, over the hosts, a tensor that fits into a greeting."""
        mine = flat.view(torch.uint8)
        theirs = self.greetings(mine)
        inputs = [
            flat if leader == self.rank else theirs[leader][: mine.numel()].clone().view(flat.dtype)
            for leader in self.hosts.leaders
        ]
        out = inputs[0]
        how.over(inputs, out if len(inputs) != 2 else flat)
        if len(inputs) != 2 and out is not flat:
            flat.copy_(out)

    def reduce_scatter(self, flat: torch.Tensor, inputs: Tensors, how: Reduction) -> None:
        """See :class:`Engine`. The leader of each host gets and combines the elements for its ranks."""
        hosts, local = self.hosts, self._local
        inside = replace(how, divisor=1)
        ours = flat.new_empty(0)
        sends: list[Any] = []
        kept: list[torch.Tensor] = []
        for host in sorted(range(len(hosts.members)), key=lambda host: host == hosts.host):  # our own last
            block = torch.cat([inputs[rank] for rank in hosts.members[host]])
            local.reduce(block, inside, root=0)
            if host == hosts.host:
                ours = block
            elif hosts.leads and block.numel():
                kept.append(block)
                sends.append(self._between.send(block.view(torch.uint8), hosts.leaders[host]))
        self._wait_longer()
        if hosts.leads:
            self.greetings()
            blocks = {leader: torch.empty_like(ours) for leader in hosts.other_leaders}
            if ours.numel():
                self._take({leader: block.view(torch.uint8) for leader, block in blocks.items()})
            self._sent(sends)
            blocks[self.rank] = ours
            ordered = [blocks[leader] for leader in hosts.leaders]
            inside.over(ordered, ordered[0])
            ours = ordered[0]
        self._scatter_here(flat, ours)
        if how.divisor != 1:
            how.divide(flat)

    # --- elements as they are --------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """See :class:`Engine`."""
        self._local.barrier()
        self._wait_longer()
        if self.hosts.leads:
            self.greetings()
        self._local.barrier()

    def broadcast(self, flat: torch.Tensor, *, root: int) -> None:
        """See :class:`Engine`. Chunk by chunk: a host shares out what has come while the next is on its way."""
        hosts = self.hosts
        home, place = hosts.where(root)
        chunks = self._chunks(flat)
        if hosts.host == home:
            sends = []
            for chunk in chunks:
                self._local.broadcast(chunk, root=place)
                if hosts.leads and chunk.numel():
                    sends += [self._between.send(chunk.view(torch.uint8), leader) for leader in hosts.other_leaders]
            if hosts.leads:
                self.greetings()
                self._sent(sends)
            return
        self._local.barrier()
        self._wait_longer()
        leader = hosts.leaders[home]
        coming: list[Any] = []
        if hosts.leads:
            self.greetings()
            coming = [self._between.receive(chunk.view(torch.uint8), leader) for chunk in chunks if chunk.numel()]
        for index, chunk in enumerate(chunks):
            if coming:
                self._between.wait([coming[index]], [leader], self._local.header, limit=self._limit)
            self._share(chunk, 0)

    def gather(
        self, outputs: Tensors, flat: torch.Tensor, *, root: int | None = None, longest: int | None = None
    ) -> None:
        """See :class:`Engine`. Each leader collects its host's elements, and sends them to the hosts that receive."""
        hosts, local = self.hosts, self._local
        count = flat.numel() if longest is None else longest
        if flat.numel() < count:
            flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
        rows = flat.new_empty(self.size, count) if hosts.leads or root is None else flat.new_empty(0, count)
        own = [rows[rank] for rank in hosts.mine] if hosts.leads else []
        local.gather(own, flat, root=0)
        self._wait_longer()
        home, place = hosts.where(root) if root is not None else (hosts.host, 0)
        if hosts.leads:
            wanted = hosts.other_leaders if root is None else [hosts.leaders[home]]
            block = torch.cat(own).view(torch.uint8)
            sends = [self._between.send(block, to) for to in wanted if to != self.rank and block.numel()]
            self.greetings()
            if block.numel() and (root is None or hosts.host == home):
                blocks = {
                    leader: flat.new_empty(len(ranks), count)
                    for leader, ranks in zip(hosts.leaders, hosts.members, strict=True)
                    if leader != self.rank
                }
                self._take({leader: each.view(-1).view(torch.uint8) for leader, each in blocks.items()})
                for leader, each in blocks.items():
                    for rank, row in zip(hosts.members[hosts.where(leader)[0]], each, strict=True):
                        rows[rank].copy_(row)
            self._sent(sends)
        whole = rows.view(-1)
        if root is None:
            self._share(whole, 0)
        elif hosts.host == home and place:
            whole = self._hand_over(whole, self.size * count, source=0, to=place)
        for rank, output in enumerate(outputs):
            output.copy_(whole[rank * count : rank * count + output.numel()])

    def scatter(self, flat: torch.Tensor, inputs: Tensors, *, root: int) -> None:
        """See :class:`Engine`. The root's leader gets all elements, and sends each leader those of its host."""
        hosts, local = self.hosts, self._local
        home, place = hosts.where(root)
        count = flat.numel()
        ours = flat.new_empty(0)
        local.barrier()
        if hosts.host == home:
            whole = torch.cat(list(inputs)) if self.rank == root else flat.new_empty(0)
            if place:
                whole = self._hand_over(whole, self.size * count, source=place, to=0)
            if hosts.leads:
                blocks = [
                    torch.cat([whole[rank * count : (rank + 1) * count] for rank in ranks]) for ranks in hosts.members
                ]
                sends = [
                    self._between.send(block.view(torch.uint8), leader)
                    for leader, block in zip(hosts.leaders, blocks, strict=True)
                    if leader != self.rank and block.numel()
                ]
                self.greetings()
                self._sent(sends)
                ours = blocks[home]
        elif hosts.leads:
            self.greetings()
            ours = flat.new_empty(len(hosts.mine) * count)
            if count:
                self._take({hosts.leaders[home]: ours.view(torch.uint8)})
        self._wait_longer()
        self._scatter_here(flat, ours)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, sizes: Sequence[Sequence[int]]) -> None:
        """See :class:`Engine`. Ranks of different hosts send to each other; those of one use their memory."""
        hosts = self.hosts
        others = [rank for rank in range(self.size) if rank not in hosts.mine]
        sends = [self._between.send(inputs[r].view(torch.uint8), r) for r in others if inputs[r].numel()]
        coming = {r: self._between.receive(outputs[r].view(torch.uint8), r) for r in others if outputs[r].numel()}
        within = [[sizes[source][target] for target in hosts.mine] for source in hosts.mine]
        self._local.all_to_all([outputs[r] for r in hosts.mine], [inputs[r] for r in hosts.mine], within)
        for rank, work in coming.items():
            self._between.wait([work], [rank], self._local.header, limit=self._limit)
        self._sent(sends, others)

    # --- messages --------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, *, to: int, tag: int, timeout: float) -> GroupWork:
        """See :class:`Engine`."""
        return self._messages.send(tensor, to=to, tag=tag, timeout=timeout)

    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> GroupWork:
        """See :class:`Engine`."""
        return self._messages.receive(tensor, source=source, tag=tag, timeout=timeout)

    # --- parts of verbs --------------------------------------------------------------------------------------------

    def greetings(self, payload: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
        """**Leaders.** Greet the other leaders and return what they have sent with their greetings, by leader."""
        header = self._local.header
        self._between.greet(header, self._limit, payload)
        return self._between.greeted(header, self._limit)

    def _wait_longer(self) -> None:
        """Let the ranks of this host wait longer from here on, for a leader that waits for other hosts."""
        self._local.allow(self._limit + _LATER)

    def _share(self, flat: torch.Tensor, place: int) -> None:
        """Give the ranks of this host the elements of the one at ``place``."""
        self._local.broadcast(flat, root=place)

    def _scatter_here(self, flat: torch.Tensor, ours: torch.Tensor) -> None:
        """Give each rank of this host its part of the leader's elements."""
        parts = ours.split(flat.numel()) if flat.numel() else [ours] * len(self.hosts.mine)
        self._local.scatter(flat, parts if self.hosts.leads else [], root=0)

    def _hand_over(self, flat: torch.Tensor, count: int, *, source: int, to: int) -> torch.Tensor:
        """Return, on rank ``to`` of this host, the ``count`` elements of rank ``source``; both are places there."""
        nothing = flat.new_empty(0)
        target = flat.new_empty(count) if self.hosts.local == to else nothing
        outputs = [target if place == source else nothing for place in range(len(self.hosts.mine))]
        mine = flat if self.hosts.local == source else nothing
        self._local.gather(outputs if self.hosts.local == to else [], mine, root=to, longest=count)
        return target if self.hosts.local == to else flat

    def _take(self, contents: dict[int, torch.Tensor]) -> None:
        """Receive bytes from several ranks."""
        coming = {source: self._between.receive(content, source) for source, content in contents.items()}
        for source, work in coming.items():
            self._between.wait([work], [source], self._local.header, limit=self._limit)

    def _sent(self, sends: Sequence[Any], ranks: Sequence[int] | None = None) -> None:
        """Wait until the tensors that were sent may change again."""
        to = self.hosts.other_leaders if ranks is None else ranks
        self._between.wait(sends, to, self._local.header, limit=self._limit)

    def _chunks(self, flat: torch.Tensor) -> Tensors:
        return flat.split(self._local.chunk // flat.element_size()) if flat.numel() else [flat]


class _Chunk:
    """A chunk of a tensor on its way between the leaders."""

    def __init__(self, elements: torch.Tensor) -> None:
        self.elements = elements
        #: Leader of another host -> the tensor that it has sent.
        self.theirs: dict[int, torch.Tensor] = {}
        self.sends: list[Any] = []
        self.receives: dict[int, Any] = {}


class _InChunks:
    """An all-reduce of a large tensor, on one rank. See Note [Two tiers]."""

    def __init__(self, engine: HostsEngine, flat: torch.Tensor, how: Reduction) -> None:
        self._engine = engine
        self._how = how
        self._chunks = [_Chunk(chunk) for chunk in engine._chunks(flat)]
        self._hosts = engine.hosts
        #: True if the hosts exchange everything in one trip; False: in two.
        self._whole = len(self._hosts.members) == 2 and how.exact

    def run(self) -> None:
        """Move all chunks: combine each here, send it, (two trips) combine parts and return them, and share it out."""
        engine, leads = self._engine, self._hosts.leads
        window = _WINDOW
        count = len(self._chunks)
        back = window if self._whole else 2 * window
        for index in range(count + back):
            if index < count:
                engine._local.reduce(self._chunks[index].elements, self._how, root=0)
                if index == 0:
                    engine._wait_longer()
                    if leads:
                        engine.greetings()
                if leads:
                    self._send(self._chunks[index])
            if leads and 0 <= index - window < count:
                self._combine(self._chunks[index - window])
            if 0 <= index - back < count:
                chunk = self._chunks[index - back]
                if leads and not self._whole:
                    self._collect(chunk)
                engine._share(chunk.elements, 0)

    def _part(self, chunk: _Chunk, leader: int) -> torch.Tensor:
        """Return the part of a chunk that ``leader`` combines."""
        first, end = part(chunk.elements.numel(), self._hosts.leaders.index(leader), len(self._hosts.leaders))
        return chunk.elements[first:end]

    def _send(self, chunk: _Chunk) -> None:
        between = self._engine._between
        mine = chunk.elements if self._whole else self._part(chunk, self._hosts.rank)
        for leader in self._hosts.other_leaders:
            if mine.numel():
                chunk.theirs[leader] = torch.empty_like(mine)
                content = chunk.theirs[leader].view(torch.uint8)
                chunk.receives[leader] = between.receive(content, leader)
            piece = chunk.elements if self._whole else self._part(chunk, leader)
            if piece.numel():
                chunk.sends.append(between.send(piece.view(torch.uint8), leader))

    def _combine(self, chunk: _Chunk) -> None:
        """Wait for the other hosts' elements of a chunk, and combine them in order of host."""
        self._wait(chunk)
        mine = chunk.elements if self._whole else self._part(chunk, self._hosts.rank)
        if mine.numel():
            inputs = [mine if leader == self._hosts.rank else chunk.theirs[leader] for leader in self._hosts.leaders]
            out = mine if len(inputs) == 2 else inputs[0]
            self._how.over(inputs, out)
            if out is not mine:
                mine.copy_(out)
        chunk.theirs.clear()
        if self._whole:
            return
        between = self._engine._between
        for leader in self._hosts.other_leaders:
            piece = self._part(chunk, leader)
            if piece.numel():
                chunk.receives[leader] = between.receive(piece.view(torch.uint8), leader)
            if mine.numel():
                chunk.sends.append(between.send(mine.view(torch.uint8), leader))

    def _collect(self, chunk: _Chunk) -> None:
        """Wait for the parts that the other leaders have combined."""
        self._wait(chunk)

    def _wait(self, chunk: _Chunk) -> None:
        engine = self._engine
        for leader, work in chunk.receives.items():
            engine._between.wait([work], [leader], engine._local.header, limit=engine._limit)
        engine._sent(chunk.sends)
        chunk.receives.clear()
        chunk.sends.clear()
