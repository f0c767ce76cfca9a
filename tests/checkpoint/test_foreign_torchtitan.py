"""checkpoint.init_from takes folders of torchtitan, as torch.distributed.checkpoint saves them from one
process and from two.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch.nn.functional as F
from foreign_runs import LAYOUTS, attend, check_first_losses, of_model, refusal, rms, rotated, swiglu
from safetensors.torch import save_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BASE = 500000.0
LLAMA = {
    "model.layers": 3, "model.hidden": 32, "model.mixer.heads": 4, "model.mixer.kv_heads": 2,
    "model.mlp.width": 48, "model.mixer.rope.base": BASE, "model.mixer.rope.scaling": None,
    "model.norm.eps": 1e-5,
}
QWEN = {**LLAMA, "model.mixer.head_dim": 16}
QWEN_MOE = {**QWEN, "model.mlp.experts": 6, "model.mlp.top_k": 2, "model.mlp.width": 20,
            "model.mlp.router.bias_rate": 0.001, "model.mlp.router.aux": None}

DEEPSEEK = {
    "model.layers": 3, "model.hidden": 32, "model.mixer.heads": 4, "model.mixer.kv_rank": 12,
    "model.mixer.q_rank": 20, "model.mixer.nope_dim": 8, "model.mixer.rope_dim": 4, "model.mixer.v_dim": 10,
    "model.mixer.rope.base": BASE, "model.mixer.rope.scaling": None, "model.blocks.dense.mlp.width": 48,
    "model.pattern": "dense, block...", "model.mlp.experts": 6, "model.mlp.top_k": 2, "model.mlp.width": 20,
    "model.mlp.router.groups": 1, "model.mlp.router.group_top_k": 1, "model.mlp.router.scale": 1.5,
    "model.mlp.router.aux": None, "model.norm.eps": 1e-5, "model.mixer.norm_eps": 1e-5, "model.mtp": None,
}


def weights(shapes):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1 if name.endswith("norm.weight") else 0)
        for name, shape in shapes.items()
    }


def shapes_of(layers, attention, mlp, vocab=257, hidden=32):
    """{name: shape}. attention, mlp: of a layer."""
    shapes = dict.fromkeys(("tok_embeddings.weight", "lm_head.weight"), (vocab, hidden))
    shapes["norm.weight"] = (hidden,)
    for layer in range(layers):
        norms = {"attention_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        of_layer = {**norms, **attention, **mlp(layer)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def grouped(head, heads=4, kv_heads=2, hidden=32):
    return {
        "attention.wq.weight": (heads * head, hidden),
        "attention.wk.weight": (kv_heads * head, hidden),
        "attention.wv.weight": (kv_heads * head, hidden),
        "attention.wo.weight": (hidden, heads * head),
    }


def dense(_):
    shapes = {1: (48, 32), 2: (32, 48), 3: (48, 32)}
    return {f"feed_forward.w{number}.weight": shape for number, shape in shapes.items()}


def experts(_, shared=False):
    found = {"moe.experts.w1": (6, 20, 32), "moe.experts.w3": (6, 20, 32), "moe.experts.w2": (6, 32, 20),
             "moe.router.gate.weight": (6, 32), "moe.expert_bias": (6,)}
    if shared:
        found |= {"moe.shared_experts.w1.weight": (20, 32), "moe.shared_experts.w3.weight": (20, 32),
                  "moe.shared_experts.w2.weight": (32, 20)}
    return found


QWEN_ATTENTION = {**grouped(16), "attention.q_norm.weight": (16,), "attention.k_norm.weight": (16,)}

LATENT = {
    "attention.wq_a.weight": (20, 32),
    "attention.q_norm.weight": (20,),
    "attention.wq_b.weight": (48, 20),
    "attention.wkv_a.weight": (16, 32),
    "attention.kv_norm.weight": (12,),
    "attention.wkv_b.weight": (72, 12),
    "attention.wo.weight": (32, 40),
}


def llama_weights():
    return weights(shapes_of(3, grouped(8), dense))


# ---- the models --------------------------------------------------------------------------------------------


def rotated_pairs(x):
    return rotated(x, BASE, pairs=True)


def grouped_attention(w, x, head, pairs):
    q, k, v = (F.linear(x, w[f"attention.w{name}.weight"]).unflatten(-1, (-1, head)) for name in "qkv")
    if "attention.q_norm.weight" in w:
        q, k = rms(q, w["attention.q_norm.weight"]), rms(k, w["attention.k_norm.weight"])
    q, k = (rotated(part, BASE, pairs=pairs) for part in (q, k))
    return F.linear(attend(q, k, v), w["attention.wo.weight"])


def latent_attention(w, x):
    q = rms(F.linear(x, w["attention.wq_a.weight"]), w["attention.q_norm.weight"])
    q = F.linear(q, w["attention.wq_b.weight"])
    q_nope, q_rope = q.unflatten(-1, (4, 12)).split((8, 4), -1)
    latent, k_rope = F.linear(x, w["attention.wkv_a.weight"]).split((12, 4), -1)
    k_rope = rotated_pairs(k_rope[:, :, None]).expand(-1, -1, 4, -1)
    kv = F.linear(rms(latent, w["attention.kv_norm.weight"]), w["attention.wkv_b.weight"])
    k_nope, v = kv.unflatten(-1, (4, 18)).split((8, 10), -1)
    q, k = torch.cat((q_nope, rotated_pairs(q_rope)), -1), torch.cat((k_nope, k_rope), -1)
    return F.linear(attend(q, k, v), w["attention.wo.weight"])


def mixture(w, x, scale):
    """With experts for every token: DeepSeek's, whose scores are sigmoids."""
    has_shared = "moe.shared_experts.w1.weight" in w
    logits = F.linear(x, w["moe.router.gate.weight"])
    scores = logits.sigmoid() if has_shared else logits.softmax(-1)
    chosen = (scores + w["moe.expert_bias"]).topk(2, -1).indices
    share = scores.gather(-1, chosen)
    share = scale * share / share.sum(-1, keepdim=True)
    every = torch.stack([
        swiglu(x, *(w[f"moe.experts.w{matrix}"][expert] for matrix in (1, 3, 2))) for expert in range(6)
    ], -2)
    best = every.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
    routed = (best * share[..., None]).sum(-2)
    if not has_shared:
        return routed
    return routed + swiglu(x, *(w[f"moe.shared_experts.w{matrix}.weight"] for matrix in (1, 3, 2)))


