"""Ends a worker that a candidate has made unusable: hung in native code, or out of memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

GRACE = 2.0
"""Seconds after the test's own limit. The limit raises inside Python code; only what cannot be
interrupted so (a deadlock or an endless loop in native code) is still there afterwards."""

HANG_PREFIX = "hang-"


class TimeLimitReached(BaseException):
    """Raised inside a test that takes too long; no ``except Exception`` of a candidate stops it."""


class TimeLimit:
    """Ends one test after its limit, and the process where that does not help.

    An alarm raises :class:`TimeLimitReached` in the test. (pytest-timeout would do the same, but
    needs a terminal reporter, which xdist's workers have not.)

    ``faulthandler`` waits in a thread of its own that needs no interpreter lock. What it writes
    into ``hang-PID.txt`` tells the runner that the process did not crash but hung.
    """

    def __init__(self, limit: float, directory: Path) -> None:
        self._limit = limit
        self._directory = directory

    @contextlib.contextmanager
    def around(self, test: str) -> Iterator[None]:
        """Watch one test."""
        path = self._directory / f"{HANG_PREFIX}{os.getpid()}.txt"
        with path.open("w", encoding="utf-8") as file:
            file.write(test + "\n")
            file.flush()
            faulthandler.dump_traceback_later(self._limit + GRACE, exit=True, file=file)
            before = signal.signal(signal.SIGALRM, self._raise)
            signal.setitimer(signal.ITIMER_REAL, self._limit)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                faulthandler.cancel_dump_traceback_later()
        path.unlink(missing_ok=True)

    def _raise(self, number: int, frame: object) -> None:
        raise TimeLimitReached(f"Timeout: took more than {self._limit:g} s")


def limit_memory(mebibytes: int) -> None:
    """Let this process grow by at most ``mebibytes`` of address space from now on; what goes over
    it raises MemoryError, or RuntimeError from torch's allocator, inside the test."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    bound = now + mebibytes * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))
