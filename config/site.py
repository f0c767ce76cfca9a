"""The site file: what the jobs of one cluster have in common, such as account, partition and bad nodes.

configs/site.example.yaml lists the keys. scripts.submit passes them to sbatch, `--sbatch` of scripts.grid and
scripts.plan writes them into the job, and a job sets its variables from them (scripts/slurm/cluster.sh).
"""
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.strict import ConfigError, read_yaml

SITE_FILE = Path(__file__).parent.parent / "configs" / "site.yaml"  # not tracked by git
SITE_VARIABLE = "BEVATRON_SITE"  # environment variable that names another file, also inside a job
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")  # minutes, [H:]M:S, D-H[:M[:S]]
NODES = re.compile(r"[\w.-]+(\[[\d,-]+\][\w.-]*)?")  # node7, node[3-5,9]
NAME = re.compile(r"[A-Za-z_]\w*")  # of a variable
OPTIONS = {  # options of sbatch whose value is that of a key
    "account": "--account",
    "partition": "--partition",
    "qos": "--qos",
    "constraint": "--constraint",
    "time": "--time",
}


@dataclass(frozen=True)
class SiteSettings:
    """The values of a site file. Keys that it lacks are None or empty.

    file: its absolute path, or None for SITE_FILE. time: as sbatch writes it. gpus_per_node, cores_per_rank
    (CPU cores of a rank, its loader and what writes its checkpoints): numbers, which become options where a
    job states none of its own. options: of sbatch, as on its command line. interface: of the network.
    environment: (variable, value) pairs.
    """
    file: Path | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    cores_per_rank: int | None = None
    exclude: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    interface: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    container: str | None = None
    container_mounts: tuple[str, ...] = ()

    def sbatch_options(self) -> list[str]:
        """Return the options of every job, without GPUs and cores. `options` come last, so they win."""
        values = {option: getattr(self, key) for key, option in OPTIONS.items()}
        results = [f"{option}={value}" for option, value in values.items() if value is not None]
        if self.exclude:
            results.append(f"--exclude={','.join(self.exclude)}")
        return [*results, *self.options]

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a job. `environment` wins over what other keys set."""
        values = {
            "NCCL_SOCKET_IFNAME": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            "CONTAINER": self.container,
            "CONTAINER_MOUNTS": ",".join(self.container_mounts),
        }
        return {name: value for name, value in values.items() if value} | dict(self.environment)


def read_site(named: str | None) -> SiteSettings:
    """Read the file `named`, or SITE_FILE if it exists. Raises ConfigError, naming file and key."""
    if not named and not SITE_FILE.exists():
        return SiteSettings()
    path = Path(named) if named else SITE_FILE
    tree = read_yaml(path)
    for key in tree:
        if key not in PARSERS:
            near = difflib.get_close_matches(str(key), PARSERS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PARSERS)}"
            raise ConfigError(f"{path}: {key}: no such key; {hint}")
    values = {key: PARSERS[key](f"{path}: {key}", value) for key, value in tree.items() if value is not None}
    site = SiteSettings(file=path.resolve() if named else None, **values)
    if site.container_mounts and "CONTAINER" not in site.variables():
        raise ConfigError(f"{path}: container_mounts: nothing is mounted without container; name its image")
    return site


def export_lines(site: SiteSettings, environment: Mapping[str, str]) -> list[str]:
    """Return shell lines that set the job's variables, except those that `environment` already has."""
    unset = {name: value for name, value in site.variables().items() if name not in environment}
    return [f"export {name}={shlex.quote(value)}" for name, value in unset.items()]


def option_names(words: Iterable[str]) -> set[str]:
    """Return the names of options of sbatch: `-c` for `-c4`, and `--gres=gpu` where that asks for GPUs."""
    text = " ".join(words).replace("--gres ", "--gres=")
    return set(re.findall(r"(?:^| )(--gres=gpu|--[\w-]+|-[a-zA-Z])", text))


def stated_options(lines: Iterable[str]) -> set[str]:
    """Return option_names of the #SBATCH lines of a script."""
    return option_names(line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH "))


# ---- values ------------------------------------------------------------------------------------------------
# Each parser takes the place of a value, "FILE: KEY", and the value. It raises ConfigError, naming the place.


def parse_word(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or re.search(r"\s", str(value)):
        raise ConfigError(f"{where}: expected one word, got {value!r}")
    return str(value)


def parse_time(where: str, value: Any) -> str:
    word = parse_word(where, value)
    if not TIME.fullmatch(word):
        raise ConfigError(f"{where}: {word} is not a time limit; write HOURS:MINUTES:SECONDS or DAYS-HOURS")
    return word


def parse_count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: expected a whole number of at least 1, got {value!r}")
    return value


def parse_words(where: str, value: Any) -> tuple[str, ...]:
    """Parse a list, or a text that is split at the commas outside of brackets: "node[3,5],node9"."""
    words = re.split(r",(?![^\[]*\])", value) if isinstance(value, str) else value
    if not isinstance(words, list):
        raise ConfigError(f"{where}: expected a list, got {value!r}")
    return tuple(parse_word(where, word.strip() if isinstance(word, str) else word) for word in words)


def parse_nodes(where: str, value: Any) -> tuple[str, ...]:
    nodes = parse_words(where, value)
    wrong = [name for name in nodes if not NODES.fullmatch(name)]
    if wrong:
        raise ConfigError(f"{where}: {wrong[0]!r} names no nodes; write node7 or node[3-5]")
    return nodes


def parse_options(where: str, value: Any) -> tuple[str, ...]:
    options = parse_words(where, value) if isinstance(value, list) else ()
    if not options or not all(option.startswith("--") for option in options):
        raise ConfigError(f"{where}: expected a list of options of sbatch, such as [--mem=0], got {value!r}")
    return options


def parse_environment(where: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected variables and values, got {value!r}")
    for name, text in value.items():
        if not NAME.fullmatch(str(name)):
            raise ConfigError(f"{where}: {name} cannot be the name of a variable")
        if isinstance(text, bool) or not isinstance(text, (str, int)):  # 12.10 would be 12.1
            raise ConfigError(f'{where}: {name}: expected text, got {text!r}; write it in "quotes"')
    return tuple((name, str(text)) for name, text in value.items())


PARSERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("account", "partition", "qos", "constraint"), parse_word),
    "time": parse_time,
    "gpus_per_node": parse_count,
    "cores_per_rank": parse_count,
    "exclude": parse_nodes,
    "options": parse_options,
    "interface": parse_word,
    "environment": parse_environment,
    "container": parse_word,
    "container_mounts": parse_words,
}
