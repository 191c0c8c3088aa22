"""Every private torch name that this package uses, each with the reason and the release.

Nothing else in the package reaches below torch's public interface. All names were tried on torch
2.11 to 2.15.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    # Which backward pass is running (-1: none); the key of recomputed tensors. Since 1.13.
    _current_graph_task_id as current_graph_task_id,
)
from torch._C import (
    # Values that autograd hands on to its device threads; Python's own thread-locals stay
    # behind. Since 1.13.
    _get_obj_in_tls as get_autograd_local,
)
from torch._C import (
    _is_key_in_tls as has_autograd_local,
)
from torch._C import (
    # Whether any dispatch mode is active; see `detach`. Since 2.0.
    _len_torch_dispatch_stack as dispatch_mode_count,
)
from torch._C import (
    # Whether any torch-function mode is active; the cheap test before asking for the default
    # device, which only such a mode can change. Since 2.0.
    _len_torch_function_stack as function_mode_count,
)
from torch._C import (  # type: ignore[attr-defined]
    # What torch.overrides.enable_reentrant_dispatch enters, 2 µs faster. Since 2.0.
    _RestorePythonTLSSnapshot as restarted_dispatch,
)
from torch._C import (
    # Grad mode and hooks without the public context managers, which cost a region 3 µs. Since 1.10.
    _set_grad_enabled as set_grad_enabled,
)
from torch._C import (
    _stash_obj_in_tls as set_autograd_local,
)
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks,
)
from torch._C._autograd import (
    _push_saved_tensors_default_hooks as push_saved_tensors_hooks,
)
from torch._C._autograd import (
    _top_saved_tensors_default_hooks,
)

# The base class of dispatch modes; documented, but its module is named as private. Since 1.13.
from torch.utils._python_dispatch import TorchDispatchMode

# As torch.compiler.disable, which imports the compiler (seconds) as soon as it is named. Since 2.1.
outside_dynamo = torch._disable_dynamo  # type: ignore[attr-defined]

# The engine behind torch.autograd.backward: whether this pass may run another one inside a node
# (false for autograd.grad and for inputs=), and a callback at the end of the pass. Since 0.4.
_engine = torch.autograd.Variable._execution_engine
nested_backward_allowed: Callable[[], bool] = _engine.is_checkpoint_valid
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback

# The innermost pack and unpack hooks, None without any; no public name tells. Since 2.7. (Its
# argument: that a trace is under way does not matter.)
saved_tensors_hooks_in_force: Callable[[], tuple[Callable, Callable] | None] = functools.partial(
    _top_saved_tensors_default_hooks, True
)

__all__ = [
    "DispatchMode",
    "aliased_argument",
    "at_end_of_backward",
    "current_graph_task_id",
    "detach",
    "device_initialized",
    "function_mode_count",
    "get_autograd_local",
    "has_autograd_local",
    "has_ordered_effect",
    "nested_backward_allowed",
    "outside_dynamo",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "restarted_dispatch",
    "saved_tensors_hooks_in_force",
    "set_autograd_local",
    "set_grad_enabled",
]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode of this package."""

    supports_higher_order_operators = True


def detach(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor, of which active dispatch modes need not know: that costs 5 µs. Since 2.0."""
    if dispatch_mode_count() and type(tensor) is torch.Tensor:
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return tensor.detach()
    return tensor.detach()


def device_initialized(device_type: str) -> bool:
    """Whether a type of device is in use; not every module has `is_initialized`. Since 2.0."""
    return bool(getattr(getattr(torch, device_type, None), "_initialized", False))


def aliased_argument(operator: Any) -> int | None:
    """Return which argument a view or in-place operator's result is an alias of. Since 1.12."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not any(result.alias_info for result in schema.returns):
        return None
    aliased = (i for i, argument in enumerate(schema.arguments) if argument.alias_info)
    return next(aliased, None)


def has_ordered_effect(operator: Any) -> bool:
    """Whether an operator must keep its place among others; the registry has no public reader.

    Since 2.4. Where nothing has imported the registry, nothing has been registered in it.
    """
    registry = sys.modules.get("torch._higher_order_ops.effects")
    return registry is not None and registry._get_effect(operator) is registry._EffectType.ORDERED
