"""Converts Hugging Face folders to run folders and back.

    python -m scripts.convert from-hf DIR RUN                      a folder of save_pretrained -> a run folder
    python -m scripts.convert to-hf RUN DIR [--weights ema]        a run -> a folder for from_pretrained
    python -m scripts.convert to-hf RUN DIR --adapter              its adapters (model.lora) -> one for PEFT
    torchrun --nproc-per-node 8 -m scripts.convert to-hf RUN DIR   the same, a tensor at a time in memory

Models: those of checkpoint/hf/families/table.py, listed in docs/families.md.

Before anything is kept, the logits of both sides are compared in fp32: against transformers if it is
installed, else (to-hf) against the new folder, read back. A failure leaves nothing behind. Memory holds one
tensor at a time, and for the logits one layer in fp32, plus the stored weights of transformers' model. With
torchrun, each rank writes some files of the same folder; the ranks do not compare logits, but verify what
they have written on disk.

An imported RUN contains weights at step 0 and no optimizer state. scripts.generate and scripts.evaluate
accept it; training continues from it in a new folder: `python train.py --config RUN/config.yaml --data.path
PREFIX`, with the settings of configs/runs/continue.yaml. It cannot be resumed in place, because it has no
data yet.

DeepSeek's multi-token prediction modules are read and written under the layer numbers after the last block,
as published. transformers ignores them when it loads and drops them when it saves, so its logits do not cover
them; a folder without them becomes a model without them (model.mtp none). Published folders also contain
copies of the embedding and the head; these must equal the originals, and are not written.

Quantized weights (FP8 and MXFP4: checkpoint/hf/quantized.py) are dequantized while they are read; to-hf
writes them plain, in fp32 or bf16. To compare logits, transformers reads a dequantized copy of the folder,
which takes space on the disk of RUN until then.
"""
import argparse
import contextlib
import json
import math
import os
import re
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import config
from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.files import remove, storage_errors, sync_dir
from checkpoint.disk.tensors_by_name import open_safetensors_folder
from checkpoint.hf import config as hf_config
from checkpoint.hf import export as hf_ranks
from checkpoint.hf import tensors as hf
from checkpoint.hf import tokenizer as hf_tokenizer
from checkpoint.hf.families.table import FAMILIES
from checkpoint.hf.quantized import write_dequantized
from checkpoint.hf.rules import spell_out
from checkpoint.sizes import check_counts, check_size
from checkpoint.systems import foreign
from checkpoint.trained import Fill, model_in_parts, tokenizer_of_run, weights_of_rank
from config import Config, ConfigError, ModelConfig, ParallelConfig, Tree, modules_ahead, provenance
from config.command_line import CommandParser
from config.reading import CONFIG_FOLDER, build_tree, dump, from_tree, merge, presets
from config.reading.suggestions import check_rules
from config.terminal import output_width, wrapped
from config.tree import plain_data
from data import tokenizer, tokenizer_files
from data.contract import SpecialToken
from data.prompts import added_start, begins_with_start, start_token
from data.same_tokens import another_text
from data.tokenizer import Tokenizer
from durable.script_job import ScriptJob, script_job
from kernels.delta_rule import CHUNK
from model.precision import DTYPES
from model.rope import rope_switches
from model.router import mixture
from parallel.topology.mesh import Mesh
from parallel.wire.comm import PeerError
from parallel.wire.world import World
from plan.count import parameters
from runtime.failure import exit_process, fail_cleanly

# Largest accepted difference / largest logit. Two correct implementations in fp32 differ by 1e-7 to 1e-5 (80
# layers of rounding); a swapped head, a wrong RoPE base or a missing bias differs by 1e-2 or more.
TOLERANCE = 1e-4
PROBED = 64  # tokens of a sequence whose logits are compared
MAX_PROBED = 8192  # longest window that is probed beyond
DROPOUTS = (
    "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "output_dropout",
    "resid_pdrop", "embd_pdrop", "attn_pdrop",
)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}  # of --shard-size
MIN_VISION_TENSORS = {"hidden_size": 16, "num_hidden_layers": 0, "num_attention_heads": 1}
MAX_ERROR_LENGTH = 300  # characters of a transformers error to show


class LogitsMismatch(ConfigError):
    """Raised if the logits of the two sides differ."""
    exit_code = 1


# ---- import ----------------------------------------------------------------------------------------------

