"""Chapter 13: device states, on a stand-in for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe.fake_device import FakeAccelerator, fake_accelerator
from conformance.testing import both_variants, clause, reached

_DEVICES = 3


def _state(value: float) -> torch.Tensor:
    return torch.full((4,), value)


def _values(device: FakeAccelerator) -> list[float]:
    return [float(state[0]) for state in device.state]


# ---------------------------------------------------------------------------- setting states


@clause("device-states/signature")
def test_device_type_is_keyword_only(ckpt: Candidate) -> None:
    """Are the two lists taken both ways, and is a third positional argument refused?"""
    with fake_accelerator(ckpt) as device:
        ckpt.set_device_states([0], [_state(7)], device_type=device.type)
        assert _values(device)[0] == 7, f"expected state 7, observed {_values(device)[0]}"
        ckpt.set_device_states(devices=[1], states=[_state(8)], device_type=device.type)
        assert _values(device)[1] == 8, f"expected state 8, observed {_values(device)[1]}"
        reached()
        with pytest.raises(TypeError):
            ckpt.set_device_states([0], [_state(9)], device.type)
        assert _values(device)[0] == 7, "the refused call has set a state"


@clause("device-states/sets-each")
@given(
    chosen=st.permutations(range(_DEVICES)).flatmap(
        lambda order: st.integers(1, _DEVICES).map(lambda count: order[:count])
    ),
    current=st.integers(0, _DEVICES - 1),
    by_default=st.booleans(),
)
def test_each_device_gets_its_own_state(
    ckpt: Candidate, chosen: list[int], current: int, by_default: bool
) -> None:
    """Does each listed device get the state at its position, and no other device any?"""
    with fake_accelerator(ckpt, count=_DEVICES) as device:
        device.current = current
        expected = _values(device)
        for index in chosen:
            expected[index] = 1000.0 + index
        states = [_state(1000.0 + index) for index in chosen]
        if by_default:
            ckpt.DefaultDeviceType.set_device_type(device.type)
            ckpt.set_device_states(chosen, states)
        else:
            ckpt.set_device_states(chosen, states, device_type=device.type)
        reached()
        observed = _values(device)
        assert observed == expected, f"expected states {expected}, observed {observed}"
        assert device.current == current, (
            f"expected current device {current}, observed {device.current}"
        )


@clause("device-states/explicit-type")
@pytest.mark.parametrize("default", ["cpu", "meta", "cuda", "xpu"])
def test_explicit_type_wins_over_the_default(ckpt: Candidate, default: str) -> None:
    """Is device_type obeyed, whatever the default device type is?"""
    with fake_accelerator(ckpt) as device:
        ckpt.DefaultDeviceType.set_device_type(default)
        ckpt.set_device_states([1], [_state(7)], device_type=device.type)
        reached()
        assert _values(device)[1] == 7, f"expected state 7 on device 1, observed {_values(device)}"
        assert ckpt.DefaultDeviceType.get_device_type() == default, "the default type has changed"


@clause("device-states/explicit-type")
def test_explicit_type_is_not_remembered(ckpt: Candidate) -> None:
    """Does an explicit type concern one call only?"""
    with fake_accelerator(ckpt) as device, fake_accelerator(ckpt) as other:
        assert device.type != other.type
        ckpt.DefaultDeviceType.set_device_type(device.type)
        ckpt.set_device_states([0], [_state(7)], device_type=other.type)
        assert _values(other)[0] == 7, "expected the state on a device of the explicit type"
        assert _values(device)[0] == 0, "a device of the default type was set"
        ckpt.set_device_states([0], [_state(8)])
        reached()
        assert _values(device)[0] == 8, "expected the second state on a device of the default type"
        assert _values(other)[0] == 7, "the explicit type was remembered"


@clause("device-states/default-type")
@pytest.mark.parametrize("given_as", ["omitted", "none"])
def test_default_type_is_read_at_the_call(ckpt: Candidate, given_as: str) -> None:
    """Without device_type, does each call follow the default device type of that moment?"""
    options: dict[str, Any] = {} if given_as == "omitted" else {"device_type": None}
    with fake_accelerator(ckpt) as first, fake_accelerator(ckpt) as second:
        for value, device, other in (
            (1.0, first, second),
            (2.0, second, first),
            (3.0, first, second),
        ):
            untouched = other.states()
            ckpt.DefaultDeviceType.set_device_type(device.type)
            ckpt.set_device_states([1], [_state(value)], **options)
            reached()
            assert _values(device)[1] == value, (
                f"expected state {value} on {device.type}:1, observed {_values(device)[1]}"
            )
            assert other.states() == untouched, f"a generator of {other.type} was set"


@clause("device-states/empty")
@pytest.mark.parametrize("device_type", ["omitted", "fake", "default"])
def test_empty_lists(ckpt: Candidate, device_type: str) -> None:
    """Do two empty lists set nothing and raise nothing?"""
    with fake_accelerator(ckpt) as device:
        ckpt.set_device_states([0], [_state(7)], device_type=device.type)
        assert device.log, "expected the legitimate call to set a state"
        device.log.clear()
        if device_type == "default":
            ckpt.DefaultDeviceType.set_device_type(device.type)
        options = {"device_type": device.type} if device_type == "fake" else {}
        ckpt.set_device_states([], [], **options)
        reached()
        assert device.log == [], f"expected no access to a generator, observed {device.log}"


@clause("device-states/meta-type")
@given(ids=st.lists(st.integers(0, 1), min_size=1, max_size=2), default=st.booleans())
def test_meta_type_does_nothing(ckpt: Candidate, ids: list[int], default: bool) -> None:
    """Is the device type meta passed over without an error?"""
    with fake_accelerator(ckpt) as device:
        ckpt.set_device_states([0], [_state(7)], device_type=device.type)
        assert device.log, "expected the legitimate call to set a state"
        device.log.clear()
        if default:
            ckpt.DefaultDeviceType.set_device_type(device.type)
        ckpt.set_device_states(ids, [_state(9) for _ in ids], device_type="meta")
        reached()
        assert device.log == [], f"expected no access to a generator, observed {device.log}"


# ---------------------------------------------------------------------------- the default type


@clause("device-states/set-default-type")
@given(
    names=st.lists(st.sampled_from(["cpu", "cuda", "xpu", "hpu", "meta"]), min_size=1, max_size=4)
)
def test_default_type_is_what_was_set(ckpt: Candidate, names: list[str]) -> None:
    """Does the default device type follow each setting and stay until the next?"""
    default = ckpt.DefaultDeviceType
    before = default.get_device_type()
    try:
        for name in names:
            default.set_device_type(name)
            observed = [default.get_device_type() for _ in range(2)]
            assert observed == [name] * 2, f"expected {name!r}, observed {observed}"
        reached()
    finally:
        default.set_device_type(before)
    assert default.get_device_type() == before, "expected the first value after setting it again"


@clause("device-states/initial-default-type")
def test_initial_default_type(ckpt: Candidate) -> None:
    """Is the default device type this machine's accelerator, or cuda or cpu without one?"""
    observed = ckpt.DefaultDeviceType.get_device_type()
    reached()
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        allowed = [accelerator.type]
    else:
        allowed = ["cuda", "cpu"]
    assert observed in allowed, f"expected one of {allowed}, observed {observed!r}"


