"""One rank's view of the layout: a Group for every axis (and product of axes) along which anything is exchanged."""
from collections import Counter
from dataclasses import dataclass

from parallel.comm import Group, World
from parallel.layout import SPANS, Layout


@dataclass(frozen=True)
class Mesh:
    """mesh.tp, .cp, .pp, .dp_rep, .data, .shard, .loss, .model, .stage, .world, .tokens, .experts, .eshard, .eloss, .emodel are Groups;
    tied: the pipeline's two ends (None on the ranks between them)."""
    layout: Layout
    rank: int
    tp: Group
    cp: Group
    pp: Group
    dp_rep: Group
    data: Group
    shard: Group
    loss: Group
    model: Group
    stage: Group
    world: Group
    tokens: Group
    experts: Group
    eshard: Group
    eloss: Group
    emodel: Group
    tied: Group | None

    @staticmethod
    def single() -> "Mesh":
        """One process: every group has one rank and every exchange is the identity. The oracle of all parallel tests."""
        return Mesh.bind(Layout(1), World())

    @staticmethod
    def bind(layout: Layout, world: World) -> "Mesh":
        """Collective: every rank of the world calls it with the same layout. One ledger counts all groups."""
        ledger: Counter = Counter()
        groups = {name: world.groups(name, layout.groups(*axes), ledger, " x ".join(axes)) for name, axes in SPANS.items()}
        return Mesh(layout, world.rank, **groups, tied=world.groups("tied", layout.ends(), ledger))

    @property
    def ledger(self) -> Counter:
        return self.world.ledger
