"""One block of the decoder: a token mixer, usually attention, and an MLP. Each adds its output to the
residual stream x, with norms placed by model.norm.place:

    before   x += f(norm(x))
    after    x += norm(f(x))                      OLMo 2 (arXiv 2501.00656)
    around   x += norm_after(f(norm(x)))          Gemma 2 (arXiv 2408.00118)

With model.residual parallel, both read the same norm: x += mixer(norm(x)) + mlp(norm(x)). With
parallel_norms, each reads its own norm of x.

MIXERS and MLPS list the choices: attention can be replaced by a mixer with a state, and the MLP by a mixture
of experts. A kind of block may have only one of the two (Nemotron-H, arXiv 2504.03624).
"""
import torch
from torch import Tensor, nn

from config import Config, config_of_layer, layer_in_fp8, layer_model, rounds_gradients
from model.attention import Attention, AttentionConfig
from model.context import ForwardContext
from model.delta import DeltaConfig, GatedDeltaNet, KimiConfig, KimiDeltaAttention
from model.mamba import GatedShortConvolution, Mamba, MambaConfig, ShortConvConfig
from model.mla import LatentConfig, MultiLatentAttention
from model.mlp import MLP, MLPConfig
from model.moe import MoE
from model.norm import SUM, Norm, add_residual
from model.recompute import checkpoint_activations
from model.router import ExpertsConfig
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
        self.is_parallel = cfg.model.residual != "sequential"
        self.shares_norm = cfg.model.residual == "parallel"
        self.residual_scale = cfg.model.residual_scale
        self.dropout = cfg.model.dropout
        self.mixer_site = 1 + 2 * layer  # dropout sites; the embedding's is 0
        self.mlp_site = 2 + 2 * layer

        self.recompute = cfg.parallel.recompute == "full"  # of the whole block

        before = cfg.model.norm.place != "after"
        after = cfg.model.norm.place != "before"
        mixer = self.mixer_class(cfg, layer)
        self.mixer = self.mlp = None
        if mixer is not None:
            self.mixer_norm = Norm(cfg, f"{key}.attn_norm") if before else SUM
            self.mixer = mixer(cfg, mesh, layer)
            self.mixer_norm_after = Norm(cfg, f"{key}.attn_norm_after") if after else None
        mlp = MLPS.get(type(cfg.model.mlp))
        if mlp is not None:
            if not self.shares_norm:
                self.mlp_norm = Norm(cfg, f"{key}.mlp_norm") if before else SUM
            self.mlp = mlp(cfg, mesh, layer)
            self.mlp_norm_after = Norm(cfg, f"{key}.mlp_norm_after") if after else None
        self.adapter_dropout = None  # of what adapters read
        if cfg.model.lora is not None:
            from model.lora import add_adapters

            self.adapter_dropout = add_adapters(self, cfg, mesh)
        exchange_weight_maxima_together(self, mesh.tp)
        self.rounding = None  # of gradients, in NVFP4
        if rounds_gradients(cfg.train) and layer_in_fp8(cfg, layer):
            from parallel.tensor.rounding import round_gradients

            self.rounding = round_gradients(self)
        if cfg.train.unproven:
            from model.unproven import use_unproven

            use_unproven(self, cfg, mesh, layer)

    def forward(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> BlockOutput:
        if self.recompute and torch.is_grad_enabled():
            own = context.of_layer(self.layer)
            y, residual, router_stats = checkpoint_activations(self.mixer_and_mlp, x, residual, own)
            context.shared_keys.take(self.layer, own.shared_keys)
            return add_residual(y, residual), None, router_stats  # store one tensor as the next block's input
        return self.mixer_and_mlp(x, residual, context)

    def mixer_and_mlp(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> BlockOutput:
        """Compute the block. Full recompute repeats this in the backward."""
        router_stats = None
        if self.rounding is not None:
            self.rounding.rng = context.token_rng
        if self.adapter_dropout is not None:
            self.adapter_dropout.start_pass(context.dropout_rng, context.token_rng)
        if self.mixer is not None:
            h, residual = self.mixer_norm.add_and_norm(x, residual)
            x = self.to_residual(self.mixer(h, context), self.mixer_norm_after, context, self.mixer_site)
        if self.mlp is None:
            return x, residual, None

        mixed = x
        if not self.is_parallel:
            h, residual = self.mlp_norm.add_and_norm(mixed, residual)
        elif not self.shares_norm:
            h = self.mlp_norm(residual)
        if isinstance(self.mlp, MoE):
            y, router_stats = self.mlp(h, context.router_inputs)
        else:
            y = self.mlp(h)
        y = self.to_residual(y, self.mlp_norm_after, context, self.mlp_site)
        return (y + mixed if self.is_parallel else y), residual, router_stats

    def to_residual(self, y: Tensor, norm: Norm | None, context: ForwardContext, site: int) -> Tensor:
        """Normalize and scale the output of mixer or MLP for the residual stream, with dropout."""
        if norm is not None:
            y = norm(y)
        if self.residual_scale != 1:
            y = y * self.residual_scale
        return dropout(y, self.dropout, context.dropout_rng, site) if self.dropout else y

    def add_router_stats(self, stats: Tensor) -> None:
        """Add a microbatch's statistics to the step's.

        Kept out of forward, which full recompute runs twice: each token would count twice.
        """
        self.mlp.router.stats += stats

    @staticmethod
    def mixer_class(cfg: Config, layer: int) -> type[nn.Module] | None:
        """Return the class of a layer's token mixer, or None for an MLP alone."""
        return MIXERS.get(type(layer_model(cfg.model, layer).mixer))
