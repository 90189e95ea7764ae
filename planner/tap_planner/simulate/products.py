"""Collectives that run behind the products that they belong to, as tensor-parallel libraries run them.

A product whose operand is gathered over g ranks is done in parts: the first on what is there already, each of the
others on what has come meanwhile; one whose result is summed sends each part while the next is made (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS'23; PyTorch's
async tensor parallelism; Transformer Engine's userbuffers behind Megatron-Core's ``--tp-comm-overlap``). With g parts
of time c and a collective of time n both take max(g c, c + n). k parts of g / k ranks' shares each (Transformer
Engine's ``aggregate`` and ``num_splits``) wait for what the first of them lacks: max(k c + n (g / k - 1) / (g - 1),
c + n). An all-reduce is k of them, and the last has nothing to hide behind: with each of time m, k c + k m - (k - 1)
min(c, m). A part is priced as what it is, the product on 1 / k of its rows, with a launch, so that parts take longer
together than the whole. The number of parts that gains most is taken; where none gains, nothing is cut.

In backward the sum of an operand's gradient may instead run as a whole behind the product that makes the parameter's
gradient, which does not wait for it ("bulk"): both take as long as the longer one. Whichever hides more is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.graph import TensorKind
from tap_planner.program import (
    Compute,
    ForgetParameters,
    GatherParameters,
    Instruction,
    Part,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    Release,
    instruction_collectives,
)
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.overlap import Busy
from tap_planner.simulate.parts import PartTimes

PRODUCT = "product"
"""Kind of communication: what runs behind the product that it belongs to."""

_SUMS = ("reduce_scatter", "all_reduce")
"""What a product's result may be sent by, part by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What the main stream does at a position where something runs behind a product, or is left of that."""

    pieces: tuple[Busy, ...]
    """In order; a piece of a product behind which something runs uses the levels of that."""
    compute_ns: int = 0
    """Of operators."""
    waited_ns: int = 0
    """Of collectives that nothing hides."""
    hidden_ns: int = 0
    """Of collectives that run behind a product, before this position or after it."""


class Products:
    """What runs behind the products of a Program.

    Args:
        program: the plan, lowered.
        durations: of its instructions.
    """

    def __init__(self, program: Program, durations: Durations) -> None:
        self._program = program
        self._durations = durations
        self._times = PartTimes(program, durations)

    def of(self, instructions: Sequence[Instruction]) -> Mapping[int, Behind]:
        """What is done otherwise than one thing after the other, by position.

        Args:
            instructions: of one pass of the main stream.
        """
        walk = _Walk(self._times)
        for position, instruction in enumerate(instructions):
            match instruction:
                case Release() | ForgetParameters() | GatherParameters() | ReduceGradients() | ReduceShards():
                    pass
                case Redistribute():
                    calls = tuple(self._calls(instruction))
                    if calls:
                        walk.communicate(position, calls, self._moved(instruction))
                case Compute():
                    self._compute(walk, position, instruction)
                case _:
                    walk.forget()
        return walk.found()

    def _calls(self, instruction: Redistribute) -> Iterator[_Call]:
        found = instruction_collectives(self._program, instruction)
        pieces = self._durations.collectives(instruction)
        for piece, (_, kind, axes, elements, dtype) in zip(pieces, found, strict=True):
            ranks = math.prod(self._program.decisions.mesh_shape[axis] for axis in axes)
            stage = self._durations.stage_of(instruction)
            yield _Call(kind, axes, elements, dtype, ranks, piece, stage, piece.ns)

    def _moved(self, instruction: Redistribute) -> _Moved | None:
        """What is redistributed; None for parameters, which no product waits for in parts."""
        decision = self._program.decisions.redistributions[instruction.redistribution]
        if self._program.graph.tensors[decision.tensor].kind is TensorKind.PARAMETER:
            return None
        return _Moved(decision.tensor, frozenset(decision.consumers), instruction.phase is Phase.BACKWARD)

    def _compute(self, walk: _Walk, position: int, instruction: Compute) -> None:
        operator = self._program.graph.operators[instruction.operator]
        reads = frozenset(name for name in operator.inputs if name is not None)
        node = _Node(operator.id, reads, frozenset(operator.outputs), instruction.phase is Phase.BACKWARD)
        collectives, ns = self._durations.collectives(instruction), self._durations.compute_ns(instruction)
        if not (collectives or ns):
            walk.rename(node)
            return
        product = None
        if not collectives and self._times.is_product(instruction.operator):
            product = self._product(node, instruction, ns)
        if product is None:
            walk.compute(node)
        else:
            walk.multiply(position, product)

    def _product(self, node: _Node, instruction: Compute, ns: int) -> _Product | None:
        if not node.backward or instruction.part is Part.INPUTS:
            return _Product(node, instruction.operator, ns, 0)
        if instruction.part is Part.PARAMETERS:
            return None
        return _Product(node, instruction.operator, *self._durations.parts_ns(instruction.operator))


