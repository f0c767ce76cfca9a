"""Short causal convolutions: against torch's own, in parts, and by a library. (Against the sum in fp64 and in
bf16: test_sequence_layers.py.)
"""

import pytest
import torch
import torch.nn.functional as F
from sequences import TOKENS, assert_near, copies, ids, install, results, saved_elements, uninstall

from kernels import short_conv as kernel
from kernels.short_conv import inputs_to_pass, short_conv

WIDTH = 4


@pytest.fixture(autouse=True)
def blocks_of_16(monkeypatch):
    """Several in each test, and no library stays."""
    monkeypatch.setattr(kernel, "BLOCK", 16)
    yield
    uninstall()


def inputs(b=2, s=TOKENS, c=8, width=WIDTH, dtype=torch.float64):
    """x, weight, bias, state."""
    shapes = (b, s, c), (c, width), (c,), (b, width - 1, c)
    return copies([torch.randn(shape) for shape in shapes], dtype)


def definition(x, weight, bias, state, documents=None, state_documents=None, silu=False):
    """One token and one weight at a time."""
    b, s, c = x.shape
    width = weight.shape[1]
    before = torch.cat((state, x), 1)
    if documents is None:
        documents = torch.zeros(b, s, dtype=torch.int64)
    if state_documents is None:
        state_documents = documents[:, :1].expand(b, width - 1)
    owners = torch.cat((state_documents, documents), 1)
    rows = []
    for t in range(s):
        z = bias.expand(b, c)
        for j in range(width):
            seen = owners[:, t + j] == documents[:, t]
            z = z + weight[:, j] * before[:, t + j] * seen[:, None]
        rows.append(z)
    z = torch.stack(rows, 1)
    return (z / (1 + (-z).exp()) if silu else z,)


def run(documents=None, state_documents=None, silu=False):
    """short_conv(x, weight, bias, state) -> (y,)."""
    options = {"documents": documents, "state_documents": state_documents, "silu": silu}
    return lambda x, weight, bias, state: (short_conv(x, weight, bias, state=state, **options),)


def test_it_is_torchs_convolution_after_zeros():
    x, weight, _, _ = leaves = inputs(dtype=torch.float32)
    padded = F.pad(x.transpose(1, 2), (WIDTH - 1, 0))
    want = F.conv1d(padded, weight[:, None], groups=len(weight)).transpose(1, 2)
    dy = torch.randn_like(want)
    found = short_conv(x, weight)
    grads = torch.autograd.grad(found, leaves[:2], dy), torch.autograd.grad(want, leaves[:2], dy)
    assert_near((found, *grads[0]), (want, *grads[1]), 1e-6)


def test_it_is_that_of_qwen3_next():
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, bias, _ = inputs(dtype=torch.float32)
    want = theirs.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
    assert_near([short_conv(x, weight, bias, silu=True)], [want], 1e-6)


@pytest.mark.parametrize("documents", [None, ids()], ids=["one document", "documents"])
def test_parts_with_passed_inputs_are_the_whole(documents):
    """As ranks of context parallelism and steps of generation have them: one part is shorter than the state,
    and one starts with a document.
    """
    leaves = inputs()
    lengths = (8, 1, 1, 20, 7)

    def in_parts(x, weight, bias, state):
        outputs = []
        owners = [None] * len(lengths)
        state_documents = None
        if documents is not None:
            owners = documents.split(lengths, 1)
            state_documents = documents[:, :1].expand(-1, WIDTH - 1)
        for part, docs in zip(x.split(lengths, 1), owners):
            options = {"documents": docs, "state_documents": state_documents}
            outputs.append(short_conv(part, weight, bias, state=state, **options))
            state = inputs_to_pass(part, WIDTH, state)
            if docs is not None:
                state_documents = torch.cat((state_documents, docs), 1)[:, 1 - WIDTH :]
        return (torch.cat(outputs, 1),)

    assert_near(results(in_parts, leaves), results(run(documents), leaves), 1e-10)


def test_the_last_inputs_are_passed_to_the_next_part():
    x = torch.arange(1.0, 6.0)[None, :, None]
    state = torch.tensor([7.0, 8.0, 9.0])[None, :, None]
    assert inputs_to_pass(x, 4).flatten().tolist() == [3, 4, 5]
    assert inputs_to_pass(x[:, :1], 4).flatten().tolist() == [0, 0, 1]
    assert inputs_to_pass(x[:, :1], 4, state).flatten().tolist() == [8, 9, 1]
    assert inputs_to_pass(x, 1).shape == (1, 0, 1)


