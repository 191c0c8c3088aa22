"""What recomputation may cost: how often a region runs, what it keeps, what it dispatches again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from conformance.observe import LiveStorages
from conformance.programs.compare import Difference
from conformance.programs.execute import Observed
from conformance.programs.model import InnerGrad, Program, walk
from conformance.programs.trace import Trace


def compare_runs(program: Program, expected: Observed, observed: Observed) -> Difference | None:
    """Hold the number of runs of every region against its bound.

    Forward runs a region as often as the plain run does. Each backward call may recompute it
    once, and a region at depth d once more for each of the d - 1 regions around it, whose
    recomputations run it too. Inside a graph execution group all calls together count as one.
    """
    if any(isinstance(item, InnerGrad) for item in walk(program.body)):
        return None  # Backward inside forward recomputes in forward, inside recomputation again.
    calls = min(1, len(program.plan.steps)) if program.plan.group else len(program.plan.steps)
    for region in program.regions():
        name = f"region_{region.number}"
        plain = expected.runs.get(name, 0)
        most = plain * (1 + calls * region.depth)
        runs = observed.runs.get(name, 0)
        if not plain <= runs <= most:
            return Difference(
                "runs", name, "", f"{plain} to {most}" if most > plain else str(plain), str(runs)
            )
    return None


class RegionStorages(LiveStorages):
    """Counts the storages that were made inside a region, not returned by it, and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def _watch(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        if self._depth:
            super()._watch(tensor, inputs)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a region, its insides being watched."""

        def region(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                for leaf in tree_leaves(_fields(result)):
                    if isinstance(leaf, torch.Tensor):
                        self._alive.pop(leaf.untyped_storage()._cdata, None)
            return result

        return region


def _fields(value: Any) -> Any:
    return list(vars(value).values()) if hasattr(value, "__dataclass_fields__") else value


def compare_memory(program: Program, observed: Observed) -> Difference | None:
    """What a region made and did not return must be gone after forward; after a backward through
    everything that the program gives, and at its end, also what recomputations made."""
    phases = ["after forward", "at the end"]
    steps = program.plan.steps
    if len(steps) == 1 and not steps[0].retain and set(program.outputs) <= set(steps[0].targets):
        phases.insert(1, "after backward")
    for phase in phases:
        if alive := observed.live.get(phase, 0):
            return Difference("memory", phase, "", "0 bytes made inside regions alive", str(alive))
    return None


def compare_operators(program: Program, expected: Trace, observed: Trace) -> Difference | None:
    """Hold what each recomputation dispatched against the same region's forward run.

    It must be a beginning of it, without the operators that a policy list keeps; with early stop
    it must end with the operator that saves the last tensor, at the latest. ``expected`` is a
    trace with what is saved.
    """
    stops = {
        f"region_{region.number}"
        for region in program.regions()
        if region.options.early_stop is not False and region.options.policy is None
    }
    kept = {
        f"region_{region.number}": region.options.policy
        for region in program.regions()
        if region.options.policy is not None
    }
    stops -= {f"region_{region.number}" for region in program.regions() if region.depth > 1}
    for name, number in observed.runs():
        if number == 1:
            continue
        forward = _operators(expected.of_run(name, 1))
        policy = kept.get(name)
        if policy is not None and policy.form == "constant":
            forward = [] if policy.answer.endswith("_SAVE") else forward
        elif policy is not None:
            forward = [
                operator
                for operator in forward
                if operator.removeprefix("aten.") not in policy.operators
            ]
        again = _operators(observed.of_run(name, number))
        if policy is not None:
            again = [operator for operator in again if operator not in _METADATA]
            forward = [operator for operator in forward if operator not in _METADATA]
        if again != forward[: len(again)]:
            return Difference(
                "operators",
                name,
                f", recomputation {number - 1}",
                f"a beginning of {forward}",
                str(again),
            )
        needed = _until_last_saved(expected.of_run(name, 1))
        if name in stops and len(again) > needed:
            return Difference(
                "operators",
                name,
                f", recomputation {number - 1}",
                f"at most {needed} operators, {forward[:needed]}",
                str(again),
            )
    return None


def _until_last_saved(events: list[str]) -> int:
    """How many operators a run needs: those before its last saved tensor, and the one behind,
    which may save what it was given before it runs."""
    last = max(
        (index for index, event in enumerate(events) if event.startswith("saved")), default=0
    )
    return len(_operators(events[:last])) + 1


# Never shown to a policy, so never kept.
_METADATA = {"aten.detach.default"}


def _operators(events: list[str]) -> list[str]:
    return [event.split()[1] for event in events if event.startswith("operator ")]
