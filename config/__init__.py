"""Config keys of a run and plain functions of them. Nothing here imports torch.

schema.py    every key with its type, default and meaning, except keys of model parts
rule.py      a rule about several keys, evaluated for one config
tree.py      key paths and value ranges
pattern.py   kinds of blocks and their order in a model
axes.py      degrees of parallelism and what depends on each
optimizers.py  what each optimizer reads, keeps and supports
site.py      what all jobs of a cluster have in common
strict.py    strict YAML; ConfigError
machine.py   platform check and number of cores
provenance.py  code, command, packages and machine behind an artifact
command_line.py  the argument parser of scripts
plots.py     style and files of all figures
values.py    combinations of values for searches and proofs
reading/     recipes, files and command lines -> config, checked by rules; knows the model parts

Import what you need to read a config from here.
"""
from config.machine import usable_cores
from config.optimizers import OPTIMIZERS, OptimizerSpec
from config.provenance import code_hash
from config.schema import (
    FIXED_SIDES,
    FP8_SIDES,
    MAX_LOSS_SCALE,
    ChannelMixer,
    CheckpointConfig,
    Config,
    DataConfig,
    DistillConfig,
    EvalConfig,
    HeadShape,
    LogConfig,
    LoraConfig,
    ModelConfig,
    MTPConfig,
    MupConfig,
    NoPart,
    NormConfig,
    NormPlace,
    OptimConfig,
    ParallelConfig,
    ProfileConfig,
    TokenMixer,
    TrainConfig,
    as_number,
    comma_separated,
    compression_block,
    config_of_layer,
    config_of_stage,
    divisors,
    fp8_block,
    fp8_recipe,
    global_batch_at,
    global_batch_sizes,
    head_dim,
    head_shape,
    is_due,
    is_permanent_step,
    kv_heads,
    layer_in_fp8,
    layer_kinds,
    layer_model,
    layer_models,
    modules_ahead,
    mup_score_scale,
    mup_width_ratio,
    padded_vocab,
    positive_integers,
    profiled_steps,
    recomputes,
    rest_of_ramp,
    rotated_dim,
    rounds_gradients,
    sequences_seen,
    steps_to_see,
    value_dim,
    vocab_size,
)
from config.strict import ConfigError, Tree, read_yaml
