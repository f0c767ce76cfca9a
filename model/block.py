"""One block of the decoder: a token mixer, usually attention, and an MLP. Each adds its output to the
residual stream x, with norms placed by model.norm.place:

    before   x += f(norm(x))
    after    x += norm(f(x))                      OLMo 2 (arXiv 2501.00656)
    around   x += norm_after(f(norm(x)))          Gemma 2 (arXiv 2408.00118)

With model.residual parallel, both read the same norm: x += mixer(norm(x)) + mlp(norm(x)).

MIXERS and MLPS list the choices: attention can be replaced by a mixer with a state, and the MLP by a mixture
of experts. A kind of block may have only one of the two (Nemotron-H, arXiv 2504.03624).
"""
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config import Config, config_of_layer, layer_in_fp8, layer_kinds, layer_model
from kernels.norm import Fp8Readers
from model.attention import Attention, AttentionConfig
from model.context import ForwardContext
from model.delta import DeltaConfig, GatedDeltaNet, KimiConfig, KimiDeltaAttention
from model.mamba import GatedShortConvolution, Mamba, MambaConfig, ShortConvConfig
from model.mla import LatentConfig, MultiLatentAttention
from model.mlp import MLP, MLPConfig
from model.moe import MoE
from model.norm import SUM, Norm, add_residual
from model.precision import fp8_reader_of_layer
from model.recompute import checkpoint_activations
from model.router import ExpertsConfig, has_experts
from model.shared_keys import key_sources
from parallel.rng import dropout
from parallel.tensor.layers import exchange_weight_maxima_together
from parallel.topology.mesh import Mesh

MIXERS: dict[type, type[nn.Module]] = {  # by the class of model.mixer
    AttentionConfig: Attention,
    LatentConfig: MultiLatentAttention,
    DeltaConfig: GatedDeltaNet,
    KimiConfig: KimiDeltaAttention,
    MambaConfig: Mamba,
    ShortConvConfig: GatedShortConvolution,
}
MLPS: dict[type, type[nn.Module]] = {MLPConfig: MLP, ExpertsConfig: MoE}  # by the class of model.mlp

BlockOutput = tuple[Tensor, Tensor | None, Tensor | None]  # (x, residual, statistics), see TransformerBlock


class BlockKind(NamedTuple):
    """Blocks of one kind differ only in parameter names.

    `name` is the kind in model.pattern. `mixer` is None for an MLP alone. `is_read` says that later blocks
    read the block's keys.
    """
    name: str
    mixer: type[nn.Module] | None
    in_fp8: bool
    is_read: bool


def attention_readers(cfg: Config, mesh: Mesh, layer: int) -> Fp8Readers:
    """Return the fp8 consumers of the pre-mixer norm.

    Other mixers than attention also need its 16-bit output. Its input gradient goes to the MLP of the block
    before.
    """
    is_alone = mesh.tp.size == 1 and isinstance(cfg.model.mixer, AttentionConfig)
    is_alone = is_alone and cfg.model.residual == "sequential"
    return Fp8Readers(
        of_result=fp8_reader_of_layer(cfg, layer) if is_alone else None,
        of_gradient=fp8_reader_of_layer(cfg, layer - 1) if layer > 0 and adds_directly(cfg) else None,
    )


def mlp_readers(cfg: Config, mesh: Mesh, layer: int) -> Fp8Readers:
    """Return the fp8 consumers of the pre-MLP norm.

    A router also needs its 16-bit output. Its input gradient goes to the output projection of attention.
    """
    reads_alone = mesh.tp.size == 1 and not has_experts(cfg.model, layer)
    reader = fp8_reader_of_layer(cfg, layer)
    return Fp8Readers(
        of_result=reader if reads_alone else None,
        of_gradient=reader if adds_directly(cfg) else None,
    )


def adds_directly(cfg: Config) -> bool:
    """Return whether mixer and MLP outputs are added to the residual stream unchanged."""
    return cfg.model.norm.place == "before" and cfg.model.residual_scale == 1


