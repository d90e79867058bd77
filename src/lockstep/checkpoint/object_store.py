"""The few requests to an object store that checkpoints are made of, each with a limit. By fsspec.

Note [Requests]
~~~~~~~~~~~~~~~
A request ends within ``Times.request``: fsspec's asynchronous file systems are told so from outside, whatever their
own limits are. So does opening a store, for which gcsfs may ask a server for credentials that does not answer. A
request that fails in a way that may pass (a connection that is refused or cut, an answer that is late, an error of
the server) is sent again, at growing intervals, until ``Times.outage`` has passed since the first time; what the
store refuses for good (no right, no such bucket, no room) is not. Every request can be sent twice: what is written
has a name of its own and the same content each time, and what is created is read back where the answer does not say
whose it is. What differs from store to store is in ``store_packages.py``.

Note [Create if absent]
~~~~~~~~~~~~~~~~~~~~~~~
``pipe_file(…, mode="create")`` makes an object unless there is one: S3 by ``If-None-Match: *``, Google's store by
``ifGenerationMatch=0``, Azure's by ``If-None-Match: *`` as well. What the answer was is told apart by reading the
object back and not by the error, which differs from store to store (and the answer to a request that succeeded may be
lost, so that the second attempt finds the first one's object): it is there with the content that was given, or with
another one, or it is not there.

A file system may also ignore ``mode``. So a run's owner tries it before it relies on it (``StoreFolder.prepare``).

Note [Opened where it is used]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Asynchronous file systems have a thread and connections, which a fork does not copy: s3fs refuses to work in a forked
process. So a store is opened by the process that uses it, when it is first used there, and never by one that forks
ranks; a process that was forked later opens its own, and leaves the one that it has inherited alone (Note [Left to the
parent] in ``store_packages.py``).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lockstep import knobs
from lockstep.checkpoint.store_packages import Package, package_of
from lockstep.errors import CheckpointError
from lockstep.text import as_duration, counted, in_one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")

#: Requests of one process that are under way at a time: enough to fill a link, and few objects in memory.
AT_A_TIME = 4

#: Seconds between the first two attempts, and at most between two.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
#: Errors that no other attempt would change. The last are of botocore, which is not imported for its names.
_FINAL = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
_FINAL_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound")
_FINAL_OF_PROGRAM = (TypeError, ValueError, AttributeError)


class StoreFailed(CheckpointError):
    """An object store could not be opened, refused a request, or did not answer it."""

    code = "checkpoint-store"


class ObjectStore:
    """An object store. Keys name the bucket first: ``bucket/run/step-00000042/manifest.json``.

    Args:
        scheme: the kind of store: ``s3``, ``gs``, ``az``, ``memory``.

    Raises:
        StoreFailed: there is no such kind, its package is not installed or finds no account, or its requests can't be
            given a limit.
    """

    #: Scheme and process -> the store that is open there.
    _opened: ClassVar[dict[tuple[str, int], ObjectStore]] = {}

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._times = knobs.times()
        self._package = _package(scheme, limit=self._times.request)
        self._fs = self._package.fs

    @classmethod
    def opened(cls, scheme: str) -> ObjectStore:
        """Return this process's store of a kind; see Note [Opened where it is used]."""
        key = scheme, os.getpid()
        found = cls._opened.get(key)
        if found is None:
            found = cls._opened[key] = cls(scheme)
        return found

    @classmethod
    def leave_to_parent(cls) -> None:
        """In a process that was just forked: leave the stores alone that it has inherited."""
        for store in cls._opened.values():
            if store._fs.async_impl:
                store._package.leave_to_parent()

    def create(self, key: str, content: bytes) -> bool:
        """Make an object unless there is one. Return whether it is there with this content, which no other has.

        Raises:
            StoreFailed: it is not known whether it was made.
        """

        def attempt() -> bool:
            try:
                self._do("pipe_file", key, content, mode="create")
            except _FINAL_OF_PROGRAM:
                raise
            except Exception as failure:  # noqa: BLE001  (every store has its own; see Note [Create if absent])
                try:
                    there = bytes(self._do("cat_file", key))
                except FileNotFoundError:
                    raise failure from None
                return there == content
            return True

        return self._within_bucket(f"creating {self.address(key)}", attempt)

    def put(self, key: str, content: bytes, *, again: bool = True) -> None:
        """Write an object, which this process alone writes.

        Args:
            key, content: its key, and what it is to hold.
            again: False: try once.
        """
        self._within_bucket(f"writing {self.address(key)}", lambda: self._do("pipe_file", key, content), again=again)

    def get(self, key: str) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._ask(f"reading {self.address(key)}", lambda: bytes(self._do("cat_file", key)))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Read the bytes of an object from ``start`` to ``stop``.

        Raises:
            FileNotFoundError: there is no such object.
        """

        def attempt() -> bytes:
            content = bytes(self._do("cat_file", key, start=start, end=stop))
            if len(content) != stop - start:
                raise OSError(errno.EIO, f"{len(content)} bytes came, {stop - start} were asked for")
            return content

        return self._ask(f"reading {self.address(key)}", attempt)

    def sizes(self, prefix: str, *, again: bool = True) -> dict[str, int]:
        """List the objects whose keys begin with ``prefix`` and a slash: what follows that -> bytes.

        Args:
            prefix: that of the keys.
            again: False: try once.
        """

        def attempt() -> dict[str, int]:
            self._fs.invalidate_cache()
            found = self._do("find", prefix, detail=True)
            if isinstance(found, list):
                return {}  # adlfs: the prefix itself is an object's key
            start = f"{prefix}/"
            named = {str(name).lstrip("/"): info for name, info in found.items()}
            return {name[len(start) :]: int(info["size"]) for name, info in named.items() if name.startswith(start)}

        return self._within_bucket(f"listing {self.address(prefix)}", attempt, again=again)

    def remove(self, keys: Iterable[str], *, again: bool = True) -> None:
        """Remove objects; those that are gone already are none to remove.

        Args:
            keys: theirs.
            again: False: try once.
        """

        def one(key: str) -> None:
            def attempt() -> None:
                try:
                    self._do("rm_file", key)
                except FileNotFoundError:
                    return  # another process, or an attempt before this one whose answer was lost

            self._ask(f"removing {self.address(key)}", attempt, again=again)

        for _ in self.side_by_side(one, keys):
            pass

    def side_by_side(self, request: Callable[[Any], Result], each: Iterable[Any]) -> Iterator[Result]:
        """Yield what ``request`` returns of each, in order, with some of them under way at a time.

        It takes from ``each`` as it goes, and waits for the first of these before it takes another one.
        """
        with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="lockstep-store") as pool:
            under_way: list[Future[Result]] = []
            try:
                for one in each:
                    under_way.append(pool.submit(request, one))
                    if len(under_way) == AT_A_TIME:
                        yield under_way.pop(0).result()
                while under_way:
                    yield under_way.pop(0).result()
            finally:
                for future in under_way:
                    future.cancel()

    def address(self, key: str) -> str:
        """Return an object's address."""
        return f"{self.scheme}://{key}"

    def _within_bucket(self, doing: str, attempt: Callable[[], Result], *, again: bool = True) -> Result:
        """Send a request that finds nothing only where there is no bucket."""
        try:
            return self._ask(doing, attempt, again=again)
        except FileNotFoundError as error:
            raise StoreFailed(f"{doing}: there is no such bucket: make it first ({_words(error)})") from error

    def _ask(self, doing: str, attempt: Callable[[], Result], *, again: bool = True) -> Result:
        """Send a request, and send it again if that may help. See Note [Requests]."""
        begun, attempts, pause = time.monotonic(), 0, _FIRST_PAUSE
        while True:
            attempts += 1
            try:
                return attempt()
            except FileNotFoundError:
                raise
            except Exception as error:
                spent = time.monotonic() - begun
                if _is_final(error):
                    raise StoreFailed(f"{doing}: the store refuses it: {_words(error)}") from error
                if not again or spent + pause > self._times.outage:
                    tries = f"{counted(attempts, 'attempt')} in {as_duration(spent)}"
                    raise StoreFailed(
                        f"{doing}: the store did not do it, {tries}: {_words(error)}; look whether it can be reached "
                        "from this machine"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _do(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out an operation of the file system, within the limit."""
        if not self._fs.async_impl:
            return getattr(self._fs, operation)(*args, **options)
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        limit = self._times.request
        try:
            return sync(self._fs.loop, getattr(self._fs, f"_{operation}"), *args, timeout=limit, **options)
        except FSTimeoutError as error:
            raise TimeoutError(f"no answer within {as_duration(limit)}") from error
        except Exception as error:
            translated = self._package.translated(error)
            if translated is error:
                raise
            raise translated from error


os.register_at_fork(after_in_child=ObjectStore.leave_to_parent)


def _package(scheme: str, *, limit: float) -> Package:
    """Open a file system of fsspec's for this process, within a limit in seconds."""
    kind = _kind(scheme)
    package = package_of(kind)
    opened: Future[Package] = Future()

    def open_it() -> None:
        try:
            opened.set_result(package(kind))
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            opened.set_exception(error)

    threading.Thread(target=open_it, name="lockstep-store-opening", daemon=True).start()
    try:
        failure = opened.exception(limit)
    except NotDone as error:
        raise StoreFailed(
            f"{scheme}://: {kind.__module__} was not ready within {as_duration(limit)}: it asks for an account at a "
            f"server that does not answer; set {package.account}"
        ) from error
    if failure is not None:
        words = _words(failure) if isinstance(failure, Exception) else repr(failure)
        raise StoreFailed(f"{scheme}://: it can't be opened: {words}; set {package.account}") from failure
    return opened.result()


def _kind(scheme: str) -> type[AbstractFileSystem]:
    """Return fsspec's class for a kind of store."""
    try:
        import fsspec
        from fsspec.implementations.memory import MemoryFileSystem
    except ImportError as error:
        raise StoreFailed(f"{scheme}://: {_install('fsspec')} ({error})") from error
    try:
        kind: type[AbstractFileSystem] = fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise StoreFailed(f"{scheme}://: fsspec knows no store of this kind ({error})") from error
    except ImportError as error:
        raise StoreFailed(f"{scheme}://: {_install(f'the package of fsspec for {scheme}://')} ({error})") from error
    if not kind.async_impl and not issubclass(kind, MemoryFileSystem):
        raise StoreFailed(
            f"{scheme}://: requests of {kind.__module__} can't be given a limit, so a run could wait without end: use "
            "an object store such as s3://, gs:// or az://, or mount it and give the path"
        )
    return kind


def _install(what: str) -> str:
    return f"this needs {what}: pip install 'torch-lockstep[storage]'"


def _is_final(error: Exception) -> bool:
    return (
        isinstance(error, (*_FINAL, *_FINAL_OF_PROGRAM))
        or type(error).__name__ in _FINAL_NAMES
        or (isinstance(error, OSError) and error.errno in _FINAL_NUMBERS)
    )


def _words(error: Exception) -> str:
    """Return what a store's library says, in one line."""
    text = in_one_line(str(error))
    return text if isinstance(error, PermissionError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
