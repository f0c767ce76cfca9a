"""muP: initial values and learning rates, by torch's AdamW and by hand; nothing changes at the width of the
base; an export holds its factors; a coordinate check that can fail. That layouts change nothing is verify's.
"""

import json
from dataclasses import replace

import pytest
import torch

import build
from checkpoint.hf import tensors as hf
from checkpoint.trained import weights_only
from config import OPTIMIZERS, ConfigError, MupConfig, ParallelConfig, layer_models
from config.reading.tiny import tiny_config
from lab.proof import mup as coord
from lab.proof.verify.tiny_config import placed, write_corpora
from lab.proof.verify.trial import reference_values, single_process
from model import head as loss
from model.router import ExpertsConfig, with_mlps
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh

CPU = torch.device("cpu")
LR, DECAY, M = 0.01, 0.1, 4.0


def without_jitter(mlp):
    if not isinstance(mlp, ExpertsConfig):
        return mlp
    return replace(mlp, router=replace(mlp.router, jitter=0.0))


def wide(name, base=8, head_dim=None, **more):
    """tiny_config's hidden is 32: four times the base."""
    cfg = tiny_config(name)
    mup = MupConfig(base=base, head_dim=head_dim) if base else None
    return replace(cfg, model=replace(with_mlps(cfg.model, without_jitter), mup=mup, dropout=0.0, **more))


def made(cfg):
    return build.build_run(cfg, Mesh.single(), CPU, None, 10)


def whole(run, flat=lambda b: b.weights.master):
    return {box.key: part.clone() for b in run.buckets for box, part in get_boxes(b, flat(b))}


READ = (".router.", "_gate.", ".f_a.", ".g_a.")  # from the hidden state to a fixed number of outputs
SAME = (".embed.", ".positions.", ".head.", "_conv.", ".conv.", ".f_b.", ".g_b.")


