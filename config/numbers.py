"""Numbers for people: counts, bytes, durations and curves in a few characters."""
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
DECIMALS_WIDTH = 6  # maximum columns for a loss, a norm, a perplexity
MINUTES_PER_DAY = 24 * 60


def short_number(number: float, smallest: float = 1.0) -> str:
    """Format as 950, 2.0K, 1.23M, 7.00B, 1.50T.

    smallest: the smallest value shown in a unit; with 0.1, 890,000 is 0.89M.
    """
    unit = ""
    digits = 0
    for larger_unit, larger_digits in (("K", 1), ("M", 2), ("B", 2), ("T", 2)):
        reaches_next_unit = round(abs(number), digits) >= 1000 * smallest  # never 1000.0K after rounding
        if not reaches_next_unit:
            break
        number /= 1000
        unit = larger_unit
        digits = larger_digits
    return f"{number:.{digits}f}{unit}"


def parameter_count(number: int) -> str:
    """Format as 0.89M, 7.00B."""
    return short_number(number, 0.1)


def byte_count(number: float) -> str:
    """Format as 812 B, 10.9 MB, 1.5 TB."""
    unit = "B"
    digits = 0
    for larger_unit in ("KB", "MB", "GB", "TB"):
        if round(number, digits) < 1000:
            break
        number /= 1000
        unit = larger_unit
        digits = 1
    return f"{number:.{digits}f} {unit}"


def duration(seconds: float) -> str:
    """Format as 0s, 44s, 1m44s, 1h02m, 2d03h, or ? if it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole_seconds = max(0, round(seconds))
    minutes = whole_seconds // 60
    if whole_seconds < 60:
        return f"{whole_seconds}s"
    if minutes < 60:
        return f"{minutes}m{whole_seconds % 60:02d}s"
    if minutes < MINUTES_PER_DAY:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // MINUTES_PER_DAY}d{minutes % MINUTES_PER_DAY // 60:02d}h"


def decimals(value: float | None, digits: int) -> str:
    """Format a value with up to `digits` decimals in six columns (10.836).

    It becomes 1.2e+06 if no decimals are left, and None becomes "-".
    """
    if value is None:
        return "-"
    for fewer in range(digits, -1, -1):
        text = f"{value:.{fewer}f}"
        if len(text.removeprefix("-")) <= DECIMALS_WIDTH:
            return text
    return f"{value:.1e}"


def sparkline(values: Sequence[float | None], width: int = 11) -> str:
    """Draw a curve in at most `width` characters, each the mean of its share of the finite values."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    width = min(width, len(finite))
    if not width:
        return ""
    bounds = [len(finite) * i // width for i in range(width + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in zip(bounds, bounds[1:])]
    low = min(means)
    spread = max(means) - low
    if not spread:
        return BLOCKS[0] * width
    levels = [round((mean - low) / spread * (len(BLOCKS) - 1)) for mean in means]
    return "".join(BLOCKS[level] for level in levels)
