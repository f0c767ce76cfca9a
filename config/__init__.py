"""The config of a run: what keys there are, what they may be, and how they are read.

schema.py    every key with its type, default and meaning, and what follows from them
model_parts.py  the keys of the parts of a model
tree.py      paths of keys, kinds of parts, ranges of values
axes.py      the degrees of parallelism, and what follows from each
parse.py     plain data -> the dataclasses
earlier.py   the keys of before: their new names, and saved configs that have them
loading.py   recipes, files and the command line -> Config; Config -> YAML
optimizers.py  what each optimizer reads, keeps and supports
flat.py      mixtures of experts as numbers beside the parts: saved configs of before, config.json
function.py  which keys decide what weights compute
machine.py   whether this system will do, and how many cores it has
provenance.py  which code, command, packages and machine made something
phases.py    from which step on which keys have other values
strict.py    YAML without its surprises; ConfigError
rules.py     which values go together: validate, and suggestions near what was asked for
sizes.py     which sizes of a model follow its width
unused.py    keys that are set but have no effect
run_name.py  the run folder of a command that names none
usage.py     the text of --help
command_line.py  the parser of a script's options
values.py    combinations of values, for searches and proofs

What a reader of a config needs can be imported from here. The rules, the unused keys and the help are modules
of their own: `from config import rules`.
"""
from config.loading import (
    dotted_overrides,
    dump,
    from_tree,
    presets,
    recipe,
    recipes,
    resolve,
    saved_config,
    split_argv,
    stated_keys,
)
from config.machine import usable_cores
from config.model_parts import (
    AttentionConfig,
    BalanceLossConfig,
    CapacityConfig,
    ChannelGate,
    ChannelMixer,
    DeltaConfig,
    ExpertsConfig,
    GrowthConfig,
    HeadGate,
    KimiConfig,
    LatentConfig,
    LayerNormConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MambaConfig,
    MLPConfig,
    MTPConfig,
    MupConfig,
    NoPart,
    RMSNormConfig,
    RopeConfig,
    RouterConfig,
    Scaling,
    SharedExpertsConfig,
    ShortConvConfig,
    YarnScaling,
)
from config.optimizers import OPTIMIZERS, OptimizerSpec
from config.parse import (
    CONFIG_FOLDER,
    HORIZONS,
    build_tree,
    flatten_tree,
    merge,
    nested,
    parse_value,
    sections,
)
from config.phases import Phase, Phases, phases_of, span_of
from config.provenance import code_hash
from config.schema import (
    MAX_LOSS_SCALE,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ProfileConfig,
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
    has_experts,
    head_dim,
    is_due,
    is_permanent_step,
    kv_heads,
    layer_in_fp8,
    layer_kinds,
    layer_model,
    layer_models,
    mixture,
    modules_ahead,
    mup_score_scale,
    mup_width_ratio,
    padded_vocab,
    positive_integers,
    profiled_steps,
    recomputes,
    rest_of_ramp,
    rope_switches,
    rotated_dim,
    sequences_seen,
    steps_to_see,
    value_dim,
    vocab_size,
    with_fitting_longrope,
    with_mlps,
    with_original_context,
)
from config.strict import ConfigError, Tree, read_yaml
