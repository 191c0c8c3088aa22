"""Programs are what they claim: valid, typed truthfully, the same for a seed, and wide."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from conformance.programs import coverage, languages
from conformance.programs.execute import PLAIN, compiled, execute
from conformance.programs.language import Language
from conformance.programs.languages import LANGUAGES
from conformance.programs.model import Apply, Program, Tensor, walk
from conformance.programs.reduce import clean, reduce
from conformance.programs.render import Rendered, render
from conformance.programs.strategy import programs


def drawn(language: Language, count: int, number: int = 0) -> list[Program]:
    found: list[Program] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(language))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_drawn_program_runs_plainly(name: str) -> None:
    for program in drawn(LANGUAGES[name], 30):
        ended = execute(render(program), PLAIN)
        assert ended.error is None, f"{program}\n{ended.error!r}"


def tensors(program: Program) -> Iterator[Tensor]:
    for item in walk(program.body):
        if isinstance(item, Apply):
            yield from item.results


@pytest.mark.parametrize(
    "name", ["plain", "detached", "autocast", "everything", "custom functions"]
)
def test_shapes_dtypes_and_requires_grad_are_told_truthfully(name: str) -> None:
    seen = 0
    for program in drawn(LANGUAGES[name], 60):
        told = {tensor.name: tensor for tensor in tensors(program)}
        checks: list[tuple[str, torch.Tensor]] = []
        lines = []
        for line in render(program).source.splitlines():
            lines.append(line)
            assigned = re.match(r"( +)(v\d+(?:, v\d+)*) = (?!v\d+$)", line)
            if assigned:
                for made in assigned[2].split(", "):
                    lines.append(f'{assigned[1]}note.type("{made}", {made})')
        rendered = render(program)

        class Notes:
            def __call__(self, name: str, value: object) -> None: ...

            def state(self, phase: str) -> None: ...

            def type(self, name: str, value: torch.Tensor, checks: list = checks) -> None:
                checks.append((name, value))

        source = "\n".join(lines) + "\n"
        names = {one: getattr(PLAIN, one) for one in rendered.names}
        compiled(Rendered(source, rendered.names, ()).source)(note=Notes(), **names)
        for made, value in checks:
            if made in told:
                seen += 1
                found = (tuple(value.shape), str(value.dtype)[6:])
                expected = told[made]
                assert found == (expected.shape, expected.dtype), f"{made} in\n{program}"
    assert seen > 60


def test_the_same_seed_draws_the_same_programs() -> None:
    one, other = drawn(languages.EVERYTHING, 20, 7), drawn(languages.EVERYTHING, 20, 7)
    assert [render(program).source for program in one] == [
        render(program).source for program in other
    ]


def test_every_option_meets_every_plan() -> None:
    account = coverage.Coverage()
    for language in LANGUAGES.values():
        for program in drawn(language, 150):
            account.add(program)
    print(account.summary())
    assert account.unreached_pairs() == []
    assert set(account.unreached_operators()) <= {"avg_pool1d"}


def test_reduction_keeps_what_fails_and_little_else() -> None:
    def uses_tanh_in_a_region(program: Program) -> bool:
        inside = any(
            isinstance(item, Apply) and item.operator == "tanh"
            for region in program.regions()
            for item in walk(region.body)
        )
        return inside and execute(render(program), PLAIN).error is None

    found = [
        reduce(program, uses_tanh_in_a_region)
        for program in drawn(languages.PLAIN, 150)
        if uses_tanh_in_a_region(program)
    ]
    assert found
    for program in found:
        assert len(program.regions()) == 1
        assert sum(1 for _ in walk(program.body)) <= 3, repr(program)


def test_cleaning_drops_unused_leaves() -> None:
    for program in drawn(languages.PLAIN, 20):
        names = {leaf.tensor.name for leaf in clean(program).leaves}
        assert names <= {leaf.tensor.name for leaf in program.leaves}
        assert execute(render(clean(program)), PLAIN).error is None
