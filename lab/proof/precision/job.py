"""The jobs of scripts.verify --precision: recipes shrunk to a second of training, and their data."""
import functools
from dataclasses import replace
from pathlib import Path

import numpy as np

import config
from config import ChannelMixer, Config, ConfigError, NoPart, layer_models
from config.reading import resolve
from config.reading.tiny import arguments, with_sizes
from data import tokenizer
from data.indexed import IndexedDatasetWriter
from lab.proof.verify.overrides import Overrides
from model.router import ExpertsConfig

STEPS = 6
FP16_STEPS = 10  # enough for the loss scale to fall and to grow
SPOILT_STEP = 3  # the step whose gradient is made non-finite
DTYPES = ("bf16", "fp16", "fp32", "fp8")
LEARNING_RATES = {
    "adamw": 3e-3,
    "adamw-bf16": 3e-5,  # masters and moments in bf16
    "muon": 3e-3,
    "normuon": 3e-3,
    "dion": 3e-3,
    "lamb": 1e-2,
    "lars": 5.0,
    "lion": 1e-3,
    "sgd": 0.1,
}

SETTINGS = {
    "train.seq_len": 32,
    "train.micro_batch": 1,
    "train.global_batch": 8,
    "train.loss_scale": 2.0**24,
    "train.loss_scale_window": 2,
    "train.threads": 1,
    "optim.warmup": 0,
    "optim.decay": "constant",
    "optim.clip": 0.5,
    "optim.eps": 1e-6,
    "eval.every": "none",
    "eval.batches": 1,
    "eval.sample": 0,
    "checkpoint.every": "none",
    "model.dropout": 0,
    "parallel.bucket_mb": 0.06,
    "log.every": 1,
    "log.name": "run",
}

# {key: why --precision has to set it itself}
NEEDED = {
    "model.preset": "--precision trains the recipe NAME; give another NAME",
    "model.vocab": "--precision writes data with the ids of the byte tokenizer",
    "model.context": "--precision trains sequences of one length",
    "model.dropout": "the bounds of --precision hold without random masks",
    "model.lora.dropout": "the bounds of --precision hold without random masks",
    "model.mlp.router.jitter": "the bounds of --precision hold without random masks",
}

# {kind of mixer: initial loss scale}: a run aborts after five overflowing steps in a row
LOSS_SCALES = {"delta": 2.0**20, "kimi": 2.0**20, "mamba": 2.0**20}

MIXER_SIZES = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "window": 11,
    "chunk": 13,
    "kv_rank": 32,
    "q_rank": 32,
    "nope_dim": 16,
    "rope_dim": 16,
    "v_dim": 16,
}


def write_corpus(folder: Path) -> str:
    """Write a data set of 80 documents as scripts.tokenize does, and return its prefix.

    The documents are random letters; letters early in the alphabet are more frequent.
    """
    byte_tokenizer = tokenizer.load_tokenizer("bytes")
    stream = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "text", byte_tokenizer.vocab) as writer:
        for _ in range(80):
            length = stream.integers(10, 60)
            letters = ord("a") + stream.geometric(0.15, length) % 26
            writer.add([*letters, byte_tokenizer.eod])
        writer.finish(byte_tokenizer, 1)
    return str(folder / "text")


def shrunk_mlp(mlp: ChannelMixer) -> ChannelMixer:
    """Return the MLP, or the MoE without jitter, of the shrunk recipe."""
    if isinstance(mlp, NoPart):
        return mlp
    if not isinstance(mlp, ExpertsConfig):
        return replace(mlp, width=64)
    router = replace(mlp.router, groups=1, group_top_k=1, jitter=0.0)
    return replace(mlp, experts=4, top_k=min(mlp.top_k, 2), width=32, router=router)


@functools.cache
def precision_config(
    name: str, data: str, dtype: str, optimizer: str, *, overrides: Overrides = Overrides()
) -> Config:
    """Return the recipe shrunk to a second of training, with all its features except dropout and jitter.

    `data` is the prefix of the data set, `optimizer` a key of LEARNING_RATES. `overrides` are model keys to
    set in the shrunk recipe. Raises ConfigError for an override under which the bounds do not hold.
    """
    for path in overrides.keys():
        if path in NEEDED:
            raise ConfigError(f"{path}: {NEEDED[path]}; leave it out")
    settings = {
        **SETTINGS,
        "train.dtype": dtype,
        "train.steps": FP16_STEPS if dtype == "fp16" else STEPS,
        "optim.name": optimizer.removesuffix("-bf16"),
        "optim.states": "bf16" if optimizer == "adamw-bf16" else "fp32",
        "optim.lr": LEARNING_RATES[optimizer],
        "data.path": data,
    }
    cfg = resolve(name, None, arguments(settings))

    model = cfg.model
    shrunk = replace(
        with_sizes(model, MIXER_SIZES, shrunk_mlp),
        layers=4,
        hidden=64,
        vocab=None,
        vocab_multiple=32,
        context=32,
    )
    kinds = (of_layer.mixer.kind for of_layer in layer_models(shrunk).values())
    loss_scale = min(LOSS_SCALES.get(kind, cfg.train.loss_scale) for kind in kinds)
    train = replace(cfg.train, loss_scale=loss_scale)
    return overrides.apply(replace(cfg, model=shrunk, train=train))


def single_process(cfg: Config) -> Config:
    """Return the same job in one process."""
    parallel = replace(config.ParallelConfig(), bucket_mb=cfg.parallel.bucket_mb)
    return replace(cfg, parallel=parallel)
