"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the last block that look further ahead.

Module k = 1 .. mtp joins what is known after token i with token i + k and predicts token i + k + 1:

    h_k = norm_k(block_k(join_k [norm(embedding of token i + k) ; norm(h_k-1)])),    h_0: the output after the model's last norm
    loss = mtp_weight / mtp * sum over k of the summed cross entropy of head(h_k), over the tokens that the main loss counts

Embedding and head are the model's own. Training only: the modules add to the gradients, not to the loss that is reported,
and evaluation and generation leave them out. Tokens and targets are shifted before context parallelism cuts the sequence
(data/batch.py). A mixture's router balances its load there over the tokens whose further target counts. The joins and
norms are whole on every tp rank, as the norms of a block are.
"""
from dataclasses import replace

from torch import Tensor, cat, is_grad_enabled, nn

from config import Config
from kernels.linear import linear
from model.attention import Context
from model.loss import Head
from model.moe import learning
from model.norm import Norm
from model.recompute import again
from parallel.boxes import Box
from parallel.mesh import Mesh
from parallel.spec import Spec, parameter
from parallel.tensor import vocab_embedding


class Predictor(nn.Module):
    """One module. block: model/transformer.py's, with the number `layer`, that of the module among the layers."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int, block: nn.Module) -> None:
        super().__init__()
        m, key = cfg.model, f"layers.{layer}"
        self.full = cfg.parallel.recompute == "full"
        self.embed_norm, self.hidden_norm = Norm(cfg, mesh, f"{key}.embed_norm"), Norm(cfg, mesh, f"{key}.hidden_norm")
        self.join = parameter(Spec((Box.whole(f"{key}.join.weight", (m.hidden, 2 * m.hidden)),), "normal", m.init_std,
                                   partial=("tp",) if cfg.parallel.sp else ()))
        self.block, self.norm = block, Norm(cfg, mesh, f"{key}.head_norm")

    def forward(self, h: Tensor, e: Tensor, ctx: Context) -> Tensor:
        """h, e [b, s, d] (sp: [b, s/tp, d]): states and embeddings -> the next states."""
        x = linear(cat((self.embed_norm(e), self.hidden_norm(h)), -1), self.join)
        x, told = again(self.block, x, ctx) if self.full and is_grad_enabled() else self.block(x, ctx)
        if told is not None:
            self.block.mlp.router.told += told
        return self.norm(x)


class MTP(nn.Module):
    """table: the embedding's, which may be another part's too."""

    def __init__(self, cfg: Config, mesh: Mesh, table: nn.Parameter, blocks: list[nn.Module]) -> None:
        super().__init__()
        m = cfg.model
        self.cfg, self.mesh = cfg, mesh
        self.tp, self.sp, self.table, self.weight = mesh.tp, cfg.parallel.sp, table, m.mtp_weight / m.mtp
        self.steps = nn.ModuleList(Predictor(cfg, mesh, m.layers + k, block) for k, block in enumerate(blocks))

    def forward(self, h: Tensor, batch, scale, ctx: Context, head: Head) -> Tensor:
        """h [b, s, d] after the model's last norm; batch: with what lies ahead (Batch.look_ahead) -> the weighted loss."""
        total = 0.0
        for step, tokens, targets in zip(self.steps, batch.ahead, batch.ahead_targets):
            if self.cfg.model.experts:
                ctx = replace(ctx, learn=learning(self.cfg, self.mesh, replace(batch, targets=targets), scale, ctx.noise))
            h = step(h, vocab_embedding(tokens, self.table, self.tp, self.sp), ctx)
            total = total + head.cross_entropy(h, targets, scale * self.weight)
        return total
