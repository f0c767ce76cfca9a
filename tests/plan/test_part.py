"""The record of a part of the model: its growth with sequences and experts, and a module that nobody
has described. Exchanges are held against real steps (tests/parallel/wire/test_ledger.py), bytes against the
record of a step (test_memory.py), FLOPs against those of the model (test_cost.py).
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from config.reading import resolve
from config.tree import with_values
from kernels import triton_
from model.attention import Attention, AttentionConfig
from model.block import MIXERS, TransformerBlock
from model.flops import flops_of_parts
from model.split import split_by_cost
from parallel.tensor.layers import ColumnLinear, RowLinear
from plan.count import flops_per_token
from plan.record.launches import CHIPS
from plan.record.part import PartForm, PartRecord, get_part_record, on_the_line, record_part

ROOT = Path(__file__).parents[2]
DENSE = "--model.vocab 4096 --model.hidden 512 --model.mlp.width 1024".split()
SIZE = "--train.seq_len 1024 --train.micro_batch 2 --model.vocab 4096".split()
SP = {"parallel.tp": 2, "parallel.sp": True}
PARTS = {"parallel.recompute": "selective", "parallel.recompute_parts": "core,norm,act"}
LAYOUTS = {
    "llama3-tiny": [
        {},
        {"parallel.tp": 2},
        SP | {"parallel.async_tp": True},
        SP | PARTS,
        SP | {"parallel.recompute": "full"},
        {"parallel.cp": 2, "parallel.cp_kind": "ring"},
        {"parallel.cp": 2, "parallel.cp_kind": "ulysses"},
        {"parallel.recompute": "full", "model.dropout": 0.1},
        SP | {"train.dtype": "fp8"},
    ],
    "deepseek-v3-tiny": [
        {},
        {"parallel.ep": 4, "parallel.ep_chunks": 2, "train.dtype": "bf16"},
        {"parallel.tp": 2, "parallel.ep": 4, "train.dtype": "bf16"},
        SP | {"parallel.ep": 2, "parallel.recompute": "full", "train.dtype": "bf16"},
    ],
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def title(name, layout):
    """llama3-tiny tp 2 sp true"""
    words = [name, *(f"{key.split('.')[1]} {value}" for key, value in layout.items())]
    return " ".join(words).lower()


IDS = [title(*case) for case in CASES]
CORE = ["llama3-tiny tp 2 sp true async_tp true", "deepseek-v3-tiny tp 2 ep 4 dtype bf16"]


def build_config(name, layout):
    cfg = resolve(name, None, [*SIZE, *(DENSE if name == "llama3-tiny" else [])])
    return with_values(cfg, layout)


@pytest.mark.slow(every=3, core=CORE)
@pytest.mark.parametrize("name, layout", CASES, ids=IDS)
def test_the_record_of_a_block_grows_by_the_same_with_each_sequence(name, layout):
    cfg = with_values(build_config(name, layout), {"train.micro_batch": 5})
    form = PartForm(cfg, cfg.model.layers - 1, CHIPS["h100"], is_split=True)
    assert_like(get_part_record(form), record_part(form))
    assert get_part_record(form).kept_for_weights == record_part(form).kept_for_weights


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("layout", [{}, SP, {"parallel.ep_chunks": 2, "parallel.recompute": "full"}], ids=str)
def test_the_record_of_a_mixture_is_on_a_line_by_the_experts_of_a_rank(layout):
    cfg = build_config("deepseek-v3-tiny", layout | {"train.dtype": "bf16", "model.mlp.experts": 64})
    for ranks in (2, 16, 32):
        keys = {"parallel.ep": ranks}
        form = PartForm(with_values(cfg, keys), cfg.model.layers - 1, CHIPS["h100"], is_split=True)
        assert_like(get_part_record(form), record_part(form))


def test_a_part_without_experts_has_one_record_for_all_numbers_of_expert_ranks():
    cfg = build_config("deepseek-v3-tiny", {"model.mtp": None})
    for layer in ("embedding", 0, "head"):
        forms = [PartForm(with_values(cfg, {"parallel.ep": ranks}), layer, CHIPS["h100"]) for ranks in (2, 4)]
        assert get_part_record(forms[0]) is get_part_record(forms[1])


def assert_like(line: PartRecord, real: PartRecord):
    """Exactly, but for tensors of less than a sequence: those of a peak, and the partial sums of a norm's
    backward, as many as processors."""
    assert line.kept == real.kept and line.context == real.context
    assert line.kept_for_weights == pytest.approx(real.kept_for_weights, rel=0.005)
    for name in ("forward", "backward", "inputs"):
        one, other = getattr(line, name), getattr(real, name)
        assert one.exchanges == other.exchanges
        for work, real_work in ((one.work, other.work), (one.weights, other.weights)):
            counts, real_counts = (replace(one, nbytes=0).numbers for one in (work, real_work))
            assert counts == pytest.approx(real_counts, 1e-12)
            assert work.nbytes == pytest.approx(real_work.nbytes, rel=0.005)
        assert one.peak == pytest.approx(other.peak, rel=0.01)


def test_a_record_of_a_gpu_needs_no_triton():
    pytest.importorskip("triton", reason="no Triton for this platform")
    program = """
