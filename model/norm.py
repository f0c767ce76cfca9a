"""RMSNorm or LayerNorm, as the config says, with the addition of the residual in the same kernel."""
from torch import Tensor, nn

from config import Config, recomputes
from kernels import norm
from kernels.linear import recompute_output
from parallel.tensor.layers import replicated_vector


class Norm(nn.Module):
    """A norm over the last dim [d]. readers: fp8 linears beside it, to which it hands what they need."""

    def __init__(self, cfg: Config, key: str, readers: norm.Fp8Readers = norm.NO_READERS) -> None:
        super().__init__()
        hidden = cfg.model.hidden
        sp = cfg.parallel.sp
        self.eps = cfg.model.norm.eps
        self.compiled = cfg.train.compile
        self.readers = readers
        self.recompute = recomputes(cfg, "norm")
        self.weight = replicated_vector(f"{key}.weight", hidden, "norm", is_partial=sp)
        self.bias = None
        if cfg.model.norm.kind == "layernorm":
            self.bias = replicated_vector(f"{key}.bias", hidden, "bias", is_partial=sp)

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalize(x)
        return recompute_output(y, self.normalize, x) if self.recompute else y

    def normalize(self, x: Tensor) -> Tensor:
        settings = (self.eps, self.compiled, self.readers)
        if self.bias is None:
            return norm.rms_norm(x, self.weight, *settings)
        return norm.layer_norm(x, self.weight, self.bias, *settings)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x). One pass, either way."""
        settings = (self.eps, self.compiled, self.readers)
        if self.bias is None:
            y, total = norm.add_rms_norm(x, residual, self.weight, *settings)
        else:
            y, total = norm.add_layer_norm(x, residual, self.weight, self.bias, *settings)
        if self.recompute:
            y = recompute_output(y, self.normalize, total)
        return y, total


def add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """x + residual, where no norm adds them; x where there is no residual."""
    return x if residual is None else x + residual