def from_hf(
    folder: Path, run: Path, spec: str | None = None, eod: str | None = None, made: Tree | None = None
) -> dict:
    """Write the run folder `run` from the Hugging Face folder and return the report.

    `spec` is the tokenizer, by default that of the folder, if it has one. `eod` is the token that ends
    documents, by default the one named in the tokenizer's files. `made` records the command
    (config/provenance.py).
    Raises ConfigError; LogitsMismatch; StorageError.
    """
    source = foreign.read_hf_folder(folder)
    family, found = source.family.model_type, source.weights.tensors
    published_mtp = modules_ahead(source.model)
    model = hf.tie_embeddings(source.model, source.family, found)
    has_tokenizer = spec or any((folder / name).exists() for name in tokenizer_files.OWN_FILES)
    tok = tokenizer.load_tokenizer(spec or folder, eod) if has_tokenizer else None
    is_own = tok is not None and has_same_ids(folder, tok, eod)
    if tok is not None and spec and not is_own:
        check_same_texts(folder, tok, spec)
    try:
        cfg = config_of_run(model, run, tok is not None)
        check_rules(cfg)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}; the names are those of our keys") from None

    with new_folder(run) as temp:
        ours = import_weights(cfg, source, tok=tok, checkpoints=temp / "checkpoints", made=made)
        with storage_errors(temp, 0):
            (temp / "config.yaml").write_text(dump(cfg))
            if tok:
                (temp / "tokenizer").mkdir()
                tok.save(temp / "tokenizer")
                tokenizer_files.copy_files(Path(spec or folder), temp / "tokenizer")
                if is_own:
                    tokenizer_files.copy_files(folder, temp / "tokenizer")
        with plain_folder(source, temp) as plain:
            match = compare(ours, their_logits(plain, model), model, "from transformers")

    notes: list[str] = []
    if source.quantized:
        notes.append(f"the weights of {folder} are quantized ({source.quantized}); those of {run} are "
                     "dequantized, and to-hf writes them plain, in fp32 or bf16")
    if not tok:
        notes.append(f"{folder} has no tokenizer.json and no tokenizer.model; generate and evaluate need "
                     "one: import with --tokenizer")
    if spec and not is_own and tokenizer_files.has_template(tokenizer_files.read_files(folder)):
        notes.append(f"the chat template of {folder} is not taken: {spec} is another tokenizer than its own")
    notes += vocab_notes(tok, model)
    if published_mtp > modules_ahead(model):
        notes.append("the folder has no weights for multi-token prediction, though config.json says "
                     f"{published_mtp}: the model has none (model.mtp none)")
    notes += hf.unread_notes(source.files.tensors, source.family, model.layers)
    notes += dropout_notes(folder)
    if match is None:
        notes.append("the logits were not compared: transformers is not installed")
    else:
        notes += window_notes(model)
    return {
        "family": family,
        "parameters": parameters(model)["total"],
        "tensors": len(found),
        "from": str(folder),
        "to": str(run),
        "logits": match,
        "notes": notes,
        **next_steps(run, "T" if tok is None else f"{run}/tokenizer"),
    }


def has_same_ids(folder: Path, tok: Tokenizer, eod: str | None) -> bool:
    """Return whether the folder has a tokenizer with the same ids as `tok`, so that its richer files can be
    used.
    """
    try:
        return tokenizer.load_tokenizer(folder, eod).fingerprint == tok.fingerprint
    except ConfigError:
        return False


def check_same_texts(folder: Path, tok: Tokenizer, spec: str) -> None:
    """Raise ConfigError if the folder's tokenizer maps some id to another text than `tok`, which --tokenizer
    names as `spec`: the weights were trained with the folder's.
    """
    try:
        own = tokenizer.load_tokenizer(folder)
    except ConfigError:  # none, or an unreadable one, which --tokenizer replaces
        return
    found = another_text(own, tok)
    if found is not None:
        token_id, theirs, ours = found
        raise ConfigError(f"--tokenizer: {spec} is not the tokenizer of {folder}: id {token_id} is "
                          f"{theirs!r} there and {ours!r} here; leave --tokenizer out, and change tokenizers "
                          "in the training: --checkpoint.init_changes data.tokenizer")


def dropout_notes(folder: Path) -> list[str]:
    """Return a note on the dropout in config.json, [] if there is none. It does not affect the logits."""
    keys = json.loads((folder / "config.json").read_text())
    stated = {key: keys[key] for key in DROPOUTS if keys.get(key)}
    if not stated:
        return []
    said = ", ".join(f"{key} {value}" for key, value in stated.items())
    return [f"config.json trains with {said}, which is not taken; --model.dropout sets that of the residual "
            "stream, and attention has none"]


def next_steps(run: Path, spec: str) -> dict[str, str]:
    """Return the commands that continue training from an imported run. FILES stands for the user's text.

    `spec` is the tokenizer, or T if the user must name it as well.
    """
    prefix = f"runs/data/{run.name}"
    return {
        "first": f"python -m scripts.prepare_data --input FILES --tokenizer {shlex.quote(spec)} "
                 f"--out {shlex.quote(prefix)}",
        "next": f"python train.py --config {shlex.quote(f'{run}/config.yaml')} "
                f"--data.path {shlex.quote(prefix)}",
    }


@contextlib.contextmanager
def plain_folder(source: foreign.HFFolder, temp: Path) -> Iterator[Path]:
    """Yield a folder that transformers can read: that of `source` or, if it is quantized, a dequantized copy
    in `temp`, which is removed afterwards. Raises StorageError.

    transformers itself dequantizes fp8 only with other packages, and not in cut blocks.
    """
    plain = temp / "dequantized"
    if not source.quantized or not has_transformers():
        yield source.path
        return
    with storage_errors(plain, 0):
        plain.mkdir()
        write_json(plain / "config.json", hf_config.without_quantization(source.path / "config.json"))
    write_dequantized(plain, source.files)
    yield plain
    remove(plain)


