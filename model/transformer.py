"""The decoder: Block (pre-norm attention and MLP) and Stage (the consecutive blocks that one pipeline stage owns)."""
import torch
from torch import Tensor, nn

from config import Config, is_moe
from model.attention import Attention, Cache, Context, context
from model.embed import Embed, table
from model.loss import Head
from model.mla import MLA
from model.mlp import MLP
from model.moe import Learning, MoE, learning
from model.mtp import MTP
from model.norm import Norm
from model.recompute import again
from parallel.collectives import take_dim1
from parallel.mesh import Mesh
from parallel.rng import Noise, dropout
from parallel.zero import Zero


class Block(nn.Module):
    """x [b, s, d] (sp: [b, s/tp, d]) -> the same, and what its router tells (model/moe.py; None without one, or outside of training)."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        self.layer, self.rate = layer, cfg.model.dropout
        self.attn_norm = Norm(cfg, mesh, f"layers.{layer}.attn_norm")
        self.attn = (MLA if cfg.model.kv_rank else Attention)(cfg, mesh, layer)
        self.mlp_norm = Norm(cfg, mesh, f"layers.{layer}.mlp_norm")
        self.moe = is_moe(cfg.model, layer)
        self.mlp = (MoE if self.moe else MLP)(cfg, mesh, layer)

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor | None]:
        a = dropout(self.attn(self.attn_norm(x), ctx), self.rate, ctx.noise, 1 + 2 * self.layer)
        h, x = self.mlp_norm.add(a, x)
        y, told = self.mlp(h, ctx.learn) if self.moe else (self.mlp(h), None)
        return x + dropout(y, self.rate, ctx.noise, 2 + 2 * self.layer), told


class Stage(nn.Module):
    """Blocks first .. last-1; the stage that owns block 0 also embeds, the one that owns the last block has the head and the
    modules of multi-token prediction.

    embed: the table of the first stage where that is another stage of this rank; apart: it is another rank's.
    zero: gathers and reduces the weights of each part around its use; build.py sets it when the buckets are made."""

    def __init__(self, cfg: Config, mesh: Mesh, first: int, last: int, embed: nn.Parameter | None = None, apart: bool = False) -> None:
        super().__init__()
        self.cfg, self.mesh, self.tp = cfg, mesh, mesh.tp
        self.embed = Embed(cfg, mesh, apart) if first == 0 else None
        self.blocks = nn.ModuleList(Block(cfg, mesh, i) for i in range(first, last))
        self.head = Head(cfg, mesh, self.embed.weight if self.embed else embed, apart) if last == cfg.model.layers else None
        self.mtp = None
        if self.head is not None and cfg.model.mtp:
            lookup = self.embed.weight if self.embed else embed if embed is not None else self.head.weight if cfg.model.tied else \
                table(cfg, mesh, "embed", apart)
            self.mtp = MTP(cfg, mesh, lookup, [Block(cfg, mesh, last + k) for k in range(cfg.model.mtp)])
        self.zero: Zero | None = None

    def every_block(self) -> list[Block]:
        """With those that predict further ahead."""
        return [*self.blocks, *(step.block for step in (self.mtp.steps if self.mtp is not None else ()))]

    def parts(self) -> list[list[nn.Parameter]]:
        """The parameters of each part, in the order of the forward pass; a tied table stands in two."""
        parts = [list(part.parameters()) for part in (self.embed, *self.blocks, self.head) if part is not None]
        if self.mtp is not None:  # a part of the head's
            parts[-1] = list(dict.fromkeys((*parts[-1], *self.mtp.parameters())))
        return parts

    def table(self) -> nn.Parameter | None:
        """The embedding's table where the last stage needs it too: tied to the head, or for multi-token prediction."""
        if self.mtp is not None:
            return self.mtp.table
        part = self.embed or (self.head if self.cfg.model.tied else None)
        return part.weight if (self.cfg.model.tied or self.cfg.model.mtp) and part is not None else None

    def hidden(self, x: Tensor, positions: Tensor, docs: Tensor | None = None, noise: Noise | None = None,
               cache: Cache | None = None, cut: bool = False, learn: Learning | None = None) -> Tensor:
        """Token ids [b, s] on the first stage, else [b, s, d] from the stage before -> [b, s, d] after the last block here.
        cut: these are this rank's tokens of sequences that are cut over cp; else whole sequences, as in generation."""
        return self.through(x, positions, context(self.cfg, positions, docs, noise, cache, cut, learn))

    def through(self, x: Tensor, positions: Tensor, ctx: Context) -> Tensor:
        part = 0
        if self.embed is not None:
            self.zero.enter(0, False)
            x = self.embed(x, positions, ctx.noise)
            self.zero.left(0)
            self.zero.watch(0, None, x)
            part = 1
        for i, block in enumerate(self.blocks, part):
            self.zero.enter(i, False)
            y, told = again(block, x, ctx) if self.cfg.parallel.recompute == "full" and torch.is_grad_enabled() else block(x, ctx)
            self.zero.left(i)
            self.zero.watch(i, x, y)
            x = y
            if told is not None:
                block.mlp.router.told += told  # here, not in the block, which recompute may run twice
        return x

    def forward(self, x: Tensor, batch, scale) -> Tensor:
        """One microbatch (data/batch.py has its shapes): the hidden state for the next stage, or, on the last, the summed
        loss times scale. x: token ids or the hidden state from the stage before. Dropout only where gradients are on."""
        learn = torch.is_grad_enabled()
        noise = None
        if (self.cfg.model.dropout or self.cfg.model.jitter) and learn:
            columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if batch.places is None else batch.places
            columns = take_dim1(columns[None], self.tp)[0] if self.cfg.parallel.sp else columns
            noise = Noise(self.cfg.train.seed, batch.step, batch.rows, columns)
        routing = learning(self.cfg, self.mesh, batch, scale, noise) if learn and self.cfg.model.experts else None
        ctx = context(self.cfg, batch.positions, batch.docs, noise, cut=batch.places is not None, learn=routing)
        x = self.through(x, batch.positions, ctx)
        if self.head is None:
            return x
        last = len(self.zero.parts) - 1
        self.zero.enter(last, learn)
        loss = self.loss(x, batch, scale, ctx, learn)
        self.zero.watch(last, x, loss) if learn else self.zero.left(last)
        return loss

    def loss(self, x: Tensor, batch, scale, ctx: Context, learn: bool) -> Tensor:
        """The next token's loss; further ones add their gradients to it, not their value."""
        if self.mtp is None or not learn:
            return self.head.loss(x, batch.targets, scale)
        h = self.head.norm(x)
        more = self.mtp(h, batch, scale, ctx, self.head)
        return self.head.cross_entropy(h, batch.targets, scale) + (more - more.detach())

    def head_logits(self, x: Tensor, at: int) -> Tensor:
        """x [1, s, d] (sp: [1, s/tp, d]) after the last block -> logits [vocab] of the token at place `at` of the sequence."""
        last = len(self.zero.parts) - 1
        self.zero.enter(last, False)
        out = self.head.logits(x)[0, at] if self.head.sp else self.head.logits(x[:, at:at + 1])[0, 0]
        self.zero.left(last)
        return out

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[b, s, vocab] in fp32 or better. Needs the whole model on this stage."""
        x = self.hidden(tokens, positions)
        self.zero.enter(len(self.zero.parts) - 1, False)
        return self.head.logits(x)
