"""Structure-aware damage to ONNX models: a mutator changes a model in place, or says that it found nothing to change.

A mutation is a pure function of (seed models, seed number, index): the same three give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import TensorProto, helper

from tests.graph.fuzz_contents import (
    add_attribute,
    change_attribute,
    change_dims,
    change_integers,
    change_name,
    change_tensor,
    change_type,
    make_sparse,
)
from tests.graph.fuzz_nodes import (
    change_operands,
    change_operator,
    change_results,
    insert,
    insert_einsum,
    insert_fused,
    insert_operator,
    insert_sequence,
    insert_structure,
    insert_tower,
    join_models,
    move_nodes,
)
from tests.graph.fuzz_places import EXTREME_INTS, Mutator, Random, chance, graphs, integer, odd_text, pick, value_names
from tests.graph.fuzz_seeds import Seed

BYTE_SHARE = 0.12
"""Share of the inputs that are damaged byte by byte."""
JOINED_SHARE = 0.08
"""Share of the models that get the nodes of another one behind them."""
GROUP_SHARES = {"exported": 0.2, "operator": 0.5, "written": 0.3}


def change_versions(rng: Random, model: onnx.ModelProto) -> bool:
    """Other operator sets and IR versions."""
    if model.opset_import and chance(rng, 0.8):
        entry = pick(rng, model.opset_import)
        entry.version = pick(rng, (*range(1, 27), *range(7, 24), *EXTREME_INTS))
    elif chance(rng, 0.5):
        model.ir_version = pick(rng, (*range(1, 12), *EXTREME_INTS))
    else:
        model.opset_import.add(domain=pick(rng, ("", "ai.onnx", "com.microsoft", "local")), version=integer(rng))
    return True


def change_ends(rng: Random, model: onnx.ModelProto) -> bool:
    """Graph inputs and outputs: dropped, doubled, added, made of inner values."""
    graph = pick(rng, graphs(model))
    part = pick(rng, (graph.input, graph.output))
    way = int(rng.integers(4))
    if way == 0 and part:
        del part[int(rng.integers(len(part)))]
    elif way == 1 and part:
        part.add().CopyFrom(pick(rng, list(part)))
    elif way == 2 and graph.output:
        pick(rng, graph.output).name = pick(rng, value_names(graph))
    else:
        part.add().CopyFrom(helper.make_tensor_value_info(pick(rng, value_names(graph)), TensorProto.FLOAT, [1]))
    return True


def nest(rng: Random, model: onnx.ModelProto) -> bool:
    """Put a node into branches of branches, or into the body of a loop."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if len(node.output) == 1 and node.output[0]]
    if not places:
        return False
    at = pick(rng, places)
    node = onnx.NodeProto.FromString(graph.node[at].SerializeToString())
    result = node.output[0]
    condition = helper.make_tensor("yes", TensorProto.BOOL, [], [chance(rng, 0.5)])
    graph.initializer.append(condition)
    for level in range(pick(rng, (1, 1, 2, 5, 20))):
        name = f"{result}_{level}" if chance(rng, 0.7) else result
        inner = onnx.NodeProto.FromString(node.SerializeToString())
        inner.output[0] = name
        value = onnx.ValueInfoProto(name=name)
        bodies = [helper.make_graph([inner], f"g{level}", [], [value]) for _ in range(2)]
        if level < 3 and chance(rng, 0.2):
            node = helper.make_node("Loop", ["", "yes"], [result], body=bodies[0])
        elif level > 3:
            other = helper.make_graph([], "h", [], [value])
            node = helper.make_node("If", ["yes"], [result], then_branch=bodies[0], else_branch=other)
        else:
            node = helper.make_node("If", ["yes"], [result], then_branch=bodies[0], else_branch=bodies[1])
    graph.node[at].CopyFrom(node)
    return True