def has_transformers() -> bool:
    """Return whether transformers is installed."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def import_weights(
    cfg: Config,
    source: foreign.HFFolder,
    *,
    tok: Tokenizer | None,
    checkpoints: Path,
    made: Tree | None,
) -> list[Tensor]:
    """Save the weights of `source` as step 0 and return our logits of the probes."""
    model, family, found = cfg.model, source.family.model_type, source.weights.tensors
    num_elements = sum(math.prod(tensor.shape) for tensor in found.values())
    check_counts(model, num_tensors=len(found), num_elements=num_elements, where=str(source.path))
    pieces = weights_without_values(cfg, "fp32")
    hf.check_folder(family, model, source.weights, pieces)
    index = foreign.index_hf_folder(source)
    foreign.check_copies(index)

    def read(piece: hf.Piece) -> Tensor:
        box, like = piece
        values = torch.zeros(box.size, dtype=like.dtype)
        foreign.ForeignLoad(index, [(box, values)]).fill()
        return values

    meta = {
        "step": 0,
        "tokens": 0,
        "config": plain_data(cfg),
        "tokenizer": tok.fingerprint if tok else "none",
        "data": f"none: weights imported from {family}",
        "torch": torch.__version__,
        "layout": asdict(Mesh.single().dims),
        "provenance": made or {},
        "bos": begins_with_start(tok) if tok else None,
    }
    saved = store.read_stored_index(store.save(checkpoints, 0, pieces, meta, keep=1, read=read))
    return our_logits(cfg, "fp32", lambda boxes: load_part(saved, boxes))


def config_of_run(model: ModelConfig, run: Path, has_tokenizer: bool) -> Config:
    """Return the content of RUN/config.yaml: continued training from these weights, in a sibling folder.

    data.path is left for the user to set.
    """
    preset = None
    for name, entry in presets().items():
        if with_all_values(preset_model(entry, model.vocab)) == with_all_values(model):
            preset = name
            break

    recipe = config.read_yaml(CONFIG_FOLDER / "runs" / "continue.yaml")
    seq_len = min(recipe["train"]["seq_len"], model.context)
    return from_tree(merge(recipe, {
        "model": {**plain_data(model), "preset": preset},
        "train": {"seq_len": seq_len},
        "checkpoint": {"init_from": str(run)},
        "data": {"tokenizer": str(run / "tokenizer")} if has_tokenizer else {},
        "log": {"dir": str(run.parent), "name": f"{run.name}-train"},
    }))


def preset_model(entry: dict, vocab: int | None) -> ModelConfig:
    """Return the model of an entry of configs/models.yaml. `vocab` is used if the entry has none."""
    values = {key: value for key, value in entry.items() if key != "recipe"}
    return build_tree(ModelConfig, {"vocab": vocab, **values})


def with_all_values(model: ModelConfig) -> ModelConfig:
    """Return the model with every optional value set, and without values that only training reads.

    Two configs of the same model then compare equal.
    """
    return replace(spell_out(model), preset="")


# ---- export ----------------------------------------------------------------------------------------------

def to_hf(
    run: str,
    folder: Path,
    dtype: str = "fp32",
    spec: str | None = None,
    weights: str = state.TRAINED,
    eod: str | None = None,
    shard_bytes: int = hf.SHARD_BYTES,
    adapter: bool = False,
) -> dict:
    """Write the Hugging Face folder from a run or checkpoint folder and return the report.

    `dtype` is that of the weights on disk. `spec` is the tokenizer, by default that of the run, if it has
    one. `weights` is one of state.WEIGHTS. `eod` is as in from_hf. `shard_bytes` limits the tensors of a
    file. `adapter` writes a folder of PEFT with the adapters alone.
    Raises ConfigError; IntegrityError; LogitsMismatch; StorageError.
    """
    notes: list[str] = []
    index = state.find_index(run, notes)
    if adapter:
        return to_peft(index, folder, dtype, weights=weights, notes=notes)
    index, merge = merged(index, weights)
    cfg = state.build_config(index.meta)
    model = cfg.model
    family = hf_config.family_of(model)

    tok, source = tokenizer_to_export(index, spec, eod, notes)

    with new_folder(folder) as temp:
        ours, num_tensors = export_weights(
            index,
            cfg,
            family,
            target=temp,
            dtype=DTYPES[dtype],
            weights=weights,
            shard_bytes=shard_bytes,
            merge=merge,
        )
        notes += write_small_files(temp, index, tok, source=source, dtype=DTYPES[dtype], weights=weights)
        match = compare(ours, their_logits(temp, model), model, "from transformers")
        if match is None:
            match = compare(ours, read_back(temp), model, "read back by ourselves")
        notes += window_notes(model)
    return export_report(index, folder, num_tensors=num_tensors, logits=match, notes=notes)


def to_hf_on_ranks(
    run: str,
    folder: Path,
    dtype: str,
    *,
    spec: str | None,
    weights: str,
    eod: str | None,
    shard_bytes: int,
    world: World,
) -> dict:
    """Run to_hf on many ranks without a model in memory: each writes some files of the folder. Collective.

    Each rank waits until all have written theirs, and the first renames the folder at the end. Raises the
    errors of to_hf on all ranks, after removing the folder.
    """
    everyone, timeout_s = world.all_ranks(), config.CheckpointConfig().timeout_s
    sharers = state.ranks_on_this_host(everyone)
    notes: list[str] = []

    def export(index: store.StoredIndex) -> dict:
        index, merge = merged(index, weights)
        cfg = state.build_config(index.meta)
        family = hf_config.family_of(cfg.model)
        pieces, tensors = tensors_to_write(index, cfg, family)
        files = hf.divide_into_files(tensors, DTYPES[dtype], shard_bytes)
        own = hf_ranks.files_of_rank(files, DTYPES[dtype], world.rank, world.size)

        def begin() -> list[str]:
            results: list[str] = []
            tok, source = tokenizer_to_export(index, spec, eod, results)
            temp = begun.enter_context(new_folder(folder))
            small = write_small_files(temp, index, tok, source=source, dtype=DTYPES[dtype], weights=weights)
            return [str(temp), *results, *small]

        def finish() -> None:
            total_bytes = sum(tensor.num_bytes(DTYPES[dtype]) for tensor in tensors)
            hf.write_index(temp, files, total_bytes)
            begun.close()  # renames it

        with contextlib.ExitStack() as begun:  # on the first rank
            name, *of_folder = state.run_on_first_rank(begin, everyone, timeout_s)
            temp = Path(name)
            try:
                state.run_on_all_ranks(
                    lambda: hf_ranks.write_files(
                        temp,
                        own,
                        files,
                        index=index,
                        model_type=family,
                        model=cfg.model,
                        pieces=pieces,
                        weights=weights,
                        dtype=DTYPES[dtype],
                        sharers=sharers,
                        merge=merge,
                    ),
                    everyone,
                    timeout_s,
                )
                state.run_on_first_rank(finish, everyone, timeout_s)
            except PeerError:
                raise
            except Exception:  # raised on all ranks: none exits before the folder is removed
                state.run_on_first_rank(lambda: remove(temp), everyone, timeout_s)
                raise
        plural = "s" if len(files) > 1 else ""
        said = (f"{world.size} ranks wrote {len(files)} file{plural} of weights and read back every bit; no "
                "logits were compared, as one process does")
        return export_report(
            index,
            folder,
            num_tensors=len(tensors),
            logits=None,
            notes=[*notes, *of_folder, said],
        )

    return state.load_found(run, notes, export, everyone, timeout_s)


Merge = Callable[[list[hf.Piece]], object]  # adds adapters to weights that were just loaded


def merged(index: store.StoredIndex, weights: str) -> tuple[store.StoredIndex, Merge]:
    """Return the index as that of a model without adapters, and what merges them into its weights."""
    lora = state.build_config(index.meta).model.lora
    if lora is None:
        return index, lambda pieces: None
    from checkpoint.hf.lora import merger, without_adapters

    return without_adapters(index), merger(index, lora, weights)


def to_peft(index: store.StoredIndex, folder: Path, dtype: str, *, weights: str, notes: list[str]) -> dict:
    """Write the adapters of a checkpoint as a folder of PEFT, and return the report."""
    model = state.build_config(index.meta).model
    if model.lora is None:
        raise ConfigError(f"--adapter: {index.path} has no adapters (model.lora); leave it out")
    from checkpoint.hf.lora import write_peft_folder
    from checkpoint.hf.peft import base_of

    family = hf_config.family_of(replace(model, lora=None))
    with new_folder(folder) as temp:
        count = write_peft_folder(temp, index, family, dtype=DTYPES[dtype], weights=weights)
    base = base_of(state.build_config(index.meta).checkpoint.init_from) or "BASE"
    report = export_report(merged(index, weights)[0], folder, num_tensors=count, logits=None, notes=notes)
    whole = f'AutoModelForCausalLM.from_pretrained("{base}")'
    return {**report, "next": f'PeftModel.from_pretrained({whole}, "{folder}")'}


def tensors_to_write(
    index: store.StoredIndex, cfg: Config, family: str
) -> tuple[list[hf.Piece], list[hf.HFTensor]]:
    """Return (our tensors, the folder's tensors) of a checkpoint to export, all without values.

    Raises ConfigError for a model that the family's format cannot represent.
    """
    check_size(cfg.model, index.pieces, str(index.path))
    pieces = weights_without_values(cfg, dtype_in_memory(cfg))
    tensors = hf.hf_tensors(family, cfg.model, pieces) + hf.constants(family, cfg.model)
    hf.fold_mup(cfg.model, pieces)
    return pieces, tensors


def weights_without_values(cfg: Config, dtype: str) -> list[hf.Piece]:
    """Return the whole tensors of a model, without values."""
    like = replace(cfg, train=replace(cfg.train, dtype=dtype), parallel=ParallelConfig())
    return weights_of_rank(like, Mesh.single(), torch.device("meta"), rank_of_stage=(0,))[1]


def dtype_in_memory(cfg: Config) -> str:
    """Return the dtype in memory of a checkpoint's weights while they are converted."""
    return "fp64" if cfg.train.dtype == "fp64" else "fp32"


def tokenizer_to_export(
    index: store.StoredIndex, spec: str | None, eod: str | None, notes: list[str]
) -> tuple[Tokenizer | None, Path]:
    """Return (the folder's tokenizer, if any; its folder or file), adding to the notes. See to_hf."""
    path, meta = index.path, index.meta
    source = Path(spec) if spec else path.parent.parent / "tokenizer"
    tok = tokenizer_of_run(path, meta["tokenizer"], spec, eod) if spec or source.is_dir() else None
    if not tok:
        notes.append(f"{source} does not exist, so the new folder has no tokenizer; --tokenizer gives it one")
    notes += vocab_notes(tok, state.build_config(meta).model)
    return tok, source


def write_small_files(
    target: Path,
    index: store.StoredIndex,
    tok: Tokenizer | None,
    *,
    source: Path,
    dtype: torch.dtype,
    weights: str,
) -> list[str]:
    """Write everything but the weights into `target` and return notes. Raises StorageError.

    `source` is the folder or file of the tokenizer.
    """
    cfg = state.build_config(index.meta)
    with storage_errors(target, 0):
        write_settings(target, cfg.model, tok, source=source, dtype=dtype)
        write_json(target / "provenance.json", find_origin(index.path, index.meta, weights))
        if tok:
            family = hf_config.family_of(cfg.model)
            return export_json(tok, family, target, start_token(tok, cfg.data.bos))
    return []


def export_report(
    index: store.StoredIndex, folder: Path, *, num_tensors: int, logits: dict | None, notes: list[str]
) -> dict:
    """Return the report of an export."""
    model = state.build_config(index.meta).model
    return {
        "family": hf_config.family_of(model),
        "parameters": parameters(model)["total"],
        "tensors": num_tensors,
        "from": str(index.path),
        "to": str(folder),
        "logits": logits,
        "notes": notes,
        "next": f'AutoModelForCausalLM.from_pretrained("{folder}")',
    }


def find_origin(path: Path, meta: Tree, weights: str) -> Tree:
    """Return the record of the exported run from its checkpoint's path and meta. For `weights` see to_hf."""
    made = meta.get("provenance") or {}
    code = made.get("code", {})
    return {
        "run": meta["config"]["log"]["name"] or path.parent.parent.name,
        "step": meta["step"],
        "tokens": meta["tokens"],
        "weights": weights,
        "commit": code.get("commit"),
        "changed": code.get("changed"),
        "training": made,
    }


def export_weights(
    index: store.StoredIndex,
    cfg: Config,
    family: str,
    *,
    target: Path,
    dtype: torch.dtype,
    weights: str,
    shard_bytes: int,
    merge: Merge,
) -> tuple[list[Tensor], int]:
    """Write the weights of a checkpoint into `target`, in `dtype`. For weights and shard_bytes see to_hf.

    Returns our logits of the probes with the weights as written, and the number of tensors.
    """
    pieces, tensors = tensors_to_write(index, cfg, family)
    files = hf.divide_into_files(tensors, dtype, shard_bytes)
    hf_ranks.write_files(
        target,
        list(files),
        files,
        index=index,
        model_type=family,
        model=cfg.model,
        pieces=pieces,
        weights=weights,
        dtype=dtype,
        merge=merge,
    )
    hf.write_index(target, files, sum(tensor.num_bytes(dtype) for tensor in tensors))

    def fill(boxes: list[hf.Piece]) -> None:
        load_part(index, state.stored_as(index, boxes, weights))
        merge(boxes)
        hf.fold_mup(cfg.model, boxes)
        # compare the written values, not those before rounding
        for tensor in hf.hf_tensors(family, cfg.model, boxes):
            for part in tensor.parts:
                part.copy_((part - tensor.above).to(tensor.dtype(dtype)).to(part.dtype) + tensor.above)
        hf.fold_mup(cfg.model, boxes, undo=True)  # our model applies the muP factors itself

    return our_logits(cfg, dtype_in_memory(cfg), fill), len(tensors)


def load_part(index: store.StoredIndex, boxes: list[hf.Piece]) -> None:
    """Load some tensors of a checkpoint. Raises IntegrityError, or ConfigError if they do not fit."""
    keys = {box.key for box, _ in boxes}
    part = replace(index, pieces=[piece for piece in index.pieces if piece.box.key in keys])
    store.load(part, boxes, strict=False)


def write_settings(
    target: Path, model: ModelConfig, tok: Tokenizer | None, source: Path, dtype: torch.dtype
) -> None:
    """Write the tokenizer's own files, config.json and generation_config.json into `target`.

    `source` is the folder or file of the tokenizer.
    """
    special: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if tok:
        special = export_tokenizer(tok, source, target)
    torch_dtype = str(dtype).removeprefix("torch.")
    write_json(target / "config.json", hf_config.to_hf_config(model, torch_dtype, special))

    generation_config = target / "generation_config.json"
    if not generation_config.exists():
        known = {key: token for key, token in special.items() if token is not None}
        write_json(generation_config, {"_from_model_config": True, **known})


def export_tokenizer(tok: Tokenizer, source: Path, target: Path) -> dict[str, int | None]:
    """Write the tokenizer's own files into `target` and return the special ids for config.json."""
    tok.save(target)
    tokenizer_files.copy_files(source, target)
    (target / "tokenizer.bytes").unlink(missing_ok=True)
    # An imported tokenizer keeps its original config.json, and the special ids in it.
    imported = json.loads(getattr(tok, "files", {}).get("config.json", "{}"))
    return {
        "bos_token_id": imported.get("bos_token_id", tok.bos),
        "eos_token_id": imported.get("eos_token_id", tok.eod),
    }


def export_json(tok: Tokenizer, family: str, target: Path, start: SpecialToken | None) -> list[str]:
    """Write tokenizer.json for a tokenizer that has none, if an exact one is possible. The files then put
    `start` before a text.

    Returns notes on what is inexact.
    """
    files = target / "tokenizer.json", target / "tokenizer_config.json"
    is_ours = not any(file.exists() for file in files)
    try:
        if is_ours:
            write_tokenizer_json(tok, family, *files)
        if start != added_start(tok):
            set_start(start, tok.contract.start, *files)
        check_auto_tokenizer(tok, target, is_ours, start)
    except hf_tokenizer.ExportRefused as refusal:
        if not is_ours:  # do not touch files of another project
            return [f"{refusal}; PreTrainedTokenizerFast may do better"]
        for file in files:
            file.unlink(missing_ok=True)
        lost = f"; the run puts {start} before a text, which this may not" if start else ""
        return [f"no tokenizer.json is written, only the tokenizer itself: {refusal}{lost}"]
    return []


def write_tokenizer_json(tok: Tokenizer, family: str, tokenizer_file: Path, settings_file: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a byte or sentencepiece tokenizer.

    Raises ExportRefused if tokenizer.json cannot reproduce our ids exactly.
    """
    if isinstance(tok, tokenizer.ByteTokenizer):
        data = hf_tokenizer.from_bytes(tok.eod)
    else:
        assert isinstance(tok, tokenizer.SentencePieceTokenizer)  # a JsonTokenizer saves tokenizer.json
        data = hf_tokenizer.from_sentencepiece(tok.model)
    tokenizer_file.write_text(hf_tokenizer.check_exact(data, tok.encode), encoding="utf-8")

    names = {entry["id"]: entry["content"] for entry in data["added_tokens"]}
    bos, eos, unknown = names.get(tok.bos), names[tok.eod], data["model"]["unk_token"]
    write_json(settings_file, hf_tokenizer.tokenizer_config(family, bos, eos, unknown))


def set_start(start: SpecialToken | None, known: SpecialToken | None, tokenizer_file: Path,
              settings_file: Path) -> None:
    """Make the files put `start`, or nothing, before a text. `known` is the tokenizer's start token."""
    if tokenizer_file.exists():
        data = json.loads(tokenizer_file.read_text(encoding="utf-8"))
        data["post_processor"] = hf_tokenizer.with_start(
            data.get("post_processor"), (start.text, start.id) if start else None
        )
        tokenizer_file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
    names = {"bos_token": known.text} if known else {}
    write_json(settings_file, {**settings, **names, "add_bos_token": start is not None})


def check_auto_tokenizer(tok: Tokenizer, folder: Path, is_ours: bool, start: SpecialToken | None) -> None:
    """Check that AutoTokenizer reproduces our ids, if transformers is installed.

    `start` precedes them if special tokens are added. If we wrote tokenizer.json (`is_ours`), texts that
    contain special tokens must match as well. Raises ExportRefused if an id differs.
    """
    try:
        import transformers
    except ImportError:
        return
    who = f"AutoTokenizer of transformers {transformers.__version__}"
    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        line = hf_tokenizer.first_difference(
            tok.encode,
            lambda text: auto.encode(text, add_special_tokens=False),
            without=() if is_ours else list(auto.get_added_vocab()),
        )
        bare, whole = auto.encode("a", add_special_tokens=False), auto.encode("a")
    except Exception as error:  # any error of transformers with this folder
        raise hf_tokenizer.ExportRefused(f"{who} fails: {' '.join(str(error).split())[:200]}") from None
    theirs = whole[0] if whole[:1] != bare[:1] else None
    if theirs != (start.id if start else None):
        raise hf_tokenizer.ExportRefused(f"{who} begins a text with {auto.decode(whole[:1])!r}, and the run "
                                         f"with {start or 'no start token'}")
    if line is not None:
        raise hf_tokenizer.ExportRefused(f"{who} gives other ids on {line[:60]!r}")


def vocab_notes(tok: Tokenizer | None, model: ModelConfig) -> list[str]:
    """Return a note if the tokenizer has ids that the model lacks."""
    if tok is None or tok.vocab <= config.vocab_size(model):
        return []
    return [f"the tokenizer has {tok.vocab} ids, the model only {model.vocab}: "
            "text that needs the last ones cannot be used"]


# ---- models and logits -----------------------------------------------------------------------------------

def probes(model: ModelConfig) -> list[Tensor]:
    """Return random token ids: [2, PROBED], and one sequence [1, s] that reaches beyond the longest window of
    any layer (unless that is too long), the first chunk of recurrent layers, and the length at which RoPE
    changes; the former stay below that length.
    """
    switches = rope_switches(model)
    shapes = [(2, min(PROBED, model.context, *switches))]
    has_state = any(not like.mixer.has_softmax for like in config.layer_models(model).values())
    reaches = [*get_windows(model), *[CHUNK] * has_state, *switches]
    seen = [reach for reach in reaches if reach < min(model.context, MAX_PROBED)]
    if seen:
        shapes.append((1, min(max(seen) + PROBED, model.context)))
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size(model), shape, generator=generator) for shape in shapes]


