"""Every layer with a state: it is its formula in fp64, documents are separate sequences, parts with
passed states are the whole, bf16 is computed in fp32, and the backward keeps little.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import pytest
import test_delta_rule
import test_short_conv
import test_state_space
import torch
from sequences import DOCUMENTS, TOKENS, assert_near, copies, ids, results, saved_elements

from kernels import delta_rule, short_conv, state_space

EITHER = pytest.mark.parametrize("documents", [None, ids()], ids=["one document", "documents"])


@dataclass(frozen=True)
class Layer:
    """inputs(**sizes): its leaves, the last is the state. Functions take all leaves, documents and their own
    options, and return (output, state), or (output,). decay: the leaf that is a decay, or the step of one.
    """

    module: ModuleType
    inputs: Callable
    definition: Callable
    run: Callable
    of_tokens: tuple[int, ...]  # leaves that have a token dim
    forms: tuple[dict, ...]  # sizes to be tried
    recurrent: Callable | None = None
    effect: Callable | None = None
    of_effect: tuple[int, ...] = ()  # the leaves that it takes
    chunks: tuple[int, ...] = ()
    decay: int | None = None
    long: dict = field(default_factory=dict)  # sizes of a sequence of several segments
    kept: Callable = lambda leaves: 0  # elements that the backward may keep beside the inputs


def delta_layer(gate: str) -> Layer:
    return Layer(
        delta_rule,
        partial(test_delta_rule.inputs, gate),
        test_delta_rule.definition,
        lambda *x, **options: delta_rule.delta_rule(*x[:5], state=x[5], **options),
        of_tokens=(0, 1, 2, 3, 4),
        forms=({"h_k": 4}, {"h_k": 2}),
        recurrent=lambda *x, **options: delta_rule.recurrent_delta_rule(*x[:5], state=x[5], **options),
        effect=delta_rule.delta_rule_effect,
        of_effect=(1, 2, 3, 4),
        chunks=(1, 8, 64),
        decay=3,
        long={"b": 1, "s": 256, "d_k": 16, "d_v": 16},
        kept=lambda leaves: 3 * leaves[5].numel(),  # states of segments
    )


def conv_layer(silu: bool) -> Layer:
    return Layer(
        short_conv,
        test_short_conv.inputs,
        partial(test_short_conv.definition, silu=silu),
        lambda *x, **options: (short_conv.short_conv(*x[:3], state=x[3], silu=silu, **options),),
        of_tokens=(0,),
        forms=({"width": 1}, {"width": 2}, {"width": 4}),
    )


LAYERS = {
    "delta rule": delta_layer("head"),
    "Kimi delta rule": delta_layer("channel"),
    "state space": Layer(
        state_space,
        test_state_space.inputs,
        test_state_space.definition,
        lambda *x, **options: state_space.state_space(*x[:6], state=x[6], **options),
        of_tokens=(0, 1, 3, 4),
        forms=({"g": 1}, {"g": 2}, {"g": 4}),
        recurrent=lambda *x, **options: state_space.recurrent_state_space(*x[:6], state=x[6], **options),
        effect=state_space.state_space_effect,
        of_effect=(0, 1, 2, 3),
        chunks=(1, 7, 8, 64),
        decay=1,
        long={"b": 1, "s": 256, "p": 16, "n": 16},
        # dt and dt A, for the whole and for the sum, and states of segments
        kept=lambda leaves: 3 * leaves[1].numel() + 3 * leaves[6].numel(),
    ),
    "convolution": conv_layer(silu=False),
    "convolution, SiLU": conv_layer(silu=True),
}
WITH_STATES = [name for name, layer in LAYERS.items() if layer.effect]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Several in each test."""
    monkeypatch.setattr(delta_rule, "SEGMENT", 16)
    monkeypatch.setattr(state_space, "SEGMENT", 16)
    monkeypatch.setattr(short_conv, "BLOCK", 16)


def in_parts(layer: Layer, leaves, lengths) -> list[list]:
    """The leaves of each part of the sequence: those of tokens are split."""
    split = {at: leaves[at].split(lengths, 1) for at in layer.of_tokens}
    return [
        [split[at][part] if at in split else x for at, x in enumerate(leaves)] for part in range(len(lengths))
    ]


def joined(outputs: list, last: tuple) -> tuple:
    return torch.cat(outputs, 1), *last


