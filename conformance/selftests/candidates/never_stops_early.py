"""Recomputes every function to its end."""

from conformance.selftests.candidates import _torch
from conformance.selftests.candidates._torch import *  # noqa: F403


def checkpoint(function=None, *args, **kwargs):
    if function is None:
        wrap = _torch.checkpoint(**kwargs)

        def decorate(wrapped):
            inner = wrap(wrapped)

            def call(*a, **k):
                with _torch.set_checkpoint_early_stop(False):
                    return inner(*a, **k)

            return call

        return decorate
    with _torch.set_checkpoint_early_stop(False):
        return _torch.checkpoint(function, *args, **kwargs)
