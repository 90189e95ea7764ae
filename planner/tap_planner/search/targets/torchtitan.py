"""torchtitan.

- Mesh: ``dp_replicate, dp_shard, cp, tp``, outermost first (torchtitan/distributed/parallel_dims.py).
- ``--parallelism.tensor_parallel_degree`` applies one plan to the whole model (models/llama3/infra/parallelize.py,
  ``apply_tp``): column-wise QKV and first linears, row-wise projections back, token embeddings by vocabulary,
  output column-wise. It must divide heads and key/value heads (torchtitan PR #4016 corrects recipes that did not).
- ``--parallelism.enable_sequence_parallel`` is one switch for norms and residuals (``SequenceParallel`` style).
- Loss parallelism takes logits that are split by vocabulary.
- ``context_parallel_degree`` splits sequences; ``expert_parallel_degree`` borrows from the others
  (``dp_shard * cp * tp == efsdp * ep``).
- ``data_parallel_replicate_degree`` alone is DDP (ZeRO 0); ``data_parallel_shard_degree`` is FSDP2: ZeRO 3, or with
  ``fsdp_reshard_after_forward never`` ZeRO 2; both together are hybrid sharding.
- ``optimizer.implementation fused_opt_states_bf16`` keeps AdamW's moments in bfloat16 beside float32 parameters
  (docs/bf16_optimizer_states.md), DDP and FSDP2 alike.
- ``activation_checkpoint.mode`` none, selective or full is one setting. Its own selective mode saves by operator; what
  is kept need not be what this plan keeps.
- DTensor shards unevenly, the recipes do not: their local views assume equal parts. Splits must be even.
"""

from tap_planner.search.targets.types import AxisRole, SequenceParallel, Target

__all__ = ["TORCHTITAN"]

_D, _C, _T = AxisRole.DATA, AxisRole.CONTEXT, AxisRole.TENSOR

TORCHTITAN = Target(
    name="torchtitan",
    orders=(
        *((_D,), (_C,), (_T,), (_D, _D), (_D, _C), (_D, _T), (_C, _T)),
        *((_D, _D, _C), (_D, _D, _T), (_D, _C, _T), (_D, _D, _C, _T)),
    ),
    embeddings=("vocabulary",),
    whole_weights=False,
    any_side=False,
    whole_attention=False,
    sequence_parallel=SequenceParallel.SWITCH,
    split_loss=True,
    expert_roles=(_D, _C, _T),
    zero_levels=(0, 2, 3),
    zero_levels_with_tensor=(0, 2, 3),
    zero_levels_with_bf16_states=(0, 2, 3),
    recomputes=("none", "selective", "full"),
    uniform_settings=True,
    hybrid_zero=True,
)
"""torchtitan."""
