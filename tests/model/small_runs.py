"""A run of one process whose weights are far from their initial values, and what is read from it."""

import torch

from build import build_run
from config.reading import resolve
from model.context import GenerationCache, forward_context
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh

VOCAB, HIDDEN = 50, 32
DOCUMENT_LENGTHS = [(1, 40, 2, 47), (65, 25)]  # of two sequences of 90 tokens


def forecast_run(recipe, settings, spread=0.3):
    """spread: standard deviation of what is added to each weight."""
    run = build_run(build_config(recipe, settings), Mesh.single(), torch.device("cpu"), None, 1)
    for number, p in enumerate(run.stages[0].parameters()):
        numbers = torch.Generator().manual_seed(number)
        p.data.add_(spread * torch.randn(p.shape, generator=numbers, dtype=p.dtype))
    return run


def build_config(recipe, settings):
    return resolve(recipe, None, [f"--{key}={value}" for key, value in settings.items()])


def compute_weights(run):
    """{key: master weight}"""
    return {box.key: x for b in run.buckets for box, x in get_boxes(b, b.weights.master)}


def gradients_of(run):
    """{key: gradient}"""
    return {box.key: x for b in run.buckets for box, x in get_boxes(b, b.grads.local)}


@torch.no_grad()
def check_cache(stage, cuts):
    """A sequence that is read part by part, from a cache, has the logits of the whole.

    cuts: where the parts begin and end. Returns {(layer, name): tensor} that the cache keeps after each part.
    """
    tokens = torch.randint(VOCAB, (1, cuts[-1]), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(cuts[-1])[None]
    whole = stage.logits(tokens, positions)
    cache, kept = GenerationCache(), []
    for first, last in zip(cuts, cuts[1:]):
        got = stage.logits(tokens[:, first:last], positions[:, first:last], cache=cache)
        cache.length = last
        torch.testing.assert_close(got, whole[:, first:last], rtol=1e-9, atol=1e-11)
        kept.append(dict(cache.kept))
    return kept


# ---- a mixer beside another program's ----------------------------------------------------------------------


def mixer_weights(tensors):
    """Those of the first layer's mixer, by their names in it."""
    start = "layers.0.attn."
    return {key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)}


def check_beside(run, theirs, parts, *, call=None, documents=None, seq=90, bound=3e-5):
    """Both mixers of the same weights have the same outputs and gradients.

    parts(of): {our name: part of of(their parameter)}; call: theirs(x of one document).
    """
    weights = mixer_weights(compute_weights(run))
    copied = parts(lambda p: p.data)
    for key, part in copied.items():
        part.copy_(weights[key].view(part.shape))
    assert sum(part.numel() for part in copied.values()) == sum(p.numel() for p in theirs.parameters())

    stream = torch.Generator().manual_seed(5)
    inputs = torch.randn(2, seq, HIDDEN, generator=stream, dtype=torch.float64)
    upstream = torch.randn(2, seq, HIDDEN, generator=stream, dtype=torch.float64)
    x, other_x = (inputs.clone().requires_grad_() for _ in range(2))
    context = forward_context(run.cfg, torch.arange(seq).expand(2, seq), documents)
    ours = run.stages[0].blocks[0].mixer(x, context)
    lengths = [(seq,)] * 2 if documents is None else DOCUMENT_LENGTHS
    rows = [
        torch.cat([(call or theirs)(part) for part in other_x[row : row + 1].split(lengths[row], 1)], 1)
        for row in range(2)
    ]
    other = torch.cat(rows)
    for out in (ours, other):
        out.backward(upstream)
    torch.testing.assert_close(ours, other, rtol=3 * bound, atol=bound)
    torch.testing.assert_close(x.grad, other_x.grad, rtol=3 * bound, atol=bound)

    found, wanted = mixer_weights(gradients_of(run)), parts(lambda p: p.grad)
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        atol = bound * float(want.abs().max())
        torch.testing.assert_close(found[key].view(want.shape), want, rtol=0, atol=atol, msg=key)
