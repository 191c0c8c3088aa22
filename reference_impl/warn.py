"""Warnings that point at the user's line, so that they can be found and filtered there."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_LIBRARIES = tuple(str(Path(file).parent) + "/" for file in (torch.__file__, __file__))
_OWN_TESTS = _LIBRARIES[1] + "tests/"


def is_user_code(filename: str) -> bool:
    """Whether a source file is neither torch's nor this package's."""
    return not filename.startswith(_LIBRARIES) or filename.startswith(_OWN_TESTS)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the nearest frame that is user code.

    warnings/direct-call-location: that line is what the reader has to change.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
