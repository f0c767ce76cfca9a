"""Megatron-core in the race on a GPU (lab/benchmarks/contestant.py), with its own optimizer and precision."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.benchmarks.others import (
    ADAMW,
    TrainStep,
    num_parameters,
    refuse_packed,
    sdpa_backends,
    token_positions,
)
from lab.benchmarks.shape import Shape


def megatron(shape: Shape, device: str, flags: set[str]) -> tuple[TrainStep, int]:
    """Return its GPT with Transformer Engine's layers, or with the flag local its own layers and SDPA.

    Weight gradients accumulate into the fp32 buffers unless the flag unfused or local is given. The head is
    not Transformer Engine's, and would need another extension for that.
    """
    if device != "cuda":
        raise ImportError("Megatron-core needs a GPU")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import layers as tensor_parallel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.module import Float16Module

    from parallel.wire.world import join_alone

    join_alone(device)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)

    # the model
    use_te = "local" not in flags
    if not use_te:
        refuse_packed(shape, "megatron-core+local")
        DotProductAttention.forward = megatron_sdpa
    is_fused = use_te and "unfused" not in flags
    cfg = megatron_config(shape, use_te, is_fused)
    tensor_parallel._grad_accum_fusion_available = True  # the head asks for it, but works without
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=megatron_layer_spec(shape, use_te),
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    model.output_layer.gradient_accumulation_fusion = False
    parameters = num_parameters(model)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(cfg, ddp_config, Float16Module(cfg, model))

    # the optimizer
    beta1, beta2 = ADAMW["betas"]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=ADAMW["lr"],
        min_lr=ADAMW["lr"],
        weight_decay=ADAMW["weight_decay"],
        adam_beta1=beta1,
        adam_beta2=beta2,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    for group in optimizer.param_groups:
        group["lr"] = ADAMW["lr"]
    positions = token_positions(shape, device).expand(shape.batch, -1)
    options = megatron_documents(shape, device) if shape.documents else {}

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        inputs = tokens, positions, targets
        if shape.documents:  # its packed format puts all documents into one sequence
            inputs = tuple(x.reshape(1, -1) for x in inputs)
        with sdpa_backends(device):
            output = model(inputs[0], inputs[1], None, labels=inputs[2], **options)
            loss = output.float().mean()
            loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        return loss.detach()

    return step, parameters


def megatron_documents(shape: Shape, device: str) -> dict[str, Any]:
    """Return the additional inputs of its model: the document boundaries of all sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = torch.tensor(shape.documents * shape.batch, device=device)
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = max(shape.documents)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {"packed_seq_params": packed}


def megatron_config(shape: Shape, use_te: bool, is_fused: bool):
    """Return a TransformerConfig. `use_te` selects Transformer Engine; for `is_fused` see megatron."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    mixture = {}
    if shape.experts:
        mixture = dict(
            num_moe_experts=shape.experts,
            moe_router_topk=shape.top_k,
            moe_ffn_hidden_size=shape.ffn,
            moe_grouped_gemm=use_te,
            moe_permute_fusion=use_te,
            moe_router_fusion=use_te,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
        )
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv or shape.heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=use_te,
        gradient_accumulation_fusion=is_fused,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te" if use_te else "native",
        **mixture,
    )


def megatron_layer_spec(shape: Shape, use_te: bool):
    from megatron.core.models.gpt import gpt_layer_specs

    experts = {"num_experts": shape.experts or None, "moe_grouped_gemm": use_te and bool(shape.experts)}
    if use_te:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts)
    return gpt_layer_specs.get_gpt_layer_local_spec(**experts, normalization="RMSNorm")


def megatron_sdpa(self, query: Tensor, key: Tensor, value: Tensor, *_, **__) -> Tensor:
    """Compute SDPA instead of Megatron-core's own attention. query, key, value: [s, b, heads, head_dim]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    is_grouped = query.shape[2] != key.shape[2]
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return heads.permute(2, 0, 1, 3).flatten(2)  # [s, b, hidden]
