"""What each optimizer reads, keeps and supports. All that depends on optim.name is decided by this table.

A new optimizer is three files: a class in optim/, a row here, and a test. The choices of optim.name, the
rules (rules.py), the unused keys (unused.py), the class that build.py makes, the bytes of the planner
(plan/memory.py) and the lattice of the proof (lab/proof/lattice.py) follow from the row.
tests/optim/test_declarations.py holds each row against what the class really does.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# The average of the weights (train.ema), by this name in checkpoints, metrics and options.
EMA = "ema"


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    implementation: "module:class" of an optim.base.Optimizer. It is imported when a run is built, because
        nothing in config/ may need torch.
    keys: the keys of optim.* that it reads and other optimizers may not (beta1, beta2, eps, momentum).
    moments: values that it keeps for each weight beside the master. moments_of_hidden: the same for hidden
        matrices, if they have a rule of their own; None: they have none.
    needs_whole_matrices: hidden matrices have buckets of their own, and are updated as whole matrices.
    supports_offload: its state can be in host memory (parallel.offload).
    supports_bf16_states: it rounds masters and moments in bf16 stochastically (optim.states).
    takes_sign: its update is the sign of a gradient, so that noise around zero changes it by its full size.
    mup_power: a hidden matrix of r times the tuned width learns r^-mup_power times as fast (muP).
    why_no_mup: why it cannot be combined with muP; "": it can.
    """
    implementation: str
    keys: tuple[str, ...]
    moments: int
    moments_of_hidden: int | None = None
    needs_whole_matrices: bool = False
    supports_offload: bool = False
    supports_bf16_states: bool = False
    takes_sign: bool = False
    mup_power: float = 1.0
    why_no_mup: str = ""

    def moments_for(self, is_hidden: bool) -> int:
        """Values for each weight; is_hidden: of a hidden matrix."""
        if is_hidden and self.moments_of_hidden is not None:
            return self.moments_of_hidden
        return self.moments


TRUST_RATIO = "its trust ratio sets the step of each tensor, and muP has no rule for that"

OPTIMIZERS = {
    "adamw": OptimizerSpec(
        implementation="optim.adamw:AdamW",
        keys=("beta1", "beta2", "eps"),
        moments=2,
        supports_offload=True,
        supports_bf16_states=True,
    ),
    "muon": OptimizerSpec(  # all but hidden matrices are updated by AdamW
        implementation="optim.muon:Muon",
        keys=("beta1", "beta2", "eps", "momentum"),
        moments=2,
        moments_of_hidden=1,
        needs_whole_matrices=True,
        mup_power=0.5,  # optim/muon.py says why
    ),
    "lamb": OptimizerSpec(
        implementation="optim.lamb:LAMB",
        keys=("beta1", "beta2", "eps"),
        moments=2,
        why_no_mup=TRUST_RATIO,
    ),
    "lars": OptimizerSpec(
        implementation="optim.lamb:LARS",
        keys=("momentum",),
        moments=1,
        why_no_mup=TRUST_RATIO,
    ),
    "lion": OptimizerSpec(
        implementation="optim.lion:Lion",
        keys=("beta1", "beta2"),
        moments=1,
        takes_sign=True,
    ),
    "sgd": OptimizerSpec(
        implementation="optim.sgd:SGD",
        keys=("momentum",),
        moments=1,
        why_no_mup="its learning rates under muP (arXiv 2203.03466, table 8) are not implemented",
    ),
}


def optimizers_that(holds: Callable[[OptimizerSpec], object]) -> list[str]:
    """The names of the optimizers for which `holds` is true, in the order of the table."""
    return [name for name, spec in OPTIMIZERS.items() if holds(spec)]


def in_words(names: Iterable[str], conjunction: str = "and") -> str:
    """"muon, lars and sgd"."""
    *first, last = names
    return f"{', '.join(first)} {conjunction} {last}" if first else last
