"""Refuses a config whose model is far larger than what is stored of it."""
from checkpoint.disk.folder import StoredPiece
from config import ConfigError, ModelConfig, layer_models
from config.tree import has_path
from model.router import mixture

SIZE_MARGIN = 2  # a size of a model beyond this times what is stored is refused before anything is made


def check_size(model: ModelConfig, pieces: list[StoredPiece], where: str) -> None:
    """check_counts, with what a checkpoint holds: the stored boxes of its weights."""
    weights = [piece.box for piece in pieces if "@" not in piece.box.key]
    num_elements = sum(box.volume for box in weights)
    check_counts(model, num_tensors=len(weights), num_elements=num_elements, where=where)


def check_counts(model: ModelConfig, *, num_tensors: int, num_elements: int, where: str) -> None:
    """Raises ConfigError if the model is far larger than what is stored of it, before it is allocated.

    The sizes come from a file that anybody may have written. Exact differences are found when it is loaded.
    """
    width = model.hidden
    mlps = [like.mlp for like in layer_models(model).values() if has_path(like, "mlp.width")]
    experts = mixture(model)
    least = {  # what any model with these sizes has at least
        "layers": (model.layers, num_tensors),
        "layers x hidden": (model.layers * width, num_elements),
        "hidden x vocab": (width * (model.vocab or 1), num_elements),
        "hidden x heads": (width * max(model.mixer.heads_over_tp().values(), default=1), num_elements),
        "hidden x ffn": (width * max((mlp.width for mlp in mlps), default=1), num_elements),
        "hidden x experts": (width * (experts.experts if experts else 1), num_elements),
    }
    for name, (asked, stored) in least.items():
        if asked > SIZE_MARGIN * stored:
            raise ConfigError(f"{where}: the config says {name} = {asked:,}, its tensors hold {stored:,}; "
                              "the two are not of one model")
