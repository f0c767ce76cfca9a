"""Multi-token prediction: what is ahead of each token, the gradients against transformers' modules, what it
must not touch, and layouts in which embedding and head are shared in other ways than in the twins.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from random_tokens import RandomTokens
from small_runs import gradients_of
from steps import watched
from torch.nn.functional import cross_entropy

from build import build_run
from config import MTPConfig
from config.reading.tiny import tiny_config
from lab.proof.verify.trial import prove
from model.mlp import MLPConfig
from parallel.context.zigzag import shard_batch, token_positions
from parallel.microbatch import Microbatch
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from train import train_step


def batch(b=2, s=16, docs=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids, starts = torch.randint(1, 50, (b, s + 1), generator=g), torch.rand(b, s, generator=g) < 0.3
    targets = ids[:, 1:].masked_fill(torch.rand(b, s, generator=g) < 0.2, -100)
    return Microbatch(
        ids[:, :-1],
        targets,
        torch.arange(s).expand(b, s),
        starts.cumsum(1, dtype=torch.int32) if docs else None,
    )


@pytest.mark.parametrize("docs", [False, True])
def test_tokens_and_targets_ahead_are_those_of_the_sequence(docs):
    b = batch(docs=docs)
    a = b.with_tokens_ahead(3)
    for k in range(1, 4):
        for row in range(2):
            for i in range(16):
                inside = i + k < 16
                assert a.tokens_ahead[k - 1, row, i] == (b.tokens[row, i + k] if inside else 0)
                counts = inside and (not docs or b.documents[row, i] == b.documents[row, i + k])
                assert a.targets_ahead[k - 1, row, i] == (b.targets[row, i + k] if counts else -100)
    assert (a.targets_ahead != -100).any(-1).all() and b.with_tokens_ahead(0) is b


def test_a_cut_carries_what_is_ahead_of_the_whole_sequence():
    whole = batch().with_tokens_ahead(2)
    for r in range(2):
        part = shard_batch(whole, SimpleNamespace(index=r, size=2))
        mine = token_positions(16, r, 2)
        assert torch.equal(part.tokens_ahead, whole.tokens_ahead[:, :, mine])
        assert torch.equal(part.targets_ahead, whole.targets_ahead[:, :, mine])


DENSE = MLPConfig(width=48)


def forecast_run(depth, weight=0.3, dtype="fp64", **model):
    cfg = tiny_config("deepseek-v3-tiny")
    mtp = MTPConfig(modules=depth, weight=weight) if depth else None
    dense = {"mlp": DENSE, "blocks": (), "pattern": None, "dropout": 0.0}
    model = replace(cfg.model, layers=2, mtp=mtp, **dense, **model)
    cfg = replace(cfg, model=model, train=replace(cfg.train, global_batch=2, dtype=dtype))
    return build_run(cfg, Mesh.single(), torch.device("cpu"), None, 50)


def gradients(run, batches):
    """(loss, {key: gradient}) of one step; nothing is left out by the clip."""
    found = {}

    def grads_ready():
        found.update({key: part.clone() for key, part in gradients_of(run).items()})

    return train_step(watched(run, grads_ready), 1, batches)[0].item(), found


def test_only_the_gradients_of_training_know_the_modules_ahead():
    """Loss, evaluation and logits are those of the model without modules ahead; gradients are not, but for a
    weight of 0.
    """
    plain, none, some = forecast_run(0), forecast_run(2, 0.0), forecast_run(2)
    data = RandomTokens(plain.cfg, 0, 1).microbatches(0)
    (loss, want), (loss_0, got_0), (loss_1, got_1) = (gradients(r, data) for r in (plain, none, some))
    assert loss == loss_0 == loss_1
    for key, gradient in want.items():
        assert torch.equal(gradient, got_0[key]) and not torch.equal(gradient, got_1[key]), key
    assert all(not got_0[k].any() and got_1[k].any() for k in got_0.keys() - want.keys())
    place = torch.arange(16)[None]
    fresh = forecast_run(0), forecast_run(2)
    assert torch.equal(*(r.logits(place, place, None, 9) for r in fresh))
    assert torch.equal(*(r.pipeline.evaluate(data) for r in fresh))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_transformers_modules(tied):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: its modules are not compared"
    )
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip(f"transformers {transformers.__version__} has no modules for multi-token prediction")
    from checkpoint.hf import config as hf_config
    from checkpoint.hf import tensors as hf

    run, depth = forecast_run(2, 0.6, tied=tied, vocab=128), 2
    m = run.cfg.model
    pieces = [(box, part) for b in run.buckets for box, part in get_boxes(b, b.weights.master)]
    for box, part in pieces:
        numbers = torch.Generator().manual_seed(len(box.key))
        part.copy_(torch.randn(part.shape, generator=numbers) * 0.3 + (part.dim() == 1))
    # dense layers, as config.json can describe them without further tokens; the modules come below
    said = hf_config.to_hf_config(replace(m, mtp=None), "float32", {})
    said["n_shared_experts"] = 1  # of layers that are replaced below
    their_config = transformers.DeepseekV3Config(**{k: v for k, v in said.items() if k != "torch_dtype"})
    main = transformers.DeepseekV3ForCausalLM(their_config).double()
    more = layers.MtpModel(main, depth).double()
    theirs = {}  # our tensors, under their names
    for place in hf.hf_tensors("deepseek_v3", m, pieces):
        theirs[place.name] = torch.cat(place.parts)
    mine = {n: t for n, t in theirs.items() if int((n.split(".layers.") + ["0"])[1].split(".")[0]) < m.layers}
    lacks, spare = main.load_state_dict(mine, strict=False)
    assert not spare and set(lacks) <= {"lm_head.weight"} if tied else not lacks
    for k, module in enumerate(more.layers):
        module.mtp_block = type(main.model.layers[0])(main.config, 0).double()  # theirs would have experts
        at = f"model.layers.{m.layers + k}."
        for name, p in module.named_parameters():
            if not name.startswith("mtp_block.post_att"):
                name = name.replace("post_norm", "shared_head.norm")
            name = name.replace("mtp_block.", "")
            p.data.copy_(theirs[at + name])
    data = [replace(b, documents=None) for b in RandomTokens(run.cfg, 0, 1).microbatches(0)]
    _, ours = gradients(run, data)
    count = sum(int(b.num_counted()) for b in data)
    for b in data:
        a = b.with_tokens_ahead(depth)
        out = main.model(input_ids=b.tokens, position_ids=b.positions)
        h = out.last_hidden_state
        losses = [cross_entropy(main.lm_head(h).flatten(0, 1), b.targets.flatten(), reduction="sum")]
        for k in range(depth):
            cos_sin = main.model.rotary_emb(h, position_ids=b.positions)
            mask = torch.full((h.shape[1], h.shape[1]), float("-inf"), dtype=h.dtype).triu(1)[None, None]
            ahead = main.model.embed_tokens(a.tokens_ahead[k])
            h = more.layers[k](ahead, h, cos_sin, mask, b.positions, None)
            logits, targets = main.lm_head(h).flatten(0, 1), a.targets_ahead[k].flatten()
            losses.append(0.6 / depth * cross_entropy(logits, targets, reduction="sum"))
        (sum(losses) / count).backward()
    compared = {
        "embed.weight": main.model.embed_tokens.weight,
        "layers.0.attn.kv_a.weight": main.model.layers[0].self_attn.kv_a_proj_with_mqa.weight,
        "norm.weight": main.model.norm.weight,
        "layers.2.join.weight": more.layers[0].eh_proj.weight,
        "layers.2.embed_norm.weight": more.layers[0].enorm.weight,
        "layers.2.hidden_norm.weight": more.layers[0].hnorm.weight,
        "layers.3.head_norm.weight": more.layers[1].post_norm.weight,
        "layers.3.mlp.down.weight": more.layers[1].mtp_block.mlp.down_proj.weight,
    }
    compared |= {} if tied else {"head.weight": main.lm_head.weight}
    for key, p in compared.items():
        error = (ours[key][: len(p)] - p.grad).abs().max()
        assert error < 1e-5 * p.grad.abs().max(), key  # their norms and softmax are in fp32


TWO = MTPConfig(modules=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,model,layout,docs",
    [
        ("deepseek-v3-tiny", dict(mtp=TWO, tied=True), dict(pp=2, zero=2), True),
        ("deepseek-v3-tiny", dict(mtp=TWO, tied=True), dict(pp=2, schedule="zb-v", zero=3), False),
        ("deepseek-v3-tiny", dict(mtp=TWO), dict(pp=2, schedule="zb-h1", zero=1), True),
        ("deepseek-v3-tiny", dict(mtp=MTPConfig(modules=3, weight=5.0)), dict(cp=2, cp_kind="ulysses"), True),
        ("llama3-tiny", dict(mtp=TWO), dict(cp=2), True),
        ("gpt2-tiny", dict(mtp=MTPConfig()), dict(tp=2, sp=True), False),
        ("gpt2-tiny", dict(mtp=MTPConfig()), dict(pp=2), False),
    ],
    ids=str,
)
def test_layouts_train_like_one_process(ranks, tmp_path, name, model, layout, docs):
    cfg = tiny_config(name, 2)
    cfg = replace(
        cfg,
        model=replace(cfg.model, layers=4, **model),
        train=replace(cfg.train, global_batch=4),
        data=replace(cfg.data, doc_mask=docs),
        parallel=replace(cfg.parallel, **layout),
    )
    first, _ = prove(ranks(2), cfg, tmp_path)
    assert not first.is_wrong, first
