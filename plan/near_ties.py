"""Layouts whose forecasts are too close to say which is faster, and how two layouts differ."""
from dataclasses import dataclass

from config.tree import value_at
from plan.cost import Forecast
from plan.search import LAYOUT_KEYS, PricedLayout, rounded, simplicity

# Fraction of a step within which two forecasts of one job count as equal. Most of the model's error is in
# rates shared by all layouts of a job; the part that they do not share has not been measured.
NEAR = 0.02
MAX_NUM_PARTS = 3  # parts of a step named in one line
MIN_SHOWN = 0.5e-3  # seconds
GIB = 2**30


def near_groups(found: list[PricedLayout]) -> list[list[PricedLayout]]:
    """Group layouts, the fastest first: all within NEAR of the group's fastest layout.
    A group starts with its simplest."""
    groups: list[list[PricedLayout]] = []
    fastest = 0.0  # of the group's fastest
    for one in sorted(found, key=lambda one: one.forecast.step):
        if groups and one.forecast.step <= fastest * (1 + NEAR):
            groups[-1].append(one)
        else:
            fastest = one.forecast.step
            groups.append([one])
    return [sorted(group, key=simplest_first) for group in groups]


def simplest_first(found: PricedLayout) -> tuple[float, ...]:
    """Return a sort key. Among layouts of the same kinds the faster comes first, then the smaller."""
    return *simplicity(found.cfg), rounded(found.forecast.step), found.held.total


@dataclass(frozen=True)
class LayoutDifference:
    """How a layout differs from the first one. keys: {section.key: (its value, the first's)}. seconds: extra
    time per step; parts: {part of the step: extra seconds}, the largest first. memory: extra bytes on its
    fullest rank."""
    keys: dict[str, tuple]
    seconds: float
    parts: dict[str, float]
    memory: int

    def __str__(self) -> str:
        keys = [f"{key} {word(own)} (first: {word(other)})" for key, (own, other) in self.keys.items()]
        shown = [(part, seconds) for part, seconds in self.parts.items() if abs(seconds) >= MIN_SHOWN]
        time = "as fast"
        if abs(self.seconds) >= MIN_SHOWN:
            time = f"{abs(self.seconds) * 1e3:,.0f} ms {'slower' if self.seconds > 0 else 'faster'}"
        if shown:
            why = ", ".join(f"{part} {1e3 * seconds:+,.0f}" for part, seconds in shown[:MAX_NUM_PARTS])
            time = f"{time}: {why}"
        held = f"{abs(self.memory) / GIB:.1f} GiB {'more' if self.memory > 0 else 'less'}"
        return " · ".join([", ".join(keys), time, held])


def difference(one: PricedLayout, first: PricedLayout) -> LayoutDifference:
    """Compare two layouts of a job."""
    keys: dict[str, tuple] = {}
    for path in LAYOUT_KEYS:
        own, other = (value_at(layout.cfg, path) for layout in (one, first))
        if own != other:
            keys[path] = (own, other)
    own_parts, parts = step_parts(one.forecast), step_parts(first.forecast)
    more = {part: own_parts.get(part, 0.0) - parts.get(part, 0.0) for part in own_parts | parts}
    return LayoutDifference(
        keys,
        seconds=one.forecast.step - first.forecast.step,
        parts=dict(sorted(more.items(), key=lambda item: -abs(item[1]))),
        memory=one.held.total - first.held.total,
    )


def step_parts(forecast: Forecast) -> dict[str, float]:
    """Return {part: seconds}, which add up to the step."""
    exposed = {f"exposed {group}": seconds for group, seconds in forecast.exposed.items()}
    own = {"compute": forecast.compute, "bubble": forecast.bubble, "optimizer": forecast.optimizer}
    return own | exposed


def word(value: object) -> str:
    """Format a value as on the command line."""
    return "unset" if value is None else str(value).lower()