import sys
sys.modules["triton"] = None
sys.path[:0] = ["tests/plan"]
from test_part import form_of_all_kernels
from plan.record.part import record_part
print(record_part(form_of_all_kernels()))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert triton_.TRITON_AVAILABLE
    assert run.stdout.strip() == str(record_part(form_of_all_kernels()))


def form_of_all_kernels() -> PartForm:
    """Products in 8 bits, grouped ones and latent attention, all with descriptors."""
    cfg = build_config("deepseek-v3-tiny", {"train.dtype": "fp8"})
    return PartForm(cfg, cfg.model.layers - 1, CHIPS["h100"])


def test_records_of_unlike_forms_make_no_line():
    forms = [PartForm(build_config("llama3-tiny", layout), 0, CHIPS["h100"]) for layout in ({}, SP)]
    one, two = map(record_part, forms)
    with pytest.raises(ValueError, match="unlike|zip"):
        on_the_line(one, two, 3)


def test_a_layout_of_its_own_has_a_record_of_its_own():
    cfg = build_config("llama3-tiny", {})
    form = PartForm(cfg, 0, CHIPS["h100"])
    assert get_part_record(form) is get_part_record(form)
    assert get_part_record(form).kept > get_part_record(PartForm(build_config("llama3-tiny", SP), 0,
                                                                 CHIPS["h100"])).kept
    other = replace(cfg, train=replace(cfg.train, seq_len=512))
    assert get_part_record(PartForm(other, 0, CHIPS["h100"])).kept < get_part_record(form).kept


@pytest.mark.parametrize("layout", [{}, {"parallel.recompute": "full"}, {"parallel.tp": 2}], ids=str)
@pytest.mark.parametrize("chip", [None, "h100"])
def test_qk_clip_multiplies_queries_with_keys_once_more(chip, layout):
    """In the forward alone. On a CPU in chunks of queries, each with the keys up to its last one; on a GPU by
    flex_attention, with values of 16 columns."""
    cfg = build_config("llama3-tiny", layout | {"train.dtype": "bf16"})
    clipped = with_values(cfg, {"optim.qk_clip": 100.0})
    plain, watched = (get_part_record(PartForm(one, 0, CHIPS.get(chip))) for one in (cfg, clipped))
    assert watched.backward.work == plain.backward.work and watched.kept == plain.kept

    b, s, mixer = cfg.train.micro_batch, cfg.train.seq_len, cfg.model.mixer
    heads, head_dim = mixer.heads // cfg.parallel.tp, cfg.model.hidden // mixer.heads
    before, after = plain.forward.work, watched.forward.work
    if chip is None:
        chunk = 2**20 // (b * heads * s)
        pairs = sum(chunk * end for end in range(chunk, s + 1, chunk))
        assert after.products - before.products == 2 * b * heads * head_dim * pairs
        assert after.attention == before.attention
    else:
        assert after.products == before.products
        assert after.attention / before.attention == 1 + (head_dim + 16) / (2 * head_dim)
        assert after.nbytes < 1.1 * before.nbytes  # no scores in memory


# ---- a module that nobody described ------------------------------------------------------------------------


