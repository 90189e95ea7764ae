"""What other frameworks can express, as rules on the space."""

from tap_planner.search.targets.deepspeed import DEEPSPEED
from tap_planner.search.targets.megatron import MEGATRON
from tap_planner.search.targets.rules import target_rules
from tap_planner.search.targets.torchtitan import TORCHTITAN
from tap_planner.search.targets.transformers import TRANSFORMERS
from tap_planner.search.targets.types import AxisRole, Target, Variant

TARGETS = {target.name: target for target in (TORCHTITAN, MEGATRON, DEEPSPEED, TRANSFORMERS)}
"""By name."""

__all__ = ["TARGETS", "AxisRole", "Target", "Variant", "target_rules"]
