"""Recipes, files and command lines become a config.

kinds.py     the kinds of parts that a model may have; all paths of the tree
parse.py     plain data -> the dataclasses
loading.py   recipes, files and the command line -> Config; Config -> YAML
earlier.py   the keys of before: their new names, and saved configs that have them
flat.py      mixtures of experts as numbers beside the parts: saved configs of before, config.json
phases.py    from which step on which keys have other values
rules.py     which values go together: validate
suggestions.py  values near what was asked for
layout.py    the layout of a job that trains nothing
schedules.py the pipeline schedules of a job
unused.py    keys that are set but have no effect
function.py  which keys decide what weights compute
sizes.py     which sizes of a model follow its width
run_name.py  the run folder of a command that names none
usage.py     the text of --help

What a program needs can be imported from here. The rules, the unused keys and the help are modules of their
own: `from config.reading import rules`.
"""
from config.reading.loading import (
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
from config.reading.phases import Phase, Phases, phases_of, span_of
