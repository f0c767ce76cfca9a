"""Split the command line of train.py: NAME, --config FILE, --depth N and settings."""
from config.strict import ConfigError

OPTIONS_AFTER_SETTINGS = ("--help", "-h")  # the rest is theirs


def split_argv(argv: list[str]) -> tuple[str | None, str | None, list[str]]:
    """Split the arguments of train.py into (NAME, --config file, all other arguments).

    --depth becomes the settings that it stands for. Raises ConfigError.
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
    return name, file, turned(name, file, rest)


def turned(name: str | None, file: str | None, argv: list[str]) -> list[str]:
    """Return the arguments with --depth N replaced by its settings (config/reading/dial.py).

    Raises ConfigError.
    """
    end = next((index for index, word in enumerate(argv) if word in OPTIONS_AFTER_SETTINGS), len(argv))
    settings, rest = argv[:end], argv[end:]
    places = [index for index, word in enumerate(settings) if word.partition("=")[0] == "--depth"]
    if not places:
        return argv
    if len(places) > 1:
        raise ConfigError("--depth: is given twice; keep one")
    index = places[0]
    _, equals_sign, depth = settings.pop(index).partition("=")
    if not equals_sign and index == len(settings):
        raise ConfigError("--depth: needs a number of layers, such as 12")

    from config.reading.dial import settings_at_depth
    return settings_at_depth(name, file, settings, depth if equals_sign else settings.pop(index)) + rest
