"""Token (and, for GPT-2, learned position) embedding."""
from torch import Tensor, nn

from config import Config, padded_vocab
from kernels.embedding import embedding
from parallel.boxes import Box
from parallel.collectives import take_dim1
from parallel.mesh import Mesh
from parallel.rng import Noise, dropout
from parallel.spec import Spec, parameter
from parallel.tensor import rows, vocab_embedding

EMBED_SITE = 0  # dropout sites: 0 is the embedding, 1 + 2 layer and 2 + 2 layer the branches of a block


def table(cfg: Config, mesh: Mesh, key: str, apart: bool) -> nn.Parameter:
    """[padded vocab / tp, d], under the key "embed" or "head". apart: first and last stage are on different ranks, and a
    tied table, or one that multi-token prediction reads, on both."""
    m = cfg.model
    tied = key == "embed" and (m.tied or m.mtp > 0) and apart
    return parameter(Spec((rows(f"{key}.weight", (padded_vocab(m), m.hidden), mesh.tp),), "normal", m.init_std,
                          partial=("tied",) if tied else ()))


class Embed(nn.Module):
    """tokens [b, s], positions [b, s] -> [b, s, d] (sp: [b, s/tp, d])."""

    def __init__(self, cfg: Config, mesh: Mesh, apart: bool) -> None:
        super().__init__()
        m = cfg.model
        self.rate, self.tp, self.sp = m.dropout, mesh.tp, cfg.parallel.sp
        self.weight = table(cfg, mesh, "embed", apart)
        # sp: a rank looks up only its share of the sequence, so the gradient is partial over tp
        spec = Spec((Box.whole("positions.weight", (m.context, m.hidden)),), "normal", m.init_std, partial=("tp",) if self.sp else ())
        self.positions = parameter(spec) if m.positions == "learned" else None

    def forward(self, tokens: Tensor, positions: Tensor, noise: Noise | None) -> Tensor:
        x = vocab_embedding(tokens, self.weight, self.tp, self.sp)
        if self.positions is not None:
            x = x + embedding(take_dim1(positions, self.tp) if self.sp else positions, self.positions)
        return dropout(x, self.rate, noise, EMBED_SITE)
