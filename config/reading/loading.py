"""Load the config from recipes, files and the command line.

Precedence: command line > --config file > recipe > defaults of the keys. config/reading/parse.py parses keys
and values, config/reading/rules.py has the rules that involve several keys.
"""
import difflib
import json

import yaml

from config.reading.earlier import current_tree
from config.reading.parse import (
    CONFIG_FOLDER,
    build_tree,
    flatten_tree,
    merge,
    nearest_key,
    nested,
    shipped_configs,
)
from config.reading.phases import get_phases, phases_text, where_stated
from config.schema import Config, ModelConfig
from config.strict import ConfigError, Tree, read_yaml
from config.tree import plain_data

DEPTH_OPTION = "--depth"  # of train.py: the recipe at another size (config/reading/dial.py)

# ---- files and recipes -----------------------------------------------------------------------------------

def presets() -> dict[str, Tree]:
    """Return the models of configs/models.yaml."""
    return shipped_configs(CONFIG_FOLDER / "models.yaml")


def recipes() -> list[str]:
    """Return every NAME that train.py accepts: files of configs/runs that name a model, then other
    presets."""
    files = (CONFIG_FOLDER / "runs").glob("*.yaml")
    runs = sorted(path.stem for path in files if "model" in shipped_configs(path))
    return runs + [name for name in presets() if name not in runs]


def recipe(name: str) -> Tree:
    """Return configs/runs/NAME.yaml, or the preset NAME with the run settings that its key `recipe` names.

    Raises ConfigError if neither exists.
    """
    path = CONFIG_FOLDER / "runs" / f"{name}.yaml"
    if name in recipes() and path.exists():
        return shipped_configs(path)

    preset = presets().get(name)
    if preset is None:
        near = difflib.get_close_matches(name, recipes(), 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; see --list"
        raise ConfigError(f"{name}: no such recipe{hint}")
    run_settings = CONFIG_FOLDER / "runs" / f"{preset.get('recipe', 'pretrain')}.yaml"
    return merge(shipped_configs(run_settings), {"model": {"preset": name}})


# ---- command line ----------------------------------------------------------------------------------------

def stated_keys(file: str | None, argv: list[str]) -> set[str]:
    """Return the keys (section.key) set by a config file and a command line. Raises ConfigError."""
    return {*dotted_overrides(argv), *flatten_tree(read_yaml(file) if file else {})}


def dotted_overrides(argv: list[str]) -> Tree:
    """Parse ['--parallel.tp', '2', '--train.steps=9'] into {'parallel.tp': '2', 'train.steps': '9'}.

    A dash in a key counts as an underscore.
    Raises ConfigError if a word is not a setting or a value is missing.
    """
    stated: Tree = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word}: unexpected; a setting is written --section.field VALUE")
        path, equals_sign, value = word[2:].partition("=")
        path = path.replace("-", "_")

        if not equals_sign:
            next_is_setting = bool(rest) and rest[0].startswith("--") and "." in rest[0]
            if not rest or next_is_setting:
                raise ConfigError(f"{path}: needs a value")
            value = rest.pop(0)

        if "." not in path:
            raise ConfigError(f"{path}: no such key" + nearest_key(Config, "", path))
        stated[path] = value
    return stated


def lower_layers(name: str | None, file: str | None) -> list[Tree]:
    """Return the settings of a recipe and of a file, the weaker first.

    Defaults to the recipe quickstart without either. Raises ConfigError.
    """
    if not name and not file:
        name = "quickstart"
    layers = [recipe(name)] if name else []
    return [*layers, current_tree(read_yaml(file))] if file else layers


def from_layers(layers: list[Tree], name: str | None = None) -> Config:
    """Return the config of these settings, the strongest last, on top of the model's preset.

    `name` is the default of log.name. Raises ConfigError.
    """
    tree: Tree = {}
    for layer in layers:
        tree = merge(tree, layer)
    return from_tree(tree, name)


def preset_values(preset: object) -> Tree:
    """Return the model keys of an entry of configs/models.yaml, or {} for None. Raises ConfigError."""
    if preset is None:
        return {}
    known = presets()
    if not isinstance(preset, str) or preset not in known:
        near = difflib.get_close_matches(str(preset), known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; see --list"
        raise ConfigError(f"model.preset: no such preset {preset!r}{hint}")
    return {key: value for key, value in known[preset].items() if key != "recipe"}


def from_tree(tree: Tree, name: str | None = None) -> Config:
    """Return the config of a tree, filled in from its preset. `name` is the default of log.name.

    Raises ConfigError if the preset or a key does not exist, or a value has the wrong type.
    """
    tree = nested(tree)
    model = tree.get("model")
    preset = model.get("preset", ModelConfig.preset) if isinstance(model, dict) else ModelConfig.preset
    if preset == "none":
        preset = None
    tree = merge({"model": preset_values(preset)}, tree)
    tree = merge({"log": {"name": name or preset}}, tree)

    train = tree.get("train")
    if not isinstance(train, dict) or train.get("phases") is None:
        return build_tree(Config, tree)
    given = train["phases"]
    text = phases_text(given)
    cfg = build_tree(Config, {**tree, "train": {**train, "phases": text}})
    get_phases(cfg, where_stated(given))  # raises if they are out of order
    return cfg


def saved_config(tree: Tree) -> Config:
    """Return a config that a run saved with all its keys, converting old ones. Raises ConfigError."""
    return build_tree(Config, current_tree(tree))


def dump(cfg: Config) -> str:
    """Return the config as YAML; reading it back yields the same config."""
    tree = plain_data(cfg)
    if cfg.train.phases is not None:
        tree["train"]["phases"] = json.loads(cfg.train.phases)  # a list is easier to read
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=120)
