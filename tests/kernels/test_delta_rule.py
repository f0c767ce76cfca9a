"""The gated delta rule with a gate for each head or each channel: against transformers, and by a library.
(Against its formula, in parts and in bf16: test_sequence_layers.py.)
"""

import math

import pytest
import torch
import torch.nn.functional as F
from sequences import TOKENS, assert_near, copies, ids, install, results, uninstall

from kernels import delta_rule as kernel
from kernels.attention_mask import DocumentCounts
from kernels.delta_rule import delta_rule, delta_rule_effect, recurrent_delta_rule

GATES = ("head", "channel")
D_K, D_V = 6, 5


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Several in each test."""
    monkeypatch.setattr(kernel, "SEGMENT", 16)
    yield
    uninstall()


def inputs(gate, b=2, s=TOKENS, h=4, h_k=4, d_k=D_K, d_v=D_V, dtype=torch.float64, strength=1.0):
    """q, k, v, g, beta, state."""
    shape = (b, s, h, d_k) if gate == "channel" else (b, s, h)
    tensors = (
        torch.randn(b, s, h_k, d_k),
        F.normalize(torch.randn(b, s, h_k, d_k), dim=-1),
        torch.randn(b, s, h, d_v),
        -strength * torch.randn(shape).exp(),
        2 * torch.rand(b, s, h),
        torch.randn(b, h, d_k, d_v),
    )
    return copies(tensors, dtype)


def definition(q, k, v, g, beta, state, documents=None, scale=None):
    """S = (1 - beta k k^T) diag(exp(g)) S + beta k v^T, one token, sequence and head at a time."""
    b, s, h, d_v = v.shape
    d_k = k.shape[-1]
    scale = 1 / math.sqrt(d_k) if scale is None else scale
    rows, states = [], []
    for i in range(b):
        for head in range(h):
            group = head // (h // k.shape[2])
            S = state[i, head]
            for t in range(s):
                if documents is not None and t and documents[i, t] != documents[i, t - 1]:
                    S = torch.zeros_like(S)
                key, step = k[i, t, group], beta[i, t, head]
                decay = g[i, t, head].exp().expand(d_k).diag()
                S = (torch.eye(d_k).to(S) - step * torch.outer(key, key)) @ decay @ S
                S = S + step * torch.outer(key, v[i, t, head])
                rows.append(scale * (q[i, t, group] @ S))
            states.append(S)
    out = torch.stack(rows).view(b, h, s, d_v).transpose(1, 2)
    return out, torch.stack(states).view(b, h, d_k, d_v)


def run(function, documents=None, **options):
    """function(q, k, v, g, beta, state) -> (output, state)."""
    return lambda *leaves: function(*leaves[:5], state=leaves[5], documents=documents, **options)


def test_without_a_state_it_starts_from_zeros_and_the_scale_is_an_argument():
    *leaves, state = inputs("head", s=9)
    zeros = torch.zeros_like(state)
    want = definition(*leaves, zeros, scale=0.3)
    for function in (delta_rule, recurrent_delta_rule):
        assert_near(function(*leaves, scale=0.3), want, 1e-10)


def test_an_effect_is_linear_and_forgets_what_another_document_left():
    *tensors, state = inputs("channel")
    _, k, v, g, beta = tensors
    effect = delta_rule_effect(k, v, g, beta, documents=ids())
    assert effect.transition.shape == (2, 4, D_K, D_K) and effect.contribution.shape == (2, 4, D_K, D_V)
    assert not effect.transition[0].any() and effect.transition[1].any()
    _, after = delta_rule(*tensors, state=3 * state, documents=ids())
    assert_near([effect.on(3 * state)], [after], 1e-10)


def test_what_needs_no_gradient_has_none():
    leaves = inputs("head", s=9)
    q, k, v, g, beta, state = leaves
    out, last = delta_rule(q.detach(), k, v.detach(), g.detach(), beta.detach(), chunk=4)
    (dk,) = torch.autograd.grad(out.sum(), k, retain_graph=True)
    (want,) = torch.autograd.grad(definition(*leaves[:5], torch.zeros_like(state))[0].sum(), k)
    assert_near([dk], [want], 1e-10)
    effect = delta_rule_effect(k, v, g, beta, chunk=4)
    transition = torch.autograd.grad(effect.transition.sum(), (k, v, g, beta), allow_unused=True)
    assert not transition[1].any() and transition[0].any()
    with torch.no_grad():
        assert delta_rule(*leaves[:5])[0].grad_fn is None


def test_another_chunk_or_gate_is_refused():
    *tensors, state = inputs("channel", s=9)
    for chunk in (0, 12):
        with pytest.raises(ValueError, match=f"chunk is {chunk} tokens: it must be a power of 2"):
            delta_rule(*tensors, chunk=chunk)
    with pytest.raises(ValueError, match=r"gate is \[2, 9, 4, 5\]: \[b, s, h\] or \[b, s, h, d_k\]"):
        delta_rule(*tensors[:3], tensors[3][..., :5], tensors[4])


# ---- transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate, h_k, model, chunked, recurrent", [
    ("head", 2, "qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("channel", 4, "kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
])
def test_it_is_that_of_transformers(gate, h_k, model, chunked, recurrent):
    """In chunks and token by token, with the gradients of its autograd."""
    theirs = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    leaves = inputs(gate, h_k=h_k, d_k=16, d_v=8, s=70, dtype=torch.float32)
    for name, ours in ((chunked, delta_rule), (recurrent, recurrent_delta_rule)):
        reference = getattr(theirs, name)
        want = results(lambda *x: reference(*x[:5], initial_state=x[5], output_final_state=True), leaves)
        assert_near(results(run(ours), leaves), want, 1e-5)


# ---- flash-linear-attention --------------------------------------------------------------------------------


def stand_in(calls, gate, fault=""):
    """A function with the arguments of fla 0.5, as it documents them: documents one after the other in one
    sequence, and a state for each.
    """

    def chunk_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs
    ):  # fmt: skip
        assert not kwargs and output_final_state and g.dim() == (4 if gate == "channel" else 3)
        assert initial_state.dtype == g.dtype == torch.float32 and q.dtype == k.dtype == v.dtype
        calls.append((k.shape, v.shape, scale, None if cu_seqlens is None else cu_seqlens.tolist()))
        tensors = q, k, v, g, beta
        if cu_seqlens is None:
            out, states = recurrent_delta_rule(*tensors, state=initial_state, scale=scale)
        else:
            assert len(q) == 1 and cu_seqlens.dtype == torch.int64
            assert len(initial_state) == len(cu_seqlens) - 1
            parts = zip(*(x.split(cu_seqlens.diff().tolist(), 1) for x in tensors), initial_state)
            done = [recurrent_delta_rule(*part[:5], state=part[5][None], scale=scale) for part in parts]
            out = torch.cat([out for out, _ in done], 1)
            states = torch.cat([state for _, state in done])
        if fault == "decays after":
            states = states * g.exp().mean()
        if fault == "a lost gradient":
            out = out.detach() + 0 * v.mean(-1, keepdim=True)
        return out, states

    name = "chunk_kda" if gate == "channel" else "chunk_gated_delta_rule"
    chunk_rule.__name__ = name
    return {"module": "fla.ops.kda" if gate == "channel" else "fla.ops.gated_delta_rule", name: chunk_rule}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("documents", [None, ids()], ids=["one document", "documents"])
def test_the_library_gets_what_it_expects(monkeypatch, gate, documents):
    leaves = inputs(gate, h_k=2, dtype=torch.bfloat16)
    options = {"documents": documents, "chunk": 8}
    if documents is not None:  # the first sequence begins with another document than the state's
        options["state_document"] = torch.stack((documents[0, 0] + 50, documents[1, 0]))
    exact = copies(leaves, torch.float64)
    want = results(run(delta_rule, **options), exact)
    want_effect = delta_rule_effect(*exact[1:5], **options)
    calls = []
    install(monkeypatch, **stand_in(calls, gate))

    counts = None if documents is None else DocumentCounts(5, 37)
    found = results(run(delta_rule, counts=counts, **options), leaves)
    ends = None if documents is None else [0, 7, 8, 19, 37, 74]
    shape = (2, TOKENS) if documents is None else (1, 2 * TOKENS)
    assert calls[-1] == ((*shape, 2, D_K), (*shape, 4, D_V), D_K**-0.5, ends)
    assert_near(found, want, 0.01)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32

    effect = delta_rule_effect(*leaves[1:5], counts=counts, **options)
    assert calls[-1] == ((*shape, 2, D_K), (*shape, 4, D_K + D_V), 1.0, ends)
    assert_near(effect, want_effect, 0.01)


def test_when_the_library_is_not_called(monkeypatch, capsys):
    calls = []
    install(monkeypatch, **stand_in(calls, "head"))
    *tensors, _ = inputs("head", dtype=torch.float32)
    delta_rule(*tensors)
    *tensors, _ = inputs("head", dtype=torch.bfloat16)
    delta_rule(*tensors, documents=ids())  # the host does not know how many
    assert not calls and not capsys.readouterr().err
    *tensors, _ = inputs("channel", dtype=torch.bfloat16)
    for _ in range(2):
        delta_rule(*tensors)
    assert not calls
    assert capsys.readouterr().err.splitlines() == [
        "delta rule: fla.ops.kda.chunk_kda is not installed (pip install flash-linear-attention); torch's "
        "own operations run instead: slower"
    ]


@pytest.mark.parametrize("fault, why", [("decays after", "wrong"), ("a lost gradient", "not have been used")])
def test_a_library_that_is_wrong_is_not_used(monkeypatch, capsys, fault, why):
    *tensors, _ = inputs("head", dtype=torch.bfloat16)
    want = delta_rule(*tensors)
    calls = []
    install(monkeypatch, **stand_in(calls, "head", fault))
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(delta_rule(*tensors), want))
    assert len(calls) == 1, "the trial"
    (line,) = capsys.readouterr().err.splitlines()
    said = "delta rule: chunk_gated_delta_rule is installed, for head dims 6 and 5: not used: "
    assert line.startswith(said)
    assert why in line