# ---------------------------------------------------------------------------- reading states

_OTHER_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "cpu": lambda: torch.ones(2),
    "number": lambda: 3,
    "none": lambda: None,
    "string": lambda: "text",
}

arguments = st.lists(
    st.one_of(st.integers(0, _DEVICES - 1), st.sampled_from(sorted(_OTHER_ARGUMENTS))),
    min_size=1,
    max_size=5,
)
"""Device indices stand for tensors on that device."""


def _made(device: FakeAccelerator, described: list[Any]) -> list[Any]:
    return [
        device.tensor(one) if isinstance(one, int) else _OTHER_ARGUMENTS[one]() for one in described
    ]


def _used(described: list[Any]) -> set[int]:
    return {one for one in described if isinstance(one, int)}


@clause("device-states/round-trip")
@given(
    described=arguments.filter(_used),
    draws=st.lists(st.integers(0, _DEVICES - 1), min_size=1, max_size=4),
    current=st.integers(0, _DEVICES - 1),
)
def test_states_read_can_be_set_again(
    ckpt: Candidate, described: list[Any], draws: list[int], current: int
) -> None:
    """Do states that were read, set later, bring the generators back?"""
    with fake_accelerator(ckpt, count=_DEVICES) as device:
        device.current = current
        for index in draws:
            device.draw(index)
        before = _values(device)
        devices, states = ckpt.get_device_states(*_made(device, described))
        assert len(devices) == len(states), (
            f"expected lists of equal length, observed {len(devices)} and {len(states)}"
        )
        assert (_values(device), device.current) == (before, current), (
            f"reading changed (states, current device) from {(before, current)} to "
            f"{(_values(device), device.current)}"
        )
        for index in (*range(_DEVICES), *draws):
            device.draw(index)
        moved = _values(device)
        ckpt.set_device_states(devices, states, device_type=device.type)
        reached()
        expected = [
            before[index] if index in _used(described) else moved[index]
            for index in range(_DEVICES)
        ]
        assert _values(device) == expected, (
            f"expected states {expected}, observed {_values(device)}"
        )


