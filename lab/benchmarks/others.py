"""Models of other codebases, and code that all contestants share.

For the races on a CPU (lab/benchmarks/peer.py) and on a GPU (lab/benchmarks/contestant.py).
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.benchmarks.shape import Shape

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
ROPE_THETA = 500000.0

SDPA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

TrainStep = Callable[[Tensor, Tensor], Tensor]  # (tokens [b, s], targets [b, s]) -> the loss, a scalar
LossFunction = Callable[[Tensor, Tensor], Tensor]  # (logits [b, s, vocab], targets [b, s]) -> the mean loss


def sdpa_backends(device: str) -> contextlib.AbstractContextManager[object]:
    """Make SDPA try its kernels in the order of kernels/attention.py."""
    if device == "cuda":
        return sdpa_kernel(SDPA_ORDER, set_priority=True)
    return contextlib.nullcontext()


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def document_numbers(shape: Shape, device: str) -> Tensor:
    """Return the document index [1, s] of each token in a sequence, all 0 unless documents are packed."""
    lengths = torch.tensor(shape.documents or (shape.seq,), device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(lengths)[None]


def token_positions(shape: Shape, device: str) -> Tensor:
    """Return the position [1, s] of each token in its document."""
    parts = [torch.arange(length, device=device) for length in shape.documents or (shape.seq,)]
    return torch.cat(parts)[None]


def refuse_packed(shape: Shape, name: str) -> None:
    """Raise ImportError for packed documents, for contestants without attention that supports them."""
    if shape.documents:
        raise ImportError(f"{name}: no attention over packed documents here")


def transformers_settings(shape: Shape) -> dict[str, object]:
    """Return the settings that every transformers decoder takes for a shape."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv or shape.heads,
        "max_position_embeddings": shape.seq,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


class GPTBlock(nn.Module):
    """nanoGPT's block: LayerNorm, fused qkv, GELU at four times the width.

    The two matrices of its MLP cost as much as SwiGLU's three.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden]."""
        b, s, hidden = x.shape

        # attention
        projected = self.qkv(self.norms[0](x)).split(hidden, 2)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in projected)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, heads, s, head_dim]
        x = x + self.out(heads.transpose(1, 2).reshape(b, s, hidden))

        # MLP
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class NanoGPT(nn.Module):
    """nanoGPT's architecture: learned positions, tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.Sequential(*(GPTBlock(shape.hidden, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [b, s] -> logits [b, s, vocab]."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss, with a softmax in fp32. logits: [b, s, vocab], targets: [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def compile_blocks(blocks: Iterable[nn.Module], fullgraph: bool = True) -> LossFunction:
    """Compile the blocks in place and return a compiled loss.

    The blocks share their code; compiling the whole model at once would take minutes.
    """
    for block in blocks:
        block.compile(fullgraph=fullgraph)
    return torch.compile(cross_entropy)


def build_torchtitan(shape: Shape, device: str) -> nn.Module:
    """Return torchtitan's Llama or Qwen3 mixture in fp32. Raises ImportError if it is not installed."""
    # importing its models imports its trainer and so tensorboard, which is not used here
    if importlib.util.find_spec("tensorboard") is None:
        sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=None)  # type: ignore

    sizes = {
        "dim": shape.hidden,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv or shape.heads,
        "vocab_size": shape.vocab,
        "max_seq_len": shape.seq,
        "rope_theta": ROPE_THETA,
    }
    if shape.experts:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3 import Qwen3Model
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

        mixture = MoEArgs(
            num_experts=shape.experts,
            num_shared_experts=0,
            top_k=shape.top_k,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            use_grouped_mm=device == "cuda",
        )
        model_class = Qwen3Model
        args = Qwen3ModelArgs(
            **sizes,
            head_dim=shape.hidden // shape.heads,
            hidden_dim=shape.ffn,
            moe_enabled=True,
            moe_inter_dim=shape.ffn,
            moe_args=mixture,
        )
    else:
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs

        model_class = Transformer
        multiplier = (shape.ffn + 0.5) / int(8 * shape.hidden / 3)  # its formula then gives shape.ffn
        packed = {"attn_type": "varlen", "attn_mask_type": "block_causal"} if shape.documents else {}
        args = TransformerModelArgs(**sizes, **packed, multiple_of=1, ffn_dim_multiplier=multiplier)

    with torch.device(device):
        model = model_class(args)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device(device))
    return model
