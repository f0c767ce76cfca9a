"""Bevatron where it is installed: one package, with the folders of the checkout inside.

    bevatron train llama3-tiny            what `python train.py llama3-tiny` is in a clone
    python -m bevatron generate RUN       the same without the script

The code names its modules as in the clone: `import data`, `from model.block import Block`. A process that is
started by one of these commands finds them, and no other process does: `import bevatron` changes nothing. In
a notebook, `bevatron.use()` makes them importable.
"""
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# the folder of config/, model/, train.py: the package, or in a clone the folder around it
FOLDER = PACKAGE if (PACKAGE / "train.py").exists() else PACKAGE.parent
MODULES = (
    "config", "kernels", "parallel", "remote", "model", "data", "optim", "checkpoint", "runtime", "plan",
    "lab", "scripts", "train", "start", "build",
)
__version__: str = runpy.run_path(str(FOLDER / "config" / "version.py"))["VERSION"]


def use() -> None:
    """Makes `import config`, `from model.block import Block` and so on possible in this process.

    From then on these names (MODULES) are Bevatron's. Call it before torch is imported: runtime/__init__.py
    says why. Raises ImportError, and changes nothing, if one of them has been imported from elsewhere.
    """
    for name in MODULES:
        loaded = sys.modules.get(name)
        if loaded is not None and not is_ours(loaded):
            raise ImportError(f"{name} is already imported from {place_of(loaded)}; Bevatron's {name} needs "
                              "a process of its own, such as python -m bevatron")
    if sys.path[:1] != [str(FOLDER)]:
        sys.path.insert(0, str(FOLDER))


def is_ours(module: object) -> bool:
    return FOLDER in Path(place_of(module)).parents


def place_of(module: object) -> str:
    """The file of a module; of a package without one, its first folder."""
    file = getattr(module, "__file__", None)
    return str(file or next(iter(getattr(module, "__path__", [])), "nowhere"))
