"""The output head: final norm, projection onto the vocabulary, token-weighted cross entropy."""
import torch
from torch import Tensor, nn

from config import Config, mup_width
from kernels.cross_entropy import linear_cross_entropy
from kernels.linear import linear
from model.embed import table
from model.norm import Norm
from parallel import comm
from parallel.collectives import enter
from parallel.mesh import Mesh
from parallel.tensor import merge_vocab


class Head(nn.Module):
    """embed: the embedding's table where it is on this rank; a tied head uses it."""

    def __init__(self, cfg: Config, mesh: Mesh, embed: nn.Parameter | None, apart: bool) -> None:
        super().__init__()
        m = cfg.model
        self.norm, self.vocab, self.tp, self.sp = Norm(cfg, mesh, "norm"), m.vocab, mesh.tp, cfg.parallel.sp
        self.shrink = 1 / mup_width(m)  # muP: of the logits
        self.weight = embed if m.tied and embed is not None else table(cfg, mesh, "embed" if m.tied else "head", apart)

    def loss(self, x: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
        """x [b, s, d], targets [b, s] (-100: not counted) -> scale * sum of the counted tokens' losses."""
        return self.cross_entropy(self.norm(x), targets, scale)

    def cross_entropy(self, x: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
        """The same, from x after the norm."""
        x = self.inputs(x)
        return linear_cross_entropy(x.view(-1, x.shape[-1]), self.weight, targets.view(-1), scale, self.vocab,
                                    start=self.tp.index * self.weight.shape[0], merge=merge_vocab(self.tp))

    def inputs(self, x: Tensor) -> Tensor:
        """x [b, s, d] (sp: [b, s/tp, d]) after the norm -> what the table is multiplied by, whole."""
        return enter(x if self.shrink == 1 else x * self.shrink, self.tp, self.sp)

    def logits(self, x: Tensor) -> Tensor:
        """x [b, s, d] -> [b, s, vocab] without the padding, in fp32 or better."""
        part = linear(self.inputs(self.norm(x)), self.weight)  # [b, s, v/tp]
        if self.tp.size > 1:
            part = torch.cat(comm.gather(part[None], self.tp).unbind(0), -1)
        return part[..., :self.vocab].to(torch.promote_types(x.dtype, torch.float32))
