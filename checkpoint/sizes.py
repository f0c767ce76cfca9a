"""Reject a config whose model is far larger than its stored tensors."""
from checkpoint.disk.folder import StoredPiece
from config import ConfigError, ModelConfig, layer_models
from config.tree import has_path
from model.router import mixture

SIZE_MARGIN = 2  # reject a model with more than this times the stored size before allocating anything


def check_size(model: ModelConfig, pieces: list[StoredPiece], where: str) -> None:
    """Call check_counts with the stored weights of a checkpoint."""
    weights = [piece.box for piece in pieces if "@" not in piece.box.key]
    num_elements = sum(box.volume for box in weights)
    check_counts(model, num_tensors=len(weights), num_elements=num_elements, where=where)


def check_counts(model: ModelConfig, *, num_tensors: int, num_elements: int, where: str) -> None:
    """Raise ConfigError if the model is far larger than its stored tensors, before it is allocated.

    The sizes come from an untrusted file. Smaller mismatches are found during loading.
    """
    width = model.hidden
    mlps = [like.mlp for like in layer_models(model).values() if has_path(like, "mlp.width")]
    experts = mixture(model)
    least = {  # lower bounds for any model with these sizes
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
                              "they belong to different models")
