"""Keeps pytest's log handlers out of a test's way, and a test's own out of the next one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


def _loggers() -> list[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return [logging.getLogger(), *(log for log in known if isinstance(log, logging.Logger))]


@contextlib.contextmanager
def quiet_loggers() -> Iterator[None]:
    """Take pytest's log handlers away for the block and put every logger's handlers back after it.

    pytest's handlers, on the root logger and on those that do not propagate, format each record and
    keep it with its arguments. A candidate that records operators through a logger (torch does
    under ``debug=True``) hands over tensors: these would be kept alive, and some of its records
    cannot be formatted at all.
    """
    before = {log: list(log.handlers) for log in _loggers()}
    for log, handlers in before.items():
        log.handlers = [h for h in handlers if not type(h).__module__.startswith("_pytest.")]
    try:
        yield
    finally:
        for log in _loggers():
            log.handlers = before.get(log, [])
