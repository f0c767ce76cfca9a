"""Which layers a pipeline stage holds: cut by hand (parallel.stages), or by cost, so that no stage waits for a heavier one."""
from functools import cache
from itertools import accumulate

from config import Config, Model, attention_weights, head_dim, is_moe, moe_ffn, numbers, padded_vocab, value_dim


def layers_of(cfg: Config, stages: int) -> list[tuple[int, int]]:
    """[(first, last)] of the blocks of each stage, last excluded; every stage has at least one."""
    sizes = numbers(cfg.parallel.stages) if cfg.parallel.stages else by_cost(cfg.model, stages, cfg.train.seq_len)
    return [(last - n, last) for n, last in zip(sizes, accumulate(sizes))]


@cache
def by_cost(m: Model, stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage. The cost is that of the GEMMs: the head weighs as many blocks as its matrix has FLOPs, a module of
    multi-token prediction a block, its join and the head again, the embedding nothing, a mixture what a token uses of it. Chooses,
    among all cuts into consecutive runs, one whose heaviest stage is lightest (dynamic programming, exact)."""
    attn = attention_weights(m)
    attn += m.heads * (head_dim(m) + value_dim(m)) * min(m.window or seq_len, seq_len) / 2  # causal: half of the products are masked
    gates = 3 if m.activation == "swiglu" else 2
    routed = m.hidden * ((m.top_k + m.shared_experts) * moe_ffn(m) * 3 + (m.experts or 0))
    costs = [attn + (routed if is_moe(m, i) else m.hidden * m.ffn * gates) for i in range(m.layers + m.mtp)]
    unit, head = costs[m.layers - 1], padded_vocab(m) * m.hidden
    head += sum(c + 2 * m.hidden ** 2 + head for c in costs[m.layers:])
    head, costs = head / unit, [c / unit for c in costs[:m.layers]]
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]  # after k stages: {layers used: (heaviest, sizes)}
    for k in range(1, stages + 1):
        row: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (heaviest, sizes) in best[-1].items():
            last, blocks = m.layers - (stages - k), 0.0
            for n in range(1, last - used + 1):
                blocks += costs[used + n - 1]
                cost = max(heaviest, blocks + (head if k == stages else 0.0))
                if used + n not in row or cost < row[used + n][0]:
                    row[used + n] = (cost, (*sizes, n))
        best.append(row)
    return best[-1][m.layers][1]
