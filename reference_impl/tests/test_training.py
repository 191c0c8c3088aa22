"""Small models train to the same bits with torch's checkpoint, with this one and with none."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import reference_impl as candidate


class Block(nn.Module):
    """A transformer block: self-attention and a two-layer perceptron, with dropout."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        q, k, v = heads.unbind()
        weights = self.dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


def transformer() -> tuple[list[nn.Module], torch.Tensor]:
    return [Block() for _ in range(4)], torch.randn(2, 6, 16)


def convolutions() -> tuple[list[nn.Module], torch.Tensor]:
    layers = [
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)
    ]
    return layers, torch.randn(2, 3, 8, 8)


def each_layer(module, **options):
    def run(layers, x):
        for layer in layers:
            x = module.checkpoint(layer, x, **options)
        return x

    return run


def sequential(module, **options):
    return lambda layers, x: module.checkpoint_sequential(layers, 3, x, **options)


def selective(module, policy_or_list):
    contexts = functools.partial(module.create_selective_checkpoint_contexts, policy_or_list)
    return each_layer(module, use_reentrant=False, context_fn=contexts)


def keep_matmuls(context, operator, *args, **kwargs):
    return operator in (torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


MODES = {
    "non-reentrant": lambda module: each_layer(module, use_reentrant=False),
    "non-reentrant, whole function": lambda module: each_layer(
        module, use_reentrant=False, early_stop=False
    ),
    "reentrant": lambda module: each_layer(module, use_reentrant=True),
    "sequential": lambda module: sequential(module, use_reentrant=False),
    "sequential, reentrant": lambda module: sequential(module, use_reentrant=True),
    "selective, policy": lambda module: selective(module, keep_matmuls),
    "selective, list": lambda module: selective(module, [torch.ops.aten.addmm.default]),
}


def train(model, run, autocast: bool = False, steps: int = 4):
    torch.manual_seed(0)
    layers, data = model()
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = data.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = run(layers, x)
        loss = out.float().pow(2).mean() + out.float().sum() / 100
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = [value for layer in layers for value in layer.state_dict().values()]
    return losses + parameters + state + [torch.get_rng_state()]


def plainly(layers, x):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [transformer, convolutions])
def test_trains_to_the_same_bits_as_with_torch(model, mode, autocast):
    ours = train(model, MODES[mode](candidate), autocast)
    theirs = train(model, MODES[mode](torch_checkpoint), autocast)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if model is transformer:  # batch norm counts recomputations too, so there it cannot hold
        plain = train(model, plainly, autocast)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
