"""The jobs of scripts.verify: recipes shrunk to tiny twins of themselves, and their data."""
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from checkpoint.branch import NOT_INHERITED, branch_config
from config import ChannelMixer, CheckpointConfig, Config, ModelConfig, NoPart, TokenMixer
from config.reading import resolve
from config.tree import plain_data, with_values
from data import fim, tokenizer
from data.indexed import IndexedDatasetWriter
from data.tokenizer import Tokenizer
from model.rope import RopeConfig, with_fitting_longrope, with_original_context
from model.router import ExpertsConfig, with_mlps
from lab.proof.lattice import NUM_STEPS, TRUNK_STEPS
from lab.proof.verify.overrides import Overrides

LAST = 4  # steps of a proof
SAVED = 3  # the step after which a layout is stopped, saves, and resumes
SKIPPED = 2  # the step whose gradient is made non-finite
FIM_VOCAB = 261  # the tokenizer with sentinels
TASKS = "tasks.jsonl"

SETTINGS = {
    "train.dtype": "fp64",
    # only LAST of these run: warm-up (1, 2), plateau (3) and decay (from 4 on) come early
    "train.steps": NUM_STEPS,
    "train.seq_len": 32,
    "train.micro_batch": 1,
    "train.fp8_block": 4,
    "train.threads": 1,
    "model.dropout": 0.1,
    "optim.clip": 0.5,
    "optim.eps": 1e-4,
    "optim.warmup": 2,
    "optim.decay": "wsd",
    "optim.decay_fraction": 0.85,
    "parallel.recompute_parts": "core,norm,act",
    "parallel.bucket_mb": 0.03,
    "parallel.node": 2,
    "data.split": "70,30",
    "eval.batches": 1,
    "eval.sample": 3,
    # longer than a window, and an even number of tokens, like a part of a sequence
    "eval.prompt": "proofs of many layouts",
    "log.every": 1,
    "eval.every": SAVED,
    "checkpoint.every": SAVED,
}


def arguments(settings: Mapping[str, object]) -> list[str]:
    """Return {"train.steps": 20} as command-line arguments."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return words


MIXER_SIZES = {
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "key_heads": 4,
    "key_dim": 6,
    "dim": 6,
    "groups": 4,
    "state": 10,
    "window": 11,
    "chunk": 13,
    "kv_rank": 12,
    "q_rank": 20,
    "nope_dim": 8,
    "rope_dim": 4,
    "v_dim": 6,
    "value_dim": 6,
}


ORIGINAL_CONTEXT = 16  # for scaled RoPE
GROWTH_EVERY = 5  # positions that share a factor of growing scores


def with_sizes(
    model: ModelConfig, sizes: Mapping[str, int], mlp: Callable[[ChannelMixer], ChannelMixer]
) -> ModelConfig:
    """Return the model with these sizes in all its mixers, including those of its block variants, and with
    its MLPs and experts mapped by `mlp`. A second window is half as long.
    """
    model = with_mlps(model, mlp)
    blocks = [
        replace(variant, changes=tuple(
            (path, shrunk_value(path, value, sizes, model.mixer)) for path, value in variant.changes))
        for variant in model.blocks
    ]
    return replace(
        model,
        mixer=shrunk_mixer(model.mixer, sizes),
        blocks=tuple(blocks),
    )


def shrunk_mlp(mlp: ChannelMixer) -> ChannelMixer:
    """Return the MLP or MoE of the shrunk recipe. Its routers change faster than usual."""
    if isinstance(mlp, NoPart):
        return mlp
    if not isinstance(mlp, ExpertsConfig):
        return replace(mlp, width=48)
    router = replace(
        mlp.router,
        groups=min(mlp.router.groups, 4),
        bias_rate=None if mlp.router.bias_rate is None else 0.01,
        aux=mlp.router.aux and replace(mlp.router.aux, weight=10 * mlp.router.aux.weight),
        jitter=0.05 if mlp.router.scores == "softmax" else 0.0,
    )
    return replace(mlp, experts=8, top_k=min(mlp.top_k, 3), width=16, router=router)


def shrunk_mixer(mixer: TokenMixer, sizes: Mapping[str, int]) -> TokenMixer:
    stated = {name: size for name, size in sizes.items() if getattr(mixer, name, None) is not None}
    growth = getattr(mixer, "growth", None)
    if growth is not None:
        stated["growth"] = replace(growth, every=GROWTH_EVERY)
    return with_original_context(replace(mixer, **stated), ORIGINAL_CONTEXT)


def shrunk_value(path: str, value: Any, sizes: Mapping[str, int], mixer: TokenMixer) -> Any:
    """Return the shrunk value or part of a block variant."""
    if path == "mixer":
        return shrunk_mixer(value, sizes)
    if path == "mixer.rope":
        return value and with_original_context(replace(mixer, rope=value), ORIGINAL_CONTEXT).rope
    if path == "mixer.rope.scaling":
        return value and with_original_context(replace(mixer, rope=RopeConfig(scaling=value)),
                                               ORIGINAL_CONTEXT).rope.scaling
    size = sizes.get(path.removeprefix("mixer."))
    if value is None or size is None:
        return value
    return size // 2 if path == "mixer.window" and getattr(mixer, "window", None) else size


def tiny_config(name: str, world: int = 1, overrides: Overrides = Overrides()) -> Config:
    """Return the recipe `name`, shrunk so that a laptop proves a layout in seconds, with all its features.

    The batch is divisible by the world size, and usually by 2 after that. `overrides` are keys to set in the
    shrunk recipe. Raises ConfigError if there is no such recipe.
    """
    global_batch = world * (-(-8 // world))
    if world > 1 and world % 2 == 1:
        global_batch *= 2
    cfg = resolve(name, None, arguments({**SETTINGS, "train.global_batch": global_batch}))

    model = cfg.model
    shrunk = replace(
        with_sizes(model, MIXER_SIZES, shrunk_mlp),
        layers=8,
        hidden=32,
        vocab=257,
        vocab_multiple=32,
        context=32,
    )
    return overrides.apply(replace(cfg, model=with_fitting_longrope(shrunk)))


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
    """Return whether the job starts from a checkpoint of another run."""
    return cfg.checkpoint != without_start(cfg).checkpoint


def without_start(cfg: Config) -> Config:
    """Return the job starting from initial weights."""
    start = {key: getattr(CheckpointConfig, key) for key in ("resume", "init_from", "init_changes", "branch")}
    return replace(cfg, checkpoint=replace(cfg.checkpoint, **start))


def trunk_of(cfg: Config) -> Config:
    """Return the run whose checkpoint after TRUNK_STEPS a job starts from (`has_trunk`). If only weights
    are loaded, it may be of another model (lattice.BUNDLES names the key).
    """
    trunk = without_start(cfg)
    if cfg.checkpoint.init_from is None:
        return trunk
    return with_values(trunk, {"model.norm.eps": 10 * trunk.model.norm.eps})
