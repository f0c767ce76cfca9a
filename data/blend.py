"""A weighted blend of datasets: maps global sample g to a dataset and a sample of it.

The order is stride scheduling (Waldspurger and Weihl 1995, MIT TM-528): sample j of dataset d is due at time
(j + 1/2) / weight_d. Samples are ordered by due time, with ties in the order of the datasets. So each (d, j)
comes exactly once, and no order is stored. With weights that sum to 1, the first g samples contain
g * weight_d samples of dataset d to within 1/2 + D * weight_d / 2, where D is the number of datasets.

All times are integers. With floats, two samples could swap between a run and its resume after billions of
samples.
"""
import math
import re
import shlex
from dataclasses import dataclass

import numpy as np

from config import ConfigError, DataConfig, as_number

NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
TIME_BITS = 64  # due times are multiples of 2**-64


@dataclass(frozen=True)
class Blend:
    """Sample order of a blend of datasets."""
    weights: tuple[int, ...]  # one integer for each dataset, in the requested ratio

    def pick(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:  # 2 x int64 [count]
        """Map global samples first .. first + count - 1 to their datasets and sample numbers there."""
        # a time range that covers the requested samples and at most 2 D more on each side
        num_datasets = len(self.weights)
        starts = self._samples_due(first - num_datasets)
        stops = self._samples_due(first + count + num_datasets)

        due: list[tuple[int, int, int]] = []  # (time, dataset, sample)
        for dataset, (start, stop) in enumerate(zip(starts, stops)):
            for sample in range(start, stop):
                due.append((self._due_time(dataset, sample), dataset, sample))
        due.sort()

        skipped = first - sum(starts)
        picked = due[skipped:skipped + count]
        datasets = np.array([dataset for _, dataset, _ in picked], np.int64)
        samples = np.array([sample for _, _, sample in picked], np.int64)
        return datasets, samples

    def drawn(self, total: int) -> list[int]:
        """Return how many of the first `total` samples come from each dataset."""
        counts = self._samples_due(total - len(self.weights))
        before = sum(counts)
        datasets, _ = self.pick(before, total - before)
        return [count + int((datasets == dataset).sum()) for dataset, count in enumerate(counts)]

    def _due_time(self, dataset: int, sample: int) -> int:
        return ((2 * sample + 1) << TIME_BITS) // self.weights[dataset]

    def _samples_due(self, total: int) -> list[int]:
        """Return how many samples of each dataset are due once about `total` are due in all."""
        time = (2 * max(total, 0) << TIME_BITS) // sum(self.weights)
        counts: list[int] = []
        for weight in self.weights:
            # the number of j >= 0 with ((2 j + 1) << TIME_BITS) // weight <= time
            half_strides = -(-(time + 1) * weight // (1 << TIME_BITS))  # rounded up
            counts.append(half_strides // 2)
        return counts


def named_paths(data: DataConfig) -> list[tuple[str, str]]:
    """Return (key, path) for each dataset named in data.path and data.valid. Raises ConfigError."""
    specs = {"data.path": data.path, "data.valid": data.valid}
    named = [(key, parse_blend(text, key)[1]) for key, text in specs.items() if text is not None]
    return [(key, path) for key, paths in named for path in paths]


def validation_key(data: DataConfig) -> str:
    """Return the config key that names the validation data."""
    return "data.path" if data.valid is None else "data.valid"


def validated_paths(data: DataConfig) -> list[str]:
    """Return the path of each dataset that a validation reads. Raises ConfigError."""
    return [path for key, path in named_paths(data) if key == validation_key(data)]


def parse_blend(text: str, key: str = "data.path") -> tuple[Blend, list[str]]:
    """Parse "0.7 a 0.3 b" into the blend and the path of each dataset; a single path has weight 1.

    Raises ConfigError naming the key.
    """
    if not text.strip():
        raise ConfigError(f"{key}: empty; name the data: a prefix of .bin/.idx that "
                          "python -m scripts.prepare_data made, a blend \"0.7 a 0.3 b\", or stdlib")
    first, *others = text.split()
    if others and NOT_FINITE.fullmatch(first):
        raise ConfigError(f"{key}: {text!r}: weights must be finite, and {first} is not")
    if as_number(first) is None:
        return Blend((1,)), [text.strip()]

    try:
        words = shlex.split(text)  # a path with spaces can be quoted
    except ValueError as error:
        raise ConfigError(f"{key}: {text!r}: {str(error).lower()}") from None

    numbers = [as_number(word) for word in words[::2]]
    paths = words[1::2]
    weights = [number for number in numbers if number is not None]
    if len(paths) != len(numbers) or len(weights) != len(numbers):
        raise ConfigError(f"{key}: {text!r} is not a blend; weights and paths must alternate: "
                          "\"0.7 a 0.3 b\"")
    if min(weights) <= 0:
        raise ConfigError(f"{key}: {text!r}: weights must be above 0; leave the dataset out instead")

    scale = math.lcm(*(weight.denominator for weight in weights))
    return Blend(tuple(int(weight * scale) for weight in weights)), paths


def source_names(paths: list[str]) -> list[str]:
    """Return a short name for each path: its last part, or the whole path if two end alike."""
    short = [path.rstrip("/").rpartition("/")[2].removesuffix(".bin").removesuffix(".idx") for path in paths]
    return [name if short.count(name) == 1 else path for name, path in zip(short, paths)]
