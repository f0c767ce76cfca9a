"""Initialize a new run with the weights of another run: checkpoint.init_from.

Weights are matched by name, for a model that computes the same function (config/reading/function.py), with
the tokenizer that they were trained with and the same use of its start token. init_changes lists intended
differences: keys of the model, data.tokenizer, data.bos, names of weights not to take, or
data.tokenizer=text, which matches rows by the text of their tokens. Any other difference is refused.
"""
import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from checkpoint.disk.store import StoredIndex
from checkpoint.systems.foreign import ForeignIndex, is_hf_folder
from config import Config, ConfigError, ModelConfig, Tree, comma_separated, vocab_size
from config.reading.function import (
    BY_TEXT,
    FUNCTION_KEYS,
    ROWS,
    START,
    TOKENIZER,
    differences,
    leaves_weights_alone,
    written,
)
from config.tree import has_path, value_at
from data.prompts import begins_with_start
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_files import OWN_FILES
from parallel.sharding.boxes import Box

UNKNOWN = "none"  # fingerprint of the tokenizer of weights imported without one
FINGERPRINT_DIGITS = 12  # of a fingerprint in a message
IMPLIED_BY_TEXT = ("model.vocab", "model.vocab_multiple")  # need not be stated in addition to BY_TEXT
MAX_NAMED = 4  # weights named in a message; the rest are only counted
LAYER = re.compile(r"layers\.(\d+)\.")
EXPERT = re.compile(r"(layers\.\d+\.mlp)\.experts\.\d+")
ADAPTERS = (".lora_a.weight", ".lora_b.weight")  # suffixes of weights that begin as no change (model/lora.py)
LOAD = ".router.load"  # of model.aux_kind global: a training statistic, like moments

INIT_FROM, TEACHER = "checkpoint.init_from", "distill.teacher"  # keys that name the weights to take
LABELS = {INIT_FROM: "weights", TEACHER: "teacher"}  # of header lines
TAKEN, IN_PART, FRESH, DROPPED = "taken", "in part", "fresh", "dropped"
Kinds = dict[str, tuple[str, Sequence[int]]]  # {weight of this run: (TAKEN, IN_PART or FRESH, its shape)}


