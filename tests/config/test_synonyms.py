"""Words of other frameworks are answered with our keys."""
import re
from pathlib import Path

import pytest

import config
from config import ConfigError
from config.reading import resolve
from config.reading.earlier import NEW_NAMES
from config.reading.kinds import every_path
from config.reading.parse import CONFIG_FOLDER, build_tree, synonyms
from config.strict import read_yaml

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
EARLIER_KEYS = Path(__file__).parents[2] / "lab" / "docs" / "earlier-keys.md"


def refusal(*argv):
    with pytest.raises(ConfigError) as error:
        resolve("llama3-tiny", None, list(argv))
    return str(error.value)


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("typed,meant", [
    ("--train.bf16", "train.dtype bf16"),
    ("--checkpoint.load", "checkpoint.init_from"),
    ("--model.num_attention_heads", "model.mixer.heads"),
    ("--model.ffn_hidden_size", "model.mlp.width"),
    ("--train.max_iters", "train.steps"),
    ("--train.batch_size", "train.micro_batch"),
    ("--optim.learning_rate", "optim.lr"),
    ("--parallel.fsdp", "parallel.zero"),
    ("--optim.schedule", "optim.decay"),
    ("--tensor-model-parallel-size", "parallel.tp"),
    ("--train.lr", "optim.lr"),
])
def test_a_word_of_another_framework_is_answered_with_our_key(typed, meant):
    assert refusal(typed, "2").endswith(f": no such key; did you mean {meant}?")


def test_what_is_offered_is_accepted():
    words = [word for listed in read_yaml(CONFIG_FOLDER / "synonyms.yaml").values() for word in listed]
    assert sorted(words) == sorted(set(words)), "a word with two meanings"
    for setting in synonyms().values():
        path, _, value = setting.partition(" ")
        assert path in every_path(config.Config), setting
        if value:
            kind = {"model.mlp.kind": "experts"} if path.startswith("model.mlp.") else {}
            build_tree(config.Config, {**kind, path: value})


def glossary_rows():
    """(our keys, the settings of others) of each row that has both."""
    for line in GLOSSARY.read_text().splitlines():
        ours, *theirs = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("| ").split(" | "))
        keys = [word.split()[0] for word in ours if re.fullmatch(r"[a-z]+(\.\w+)+( \w+)?", word)]
        if keys and theirs:
            yield keys, [word for cell in theirs for word in cell]


@pytest.mark.skipif(not EARLIER_KEYS.exists(), reason="a clone without lab/ does not have the page")
def test_the_page_of_earlier_keys_has_old_names_beside_new():
    text = EARLIER_KEYS.read_text()
    rows = re.findall(r"^\| `(model\.[\w.]+)` \| `(model\.[^|]+)` \|$", text, re.MULTILINE)
    assert dict(rows) == {old: new.replace(" and ", "`, `") for old, new in NEW_NAMES.items()}


def test_the_settings_of_the_glossary_are_known():
    """Those that are single words, as one would type them; the longer ones are explanations."""
    keys_of: dict[str, set[str]] = {}
    for keys, others in glossary_rows():
        for word in others:
            name = word.removeprefix("--").replace("-", "_").split(".")[-1]
            if re.fullmatch(r"[a-z0-9_]+", name):
                keys_of.setdefault(name, set()).update(keys)

    own = {path.rpartition(".")[2] for path in every_path(config.Config)}
    too_general = {"type", "interval", "freq", "enabled", "mode"}  # outside of the section of their framework
    wrong = {}
    for name in sorted(keys_of.keys() - own - too_general):
        answer = refusal(f"--{name}", "2")
        if not any(
            f"did you mean {key}" in answer or f"it is {key} now" in answer for key in keys_of[name]
        ):
            wrong[name] = answer
    assert not wrong
    assert len(keys_of) > 100
