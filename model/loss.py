"""The output head: final norm, projection onto the vocabulary, token-weighted cross entropy."""
import torch
from torch import Tensor, nn

from config import Config, padded_vocab
from kernels.cross_entropy import linear_cross_entropy
from kernels.linear import linear
from model.norm import Norm
from parallel.mesh import Mesh
from parallel.spec import Spec, parameter
from parallel.tensor import rows


class Head(nn.Module):
    """embed: the embedding's weight where it is tied."""

    def __init__(self, cfg: Config, mesh: Mesh, embed: nn.Parameter | None) -> None:
        super().__init__()
        m = cfg.model
        self.norm, self.vocab = Norm(cfg, mesh, "norm"), m.vocab
        self.weight = embed if m.tied else parameter(
            Spec((rows("head.weight", (padded_vocab(m), m.hidden), mesh.tp),), "normal", m.init_std))

    def loss(self, x: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
        """x [b, s, d], targets [b, s] (-100: not counted) -> scale * sum of the counted tokens' losses."""
        x = self.norm(x)
        return linear_cross_entropy(x.view(-1, x.shape[-1]), self.weight, targets.view(-1), scale, self.vocab)

    def logits(self, x: Tensor) -> Tensor:
        """x [b, s, d] -> [b, s, vocab] without the padding, in fp32 or better."""
        return linear(self.norm(x), self.weight)[..., :self.vocab].to(torch.promote_types(x.dtype, torch.float32))
