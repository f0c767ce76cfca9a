"""Every call of a library fits its function's signature, as it was read in the sources, and gives tensors as
it documents them: a wrong name, dtype or layout fails here and not on a user's GPU.
"""

import itertools
import re

import pytest
import torch
from library_signatures import SOURCES, bound, signatures

from kernels import delta_rule, short_conv, state_space
from kernels.attention_libraries import LIBRARIES, Request
from kernels.attention_mask import PackedDocuments
from kernels.attention_scores import ScoreForm
from kernels.sequence_libraries import trial_documents

OF_OTHERS = [library for library in LIBRARIES if not library.module.startswith(("torch.", "kernels."))]
CALLS = [
    pytest.param(library, name, name == library.packed_function, id=f"{library.module}.{name}")
    for library in OF_OTHERS for name in (library.function, library.packed_function) if name is not None
]  # fmt: skip
B, S, H, G, D, E = 2, 400, 4, 2, 16, 24
INT, LONG, FP32, BF16 = torch.int32, torch.int64, torch.float32, torch.bfloat16


def recorder(signature, returns):
    """A function that binds what it is given to a signature. It returns what `returns` makes of that."""

    def function(*args, **kwargs):
        function.given = bound(signature, args, kwargs)
        return returns(function.given)

    return function


def given_by(module, name, returns, call):
    """[{parameter: argument}] of a call, for each version of the function that was read."""
    versions = signatures(module, name)
    assert versions, f"{module}.{name} is in no source that was read"
    found = []
    for signature in versions:
        function = recorder(signature, returns)
        call(function)
        found.append(function.given)
    return found


def check_tensors(given, expected):
    """expected: {parameter: (shape, dtype)}. All tensors that are given are expected."""
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    assert {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()} == expected


def test_every_library_was_read():
    of_attention = {library.module for library in OF_OTHERS}
    of_layers = {module for module, _ in delta_rule.LIBRARY_FUNCTIONS.values()}
    of_layers |= {"mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"}
    assert {module for module, _ in SOURCES} == of_attention | of_layers


def asked(library, packed):
    """The requests that the table says the library takes."""
    windows = (None, 40) if library.windows else (None,)
    caps = (None, 1.5) if library.softcap else (None,)
    lses = (False, True) if library.lse else (False,)
    for window, cap, with_lse, scale in itertools.product(windows, caps, lses, (None, 0.3)):
        yield Request(packed and packed._replace(window=window), window, ScoreForm(scale, cap), with_lse)


@pytest.mark.parametrize("library, name, is_packed", CALLS)
def test_attention(library, name, is_packed):
    shape = (B * S,) if is_packed else (B, S)
    q, k, v = torch.randn(*shape, H, D), torch.randn(*shape, G, D), torch.randn(*shape, G, D)
    ends = torch.tensor([0, 150, 300, B * S], dtype=INT)
    returns_lse = library.lse or library.module == "cudnn"

    def returns(given):
        lse = torch.zeros(H, B * S) if is_packed else torch.zeros(B, H, S)
        return (q.clone(), lse) if returns_lse else q.clone()

    for request in asked(library, PackedDocuments(ends, 3, 500, None) if is_packed else None):
        results = []
        for given in given_by(
            library.module, name, returns, lambda f: results.append(library.call(f, q, k, v, request))
        ):
            # the query itself is not counted in a window; the scale is that of the scores
            assert given.get("window_size", (None, 0)) == (request.window and request.window - 1, 0)
            assert given.get("softcap") == request.form.softcap
            assert given.get("softmax_scale", given.get("scale")) == request.form.scale
            assert given.get("causal", given.get("is_causal")) is True
            for end in [x for parameter, x in given.items() if parameter.startswith("cu_seqlens")]:
                assert end.dtype == INT and end[:4].tolist() == ends.tolist()
            assert ("cu_seqlens_q" in given) == is_packed
        for out, lse in results:
            assert out.shape == q.shape
            assert (lse is not None) == request.with_lse and (lse is None or lse.shape == q.shape[:-1])


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_delta_rule(per_channel, has_documents):
    """Gates are logarithms in fp32; a state is [keys, values], one for each document."""
    q, k, v = torch.randn(B, S, G, D), torch.randn(B, S, G, D), torch.randn(B, S, H, E)
    g = -torch.rand(B, S, H, D) if per_channel else -torch.rand(B, S, H)
    tensors = [x.to(BF16) for x in (q, k, v, g, torch.rand(B, S, H))]
    state, starts, ends, count = torch.randn(B, H, D, E), None, None, B
    if has_documents:
        documents, count = trial_documents(torch.device("cpu")), 5
        starts, ends = delta_rule.document_starts(documents, None), delta_rule.document_ends(documents, count)
    lead = (1, B * S) if has_documents else (B, S)

    def returns(given):
        return given["v"], given["initial_state"]

    module, name = delta_rule.LIBRARY_FUNCTIONS[per_channel]
    for given in given_by(
        module, name, returns, lambda f: delta_rule.call_library(f, *tensors, state, starts, ends, 0.5)
    ):
        check_tensors(given, {
            "q": ((*lead, G, D), BF16), "k": ((*lead, G, D), BF16), "v": ((*lead, H, E), BF16),
            "g": ((*lead, *g.shape[2:]), FP32), "beta": ((*lead, H), BF16),
            "initial_state": ((count, H, D, E), FP32),
            **({"cu_seqlens": ((count + 1,), LONG)} if has_documents else {}),
        })  # fmt: skip
        assert given["scale"] == 0.5 and given["output_final_state"] is True


