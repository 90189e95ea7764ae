"""Hugging Face transformers (5.24 and later).

- ``DistributedConfig(tp_size, fsdp_size, dp_replicate_size, ...)``; ``tp_plan`` gives each module a style: colwise,
  rowwise, colwise_gather_output, rowwise_rep, embedding_rowwise and embedding_colwise, sequence_parallel, replicate,
  ... (transformers/integrations/tensor_parallel.py, ``ParallelInterface``); a module without one is whole.
- Logits are gathered before the loss.
- Experts by ``ep_plan`` (grouped_gemm, ep_dispatch) share the ranks of tp_size.
- FSDP2 by ``fsdp_plan``: ZeRO 3, or ZeRO 2 without resharding after forward; DDP is ZeRO 0; both together are hybrid.
- ``gradient_checkpointing_enable()`` recomputes all layers.
- ``--optim adamw_anyprecision`` has moments in bfloat16, by way of torchdistx, which is no longer maintained and has no
  float32 master values. So not here.
- Sizes must divide (the loader cuts shards of equal size).
"""

from tap_planner.search.targets.types import AxisRole, SequenceParallel, Target

__all__ = ["TRANSFORMERS"]

_D, _T = AxisRole.DATA, AxisRole.TENSOR

TRANSFORMERS = Target(
    name="transformers",
    orders=((_D,), (_T,), (_D, _D), (_D, _T), (_D, _D, _T)),
    embeddings=("vocabulary", "column", "none"),
    whole_weights=True,
    any_side=True,
    whole_attention=True,
    sequence_parallel=SequenceParallel.MODULES,
    split_loss=False,
    expert_roles=(_T,),
    zero_levels=(0, 2, 3),
    zero_levels_with_tensor=(0, 2, 3),
    zero_levels_with_bf16_states=(),
    recomputes=("none", "full"),
    uniform_settings=True,
    hybrid_zero=True,
)
"""transformers."""
