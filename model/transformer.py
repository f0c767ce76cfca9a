"""The decoder: Block (pre-norm attention and MLP) and Stage (the consecutive blocks that one pipeline stage owns)."""
import torch
from torch import Tensor, nn

from config import Config
from model.attention import Attention, Cache, Context, context
from model.embed import Embed
from model.loss import Head
from model.mlp import MLP
from model.norm import Norm
from parallel.mesh import Mesh
from parallel.rng import Noise, dropout


class Block(nn.Module):
    """x [b, s, d] -> [b, s, d]."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        self.layer, self.rate = layer, cfg.model.dropout
        self.attn_norm = Norm(cfg, mesh, f"layers.{layer}.attn_norm")
        self.attn = Attention(cfg, mesh, layer)
        self.mlp_norm = Norm(cfg, mesh, f"layers.{layer}.mlp_norm")
        self.mlp = MLP(cfg, mesh, layer)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        a = dropout(self.attn(self.attn_norm(x), ctx), self.rate, ctx.noise, 1 + 2 * self.layer)
        h, x = self.mlp_norm.add(a, x)
        return x + dropout(self.mlp(h), self.rate, ctx.noise, 2 + 2 * self.layer)


class Stage(nn.Module):
    """Blocks first .. last-1; the stage that owns block 0 also embeds, the one that owns the last block has the head."""

    def __init__(self, cfg: Config, mesh: Mesh, first: int, last: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = Embed(cfg, mesh) if first == 0 else None
        self.blocks = nn.ModuleList(Block(cfg, mesh, i) for i in range(first, last))
        self.head = Head(cfg, mesh, self.embed.weight if self.embed else None) if last == cfg.model.layers else None

    def groups(self) -> list[list[nn.Parameter]]:
        """Parameters, each once, in the order of the forward pass: what becomes one flat bucket each."""
        seen: set[int] = set()
        parts = [self.embed, *self.blocks, self.head]
        every = [[p for p in part.parameters() if not (id(p) in seen or seen.add(id(p)))] for part in parts if part]
        return [g for g in every if g]

    def hidden(self, tokens: Tensor, positions: Tensor, docs: Tensor | None = None, noise: Noise | None = None,
               cache: Cache | None = None) -> Tensor:
        """tokens, positions [b, s] -> [b, s, d] after the last block."""
        ctx = context(self.cfg, positions, docs, noise, cache)
        x = self.embed(tokens, positions, noise)
        for block in self.blocks:
            x = block(x, ctx)
        if cache is not None:
            cache.length += tokens.shape[1]
        return x

    def forward(self, batch, scale) -> Tensor:
        """The batch's summed loss times scale (data/batch.py has the batch's shapes); dropout only where gradients are on."""
        noise = None
        if self.cfg.model.dropout and torch.is_grad_enabled():
            columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
            noise = Noise(self.cfg.train.seed, batch.step, batch.rows, columns)
        return self.head.loss(self.hidden(batch.tokens, batch.positions, batch.docs, noise), batch.targets, scale)

    def logits(self, tokens: Tensor, positions: Tensor, cache: Cache | None = None, last: bool = False) -> Tensor:
        """[b, s, vocab] in fp32 or better; last: of the last token only [b, 1, vocab]."""
        x = self.hidden(tokens, positions, cache=cache)
        return self.head.logits(x[:, -1:] if last else x)
