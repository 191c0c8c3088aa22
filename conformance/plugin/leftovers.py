"""What a test may leave in the process beside ambient state: replaced attributes of torch, child
processes, threads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.autograd.graph": torch.autograd.graph,
    "torch.nn.functional": torch.nn.functional,
    "torch.nn.Module": torch.nn.Module,
}

_TORCH_FOLDER = str(Path(torch.__file__).parent)


class Leftovers:
    """Remembers the process as it was when made; :meth:`undo` puts it back."""

    def __init__(self) -> None:
        self._attributes = {name: dict(vars(space)) for name, space in _NAMESPACES.items()}

    def undo(self) -> list[str]:
        """Undo what can be undone and name everything that was found."""
        found = self._attributes_put_back()
        for child in _children():
            # Children started by the suite's own machinery do not exist between tests.
            if _is_torchs_symbolizer(child):
                continue
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            found.append("a child process")
        if any(_counts(thread) for thread in threading.enumerate()):
            found.append("a thread that does not end")
        return sorted(set(found))

    def _attributes_put_back(self) -> list[str]:
        found = []
        for name, before in self._attributes.items():
            space = _NAMESPACES[name]
            now = vars(space)
            for attribute, value in list(before.items()):
                current = now.get(attribute)
                if current is value:
                    continue
                if _is_torchs_own(current):
                    # torch wraps some functions when its compiler is first imported.
                    before[attribute] = current
                else:
                    found.append(f"{name}.{attribute}")
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(space, attribute, value)
        return found


def _is_torchs_own(value: Any) -> bool:
    """Whether the code of ``value`` stands in torch's own files."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH_FOLDER)


def _counts(thread: threading.Thread) -> bool:
    """A thread that keeps the process from ending and is none of the suite's."""
    if thread is threading.main_thread() or thread.daemon:
        return False
    if getattr(thread, "_conformance_seen", False):
        return False
    thread._conformance_seen = True  # type: ignore[attr-defined]
    return True


def _is_torchs_symbolizer(child: int) -> bool:
    """Whether it is the addr2line that torch starts for a stack trace in C++ and uses again for
    the next one; without it every later trace (debug=True) raises."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{child}/comm").read_text().strip() == "addr2line"
    return False


def _children() -> list[int]:
    """Process ids of this process's children; empty where the system does not tell."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(part) for part in path.read_text().split()]
    return found
