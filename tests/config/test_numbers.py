"""Numbers as people read them."""
import math

import pytest

from config.numbers import byte_count, decimals, duration, parameter_count, short_number, sparkline


@pytest.mark.parametrize(
    "n, text",
    [
        (0, "0"),
        (950, "950"),
        (999.4, "999"),
        (2048, "2.0K"),
        (204_800, "204.8K"),
        (999_949, "999.9K"),
        (999_950, "1.00M"),
        (1_228_800, "1.23M"),
        (7e9, "7.00B"),
        (1.5e13, "15.00T"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_shortened_to_four_digits(n, text):
    assert short_number(n) == text


def test_numbers_for_people():
    assert [parameter_count(n) for n in (890_000, 7_000_000_000, 50_000)] == ["0.89M", "7.00B", "50.0K"]
    assert [duration(s) for s in (0, 0.4, 59.6, 104, 3599.7, 3720, 86400 * 2 + 3 * 3600, math.inf, -3)] == [
        "0s", "0s", "1m00s", "1m44s", "1h00m", "1h02m", "2d03h", "?", "0s",
    ]
    assert [byte_count(n) for n in (812, 10_900_000, 999_960, 1.5e12)] == [
        "812 B", "10.9 MB", "1.0 MB", "1.5 TB",
    ]
    assert [decimals(x, 4) for x in (6.942, 123.0, math.nan, None)] == ["6.9420", "123.00", "nan", "-"]
    losses = (9.99994, 9.99996, 10.8372, 999.996, -11.7, 99_999.6, 1.24e6, math.inf)
    assert [decimals(x, 4) for x in losses] == [
        "9.9999", "10.000", "10.837", "1000.0", "-11.700", "100000", "1.2e+06", "inf",
    ]


def test_a_sparkline_shows_the_course_and_skips_what_is_not_finite():
    assert sparkline([4, 3, 2, 1]) == "█▆▃▁"
    assert len(sparkline(list(range(1000)))) == 11
    assert sparkline([]) == "" and sparkline([None, math.nan]) == "" and sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([3, None, math.inf, 1]) == "█▁"
