"""Groups of parameters that learn at other rates (optim.groups).

    groups: "embedding: lr_factor 0.3, weight_decay 0; layers.*.attn.*: lr_factor 0.5"

A group names parameters by role (ROLES in parallel/sharding/spec.py) or by a pattern of their names in
checkpoints, in which * and ? stand for any characters. lr_factor multiplies the learning rate, and 0 freezes:
such parameters have no gradient, no optimizer state and no master copy. weight_decay takes the place of
optim.weight_decay. A parameter belongs to the first group that names it.
"""
import functools
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from config.schema import Config
from config.strict import ConfigError

EXAMPLE = "embedding: lr_factor 0.3, weight_decay 0; layers.*.attn.*: lr_factor 0.5"
RATES = ("lr_factor", "weight_decay")


@dataclass(frozen=True)
class ParameterGroup:
    """`names`: a role, or a pattern of names. weight_decay None: that of optim.weight_decay."""
    names: str
    lr_factor: float = 1.0
    weight_decay: float | None = None

    def has(self, role: str, key: str) -> bool:
        """Return whether a parameter of this role and name in checkpoints belongs to the group."""
        return role == self.names or fnmatchcase(key, self.names)


def find_group(groups: tuple[ParameterGroup, ...], role: str, key: str) -> ParameterGroup | None:
    """Return the first group that names a parameter, or None."""
    return next((group for group in groups if group.has(role, key)), None)


def freezes(cfg: Config) -> bool:
    """Return whether any parameter may be frozen: by a group, or beside adapters. Raises ConfigError."""
    return cfg.model.lora is not None or any(group.lr_factor == 0 for group in parse_groups(cfg.optim.groups))


@functools.lru_cache(maxsize=1 << 6)
def parse_groups(text: str | None) -> tuple[ParameterGroup, ...]:
    """Parse optim.groups. Raises ConfigError."""
    if text is None:
        return ()
    return tuple(parse_group(entry.strip()) for entry in re.split("[;\n]", text) if entry.strip())


def parse_group(entry: str) -> ParameterGroup:
    """Parse one group, "NAMES: RATE NUMBER, RATE NUMBER". Raises ConfigError."""
    names, colon, stated = entry.partition(":")
    if not names.strip() or not colon or not stated.strip():
        raise wrong(entry, "expected NAMES: lr_factor NUMBER, weight_decay NUMBER")
    rates: dict[str, float] = {}
    for word in stated.split(","):
        rate, _, number = word.strip().partition(" ")
        if rate not in RATES:
            raise wrong(entry, f"{rate!r} is not one of {', '.join(RATES)}")
        if rate in rates:
            raise wrong(entry, f"{rate} is given twice")
        if not re.fullmatch(r"\s*[0-9.]+([eE][+-]?[0-9]+)?", number) or number.count(".") > 1:
            raise wrong(entry, f"{rate} needs a number that is not negative, got {number.strip()!r}")
        rates[rate] = float(number)
    return ParameterGroup(names.strip(), **rates)


def wrong(entry: str, why: str) -> ConfigError:
    return ConfigError(f"optim.groups: {entry!r}: {why}; write it as {EXAMPLE!r}")