@pytest.mark.parametrize("has_documents", [False, True])
def test_the_state_space(has_documents):
    """dt is positive and A negative, without a softplus there; the state before belongs to document 0."""
    x, dt, A = torch.randn(B, S, H, D).to(BF16), torch.rand(B, S, H), -torch.rand(H)
    C, skip, state = torch.randn(B, S, G, E).to(BF16), torch.randn(H), torch.randn(B, H, D, E)
    starts = None
    if has_documents:
        starts = state_space.document_starts(trial_documents(torch.device("cpu")), None)
    for given in given_by(
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        lambda given: (given["x"], given["initial_states"]),
        lambda f: state_space.call_library(f, x, dt, A, C, C, skip, state, starts),
    ):
        check_tensors(given, {
            "x": ((B, S, H, D), BF16), "dt": ((B, S, H), FP32), "A": ((H,), FP32),
            "B": ((B, S, G, E), BF16), "C": ((B, S, G, E), BF16), "D": ((H,), FP32),
            "initial_states": ((B, H, D, E), FP32),
            **({"seq_idx": ((B, S), INT)} if has_documents else {}),
        })  # fmt: skip
        assert given["return_final_states"] is True
        assert not has_documents or (given["seq_idx"][:, 0] == 0).all()


@pytest.mark.parametrize("has_documents", [False, True])
def test_the_short_convolution(has_documents):
    """Channels are adjacent in memory; a state or documents, never both."""
    c, width = 64, 4
    x, state = torch.randn(B, S, c).to(BF16), torch.randn(B, width - 1, c).to(BF16)
    weight, bias = torch.randn(c, width), torch.randn(c)
    documents = torch.zeros(B, S + width - 1, dtype=LONG) if has_documents else None
    length = S + width - 1 if has_documents else S
    for given in given_by(
        "causal_conv1d",
        "causal_conv1d_fn",
        lambda given: given["x"],
        lambda f: short_conv.call_library(f, x, weight, bias, True, state, documents),
    ):
        check_tensors(given, {
            "x": ((B, c, length), BF16), "weight": ((c, width), FP32), "bias": ((c,), FP32),
            **({"seq_idx": ((B, length), INT)} if has_documents
               else {"initial_states": ((B, c, width - 1), BF16)}),
        })  # fmt: skip
        assert given["activation"] == "silu" and given["x"].stride(1) == 1
        assert has_documents or given["initial_states"].stride(1) == 1


@pytest.mark.parametrize("module, name", [(of, name) for (of, _), source in SOURCES.items()
                                          for name in source.functions])  # fmt: skip
def test_a_wrong_name_is_found(module, name):
    for signature in signatures(module, name):
        words = {word: None for word in signature.parameters if word != "kwargs"}
        assert bound(signature, (), words) == words
        with pytest.raises(TypeError, match=re.escape("initial_stat")):
            bound(signature, (), {**words, "initial_stat": None})
