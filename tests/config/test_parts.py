"""--part K/M of verify, mutate and chaos."""

import pytest

from config import ConfigError
from config.parts import part_of


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("num_parts", [1, 2, 4, 7, 10])
def test_parts_are_the_whole_and_of_even_length(num_parts):
    items = list(range(10))
    parts = [part_of(items, f"{part}/{num_parts}") for part in range(1, num_parts + 1)]
    assert sorted(sum(parts, [])) == items and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "2/0", "-1/4", "a/b", "1/4/2", "1/11", "1/2 ", ""])
def test_parts_that_do_not_exist_are_refused(part):
    with pytest.raises(ConfigError, match="^--part: ") as error:
        part_of([None] * 10, part)
    assert "K/M" in str(error.value) and "\n" not in str(error.value)
