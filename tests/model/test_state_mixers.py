"""Mixers with a state (delta rule, state space, short convolution) beside transformers' modules with the same
weights: outputs, and the gradient of each weight and of the input. And their caches, initial values, FLOPs.
"""

import importlib

import pytest
import torch
from small_runs import (
    DOCUMENT_LENGTHS,
    HIDDEN,
    build_config,
    check_beside,
    check_cache,
    compute_weights,
    forecast_run,
    mixer_weights,
)

from config import ConfigError
from config.reading.schedules import plan_pipeline
from model.flops import flops_of_parts

COMMON = {
    "model.layers": 1,
    "model.hidden": HIDDEN,
    "model.vocab": 50,
    "model.vocab_multiple": 1,
    "model.norm.eps": 1e-6,
    "train.dtype": "fp64",
}
DELTA = {"kind": "delta", "heads": 4, "key_heads": 2, "key_dim": 6, "v_dim": 8}
MIXERS = {
    "delta": DELTA,
    "kimi": {"kind": "kimi", "heads": 4, "dim": 6},
    "mamba": {"kind": "mamba", "heads": 4, "dim": 6, "groups": 2, "state": 10},
    "short_conv": {"kind": "short_conv"},
}
KEY, VALUE = 2 * 6, 4 * 8  # features of the delta rule
DOCUMENTS = torch.stack(
    [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENT_LENGTHS]
)


def settings_of(mixer, part="mixer", **more):
    return {**COMMON, **{f"model.{part}.{key}": value for key, value in mixer.items()}, **more}


# ---- beside transformers -----------------------------------------------------------------------------------


def qwen3_next(theirs, of):
    """Projections lie by key head: q, k, v and z of the first one, then of the second."""
    qkvz = of(theirs.in_proj_qkvz.weight).view(2, -1, HIDDEN).split([6, 6, 16, 16], 1)
    ba = of(theirs.in_proj_ba.weight).view(2, -1, HIDDEN).split([2, 2], 1)
    conv = of(theirs.conv1d.weight).split([KEY, KEY, VALUE])
    return {
        **{f"{name}.weight": x for name, x in zip("qkvzba", (*qkvz, *ba))},
        **{f"{name}_conv.weight": x for name, x in zip("qkv", conv)},
        **{name: of(getattr(theirs, name)) for name in ("A_log", "dt_bias")},
        "norm.weight": of(theirs.norm.weight),
        "o.weight": of(theirs.out_proj.weight),
    }


def olmo_hybrid(theirs, of):
    names = {**dict(zip("qkvabzo", (f"{letter}_proj" for letter in "qkvabgo"))), "norm": "o_norm"}
    conv = of(theirs.conv1d.weight).split([KEY, KEY, VALUE])
    return {
        **{f"{name}.weight": of(getattr(theirs, other).weight) for name, other in names.items()},
        **{f"{name}_conv.weight": x for name, x in zip("qkv", conv)},
        **{name: of(getattr(theirs, name)) for name in ("A_log", "dt_bias")},
    }


def kimi_linear(theirs, of):
    forget = theirs.forget_gate
    return {
        **{f"{name}.weight": of(getattr(theirs, f"{name}_proj").weight) for name in (*"qkvbo", "g_a", "g_b")},
        **{f"{name}.weight": of(getattr(forget, f"{name}_proj").weight) for name in ("f_a", "f_b")},
        **{f"{name}_conv.weight": x for name, x in zip("qkv", of(theirs.conv1d.weight).chunk(3))},
        **{name: of(getattr(forget, name)) for name in ("A_log", "dt_bias")},
        "norm.weight": of(theirs.o_norm.weight),
    }


def nemotron_h(theirs, of):
    theirs.time_step_limit = (0.0, float("inf"))
    projections = {"z": 24, "x": 24, "B": 20, "C": 20, "dt": 4}
    convolved = [projections[name] for name in "xBC"]
    return {
        **{
            f"{name}.weight": x
            for name, x in zip(projections, of(theirs.in_proj.weight).split([*projections.values()]))
        },
        **{f"{n}_conv.weight": x for n, x in zip("xBC", of(theirs.conv1d.weight).split(convolved))},
        **{f"{n}_conv.bias": x for n, x in zip("xBC", of(theirs.conv1d.bias).split(convolved))},
        **{name: of(getattr(theirs, name)) for name in ("A_log", "dt_bias", "D")},
        "norm.weight": of(theirs.norm.weight),
        "o.weight": of(theirs.out_proj.weight),
    }


