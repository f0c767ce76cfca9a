"""--help and --list: all of what config/schema.py says, in words that the parser takes, at any width; files
parsed once.
"""

import dataclasses
import re
import shlex
import tokenize
import typing

import pytest
import yaml

import config
import train
from config import Config, ConfigError, loading, schema, strict, usage

SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Config)}
EVERY = [(s, f.name) for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)]


def comments() -> dict[str, str]:
    """{"ModelConfig.layers": its comment}, by Python's own tokenizer: every comment up to the next key."""
    out, section, key = {}, "", ""
    with open(schema.__file__, "rb") as f:
        tokens = list(tokenize.tokenize(f.readline))
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


def parsed(section: str, key: str, argument: str):
    """What train.py makes of --section.key ARGUMENT."""
    tree = config.build_tree(Config, config.dotted_overrides([f"--{section}.{key}={argument}"]))
    return getattr(getattr(tree, section), key)


@pytest.mark.parametrize("width", [80, 200])
def test_help_says_all_of_every_comment(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = shown(capsys, "llama3-tiny", "--help")
    whole, said = " ".join(out.split()), comments()
    for section, key in EVERY:
        meaning = " ".join(said[f"{SECTIONS[section].__name__}.{key}"].split())
        kind = re.escape(usage.type_name(typing.get_type_hints(SECTIONS[section])[key]))
        line = rf"--{section}\.{key} {kind} {re.escape(meaning)} \(default: "
        assert re.search(line, whole), (section, key)
    assert all(len(line) <= width for line in out.splitlines() if not line.startswith("  --"))


def test_the_values_that_help_shows_are_read_back(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    cfg = config.resolve("deepseek-v3-tiny", None, [])
    out = shown(capsys, "deepseek-v3-tiny", "--help")
    found = re.findall(r"--(\w+)\.(\w+) (\S+)\s.*\(default: (.*?)(?:; here: (.*))?\)$", out, re.MULTILINE)
    assert [(s, k) for s, k, *_ in found] == EVERY
    for section, key, kind, usual, here in found:
        for text, tree in ((usual, Config()), (here or usual, cfg)):
            value = getattr(getattr(tree, section), key)
            argument = shlex.split(text)[0]
            assert parsed(section, key, argument) == value, (section, key, text)
        for word in ("none", "None") if kind.endswith("|none") else ():  # the help's word, and Python's
            assert parsed(section, key, word) is None


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
    with pytest.raises(ConfigError, match="no key speaks of 'xyzzy'; the sections are model, train"):
        train.main(["--help", "xyzzy"])


def test_list_parses_each_file_once(capsys, monkeypatch):
    read = []
    monkeypatch.setattr(loading, "read_yaml", lambda path: read.append(path.name) or strict.read_yaml(path))
    loading.parse_yaml_cached.cache_clear()
    out = shown(capsys, "--list")
    assert len(out.splitlines()) == 1 + len(config.recipes())
    assert sorted(read) == sorted({*read}) and "models.yaml" in read
    shown(capsys, "--list")
    assert len(read) == len({*read})


def test_what_was_read_cannot_be_spoiled_and_a_new_file_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "CONFIG_FOLDER", tmp_path)
    (tmp_path / "models.yaml").write_text("llama-mini: {layers: 4}\n")
    config.presets()["llama-mini"]["layers"] = 9
    assert config.presets() == {"llama-mini": {"layers": 4}}
    text = yaml.safe_dump({"llama-mini": {"layers": 5}})
    (tmp_path / "new").write_text(text)
    (tmp_path / "new").replace(tmp_path / "models.yaml")
    assert config.presets()["llama-mini"]["layers"] == 5
