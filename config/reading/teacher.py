"""The config of a teacher (distill.teacher) under the layout of a run, from the model of its weights."""
from dataclasses import replace

from config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DistillConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    fp8_recipe,
    vocab_size,
)
from config.reading.function import differences
from config.reading.layout import first_broken
from config.reading.rules import RULES_OF_SEQUENCES, RULES_OF_WEIGHTS
from model.router import mixture

FROZEN = "*: lr_factor 0"  # of optim.groups
OF_ONE_STAGE = {"pp": 1, "vpp": None, "schedule": "1f1b", "stages": None}
ONLY_COMPUTES = {  # what belongs to a backward, or loses bits of weights
    "recompute": "none",
    "recompute_stages": None,
    "offload": "none",
    "compress": "none",
    "compress_weights": "none",
    "ep_bound": None,  # rows over it would need another step
}
OF_EXPERTS = ("ep", "etp", "ep_chunks", "compress_tokens")


def teacher_config(cfg: Config, source: ModelConfig, where: object, world: int) -> Config:
    """Return the teacher's config: one stage, frozen, in 16 bits or more, laid out like the run otherwise.

    source: the model of the weights, which are at `where`. Raises ConfigError if it has another vocabulary,
    or if `world` ranks cannot hold it or run it on the sequences of the run.
    """
    check_vocab(cfg, source, where)
    model = replace(source, vocab_multiple=cfg.model.vocab_multiple, mtp=None, dropout=0.0)
    undivided = {key: getattr(ParallelConfig, key) for key in OF_EXPERTS} if mixture(model) is None else {}
    train = cfg.train
    if fp8_recipe(train) is not None:
        dtype = "bf16" if train.dtype == "fp8" else train.dtype
        train = replace(train, dtype=dtype, fp8=None, fp8_block=None)
    changes = ",".join(differences(source, model))
    teacher = replace(
        cfg,
        model=model,
        parallel=replace(cfg.parallel, **OF_ONE_STAGE, **ONLY_COMPUTES, **undivided),
        train=train,
        checkpoint=CheckpointConfig(init_changes=changes or None, timeout_s=cfg.checkpoint.timeout_s),
        optim=OptimConfig(groups=FROZEN),
        distill=DistillConfig(),
    )
    problem = first_broken((*RULES_OF_WEIGHTS, *RULES_OF_SEQUENCES), teacher, world // cfg.parallel.pp)
    if problem is not None:
        raise ConfigError(f"distill.teacher: {where} under the layout of the run: {problem}")
    return teacher


def check_vocab(cfg: Config, source: ModelConfig, where: object) -> None:
    """Raise ConfigError if a teacher has more or fewer token ids than the model of a run."""
    theirs, own = vocab_size(source), vocab_size(cfg.model)
    if theirs == own:
        return
    remedy = "choose a teacher with the same tokenizer"
    if theirs > own:
        remedy += f", or if it has that, set --model.vocab {theirs}"
    raise ConfigError(
        f"distill.teacher: {where} has {theirs:,} token ids, and model.vocab is {own:,}; {remedy}"
    )
