"""Layers that tensor parallelism splits (arXiv 1909.08053): column- and row-split linears over mesh.tp.

A column layer may hold several projections (q, k, v; gate, up) as one GEMM: each is split on its own, so the stored keys
stay the unfused canonical names. With one tp rank every piece is the whole tensor.
"""
from torch import Tensor, nn

from kernels.linear import linear
from parallel.boxes import Box
from parallel.comm import Group
from parallel.mesh import Mesh
from parallel.spec import Spec, parameter


def rows(key: str, shape: tuple[int, ...], group: Group) -> Box:
    """This rank's share of dim 0."""
    share = shape[0] // group.size
    return Box(key, shape, (group.index * share, *(0,) * (len(shape) - 1)), (share, *shape[1:]))


def columns(key: str, shape: tuple[int, int], group: Group) -> Box:
    """This rank's share of dim 1."""
    share = shape[1] // group.size
    return Box(key, shape, (0, group.index * share), (shape[0], share))


class ColumnLinear(nn.Module):
    """[b, s, n] -> [b, s, sum(outs)/tp]: output features split. outs: {key: features} of the merged projections."""

    def __init__(self, mesh: Mesh, outs: dict[str, int], n: int, std: float, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(Spec(tuple(rows(f"{k}.weight", (m, n), mesh.tp) for k, m in outs.items()), "normal", std))
        self.bias = parameter(Spec(tuple(rows(f"{k}.bias", (m,), mesh.tp) for k, m in outs.items()), "zeros",
                                   decay=False)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """[b, s, n/tp] -> [b, s, m]: input features split, the partial products summed over tp."""

    def __init__(self, mesh: Mesh, key: str, n: int, m: int, std: float, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(Spec((columns(f"{key}.weight", (m, n), mesh.tp),), "normal", std))
        self.bias = parameter(Spec((Box.whole(f"{key}.bias", (m,)),), "zeros", decay=False)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
