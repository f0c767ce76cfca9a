"""transformers in fp64, as a reference."""

import torch
from torch.overrides import TorchFunctionMode


class InFp64(TorchFunctionMode):
    """transformers computes norms, rotary tables and softmax in fp32, whatever it is given; here in fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)
