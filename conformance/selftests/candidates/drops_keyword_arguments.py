"""Keeps its own options and loses the function's keyword arguments."""

from conformance.selftests.candidates import _torch
from conformance.selftests.candidates._torch import *  # noqa: F403

_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug",
    "early_stop", "respect_saved_tensors_hooks",
)  # fmt: skip


def checkpoint(function=None, *args, **kwargs):
    kept = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    if function is None:
        wrap = _torch.checkpoint(**kept)
        return lambda wrapped: lambda *a, **k: wrap(wrapped)(*a)
    return _torch.checkpoint(function, *args, **kept)