def logits_of(tensors, attention, scale=1.0):
    tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def logits(tokens):
        x = tensors["tok_embeddings.weight"][tokens]
        for layer in range(3):
            start = f"layers.{layer}."
            w = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
            x = x + attention(w, rms(x, w["attention_norm.weight"]))
            h = rms(x, w["ffn_norm.weight"])
            if "moe.router.gate.weight" in w:
                x = x + mixture(w, h, scale)
            else:
                x = x + swiglu(h, *(w[f"feed_forward.w{matrix}.weight"] for matrix in (1, 3, 2)))
        return F.linear(rms(x, tensors["norm.weight"]), tensors["lm_head.weight"])

    return logits


def in_pairs(w, x):
    return grouped_attention(w, x, head=8, pairs=True)


def in_halves(w, x):
    return grouped_attention(w, x, head=16, pairs=False)


# ---- what is saved -----------------------------------------------------------------------------------------


class TrainState:
    def state_dict(self):
        return {"step": torch.tensor(7), "lr": [0.1]}

    def load_state_dict(self, state):
        raise AssertionError


def saved(folder, tensors, **others):
    """As torchtitan saves: the model's tensors at the top, other states beside them."""
    shutil.rmtree(folder, ignore_errors=True)
    optimizer = {"state": {"norm.weight": {"exp_avg": torch.ones(32)}}}
    states = {"optimizer": optimizer, "train_state": TrainState(), "freqs_cis": torch.ones(3, 2) * 1j}
    torch_dcp.save({**tensors, **states, **others}, checkpoint_id=folder, no_dist=True)
    return folder


TWO_RANKS = """
import sys, torch.distributed as dist, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
tensors = load_file(f"{folder}/whole.safetensors")
model = {name: distribute_tensor(tensor, mesh, [Shard(name.endswith("w2.weight"))])
         for name, tensor in tensors.items()}
dcp.save({"model": model}, checkpoint_id=f"{folder}/step-20")
dist.destroy_process_group()
"""


def saved_by_two(home, tensors):
    """Sharded, and below `model.` with names of an earlier version."""
    named = {name.replace("lm_head", "output"): tensor for name, tensor in tensors.items()}
    save_file(named, home / "whole.safetensors")
    ranks = [subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(n), str(home)]) for n in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    os.remove(home / "whole.safetensors")


def todays_names(tensors):
    """As the newest version names them."""
    found = {}
    for name, tensor in tensors.items():
        name = re.sub(r"attention\.(w[qkv])\.", r"attention.qkv_linear.\1.", name)
        name = re.sub(r"moe\.experts\.(w[13])$", r"moe.routed_experts.inner_experts.\1_EFD", name)
        name = re.sub(r"moe\.experts\.w2$", "moe.routed_experts.inner_experts.w2_EDF", name)
        found[name.replace("expert_bias", "expert_bias_E")] = tensor
    return found


# ---- tests -------------------------------------------------------------------------------------------------


def check_losses(home, recipe, settings, logits, layouts=tuple(LAYOUTS)):
    check_first_losses(home, recipe, settings, layouts, logits, says="does not describe its model")


@pytest.mark.parametrize("pairs", [False, True])
def test_llama_3_is_read_in_every_layout(tmp_path, pairs):
    """Its pairs of channels are halves where the run rotates these. The newest step of two is taken."""
    tensors = llama_weights()
    saved(tmp_path / "step-3", {"tok_embeddings.weight": torch.ones(2, 2)})
    saved_by_two(tmp_path, tensors)
    settings = {**LLAMA, "model.mixer.rope.pairs": pairs, "checkpoint.init_from": tmp_path}
    check_losses(tmp_path, "llama3-tiny", settings, logits_of(tensors, in_pairs))


