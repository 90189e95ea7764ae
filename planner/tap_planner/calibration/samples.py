"""Small models that stand for what real ones do, as Programs for one device: what ``tap-calibrate`` runs.

Products and elementwise operators come in chains of two, so that backward makes gradients of operands as well as of
weights. A layer holds the operators of a transformer's layer in their usual mix, with its views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.graph import BindOptions, Graph, LossOptions, bind, model_of_text
from tap_planner.plan import unsplit_decisions
from tap_planner.program import Program, lower

__all__ = ["Sample", "attention", "elementwise", "fused_attention", "layer", "product", "program_on_one_device"]

_FUSED_HEAD = '<ir_version: 11, opset_import: ["" : 23]>'
_HEAD = '<ir_version: 10, opset_import: ["" : 20]>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step to be measured on one device."""

    kind: str
    """``matrix``, ``memory``, ``attention`` or ``launch``: what its time tells most about."""
    name: str
    """Kind, sizes and precision."""
    program: Program

    @property
    def precision(self) -> str:
        """What floats are computed in."""
        return self.program.decisions.precision


def product(rows: int, terms: int, columns: int, precision: str) -> Sample:
    """Two matrix products: [rows, terms] x [terms, columns] x [columns, terms]."""
    text = f"""{_HEAD} products (float[batch, {terms}] x) => (float[batch, {terms}] y) {{
        h = MatMul(x, up)
        y = MatMul(h, down)
    }}"""
    weights = {"up": (terms, columns), "down": (columns, terms)}
    return _sample("matrix", f"product {rows}x{terms}x{columns}", text, weights, rows, precision)


def elementwise(rows: int, columns: int, precision: str) -> Sample:
    """Operators that only move bytes, on [rows, columns]."""
    text = f"""{_HEAD} elementwise (float[batch, {columns}] x) => (float[batch, {columns}] y) {{
        a = Add(x, shift)
        b = LayerNormalization <axis: int = -1> (a, scale, bias)
        c = Gelu(b)
        d = Add(c, a)
        e = Softmax <axis: int = -1> (d)
        y = Mul(e, gate)
    }}"""
    weights: dict[str, tuple[int, ...]] = dict.fromkeys(("shift", "scale", "bias", "gate"), (columns,))
    return _sample("memory", f"elementwise {rows}x{columns}", text, weights, rows, precision)


def attention(batch: int, positions: int, heads: int, width: int, precision: str) -> Sample:
    """Products of queries, keys and values with a softmax between, [batch, heads, positions, width]."""
    shape = f"float[batch, {heads}, {positions}, {width}]"
    text = f"""{_HEAD} attention ({shape} x) => ({shape} y) <float scale = {{{width**-0.5}}}> {{
        q = Mul(x, gate)
        k = Add(x, gate)
        t = Transpose <perm: ints = [0, 1, 3, 2]> (k)
        s = MatMul(q, t)
        m = Mul(s, scale)
        p = Softmax <axis: int = -1> (m)
        y = MatMul(p, k)
    }}"""
    name = f"attention {batch}x{heads}x{positions}x{width}"
    return _sample("attention", name, text, {"gate": (width,)}, batch, precision)


def fused_attention(batch: int, positions: int, heads: int, width: int, precision: str) -> Sample:
    """The same as one operator."""
    shape = f"float[batch, {heads}, {positions}, {width}]"
    text = f"""{_FUSED_HEAD} fused ({shape} x) => ({shape} y) {{
        q = Mul(x, gate)
        k = Add(x, gate)
        y = Attention(q, k, k)
    }}"""
    name = f"fused attention {batch}x{heads}x{positions}x{width}"
    return _sample("attention", name, text, {"gate": (width,)}, batch, precision)


def layer(batch: int, positions: int, hidden: int, heads: int, precision: str) -> Sample:
    """One layer of a GPT on [batch, positions, hidden]; of tiny sizes every operator takes its launch only."""
    width, inner = hidden // heads, 4 * hidden
    shape = f"float[batch, {positions}, {hidden}]"
    weights: dict[str, tuple[int, ...]] = {"up": (hidden, inner), "up_b": (inner,), "down": (inner, hidden)}
    weights |= dict.fromkeys(("wq", "wk", "wv", "wo"), (hidden, hidden))
    weights |= dict.fromkeys(("n1", "n1b", "n2", "n2b", "qb", "kb", "vb", "ob", "down_b"), (hidden,))
    parts = "".join(
        f"""
        {x}m = MatMul(n, w{x})
        {x}a = Add({x}m, {x}b)
        {x}h = Reshape({x}a, apart)
        {x}t = Transpose <perm: ints = [{"0, 2, 3, 1" if x == "k" else "0, 2, 1, 3"}]> ({x}h)"""
        for x in "qkv"
    )
    text = f"""{_HEAD} layer ({shape} x) => ({shape} y)
        <int64[4] apart = {{0, 0, {heads}, {width}}}, int64[3] merged = {{0, 0, {hidden}}},
         float scale = {{{width**-0.5}}}>
    {{
        n = LayerNormalization <axis: int = -1> (x, n1, n1b){parts}
        s = MatMul(qt, kt)
        sm = Mul(s, scale)
        p = Softmax <axis: int = -1> (sm)
        o = MatMul(p, vt)
        ot = Transpose <perm: ints = [0, 2, 1, 3]> (o)
        om = Reshape(ot, merged)
        op = MatMul(om, wo)
        oa = Add(op, ob)
        r = Add(x, oa)
        n2n = LayerNormalization <axis: int = -1> (r, n2, n2b)
        u = MatMul(n2n, up)
        ua = Add(u, up_b)
        g = Gelu(ua)
        d = MatMul(g, down)
        da = Add(d, down_b)
        y = Add(r, da)
    }}"""
    return _sample("launch", f"layer {batch}x{positions}x{hidden}", text, weights, batch, precision)


def _sample(
    kind: str, name: str, text: str, weights: Mapping[str, tuple[int, ...]], batch: int, precision: str
) -> Sample:
    options = BindOptions(batch=batch, training=True, loss=LossOptions(kind="mean"))
    graph = bind(model_of_text(text, weights), options)
    return Sample(kind=kind, name=f"{name} {precision}", program=program_on_one_device(graph, precision))


def program_on_one_device(graph: Graph, precision: str) -> Program:
    """A training step of a graph with a mean loss on a mesh without axes: nothing to decide, nothing to send."""
    decisions = unsplit_decisions(graph, training=True, precision=precision, loss_output=graph.output_names[0])
    return lower(graph, decisions)
