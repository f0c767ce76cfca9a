"""Each row of config/optimizers.py against the class that it names: state, buckets, and what it supports."""

from dataclasses import replace

import pytest
import torch

from build import build_run, optimizer_class
from config import OPTIMIZERS, Config, ConfigError, MupConfig
from config.optimizers import optimizers_that, to_text
from config.reading.suggestions import check_rules
from config.reading.tiny import tiny_config
from optim.base import Optimizer
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh

YES = torch.tensor(True)


def with_optimizer(name: str, offload: str = "none", states: str = "fp32") -> Config:
    cfg = tiny_config("mixtral-tiny")
    optim = replace(cfg.optim, name=name, states=states)
    return replace(cfg, optim=optim, parallel=replace(cfg.parallel, offload=offload))


def masters_after_a_step(cfg: Config) -> dict[str, torch.Tensor]:
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 10)
    stream = torch.Generator().manual_seed(0)
    for bucket in run.buckets:
        bucket.grads.local.normal_(generator=stream)
    run.optim.step(1, 0.01, torch.tensor(1.0, dtype=torch.float64), YES)
    return {box.key: part for bucket in run.buckets for box, part in get_boxes(bucket, bucket.weights.master)}


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_class_keeps_what_the_row_says(name):
    run = build_run(with_optimizer(name), Mesh.single(), torch.device("cpu"), None, 10)
    assert type(run.optim) is optimizer_class(name) and isinstance(run.optim, Optimizer)
    spec = OPTIMIZERS[name]
    for index, bucket in enumerate(run.buckets):
        moments = [flats[index] for flats in run.optim.state().values() if flats[index] is not None]
        assert {moment.shape for moment in moments} == {bucket.weights.master.shape}
        assert len(moments) == spec.moments_for(bucket.is_hidden), bucket
    assert any(bucket.is_hidden for bucket in run.buckets) == spec.needs_whole_matrices
    if spec.implementation_8bit:
        run = build_run(with_optimizer(name, states="8bit"), Mesh.single(), torch.device("cpu"), None, 10)
        assert type(run.optim) is optimizer_class(name, "8bit") is not optimizer_class(name)
        assert len(run.optim.state()) == spec.moments
    else:
        with pytest.raises(ConfigError, match=f"^optim.states: 8bit is of .* optim.name={name}; use "):
            check_rules(with_optimizer(name, states="8bit"))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offload_and_bf16_states_are_as_the_row_says(name):
    """Offloaded state gives the same weights; states in bf16 nearly the same. Others are refused."""
    spec, plain = OPTIMIZERS[name], masters_after_a_step(with_optimizer(name))
    offloaded, narrow = with_optimizer(name, offload="optimizer"), with_optimizer(name, states="bf16")
    if spec.supports_offload:
        there = masters_after_a_step(offloaded)
        assert all(torch.equal(there[key], plain[key]) for key in plain)
    else:
        with pytest.raises(ConfigError, match=f"^parallel.offload: .* optim.name is {name}; use none"):
            check_rules(offloaded)
    if spec.supports_bf16_states:
        for key, rounded in masters_after_a_step(narrow).items():
            assert rounded.dtype == torch.bfloat16
            torch.testing.assert_close(rounded.double(), plain[key], rtol=2**-6, atol=1e-3)
    else:
        with pytest.raises(ConfigError, match=f"^optim.states: .* optim.name={name}; use "):
            check_rules(narrow)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mup_is_as_the_row_says(name):
    cfg = with_optimizer(name)
    cfg = replace(cfg, model=replace(cfg.model, mup=MupConfig(base=16)))
    if OPTIMIZERS[name].why_no_mup:
        others = to_text(optimizers_that(lambda spec: not spec.why_no_mup), "or")
        with pytest.raises(ConfigError, match=f"^optim.name: {name} does not support muP .*; use {others}$"):
            check_rules(cfg)
    else:
        check_rules(cfg)


def test_a_list_in_words():
    assert [to_text([*names]) for names in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
    assert to_text(["a", "b", "c"], "or") == "a, b or c"
