"""Which operators reach the dispatcher while a block runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorLog(TorchDispatchMode):
    """Logs every operator dispatched inside ``with OperatorLog() as log:``.

    Works around backward as well: on CPU the autograd engine runs in the calling thread, so the
    operators of recomputation and of gradient formulas are both seen. ``log.count("aten.mm")``
    counts any overload, ``log.count("aten.mm.default")`` that one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        """How many calls of the operator or overload ``name`` were seen."""
        return sum(seen == name or seen.startswith(name + ".") for seen in self.names)

    def counts(self) -> Counter[str]:
        """Calls per overload."""
        return Counter(self.names)

    def __bool__(self) -> bool:
        return True


def overload(name: str) -> Any:
    """The OpOverload called ``name``, such as ``aten.mm.default``."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
