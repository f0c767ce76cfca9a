"""The feed-forward half of a block: SwiGLU with gate and up as one matrix product, or another of
ACTIVATIONS."""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from config import ChannelMixer, Config, recomputes
from config.rule import Rule
from config.tree import Count, Positive
from kernels.activations import get_activation
from kernels.grad import read_weight
from kernels.linear import recompute_output
from model.init import residual_std
from model.precision import fp8_of_layer
from parallel.tensor.layers import ColumnLinear, RowLinear, replicated_vector
from parallel.topology.mesh import Mesh

ExpertActivationName = Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "gelu_erf", "relu2"]
ActivationName = Literal[ExpertActivationName, "xielu"]  # xielu learns two numbers per MLP


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ChannelMixer):
    """The MLP of a block."""
    kind: Literal["mlp"] = "mlp"
    width: Count = 352  # inner width
    activation: ActivationName = "swiglu"  # gelu, geglu: with the tanh approximation (GPT-2, Gemma);
    #   clamped_swiglu: of gpt-oss; gelu_erf: GELU without the approximation; relu2: squared ReLU (Nemotron);
    #   xielu: of Apertus, learns two numbers
    bias: bool = False  # biases of its linear layers (GPT-2)
    limit: Positive | None = None  # of swiglu: silu(gate) is at most this, and up within plus or minus this
    #   (Step 3.7)

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        return {"mlp.width": self.width}

    def rules(self, cfg: Config) -> Iterator[Rule]:
        yield limit_rule("limit", self.limit, self.activation)


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """Experts that process every token (arXiv 2401.06066), computed as one MLP of their total width."""
    experts: Count = 1  # number of shared experts, each as wide as a routed one
    gate: bool = False  # multiply their output by sigmoid(x w) (Qwen2-MoE)
    limit: Positive | None = None  # as that of an MLP


def limit_rule(key: str, limit: float | None, activation: str) -> Rule:
    return Rule(
        limit is None or activation == "swiglu",
        f"model.mlp.{key}: bounds swiglu, and model.mlp.activation is {activation}; leave it out")


class MLP(nn.Module):
    """x [b, s/cp, d] (sp: [b, s/cp/tp, d]) -> the same.

    It is the MLP of the block, or a mixture's shared experts if `shared` is set.
    """

    def __init__(
        self, cfg: Config, mesh: Mesh, layer: int, shared: SharedExpertsConfig | None = None
    ) -> None:
        super().__init__()
        model = cfg.model
        key = f"layers.{layer}.mlp.shared" if shared else f"layers.{layer}.mlp"
        width = model.mlp.shared_width if shared else model.mlp.width
        limit = (shared or model.mlp).limit
        activation = get_activation(model.mlp.activation, limit)
        self.activation = partial(activation.function, compiled=cfg.train.compile)
        self.recompute_activation = recomputes(cfg, "act")
        self.learned = activation.learned
        for name in self.learned:  # each tp rank applies them to its own features
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
        """Return the input of the down-projection [b, s, f/tp], f: model.mlp.width."""
        gate_up = self.gate_up(x)  # [b, s, 2f/tp] if gated, else [b, s, f/tp]
        numbers = [read_weight(getattr(self, name)) for name in self.learned]
        activated = self.activation(gate_up, *numbers)
        if self.recompute_activation:
            return recompute_output(activated, self.activation, gate_up, *numbers)
        return activated
