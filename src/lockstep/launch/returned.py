"""What a function that ``lockstep.spawn`` calls returns, on its way from the rank to the program that spawned it.

It goes through a memory file that the program has made and the rank has inherited: never over disk or network. A file
takes results of any size without anybody reading meanwhile, and a rank that dies leaves nothing behind.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import IO, Any

from lockstep.errors import said
from lockstep.launch import by_value as typed

# Note [Values that can't be sent]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Functions written for torch's spawn, which drops what they return, may return anything: a model with hooks, a file.
# Such a function has done its work, so this fails nothing: the program gets None in its place and a warning with the
# reason.


class NotReturned(Exception):
    """A rank's value could not be sent, or not be read here; the message says why."""


class Returned:
    """The value of one rank, in the program that spawned it."""

    def __init__(self) -> None:
        self._file: int | None = os.memfd_create("lockstep-returned")
        self._value: Any = None
        #: The reason why there is no value, though the rank returned one; empty: there is one.
        self._reason = ""

    @property
    def descriptor(self) -> int:
        """What the rank writes to."""
        assert self._file is not None, "it is asked for before the rank has ended"
        return self._file

    def take(self) -> Any:
        """Return the value, once the rank has ended; None: it has left without returning.

        Raises:
            NotReturned: it could not be sent; see Note [Values that can't be sent].
        """
        if self._file is not None:
            self._read(self._file)
        if self._reason:
            raise NotReturned(self._reason)
        return self._value

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as file:
            self._file = None
            file.seek(0)
            if not file.read(1):  # the rank has left otherwise
                return
            file.seek(0)
            self._reason = pickle.load(file) or ""  # noqa: S301  (from this process's own rank, see above)
            if not self._reason:
                try:
                    self._value = pickle.load(file)  # noqa: S301
                except Exception as error:  # noqa: BLE001  (whatever the value's own classes raise)
                    self._reason = f"{type(error).__name__}: {said(error)}"

    def close(self) -> None:
        """Drop the value if no caller has asked for it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    __del__ = close


def send(descriptor: int, value: object, *, by_value: bool = False) -> None:
    """Write the value that this rank's function has returned, or why that can't be, and close the descriptor.

    Args:
        descriptor: of the file for it.
        value: what was returned.
        by_value: whether its class may have been typed at a prompt; see by_value.py.
    """
    with os.fdopen(descriptor, "wb") as file:
        pickle.dump(None, file)
        try:
            pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
            (typed.pickler(file, first=pickler.reducer_override) if by_value else pickler).dump(value)
        except Exception as error:  # noqa: BLE001  (whatever the value's own classes raise)
            file.seek(0)
            pickle.dump(f"{type(error).__name__}: {said(error)}", file)


class _Pickler(pickle.Pickler):
    """Sends tensors of devices as tensors of the CPU: the program that spawns may have none of the ranks' devices, and
    is not to open one."""

    def __init__(self, file: IO[bytes] | io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self._torch: Any = sys.modules.get("torch")  # where it is not imported there are no tensors

    def reducer_override(self, value: object) -> Any:
        """Decide how ``value`` is pickled; ``NotImplemented``: as pickle itself would."""
        if self._torch is None or not isinstance(value, self._torch.Tensor):
            return NotImplemented
        if value.device.type == "cpu" or value.is_meta:  # one of no device has nothing that could be copied
            return NotImplemented
        return _on_cpu(self._torch, value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _on_cpu(torch_module: Any, value: Any) -> Any:
    there = value.detach().cpu()
    if isinstance(value, torch_module.nn.Parameter):
        return torch_module.nn.Parameter(there, requires_grad=value.requires_grad)
    return there.requires_grad_(value.requires_grad)
