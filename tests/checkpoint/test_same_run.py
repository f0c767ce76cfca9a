"""checkpoint/state.py: what is said of a run that resumes from a checkpoint of other settings or data."""

from types import SimpleNamespace

import pytest
import torch

from checkpoint.origin import UNKNOWN
from checkpoint.state import check_same_run
from config import ConfigError
from config.pattern import BlockVariant
from config.reading import defaults, get_phases
from config.tree import plain_data, with_values
from model.rope import YarnScaling

STEP = 3
WHERE = "runs/one/checkpoints/step_00000003"
TOKENIZER, DATA = "0123456789abcdef", "fedcba9876543210"
NEW_RUN = "start a new run from its weights: --log.name OTHER --checkpoint.init_from"


def config_with(**settings):
    """{section__key: value}"""
    return with_values(defaults(), {name.replace("__", "."): value for name, value in settings.items()})


def compared(old=(), new=(), *, in_memory=False, **meta):
    """The warnings of a run with settings `new` that resumes from a checkpoint with settings `old`."""
    phases = get_phases(config_with(**dict(new)))
    tokenizer = SimpleNamespace(fingerprint=TOKENIZER)
    data = SimpleNamespace(tokenizer=tokenizer, fingerprint=DATA, has_start=False)
    run = SimpleNamespace(cfg=phases.whole, phases=phases, phase=phases.all[0], steps=9, data=data)
    meta = {"step": STEP, "steps": 9, "config": plain_data(config_with(**dict(old))), "tokenizer": TOKENIZER,
            "data": DATA, "bos": False, "torch": torch.__version__, **meta}
    return check_same_run(meta, run, "the checkpoint" if in_memory else WHERE, in_memory)


def refused(*settings, **more):
    with pytest.raises(ConfigError) as error:
        compared(*settings, **more)
    return str(error.value)


@pytest.mark.parametrize("old, new, warnings", [
    ({}, {}, []),
    ({}, {"optim__lr": 0.5}, [f"resumed with a different optim.lr ({defaults().optim.lr} -> 0.5)"]),
    ({"data__valid": "a"}, {"data__valid": "b"}, ["resumed with a different data.valid (a -> b)"]),
])
def test_what_may_change_is_a_warning(old, new, warnings):
    assert compared(old, new) == warnings


def test_another_torch_is_a_warning():
    assert compared(torch="1.0") == [f"resumed with a different torch 1.0 -> {torch.__version__}"]


@pytest.mark.parametrize("key, old, new", [
    ("train__seed", 1, 2), ("train__global_batch", 8, 16), ("data__split", "9,1", "8,2"),
    ("data__valid", None, "a"), ("data__valid", "a", None), ("data__pack", "stream", "best_fit"),
    ("data__fim_rate", 0.0, 0.5),
])
@pytest.mark.parametrize("in_memory", [False, True])
def test_what_decides_the_samples_is_refused(key, old, new, in_memory):
    name, where = key.replace("__", "."), "the checkpoint" if in_memory else WHERE
    told = refused({key: old}, {key: new}, in_memory=in_memory)
    assert told.startswith(f"{name}: {where} was trained with {old}, not {new}; set it back, ")
    assert told.endswith(f"or {NEW_RUN} {'CHECKPOINT' if in_memory else WHERE}")


def with_kinds(pattern, **windows):
    blocks = tuple(BlockVariant(name, (("mixer.window", window),)) for name, window in windows.items())
    return {"model__layers": 4, "model__blocks": blocks, "model__pattern": pattern}


def test_other_names_of_the_same_layers_are_the_same_model():
    old = with_kinds("local, 2 block, local", local=8)
    assert compared(old, with_kinds("near, 2 block, near", near=8, unused=3)) == []
    assert compared(old, with_kinds("(local, block, block)...", local=8)) == []
    told = refused(old, with_kinds("local, block, near, local", local=8, near=7))
    assert told.startswith("model.blocks: ") and "set it back" in told
    told = refused(old, with_kinds("local, block, local, block", local=8))
    assert told.startswith("model.pattern: ") and "set it back" in told


@pytest.mark.parametrize("in_memory", [False, True])
def test_another_model_is_refused_with_what_to_state(in_memory):
    old, new = ({"model__layers": layers, "model__mixer__rope__base": layers / 2} for layers in (2, 3))
    told = refused(old, new, in_memory=in_memory)
    source = "CHECKPOINT" if in_memory else WHERE
    assert "trained with " in told and NEW_RUN in told
    words = told.split(f"{source} --checkpoint.init_changes ")[1]
    assert sorted(words.split(",")) == ["model.layers", "model.mixer.rope.base"]


def test_a_scaling_that_is_gone_is_another_model():
    old = {"model__mixer__rope__scaling": YarnScaling(factor=8.0)}
    told = refused(old, {})
    assert "model.mixer.rope.scaling: " in told and "not None" in told
    assert "trained with {kind: yarn, factor: 8.0, " in told
    assert "model.mixer.rope.scaling: " in refused({}, old)


def test_a_checkpoint_with_flat_keys_is_the_same_run():
    model = {"heads": 4, "ffn": 352, "rope_theta": 10000.0, "positions": "rope"}
    model |= {"kv_heads": None, "head_dim": None, "window": None, "attention": "auto", "bias": False}
    model |= {"qkv_bias": False, "qk_norm": False, "rope_factor": None, "activation": "swiglu"}
    model |= {"norm": "rmsnorm", "norm_eps": 1e-5, "layers": 2}
    tree = {**plain_data(defaults()), "model": model}
    assert compared({}, {"model__layers": 2}, config=tree) == []
    assert "model.mixer.heads: " in refused({}, {"model__layers": 2, "model__mixer__heads": 8}, config=tree)


def test_another_batch_is_refused_with_the_branch_that_may_have_it():
    told = refused({"train__global_batch": 8}, {"train__global_batch": 16})
    assert "--checkpoint.branch runs/one@3 --train.global_batch 16; or start" in told
    assert "branch" not in refused({"train__global_batch": 8}, {"train__global_batch": 16}, in_memory=True)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("bos, stating", [
    (False, ""), (None, ""), (True, " --checkpoint.init_changes data.bos")
])
def test_other_data_is_refused(in_memory, bos, stating):
    where, source = ("the checkpoint", "CHECKPOINT") if in_memory else (WHERE, WHERE)
    assert refused(in_memory=in_memory, data="0" * 16, bos=bos) == (
        f"data.path: the data of {where} has fingerprint {'0' * 12}, this one {DATA[:12]}; "
        f"give the same data and data.bos, or {NEW_RUN} {source}{stating}"
    )


def test_another_tokenizer_is_refused_without_its_weights():
    told = f"data.path: the tokenizer of {WHERE} has fingerprint {'0' * 12}, this one {TOKENIZER[:12]}; "
    assert refused(tokenizer="0" * 16) == (
        told + "set --data.tokenizer ITS_TOKENIZER, or start a new run: --log.name OTHER"
    )
    told = refused(tokenizer=UNKNOWN)
    assert f"has fingerprint {UNKNOWN}, " in told and "give the same data" in told
