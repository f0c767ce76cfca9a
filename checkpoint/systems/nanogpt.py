"""Read nanoGPT's ckpt.pt: model_args and the tensors, in one torch.save file.

Its matrices are [out, in], with q, k and v stacked. Names begin with _orig_mod if the model was wrapped by
torch.compile. The vocabulary may be padded to a multiple of 64 rows (50,257 to 50,304).

Source: model.py and train.py of nanoGPT.
"""
from pathlib import Path

from checkpoint.hf.families.family import Family
from checkpoint.hf.families.openai import GPT2_TENSORS
from checkpoint.hf.rules import FamilyError, Field, FieldGroup, Fixed, Idle
from checkpoint.systems.foreign import ForeignIndex, foreign_index, with_full_names
from checkpoint.systems.pickled import read_tree, shown, tensors_of_tree
from checkpoint.systems.system_rules import cut_vocabulary, read_model
from config import ConfigError, ModelConfig, Tree

FILE = "ckpt.pt"
KEYS = ("model_args", "model")
COMPILED = "_orig_mod."
PADDED_TO = 64  # rows of the vocabulary


def read_bias(keys: Tree) -> Tree:
    """Read the bias arg, which covers all linear layers and norms."""
    bias = keys["bias"]
    if type(bias) is not bool:
        raise FamilyError(f"bias = {bias!r} is not true or false")
    return {"mixer.bias": "all" if bias else None, "mlp.bias": bias, "norm.bias": bias}


def read_width(keys: Tree) -> Tree:
    return {"mlp.width": 4 * keys["n_embd"]}


NANOGPT = Family(
    model_type="nanoGPT",
    architecture="GPT",
    rules=(
        Fixed("mixer.kind", "attention"),
        Field("layers", "n_layer", minimum=1),
        Field("hidden", "n_embd", minimum=1),
        Field("mixer.heads", "n_head", minimum=1),
        FieldGroup(("mlp.width",), read_width),
        Field("vocab", "vocab_size", minimum=1),
        Field("context", "block_size", minimum=1),
        FieldGroup(("mixer.bias", "mlp.bias", "norm.bias"), read_bias),
        Fixed("norm.kind", "layernorm"),
        Fixed("norm.eps", 1e-5),
        Fixed("mlp.activation", "gelu_erf"),
        Fixed("positions", "learned"),
        Fixed("mixer.rope", None),
        Fixed("tied", True),
        Idle(("dropout",)),
    ),
    defaults={"bias": True},
    tensors=GPT2_TENSORS,
    prefix="transformer.",
    config="model_args",
)


def find_nanogpt(path: Path) -> Path | None:
    """Return the file if a path is a torch.save file, or the folder of ckpt.pt."""
    file = path / FILE if path.is_dir() else path
    return file if file.suffix in (".pt", ".pth") and file.is_file() else None


def open_nanogpt(file: Path, run: ModelConfig) -> ForeignIndex:
    """Open the tensors of the file under our names. `run` is the model of the run, whose vocabulary may be
    padded there.

    Raises ConfigError naming the file.
    """
    tree = read_tree(file)
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in KEYS):
        found = ", ".join(map(shown, list(tree)[:8])) if isinstance(tree, dict) else shown(tree)
        raise ConfigError(f"{file}: {' and '.join(KEYS)} of nanoGPT are looked for, and it has {found}; "
                          "convert the weights to a Hugging Face folder")
    model = read_model(NANOGPT, tree["model_args"], f"{file}: model_args")
    tensors = with_full_names(tensors_of_tree(file, without_prefix(tree["model"])), NANOGPT, model)
    model, tensors, notes = cut_vocabulary(NANOGPT, model, tensors, run=run, multiple=PADDED_TO)
    return foreign_index(file, NANOGPT, model, tensors, notes)


def without_prefix(tensors: Tree) -> Tree:
    """Return the tensors under the names of an uncompiled model."""
    return {str(name).removeprefix(COMPILED): tensor for name, tensor in tensors.items()}
