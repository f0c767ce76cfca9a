"""The runs that faults are injected into: a tiny model, under several layouts."""

from dataclasses import dataclass, replace

STEPS = 12
SAVE_EVERY = 5  # so there are checkpoints at 5, 10 and 12
SAVES = (5, 10, STEPS)
MEMORY_EVERY = 2
MEMORY_SAVES = (2, 4, 6, 8)  # a save to disk replaces one in memory
EVALUATE_EVERY = 4
MODEL = (
    "--model.layers", "2", "--model.hidden", "32", "--model.mixer.heads", "4", "--model.mixer.kv_heads", "2",
    "--model.mlp.width", "48", "--model.dropout", "0.1",
)
MIXTURE = ("--model.mlp", "experts", "--model.mlp.experts", "4", "--model.mlp.top_k", "2")
RUN = (
    "--train.steps", str(STEPS), "--train.seq_len", "16", "--train.micro_batch", "1",
    "--train.global_batch", "4", "--train.threads", "1", "--optim.warmup", "2",
    "--eval.every", str(EVALUATE_EVERY), "--eval.batches", "1", "--eval.sample", "0", "--log.every", "1",
    "--checkpoint.every", str(SAVE_EVERY), "--checkpoint.keep", "2",
)


@dataclass(frozen=True)
class RunLayout:
    """How a run is launched.

    words: arguments of train.py other than those of the model.
    has_replicas: whether the last rank holds a replica of what the first gradient of another rank belongs
        to, so that comparing them finds a wrong number.
    in_memory: whether the run also keeps checkpoints in memory.
    nproc: of scripts.launch, by default the number of ranks.
    """

    name: str
    world: int
    words: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    dtype: str = "fp32"
    is_async: bool = False
    has_replicas: bool = False
    in_memory: bool = False
    nproc: str = ""

    @property
    def last_rank(self) -> int:
        return self.world - 1

    def arguments(self) -> list[str]:
        """Return the arguments of train.py, except those that name the run and its data."""
        saving = ("--checkpoint.async_save", "true" if self.is_async else "false")
        return ["llama3-tiny", *MODEL, *self.model, *RUN, *self.words, "--train.dtype", self.dtype, *saving]


# scripts.launch starts two ranks; one rank is `python train.py`
LAYOUTS = (
    RunLayout("one", 1),
    RunLayout("one-async", 1, is_async=True, dtype="bf16"),
    RunLayout("dp2", 2, ("--parallel.zero", "0"), has_replicas=True),
    RunLayout("zero1-async", 2, ("--parallel.zero", "1"), dtype="bf16", is_async=True),
    RunLayout("tp2-async", 2, ("--parallel.tp", "2"), is_async=True),
    RunLayout("pp2", 2, ("--parallel.pp", "2")),
    RunLayout(
        "zero1-memory",
        2,
        ("--parallel.zero", "1", "--checkpoint.memory_every", str(MEMORY_EVERY)),
        in_memory=True,
    ),
    RunLayout("ep2", 2, ("--parallel.ep", "2", "--parallel.zero", "1"), model=MIXTURE),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def in_fp64(layout: RunLayout) -> RunLayout:
    """Return the layout in fp64, in which another layout must give the same numbers."""
    return replace(layout, name=f"{layout.name} in fp64", dtype="fp64")


def elastic(layout: RunLayout) -> RunLayout:
    """Return the layout under a launcher that continues with one rank when the other is lost, in fp64."""
    return replace(in_fp64(layout), name=f"{layout.name} on one rank or two", nproc=f"1:{layout.world}")


def moved_to(layout: RunLayout, other: RunLayout) -> RunLayout:
    """Return the model of `layout` on the ranks of `other`, in fp64."""
    return replace(in_fp64(other), name=f"{layout.name} on {other.name}", model=layout.model)
