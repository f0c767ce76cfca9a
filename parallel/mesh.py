"""One rank's view of the layout: a Group for every axis (and product of axes) along which anything is exchanged."""
from dataclasses import dataclass

from parallel.comm import Group
from parallel.layout import Layout

SPANS = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("dp",), "dp_rep": ("dp_rep",),
         "data": ("dp_rep", "dp"),  # ranks that read different samples
         "loss": ("dp_rep", "dp", "cp"),  # ranks that see different tokens: counts and gradients are summed here
         "world": ("pp", "dp_rep", "dp", "cp", "tp")}


@dataclass(frozen=True)
class Mesh:
    """mesh.tp, mesh.cp, mesh.pp, mesh.dp, mesh.dp_rep, mesh.data, mesh.loss, mesh.world are Groups."""
    layout: Layout
    rank: int
    tp: Group
    cp: Group
    pp: Group
    dp: Group
    dp_rep: Group
    data: Group
    loss: Group
    world: Group

    @staticmethod
    def single() -> "Mesh":
        """One process: every group has one rank and every exchange is the identity. The oracle of all parallel tests."""
        return Mesh(Layout(1), 0, **{name: Group(name) for name in SPANS})
