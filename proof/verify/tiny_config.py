"""What scripts.verify trains: a recipe shrunk to a tiny twin of itself, and the data that it reads."""
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import config
from config import Config
from data import tokenizer
from data.indexed import IndexedDatasetWriter
from proof.verify.overrides import Overrides

LAST = 4  # steps of a proof
SAVED = 3  # the step after which a layout is stopped, saves, and is started again
SKIPPED = 2  # the step whose gradient is made non-finite

SETTINGS = {
    "train.dtype": "fp64",
    # 20 steps are announced and LAST of them run: warm-up (1, 2), plateau (3) and decay (from 4 on) come
    # early
    "train.steps": 20,
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
    # longer than a window; an even number of tokens, as a part of a sequence has
    "eval.prompt": "proofs of many layouts",
    "log.every": 1,
    "eval.every": SAVED,
    "checkpoint.every": SAVED,
}


def arguments(settings: Mapping[str, object]) -> list[str]:
    """{"train.steps": 20} as the words of a command line."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return words


def tiny_config(name: str, world: int = 1, overrides: Overrides = Overrides()) -> Config:
    """The recipe `name`, shrunk so that a laptop proves a layout in seconds; its features stay.

    The batch is divisible by the world size, and mostly by 2 after that. overrides: keys that are set in the
    shrunk recipe. Raises ConfigError if there is no such recipe.
    """
    global_batch = world * (-(-8 // world))
    if world > 1 and world % 2 == 1:
        global_batch *= 2
    cfg = config.resolve(name, None, arguments({**SETTINGS, "train.global_batch": global_batch}))

    model = cfg.model
    shrunk = replace(
        model,
        layers=8,
        hidden=32,
        heads=8,
        kv_heads=None if model.kv_heads is None else 4,
        head_dim=None if model.head_dim is None else 8,
        ffn=48,
        vocab=257,
        vocab_multiple=32,
        context=32,
        rope_original=16,
        window=None if model.window is None else 11,
        kv_rank=model.kv_rank and 12,
        q_rank=model.q_rank and 20,
        nope_dim=8,
        rope_dim=4,
        v_dim=6,
    )
    if model.experts:
        shrunk = replace(
            shrunk,
            experts=8,
            top_k=min(model.top_k, 3),
            moe_ffn=16,
            router_groups=min(model.router_groups, 4),
            router_bias_rate=0.01,
            aux_loss=10 * model.aux_loss,
            jitter=0.05 if model.router == "softmax" else 0.0,
        )
    return overrides.apply(replace(cfg, model=shrunk))


def write_corpora(folder: Path) -> None:
    """Writes two data sets of random letters under the byte tokenizer: folder/short and folder/long.

    Documents of `short` have 1 to 60 tokens, and many have very few: under data.doc_mask, microbatches then
    have very different numbers of targets.
    """
    byte_tokenizer = tokenizer.load_tokenizer("bytes")
    stream = np.random.default_rng(0)
    few = stream.integers(1, 4, 300)
    many = stream.integers(20, 60, 30)
    short = [*few[:150], *many[:15], *few[150:], *many[15:]]
    long = stream.integers(100, 900, 8)
    for name, lengths in (("short", short), ("long", long)):
        with IndexedDatasetWriter(folder / name, byte_tokenizer.vocab) as writer:
            for length in lengths:
                letters = stream.integers(ord("a"), ord("z") + 1, length)
                writer.add([*letters, byte_tokenizer.eod])
            writer.finish(byte_tokenizer, 1)


def placed(cfg: Config, home: Path, name: str) -> Config:
    """The job with its data in `home` and its run folder at home/name."""
    if cfg.train.seq_len <= 32:
        path = str(home / "short")
    else:
        path = f"0.6 {home / 'short'} 0.4 {home / 'long'}"
    valid = None if cfg.data.valid is None else str(home / cfg.data.valid)
    return replace(
        cfg,
        data=replace(cfg.data, path=path, valid=valid),
        log=replace(cfg.log, dir=str(home), name=name),
    )
