"""The contract every strategy passes; it runs on each YAML in configs/residual/, so a new one is tested at once."""

import re
from collections import defaultdict

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnres_lit.model.init import initialize, materialize
from attnres_lit.residual import PreNorm, Sources
from residual.models import CONFIGS, build, factory_from_yaml, loss_of, scatter
from residual.reference import REFERENCES, reference_logits

FILES = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def factory(request):
    return factory_from_yaml(request.param)


def grads_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def step(model, sources, site):
    h, note = model.residual.read(sources, site)
    return model.residual.write(sources, model.sublayers[str(site)](h), site, note)


def unique(sources):
    """The tensors that cross a cut, each once, and how to put others in their place."""
    tensors = list({id(t): t for t in (*sources.done, sources.partial) if t is not None}.values())

    def rebuild(replacements):
        new = {id(old): r for old, r in zip(tensors, replacements, strict=True)}
        partial = None if sources.partial is None else new[id(sources.partial)]
        return Sources(tuple(new[id(t)] for t in sources.done), partial)

    return tensors, rebuild


def test_read_and_write_are_pure(factory, tokens):
    model = scatter(build(factory))
    sources = model.residual.open(model.embed(tokens))
    for site in range(model.residual.num_sites):
        before = [t.clone() for t in unique(sources)[0]]
        attributes = dict(vars(model.residual))
        h, note = model.residual.read(sources, site)
        output = model.sublayers[str(site)](h)
        kept = output.clone()
        after = model.residual.write(sources, output, site, note)
        again = model.residual.write(sources, output, site, model.residual.read(sources, site)[1])
        assert all(torch.equal(a, b) for a, b in zip(before, unique(sources)[0], strict=True))
        assert torch.equal(kept, output)
        assert vars(model.residual) == attributes
        assert all(torch.equal(a, b) for a, b in zip(unique(after)[0], unique(again)[0], strict=True))
        sources = after


def test_causality(factory, tokens):
    model = scatter(build(factory))
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 31
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] - after[:, 3:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize(
    ("dtype", "eps", "bound"),
    [
        (torch.float64, 1e-18, 1e-9),
        (torch.float64, 1e-2, 1e-9),  # every norm has the share of eps that `read_scale` says
        (torch.float32, 1e-12, 1e-4),
    ],
)
def test_starts_as_prenorm_where_it_says_so(factory, tokens, dtype, eps, bound):
    model, plain = build(factory, dtype, norm_eps=eps), build(PreNorm, dtype, norm_eps=eps)
    shared = {name: p for name, p in model.named_parameters() if not name.startswith("residual.")}
    assert all(torch.equal(shared[name], p) for name, p in plain.named_parameters())
    difference = (model(tokens) - plain(tokens)).abs().max()
    assert (difference < bound) == model.residual.starts_as_prenorm


def test_every_parameter_matters(factory, tokens):
    """A gradient of the size of its kind at other sites, and a loss that moves by what the gradient predicts."""
    model = scatter(build(factory))
    grads = grads_of(model, loss_of(model(tokens)))
    kinds = defaultdict(list)
    for name, grad in grads.items():
        kinds[re.sub(r"\d+|exit_", "", name)].append(grad.norm())
    for name, parameter in model.named_parameters():
        size = grads[name].norm()
        assert size > 1e-6 * max(kinds[re.sub(r"\d+|exit_", "", name)]), name
        assert size > 1e-9, name
        direction, h = grads[name] / size, 1e-6
        with torch.no_grad():
            parameter.add_(direction, alpha=h)
            above = loss_of(model(tokens))
            parameter.sub_(direction, alpha=2 * h)
            below = loss_of(model(tokens))
            parameter.add_(direction, alpha=h)
        torch.testing.assert_close((above - below) / (2 * h), size, rtol=1e-4, atol=1e-7, msg=name)


def test_cut_anywhere_and_continued_is_uncut(factory, tokens):
    model = scatter(build(factory))
    logits = model(tokens)
    grads = grads_of(model, loss_of(logits))
    for cut in range(1, model.residual.num_sites):
        model.zero_grad()
        sources = model.residual.open(model.embed(tokens))
        for site in range(cut):
            sources = step(model, sources, site)
        sent, rebuild = unique(sources)
        received = [t.detach().clone().requires_grad_() for t in sent]
        sources = rebuild(received)
        for site in range(cut, model.residual.num_sites):
            sources = step(model, sources, site)
        continued = model.head(model.norm(model.residual.exit(sources)))
        assert torch.equal(continued, logits), cut
        loss_of(continued).backward()
        torch.autograd.backward(sent, [t.grad for t in received])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, grads[name]), (cut, name)