def add_functions(rng: Random, model: onnx.ModelProto) -> bool:
    """Local functions: one that calls itself, a ring, or a tree whose inlining doubles at each level."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    count = pick(rng, (1, 2, 5, 12, 30))
    way = pick(rng, ("ring", "tree", "chain"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("bomb", 1)]
    for level in range(count):
        following = (level + 1) % count if way == "ring" else level + 1
        last = way != "ring" and following == count
        nodes = [helper.make_node("Neg" if last else f"F{following}", ["x"], ["m"], domain="" if last else "bomb")]
        calls = 2 if way == "tree" else 1
        if calls == 2 and not last:
            nodes.append(helper.make_node(f"F{following}", ["m"], ["y"], domain="bomb"))
        else:
            nodes.append(helper.make_node("Identity", ["m"], ["y"]))
        model.functions.append(helper.make_function("bomb", f"F{level}", ["x"], ["y"], nodes, opsets))
    model.opset_import.add(domain="bomb", version=1)
    source = graph.node[at].input[0]
    insert(graph, at, [helper.make_node("F0", [source], ["fuzzed_f"], domain="bomb")], source, "fuzzed_f")
    return True


def scramble_metadata(rng: Random, model: onnx.ModelProto) -> bool:
    """Annotations, training information, doubled functions."""
    model.graph.quantization_annotation.add(tensor_name=pick(rng, value_names(model.graph)))
    model.metadata_props.add(key=odd_text(rng), value=odd_text(rng))
    model.training_info.add().algorithm.CopyFrom(model.graph)
    if model.functions:
        model.functions.add().CopyFrom(model.functions[0])
    return True


MUTATORS: tuple[tuple[Mutator, int], ...] = (
    (change_operator, 8),
    (change_operands, 8),
    (change_results, 4),
    (move_nodes, 4),
    (insert_operator, 8),
    (insert_fused, 5),
    (insert_structure, 8),
    (insert_tower, 3),
    (insert_einsum, 2),
    (insert_sequence, 3),
    (change_attribute, 10),
    (add_attribute, 6),
    (change_dims, 6),
    (change_type, 4),
    (change_tensor, 8),
    (change_integers, 8),
    (make_sparse, 2),
    (change_name, 4),
    (change_versions, 3),
    (change_ends, 3),
    (nest, 3),
    (add_functions, 2),
    (scramble_metadata, 1),
)
"""Mutators with their weights."""


def damage_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, cut, insert, double or overwrite bytes."""
    found = bytearray(data)
    for _ in range(pick(rng, (1, 1, 2, 8))):
        at = int(rng.integers(len(found) + 1))
        way = int(rng.integers(6))
        if way <= 1 and at < len(found):
            found[at] ^= 1 << int(rng.integers(8))
        elif way == 2:
            del found[at:]
        elif way == 3:
            found[at:at] = rng.bytes(int(rng.integers(1, 20)))
        elif way == 4:
            stop = at + int(rng.integers(1, 60))
            found[at:at] = found[at:stop]
        else:
            del found[at : at + int(rng.integers(1, 60))]
    return bytes(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A damaged model."""

    seed: str
    """Name of the model that it was made of."""
    steps: tuple[str, ...]
    """The mutators that were applied."""
    data: bytes


def _steps(rng: Random, model: onnx.ModelProto, others: Sequence[Seed]) -> Iterator[str]:
    if chance(rng, JOINED_SHARE):
        join_models(others)(rng, model)
        yield "join_models"
    weights = np.array([weight for _, weight in MUTATORS], float)
    count = 1 + int(rng.geometric(0.55) - 1 if chance(rng, 0.7) else 0)
    for _ in range(min(count, 5)):
        for _ in range(10):
            mutator = MUTATORS[int(rng.choice(len(MUTATORS), p=weights / weights.sum()))][0]
            if mutator(rng, model):
                yield mutator.__name__
                break


def make_mutation(groups: dict[str, list[Seed]], seed: int, index: int) -> Mutation:
    """Mutation number ``index`` of the stream ``seed``.

    Args:
        groups: models by group, see ``load_seeds``.
        seed: of the stream.
        index: of the mutation.
    """
    rng = np.random.default_rng((seed, index))
    shares = np.array([GROUP_SHARES[group] for group in groups])
    group = list(groups)[int(rng.choice(len(groups), p=shares / shares.sum()))]
    origin = pick(rng, groups[group])
    if chance(rng, BYTE_SHARE):
        data = damage_bytes(rng, origin.proto.SerializeToString())
        return Mutation(seed=origin.name, steps=("damage_bytes",), data=data)
    model = onnx.ModelProto()
    model.CopyFrom(origin.proto)
    try:
        steps = tuple(_steps(rng, model, groups[list(groups)[-1]]))
        data = model.SerializeToString()
    except (DecodeError, EncodeError):  # nested deeper than protobuf itself goes
        data, steps = damage_bytes(rng, origin.proto.SerializeToString()), ("damage_bytes",)
    return Mutation(seed=origin.name, steps=steps, data=data)
