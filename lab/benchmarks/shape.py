"""The models of the races, and printing of tables."""

import json
from dataclasses import dataclass, replace

HELP = """race: 8 layers, hidden 512, vocab 32000, 4 x 512 tokens;
quickstart: the model of scripts/quickstart.sh;
mixture: 8 layers, hidden 512, 16 experts of width 704, 2 a token, vocab 8192, 4 x 256 tokens"""


@dataclass(frozen=True)
class Shape:
    """A Llama-like model and its batch. Embedding and head are not tied."""

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
    documents: tuple[int, ...] = ()  # lengths of the documents packed into each sequence; empty: no packing

    @staticmethod
    def race() -> "Shape":
        return Shape(layers=8, hidden=512, heads=8, ffn=1408, vocab=32000, seq=512, batch=4)

    @staticmethod
    def quickstart() -> "Shape":
        return Shape(layers=4, hidden=128, heads=4, ffn=352, vocab=1024, seq=128, batch=16)

    @staticmethod
    def mixture() -> "Shape":
        return Shape(
            layers=8, hidden=512, heads=8, ffn=704, vocab=8192, seq=256, batch=4, experts=16, top_k=2
        )

    @staticmethod
    def gpu_models(tiny: bool) -> "dict[str, Shape]":
        """Return the models of one GPU, or tiny models of the same kinds for a rehearsal.

        A dense model of 1.57B parameters with two vocabularies, the 8B model with all its layers
        (lab/benchmarks/card.py drops those that do not fit), and a mixture of 3.9B parameters with 0.7B
        active (plan/count.py). packed: the dense model with its sequences packed in pairs as documents, so
        with the same tokens and FLOPs; packed-uneven: with documents of other lengths, which end anywhere.
        """
        if tiny:
            small = Shape(layers=3, hidden=64, heads=2, ffn=96, vocab=512, seq=64, batch=2)
            return {
                "dense": small,
                "packed": replace(small, seq=128, batch=1, documents=(64, 64)),
                "packed-uneven": replace(small, documents=(7, 20, 37)),
                "dense-128k": replace(small, vocab=1024),
                "8b": replace(small, kv=1),
                "moe": replace(small, experts=4, top_k=2),
            }

        dense = Shape(layers=28, hidden=2048, heads=16, ffn=5632, vocab=32000, seq=4096, batch=8)
        large = Shape(layers=32, hidden=4096, heads=32, kv=8, ffn=14336, vocab=128256, seq=8192, batch=1)
        mixture = Shape(
            layers=16,
            hidden=1536,
            heads=12,
            ffn=768,
            vocab=32000,
            seq=4096,
            batch=8,
            experts=64,
            top_k=8,
        )
        return {
            "dense": dense,
            "packed": replace(dense, seq=8192, batch=4, documents=(4096, 4096)),
            "packed-uneven": replace(dense, documents=(137, 1000, 2959)),
            "dense-128k": replace(dense, vocab=128256),
            "8b": large,
            "moe": mixture,
        }

    def model_keys(self) -> dict:
        """Return model.* keys for config.build_tree."""
        keys = {
            "layers": self.layers,
            "hidden": self.hidden,
            "mixer": {"heads": self.heads, "kv_heads": self.kv or None},
            "mlp.width": self.ffn,
            "vocab": self.vocab,
        }
        if self.experts:
            keys |= {"mlp.kind": "experts", "mlp.experts": self.experts, "mlp.top_k": self.top_k}
        return keys

    @property
    def tokens(self) -> int:
        """The tokens of one step."""
        return self.batch * self.seq

    def linear_sizes(self) -> list[tuple[int, int, int]]:
        """Return (outputs, inputs, how often) of every linear layer.

        Each costs three products of 2 * tokens * outputs * inputs FLOPs. A token's experts count as if all
        tokens were routed to the same ones.
        """
        num_mlps = self.layers * (self.top_k or 1)
        return [
            (3 * self.hidden, self.hidden, self.layers),  # query, key, value
            (self.hidden, self.hidden, self.layers),  # output of attention
            (2 * self.ffn, self.hidden, num_mlps),  # gate, up
            (self.hidden, self.ffn, num_mlps),  # down
            (self.vocab, self.hidden, 1),  # head
        ]

    def gemm_flops(self) -> int:
        """The FLOPs of the matrix products of one step, excluding those of attention."""
        products = [outputs * inputs * times for outputs, inputs, times in self.linear_sizes()]
        return 6 * self.tokens * sum(products)


def show(rows: list[dict], as_json: bool, **facts) -> None:
    """Print rows with the same keys as an aligned table, or everything as one JSON object."""
    if as_json:
        print(json.dumps({**facts, "rows": rows}))
        return
    for key, value in facts.items():
        print(f"{key}: {value}")
    if not rows:
        return

    table = [list(rows[0])]
    for row in rows:
        table.append(["" if value is None else str(value) for value in row.values()])
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        cells[0] = line[0].ljust(widths[0])
        print("  ".join(cells).rstrip())
