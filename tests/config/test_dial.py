"""train.py NAME --depth N: a recipe at another size, whose width, length, batch and rates follow."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from checkpoint import branch
from config import ConfigError
from config.reading import resolve, split_argv, stated_keys
from config.tree import differing_leaves

ROOT = pathlib.Path(__file__).parents[2]


def at(words: str):
    """The config of a command line of train.py."""
    return resolve(*split_argv(words.split()))


def by_hand(depth: int, reference: int = 12, vocab: int = 32768, tokens: float = 1.3212e9, batch: int = 2**19,
            decay: float = 0.4) -> dict[str, float]:
    """The rules of nanochat's base_train.py for a model of 12 width^2 weights a layer and an output head."""
    def weights(layers: int) -> int:
        width = -(-layers * 64 // 128) * 128
        return layers * 12 * width**2 + vocab * width

    longer = weights(depth) / weights(reference)
    size = 2 ** round(math.log2(batch * longer**0.383))
    return {
        "width": -(-depth * 64 // 128) * 128,
        "tokens": round(tokens * longer),
        "batch": size,
        "rate": 3.6e-3 * math.sqrt(size / batch),
        "decay": decay * math.sqrt(size / batch) / longer,
    }


@pytest.mark.parametrize("depth", [4, 9, 12, 20, 26])
def test_a_depth_of_the_speedrun_has_the_sizes_batch_and_rates_of_nanochats_rules(depth):
    cfg, expected = at(f"speedrun --depth {depth}"), by_hand(depth)
    assert (cfg.model.layers, cfg.model.hidden) == (depth, expected["width"])
    assert cfg.model.mixer.heads * 128 == cfg.model.hidden and cfg.model.mlp.width == 4 * cfg.model.hidden
    assert cfg.train.tokens == expected["tokens"]
    assert cfg.train.global_batch * cfg.train.seq_len == expected["batch"]
    rate = cfg.optim.lr * math.sqrt(cfg.train.global_batch / cfg.optim.base_batch)
    assert (cfg.optim.lr_rule, rate) == ("sqrt", pytest.approx(expected["rate"]))
    assert cfg.optim.weight_decay == pytest.approx(expected["decay"], rel=1e-3)
    assert cfg.model.mup.base == 768
    assert cfg.log.name == f"speedrun-d{depth}"


@pytest.mark.parametrize("name", ["quickstart", "gpt2", "olmo2-190m", "mixtral-tiny"])
def test_the_depth_of_the_recipe_itself_changes_no_size_length_batch_or_rate(name):
    recipe = at(name)
    same = at(f"{name} --depth={recipe.model.layers}")
    changed = set(differing_leaves(recipe, same))
    named = {"model.mup", "log.name", "optim.lr_rule", "optim.base_batch", "train.steps", "train.tokens"}
    assert {path for path in changed if path not in named and not path.startswith("model.mup")} == set()
    length = recipe.train.tokens or recipe.train.steps * recipe.train.global_batch * recipe.train.seq_len
    assert (same.train.tokens, same.optim.base_batch) == (length, same.train.global_batch)


def test_experts_that_a_token_does_not_choose_and_its_embedding_do_not_lengthen_the_run():
    few, many = (at(f"mixtral-tiny --depth 8 --model.vocab 512 --model.mlp.experts {n}") for n in (8, 16))
    assert few.train.tokens == pytest.approx(many.train.tokens, rel=2e-2)  # routers alone differ
    settings = "quickstart --depth 8 --model.vocab 512 --model.tied"
    own, tied = (at(f"{settings} {word}") for word in ("false", "true"))
    assert own.train.tokens == tied.train.tokens


def test_what_is_stated_beside_the_depth_wins_and_the_rest_follows_from_it():
    batch = at("speedrun --depth 20 --train.global_batch 1024")
    assert (batch.train.global_batch, batch.optim.base_batch, batch.optim.lr) == (1024, 256, 3.6e-3)
    longer = at("speedrun --depth 12 --train.tokens 5.2848e9")
    assert longer.train.global_batch == 256 * 2 ** round(0.383 * 2)
    assert longer.optim.weight_decay == pytest.approx(0.4 * math.sqrt(2) / 4, rel=1e-3)
    for words in ("--train.steps 7", "--train.tokens none --train.steps 7"):
        steps = at(f"speedrun --depth 20 {words}").train
        assert (steps.steps, steps.tokens, steps.global_batch) == (7, None, 512)
    wide = at("speedrun --depth 12 --model.hidden 1536")
    assert (wide.model.layers, wide.model.mixer.heads, wide.model.mlp.width) == (12, 12, 6144)
    short = at("speedrun --depth 12 --train.seq_len 1024")
    assert (short.train.global_batch, short.optim.base_batch) == (512, 512)
    decay = at("speedrun --depth 20 --optim.weight_decay 0.8 --optim.lr 1e-3")
    as_in_recipe = at("speedrun --depth 20").optim.weight_decay
    assert decay.optim.weight_decay == pytest.approx(2 * as_in_recipe, rel=1e-3)
    assert decay.optim.lr == 1e-3
    other = at("quickstart --depth 16 --model.preset llama3-8b")
    assert (other.model.hidden, other.model.mixer.heads, other.model.mixer.kv_heads) == (2048, 16, 4)


def test_a_part_that_is_stated_as_a_whole_wins():
    cfg = at("quickstart --depth 2 --model.mup none")
    assert (cfg.model.layers, cfg.model.mup) == (2, None)
    assert at("quickstart --depth 2 --model.mlp none").model.mlp.kind == "none"


@pytest.mark.parametrize("words, expected", [
    ("speedrun --depth", "--depth: needs a number of layers, such as 12"),
    ("speedrun --depth deep", "--depth: expected a number of layers, such as 12, got 'deep'"),
    ("speedrun --depth 0", "--depth: expected a number of layers, such as 12, got '0'"),
    ("speedrun --depth ²", "--depth: expected a number of layers, such as 12, got '²'"),
    ("speedrun --depth 8 --depth=9", "--depth: is given twice; keep one"),
    ("speedrun --depth 8 --model.layers 9", "--depth: model.layers is stated, too; keep one"),
    ("speedrun --depth 8 --model.hidden 0", "model.hidden: 0 must be above 0"),
    ("speedrun --depth 8 --train.tokens 0", "train.tokens: 0.0 must be above 0, or none"),
    ("speedrun --depth 8 --train.seq_len 0", "train.seq_len: 0 must be above 0"),
    ("speedrun --depth 8 --train.global_batch 0", "train.global_batch: 0 must be above 0"),
    ("speedrn --depth 8", "speedrn: no such recipe; did you mean speedrun?"),
    ("gemma3-tiny --depth 8 --model.pattern local,block", "model.pattern"),
])
def test_a_depth_that_cannot_be_is_refused_in_one_line(words, expected):
    with pytest.raises(ConfigError) as error:
        at(words)
    assert expected in str(error.value)


@pytest.mark.parametrize("keys, expected", [
    ("train: {flops: 1.0e+15}", "--depth: file has neither train.steps nor train.tokens"),
    ("train: {steps: 9, ramp: '2,2,8'}", "--depth: train.ramp of file counts the steps of its own size"),
])
def test_a_file_whose_length_cannot_grow_is_refused(tmp_path, keys, expected):
    file = tmp_path / "file.yaml"
    file.write_text(f"model: {{preset: llama-mini}}\nlog: {{name: file}}\n{keys}\n")
    with pytest.raises(ConfigError, match=expected):
        at(f"--config {file} --depth 8")


def test_a_branch_keeps_its_sizes():
    with pytest.raises(ConfigError, match="a branch keeps the settings of runs/a; leave the recipe out"):
        branch.resolve(*split_argv("--depth 8 --checkpoint.branch runs/a".split()))


def test_what_takes_a_recipe_takes_it_at_a_depth():
    assert at("speedrun-d20") == at("speedrun --depth 20")
    assert at("d2").log.name == "d2" and at("--depth 2").log.name == "quickstart-d2"
    assert stated_keys(None, split_argv("quickstart --depth 2 --optim.lr 1e-3".split())[2]) == {"optim.lr"}
    with pytest.raises(ConfigError, match="quickstart-d8: no such recipe"):
        at("quickstart-d8 --depth 6")


def test_a_loop_over_a_rate_at_a_depth_makes_a_run_for_each(tmp_path):
    """The first is quickstart-d2, the second is named by its rate."""
    keys = ["--train.steps", "2", "--train.seq_len", "32", "--eval.every", "none", "--log.dir", str(tmp_path)]
    for rate in ("1e-3", "2e-3"):
        words = [sys.executable, "train.py", "quickstart", "--depth", "2", *keys, "--optim.lr", rate]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"quickstart-d2", "quickstart-d2+optim.lr=0.002"}


def test_train_py_turns_the_dial_trains_resumes_and_shows_it(tmp_path):
    def run(*words):
        return subprocess.run([sys.executable, "train.py", "quickstart", "--depth", "2", *words],
                              cwd=ROOT, capture_output=True, text=True, timeout=300)

    where = ["--log.dir", str(tmp_path), "--train.seq_len", "32", "--train.tokens", "256"]
    where += ["--checkpoint.every", "2", "--eval.every", "none"]
    first = run(*where)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 layers · d 64 · 2 heads" in first.stdout
    again = run(*where)
    assert "the run is already finished" in again.stdout
    rows = [json.loads(line) for line in (tmp_path / "quickstart-d2/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row]
    shown = run("--help", "model.hidden")
    assert "here: 64" in shown.stdout


def test_at_its_own_depth_a_recipe_trains_bit_for_bit_as_without_the_dial(tmp_path):
    losses = []
    for name, words in (("with", ["--depth", "4"]), ("without", [])):
        keys = ["--log.dir", str(tmp_path), "--log.name", name, "--train.steps", "3",
                "--eval.every", "none", "--log.every", "1", "--checkpoint.every", "none"]
        done = subprocess.run([sys.executable, "train.py", "quickstart", *words, *keys], cwd=ROOT,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert len(losses[0]) == 3 and losses[0] == losses[1]
