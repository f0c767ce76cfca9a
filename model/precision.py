"""Which linears of a model run in fp8 (kernels/fp8_linear.py): those of attention and the MLP, but for the first and last layers'."""
from config import Config, fp8_recipe, in_fp8


def of_layer(cfg: Config, layer: int) -> tuple[str, int] | None:
    """What parallel/tensor.py's linears take: the recipe and the side of its blocks; None: the compute dtype."""
    return (fp8_recipe(cfg.train), cfg.train.fp8_block) if in_fp8(cfg, layer) else None
