"""Mixers with the delta rule beside transformers' modules, with the same weights: outputs, and the gradient
of each weight and of the input. Theirs compute within the rule in fp32."""

import pytest
import torch

from build import build_run
from config import ConfigError
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from model.context import GenerationCache, forward_context
from model.flops import flops_of_parts
from parallel.sharding.views import boxes_of
from parallel.topology.mesh import Mesh

S, HIDDEN = 90, 32
SETTINGS = {
    "model.layers": 1,
    "model.hidden": HIDDEN,
    "model.vocab": 50,
    "model.vocab_multiple": 1,
    "model.norm.eps": 1e-6,
    "model.mixer.kind": "delta",
    "model.mixer.heads": 4,
    "model.mixer.key_heads": 2,
    "model.mixer.key_dim": 6,
    "model.mixer.v_dim": 8,
    "train.dtype": "fp64",
}
KEY, VALUE = 2 * 6, 4 * 8  # features


def made_of(settings):
    """A run whose tensors are far from their initial values."""
    words = [f"--{key}={value}" for key, value in settings.items()]
    run = build_run(resolve("llama2-tiny", None, words), Mesh.single(), torch.device("cpu"), None, 1)
    for number, param in enumerate(run.stages[0].parameters()):
        numbers = torch.Generator().manual_seed(number)
        param.data.add_(0.3 * torch.randn(param.shape, generator=numbers, dtype=param.dtype))
    return run


def weights_and_gradients(run):
    """{name within the mixer: (weight, gradient)} after a backward."""
    start = "layers.0.attn."
    values, grads = {}, {}
    for bucket in run.buckets:
        values |= {box.key: x for box, x in boxes_of(bucket, bucket.weights.master)}
        grads |= {box.key: x for box, x in boxes_of(bucket, bucket.grads.local)}
    return {
        key.removeprefix(start): (value, grads[key]) for key, value in values.items() if key.startswith(start)
    }


def run_both(run, theirs, documents=None):
    """The outputs of our mixer and of theirs(x of one document), and the gradients of the input."""
    stream = torch.Generator().manual_seed(5)
    x = torch.randn(2, S, HIDDEN, generator=stream, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, S, HIDDEN, generator=stream, dtype=torch.float64)
    positions = torch.arange(S).expand(2, S)
    ours = run.stages[0].blocks[0].attn(x, forward_context(run.cfg, positions, documents))
    ours.backward(upstream)
    ours_dx = x.grad.clone()
    x.grad = None

    rows = []
    for row in range(2):
        lengths = [S]
        if documents is not None:
            lengths = documents[row].unique_consecutive(return_counts=True)[1].tolist()
        parts = [theirs(part) for part in x[row : row + 1].split(lengths, 1)]
        rows.append(torch.cat(parts, 1))
    other = torch.cat(rows)
    other.backward(upstream)
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=3e-5)
    torch.testing.assert_close(ours_dx, x.grad, rtol=1e-4, atol=3e-5)


def documents_of(lengths):
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


DOCUMENTS = documents_of([(1, 40, 2, 47), (65, 25)])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=("whole", "documents"))
def test_gated_delta_net_is_that_of_qwen3_next(documents):
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    run = made_of(SETTINGS)
    settings = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
    )
    theirs = Qwen3NextGatedDeltaNet(settings, 0).double()
    w = {key: value for key, (value, _) in weights_and_gradients(run).items()}
    by_key_head = [w[f"{name}.weight"].view(2, -1, HIDDEN) for name in "qkvz"]
    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(torch.cat(by_key_head, 1).flatten(0, 1))
        numbers = [w[f"{name}.weight"].view(2, -1, HIDDEN) for name in "ba"]
        theirs.in_proj_ba.weight.copy_(torch.cat(numbers, 1).flatten(0, 1))
        theirs.conv1d.weight.copy_(torch.cat([w[f"{name}_conv.weight"] for name in "qkv"])[:, None])
        theirs.A_log.copy_(w["A_log"])
        theirs.dt_bias.copy_(w["dt_bias"])
        theirs.norm.weight.copy_(w["norm.weight"])
        theirs.out_proj.weight.copy_(w["o.weight"])
    run_both(run, theirs, documents)

    ours = {key: gradient for key, (_, gradient) in weights_and_gradients(run).items()}
    sizes = [6, 6, 16, 16]
    qkvz = theirs.in_proj_qkvz.weight.grad.view(2, -1, HIDDEN).split(sizes, 1)
    ba = theirs.in_proj_ba.weight.grad.view(2, -1, HIDDEN).split([2, 2], 1)
    conv = theirs.conv1d.weight.grad[:, 0].split([KEY, KEY, VALUE])
    want = {
        **{f"{name}.weight": x.flatten(0, 1) for name, x in zip("qkvzba", (*qkvz, *ba))},
        **{f"{name}_conv.weight": x for name, x in zip("qkv", conv)},
        "A_log": theirs.A_log.grad,
        "dt_bias": theirs.dt_bias.grad,
        "norm.weight": theirs.norm.weight.grad,
        "o.weight": theirs.out_proj.weight.grad,
    }
    assert ours.keys() == want.keys()
    for key, gradient in want.items():
        bound = 3e-5 * float(gradient.abs().max())
        torch.testing.assert_close(ours[key], gradient, rtol=0, atol=bound, msg=key)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=("whole", "documents"))
