"""The options of train.py that show something instead of training: --list, --help and --dry-run."""
import os
import re
import sys
from pathlib import Path

from config import Config, reading
from config.reading import from_tree, recipe, resolve, split_argv, usage
from config.terminal import output_width
from plan.count import table

# python -m scripts.dry_run from any folder; the first argument is the code's folder.
DRY_RUN = (
    "import runpy, sys; sys.path[0] = sys.argv.pop(1); "
    "runpy.run_module('scripts.dry_run', run_name='__main__', alter_sys=True)"
)


def shows(argv: list[str], code: Path) -> bool:
    """Handle an option that shows something; return whether there was one. code: the code's folder."""
    if "--list" in argv:
        recipes = {name: from_tree(recipe(name), name) for name in reading.recipes()}
        print(table(dict(sorted(recipes.items(), key=place_in_list)), output_width()))
        return True
    if "--dry-run" in argv:  # a separate process: it loads Triton before the kernels
        os.execv(sys.executable, [sys.executable, "-c", DRY_RUN, str(code), *argv])
    name, file, words = split_argv(argv)
    for index, word in enumerate(words):
        if word in ("--help", "-h"):
            wanted = words[index + 1:]
            cfg = resolve(name, file, words[:index])
            print(usage.help_text(cfg, wanted[0] if wanted else ""))
            return True
    return False


def place_in_list(row: tuple[str, Config]) -> tuple[int, list[tuple[int, str]]]:
    """Return where --list has a recipe: the default, those that train anywhere, the published ones by name.

    Numbers in names count as numbers. A model without model.vocab takes it from the data, and is small.
    """
    name, cfg = row
    group = 0 if name == "quickstart" else 1 if cfg.model.vocab is None else 2
    words = re.findall(r"[0-9.]+|[^0-9.]+", name)
    return group, [(round(1000 * float(word)), "") if word[0].isdigit() else (0, word) for word in words]
