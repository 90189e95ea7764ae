"""GPT as training libraries run it, operator by operator: a fused kernel is one operator, what strides do is free.

A layer is the ``ParallelTransformerLayer`` of Megatron-LM (megatron/model/transformer.py, v2.0 to v3.0) and
Megatron-DeepSpeed: LayerNorm, bias + GeLU and bias + dropout + add are one kernel each. ``Kernels.MEGATRON`` has its
attention: ``baddbmm``, scale + mask + softmax in one kernel (or in five: ``GptShape.fuses_softmax``), dropout, ``bmm``
and a copy back to [batch, seq, hidden]. ``Kernels.FLASH`` has the fused Attention operator (opset 23) and no dropout:
the MPT of llm-foundry (llmfoundry/models/mpt), whose biases torch adds in kernels that are there anyway.
``GptShape.rules`` describe what ONNX lacks, as ``--custom-rule`` would.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from tap_planner.operators import CustomRule, custom_rule
from tests.search.models import Nodes

_DOMAIN = "training"


def _moved(name: str, dims: str, result: str) -> CustomRule:
    """A kernel that reads and writes, and whose backward reads nothing of them."""
    return custom_rule(
        type=f"{_DOMAIN}::{name}",
        inputs=[dims],
        outputs=[result],
        factors={"d": "fixed"} if "d" in dims.split() else {},
        saved_inputs=(),
        saved_outputs=(),
    )


def _softmax(name: str) -> CustomRule:
    """A kernel whose backward reads its result."""
    return custom_rule(
        type=f"{_DOMAIN}::{name}",
        inputs=["b n s t"],
        outputs=["b n s t"],
        factors={"t": "fixed"},
        saved_inputs=(),
        saved_outputs=(0,),
    )


def _cast(name: str, dims: str, result: str) -> CustomRule:
    """A cast of scores to float32 or back."""
    return custom_rule(
        type=f"{_DOMAIN}::{name}",
        inputs=[dims],
        outputs=[result],
        factors={"t": "fixed", "two": "fixed"},
        sizes={"two": 2},
        saved_inputs=(),
        saved_outputs=(),
    )


_SPLIT: dict[str, Any] = {
    "inputs": ["b s (n three d)"],
    "factors": {"n": "parallel", "three": "fixed", "d": "fixed"},
    "sizes": {"n": "num_heads", "three": 3},
    "kind": "view",
    "saved_inputs": (),
}
_RULES: tuple[CustomRule, ...] = (
    custom_rule(
        type=f"{_DOMAIN}::BiasDropoutAdd",
        inputs=["b s h", "h", "b s h"],
        outputs=["b s h"],
        saved_inputs=(),
        saved_outputs=(),
        trainable=(1,),
    ),
    _moved("LossPass", "b s v", "b s v"),
)
_MEGATRON_RULES = (
    custom_rule(type=f"{_DOMAIN}::SplitHeads", outputs=["b n s d", "b n d s", "b n s d"], **_SPLIT),
    _moved("AttentionDropout", "b n s d", "b n s d"),
    _moved("MergeHeads", "b n s d", "b s (n d)"),
    _moved("HiddenDropout", "b s d", "b s d"),
)
"""Masks of dropout, one byte an element, are left out."""
_FUSED_SOFTMAX = {"softmax": _softmax("MaskedSoftmax")}
_TORCH_SOFTMAX = {
    "float": _cast("ToFloat", "b n s t", "b n s (t two)"),
    "scaled": _moved("Scale", "b n s d", "b n s d"),
    "masked": _moved("Mask", "b n s d", "b n s d"),
    "softmax": _softmax("FloatSoftmax"),
    "half": _cast("ToHalf", "b n s (t two)", "b n s t"),
}
"""Name of a kernel's result -> its rule. The planner gives every float the precision's size, so a float32 is two
elements of 16 bits here. The mask, which all heads share, is left out."""
_FLASH_RULES = (custom_rule(type=f"{_DOMAIN}::SplitParts", outputs=["b s (n d)"] * 3, **_SPLIT),)


class Kernels(enum.Enum):
    """Whose kernels run a layer."""

    MEGATRON = "megatron"
    FLASH = "flash"


_LOSS_PASSES = {Kernels.MEGATRON: 6, Kernels.FLASH: 4}
"""Cross-entropy runs in float32, kernel by kernel: Megatron's ``vocab_parallel_cross_entropy`` (cast, max, subtract,
exp, sum, divide; backward multiply and cast) moves 52 bytes a logit, torch's ``cross_entropy`` (cast, log_softmax,
nll_loss) 36. The planner's own loss moves 6 at 16 bits; passes of 8, half of them backward, are put before it for the
rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """Sizes of a GPT."""

    hidden: int
    heads: int
    layers: int
    seq: int
    vocab: int = 51200
    kernels: Kernels = Kernels.MEGATRON

    @property
    def name(self) -> str:
        """A name of a file."""
        sizes = (self.hidden, self.heads, self.layers, self.seq, self.vocab)
        return f"{self.kernels.value}_{'_'.join(map(str, sizes))}"

    @property
    def rules(self) -> tuple[CustomRule, ...]:
        """Rules of the operators that ONNX lacks, where the softmax is fused."""
        return self.rules_with(fused_softmax=True)

    def rules_with(self, *, fused_softmax: bool) -> tuple[CustomRule, ...]:
        """Rules of the operators that ONNX lacks.

        Args:
            fused_softmax: as ``fuses_softmax`` says.
        """
        if self.kernels is Kernels.FLASH:
            return (*_RULES, *_FLASH_RULES)
        return (*_RULES, *_MEGATRON_RULES, *_softmax_kernels(fused_softmax).values())

    def fuses_softmax(self, *, tp: int, micro_batch: int) -> bool:
        """Whether scale, mask and softmax are one kernel.

        Megatron's kernel takes up to 2048 keys and the scores of four heads (of one sample or several) a block. Where a
        device has no multiple of four, ``FusedScaleMaskSoftmax`` (megatron/model/fused_softmax.py of Megatron-LM and of
        Megatron-DeepSpeed, 2021 and later) lets torch do it: cast to float32, scale, mask, softmax, cast back. Earlier
        versions look at the length only, and the kernel then refuses.

        Args:
            tp: ranks that share the heads.
            micro_batch: samples at once.
        """
        if self.kernels is Kernels.FLASH:
            return True
        return 16 < self.seq <= 2048 and self.seq % 4 == 0 and self.heads // tp * micro_batch % 4 == 0

    def training_flops(self, batch: int, *, recompute: bool) -> int:
        """Matrix FLOPs of one step; with full recompute 96 B s l h^2 (1 + s / 6h + V / 16lh) (Narayanan et al., SC'21,
        equation 3): of the layers' products a quarter is their second forward.

        Args:
            batch: samples of the step.
            recompute: whether every layer's forward runs twice.
        """
        tokens, h = batch * self.seq, self.hidden
        layer = 24 * tokens * h * h + 4 * tokens * self.seq * h
        return self.layers * layer * (4 if recompute else 3) + 6 * tokens * h * self.vocab