def kind(key, w):
    if w.dim() == 1 or any(part in f".{key}" for part in SAME):
        return "same"
    return "read" if any(part in key for part in READ) else "hidden"


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "qwen2-moe-tiny", "deepseek-v3-tiny", "kimi-delta-tiny", "mamba-tiny"]
)
def test_each_kind_of_tensor_starts_as_the_paper_says(name):
    plain, mup = (whole(made(wide(name, base))) for base in (None, 8))
    seen = set()
    for key, w in plain.items():
        seen.add(kind(key, w))
        want = w / {"same": 1.0, "hidden": M**0.5, "read": M}[kind(key, w)]
        torch.testing.assert_close(mup[key], want, rtol=1e-12, atol=0, msg=key)
    assert seen == {"same", "hidden"} | (set() if name in ("gpt2-tiny", "mamba-tiny") else {"read"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-moe-tiny", "gpt2-tiny"])
def test_adamw_is_torchs_with_scaled_rates_and_the_decay_of_the_base(name):
    cfg = wide(name)
    run = made(replace(cfg, optim=replace(cfg.optim, weight_decay=DECAY, eps=1e-8)))
    params = {k: torch.nn.Parameter(w) for k, w in whole(run).items()}
    rate = {k: 1.0 if kind(k, p) == "same" else 1 / M for k, p in params.items()}
    groups = [
        {"params": [p], "lr": LR * rate[k], "weight_decay": DECAY / rate[k] if p.dim() > 1 else 0.0}
        for k, p in params.items()
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    stream = torch.Generator().manual_seed(3)
    for step in (1, 2, 3):
        for b in run.buckets:
            b.grads.local.normal_(generator=stream)
        for k, g in whole(run, lambda b: b.grads.local).items():
            params[k].grad = g
        theirs.step()
        run.optim.step(step, LR, torch.tensor(1.0, dtype=torch.float64), torch.tensor(True))
    for k, w in whole(run).items():
        torch.testing.assert_close(w, params[k].detach(), rtol=1e-12, atol=1e-14, msg=k)


@pytest.mark.parametrize("model", ["mixtral-tiny", "kimi-delta-tiny"])
@pytest.mark.parametrize("name, power", [("lion", 1.0), ("muon", 0.5), ("normuon", 0.5), ("dion", 0.5)])
def test_lion_and_muon_move_a_hidden_matrix_by_their_share(name, power, model):
    """One step from the same weights, gradients and momentum, without decay: the plain one over m^power."""
    moved = {}
    for base in (None, 8):
        cfg = wide(model, base)
        run = made(replace(cfg, optim=replace(cfg.optim, name=name, weight_decay=0.0, eps=1e-12)))
        stream = torch.Generator().manual_seed(3)
        grads = {}
        for key, w in sorted(whole(run).items()):
            grads[key] = torch.randn(w.shape, generator=stream, dtype=w.dtype)
        for b in run.buckets:
            for box, part in get_boxes(b, b.grads.local):
                part.copy_(grads[box.key].view(part.shape))
        before = whole(run)
        run.optim.step(1, LR, torch.tensor(1.0, dtype=torch.float64), torch.tensor(True))
        moved[base] = {k: w - before[k] for k, w in whole(run).items()}
    for k, change in moved[None].items():
        share = {"same": 1.0, "hidden": M**-power, "read": 1 / M}[kind(k, change)]
        torch.testing.assert_close(moved[8][k], change * share, rtol=1e-6, atol=1e-12, msg=k)


@pytest.mark.slow
def test_at_the_bases_width_every_bit_is_the_same(tmp_path):
    write_corpora(tmp_path)
    for name in ("mixtral-tiny", "gpt2-tiny"):
        without, base = (
            reference_values(placed(single_process(wide(name, width)), tmp_path, f"{name}-{width}"), tmp_path)
            for width in (None, 32)
        )
        assert without.keys() == base.keys() and all(torch.equal(without[k], base[k]) for k in without)


def filled(cfg):
    """A stage in fp64 with random weights, norms and biases too."""
    stage, pieces = weights_only(replace(cfg, parallel=ParallelConfig()), CPU, "fp64")
    stream = torch.Generator().manual_seed(5)
    for _, t in pieces:
        t.copy_(0.5 * torch.randn(t.shape, generator=stream, dtype=t.dtype) + (t.dim() == 1))
    return stage, pieces


TOKENS = torch.randint(125, (2, 20), generator=torch.Generator().manual_seed(0))
PLACES = torch.arange(20).expand(2, 20)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", [
    "llama3-tiny",
    "gpt2-tiny",
    "qwen3-tiny",
    "qwen2.5-tiny",
    "mixtral-tiny",
    "deepseek-v3-tiny",
    "deepseek-v2-lite-tiny",
    "olmoe-tiny",
    "gpt-oss-tiny",
])
def test_an_export_holds_the_factors(name):
    """A plain model with the folded weights computes what the muP model does; folding back restores them."""
    cfg = wide(name, head_dim=3)
    stage, pieces = filled(cfg)
    before = [t.clone() for _, t in pieces]
    ours = stage.logits(TOKENS, PLACES)
    plain, theirs = weights_only(replace(cfg, model=replace(cfg.model, mup=None)), CPU, "fp64")
    hf.fold_mup(cfg.model, pieces)
    for (box, t), (other, source) in zip(theirs, pieces, strict=True):
        assert box.key == other.key
        t.copy_(source)
    torch.testing.assert_close(plain.logits(TOKENS, PLACES), ours, rtol=1e-9, atol=1e-9)
    hf.fold_mup(cfg.model, pieces, undo=True)
    assert all(torch.allclose(t, b, rtol=1e-14) for (_, t), b in zip(pieces, before))
    for (_, t), b in zip(theirs, before):
        t.copy_(b)
    assert (plain.logits(TOKENS, PLACES) - ours).abs().max() > 0.1  # the factors do something


def test_factors_that_no_folder_can_hold_are_refused():
    cases = {
        "^model.mup: .*multi-token": wide("deepseek-v3-tiny", tied=True),
        "^model.mup.head_dim: .*qk_norm unweighted": wide("llama4-tiny", head_dim=3),
    }
    for line, cfg in cases.items():
        with pytest.raises(ConfigError, match=line) as e:
            hf.fold_mup(cfg.model, [])
        assert "\n" not in str(e.value)
    hf.fold_mup(wide("llama4-tiny").model, [])


def test_the_role_of_a_matrix_gives_its_std_and_rate():
    def matrix(role):
        return ParameterSpec((Box.whole("w", (4, 6)),), role, 0.02)

    assert matrix("hidden").with_mup(16, 1) == replace(matrix("hidden"), std=0.005, lr_factor=1 / 16)
    assert matrix("hidden").with_mup(16, 0.5).lr_factor == 0.25
    for role in ("router", "gate", "narrowing"):
        assert matrix(role).with_mup(16, 0.5).lr_factor == 1 / 16
    for role in ("embedding", "positions", "head", "norm", "bias", "convolution", "widening"):
        assert matrix(role).with_mup(16, 1) == matrix(role)
    for role in ("hidden", "narrowing", "widening"):
        assert matrix(role).is_hidden_matrix  # what Muon takes, with muP and without


# ---- the coordinate check ----------------------------------------------------------------------------------

WIDTHS = (64, 128, 256)


@pytest.fixture(scope="module")
def standard():
    return coord.rows(coord.config.reading.resolve("llama-mini", None, []), WIDTHS, False)


def judged(standard, name="llama-mini"):
    return coord.verdict(standard, coord.rows(coord.config.reading.resolve(name, None, []), WIDTHS, True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-mini", "mixtral-tiny", "deepseek-v3-tiny"])
def test_coordinates_stay(standard, name):
    assert judged(standard, name) == []


def with_mixer(kind, **sizes):
    sizes = {"kind": kind, **sizes}
    words = [word for name, size in sizes.items() for word in (f"--model.mixer.{name}", str(size))]
    return coord.config.reading.resolve("llama-mini", None, words)


MIXERS = {
    "delta": (with_mixer("delta", heads=4, key_heads=2), {"features", "numbers"}),
    "kimi": (with_mixer("kimi", heads=4), {"features", "numbers", "low_rank", "gates"}),
    "mamba": (with_mixer("mamba", heads=4, groups=2), {"features", "numbers"}),
    "short_conv": (with_mixer("short_conv"), set()),
}
SEEN = {"embedding", "state", "mlp", "residual", "logits"}


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("mixer", MIXERS)
def test_coordinates_of_a_mixer_with_a_state_stay(mixer):
    """And grow in the standard parametrization, each kind of them."""
    cfg, inside = MIXERS[mixer]
    widths = coord.WIDTHS[:4]
    found = {mup: coord.rows(cfg, widths, mup) for mup in (False, True)}
    assert {row.kind for row in found[True]} == SEEN | inside
    assert coord.verdict(found[False], found[True]) == []
    wrong = {row.kind for row in found[False] if row.wrong and row.what == "change"}
    assert wrong == (SEEN | inside) - {"embedding"}


@pytest.mark.slow
def test_coordinates_of_a_pattern_stay():
    """Of a pattern of two mixers: a kind of block states its own, which widens as the model's does."""
    cfg = coord.config.reading.resolve("delta-tiny", None, [])
    for width in WIDTHS:
        model = coord.widened(cfg, width, True, WIDTHS[0]).model
        kinds = layer_models(model)
        assert {like.mixer.heads for like in kinds.values()} == {width // coord.HEAD_DIM}
        assert model.layers == 4 and len(kinds) == 2
        assert kinds["linear"].mixer.key_heads == kinds["block"].mixer.kv_heads == width // 32
    found = [coord.rows(cfg, WIDTHS, mup) for mup in (False, True)]
    assert coord.verdict(*found) == []
    assert {"attention", "state"} <= {row.kind for row in found[1]}


def test_a_full_recipe_is_shortened_to_its_kinds_of_blocks(monkeypatch, capsys):
    """The pattern of LFM2 does not repeat: three of its 16 layers have a convolution and attention."""
    assert not coord.config.reading.resolve("lfm2-1.2b", None, []).model.pattern.endswith("...")
    monkeypatch.setattr(coord, "WIDTHS", WIDTHS)
    assert coord.check("lfm2-1.2b") == 0
    assert "lfm2-1.2b: 3 layers (2 conv, block...), 8 steps" in capsys.readouterr().out
    monkeypatch.setattr(coord, "WIDTHS", (64, 128))
    coord.check("lfm2-1.2b", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["layers"], said["pattern"]) == (3, "2 conv, block...")
    assert {"attention", "state"} <= {row["kind"] for row in said["muP"]}


def test_every_recipe_keeps_its_kinds_of_blocks():
    for name in coord.config.reading.presets():
        cfg = coord.config.reading.resolve(name, None, [])
        kinds, found = coord.config.layer_kinds(cfg.model), coord.widened(cfg, 64, True, 64).model
        kept = coord.config.layer_kinds(found)
        assert {*kept} == {*kinds} and len(kept) <= 8, name
        assert kept in (kinds[:len(kept)], tuple(dict.fromkeys(kinds))), name


@pytest.mark.slow
def test_gates_that_take_a_rank_for_a_width_are_seen(monkeypatch):
    """Kimi's low-rank matrices as if they were between hidden features: what the gates learn vanishes."""
    with_mup = ParameterSpec.with_mup

    def as_hidden(spec, *ratios):
        role = "hidden" if spec.is_hidden_matrix else spec.role
        return with_mup(replace(spec, role=role), *ratios)

    monkeypatch.setattr(ParameterSpec, "with_mup", as_hidden)
    wrong = [row.wrong for row in coord.rows(MIXERS["kimi"][0], WIDTHS, True) if row.wrong]
    assert any("change of gates" in line for line in wrong)


@pytest.mark.parametrize("power, wrong", [(0.0, "change of mlp"), (2.0, "change of attention")])
def test_a_rate_that_does_not_fall_or_falls_too_fast_is_seen(standard, monkeypatch, power, wrong):
    monkeypatch.setitem(OPTIMIZERS, "adamw", replace(OPTIMIZERS["adamw"], mup_power=power))
    assert any(wrong in line for line in judged(standard))


def test_a_head_without_its_factor_is_seen(standard, monkeypatch):
    monkeypatch.setattr(loss, "mup_width_ratio", lambda m: 1.0)
    assert any("change of logits" in w for w in judged(standard))


def test_a_check_that_sees_nothing_fails_and_so_does_nan(standard):
    flat = [replace(r, exponent=0.1) for r in standard]
    assert len(coord.verdict(flat, flat)) == 1 and "sees nothing" in coord.verdict(flat, flat)[0]
    unknown = [replace(r, exponent=float("nan")) for r in standard]
    assert len(coord.verdict(standard, unknown)) == len(standard)


def test_the_check_writes_its_verdict_and_its_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(coord, "WIDTHS", (64, 128))
    assert coord.check("llama-mini", True, tmp_path / "x" / "coord.png") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert {r["kind"] for r in said["muP"]} == {"embedding", "attention", "mlp", "residual", "logits"}
    assert (tmp_path / "x" / "coord.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(OPTIMIZERS, "adamw", replace(OPTIMIZERS["adamw"], mup_power=-1.0))
    assert coord.check("llama-mini") == 1
    assert "beyond" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="^--out: .*png"):
        coord.check("llama-mini", out=tmp_path / "coord.txt")