# -- one pass --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A collective of a redistribution."""

    kind: str
    axes: tuple[int, ...]
    elements: int
    dtype: str
    ranks: int
    whole: Busy
    stage: int | None
    """On whose links it is timed."""
    whole_ns: int
    """What it takes; more where it is done in parts that are calls of their own."""
    parts: int | None = None
    """In how many parts it is done; None: as a whole."""
    hidden_ns: int = 0

    @property
    def left_ns(self) -> int:
        """What nothing hides."""
        return self.whole_ns - self.hidden_ns

    def hide(self, ns: int) -> Busy:
        """Let more of it run behind a product."""
        self.hidden_ns += ns
        return Busy(ns, self.whole.levels)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A product in parts, with a collective behind them."""

    parts: int
    product_ns: int
    call_ns: int
    hidden_ns: int
    gain_ns: int
    """What both together take less than one after the other."""

    def make(self, product: _Product, call: _Call) -> Busy:
        """Do it; returns what runs behind the product."""
        product.parts, product.first_ns = self.parts, self.product_ns
        call.parts, call.whole_ns = self.parts, self.call_ns
        return call.hide(self.hidden_ns)


@dataclass(frozen=True, slots=True)
class _Moved:
    """What a redistribution is about."""

    tensor: str
    consumers: frozenset[str]
    """Operators that read it, forward."""
    backward: bool


@dataclass(frozen=True, slots=True)
class _Node:
    """An operator that runs."""

    id: str
    reads: frozenset[str]
    makes: frozenset[str]
    backward: bool


class _Product:
    """A product on its way. Backward it is two: first the gradient of what was multiplied, later the parameter's."""

    def __init__(self, node: _Node, index: int, first_ns: int, later_ns: int) -> None:
        self.node = node
        self.index = index
        self.first_ns = first_ns
        self.later_ns = later_ns
        self.parts: int | None = None
        """In how many parts the first is done; None: as a whole."""
        self.before: list[Busy] = []
        """What runs behind its parts, and was before them."""
        self.after: list[Busy] = []
        """The same of what follows them."""
        self.beside: list[Busy] = []
        """What runs behind the later one."""

    @property
    def is_changed(self) -> bool:
        """Whether anything runs behind it."""
        return bool(self.before or self.after or self.beside)

    def room_ns(self, total_ns: int, parts: int) -> int:
        """What may still run behind the first in parts that take so long together."""
        return total_ns * (parts - 1) // parts - sum(piece.ns for piece in (*self.before, *self.after))

    @property
    def later_room_ns(self) -> int:
        """What may still run behind the later one."""
        return self.later_ns - sum(piece.ns for piece in self.beside)

    def result(self) -> Behind:
        """What the main stream does."""
        rest = Busy(self.first_ns - sum(piece.ns for piece in (*self.before, *self.after)))
        pieces = (*self.before, rest, *self.after, *self.beside, Busy(self.later_room_ns))
        return Behind(pieces=pieces, compute_ns=self.first_ns + self.later_ns)


