"""Calling a checkpoint: the direct form, the decorator form and what each argument may be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from reference_impl.debug import OperatorTrace, debug_in_force
from reference_impl.determinism import require_known_check
from reference_impl.options import ContextPair, Options, noop_context_fn
from reference_impl.recomputation import Region, suppressed_failure
from reference_impl.reentrant import CheckpointFunction
from reference_impl.torch_private import outside_dynamo
from reference_impl.warn import warn_caller


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function without keeping its intermediate tensors; recompute them in backward.

    Without `function` it returns a decorator that has the given configuration; keyword arguments
    of the decorated function's calls all go to that function.

    Args:
        function: any callable. It must do the same when it is called again in backward.
        *args: its arguments. Tensors of any shape, dtype and device; other values are passed as
            they are.
        use_reentrant: which variant. Pass it: without it there is a UserWarning and the reentrant
            variant is used. False is recommended; True supports only ``backward()`` without
            `inputs`, needs an input with requires_grad, ignores tensors nested in containers,
            and always recomputes the whole function.
        preserve_rng_state: replay the random-number state of the CPU, and of each accelerator that
            holds a tensor argument, for the recomputation.
        context_fn: returns two context managers: the function runs in the first, its recomputation
            in the second. Each recomputation enters the second anew. Only use_reentrant=False.
        determinism_check: "default" compares shape, dtype and device of recomputed tensors with
            the saved ones; "none" does not. Without effect if use_reentrant=True.
        debug: add the operators of both runs to error messages. Only use_reentrant=False, and not
            together with `context_fn`.
        early_stop: end the recomputation as soon as every needed tensor is there. Ignored if
            use_reentrant=True.
        respect_saved_tensors_hooks: whether tensors kept by selective checkpointing pass through
            the surrounding `torch.autograd.graph.saved_tensors_hooks`; None does not, with a
            FutureWarning where such hooks are in force. Only use_reentrant=False.
        **kwargs: keyword arguments of the function. Only use_reentrant=False.

    Returns:
        What the function returns, or a decorator.

    Raises:
        ValueError: an option or keyword that does not exist or does not fit the variant.
        CheckpointError: in backward, if the recomputation did not give back what was saved.

    Under ``torch.compile`` the call is a graph break: the function runs eagerly, and random state
    is always preserved. Source: documentation 2.14, checkpoint.
    """
    options = Options(
        use_reentrant,
        preserve_rng_state,
        context_fn,
        determinism_check,
        debug,
        early_stop,
        respect_saved_tensors_hooks,
    )
    if function is None and not args:
        if kwargs:
            raise ValueError(f"Unexpected keyword arguments: {', '.join(kwargs)}")
        return functools.partial(_decorate, options)
    if function is None:
        raise TypeError("checkpoint got arguments, but None as the function to call with them")
    return _call(function, options, args, kwargs)


def _decorate(options: Options, function: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorate(options, function.__func__))

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return _call(function, options, args, kwargs)

    # Name and documentation, but not the attributes: those of a module are its parameters.
    return functools.update_wrapper(checkpointed, function, updated=())


def _call(
    function: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _call_eagerly(function, options, args, kwargs)
    use_reentrant = options.use_reentrant
    if use_reentrant is None:
        warn_caller(
            "checkpoint: pass use_reentrant explicitly. Without it the reentrant variant is used; "
            "use_reentrant=False is recommended."
        )
        use_reentrant = True
    if use_reentrant:
        return _call_reentrant(function, options, args, kwargs)
    return _call_nonreentrant(function, options, args, kwargs)


@outside_dynamo
def _call_eagerly(
    function: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # compile/rng-preserved: compiled code always preserves random state.
    options = dataclasses.replace(options, preserve_rng_state=True)
    return _call(function, options, args, kwargs)


def _call_reentrant(
    function: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if kwargs:
        raise ValueError(
            f"Unexpected keyword arguments: {', '.join(kwargs)}; the reentrant variant passes "
            "none to the function (use_reentrant=False does)"
        )
    if (
        options.context_fn is not noop_context_fn
        or options.debug
        or options.respect_saved_tensors_hooks is not None
    ):
        raise ValueError(
            "context_fn, debug and respect_saved_tensors_hooks need use_reentrant=False"
        )
    return CheckpointFunction.apply(function, options.preserve_rng_state, *args)


def _call_nonreentrant(
    function: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    require_known_check(options.determinism_check)
    forward_context, recompute_context = _contexts(options)
    if not torch.is_grad_enabled():
        # Nothing will be needed in backward, so nothing is remembered.
        with forward_context:
            return function(*args, **kwargs)
        raise suppressed_failure()
    region = Region(function, args, kwargs, options, forward_context, recompute_context)
    return region.run(args, kwargs)


def _contexts(options: Options) -> ContextPair:
    if not debug_in_force(options.debug):
        return options.context_fn()
    if options.context_fn is not noop_context_fn:
        raise ValueError("debug uses the contexts of both runs itself; it excludes context_fn")
    return OperatorTrace(), OperatorTrace()
