"""A run that continues a Hugging Face model and trains a part of it, beside transformers' model under a
training loop written by hand: the losses, gradient norms and exported weights of every step.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from in_fp64 import InFp64
from program import Enough, trained
from ranks import corpus

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

from checkpoint.trained import load_run  # noqa: E402
from config import ConfigError  # noqa: E402
from config.reading import resolve, split_argv  # noqa: E402
from model.context import GenerationCache  # noqa: E402
from parallel.rng import DropoutRng  # noqa: E402
from parallel.sharding.views import get_boxes  # noqa: E402
from parallel.wire.world import World  # noqa: E402
from scripts import convert, generate  # noqa: E402

STEPS, LR, DECAY, CLIP = 4, 0.02, 0.1, 0.5
RUN = (
    "--train.dtype fp64 --train.seq_len 16 --train.micro_batch 2 --train.global_batch 4 --train.threads 1 "
    f"--train.steps {STEPS} --optim.lr {LR} --optim.weight_decay {DECAY} --optim.clip {CLIP} "
    "--optim.warmup 0 --optim.decay constant --eval.every none --eval.batches 1 --eval.sample 0 "
    "--log.every 1 --data.tokenizer bytes --model.vocab 257"
).split()
WORDS = [
    *(
        "llama3-tiny --model.layers 2 --model.hidden 32 --model.mixer.heads 4 --model.mixer.kv_heads 2 "
        "--model.mlp.width 48 --model.context 64 --model.tied false --model.norm.eps 1e-6 "
        "--model.mixer.rope.base 10000 --model.mixer.rope.scaling none"
    ).split(),
    *RUN,
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """hf/: a Llama of two layers in fp64; text: the data."""
    home = tmp_path_factory.mktemp("continued")
    corpus(home)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, bos_token_id=None,
        eos_token_id=256, tie_word_embeddings=False, dtype="float64",
    )
    LlamaForCausalLM(config).double().save_pretrained(home / "hf")
    return home


def config_of(home, name, *more, init=True):
    start = ("--checkpoint.init_from", str(home / "hf")) if init else ()
    argv = [*WORDS, "--data.path", str(home / "text"), "--log.dir", str(home / "runs"),
            "--log.name", name, *start, *more]
    return resolve(*split_argv(argv))


def train_ours(home, name, *more, last=None):
    """batches, loss, norm: of each step; run: the run; first: its own initial weights. last: the step after
    which it dies.
    """
    seen = SimpleNamespace(batches={}, loss=[], norm=[], run=None, first={})

    def watch(point, step=None, **what):
        if point == "run.built":
            seen.run = what["run"]
            for bucket in seen.run.buckets:
                of_bucket = get_boxes(bucket, bucket.weights.master)
                seen.first |= {box.key: part.clone() for box, part in of_bucket}
        elif point == "step.read":
            seen.batches[step] = what["batches"]
        elif point == "step.end":
            seen.loss.append(float(what["loss"]))
            seen.norm.append(float(what["norm"]))
            if step == last:
                seen.run.data.close()
                raise Enough

    cfg = config_of(home, name, *more)
    assert trained(World(), cfg, str(home / "runs" / name), watch) == 0
    return seen


def train_theirs(model, batches, params, before=lambda step: None):
    """(losses, norms) of the steps by torch.optim.AdamW over these parameters alone. before: called first."""
    for p in model.parameters():
        p.requires_grad_(any(p is one for one in params))
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optim = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in sorted(batches):
        tokens = torch.cat([batch.tokens for batch in batches[step]])
        targets = torch.cat([batch.targets for batch in batches[step]])
        before(step)
        with InFp64():
            logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optim.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, CLIP)))
        optim.step()
        losses.append(loss.item())
    return losses, norms


def load_theirs(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    size = model.config.hidden_size // 4
    model.model.rotary_emb.inv_freq = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    return model


def exported(home, name):
    folder = home / f"hf-{name}"
    assert convert.main(["to-hf", str(home / "runs" / name), str(folder)]) == 0
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def same_values(ours, theirs):
    assert ours.loss == pytest.approx(theirs[0], rel=1e-9)
    assert ours.norm == pytest.approx(theirs[1], rel=1e-9)


# ---- frozen parameters -------------------------------------------------------------------------------------

FROZEN = {
    "lower": ("embedding: lr_factor 0; layers.0.*: lr_factor 0", ("embed_tokens", "layers.0.")),
    "scattered": ("norm: lr_factor 0; layers.*.mlp.*: lr_factor 0", ("norm", "mlp")),
    "head alone": ("embedding: lr_factor 0; layers.*: lr_factor 0; norm.weight: lr_factor 0", ("model.",)),
}


@pytest.mark.parametrize("groups, frozen", FROZEN.values(), ids=FROZEN)
def test_what_is_not_frozen_trains_as_with_torchs_adamw_alone(home, groups, frozen):
    name = f"frozen-{len(groups)}"
    ours = train_ours(home, name, "--optim.groups", groups)
    model = load_theirs(home / "hf")
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    left = [p for key, p in model.named_parameters() if not any(word in key for word in frozen)]
    same_values(ours, train_theirs(model, ours.batches, left))

    after = dict(exported(home, name).named_parameters())
    for key, p in model.named_parameters():
        torch.testing.assert_close(after[key], p, rtol=1e-6, atol=1e-7, msg=key)
        is_frozen = any(word in key for word in frozen)
        assert torch.equal(after[key], before[key].float().double()) == is_frozen, key


def test_frozen_parameters_have_weights_alone(home):
    groups, _ = FROZEN["lower"]
    run = train_ours(home, "kept", "--optim.groups", groups).run
    params = dict(run.stages[0].named_parameters())
    assert {key for key, p in params.items() if not p.requires_grad} == {
        key for key in params if key.startswith(("embedding.", "blocks.0."))
    }
    size = sum(b.size for b in run.buckets if b.trains)
    assert 0 < size < sum(b.size for b in run.buckets)
    assert sum(b.grads.full.numel() for b in run.buckets) == size
    assert all(sum(flat.numel() for flat in flats) == size for flats in run.optim.state().values())
    assert all(b.weights.master is b.weights.local for b in run.buckets if not b.trains)
    assert all(p.main_grad is None for p in params.values() if not p.requires_grad)


def test_a_run_resumes_with_its_frozen_parameters_and_with_others(home):
    """The same groups: bit for bit. Others: what trains from then on has moments from 0."""
    groups, _ = FROZEN["lower"]
    whole = train_ours(home, "whole", "--optim.groups", groups)
    half = ("--checkpoint.every", "2", "--optim.groups", groups)
    with pytest.raises(Enough):
        train_ours(home, "half", *half, last=3)
    again = train_ours(home, "half", *half)
    assert again.loss == whole.loss[2:] and again.norm == whole.norm[2:]

    with pytest.raises(Enough):
        train_ours(home, "thawed", *half, last=3)
    thawed = train_ours(home, "thawed", "--checkpoint.every", "2")
    assert thawed.loss[0] == whole.loss[2] and thawed.norm[0] > whole.norm[2]
    assert all(p.requires_grad for p in thawed.run.stages[0].parameters())


def test_a_phase_trains_what_the_one_before_has_frozen(home):
    groups, _ = FROZEN["lower"]
    phases = home / "phases.yaml"
    phases.write_text("- after_steps: 2\n  optim.groups: 'embedding: lr_factor 0'\n")
    words = ("--optim.groups", groups, "--train.phases", str(phases))
    whole, phased = (train_ours(home, name, *words[:n]) for name, n in (("one-phase", 2), ("phased", 4)))
    assert phased.loss[:3] == whole.loss[:3] and phased.norm[:2] == whole.norm[:2]
    assert phased.norm[2] > whole.norm[2]  # of more parameters
    frozen = [key for key, p in phased.run.stages[0].named_parameters() if not p.requires_grad]
    assert frozen == ["embedding.weight"]


REFUSED = {
    "*: lr_factor 0": "every parameter has lr_factor 0, and nothing trains",
    "embedding: lr_factor 0, weight_decay 0.1": "weight_decay 0.1, and lr_factor 0 freezes these parameters",
}


@pytest.mark.parametrize("groups, why", REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_frozen_is_refused(home, groups, why):
    with pytest.raises(ConfigError, match=f"^optim.groups: .*{why}"):
        train_ours(home, "refused", "--optim.groups", groups)


# ---- adapters ----------------------------------------------------------------------------------------------

THEIR_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
WORDS_OF_ALL = (
    "--model.lora.rank 3 --model.lora.alpha 5 --model.lora.scale rslora --model.lora.targets *"
).split()
LORA = {  # words of train.py, the projections, the factor of B A x, what else trains
    "default": (("--model.lora.rank", "4", "--model.lora.alpha", "6"), ("attn.q", "attn.v"), 6 / 4, ()),
    "all": (WORDS_OF_ALL, tuple(THEIR_NAMES), 5 / 3**0.5, ()),
    "norms too": (
        ("--model.lora.targets", "attn.k,mlp.*", "--optim.groups", "norm: lr_factor 1"),
        ("attn.k", "mlp.gate", "mlp.up", "mlp.down"),
        1.0,
        ("norm",),
    ),
}
TOKENS = torch.arange(40)[None]


class LowRank(torch.nn.Module):
    """y = W x + s B A x. kept: the factor of x before A, if it has dropout."""

    def __init__(self, linear, a, b, scale):
        super().__init__()
        self.linear, self.scale, self.kept = linear, scale, None
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x):
        read = x if self.kept is None else x * self.kept
        return self.linear(x) + self.scale * ((read @ self.a.T) @ self.b.T)

    def merged(self):
        return self.linear.weight + self.scale * self.b @ self.a


def add_branches(model, targets, scale, matrix):
    """Give the model of transformers low-rank branches: {(layer, our name): branch}.

    matrix(layer, our name, "a" or "b"): their values.
    """
    branches = {}
    for layer in range(2):
        for name in targets:
            part, last = THEIR_NAMES[name].split(".")
            parent = model.get_submodule(f"model.layers.{layer}.{part}")
            a, b = (matrix(layer, name, which) for which in "ab")
            branches[layer, name] = LowRank(getattr(parent, last), a, b, scale)
            setattr(parent, last, branches[layer, name])
    return branches


@pytest.mark.parametrize("words, targets, scale, others", LORA.values(), ids=LORA)
def test_adapters_train_as_low_rank_branches_by_hand(home, words, targets, scale, others):
    name = f"lora-{len(targets)}"
    ours = train_ours(home, name, *words)

    def first(layer, target, which):
        value = ours.first[f"layers.{layer}.{target}.lora_{which}.weight"].clone()
        assert value.abs().max() <= value.shape[1] ** -0.5 and value.any() == (which == "a")
        return value

    model = load_theirs(home / "hf")
    branches = add_branches(model, targets, scale, first)
    left = [p for branch in branches.values() for p in (branch.a, branch.b)]
    left += [p for key, p in model.named_parameters() if any(word in key for word in others)]
    same_values(ours, train_theirs(model, ours.batches, left))
    assert ours.loss[-1] < ours.loss[0]

    merged = exported(home, name)
    for (layer, target), branch in branches.items():
        found = merged.get_parameter(f"model.layers.{layer}.{THEIR_NAMES[target]}.weight")
        torch.testing.assert_close(found, branch.merged(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


ONE_MASK = (("attn.q", "attn.k", "attn.v"), ("attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))  # of a layer


def test_adapters_read_what_dropout_leaves_in_training_alone(home, monkeypatch):
    """Beside branches by hand that get the masks of the run; all else reads whole inputs."""
    rate, drawn = 0.25, {}
    keep_mask = DropoutRng.keep_mask

    def watched(rng, site, *args):
        mask = keep_mask(rng, site, *args)
        drawn.setdefault(rng.step, {}).setdefault(site, []).append(mask)
        return mask

    monkeypatch.setattr(DropoutRng, "keep_mask", watched)
    ours = train_ours(home, "dropped", *WORDS_OF_ALL, "--model.lora.dropout", str(rate))
    of_sites = [masks for step in drawn.values() for masks in step.values()]
    assert [len(masks) for masks in of_sites] == [2] * STEPS * 2 * len(ONE_MASK)
    kept = torch.cat([mask.flatten() for masks in of_sites for mask in masks]).double().mean()
    assert kept == pytest.approx(1 - rate, abs=0.01)

    _, targets, scale, _ = LORA["all"]
    model = load_theirs(home / "hf")

    def first(layer, target, which):
        return ours.first[f"layers.{layer}.{target}.lora_{which}.weight"].clone()

    branches = add_branches(model, targets, scale, first)

    def drop(step):
        places = [(layer, names) for layer in range(2) for names in ONE_MASK]
        for (layer, names), masks in zip(places, list(drawn.values())[step - 1].values()):
            for name in names:
                branches[layer, name].kept = torch.cat(masks).double() / (1 - rate)

    left = [p for branch in branches.values() for p in (branch.a, branch.b)]
    same_values(ours, train_theirs(model, ours.batches, left, before=drop))


def values_of(world, argv, folder):
    """The loss and the gradient norm of each step of a run, on one of its ranks."""
    seen = []

    def watch(point, step=None, **what):
        if point == "step.end":
            seen.extend((float(what["loss"]), float(what["norm"])))

    assert trained(world, resolve(*split_argv(argv)), folder, watch) == 0
    return seen


@pytest.mark.parametrize("model, layout", [
    ("llama3-tiny --model.layers 2", "tp 2, sp true, recompute full"),
    pytest.param("llama3-tiny --model.layers 2", "tp 2, pp 2", marks=pytest.mark.slow),
    pytest.param("llama3-tiny --model.layers 2", "cp 2, zero 3", marks=pytest.mark.slow),
    pytest.param("deepseek-v3-tiny --model.mtp.modules 1", "tp 2, sp true, ep 2", marks=pytest.mark.slow),
    pytest.param("deepseek-v3-tiny --model.mtp.modules 1", "tp 2, cp 2, sp false", marks=pytest.mark.slow),
])
def test_layouts_drop_the_same(home, ranks, model, layout):
    name = f"{model.split()[0]}-{layout.replace(' ', '').replace(',', '-')}"
    words = [f"--parallel.{word.replace(' ', '=')}" for word in layout.split(", ")]
    argv = [*model.split(), *RUN, *WORDS_OF_ALL, "--model.lora.dropout", "0.3", "--train.micro_batch", "1",
            "--data.path", str(home / "text"), "--log.dir", str(home / "runs"), "--log.name"]
    alone = values_of(World(), [*argv, f"alone-{name}"], str(home / "runs" / f"alone-{name}"))
    for seen in ranks(4).run(values_of, [*argv, name, *words], str(home / "runs" / name)):
        assert seen == pytest.approx(alone, rel=1e-9)


def test_an_exported_adapter_has_pefts_names_and_the_logits_of_the_run(home):
    _, targets, scale, _ = LORA["all"]
    train_ours(home, "peft", *WORDS_OF_ALL, "--model.lora.dropout", "0.1")
    run, folder = str(home / "runs" / "peft"), home / "peft"
    assert convert.main(["to-hf", run, str(folder), "--adapter"]) == 0
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"], said["use_rslora"]) == ("LORA", 3, 5.0, True)
    assert said["base_model_name_or_path"] == str(home / "hf") and said["lora_dropout"] == 0.1
    assert set(said["target_modules"]) == {theirs.split(".")[1] for theirs in THEIR_NAMES.values()}

    tensors = load_file(folder / "adapter_model.safetensors")

    def stored(layer, target, which):
        path = f"base_model.model.model.layers.{layer}.{THEIR_NAMES[target]}"
        return tensors.pop(f"{path}.lora_{which.upper()}.weight").double()

    model = load_theirs(home / "hf")
    add_branches(model, targets, scale, stored)
    assert not tensors
    with InFp64(), torch.no_grad():
        theirs = model(TOKENS).logits
    logits = load_run(run, torch.device("cpu")).stage.logits(TOKENS, TOKENS)
    torch.testing.assert_close(theirs, logits, rtol=1e-5, atol=1e-6)
    assert generate.main([run, "--prompt", "ab", "--max-new-tokens", "3"]) == 0


WHOLE = {  # what PEFT writes beside the keys of peft_settings
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "megatron_config": None, "megatron_core": "megatron.core",
    "peft_version": "0.18.0", "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
    "target_parameters": None, "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
}


def write_peft(home, name, targets, *, base=None, dtype=torch.float64, drop=(), more=None, **settings):
    """A folder as PEFT writes it, with random matrices of rank 3 -> {(layer, our name, "a" or "b"): matrix}.

    drop: names of tensors that it lacks. more: {name: tensor} that it has besides. settings: other values.
    """
    folder = home / name
    folder.mkdir()
    torch.manual_seed(9)
    model = load_theirs(home / "hf")
    matrices, tensors = {}, {}
    for layer in range(2):
        for target in targets:
            module = f"model.layers.{layer}.{THEIR_NAMES[target]}"
            outputs, inputs = model.get_submodule(module).weight.shape
            for which, shape in (("a", (3, inputs)), ("b", (outputs, 3))):
                values = 0.1 * torch.randn(shape, dtype=dtype)
                matrices[layer, target, which] = values
                tensors[f"base_model.model.{module}.lora_{which.upper()}.weight"] = values
    tensors = {key: value for key, value in (tensors | (more or {})).items() if key not in drop}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base or home / "hf"),
        "r": 3, "lora_alpha": 5, "use_rslora": True, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [THEIR_NAMES[target].split(".")[1] for target in targets], "modules_to_save": None,
        "fan_in_fan_out": False, "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(WHOLE | said | settings))
    return matrices


def test_a_run_goes_on_from_a_folder_of_peft(home, ranks):
    """Beside branches by hand that begin with its matrices."""
    _, targets, scale, _ = LORA["all"]
    matrices = write_peft(home, "theirs", targets)
    ours = train_ours(home, "from-peft", *WORDS_OF_ALL, "--checkpoint.init_from", str(home / "theirs"))
    model = load_theirs(home / "hf")
    branches = add_branches(model, targets, scale, lambda *place: matrices[place].clone())
    left = [p for branch in branches.values() for p in (branch.a, branch.b)]
    same_values(ours, train_theirs(model, ours.batches, left))
    assert ours.loss[-1] < ours.loss[0]
    argv = [*WORDS, *WORDS_OF_ALL, "--checkpoint.init_from", str(home / "theirs"), "--parallel.tp", "2",
            "--data.path", str(home / "text"), "--log.dir", str(home / "runs"), "--log.name", "peft-tp2"]
    for seen in ranks(2).run(values_of, argv, str(home / "runs" / "peft-tp2")):
        assert seen[::2] == pytest.approx(ours.loss, rel=1e-9)
        assert seen[1::2] == pytest.approx(ours.norm, rel=1e-9)


def test_an_exported_adapter_is_read_bit_for_bit(home):
    """From a folder that we write, too, and beside the weights of its base."""
    words = ("--model.lora.rank", "3", "--model.lora.targets", "layers.1.attn.q,mlp.up")
    first = train_ours(home, "round", *words, "--train.dtype", "fp32")
    folder = home / "round-peft"
    assert convert.main(["to-hf", str(home / "runs" / "round"), str(folder), "--adapter"]) == 0
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 6 and all(value.any() for value in tensors.values())
    again = train_ours(home, "again", *words, "--train.dtype", "fp32", "--checkpoint.init_from", str(folder))
    for layer, name in ((1, "attn.q"), (0, "mlp.up"), (1, "mlp.up")):
        for which in "ab":
            stored = tensors.pop(
                f"base_model.model.model.layers.{layer}.{THEIR_NAMES[name]}.lora_{which.upper()}.weight")
            assert torch.equal(again.first[f"layers.{layer}.{name}.lora_{which}.weight"], stored)
    assert not tensors
    second = home / "again-peft"  # of the same base
    assert convert.main(["to-hf", str(home / "runs" / "again"), str(second), "--adapter"]) == 0
    ours, theirs = (json.loads((each / "adapter_config.json").read_text()) for each in (second, folder))
    assert ours == theirs and ours["base_model_name_or_path"] == str(home / "hf")
    for key, value in first.first.items():
        if "lora" not in key:  # frozen in both
            assert torch.equal(again.first[key], value), key


EXTRA = {"base_model.model.lm_head.lora_A.weight": torch.ones(3, 32)}
MODULE = "base_model.model.model.layers.1.self_attn.q_proj"
WRONG_ADAPTERS = {  # {id: (targets, what is wrong in the folder, words of the run, why)}
    "dora": ("q", {"use_dora": True}, (), "adapter_config.json: use_dora is True, and only False is read"),
    "saved": ("q", {"modules_to_save": ["lm_head"]}, (), "modules_to_save is ..lm_head.., and only"),
    "bias": ("q", {"bias": "all"}, (), "bias is 'all', and only 'none' is read"),
    "pissa": ("q", {"init_lora_weights": "pissa"}, (), "init_lora_weights is 'pissa', and only"),
    "no base": ("q", {"base": "nowhere"}, (), "path is 'nowhere', and no Hugging Face folder is there"),
    "rank": ("q", {"r": 0}, (), "adapter_config.json: r is 0, and should be a positive number"),
    "another rank": ("q", {}, ("--model.lora.rank", "4"), "model.lora.rank 3 there and 4 here"),
    "head": ("q", {"more": EXTRA}, (), "lm_head takes no adapter here; in the base .* these do: down_proj, "),
    "shape": ("q", {"r": 2}, (), r"lora_A.weight is torch.float64 \[3, 32\]; with r 2 .* of \[2, 32\]"),
    "half": ("q", {"drop": (f"{MODULE}.lora_B.weight",)}, (), "has .*lora_A.weight without its lora_B"),
    "other": ("q", {"more": {"x": torch.ones(1)}}, (), "safetensors: x is not a lora_A or lora_B"),
    "targets": ("q", {}, ("--model.lora.targets", "attn.v"), "lora.targets attn.q there and attn.v here"),
    "none": ("q", {}, ("--model.lora", "none"), "set --model.lora.rank 3 .* --model.lora.targets attn.q$"),
}


@pytest.mark.parametrize("case", WRONG_ADAPTERS)
def test_a_folder_of_peft_that_does_not_fit_is_refused_in_one_line(home, case):
    target, wrong, words, why = WRONG_ADAPTERS[case]
    write_peft(home, f"wrong-{case}", [f"attn.{target}"], **wrong)
    fits = ("--model.lora.rank", "3", "--model.lora.alpha", "5", "--model.lora.scale", "rslora",
            "--model.lora.targets", "attn.q")
    folder = ("--checkpoint.init_from", str(home / f"wrong-{case}"))
    with pytest.raises(ConfigError, match=why) as error:
        train_ours(home, "refused", *(fits if words[1:] != ("none",) else ()), *words, *folder)
    assert "\n" not in str(error.value)


def test_the_latents_of_attention_take_adapters(home):
    """Beside transformers' model with the merged weights; a token at a time, the run absorbs them."""
    model = "deepseek-v3-tiny --model.layers 2 --model.hidden 32 --model.mtp none --model.lora.targets *"
    place = {"data.path": home / "text", "log.dir": home / "runs", "log.name": "latents"}
    words = [word for key, value in place.items() for word in (f"--{key}", str(value))]
    cfg = resolve(*split_argv([*model.split(), *RUN, *words]))
    assert trained(World(), cfg, str(home / "runs" / "latents"), lambda *_, **what: None) == 0
    stage = load_run(str(home / "runs" / "latents"), torch.device("cpu"), "fp64").stage
    with torch.no_grad():
        logits = stage.logits(TOKENS, TOKENS)
        cache = GenerationCache()
        for place in range(TOKENS.shape[1]):
            one = TOKENS[:, place : place + 1]
            torch.testing.assert_close(stage.logits(one, one, cache=cache)[:, 0], logits[:, place])
            cache.length = place + 1
        model = exported(home, "latents")
        model.set_experts_implementation("eager")  # the grouped product has no fp64
        theirs = model(TOKENS).logits
    torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)