def window_notes(model: ModelConfig) -> list[str]:
    """Return a note that the logits were only compared within the window or the original context, [] if they
    were compared beyond it.
    """
    named = {"window": get_windows(model), "original context": sorted(rope_switches(model))}
    missed = {name: [length for length in lengths if length >= min(model.context, MAX_PROBED)]
              for name, lengths in named.items()}
    return [f"no logits were compared beyond the {name} of {', '.join(f'{length:,}' for length in lengths)}"
            for name, lengths in missed.items() if lengths]


def get_windows(model: ModelConfig) -> list[int]:
    """Return the attention windows of all layers, in ascending order."""
    windows = {getattr(like.mixer, "window", None) for like in config.layer_models(model).values()}
    return sorted(windows - {None})


@torch.no_grad()
def our_logits(cfg: Config, dtype: str, fill: Fill) -> list[Tensor]:
    """Return our logits [b, n, vocab] of each probe's last n tokens, at most PROBED. See model_in_parts."""
    stage = model_in_parts(cfg, dtype, fill)
    logits: list[Tensor] = []
    for tokens in probes(cfg.model):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits.append(stage.logits(tokens, positions)[:, -PROBED:].clone())
    return logits


@torch.no_grad()
def their_logits(folder: Path, ours: ModelConfig) -> tuple[str, list[Tensor]] | None:
    """Return (who computed them, logits like our_logits) of transformers' model of this folder, in fp32, or
    None without transformers.

    Raises LogitsMismatch if transformers cannot load the folder or run its model.
    """
    try:
        import transformers
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    who = f"transformers {transformers.__version__}"
    keys = hf_config.read_json(folder / "config.json") | {"tie_word_embeddings": ours.tied}
    keys = as_whole(keys)
    model_type = keys["model_type"]
    family = FAMILIES.get(model_type)
    if family is not None:
        model_type = family.code or model_type
        model_class = getattr(transformers, family.architecture, None)
        model_class = kept_as_stored(model_class, folder) or transformers.AutoModelForCausalLM
    else:  # multimodal
        model_class = transformers.AutoModelForImageTextToText
    try:
        their_config = transformers.CONFIG_MAPPING[model_type].from_dict(
            {**keys, "model_type": model_type})
        model = model_class.from_pretrained(
            folder, config=their_config, dtype=torch.float32, local_files_only=True)
        # Llama 4 with images fails on text alone, and contains a complete text model
        text = getattr(model, "language_model", None)
        model = text if hasattr(text, "lm_head") else model
        if mixture(ours) and hasattr(model, "set_experts_implementation"):
            # loop over experts: transformers' grouped product requires rows of a multiple of 16 bytes
            model.set_experts_implementation("eager")
        model.eval()
        compute_in_fp32(model)
        logits: list[Tensor] = []
        for tokens in probes(ours):
            logits.append(model(input_ids=tokens, use_cache=False, logits_to_keep=PROBED).logits)
        return who, logits
    except Exception as error:  # any error of transformers with this folder
        text = " ".join(str(error).split())[:MAX_ERROR_LENGTH]
        raise LogitsMismatch(f"{folder}: {who} cannot run it: {type(error).__name__}: {text}") from error


