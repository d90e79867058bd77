"""The ranks act at the same step, in whatever order they run: on every board, with made-up ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.errors import PeerLost
from lockstep.job import stop
from lockstep.job.page import Pages
from lockstep.job.stop import Action, Agreement, Board, PageBoard, Proposal, StoreBoard

Boards = Callable[[int], list[Board]]


@pytest.fixture(params=["pages", "store"])
def boards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Boards]:
    """Makes one board for each rank of a new job."""
    opened: list[Pages] = []

    def make(world_size: int) -> list[Board]:
        if request.param == "store":
            store = HashStore()
            return [StoreBoard(store) for _ in range(world_size)]
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        mapped = [Pages(folder, world_size) for _ in range(world_size)]
        opened.extend(mapped)
        return [PageBoard(pages, rank=rank) for rank, pages in enumerate(mapped)]

    yield make
    for pages in opened:
        pages.close()


class _Gone:
    """A store whose server has ended. (A real one leaves the pipes of its thread open in this process.)"""

    def check(self, *_: object) -> bool:
        raise RuntimeError("Connection reset by peer")

    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("Broken pipe")

    def get(self, *_: object) -> bytes:
        raise RuntimeError("Broken pipe")


def test_a_store_that_has_gone_is_told_in_our_own_words() -> None:
    board = StoreBoard(_Gone())
    with pytest.raises(PeerLost, match="the store that the ranks met at is gone"):
        board.smallest(1)
    with pytest.raises(PeerLost, match="the store that the ranks met at is gone"):
        board.propose(1, Proposal(12, Action.SAVE))


def test_the_smallest_proposal_of_a_round_counts(boards: Boards) -> None:
    first, second = boards(2)
    assert first.smallest(1) is None
    first.propose(1, Proposal(12, Action.SAVE))
    assert second.smallest(1) == Proposal(12, Action.SAVE)
    assert second.smallest(2) is None
    second.propose(2, Proposal(15, Action.STOP))
    assert first.smallest(2) == Proposal(15, Action.STOP)


def test_a_page_board_takes_the_smallest_of_two_that_were_written_at_once(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 2)
    first, second = PageBoard(pages, rank=0), PageBoard(pages, rank=1)
    first.propose(1, Proposal(13, Action.STOP))
    second.propose(1, Proposal(12, Action.SAVE))
    assert first.smallest(1) == second.smallest(1) == Proposal(12, Action.SAVE)
    first.propose(1, Proposal(12, Action.STOP))
    assert second.smallest(1) == Proposal(12, Action.STOP), "leaving saves, too"
    pages.close()


def test_a_lone_rank_acts_at_once(boards: Boards) -> None:
    agreement = Agreement(boards(1)[0], world_size=1)
    assert agreement.due(7, wanted=None) is None
    assert agreement.due(7, wanted=Action.SAVE) is Action.SAVE
    assert agreement.due(8, wanted=None) is None
    assert agreement.due(9, wanted=Action.STOP) is Action.STOP


class _Rank:
    """Takes a step as soon as all ranks have contributed to it, and asks at each boundary what is due."""

    def __init__(self, board: Board, world_size: int, asks: list[tuple[int, Action]]) -> None:
        self.agreement = Agreement(board, world_size=world_size)
        #: What it is asked for, once it has so many steps done.
        self.asks = asks
        self.done = 0
        self.contributed = 0
        self.acts: list[tuple[int, Action]] = []

    def boundary(self) -> bool:
        """True when it leaves."""
        wanted = min((kind for step, kind in self.asks if step <= self.done), default=None)
        due = self.agreement.due(self.done, wanted=wanted)
        if due is not None:
            self.acts.append((self.done, due))
            self.asks = [(step, kind) for step, kind in self.asks if step > self.done or kind is not due]
        return due is Action.STOP


def _run(ranks: list[_Rank], chance: random.Random, *, steps: int) -> None:
    """Let a rank at a time go on, in any order that reductions and collective saves allow."""
    for rank in ranks:
        rank.boundary()
    while any(rank.done < steps for rank in ranks):
        able = []
        for rank in ranks:
            waits_for_step = rank.contributed > rank.done and min(r.contributed for r in ranks) < rank.contributed
            # A save is collective: nobody goes on from one that another rank has not come to.
            waits_for_save = len(rank.acts) > min(len(r.acts) for r in ranks)
            stopped = bool(rank.acts) and rank.acts[-1][1] is Action.STOP
            if rank.done < steps and not (waits_for_step or waits_for_save or stopped):
                able.append(rank)
        if not able:
            return
        rank = chance.choice(able)
        if rank.contributed == rank.done:
            rank.contributed += 1
        else:
            rank.done += 1
            rank.boundary()


def _random_job(boards: Boards, seed: int) -> list[_Rank]:
    chance = random.Random(seed)
    world_size = chance.randint(2, 4)
    ranks = []
    for board in boards(world_size):
        asks = [(chance.randint(0, 8), Action.SAVE) for _ in range(chance.randint(0, 2))]
        if chance.random() < 0.7:
            asks.append((chance.randint(0, 8), Action.STOP))
        ranks.append(_Rank(board, world_size, asks))
    _run(ranks, chance, steps=30)
    return ranks


def test_ranks_act_together_in_any_order_of_events(boards: Boards) -> None:
    stopped = 0
    for seed in range(400):
        ranks = _random_job(boards, seed)
        acts = ranks[0].acts
        assert all(rank.acts == acts for rank in ranks), f"seed {seed}: {[rank.acts for rank in ranks]}"
        wants_stop = any(kind is Action.STOP for rank in ranks for _, kind in rank.asks)
        assert not wants_stop or (acts and acts[-1][1] is Action.STOP), f"seed {seed}: nobody stopped"
        stopped += bool(acts) and acts[-1][1] is Action.STOP
    assert stopped > 200


def test_without_a_lead_they_would_not(boards: Boards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "LEAD", 0)
    jobs = (_random_job(boards, seed) for seed in range(400))
    assert any(any(rank.acts != ranks[0].acts for rank in ranks) for ranks in jobs)
