"""The command line of train.py: NAME, --config FILE, --depth N and settings.

`NAME --depth N` is written NAME-dN: the recipe at N layers (config/reading/dial.py). So everything that takes
a recipe takes one at another size.
"""
import re

from config.reading.loading import DEPTH_OPTION, dotted_overrides, from_layers, lower_layers, recipes
from config.schema import Config
from config.strict import ConfigError

DEPTH = "[1-9][0-9]{0,5}"
AT_DEPTH = re.compile(f"(?:(.+)-)?d({DEPTH})")
OPTIONS_AFTER_SETTINGS = ("--help", "-h")  # the rest is theirs


def split_argv(argv: list[str]) -> tuple[str | None, str | None, list[str]]:
    """Split the arguments of train.py into (NAME, --config file, all other arguments).

    With --depth N, NAME is that of the recipe at this depth. Raises ConfigError.
    """
    rest = list(argv)
    name = None
    if rest and not rest[0].startswith("-"):
        name = rest.pop(0)

    file = None
    if "--config" in rest:
        index = rest.index("--config")
        if index + 1 == len(rest):
            raise ConfigError("--config: needs a file")
        file = rest[index + 1]
        del rest[index:index + 2]

    depth, rest = pop_depth(rest)
    if depth is not None:
        recipe = name or (None if file else "quickstart")
        name = f"{recipe}-d{depth}" if recipe else f"d{depth}"
    return name, file, rest


def pop_depth(argv: list[str]) -> tuple[str | None, list[str]]:
    """Return the depth of --depth N, or None, and the other arguments. Raises ConfigError."""
    end = next((index for index, word in enumerate(argv) if word in OPTIONS_AFTER_SETTINGS), len(argv))
    settings, rest = argv[:end], argv[end:]
    places = [index for index, word in enumerate(settings) if word.partition("=")[0] == DEPTH_OPTION]
    if not places:
        return None, argv
    if len(places) > 1:
        raise ConfigError(f"{DEPTH_OPTION}: is given twice; keep one")
    index = places[0]
    _, equals_sign, depth = settings.pop(index).partition("=")
    if not equals_sign and index == len(settings):
        raise ConfigError(f"{DEPTH_OPTION}: needs a number of layers, such as 12")
    depth = depth if equals_sign else settings.pop(index)
    if not re.fullmatch(DEPTH, depth):
        raise ConfigError(f"{DEPTH_OPTION}: expected a number of layers, such as 12, got {depth!r}")
    return depth, settings + rest


def split_depth(name: str | None) -> tuple[str | None, int | None]:
    """Split NAME-dN into (NAME, N); any other name has no depth."""
    match = AT_DEPTH.fullmatch(name or "")
    if match is None or name in recipes():
        return name, None
    return match[1], int(match[2])


def resolve(name: str | None, file: str | None, argv: list[str]) -> Config:
    """Return the config of a command line: recipe, then file, then overrides, on top of the model's preset.

    Defaults to the recipe quickstart without a recipe or a file. Raises ConfigError.
    """
    overrides = dotted_overrides(argv)
    recipe, depth = split_depth(name)
    layers = lower_layers(recipe, file)
    if depth is not None:
        from config.reading.dial import settings_at_depth

        overrides = settings_at_depth(layers, overrides, depth)
    return from_layers([*layers, overrides], name)
