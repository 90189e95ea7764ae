"""Megatron-LM / Megatron Core.

- Ranks: ``tp-cp-ep-dp-pp``, tensor parallelism innermost (megatron/core/parallel_state.py, ``RankGenerator``).
- ``--tensor-model-parallel-size`` splits every attention and MLP: ``ColumnParallelLinear`` for QKV and first linears,
  ``RowParallelLinear`` for the projections back to the residual stream; no layer is left whole
  (megatron/core/models/gpt/gpt_layer_specs.py). Heads and query groups must divide by it
  (``TransformerConfig.__post_init__``), and so must every split dim (``divide`` in megatron/core/utils.py). The
  vocabulary is padded until it does (``--make-vocab-size-divisible-by``), which is another model: here it must divide.
- ``VocabParallelEmbedding`` splits tables of tokens by vocabulary; learned positions are whole
  (megatron/core/models/common/embeddings/language_model_embedding.py).
- ``--sequence-parallel`` is one switch for norms, dropout and residuals (Korthikanti et al. 2022, section 4.2.2).
- ``vocab_parallel_cross_entropy`` takes split logits.
- ``--context-parallel-size`` splits sequences, ``--expert-model-parallel-size`` spreads experts over data ranks,
  ``--expert-tensor-parallel-size 1`` over tensor ranks.
- ``--use-distributed-optimizer`` shards optimizer states over all data ranks: ZeRO 1.
- ``--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16`` keeps moments in bfloat16 beside
  float32 master values, with the distributed optimizer only (megatron/core/optimizer/optimizer_config.py).
- ``--recompute-granularity selective|full`` is one setting; that full recompute may stop after the first N layers
  (``--recompute-method block``) is not used here.
"""

from tap_planner.search.targets.types import AxisRole, SequenceParallel, Target

__all__ = ["MEGATRON"]

_D, _C, _T = AxisRole.DATA, AxisRole.CONTEXT, AxisRole.TENSOR

MEGATRON = Target(
    name="megatron",
    orders=((_D,), (_C,), (_T,), (_D, _C), (_D, _T), (_C, _T), (_D, _C, _T)),
    embeddings=("vocabulary",),
    whole_weights=False,
    any_side=False,
    whole_attention=False,
    sequence_parallel=SequenceParallel.SWITCH,
    split_loss=True,
    expert_roles=(_D, _T),
    zero_levels=(0, 1),
    zero_levels_with_tensor=(0, 1),
    zero_levels_with_bf16_states=(1,),
    recomputes=("none", "selective", "full"),
    uniform_settings=True,
    hybrid_zero=False,
)
"""Megatron-LM."""
