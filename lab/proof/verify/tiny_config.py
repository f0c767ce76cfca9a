"""The jobs of scripts.verify: recipes shrunk to tiny twins of themselves, and their data."""
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers

from checkpoint.branch import NOT_INHERITED, branch_config
from config import CheckpointConfig, Config, DistillConfig
from config.reading import tiny
from config.tree import plain_data, with_values
from data import fim, tokenizer
from data.indexed import IndexedDatasetWriter
from data.tokenizer import Tokenizer
from lab.proof.lattice import TRUNK_STEPS
from lab.proof.verify.overrides import Overrides

LAST = 4  # steps of a proof
SKIPPED = 2  # the step whose gradient is made non-finite
FIM_VOCAB = 261  # the tokenizer with sentinels
TASKS = "tasks.jsonl"


def tiny_config(name: str, world: int = 1, overrides: Overrides = Overrides()) -> Config:
    """Return the shrunk recipe (config/reading/tiny.py) with `overrides`."""
    return overrides.apply(tiny.tiny_config(name, world))


def write_corpora(folder: Path) -> None:
    """Write two data sets of random letters, `short` and `long`, for the byte tokenizer: with an index,
    without one (raw-NAME.bin), and for a tokenizer with sentinels and a start token (fim-NAME).
    Also write tasks.jsonl with two tasks.

    Documents of `short` have 1 to 60 tokens, many of them very few, so that microbatches have very different
    numbers of targets under data.doc_mask.
    """
    byte_tokenizer = tokenizer.load_tokenizer("bytes")
    stream = np.random.default_rng(0)
    few = stream.integers(1, 4, 300)
    many = stream.integers(20, 60, 30)
    short = [*few[:150], *many[:15], *few[150:], *many[15:]]
    long = stream.integers(100, 900, 8)
    texts: dict[str, list[np.ndarray]] = {}
    for name, lengths in (("short", short), ("long", long)):
        texts[name] = [stream.integers(ord("a"), ord("z") + 1, length, np.uint8) for length in lengths]
        documents = [[*letters, byte_tokenizer.eod] for letters in texts[name]]
        write_index(folder / name, byte_tokenizer, documents)
        np.concatenate(documents).astype("<i4").tofile(folder / f"raw-{name}.bin")

    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    with_sentinels = tokenizer.load_tokenizer(folder / "tokenizer")
    for name, found in texts.items():
        ids = with_sentinels.encode_batch([letters.tobytes().decode() for letters in found])
        write_index(folder / f"fim-{name}", with_sentinels, [[*each, with_sentinels.eod] for each in ids])
    question = {"context": "a layout ", "choices": ["proves", "is", "<s>"]}
    tasks = [question | {"answer": answer} for answer in (0, 2)]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of single bytes, with a start token, an end token, and a family's sentinels."""
    bytes_as_letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate(bytes_as_letters)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", *fim.SENTINELS[0]])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


def write_index(path: Path, tok: Tokenizer, documents: list[list[int]]) -> None:
    """Write a data set of documents, as scripts.prepare_data does."""
    with IndexedDatasetWriter(path, tok.vocab) as writer:
        for document in documents:
            writer.add(document)
        writer.finish(tok, 1)


def placed(cfg: Config, home: Path, name: str, trunk: Path | None = None) -> Config:
    """Return the job with its data in `home` and its run folder at home/name.

    `trunk` is the checkpoint of another run to start from (`has_trunk`).
    """
    form, vocab = "{}", cfg.model.vocab
    if cfg.data.fim_rate or cfg.data.bos:
        form, vocab = "fim-{}", FIM_VOCAB
    elif cfg.data.dtype:
        form = "raw-{}.bin"
    short, long = (home / form.format(which) for which in ("short", "long"))
    checkpoint = cfg.checkpoint
    if checkpoint.mirror is not None:
        checkpoint = replace(checkpoint, mirror=f"file://{home}/store", memory_dir=str(home))
    if trunk is not None and checkpoint.resume != "auto":
        checkpoint = replace(checkpoint, resume=str(trunk))
    if trunk is not None and checkpoint.init_from is not None:
        checkpoint = replace(checkpoint, init_from=str(trunk))
    if trunk is not None and cfg.distill.teacher is not None:
        cfg = replace(cfg, distill=replace(cfg.distill, teacher=str(trunk)))
    cfg = replace(
        cfg,
        model=replace(cfg.model, vocab=vocab),
        data=replace(
            cfg.data,
            path=str(short) if cfg.train.seq_len <= 32 else f"0.6 {short} 0.4 {long}",
            valid=None if cfg.data.valid is None else str(long),
        ),
        eval=replace(cfg.eval, tasks=str(home / TASKS) if cfg.eval.tasks == TASKS else cfg.eval.tasks),
        checkpoint=checkpoint,
        log=replace(cfg.log, dir=str(home), name=name),
    )
    if trunk is None or checkpoint.branch is None:
        return cfg
    stated = plain_data(cfg)
    for section, keys in NOT_INHERITED.items():
        stated[section] = {key: value for key, value in stated[section].items() if key not in keys}
    stated["log"]["name"] = name
    stated["optim"]["lr"] *= 0.75
    return branch_config(f"{trunk.parent.parent}@{TRUNK_STEPS}", [stated])


def has_trunk(cfg: Config) -> bool:
    """Return whether the job starts from a checkpoint of another run, or has it as its teacher."""
    return cfg != without_start(cfg)


def without_start(cfg: Config) -> Config:
    """Return the job starting from initial weights, without a teacher."""
    start = {key: getattr(CheckpointConfig, key) for key in ("resume", "init_from", "init_changes", "branch")}
    return replace(cfg, checkpoint=replace(cfg.checkpoint, **start), distill=DistillConfig())


def get_trunk(cfg: Config) -> Config:
    """Return the run whose checkpoint after TRUNK_STEPS a job starts from (`has_trunk`). If only weights
    are loaded, it may be of another model (lattice.BUNDLES names the key). A teacher alone has learned from
    other initial weights.
    """
    trunk = without_start(cfg)
    if cfg.checkpoint == trunk.checkpoint:
        return with_values(trunk, {"train.seed": trunk.train.seed + 1})
    if cfg.checkpoint.init_from is None:
        return trunk
    return with_values(trunk, {"model.norm.eps": 10 * trunk.model.norm.eps})