@clause("device-states/covers-arguments")
@given(described=arguments)
def test_ids_are_those_of_the_arguments(ckpt: Candidate, described: list[Any]) -> None:
    """Are the ids those of the arguments' devices, whatever else is among the arguments?"""
    with fake_accelerator(ckpt, count=_DEVICES) as device:
        devices, states = ckpt.get_device_states(*_made(device, described))
        reached()
        observed = {device.index(one) for one in devices}
        assert observed == _used(described), (
            f"arguments {described}: expected ids {sorted(_used(described))}, "
            f"observed {sorted(observed)}"
        )
        for one, state in zip(devices, states, strict=True):
            wanted = device.state[device.index(one)]
            assert torch.equal(state, wanted), (
                f"device {one}: expected state {wanted.tolist()}, observed {state.tolist()}"
            )


@clause("device-states/covers-arguments")
def test_ids_with_a_meta_tensor_behind(ckpt: Candidate) -> None:
    """Does a meta tensor behind the accelerator's tensors contribute nothing?"""
    with fake_accelerator(ckpt) as device:
        devices, states = ckpt.get_device_states(
            device.tensor(1), torch.ones(2), torch.ones(2, device="meta")
        )
        reached()
        assert {device.index(one) for one in devices} == {1}, f"expected id 1, observed {devices}"
        assert all(torch.equal(state, device.state[1]) for state in states)
        nothing = ckpt.get_device_states(torch.ones(2, device="meta"), 3)
        assert [len(part) for part in nothing] == [0, 0], f"expected no ids, observed {nothing}"


@clause("device-states/meta-argument-order")
@pytest.mark.parametrize("behind", [1, 2])
def test_reading_with_a_meta_tensor_first(ckpt: Candidate, behind: int) -> None:
    """Does get_device_states find the accelerator behind a meta tensor?"""
    with fake_accelerator(ckpt) as device:
        meta = [torch.ones(2, device="meta") for _ in range(behind)]
        devices, states = ckpt.get_device_states(*meta, device.tensor(1))
        reached()
        assert {device.index(one) for one in devices} == {1}, f"expected id 1, observed {devices}"
        assert all(torch.equal(state, device.state[1]) for state in states)


@clause("device-states/meta-argument-order")
@both_variants
def test_region_with_a_meta_tensor_first(ckpt: Candidate, use_reentrant: bool) -> None:
    """Does a region replay the accelerator's generator behind a meta tensor?"""
    with fake_accelerator(ckpt) as device:
        region = _Region(device)

        def function(meta: torch.Tensor, x: torch.Tensor, *others: Any) -> torch.Tensor:
            return region(x, *others)

        ckpt.checkpoint(
            function,
            torch.ones(2, device="meta"),
            torch.ones(3, requires_grad=True),
            device.tensor(1),
            use_reentrant=use_reentrant,
        ).sum().backward()
        region.assert_replayed({1})


# ---------------------------------------------------------------------------- regions


