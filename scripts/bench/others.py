"""Others' models, for the races on a CPU (scripts/bench/peer.py) and on a GPU (scripts/bench/contestant.py), and how they are compiled."""
import importlib.util
import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench.shape import Shape

ROPE = 500000.0


class GPTBlock(nn.Module):
    """nanoGPT's block: LayerNorm, fused qkv, GELU at four times the width (its two matrices cost as much as SwiGLU's three)."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(d, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class NanoGPT(nn.Module):
    """As nanoGPT is written: learned positions, tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.hidden
        self.tokens, self.positions = nn.Embedding(shape.vocab, d), nn.Embedding(shape.seq, d)
        self.blocks = nn.Sequential(*(GPTBlock(d, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(d, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions.weight[:x.shape[1]]
        return F.linear(self.norm(self.blocks(h)), self.tokens.weight)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def compiled(blocks, whole: bool = True):
    """Compile the blocks, which share their code, in place (the whole model at once would take minutes); returns a compiled loss."""
    for block in blocks:
        block.compile(fullgraph=whole)
    return torch.compile(cross_entropy)


def torchtitan(shape: Shape, device: str) -> nn.Module:
    """Its Llama or Qwen3 mixture, in fp32. Raises ImportError."""
    if importlib.util.find_spec("tensorboard") is None:  # its trainer writes there, and is not run here; its models import it
        sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=None)
    sizes = {"dim": shape.hidden, "n_layers": shape.layers, "n_heads": shape.heads, "n_kv_heads": shape.kv or shape.heads, "vocab_size": shape.vocab,
             "max_seq_len": shape.seq, "rope_theta": ROPE}
    if shape.experts:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3 import Qwen3Model
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        args = Qwen3ModelArgs(**sizes, head_dim=shape.hidden // shape.heads, hidden_dim=shape.ffn, moe_enabled=True, moe_inter_dim=shape.ffn,
                              moe_args=MoEArgs(num_experts=shape.experts, num_shared_experts=0, top_k=shape.top_k, score_func="softmax",
                                               route_norm=True, score_before_experts=False, use_grouped_mm=device == "cuda"))
        kind = Qwen3Model
    else:
        from torchtitan.models.llama3 import Transformer as kind
        from torchtitan.models.llama3 import TransformerModelArgs
        args = TransformerModelArgs(**sizes, multiple_of=1, ffn_dim_multiplier=(shape.ffn + 0.5) / int(8 * shape.hidden / 3))  # gives shape.ffn
    with torch.device(device):
        model = kind(args)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device(device))
    return model
