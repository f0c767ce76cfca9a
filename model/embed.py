"""Token (and, for GPT-2, learned position) embedding."""
from torch import Tensor, nn

from config import Config, padded_vocab
from kernels.embedding import embedding
from parallel.boxes import Box
from parallel.mesh import Mesh
from parallel.rng import Noise, dropout
from parallel.spec import Spec, parameter
from parallel.tensor import rows

EMBED_SITE = 0  # dropout sites: 0 is the embedding, 1 + 2 layer and 2 + 2 layer the branches of a block


class Embed(nn.Module):
    """tokens [b, s], positions [b, s] -> [b, s, d]."""

    def __init__(self, cfg: Config, mesh: Mesh) -> None:
        super().__init__()
        m = cfg.model
        self.rate = m.dropout
        self.weight = parameter(Spec((rows("embed.weight", (padded_vocab(m), m.hidden), mesh.tp),), "normal", m.init_std))
        learned = m.positions == "learned"
        self.positions = parameter(Spec((Box.whole("positions.weight", (m.context, m.hidden)),), "normal", m.init_std)) if learned else None

    def forward(self, tokens: Tensor, positions: Tensor, noise: Noise | None) -> Tensor:
        x = embedding(tokens, self.weight)
        if self.positions is not None:
            x = x + embedding(positions, self.positions)
        return dropout(x, self.rate, noise, EMBED_SITE)