@EITHER
@pytest.mark.parametrize(
    "name, sizes", [(name, sizes) for name, layer in LAYERS.items() for sizes in layer.forms], ids=str
)
def test_a_layer_is_its_formula(name, sizes, documents):
    """All results and gradients in fp64, for chunks that divide 37 tokens and for others."""
    layer = LAYERS[name]
    leaves = layer.inputs(**sizes)
    want = results(lambda *leaves: layer.definition(*leaves, documents=documents), leaves)
    ways = [partial(layer.run, chunk=chunk) for chunk in layer.chunks] or [layer.run]
    for way in [*ways, layer.recurrent] if layer.recurrent else ways:
        assert_near(results(partial(way, documents=documents), leaves), want, 1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_documents_are_separate_sequences(name):
    layer = LAYERS[name]
    leaves = layer.inputs(b=1)
    run = partial(layer.run, chunk=8) if layer.chunks else layer.run

    def apart(*leaves):
        parts = in_parts(layer, leaves, DOCUMENTS[0])
        done = [run(*part[:-1], None if number else part[-1]) for number, part in enumerate(parts)]
        return joined([out for out, *_ in done], tuple(done[-1][1:]))

    together = partial(run, documents=ids(DOCUMENTS[:1]))
    assert_near(results(together, leaves), results(apart, leaves), 1e-10)


@EITHER
@pytest.mark.parametrize("name", WITH_STATES)
def test_parts_with_passed_states_are_the_whole(name, documents):
    """As ranks of context parallelism have them: each knows its effect first, then the state before it. One
    part starts with a document, and one is of several chunks and segments.
    """
    layer = LAYERS[name]
    leaves = layer.inputs()
    lengths = (8, 22, 7)
    owners = [{} for _ in lengths]
    if documents is not None:
        of_parts = documents.split(lengths, 1)
        owners = [{"documents": docs} for docs in of_parts]
        for own, before in zip(owners[1:], of_parts):
            own["state_document"] = before[:, -1]

    def passed(*leaves):
        parts, state = in_parts(layer, leaves, lengths), leaves[-1]
        effects = [
            layer.effect(*(part[at] for at in layer.of_effect), **own, chunk=8)
            for part, own in zip(parts, owners)
        ]
        last_state = effects[0].then(effects[1]).then(effects[2]).on(state)
        outputs = []
        for part, own, effect in zip(parts, owners, effects):
            out, after = layer.run(*part[:-1], state, **own, chunk=8)
            state = effect.on(state)
            torch.testing.assert_close(after, state, rtol=1e-10, atol=1e-10)
            outputs.append(out)
        return joined(outputs, (last_state,))

    assert_near(results(passed, leaves), results(partial(layer.run, documents=documents), leaves), 1e-10)


@pytest.mark.parametrize("name", WITH_STATES)
def test_generation_continues_from_the_state(name):
    layer = LAYERS[name]
    leaves = layer.inputs()
    first, *tokens = in_parts(layer, leaves, [30] + [1] * (TOKENS - 30))
    out, state = layer.run(*first)
    outputs = [out]
    for token in tokens:
        out, state = layer.recurrent(*token[:-1], state)
        outputs.append(out)
    assert_near(joined(outputs, (state,)), layer.run(*leaves), 1e-10)


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_strong_decays_in_fp32(name, strength):
    """Sums of a chunk reach thousands: a late decay must not be a difference of them in fp32."""
    layer = LAYERS[name]
    leaves = [x.detach() for x in layer.inputs(s=64, strength=strength)]
    leaves[layer.decay][:, 40:] /= 1000 * strength
    decay = leaves[3] if layer.module is delta_rule else leaves[1] * leaves[2]
    assert strength == 1 or decay.sum(1).min() < -1000
    leaves = copies(leaves, torch.float32)
    want = results(layer.definition, copies(leaves, torch.float64))
    assert_near(results(layer.run, leaves), want, 3e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_bf16_inputs_are_computed_in_fp32(name):
    """One rounding of each result; states stay in fp32."""
    layer = LAYERS[name]
    leaves = layer.inputs(dtype=torch.bfloat16)
    if layer.effect:
        leaves[-1] = leaves[-1].detach().float().requires_grad_()
    found = results(partial(layer.run, chunk=8) if layer.chunks else layer.run, leaves)
    states = [torch.float32] if layer.effect else []
    assert [x.dtype for x in found] == [torch.bfloat16, *states, *(x.dtype for x in leaves)]
    want = results(layer.definition, copies(leaves, torch.float64))
    assert_near(found, want, 3e-3)
    if layer.effect:
        assert_near((found[1], found[-1]), (want[1], want[-1]), 1e-5)


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_backward_keeps_inputs_and_the_states_of_segments(monkeypatch, name):
    layer = LAYERS[name]
    monkeypatch.setattr(layer.module, "SEGMENT", 64)
    leaves = layer.inputs(**layer.long)
    kept, _ = saved_elements(lambda: layer.run(*leaves, chunk=16))
    assert kept <= sum(x.numel() for x in leaves) + layer.kept(leaves)