@dataclass(frozen=True)
class WeightOrigin:
    """Where the weights of a new run come from, and how the two runs differ (checkpoint.init_changes).

    `keys` is {key: (value there, value here)}. `names` are patterns of weights not taken. `source` and
    `target` are the models there and here. `shapes` are those of stored weights, by name. `same_ids` int64
    [vocab], set if rows are matched by text, has for each id here the id there, or a negative number. `asker`
    is the key that names the weights.
    """
    index: StoredIndex
    keys: Mapping[str, tuple[Any, Any]]
    names: list[str]
    source: ModelConfig
    target: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    same_ids: NDArray[np.int64] | None = None
    asker: str = INIT_FROM

    def is_named(self, name: str) -> bool:
        """Return whether the weight is listed by name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def stored_name(self, name: str) -> str | None:
        """Return the stored weight with the same place in the model as `name`, or None.

        Multi-token prediction modules are numbered after the last block. An expert of a layer that has an MLP
        there begins as that MLP (sparse upcycling, arXiv 2212.05055).
        """
        layer = LAYER.match(name)
        if layer is not None and self.source.layers != self.target.layers:
            number = int(layer[1])
            if number >= self.target.layers:
                number += self.source.layers - self.target.layers
            elif number >= self.source.layers:
                return None
            name = f"layers.{number}.{name[layer.end():]}"
        names = name, EXPERT.sub(r"\1", name)
        return next((each for each in names if each in self.shapes), None)

    def is_copy(self, name: str) -> bool:
        """Return whether the weight is that of an expert which begins as an MLP."""
        return EXPERT.match(name) is not None and not EXPERT.match(self.stored_name(name) or name)

    def rows(self, name: str) -> NDArray[np.int64] | None:
        """Return for each of the first rows here the equivalent row there, or a negative number.

        Returns None if all rows are taken, or none.
        """
        deciding = ROWS.get(name, ())
        if self.same_ids is not None and "vocab" in deciding:
            return self.same_ids
        if not any(f"model.{key}" in self.keys for key in deciding):
            return None
        return np.arange(min(getattr(self.source, deciding[0]), getattr(self.target, deciding[0])))

    def kind(self, name: str, shape: Sequence[int]) -> str:
        """Return how a weight of this run is initialized."""
        stored = self.stored_name(name)
        if stored is None or self.is_named(name):
            return FRESH
        stored_shape = self.shapes[stored]
        if self.rows(name) is not None and stored_shape[1:] == tuple(shape[1:]):
            return IN_PART
        return TAKEN if stored_shape == tuple(shape) else FRESH


# ---- the tokenizer of a Hugging Face folder ----------------------------------------------------------------

def with_tokenizer(index: ForeignIndex, tok: Tokenizer) -> ForeignIndex:
    """Return the index with the tokenizer and start token of a Hugging Face folder in its meta, where the
    index of a run has them. Folders of other systems, or without a tokenizer, stay as they are.

    `tok` is the run's tokenizer. Raises ConfigError naming a file that is damaged.
    """
    folder = index.base or index.path
    if not is_hf_folder(folder):
        return index
    files = [folder / name for name in OWN_FILES if (folder / name).is_file()]
    if not files:
        return index

    # files may have the same ids in several forms; the first one counts, unless another equals the run's
    stored = tokenizer_in_file(files[0], tok)
    for file in files[1:]:
        if stored.fingerprint == tok.fingerprint:
            break
        with contextlib.suppress(ConfigError):  # tokenizer.model may be of a kind that is not read
            other = tokenizer_in_file(file, tok)
            if other.fingerprint == tok.fingerprint:
                stored = other
    meta = {**index.meta, "tokenizer": stored.fingerprint, "bos": begins_with_start(stored)}
    return replace(index, meta=meta)


def tokenizer_in_file(file: Path, tok: Tokenizer) -> Tokenizer:
    """Load a tokenizer. If its folder names several tokens that end documents, that of `tok`, the run's
    tokenizer, is taken, since the user chose it for the data. Raises ConfigError naming the file."""
    try:
        return load_tokenizer(file)
    except ConfigError as error:
        try:
            return load_tokenizer(file, str(tok.eod))
        except ConfigError:
            raise error from None


# ---- differences -------------------------------------------------------------------------------------------

def compare(
    index: StoredIndex,
    source: ModelConfig,
    cfg: Config,
    *,
    fingerprint: str,
    has_start: bool,
    ids_by_text: Callable[[Path, str], NDArray[np.int64]],
    asker: str = INIT_FROM,
) -> WeightOrigin:
    """Compare the function and the tokenizer of stored weights with those of a run.

    `source` is the model of `index`. `fingerprint` is that of the run's tokenizer, and `has_start` says
    whether its documents begin with the start token. `ids_by_text` maps the folder of another tokenizer and
    its fingerprint to WeightOrigin.same_ids.

    Raises ConfigError for a difference that checkpoint.init_changes does not state, or a stated one that does
    not exist.
    """
    keys: dict[str, tuple[Any, Any]] = differences(source, with_its_adapters(cfg.model, source))
    there = index.meta["tokenizer"]
    if there not in (fingerprint, UNKNOWN):
        keys[TOKENIZER] = there[:FINGERPRINT_DIGITS], fingerprint[:FINGERPRINT_DIGITS]
    elif other_start(index.meta, has_start):  # with another tokenizer it differs anyway
        keys[START] = not has_start, has_start

    words = comma_separated(cfg.checkpoint.init_changes)
    is_by_text = BY_TEXT in words
    stated = [TOKENIZER if word == BY_TEXT else word for word in words]
    stated_keys = [word for word in stated if word in FUNCTION_KEYS or word in (TOKENIZER, START)]
    implied = IMPLIED_BY_TEXT if is_by_text else ()
    unstated = [key for key in keys if key not in stated and key not in implied]
    if unstated:
        differing = ", ".join(f"{key} {two_values(keys[key])}" for key in unstated)
        changes = ",".join([*words, *unstated])
        by_text = f" ({BY_TEXT}: rows go to tokens of the same text)" if TOKENIZER in unstated else ""
        declaring = f", or declare the difference: --checkpoint.init_changes {changes}{by_text}"
        raise ConfigError(
            f"{asker}: {index.path} holds the weights of another model: {differing}; "
            f"{remedy(index.path, {key: keys[key] for key in unstated}, cfg)}"
            f"{declaring if asker == INIT_FROM else ''}"
        )
    for key in stated_keys:
        if key not in keys:
            why = no_difference(key, there, cfg)
            raise ConfigError(f"checkpoint.init_changes: {key} {why}; leave it out")

    shapes: dict[str, tuple[int, ...]] = {}
    for piece in index.pieces:
        key = piece.box.key
        if "@" not in key and not key.endswith(LOAD):
            shapes[key] = piece.box.shape
    return WeightOrigin(
        index=index,
        keys=keys,
        names=[word for word in stated if word not in stated_keys],
        source=source,
        target=cfg.model,
        shapes=shapes,
        same_ids=match_token_ids(index, source, ids_by_text) if is_by_text else None,
        asker=asker,
    )


def with_its_adapters(model: ModelConfig, source: ModelConfig) -> ModelConfig:
    """Return the run's model without adapters if the source has none: new ones change nothing."""
    return replace(model, lora=None) if source.lora is None else model


