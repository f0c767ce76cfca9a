"""--help and --list: all that the keys' comments say, in words that the parser takes, at any width; files
parsed once.
"""

import dataclasses
import importlib
import re
import shlex
import sys
import tokenize

import pytest
import yaml

import train
from config import Config, ConfigError, schema, strict
from config.reading import (
    build_tree,
    defaults,
    dotted_overrides,
    loading,
    merge,
    parse,
    presets,
    recipes,
    resolve,
    usage,
)
from config.reading.kinds import every_path
from config.tree import field_types, get_kind, has_path, leaves, plain_data, value_at

EVERY = every_path(Config)


def comments() -> dict[str, str]:
    """{"ModelConfig.layers": its comment}, by Python's own tokenizer: every comment up to the next key."""
    out, section, key = {}, "", ""
    tokens = []
    for module in dict.fromkeys(part.__module__ for part, _ in EVERY.values()):
        with open(sys.modules[module].__file__, "rb") as f:
            tokens += tokenize.tokenize(f.readline)
    for i, token in enumerate(tokens):
        if token.type == tokenize.NAME and token.string == "class":
            section, key = tokens[i + 1].string, ""
        elif token.type == tokenize.NAME and token.string == "def":
            key = ""
        elif token.type == tokenize.NL and not token.line.strip():
            key = ""  # an empty line ends a comment: what follows is a heading
        elif token.type == tokenize.NAME and token.start[1] == 4 and tokens[i + 1].string == ":":
            key = f"{section}.{token.string}"
        elif token.type == tokenize.COMMENT and key:
            out[key] = f"{out.get(key, '')} {token.string.lstrip('# ')}".strip()
    return out


def shown(capsys, *argv: str) -> str:
    assert train.main([*argv]) == 0
    return capsys.readouterr().out


def parsed(cfg: Config, path: str, argument: str):
    """The value that train.py makes of --section.key ARGUMENT over a config."""
    tree = merge(plain_data(cfg), dotted_overrides([f"--{path}={argument}"]))
    return value_at(build_tree(Config, tree), path)


