"""Turn recipes, files and command lines into a config.

kinds.py     the kinds of parts that a model may have; all paths of the tree
parse.py     plain data -> the dataclasses
arguments.py the command line: NAME, --config, --depth, settings
dial.py      a recipe at another depth
loading.py   recipes, files and the command line -> Config; Config -> YAML
earlier.py   renamed keys, and saved configs that still have the old ones
flat.py      mixtures of experts as flat keys: older saved configs, config.json
phases.py    keys that change at some step of the run
rules.py     which values go together: validate
suggestions.py  nearby values that pass the rules
layout.py    the layout of a job that only computes
schedules.py the pipeline schedules of a job
unused.py    keys that are set but have no effect
function.py  which keys decide what weights compute
sizes.py     which sizes of a model scale with its width
run_name.py  the default run folder of a command
grid.py      one command at every combination of some keys' values
usage.py     the text of --help

Import what a program needs from here. The rules, the unused keys and the help are imported as modules:
`from config.reading import rules`.
"""
from config.reading.arguments import resolve, split_argv
from config.reading.loading import (
    dotted_overrides,
    dump,
    from_tree,
    presets,
    recipe,
    recipes,
    saved_config,
    stated_keys,
)
from config.reading.parse import (
    CONFIG_FOLDER,
    HORIZONS,
    build_tree,
    defaults,
    flatten_tree,
    merge,
    nested,
    parse_value,
    sections,
)
from config.reading.phases import Phase, Phases, get_phases, shuffle_span