def lfm2(theirs, of):
    return {
        **{f"{name}.weight": x for name, x in zip("BCx", of(theirs.in_proj.weight).chunk(3))},
        "conv.weight": of(theirs.conv.weight),
        "o.weight": of(theirs.out_proj.weight),
    }


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-6,
    "layers_block_type": ["mamba"],
}
OLMO = {
    "model.norm.eps": 1e-2,
    "model.mixer.norm_eps": 1e-5,
    "model.mixer.negative_eigenvalues": "true",
}
# parts: (our mixer, our other settings, their config and module, what is given to the config)
BESIDE = {
    qwen3_next: (
        "delta", {}, ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
        {**LINEAR, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "num_hidden_layers": 1},
    ),
    olmo_hybrid: (
        "delta", OLMO, ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet"),
        {**LINEAR, "num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-2,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    kimi_linear: (
        "kimi", {}, ("KimiLinearConfig", "KimiLinearDeltaAttention"),
        {"linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
         "num_hidden_layers": 1},
    ),
    nemotron_h: ("mamba", {}, ("NemotronHConfig", "NemotronHMamba2Mixer"), MAMBA),
    lfm2: (
        "short_conv", {}, ("Lfm2Config", "Lfm2ShortConv"),
        {"conv_L_cache": 3, "conv_bias": False, "num_hidden_layers": 1, "layer_types": ["conv"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=("whole", "documents"))
@pytest.mark.parametrize("parts", BESIDE, ids=lambda parts: parts.__name__)
def test_a_mixer_is_that_of_transformers(parts, documents):
    """Theirs computes within the rule in fp32."""
    mixer, more, (config, module), sizes = BESIDE[parts]
    folder = f"transformers.models.{parts.__name__}"
    modeling = importlib.import_module(f"{folder}.modeling_{parts.__name__}")
    configuration = importlib.import_module(f"{folder}.configuration_{parts.__name__}")
    their_config = getattr(configuration, config)(hidden_size=HIDDEN, **sizes)
    theirs = getattr(modeling, module)(their_config, 0).double()
    run = forecast_run("llama2-tiny", settings_of(MIXERS[mixer], **more))
    check_beside(run, theirs, lambda of: parts(theirs, of), documents=documents)


# ---- one process -------------------------------------------------------------------------------------------

# elements that a layer keeps: its state, and inputs of its convolutions
KEPT = {
    "delta": 4 * 6 * 8 + 3 * (2 * KEY + VALUE),
    "mamba": 4 * 6 * 10 + 3 * (24 + 20 + 20),
    "short_conv": 2 * HIDDEN,
}


@pytest.mark.parametrize("name", KEPT)
def test_the_cache_changes_nothing_and_does_not_grow(name):
    beside = {"model.layers": 4, "model.context": 128, "model.pattern": "(3 linear, block)..."}
    run = forecast_run("llama2-tiny", settings_of(MIXERS[name], part="blocks.linear.mixer", **beside))
    for kept in check_cache(run.stages[0], (0, 1, 2, 4, 70, 71, 90)):
        elements = [sum(x.numel() for (at, _), x in kept.items() if at == layer) for layer in range(3)]
        assert elements == [KEPT[name]] * 3


def test_initial_decays_and_steps_of_the_delta_rule_are_those_of_the_papers():
    run = forecast_run("llama2-tiny", settings_of({**DELTA, "heads": 512}), spread=0.0)
    w = mixer_weights(compute_weights(run))
    rate, step = w["A_log"].exp(), torch.nn.functional.softplus(w["dt_bias"])
    assert 1 <= rate.min() < 1.5 and 15.5 < rate.max() <= 16 and 7.5 < rate.mean() < 9.5
    assert 1e-3 <= step.min() * 1.001 and step.max() <= 0.1001 and 0.007 < step.median() < 0.014
    assert w["q_conv.weight"].std() == pytest.approx(1 / 12**0.5, rel=0.3)


def test_flops_of_the_delta_rule_are_those_of_matrices_and_chunks():
    """A chunk of 64 tokens is multiplied, however long a sequence is: per token and head, products with
    the keys of the chunk, with the state and with what was written.
    """
    cfg = build_config("llama2-tiny", settings_of(DELTA))
    short, long = (flops_of_parts(cfg.model, (n,), n)[1] for n in (64, 640))
    assert short == long
    matrices = 2 * HIDDEN * (2 * KEY + 2 * VALUE + 8 + VALUE) + 2 * 3 * HIDDEN * cfg.model.mlp.width
    per_head = 2 * (2 * 64 * 6 + 64 + 64 * 8 + 3 * 6 * 8)
    assert short == pytest.approx(matrices + 4 * per_head, rel=1e-12)


def test_a_layout_that_cannot_divide_the_key_heads_is_refused():
    cfg = build_config("llama2-tiny", settings_of(DELTA) | {"model.mlp.width": 48, "parallel.tp": 4})
    with pytest.raises(ConfigError, match="parallel.tp: 4 does not divide model.mixer.key_heads=2"):
        plan_pipeline(cfg, 4)