def match_token_ids(
    index: StoredIndex, source: ModelConfig, ids_by_text: Callable[[Path, str], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return WeightOrigin.same_ids. A tokenizer may have more ids than its model has rows."""
    folder = tokenizer_folder(index.path)
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint.init_changes: {BY_TEXT} reads the tokenizer of the weights, and {folder} is not "
            f"there; put it there, or state {TOKENIZER} alone: rows keep their indices"
        )
    found = ids_by_text(folder, index.meta["tokenizer"])
    return np.where(found < vocab_size(source), found, -1)


def tokenizer_folder(checkpoint: Path) -> Path:
    """Return the tokenizer folder of the run that made a checkpoint, or the Hugging Face folder itself."""
    return checkpoint if is_hf_folder(checkpoint) else checkpoint.parent.parent / "tokenizer"


def other_start(meta: Tree, has_start: bool) -> bool:
    """Return whether documents are known to begin differently there. `meta` is the checkpoint's."""
    return meta.get("bos") not in (None, has_start)


def two_values(values: tuple[Any, Any]) -> str:
    return f"{written(values[0])} there and {written(values[1])} here"


def no_difference(key: str, fingerprint: str, cfg: Config) -> str:
    """Return why a stated key is not needed. `fingerprint` is that of the tokenizer there."""
    if key == START:
        return "is the same there and here, or belongs to another tokenizer"
    if key != TOKENIZER:
        path = key.partition(".")[2]
        if not has_path(cfg.model, path):
            return "is a key that the model here does not have"
        value = value_at(cfg.model, path)
        return f"is {written(value)} there and here, or the weights compute the same with both"
    if fingerprint == UNKNOWN:
        return "is not known there"
    return "is the same there and here"


def remedy(path: Path, keys: Mapping[str, tuple[Any, Any]], cfg: Config) -> str:
    """Return how to make the run agree with the checkpoint `path` in these keys: {key: (value there,
    here)}."""
    advice: list[str] = []
    follows = {START}
    if START in keys:
        advice.append(f"set --{START} {written(keys[START][0])}")
    if TOKENIZER in keys:
        advice.append(data_of_tokenizer(path, cfg))
        follows = {TOKENIZER, "model.vocab"}  # the vocabulary follows the tokenizer
    if not follows.issuperset(keys):
        advice.append("set the model as it is there")
    return " and ".join(advice)


def data_of_tokenizer(checkpoint: Path | str, cfg: Config) -> str:
    """Return how to get data for the tokenizer that a checkpoint was trained with."""
    folder = tokenizer_folder(Path(checkpoint))
    name = str(folder) if folder.is_dir() else "ITS_TOKENIZER"
    if cfg.data.path == "stdlib":
        return f"set --data.tokenizer {name}"
    return f"prepare the data with --tokenizer {name}"


# ---- weights to take ---------------------------------------------------------------------------------------

def kinds_of(origin: WeightOrigin, wants: Iterable[tuple[Box, Tensor]]) -> Kinds:
    """Return how each weight that this rank holds, at least in part, is initialized."""
    return {box.key: (origin.kind(box.key, box.shape), box.shape) for box, _ in wants}


def stored_boxes(origin: WeightOrigin, wants: Iterable[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
    """Return the parts of this rank's weights to load, under the names and shapes of the checkpoint."""
    results: list[tuple[Box, Tensor]] = []
    for box, tensor in wants:
        kind = origin.kind(box.key, box.shape)
        stored = origin.stored_name(box.key)
        if kind == FRESH or stored is None:
            continue
        rows = origin.rows(box.key)
        parts = [(box, tensor)] if kind != IN_PART or rows is None else parts_by_rows(box, tensor, rows)
        for part, values in parts:
            results.append((replace(part, key=stored, shape=origin.shapes[stored]), values))
    return results


def parts_by_rows(box: Box, tensor: Tensor, rows: NDArray[np.int64]) -> Iterator[tuple[Box, Tensor]]:
    """Split a weight into parts whose rows are contiguous both there and here, skipping rows missing in
    `rows`."""
    begin = box.start[0]
    wanted = rows[begin:begin + box.size[0]]
    is_break = (np.diff(wanted) != 1) | (wanted[:-1] < 0)
    breaks = 1 + np.flatnonzero(is_break)
    for first, end in itertools.pairwise([0, *breaks.tolist(), len(wanted)]):
        if first == end or wanted[first] < 0:
            continue
        part = box.rows(first, end)
        there = (int(wanted[first]), *part.start[1:])
        yield replace(part, start=there), tensor[first:end]


def header_lines(origin: WeightOrigin, kinds: Kinds) -> list[str]:
    """Return header lines that say where weights come from, and which were taken, fresh or dropped.

    `kinds` covers all ranks. Raises ConfigError if a weight of one side has no counterpart and nothing stated
    explains it, if a stated name matches no weight, or if nothing is taken.
    """
    names: dict[str, list[str]] = {TAKEN: [], IN_PART: [], FRESH: [], DROPPED: []}
    used: set[str | None] = set()
    for name, (kind, _) in kinds.items():
        names[kind].append(name)
        if kind != FRESH:
            used.add(origin.stored_name(name))
    names[DROPPED] = [name for name in origin.shapes if name not in used]
    check_explained(origin, kinds, names[FRESH], names[DROPPED])
    if not names[TAKEN] and not names[IN_PART]:
        raise ConfigError(f"{origin.asker}: no weight of {origin.index.path} has a place here; leave it out")

    index = origin.index
    counts = ", ".join(f"{len(found):,} {kind}" for kind, found in names.items() if found)
    unknown = "; their tokenizer is not known" if index.meta["tokenizer"] == UNKNOWN else ""
    lines = [f"{LABELS[origin.asker]:<9}from {index.path} (step {index.meta['step']:,}): {counts}{unknown}"]
    if origin.keys:
        changed = [f"{key} {written(old)} -> {written(new)}" for key, (old, new) in origin.keys.items()]
        lines.append(f"{'changed':<9}{', '.join(changed)}")
    copies = [name for name in names[TAKEN] if origin.is_copy(name)]
    if copies:
        lines.append(f"{'copied':<9}{len(copies):,}: each expert begins as the MLP of its layer")
    for kind in (IN_PART, FRESH, DROPPED):
        if names[kind]:
            said = summarize_names(names[kind], lambda name, kind=kind: with_rows(origin, name, kind))
            lines.append(f"{kind:<9}{len(names[kind]):,}: {said}")
    return lines


def with_rows(origin: WeightOrigin, name: str, kind: str) -> str:
    rows = origin.rows(name)
    return name if kind != IN_PART or rows is None else f"{name} ({int((rows >= 0).sum()):,} rows)"


def check_explained(origin: WeightOrigin, kinds: Kinds, fresh: list[str], dropped: list[str]) -> None:
    """Raise ConfigError for weights missing on one side without explanation, or for names that match no
    weight."""
    for pattern in origin.names:
        if not any(fnmatchcase(name, pattern) for name in (*kinds, *origin.shapes)):
            raise ConfigError(
                f"checkpoint.init_changes: {pattern} matches no weight, neither there nor here; leave it out"
            )
    implied = () if origin.same_ids is None else IMPLIED_BY_TEXT
    free = (TOKENIZER, START, *implied)
    if not all(key in free or leaves_weights_alone(key) for key in origin.keys):
        return  # a key changes names or shapes
    new = () if origin.source.lora else ADAPTERS
    lacking = [name for name in fresh if not (origin.is_named(name) or name.endswith(new))]
    extra = [name for name in dropped if not origin.is_named(name)]
    wrong: list[str] = []
    if extra:
        said = summarize_names(extra, lambda name: with_shape(name, origin.shapes[name], kinds))
        wrong.append(f"weights there that are not used here: {len(extra):,} ({said})")
    if lacking:
        said = summarize_names(lacking, lambda name: with_shape(name, kinds[name][1], origin.shapes))
        wrong.append(f"weights here that are not there: {len(lacking):,} ({said})")
    skipping = (
        ", or list the weights to skip, with * as a wildcard: --checkpoint.init_changes "
        "'layers.*.attn.gate.weight'"
    )
    if wrong:
        raise ConfigError(
            f"{origin.asker}: {origin.index.path} does not fit this run, nothing was loaded: "
            f"{'; '.join(wrong)}; use the code and the config that made it"
            f"{skipping if origin.asker == INIT_FROM else ''}"
        )


def with_shape(name: str, shape: Sequence[int], others: Iterable[str]) -> str:
    """Return the name, with its shape if the other side has this weight in another shape."""
    return f"{name} {tuple(shape)}" if name in others else name


def summarize_names(names: Iterable[str], text: Callable[[str], str]) -> str:
    """Return the first few names, and how many more there are."""
    ordered = sorted(names, key=by_number)
    shown = ", ".join(text(name) for name in ordered[:MAX_NAMED])
    more = len(ordered) - MAX_NAMED
    return f"{shown} and {more:,} more" if more > 0 else shown


def by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