def as_whole(keys: Tree) -> Tree:
    """Return the keys of a text model as those of a multimodal model, if transformers has no class for the
    text alone. The vision part then has no weights in the folder, and no inputs.
    """
    family = FAMILIES.get(keys["model_type"])
    if family is None or not family.within:
        return keys
    tied = {"tie_word_embeddings": keys["tie_word_embeddings"]}
    return {"model_type": family.within, hf_config.TEXT: keys, "vision_config": MIN_VISION_TENSORS, **tied}


def kept_as_stored(model_class: type | None, folder: Path) -> type | None:
    """Return the transformers model class with weights kept in 16 bits if the folder has no others.
    Everything else, such as factors computed from config.json, has the dtype given to from_pretrained.
    """
    dtypes = {info.dtype for info in open_safetensors_folder(folder).tensors.values()}
    if model_class is None or dtypes not in ({torch.bfloat16}, {torch.float16}):
        return model_class
    plan = dict.fromkeys([""], *dtypes)  # every name
    members = {"__module__": model_class.__module__, "_get_dtype_plan": lambda *_: plan}
    return type(model_class.__name__, (model_class,), members)


def compute_in_fp32(module: nn.Module, is_layer: bool = False) -> None:
    """Convert the weights of each layer, and of each module outside the layers, to fp32 only while it
    computes; all others stay as stored.
    """
    if not list(module.parameters(recurse=is_layer)):
        for child in module.children():
            compute_in_fp32(child, is_layer=isinstance(module, nn.ModuleList))
        return
    stored: list[Tensor] = []

    def hold(*_: object) -> None:
        stored[:] = [weight.data for weight in module.parameters()]
        for weight in module.parameters():
            weight.data = weight.data.float()

    def release(*_: object) -> None:
        for weight, values in zip(module.parameters(), stored):
            weight.data = values
        stored.clear()

    module.register_forward_pre_hook(hold)
    module.register_forward_hook(release)


