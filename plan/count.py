"""How large a model is and what a token costs, from the config alone (no torch)."""
from collections.abc import Sequence
from dataclasses import replace

from config import Model, attention_weights, head_dim, is_moe, kv_heads, moe_ffn, padded_vocab, value_dim


def mixture(m: Model, experts: int) -> int:
    """Weights of a mixture layer of which `experts` routed experts count. (A router's bias is state, not a weight.)"""
    shared = 3 * m.hidden * m.shared_experts * moe_ffn(m) + (m.hidden if m.shared_gate else 0)
    return m.experts * m.hidden + experts * 3 * m.hidden * moe_ffn(m) + shared


def parameters(m: Model) -> dict[str, int]:
    """{'total', 'active' (used by one token), 'embedding' (lookup tables; the head too where it is not tied), 'ahead' (the modules
    of multi-token prediction, which only training uses: not in the others)}.

    The vocabulary counts as published, without padding."""
    d, hd, h, g = m.hidden, head_dim(m), m.heads, kv_heads(m)
    norm = d * (2 if m.norm == "layernorm" else 1)
    attn = attention_weights(m) + (m.kv_rank + (m.q_rank or 0) if m.kv_rank else 0)
    attn += (hd * (h + 2 * g) if m.bias or m.qkv_bias else 0) + (d if m.bias else 0)
    attn += hd * (h + g) if m.qk_norm_whole else 2 * hd if m.qk_norm else 0
    gated = m.activation == "swiglu"
    mlp = d * m.ffn * (3 if gated else 2) + ((m.ffn * (2 if gated else 1) + d) if m.bias else 0)
    sparse = sum(is_moe(m, i) for i in range(m.layers))
    table = m.vocab * d
    embedding = table * (1 if m.tied else 2) + (m.context * d if m.positions == "learned" else 0)
    rest = embedding + m.layers * (attn + 2 * norm) + (m.layers - sparse) * mlp + norm
    total, active = (rest + (sparse * mixture(m, n) if sparse else 0) for n in (m.experts, m.top_k))
    ahead = sum(attn + 5 * norm + 2 * d * d + (mixture(m, m.experts) if is_moe(m, m.layers + k) else mlp) for k in range(m.mtp))
    return {"total": total, "active": active, "embedding": embedding, "ahead": ahead}


def flops_per_token(m: Model, seq_len: int, pieces: Sequence[int] = ()) -> float:
    """Model FLOPs of one token's forward and backward (6 per matrix weight; attention's two products over the keys a
    causal, windowed query really sees; of a mixture, what it uses; modules of multi-token prediction included; no recompute).
    Padded vocabulary rows are work done, but not counted. pieces: lengths of the stretches of tokens that see each other
    (documents under data.doc_mask); none: whole sequences."""
    pieces = pieces or (seq_len,)
    seen = sum(n * keys_seen(m, n) for n in pieces) / sum(pieces)
    blocks = m.layers + m.mtp
    sparse = sum(is_moe(m, i) for i in range(blocks))
    weights = blocks * attention_weights(m) + (blocks - sparse) * m.hidden * m.ffn * (3 if m.activation == "swiglu" else 2)
    weights += sparse * mixture(m, m.top_k) if sparse else 0
    weights += (1 + m.mtp) * m.vocab * m.hidden + m.mtp * 2 * m.hidden ** 2
    return 6.0 * weights + 6.0 * blocks * m.heads * (head_dim(m) + value_dim(m)) * seen


def keys_seen(m: Model, s: int) -> float:
    """The mean number of keys that a query of a sequence of s tokens sees."""
    w = min(m.window or s, s)
    return (w * (w + 1) / 2 + (s - w) * w) / s


def state_bytes(m: Model, dtype: str) -> int:
    """Weights, gradients, master weights and two moments of AdamW, on one rank."""
    count = parameters(m)
    padded = count["total"] + count["ahead"] + (padded_vocab(m) - m.vocab) * m.hidden * (1 if m.tied else 2)
    return padded * {"fp64": 4 * 8, "fp32": 4 * 4, "bf16": 4 * 4 + 2, "fp16": 4 * 4 + 2, "fp8": 4 * 4 + 2}[dtype]


def table(configs: dict) -> str:
    """What `train.py --list` prints: a line a recipe. A vocabulary that the tokenizer decides counts as 0 rows here."""
    def size(n: int) -> str:
        return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"

    lines = [f"{'recipe':<22}{'params':>9}{'active':>9}{'layers':>8}{'width':>7}{'heads/kv':>10}{'experts':>9}{'vocab':>9}{'context':>9}"]
    for name, cfg in configs.items():
        m = cfg.model
        n = parameters(m if m.vocab else replace(m, vocab=0))
        heads, experts = f"{m.heads}/{kv_heads(m)}", f"{m.experts}:{m.top_k}" if m.experts else "-"
        lines.append(f"{name:<22}{size(n['total']):>9}{size(n['active']):>9}{m.layers:>8}{m.hidden:>7}{heads:>10}{experts:>9}"
                     f"{m.vocab or 'data':>9}{m.context:>9}")
    return "\n".join(lines)
