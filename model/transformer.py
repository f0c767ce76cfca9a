"""The decoder: TransformerBlock, and PipelineStage, the consecutive blocks of one pipeline stage."""
import torch
from torch import Tensor, nn

from config import Config, has_experts, layer_in_fp8, recomputes
from model.attention import Attention
from model.context import ForwardContext, KeyValueCache, context_cost, forward_context
from model.embedding import Embedding, embedding_table
from model.head import LossInputs, OutputHead
from model.mla import MultiLatentAttention
from model.mlp import MLP
from model.modules import ModuleList
from model.moe import MoE
from model.mtp import MultiTokenPrediction
from model.norm import Norm
from model.recompute import checkpoint_activations
from model.router import Router, router_inputs
from parallel.cost import RECOMPUTABLE_PARTS, Cost, MemoryTraffic, Part, SavedTensor, Workload, total
from parallel.microbatch import Microbatch
from parallel.rng import DropoutRng, dropout
from parallel.sharding.spec import ShardedParameter
from parallel.tensor.regions import local_chunk, outside_region
from parallel.topology.mesh import Mesh


class TransformerBlock(nn.Module):
    """Attention and MLP with norms before them. x [b, s, d] (sp: [b, s/tp, d]) -> the same, and its router's
    stats.

    The stats (model/router.py) are None without a router, or outside of training.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = cfg.model.dropout
        self.recompute = cfg.parallel.recompute == "full"
        parts: list[Part] = [part for part in RECOMPUTABLE_PARTS if recomputes(cfg, part)]
        self.recomputed_parts = frozenset(parts)
        self.has_experts = has_experts(cfg.model, layer)
        key = f"layers.{layer}"
        self.attn_norm = Norm(cfg, mesh, f"{key}.attn_norm")
        attention = MultiLatentAttention if cfg.model.kv_rank else Attention
        self.attn = attention(cfg, mesh, layer)
        self.mlp_norm = Norm(cfg, mesh, f"{key}.mlp_norm")
        self.mlp = MoE(cfg, mesh, layer) if self.has_experts else MLP(cfg, mesh, layer)

    def forward(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint_activations(self.run, x, context)
        return self.run(x, context)

    def run(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """The computation; with recompute it runs again in the backward."""
        rng = context.dropout_rng
        attended = self.attn(self.attn_norm(x), context)
        attended = dropout(attended, self.dropout, rng, site=1 + 2 * self.layer)
        h, x = self.mlp_norm.add_and_norm(attended, x)
        router_stats = None
        if self.has_experts:
            y, router_stats = self.mlp(h, context.router_inputs)
        else:
            y = self.mlp(h)
        y = dropout(y, self.dropout, rng, site=2 + 2 * self.layer)
        return x + y, router_stats

    def add_router_stats(self, stats: Tensor | None) -> None:
        """Adds the stats of a microbatch to those of the step: not in forward, which recompute may run
        twice."""
        if stats is not None and isinstance(self.mlp, MoE):
            self.mlp.router.stats += stats

    @staticmethod
    def kind(cfg: Config, layer: int) -> tuple[bool, bool]:
        """Blocks of the same kind differ in their names alone."""
        return has_experts(cfg.model, layer), layer_in_fp8(cfg, layer)

    def cost(self, work: Workload) -> Cost:
        """The only place where recompute changes what is kept and exchanged."""
        cost = self.cost_without_recompute(work)
        if self.recompute:
            input_bytes = self.hidden_elements(work) * work.compute_bytes
            return cost.recompute_all(kept=SavedTensor(input_bytes))
        return cost.recompute_parts(self.recomputed_parts)

    def cost_without_recompute(self, work: Workload) -> Cost:
        mlp = self.mlp.cost(work)
        return total((
            self.attn_norm.cost(work),
            self.attn.cost(work).as_inner(),  # the residual is kept by the second norm
            self.mlp_norm.cost(work),
            mlp.as_inner() if self.dropout else mlp,  # dropout keeps a mask
            self.residuals_cost(work),
        ))

    def residuals_cost(self, work: Workload) -> Cost:
        """Each of the two reads one tensor more and writes one. Dropout keeps a mask of bools."""
        elements = self.hidden_elements(work)
        masks = 2 * elements if self.dropout else 0
        return Cost(
            traffic=(MemoryTraffic(4 * elements * work.compute_bytes),),
            saved=(SavedTensor(masks),),
            launches=1,
        )

    def hidden_elements(self, work: Workload) -> int:
        """Of x on this rank."""
        norm = self.attn_norm
        tokens = outside_region(work.tokens, norm.tp, norm.sp)
        return tokens * norm.weight.spec.numel


class PipelineStage(nn.Module):
    """Blocks first .. last - 1. The stage with block 0 has the embedding, the one with the last block the
    output head."""

    def __init__(self, cfg: Config, mesh: Mesh, first: int, last: int,
                 table: ShardedParameter | None = None, ends_are_apart: bool = False) -> None:
        """table: the embedding's, if another stage of this rank has it. ends_are_apart: the first and the
        last stage are on different ranks."""
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.embedding = Embedding(cfg, mesh, ends_are_apart) if first == 0 else None
        if self.embedding is not None:
            table = self.embedding.weight
        layers = range(first, last)
        self.blocks = ModuleList(TransformerBlock(cfg, mesh, layer) for layer in layers)
        self.head = None
        if last == cfg.model.layers:
            self.head = OutputHead(cfg, mesh, table, ends_are_apart)
            self.head.mtp = self.multi_token_prediction(table, ends_are_apart)

    def multi_token_prediction(self, table: ShardedParameter | None,
                               ends_are_apart: bool) -> MultiTokenPrediction | None:
        """The modules of the last stage; None without model.mtp."""
        cfg = self.cfg
        if self.head is None or not cfg.model.mtp:
            return None
        if table is None and cfg.model.tied:
            table = self.head.weight
        elif table is None:
            table = embedding_table(cfg, self.mesh, ends_are_apart)
        num_layers = cfg.model.layers
        layers = range(num_layers, num_layers + cfg.model.mtp)
        blocks = [TransformerBlock(cfg, self.mesh, layer) for layer in layers]
        return MultiTokenPrediction(cfg, self.mesh, table, blocks)

    # ---- what it is made of --------------------------------------------------------------------------------

    def parts(self) -> list[nn.Module]:
        """What runs at once, in the order of the forward pass: the embedding, each block, the output head."""
        modules: list[nn.Module] = list(self.blocks)
        if self.embedding is not None:
            modules.insert(0, self.embedding)
        if self.head is not None:
            modules.append(self.head)
        return modules

    def routers(self) -> list[Router]:
        """Of all mixture layers, those of multi-token prediction included."""
        blocks = list(self.blocks)
        if self.head is not None and self.head.mtp is not None:
            blocks += [module.block for module in self.head.mtp.modules_ahead]
        return [block.mlp.router for block in blocks if isinstance(block.mlp, MoE)]

    def shared_table(self) -> ShardedParameter | None:
        """The embedding's table if the first and the last stage both need it; None on stages between them."""
        if self.head is not None and self.head.mtp is not None:
            return self.head.mtp.table
        model = self.cfg.model
        if self.embedding is not None and (model.tied or model.mtp):
            return self.embedding.weight
        if self.head is not None and model.tied:
            return self.head.weight
        return None

    def cost(self, work: Workload) -> Cost:
        """Of one microbatch: of its parts, and of what its blocks share."""
        costs = [context_cost(self.cfg, work)]
        if self.embedding is not None:
            costs.append(self.embedding.cost(work))
        costs += [block.cost(work) for block in self.blocks]
        if self.head is not None:
            costs.append(self.head.cost(work))
        return total(costs)

    # ---- what it computes ----------------------------------------------------------------------------------

    def forward(self, x: Tensor, microbatch: Microbatch, scale: Tensor | float) -> Tensor:
        """One microbatch. x: token ids, or hidden states of the stage before.

        Returns hidden states for the next stage; the last stage the summed loss times scale. Dropout, jitter
        and router losses where gradients are on.
        """
        if torch.is_grad_enabled():
            context = self.training_context(microbatch, scale)
        else:
            context = forward_context(
                self.cfg,
                microbatch.positions,
                microbatch.documents,
                sequence_is_sharded=microbatch.sequence_positions is not None,
            )
        x = self.run_blocks(x, microbatch.positions, context)
        if self.head is None:
            return x
        return self.head(x, LossInputs(microbatch, scale, context))

    def training_context(self, microbatch: Microbatch, scale: Tensor | float) -> ForwardContext:
        """The context of a forward with dropout and router losses."""
        cfg = self.cfg
        is_random = cfg.model.dropout or cfg.model.jitter
        rng = self.dropout_rng(microbatch) if is_random else None
        training = None
        if cfg.model.experts:
            training = router_inputs(cfg, self.mesh, microbatch.targets, scale, rng)
        return forward_context(
            cfg,
            microbatch.positions,
            microbatch.documents,
            dropout_rng=rng,
            router_inputs=training,
            sequence_is_sharded=microbatch.sequence_positions is not None,
        )

    def dropout_rng(self, microbatch: Microbatch) -> DropoutRng:
        """Of this rank's tokens. Raises ValueError for a microbatch without sequence_ids."""
        if microbatch.sequence_ids is None:
            raise ValueError("dropout and jitter need each sequence's index in the step: "
                             "Microbatch.sequence_ids")
        positions = microbatch.sequence_positions
        if positions is None:
            tokens = microbatch.tokens
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.cfg.parallel.sp:
            positions = local_chunk(positions[None], self.mesh.tp)[0]
        return DropoutRng(self.cfg.train.seed, microbatch.step, microbatch.sequence_ids, positions)

    def run_blocks(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Embedding, if it is here, and blocks."""
        if self.embedding is not None:
            x = self.embedding(x, positions, context.dropout_rng)
        for block in self.blocks:
            x, router_stats = block(x, context)
            block.add_router_stats(router_stats)
        return x

    def hidden_states(self, x: Tensor, positions: Tensor, documents: Tensor | None = None, *,
                      dropout_rng: DropoutRng | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Token ids [b, s] on the first stage, else hidden states of the stage before -> [b, s, d] after the
        last block here.

        Of full sequences, as in generation.
        """
        context = forward_context(self.cfg, positions, documents, dropout_rng=dropout_rng, cache=cache)
        return self.run_blocks(x, positions, context)

    def logits(self, tokens: Tensor, positions: Tensor, *, cache: KeyValueCache | None = None,
               position: int | None = None) -> Tensor:
        """[b, s, vocab] in fp32 or better; with `position` the logits [vocab] of that one of the first
        sequence.

        Raises ValueError unless the stage is a full model.
        """
        if self.embedding is None or self.head is None:
            raise ValueError("a stage without the first or the last block is no full model")
        x = self.hidden_states(tokens, positions, cache=cache)
        return self.head(x, position=position)