def test_a_run_with_adapters_resumes_bit_for_bit(home):
    words = (*LORA["default"][0], "--model.lora.dropout", "0.2")
    whole = train_ours(home, "lora-whole", *words)
    half = ("--checkpoint.every", "2", *words)
    with pytest.raises(Enough):
        train_ours(home, "lora-half", *half, last=3)
    again = train_ours(home, "lora-half", *half)
    assert again.loss == whole.loss[2:] and again.norm == whole.norm[2:]


REFUSED_ADAPTERS = {
    ("--model.lora.targets", "attn.q,head"): "targets: head names no part that takes .* do: attn.k, attn.o",
    ("--model.lora.rank", "2", "--model.mup.base", "16"): "model.lora: the rates of adapters under muP",
    ("--model.lora.rank", "2", "--log.noise_scale", "true"): "log.noise_scale: measures hidden matrices",
    ("--model.lora.rank", "2", "--optim.groups", "*: lr_factor 0"): "every parameter has lr_factor 0",
}


@pytest.mark.parametrize("words, why", REFUSED_ADAPTERS.items(), ids=list(REFUSED_ADAPTERS.values()))
def test_adapters_that_cannot_be_are_refused(home, words, why):
    with pytest.raises(ConfigError, match=why):
        train_ours(home, "refused", *words)
