"""Norms and clipping of gradients that lie in several processes, against the whole of them in one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attnres_lit.parallel.gradients import clip, total_norm
from parallel.world import on_ranks

SHAPES = [(5, 3), (4,), (1, 7), (8, 2)]


def gradients(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def parameters(gradients):
    made = [nn.Parameter(torch.zeros_like(each)) for each in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient.clone()
    return made


def norm(*gradients):
    return torch.cat([each.flatten().double() for each in gradients]).norm().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_process(dtype):
    whole = gradients(0, dtype)
    made = parameters(whole)
    made.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    total = total_norm(made)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert total.item() == pytest.approx(norm(*whole), rel=1e-6)
    clip(made, 0.5, total)
    assert norm(*(p.grad for p in made[:-1])) == pytest.approx(0.5, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    clip(made, 100.0, total_norm(made))
    assert norm(*(p.grad for p in made[:-1])) == pytest.approx(0.5, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_no_gradients_at_all():
    assert total_norm([]).item() == 0
    clip([nn.Parameter(torch.zeros(3))], 1.0, total_norm([]))


def sharded():
    """Plain tensors, shards of uneven size, replicas of shards, on two meshes."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (4,))
    layouts = [(flat, [Shard(0)]), (both, [Replicate(), Shard(0)]), (both["shard"], [Shard(0)]), None]
    whole = gradients(0)
    made = parameters(whole)
    for i, layout in enumerate(layouts):
        if layout:
            mesh, placements = layout
            made[i] = nn.Parameter(distribute_tensor(torch.zeros(SHAPES[i]), mesh, placements))
            made[i].grad = distribute_tensor(whole[i], mesh, placements)
    total = total_norm(made)
    clip(made, 1.0, total)
    clipped = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in made]
    return total.item(), clipped


def test_sharded_on_several_meshes():
    expected = norm(*gradients(0))
    for total, clipped in on_ranks(4, sharded):
        assert total == pytest.approx(expected, rel=1e-6)
        for gradient, whole in zip(clipped, gradients(0), strict=True):
            torch.testing.assert_close(gradient, whole / expected)


def stages():
    """Two stages of two data-parallel ranks each; both hold a copy of the second parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh["stage"].get_local_rank()
    own, copy = gradients(stage), gradients(7)[1]
    made = parameters([own[0], copy])
    shard = nn.Parameter(distribute_tensor(torch.zeros(SHAPES[3]), mesh["data"], [Shard(0)]))
    shard.grad = distribute_tensor(own[3], mesh["data"], [Shard(0)])
    group = mesh["stage"].get_group()
    everything = total_norm([*made, shard], group).item()
    once = total_norm([*made, shard], group, lambda p: p is not made[1] or stage == 0).item()
    nothing_here = total_norm([] if stage else made, group).item()
    return everything, once, nothing_here, dist.get_rank()


def test_over_the_stages_of_a_pipeline():
    first, second, copy = gradients(0), gradients(1), gradients(7)[1]
    others = (first[0], first[3], second[0], second[3])
    for everything, once, nothing_here, _ in on_ranks(4, stages):
        assert everything == pytest.approx(norm(*others, copy, copy), rel=1e-6)
        assert once == pytest.approx(norm(*others, copy), rel=1e-6)
        assert nothing_here == pytest.approx(norm(first[0], copy), rel=1e-6)