def read_back(folder: Path) -> tuple[str, list[Tensor]]:
    """Return (who computed them, logits) of the folder, loaded as from-hf does."""
    index = foreign.open_hf_folder(folder)
    return "its own reader", our_logits(
        Config(model=index.model), "fp32", lambda boxes: foreign.ForeignLoad(index, boxes).fill())


def compare(
    ours: list[Tensor], theirs: tuple[str, list[Tensor]] | None, model: ModelConfig, where: str
) -> dict | None:
    """Return the report on the logits of both sides, None if there is no other side. Raises
    LogitsMismatch."""
    if theirs is None:
        return None
    who, logits = theirs
    shapes, our_shapes = ([list(each.shape) for each in side] for side in (logits, ours))
    if shapes != our_shapes:
        raise LogitsMismatch(f"logits {where}: shapes {shapes}, ours {our_shapes}")

    difference = max(float((one - other).abs().max()) for one, other in zip(ours, logits))
    largest = max(float(each.abs().max()) for each in logits)
    if not difference <= TOLERANCE * largest:  # also true for NaN
        raise LogitsMismatch(
            f"logits {where} differ by {difference:.3g} where the largest is {largest:.3g}; nothing was "
            "kept. After an edit of model/ or kernels/, the exported config.json cannot say what the model "
            "computes; without one this is a bug in the conversion: please report it with the config.json")
    return {
        "max_abs_difference": difference,
        "largest": largest,
        "against": who,
        "tokens": [list(tokens.shape) for tokens in probes(model)],
    }


