"""POSIX semaphores in shared memory: the only thing ranks synchronise by.

Note [Memory ordering]
~~~~~~~~~~~~~~~~~~~~~~
Python has no atomics, and a plain store of a counter after a plain store of data says nothing about the order in which
another core sees them: on x86-64 stores become visible in program order, on Arm they do not. (A shared-memory
all-reduce in gloo failed on exactly that.) So no rank ever learns from a plain word that data is ready. Every
hand-over is a semaphore:

- the writer stores the data, then calls ``sem_post``;
- the reader calls ``sem_trywait`` or ``sem_clockwait`` on that semaphore, and reads the data only after it succeeded.

POSIX lists both among the functions that synchronise memory (IEEE Std 1003.1, section 4.12), so what the writer stored
before the post is visible to the reader that took that post. glibc and musl implement it with a release on the post
and an acquire on the successful wait, on every architecture: on x86-64 with a locked instruction, on Arm with
load-acquire/store-release or the acquire/release forms of CAS. Neither side's compiler can move the accesses across:
they are made by other functions (torch's kernels, CPython's memoryview, ``memcpy``) than the one that posts.

That covers every shared byte, one by one:

=====================  ==================================  ============================================================
what                   writer -> reader                    handed over by
=====================  ==================================  ============================================================
fingerprint headers    each rank -> all                    the round's token [from][to]
stages                 each rank -> all                    the round's token; reuse: the tokens of the rounds between
                                                           (Note [Rounds])
reduced part of stage  its owner -> all                    the next round's token
failure record         the rank that claimed it -> all     the claim (a semaphore of value 1) makes one writer;
                                                           notice[to] hands over the text
message boxes          sender -> receiver, and back        full[from][to], free[from][to]; the wake-up only ends a sleep
identity page          rank 0 -> all                       the rendezvous store: written before the segment's name is
                                                           published there, read after the name was read
presence words         each rank -> all                    nothing: one aligned word, 0 or 1, which no data
                                                           goes with: it can only make a waiting rank give up
=====================  ==================================  ============================================================

A rank that runs ahead may have written the next header while a late rank builds an error message from the last one:
messages are composed from headers whose token was taken, except for the words "last seen at", which are a hint.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

from lockstep.errors import LockstepError

_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


# Two handles to the C library: calls that return at once keep the interpreter's lock (releasing it would cost more than
# the call) and leave errno alone, which costs as much; the call that sleeps releases the lock.
_quick = ctypes.PyDLL(None)
_sleeping = ctypes.CDLL(None, use_errno=True)

#: ``post(address)``: hand over. Returns 0.
post = _quick.sem_post
post.argtypes = (ctypes.c_void_p,)
#: ``trywait(address)``: 0 if a post was taken, -1 if there is none.
trywait = _quick.sem_trywait
trywait.argtypes = (ctypes.c_void_p,)

#: ``copy(target, source, nbytes)``: memory to memory, for a few kilobytes: a third of what a tensor's ``copy_`` costs.
copy = _quick.memcpy
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy.restype = None

_init = _sleeping.sem_init
_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)

# glibc has it since 2.30, musl not; without it a rank that waits naps instead (see _nap).
_clockwait = getattr(_sleeping, "sem_clockwait", None)
if _clockwait is not None:
    _clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


def drain(address: int) -> None:
    """Take all posts that are there."""
    while trywait(address) == 0:
        pass


def initialise(address: int, value: int) -> None:
    """Make the semaphore at ``address``, shared between processes, with ``value`` posts."""
    if _init(address, 1, value) != 0:
        code = ctypes.get_errno()
        raise LockstepError(
            f"this system has no POSIX semaphores that processes can share ({os.strerror(code)}): "
            'use the backend "gloo" here'
        )


def wait(address: int, seconds: float) -> bool:
    """Sleep until a post can be taken, ``seconds`` have passed or a signal came; True if one was taken."""
    if _clockwait is None:
        return _nap(address, seconds)
    moment = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
    limit = _Timespec(moment // 1_000_000_000, moment % 1_000_000_000)
    if _clockwait(address, _CLOCK_MONOTONIC, ctypes.byref(limit)) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(code, f"sem_clockwait: {os.strerror(code)}")
    return False


def _nap(address: int, seconds: float) -> bool:
    """Do as :func:`wait`, by naps of up to a millisecond (sem_timedwait uses the wall clock, which may be set back)."""
    limit = time.monotonic() + seconds
    pause = 50e-6
    while trywait(address) != 0:
        left = limit - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, 1e-3)
    return True
