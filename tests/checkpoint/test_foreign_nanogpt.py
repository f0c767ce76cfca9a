"""checkpoint.init_from takes ckpt.pt of nanoGPT. The GPT here is written from the definition of the format,
and shares nothing with ours.
"""

import shutil

import pytest
import torch
from foreign_runs import LAYOUTS, attend, expected_loss, first_loss, of_model, refusal
from torch import nn
from torch.nn import functional as F

from config import ConfigError, provenance
from scripts.reproduce import check_inputs

RECIPE = "gpt2-tiny"
MODEL = {
    "model.layers": 3, "model.hidden": 32, "model.mixer.heads": 4, "model.mlp.width": 128,
    "model.context": 40, "model.tied": True, "model.mlp.activation": "gelu_erf",
}
NO_BIAS = {"model.mixer.bias": None, "model.mlp.bias": False, "model.norm.bias": False}
ARGS = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 40, "bias": True, "vocab_size": 320,
        "dropout": 0.1}


class Norm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, width = args["n_head"], args["n_embd"]
        self.c_attn = nn.Linear(width, 3 * width, bias=args["bias"])
        self.c_proj = nn.Linear(width, width, bias=args["bias"])

    def forward(self, x):
        parts = self.c_attn(x).chunk(3, -1)
        return self.c_proj(attend(*(part.unflatten(-1, (self.heads, -1)) for part in parts)))


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        width = args["n_embd"]
        self.c_fc = nn.Linear(width, 4 * width, bias=args["bias"])
        self.c_proj = nn.Linear(4 * width, width, bias=args["bias"])

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.ln_1, self.ln_2 = (Norm(args["n_embd"], args["bias"]) for _ in range(2))
        self.attn, self.mlp = Attention(args), MLP(args)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        width = args["n_embd"]
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(args["vocab_size"], width),
            "wpe": nn.Embedding(args["block_size"], width),
            "h": nn.ModuleList(Block(args) for _ in range(args["n_layer"])),
            "ln_f": Norm(width, args["bias"]),
        })
        self.lm_head = nn.Linear(width, args["vocab_size"], bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.1, 0.2, generator=generator)

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def saved(file, prefix="", change=lambda tensors: None, **other):
    """A ckpt.pt as train.py of nanoGPT writes it. Returns the model."""
    args = {**ARGS, **other}
    model = GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tensors = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    change(tensors)
    more = {"iter_num": 7, "best_val_loss": torch.tensor(3.5), "config": {"batch_size": 12, "compile": True}}
    torch.save({"model": tensors, "optimizer": optimizer.state_dict(), "model_args": args, **more}, file)
    return model


def logits_of(model, vocab):
    return lambda tokens: model.double()(tokens)[..., :vocab]


@pytest.mark.parametrize("bias, prefix, vocab", [(True, "", 320), (False, "_orig_mod.", 257)])
def test_the_first_loss_is_that_of_nanogpt(tmp_path, bias, prefix, vocab):
    """In every layout; from a padded vocabulary and from one that is not; from the file and its folder."""
    model = saved(tmp_path / "ckpt.pt", prefix, bias=bias, vocab_size=vocab)
    settings = {**MODEL, **({} if bias else NO_BIAS)}
    losses = []
    for number, layout in enumerate(LAYOUTS):
        path = tmp_path if number % 2 else tmp_path / "ckpt.pt"
        loss, told = first_loss(tmp_path, RECIPE, {**settings, "checkpoint.init_from": path}, layout)
        assert f"weights  from {tmp_path}/ckpt.pt (step 0)" in told
        assert ("the last 63 of 320 rows of the vocabulary" in told) == (vocab == 320)
        losses.append(loss)
    expected = expected_loss(tmp_path, logits_of(model, 257))
    assert losses == pytest.approx([expected] * len(losses), rel=1e-9)


def test_what_differs_or_is_damaged_is_refused(tmp_path):
    file = tmp_path / "ckpt.pt"
    settings = {**MODEL, "checkpoint.init_from": file}

    def line(keys=None):
        return refusal(tmp_path, RECIPE, {**settings, **of_model(keys)})

    saved(file)
    for keys, said in (
        ({"layers": 2}, "model.layers 3 there and 2 here"),
        ({"mixer.heads": 2}, "model.mixer.heads 4 there and 2 here"),
        ({"mlp.activation": "gelu"}, "model.mlp.activation gelu_erf there and gelu here"),
        ({"norm.eps": 1e-4}, "model.norm.eps 1e-05 there and 0.0001 here"),
        ({"vocab": 330}, "model.vocab 320 there and 330 here"),
    ):
        assert said in line(keys), said
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    assert line().startswith(f"error: {file}: truncated, or not a file that torch.save")

    first = "transformer.h.0.mlp.c_fc.weight"
    for change, said in (
        (lambda tensors: tensors[first].fill_(torch.nan), f"{file}: {first} holds NaN or Inf"),
        (lambda tensors: tensors.update({first: torch.tensor(1.0)}),
         f"{first} has shape [], and at least 1 dim"),
        (lambda tensors: tensors.update({first: tensors[first].int()}),
         f"{first} is torch.int32; only plain floats are read"),
        (lambda tensors: tensors.pop(first), "weights here that are not there: 1 (layers.0.mlp.up.weight)"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), f"{file}: extra is not a weight of nanoGPT"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(320, 32)}),
         "lm_head.weight differs from transformer.wte.weight, and model_args says that they are one"),
    ):
        saved(file, change=change)
        assert said in line(), said
    saved(file, rotary=True)
    assert f"{file}: model_args: rotary: this arg is unknown for nanoGPT" in line()
    saved(file, bias="some")
    assert "bias = 'some' is not true or false" in line()
    torch.save({"state": 1, "net": {}}, file)
    assert f"{file}: model_args and model of nanoGPT are looked for, and it has state, net" in line()


def test_a_run_knows_what_it_began_with(tmp_path):
    file = tmp_path / "ckpt.pt"
    saved(file)
    first_loss(tmp_path, RECIPE, {**MODEL, "checkpoint.init_from": tmp_path})
    records = provenance.read_records(tmp_path / "runs" / "one")
    assert check_inputs(records) == []
    saved(file, change=lambda tensors: tensors["transformer.ln_f.bias"].add_(1))
    with pytest.raises(ConfigError, match=f"checkpoint.init_from: {file} is another checkpoint now; restore"):
        check_inputs(records)
    file.unlink()
    with pytest.raises(ConfigError, match=f"checkpoint.init_from: {file} is gone; restore"):
        check_inputs(records)


def test_no_known_system_is_refused_with_what_was_looked_for(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.npz").write_bytes(b"1")
    for path in (tmp_path / "weights", tmp_path / "weights" / "model.npz", tmp_path / "gone"):
        line = refusal(tmp_path, RECIPE, {"checkpoint.init_from": path})
        assert line.startswith(f"error: checkpoint.init_from: {path} ") and "holds no checkpoint" in line
        for word in ("checkpoints/", "config.json (Hugging Face)", "ckpt.pt (nanoGPT)", "convert"):
            assert word in line
    shutil.rmtree(tmp_path / "weights")