# ---- folders ---------------------------------------------------------------------------------------------

@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. It is renamed to `final` at the end, and removed after an error.

    Raises ConfigError if `final` exists and is not an empty folder.
    """
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConfigError(f"{final}: exists already; choose another name, or remove it")
    temp = final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex}")
    with storage_errors(temp, 0):
        temp.mkdir(parents=True)
    try:
        yield temp
        with storage_errors(final, 0):
            os.rename(temp, final)
            sync_dir(final.absolute().parent)
    except BaseException:
        removed = temp.with_name(f"{temp.name}.removed")
        with contextlib.suppress(OSError):  # other ranks may be about to write: by this name they cannot
            os.rename(temp, removed)
        remove(removed)
        remove(temp)
        raise


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# ---- command line ----------------------------------------------------------------------------------------

def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.convert",
        description=__doc__,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="from-hf | to-hf")

    importer = commands.add_parser("from-hf", help="a Hugging Face folder -> a run folder")
    importer.add_argument("folder", metavar="DIR", type=Path,
                          help="config.json, *.safetensors, tokenizer files")
    importer.add_argument("run", metavar="RUN", type=Path, help="run folder to create")

    exporter = commands.add_parser("to-hf", help="a run -> a Hugging Face folder")
    exporter.add_argument("run", metavar="RUN",
                          help="run folder (its newest checkpoint) or checkpoint folder")
    exporter.add_argument("folder", metavar="DIR", type=Path, help="folder to create")
    exporter.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32",
                          help="dtype of the weights on disk (default fp32: exact)")
    exporter.add_argument("--weights", choices=state.WEIGHTS, default=state.TRAINED,
                          help="ema: their moving average (train.ema)")

    exporter.add_argument("--shard-size", type=shard_size, default=hf.SHARD_BYTES, metavar="SIZE",
                          help="largest size of a file of weights, such as 5GB or 200MB (default 5GB)")
    exporter.add_argument("--adapter", action="store_true",
                          help="a folder of PEFT with the adapters alone (model.lora); default: they are "
                               "merged into the weights")

    for command in (importer, exporter):
        command.add_argument("--tokenizer", metavar="SPEC",
                             help="bytes, a .model, a tokenizer.json or a folder; none: that of the source")
        command.add_argument("--eod", metavar="TOKEN_OR_ID",
                             help="the token that ends documents; none: what the tokenizer's files name")
        command.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def shard_size(text: str) -> int:
    """Return the bytes of a size in transformers' notation: 5GB. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(GB|MB|KB)", text.upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 200MB, got {text!r}")
    return size


