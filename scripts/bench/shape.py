"""The models that are raced, and how tables are printed."""
import json
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A Llama-like model and its batch; embedding and head not tied."""
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    experts: int = 0  # of a Mixtral-like model; 0: dense
    top_k: int = 0
    kv: int = 0  # key/value heads; 0: as many as heads

    @staticmethod
    def race() -> "Shape":
        """race: 8 layers, hidden 512, vocab 32000, 4 x 512 tokens; quickstart: the model of scripts/quickstart.sh;
        mixture: 8 layers, hidden 512, 16 experts of width 704, 2 a token, vocab 8192, 4 x 256 tokens"""
        return Shape(layers=8, hidden=512, heads=8, ffn=1408, vocab=32000, seq=512, batch=4)

    @staticmethod
    def quickstart() -> "Shape":
        return Shape(layers=4, hidden=128, heads=4, ffn=352, vocab=1024, seq=128, batch=16)

    @staticmethod
    def mixture() -> "Shape":
        return Shape(layers=8, hidden=512, heads=8, ffn=704, vocab=8192, seq=256, batch=4, experts=16, top_k=2)

    @staticmethod
    def card(tiny: bool) -> "dict[str, Shape]":
        """Those of one GPU: 1.57B with two vocabularies, the 8B model (all layers: scripts/bench/card.py cuts them), and a mixture of 3.9B,
        of which plan/count.py counts 0.7B a token. tiny: twins for a rehearsal."""
        if tiny:
            small = Shape(layers=3, hidden=64, heads=2, ffn=96, vocab=512, seq=64, batch=2)
            return {"dense": small, "dense-128k": replace(small, vocab=1024), "8b": replace(small, kv=1), "moe": replace(small, experts=4, top_k=2)}
        dense = Shape(layers=28, hidden=2048, heads=16, ffn=5632, vocab=32000, seq=4096, batch=8)
        return {"dense": dense, "dense-128k": replace(dense, vocab=128256),
                "8b": Shape(layers=32, hidden=4096, heads=32, kv=8, ffn=14336, vocab=128256, seq=8192, batch=1),
                "moe": Shape(layers=16, hidden=1536, heads=12, ffn=768, vocab=32000, seq=4096, batch=8, experts=64, top_k=8)}

    def model(self) -> dict:
        """The keys of config.Model."""
        mixture = {"experts": self.experts, "top_k": self.top_k} if self.experts else {}
        return {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "kv_heads": self.kv or None,
                "ffn": self.ffn, "vocab": self.vocab, **mixture}

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def gemms(self) -> list[tuple[int, int, int]]:
        """(outputs, inputs, how often) of every linear: each costs three products of 2 * tokens * outputs * inputs FLOPs."""
        d, f, n = self.hidden, self.ffn, self.layers
        mlps = n * (self.top_k or 1)  # a token's experts, as if all tokens went to the same
        return [(3 * d, d, n), (d, d, n), (2 * f, d, mlps), (d, f, mlps), (self.vocab, d, 1)]

    def gemm_flops(self) -> int:
        return sum(6 * self.tokens * m * n * times for m, n, times in self.gemms())


def show(rows: list[dict], as_json: bool, **facts) -> None:
    """Print rows (same keys) as an aligned table, or everything as one JSON object."""
    if as_json:
        print(json.dumps({**facts, "rows": rows}))
        return
    for key, value in facts.items():
        print(f"{key}: {value}")
    if rows:
        table = [list(rows[0])] + [["" if v is None else str(v) for v in row.values()] for row in rows]
        widths = [max(map(len, column)) for column in zip(*table)]
        for line in table:
            cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
            print("  ".join(cells).rstrip())
