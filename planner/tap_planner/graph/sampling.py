"""Canonical forms of random operators. Without a ``seed`` an operator draws by its own name."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.values import Call, Form
from tap_planner.operators import AttributeValue

_PARAMETERS = {
    "RandomNormal": {"mean": 0.0, "scale": 1.0},
    "RandomNormalLike": {"mean": 0.0, "scale": 1.0},
    "RandomUniform": {"low": 0.0, "high": 1.0},
    "RandomUniformLike": {"low": 0.0, "high": 1.0},
    "Bernoulli": {},
    "Multinomial": {},
}
_DEFAULT_TYPES = {"RandomNormal": "float32", "RandomUniform": "float32", "Multinomial": "int32"}


def seed_of(call: Call) -> dict[str, AttributeValue]:
    """The seed as an integer (files hold a float: its bits), nothing where the file has none."""
    value = call.attributes.get("seed")
    if isinstance(value, int):
        return {"seed": value}
    return {"seed": struct.unpack("<q", struct.pack("<d", value))[0]} if isinstance(value, float) else {}


def _random(call: Call) -> Form:
    kind = call.node.type
    attributes: dict[str, AttributeValue] = {
        name: call.number(name, default) for name, default in _PARAMETERS[kind].items()
    }
    attributes.update(seed_of(call))
    if "dtype" in call.attributes:
        attributes["dtype"] = dtype_name(call.integer("dtype"))
    else:
        attributes["dtype"] = _DEFAULT_TYPES[kind] if kind in _DEFAULT_TYPES else call.operand(0).type.dtype
    if kind in ("RandomNormal", "RandomUniform"):
        shape = call.integers("shape")
        if shape is None:
            raise call.error("has no shape")
        attributes["shape"] = shape
    if kind == "Multinomial":
        attributes["sample_size"] = call.integer("sample_size", 1)
    return Form(type=kind, attributes=attributes, inputs=call.data())


CANONICAL: dict[str, Callable[[Call], Form]] = dict.fromkeys(_PARAMETERS, _random)
