"""YAML files as plain data, read strictly.

Anything that a person can misread or a program can choke on is a ConfigError that names file and line.
"""
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]  # nested keys and values, as in YAML and JSON
KEPT_RESOLVERS = ("null", "float", "merge")  # of yaml.SafeLoader; int and bool are replaced below


class ConfigError(ValueError):
    """A user error: one line that names the key and how to correct it.

    train.py prints the line and exits with `exit_code`.
    """
    exit_code = 2


def kept_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return {first character: [(tag, pattern)]}, the implicit types that StrictYamlLoader keeps from
    SafeLoader."""
    kept: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
        kept[first] = []
        for tag, pattern in resolvers:
            type_name = tag.rsplit(":")[-1]  # of "tag:yaml.org,2002:float"
            if type_name in KEPT_RESOLVERS:
                kept[first].append((tag, pattern))
    return kept


class StrictYamlLoader(yaml.SafeLoader):
    """Safe YAML with fewer surprises.

    Aliases (billion laughs attack) and duplicate keys are errors. 12:30:45 and 017 are not numbers; `no` and
    `off` are text, and only `true` and `false` are booleans.
    """

    yaml_implicit_resolvers = kept_resolvers()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise ConfigError(f"{self.name}:{line}: aliases are not allowed here; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []  # `!!map [1]`: refused below
        for key, _ in pairs:
            if not isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                raise ConfigError(f"{self.name}:{line}: a key must be one word, not a list or a mapping")
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{self.name}:{line}: {key.value} is given twice; keep one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. PyYAML lets errors of int(), float() and its tables escape for a
        value like `!!int abc` or a number of 5,000 digits."""
        try:
            return super().construct_object(node, deep)
        except (ConfigError, yaml.YAMLError):
            raise
        except (ValueError, TypeError, LookupError, AttributeError):
            line = node.start_mark.line + 1
            what = node.tag.rsplit(":")[-1]
            raise ConfigError(f"{self.name}:{line}: this value is not a valid {what}; correct it") from None


INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")
BOOLEAN = re.compile(r"^(true|false)$")
StrictYamlLoader.add_implicit_resolver("tag:yaml.org,2002:int", INTEGER, list("-+0123456789"))
StrictYamlLoader.add_implicit_resolver("tag:yaml.org,2002:bool", BOOLEAN, list("tf"))


def read_yaml(path: Path | str) -> Tree:
    """Return the file's keys and values, or {} if it is empty. Raises ConfigError like read_yaml_value."""
    tree = read_yaml_value(path)
    if tree is None or isinstance(tree, dict):
        return tree or {}
    raise ConfigError(f"{path}: expected keys and values, got {type(tree).__name__}")


def list_lines(path: Path | str, key: str) -> list[int]:
    """Return the line of each item of the list `key` of a file that read_yaml reads; [] without one."""
    with open(path, encoding="utf-8") as file:
        root = yaml.compose(file, StrictYamlLoader)
    for name, value in root.value if isinstance(root, yaml.MappingNode) else []:
        if name.value == key and isinstance(value, yaml.SequenceNode):
            return [item.start_mark.line + 1 for item in value.value]
    return []


def read_yaml_value(path: Path | str) -> Any:
    """Return the file's content: keys and values, a list, a single value, or None if it is empty.

    Raises ConfigError, naming file and line, if the file cannot be read or is not strict YAML.
    """
    try:
        with open(path, encoding="utf-8") as file:
            loader = StrictYamlLoader(file)
            loader.name = str(path)
            return loader.get_single_data()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", error)).partition("\n")[0]  # some repeat the file below it
        raise ConfigError(f"{path}{line}: not YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: brackets are nested too deep; no config needs that") from None
