"""What differs between fsspec's packages for stores, on file systems that behave like theirs."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem, get_loop, sync
from fsspec.exceptions import FSTimeoutError

from lockstep import knobs
from lockstep.checkpoint import object_store, store_packages
from lockstep.checkpoint.object_store import ObjectStore, StoreFailed
from lockstep.checkpoint.store_packages import S3, Azure, Google, Package, package_of
from tests.stores import Clock


class _Store(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store whose requests all end as the test says, of no package."""

    protocol = "like"
    #: What opening one does, and what a request does.
    opening: ClassVar[Callable[[], object]]
    request: ClassVar[Callable[[], object]]
    asked: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).opening()

    async def _pipe_file(self, *_: Any, **__: Any) -> object:
        _Store.asked += 1
        return _Store.request()

    _find = _cat_file = _rm_file = _pipe_file


@pytest.fixture(scope="module", autouse=True)
def loop() -> None:
    """Start the thread with fsspec's loop, which stays."""
    get_loop()


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Store]]:
    """Of which ``like://`` is made. Nothing waits for it."""
    monkeypatch.setattr(object_store, "time", Clock())
    fsspec.register_implementation("like", _Store, clobber=True)
    _Store.opening, _Store.request, _Store.asked = _pass, _pass, 0
    yield _Store
    ObjectStore._opened.clear()


def _pass() -> None:
    pass


def _raising(error: Exception) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def _of(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store be one of a package's."""
    monkeypatch.setattr(_Store, "__module__", f"{package}.core")


class _Answer(Exception):
    """As gcsfs has them, and azure's packages."""

    def __init__(self, words: str, **fields: Any) -> None:
        super().__init__(words)
        self.__dict__.update(fields)


class ClientAuthenticationError(_Answer):
    """As azure's packages raise it if there is nobody to send a request."""


def test_a_package_is_known_by_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_of(_Store) is Package
    for name, package in {"s3fs": S3, "gcsfs": Google, "adlfs": Azure}.items():
        _of(name, monkeypatch)
        assert package_of(_Store) is package
        assert package_of(type("Extended", (_Store,), {})) is package


def test_an_account_that_is_missing_is_said_when_the_store_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    _of("adlfs", monkeypatch)
    _Store.opening = _raising(ValueError("unable to connect"))
    with pytest.raises(StoreFailed, match=r"like://: it can't be opened: .*unable to connect; set AZURE_STORAGE_CONNE"):
        ObjectStore.opened("like")


def test_opening_a_store_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.002,request=1")
    over = threading.Event()
    _Store.opening = over.wait
    try:
        with pytest.raises(StoreFailed, match=r"was not ready within 1\.00 s: it asks for an account at a server"):
            ObjectStore.opened("like")
    finally:
        over.set()


def test_a_request_without_an_answer_is_told_with_its_limit() -> None:
    _Store.request = _raising(FSTimeoutError())
    with pytest.raises(StoreFailed, match=r"attempts? in .*TimeoutError: no answer within 75"):
        ObjectStore.opened("like").put("bucket/x", b"1")


def test_a_prefix_that_is_itself_a_key_has_nothing_below_it() -> None:
    _Store.request = lambda: ["bucket/x"]
    assert ObjectStore.opened("like").sizes("bucket/x") == {}


@pytest.mark.parametrize(
    ("package", "error", "words"),
    [
        ("gcsfs", OSError("Forbidden: http://x\nno right"), "the store refuses it: Forbidden: http://x no right$"),
        ("gcsfs", _Answer("no right", code=403), "the store refuses it: no right$"),
        ("gcsfs", _Answer("Anonymous caller", code=401), r": Anonymous caller \(gcsfs found no account: set GOOGLE_"),
        ("adlfs", _Answer("no right\nRequestId:1", status_code=403, error_code="Denied"), "it: Denied: no right$"),
        ("adlfs", _Answer("no container\n<?xml", status_code=404), "there is no such bucket: make it first .*no cont"),
        ("adlfs", ClientAuthenticationError("no token\nAttempted"), r"refuses it: no token \(set AZURE_STORAGE_CONN"),
    ],
)  # fmt: skip
def test_what_a_store_refuses_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, package: str, error: Exception, words: str
) -> None:
    opened = _opened(package, monkeypatch)
    _Store.request = _raising(error)
    with pytest.raises(StoreFailed, match=words):
        opened.put("bucket/x", b"1")
    assert _Store.asked == 1


