"""The state space layer of Mamba-2: against transformers, and by a library. (Against its formula, in parts
and in bf16: test_sequence_layers.py.)
"""

import pytest
import torch
import torch.nn.functional as F
from sequences import DOCUMENTS, TOKENS, assert_near, copies, ids, install, results, uninstall

from kernels import state_space as kernel
from kernels.state_space import recurrent_state_space, state_space, state_space_effect

P, N = 6, 5


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Several in each test."""
    monkeypatch.setattr(kernel, "SEGMENT", 16)
    yield
    uninstall()


def inputs(b=2, s=TOKENS, h=4, g=2, p=P, n=N, dtype=torch.float64, strength=1.0):
    """x, dt, A, B, C, D, state."""
    tensors = (
        torch.randn(b, s, h, p),
        F.softplus(torch.randn(b, s, h)),
        -strength * torch.rand(h),
        torch.randn(b, s, g, n),
        torch.randn(b, s, g, n),
        torch.randn(h),
        torch.randn(b, h, p, n),
    )
    return copies(tensors, dtype)


def definition(x, dt, A, B, C, D, state, documents=None):
    """As attention (section 3 of the paper): y_i is the sum over j of <C_i, B_j> exp(sum of dt A) dt_j x_j.
    The whole sequence is one matrix, and the state is added.
    """
    b, s, h, _ = x.shape
    B, C = (y.repeat_interleave(h // B.shape[2], 2) for y in (B, C))
    if documents is None:
        documents = torch.zeros(b, s, dtype=torch.int64)
    log_decay = (dt * A).cumsum(1)
    between = log_decay[:, :, None] - log_decay[:, None]  # [b, i, j, h]
    sees = (documents[:, :, None] == documents[:, None]) & torch.ones(s, s, dtype=torch.bool).tril()
    between = between.masked_fill(~sees[..., None], -torch.inf).exp()
    first = (documents == documents[:, :1])[..., None]
    from_state = log_decay.exp() * first  # [b, i, h]

    y = torch.einsum("bihn,bjhn,bijh,bjh,bjhp->bihp", C, B, between, dt, x)
    y = y + torch.einsum("bihn,bih,bhpn->bihp", C, from_state, state) + D[:, None] * x
    last = torch.einsum("bjhn,bjh,bjh,bjhp->bhpn", B, between[:, -1], dt, x)
    return y, last + from_state[:, -1, :, None, None] * state


def run(function, documents=None, **options):
    """function(x, dt, A, B, C, D, state) -> (y, state)."""
    return lambda *leaves: function(*leaves[:6], state=leaves[6], documents=documents, **options)


def test_without_a_state_it_starts_from_zeros_and_without_d_it_adds_no_input():
    *leaves, D, state = inputs()
    want = definition(*leaves, torch.zeros_like(D), torch.zeros_like(state))
    for function in (state_space, recurrent_state_space):
        assert_near(function(*leaves), want, 1e-10)


def test_the_effect_of_documents_forgets():
    x, dt, A, B, *_ = inputs()
    effect = state_space_effect(x, dt, A, B, documents=ids())
    assert effect.decay.shape == (2, 4) and effect.contribution.shape == (2, 4, P, N)
    assert not effect.decay[0].any() and effect.decay[1].all()


def test_what_needs_no_gradient_has_none():
    leaves = inputs(s=9)
    x, dt, A, B, C, D, state = leaves
    out, last = state_space(x.detach(), dt.detach(), A, B.detach(), C, chunk=4)
    found = torch.autograd.grad(out.sum(), (A, C))
    want, _ = definition(x, dt, A, B, C, torch.zeros_like(D), torch.zeros_like(state))
    assert_near(found, torch.autograd.grad(want.sum(), (A, C)), 1e-10)
    with torch.no_grad():
        assert state_space(*leaves[:5])[0].grad_fn is None


def test_another_chunk_is_refused():
    with pytest.raises(ValueError, match="chunk is 0 tokens: it must be at least 1"):
        state_space(*inputs(s=9)[:5], chunk=0)


# ---- transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mamba2", "bamba", "nemotron_h"])
def test_it_is_that_of_transformers(model):
    """In chunks, with the gradients of its autograd."""
    theirs = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    leaves = inputs(s=70, p=16, n=8, dtype=torch.float32)

    def reference(x, dt, A, B, C, D, state):
        return theirs.mamba2_chunk_scan(
            x, dt, A, B, C, 16, D=D, initial_states=state, return_final_states=True
        )

    assert_near(results(run(state_space), leaves), results(reference, leaves), 1e-5)


def test_a_step_is_that_of_transformers():
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, dt, A, B, C, D, state = (y.detach() for y in inputs(s=1, dtype=torch.float32))
    b, _, h, p = x.shape
    wide = (b, h, p)
    want_state = state.clone()  # written over in place
    want = theirs.mamba2_selective_state_update(
        want_state,
        x[:, 0],
        dt[:, 0, :, None].expand(wide),
        A[:, None, None].expand(h, p, N),
        B[:, 0],
        C[:, 0],
        D=D[:, None].expand(h, p),
    )
    out, state = recurrent_state_space(x, dt, A, B, C, D, state=state)
    assert_near((out[:, 0], state), (want, want_state), 1e-6)


# ---- mamba_ssm ---------------------------------------------------------------------------------------------


def stand_in(calls, fault=""):
    """A function with the arguments of mamba_ssm 2.3, as it documents them: the state belongs to document 0.
    """

    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
        cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
        return_varlen_states=False,
    ):  # fmt: skip
        assert return_final_states and z is dt_bias is cu_seqlens is None and not dt_softplus
        assert A.dtype == initial_states.dtype == torch.float32 and x.dtype == B.dtype == C.dtype
        calls.append((x.shape, B.shape, chunk_size, D is not None, seq_idx))
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and not seq_idx[:, 0].any()
        if fault == "one document":
            seq_idx = None
        return recurrent_state_space(x, dt, A, B, C, D, state=initial_states, documents=seq_idx)

    module = "mamba_ssm.ops.triton.ssd_combined"
    return {"module": module, "mamba_chunk_scan_combined": mamba_chunk_scan_combined}


@pytest.mark.parametrize("documents", [None, ids()], ids=["one document", "documents"])
def test_the_library_gets_what_it_expects(monkeypatch, documents):
    leaves = inputs(dtype=torch.bfloat16)
    options = {"documents": documents, "chunk": 8}
    if documents is not None:  # the first sequence begins with another document than the state's
        options["state_document"] = torch.stack((documents[0, 0] + 50, documents[1, 0]))
    exact = copies(leaves, torch.float64)
    want = results(run(state_space, **options), exact)
    want_effect = state_space_effect(*exact[:4], **options)
    calls = []
    install(monkeypatch, **stand_in(calls))

    found = results(run(state_space, **options), leaves)
    shapes = ((2, TOKENS, 4, P), (2, TOKENS, 2, N))
    assert calls[-1][:4] == (*shapes, 256, True)
    if documents is not None:
        numbers = [n for n, length in enumerate(DOCUMENTS[0]) for _ in range(length)]
        assert calls[-1][4].tolist() == [numbers, [0] * TOKENS]
    assert_near(found, want, 0.01)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32

    effect = state_space_effect(*leaves[:4], **options)
    assert calls[-1][:4] == (*shapes, 256, False)
    assert_near(effect, want_effect, 0.01)


def test_when_the_library_is_not_called(monkeypatch, capsys):
    """An installed version that does not know torch's deterministic mode is not used in it."""
    calls = []
    install(monkeypatch, **stand_in(calls))
    state_space(*inputs(dtype=torch.float32)[:6])
    leaves = inputs(dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        state_space(*leaves[:6])
        assert not calls
        install(monkeypatch, "mamba_ssm.utils.determinism", use_deterministic_mode=lambda: True)
        state_space(*leaves[:6])
        assert calls
    finally:
        torch.use_deterministic_algorithms(False)
    assert not capsys.readouterr().err


def test_a_library_that_is_wrong_is_not_used(monkeypatch, capsys):
    leaves = inputs(dtype=torch.bfloat16)
    want = state_space(*leaves[:6], documents=ids())
    calls = []
    install(monkeypatch, **stand_in(calls, "one document"))
    for _ in range(2):
        found = state_space(*leaves[:6], documents=ids())
        assert all(torch.equal(x, y) for x, y in zip(found, want))
    assert len(calls) == 1, "the trial"
    (line,) = capsys.readouterr().err.splitlines()
    said = "state space: mamba_chunk_scan_combined is installed, for head dims 6 and 5: not used: a wrong"
    assert line.startswith(said)
    state_space(*leaves[:6])
    assert calls[-1][0] == (2, TOKENS, 4, P), "without documents it is right"
