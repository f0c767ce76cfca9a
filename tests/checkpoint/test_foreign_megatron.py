"""checkpoint.init_from takes checkpoints of Megatron-LM, laid out by hand as its versions do. The model here
reads the tensors in Megatron-LM's own form.
"""

import argparse
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from foreign_runs import LAYOUTS, attend, check_first_losses, of_model, refusal, rms, rotated, swiglu
from test_dcp import lay_out

LAYERS, WIDTH, HEADS, HEAD, GROUPS, FFN, PADDED = 4, 32, 4, 12, 2, 40, 512
SIZES = {
    "model.layers": LAYERS, "model.hidden": WIDTH, "model.mixer.heads": HEADS, "model.mixer.head_dim": HEAD,
    "model.mlp.width": FFN, "model.norm.eps": 1e-5,
}
LLAMA = {
    **SIZES, "model.mixer.kv_heads": GROUPS, "model.mixer.rope.base": 10000, "model.mixer.rope.scaling": None,
}
GPT = {**SIZES, "model.context": 64, "model.tied": True}
ARGS = {  # of both, and some that change no logits
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "kv_channels": HEAD,
    "ffn_hidden_size": FFN,
    "max_position_embeddings": 64,
    "padded_vocab_size": PADDED,
    "make_vocab_size_divisible_by": 256,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "lr": 1e-4,
    "params_dtype": torch.bfloat16,
    "attention_backend": argparse.Namespace(name="auto"),
    "window_size": None,
}
LLAMA_ARGS = {
    **ARGS, "group_query_attention": True, "num_query_groups": GROUPS, "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}
MIXTURE = {
    **LLAMA, "model.mlp.kind": "experts", "model.mlp.experts": 6, "model.mlp.top_k": 2, "model.mlp.width": 10,
}
MIXTURE_ARGS = {
    **LLAMA_ARGS, "num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 10,
    "moe_router_load_balancing_type": "aux_loss",
}
SIGMOIDS = {
    **MIXTURE, "model.mlp.experts": 8, "model.mlp.top_k": 4, "model.mlp.router.scores": "sigmoid",
    "model.mlp.router.bias_rate": 0.001, "model.mlp.router.scale": 1.7, "model.mlp.router.groups": 4,
    "model.mlp.router.group_top_k": 2, "model.mlp.shared.experts": 2, "model.mlp.shared.gate": True,
    "model.blocks.dense.mlp.kind": "mlp", "model.blocks.dense.mlp.width": FFN,
    "model.pattern": "dense, block...",
}
SIGMOID_ARGS = {
    **MIXTURE_ARGS,
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.7,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": [0, 1, 1, 1],
}
GPT_ARGS = {**ARGS, "num_query_groups": 1, "group_query_attention": False, "bias_gelu_fusion": True}


def weights(args):
    """The whole tensors under the names of megatron/core, norms fused with the matrices that read them."""
    generator = torch.Generator().manual_seed(8)
    groups = args["num_query_groups"] if args["group_query_attention"] else HEADS
    qkv = (HEADS + 2 * groups) * HEAD
    shapes = {"embedding.word_embeddings.weight": (PADDED, WIDTH), "decoder.final_layernorm.weight": (WIDTH,)}
    of_layer = {
        "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
        "self_attention.linear_qkv.weight": (qkv, WIDTH),
        "self_attention.linear_proj.weight": (WIDTH, HEADS * HEAD),
        "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
        "mlp.linear_fc1.weight": ((2 if args.get("swiglu") else 1) * FFN, WIDTH),
        "mlp.linear_fc2.weight": (WIDTH, FFN),
    }
    if args.get("add_bias_linear", True):
        of_layer |= {
            "self_attention.linear_qkv.bias": (qkv,),
            "self_attention.linear_proj.bias": (WIDTH,),
            "mlp.linear_fc1.bias": (FFN,),
            "mlp.linear_fc2.bias": (WIDTH,),
        }
    if args.get("normalization") != "RMSNorm":
        of_layer |= {
            "self_attention.linear_qkv.layer_norm_bias": (WIDTH,),
            "mlp.linear_fc1.layer_norm_bias": (WIDTH,),
        }
        shapes["decoder.final_layernorm.bias"] = (WIDTH,)
    if args.get("qk_layernorm"):
        of_layer |= {f"self_attention.{name}_layernorm.weight": (HEAD,) for name in "qk"}
    if args.get("position_embedding_type") != "rope":
        shapes["embedding.position_embeddings.weight"] = (64, WIDTH)
    if args.get("untie_embeddings_and_output_weights"):
        shapes["output_layer.weight"] = (PADDED, WIDTH)
    for layer in range(LAYERS):
        own = of_layer
        if args.get("num_experts") and args.get("moe_layer_freq", [1] * LAYERS)[layer]:
            own = {name: shape for name, shape in of_layer.items() if not name.startswith("mlp")}
            own |= expert_shapes(args)
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def expert_shapes(args):
    count, width = args["num_experts"], args["moe_ffn_hidden_size"]
    shapes = {
        "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
        "mlp.router.weight": (count, WIDTH),
        "mlp.experts.experts.linear_fc1.weight": (count, 2 * width, WIDTH),
        "mlp.experts.experts.linear_fc2.weight": (count, WIDTH, width),
    }
    if args.get("moe_router_enable_expert_bias"):
        shapes["mlp.router.expert_bias"] = (count,)
    if shared := args.get("moe_shared_expert_intermediate_size"):
        shapes |= {
            "mlp.shared_experts.linear_fc1.weight": (2 * shared, WIDTH),
            "mlp.shared_experts.linear_fc2.weight": (WIDTH, shared),
            "mlp.shared_experts.gate_weight": (1, WIDTH),
        }
    return shapes


def with_experts_apart(tensors, prefix):
    """Each expert has tensors of its own: prefix.NUMBER.linear_fc1.weight."""
    found = {}
    for name, tensor in tensors.items():
        start, is_of_experts, end = name.partition("experts.experts")
        if is_of_experts:
            found |= {f"{start}experts.{prefix}.{expert}{end}": one for expert, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


# ---- the model ---------------------------------------------------------------------------------------------


def norm(x, w, name, args):
    weight = w[f"{name}weight"] + (1 if args.get("apply_layernorm_1p") else 0)
    if args.get("normalization") == "RMSNorm":
        return rms(x, weight)
    return F.layer_norm(x, weight.shape, weight, w[f"{name}bias"], 1e-5)


def attention(w, x, args):
    groups = args["num_query_groups"] if args["group_query_attention"] else HEADS
    mixed = F.linear(x, w["self_attention.linear_qkv.weight"], w.get("self_attention.linear_qkv.bias"))
    q, k, v = mixed.unflatten(-1, (groups, -1, HEAD)).split((HEADS // groups, 1, 1), -2)
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    if args.get("qk_layernorm"):
        q = norm(q, w, "self_attention.q_layernorm.", args)
        k = norm(k, w, "self_attention.k_layernorm.", args)
    if args.get("position_embedding_type") == "rope":
        dim, pairs = int(HEAD * args["rotary_percent"]), args.get("rotary_interleaved", False)
        q, k = (rotated(part, 10000.0, dim, pairs) for part in (q, k))
    out = attend(q, k, v)
    return F.linear(out, w["self_attention.linear_proj.weight"], w.get("self_attention.linear_proj.bias"))


def gated(x, up, down):
    """The gate and the up matrix are one."""
    return swiglu(x, *up.chunk(2), down)


def mixture(w, x, args):
    """One token after the other."""
    count, top_k, out = args["num_experts"], args["moe_router_topk"], []
    for token in x.flatten(0, 1):
        logits = w["mlp.router.weight"] @ token
        is_sigmoid = args.get("moe_router_score_function") == "sigmoid"
        before = is_sigmoid or args.get("moe_router_pre_softmax")
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1) if before else logits
        choice = scores + w.get("mlp.router.expert_bias", torch.zeros(count, dtype=scores.dtype))
        if groups := args.get("moe_router_num_groups"):
            chosen = args["moe_router_group_topk"]
            best = choice.view(groups, -1).topk(top_k // chosen).values.sum(-1).topk(chosen).indices
            allowed = torch.full_like(choice, -torch.inf).view(groups, -1)
            allowed[best] = 0
            choice = choice + allowed.flatten()
        experts = choice.topk(top_k).indices
        share = scores[experts] if before else scores[experts].softmax(-1)
        share = share / share.sum() if is_sigmoid else share
        share = share * args.get("moe_router_topk_scaling_factor", 1)
        parts = [
            part * gated(token, *(w[f"mlp.experts.experts.linear_fc{n}.weight"][expert] for n in (1, 2)))
            for part, expert in zip(share, experts)
        ]
        if "mlp.shared_experts.gate_weight" in w:
            shared = gated(token, *(w[f"mlp.shared_experts.linear_fc{n}.weight"] for n in (1, 2)))
            parts.append((w["mlp.shared_experts.gate_weight"] @ token).sigmoid() * shared)
        out.append(sum(parts))
    return torch.stack(out).view_as(x)


def mlp(w, x, args):
    if "mlp.router.weight" in w:
        return mixture(w, x, args)
    if args.get("swiglu"):
        return gated(x, w["mlp.linear_fc1.weight"], w["mlp.linear_fc2.weight"])
    h = F.linear(x, w["mlp.linear_fc1.weight"], w.get("mlp.linear_fc1.bias"))
    if args.get("squared_relu"):
        h = h.relu().square()
    else:
        h = F.gelu(h, approximate="tanh" if args.get("bias_gelu_fusion") else "none")
    return F.linear(h, w["mlp.linear_fc2.weight"], w.get("mlp.linear_fc2.bias"))


def logits_of(tensors, args):
    tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def logits(tokens):
        x = tensors["embedding.word_embeddings.weight"][tokens]
        if "embedding.position_embeddings.weight" in tensors:
            x = x + tensors["embedding.position_embeddings.weight"][:tokens.shape[1]]
        for layer in range(LAYERS):
            start = f"decoder.layers.{layer}."
            w = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
            x = x + attention(w, norm(x, w, "self_attention.linear_qkv.layer_norm_", args), args)
            x = x + mlp(w, norm(x, w, "mlp.linear_fc1.layer_norm_", args), args)
        head = tensors.get("output_layer.weight", tensors["embedding.word_embeddings.weight"])
        return F.linear(norm(x, tensors, "decoder.final_layernorm.", args), head)[..., :257]

    return logits


# ---- torch_dist --------------------------------------------------------------------------------------------


def boxes(name, tensor, tp):
    """(offset, part) of each rank of tensor parallelism."""
    dim = 0 if re.search(r"linear_(qkv|fc1)\.(weight|bias)|word_embeddings|output_layer", name) else None
    dim = 1 if re.search(r"linear_(proj|fc2)\.weight", name) else dim
    if dim is None or tensor.dim() == 3:
        return [((0,) * tensor.dim(), tensor)]
    parts = tensor.chunk(2 * tp if "linear_fc1" in name else tp, dim)  # gates and ups have boxes of their own
    found, at = [], 0
    for part in parts:
        found.append((tuple(at if d == dim else 0 for d in range(tensor.dim())), part))
        at += part.shape[dim]
    return found


def torch_dist(home, tensors, args, stacked=True, common="file"):
    """A folder of iteration 100, with the file that names it."""
    folder = home / "iter_0000100"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shapes, items = {}, []
    for name, tensor in tensors.items():
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        if layer and stacked:
            name = name.replace(layer[0], "decoder.layers.")
            shapes[name] = ((LAYERS, *tensor.shape), torch.float32)
            items += [(name, (int(layer[1]), *at), part[None].clone()) for at, part in boxes(name, tensor, 2)]
            continue
        shapes[name] = (tuple(tensor.shape), torch.float32)
        items += [(name, at, part.clone()) for at, part in boxes(name, tensor, 2)]
    moment = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    shapes[moment] = ((WIDTH,), torch.float32)
    items.append((moment, (0,), torch.ones(WIDTH)))
    whole = {"args": argparse.Namespace(**args), "iteration": 100, "checkpoint_version": 3.0}
    extra = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"
    objects = {extra: [b"fp8"], **({} if common == "file" else {"common_state/shard_0_1": [whole]})}
    items += [(name, None, what) for name, what in objects.items()]
    lay_out(folder, {"__0_0.distcp": items[::2], "__1_0.distcp": items[1::2]}, shapes, list(objects))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if common == "file":
        torch.save(whole, folder / "common.pt")
    (home / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def check_losses(home, recipe, settings, layouts, tensors, args):
    check_first_losses(home, recipe, settings, layouts, logits_of(tensors, args))


def test_torch_dist_is_read_in_every_layout(tmp_path):
    """Layers are stacked; the folder of all iterations is given."""
    tensors = weights(LLAMA_ARGS)
    torch_dist(tmp_path / "saved", tensors, {**LLAMA_ARGS, "tensor_model_parallel_size": 2})
    settings = {**LLAMA, "checkpoint.init_from": tmp_path / "saved"}
    padding = "the last 255 of 512 rows of the vocabulary"
    logits = logits_of(tensors, LLAMA_ARGS)
    check_first_losses(tmp_path, "llama3-tiny", settings, LAYOUTS, logits, says=padding)


@pytest.mark.parametrize("args, keys", [
    ({"rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": False},
     {"mixer.rope.share": 0.5, "mixer.rope.pairs": True}),
    ({"qk_layernorm": True, "apply_layernorm_1p": True, "num_query_groups": 4},
     {"mixer.qk_norm": "head", "mixer.kv_heads": 4}),
    ({"swiglu": False, "squared_relu": True, "rotary_base": 10000}, {"mlp.activation": "relu2"}),
])
def test_the_args_of_a_checkpoint_say_its_model(tmp_path, args, keys):
    """Layers have names of their own, gates and ups too, and the args are an object of the folder."""
    args = {**LLAMA_ARGS, **args}
    tensors = weights(args)
    saved = {}
    for name, tensor in tensors.items():
        if "linear_fc1.weight" in name and args["swiglu"]:
            saved[f"{name}_w"], saved[f"{name}_v"] = tensor.chunk(2)
        else:
            saved[name] = tensor
    folder = torch_dist(tmp_path / "saved", saved, args, stacked=False, common="object")
    settings = {**LLAMA, **of_model(keys), "checkpoint.init_from": folder}
    check_losses(tmp_path, "llama3-tiny", settings, ["one", "tp2"], tensors, args)


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_gpt_with_biases_and_learned_positions_is_read(tmp_path, is_fused):
    """With LayerNorm and one tied head. GELU is the tanh form where its bias is fused."""
    args = {**GPT_ARGS, "bias_gelu_fusion": is_fused}
    tensors = weights(args)
    folder = torch_dist(tmp_path / "saved", tensors, args)
    settings = {**GPT, "model.mlp.activation": "gelu" if is_fused else "gelu_erf"}
    settings["checkpoint.init_from"] = folder
    check_losses(tmp_path, "gpt2-tiny", settings, ["one", "zero3"], tensors, args)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("args, settings", [
    (MIXTURE_ARGS, MIXTURE),
    ({**MIXTURE_ARGS, "moe_router_pre_softmax": True}, {**MIXTURE, "model.mlp.router.renorm": False}),
    (SIGMOID_ARGS, SIGMOIDS),
])
def test_experts_are_read_stacked_or_each_alone(tmp_path, args, settings, alone):
    tensors = weights(args)
    saved = with_experts_apart(tensors, "experts") if alone else tensors
    is_stacked = not alone and "moe_layer_freq" not in args
    folder = torch_dist(tmp_path / "saved", saved, args, stacked=is_stacked)
    settings = {**settings, "checkpoint.init_from": folder}
    check_losses(tmp_path, "llama3-tiny", settings, ["one", "tp2"], tensors, args)


# ---- a file for each rank ----------------------------------------------------------------------------------

OLD_NAMES = (
    (r"^decoder\.", "language_model.encoder."),
    (r"^embedding\.", "language_model.embedding."),
    (r"^output_layer\.", "language_model.output_layer."),
    (r"linear_qkv\.layer_norm_", "input_layernorm."),
    (r"self_attention\.input_layernorm", "input_layernorm"),
    (r"mlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
    (r"linear_qkv", "query_key_value"),
    (r"linear_proj", "dense"),
    (r"linear_fc1", "dense_h_to_4h"),
    (r"linear_fc2", "dense_4h_to_h"),
)


def shard(name, tensor, rank, tp, is_gated):
    """The part of a tensor that a rank of tensor parallelism holds."""
    if re.search(r"linear_(proj|fc2)\.weight", name):
        return tensor.chunk(tp, 1)[rank].clone()
    if not re.search(r"linear_(qkv|fc1)\.(weight|bias)|word_embeddings|output_layer", name):
        return tensor
    if "linear_fc1" in name and is_gated:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp)[rank].clone()


def chunk_of(tensors, number, of):
    """The tensors of one of `of` chunks of layers, which are counted from 0 in it."""
    size = LAYERS // of
    found = {}
    for name, tensor in tensors.items():
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) // size == number:
            found[name.replace(layer[0], f"decoder.layers.{int(layer[1]) % size}.")] = tensor
        elif not layer and number == (0 if name.startswith("embedding.") else of - 1):
            found[name] = tensor
    return found


def rank_files(home, tensors, args, *, tp=1, pp=1, chunks=1, old=False, namespace=argparse.Namespace):
    """A folder of iteration 100. A tied head is a copy of the embedding in the last stage."""
    args = {**args, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    folder = home / "iter_0000100"
    shutil.rmtree(folder, ignore_errors=True)
    if pp * chunks > 1 and "output_layer.weight" not in tensors:
        copy = "word_embeddings_for_head.weight" if old else "output_layer.weight"
        tensors = {**tensors, copy: tensors["embedding.word_embeddings.weight"]}
    for p in range(pp):
        for t in range(tp):
            models = {}
            for chunk in range(chunks):
                own = chunk_of(tensors, pp * chunk + p, pp * chunks)
                model = {name: shard(name, tensor, t, tp, args.get("swiglu")) for name, tensor in own.items()}
                empty = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
                key = "model" if chunks == 1 else f"model{chunk}"
                models[key] = old_form(model) if old else model | empty
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            (folder / name).mkdir(parents=True)
            whole = {"args": namespace(**args), "checkpoint_version": 3.0, "iteration": 100, **models}
            optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}}
            torch.save({**whole, "optimizer": optimizer}, folder / name / "model_optim_rng.pt")
    return folder


def old_form(model):
    """As earlier versions nest it: the names of layers are one dict, `encoder`."""
    tree = {}
    for name, tensor in model.items():
        for new, old in OLD_NAMES:
            name = re.sub(new, old, name)
        keys = name.split(".")
        depth = 2 if "encoder" in keys else len(keys) - 1
        place = tree
        for key in keys[:depth]:
            place = place.setdefault(key, {})
        place[".".join(keys[depth:])] = tensor
    return tree


@pytest.mark.parametrize("tp, pp, chunks, old", [(2, 1, 1, False), (2, 2, 1, True), (1, 2, 2, False)])
def test_files_of_ranks_are_joined(tmp_path, tp, pp, chunks, old):
    tensors = weights(LLAMA_ARGS)
    folder = rank_files(tmp_path / "saved", tensors, LLAMA_ARGS, tp=tp, pp=pp, chunks=chunks, old=old)
    settings = {**LLAMA, "checkpoint.init_from": folder}
    check_losses(tmp_path, "llama3-tiny", settings, ["one", "zero3"], tensors, LLAMA_ARGS)


@pytest.mark.parametrize("tp, pp, old", [(2, 1, True), (1, 2, False), (2, 2, True)])
def test_files_of_ranks_of_a_gpt_are_joined(tmp_path, tp, pp, old):
    """The last stage has a copy of the embedding."""
    tensors = weights(GPT_ARGS)
    layout = {"tp": tp, "pp": pp, "old": old, "namespace": SimpleNamespace}
    folder = rank_files(tmp_path / "saved", tensors, GPT_ARGS, **layout)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("100\n")
    settings = {**GPT, "checkpoint.init_from": folder.parent}
    check_losses(tmp_path, "gpt2-tiny", settings, ["one", "pp2"], tensors, GPT_ARGS)


def test_files_of_ranks_of_a_mixture_are_joined(tmp_path):
    tensors = weights(SIGMOID_ARGS)
    saved = with_experts_apart(tensors, "local_experts")
    folder = rank_files(tmp_path / "saved", saved, SIGMOID_ARGS, tp=2, pp=2)
    settings = {**SIGMOIDS, "checkpoint.init_from": folder}
    check_losses(tmp_path, "llama3-tiny", settings, ["one", "pp2"], tensors, SIGMOID_ARGS)
    args = {**SIGMOID_ARGS, "expert_tensor_parallel_size": 1}
    folder = rank_files(tmp_path / "saved", saved, args, tp=2)
    line = refusal(tmp_path, "llama3-tiny", settings)
    assert "expert_tensor_parallel_size = 1 is not read beside tensor_model_parallel_size 2" in line


# ---- refusals ----------------------------------------------------------------------------------------------


def line_of(home, folder, keys=None):
    return refusal(home, "llama3-tiny", {**LLAMA, **of_model(keys), "checkpoint.init_from": folder})


def test_another_model_is_refused_by_key(tmp_path):
    folder = rank_files(tmp_path / "saved", weights(LLAMA_ARGS), LLAMA_ARGS)
    for keys, said in (
        ({"layers": 2}, "model.layers 4 there and 2 here"),
        ({"mixer.heads": 2}, "model.mixer.heads 4 there and 2 here"),
        ({"mixer.rope.base": 500}, "model.mixer.rope.base 10000.0 there and 500.0 here"),
        ({"mixer.rope.pairs": True}, "model.mixer.rope.pairs false there and true here"),
        ({"norm.eps": 0.1}, "model.norm.eps 1e-05 there and 0.1 here"),
        ({"tied": True}, "model.tied false there and true here"),
        ({"vocab": 600}, "model.vocab 512 there and 600 here"),
        ({"mixer.window": 3}, "model.mixer.window none there and 3 here"),
    ):
        assert said in line_of(tmp_path, folder, keys), said


@pytest.mark.parametrize("args, said", [
    ({"multi_latent_attention": True}, "multi_latent_attention = True is not supported"),
    ({"num_experts": 8, "add_bias_linear": True}, "num_experts with add_bias_linear = True"),
    ({"num_experts": 8, "moe_layer_freq": [1, 0, 1, 1]}, "moe_layer_freq = [1, 0, 1, 1] is not"),
    ({"num_experts": 8, "moe_layer_freq": [0, 1]}, "moe_layer_freq = [0, 1] is not supported"),
    ({"num_experts": 8, "moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
    ({"num_experts": 8, "moe_router_load_balancing_type": ["sinkhorn"]}, "'sinkhorn' is not supported"),
    ({"num_experts": 8, "moe_router_score_function": "sqrtsoftplus"}, "'sqrtsoftplus' is not supported"),
    ({"num_experts": 8, "moe_router_enable_expert_bias": True}, "is not supported with a softmax"),
    ({"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
     "moe_router_group_topk = 1 with moe_router_topk = 2 is not supported"),
    ({"num_experts": 8, "moe_shared_expert_intermediate_size": 50}, "only a multiple of that"),
    ({"mtp_num_layers": 1}, "mtp_num_layers = 1 is not supported"),
    ({"window_size": (128, 0)}, "window_size = (128, 0) is not supported"),
    ({"position_embedding_type": "yarn"}, "position_embedding_type = 'yarn' is not supported"),
    ({"quick_geglu": True}, "quick_geglu = True is not supported"),
    ({"norm_epsilon": 1e-5, "layernorm_epsilon": 1e-6}, "are the same arg, and differ: [1e-06, 1e-05]"),
    ({"norm_epsilon": [1]}, "norm_epsilon = [1] is not a number"),
    ({"num_layers": 5}, "args say num_layers 5"),
    ({"num_query_groups": 3}, "num_attention_heads = 4 is not a multiple of num_query_groups = 3"),
    ({"normalization": "Other"}, "normalization = 'Other' is not supported"),
    ({"qk_layernorm": True, "normalization": "LayerNorm"}, "qk_layernorm = True with LayerNorm"),
    ({"swiglu": "yes"}, "swiglu = 'yes' is not true or false"),
    ({"hidden_size": "large"}, "hidden_size = 'large' is not a number"),
    ({"ffn_hidden_size": None}, "ffn_hidden_size is missing"),
    ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by = 0 is not a number above 0"),
    ({"padded_vocab_size": 500}, "has 512 rows, args 500"),
    ({"num_query_groups": 1}, "args makes it 72 rows"),
])
def test_args_that_mean_another_model_are_refused_by_name(tmp_path, args, said):
    folder = torch_dist(tmp_path / "saved", weights(LLAMA_ARGS), {**LLAMA_ARGS, **args})
    line = line_of(tmp_path, folder)
    assert line.startswith(f"error: {folder}: ") and said in line, line


def test_files_of_ranks_that_do_not_fit_are_refused(tmp_path):
    tensors = weights(LLAMA_ARGS)

    def again(**layout):
        return rank_files(tmp_path / "saved", tensors, LLAMA_ARGS, **layout)

    folder = again(tp=2)
    shutil.rmtree(folder / "mp_rank_01")
    said = f"{folder}: mp_rank_01 is missing: args say tensor_model_parallel_size 2"
    assert said in line_of(tmp_path, folder)
    folder = again(tp=2)
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_02")
    assert f"{folder}: mp_rank_02 is one too many" in line_of(tmp_path, folder)
    (folder / "mp_rank_02" / "model_optim_rng.pt").unlink()
    assert f"{folder}/mp_rank_02/model_optim_rng.pt: missing" in line_of(tmp_path, folder)
    folder = again(tp=2)
    (folder / "mp_rank_01").rename(folder / "mp_rank_01_000_000")
    assert "not mp_rank_TT or mp_rank_TT_PPP" in line_of(tmp_path, folder)

    file = again(tp=2) / "mp_rank_01" / "model_optim_rng.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:-500])
    assert f"{file}: truncated, or not a file" in line_of(tmp_path, folder)
    tree = torch.load(file.parent.parent / "mp_rank_00" / file.name, weights_only=False)
    for change, said in (
        ({"iteration": 99}, f"{file}: of iteration 99, and "),
        ({"model": {"decoder.extra": torch.ones(2)}}, f"{file}: decoder."),
        ({"checkpoint_version": 1.0}, f"{file}: checkpoint_version 1.0"),
        ({"args": None}, f"{file}: holds no args of Megatron-LM"),
    ):
        torch.save({**tree, **change}, file)
        assert said in line_of(tmp_path, folder), said
    cut = {**tree["model"], "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(WIDTH, 3)}
    torch.save({**tree, "model": cut}, file)
    assert "layers.0.mlp.down.weight (32, 23)" in line_of(tmp_path, folder)
    cut["decoder.layers.0.mlp.linear_fc2.weight"] = torch.ones(())
    torch.save({**tree, "model": cut}, file)
    assert "decoder.layers.0.mlp.linear_fc2.weight has shape [], and 2 dims" in line_of(tmp_path, folder)


def test_damage_is_refused(tmp_path):
    tensors = weights(LLAMA_ARGS)
    home = tmp_path / "saved"
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    folder = torch_dist(home, {**tensors, name: tensors[name] * torch.inf}, LLAMA_ARGS)
    assert f"{folder}: {name} holds NaN or Inf" in line_of(tmp_path, folder)
    odd = "decoder.layers.0.odd.weight"
    folder = torch_dist(home, {**tensors, odd: tensors[name]}, LLAMA_ARGS, stacked=False)
    assert f"{folder}: {odd} is not a weight of Megatron-LM" in line_of(tmp_path, folder)
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    folder = torch_dist(home, missing, LLAMA_ARGS, stacked=False)
    assert "weights here that are not there: 1 (layers.1.mlp.down.weight)" in line_of(tmp_path, folder)

    folder = torch_dist(home, tensors, LLAMA_ARGS)
    (folder / "__1_0.distcp").unlink()
    assert f"{folder}/__1_0.distcp: missing" in line_of(tmp_path, folder)
    folder = torch_dist(home, tensors, LLAMA_ARGS)
    (folder / "common.pt").unlink()
    assert f"{folder}: holds neither common.pt nor common_state" in line_of(tmp_path, folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "sharded_backend 'zarr' is not read, only torch_dist" in line_of(tmp_path, folder)
    (home / "latest_checkpointed_iteration.txt").write_text("200")
    assert f"names '200', and {home}/iter_0000200 is not there" in line_of(tmp_path, home)
