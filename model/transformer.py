"""The decoder as pipeline stages: consecutive blocks, with the embedding or the output head at an end."""
from dataclasses import replace

import torch
from torch import Tensor, nn

from config import Config, rounds_gradients
from model.block import TransformerBlock
from model.context import ForwardContext, GenerationCache, LossInputs, forward_context
from model.embedding import Embedding
from model.head import OutputHead
from model.modules import ModuleList
from model.moe import MoE
from model.norm import add_residual
from model.router import Router, make_router_inputs, mixture
from model.shared_keys import pack_keys, unpack_keys
from parallel.microbatch import Microbatch
from parallel.rng import DropoutRng
from parallel.sharding.spec import ShardedParameter
from parallel.tensor.regions import local_chunk
from parallel.topology.mesh import Mesh


class PipelineStage(nn.Module):
    """Map token ids, or the previous stage's hidden states, to hidden states or the loss.

    The stage with block 0 has the embedding, the one with the last block the output head.
    """

    def __init__(self, cfg: Config, mesh: Mesh, first: int, end: int,
                 table: ShardedParameter | None = None, ends_are_apart: bool = False) -> None:
        """Build blocks first .. end - 1. `table` is the embedding's, if another stage of this rank has
        it. `ends_are_apart` says that the first and last stage are on different ranks."""
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.first, self.end = first, end
        self.experts = mixture(cfg.model)
        has_jitter = self.experts is not None and self.experts.router.jitter > 0
        drops_for_adapters = cfg.model.lora is not None and cfg.model.lora.dropout > 0
        self.reads_token_rng = rounds_gradients(cfg.train) or drops_for_adapters
        self.draws_numbers = cfg.model.dropout > 0 or has_jitter or drops_for_adapters
        self.embedding = Embedding(cfg, mesh, ends_are_apart) if first == 0 else None
        if self.embedding is not None:
            table = self.embedding.weight
        self.blocks = ModuleList(TransformerBlock(cfg, mesh, layer) for layer in range(first, end))
        self.head = None
        if end == cfg.model.layers:
            self.head = OutputHead(cfg, mesh, table, ends_are_apart)

    # ---- parts ---------------------------------------------------------------------------------------------

    def parts(self) -> list[nn.Module]:
        """Return the parts in forward order: the embedding, each block, the output head."""
        modules: list[nn.Module] = list(self.blocks)
        if self.embedding is not None:
            modules.insert(0, self.embedding)
        if self.head is not None:
            modules.append(self.head)
        return modules

    def routers(self) -> list[Router]:
        """Return the routers of all mixture layers, including multi-token prediction."""
        blocks = list(self.blocks)
        if self.head is not None and self.head.mtp is not None:
            blocks += [module.block for module in self.head.mtp.modules_ahead]
        return [block.mlp.router for block in blocks if isinstance(block.mlp, MoE)]

    def shared_table(self) -> ShardedParameter | None:
        """Return the embedding's table if both the first and the last stage need it, else None."""
        if self.head is not None and self.head.mtp is not None:
            return self.head.mtp.table
        model = self.cfg.model
        if self.embedding is not None and (model.tied or model.mtp):
            return self.embedding.weight
        if self.head is not None and model.tied:
            return self.head.weight
        return None

    # ---- computation ---------------------------------------------------------------------------------------

    def forward(self, x: Tensor, microbatch: Microbatch, scale: Tensor | float) -> Tensor:
        """Run one microbatch. x holds token ids, or hidden states of the previous stage.

        Returns hidden states for the next stage, or on the last stage the summed loss times scale. Dropout,
        jitter and router losses apply where gradients are on.
        """
        context = self.context_of(microbatch, scale)
        x, residual = self.run_blocks(x, microbatch.positions, context)
        if self.head is None:
            return self.output(x, residual, context)
        return self.head(x, LossInputs(microbatch, scale, context), residual=residual)

    def context_of(self, microbatch: Microbatch, scale: Tensor | float) -> ForwardContext:
        """Return the context of a microbatch, with dropout and router losses if gradients are on."""
        cfg = self.cfg
        rng = token_rng = router_inputs = None
        if torch.is_grad_enabled() and self.draws_numbers:
            rng = self.dropout_rng(microbatch)
        if torch.is_grad_enabled() and self.reads_token_rng:
            token_rng = self.token_rng(microbatch)
        if torch.is_grad_enabled() and self.experts is not None:
            router_inputs = make_router_inputs(cfg, self.mesh, microbatch.targets, scale, rng)
        return forward_context(
            cfg,
            microbatch.positions,
            microbatch.documents,
            document_counts=microbatch.document_counts,
            dropout_rng=rng,
            token_rng=token_rng,
            router_inputs=router_inputs,
            sequence_is_sharded=microbatch.sequence_positions is not None,
        )

    def dropout_rng(self, microbatch: Microbatch) -> DropoutRng:
        """Return the dropout generator of this rank's tokens (sp: of those between its linears)."""
        rng = self.token_rng(microbatch)
        if self.cfg.parallel.sp:
            return replace(rng, positions=local_chunk(rng.positions[None], self.mesh.tp)[0])
        return rng

    def token_rng(self, microbatch: Microbatch) -> DropoutRng:
        """Return the generator of the tokens [b, s/cp]. Raises ValueError for a microbatch without
        sequence_ids."""
        if microbatch.sequence_ids is None:
            raise ValueError("dropout, jitter and nvfp4 need each sequence's index in the step: "
                             "Microbatch.sequence_ids")
        positions = microbatch.sequence_positions
        if positions is None:
            tokens = microbatch.tokens
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return DropoutRng(self.cfg.train.seed, microbatch.step, microbatch.sequence_ids, positions)

    def run_blocks(
        self, x: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Run the embedding, if present, and the blocks. The hidden states are the sum of the two results
        (model/block.py)."""
        if self.embedding is not None:
            x = self.embedding(x, positions, context.dropout_rng)
        else:
            x = unpack_keys(x, context.shared_keys, self.cfg, self.first)
        residual = None
        for block in self.blocks:
            x, residual, router_stats = block(x, residual, context)
            if router_stats is not None:
                block.add_router_stats(router_stats)
        return x, residual

    def output(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> Tensor:
        """Return the single tensor that is sent to the next stage."""
        return pack_keys(add_residual(x, residual), context.shared_keys, self.cfg, self.end)

    def hidden_states(self, x: Tensor, positions: Tensor, documents: Tensor | None = None, *,
                      dropout_rng: DropoutRng | None = None, cache: GenerationCache | None = None) -> Tensor:
        """Return hidden states [b, s, d] after the last local block, for token ids [b, s] on the first stage
        or hidden states of the previous one.

        Takes full sequences, as in generation.
        """
        context = forward_context(self.cfg, positions, documents, dropout_rng=dropout_rng, cache=cache)
        return self.output(*self.run_blocks(x, positions, context), context)

    def logits(self, tokens: Tensor, positions: Tensor, *, cache: GenerationCache | None = None,
               position: int | None = None) -> Tensor:
        """Return logits [b, s, vocab] in fp32 or better, or [vocab] at `position` of the first sequence.

        Raises ValueError unless the stage is a full model.
        """
        if self.embedding is None or self.head is None:
            raise ValueError("a stage without the first or the last block is not a full model")
        x = self.hidden_states(tokens, positions, cache=cache)
        return self.head(x, position=position)
