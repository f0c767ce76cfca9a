"""The state space mixer and the gated short convolution beside transformers' modules, with the same weights:
outputs, and the gradient of each weight and of the input; and their caches."""

import pytest
import torch
from test_delta import DOCUMENTS, HIDDEN, SETTINGS, S, made_of, run_both, weights_and_gradients

from model.context import GenerationCache

COMMON = {key: value for key, value in SETTINGS.items() if "mixer" not in key}
MIXERS = {
    "mamba": {"kind": "mamba", "heads": 4, "dim": 6, "groups": 2, "state": 10},
    "short_conv": {"kind": "short_conv"},
}


def made(name, part="mixer", **settings):
    keys = {f"model.{part}.{key}": value for key, value in MIXERS[name].items()}
    return made_of({**COMMON, **keys, **settings})


def same_gradients(run, want):
    found = weights_and_gradients(run)
    assert found.keys() == want.keys()
    for key, (_, gradient) in found.items():
        bound = 3e-5 * float(want[key].abs().max())
        torch.testing.assert_close(gradient, want[key].view(gradient.shape), rtol=0, atol=bound, msg=key)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=("whole", "documents"))
def test_mamba_is_that_of_nemotron_h(documents):
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    run = made("mamba")
    settings = NemotronHConfig(
        hidden_size=HIDDEN,
        mamba_num_heads=4,
        mamba_head_dim=6,
        n_groups=2,
        ssm_state_size=10,
        conv_kernel=4,
        layer_norm_epsilon=1e-6,
        layers_block_type=["mamba"],
    )
    theirs = NemotronHMamba2Mixer(settings, 0).double()
    theirs.time_step_limit = (0.0, float("inf"))
    w = {key: value for key, (value, _) in weights_and_gradients(run).items()}
    plain = {
        "A_log": theirs.A_log,
        "dt_bias": theirs.dt_bias,
        "D": theirs.D,
        "norm.weight": theirs.norm.weight,
        "o.weight": theirs.out_proj.weight,
    }
    projections = {"z": 24, "x": 24, "B": 20, "C": 20, "dt": 4}
    convolved = {name: projections[name] for name in "xBC"}
    with torch.no_grad():
        for key, weight in plain.items():
            weight.copy_(w[key])
        theirs.in_proj.weight.copy_(torch.cat([w[f"{name}.weight"] for name in projections]))
        theirs.conv1d.weight.copy_(torch.cat([w[f"{name}_conv.weight"] for name in convolved])[:, None])
        theirs.conv1d.bias.copy_(torch.cat([w[f"{name}_conv.bias"] for name in convolved]))
    run_both(run, theirs, documents)

    want = {key: weight.grad for key, weight in plain.items()}
    parts = theirs.in_proj.weight.grad.split([*projections.values()])
    want |= {f"{name}.weight": x for name, x in zip(projections, parts)}
    for key, grad in (("weight", theirs.conv1d.weight.grad[:, 0]), ("bias", theirs.conv1d.bias.grad)):
        want |= {f"{name}_conv.{key}": x for name, x in zip(convolved, grad.split([*convolved.values()]))}
    same_gradients(run, want)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=("whole", "documents"))
def test_the_gated_short_convolution_is_that_of_lfm2(documents):
    from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    run = made("short_conv")
    settings = Lfm2Config(hidden_size=HIDDEN, conv_L_cache=3, conv_bias=False, num_hidden_layers=1,
                          layer_types=["conv"])
    theirs = Lfm2ShortConv(settings, 0).double()
    w = {key: value for key, (value, _) in weights_and_gradients(run).items()}
    with torch.no_grad():
        theirs.in_proj.weight.copy_(torch.cat([w[f"{name}.weight"] for name in "BCx"]))
        theirs.conv.weight.copy_(w["conv.weight"][:, None])
        theirs.out_proj.weight.copy_(w["o.weight"])
    run_both(run, theirs, documents)

    parts = theirs.in_proj.weight.grad.chunk(3)
    same_gradients(run, {
        **{f"{name}.weight": x for name, x in zip("BCx", parts)},
        "conv.weight": theirs.conv.weight.grad[:, 0],
        "o.weight": theirs.out_proj.weight.grad,
    })


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_the_cache_changes_nothing_and_does_not_grow(name):
    beside = {"model.layers": 4, "model.context": 128, "model.pattern": "(3 linear, block)..."}
    stage = made(name, part="blocks.linear.mixer", **beside).stages[0]
    ids = torch.randint(50, (1, S), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(S)[None]
    whole = stage.logits(ids, positions)
    cache, sizes = GenerationCache(), set()
    for first, last in ((0, 1), (1, 2), (2, 70), (70, 71), (71, 72), (72, S)):
        got = stage.logits(ids[:, first:last], positions[:, first:last], cache=cache)
        cache.length = last
        torch.testing.assert_close(got, whole[:, first:last], rtol=1e-9, atol=1e-10)
        sizes.add(sum(x.numel() for (layer, _), x in cache.kept.items() if layer < 3))
    assert len(sizes) == 1
