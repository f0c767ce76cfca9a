"""optim.groups: what is refused, and which parameters a pattern has under every layout."""

import pytest

from config import ConfigError
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from config.tree import with_values
from model.describe import all_parameters
from model.transformer import PipelineStage
from parallel.sharding.spec import sharded_parameters
from parallel.topology.mesh import Mesh

WAYS_OUT = {
    "tables: lr_factor 2": "tables names no parameter .* use a role .embedding, .* or a pattern",
    "layers.9.*: lr_factor 2": "layers.9.* names no parameter",
    "hidden: lr_factor 2; layers.*.attn.q.weight: lr_factor 3": "layers.*.attn.q.weight names no parameter",
    "norm: weight_decay 0.1": "norm: weight_decay 0.1, and none of these parameters decays",
    "layers.*.attn.q.weight: lr_factor 2": "attn.q.weight and layers.0.attn.k.weight are updated together",
    "embedding": "expected NAMES: lr_factor NUMBER, weight_decay NUMBER; write it as",
    ": lr_factor 2": "expected NAMES",
    "embedding: lr 2": "'lr' is not one of lr_factor, weight_decay",
    "embedding: lr_factor": "lr_factor needs a number that is not negative, got ''",
    "embedding: lr_factor -2": "needs a number that is not negative, got '-2'",
    "embedding: lr_factor 1.2.3": "needs a number that is not negative, got '1.2.3'",
    "embedding: lr_factor nan": "needs a number that is not negative, got 'nan'",
    "embedding: lr_factor 1, lr_factor 2": "lr_factor is given twice",
}


@pytest.mark.parametrize("groups,way_out", WAYS_OUT.items(), ids=WAYS_OUT)
def test_groups_that_cannot_be_are_refused_in_one_line(groups, way_out):
    with pytest.raises(ConfigError, match=rf"^optim\.groups: .*{way_out}") as error:
        plan_pipeline(resolve("llama3-tiny", None, ["--optim.groups", groups]), 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", ["llama3-tiny", "deepseek-v3-tiny", "kimi-delta-tiny", "gpt2-tiny"])
def test_the_names_that_are_checked_are_those_of_the_model(recipe):
    """The description has a block of each kind once, and names the parameters of the others after theirs."""
    cfg = with_values(resolve(recipe, None, []), {"model.vocab": 500})
    stage = PipelineStage(cfg, Mesh.single(), 0, cfg.model.layers)
    built = {(p.spec.role, box.key) for p in sharded_parameters(stage) for box in p.spec.boxes}
    assert {(spec.role, key) for spec, keys in all_parameters(cfg.model) for key in keys} == built
