"""Canonical forms of operators that compute: reductions, contractions, convolutions, normalisations."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache

import onnx
from onnx import AttributeProto, TensorProto

from tap_planner.graph.tensors import to_array
from tap_planner.graph.values import Call, Form, identity
from tap_planner.operators import AttributeValue


def _reduce(call: Call) -> Form:
    value = call.operand(0)
    axes = call.ints_either("axes", 1)
    if not axes:
        if call.integer("noop_with_empty_axes", 0):
            return identity(value)
        axes = tuple(range(value.rank))
    dims = tuple(sorted(call.axis(axis, value.rank) for axis in axes))
    attributes: dict[str, AttributeValue] = {"axes": dims, "keepdims": call.integer("keepdims", 1)}
    return Form(type=call.node.type, attributes=attributes, inputs=[value])


def _arg_reduce(call: Call) -> Form:
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(call.integer("axis", 0), value.rank),
        "keepdims": call.integer("keepdims", 1),
        "select_last_index": call.integer("select_last_index", 0),
    }
    return Form(type=call.node.type, attributes=attributes, inputs=[value])


def _softmax(call: Call) -> Form:
    value = call.operand(0)
    if call.opset >= 13:
        axes = (call.axis(call.integer("axis", -1), value.rank),)
    else:
        axes = tuple(range(call.axis(call.integer("axis", 1), value.rank), value.rank))
    return Form(type=call.node.type, attributes={"axes": axes}, inputs=[value])


def _cumsum(call: Call) -> Form:
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(int(call.scalar(1)), value.rank),
        "exclusive": call.integer("exclusive", 0),
        "reverse": call.integer("reverse", 0),
    }
    return Form(type="CumSum", attributes=attributes, inputs=[value])


def _top_k(call: Call) -> Form:
    value = call.operand(0)
    count = int(call.scalar(1)) if call.has(1) else call.integer("k")
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(call.integer("axis", -1), value.rank),
        "k": count,
        "largest": call.integer("largest", 1),
        "sorted": call.integer("sorted", 1),
    }
    return Form(type="TopK", attributes=attributes, inputs=[value])


def _one_hot(call: Call) -> Form:
    indices = call.operand(0)
    pair = call.array(2)
    if pair.size != 2 or pair.dtype == object:
        raise call.error(f"its values are {pair.size} elements of {pair.dtype}, expected 2 numbers")
    off, on = pair.reshape(-1).tolist()
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(call.integer("axis", -1), indices.rank + 1),
        "depth": int(call.scalar(1)),
        "dtype": call.operand(2).type.dtype,
        "off_value": float(off),
        "on_value": float(on),
    }
    return Form(type="OneHot", attributes=attributes, inputs=[indices])


def _clip(call: Call) -> Form:
    """Constant limits are attributes; where one depends on data both stay operands."""
    bounds = [(index, name) for index, name in ((1, "min"), (2, "max")) if call.has(index)]
    if any(not call.operand(index).is_constant for index, _ in bounds):
        return Form(type="Clip", inputs=call.data())
    attributes: dict[str, AttributeValue] = {
        name: call.number(name, 0.0) for name in ("min", "max") if name in call.attributes
    }
    exact = not call.operand(0).type.is_float
    attributes.update({name: call.scalar(index) if exact else float(call.scalar(index)) for index, name in bounds})
    if not attributes:
        return identity(call.operand(0))
    return Form(type="Clip", attributes=attributes, inputs=[call.operand(0)])


def _gemm(call: Call) -> Form:
    attributes: dict[str, AttributeValue] = {
        "alpha": call.number("alpha", 1.0),
        "beta": call.number("beta", 1.0),
        "transA": call.integer("transA", 0),
        "transB": call.integer("transB", 0),
    }
    return Form(type="Gemm", attributes=attributes, inputs=call.data())


def _einsum(call: Call) -> Form:
    """The equation written out: an ellipsis becomes capital letters, a result that is left out the single indices."""
    equation = call.text("equation", "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    parts = terms.split(",")
    if len(parts) != len(call.data()):
        raise call.error(f"equation {equation!r} has {len(parts)} terms for {len(call.data())} operands")
    ranks = [call.operand(index).rank - len(term.replace("...", "")) for index, term in enumerate(parts)]
    most = max((rank for term, rank in zip(parts, ranks, strict=True) if "..." in term), default=0)
    free = [letter for letter in string.ascii_letters[::-1] if letter not in equation]
    if most > len(free) or min(ranks) < 0:
        raise call.error(f"equation {equation!r} does not fit operands of these ranks")
    letters = free[:most]
    written = [term.replace("...", "".join(letters[most - rank :])) for term, rank in zip(parts, ranks, strict=True)]
    if not arrow:
        single = sorted(letter for letter in set(terms) - {",", "."} if terms.count(letter) == 1)
        result = ("..." if most else "") + "".join(single)
    equation = ",".join(written) + "->" + result.replace("...", "".join(letters))
    return Form(type="Einsum", attributes={"equation": equation}, inputs=call.data())


def _variadic(call: Call) -> Form:
    values = call.data()
    if len(values) == 1:
        return identity(call.operand(0))
    binary = call.node.type == "Sum" and len(values) == 2
    return Form(type="Add" if binary else call.node.type, inputs=values)


def _spatial(call: Call, kernel: tuple[int, ...], *, ceil_mode: int = 0) -> dict[str, AttributeValue]:
    """kernel_shape, strides, dilations and pads, with auto_pad resolved."""
    rank = len(kernel)
    strides = call.integers("strides") or (1,) * rank
    dilations = call.integers("dilations") or (1,) * rank
    pads = call.integers("pads") or (0,) * (2 * rank)
    if not len(strides) == len(dilations) == rank or len(pads) != 2 * rank or call.operand(0).rank != rank + 2:
        raise call.error(
            f"a kernel of {rank} dims over {call.operand(0).rank} dims, with {len(strides)} strides, {len(dilations)} "
            f"dilations and {len(pads)} pads"
        )
    mode = call.text("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = (0,) * (2 * rank)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        begins, ends = [], []
        for size, length, stride, dilation in zip(call.operand(0).shape[2:], kernel, strides, dilations, strict=True):
            total = max(0, (-(-size // stride) - 1) * stride + dilation * (length - 1) + 1 - size)
            small, large = total // 2, total - total // 2
            begins.append(small if mode == "SAME_UPPER" else large)
            ends.append(large if mode == "SAME_UPPER" else small)
        pads = (*begins, *ends)
    return {"dilations": dilations, "kernel_shape": kernel, "pads": pads, "strides": strides}


def _conv(call: Call) -> Form:
    kernel = call.integers("kernel_shape") or call.operand(1).shape[2:]
    attributes = _spatial(call, kernel)
    attributes["group"] = call.integer("group", 1)
    return Form(type="Conv", attributes=attributes, inputs=call.data())


def _conv_transpose(call: Call) -> Form:
    value, weight = call.operand(0), call.operand(1)
    kernel = call.integers("kernel_shape") or weight.shape[2:]
    rank = len(kernel)
    strides = call.integers("strides") or (1,) * rank
    dilations = call.integers("dilations") or (1,) * rank
    extra = call.integers("output_padding") or (0,) * rank
    pads = call.integers("pads") or (0,) * (2 * rank)
    mode, sizes = call.text("auto_pad", "NOTSET"), call.integers("output_shape")
    if sizes or mode.startswith("SAME"):
        begins, ends, added = [], [], list(extra)
        for dim in range(rank):
            full = strides[dim] * (value.shape[2 + dim] - 1) + extra[dim] + (kernel[dim] - 1) * dilations[dim] + 1
            wanted = sizes[-rank + dim] if sizes else value.shape[2 + dim] * strides[dim]
            added[dim] += max(0, wanted - full)
            total = max(0, full - wanted)
            begin = total // 2 if mode == "SAME_UPPER" else total - total // 2
            begins.append(begin)
            ends.append(total - begin)
        pads, extra = (*begins, *ends), tuple(added)
    attributes: dict[str, AttributeValue] = {
        "dilations": dilations,
        "group": call.integer("group", 1),
        "kernel_shape": kernel,
        "output_padding": extra,
        "pads": pads,
        "strides": strides,
    }
    return Form(type="ConvTranspose", attributes=attributes, inputs=call.data())


def _pool(call: Call) -> Form:
    kernel = call.integers("kernel_shape")
    if kernel is None:
        raise call.error("has no kernel_shape")
    attributes = _spatial(call, kernel)
    attributes["ceil_mode"] = call.integer("ceil_mode", 0)
    if call.node.type == "AveragePool":
        attributes["count_include_pad"] = call.integer("count_include_pad", 0)
    if call.node.type == "LpPool":
        attributes["p"] = call.integer("p", 2)
    if call.node.type == "MaxPool":
        attributes["storage_order"] = call.integer("storage_order", 0)
    return Form(type=call.node.type, attributes=attributes, inputs=[call.operand(0)])


def _batch_norm(call: Call) -> Form:
    training = (
        call.integer("training_mode", 0) if call.opset >= 14 else int(len([n for n in call.node.outputs if n]) > 1)
    )
    attributes: dict[str, AttributeValue] = {
        "epsilon": call.number("epsilon", 1e-5),
        "momentum": call.number("momentum", 0.9),
        "training_mode": training,
    }
    return Form(type="BatchNormalization", attributes=attributes, inputs=call.data())


def _norm(call: Call) -> Form:
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(call.integer("axis", -1), value.rank),
        "epsilon": call.number("epsilon", 1e-5),
    }
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


@cache
def _defaults(name: str, domain: str, opset: int) -> tuple[tuple[str, AttributeValue], ...]:
    """Default attribute values of ONNX's own schema."""
    try:
        schema = onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return ()
    found: list[tuple[str, AttributeValue]] = []
    for key, attribute in schema.attributes.items():
        default = attribute.default_value
        if default.type == AttributeProto.INT:
            found.append((key, default.i))
        elif default.type == AttributeProto.FLOAT:
            found.append((key, default.f))
        elif default.type == AttributeProto.STRING:
            found.append((key, default.s.decode()))
        elif default.type == AttributeProto.INTS:
            found.append((key, tuple(default.ints)))
        elif default.type == AttributeProto.FLOATS:
            found.append((key, tuple(default.floats)))
    return tuple(found)


