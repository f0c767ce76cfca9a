"""The table of proven feature pairs, in Markdown, and the file that it goes into."""
from pathlib import Path

from config import ConfigError
from config.axes import AXES
from parallel.topology.dims import FACTORIZATIONS

# {axis of the mesh: the prefix of its degree in the name of a layout}
WORDS = {axis.dims: axis.word for axis in AXES} | {"dp_shard": "dp"}
# from the outermost to the innermost
AXIS_WORDS = tuple(WORDS[axis] for axis in dict.fromkeys(sum(FACTORIZATIONS, ())) if axis in WORDS)
COLUMNS = ("tp", "sp", "pp", "cp-ring", "cp-ulysses", "ep", "etp", "dp", "rep", "zero1", "zero2", "zero3")
LEFT_OUT = {"cp", "mb1"}  # cp has a column for each of its kinds; mb1 is the default


def feature(word: str) -> str:
    """Return the feature that a word of a cell's name stands for: tp2 and tp4 are both tp."""
    return word[:-1] if word[:-1] in AXIS_WORDS else word


def support_table(proofs: list[tuple[set[str], bool]]) -> list[str]:
    """Return the lines of a Markdown table that counts the proven layouts of each pair of features.

    `proofs` are the (words, whether it is proven) of all layouts tried. If some layouts with a pair are not
    proven, the entry is "**proven of tried**".
    """
    features = [{feature(word) for word in words} for words, _ in proofs]
    every_feature = set().union(*features)
    columns = [column for column in COLUMNS if column in every_feature]
    others = sorted(every_feature - set(columns) - LEFT_OUT)

    lines = [
        "| with | " + " | ".join(columns) + " | all |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for row in (*columns, *others):
        entries = []
        for column in (*columns, row):  # the last entry counts all layouts with the row's feature
            results = [ok for has, (_, ok) in zip(features, proofs) if {row, column} <= has]
            entries.append(table_entry(results))
        lines.append(f"| {row} | " + " | ".join(entries) + " |")
    return lines


def table_entry(results: list[bool]) -> str:
    """Return how many of the results are good, or "-" if nothing was tried."""
    if not results:
        return "-"
    return f"{len(results)}" if all(results) else f"**{sum(results)} of {len(results)}**"


def write_table(path: Path, name: str, lines: list[str]) -> None:
    """Write the lines between the markers of `name` in the file. A missing file is created with the markers.

    Raises ConfigError if the file exists without the markers.
    """
    begin = f"<!-- scripts.verify {name} -->"
    end = "<!-- end -->"
    old = path.read_text() if path.exists() else f"{begin}\n{end}\n"
    if begin not in old:
        raise ConfigError(f"--table: {path} has no line {begin}; add it, and {end} after it")
    before, rest = old.split(begin, 1)
    after = rest.split(end, 1)[1]
    path.write_text(before + "\n".join([begin, *lines, end]) + after)
