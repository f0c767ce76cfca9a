"""The feed-forward half of a block: SwiGLU (gate and up as one matrix product), or another of ACTIVATIONS."""
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from config import ChannelMixer, Config, recomputes
from config.tree import Count
from kernels.activations import ACTIVATIONS
from kernels.grad import read_weight
from kernels.linear import recompute_output
from model.init import residual_std
from model.precision import fp8_of_layer, fp8_reader_of_layer
from parallel.tensor.layers import ColumnLinear, RowLinear, replicated_vector
from parallel.topology.mesh import Mesh

ExpertActivationName = Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "gelu_erf", "relu2"]
ActivationName = Literal[ExpertActivationName, "xielu"]  # which learns two numbers of each MLP


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ChannelMixer):
    """The MLP of a block."""
    kind: Literal["mlp"] = "mlp"
    width: Count = 352  # inner width
    activation: ActivationName = "swiglu"  # gelu, geglu: with the tanh approximation (GPT-2, Gemma);
    #   clamped_swiglu: of gpt-oss; gelu_erf: GELU without the approximation; relu2: squared ReLU (Nemotron);
    #   xielu: of Apertus, learns two numbers
    bias: bool = False  # biases of its linear layers (GPT-2)

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        return {"mlp.width": self.width}


class MLP(nn.Module):
    """x [b, s/cp, d] (sp: [b, s/cp/tp, d]) -> the same.

    name, width: of a mixture's shared experts; else of the block's MLP.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int, name: str = "mlp",
                 width: int | None = None) -> None:
        super().__init__()
        model = cfg.model
        key = f"layers.{layer}.{name}"
        width = width or model.mlp.width
        activation = ACTIVATIONS[model.mlp.activation]
        self.activation = partial(activation.function, compiled=cfg.train.compile)
        if model.mlp.activation == "swiglu" and not model.mlp.bias:  # a bias sums gate_up's gradient
            self.activation = partial(self.activation, reader=fp8_reader_of_layer(cfg, layer))
        self.recompute_activation = recomputes(cfg, "act")
        self.learned = activation.learned
        for name in self.learned:  # each tp rank has some of the features that they act on
            setattr(self, name, replicated_vector(f"{key}.{name}", 1, name, is_partial=True))

        names = ("gate", "up") if activation.is_gated else ("up",)
        outputs = {f"{key}.{name}": width for name in names}
        fp8 = fp8_of_layer(cfg, layer)
        self.gate_up = ColumnLinear(
            mesh,
            outputs,
            model.hidden,
            std=model.init_std,
            bias=model.mlp.bias,
            sp=cfg.parallel.sp,
            async_tp=cfg.parallel.async_tp,
            fp8=fp8,
        )
        self.down = RowLinear(
            mesh,
            f"{key}.down",
            width,
            model.hidden,
            std=residual_std(model),
            bias=model.mlp.bias,
            sp=cfg.parallel.sp,
            async_tp=cfg.parallel.async_tp,
            fp8=fp8,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden_activation(x))

    def hidden_activation(self, x: Tensor) -> Tensor:
        """x -> the input of the down-projection [b, s, f/tp]."""
        gate_up = self.gate_up(x)  # [b, s, 2f/tp]
        numbers = [read_weight(getattr(self, name)) for name in self.learned]
        activated = self.activation(gate_up, *numbers)
        if self.recompute_activation:
            return recompute_output(activated, self.activation, gate_up, *numbers)
        return activated