def test_survives_activation_checkpointing(factory, tokens):
    model = scatter(build(factory))
    grads = grads_of(model, loss_of(model(tokens)))
    sources = model.residual.open(model.embed(tokens))
    for site in range(model.residual.num_sites):
        sources = checkpoint(step, model, sources, site, use_reentrant=False)
    recomputed = grads_of(model, loss_of(model.head(model.norm(model.residual.exit(sources)))))
    assert all(torch.equal(grads[name], recomputed[name]) for name in grads)


def test_survives_a_state_dict_round_trip_and_meta(factory, tokens):
    model = scatter(build(factory))
    with torch.device("meta"):
        copy = build(factory)
    materialize(copy)
    initialize(fresh := build(factory))
    for name, parameter in copy.named_parameters():  # the residual's had their values before they became float64
        rtol = 1e-7 if name.startswith("residual.") else 0.0
        torch.testing.assert_close(parameter, fresh.get_parameter(name), rtol=rtol, atol=0.0, msg=name)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(tokens), model(tokens))


def test_bf16_in_bf16_out(factory, tokens):
    def dtypes(model):
        seen = set()
        sources = model.residual.open(model.embed(tokens))
        for site in range(model.residual.num_sites):
            seen |= {model.residual.read(sources, site)[0].dtype, *(t.dtype for t in unique(sources)[0])}
            sources = step(model, sources, site)
        return seen | {model.residual.exit(sources).dtype}

    assert dtypes(build(factory, torch.bfloat16)) == {torch.bfloat16}
    mixed = build(factory, torch.float32, norm_eps=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes(mixed) == {torch.bfloat16}
        mixed.fp32_residual = True
        assert dtypes(mixed) == {torch.float32}
        loss_of(mixed(tokens).float()).backward()
    assert all(p.grad.isfinite().all() for p in mixed.parameters())


def test_weights_are_what_a_site_takes_of_the_sources(factory, tokens):
    model = scatter(build(factory))
    sources = model.residual.open(model.embed(tokens))
    for site in range(model.residual.num_sites + 1):
        weights = model.residual.weights(sources, site)
        if weights is not None:
            assert weights.shape[1:3] == tokens.shape
            last = site == model.residual.num_sites
            read = model.residual.exit(sources) if last else model.residual.read(sources, site)[0]
            tensors = sources.done if sources.partial is None else (*sources.done, sources.partial)
            torch.testing.assert_close((weights.unsqueeze(-1) * torch.stack(tensors)).sum(0), read)
            if getattr(model.residual, "mixing", "softmax") != "sigmoid":
                torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
        if site < model.residual.num_sites:
            sources = step(model, sources, site)


def test_equals_its_reference_loop(factory, tokens):
    model = scatter(build(factory))
    if type(model.residual) not in REFERENCES:
        pytest.skip("write its paper-literal loop in tests/residual/reference.py")
    logits, expected = model(tokens), reference_logits(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    grads, reference = grads_of(model, loss_of(logits)), grads_of(model, loss_of(expected))
    for name, grad in grads.items():
        torch.testing.assert_close(grad, reference[name], rtol=1e-8, atol=1e-10, msg=name)
