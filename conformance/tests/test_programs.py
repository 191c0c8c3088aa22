"""Chapter 17: any program.

Each test draws programs of one sub-language (``conformance.programs.languages``), runs them plainly
and through the candidate, and compares everything that can be seen. A failure carries its script.
"""

from __future__ import annotations

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from conformance.candidate import Candidate
from conformance.programs import examples, languages, machines
from conformance.programs.grade import check, reported
from conformance.programs.model import Program
from conformance.programs.strategy import programs
from conformance.testing import clause

_CURRENT = settings.default
assert _CURRENT is not None
_BUDGET = _CURRENT.max_examples


def histories() -> settings:
    """Histories of at most 12 steps."""
    return settings(max_examples=_BUDGET, stateful_step_count=12)


def times(count: int) -> settings:
    """Each example of the budget stands for ``count`` programs: one costs a few milliseconds.

    ``reduce`` makes a failing program small, faster than Hypothesis's own shrinking would.
    """
    return settings(
        max_examples=count * _BUDGET,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


@clause("programs/plain")
@reported
@times(4)
@given(program=programs(languages.PLAIN))
def test_plain(ckpt: Candidate, program: Program) -> None:
    """Do operators in any combination give what they give plainly?"""
    check(program, ckpt, languages.PLAIN)


@clause("programs/detached")
@reported
@times(3)
@given(program=programs(languages.DETACHED))
def test_detached(ckpt: Candidate, program: Program) -> None:
    """Do detached parts change what a program gives?"""
    check(program, ckpt, languages.DETACHED)


@clause("programs/structures")
@reported
@times(3)
@given(program=programs(languages.STRUCTURES))
def test_structures(ckpt: Candidate, program: Program) -> None:
    """Do structured arguments and results change what a program gives?"""
    check(program, ckpt, languages.STRUCTURES)


@clause("programs/modules")
@reported
@times(3)
@given(program=programs(languages.MODULES))
def test_modules(ckpt: Candidate, program: Program) -> None:
    """Do modules and shared parameters get the plain run's gradients?"""
    check(program, ckpt, languages.MODULES)


@clause("programs/custom-functions")
@reported
@times(3)
@given(program=programs(languages.FUNCTIONS))
def test_custom_functions(ckpt: Candidate, program: Program) -> None:
    """Do custom autograd functions give what they give plainly?"""
    check(program, ckpt, languages.FUNCTIONS)


@clause("programs/backward-calls")
@reported
@times(4)
@given(program=programs(languages.BACKWARD_CALLS))
def test_backward_calls(ckpt: Candidate, program: Program) -> None:
    """Does every way of running backward give the plain gradients?"""
    check(program, ckpt, languages.BACKWARD_CALLS)


@clause("programs/disjoint-backward-calls")
@reported
@times(3)
@given(program=programs(languages.LANES))
def test_disjoint_backward_calls(ckpt: Candidate, program: Program) -> None:
    """Can parts of a region go backward in separate calls?"""
    check(program, ckpt, languages.LANES)


@clause("programs/hooks")
@reported
@times(3)
@given(program=programs(languages.HOOKS))
def test_hooks(ckpt: Candidate, program: Program) -> None:
    """Do tensor hooks and saved-tensor hooks see and do what they do plainly?"""
    check(program, ckpt, languages.HOOKS)


@clause("programs/backward-in-forward")
@reported
@times(3)
@given(program=programs(languages.BACKWARD_INSIDE))
def test_backward_in_forward(ckpt: Candidate, program: Program) -> None:
    """Can a region run backward over what it made?"""
    check(program, ckpt, languages.BACKWARD_INSIDE)


@clause("programs/early-stop")
@reported
@times(3)
@given(program=programs(languages.EARLY_STOP))
def test_early_stop(ckpt: Candidate, program: Program) -> None:
    """Does early stop, on or off, change what a program gives?"""
    check(program, ckpt, languages.EARLY_STOP)


@clause("programs/determinism-check")
@reported
@times(3)
@given(program=programs(languages.DETERMINISM))
def test_determinism_check(ckpt: Candidate, program: Program) -> None:
    """Does a deterministic program pass the determinism check?"""
    check(program, ckpt, languages.DETERMINISM)


@clause("programs/debug")
@reported
@times(1)
@given(program=programs(languages.DEBUG))
def test_debug(ckpt: Candidate, program: Program) -> None:
    """Does debug mode change what a program gives?"""
    check(program, ckpt, languages.DEBUG)


@clause("programs/debug-repeated")
@reported
@times(1)
@example(examples.DEBUG_TWICE)
@given(program=programs(languages.DEBUG_REPEATED))
def test_debug_repeated(ckpt: Candidate, program: Program) -> None:
    """Can a region in debug mode be recomputed twice?"""
    check(program, ckpt, languages.DEBUG_REPEATED)


@clause("programs/context-fn")
@reported
@times(3)
@given(program=programs(languages.CONTEXTS))
def test_context_fn(ckpt: Candidate, program: Program) -> None:
    """Does a context_fn of empty contexts change what a program gives?"""
    check(program, ckpt, languages.CONTEXTS)


@clause("programs/decorated")
@reported
@times(3)
@given(program=programs(languages.DECORATED))
def test_decorated(ckpt: Candidate, program: Program) -> None:
    """Does the decorator form give the plain run's results?"""
    check(program, ckpt, languages.DECORATED)


@clause("programs/random")
@reported
@times(4)
@given(program=programs(languages.RANDOM))
def test_random(ckpt: Candidate, program: Program) -> None:
    """Do random operators draw the plain run's numbers?"""
    check(program, ckpt, languages.RANDOM)


@clause("programs/random-reentrant")
@reported
@times(3)
@given(program=programs(languages.REENTRANT_RANDOM))
def test_random_reentrant(ckpt: Candidate, program: Program) -> None:
    """Do random operators draw the plain run's numbers in the reentrant variant?"""
    check(program, ckpt, languages.REENTRANT_RANDOM)


@clause("programs/autocast")
@reported
@times(3)
@given(program=programs(languages.AUTOCAST))
def test_autocast(ckpt: Candidate, program: Program) -> None:
    """Does recomputation run under forward's autocast state?"""
    check(program, ckpt, languages.AUTOCAST)


@clause("programs/autocast-reentrant")
@reported
@times(3)
@given(program=programs(languages.REENTRANT_AUTOCAST))
def test_autocast_reentrant(ckpt: Candidate, program: Program) -> None:
    """Does the reentrant variant recompute under forward's autocast state?"""
    check(program, ckpt, languages.REENTRANT_AUTOCAST)


@clause("programs/nested")
@reported
@times(3)
@given(program=programs(languages.NESTED))
def test_nested(ckpt: Candidate, program: Program) -> None:
    """Do nested regions give the plain run's gradients?"""
    check(program, ckpt, languages.NESTED)


@clause("programs/mixed-variants")
@reported
@times(3)
@given(program=programs(languages.MIXED))
def test_mixed_variants(ckpt: Candidate, program: Program) -> None:
    """Do regions of both variants work beside and inside each other?"""
    check(program, ckpt, languages.MIXED)


@clause("programs/reentrant")
@reported
@times(3)
@given(program=programs(languages.REENTRANT))
def test_reentrant(ckpt: Candidate, program: Program) -> None:
    """Does the reentrant variant give the plain run's results?"""
    check(program, ckpt, languages.REENTRANT)


@clause("programs/selective")
@reported
@times(4)
@given(program=programs(languages.SELECTIVE))
def test_selective(ckpt: Candidate, program: Program) -> None:
    """Does any policy leave results and gradients alone?"""
    check(program, ckpt, languages.SELECTIVE)


@clause("programs/selective-random")
@reported
@times(3)
@example(examples.KEPT_BESIDE_RANDOM)
@given(program=programs(languages.SELECTIVE_RANDOM))
def test_selective_random(ckpt: Candidate, program: Program) -> None:
    """Do random operators draw forward's numbers next to kept ones?"""
    check(program, ckpt, languages.SELECTIVE_RANDOM)


@clause("programs/respected-hooks")
@reported
@times(3)
@given(program=programs(languages.RESPECTED_HOOKS))
def test_respected_hooks(ckpt: Candidate, program: Program) -> None:
    """Do saved-tensor hooks around a selective region change what it gives?"""
    check(program, ckpt, languages.RESPECTED_HOOKS)


@clause("programs/groups")
@reported
@times(2)
@given(program=programs(languages.GROUPS))
def test_groups(ckpt: Candidate, program: Program) -> None:
    """Do disjoint backward calls in a group recompute at most once?"""
    check(program, ckpt, languages.GROUPS)


@clause("programs/sequential")
@reported
@times(3)
@given(program=programs(languages.SEQUENTIAL))
def test_sequential(ckpt: Candidate, program: Program) -> None:
    """Does checkpoint_sequential give what calling the functions gives?"""
    check(program, ckpt, languages.SEQUENTIAL)


@clause("programs/sequential-reentrant")
@reported
@times(3)
@given(program=programs(languages.SEQUENTIAL_REENTRANT))
def test_sequential_reentrant(ckpt: Candidate, program: Program) -> None:
    """Does the reentrant checkpoint_sequential give what calling the functions gives?"""
    check(program, ckpt, languages.SEQUENTIAL_REENTRANT)


@clause("programs/runs")
@reported
@times(2)
@given(program=programs(languages.RUNS))
def test_runs(ckpt: Candidate, program: Program) -> None:
    """How often does each region run?"""
    check(program, ckpt, languages.RUNS)


@clause("programs/memory")
@reported
@times(2)
@given(program=programs(languages.MEMORY))
def test_memory(ckpt: Candidate, program: Program) -> None:
    """Is anything alive that regions made and did not return?"""
    check(program, ckpt, languages.MEMORY)


@clause("programs/recomputed-operators")
@reported
@times(1)
@given(program=programs(languages.RECOMPUTED))
def test_recomputed_operators(ckpt: Candidate, program: Program) -> None:
    """Does recomputation dispatch what forward did, in order?"""
    check(program, ckpt, languages.RECOMPUTED)


@clause("programs/kept-operators")
@reported
@times(1)
@given(program=programs(languages.KEPT))
def test_kept_operators(ckpt: Candidate, program: Program) -> None:
    """Are kept operators left out of recomputation?"""
    check(program, ckpt, languages.KEPT)


@clause("programs/everything")
@reported
@times(2)
@given(program=programs(languages.EVERYTHING))
def test_everything(ckpt: Candidate, program: Program) -> None:
    """Do combinations of everything give the plain run's results?"""
    check(program, ckpt, languages.EVERYTHING)


@clause("programs/retained-graphs")
def test_retained_graphs(ckpt: Candidate) -> None:
    """Does every history of backward calls over a retained graph go as it does plainly?"""
    run_state_machine_as_test(machines.retained_graph_machine(ckpt), settings=histories())


@clause("programs/switch-histories")
def test_switch_histories(ckpt: Candidate) -> None:
    """Does a region keep the early-stop setting that it was called under?"""
    run_state_machine_as_test(machines.switch_machine(ckpt), settings=histories())


@clause("programs/group-histories")
def test_group_histories(ckpt: Candidate) -> None:
    """Does each group recompute a region at most once, and outside of groups each call?"""
    run_state_machine_as_test(machines.group_machine(ckpt), settings=histories())


@clause("programs/device-state-histories")
def test_device_state_histories(ckpt: Candidate) -> None:
    """Does each device get its own state, whatever was set before?"""
    run_state_machine_as_test(machines.device_state_machine(ckpt), settings=histories())


@clause("programs/threads")
@given(made=st.lists(programs(machines.THREADED), min_size=2, max_size=3))
def test_threads(ckpt: Candidate, made: list[Program]) -> None:
    """Do backward calls in threads of their own give what they give alone?"""
    machines.in_threads(made, ckpt)
