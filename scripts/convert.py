"""Hugging Face folders, both ways: GPT-2, Llama (2, 3, 3.1, 3.2), Mistral, Qwen2 and 2.5, Qwen3, DeepSeek V2 and V3, and the
mixtures Mixtral, Qwen1.5-, 2- and 3-MoE, OLMoE and dots.llm1.

    python -m scripts.convert from-hf DIR RUN                         DIR as save_pretrained writes it -> a run folder
    python -m scripts.convert to-hf RUN DIR [--dtype fp32|bf16]       a run or checkpoint folder -> DIR for from_pretrained

The logits of both sides are compared in fp32 before anything is kept: against transformers where it is installed, else
(to-hf) against the new folder read back. On a failure nothing is left behind.

An imported RUN holds weights at step 0 and no optimizer state. Generate and evaluate work on it; training goes on from it,
in a folder of its own: `python train.py --config RUN/config.yaml`. It cannot be resumed in place, since it has no data yet.

DeepSeek's modules of multi-token prediction are read and written under the layer numbers after the last, as published.
transformers ignores them when it loads and drops them when it saves, so its logits say nothing about them; a folder without
them becomes a model without (model.mtp 0). The copies of embedding and head that published folders keep beside them must
be equal to the originals, and are not written. FP8 weights are refused (quantization_config).
"""
import argparse
import contextlib
import gc
import json
import os
import sys
import uuid
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

import config
import rules
from build import DTYPES, weights_only
from checkpoint import hf, hf_config, hf_tokenizer, state, store
from checkpoint.files import NonFinite, remove, storing, sync_dir
from config import Config, ConfigError, Model
from data import tokenizer
from parallel.mesh import Mesh
from plan.count import parameters
from runtime.failure import fail_cleanly

# Of the largest logit. Two right implementations in fp32 differ by 1e-7 to 1e-5 (80 layers of rounding); a swapped head, a
# wrong base of the rotation or a bias left out differs by 1e-2 and more.
TOLERANCE = 1e-4
CPU = torch.device("cpu")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes")


class Differs(ConfigError):
    """The logits of the two sides are not the same."""
    exit_code = 1