def main(argv: list[str]) -> int:
    with script_job(argv) as job:
        args = arguments().parse_args(argv)
        try:
            if args.command == "from-hf":
                report = import_folder(args, argv, job)
            else:
                report = export_run(args, job.join(kind="cpu"))
        except LogitsMismatch as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        print(json.dumps(report) if args.json else report_text(report))
    return 0


def import_folder(args: argparse.Namespace, argv: list[str], job: ScriptJob) -> dict:
    """Run from-hf. Raises ConfigError on many ranks."""
    if job.size > 1:
        raise ConfigError(f"from-hf: one process imports, and here are {job.size} ranks; start it without "
                          "torchrun")
    made = provenance.of_script("scripts.convert", argv)
    return from_hf(args.folder, args.run, args.tokenizer, args.eod, made)


def export_run(args: argparse.Namespace, world: World) -> dict:
    """Run to-hf."""
    options = {
        "spec": args.tokenizer,
        "weights": args.weights,
        "eod": args.eod,
        "shard_bytes": args.shard_size,
    }
    if world.size == 1:
        return to_hf(args.run, args.folder, args.dtype, **options, adapter=args.adapter)
    if args.adapter:
        raise ConfigError("--adapter: one process writes the adapters; start it without torchrun")
    with interrupted_by_sigterm():
        return to_hf_on_ranks(args.run, args.folder, args.dtype, **options, world=world)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Make a SIGTERM inside, which torchrun sends when another rank is lost, act like Ctrl-C, so that this
    rank leaves no folder behind.
    """
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report_text(report: dict) -> str:
    """Return the report as lines of text."""
    width = output_width()
    size = f"{report['parameters']:,} parameters in {report['tensors']} tensors"
    lines = wrapped(f"{report['family']}: {size}, {report['from']} -> {report['to']}", width)
    match = report["logits"]
    if match:
        tokens = " and ".join(f"{sequences} x {length:,}" for sequences, length in match["tokens"])
        lines += wrapped(f"logits: max |difference| {match['max_abs_difference']:.2e} where the largest is "
                         f"{match['largest']:.3g}, against {match['against']} "
                         f"on {tokens} tokens in fp32", width)
    for note in report["notes"]:
        lines += wrapped(f"note: {note}", width)
    if "first" in report:
        lines.append(f"first: {report['first']}   (FILES: your text)")
    lines.append(f"next: {report['next']}")
    return "\n".join(lines)


if __name__ == "__main__":
    exit_process(fail_cleanly(main, sys.argv[1:]))