def write_gpt(folder: Path, shape: GptShape, *, fused_softmax: bool = True) -> Path:
    """Write the ONNX file, unless it is there.

    Args:
        folder: where it goes.
        shape: sizes.
        fused_softmax: as ``GptShape.fuses_softmax`` says.
    """
    path = folder / f"{shape.name}{'' if fused_softmax else '_unfused'}.onnx"
    if not path.exists():
        onnx.save(gpt_model(shape, fused_softmax=fused_softmax), path)
    return path


def gpt_model(shape: GptShape, *, fused_softmax: bool = True) -> onnx.ModelProto:
    """The model without weights: ids [batch, seq] to logits [batch, seq, vocab], by the transposed embedding."""
    graph = Nodes()
    table = graph.weight("embedding.word.weight", shape.vocab, shape.hidden)
    x = graph.add("Gather", [table, "input_ids"], "embedding.words")
    x = graph.add("Add", [x, graph.weight("embedding.position.weight", shape.seq, shape.hidden)], "embedding.sum")
    if shape.kernels is Kernels.MEGATRON:
        x = graph.add("HiddenDropout", [x], "embedding.dropped", domain=_DOMAIN)
    for layer in range(shape.layers):
        x = _layer(graph, f"layers.{layer}", x, shape, fused_softmax)
    x = _norm(graph, "final_norm", x, shape)
    x = graph.add("MatMul", [x, graph.add("Transpose", [table], "embedding.transposed", perm=[1, 0])], "scores")
    passes = _LOSS_PASSES[shape.kernels]
    for number in range(1, passes + 1):
        x = graph.add("LossPass", [x], "logits" if number == passes else f"loss.{number}", domain=_DOMAIN)
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        graph.nodes,
        shape.name,
        [value("input_ids", TensorProto.INT64, ["batch", shape.seq])],
        [value("logits", TensorProto.FLOAT, ["batch", shape.seq, shape.vocab])],
        graph.initializers,
    )
    opsets = [helper.make_opsetid(*opset) for opset in (("", 23), (_DOMAIN, 1), ("com.microsoft", 1))]
    return helper.make_model(made, opset_imports=opsets, ir_version=11)


