"""How machines make a round: a client over a real store, and beside it a machine that the test plays."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]  # not in torch's stubs

from lockstep import knobs
from lockstep.job.messages import Channel
from lockstep.rendezvous import client
from lockstep.rendezvous.membership import Card, RoundAttempt, encode_card, proof
from lockstep.rendezvous.messages import Command, Event, Looking, Meet, Met, Options
from tests.launching import PATIENT
from tests.stores import Clock

#: What machine 0 writes down on the way to a round, in order.
_STEPS = ("proof/0", "here/0/0", "here/1/0", "here/2/0", "here/3/0", "clock/0", "fate")


class _Other:
    """The first machine of the job, which lives, and takes a while for each step on the way to a round.

    Args:
        path: the file of the store.
        pause: seconds for each step.
    """

    def __init__(self, path: Path, *, pause: float) -> None:
        self._path = path
        self._pause = pause
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._live, self._take_part)]

    def __enter__(self) -> _Other:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _live(self) -> None:
        store, beat = FileStore(str(self._path)), 0
        while not self._over.wait(0.05):
            beat += 1
            store.set(_key("beat/other"), json.dumps([beat, []]))

    def _take_part(self) -> None:
        store = FileStore(str(self._path))
        while not store.check([_key("card/1")]):
            if self._over.wait(0.01):
                return
        theirs = json.loads(json.loads(store.get(_key("card/1")))[0])
        card = Card(**{**theirs, "name": "other", "started": 0, "challenge": "00"})
        store.add(_key("tickets"), 1)
        store.set(_key("card/2"), encode_card(card, key="", ticket=2))
        attempt, done = 0, 0
        while not self._over.wait(self._pause if attempt else 0.01):
            newest = json.loads(store.get(_key("attempt")))["count"] if store.check([_key("attempt")]) else 0
            if newest != attempt:
                attempt, done = newest, 0
            elif attempt and done < len(_STEPS):
                store.compare_set(_key(f"attempt/{attempt}/{_STEPS[done]}"), "", _content(_STEPS[done]))
                done += 1


def _key(name: str) -> str:
    return f"lockstep/job/{name}"


def _content(step: str) -> str:
    now = time.monotonic_ns()
    known = {"proof/0": proof(""), "clock/0": json.dumps([time.time(), [[now, now]] * 4])}
    return known.get(step, json.dumps({"made": ["127.0.0.1", 1, "a job"]}) if step == "fate" else "here")


def _options(path: Path) -> Options:
    return Options(
        endpoint=f"file:{path}", job="job", min_nodes=2, max_nodes=2, ranks=1, join_timeout=300.0,
        local_addr="127.0.0.1",
    )  # fmt: skip


def _meet(path: Path) -> tuple[str, list[str]]:
    """Have a client take part. Return why it was refused, or nothing if the machines have met, and what it said."""
    ours, theirs = socket.socketpair()
    options = _options(path)
    refused: list[str] = []

    def serve() -> None:
        try:
            client._Client(Channel(theirs, Command.__args__), options).serve()
        except client._Refusal as error:
            refused.append(str(error))
        except (EOFError, ConnectionError):
            pass  # the test has heard enough
        finally:
            theirs.close()

    channel, said = Channel(ours, Event.__args__), []
    thread = threading.Thread(target=serve)
    thread.start()
    channel.send(Meet())
    try:
        while True:
            for message, _ in channel.receive():
                if isinstance(message, Looking) and message.text:
                    said.append(message.text)
                if isinstance(message, Met):
                    return "", said
    except EOFError:
        return refused[0], said
    finally:
        channel.close()
        thread.join()


def test_all_that_a_round_waits_for_shares_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait takes longer than the limit, and together they do; and a job whose rounds all fail comes to an end."""
    monkeypatch.setenv(knobs.TIMES, f"{PATIENT},forming=1")
    store, tell, failures = tmp_path / "store", client._Client._tell_failure, count(1)

    def tell_failure(self: client._Client, attempt: RoundAttempt) -> None:
        tell(self, attempt)
        if next(failures) == 2:
            self._limit = time.monotonic()  # --join-timeout is over

    monkeypatch.setattr(client._Client, "_tell_failure", tell_failure)
    with _Other(store, pause=0.4):
        refused, said = _meet(store)
    assert next(failures) == 3
    assert "could not start together until --join-timeout: waited for" in refused
    assert any("the machines could not start together, and meet again: waited for" in text for text in said)


def test_machines_that_take_their_time_meet_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, f"{PATIENT},searching=300")
    store = tmp_path / "store"
    with _Other(store, pause=0.05):
        refused, said = _meet(store)
    assert refused == ""
    assert said == []


def test_a_machine_that_stands_still_once_it_has_listened_takes_nobody_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store, (ours, theirs) = Clock(), HashStore(), socket.socketpair()
    monkeypatch.setattr(client, "time", clock)
    with ours, theirs:
        mine = client._Client(Channel(theirs, Command.__args__), _options(tmp_path / "store"))
        mine._base, listen = store, mine._listen
        mine._cards[2] = replace(mine._card(Meet()), name="other"), True
        for beat in (1, 2):
            store.set(_key("beat/other"), json.dumps([beat, []]))
            listen(["other"])

        def listen_and_stand_still(names: list[str]) -> list[list[object]]:
            heard = listen(names)
            clock.sleep(60.0)
            return heard

        monkeypatch.setattr(mine, "_listen", listen_and_stand_still)
        assert list(mine._here(())) == [2]
        # The result of a job whose machines are about to leave is no earlier job's.
        store.set(_key("beat/other"), json.dumps([3, []]))
        store.set(_key("0/result"), json.dumps([7, "it has ended"]))
        mine._found_result = "0/result"
        with pytest.raises(client._Refusal, match="it has ended"):
            mine._end_if_over(Meet(), RoundAttempt(1, 0, (2,), ("other",)), {"made": []})


def test_only_a_stranger_with_a_last_word_ends_a_machine_that_it_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed may have been there for a moment only, and what is no card has no machine."""
    clock, store, (ours, theirs) = Clock(), HashStore(), socket.socketpair()
    monkeypatch.setattr(client, "time", clock)
    with ours, theirs:
        mine = client._Client(Channel(theirs, Command.__args__), _options(tmp_path / "store"))
        mine._base, card = store, mine._card(Meet())
        mine._cards = {1: (card, True), 2: (replace(card, name="other"), False)}
        mine._first = 1

        def wait() -> None:
            for _ in range(3):
                clock.sleep(60.0)
                mine._consider(card, 1, {1: card}, {1: card})

        wait()
        store.set(_key("gone/other"), "2")
        with pytest.raises(client._Refusal, match="has a key for this job, and this machine has none"):
            wait()