def from_hf(folder: Path, run: Path, spec: str | None = None) -> dict:
    """Writes the run folder; returns the report. Raises ConfigError; Differs; StorageError."""
    kind, m = hf_config.read(folder)
    found = hf.stored(folder, kind)
    ahead, m = m.mtp, hf.tie(m, found)
    has = spec or any((folder / name).exists() for name in TOKENIZERS)
    tok = tokenizer.load(spec or folder) if has else None
    cfg = recipe(m, run, tok is not None)
    rules.validate(cfg, fits=rules.validate)
    with made(run) as temp:
        stage, pieces = weights_only(cfg, CPU, "fp32")
        hf.read(kind, m, found, pieces)
        meta = {"step": 0, "tokens": 0, "config": asdict(cfg), "tokenizer": tok.fingerprint if tok else "none",
                "data": f"none: weights imported from {kind}", "torch": torch.__version__, "layout": asdict(Mesh.single().layout)}
        try:
            store.save(temp / "checkpoints", 0, pieces, meta, keep=1)
        except NonFinite as e:
            name = hf.rename(str(e).partition(":")[0], hf.TABLES[kind])
            raise ConfigError(f"{folder}: {name} holds NaN or Inf; these weights are damaged") from None
        with storing(temp, 0):
            (temp / "config.yaml").write_text(config.dump(cfg))
            if tok:
                (temp / "tokenizer").mkdir()
                tok.save(temp / "tokenizer")
                hf_tokenizer.carry(Path(spec or folder), temp / "tokenizer")
        tokens = probe(m)
        ours = stage.logits(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
        del stage, pieces  # one model in memory at a time
        gc.collect()
        match = compare(ours, their_logits(folder, tokens, m.tied), "from transformers")
    notes = [] if tok else [f"{folder} has no tokenizer.json and no tokenizer.model; generate and evaluate need one: import with --tokenizer"]
    notes += too_many(tok, m)
    if ahead > m.mtp:
        notes.append(f"the folder has no weights for multi-token prediction, though config.json says {ahead}: the model has none (model.mtp 0)")
    if match is None:
        notes.append("the logits were not compared: transformers is not installed")
    return {"family": kind, "parameters": parameters(m)["total"], "tensors": len(found), "from": str(folder), "to": str(run), "logits": match,
            "notes": notes, "next": f"python train.py --config {run}/config.yaml"}


def to_hf(run: str, folder: Path, dtype: str = "fp32", spec: str | None = None) -> dict:
    """Writes the Hugging Face folder; returns the report. Raises ConfigError; IntegrityError; Differs; StorageError."""
    notes: list[str] = []
    path = state.find(run, notes)
    meta = store.meta(path)
    cfg = config.build(Config, meta["config"])
    m = cfg.model
    kind = hf_config.family_of(m)
    source = Path(spec) if spec else path.parent.parent / "tokenizer"
    tok = tokenizer.load(spec or source) if spec or source.is_dir() else None
    if tok and not spec and meta["tokenizer"] not in (tok.fingerprint, "none"):
        raise ConfigError(f"{source}: is not the tokenizer that {path} was trained with; put that one there, or give --tokenizer")
    if not tok:
        notes.append(f"{source} does not exist, so the new folder has no tokenizer; --tokenizer gives it one")
    notes += too_many(tok, m)
    with made(folder) as temp:
        stage, pieces = weights_only(cfg, CPU, "fp64" if cfg.train.dtype == "fp64" else "fp32")
        store.load(path, pieces, strict=False)
        hf.fold(m, pieces)
        hf.write(temp, kind, m, pieces, DTYPES[dtype])
        with storing(temp, 0):
            special = export_tokenizer(tok, source, temp) if tok else {"bos_token_id": None, "eos_token_id": None}
            write_json(temp / "config.json", hf_config.to_json(m, str(DTYPES[dtype]).removeprefix("torch."), special))
            if not (temp / "generation_config.json").exists():
                write_json(temp / "generation_config.json", {"_from_model_config": True, **{k: v for k, v in special.items() if v is not None}})
            notes += export_json(tok, kind, temp) if tok else []
        for place in hf.places(kind, m, pieces):  # what was written is what is compared, not what it was rounded from
            for t in place.parts:
                t.copy_(t.to(place.dtype(DTYPES[dtype])))
        hf.fold(m, pieces, back=True)  # our side multiplies by itself
        tokens = probe(m)
        ours = stage.logits(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
        count = len(hf.places(kind, m, pieces))
        del stage, pieces, place, t  # one model in memory at a time
        gc.collect()
        theirs = their_logits(temp, tokens, m.tied)
        match = compare(ours, theirs, "from transformers") or compare(ours, read_back(temp, tokens), "read back by ourselves")
    return {"family": kind, "parameters": parameters(m)["total"], "tensors": count, "from": str(path), "to": str(folder), "logits": match,
            "notes": notes, "next": f'AutoModelForCausalLM.from_pretrained("{folder}")'}


# ---- models and logits -----------------------------------------------------------------------------------------------

def probe(m: Model) -> Tensor:
    """A tiny batch [2, s] of any ids; longer than the window where that is cheap."""
    length = 2 * m.window if m.window and 32 < m.window < 256 else 64
    return torch.randint(m.vocab, (2, min(length, m.context)), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor, tied: bool) -> tuple[str, Tensor] | None:
    """(who, logits) of transformers' model of this folder, in fp32; None where it is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    who = f"transformers {transformers.__version__}"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, tie_word_embeddings=tied)
        return who, model.eval()(input_ids=tokens, use_cache=False).logits
    except Exception as e:  # whatever it does not like about the folder
        raise Differs(f"{folder}: {who} does not load it: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e


@torch.no_grad()
def read_back(folder: Path, tokens: Tensor) -> tuple[str, Tensor]:
    """(who, logits) of the folder as from-hf reads it."""
    kind, m = hf_config.read(folder)
    stage, pieces = weights_only(Config(model=m), CPU, "fp32")
    hf.read(kind, m, hf.stored(folder, kind), pieces)
    return "its own reader", stage.logits(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def compare(ours: Tensor, theirs: tuple[str, Tensor] | None, where: str) -> dict | None:
    """The report on two sides' logits; None where there is no other side. Raises Differs."""
    if theirs is None:
        return None
    who, theirs = theirs
    if ours.shape != theirs.shape:
        raise Differs(f"logits {where}: shape {list(theirs.shape)}, ours {list(ours.shape)}")
    apart, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not apart <= TOLERANCE * scale:  # NaN too
        raise Differs(f"logits {where} differ by {apart:.3g} where the largest is {scale:.3g}; nothing was kept. This is a bug in the "
                      f"conversion: please report it with the config.json")
    return {"max_abs_difference": apart, "largest": scale, "against": who, "tokens": list(ours.shape[:2])}


# ---- folders ---------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def made(final: Path):
    """A folder to fill, which takes its name when all went well and is gone when not."""
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConfigError(f"{final}: is there already; choose another name, or remove it")
    temp = final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex}")
    with storing(temp, 0):
        temp.mkdir(parents=True)
    try:
        yield temp
        with storing(final, 0):
            os.rename(temp, final)
            sync_dir(final.absolute().parent)
    except BaseException:
        remove(temp)
        raise


def recipe(m: Model, run: Path, has_tokenizer: bool) -> Config:
    """What RUN/config.yaml says: train from these weights, in a folder beside this one."""
    known = next((name for name, entry in config.presets().items() if full(published(entry, m.vocab)) == full(m)), Model.preset)
    tree = config.read_yaml(config.HERE / "runs" / "pretrain.yaml")
    seq = min(tree["train"]["seq_len"], m.context)
    return config.from_tree(config.merge(tree, {
        "model": {**asdict(m), "preset": known}, "train": {"seq_len": seq}, "checkpoint": {"init_from": str(run)},
        "data": {"path": "stdlib", "tokenizer": str(run / "tokenizer")} if has_tokenizer else {},
        "log": {"dir": str(run.parent), "name": f"{run.name}-train"}}))


def published(entry: dict, vocab: int) -> Model:
    return config.build(Model, {"vocab": vocab, **{k: v for k, v in entry.items() if k != "recipe"}})


def full(m: Model) -> Model:
    """With what is left out filled in, so that two spellings of one model are equal."""
    plain = {key: getattr(Model(), key) for key in config.LEARNING}
    return replace(m, preset="", kv_heads=config.kv_heads(m), head_dim=config.head_dim(m), moe_ffn=config.moe_ffn(m), **plain)


def too_many(tok, m: Model) -> list[str]:
    """A note where the tokenizer makes ids that the model does not have."""
    if tok is None or tok.vocab <= m.vocab:
        return []
    return [f"the tokenizer has {tok.vocab} ids, the model only {m.vocab}: text that needs the last ones cannot be used"]


def export_tokenizer(tok, source: Path, target: Path) -> dict:
    """The tokenizer's own files into `target`; returns the special ids for config.json."""
    tok.save(target)
    hf_tokenizer.carry(source, target)
    (target / "tokenizer.bytes").unlink(missing_ok=True)
    said = json.loads(getattr(tok, "files", {}).get("config.json", "{}"))  # an imported one: as its config.json had them
    return {"bos_token_id": said.get("bos_token_id", tok.bos), "eos_token_id": said.get("eos_token_id", tok.eod)}


def export_json(tok, kind: str, target: Path) -> list[str]:
    """tokenizer.json for a tokenizer of ours that came without, if it can be exact. Returns notes on what is not."""
    files = target / "tokenizer.json", target / "tokenizer_config.json"
    mine = not any(f.exists() for f in files)
    try:
        if mine:
            data = hf_tokenizer.from_bytes(tok.eod) if isinstance(tok, tokenizer.Bytes) else hf_tokenizer.from_sentencepiece(tok.model)
            files[0].write_text(hf_tokenizer.exact(data, tok.encode), encoding="utf-8")
            names = {entry["id"]: entry["content"] for entry in data["added_tokens"]}
            write_json(files[1], hf_tokenizer.settings(kind, names.get(tok.bos), names[tok.eod], data["model"]["unk_token"]))
        check_auto(tok, target, mine)
    except hf_tokenizer.Refused as e:
        if not mine:  # someone else's tokenizer: it stays as it is
            return [f"{e}; PreTrainedTokenizerFast may do better"]
        for f in files:
            f.unlink(missing_ok=True)
        return [f"no tokenizer.json is written, only the tokenizer itself: {e}"]
    return []


def check_auto(tok, folder: Path, mine: bool) -> None:
    """AutoTokenizer gives our ids, where transformers is installed; special tokens in the text too if it is `mine`. Raises Refused."""
    try:
        import transformers
    except ImportError:
        return
    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        where = hf_tokenizer.difference(tok.encode, lambda text: auto.encode(text, add_special_tokens=False),
                                        () if mine else list(auto.get_added_vocab()))
    except Exception as e:  # whatever it does not like about the folder
        raise hf_tokenizer.Refused(f"AutoTokenizer of transformers {transformers.__version__} fails: {' '.join(str(e).split())[:200]}") from None
    if where is not None:
        raise hf_tokenizer.Refused(f"AutoTokenizer of transformers {transformers.__version__} gives other ids on {where[:60]!r}")


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# ---- command line ----------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m scripts.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = p.add_subparsers(dest="way", required=True, metavar="from-hf | to-hf")
    into = ways.add_parser("from-hf", help="a Hugging Face folder -> a run folder")
    out = ways.add_parser("to-hf", help="a run -> a Hugging Face folder")
    into.add_argument("folder", metavar="DIR", type=Path, help="config.json, *.safetensors, tokenizer files")
    into.add_argument("run", metavar="RUN", type=Path, help="run folder to make")
    out.add_argument("run", metavar="RUN", help="run folder (its newest checkpoint) or checkpoint folder")
    out.add_argument("folder", metavar="DIR", type=Path, help="folder to make")
    out.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights on disk (default fp32: exact)")
    for way in (into, out):
        way.add_argument("--tokenizer", metavar="SPEC", help="bytes, a .model, a tokenizer.json or a folder; none: the one that is there")
        way.add_argument("--json", action="store_true", help="the report as one JSON object")
    a = p.parse_args(argv)
    try:
        report = from_hf(a.folder, a.run, a.tokenizer) if a.way == "from-hf" else to_hf(a.run, a.folder, a.dtype, a.tokenizer)
    except Differs as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    print(json.dumps(report) if a.json else show(report))
    return 0


def show(r: dict) -> str:
    out = [f"{r['family']}: {r['parameters']:,} parameters in {r['tensors']} tensors, {r['from']} -> {r['to']}"]
    if match := r["logits"]:
        out.append(f"logits: max |difference| {match['max_abs_difference']:.2e} where the largest is {match['largest']:.3g}, "
                   f"against {match['against']} on {match['tokens'][0]} x {match['tokens'][1]} tokens in fp32")
    return "\n".join([*out, *(f"note: {n}" for n in r["notes"]), f"next: {r['next']}"])


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
