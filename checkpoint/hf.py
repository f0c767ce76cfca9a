"""The weights of a Hugging Face folder <-> our tensors, one tensor at a time.

Our keys are unfused and our RoPE is rotate-half like theirs, so a conversion is a renaming; GPT-2 alone fuses q, k, v and
keeps its matrices transposed (Conv1D). `places` lays that out as views of our tensors: reading copies into them, writing
copies out of them. Nothing else of the model's size is ever held. No pickle is opened.
"""
import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.files import CHUNK, DTYPES, raw, storing, write_file
from config import ConfigError, Model, mup_scores, mup_width
from parallel.boxes import Box

LLAMA = {"embed": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "head": "lm_head",
         "attn_norm": "input_layernorm", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
         "attn.o": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
         "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
GPT2 = {"embed": "transformer.wte", "positions": "transformer.wpe", "layers": "transformer.h", "norm": "transformer.ln_f",
        "head": "lm_head", "attn_norm": "ln_1", "attn.q": "attn.c_attn", "attn.k": "attn.c_attn", "attn.v": "attn.c_attn",
        "attn.o": "attn.c_proj", "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
MIXTRAL = {**LLAMA, "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
           "mlp.experts.up": "block_sparse_moe.experts.{}.w3", "mlp.experts.down": "block_sparse_moe.experts.{}.w2"}
MOE = {**LLAMA, "mlp.router": "mlp.gate", **{f"mlp.experts.{n}": f"mlp.experts.{{}}.{n}_proj" for n in ("gate", "up", "down")}}
QWEN2_MOE = {**MOE, "mlp.shared_gate": "mlp.shared_expert_gate", **{f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")}}
DOTS = {**MOE, "mlp.router.bias": "mlp.gate.e_score_correction_bias",
        **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}}
DEEPSEEK = {**DOTS, "attn.q_a": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm", "attn.q_b": "self_attn.q_b_proj",
            "attn.kv_a": "self_attn.kv_a_proj_with_mqa", "attn.kv_norm": "self_attn.kv_a_layernorm", "attn.kv_b": "self_attn.kv_b_proj",
            "embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "head_norm": "shared_head.norm"}  # the last four: MTP
TABLES = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE,
          "qwen3_moe": MOE, "olmoe": MOE, "dots1": DOTS, "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK}
HEAD = "lm_head.weight"
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)")
BUFFERS = re.compile(r"(.*\.)?(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")  # old files carry them; not weights
FLOATS = ("F64", "F32", "F16", "BF16")
SHARD_BYTES = 5_000_000_000  # transformers 4's own limit; version 5 went to ten times that


@dataclass(frozen=True)
class Place:
    """A tensor of theirs: `parts` (views of ours) stacked along dim 0, then transposed where `flip`."""
    name: str
    parts: list[Tensor]
    flip: bool
    exact: bool = False  # stays fp32 whatever the rest is written in: it only compares

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.exact else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (sum(len(p) for p in self.parts), *self.parts[0].shape[1:])
        return shape[::-1] if self.flip else shape


def places(kind: str, m: Model, pieces: list[tuple[Box, Tensor]]) -> list[Place]:
    """Every tensor of the folder, in the order of the forward pass. pieces: whole tensors under our keys; the padding of the
    vocabulary is left out."""
    found: dict[str, Place] = {}
    for box, t in pieces:
        name = rename(box.key, TABLES[kind])
        flip = kind == "gpt2" and t.dim() == 2 and box.key.startswith("layers.")
        t = t[:m.vocab] if box.key in ("embed.weight", "head.weight") else t
        found.setdefault(name, Place(name, [], flip, box.key.endswith(".router.bias"))).parts.append(t)
    return list(found.values())


def rename(key: str, table: dict[str, str]) -> str:
    """layers.3.attn.q.weight -> model.layers.3.self_attn.q_proj.weight; layers.3.mlp.experts.7.up.weight -> ...experts.7.up_proj.weight"""
    body, _, leaf = key.rpartition(".")
    if not body.startswith("layers."):
        return f"{table[body]}.{leaf}"
    _, i, body = body.split(".", 2)
    expert = EXPERT.fullmatch(body)
    body, number = (f"mlp.experts.{expert[2]}", expert[1]) if expert else (body, "")
    name = table.get(f"{body}.{leaf}") or f"{table[body]}.{leaf}"
    return f"{table['layers']}.{i}.{name.format(number)}"


# ---- reading ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Stored:
    """A tensor on disk: its name in its file, before the prefix was added."""
    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def stored(folder: Path, kind: str) -> dict[str, Stored]:
    """{full name: Stored} of a folder's safetensors, from their headers alone. Raises ConfigError naming the file."""
    found: dict[str, Stored] = {}
    for file in weight_files(Path(folder)):
        with opened(file) as f:
            for name in f.keys():
                view = f.get_slice(name)
                if name in found:
                    raise ConfigError(f"{file}: {name} stands in {found[name].file.name} already")
                found[name] = Stored(file, name, tuple(view.get_shape()), view.get_dtype())
    prefix = "transformer." if kind == "gpt2" else "model."  # the hub's gpt2 and bare base models are saved without it
    if not any(name.startswith(prefix) for name in found):
        found = {name if name == HEAD else prefix + name: s for name, s in found.items()}
    return {name: s for name, s in found.items() if not BUFFERS.fullmatch(name)}


def weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        pickles = any(folder.glob("pytorch_model*.bin"))
        raise ConfigError(f"{folder}: holds no model.safetensors and no model.safetensors.index.json"
                          + ("; pickled weights (pytorch_model.bin) are never opened: save them again as safetensors" if pickles else ""))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or any(Path(n).name != n for n in names):
            raise ValueError("a weight_map of plain file names is expected")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise ConfigError(f"{index}: not an index of safetensors ({type(e).__name__}: {e})") from None
    return [folder / n for n in names]


def opened(file: Path):
    try:
        return safe_open(file, "pt")
    except FileNotFoundError:
        raise ConfigError(f"{file}: missing, though the index names it; download it again") from None
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{file}: truncated, or not a safetensors file ({e}); download it again") from None


def tie(m: Model, found: dict[str, Stored]) -> Model:
    """What the tensors say, whatever config.json says or leaves out: a folder without lm_head has a tied one; one without the
    modules of multi-token prediction (transformers drops them when it saves) has none."""
    ahead = any(name.startswith(f"model.layers.{m.layers}.") for name in found)
    return replace(m, tied=m.tied or HEAD not in found, mtp=m.mtp if ahead else 0)


def copies(m: Model) -> dict[str, str]:
    """{name: which table of ours}: tensors that files may store a second time."""
    out = {HEAD: "embed.weight"} if m.tied else {}
    for i in range(m.layers, m.layers + m.mtp):
        out |= {f"model.layers.{i}.embed_tokens.weight": "embed.weight",
                f"model.layers.{i}.shared_head.head.weight": "embed.weight" if m.tied else "head.weight"}
    return out


@torch.no_grad()
def read(kind: str, m: Model, found: dict[str, Stored], pieces: list[tuple[Box, Tensor]]) -> None:
    """Fills `pieces`. Raises ConfigError listing every tensor that is missing, too much or misshapen, before any is read."""
    want = {p.name: p for p in places(kind, m, pieces)}
    spare = copies(m)
    wrong = [f"{n} is missing" for n in want if n not in found]
    wrong += [f"{n} is not a weight of {kind}" for n in found if n not in want and n not in spare]
    wrong += [f"{n} has shape {list(found[n].shape)}, config.json makes it {list(p.shape)}" for n, p in want.items()
              if n in found and found[n].shape != p.shape]
    wrong += [f"{n} is {s.dtype}, only {', '.join(FLOATS)} are read" for n, s in found.items() if s.dtype not in FLOATS]
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ConfigError(f"{next(iter(found.values())).file.parent if found else kind}: {'; '.join(wrong[:4])}{more}")
    by_file = defaultdict(list)
    for name, s in found.items():
        by_file[s.file].append((name, s.name))
    for file, names in by_file.items():  # one mapped at a time
        with opened(file) as f:
            for name, inside in names:
                if name in want:
                    value = f.get_tensor(inside)
                    value = value.t() if want[name].flip else value
                    for part, source in zip(want[name].parts, value.split([len(p) for p in want[name].parts])):
                        part.copy_(source)
    for name in spare.keys() & found.keys():
        table = next(t for box, t in pieces if box.key == spare[name])[:m.vocab]
        with opened(found[name].file) as f:
            copy = f.get_tensor(found[name].name)
        if copy.shape != table.shape or not torch.equal(copy.to(table.dtype), table):
            why = "tie_word_embeddings says they are one" if name == HEAD else "multi-token prediction shares it"
            raise ConfigError(f"{found[name].file}: {name} differs from the {'head' if spare[name] == 'head.weight' else 'embedding'}, but {why}")


# ---- writing ---------------------------------------------------------------------------------------------------------

@torch.no_grad()
def fold(m: Model, pieces: list[tuple[Box, Tensor]], back: bool = False) -> None:
    """What muP multiplies by, which no config.json can say, into the weights, in place: the logits' factor into the head or, where
    that is the embedding, the last norm; that of attention scores into what makes the queries. back: out of them again.
    Raises ConfigError where no weights can hold it."""
    if m.mup_base and m.tied and m.mtp:
        raise ConfigError("model.mup_base: the factor of a tied head goes into the last norm, which multi-token prediction reads too; "
                          "no Hugging Face folder can hold this model (model.tied with model.mtp)")
    head = ("norm.weight", "norm.bias") if m.tied else ("head.weight",)
    query = ("q_b.weight",) if m.q_rank else ("q_norm.weight",) if m.qk_norm else ("q.weight", "q.bias")  # behind a norm q has no size
    for box, t in pieces:
        _, attn, leaf = box.key.rpartition(".attn.")
        factor = 1 / mup_width(m) if box.key in head else mup_scores(m) if attn and leaf in query else 1.0
        t.mul_(1 / factor if back else factor)


@torch.no_grad()
def write(folder: Path, kind: str, m: Model, pieces: list[tuple[Box, Tensor]], dtype: torch.dtype, shard: int = SHARD_BYTES) -> int:
    """The folder's safetensors, in one file or, beyond `shard` bytes, in several with an index. Returns the bytes of all
    tensors. Raises StorageError."""
    groups, size = [[]], 0
    for place in places(kind, m, pieces):
        n = prod(place.shape) * place.dtype(dtype).itemsize
        if groups[-1] and size + n > shard:
            groups, size = [*groups, []], 0
        groups[-1].append(place)
        size += n
    single = len(groups) == 1
    files = ["model.safetensors"] if single else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    total = sum(write_tensors(folder / file, group, dtype) for file, group in zip(files, groups))
    if not single:
        where = {place.name: file for file, group in zip(files, groups) for place in group}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        with storing(folder, len(text)):
            write_file(folder / "model.safetensors.index.json", text.encode())
    return total


def write_tensors(path: Path, group: list[Place], dtype: torch.dtype) -> int:
    """One safetensors file, flushed; each tensor is converted when its turn comes. Returns the bytes of its tensors."""
    table, end = {"__metadata__": {"format": "pt"}}, 0  # older transformers refuse a file without it
    for p in group:
        begin, end = end, end + prod(p.shape) * p.dtype(dtype).itemsize
        table[p.name] = {"dtype": DTYPES[p.dtype(dtype)], "shape": list(p.shape), "data_offsets": [begin, end]}
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)  # the first tensor starts aligned
    with storing(path, end), open(path, "xb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for p in group:
            value = p.parts[0] if len(p.parts) == 1 else torch.cat(p.parts)
            data = raw((value.t() if p.flip else value).to(p.dtype(dtype)))
            for at in range(0, len(data), CHUNK):
                f.write(data[at:at + CHUNK])
        f.flush()
        os.fsync(f.fileno())
    return end
