"""Formulas on tensors: torch only, no Module, no config."""

from attnres_lit.ops.depth_attention import depth_attention, depth_attention_reference
from attnres_lit.ops.sinkhorn import sinkhorn
from attnres_lit.ops.two_phase import DepthStats, inter_block_attention, merge_partial
from attnres_lit.ops.weighted_sum import weighted_sum

__all__ = [
    "DepthStats",
    "depth_attention",
    "depth_attention_reference",
    "inter_block_attention",
    "merge_partial",
    "sinkhorn",
    "weighted_sum",
]
