"""What scripts.verify trains: a recipe shrunk to a tiny twin of itself, and the files that it reads."""
from dataclasses import replace
from pathlib import Path

import numpy as np

import config
from config import Config
from data import tokenizer
from data.indexed import Writer

LAST = 4  # steps of a proof
SAVED = 3  # the step after which a layout is stopped, saves, and is started again
SKIPPED = 2  # the step whose gradient is made non-finite
# 20 steps are announced and LAST of them run: so warm-up (1, 2), plateau (3) and decay (from 4 on) come early
SETTINGS = ("--train.dtype fp64 --train.steps 20 --train.seq_len 32 --train.micro_batch 1 "
            "--train.fp8_block 4 --train.threads 1 --model.dropout 0.1 --optim.clip 0.5 --optim.eps 1e-4 "
            "--optim.warmup 2 --optim.decay wsd --optim.decay_fraction 0.85 "
            "--parallel.recompute_parts core,norm,act --parallel.bucket_mb 0.03 --parallel.node 2 "
            "--data.split 70,30 --eval.batches 1 --eval.sample 2 --eval.prompt a --log.every 1 "
            f"--eval.every {SAVED} --checkpoint.every {SAVED}")


def subject(name: str, world: int = 1) -> Config:
    """The recipe shrunk to what a laptop proves in seconds a layout; every feature of the family stays."""
    # every world divides the batch, and 2 mostly divides what is left
    batch = world * (-(-8 // world)) * (1 if world % 2 == 0 or world == 1 else 2)
    cfg = config.resolve(name, None, [*SETTINGS.split(), "--train.global_batch", str(batch)])
    m = cfg.model
    shrunk = replace(m, layers=8, hidden=32, heads=8, ffn=48, vocab=257, vocab_multiple=32, context=32,
                     rope_original=16, kv_heads=None if m.kv_heads is None else 4,
                     head_dim=None if m.head_dim is None else 8, window=None if m.window is None else 11,
                     kv_rank=m.kv_rank and 12, q_rank=m.q_rank and 20, nope_dim=8, rope_dim=4, v_dim=6)
    if m.experts:
        shrunk = replace(shrunk, experts=8, top_k=min(m.top_k, 3), moe_ffn=16,
                         router_groups=min(m.router_groups, 4), router_bias_rate=0.01,
                         aux_loss=10 * m.aux_loss, jitter=0.05 if m.router == "softmax" else 0.0)
    return replace(cfg, model=shrunk)


def write_corpora(folder: Path) -> None:
    """Two data sets of random letters under the byte tokenizer, folder/short and folder/long. Documents of
    `short` have 1 to 60 tokens, many of them very few: with data.doc_mask microbatches then count very
    different numbers of targets."""
    tok, stream = tokenizer.load("bytes"), np.random.default_rng(0)
    few, many = stream.integers(1, 4, 300), stream.integers(20, 60, 30)
    short = [*few[:150], *many[:15], *few[150:], *many[15:]]
    for name, lengths in (("short", short), ("long", stream.integers(100, 900, 8))):
        with Writer(folder / name, tok.vocab) as out:
            for length in lengths:
                out.add([*stream.integers(97, 123, length), tok.eod])
            out.finish(tok, 1)


def placed(cfg: Config, home: Path, name: str) -> Config:
    """The job with its data in `home` and its run folder at home/name."""
    path = str(home / "short") if cfg.train.seq_len <= 32 else f"0.6 {home / 'short'} 0.4 {home / 'long'}"
    return replace(cfg, data=replace(cfg.data, path=path), log=replace(cfg.log, dir=str(home), name=name))
