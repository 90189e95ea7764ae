"""DeepSpeed.

- ``zero_optimization.stage`` 0 to 3 over the data ranks; hybrid sharding by MiCS (``mics_shard_size``).
- ``tensor_parallel.autotp_size`` replaces linear layers by column-wise ``LinearLayer`` and row-wise ``LinearAllreduce``
  (deepspeed/module_inject/layers.py), each module by itself; all other modules are whole: no sequence parallelism
  between them, token embeddings and the loss whole. In training it goes with ZeRO 0 to 2 (AutoTP training tutorial).
- Plans in the form of transformers' tp_plan: colwise, rowwise, colwise_gather_output (DeepSpeed PR #7901).
- ``sequence_parallel_size`` is Ulysses: sequences are split, attention by heads (Jacobs et al. 2023).
- ``deepspeed.moe``: experts over data ranks (Rajbhandari et al. 2022).
- Activation checkpointing wraps whole layers; here all of them or none.
- ``bf16_optimizer_states`` wants ``bf16_master_weights_and_grads`` (deepspeed/runtime/base_optimizer.py): moments in
  bfloat16 only without the float32 master values that plans have. So not here.
- Sizes must divide; AutoTP's uneven parts of kv heads are not used.
"""

from tap_planner.search.targets.types import AxisRole, SequenceParallel, Target

__all__ = ["DEEPSPEED"]

_D, _U, _T = AxisRole.DATA, AxisRole.ULYSSES, AxisRole.TENSOR

DEEPSPEED = Target(
    name="deepspeed",
    orders=((_D,), (_U,), (_T,), (_D, _D), (_D, _U), (_D, _T), (_D, _D, _U), (_D, _D, _T)),
    embeddings=("none",),
    whole_weights=True,
    any_side=True,
    whole_attention=True,
    sequence_parallel=SequenceParallel.NEVER,
    split_loss=False,
    expert_roles=(_D,),
    zero_levels=(0, 1, 2, 3),
    zero_levels_with_tensor=(0, 1, 2),
    zero_levels_with_bf16_states=(),
    recomputes=("none", "full"),
    uniform_settings=True,
    hybrid_zero=False,
)
"""DeepSpeed."""
