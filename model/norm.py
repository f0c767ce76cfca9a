"""The block's norm as configured, with the residual add folded in."""
from torch import Tensor, nn

from config import Config
from kernels import norm
from parallel.boxes import Box
from parallel.mesh import Mesh
from parallel.spec import Spec, parameter


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim [d]."""

    def __init__(self, cfg: Config, mesh: Mesh, key: str) -> None:
        super().__init__()
        m = cfg.model
        self.eps, self.fused = m.norm_eps, cfg.train.compile
        self.weight = parameter(Spec((Box.whole(f"{key}.weight", (m.hidden,)),), "ones", decay=False))
        layer = m.norm == "layernorm"
        self.bias = parameter(Spec((Box.whole(f"{key}.bias", (m.hidden,)),), "zeros", decay=False)) if layer else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return norm.rms_norm(x, self.weight, self.eps, self.fused)
        return norm.layer_norm(x, self.weight, self.bias, self.eps, self.fused)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        if self.bias is None:
            return norm.add_rms_norm(x, residual, self.weight, self.eps, self.fused)
        return norm.add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.fused)
