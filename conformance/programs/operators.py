"""The operators that programs are made of: how each is written, on what it works, what it gives.

Shapes and dtypes are computed here, without running torch, so that a program is valid by
construction. Every operator is deterministic on CPU once the random state is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from conformance.programs.model import FLOATS, Shape, Tensor

MAX_NUMEL = 48

Operands = tuple[Tensor, ...]
Chosen = dict[str, Any]
Result = tuple[Shape, str]
Accepts = Callable[[Operands], bool]


def _no_settings(operands: Operands) -> list[Chosen]:
    return [{}]


@dataclass(frozen=True)
class Operator:
    """One operator.

    ``template`` is its source, ``{0}`` and ``{dim}`` standing for operands and settings.
    ``accepts`` sees the operands chosen so far. ``results`` gives shape and dtype of each result
    as outside autocast; a result of integer or boolean dtype never requires grad.
    ``saves``: autograd may keep an operand or a result, so none of them may be changed later.
    ``alias``: the result shares memory with the first operand. ``autocast``: what an enabled CPU
    autocast does, ``keep`` nothing, ``lower`` computes in bfloat16, ``avoid`` is not drawn there.
    ``double``: can be differentiated twice. ``needs``: a definition that must precede the program.
    """

    name: str
    template: str
    arity: int
    accepts: Accepts
    results: Callable[[Operands, Chosen], tuple[Result, ...]]
    settings: Callable[[Operands], list[Chosen]] = _no_settings
    category: str = "elementwise"
    saves: bool = True
    alias: bool = False
    multi_view: bool = False
    detaches: bool = False
    random: bool = False
    in_place: bool = False
    autocast: str = "keep"
    double: bool = True
    needs: str | None = None
    makes: tuple[Callable[[Tensor], Tensor | None], ...] = ()
    """For each operand after the first: what a new leaf for it would be, given the first."""


OPERATORS: dict[str, Operator] = {}


def _add(*operators: Operator) -> None:
    for operator in operators:
        assert operator.name not in OPERATORS, operator.name
        OPERATORS[operator.name] = operator


# ---------------------------------------------------------------------- conditions


def _float(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS


def _first_float(operands: Operands) -> bool:
    return _float(operands[0])


def _rank(low: int, high: int = 9) -> Accepts:
    return lambda operands: _float(operands[0]) and low <= len(operands[0].shape) <= high


def _same_result(operands: Operands, chosen: Chosen) -> tuple[Result, ...]:
    return ((operands[0].shape, operands[0].dtype),)


def broadcast(one: Shape, other: Shape) -> Shape | None:
    """The broadcast shape, or None where the two do not fit."""
    result = []
    for index in range(max(len(one), len(other))):
        left = one[-1 - index] if index < len(one) else 1
        right = other[-1 - index] if index < len(other) else 1
        if left != right and 1 not in (left, right):
            return None
        result.append(max(left, right))
    return tuple(reversed(result))


_ORDER = {"bfloat16": 0, "float32": 1, "float64": 2}


def promote(tensors: Iterable[Tensor]) -> str:
    """The dtype of an elementwise result: the widest floating one, zero-dimensional tensors
    counting only where there are no others."""
    all_of = [tensor for tensor in tensors if _float(tensor)]
    wide = [tensor for tensor in all_of if tensor.shape]
    return max((tensor.dtype for tensor in wide or all_of), key=_ORDER.__getitem__)


def _broadcasts(operands: Operands) -> bool:
    if not all(map(_float, operands)):
        return False
    shape: Shape | None = ()
    for tensor in operands:
        shape = broadcast(shape or (), tensor.shape)
        if shape is None:
            return False
    return math.prod(shape or ()) <= MAX_NUMEL


def _broadcast_result(operands: Operands, chosen: Chosen) -> tuple[Result, ...]:
    shape: Shape = ()
    for tensor in operands:
        shape = broadcast(shape, tensor.shape) or ()
    return ((shape, promote(operands)),)


def _dims(operands: Operands) -> list[Chosen]:
    return [{"dim": dim} for dim in range(len(operands[0].shape))]


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _reduced(operands: Operands, chosen: Chosen) -> tuple[Result, ...]:
    return ((_without(operands[0].shape, chosen["dim"]), operands[0].dtype),)


def _like(tensor: Tensor) -> Tensor | None:
    return Tensor("", tensor.shape, tensor.dtype, True)


# ---------------------------------------------------------------------- elementwise


def _unary(name: str, template: str, **options: Any) -> Operator:
    return Operator(name, template, 1, _first_float, _same_result, **options)


_add(
    _unary("sin", "torch.sin({0})"),
    _unary("cos", "torch.cos({0})"),
    _unary("tanh", "torch.tanh({0})"),
    _unary("sigmoid", "torch.sigmoid({0})"),
    _unary("exp", "torch.exp({0} / 4)"),
    _unary("relu", "torch.relu({0})"),
    _unary("gelu", "torch.nn.functional.gelu({0})"),
    _unary("silu", "torch.nn.functional.silu({0})"),
    _unary("softplus", "torch.nn.functional.softplus({0})"),
    _unary("abs", "{0}.abs()"),
    _unary("square", "{0} ** 2"),
    _unary("log", "torch.log({0}.abs() + 1)"),
    _unary("sqrt", "torch.sqrt({0}.abs() + 1)"),
    _unary("clamp", "{0}.clamp(-1, 1)"),
    _unary("erf", "torch.erf({0})"),
    _unary("neg", "-{0}", saves=False),
    _unary("shift", "{0} + 1", saves=False),
    _unary("scale", "{0} * 2", saves=False),
    _unary("third", "{0} / 3", saves=False),
    _unary("clone", "{0}.clone()", saves=False, category="views"),
    _unary("cumsum", "{0}.cumsum(0)", saves=False, category="reductions"),
)


def _binary(name: str, template: str, **options: Any) -> Operator:
    options.setdefault("makes", (_like,))
    return Operator(name, template, 2, _broadcasts, _broadcast_result, **options)


_add(
    _binary("add", "{0} + {1}", saves=False),
    _binary("sub", "{0} - {1}", saves=False),
    _binary("mul", "{0} * {1}"),
    _binary("div", "{0} / ({1}.abs() + 1)"),
    _binary("maximum", "torch.maximum({0}, {1})"),
    _binary("where", "torch.where({0} > 0, {0}, {1})"),
    Operator(
        "addcmul",
        "torch.addcmul({0}, {1}, {2})",
        3,
        lambda operands: (
            _broadcasts(operands)
            and len({tensor.dtype for tensor in operands}) == 1
            and operands[0].shape != ()
        ),
        _broadcast_result,
        autocast="avoid",
        makes=(_like, _like),
    ),
)

# ---------------------------------------------------------------------- reductions

_add(
    Operator(
        "sum",
        "{0}.sum({dim})",
        1,
        _rank(1),
        _reduced,
        _dims,
        "reductions",
        saves=False,
    ),
    Operator("mean", "{0}.mean({dim})", 1, _rank(1), _reduced, _dims, "reductions", saves=False),
    Operator("amax", "{0}.amax({dim})", 1, _rank(1), _reduced, _dims, "reductions"),
    Operator("logsumexp", "{0}.logsumexp({dim})", 1, _rank(1), _reduced, _dims, "reductions"),
    Operator(
        "prod",
        "{0}.prod({dim})",
        1,
        _rank(1),
        _reduced,
        _dims,
        "reductions",
        autocast="avoid",
    ),
    Operator(
        "max",
        "{0}.max({dim})",
        1,
        _rank(1),
        lambda operands, chosen: (
            (_without(operands[0].shape, chosen["dim"]), operands[0].dtype),
            (_without(operands[0].shape, chosen["dim"]), "int64"),
        ),
        _dims,
        "multi-output",
    ),
    Operator(
        "sort",
        "{0}.sort({dim}, stable=True)",
        1,
        _rank(1),
        lambda operands, chosen: (
            (operands[0].shape, operands[0].dtype),
            (operands[0].shape, "int64"),
        ),
        lambda operands: [{"dim": f"dim={d['dim']}"} for d in _dims(operands)],
        "multi-output",
    ),
    Operator(
        "var_mean",
        "torch.var_mean({0}, {dim}, correction=0)",
        1,
        _rank(1),
        lambda operands, chosen: (
            ((_without(operands[0].shape, chosen["dim"]), operands[0].dtype),) * 2
        ),
        _dims,
        "multi-output",
    ),
)

# ---------------------------------------------------------------------- normalisation

_add(
    Operator("softmax", "{0}.softmax({dim})", 1, _rank(1), _same_result, _dims, "normalisation"),
    Operator(
        "log_softmax", "{0}.log_softmax({dim})", 1, _rank(1), _same_result, _dims, "normalisation"
    ),
    Operator(
        "layer_norm",
        "torch.nn.functional.layer_norm({0}, {0}.shape[-1:])",
        1,
        _rank(1),
        _same_result,
        category="normalisation",
        autocast="avoid",
    ),
    Operator(
        "batch_norm",
        "torch.nn.functional.batch_norm({0}, None, None, training=True)",
        1,
        lambda operands: _rank(2, 3)(operands) and operands[0].numel // operands[0].shape[1] > 1,
        _same_result,
        category="normalisation",
        autocast="avoid",
    ),
)

# ---------------------------------------------------------------------- matmul, convolution


def _one_float_dtype(operands: Operands) -> bool:
    return all(map(_float, operands)) and len({tensor.dtype for tensor in operands}) == 1


def _matmul(operands: Operands) -> bool:
    if not _one_float_dtype(operands) or len(operands[0].shape) not in (2, 3):
        return False
    if len(operands) == 1:
        return True
    right = operands[1].shape
    return len(right) == 2 and operands[0].shape[-1] == right[0]


def _matmul_result(operands: Operands, chosen: Chosen) -> tuple[Result, ...]:
    return (((*operands[0].shape[:-1], operands[1].shape[-1]), operands[0].dtype),)


def _square_weight(tensor: Tensor) -> Tensor | None:
    return Tensor("", (tensor.shape[-1], 2), tensor.dtype, True)


def _linear(operands: Operands) -> bool:
    if not _one_float_dtype(operands) or not 1 <= len(operands[0].shape) <= 3:
        return False
    if len(operands) == 1:
        return True
    return len(operands[1].shape) == 2 and operands[1].shape[1] == operands[0].shape[-1]


def _bmm(operands: Operands) -> bool:
    if not _one_float_dtype(operands) or len(operands[0].shape) != 3:
        return False
    if len(operands) == 1:
        return True
    one, other = operands[0].shape, operands[1].shape
    return len(other) == 3 and one[0] == other[0] and one[2] == other[1]


def _conv(operands: Operands) -> bool:
    if not _one_float_dtype(operands) or len(operands[0].shape) != 3:
        return False
    if operands[0].dtype == "bfloat16":
        return False
    if len(operands) == 1:
        return True
    return len(operands[1].shape) == 3 and operands[1].shape[1:] == (operands[0].shape[1], 1)


_add(
    Operator(
        "matmul",
        "{0} @ {1}",
        2,
        _matmul,
        _matmul_result,
        category="matmul",
        autocast="lower",
        makes=(_square_weight,),
    ),
    Operator(
        "gram",
        "{0} @ {0}.mT",
        1,
        _rank(2, 3),
        lambda operands, chosen: (
            ((*operands[0].shape[:-1], operands[0].shape[-2]), operands[0].dtype),
        ),
        category="matmul",
        autocast="lower",
    ),
    Operator(
        "linear",
        "torch.nn.functional.linear({0}, {1})",
        2,
        _linear,
        lambda operands, chosen: (
            ((*operands[0].shape[:-1], operands[1].shape[0]), operands[0].dtype),
        ),
        category="matmul",
        autocast="lower",
        makes=(lambda tensor: Tensor("", (2, tensor.shape[-1]), tensor.dtype, True),),
    ),
    Operator(
        "bmm",
        "torch.bmm({0}, {1})",
        2,
        _bmm,
        _matmul_result,
        category="matmul",
        autocast="lower",
        makes=(
            lambda tensor: Tensor("", (tensor.shape[0], tensor.shape[2], 2), tensor.dtype, True),
        ),
    ),
    Operator(
        "einsum",
        'torch.einsum("...i,...i->...", {0}, {1})',
        2,
        lambda operands: (
            _one_float_dtype(operands)
            and len(operands[0].shape) > 1
            and operands[0].shape == operands[-1].shape
        ),
        lambda operands, chosen: ((operands[0].shape[:-1], operands[0].dtype),),
        category="matmul",
        autocast="lower",
        makes=(_like,),
    ),
    Operator(
        "conv1d",
        "torch.nn.functional.conv1d({0}, {1})",
        2,
        _conv,
        lambda operands, chosen: (
            (
                (operands[0].shape[0], operands[1].shape[0], operands[0].shape[2]),
                operands[0].dtype,
            ),
        ),
        category="convolution",
        autocast="lower",
        makes=(lambda tensor: Tensor("", (2, tensor.shape[1], 1), tensor.dtype, True),),
    ),
    Operator(
        "avg_pool1d",
        "torch.nn.functional.avg_pool1d({0}, 1)",
        1,
        _rank(3, 3),
        _same_result,
        category="convolution",
        autocast="avoid",
    ),
    Operator(
        "attention",
        "torch.nn.functional.scaled_dot_product_attention({0}, {0}, {0})",
        1,
        _rank(3, 3),
        _same_result,
        category="matmul",
        autocast="avoid",
        double=False,
    ),
)

# ---------------------------------------------------------------------- indexing


def _gather(operands: Operands) -> bool:
    if not _float(operands[0]) or not operands[0].shape or operands[0].shape[0] < 2:
        return False
    return len(operands) == 1 or (operands[1].dtype == "int64" and len(operands[1].shape) == 1)


def _index_leaf(tensor: Tensor) -> Tensor | None:
    return Tensor("", (2,), "int64")


_add(
    Operator(
        "index_select",
        "{0}.index_select(0, {1})",
        2,
        _gather,
        lambda operands, chosen: (
            ((operands[1].shape[0], *operands[0].shape[1:]), operands[0].dtype),
        ),
        category="indexing",
        makes=(_index_leaf,),
    ),
    Operator(
        "index",
        "{0}[{1}]",
        2,
        _gather,
        lambda operands, chosen: (
            ((operands[1].shape[0], *operands[0].shape[1:]), operands[0].dtype),
        ),
        category="indexing",
        makes=(_index_leaf,),
    ),
    _unary("masked_fill", "{0}.masked_fill({0} > 0, 0.5)", category="indexing"),
    Operator("flip", "{0}.flip(0)", 1, _rank(1), _same_result, category="indexing", saves=False),
    Operator("roll", "{0}.roll(1, 0)", 1, _rank(1), _same_result, category="indexing", saves=False),
    Operator(
        "cat",
        "torch.cat([{0}, {1}])",
        2,
        lambda operands: (
            all(map(_float, operands))
            and len(operands[0].shape) > 0
            and operands[0].dtype == operands[-1].dtype
            and operands[0].shape[1:] == operands[-1].shape[1:]
            and len(operands[0].shape) == len(operands[-1].shape)
            and 2 * operands[0].numel <= MAX_NUMEL
            and sum(tensor.shape[0] for tensor in operands) <= 8
        ),
        lambda operands, chosen: (
            (
                (operands[0].shape[0] + operands[1].shape[0], *operands[0].shape[1:]),
                operands[0].dtype,
            ),
        ),
        category="indexing",
        saves=False,
        makes=(_like,),
    ),
    Operator(
        "stack",
        "torch.stack([{0}, {1}])",
        2,
        lambda operands: (
            all(map(_float, operands))
            and len(operands[0].shape) < 3
            and operands[0].shape == operands[-1].shape
            and operands[0].dtype == operands[-1].dtype
            and 2 * operands[0].numel <= MAX_NUMEL
        ),
        lambda operands, chosen: (((2, *operands[0].shape), operands[0].dtype),),
        category="indexing",
        saves=False,
        makes=(_like,),
    ),
)

# ---------------------------------------------------------------------- views


def _view(
    name: str,
    template: str,
    accepts: Accepts,
    result: Callable[[Shape, Chosen], Shape],
    settings: Callable[[Operands], list[Chosen]] = _no_settings,
) -> Operator:
    return Operator(
        name,
        template,
        1,
        accepts,
        lambda operands, chosen: ((result(operands[0].shape, chosen), operands[0].dtype),),
        settings,
        "views",
        saves=False,
        alias=True,
    )


_add(
    _view("first", "{0}[0]", _rank(1), lambda shape, chosen: shape[1:]),
    _view("slice", "{0}[:1]", _rank(1), lambda shape, chosen: (1, *shape[1:])),
    _view("last", "{0}[..., -1]", _rank(1), lambda shape, chosen: shape[:-1]),
    _view(
        "transpose",
        "{0}.transpose(0, -1)",
        _rank(2),
        lambda shape, chosen: (shape[-1], *shape[1:-1], shape[0]),
    ),
    _view("flatten", "{0}.reshape(-1)", _rank(0), lambda shape, chosen: (math.prod(shape),)),
    _view("unsqueeze", "{0}.unsqueeze(0)", _rank(0, 2), lambda shape, chosen: (1, *shape)),
    _view(
        "squeeze",
        "{0}.squeeze(0)",
        _rank(1),
        lambda shape, chosen: shape[1:] if shape[0] == 1 else shape,
    ),
    # Expanded tensors overlap themselves, so they are never changed in place: ``multi_view``.
    Operator(
        "expand",
        "{0}.expand(2, *{0}.shape)",
        1,
        lambda operands: _rank(0, 2)(operands) and 2 * operands[0].numel <= MAX_NUMEL,
        lambda operands, chosen: (((2, *operands[0].shape), operands[0].dtype),),
        category="views",
        saves=False,
        alias=True,
        multi_view=True,
    ),
    Operator(
        "split",
        "{0}.split(1)",
        1,
        lambda operands: _rank(1)(operands) and operands[0].shape[0] == 2,
        lambda operands, chosen: (((1, *operands[0].shape[1:]), operands[0].dtype),) * 2,
        category="multi-output",
        saves=False,
        alias=True,
        multi_view=True,
    ),
    Operator(
        "unbind",
        "{0}.unbind(0)",
        1,
        lambda operands: _rank(1)(operands) and operands[0].shape[0] == 2,
        lambda operands, chosen: ((operands[0].shape[1:], operands[0].dtype),) * 2,
        category="multi-output",
        saves=False,
        alias=True,
        multi_view=True,
    ),
)

# ---------------------------------------------------------------------- in place


def _in_place(
    name: str, template: str, arity: int = 1, accepts: Accepts = _first_float, **options: Any
) -> Operator:
    return Operator(
        name,
        template,
        arity,
        accepts,
        lambda operands, chosen: (),
        category="in-place",
        in_place=True,
        autocast="avoid",
        **options,
    )


def _fits_into(operands: Operands) -> bool:
    return (
        all(map(_float, operands))
        and operands[0].dtype == operands[-1].dtype
        and broadcast(operands[0].shape, operands[-1].shape) == operands[0].shape
    )


_add(
    _in_place("mul_", "{0}.mul_(2)", saves=False),
    _in_place("sub_", "{0}.sub_(0.5)", saves=False),
    _in_place("neg_", "{0}.neg_()", saves=False),
    _in_place("sin_", "{0}.sin_()"),
    _in_place("tanh_", "{0}.tanh_()"),
    _in_place("relu_", "{0}.relu_()"),
    _in_place("add_", "{0}.add_({1})", 2, _fits_into, saves=False, makes=(_like,)),
    _in_place("addcmul_", "{0}.addcmul_({1}, {1})", 2, _fits_into, makes=(_like,)),
    _in_place("set first", "{0}[0] = 0.5", accepts=_rank(1), saves=False),
    _in_place("slice mul_", "{0}[:1].mul_(3)", accepts=_rank(1), saves=False),
    _in_place("copy_", "{0}.copy_({1})", 2, _fits_into, saves=False, makes=(_like,)),
    _in_place("augmented", "{0} += {1}", 2, _fits_into, saves=False, makes=(_like,)),
)

# ---------------------------------------------------------------------- dtypes, no gradient


def _cast(dtype: str, method: str) -> Operator:
    return Operator(
        method,
        f"{{0}}.{method}()",
        1,
        lambda operands: _float(operands[0]) and operands[0].dtype != dtype,
        lambda operands, chosen: ((operands[0].shape, dtype),),
        category="dtypes",
        saves=False,
    )


_add(
    _cast("float64", "double"),
    _cast("float32", "float"),
    _cast("bfloat16", "bfloat16"),
    _unary("detach", "{0}.detach()", category="detached", saves=False, alias=True, detaches=True),
    Operator(
        "argmax",
        "{0}.argmax(0)",
        1,
        _rank(1),
        lambda operands, chosen: ((operands[0].shape[1:], "int64"),),
        category="detached",
    ),
    Operator(
        "positive",
        "{0} > 0",
        1,
        _first_float,
        lambda operands, chosen: ((operands[0].shape, "bool"),),
        category="detached",
    ),
    Operator(
        "full_like",
        "torch.full_like({0}, 0.5)",
        1,
        _first_float,
        _same_result,
        category="factories",
        saves=False,
        detaches=True,
    ),
    Operator(
        "new ones",
        "torch.ones({0}.shape)",
        1,
        _first_float,
        lambda operands, chosen: ((operands[0].shape, "float32"),),
        category="factories",
        saves=False,
        detaches=True,
    ),
    Operator(
        "arange",
        "torch.arange({0}.shape[0]) + 0.5",
        1,
        _rank(1),
        lambda operands, chosen: ((operands[0].shape[:1], "float32"),),
        category="factories",
        saves=False,
        detaches=True,
    ),
)

# ---------------------------------------------------------------------- random


_add(
    _unary("dropout", "torch.dropout({0}, 0.5, True)", category="random", random=True),
    _unary(
        "functional dropout",
        "torch.nn.functional.dropout({0}, 0.3)",
        category="random",
        random=True,
    ),
    _unary("noise", "{0} * torch.rand_like({0})", category="random", random=True),
    _unary(
        "normal",
        "{0} * torch.randn({0}.shape, dtype={0}.dtype)",
        category="random",
        random=True,
        autocast="avoid",
    ),
    Operator(
        "rand_like",
        "torch.rand_like({0})",
        1,
        _first_float,
        _same_result,
        category="random",
        random=True,
        saves=False,
        detaches=True,
    ),
    Operator(
        "bernoulli",
        "torch.bernoulli(torch.sigmoid({0}.detach()))",
        1,
        _first_float,
        _same_result,
        category="random",
        random=True,
        saves=False,
        detaches=True,
    ),
    Operator(
        "permuted",
        "{0}[torch.randperm({0}.shape[0])]",
        1,
        _rank(1),
        _same_result,
        category="random",
        random=True,
    ),
)

# ---------------------------------------------------------------------- custom functions

_add(
    _unary("Doubled", "Doubled.apply({0})", category="functions", needs="Doubled", saves=False),
    _unary("Squared", "Squared.apply({0})", category="functions", needs="Squared"),
    _unary("Exponential", "Exponential.apply({0})", category="functions", needs="Exponential"),
    _unary("Scaled", "Scaled.apply({0}, 3)", category="functions", needs="Scaled"),
    Operator(
        "SignAndCube",
        "SignAndCube.apply({0})",
        1,
        _first_float,
        lambda operands, chosen: (
            (operands[0].shape, operands[0].dtype),
            (operands[0].shape, "bool"),
        ),
        category="functions",
        needs="SignAndCube",
    ),
    Operator(
        "Product",
        "Product.apply({0}, {1})",
        2,
        lambda operands: _one_float_dtype(operands) and operands[0].shape == operands[-1].shape,
        _same_result,
        category="functions",
        needs="Product",
        makes=(_like,),
    ),
)
CATEGORIES: dict[str, tuple[str, ...]] = {}
for _operator in OPERATORS.values():
    CATEGORIES[_operator.category] = (*CATEGORIES.get(_operator.category, ()), _operator.name)
