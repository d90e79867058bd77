"""The ranks of a machine, connected: who leads, what goes over the lines, strangers, and ends that are closed."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import pytest

import lockstep
from lockstep.comm import local_ranks
from lockstep.comm.local_ranks import Hello, RankLine, connect
from tests.backends import EACH_BACKEND
from tests.harness import run_ranks

pytestmark = EACH_BACKEND


@dataclass(frozen=True)
class Word:
    text: str


def _talks(unwilling: int | None) -> list[Any]:
    world = lockstep.init(timeout=30)
    found: list[list[Any]] = []
    for _ in range(2):  # each time anew
        local = connect(world, [Word], wants=world.rank != unwilling)
        found.append([local.members, local.leads, [line.rank for line in local.lines], local.why_not])
        read, write = os.pipe()
        for line in local.lines:
            if local.leads:
                line.send(Word(f"to {line.rank}"), [write])
                message, descriptors = line.wait("nothing has come", 30)
                os.write(descriptors[0], b"up")
            else:
                message, descriptors = line.wait("nothing has come", 30)
                os.write(descriptors[0], b"down")
                line.send(Word(f"from {world.rank}"), [write])
            found[-1].append([message.text, os.read(read, 9)])
            for descriptor in descriptors:
                os.close(descriptor)
        os.close(read)
        os.close(write)
        local.close()
    assert found[0] == found[1]
    return found[0]


def test_the_leader_of_each_machine_talks_to_its_other_ranks() -> None:
    assert run_ranks(_talks, 4, None, hosts=[3, 1]) == [
        [(0, 1, 2), True, [1, 2], "", ["from 1", b"down"], ["from 2", b"down"]],
        [(0, 1, 2), False, [0], "", ["to 1", b"up"]],
        [(0, 1, 2), False, [0], "", ["to 2", b"up"]],
        [(3,), True, [], ""],
    ]


def test_where_one_rank_wants_it_not_its_machine_is_not_connected() -> None:
    ranks = run_ranks(_talks, 4, 1, hosts=[2, 2])
    assert [rank[2] for rank in ranks] == [[], [], [3], [2]]
    assert [rank[3] for rank in ranks] == [""] * 4


def _fails(on: int) -> tuple[int, str]:
    world = lockstep.init(timeout=30)
    if world.rank == on:
        vars(local_ranks)["_call"] = lambda *_: (None, f"rank {world.rank} can't")
        vars(local_ranks)["_listen"] = lambda _: (None, "", "no sockets here")
    local = connect(world, [Word])
    return len(local.lines), local.why_not


def test_a_rank_that_can_not_be_reached_is_told_on_all_ranks_of_its_machine() -> None:
    assert run_ranks(_fails, 3, 2) == [(0, "rank 2 can't")] * 3
    assert run_ranks(_fails, 3, 0) == [(0, "no sockets here")] * 3
    assert run_ranks(_fails, 3, 2, hosts=[1, 2])[0] == (0, "")


def _strangers() -> list[int]:
    """Rank 0 is called by others first: one that goes, one that says something else, two that guess the word."""
    world = lockstep.init(timeout=30)
    listen, strangers = local_ranks._listen, []

    def called(most: int) -> Any:
        listener, name, why = listen(most + 4)
        for word in (None, Word("hello"), Hello(1, "guessed"), Hello(2, "guessed")):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{name}")
            strangers.append(stranger)
            if word is None:
                stranger.close()
            else:
                RankLine(0, 1, stranger, []).send(word)
        return listener, name, why

    if world.is_main:
        vars(local_ranks)["_listen"] = called
    local = connect(world, [Word])
    for line in local.lines:
        line.send(Word("to a rank"))
    heard = [line.wait("nothing has come", 30)[0] for line in local.lines]
    assert heard == [Word("to a rank")] * len(local.lines)
    for stranger in strangers[1:]:
        assert stranger.recv(9) == b"", "it was sent away"
        stranger.close()
    local.close()
    return [line.rank for line in local.lines]


def test_strangers_are_sent_away() -> None:
    assert run_ranks(_strangers, 3) == [[1, 2], [0], [0]]


def _ends(forks: bool) -> str:
    """Rank 0 says a word and goes; a child that it has forked meanwhile lives on, until rank 1 has seen the end."""
    world = lockstep.init(timeout=30)
    local = connect(world, [Word])
    line = local.lines[0]
    read, write = os.pipe()
    if world.is_main:
        if forks and not os.fork():
            os.close(write)
            os.read(read, 1)  # until its parent has gone
            os._exit(0)
        line.send(Word("last"))
        local.close()
        world.barrier()
        return ""
    assert line.wait("nothing has come", 30)[0] == Word("last")
    with pytest.raises(lockstep.PeerLost, match="rank 1: no word has come: rank 0 ended, or was killed"):
        line.wait("no word has come", 30)
    assert line.wait_unless_closed("no word has come", 30) is None
    line.send(Word("into the void"))
    world.barrier()
    return "seen"


@pytest.mark.parametrize("forks", [False, True])
def test_an_end_that_is_closed_is_seen_at_once_also_while_a_child_of_it_lives(forks: bool) -> None:
    assert run_ranks(_ends, 2, forks) == ["", "seen"]


def _silent() -> str:
    world = lockstep.init(timeout=30)
    local = connect(world, [Word])
    with pytest.raises(lockstep.CollectiveTimeout) as caught:
        local.lines[0].wait("no word has come", 0.05)
    world.barrier()
    return str(caught.value)


def test_a_wait_has_a_limit() -> None:
    why = "it may be stuck or slow, or at another batch or call of the program than this rank"
    assert run_ranks(_silent, 2) == [f"rank {rank}: no word has come within 0.05 s: {why}" for rank in (0, 1)]
