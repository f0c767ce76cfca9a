"""config/reading/function.py names exactly the keys that change what weights compute: every key is changed in
a tiny model, and its logits in fp64, and the names and shapes of its weights, are looked at.
"""

import dataclasses
import typing
import zlib

import pytest
import torch
from test_model_keys import CASES, ELSEWHERE, OTHER_KINDS, SIZE, TRAIN, Case, once

import config.reading
from checkpoint.trained import weights_only
from config import ConfigError, ModelConfig
from config.reading import from_tree, function, merge
from config.reading.kinds import every_path
from config.reading.suggestions import check_rules
from config.tree import has_path, is_below

TOKENS = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(4))
KINDS = {"plain": {}, **OTHER_KINDS}
ROUNDS = {"dtype", "fp8", "fp8_block", "fp8_keep", "compile"}  # of train.*: how it is rounded


@dataclasses.dataclass(frozen=True)
class Seen:
    """model: as the config has it. shapes: of its weights, by name. logits: of TOKENS."""

    model: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    logits: torch.Tensor

    def differs_from(self, other: "Seen") -> bool:
        if self.shapes != other.shapes or self.logits.shape != other.logits.shape:
            return True
        return not torch.allclose(self.logits, other.logits, rtol=1e-11, atol=1e-14)


def fill(key: str, tensor: torch.Tensor) -> None:
    """Numbers that follow from the name of the weight."""
    stream = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    tensor.copy_(0.3 * torch.randn(tensor.shape, generator=stream, dtype=torch.float64))
    if key.endswith("norm.weight"):
        tensor += 1


@torch.no_grad()
def look(model: dict, **sections) -> Seen:
    """The model with weights that follow from their names. Raises ConfigError where it is refused."""
    model = {"preset": "llama2-tiny", **SIZE, **model}
    tree = {"model": model, "train": TRAIN, "log": {"name": "function"}}
    cfg = from_tree(merge(tree, sections))
    if not sections:
        check_rules(cfg)
    stage, boxes = weights_only(cfg, torch.device("cpu"), "fp64")
    for box, tensor in boxes:
        fill(box.key, tensor)
    logits = stage.logits(TOKENS, torch.arange(16).expand(2, 16))
    return Seen(cfg.model, {box.key: box.shape for box, _ in boxes}, logits)


@pytest.fixture(scope="module")
def seen():
    return once(look)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_key_is_named_if_and_only_if_the_function_changes(seen, case: Case):
    """In the model where it acts, and in every kind of model."""
    for base in (case.base, *({**kind, **case.base} for kind in KINDS.values()), *KINDS.values()):
        changed = case.changed(base)
        if changed == base:
            continue
        try:
            before, after = seen(base), seen(changed)
        except ConfigError:  # there is no such model
            continue
        named = function.differences(before.model, after.model)
        # of a part that was not there, the part is named; of kinds of blocks, what a layer has otherwise
        key = case.key if has_path(before.model, case.key) else case.key.rpartition(".")[0]
        if key in ("blocks", "pattern"):
            key = "mlp.kind" if "dense" in base["blocks"] else "mixer.window"
        expected = {f"model.{key}"} if after.differs_from(before) else set()
        assert set(named) == expected, (case.key, base)
        if before.shapes != after.shapes:
            assert not function.leaves_weights_alone(f"model.{case.key}")


def test_every_key_of_the_model_is_tried():
    names = every_path(ModelConfig).keys()
    assert {case.key for case in CASES} == names - ELSEWHERE.keys()
    assert function.FUNCTION_KEYS.isdisjoint(f"model.{key}" for key in function.NOT_THE_FUNCTION)
    others = {path for path in names if is_below(path, function.NOT_THE_FUNCTION)}
    assert function.FUNCTION_KEYS == {f"model.{path}" for path in names - others}
    for part in function.VALUES_ALONE:
        assert any(is_below(path, (part,)) for path in function.FUNCTION_KEYS), part


@pytest.mark.parametrize("model, same", [
    ({"mixer.kv_heads": 4}, {}),  # as many as heads
    ({"mixer.head_dim": 8}, {}),  # hidden / heads
    ({"mup.base": 32}, {}),  # as wide as the base
    ({"vocab_multiple": 64}, {}),  # 100 ids take 128 rows either way
], ids=str)
def test_a_value_that_is_written_otherwise_is_the_same_function(seen, model, same):
    before, after = seen(same), look(model)
    assert not after.differs_from(before)
    assert function.differences(before.model, after.model) == {}


def changed_value(kind: object, value: object) -> object:
    """Another value of a key of this type."""
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != value)
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if members:
        return changed_value(members[0], value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return kind((value or 0) * 2 + 1)
    return "1"


@pytest.mark.parametrize("name", [name for name in config.reading.sections() if name != "model"])
def test_keys_of_other_sections_do_not_change_it(seen, name):
    base = {"mlp.kind": "experts", "mlp.experts": 4, "dropout": 0.1}
    section = config.reading.sections()[name]
    for key, kind in typing.get_type_hints(section).items():
        if (name == "train" and key in ROUNDS) or key == "phases":
            continue
        value = changed_value(kind, {**TRAIN, **dataclasses.asdict(section())}[key])
        if key == "groups":
            value = "embedding: lr_factor 2"
        after = look(base, **{name: {key: value}})
        assert not after.differs_from(seen(base)), f"{name}.{key}"