@pytest.mark.parametrize(
    ("package", "error", "words"),
    [
        ("gcsfs", _Answer("Invalid Credentials, 401", code=401), "_Answer: Invalid Credentials, 401;"),
        ("gcsfs", _Answer("busy", code=503), "_Answer: busy;"),
        ("adlfs", _Answer("busy\n<?xml", status_code=503, error_code="ServerBusy"), r"OSError: ServerBusy: busy \(503"),
        ("adlfs", _Answer("cut off"), "_Answer: cut off;"),
    ],
)  # fmt: skip
def test_what_may_pass_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, package: str, error: Exception, words: str
) -> None:
    opened = _opened(package, monkeypatch)
    _Store.request = _raising(error)
    with pytest.raises(StoreFailed, match=rf"the store did not do it, 17 attempts in 56\.30 s: {words}"):
        opened.put("bucket/x", b"1")
    assert _Store.asked == 17


def _opened(package: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Open a store of a package, which has what the package's own has."""
    _of(package, monkeypatch)
    monkeypatch.setattr(_Store, "_request", _pass, raising=False)
    monkeypatch.setattr(_Store, "credentials", None, raising=False)
    monkeypatch.setattr(_Store, "service_client", None, raising=False)
    return ObjectStore.opened("like")


def test_gcsfs_sends_a_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(_: object) -> str:
        return "once"

    def often(_: object) -> str:
        return "often"

    often.__wrapped__ = once  # type: ignore[attr-defined]
    _of("gcsfs", monkeypatch)
    monkeypatch.setattr(_Store, "_request", often, raising=False)
    assert Google(_Store).fs._request() == "once"


def test_adlfs_sends_a_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SimpleNamespace(total_retries=3)
    _of("adlfs", monkeypatch)
    client = SimpleNamespace(_config=SimpleNamespace(retry_policy=policy))
    monkeypatch.setattr(_Store, "service_client", client, raising=False)
    Azure(_Store)
    assert policy.total_retries == 0


def test_of_gcsfs_the_file_system_without_grpc_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Store, "_request", _pass, raising=False)
    _of("gcsfs", monkeypatch)
    extended = type("Extended", (_Store,), {"__module__": "gcsfs.extended_gcsfs"})
    assert type(Google(extended).fs) is _Store
    users = type("Users", (extended,), {"__module__": "users"})
    assert type(Google(users).fs) is users


async def _close() -> None:
    pass


def test_what_adlfs_does_at_the_end_of_a_process_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _of("adlfs", monkeypatch)
    monkeypatch.setattr(_Store, "service_client", None, raising=False)
    done: list[str] = []

    def opening(fs: _Store) -> None:
        weakref.finalize(fs, sync, fs.loop, _close)
        weakref.finalize(fs, done.append, "other")

    monkeypatch.setattr(_Store, "__init__", _then(opening))
    ends = [finalizer.peek() for finalizer in store_packages._finalizers(Azure(_Store).fs)]
    assert {end[1]: end[3] for end in ends if end} == {done.append: {}, sync: {"timeout": store_packages._CLOSING}}


def _then(act: Callable[[_Store], None]) -> Callable[..., None]:
    def init(self: _Store, **options: Any) -> None:
        AsyncFileSystem.__init__(self, **options)
        act(self)

    return init


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # (a process with threads, which is what this is about)
def test_a_forked_process_neither_closes_nor_frees_what_it_has_inherited() -> None:
    store = ObjectStore.opened("like")
    finalizer = weakref.finalize(store._fs, sync, store._fs.loop, _close)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        signal.alarm(20)  # where it waits for the thread of the loop that it does not have
        freed = weakref.ref(store._fs)
        atexit = finalizer.atexit
        ObjectStore._opened.clear()
        store._package.__dict__.clear()
        store.__dict__.clear()
        gc.collect()
        os.write(writing, f"{atexit} {freed() is None}".encode())
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert os.read(reading, 100) == b"False False"
    assert finalizer.atexit, "and here it is closed"
    finalizer.detach()
    os.close(reading)
    os.close(writing)
