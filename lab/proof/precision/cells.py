"""The cells that scripts.verify --precision proves: every dtype, optimizer and ZeRO stage, in some layout."""
import itertools
from collections import Counter
from dataclasses import dataclass, replace

from config import Config, ConfigError, MTPConfig
from config.axes import ranks_of_layout
from config.reading.schedules import plan_pipeline
from lab.proof.precision.job import DTYPES, LEARNING_RATES, precision_config
from lab.proof.verify.overrides import Overrides

LAYOUTS: dict[int, tuple[dict, ...]] = {  # {world size: keys of `parallel`}
    1: ({},),
    2: (
        {},
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"pp": 2, "schedule": "zb-v"},
        {"cp": 2},
        {"ep": 2},
        {"cp": 2, "cp_kind": "ulysses"},
        {"tp": 2, "sp": True, "async_tp": True},
        {"pp": 2, "schedule": "interleaved"},
        {"ep": 2, "ep_chunks": 2},
        {"tp": 2, "etp": 2},
    ),
    4: (
        {},
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"pp": 2, "tp": 2, "sp": True, "schedule": "zb-v"},
        {"cp": 2},
        {"dp_rep": 2},
        {"ep": 2},
        {"tp": 2, "ep": 2, "schedule": "zb-v", "pp": 2},
        {"cp": 2, "cp_kind": "ulysses"},
        {"tp": 2, "sp": True, "async_tp": True},
        {"pp": 2, "schedule": "interleaved"},
        {"ep": 2, "etp": 2, "ep_chunks": 2, "tp": 2},
    ),
}
EXTRAS: tuple[dict, ...] = (  # keys of `parallel`, train.fp8 and model.mtp
    {},
    {"offload": "optimizer"},
    {"compress_weights": "int8", "compress_block": 64},
    {"compress_weights": "fp8"},
    {"fp8": "rowwise"},
    {"fp8": "blockwise"},
    {"fp8": "mxfp8"},
    {"fp8": "nvfp4"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"mtp": MTPConfig()},
    {"compress_tokens": "fp8"},
)
BLOCKS = {"blockwise": 16}  # {train.fp8: the side of its blocks, if the format leaves it free}
PREFIXES = {  # put before the value of a key in the name of a cell
    "schedule": "",
    "cp_kind": "",
    "ep_chunks": "chunks",
    "offload": "offload ",
    "compress_weights": "weights ",
    "compress_block": "block ",
    "compress_tokens": "tokens ",
    "fp8": "fp8 ",
    "recompute": "recompute ",
}


@dataclass(frozen=True)
class Cell:
    """A dtype, an optimizer, a ZeRO stage, a layout, and one extra feature."""

    dtype: str
    optimizer: str
    zero: int
    layout: int  # index into LAYOUTS[world]
    extra: int  # index into EXTRAS

    def config(self, name: str, world: int, data: str, overrides: Overrides = Overrides()) -> Config:
        """Return the config of the cell for a recipe and a data set prefix.

        `overrides` are model keys to set in the shrunk recipe.
        """
        keys = LAYOUTS[world][self.layout] | EXTRAS[self.extra]
        fp8, mtp = keys.pop("fp8", None), keys.pop("mtp", None)
        cfg = precision_config(name, data, self.dtype, self.optimizer, overrides=overrides)
        return replace(
            cfg,
            model=cfg.model if mtp is None else replace(cfg.model, mtp=mtp),
            train=replace(cfg.train, fp8=fp8, fp8_block=BLOCKS.get(fp8)),
            parallel=replace(cfg.parallel, zero=self.zero, **keys),
        )

    def words(self, world: int) -> str:
        """Return the name of the cell: `bf16 adamw zero1 dp2 weights int8`."""
        keys = LAYOUTS[world][self.layout] | EXTRAS[self.extra]
        dp = world // ranks_of_layout(keys)
        named = [self.dtype, self.optimizer, f"zero{self.zero}"]
        if dp > 1:
            named.append(f"dp{dp}")

        if "mtp" in keys:
            keys["mtp"] = keys["mtp"].modules
        for key, value in keys.items():
            named.append(key.replace("_", "-") if value is True else f"{PREFIXES.get(key, key)}{value}")
        return " ".join(named)

    def pairs(self) -> set[tuple]:
        """Return all pairs of (position, value) among the five values."""
        values = (self.dtype, self.optimizer, self.zero, self.layout, self.extra)
        return set(itertools.combinations(enumerate(values), 2))


def choose_cells(name: str, world: int, overrides: Overrides = Overrides()) -> list[Cell]:
    """Return one cell for every legal (dtype, optimizer, ZeRO stage), each with a layout and an extra.

    Picks the layout and the extra that cover the most new pairs of values; ties go to those used least.
    """
    times_taken: Counter[tuple[str, int]] = Counter()
    seen: set[tuple] = set()
    cells: list[Cell] = []

    def rank(cell: Cell) -> tuple[int, int]:
        num_new = len(cell.pairs() - seen)
        return -num_new, times_taken["layout", cell.layout] + times_taken["extra", cell.extra]

    num_layouts = len(LAYOUTS[world])
    for dtype, optimizer, zero in itertools.product(DTYPES, LEARNING_RATES, range(4)):
        places = itertools.product(range(num_layouts), range(len(EXTRAS)))
        candidates = [Cell(dtype, optimizer, zero, layout, extra) for layout, extra in places]
        candidates.sort(key=rank)
        runnable = (cell for cell in candidates if is_runnable(cell, name, world, overrides))
        cell = next(runnable, None)
        if cell is not None:
            cells.append(cell)
            seen |= cell.pairs()
            times_taken.update((("layout", cell.layout), ("extra", cell.extra)))
    return cells


def is_runnable(cell: Cell, name: str, world: int, overrides: Overrides = Overrides()) -> bool:
    """Return whether train.py accepts the cell and every key of it has an effect (so it repeats no other)."""
    extra = EXTRAS[cell.extra]
    if "fp8" in extra and cell.dtype != "fp8":
        return False
    if "compress_weights" in extra and world == 1:
        return False
    if "compress_tokens" in extra and not LAYOUTS[world][cell.layout].keys() & {"ep", "etp"}:
        return False
    try:
        family = precision_config(name, "none", cell.dtype, cell.optimizer, overrides=overrides)
        check_model(cell.config(name, world, "none", overrides), world)
    except ConfigError:
        return False
    return not ("mtp" in extra and family.model.mtp)


def check_model(cfg: Config, world: int = 1) -> None:
    """Raise ConfigError if train.py rejects the job on `world` ranks. The vocabulary is the proof's."""
    plan_pipeline(replace(cfg, model=replace(cfg.model, vocab=257)), world, advise=False)
