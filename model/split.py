"""Which layers a pipeline stage holds: cut by cost, so that no stage waits for a heavier one."""
from config import Model, attention_weights, head_dim, padded_vocab, value_dim


def layers_of(m: Model, stages: int, seq_len: int) -> list[tuple[int, int]]:
    """[(first, last)] of the blocks of each stage, last excluded; every stage has at least one.

    The cost is that of the GEMMs: the head weighs as many blocks as its matrix has FLOPs, a module of multi-token prediction a
    block, its join and the head again, the embedding nothing. Chooses,
    among all cuts into consecutive runs, one whose heaviest stage is lightest (dynamic programming, exact)."""
    block = attention_weights(m) + m.hidden * m.ffn * (3 if m.activation == "swiglu" else 2)
    block += m.heads * (head_dim(m) + value_dim(m)) * min(m.window or seq_len, seq_len) / 2  # causal: half of the products are masked
    head = padded_vocab(m) * m.hidden / block
    head += m.mtp * (1 + 2 * m.hidden ** 2 / block + head)
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]  # after k stages: {layers used: (heaviest, sizes)}
    for k in range(1, stages + 1):
        row: dict[int, tuple[float, list[int]]] = {}
        for used, (heaviest, sizes) in best[-1].items():
            for n in range(1, m.layers - used - (stages - k) + 1):
                cost = max(heaviest, n + (head if k == stages else 0.0))
                if used + n not in row or cost < row[used + n][0]:
                    row[used + n] = (cost, [*sizes, n])
        best.append(row)
    out, at = [], 0
    for n in best[-1][m.layers][1]:
        out.append((at, at + n))
        at += n
    return out