def test_negative_eigenvalues_and_another_eps_are_those_of_olmo_hybrid(documents):
    from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    run = made_of({
        **SETTINGS, "model.norm.eps": 1e-2, "model.mixer.norm_eps": 1e-5,
        "model.mixer.negative_eigenvalues": "true",
    })
    theirs = OlmoHybridGatedDeltaNet(OlmoHybridConfig(
        hidden_size=HIDDEN, num_attention_heads=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=8, num_hidden_layers=2, rms_norm_eps=1e-2,
        layer_types=["linear_attention", "full_attention"],
    ), 0).double()
    names = {**dict(zip("qkvabzo", (f"{letter}_proj" for letter in "qkvabgo"))), "norm": "o_norm"}
    w = weights_and_gradients(run)
    theirs.conv1d.weight.data.copy_(torch.cat([w[f"{name}_conv.weight"][0] for name in "qkv"])[:, None])
    theirs.A_log.data.copy_(w["A_log"][0])
    theirs.dt_bias.data.copy_(w["dt_bias"][0])
    for name, other in names.items():
        getattr(theirs, other).weight.data.copy_(w[f"{name}.weight"][0])
    run_both(run, theirs, documents)

    conv = theirs.conv1d.weight.grad[:, 0].split([KEY, KEY, VALUE])
    want = {
        **{f"{name}.weight": getattr(theirs, other).weight.grad for name, other in names.items()},
        **{f"{name}_conv.weight": x for name, x in zip("qkv", conv)},
        "A_log": theirs.A_log.grad,
        "dt_bias": theirs.dt_bias.grad,
    }
    found = weights_and_gradients(run)
    assert found.keys() == want.keys()
    for key, (_, gradient) in found.items():
        bound = 3e-5 * float(want[key].abs().max())
        torch.testing.assert_close(gradient, want[key], rtol=0, atol=bound, msg=key)


BESIDE_ATTENTION = {
    **{key: value for key, value in SETTINGS.items() if not key.startswith("model.mixer")},
    **{key.replace("mixer", "blocks.linear.mixer"): v for key, v in SETTINGS.items() if "mixer" in key},
    "model.layers": 4,
    "model.context": 128,
    "model.pattern": "(3 linear, block)...",
}


