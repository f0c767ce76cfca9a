"""The mean of checkpoints, against the mean by hand; what comes of it is a model that can be read."""

import pytest
import torch
from program import settings, trained
from ranks import corpus
from safetensors.torch import load_file

from checkpoint.disk import store
from checkpoint.trained import load_run
from config import ConfigError
from parallel.wire.world import World
from scripts import average


def weights(path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in path.glob("*.safetensors"):
        found |= load_file(shard)
    return {key: value for key, value in found.items() if "@" not in key}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("average")
    path = corpus(home)
    train = {"steps": 4, "dtype": "fp32"}
    for name, seed in (("one", 1), ("two", 2)):
        cfg = settings(path, train={**train, "seed": seed}, checkpoint={"every": 1, "keep": 9})
        assert trained(World(), cfg, str(home / name), lambda *_, **__: None) == 0
    return home


@pytest.mark.parametrize(
    "words, steps",
    [
        (["{one}@2", "{one}@4"], [("one", 2), ("one", 4)]),
        (["{one}@1", "{two}@4", "{one}"], [("one", 1), ("two", 4), ("one", 4)]),
        (["{one}", "--last", "3"], [("one", 2), ("one", 3), ("one", 4)]),
    ],
)
def test_the_mean_is_that_computed_by_hand(home, tmp_path, words, steps):
    names = {"one": home / "one", "two": home / "two"}
    argv = [word.format(**names) for word in words]
    position = next((index for index, word in enumerate(argv) if word == "--last"), len(argv))
    out = tmp_path / "out"
    assert average.main([*argv[:position], str(out), *argv[position:]]) == 0

    sources = [weights(home / name / "checkpoints" / f"step_{step:08d}") for name, step in steps]
    (path,) = [path for _, path in store.committed_checkpoints(out / "checkpoints")]
    found = weights(path)
    assert found.keys() == sources[0].keys()
    for key, value in found.items():
        mean = torch.stack([source[key].double() for source in sources]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-7, atol=1e-9)
    assert len(store.read_meta(path)["averaged"]) == len(steps)

    model = load_run(str(out), torch.device("cpu"))
    tokens = torch.arange(8)[None]
    assert torch.isfinite(model.logits(tokens, tokens.clone(), None, 7)).all()


def test_models_that_compute_otherwise_are_refused_and_others_are_not(home, tmp_path):
    models = {"theta": {"mixer.rope.base": 7.0}, "dropped": {"dropout": 0.1, "mixer.kernel": "sdpa"}}
    for name, model in models.items():
        path = str(home / "text")
        cfg = settings(path, train={"steps": 1, "dtype": "fp32"}, checkpoint={"every": 1}, model=model)
        assert trained(World(), cfg, str(home / name), lambda *_, **__: None) == 0
    wanted = "^model.mixer.rope.base: .*theta.* has 7.0, and .*one.* has 500000.0"
    with pytest.raises(ConfigError, match=wanted):
        average.main([str(home / "one"), str(home / "theta"), str(tmp_path / "out")])
    assert average.main([str(home / "one"), str(home / "dropped"), str(tmp_path / "out")]) == 0


def test_a_mean_that_cannot_be_is_refused(home, tmp_path):
    one = str(home / "one")
    for argv, words in (
        ([one, str(tmp_path / "out")], "at least two"),
        ([f"{one}@9", one, str(tmp_path / "out")], "no checkpoint at step 9; it has 1, 2, 3, 4"),
        ([one, one, str(tmp_path)], "exists already"),
        ([one, "--last", "7", str(tmp_path / "out")], "has 4 checkpoints"),
    ):
        with pytest.raises(ConfigError, match=words):
            average.main(argv)
    assert not (tmp_path / "out").exists()
