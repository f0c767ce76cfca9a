"""What the GPU's kernels are measured and checked on: sizes, inputs, and a case of each kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[[], Any]  # one call of a kernel on tensors that it holds


@dataclass(frozen=True)
class Size:
    """Sizes of the tensors. kv: key/value heads; rows: of logits at a time; params: of one AdamW launch."""

    batch: int = 8
    seq: int = 4096
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 16
    kv: int = 4
    vocab: int = 32768
    rows: int = 4096
    experts: int = 64
    top_k: int = 8
    expert_ffn: int = 768
    params: int = 1 << 28

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Case:
    """work: bytes that a memory-bound kernel must move, FLOPs of a product; others: {name: alternative}."""

    work: float
    ours: Function
    others: dict[str, Function]


@dataclass(frozen=True)
class Inputs:
    """Makes the inputs of all cases."""

    size: Size
    device: torch.device
    dtype: torch.dtype

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=self.dtype)

    def compiled(self, function: Function) -> Function:
        """Returns the function under torch.compile; as it is on a CPU, for a rehearsal."""
        return torch.compile(function) if self.device.type == "cuda" else function

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one tensor [tokens, hidden]."""
        return self.size.tokens * self.size.hidden * self.element_bytes
