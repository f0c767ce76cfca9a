"""The pipeline stages of a rank, and the shape of what travels between them."""
from config import Config, config_of_stage
from model.precision import DTYPES
from model.sharding import set_rates
from model.shared_keys import widths_between_stages
from model.split import split_layers
from model.transformer import PipelineStage
from parallel.pipeline.executor import HiddenShape
from parallel.topology.mesh import Mesh


def get_hidden_shape(cfg: Config, stages: int) -> HiddenShape:
    """Return the shape of the tensors sent between the stages."""
    return HiddenShape(
        widths=widths_between_stages(cfg, split_layers(cfg, stages)),
        dtype=DTYPES[cfg.train.dtype],
        sequence_shards=cfg.parallel.tp if cfg.parallel.sp else 1,
    )


def make_stages(cfg: Config, mesh: Mesh, rank_of_stage: tuple[int, ...]) -> dict[int, PipelineStage]:
    """This rank's stages, without storage. rank_of_stage: the rank of each stage."""
    layers = split_layers(cfg, len(rank_of_stage))
    ends_are_apart = rank_of_stage[0] != rank_of_stage[-1]
    stages: dict[int, PipelineStage] = {}
    for number, rank in enumerate(rank_of_stage):
        if rank != mesh.pp.index:
            continue
        first, end = layers[number]
        embedding = stages[0].embedding if 0 in stages else None
        table = None if embedding is None else embedding.weight
        stage = PipelineStage(
            config_of_stage(cfg, number),
            mesh,
            first,
            end,
            table=table,
            ends_are_apart=ends_are_apart,
        )
        set_rates(cfg, stage)
        stages[number] = stage
    return stages
