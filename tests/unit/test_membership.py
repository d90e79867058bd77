"""Who takes part in a round: who lives, who fits, and when there are enough."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lockstep.rendezvous.membership import (
    Card,
    RoundAttempt,
    decode_card,
    differences,
    encode_card,
    enough,
    misfits_end_it,
    objection,
    proof,
)
from lockstep.rendezvous.signs import Signs
from lockstep.times import Times

SILENT = Times().silent
KEY, OTHER = "ab" * 32, "cd" * 32
CARD = Card(
    name="a",
    started=10,
    host="box-a",
    address="10.0.0.1",
    ranks=2,
    least=2,
    most=4,
    last=-1,
    job="",
    history={},
    serves=False,
    keyed=True,
    challenge="12",
    backend="",
    lockstep="1.0",
    others={"torch": "2.13", "Python": "3.11"},
)


def _cards(count: int) -> dict[int, Card]:
    return {n: replace(CARD, name=f"m{n}", address=f"10.0.0.{9 - n}", started=n) for n in range(1, count + 1)}


def test_what_was_counted_before_is_no_sign_of_life() -> None:
    signs = Signs(SILENT)
    signs.hear("a", 7, now=100.0)
    assert not signs.lives("a", 100.0)
    signs.hear("a", 7, now=101.0)
    assert not signs.lives("a", 101.0)
    signs.hear("a", 8, now=102.0)
    assert signs.lives("a", 102.0 + SILENT)
    assert not signs.lives("a", 102.1 + SILENT)


def test_a_machine_that_is_expected_and_says_nothing_is_silent() -> None:
    signs = Signs(SILENT)
    assert not signs.is_silent("a", 1e9), "nobody expects it"
    signs.expect("a", 10.0)
    signs.expect("a", 13.0)
    assert not signs.is_silent("a", 10.0 + SILENT)
    assert signs.is_silent("a", 10.1 + SILENT)


def test_a_machine_that_stood_still_has_heard_nobody() -> None:
    signs = Signs(SILENT)
    for count in (1, 2):
        signs.hear("a", count, now=10.0)
    signs.pause(60.0)
    assert signs.lives("a", 70.0)
    assert not signs.heard_since(["a"], 70.0)
    signs.hear("a", 3, now=71.0)
    assert signs.heard_since(["a"], 70.0)


def test_an_attempt_is_read_as_it_was_written() -> None:
    attempt = RoundAttempt(3, 1, (4, 7), ("a", "b"), (1, 2))
    assert RoundAttempt.decode(attempt.encode()) == attempt


@pytest.mark.parametrize(
    ("mine", "theirs", "proved"),
    [(KEY, KEY, True), (KEY, OTHER, False), (KEY, "", False), ("", KEY, False), ("", "", True)],
)
def test_a_card_is_proved_by_the_key(mine: str, theirs: str, proved: bool) -> None:
    assert decode_card(encode_card(CARD, key=theirs, ticket=5), key=mine, ticket=5) == (CARD, proved)


def test_a_proof_is_of_one_card_and_ticket() -> None:
    written = encode_card(CARD, key=KEY, ticket=5)
    assert not decode_card(written, key=KEY, ticket=6)[1]
    assert not decode_card(written.replace("box-a", "box-b"), key=KEY, ticket=5)[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"least": 3, "most": 3}, "was started with --nnodes 3, and this machine with --nnodes 2:4"),
        ({"backend": "gloo"}, "asks for the backend gloo, and this machine leaves the choice"),
        ({"lockstep": "0.9"}, "has lockstep 0.9, and this machine 1.0"),
        ({"others": {"torch": "2.14"}, "ranks": 7}, ""),
    ],
)
def test_who_fits(change: dict[str, object], said: str) -> None:
    text = objection(CARD, replace(CARD, **change), proved=True)  # type: ignore[arg-type]
    assert said in text
    assert bool(said) == bool(text)
    if said:
        assert "box-a (10.0.0.1)" in text


@pytest.mark.parametrize("has_more", [True, False])
def test_the_card_of_another_version_is_read_and_its_machine_refused_by_name(has_more: bool) -> None:
    said = json.loads(json.loads(encode_card(replace(CARD, lockstep="2.0"), key=KEY, ticket=3))[0])
    if has_more:
        said["colour"] = "green"
    else:
        del said["backend"], said["least"]
    text = json.dumps(said)
    card, proved = decode_card(json.dumps([text, proof(KEY, 3, text)]), key=KEY, ticket=3)
    assert proved
    objected = objection(CARD, card, proved=proved)
    assert objected == "the machine box-a (10.0.0.1) has lockstep 2.0, and this machine 1.0: install the same version"


@pytest.mark.parametrize(
    "written",
    [
        "",
        "no JSON",
        "[]",
        "3",
        '["{}"]',
        '["{", "none"]',
        '["[]", "none"]',
        "[1, 2]",
        '["{\\"ranks\\": \\"two\\"}", "none"]',
    ],
)
def test_what_is_no_card_is_refused_and_ends_nothing(written: str) -> None:
    card, proved = decode_card(written, key=KEY, ticket=3)
    assert not proved
    assert "does not know the job's key" in objection(replace(CARD, keyed=True), card, proved=proved)


def test_a_card_without_a_field_is_no_card_of_a_keyed_machine() -> None:
    card, proved = decode_card(json.dumps(["{}", "é"]), key=KEY, ticket=3)
    assert (card.host, proved) == ("", False)


def test_what_differs_is_said_in_a_line_for_each_thing() -> None:
    lines = differences([CARD, replace(CARD, host="box-b", others={"torch": "2.14", "Python": "3.11"})])
    assert lines == ["the machines differ in torch: 2.13 on machine 0 (box-a); 2.14 on machine 1 (box-b)"]


def test_never_fewer_than_the_minimum_and_never_more_than_the_maximum() -> None:
    long_ago = -1e9
    assert enough(_cards(1), since=long_ago, now=0.0, last_call=2.0) == []
    assert enough(_cards(2), since=None, now=0.0, last_call=2.0) == []
    assert enough(_cards(2), since=0.0, now=1.9, last_call=2.0) == []
    assert enough(_cards(2), since=0.0, now=2.0, last_call=2.0) == [2, 1], "by address"
    assert enough(_cards(4), since=0.0, now=0.0, last_call=2.0) == [4, 3, 2, 1]
    assert enough(_cards(6), since=0.0, now=0.0, last_call=2.0) == [4, 3, 2, 1], "the first to come"


def test_members_of_the_last_round_keep_their_places() -> None:
    cards = _cards(6)
    cards[6] = replace(cards[6], last=3)
    assert 6 in enough(cards, since=0.0, now=0.0, last_call=2.0)


def test_a_closed_job_lets_nobody_in_while_it_has_enough() -> None:
    cards = {ticket: replace(card, last=0 if ticket > 1 else -1) for ticket, card in _cards(3).items()}
    assert enough(cards, since=0.0, now=2.0, last_call=2.0) == [3, 2, 1]
    closed = {ticket: replace(card, closed=card.last >= 0) for ticket, card in cards.items()}
    assert enough(closed, since=0.0, now=2.0, last_call=2.0) == [3, 2]
    del closed[3]
    assert enough(closed, since=0.0, now=2.0, last_call=2.0) == [2, 1], "else it could not go on"


def test_misfits_end_only_what_has_not_begun() -> None:
    one, other = _cards(1), {9: replace(CARD, name="x", least=3, most=3)}
    assert misfits_end_it(one, other, left={})
    assert misfits_end_it(other, one, left={}), "both see it alike"
    assert not misfits_end_it(one, {}, left={})
    assert not misfits_end_it(_cards(2), other, left={}), "enough fit"
    assert not misfits_end_it({1: replace(CARD, last=0)}, other, left={})


def test_a_misfit_that_has_left_counts_among_those_that_it_met() -> None:
    """Of two machines with different keys one may have left before the other has heard it twice."""
    one, other = _cards(1), {2: replace(CARD, name="x")}
    assert misfits_end_it(one, other, left={2: 2})
    assert misfits_end_it(one, other, left={2: 5}), "others had come and gone"
    assert not misfits_end_it(one, other, left={2: 0}), "it was killed, or never there"
    three = {ticket: replace(card, least=3, most=3) for ticket, card in _cards(3).items()}
    first_and_third = {1: three[1], 3: three[3]}
    assert not misfits_end_it(first_and_third, {2: three[2]}, left={2: 2}), "three were never here together"
    assert misfits_end_it(first_and_third, {2: three[2]}, left={2: 3})
