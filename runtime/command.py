"""The options of train.py that show something instead of training: --list, --help and --dry-run."""
import os
import sys
from pathlib import Path

from config import reading
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
        print(table(recipes, output_width()))
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
