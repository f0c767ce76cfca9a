"""The keys of a run, and what follows from them. Nothing here needs torch.

schema.py    every key with its type, default and meaning, but for those of the model's parts
rule.py      what a rule about several keys says of one config
tree.py      paths of keys, ranges of values
pattern.py   kinds of blocks, and the order in which a model has them
axes.py      the degrees of parallelism, and what follows from each
optimizers.py  what each optimizer reads, keeps and supports
strict.py    YAML without its surprises; ConfigError
machine.py   whether this system will do, and how many cores it has
provenance.py  which code, command, packages and machine made something
command_line.py  the parser of a script's options
plots.py     what all pictures share: figure, style, file
values.py    combinations of values, for searches and proofs
reading/     recipes, files and command lines become a config, by rules; it knows the parts of a model

What a reader of a config needs can be imported from here.
"""
from config.machine import usable_cores
from config.optimizers import OPTIMIZERS, OptimizerSpec
from config.provenance import code_hash
from config.schema import (
    MAX_LOSS_SCALE,
    ChannelMixer,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    HeadShape,
    LogConfig,
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
    sequences_seen,
    steps_to_see,
    value_dim,
    vocab_size,
)
from config.strict import ConfigError, Tree, read_yaml
