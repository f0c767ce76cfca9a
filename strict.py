"""YAML files as plain data, read strictly: what a person could misread, or a machine could choke on, is an error that names
file and line (ConfigError, the user's mistake).
"""
import re

import yaml


class ConfigError(ValueError):
    """The user's mistake: one line that names the key and the way out. train.py prints it and exits with 2."""
    exit_code = 2


class StrictLoader(yaml.SafeLoader):
    """Safe YAML without the surprises: no aliases (a billion laughs), no duplicate keys; 12:30:45 and 017 are no numbers,
    `no` and `off` are words."""

    yaml_implicit_resolvers = {first: [(tag, regex) for tag, regex in rules if tag.rsplit(":")[-1] in ("null", "float", "merge")]
                               for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()}

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise ConfigError(f"{self.name}:{self.peek_event().start_mark.line + 1}: aliases are not allowed here; write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConfigError(f"{self.name}:{key.start_mark.line + 1}: {key.value} stands twice; keep one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))


def read_yaml(path) -> dict:
    """Raises ConfigError naming file and line."""
    try:
        with open(path, encoding="utf-8") as f:
            loader = StrictLoader(f)
            loader.name = str(path)
            tree = loader.get_single_data()
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        raise ConfigError(f"{path}{f':{mark.line + 1}' if mark else ''}: not YAML: {getattr(e, 'problem', e)}") from None
    if tree is None or isinstance(tree, dict):
        return tree or {}
    raise ConfigError(f"{path}: expected keys and values, got {type(tree).__name__}")