class _Region:
    """A function that draws ``draws`` numbers from every device and from the CPU in each run."""

    def __init__(self, device: FakeAccelerator, draws: int = 1, raises: bool = False) -> None:
        self.device = device
        self.draws = draws
        self.raises = raises
        self.runs: list[dict[int, list[float]]] = []
        self.cpu: list[float] = []

    def __call__(self, x: torch.Tensor, *others: Any, **keywords: Any) -> torch.Tensor:
        drawn = {
            index: [self.device.draw(index) for _ in range(self.draws)]
            for index in range(self.device.count)
        }
        self.runs.append(drawn)
        noise = torch.rand(1)
        self.cpu.append(float(noise))
        if self.raises and len(self.runs) > 1:
            raise KeyError("recomputation")
        return (x * (noise + sum(sum(values) for values in drawn.values()))).sin().exp()

    def assert_replayed(self, devices: set[int]) -> None:
        """Every recomputation drew forward's numbers on ``devices`` and on the CPU."""
        assert len(self.runs) >= 2, "expected a recomputation"
        reached()
        for run, cpu in zip(self.runs[1:], self.cpu[1:], strict=True):
            for index in sorted(devices):
                assert run[index] == self.runs[0][index], (
                    f"device {index}: expected {self.runs[0][index]} again, observed {run[index]}"
                )
            assert cpu == self.cpu[0], f"CPU: expected {self.cpu[0]} again, observed {cpu}"


def _advance(device: FakeAccelerator, by: int) -> None:
    """What the surrounding program draws."""
    torch.rand(1)
    for index in range(device.count):
        for _ in range(by + index):
            device.draw(index)


flags = st.sampled_from([{}, {"preserve_rng_state": True}])


@clause("device-states/replayed")
@both_variants
@given(
    described=arguments.filter(_used),
    x_first=st.booleans(),
    options=flags,
    default=st.booleans(),
    draws=st.integers(1, 3),
    between=st.integers(0, 3),
    times=st.integers(1, 2),
)
def test_generators_of_the_arguments_devices(
    ckpt: Candidate,
    use_reentrant: bool,
    described: list[Any],
    x_first: bool,
    options: dict[str, bool],
    default: bool,
    draws: int,
    between: int,
    times: int,
) -> None:
    """Does a recomputation draw forward's numbers on every device that an argument is on?"""
    with fake_accelerator(ckpt, count=_DEVICES) as device:
        if default:
            ckpt.DefaultDeviceType.set_device_type(device.type)
        region = _Region(device, draws)
        x = torch.ones(3, requires_grad=True)
        others = _made(device, described)
        if x_first:
            y = ckpt.checkpoint(region, x, *others, use_reentrant=use_reentrant, **options)
        else:
            y = ckpt.checkpoint(
                lambda *args: region(args[-1]), *others, x, use_reentrant=use_reentrant, **options
            )
        for _ in range(times):
            _advance(device, between)
            y.sum().backward(retain_graph=True)
        region.assert_replayed(_used(described))


@clause("device-states/replayed")
@both_variants
@given(indices=st.lists(st.integers(0, 1), min_size=2, max_size=3), options=flags)
def test_each_region_replays_its_own_device_states(
    ckpt: Candidate, use_reentrant: bool, indices: list[int], options: dict[str, bool]
) -> None:
    """Do several regions each replay the device states that they ran with?"""
    with fake_accelerator(ckpt) as device:
        y = torch.ones(3, requires_grad=True) * 0.01
        regions = []
        for index in indices:
            _advance(device, 1)
            regions.append(_Region(device))
            y = ckpt.checkpoint(
                regions[-1], y, device.tensor(index), use_reentrant=use_reentrant, **options
            )
        y.sum().backward()
        for index, region in zip(indices, regions, strict=True):
            region.assert_replayed({index})


