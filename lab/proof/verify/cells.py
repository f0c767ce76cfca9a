"""The cells that a call of scripts.verify proves: how they are named and chosen."""
import difflib
import itertools
from dataclasses import replace

from config import ConfigError
from config.axes import AXES, ranks_of_layout
from lab.proof import lattice
from lab.proof.lattice import Lattice, Values
from lab.proof.verify.table import AXIS_WORDS


def words(values: Values, world: int) -> list[str]:
    """Return the name of a cell as a list of words: `pp2 dp2 tp2 sp zero1 1f1b mb1`.

    Words name what differs from the default; zero and mb (train.micro_batch) are always included.
    """
    degrees = {axis.word: values[axis.key] for axis in AXES} | {"dp": world // ranks_of_layout(values)}
    named = [f"{word}{degrees[word]}" for word in AXIS_WORDS if degrees[word] > 1]

    conditions = [  # (word, whether the cell has it)
        ("sp", values["sp"]),
        ("async-tp", values["async_tp"]),
        (f"ep-chunks{values['ep_chunks']}", values["ep_chunks"] > 1),
        (f"ep-bound{values['ep_bound']}", values["ep_bound"] is not None),
        (f"tokens-{values['compress_tokens']}", values["compress_tokens"] != "none"),
        (f"zero{values['zero']}", True),
        (values["schedule"], values["pp"] > 1),
        (f"vpp{values['vpp']}", values["vpp"] is not None),
        (f"mb{values['micro_batch']}", True),
        (f"cp-{values['cp_kind']}", values["cp"] > 1),
        (f"reduce-{values['reduce']}", values["reduce"] not in ("collective", "powersgd")),
        ("powersgd", values["reduce"] == "powersgd"),
        ("ramp", values["ramp"]),
        ("uneven", values["stages"] is not None),
        ("offload", values["offload"] != "none"),
        ("docs", values["doc_mask"]),
        ("best-fit", values["pack"] == "best_fit"),
        ("own-valid", values["valid"] is not None),
        ("capacity", values["capacity"] == 1.0),
        ("padded", values["capacity"] == "padded"),
        ("fp8", values["fp8"] is not None),
        (values["fp8"], values["fp8"] is not None),
        (values["name"], values["name"] != "adamw"),
        ("mup", values["mup"] is not None),
        (values["recompute"], values["recompute"] != "none"),
        ("ema", values["ema"] is not None),
        ("qk-clip", values["qk_clip"] is not None),
        ("async", values["async_save"]),
        (f"vocab{values['vocab_multiple']}", values["vocab_multiple"] != 32),
        ("wide", values["geometry"] == "wide"),
        *((values[switch], values[switch] is not None) for switch in lattice.BUNDLE_SWITCHES),
    ]
    return named + [word for word, holds in conditions if holds]


def chosen(found: Lattice, which: str, only: set[str], seed: int) -> list[Values]:
    """Return the cells that --layouts and --only ask for.

    `which` is "all" (every layout), "product" (every legal cell), or how many to draw, as text. `only` lists
    words that a cell must have or, prefixed with "no-", must not have. Raises ConfigError if no cell matches,
    or for an unknown word.
    """
    required = {word for word in only if not word.startswith("no-")}
    forbidden = {word.removeprefix("no-") for word in only if word.startswith("no-")}
    check_words(required | forbidden, found.world)
    legal_layouts = [layout for layout in found.layouts if can_have(found, layout, required, forbidden)]
    found = replace(found, layouts=legal_layouts)

    def is_wanted(values: Values) -> bool:
        named = set(words(values, found.world))
        return required <= named and not forbidden & named

    if which == "all" and not only:
        return lattice.covering_cells(found, seed)
    if which in ("all", "product"):
        cells = list(lattice.all_cells(found, is_wanted))
    else:
        cells = lattice.draw_cells(found, int(which), seed, is_wanted)
    if not cells:
        named = " ".join(sorted(only))
        raise ConfigError(f"--only: no legal layout of {found.world} ranks has the words {named}")
    return cells


def check_words(named: set[str], world: int) -> None:
    """Raise ConfigError for a word that no cell of `world` ranks has, with any model.

    The error suggests similar words.
    """
    known = every_word(world)
    for word in sorted(named - known):
        like = [one for one in sorted(known) if word in one.split("-")]
        like += difflib.get_close_matches(word, known, n=3)
        advice = f"; did you mean {', '.join(dict.fromkeys(like))}?" if like else ""
        raise ConfigError(f"--only: no cell of {world} ranks has the word {word}{advice}")


def every_word(world: int) -> set[str]:
    """Return the words of all cells of `world` ranks, legal or not."""
    named = {f"{axis}{degree}" for axis in AXIS_WORDS for degree in range(2, world + 1)}
    undivided = dict.fromkeys(lattice.DEGREES, 1)
    first_values = {key: values[0] for key, values in lattice.LAYOUT.items()}
    divided = undivided | {"pp": 2, "cp": 2} | first_values | lattice.default_switches()
    for key, values in (lattice.LAYOUT | lattice.SWITCHES).items():
        for value in values:
            named.update(words(divided | {key: value}, world))
    return named


def can_have(found: Lattice, layout: Values, required: set[str], forbidden: set[str]) -> bool:
    """Return whether the layout has a legal cell with the required words and no forbidden one, with unnamed
    switches at their first value.

    This saves a search through all switch settings of a layout that has none.
    """
    defaults = layout | lattice.default_switches()
    own = set(words(defaults, found.world))
    to_add, to_remove = required - own, forbidden & own
    if not (to_add or to_remove):
        return True
    named = {
        (key, value): set(words(defaults | {key: value}, found.world))
        for key, values in lattice.SWITCHES.items()
        for value in values
    }
    ways = [[item for item, its in named.items() if word in its] for word in to_add]
    ways += [[item for item, its in named.items() if word not in its] for word in to_remove]
    for items in itertools.product(*ways):
        cell = defaults | dict(items)
        its = set(words(cell, found.world))
        if required <= its and not forbidden & its and found.is_legal(cell):
            return True
    return False
