"""The reentrant variant, and the device states that both variants use."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from reference_impl import (
    CheckpointFunction,
    DefaultDeviceType,
    check_backward_validity,
    checkpoint,
    detach_variable,
    get_device_states,
    set_device_states,
)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values or (0.1, 0.5, 0.9), requires_grad=True)


def test_outputs_of_every_kind():
    x = leaf()
    y, order, cut, tag, none = checkpoint(
        lambda t: (t.sin().exp(), t.argsort(), t.detach() + 1, "tag", None), x, use_reentrant=True
    )
    assert cut.requires_grad
    assert not order.requires_grad
    assert (tag, none) == ("tag", None)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * x.sin().exp()).detach())


def test_a_region_that_cuts_everything_off_raises():
    with torch.no_grad():
        pass
    out = checkpoint(lambda t: t.detach() * 2, leaf(), use_reentrant=True)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="requires_grad"):
        out.sum().backward()


def test_an_unused_output_adds_no_gradient():
    weight = torch.nn.Parameter(torch.ones(3))
    a, _ = checkpoint(lambda t: (t.sin(), t * weight), leaf(), use_reentrant=True)
    a.sum().backward()
    assert weight.grad is None


def test_other_ways_of_backward_are_refused_and_spoil_nothing():
    x = leaf()
    for call in (
        lambda out: torch.autograd.grad(out.sum(), x),
        lambda out: out.sum().backward(inputs=[x]),
    ):
        with pytest.raises(RuntimeError, match="use_reentrant"):
            call(checkpoint(torch.sin, x, use_reentrant=True))
        assert x.grad is None
    checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_inputs_that_need_no_gradient_are_announced():
    linear = torch.nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="requires_grad") as found:
        out = checkpoint(linear, torch.ones(3), use_reentrant=True)
    assert found[0].filename == __file__
    assert not out.requires_grad
    with pytest.warns(UserWarning, match="requires_grad"):
        check_backward_validity([torch.ones(1), [leaf()], 3])


def test_the_function_can_be_applied_directly():
    x = leaf()
    CheckpointFunction.apply(lambda a, b: a.sin() * b, True, x, 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().cos())


def test_detach_variable():
    x, other = leaf(), object()
    detached, same = detach_variable((x * 1, other))
    assert detached.is_leaf
    assert detached.requires_grad
    assert same is other
    with pytest.raises(RuntimeError, match="tuple"):
        detach_variable([x])


@pytest.fixture
def device():
    """A stand-in for an accelerator: the meta device under a module with generator states."""
    current, states, log = [0], {0: torch.zeros(2), 1: torch.zeros(2)}, []

    @contextlib.contextmanager
    def switch(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    def read():
        log.append(("get", current[0]))
        return states[current[0]].clone()

    def write(state):
        log.append(("set", current[0]))
        states[current[0]] = state.clone()

    module = types.SimpleNamespace(
        device=switch, get_rng_state=read, set_rng_state=write, states=states, log=log
    )
    torch.pretend = module
    yield module
    DefaultDeviceType._device_type = None
    del torch.pretend


def test_device_states_go_to_the_device_that_is_meant(device, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"pretend": device}[kind])
    set_device_states([1, 0], [torch.full((2,), 8.0), torch.full((2,), 9.0)], device_type="pretend")
    assert (device.states[0][0], device.states[1][0]) == (9, 8)
    DefaultDeviceType.set_device_type("pretend")
    set_device_states([0], [torch.full((2,), 3.0)])
    assert device.states[0][0] == 3
    before = len(device.log)
    set_device_states([0], [torch.zeros(2)], device_type="meta")
    set_device_states([], [])
    assert len(device.log) == before
    with pytest.raises(ValueError, match="argument"):
        set_device_states([0, 1], [torch.zeros(2)])


def test_tensors_without_an_accelerator_have_no_device_state():
    assert get_device_states(leaf(), [torch.empty(1, device="meta")], 3) == ([], [])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert DefaultDeviceType.get_device_type() == (accelerator.type if accelerator else "cuda")
