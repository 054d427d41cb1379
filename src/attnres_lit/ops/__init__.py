"""Formulas on tensors: torch only, no Module, no config."""

from attnres_lit.ops.backends import BACKENDS, Backend, check_backend, resolve
from attnres_lit.ops.depth_attention import (
    complete_rstd,
    depth_attention,
    depth_attention_reference,
    read_alone,
    reciprocal_rms,
)
from attnres_lit.ops.mixing import Mixing, Query, depth_read
from attnres_lit.ops.permutations import permutation_mixture
from attnres_lit.ops.sinkhorn import sinkhorn
from attnres_lit.ops.two_phase import (
    DepthStats,
    inter_block_attention,
    inter_block_reads,
    merge_partial,
    merge_sources,
)
from attnres_lit.ops.weighted_sum import weighted_sum

__all__ = [
    "BACKENDS",
    "Backend",
    "DepthStats",
    "Mixing",
    "Query",
    "check_backend",
    "complete_rstd",
    "depth_attention",
    "depth_attention_reference",
    "depth_read",
    "inter_block_attention",
    "inter_block_reads",
    "merge_partial",
    "merge_sources",
    "permutation_mixture",
    "read_alone",
    "reciprocal_rms",
    "resolve",
    "sinkhorn",
    "weighted_sum",
]