def test_the_backward_keeps_the_inputs():
    leaves = inputs()
    kept, _ = saved_elements(lambda: run(ids(), silu=True)(*leaves))
    documents = 2 * (TOKENS + WIDTH - 1)
    assert kept <= leaves[0].numel() + leaves[3].numel() + documents


@pytest.mark.parametrize("library", [False, True])
def test_weight_gradients_go_to_the_buffers(monkeypatch, given, library):
    x, weight, bias, _ = inputs(dtype=torch.bfloat16)
    plain = torch.autograd.grad(short_conv(x, weight, bias, silu=True).sum(), (weight, bias))
    calls = []
    if library:
        install(monkeypatch, "causal_conv1d", causal_conv1d_fn=stand_in(calls))
    weight, bias = given(weight, 1.0), given(bias, 2.0)
    for _ in range(2):
        short_conv(x, weight, bias, silu=True).sum().backward()
    assert weight.grad is None and bias.grad is None and bool(calls) == library
    assert_near((weight.main_grad, bias.main_grad), (1 + 2 * plain[0], 2 + 2 * plain[1]), 0.01)


# ---- causal_conv1d -----------------------------------------------------------------------------------------


def stand_in(calls, fault=""):
    """A function with the arguments of causal_conv1d 1.6, as it documents them."""

    def causal_conv1d_fn(
        x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ):  # fmt: skip
        assert not return_final_states and final_states_out is None
        assert x.stride(1) == 1 and (seq_idx is None or initial_states is None)
        calls.append((x.shape, activation, seq_idx, None if initial_states is None else initial_states.shape))
        width = weight.shape[1]
        state = x.new_zeros(len(x), width - 1, x.shape[1])
        state_documents = None
        if initial_states is not None:
            assert initial_states.stride(1) == 1 and initial_states.dtype == x.dtype
            state = initial_states.transpose(1, 2)
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
            state_documents = torch.full((len(x), width - 1), -1)
        if fault == "flipped":
            weight = weight.flip(1)
        bias = torch.zeros(len(weight)) if bias is None else bias
        inputs = (y.float() for y in (x.transpose(1, 2), weight, bias, state))
        (out,) = definition(*inputs, seq_idx, state_documents, silu=activation == "silu")
        return out.to(x.dtype).transpose(1, 2)

    return causal_conv1d_fn


@pytest.mark.parametrize("documents", [None, ids()], ids=["one document", "documents"])
def test_the_library_gets_what_it_expects(monkeypatch, documents):
    leaves = inputs(dtype=torch.bfloat16)
    state_documents = None
    if documents is not None:  # the state's last input alone is of the first document
        state_documents = documents[:, :1] + torch.tensor([50, 50, 0])
    options = {"documents": documents, "state_documents": state_documents, "silu": True}
    want = results(run(**options), copies(leaves, torch.float64))
    calls = []
    install(monkeypatch, "causal_conv1d", causal_conv1d_fn=stand_in(calls))
    assert_near(results(run(**options), leaves), want, 0.01)

    shape, activation, index, state_shape = calls[-1]
    assert activation == "silu"
    if documents is None:
        assert (shape, index, state_shape) == ((2, 8, TOKENS), None, (2, 8, WIDTH - 1))
    else:
        assert (shape, state_shape) == ((2, 8, TOKENS + WIDTH - 1), None)
        assert index.tolist() == torch.cat((state_documents, documents), 1).tolist()


def test_when_the_library_is_not_called(monkeypatch, capsys):
    calls = []
    install(monkeypatch, "causal_conv1d", causal_conv1d_fn=stand_in(calls))
    for case in ({"dtype": torch.float32}, {"width": 5}, {"c": 12}):
        short_conv(*inputs(**{"dtype": torch.bfloat16} | case)[:3])
    leaves = inputs(dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        short_conv(*leaves[:3])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls and not capsys.readouterr().err


def test_a_library_that_is_wrong_is_not_used(monkeypatch, capsys):
    leaves = inputs(dtype=torch.bfloat16)
    want = short_conv(*leaves[:3])
    calls = []
    install(monkeypatch, "causal_conv1d", causal_conv1d_fn=stand_in(calls, "flipped"))
    for _ in range(2):
        assert torch.equal(short_conv(*leaves[:3]), want)
    assert len(calls) == 1, "the trial"
    (line,) = capsys.readouterr().err.splitlines()
    said = "short convolution: causal_conv1d_fn is installed, for 4 weights a channel: not used: a wrong"
    assert line.startswith(said)
