"""Data of a test: records through scripts.prepare_data, byte-level tokenizers, and runs that train on them.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import run_folder
import tokenizers
from ranks import job

import config
from config.reading import defaults
from data.indexed import IndexedDataset
from scripts import prepare_data


def write_jsonl(path, rows):
    """Write a record on each line; a file that has them already stays as it is. Returns the path."""
    path, content = Path(path), "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)
    return path


def prepare(*words):
    """Run prepare_data in one process, unless the words say otherwise. Returns its exit code."""
    return prepare_data.main(["--workers", "1", *map(str, words)])


def prepare_rows(rows, tokenizer, out, *words):
    """prepare() of a .jsonl of these records, which lies beside `out`."""
    source = write_jsonl(f"{out}.jsonl", rows)
    return prepare("--input", source, "--tokenizer", tokenizer, "--out", out, *words)


def byte_level_bpe(texts=(), vocab_size=256, special_tokens=(), prefix_space=False):
    """A byte-level BPE of the library `tokenizers`, as tokenizer.json of the hub have it."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special_tokens], initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def loader_config(path, seq_len=16, micro_batch=1, global_batch=4, seed=None, **data):
    """A config to open a loader with. data: keys of data.*"""
    cfg = defaults()
    train = config.TrainConfig(steps=1, seq_len=seq_len, micro_batch=micro_batch, global_batch=global_batch)
    train = train if seed is None else replace(train, seed=seed)
    return replace(cfg, data=config.DataConfig(path=str(path), **data), train=train)


def get_text(index: IndexedDataset, first=0, stop=None):
    """The text of stored bytes, without the ends of documents."""
    ids = index.read(first, index.tokens if stop is None else stop)
    return bytes(ids[ids < 256].tolist()).decode()


def metrics(folder, *names):
    """The values under these names in metrics.jsonl, in their order."""
    return [row[name] for row in run_folder.rows(folder) for name in names if name in row]


LAYOUTS = ("--parallel.zero 1", "--parallel.cp 2", "--parallel.pp 2 --train.micro_batch 2")


def check_layouts(folder, words, layouts=LAYOUTS):
    """Runs of train.py in fp64: two ranks train under every layout as one does, in losses, gradient norms
    and validation. Returns the losses."""
    names = ("loss", "grad_norm", "val_loss")
    for number, layout in enumerate(("", *layouts)):
        world, name = 2 if layout else 1, f"r{number}"
        end = job(folder / f"log{number}", world, [*words, "--train.dtype", "fp64", "--log.dir", str(folder),
                                                   "--log.name", name, *layout.split()])
        assert end.codes == [0] * world, end.logs
        want = metrics(folder / "r0", *names)
        np.testing.assert_allclose(metrics(folder / name, *names), want, rtol=1e-9, err_msg=layout)
    return metrics(folder / "r0", "loss")
