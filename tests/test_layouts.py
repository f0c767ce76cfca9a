"""Cells of the lattice that a random draw meets too seldom: what scripts.verify proves, on layouts chosen by
hand.
"""

from dataclasses import replace

import pytest

from config import ConfigError
from config.reading.schedules import plan_pipeline
from config.reading.tiny import tiny_config
from lab.proof.verify.trial import prove

CUTS = [
    dict(pp=4, stages="3,2,2,1"), dict(pp=2, stages="1,7", schedule="gpipe", zero=3),
    dict(pp=2, stages="2,1,4,1", schedule="interleaved", zero=1),
    dict(pp=2, stages="6,2", schedule="zb-h1", tp=2, sp=True),
    dict(pp=2, stages="1,4,2,1", schedule="zb-v", zero=2),
    dict(pp=2, stages="1,1,1,5", schedule="dualpipe-v", cp=2),
]


def proved(pool, folder, name: str, parallel: dict, mixer: dict | None = None, **model) -> None:
    """Train it and one process; fails where they differ. Of 4 layers, where `stages` does not share out 8."""
    cfg = tiny_config(name, pool.size)
    layers = cfg.model.layers if "stages" in parallel else 4
    model = replace(cfg.model, layers=layers, mixer=replace(cfg.model.mixer, **(mixer or {})), **model)
    cfg = replace(cfg, parallel=replace(cfg.parallel, **parallel), model=model)
    first, _ = prove(pool, cfg, folder)
    assert not first.is_wrong, first


@pytest.mark.slow
@pytest.mark.parametrize("parallel", CUTS, ids=str)
def test_stages_cut_by_hand_train_the_same(ranks, tmp_path, parallel):
    proved(ranks(4), tmp_path, "llama3.2-tiny", parallel)


@pytest.mark.parametrize(
    "stages, schedule, says",
    [
        ("3,2", "1f1b", "makes 5 layers, model.layers is 8; try parallel.stages 3,5"),
        ("9,9", "1f1b", "makes 18 layers"),
        ("3,0,5", "1f1b", "each at least 1"),
        ("4;4", "1f1b", "not a list of layers"),
        ("4,4", "zb-v", "has 4; try parallel.stages 2,2,3,1"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(stages, schedule, says):
    cfg = tiny_config("llama3-tiny")
    with pytest.raises(ConfigError, match="^parallel.stages: ") as e:
        plan_pipeline(replace(cfg, parallel=replace(cfg.parallel, pp=2, stages=stages, schedule=schedule)), 2)
    assert says in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
def test_a_rank_whose_vocabulary_is_padding(ranks, tmp_path):
    """257 ids in a table of 1,024 rows: the second rank has padding alone."""
    proved(ranks(2), tmp_path, "llama3-tiny", dict(tp=2), vocab_multiple=1024)


PARTS = "core,norm,act"
AWAY = [dict(zero=z, offload="both") for z in (0, 3)] + [
    dict(pp=2, zero=2, schedule="zb-v", offload="both", recompute="full"),
    dict(tp=2, sp=True, offload="activations"),
    dict(pp=2, schedule="dualpipe-v", offload="activations"),
    dict(cp=2, zero=1, offload="optimizer"),
]
AGAIN = [
    dict(recompute="selective", recompute_parts=PARTS),
    dict(tp=2, sp=True, recompute="selective", recompute_parts="norm"),
    dict(tp=2, recompute="selective", recompute_parts="act"),
    dict(tp=2, sp=True, zero=3, recompute="selective", recompute_parts=PARTS),
    dict(pp=2, schedule="zb-v", zero=2, recompute="selective", recompute_parts="norm,act"),
    dict(tp=2, sp=True, recompute="full"),
    dict(cp=2, cp_kind="ulysses", recompute="selective", recompute_parts=PARTS),
    dict(cp=2, recompute="full", zero=3),
    dict(pp=2, tp=2, sp=True, schedule="zb-h1", recompute_stages="full,selective", recompute_parts=PARTS),
    dict(pp=4, stages="3,2,2,1", recompute_stages="full,selective,none,none"),
]


@pytest.mark.slow(core=[str(AGAIN[at]) for at in (0, 6, 9)])
@pytest.mark.parametrize("parallel", AGAIN, ids=str)
def test_recomputing_trains_the_same(ranks, tmp_path, parallel):
    proved(ranks(4), tmp_path, "gpt2-tiny" if parallel.get("pp") == 2 else "llama3-tiny", parallel)


@pytest.mark.parametrize(
    "keys, says",
    [
        (dict(recompute_parts="core,nrom"), "parallel.recompute_parts: 'nrom' is not one of core, norm, act"),
        (
            dict(recompute_stages="full,half"),
            "parallel.recompute_stages: 'half' is not one of none, selective, full",
        ),
        (
            dict(recompute_stages="full"),
            "parallel.recompute_stages: 1 modes, 1f1b on 2 ranks has 2 stages; "
            "try parallel.recompute_stages full,full",
        ),
    ],
)
def test_recompute_that_does_not_exist_is_refused(keys, says):
    cfg = tiny_config("llama3-tiny")
    with pytest.raises(ConfigError) as e:
        plan_pipeline(replace(cfg, parallel=replace(cfg.parallel, pp=2, **keys)), 2)
    assert str(e.value).startswith(says)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", AWAY, ids=str)
def test_offloading_trains_the_same(ranks, tmp_path, parallel):
    proved(ranks(4), tmp_path, "llama3.2-tiny", parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [dict(reduce="ring", zero=1), dict(reduce="ring", zero=3), dict(zero=2)], ids=str
)
def test_three_replicas_of_two_shards(ranks, tmp_path, parallel):
    """Where replicas sum by sends a bucket must fall into six equal parts, and not only into two."""
    proved(ranks(6), tmp_path, "llama3.2-tiny", dict(dp_rep=3, **parallel))


FEW = [
    dict(tp=4),
    dict(tp=4, sp=True, zero=3),
    dict(tp=2, cp=2),
    dict(tp=2, pp=2, schedule="zb-v", zero=2),
    dict(tp=2, sp=True, dp_rep=2, zero=1),
    dict(tp=4, sp=True, recompute="selective", recompute_parts=PARTS, offload="both"),
    dict(tp=4, recompute="full"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("parallel", FEW, ids=str)
def test_fewer_key_heads_than_ranks(ranks, tmp_path, name, parallel):
    few = {"kv_heads": 1 if parallel["tp"] == 2 else 2, "bias": "qkv"}
    proved(ranks(4), tmp_path, name, parallel, few)
