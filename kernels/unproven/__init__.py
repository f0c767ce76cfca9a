"""Kernels that a model of the step says gain something, and that no GPU has confirmed yet.

train.unproven asks for them (model/unproven.py), and only then are they imported. Each computes what a path
of kernels/ computes, which runs otherwise:

    fp8_*          norm, SwiGLU and RoPE's backward inside the casts of the fp8 linears that read their
                   results, instead of results in 16 bits, which are written, and read by maxima and casts
    head_norm      norm of heads and RoPE in one pass, instead of kernels/norm.py, then kernels/rope.py
    latent_heads   heads of latent attention in one pass, instead of kernels/rope.py and torch.cat

A kernel that a GPU confirms moves to kernels/; one that gains nothing there is deleted.
"""
