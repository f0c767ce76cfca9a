"""The feed-forward half of a block: SwiGLU (gate and up as one GEMM) or GELU."""
import math
from functools import partial

from torch import Tensor, nn

from config import Config, remakes
from kernels.linear import remade
from kernels.swiglu import gelu, swiglu
from model.precision import of_layer
from parallel.mesh import Mesh
from parallel.tensor import ColumnLinear, RowLinear


class MLP(nn.Module):
    """name, width: of a mixture's shared experts; else the block's MLP."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int, name: str = "mlp", width: int | None = None) -> None:
        super().__init__()
        m, key = cfg.model, f"layers.{layer}.{name}"
        width, fp8 = width or m.ffn, of_layer(cfg, layer)
        self.fused, self.again = cfg.train.compile, remakes(cfg, "act")
        self.activation = swiglu if m.activation == "swiglu" else gelu
        names = ("gate", "up") if m.activation == "swiglu" else ("up",)
        self.inner = ColumnLinear(mesh, {f"{key}.{n}": width for n in names}, m.hidden, m.init_std, m.bias, cfg.parallel.sp, fp8)
        self.down = RowLinear(mesh, f"{key}.down", width, m.hidden, m.init_std / math.sqrt(2 * m.layers), m.bias, cfg.parallel.sp, fp8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.active(x))  # [b, s, d] -> [b, s, 2f/tp] -> [b, s, f/tp] -> [b, s, d]

    def active(self, x: Tensor) -> Tensor:
        """All but the last product."""
        inner = self.inner(x)
        h = self.activation(inner, self.fused)
        return remade(h, partial(self.activation, fused=self.fused), inner) if self.again else h