class LinearAttention(nn.Module):
    """Linear attention (arXiv 2006.16236) over whole sequences, without a causal order: it says nothing of
    what it costs."""

    def __init__(self, cfg, mesh, layer):
        super().__init__()
        hidden = cfg.model.hidden
        self.heads = cfg.model.mixer.heads // mesh.tp.size
        key = f"layers.{layer}.attn"
        options = {"std": cfg.model.init_std, "bias": False, "sp": cfg.parallel.sp, "async_tp": False}
        self.qkv = ColumnLinear(mesh, {f"{key}.{name}": hidden for name in "qkv"}, hidden, **options)
        self.out = RowLinear(mesh, f"{key}.o", hidden, hidden, **options)

    def forward(self, x, context):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in parts)  # [b, h/tp, s, d]
        state = k.softmax(-2).transpose(-1, -2) @ v  # [b, h/tp, d, d]
        return self.out((q.softmax(-1) @ state).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("chip", [None, CHIPS["h100"]], ids=["cpu", "h100"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_module_that_nobody_described_is_recorded(monkeypatch, chip, recompute):
    """By hand: its FLOPs, what it exchanges, and that it keeps all but what full recompute makes again."""
    monkeypatch.setitem(MIXERS, AttentionConfig, LinearAttention)
    cfg = build_config("llama3-tiny", SP | {"parallel.recompute": recompute, "train.dtype": "bf16"})
    record = record_part(PartForm(cfg, 1, chip))
    model, tokens = cfg.model, cfg.train.micro_batch * cfg.train.seq_len
    d = model.hidden // model.mixer.heads

    # of a rank: half of the features of each product
    projections = 2 * tokens * model.hidden * (4 * model.hidden + 3 * model.mlp.width) // 2
    states = 2 * 2 * tokens * model.hidden * d // 2
    forward, backward = record.forward.work, record.backward.work
    assert forward.products == projections + states and forward.attention == 0
    again = forward.products if recompute == "full" else 0
    assert backward.products == 2 * forward.products + again
    assert record.backward.weights.products == projections

    # two regions of tensor parallelism: each is entered and left, and entered again where all is made again
    hidden_bytes = 2 * tokens * model.hidden
    gathers = sum(one.nbytes for one in record.backward.exchanges if one.verb == "all_gather")
    assert sum(one.nbytes for one in record.forward.exchanges) == 4 * hidden_bytes
    assert gathers == (4 if recompute == "full" else 2) * hidden_bytes

    # bytes
    if recompute == "full":
        assert record.kept == pytest.approx(hidden_bytes // 2, rel=0.01)
    else:
        assert record.kept > 4 * hidden_bytes


def test_the_products_of_a_mixer_that_nobody_described_are_counted(monkeypatch):
    """By hand: linear attention has no products with keys, and two with a state of d x d a head."""
    model = replace(build_config("llama3-tiny", {}).model, vocab=512, init_std=0.0131)  # none of it is cached
    monkeypatch.setitem(MIXERS, AttentionConfig, LinearAttention)
    d = model.hidden // model.mixer.heads
    block = 4 * model.hidden**2 + 3 * model.hidden * model.mlp.width
    matrices = model.layers * block + model.hidden * model.vocab
    states = model.layers * 2 * model.hidden * d
    for seq_len in (64, 4096):
        assert flops_per_token(model, seq_len) == pytest.approx(3 * 2 * (matrices + states), rel=1e-12)


def test_layers_with_other_mixers_are_counted_and_divided_as_they_are(monkeypatch):
    """Softmax attention in the last layer alone: a long sequence makes it heavier than the three others."""
    model = replace(build_config("llama3-tiny", {}).model, vocab=512, init_std=0.0132)
    mixers = [LinearAttention] * (model.layers - 1) + [Attention]
    monkeypatch.setattr(TransformerBlock, "mixer_class", staticmethod(lambda cfg, layer: mixers[layer]))
    first, *_, last = flops_of_parts(model, (16384,), 16384)[1:-1]
    scores = 2 * 2 * model.hidden * 8192.5
    assert last - first > 0.9 * scores
    assert split_by_cost(model, 2, 16384) == (3, 1)


def test_a_mixer_that_does_not_run_without_values_is_named(monkeypatch):
    class Reading(LinearAttention):
        def forward(self, x, context):
            return super().forward(x, context) * x.sum().item()

    model = replace(build_config("llama3-tiny", {}).model, vocab=512, init_std=0.0133)
    monkeypatch.setitem(MIXERS, AttentionConfig, Reading)
    with pytest.warns(UserWarning, match="FLOPs of Reading beside its matrices are not counted"):
        assert flops_per_token(model, 64) > 0