class TransformerBlock(nn.Module):
    """x, residual [b, s/cp, d] (sp: [b, s/cp/tp, d]) -> the same two, and the router's statistics.

    The hidden states are x + residual, or x if residual is None. The next norm adds the two in the same pass.

    The statistics [E + len(ROUTER_STATS)] (model/router.py) are None without a router or outside of training.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        cfg = config_of_layer(cfg, layer)
        self.layer = layer
        key = f"layers.{layer}"
        self.is_parallel = cfg.model.residual == "parallel"
        self.residual_scale = cfg.model.residual_scale
        self.dropout = cfg.model.dropout
        self.attention_site = 1 + 2 * layer  # dropout sites; the embedding's is 0
        self.mlp_site = 2 + 2 * layer

        self.recompute = cfg.parallel.recompute == "full"  # of the whole block

        before = cfg.model.norm.place != "after"
        after = cfg.model.norm.place != "before"
        mixer = self.mixer(cfg, layer)
        self.attn = self.mlp = None
        if mixer is not None:
            readers = attention_readers(cfg, mesh, layer)
            self.attn_norm = Norm(cfg, f"{key}.attn_norm", readers) if before else SUM
            self.attn = mixer(cfg, mesh, layer)
            self.attn_norm_after = Norm(cfg, f"{key}.attn_norm_after") if after else None
        mlp = MLPS.get(type(cfg.model.mlp))
        if mlp is not None:
            if not self.is_parallel:
                self.mlp_norm = Norm(cfg, f"{key}.mlp_norm", mlp_readers(cfg, mesh, layer)) if before else SUM
            self.mlp = mlp(cfg, mesh, layer)
            self.mlp_norm_after = Norm(cfg, f"{key}.mlp_norm_after") if after else None
        exchange_weight_maxima_together(self, mesh.tp)

    def forward(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> BlockOutput:
        if self.recompute and torch.is_grad_enabled():
            own = context.of_layer(self.layer)
            y, residual, router_stats = checkpoint_activations(self.attention_and_mlp, x, residual, own)
            context.shared_keys.take(self.layer, own.shared_keys)
            return add_residual(y, residual), None, router_stats  # store one tensor as the next block's input
        return self.attention_and_mlp(x, residual, context)

    def attention_and_mlp(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> BlockOutput:
        """Compute the block. Full recompute repeats this in the backward."""
        rng = context.dropout_rng
        router_stats = None
        if self.attn is not None:
            h, residual = self.attn_norm.add_and_norm(x, residual)
            x = self.to_residual(self.attn(h, context), self.attn_norm_after)
            x = dropout(x, self.dropout, rng, site=self.attention_site)
        if self.mlp is None:
            return x, residual, None

        attended = x
        if not self.is_parallel:
            h, residual = self.mlp_norm.add_and_norm(attended, residual)
        if isinstance(self.mlp, MoE):
            y, router_stats = self.mlp(h, context.router_inputs)
        else:
            y = self.mlp(h)
        y = dropout(self.to_residual(y, self.mlp_norm_after), self.dropout, rng, site=self.mlp_site)
        return (y + attended if self.is_parallel else y), residual, router_stats

    def to_residual(self, y: Tensor, norm: Norm | None) -> Tensor:
        """Normalize and scale the output of mixer or MLP for the residual stream."""
        if norm is not None:
            y = norm(y)
        return y if self.residual_scale == 1 else y * self.residual_scale

    def add_router_stats(self, stats: Tensor | None) -> None:
        """Add a microbatch's statistics to the step's.

        Kept out of forward, which full recompute runs twice: each token would count twice.
        """
        if stats is not None and isinstance(self.mlp, MoE):
            self.mlp.router.stats += stats

    @staticmethod
    def mixer(cfg: Config, layer: int) -> type[nn.Module] | None:
        return MIXERS.get(type(layer_model(cfg.model, layer).mixer))

    @staticmethod
    def kind(cfg: Config, layer: int) -> BlockKind:
        name = layer_kinds(cfg.model)[min(layer, cfg.model.layers - 1)]
        is_read = layer in key_sources(cfg.model).values()
        return BlockKind(name, TransformerBlock.mixer(cfg, layer), layer_in_fp8(cfg, layer), is_read)
