"""The words of ranks in the store: counted in real processes, and the same for every number of ranks."""

import pytest

from config import ConfigError
from lab.benchmarks import command, words


@pytest.mark.slow
def test_a_rank_says_as_much_whatever_the_number_of_ranks(capsys):
    assert command.main(["words", "--ranks", "2,6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = {(story, ranks): values for story, ranks, *values in cells[2:]}
    assert {story for story, _ in rows} == set(words.STORIES)
    for story in words.STORIES:
        few, many = rows[story, "2"], rows[story, "6"]
        assert float(few[0]) >= 1 and float(few[2]) > 10
        assert float(many[0]) <= float(few[0]) + 2, story  # operations a rank
        assert float(many[1]) <= float(few[1]) + 3, story  # of the busiest
        assert "at the store's rate" in rows[story, "16,384 (extrapolated)"][3]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["8", "1,2", "a,b", "", "8,8"])
def test_ranks_that_are_no_numbers(text):
    with pytest.raises(ConfigError, match="--ranks: .*: give two numbers or more"):
        words.parse_sizes(text)


@pytest.mark.slow
def test_the_line_to_far_ranks():
    counts = [words.Counts(size, [], [], 0.0) for size in (8, 64)]
    assert words.line_at_far(counts, [8 * 3 + 5, 64 * 3 + 5]) == 16_384 * 3 + 5