@pytest.mark.parametrize("width", [80, 200])
def test_help_says_all_of_every_comment(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = shown(capsys, "llama3-tiny", "--help", "all")
    whole, said = " ".join(out.split()), comments()
    for path, _ in leaves(resolve("llama3-tiny", None, [])):
        part, key = EVERY[path]
        if key == "kind" and get_kind(part):  # its meaning is that of the field that has the part
            where, key = path.split(".")[-2:]
            assert re.search(rf"--{re.escape(path)} (\w+\|)+\w+ \w+", whole), path
            continue
        meaning = " ".join(said[f"{part.__name__}.{key}"].split())
        kind = re.escape(usage.type_name(field_types(part)[key]))
        line = rf"--{re.escape(path)} {kind} {re.escape(meaning)} \((no default|default: )"
        assert re.search(line, whole), path
    assert all(len(line) <= width for line in out.splitlines() if not line.startswith("  --"))


def test_the_values_that_help_shows_are_read_back(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    cfg = resolve("deepseek-v3-tiny", None, [])
    out = shown(capsys, "deepseek-v3-tiny", "--help", "all")
    entry = r"--([\w.]+) (\S+)\s.*\((?:no default|default: (.*?))(?:; here: (.*))?\)$"
    found = re.findall(entry, out, re.MULTILINE)
    order = ("train", "data", "model", "optim", "parallel", "distill", "eval", "checkpoint", "log", "profile")
    by_section = sorted((path for path, _ in leaves(cfg)), key=lambda path: order.index(path.split(".")[0]))
    assert [path for path, *_ in found] == by_section
    for path, kind, usual, here in found:
        if path == "model.blocks":  # which kinds there are
            assert here == ", ".join(variant.name for variant in cfg.model.blocks)
            continue
        for text, tree in ((usual, defaults()), (here or usual, cfg)):
            if text and has_path(tree, path):
                argument = shlex.split(text)[0]
                assert parsed(tree, path, argument) == value_at(tree, path), (path, text)
        may_be_none = kind.endswith("|none") and not path.endswith(".kind")
        for word in ("none", "None") if may_be_none else ():  # the help's word, and Python's
            assert parsed(cfg, path, word) is None


def test_a_word_finds_keys_of_parts_that_a_model_does_not_have(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    out = shown(capsys, "llama3-tiny", "--help", "kv_rank")
    assert re.search(r"--model.mixer.kv_rank INT .*\(no default; of model.mixer latent\)$", out, re.MULTILINE)
    assert "--model.mtp.weight" in shown(capsys, "llama3-tiny", "--help", "mtp.weight")
    assert "kv_rank" not in shown(capsys, "llama3-tiny", "--help", "model")


@pytest.mark.parametrize(
    "recipe, most", [("llama3-tiny", 80), ("mixtral-tiny", 85), ("deepseek-v3-tiny", 85)]
)
def test_help_alone_shows_the_keys_that_most_runs_set(capsys, recipe, most):
    """And says of each section how many more there are."""
    out = shown(capsys, recipe, "--help")
    keys = re.findall(r"^  --(\S+)", out, re.MULTILINE)
    every = [path for path, _ in leaves(resolve(recipe, None, []))]
    assert set(keys) < set(every) and len(keys) <= most
    more = re.findall(r"^  and (\d+) more: --help (\w+)$", out, re.MULTILINE)
    assert len(keys) + sum(int(number) for number, _ in more) == len(every)
    for number, section in more:
        listed = re.findall(r"^  --(\S+)", shown(capsys, recipe, "--help", section), re.MULTILINE)
        assert len(listed) == int(number) + sum(key.startswith(f"{section}.") for key in keys)


def test_each_key_that_help_alone_shows_exists():
    for section, names in usage.MOST_SET.items():
        assert all(f"{section}.{name}" in EVERY for name in names.split()), section


def test_help_of_a_section_of_a_word_and_of_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    out = shown(capsys, "--help", "parallel")
    listed = re.compile(r"^  --(\S+)", re.MULTILINE)
    assert listed.findall(out) == [f"parallel.{f.name}" for f in dataclasses.fields(schema.ParallelConfig)]
    words = listed.findall(shown(capsys, "llama3-tiny", "-h", "recompute"))
    assert {"parallel.recompute", "parallel.recompute_parts", "parallel.recompute_stages"} <= {*words}
    assert len(words) < 12
    assert listed.findall(shown(capsys, "--help", "--optim.min_lr")) == ["optim.min_lr"]
    assert "default: 4; here: 7" in shown(capsys, "--model.layers", "7", "--help", "model.layers")
    with pytest.raises(ConfigError, match="no key mentions 'xyzzy'; the sections are train, data, mod"):
        train.main(["--help", "xyzzy"])


def test_list_parses_each_file_once(capsys, monkeypatch):
    read = []
    monkeypatch.setattr(parse, "read_yaml", lambda path: read.append(path.name) or strict.read_yaml(path))
    parse.parse_yaml_cached.cache_clear()
    out = shown(capsys, "--list")
    assert len(out.splitlines()) == 1 + len(recipes())
    assert sorted(read) == sorted({*read}) and "models.yaml" in read
    shown(capsys, "--list")
    assert len(read) == len({*read})


def test_what_was_read_cannot_be_spoiled_and_a_new_file_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "CONFIG_FOLDER", tmp_path)
    (tmp_path / "models.yaml").write_text("llama-mini: {layers: 4}\n")
    presets()["llama-mini"]["layers"] = 9
    assert presets() == {"llama-mini": {"layers": 4}}
    text = yaml.safe_dump({"llama-mini": {"layers": 5}})
    (tmp_path / "new").write_text(text)
    (tmp_path / "new").replace(tmp_path / "models.yaml")
    assert presets()["llama-mini"]["layers"] == 5


@pytest.mark.parametrize("script, word", [
    ("compare.__main__", "--wat"),
    ("plan", "--gpu"),
    ("generate", "--promp"),
    ("submit", "--prin"),
])
def test_a_part_of_an_option_is_not_that_option(script, word):
    """A later option could give it another meaning."""
    given = importlib.import_module(f"scripts.{script}")
    with pytest.raises(ConfigError, match=f"unrecognized arguments: .*{word}"):
        given.arguments().parse_args(["x", word, "1"])
