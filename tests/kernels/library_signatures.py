"""What the libraries' functions take, read in their sources: module, version, commit and parameters.

A parameter ends with = if it has a default; those after * are given by name; **NAME takes any name.
"""

import inspect
from typing import NamedTuple

KINDS = inspect.Parameter


class Source(NamedTuple):
    """Where functions of a module were read, and {function: its parameters}."""

    version: str
    commit: str
    functions: dict[str, str]


SOURCES = {
    ("flash_attn", "release"): Source("2.8.3.post1", "v2.8.3.post1", {
        "flash_attn_func":
            "q k v dropout_p= softmax_scale= causal= window_size= softcap= alibi_slopes= deterministic= "
            "return_attn_probs=",
        "flash_attn_varlen_func":
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p= softmax_scale= causal= "
            "window_size= softcap= alibi_slopes= deterministic= return_attn_probs= block_table=",
    }),
    ("flash_attn_interface", "main"): Source("3", "0251105a", {
        "flash_attn_func":
            "q k v softmax_scale= causal= qv= q_descale= k_descale= v_descale= window_size= attention_chunk= "
            "softcap= num_splits= pack_gqa= deterministic= sm_margin= return_attn_probs=",
        "flash_attn_varlen_func":
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q= seqused_k= softmax_scale= "
            "causal= qv= q_descale= k_descale= v_descale= window_size= attention_chunk= softcap= num_splits= "
            "pack_gqa= deterministic= sm_margin= return_attn_probs=",
    }),
    ("flash_attn.cute", "main"): Source("4", "0251105a", {
        "flash_attn_func":
            "q k v qv= gather_kv_indices= softmax_scale= causal= window_size= learnable_sink= softcap= "
            "num_splits= pack_gqa= deterministic= score_mod= score_mod_bwd= mask_mod= aux_tensors= "
            "aux_scalars= block_sparse_tensors= block_sparse_tensors_bwd= return_lse=",
        "flash_attn_varlen_func":
            "q k v qv= cu_seqlens_q= cu_seqlens_k= max_seqlen_q= max_seqlen_k= min_seqlen_k= seqused_q= "
            "seqused_k= gather_kv_indices= page_table= softmax_scale= causal= window_size= learnable_sink= "
            "softcap= num_splits= pack_gqa= deterministic= score_mod= score_mod_bwd= mask_mod= "
            "block_sparse_tensors= aux_tensors= aux_scalars= return_lse= scheduler_metadata= "
            "seqlen_k_per_split= disable_scheduler_metadata=",
    }),
    ("cudnn", "release"): Source("1.32.0", "wheel", {
        "sdpa_torch":
            "query key value * scale= is_causal= causal_bottom_right= window_left= window_right= sinks= "
            "seq_len_q= seq_len_kv= cu_seqlens_q= cu_seqlens_kv= max_seqlen_q= max_seqlen_kv= return_lse=",
    }),
    ("fla.ops.gated_delta_rule", "release"): Source("0.5.2", "v0.5.2", {
        "chunk_gated_delta_rule":
            "q k v g beta scale= initial_state= output_final_state= use_qk_l2norm_in_kernel= "
            "use_beta_sigmoid_in_kernel= allow_neg_eigval= state_v_first= cu_seqlens= cu_seqlens_cpu= "
            "cp_context= **kwargs",
    }),
    ("fla.ops.gated_delta_rule", "main"): Source("0.5.2", "bc3b101d", {
        "chunk_gated_delta_rule":
            "q k v g beta scale= initial_state= output_final_state= use_qk_l2norm_in_kernel= "
            "use_beta_sigmoid_in_kernel= allow_neg_eigval= state_v_first= cu_seqlens= cu_seqlens_cpu= "
            "chunk_indices= cp_context= **kwargs",
    }),
    ("fla.ops.kda", "main"): Source("0.5.2", "bc3b101d", {  # the same at v0.5.2
        "chunk_kda":
            "q k v g beta scale= initial_state= output_final_state= use_qk_l2norm_in_kernel= "
            "use_gate_in_kernel= use_beta_sigmoid_in_kernel= allow_neg_eigval= safe_gate= lower_bound= "
            "disable_recompute= return_intermediate_states= state_v_first= cu_seqlens= cu_seqlens_cpu= "
            "cp_context= **kwargs",
    }),
    ("mamba_ssm.ops.triton.ssd_combined", "release"): Source("2.3.2.post1", "v2.3.2.post1", {
        "mamba_chunk_scan_combined":
            "x dt A B C chunk_size D= z= dt_bias= initial_states= seq_idx= cu_seqlens= dt_softplus= "
            "dt_limit= return_final_states= return_varlen_states=",
    }),
    ("mamba_ssm.ops.triton.ssd_combined", "main"): Source("2.3.2.post1", "e9594ce1", {
        "mamba_chunk_scan_combined":
            "x dt A B C chunk_size D= z= dt_bias= initial_states= seq_idx= cu_seqlens= dt_softplus= "
            "dt_limit= return_final_states= return_varlen_states= state_dtype=",
    }),
    ("causal_conv1d", "main"): Source("1.6.1", "0d2252d1", {  # the same at v1.6.1.post4
        "causal_conv1d_fn":
            "x weight bias= seq_idx= initial_states= return_final_states= final_states_out= activation=",
    }),
}  # fmt: skip


def parsed(parameters: str) -> inspect.Signature:
    found, kind = [], KINDS.POSITIONAL_OR_KEYWORD
    for word in parameters.split():
        if word == "*":
            kind = KINDS.KEYWORD_ONLY
        elif word.startswith("**"):
            found.append(inspect.Parameter(word[2:], KINDS.VAR_KEYWORD))
        else:
            default = None if word.endswith("=") else KINDS.empty
            found.append(inspect.Parameter(word.removesuffix("="), kind, default=default))
    return inspect.Signature(found)


def signatures(module: str, name: str) -> list[inspect.Signature]:
    """Those of a function in every version that was read."""
    return [
        parsed(source.functions[name]) for (of, _), source in SOURCES.items()
        if of == module and name in source.functions
    ]  # fmt: skip


def bound(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict:
    """{parameter: argument} of a call. TypeError for a name that is not declared: what **kwargs takes is
    ignored there, so a misspelled name would change the result.
    """
    arguments = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is KINDS.VAR_KEYWORD and arguments.pop(name, None):
            raise TypeError(f"no such parameter: {set(kwargs) - set(signature.parameters)}")
    return arguments
