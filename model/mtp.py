"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules after the last block that
predict further ahead.

Module k = 1 .. mtp joins the state of token i with the embedding of token i + k, and predicts token i + k +
1:

    h_0 = the model's output, after its last norm
    h_k = norm_k(block_k(join_k [norm(embedding of token i + k) ; norm(h_k-1)]))
    loss = mtp_weight / mtp * sum over k of the cross entropy of head(h_k), over the tokens of the main loss

Embedding and head are shared with the model. The modules run only in training: they contribute to the
gradients, not to the reported loss, and evaluation and generation skip them. Tokens and targets are shifted
before context parallelism shards the sequence (parallel/microbatch.py). A mixture's router balances its load
over the tokens whose further target is counted. Join matrices and norms are replicated over tp, like a
block's norms.
"""
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from config import Config
from kernels.linear import linear
from model.block import TransformerBlock
from model.context import ForwardContext, LossInputs
from model.embedding import embed_tokens
from model.modules import ModuleList
from model.norm import Norm
from model.router import make_router_inputs, mixture
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import partial_over_tp
from parallel.topology.mesh import Mesh

CrossEntropy = Callable[[Tensor, Tensor, Tensor | float], Tensor]  # (states, targets, scale) -> a scalar


class MTPModule(nn.Module):
    """One prediction module: joins states with embeddings, then runs a transformer block.

    `layer` is the number of that block; numbering continues after the model's blocks.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        hidden = cfg.model.hidden
        key = f"layers.{layer}"
        self.embed_norm = Norm(cfg, f"{key}.embed_norm")
        self.hidden_norm = Norm(cfg, f"{key}.hidden_norm")
        box = Box.whole(f"{key}.join.weight", (hidden, 2 * hidden))
        partial_over = partial_over_tp(cfg.parallel.sp)
        spec = ParameterSpec((box,), "hidden", cfg.model.init_std, partial_over=partial_over)
        self.join = parameter(spec)
        self.block = TransformerBlock(cfg, mesh, layer)
        self.norm = Norm(cfg, f"{key}.head_norm")

    def forward(self, h: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Return the states for the module's prediction, from the states h of the module before and the
        embeddings of the tokens ahead. All are [b, s/cp, d] (sp: [b, s/cp/tp, d])."""
        embedded = self.embed_norm(embedded)
        joined = torch.cat((embedded, self.hidden_norm(h)), -1)  # [b, s/cp, 2d]
        x, residual, router_stats = self.block(linear(joined, self.join), None, context)
        if router_stats is not None:
            self.block.add_router_stats(router_stats)
        return self.norm.add_and_norm(x, residual)[0]


class MultiTokenPrediction(nn.Module):
    """The prediction modules of a model. `table` is the embedding's, shared with other parts of the model."""

    def __init__(self, cfg: Config, mesh: Mesh, table: ShardedParameter) -> None:
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.table = table
        self.embed_scale = cfg.model.embed_scale
        self.loss_weight = cfg.model.mtp.weight / cfg.model.mtp.modules
        first = cfg.model.layers
        layers = range(first, first + cfg.model.mtp.modules)
        self.modules_ahead = ModuleList(MTPModule(cfg, mesh, layer) for layer in layers)

    def forward(self, h: Tensor, inputs: LossInputs, cross_entropy: CrossEntropy) -> Tensor:
        """Return the weighted loss of all modules, a scalar. Takes h [b, s/cp, d] (sp: [b, s/cp/tp, d]) after
        the model's last norm.

        `cross_entropy` is the head's. Raises ValueError for a microbatch without tokens_ahead.
        """
        microbatch, scale, context = inputs.microbatch, inputs.scale, inputs.context
        if microbatch.tokens_ahead is None or microbatch.targets_ahead is None:
            raise ValueError("multi-token prediction needs a microbatch of Microbatch.with_tokens_ahead")
        losses: list[Tensor] = []
        sp = self.cfg.parallel.sp
        ahead = zip(self.modules_ahead, microbatch.tokens_ahead, microbatch.targets_ahead)
        for module, tokens, targets in ahead:
            if mixture(self.cfg.model):
                router_inputs = make_router_inputs(self.cfg, self.mesh, targets, scale, context.dropout_rng)
                if context.router_inputs is not None:
                    router_inputs = replace(router_inputs, chosen=context.router_inputs.chosen)
                context = replace(context, router_inputs=router_inputs)
            embedded = embed_tokens(tokens, self.table, self.mesh.tp, sp=sp, scale=self.embed_scale)
            h = module(h, embedded, context)
            losses.append(cross_entropy(h, targets, scale * self.loss_weight))
        return reduce(add, losses)
