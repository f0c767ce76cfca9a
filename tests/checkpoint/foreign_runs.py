"""Runs of train.py that begin with weights of another system, and what they are compared with: the loss that
an independent implementation has on the tokens of the first step. The parts of its models are here: written
from their definitions in plain torch, they share nothing with ours.
"""

import pytest
import run_folder
import torch
import torch.nn.functional as F
from ranks import corpus, job

import config
from config.reading import from_tree
from data.loader import open_loader

RUN = {
    "train.steps": 1, "train.seq_len": 24, "train.micro_batch": 1, "train.global_batch": 4,
    "train.dtype": "fp64", "train.threads": 1, "model.vocab_multiple": 64, "optim.warmup": 0,
    "eval.every": "none", "eval.batches": 1, "eval.sample": 0, "log.every": 1,
}
LAYOUTS = {  # ranks, keys
    "one": (1, {}),
    "tp2": (2, {"parallel.tp": 2}),
    "pp2": (2, {"parallel.pp": 2}),
    "zero3": (2, {"parallel.zero": 3}),
}


def words(home, recipe, name, settings):
    """The arguments of train.py. settings: {key: value}"""
    place = {"log.dir": home / "runs", "log.name": name}
    if not (home / "text.idx").exists():
        corpus(home)
    every = {"data.path": home / "text", **RUN, **place, **settings}
    return [recipe, *(word for key, value in every.items() for word in (f"--{key}", str(value)))]


def of_model(keys):
    """{model.KEY: value}"""
    return {f"model.{key}": value for key, value in (keys or {}).items()}


def first_loss(home, recipe, settings, layout="one"):
    """(the loss of the first step, which is that of the initial weights; what was printed)"""
    ranks, keys = LAYOUTS[layout]
    end = job(home, ranks, words(home, recipe, layout, {**settings, **keys}))
    assert end.codes == [0] * ranks, end.logs
    return run_folder.losses(home / "runs" / layout)[1], end.logs[0]


def refusal(home, recipe, settings, ranks=1):
    """The one line with which a start is refused, with exit code 2 and before a run folder is there."""
    end = job(home, ranks, words(home, recipe, "refused", settings))
    assert end.codes == [2] * ranks and not (home / "runs" / "refused").exists(), end.logs
    (line,) = set(end.errors())
    return line


def expected_loss(home, logits):
    """The mean loss of the first step of the run of one rank. logits(tokens [b, s]) -> [b, s, vocab]"""
    cfg = from_tree(config.read_yaml(home / "runs" / "one" / "config.yaml"))
    loader = open_loader(cfg, "train", 0, 1)
    batches = loader.microbatches(0)
    loader.close()
    tokens = torch.cat([batch.tokens for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    with torch.no_grad():
        return F.cross_entropy(logits(tokens).flatten(0, 1), targets.flatten()).item()


def check_first_losses(home, recipe, settings, layouts, logits, says=""):
    """The first loss under each layout, "one" first, is that of the reference; each run says this."""
    ends = [first_loss(home, recipe, settings, layout) for layout in layouts]
    assert [told for _, told in ends if says not in told] == []
    expected = expected_loss(home, logits)
    assert [loss for loss, _ in ends] == pytest.approx([expected] * len(ends), rel=1e-9)


# ---- parts of the references -------------------------------------------------------------------------------


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x, base, dim=None, pairs=False):
    """x [b, s, heads, channels]: the first `dim` channels of a head, as halves or as pairs of neighbours."""
    part, rest = x[..., :dim], x[..., x.shape[-1] if dim is None else dim:]
    channels = part.shape[-1]
    theta = torch.outer(torch.arange(x.shape[1]), base ** (-torch.arange(0, channels, 2) / channels)).double()
    if pairs:
        theta = theta.repeat_interleave(2, -1)[:, None]
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        theta = theta.repeat(1, 2)[:, None]
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat((part * theta.cos() + turned * theta.sin(), rest), -1)


def attend(q, k, v):
    """[b, s, heads, dim] each; a head of k and v serves several of q. Returns [b, s, heads * dim]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def swiglu(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