@torch.no_grad()
def test_the_cache_changes_nothing_and_does_not_grow():
    stage = made_of(BESIDE_ATTENTION).stages[0]
    ids = torch.randint(50, (1, S), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(S)[None]
    whole = stage.logits(ids, positions)
    cache, sizes = GenerationCache(), set()
    for first, last in ((0, 2), (2, 3), (3, 70), (70, 71), (71, 72), (72, S)):
        got = stage.logits(ids[:, first:last], positions[:, first:last], cache=cache)
        cache.length = last
        torch.testing.assert_close(got, whole[:, first:last], rtol=1e-9, atol=1e-10)
        sizes.add(sum(x.numel() for (layer, _), x in cache.kept.items() if layer < 3))
    assert sizes == {3 * (4 * 6 * 8 + 3 * (2 * KEY + VALUE))}


def test_initial_values_are_those_of_the_papers():
    words = [f"--{key}={value}" for key, value in (SETTINGS | {"model.mixer.heads": 512}).items()]
    run = build_run(resolve("llama2-tiny", None, words), Mesh.single(), torch.device("cpu"), None, 1)
    w = {key: value for key, (value, _) in weights_and_gradients(run).items()}
    rate, step = w["A_log"].exp(), torch.nn.functional.softplus(w["dt_bias"])
    assert 1 <= rate.min() < 1.5 and 15.5 < rate.max() <= 16 and 7.5 < rate.mean() < 9.5
    assert 1e-3 <= step.min() * 1.001 and step.max() <= 0.1001 and 0.007 < step.median() < 0.014
    assert w["q_conv.weight"].std() == pytest.approx(1 / 12**0.5, rel=0.3)


def test_flops_are_those_of_matrices_and_chunks():
    """A chunk of 64 tokens is multiplied, however long a sequence is: per token and head, products with
    the keys of the chunk, with the state and with what was written."""
    cfg = resolve("llama2-tiny", None, [f"--{key}={value}" for key, value in SETTINGS.items()])
    short, long = (flops_of_parts(cfg.model, (n,), n)[1] for n in (64, 640))
    assert short == long
    matrices = 2 * HIDDEN * (2 * KEY + 2 * VALUE + 8 + VALUE) + 2 * 3 * HIDDEN * cfg.model.mlp.width
    per_head = 2 * (2 * 64 * 6 + 64 + 64 * 8 + 3 * 6 * 8)
    assert short == pytest.approx(matrices + 4 * per_head, rel=1e-12)


def test_a_layout_that_cannot_divide_it_is_refused():
    words = [f"--{key}={value}" for key, value in SETTINGS.items()]
    cfg = resolve("llama2-tiny", None, [*words, "--model.mlp.width=48", "--parallel.tp=4"])
    with pytest.raises(ConfigError, match="parallel.tp: 4 does not divide model.mixer.key_heads=2"):
        plan_pipeline(cfg, 4)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=("whole", "documents"))
def test_kimi_delta_attention_is_that_of_kimi_linear(documents):
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    kimi = {"model.mixer.kind": "kimi", "model.mixer.heads": 4, "model.mixer.dim": 6}
    dropped = ("model.mixer.key_heads", "model.mixer.key_dim", "model.mixer.v_dim")
    run = made_of({key: value for key, value in (SETTINGS | kimi).items() if key not in dropped})
    settings = KimiLinearConfig(
        hidden_size=HIDDEN,
        linear_num_heads=4,
        linear_head_dim=6,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
    )
    theirs = KimiLinearDeltaAttention(settings, 0).double()
    forget, numbers = theirs.forget_gate, ("f_a", "f_b")
    matrices = {
        **{f"{name}.weight": getattr(theirs, f"{name}_proj").weight for name in (*"qkvbo", "g_a", "g_b")},
        **{f"{name}.weight": getattr(forget, f"{name}_proj").weight for name in numbers},
        "A_log": forget.A_log,
        "dt_bias": forget.dt_bias,
        "norm.weight": theirs.o_norm.weight,
    }
    w = {key: value for key, (value, _) in weights_and_gradients(run).items()}
    assert w.keys() == matrices.keys() | {f"{name}_conv.weight" for name in "qkv"}
    with torch.no_grad():
        for key, weight in matrices.items():
            weight.copy_(w[key].view(weight.shape))
        theirs.conv1d.weight.copy_(torch.cat([w[f"{name}_conv.weight"] for name in "qkv"])[:, None])
    run_both(run, theirs, documents)

    conv = theirs.conv1d.weight.grad[:, 0].chunk(3)
    want = {key: weight.grad for key, weight in matrices.items()}
    want |= {f"{name}_conv.weight": x for name, x in zip("qkv", conv)}
    for key, (_, gradient) in weights_and_gradients(run).items():
        bound = 3e-5 * float(want[key].abs().max())
        torch.testing.assert_close(gradient, want[key].view(gradient.shape), rtol=0, atol=bound, msg=key)
