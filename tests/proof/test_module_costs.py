"""scripts.verify --cost: what the modules of every family say that they cost is so, and what they forget is
seen.
"""

from dataclasses import replace

import pytest

import config
from model import describe
from model.attention import AttentionCore
from model.mlp import MLP
from parallel.cost import Cost
from parallel.tensor.layers import ColumnLinear, RowLinear
from proof import module_costs
from proof.verify.command import main
from proof.verify.overrides import Overrides
from runtime.failure import fail_cleanly

CACHES = (
    describe.cost_of_part,
    describe.cost_of_stage,
    describe.describe_ends,
    describe.describe_block,
    describe.describe_stage,
    describe.describe_modules,
)
FAMILIES = sorted(name.removesuffix("-tiny") for name in config.recipes() if name.endswith("-tiny"))


@pytest.fixture
def pool(ranks, monkeypatch):
    """The pool of the tests in the place of the command's own."""
    monkeypatch.setattr(module_costs, "WorkerPool", ranks)
    monkeypatch.setattr(type(ranks(2)), "close", lambda self: None)


@pytest.fixture
def fresh_costs():
    """Costs are computed once for a module: without what a test has replaced, before and after it."""
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_costs_what_its_modules_say(pool, capsys, family):
    assert main([f"{family}-tiny", "--cost"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3", "deepseek-v3"])
def test_a_factor_of_the_scores_costs_what_the_modules_say(pool, capsys, family):
    factor = ["--model.mup_base", "16", "--model.mup_head_dim", "2"]
    assert main([f"{family}-tiny", "--cost", *factor]) == 0, capsys.readouterr().out


def forget(monkeypatch, module: type, **kept: object) -> None:
    """The module says a cost without some of its fields."""
    said = module.cost

    def forgetful(self, *args: object, **named: object) -> Cost:
        return replace(said(self, *args, **named), **kept)

    monkeypatch.setattr(module, "cost", forgetful)


@pytest.mark.slow(every=7)
@pytest.mark.parametrize(
    "module, field, says, layout",
    [
        (ColumnLinear, "products", "products: ", {}),
        (RowLinear, "products", "products: ", {}),
        (ColumnLinear, "exchanges", "exchanges: ", {"tp": 2, "sp": True}),
        (RowLinear, "saved", "saved: ", {"pp": 2}),
        (MLP, "saved", "saved: ", {"zero": 3}),
        (AttentionCore, "saved", "saved: ", {"tp": 2}),
        (AttentionCore, "exchanges", "exchanges: send in cp", {"cp": 2, "cp_kind": "ring"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_a_module_forgets_is_seen(pool, monkeypatch, capsys, fresh_costs, module, field, says, layout):
    monkeypatch.setattr(module_costs, "LAYOUTS", (layout,))
    forget(monkeypatch, module, **{field: ()})
    assert main(["llama3-tiny", "--cost"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith(says) for line in lines), lines
    assert any(line.startswith("WRONG") for line in lines)


def test_a_layout_that_a_model_cannot_have_is_refused_and_the_others_run(pool, monkeypatch, capsys):
    monkeypatch.setattr(module_costs, "LAYOUTS", ({}, {"tp": 2}, {"ep": 2}))
    one_head = Overrides((("model.heads", "1"), ("model.kv_heads", "1")))
    assert module_costs.check("llama3-tiny", False, one_head) == 0
    out = capsys.readouterr().out
    assert "refused tp=2: parallel.tp" in out and "refused ep=2: model.experts" in out
    assert "1 of 1 layouts cost" in out


def test_keys_beside_the_model_are_refused(capsys):
    assert fail_cleanly(main, ["llama3-tiny", "--cost", "--optim.lr", "1"]) == 2
    assert "optim.lr: --cost sets every key but those of the model" in capsys.readouterr().err


def test_the_definition_of_attention_is_refused_in_one_line(capsys):
    words = ["llama3-tiny", "--cost", "--model.attention", "reference"]
    assert fail_cleanly(main, words) == 2
    assert capsys.readouterr().err.startswith("error: model.attention: reference is the definition, ")
