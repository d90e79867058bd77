"""The lock on a run's folder in an object store: a lease, of objects that are created and never replaced by others.

Note [Lease]
~~~~~~~~~~~~
An object store has no locks, but *create if absent*: of several processes that create one object, one does. Each
owner of a run's folder has a *term*, whose number is one more than that of the owner before, and an object
``owner-00000017.json`` that it has created. Who creates the object of the next number owns the folder, at one moment,
and knows it; so the owner is whoever has the highest number. The object says who that is and holds a number that the
owner raises every ``Times.lease_beat`` seconds; it writes to its own object and to nobody else's.

A job that finds an owner creates the next term only if the owner has released the folder, is known to be gone (its
process on this machine), is of an earlier round of the same job (Note [Rounds of a job]; it gets some seconds to let
go), or has given no sign of life for ``Times.lease``. That time passes on the observer's own clock, from when it has
seen the present number to when it looks and sees it again: no clocks of two machines are ever compared, and the owner
may give signs of life while the observer itself stands still (Ctrl-Z). An owner that does give a sign of life in that
time is named in the refusal.

An owner that was slow, and not dead, is *fenced*: nothing depends on whether it notices that its time is over. Before
each commit it lists the terms, and refuses if there is a higher one. What if it is stopped between that look and the
commit? Then all the objects of its draft were there when the new owner's term began. The new owner, before anything
else, creates the manifest of every draft, empty: a commit creates the manifest, too, and so fails (Note [Commit in a
store] in ``store_folder.py``).

The objects of earlier terms are removed by the next owner. A process that has seen term 17 and is stopped may then
create 18 though 18 and 19 have been: so whoever has created a term lists them again, and withdraws if there is a
higher one."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from lockstep import knobs
from lockstep._files import StorePath
from lockstep.checkpoint import locks
from lockstep.checkpoint.at_exit import before_threads_end
from lockstep.checkpoint.locks import Owner
from lockstep.checkpoint.object_store import ObjectStore, StoreFailed
from lockstep.errors import CheckpointError
from lockstep.text import as_duration

_TERM = re.compile(r"owner-(\d{8})\.json")
#: Number of looks of an observer in the time between two signs of life.
_LOOKS = 4


@dataclass(frozen=True)
class Sign:
    """What an owner's object says."""

    owner: Owner
    #: A random text that tells this owner from others with the same description.
    nonce: str
    #: Raised at each sign of life.
    beat: int = 0
    released: bool = False

    def to_json(self) -> bytes:
        """Return the object's content."""
        return json.dumps({**vars(self), "owner": asdict(self.owner)}).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> Sign | None:
        """Read back what :meth:`to_json` returned; None if it is something else."""
        try:
            fields = json.loads(content)
            owner = Owner.from_json(json.dumps(fields.pop("owner")).encode())
            sign = cls(**fields, owner=owner) if owner is not None else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None
        if sign is None or type(sign.beat) is not int or type(sign.released) is not bool or type(sign.nonce) is not str:
            return None
        return sign


def terms(store: ObjectStore, root: StorePath) -> list[int]:
    """List the numbers of the terms whose objects are there, in order."""
    return sorted(int(found[1]) for name in store.sizes(root.key) if (found := _TERM.fullmatch(name)))


def owner_now(store: ObjectStore, root: StorePath) -> Owner | None:
    """Return the owner of the highest term, unless it has released the folder or is known to be gone."""
    sign = sign_now(store, root)
    return None if sign is None else sign.owner


def sign_now(store: ObjectStore, root: StorePath) -> Sign | None:
    """Return the sign of the owner of the highest term, unless it has released the folder or is known to be gone."""
    numbers = terms(store, root)
    sign = _read(store, root, numbers[-1]) if numbers else None
    return None if sign is None or sign.released or sign.owner.is_gone else sign


def _key(root: StorePath, term: int) -> str:
    return f"{root.key}/owner-{term:08d}.json"


def _read(store: ObjectStore, root: StorePath, term: int) -> Sign | None:
    """Read the sign of a term's owner; None if there is none that can be read."""
    try:
        return Sign.from_json(store.get(_key(root, term)))
    except FileNotFoundError:
        return None


class Lease:
    """One job's hold on a run's folder in a store. :meth:`release` it, or drop the object. See Note [Lease].

    Raises:
        CheckpointError: another job has the folder; the message says which.
        StoreFailed: the store does not do what is asked.
    """

    def __init__(self, root: StorePath) -> None:
        self._tenure = _Tenure.shared(root)
        self._release = weakref.finalize(self, _Tenure.let_go, self._tenure, os.getpid())

    @property
    def term(self) -> int:
        """The number of this owner's term."""
        return self._tenure.term

    @property
    def token(self) -> str:
        """The term and the owner's nonce, which its object shows to other ranks."""
        return f"{self._tenure.term} {self._tenure.nonce}"

    def check(self) -> None:
        """Make sure that the folder is still this job's: to be called right before a commit.

        Raises:
            CheckpointError: another job has it by now.
        """
        self._tenure.check()

    def release(self) -> None:
        """Let another job have the folder; a second call does nothing."""
        self._release()
        self._tenure.wait_for_end()


def term_here(root: StorePath) -> int:
    """Return the number of this process's term; 0 if it does not hold the folder."""
    tenure = _Tenure.here(root)
    return 0 if tenure is None else tenure.term


