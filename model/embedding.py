"""Token embedding and, as in GPT-2, learned positions."""
from torch import Tensor, nn

from config import Config, padded_vocab
from kernels.embedding import embedding
from model.norm import Norm
from parallel.rng import DropoutRng, dropout
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import partial_over_tp, row_shard, vocab_embedding
from parallel.tensor.regions import local_chunk
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group

EMBEDDING_SITE = 0  # dropout sites; 1 + 2 layer and 2 + 2 layer: a block's branches; -1 - layer: its router


def embedding_table(cfg: Config, mesh: Mesh, ends_are_apart: bool) -> ShardedParameter:
    """Create the token table [padded vocab / tp, d].

    `ends_are_apart` says that the first and last stage are on different ranks. A table that both need (tied,
    or multi-token prediction) then exists on both, each with a partial gradient.
    """
    is_shared = cfg.model.tied or cfg.model.mtp is not None
    partial_over = ("embedding_ends",) if is_shared and ends_are_apart else ()
    return vocab_table(cfg, mesh, "embed.weight", role="embedding", partial_over=partial_over)


def vocab_table(cfg: Config, mesh: Mesh, key: str, *, role: str,
                partial_over: tuple[str, ...] = ()) -> ShardedParameter:
    """Create a table [padded vocab / tp, d] whose rows are sharded over tp."""
    model = cfg.model
    box = row_shard(key, (padded_vocab(model), model.hidden), mesh.tp)
    spec = ParameterSpec((box,), role, model.init_std, partial_over=partial_over)
    return parameter(spec)


def embed_tokens(tokens: Tensor, table: ShardedParameter, tp: Group, *, sp: bool, scale: float) -> Tensor:
    """Look up tokens [b, s/cp] and scale their rows -> [b, s/cp, d] (sp: [b, s/cp/tp, d])."""
    x = vocab_embedding(tokens, table, tp, sp) if tp.size > 1 else embedding(tokens, table)
    return x if scale == 1 else x * scale


class Embedding(nn.Module):
    """tokens, positions [b, s/cp] -> [b, s/cp, d] (sp: [b, s/cp/tp, d])."""

    def __init__(self, cfg: Config, mesh: Mesh, ends_are_apart: bool) -> None:
        super().__init__()
        model = cfg.model
        self.scale = model.embed_scale
        self.dropout = model.dropout
        self.tp = mesh.tp
        self.sp = cfg.parallel.sp
        self.weight = embedding_table(cfg, mesh, ends_are_apart)
        self.positions = None
        if model.positions == "learned":
            box = Box.whole("positions.weight", (model.context, model.hidden))
            # under sp a rank looks up only its part of the sequence
            partial_over = partial_over_tp(self.sp)
            spec = ParameterSpec((box,), "positions", model.init_std, partial_over=partial_over)
            self.positions = parameter(spec)
        self.norm = Norm(cfg, "embed_norm") if model.embed_norm else None

    def forward(self, tokens: Tensor, positions: Tensor, dropout_rng: DropoutRng | None) -> Tensor:
        x = embed_tokens(tokens, self.weight, self.tp, sp=self.sp, scale=self.scale)
        if self.positions is not None:
            local_positions = local_chunk(positions, self.tp) if self.sp else positions
            x = x + embedding(local_positions, self.positions)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.dropout, dropout_rng, EMBEDDING_SITE) if self.dropout else x
