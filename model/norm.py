"""The block's norm as configured, with the residual add folded in."""
from torch import Tensor, nn

from config import Config, remakes
from kernels import norm
from kernels.linear import remade
from parallel.mesh import Mesh
from parallel.tensor import replicated


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim [d]."""

    def __init__(self, cfg: Config, mesh: Mesh, key: str) -> None:
        super().__init__()
        m = cfg.model
        self.eps, self.fused, self.again = m.norm_eps, cfg.train.compile, remakes(cfg, "norm")
        self.weight = replicated(f"{key}.weight", (m.hidden,), "ones", cfg.parallel.sp)
        self.bias = replicated(f"{key}.bias", (m.hidden,), "zeros", cfg.parallel.sp) if m.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        return remade(self.of(x), self.of, x) if self.again else self.of(x)

    def of(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return norm.rms_norm(x, self.weight, self.eps, self.fused)
        return norm.layer_norm(x, self.weight, self.bias, self.eps, self.fused)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        if self.bias is None:
            y, x = norm.add_rms_norm(x, residual, self.weight, self.eps, self.fused)
        else:
            y, x = norm.add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.fused)
        return (remade(y, self.of, x) if self.again else y), x
