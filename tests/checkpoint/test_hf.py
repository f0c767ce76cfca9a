"""Weights in Hugging Face's layout: what is written reads back exactly, in one file or many; every misfit is
named before a tensor changes.
"""

import json

import pytest
import torch
import whole_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint.disk.tensors_by_name import open_safetensors_folder
from checkpoint.hf.families.table import FAMILIES
from checkpoint.hf import tensors as hf
from config import ConfigError, ModelConfig
from config.reading import build_tree, merge
from parallel.sharding.boxes import Box

D, F, V, PADDED = 12, 20, 37, 128
SIZES = {"layers": 2, "hidden": D, "mixer.heads": 3, "mlp.width": F, "vocab": V, "context": 9}
GPT2 = {
    "mixer": {"bias": "all", "rope": None},
    "mlp": {"activation": "gelu", "bias": True},
    "norm.kind": "layernorm",
    "positions": "learned",
}


def model(kind, tied):
    rest = GPT2 if kind == "gpt2" else {"mixer.kv_heads": 1}
    return build_tree(ModelConfig, merge(SIZES | {"tied": tied}, rest, ModelConfig))


def pieces(kind, tied, fill=None):
    """Whole tensors under our keys, random or all `fill`; the padding of the vocabulary is zero, as it is in
    a stage.
    """
    g = torch.Generator().manual_seed(0)
    kv = D if kind == "gpt2" else 4
    shapes = {
        "embed.weight": (PADDED, D),
        "norm.weight": (D,),
        **({} if tied else {"head.weight": (PADDED, D)}),
    }
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {
            at + "attn_norm.weight": (D,), at + "mlp_norm.weight": (D,),
            at + "attn.q.weight": (D, D), at + "attn.k.weight": (kv, D),
            at + "attn.v.weight": (kv, D), at + "attn.o.weight": (D, D),
            at + "mlp.up.weight": (F, D), at + "mlp.down.weight": (D, F),
        }
        shapes |= {} if kind == "gpt2" else {at + "mlp.gate.weight": (F, D)}
    if kind == "gpt2":
        biased = [key for key in shapes if key not in ("embed.weight", "head.weight")]
        shapes |= {key.replace("weight", "bias"): shapes[key][:1] for key in biased}
        shapes["positions.weight"] = (9, D)
    out = []
    for key, shape in shapes.items():
        t = torch.randn(shape, generator=g) if fill is None else torch.full(shape, float(fill))
        if key in ("embed.weight", "head.weight"):
            t[V:] = 0
        out.append((Box.whole(key, shape), t))
    return out


def write(folder, kind, tied, dtype=torch.float32, **more):
    return whole_folder.write_weights(
        folder, kind, model(kind, tied), pieces(kind, tied), dtype=dtype, **more
    )