@clause("device-states/containers")
@given(
    kind=st.sampled_from(["list", "tuple", "dictionary", "nested"]),
    index=st.integers(0, 1),
    options=flags,
)
def test_device_tensor_in_a_container(
    ckpt: Candidate, kind: str, index: int, options: dict[str, bool]
) -> None:
    """Does a device tensor inside a container make its device's generator replayed?"""
    with fake_accelerator(ckpt) as device:
        one = device.tensor(index)
        argument = {
            "list": [one],
            "tuple": (torch.ones(1), one),
            "dictionary": {"key": one},
            "nested": [{"key": (None, one)}],
        }[kind]
        region = _Region(device)
        x = torch.ones(3, requires_grad=True)
        y = ckpt.checkpoint(region, x, argument, use_reentrant=False, **options)
        _advance(device, 2)
        y.sum().backward()
        region.assert_replayed({index})


@clause("device-states/keyword-arguments")
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("options", [{}, {"preserve_rng_state": True}], ids=["default", "true"])
def test_device_tensor_by_keyword(ckpt: Candidate, index: int, options: dict[str, bool]) -> None:
    """Does a device tensor passed by keyword make its device's generator replayed?"""
    with fake_accelerator(ckpt) as device:
        region = _Region(device)
        x = torch.ones(3, requires_grad=True)
        y = ckpt.checkpoint(region, x, mask=device.tensor(index), use_reentrant=False, **options)
        _advance(device, 2)
        y.sum().backward()
        region.assert_replayed({index})


@clause("device-states/undisturbed")
@both_variants
@given(
    described=arguments.filter(_used),
    options=flags,
    default=st.booleans(),
    draws=st.integers(1, 3),
    between=st.integers(0, 3),
    current=st.integers(0, _DEVICES - 1),
    raises=st.booleans(),
)
def test_device_streams_stay(
    ckpt: Candidate,
    use_reentrant: bool,
    described: list[Any],
    options: dict[str, bool],
    default: bool,
    draws: int,
    between: int,
    current: int,
    raises: bool,
) -> None:
    """Are device generators after forward as plain, and after backward as before it?"""
    with fake_accelerator(ckpt, count=_DEVICES) as device:
        if default:
            ckpt.DefaultDeviceType.set_device_type(device.type)
        device.current = current
        start = _values(device)
        region = _Region(device, draws, raises)
        x = torch.ones(3, requires_grad=True)
        y = ckpt.checkpoint(
            region, x, *_made(device, described), use_reentrant=use_reentrant, **options
        )
        expected = [value + draws for value in start]
        assert _values(device) == expected, (
            f"after forward: expected states {expected}, observed {_values(device)}"
        )
        _advance(device, between)
        before = _values(device)
        if raises:
            with pytest.raises(Exception, match="recomputation"):
                y.sum().backward()
        else:
            y.sum().backward()
        assert len(region.runs) == 2, "expected one recomputation"
        reached()
        for index in sorted(_used(described)):
            assert _values(device)[index] == before[index], (
                f"device {index} after backward: expected state {before[index]}, "
                f"observed {_values(device)[index]}"
            )
        assert device.current == current, (
            f"expected current device {current}, observed {device.current}"
        )


@clause("device-states/untouched-when-false")
@both_variants
@given(
    described=arguments,
    default=st.booleans(),
    draws=st.integers(1, 3),
    between=st.integers(0, 3),
)
def test_false_touches_no_generator(
    ckpt: Candidate,
    use_reentrant: bool,
    described: list[Any],
    default: bool,
    draws: int,
    between: int,
) -> None:
    """With preserve_rng_state=False, is no device generator read or set?"""
    with fake_accelerator(ckpt, count=_DEVICES) as device:
        if default:
            ckpt.DefaultDeviceType.set_device_type(device.type)
        region = _Region(device, draws)
        x = torch.ones(3, requires_grad=True)
        y = ckpt.checkpoint(
            region,
            x,
            *_made(device, described),
            use_reentrant=use_reentrant,
            preserve_rng_state=False,
        )
        _advance(device, between)
        before = _values(device)
        y.sum().backward()
        assert len(region.runs) == 2, "expected one recomputation"
        reached()
        assert device.log == [], f"expected no access to a generator, observed {device.log}"
        for index in range(_DEVICES):
            expected = [before[index] + step for step in range(draws)]
            assert region.runs[1][index] == expected, (
                f"device {index}: expected the recomputation to draw {expected}, "
                f"observed {region.runs[1][index]}"
            )
