"""Programs of nested context managers that switch one option, with calls between them.

For ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled``: which setting is in force
at each call follows from the program alone, whatever the candidate does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Call:
    """A checkpoint call with the option given as ``argument`` (None: left out)."""

    argument: bool | None


@dataclass(frozen=True)
class Block:
    """``body`` under the context manager with ``setting``, left by an exception if ``raises``."""

    setting: bool | None
    raises: bool
    body: tuple[Any, ...]


def both_ways(*, raises: bool) -> tuple[Call | Block, ...]:
    """A fixed program in which each setting is nested in the other one and left again, so that a
    setting that outlives its block, or is undone too far, shows at the next call."""

    def block(outer: bool) -> Block:
        inner = Block(not outer, raises, (Call(outer),))
        return Block(outer, raises, (Call(not outer), inner, Call(not outer), Call(None)))

    return (block(False), Call(None), Call(True), block(True), Call(None), Call(False))


class _Left(Exception):
    """Leaves a block."""


def switch_programs(
    settings: Sequence[bool | None], *, raises: bool, calls: int = 5
) -> st.SearchStrategy[tuple[Call | Block, ...]]:
    """Programs with about ``calls`` calls; each starts and ends with a call outside of every
    block and has at least one block. With ``raises`` some blocks are left by an exception."""
    call = st.builds(Call, st.sampled_from([None, True, False]))

    def block(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        leaves = st.booleans() if raises else st.just(False)
        body = st.lists(inner, min_size=1, max_size=3).map(tuple)
        return st.builds(Block, st.sampled_from(settings), leaves, body)

    item = st.recursive(call, block, max_leaves=calls)
    return st.tuples(call, block(item), item, call)


def run_switches(
    program: Sequence[Call | Block],
    enter: Callable[[bool | None], AbstractContextManager[Any]],
    call: Callable[[bool | None, tuple[bool | None, ...]], None],
    _active: tuple[bool | None, ...] = (),
) -> None:
    """Run ``program``: ``enter(setting)`` makes a context manager, ``call(argument, settings)``
    makes a checkpoint call under ``settings``, the innermost last."""
    for item in program:
        if isinstance(item, Call):
            call(item.argument, _active)
            continue
        left = False
        try:
            with enter(item.setting):
                run_switches(item.body, enter, call, (*_active, item.setting))
                if item.raises:
                    raise _Left
        except _Left:
            left = True
        assert left == item.raises, "expected the block's exception to pass the context manager"