def default_form(call: Call) -> Form:
    """Attributes as they are, missing ones filled in from ONNX's schema."""
    kind = call.node.type
    attributes: dict[str, AttributeValue] = dict(_defaults(kind, "", call.opset)) if "::" not in kind else {}
    for key, value in call.attributes.items():
        if isinstance(value, TensorProto):
            array = to_array(value)
            attributes[key] = tuple(array.reshape(-1).tolist())
        elif value is None or isinstance(value, onnx.GraphProto | onnx.SparseTensorProto):
            raise call.error(f"attribute {key!r} is of a kind that is not supported")
        else:
            attributes[key] = value
    return Form(type=kind, attributes=attributes, inputs=call.data())


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "ArgMax": _arg_reduce,
    "ArgMin": _arg_reduce,
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Clip": _clip,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "CumSum": _cumsum,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "Hardmax": _softmax,
    "LayerNormalization": _norm,
    "LogSoftmax": _softmax,
    "LpPool": _pool,
    "Max": _variadic,
    "MaxPool": _pool,
    "Mean": _variadic,
    "Min": _variadic,
    "OneHot": _one_hot,
    "RMSNormalization": _norm,
    "Softmax": _softmax,
    "Sum": _variadic,
    "TopK": _top_k,
}
for _name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
    CANONICAL[f"Reduce{_name}"] = _reduce