def witness(store: ObjectStore, root: StorePath, token: str) -> None:
    """Make sure that this process sees the term that another rank has begun.

    Raises:
        CheckpointError: it does not: the ranks have different stores.
    """
    term, nonce = token.split()
    sign = _read(store, root, int(term))
    if sign is None or sign.nonce != nonce:
        raise CheckpointError(
            f"{root}: this rank does not see what rank 0 has just written there, so their stores are not the same: a "
            "memory:// is one process's own, and the store's address and the account must be the same on every machine"
        )


class _Tenure:
    """This process's term as the owner of one folder, shared by its Leases, and the thread that gives signs of life."""

    _all: ClassVar[dict[str, _Tenure]] = {}
    #: Those that nobody uses any more, and that are about to say so in the store.
    _ending: ClassVar[list[_Tenure]] = []
    #: Held while the store is asked for a term, which takes its time.
    _taking = threading.Lock()
    #: Never held while anything is awaited: a Lease may be dropped in any thread, also in the store's own.
    _guard = threading.RLock()

    def __init__(self, root: StorePath) -> None:
        self._root, self._users, self._pid = root, 1, os.getpid()
        self._store = ObjectStore.opened(root.scheme)
        self._beat = knobs.times().lease_beat
        self._sign = Sign(Owner.this_process(), secrets.token_hex(8))
        self.term = _take(self._store, root, self._sign)
        self._over = threading.Event()
        self._signs = threading.Thread(target=self._give_signs, name="lockstep-lease", daemon=True)
        self._signs.start()
        before_threads_end(_Tenure.let_all_go)

    @property
    def nonce(self) -> str:
        return self._sign.nonce

    @classmethod
    def here(cls, root: StorePath) -> _Tenure | None:
        """Return this process's tenure of the folder, or None."""
        tenure = cls._all.get(str(root))
        return tenure if tenure is not None and tenure._pid == os.getpid() else None  # a fork inherits the table

    @classmethod
    def shared(cls, root: StorePath) -> _Tenure:
        with cls._taking:
            with cls._guard:
                tenure = cls.here(root)
                if tenure is not None:
                    tenure._users += 1
                    return tenure
            tenure = cls(root)
            with cls._guard:
                cls._all[str(root)] = tenure
            return tenure

    def check(self) -> None:
        number = terms(self._store, self._root)[-1:]
        if number == [self.term]:
            return
        owner = _read(self._store, self._root, number[0]) if number else None
        who = "a job that left no record of itself" if owner is None else str(owner.owner)
        raise CheckpointError(
            f"{self._root} has another owner by now, {who}: this job gave no sign of life for "
            f"{as_duration(knobs.times().lease)} as seen from there, or has continued without this machine, and "
            "nothing was saved here"
        )

    def _give_signs(self) -> None:
        beat = 0
        while not self._over.wait(self._beat):
            beat += 1
            self._sign = replace(self._sign, beat=beat)
            # A save says so, if the store is still away then; and if it takes long, another job may come.
            with suppress(StoreFailed):
                self._store.put(_key(self._root, self.term), self._sign.to_json(), again=False)
        try:
            self._store.put(_key(self._root, self.term), replace(self._sign, released=True).to_json())
        except StoreFailed as error:  # what was saved is safe
            limit = as_duration(knobs.times().lease)
            print(f"lockstep: {error}; another job can have {self._root} after {limit}", file=sys.stderr, flush=True)

    def let_go(self, pid: int) -> None:
        if os.getpid() != pid:
            return
        with self._guard:
            self._users -= 1
            if not self._users:
                self._end()

    def wait_for_end(self) -> None:
        """Wait until the store knows that the folder was released; at once if others use it."""
        if self._over.is_set():
            self._signs.join()

    @classmethod
    def let_all_go(cls) -> None:
        """Release the folders of this process while its threads can still talk to a store."""
        with cls._guard:
            for tenure in [*cls._all.values()]:
                if tenure._pid == os.getpid():
                    tenure._users = 0
                    tenure._end()
            ending = [*cls._ending]
        for tenure in ending:
            if tenure._pid == os.getpid():
                tenure.wait_for_end()

    def _end(self) -> None:
        """Have the thread release the folder. ``_guard`` is held."""
        self._all.pop(str(self._root), None)
        self._ending[:] = [one for one in self._ending if one._signs.is_alive()] + [self]
        self._over.set()


def _take(store: ObjectStore, root: StorePath, sign: Sign) -> int:
    """Begin a term; return its number."""
    while True:
        numbers = terms(store, root)
        latest = numbers[-1] if numbers else 0
        if latest:
            _wait_for_end(store, root, latest)
        own = latest + 1
        if not store.create(_key(root, own), sign.to_json()):
            continue
        numbers = terms(store, root)
        if numbers[-1:] != [own]:
            store.remove([_key(root, own)])
            continue
        store.remove([_key(root, number) for number in numbers if number < own])
        return own


def _wait_for_end(store: ObjectStore, root: StorePath, term: int) -> None:
    """Return when the next term may be begun, as far as the owner of this one goes.

    Raises:
        CheckpointError: it is alive.
    """
    times, first = knobs.times(), _read(store, root, term)
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun  # until this look; see Note [Lease]
        sign = _read(store, root, term)
        first = first or sign
        if sign is None:
            if term not in terms(store, root):
                return  # there is a later one, which creating the next shows
        elif sign.released or sign.owner.is_gone:
            return
        if sign is not None and sign.owner.is_superseded:
            if waited > locks.SUCCESSION:
                return
        elif sign is not None and first is not None and sign.beat != first.beat:
            raise CheckpointError(
                f"{root} belongs to another job, {sign.owner}: wait for it, stop it, or choose another folder"
            )
        elif waited > times.lease:
            return
        time.sleep(times.lease_beat / _LOOKS)
