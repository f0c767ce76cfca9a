"""Bevatron as an installed package, which contains the folders of the checkout.

    bevatron train llama3-tiny            what `python train.py llama3-tiny` is in a clone
    python -m bevatron generate RUN       the same without the script

The code imports its modules by the same names as in a clone: `import data`, `from model.block import Block`.
Only processes launched by one of these commands can find them: `import bevatron` alone changes nothing. In a
notebook, `bevatron.use()` makes them importable.
"""
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# the folder of config/, model/, train.py: the package, or in a clone its parent
FOLDER = PACKAGE if (PACKAGE / "train.py").exists() else PACKAGE.parent
MODULES = (
    "config", "kernels", "parallel", "model", "data", "optim", "checkpoint", "durable", "runtime", "plan",
    "lab", "scripts", "train", "start", "phases", "services", "build",
)
__version__: str = runpy.run_path(str(FOLDER / "config" / "version.py"))["VERSION"]


def use() -> None:
    """Make `import config`, `from model.block import Block` and so on work in this process.

    From then on these names (MODULES) are Bevatron's. Call it before importing torch; runtime/__init__.py
    says why. Raises ImportError, and changes nothing, if one of them was already imported from elsewhere.
    """
    for name in MODULES:
        loaded = sys.modules.get(name)
        if loaded is not None and not is_ours(loaded):
            raise ImportError(f"{name} is already imported from {place_of(loaded)}; Bevatron's {name} needs "
                              "a separate process, such as python -m bevatron")
    if sys.path[:1] != [str(FOLDER)]:
        sys.path.insert(0, str(FOLDER))


def is_ours(module: object) -> bool:
    return FOLDER in Path(place_of(module)).parents


def place_of(module: object) -> str:
    """Return a module's file, or the first folder of a namespace package."""
    file = getattr(module, "__file__", None)
    return str(file or next(iter(getattr(module, "__path__", [])), "nowhere"))
