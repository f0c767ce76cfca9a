"""The keys, moments and features of each optimizer. Everything that depends on optim.name follows from this
table.

A new optimizer is three files: a class in optim/, a row here, and a test. The row determines the choices of
optim.name, the rules (rules.py), the unused keys (unused.py), the class that build.py creates, the planner's
memory estimate (plan/memory.py) and the lattice of the proof (lab/proof/lattice.py).
tests/optim/test_declarations.py checks each row against what the class really does.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# name of the weight average (train.ema) in checkpoints, metrics and options
EMA = "ema"


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    implementation: "module:class" of an optim.base.Optimizer. Imported only when a run is built, because
        config/ must not import torch.
    keys: keys of optim.* that it reads and other optimizers may not (beta1, momentum, ...).
    moments: values kept per weight besides the master.
    hidden_moments: the same for hidden matrices, or None if they are treated like other weights.
    needs_whole_matrices: hidden matrices get separate buckets and are updated as whole matrices.
    supports_offload: its state can live in host memory (parallel.offload).
    supports_bf16_states: it can round masters and moments to bf16 stochastically (optim.states).
    implementation_8bit: the class that keeps its moments in 8 bits (optim.states), or "" if there is none.
    takes_sign: its update is the sign of a gradient, so noise around zero changes it by its full size.
    mup_power: under muP, the learning rate of a hidden matrix with r times the tuned width scales by
        r^-mup_power.
    why_no_mup: why it cannot be combined with muP; empty if it can.
    """
    implementation: str
    keys: tuple[str, ...]
    moments: int
    hidden_moments: int | None = None
    needs_whole_matrices: bool = False
    supports_offload: bool = False
    supports_bf16_states: bool = False
    implementation_8bit: str = ""
    takes_sign: bool = False
    mup_power: float = 1.0
    why_no_mup: str = ""

    def moments_for(self, is_hidden: bool) -> int:
        """Return the number of values per weight, for hidden matrices if is_hidden."""
        if is_hidden and self.hidden_moments is not None:
            return self.hidden_moments
        return self.moments


TRUST_RATIO = "its trust ratio sets the step of each tensor, and muP has no rule for that"

OPTIMIZERS = {
    "adamw": OptimizerSpec(
        implementation="optim.adamw:AdamW",
        keys=("beta1", "beta2", "eps"),
        moments=2,
        supports_offload=True,
        supports_bf16_states=True,
        implementation_8bit="optim.adamw_8bit:AdamW8bit",
    ),
    "muon": OptimizerSpec(  # AdamW updates everything except hidden matrices
        implementation="optim.muon:Muon",
        keys=("beta1", "beta2", "eps", "momentum", "orthogonalize"),
        moments=2,
        hidden_moments=1,
        needs_whole_matrices=True,
        mup_power=0.5,  # see optim/muon.py
    ),
    "normuon": OptimizerSpec(  # as muon
        implementation="optim.normuon:NorMuon",
        keys=("beta1", "beta2", "eps", "momentum", "orthogonalize"),
        moments=2,
        needs_whole_matrices=True,
        mup_power=0.5,
    ),
    "dion": OptimizerSpec(  # as muon
        implementation="optim.dion:Dion",
        keys=("beta1", "beta2", "eps", "momentum", "rank_fraction"),
        moments=2,
        needs_whole_matrices=True,
        mup_power=0.5,
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
    """Return the names of the optimizers for which `holds` is true, in table order."""
    return [name for name, spec in OPTIMIZERS.items() if holds(spec)]


def to_text(names: Iterable[str], conjunction: str = "and") -> str:
    """Join names: "muon, lars and sgd"."""
    *first, last = names
    return f"{', '.join(first)} {conjunction} {last}" if first else last
