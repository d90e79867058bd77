"""What differs between the packages that fsspec has for object stores: how each is opened, and what its errors mean.

Note [Packages of stores]
~~~~~~~~~~~~~~~~~~~~~~~~~
Requests, and what is made of them, are the same for every store (``object_store.py``). What is not stands here, an
object for each package:

- *Each request is sent once.* s3fs, gcsfs and adlfs send one again by themselves if it fails, two of them with pauses
  that take most of ``Times.request`` or all of it, so that a server that is busy costs a quarter of a minute and one
  that is away is reported as late. ``ObjectStore`` does that for all of them, and says so. gcsfs and adlfs have no
  option for it.
- *An error has Python's class.* s3fs raises ``PermissionError`` and ``FileNotFoundError`` of what a store refuses and
  has not; gcsfs and adlfs have classes and words of their own for some of that.
- *What is done at the end of a process has a limit.* adlfs closes its connections there by a request to its loop
  without one.

Note [Left to the parent]
~~~~~~~~~~~~~~~~~~~~~~~~~
A process that is forked from one with an open store inherits its connections and what closes them at the end of a
process, but not the thread in which their loop runs. adlfs would wait for that thread without end. And whoever closes
a connection takes it from the loop's selector, which the two processes share: the parent would not hear the answer to
its next request, and wait for it as long as it may. So in the new process what was inherited is neither closed nor
freed; the kernel takes its part of it when it ends.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from lockstep.text import in_one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: Seconds that closing connections may take at the end of a process.
_CLOSING = 2.0


class Package:
    """A file system of one of fsspec's packages. It keeps nothing of what it has listed, and sends a request once.

    See Note [Packages of stores].

    Args:
        kind: the class of the file system.
    """

    #: The words that say whose account the package uses.
    account = "the account as the package expects it"

    def __init__(self, kind: type[AbstractFileSystem]) -> None:
        self.fs = kind(skip_instance_cache=True, use_listings_cache=False)
        if hasattr(self.fs, "retries"):
            self.fs.retries = 1

    def leave_to_parent(self) -> None:
        """Leave the file system alone that this process has inherited. See Note [Left to the parent]."""
        for finalizer in _finalizers(self.fs):
            finalizer.atexit = False
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.fs))

    def translated(self, error: Exception) -> Exception:
        """Return an error as an instance of Python's own class for it; any other as it is."""
        return error


class S3(Package):
    """s3fs: its errors have Python's classes already."""

    account = "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class Google(Package):
    """gcsfs, without its requests by gRPC.

    By default it asks over gRPC what kind of bucket it has to do with. Where it gets no answer (no right to ask, an
    emulator), it asks again before each request, with a warning each time and a search for credentials that may take
    half a minute; and gRPC has threads, which no fork of a DataLoader's workers copies. Only zonal buckets need it.
    """

    account = "GOOGLE_APPLICATION_CREDENTIALS"

    def __init__(self, kind: type[AbstractFileSystem]) -> None:
        if kind.__module__ == "gcsfs.extended_gcsfs":
            kind = next(base for base in kind.__mro__ if base.__module__ == "gcsfs.core")
        super().__init__(kind)
        once = getattr(getattr(kind, "_request", None), "__wrapped__", None)
        if once is not None:
            self.fs._request = once.__get__(self.fs)

    def translated(self, error: Exception) -> Exception:
        """See the class above. A token that is out of date (401, too) may be renewed before the next attempt."""
        words = in_one_line(str(error))
        code = str(getattr(error, "code", ""))
        if code == "401" and "Invalid Credentials" not in words:
            if getattr(self.fs.credentials, "credentials", None) is None:
                words += f" (gcsfs found no account: set {self.account})"
            return PermissionError(words)
        if code == "403" or (type(error) is OSError and words.startswith("Forbidden")):
            return PermissionError(words)
        return error


class Azure(Package):
    """adlfs."""

    account = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"

    def __init__(self, kind: type[AbstractFileSystem]) -> None:
        super().__init__(kind)
        policy = getattr(getattr(self.fs.service_client, "_config", None), "retry_policy", None)
        if policy is not None and hasattr(policy, "total_retries"):
            policy.total_retries = 0
        _limit_end(self.fs)

    def translated(self, error: Exception) -> Exception:
        """See the class above. An error's text has the whole answer in XML, of which the first line is for people."""
        status = getattr(error, "status_code", None)
        words = str(error).partition("\n")[0]
        code = getattr(getattr(error, "error_code", None), "value", None) or getattr(error, "error_code", None)
        words = f"{code}: {words}" if code else words
        if status in (401, 403):
            return PermissionError(words)
        if status == 404:
            return FileNotFoundError(words)
        if type(error).__name__ in ("ClientAuthenticationError", "CredentialUnavailableError"):
            return PermissionError(f"{words} (set {self.account})")
        return error if status is None else OSError(f"{words} ({status})")


def package_of(kind: type[AbstractFileSystem]) -> type[Package]:
    """Return what opens file systems of a class, which may extend a package's own."""
    found = {"s3fs": S3, "gcsfs": Google, "adlfs": Azure}
    modules = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((found[module] for module in modules if module in found), Package)


def _finalizers(fs: AbstractFileSystem) -> list[weakref.finalize[Any, Any]]:
    """Return what is to be done when a file system is freed, or at the end of the process."""
    found = [reference.__callback__ for reference in weakref.getweakrefs(fs)]
    return [each for each in found if isinstance(each, weakref.finalize)]


def _limit_end(fs: AbstractFileSystem) -> None:
    """Give a limit to the requests that a file system makes at the end of a process."""
    from fsspec.asyn import sync

    for finalizer in _finalizers(fs):
        whole = finalizer.peek()
        if whole is not None and whole[1] is sync:
            finalizer.detach()
            weakref.finalize(fs, sync, *whole[2], **{**(whole[3] or {}), "timeout": _CLOSING})