def test_a_tied_head_is_read_where_both_copies_agree(tmp_path):
    tensors = llama_weights()
    tensors["lm_head.weight"] = tensors["tok_embeddings.weight"]
    folder = saved(tmp_path / "step-3", tensors)
    settings = {**LLAMA, "model.tied": True, "checkpoint.init_from": folder}
    check_losses(tmp_path, "llama3-tiny", settings, logits_of(tensors, in_pairs), ["one"])
    saved(folder, {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1})
    line = refusal(tmp_path, "llama3-tiny", settings)
    assert "lm_head.weight differs from tok_embeddings.weight, and the run's recipe says" in line


def deepseek_mlp(layer):
    return experts(layer, shared=True) if layer else dense(layer)


@pytest.mark.parametrize("recipe, settings, attention, mlp, logits, layout, other, line", [
    ("qwen3-tiny", QWEN, QWEN_ATTENTION, dense, {"attention": in_halves}, "tp2",
     {"model.mixer.rope.pairs": True}, "model.mixer.rope.pairs false there and true here"),
    ("qwen3-moe-tiny", QWEN_MOE, QWEN_ATTENTION, experts, {"attention": in_halves}, "tp2",
     {"model.mixer.rope.pairs": True}, "model.mixer.rope.pairs false there and true here"),
    ("deepseek-v3-tiny", DEEPSEEK, LATENT, deepseek_mlp, {"attention": latent_attention, "scale": 1.5},
     "pp2", {"model.mixer.norm_eps": 1e-6}, "model.mixer.norm_eps 1e-05 there and 1e-06 here"),
], ids=["qwen3", "qwen3-moe", "deepseek-v3"])
def test_other_models_are_read_under_todays_names(
    tmp_path, recipe, settings, attention, mlp, logits, layout, other, line
):
    tensors = weights(shapes_of(3, attention, mlp))
    saved(tmp_path / "step-3", todays_names(tensors))
    settings = {**settings, "checkpoint.init_from": tmp_path / "step-3"}
    check_losses(tmp_path, recipe, settings, logits_of(tensors, **logits), ["one", layout])
    assert line in refusal(tmp_path, recipe, {**settings, **other})


def test_a_folder_that_differs_or_is_cut_is_refused_by_key_or_by_name(tmp_path):
    tensors = llama_weights()
    folder = saved(tmp_path / "step-3", tensors)

    def line(keys=None):
        return refusal(tmp_path, "llama3-tiny", {**LLAMA, **of_model(keys), "checkpoint.init_from": folder})

    for keys, said in (
        ({"layers": 2}, "model.layers 3 there and 2 here"),
        ({"mlp.width": 40}, "model.mlp.width 48 there and 40 here"),
        ({"vocab": 300}, "model.vocab 257 there and 300 here"),
        ({"mixer.kv_heads": 4}, "model.mixer.kv_heads 2 there and 4 here"),
        ({"mixer.window": 4}, "torchtitan's Llama 3, which has no form for model.mixer.window"),
        ({"logit_scale": 2}, "has no form for model.logit_scale"),
        ({"mup.base": 16}, "model.mup none there and"),
        ({"mtp.modules": 1}, "model.mtp none there and"),
        ({"mixer.bias": "all"}, "weights here that are not there: 12 (layers.0.attn.k.bias"),
    ):
        assert said in line(keys), said

    first = "layers.1.feed_forward.w1.weight"
    for changes, said in (
        ({first: tensors[first] * torch.nan}, f"{folder}: {first} holds NaN or Inf"),
        ({first: torch.ones(48, 30)},
         "weights there that are not used here: 1 (layers.1.mlp.gate.weight (48, 30))"),
        ({"layers.0.attention.wq.bias": torch.ones(2), "layers.1.attention.wq.bias": torch.ones(2)},
         f"{folder}: layers.N.attention.wq.bias (2): no weights of torchtitan's Llama 3"),
        ({first: torch.ones(())}, f"{folder}: {first} has shape [], and 2 dims are expected"),
        ({"tok_embeddings.weight": torch.ones(9)}, "tok_embeddings.weight has shape [9], and 2 dims"),
        ({first: None}, "weights here that are not there: 1 (layers.1.mlp.gate.weight)"),
        ({"output.weight": torch.ones(257, 32)}, "lm_head.weight and output.weight are the same tensor"),
    ):
        chosen = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        saved(folder, chosen)
        assert said in line(), said
    saved(folder, {"other": torch.ones(2)})
    assert f"{folder}: other: no weights of torchtitan's Llama 3" in line()

    folder = saved(folder, tensors)
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    settings = {**LLAMA, "checkpoint.init_from": folder}
    assert f"{file}: truncated" in refusal(tmp_path, "llama3-tiny", settings, ranks=2)
