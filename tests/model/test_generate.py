"""Generation under a layout writes what one process writes, with several stages on a rank as well, and a prompt is read causally."""
from dataclasses import replace

import pytest
import torch

from build import build
from model.attention import Cache
from model.generate import generate
from parallel.comm import World
from parallel.layout import Layout
from parallel.mesh import Mesh
from scripts.verify import subject

PROMPT, NEW = [5, 7, 11, 13, 2], 6
SEVERAL = (("interleaved", 2), ("interleaved", 4), ("zb-v", None), ("dualpipe-v", None))  # stages of one rank


def written(world, cfg) -> tuple[list[int], list[float]]:
    """The ids that a run writes after a prompt, and the logits after the prompt's first three tokens, read with and without more."""
    p = cfg.parallel
    mesh = Mesh.bind(Layout(world.size, p.tp, p.cp, p.pp, p.dp_rep), world)
    run = build(cfg, mesh, torch.device("cpu"), None, cfg.train.steps)
    for bucket in run.buckets:  # far from uniform, so that ids depend on what was read
        bucket.weights.mul_(4) if bucket.weights is not None else None
    ids = list(generate(run.pipeline.logits, PROMPT, NEW, temperature=0.0, multiple=run.pipeline.cut))
    places = torch.arange(len(PROMPT))[None]
    part = run.pipeline.logits(torch.tensor([PROMPT[:3]]), places[:, :3], Cache(), 2)
    whole = run.pipeline.logits(torch.tensor([PROMPT]), places, Cache(), 2)  # the same place, with tokens behind it
    return ids, float((part - whole).abs().max())


@pytest.mark.parametrize("name", ["llama3-tiny", "deepseek-v2-lite-tiny"])
def test_several_stages_on_a_rank(ranks, name):
    cfg = subject(name, 2)
    cfg = replace(cfg, model=replace(cfg.model, dropout=0.0))
    alone, _ = written(World(), cfg)
    for schedule, vpp in SEVERAL:
        there = replace(cfg, parallel=replace(cfg.parallel, pp=2, schedule=schedule, vpp=vpp))
        for ids, ahead in ranks(2).run(written, there):
            assert ids == alone, schedule
            assert ahead < 1e-12, f"{schedule}: a token of the prompt sees the ones behind it"