@pytest.fixture(params=[("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)], ids=str)
def made(request, tmp_path):
    """(kind, is it tied?, the folder)"""
    write(tmp_path, *request.param)
    return *request.param, tmp_path


def read(kind, tied, folder):
    found = whole_folder.stored_tensors(folder, kind)
    got = pieces(kind, tied, 0)
    ours = hf.tie_embeddings(model(kind, tied), FAMILIES[kind], found)
    whole_folder.read_weights(kind, ours, found, got)
    return got


def same(got, want):
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(got, want, strict=True))


def change(folder, how):
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_is_written_reads_back_exactly(made):
    kind, tied, folder = made
    assert same(read(kind, tied, folder), pieces(kind, tied))


def test_shards_read_back_by_their_index(made):
    kind, tied, folder = made
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    total = write(folder, kind, tied, shard_bytes=4000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total == sum(t.numel() * 4 for t in whole.values())
    assert len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as f:
            assert f.metadata() == {"format": "pt"} and torch.equal(f.get_tensor(name), whole[name])
        assert (folder / file).stat().st_size < 4000 + 2000  # a header beside the tensors
    assert same(read(kind, tied, folder), pieces(kind, tied))


def test_bf16_is_rounded_once(made):
    kind, tied, folder = made
    (folder / "model.safetensors").unlink()
    write(folder, kind, tied, torch.bfloat16)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert same(read(kind, tied, folder), [(b, t.bfloat16().float()) for b, t in pieces(kind, tied)])


def test_names_without_their_prefix_are_read_and_old_buffers_passed_over(made):
    kind, tied, folder = made

    def strip(tensors):
        for name in [n for n in tensors if n != "lm_head.weight"]:
            tensors[name.partition(".")[2]] = tensors.pop(name)
        buffer = "h.0.attn.bias" if kind == "gpt2" else "layers.0.self_attn.rotary_emb.inv_freq"
        tensors[buffer] = torch.ones(1, 1, 9, 9)

    change(folder, strip)
    assert same(read(kind, tied, folder), pieces(kind, tied))


def test_a_head_that_is_missing_or_equal_is_tied(tmp_path):
    write(tmp_path, "llama", False)
    change(tmp_path, lambda t: t.pop("lm_head.weight"))
    found = whole_folder.stored_tensors(tmp_path, "llama")
    tied = hf.tie_embeddings(model("llama", False), FAMILIES["llama"], found)
    assert tied.tied  # no head on disk: it is the embedding
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert same(read("llama", True, tmp_path), pieces("llama", True)[:2] + pieces("llama", False)[3:])
    change(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ConfigError, match="differs from the embedding"):
        read("llama", True, tmp_path)


@pytest.mark.parametrize("how, words", [
    (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    (lambda t: t.update({"score.weight": torch.ones(2, D)}), "score.weight is not a weight of llama"),
    (lambda t: t.update({"model.norm.weight": torch.ones(D + 1)}),
     f"model.norm.weight has shape [{D + 1}], config.json implies [{D}]"),
    (lambda t: t.update({"model.norm.weight": torch.ones(D, dtype=torch.int8)}),
     "model.norm.weight is torch.int8, only torch.float64, torch.float32"),
    (lambda t: [t.pop(n) for n in list(t) if ".0." in n], "and 5 more"),
])
def test_a_misfit_is_named_and_changes_nothing(tmp_path, how, words):
    write(tmp_path, "llama", False)
    change(tmp_path, how)
    found, got = whole_folder.stored_tensors(tmp_path, "llama"), pieces("llama", False, 7)
    with pytest.raises(ConfigError) as e:
        whole_folder.read_weights("llama", model("llama", False), found, got)
    assert words in str(e.value) and "\n" not in str(e.value)
    assert same(got, pieces("llama", False, 7))


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-9])


def index(text):
    def write(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return write


@pytest.mark.parametrize("how, words", [
    (cut, "truncated"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated"),
    (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
     "pickled weights (pytorch_model.bin) are never opened"),
    (index("{"), "not an index"),
    (index('{"weight_map": {}}'), "not an index"),
    (index('{"weight_map": {"a": "../b"}}'), "not an index"),
    (index('{"weight_map": {"a": "gone.safetensors"}}'),
     "gone.safetensors: missing, though the index names it"),
])
def test_a_bad_folder_is_named(tmp_path, how, words):
    write(tmp_path, "llama", False)
    how(tmp_path)
    with pytest.raises(ConfigError) as e:
        open_safetensors_folder(tmp_path)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_a_factor_of_scores_goes_into_queries_of_attention_alone():
    """A mixer with a state has q too, and no scores."""
    kimi = {
        "mixer": {"kind": "latent", "heads": 3, "kv_rank": 4, "nope_dim": 4, "rope_dim": 4, "rope": None},
        "blocks": {"linear": {"mixer": {"kind": "kimi", "heads": 3, "dim": 4}}},
        "pattern": "linear, block",
        "mup": {"base": 6, "head_dim": 2},
    }
    found = [(Box.whole(f"layers.{layer}.attn.q.weight", (4,)), torch.ones(4)) for layer in range(2)]
    made = build_tree(ModelConfig, merge(SIZES, kimi, ModelConfig))
    hf.fold_mup(made, found)
    assert [tensor[0].item() for _, tensor in found] == [1.0, pytest.approx(0.5)]
    hf.fold_mup(made, found, undo=True)
    assert all(torch.equal(tensor, torch.ones(4)) for _, tensor in found)


def test_a_factor_of_a_tied_head_needs_a_norm_with_a_weight():
    plain = {"mup": {"base": 6}, "tied": True, "norm.weight": False}
    made = build_tree(ModelConfig, merge(SIZES, plain, ModelConfig))
    with pytest.raises(ConfigError, match=r"model.mup: .* \(model.norm.weight\); untie the head"):
        hf.fold_mup(made, [])
    hf.fold_mup(build_tree(ModelConfig, merge(SIZES, plain | {"tied": False}, ModelConfig)), [])
