"""How large a model is and what a token costs, from the config alone (no torch)."""
from dataclasses import replace

from config import Model, head_dim, is_moe, kv_heads, moe_ffn, padded_vocab


def mixture(m: Model, experts: int) -> int:
    """Weights of a mixture layer of which `experts` routed experts count. (A router's bias is state, not a weight.)"""
    shared = 3 * m.hidden * m.shared_experts * moe_ffn(m) + (m.hidden if m.shared_gate else 0)
    return m.experts * m.hidden + experts * 3 * m.hidden * moe_ffn(m) + shared


def parameters(m: Model) -> dict[str, int]:
    """{'total', 'active' (used by one token), 'embedding' (lookup tables; the head too where it is not tied)}.

    The vocabulary counts as published, without padding."""
    d, hd, h, g = m.hidden, head_dim(m), m.heads, kv_heads(m)
    norm = d * (2 if m.norm == "layernorm" else 1)
    attn = d * hd * (h + 2 * g) + h * hd * d
    attn += (hd * (h + 2 * g) if m.bias or m.qkv_bias else 0) + (d if m.bias else 0) + (hd * (h + g) if m.qk_norm_whole else 2 * hd if m.qk_norm else 0)
    gated = m.activation == "swiglu"
    mlp = d * m.ffn * (3 if gated else 2) + ((m.ffn * (2 if gated else 1) + d) if m.bias else 0)
    sparse = sum(is_moe(m, i) for i in range(m.layers))
    table = m.vocab * d
    embedding = table * (1 if m.tied else 2) + (m.context * d if m.positions == "learned" else 0)
    rest = embedding + m.layers * (attn + 2 * norm) + (m.layers - sparse) * mlp + norm
    total, active = (rest + (sparse * mixture(m, n) if sparse else 0) for n in (m.experts, m.top_k))
    return {"total": total, "active": active, "embedding": embedding}


def flops_per_token(m: Model, seq_len: int) -> float:
    """Model FLOPs of one token's forward and backward (6 per matrix weight; attention's two products over the keys a
    causal, windowed query really sees; of a mixture, what it uses; no recompute). Padded vocabulary rows are work done, but not counted."""
    d, hd, h, g = m.hidden, head_dim(m), m.heads, kv_heads(m)
    sparse = sum(is_moe(m, i) for i in range(m.layers))
    weights = m.layers * d * hd * (2 * h + 2 * g) + (m.layers - sparse) * d * m.ffn * (3 if m.activation == "swiglu" else 2) + m.vocab * d
    weights += sparse * mixture(m, m.top_k) if sparse else 0
    w = min(m.window or seq_len, seq_len)
    keys = (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len  # mean number of keys a query sees
    return 6.0 * weights + 12.0 * m.layers * h * hd * keys


def state_bytes(m: Model, dtype: str) -> int:
    """Weights, gradients, master weights and two moments of AdamW, on one rank."""
    padded = parameters(m)["total"] + (padded_vocab(m) - m.vocab) * m.hidden * (1 if m.tied else 2)
    return padded * {"fp64": 4 * 8, "fp32": 4 * 4, "bf16": 4 * 4 + 2}[dtype]


def table(configs: dict) -> str:
    """What `train.py --list` prints: a line a recipe. A vocabulary that the tokenizer decides counts as 0 rows here."""
    def size(n: int) -> str:
        return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"

    lines = [f"{'recipe':<16}{'params':>9}{'active':>9}{'layers':>8}{'width':>7}{'heads/kv':>10}{'experts':>9}{'vocab':>9}{'context':>9}"]
    for name, cfg in configs.items():
        m = cfg.model
        n = parameters(m if m.vocab else replace(m, vocab=0))
        heads, experts = f"{m.heads}/{kv_heads(m)}", f"{m.experts}:{m.top_k}" if m.experts else "-"
        lines.append(f"{name:<16}{size(n['total']):>9}{size(n['active']):>9}{m.layers:>8}{m.hidden:>7}{heads:>10}{experts:>9}"
                     f"{m.vocab or 'data':>9}{m.context:>9}")
    return "\n".join(lines)
