"""What all parts of a model have in common. The keys of each part stand beside its module, in model/.

A mixer of tokens, a mixer of channels and a norm make a block; config/reading/kinds.py lists which there are.
"""
from dataclasses import dataclass
from typing import Literal, NamedTuple

from config.tree import Count, NotNegative

# ---- parts of a block --------------------------------------------------------------------------------------


class HeadShape(NamedTuple):
    """The heads of softmax attention. rotated: channels of a query or key head that RoPE rotates."""
    head_dim: int  # channels of a query or key head
    value_dim: int  # channels of a value head
    kv_heads: int
    rotated: int


class TokenMixer:
    """What mixes the tokens of a sequence. Beside its keys it says, for rules and planner:

    has_softmax: a token sees all tokens before it; in the other mixers it sees a state.
    """
    has_softmax = False

    def heads_over_tp(self) -> dict[str, int]:
        """{key of the mixer: its number} of the heads that tp divides, and of what several heads share."""
        return {}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        """{key of the model that sets the size: features of a matrix that tp divides}."""
        return {}

    def head_shape(self, hidden: int) -> HeadShape:
        """Of a mixer with softmax."""
        raise TypeError(f"{type(self).__name__} has no softmax attention")


class ChannelMixer:
    """What mixes the channels of a token."""

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        """{key of the model that sets the size: features of a matrix that tp divides}."""
        return {}


@dataclass(frozen=True, kw_only=True)
class NoPart(TokenMixer, ChannelMixer):
    """A block without this part: with an MLP alone, or a mixer of tokens alone (Nemotron-H, arXiv
    2504.03624)."""
    kind: Literal["none"] = "none"


NormPlace = Literal["before", "after", "around"]


class NormConfig:
    """A norm around the mixer and the MLP of every block, and after the last block."""
    eps: float  # added to the mean square, or to the variance
    place: NormPlace


# ---- around the blocks -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (arXiv 2412.19437)."""
    modules: Count = 1  # after the last block; each predicts one token further ahead
    weight: NotNegative = 0.3  # of their mean loss, which is added to the next-token loss


@dataclass(frozen=True, kw_only=True)
class MupConfig:
    """muP (arXiv 2203.03466): MLP, heads and ranks grow with the width."""
    base: Count  # width of the model whose learning rates and init_std are tuned
    head_dim: Count | None = None  # head_dim of the tuned model; attention scores change as 1 / head_dim from
    #   there; none: head_dim is the same as in the tuned model