def _layer(graph: Nodes, name: str, x: str, shape: GptShape, fused_softmax: bool) -> str:
    h, attention = shape.hidden, f"{name}.attention"
    qkv = _qkv(graph, name, x, shape)
    if shape.kernels is Kernels.MEGATRON:
        mixed = _megatron_attention(graph, attention, qkv, shape, fused_softmax)
    else:
        mixed = _flash_attention(graph, attention, qkv, shape)
    x = _added(graph, f"{attention}.dense", _linear(graph, f"{attention}.dense", mixed, h, h), x, h)
    y = _linear(graph, f"{name}.mlp.up", _norm(graph, f"{name}.post_norm", x, shape), h, 4 * h)
    bias = graph.weight(f"{name}.mlp.up.bias", 4 * h)
    y = graph.add("BiasGelu", [y, bias], f"{name}.mlp.gelu", domain="com.microsoft")
    return _added(graph, f"{name}.mlp.down", _linear(graph, f"{name}.mlp.down", y, 4 * h, h), x, h)


def _norm(graph: Nodes, name: str, x: str, shape: GptShape) -> str:
    operands = [x, *(graph.weight(f"{name}.{part}", shape.hidden) for part in ("weight", "bias"))]
    return graph.add("LayerNormalization", operands, f"{name}.out", axis=-1, epsilon=1e-5)


def _linear(graph: Nodes, name: str, x: str, rows: int, columns: int) -> str:
    """A projection, whose bias comes later."""
    return graph.add("MatMul", [x, graph.weight(f"{name}.weight", rows, columns)], f"{name}.out")


def _added(graph: Nodes, name: str, x: str, residual: str, h: int) -> str:
    operands = [x, graph.weight(f"{name}.bias", h), residual]
    return graph.add("BiasDropoutAdd", operands, f"{name}.added", domain=_DOMAIN)


def _qkv(graph: Nodes, layer: str, x: str, shape: GptShape) -> str:
    h, name = shape.hidden, f"{layer}.attention.qkv"
    qkv = _linear(graph, name, _norm(graph, f"{layer}.input_norm", x, shape), h, 3 * h)
    return graph.add("Add", [qkv, graph.weight(f"{name}.bias", 3 * h)], f"{name}.biased")


def _parts(graph: Nodes, op: str, name: str, qkv: str, shape: GptShape) -> list[str]:
    """Queries, keys and values."""
    parts = [f"{name}.{part}" for part in ("query", "key", "value")]
    graph.nodes.append(helper.make_node(op, [qkv], parts, name=parts[0], domain=_DOMAIN, num_heads=shape.heads))
    return parts


def _softmax_kernels(fused: bool) -> dict[str, CustomRule]:
    return _FUSED_SOFTMAX if fused else _TORCH_SOFTMAX


def _megatron_attention(graph: Nodes, name: str, qkv: str, shape: GptShape, fused_softmax: bool) -> str:
    query, key, value = _parts(graph, "SplitHeads", name, qkv, shape)
    scores = graph.add("MatMul", [query, key], f"{name}.scores")
    for result, rule in _softmax_kernels(fused_softmax).items():
        scores = graph.add(rule.type.removeprefix(f"{_DOMAIN}::"), [scores], f"{name}.{result}", domain=_DOMAIN)
    scores = graph.add("AttentionDropout", [scores], f"{name}.dropped", domain=_DOMAIN)
    mixed = graph.add("MatMul", [scores, value], f"{name}.context")
    return graph.add("MergeHeads", [mixed], f"{name}.merged", domain=_DOMAIN)


def _flash_attention(graph: Nodes, name: str, qkv: str, shape: GptShape) -> str:
    parts = _parts(graph, "SplitParts", name, qkv, shape)
    heads = {"q_num_heads": shape.heads, "kv_num_heads": shape.heads}
    return graph.add("Attention", parts, f"{name}.mixed", is_causal=1, **heads)