class _Walk:
    """Working state of ``Products.of``."""

    def __init__(self, times: PartTimes) -> None:
        self._times = times
        self._calls: dict[int, tuple[_Call, ...]] = {}
        self._products: dict[int, _Product] = {}
        self.forget()

    def forget(self) -> None:
        """What comes has nothing to do with what was."""
        self._coming: list[tuple[_Call, _Moved, frozenset[str]]] = []
        """Gathers that a product may read in parts, with the names that views gave to what they bring."""
        self._product: _Product | None = None
        """What has just run."""
        self._made: frozenset[str] = frozenset()
        """What its result is called."""

    def communicate(self, position: int, calls: tuple[_Call, ...], moved: _Moved | None) -> None:
        """A redistribution: perhaps of what the product before it made, perhaps for that after it."""
        self._calls[position] = calls
        self._coming = [entry for entry in self._coming if not entry[0].hidden_ns]
        if moved is None:
            return
        first, last = calls[0], calls[-1]
        if self._product is not None and first.kind in _SUMS and self._is_made(moved):
            self._send(self._product, first)
        if last.kind == "all_gather" and not last.hidden_ns:
            self._coming.append((last, moved, frozenset()))

    def _is_made(self, moved: _Moved) -> bool:
        """Whether the last product made it: forward its result, backward the gradient of its operand."""
        assert self._product is not None
        node = self._product.node
        if moved.backward:
            return node.backward and (node.id in moved.consumers or moved.tensor in self._made)
        return not node.backward and moved.tensor in self._made

    def rename(self, node: _Node) -> None:
        """A view: what it makes is what it reads."""
        source, result = (node.makes, node.reads) if node.backward else (node.reads, node.makes)
        if self._made & source:
            self._made |= result
        self._coming = [
            (call, moved, names | result if self._is_read(node, moved, names) else names)
            for call, moved, names in self._coming
        ]

    def _is_read(self, node: _Node, moved: _Moved, names: frozenset[str]) -> bool:
        """Whether an operator reads what was gathered, or backward the gradient that was."""
        if moved.backward != node.backward:
            return False
        if moved.backward:
            return moved.tensor in node.makes or bool(names & node.makes)
        return node.id in moved.consumers or bool(names & node.reads)

    def compute(self, node: _Node) -> None:
        """Anything that is not done in parts. A gather that hides behind a product may go on behind the next one that
        reads the same, but not behind what does not; what reads it otherwise waits for all of it."""
        self._product = None
        self._coming = [
            entry for entry in self._coming if entry[0].hidden_ns and not self._is_read(node, entry[1], entry[2])
        ]

    def multiply(self, position: int, product: _Product) -> None:
        """A product."""
        self._products[position] = product
        node = product.node
        self._coming = [entry for entry in self._coming if self._is_read(node, entry[1], entry[2])]
        for call, _, _ in self._coming:
            self._receive(product, call)
        self._coming = [entry for entry in self._coming if entry[0].hidden_ns and not node.backward]
        self._product = product
        self._made = node.reads if node.backward else node.makes

    def _receive(self, product: _Product, call: _Call) -> None:
        """Let a gather run behind the parts of a product that reads it."""
        best = max(self._cuts(product, call), key=lambda cut: cut.gain_ns, default=None)
        if best is not None and best.gain_ns > 0:
            product.before.append(best.make(product, call))

    def _send(self, product: _Product, call: _Call) -> None:
        """Let a sum run behind the parts of the product that made it, or backward behind what comes later."""
        best = max(self._cuts(product, call), key=lambda cut: cut.gain_ns, default=None)
        beside_ns = min(call.left_ns, product.later_room_ns)
        if best is not None and best.gain_ns > max(beside_ns, 0):
            product.after.append(best.make(product, call))
        elif beside_ns > 0:
            product.beside.append(call.hide(beside_ns))

    def _cuts(self, product: _Product, call: _Call) -> Iterator[_Cut]:
        """Ways to hide a collective behind the parts of a product: as many as there are ranks, or groups of these."""
        for parts in range(2, call.ranks + 1):
            if call.ranks % parts or product.parts not in (None, parts) or call.parts not in (None, parts):
                continue
            part_ns = self._times.product_ns(product.index, backward=product.node.backward, parts=parts)
            if part_ns is None:
                continue
            product_ns = max(product.first_ns, parts * part_ns)
            call_ns, most_ns = call.whole_ns, call.whole_ns
            if call.kind == "all_reduce":  # in parts it is several, of which one has nothing to hide behind
                part_of_call_ns = self._times.collective_ns(
                    call.kind, call.axes, call.elements, call.dtype, stage=call.stage, parts=parts
                )
                call_ns, most_ns = parts * part_of_call_ns, (parts - 1) * part_of_call_ns
            else:  # the first of a ring is there, all others of the first part are waited for
                most_ns = most_ns * (call.ranks - call.ranks // parts) // (call.ranks - 1)
            ns = min(most_ns - call.hidden_ns, product.room_ns(product_ns, parts))
            longer_ns = product_ns - product.first_ns + call_ns - call.whole_ns
            yield _Cut(parts, product_ns, call_ns, ns, ns - longer_ns)

    def found(self) -> Mapping[int, Behind]:
        """All positions at which something is done otherwise."""
        found = {position: product.result() for position, product in self._products.items() if product.is_changed}
        for position, calls in self._calls.items():
            if any(call.hidden_ns for call in calls):
                found[position] = Behind(
                    pieces=tuple(Busy(call.left_ns, call.whole.levels) for call in calls),
                    waited_ns=sum(call.left_ns for call in calls),
                    hidden_ns=sum(call.hidden_ns for call in calls),
                )
        return found
