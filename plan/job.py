"""One rank of a run, and its device, as seen by the planner."""
from dataclasses import dataclass, replace
from typing import NamedTuple

from config import Config, ConfigError, ModelConfig, config_of_stage, read_yaml
from config.reading import CONFIG_FOLDER
from config.reading.schedules import plan_pipeline
from config.reading.teacher import teacher_config
from model.describe import PartDescription, describe_stage
from model.router import mixture
from model.sharding import parallel_dims
from model.split import split_layers
from parallel.pipeline.schedule import Schedule
from parallel.topology.dims import GROUP_AXES, ParallelDims

UNBOUNDED_MEMORY = 2.0**60  # bytes: for forecasts of time, which ignore memory


class RankDevice(NamedTuple):
    """The device to plan for. `gpu` is torch's name, or "" for CPUs; `memory` is the bytes of a GPU."""

    gpu: str = ""
    memory: float = UNBOUNDED_MEMORY


def peak_flops_of_gpu(name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a GPU in `dtype` (a train.dtype), or None if unknown.

    name: torch's; the longest name in configs/clusters.yaml that it contains counts.
    """
    gpus = read_yaml(CONFIG_FOLDER / "clusters.yaml")["gpus"]
    matching = [gpu for gpu in gpus if gpu in name.lower()]
    if not matching:
        return None
    teraflops = gpus[max(matching, key=len)].get(dtype)
    return None if teraflops is None else 1e12 * teraflops


@dataclass(frozen=True)
class Job:
    """schedule: of a step. cuts: [(first, last)] blocks of each stage (model/split.py). parts: of each stage,
    without storage, in forward order. teacher: the config of distill.teacher (config/reading/teacher.py)."""
    cfg: Config
    layout: ParallelDims
    rank: int
    schedule: Schedule
    cuts: list[tuple[int, int]]
    parts: list[tuple[PartDescription, ...]]
    teacher: Config | None = None

    @property
    def pp(self) -> int:
        """Position in the pipeline."""
        return self.layout.coordinates(self.rank)["pp"]

    def of_pipeline_ranks(self) -> list["Job"]:
        """Return the job as seen by one rank at each position of the pipeline."""
        return [self.at_place(place) for place in range(self.layout.pp)]

    def at_place(self, place: int) -> "Job":
        """Return the job as seen by the first rank at a position of the pipeline."""
        ranks_of_place = self.layout.world // self.layout.pp
        return replace(self, rank=place * ranks_of_place)

    def stages(self) -> list[int]:
        """Return the stages of this rank."""
        return self.stages_of_places()[self.pp]

    def stages_of_places(self) -> list[list[int]]:
        """Return the stages at each position of the pipeline."""
        found: list[list[int]] = [[] for _ in range(self.layout.pp)]
        for stage, place in enumerate(self.schedule.rank_of_stage):
            found[place].append(stage)
        return found

    def shards(self, expert: bool = False) -> int:
        """Return how many ranks share a bucket under ZeRO: those of mesh.fsdp, or of mesh.expert_fsdp."""
        return self.layout.group_size(*sharding_axes(expert))

    def place(self, expert: bool = False) -> int:
        """Return this rank's index among them."""
        return self.layout.place(self.rank, *sharding_axes(expert))


def has_row_bound(job: Job) -> bool:
    """Return whether a step may be computed again since rows are over parallel.ep_bound."""
    parallel = job.cfg.parallel
    return parallel.ep_bound is not None and parallel.ep * parallel.etp > 1


def sharding_axes(expert: bool) -> tuple[str, ...]:
    return GROUP_AXES["expert_fsdp" if expert else "fsdp"]


def check_routing(cfg: Config) -> None:
    """Raise ConfigError if the plan would depend on the decisions of routers."""
    experts = mixture(cfg.model)
    capacity = experts.capacity if experts else None
    if capacity is not None and capacity.factor < 1 and not capacity.pad:
        raise ConfigError(
            f"model.mlp.capacity.factor: {capacity.factor} is below 1, and experts drop tokens even of equal "
            "shares, which a plan assumes; set model.mlp.capacity.pad true, under which the number of rows "
            "is known, or use 1 or more"
        )


def make_rank_job(
    cfg: Config, world: int, rank: int, advise: bool = True, teacher: ModelConfig | None = None
) -> Job:
    """Plan one rank of a config on `world` ranks.

    `advise` lets an error suggest layouts that work. teacher: the model of distill.teacher, which is not
    counted without. Raises ConfigError if train.py refuses the run.
    """
    schedule = plan_pipeline(cfg, world, advise)
    cuts = split_layers(cfg, schedule.n_stages)
    ends_are_apart = schedule.rank_of_stage[0] != schedule.rank_of_stage[-1]
    parts: list[tuple[PartDescription, ...]] = []
    for number, (first, last) in enumerate(cuts):
        stage = describe_stage(config_of_stage(cfg, number), first, last, ends_are_apart)
        parts.append(stage.parts)
    laid_out = None if teacher is None else teacher_config(cfg, teacher, cfg.distill.teacher, world)
    return Job(cfg, parallel_dims(cfg, world), rank, schedule, cuts, parts, laid_out)
