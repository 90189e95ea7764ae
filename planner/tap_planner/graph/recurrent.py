"""Canonical forms of recurrent layers: LSTM, GRU, RNN."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.graph.values import Call, Form
from tap_planner.operators import AttributeValue

_ACTIVATIONS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
"""Per direction, as the ONNX schemas state them."""
_SWITCHES = {"RNN": (), "GRU": ("linear_before_reset",), "LSTM": ("input_forget",)}
_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "LeakyRelu": (0.01, None),
    "ThresholdedRelu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "Elu": (1.0, None),
    "Affine": (1.0, 0.0),
    "ScaledTanh": (1.0, 1.0),
}
"""Alpha and beta of the activations that have them (None: has none), as ONNX's operators of the same name have them."""
_KNOWN = {name.lower(): name for name in ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus", *_DEFAULTS)}


def _texts(call: Call, name: str) -> tuple[str, ...] | None:
    value = call.attributes.get(name)
    return tuple(str(item) for item in value) if isinstance(value, tuple) else None


def _numbers(call: Call, name: str) -> list[float]:
    value = call.attributes.get(name)
    return [float(item) for item in value] if isinstance(value, tuple) else []


def _activations(call: Call, directions: int) -> dict[str, AttributeValue]:
    """Names with an alpha and a beta each; the file lists alphas and betas only of the activations that have one."""
    expected = _ACTIVATIONS[call.node.type] * directions
    names = _texts(call, "activations") or expected
    if len(names) != len(expected):
        raise call.error(f"has {len(names)} activations, expected {len(expected)}")
    alphas, betas = _numbers(call, "activation_alpha"), _numbers(call, "activation_beta")
    known: list[str] = []
    pairs: list[float] = []
    for text in names:
        name = _KNOWN.get(text.lower())
        if name is None:
            raise call.error(f"activation {text!r}, expected one of {', '.join(sorted(_KNOWN.values()))}")
        alpha, beta = _DEFAULTS.get(name, (None, None))
        known.append(name)
        pairs.append(alphas.pop(0) if alpha is not None and alphas else alpha or 0.0)
        pairs.append(betas.pop(0) if beta is not None and betas else beta or 0.0)
    attributes: dict[str, AttributeValue] = {"activations": tuple(known)}
    if any(name in _DEFAULTS for name in known):
        attributes["activation_values"] = tuple(pairs)
    return attributes


def _recurrent(call: Call) -> Form:
    direction = call.text("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise call.error(f"direction {direction!r}, expected forward, reverse or bidirectional")
    attributes = _activations(call, 2 if direction == "bidirectional" else 1)
    attributes["direction"] = direction
    attributes["layout"] = call.integer("layout", 0)
    for name in _SWITCHES[call.node.type]:
        attributes[name] = call.integer(name, 0)
    if "clip" in call.attributes:
        attributes["clip"] = call.number("clip", 0.0)
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


CANONICAL: dict[str, Callable[[Call], Form]] = dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent)
