"""Prove the precisions that people train in: python -m scripts.verify NAME --precision --world 2

scripts.verify proves layouts in fp64. Here bf16, fp16, fp32 and fp8 run through train.train itself: every
optimizer, every ZeRO stage, on real files. After every step this must hold:

    agreement    own weights == masters rounded to the compute dtype; what forward and backward read == the
                 shards of all ranks side by side (in 8 bits: as parallel/wire/compress.py defines it);
                 replicas equal: all of it bit for bit
    update       masters and moments == the optimizer's paper, computed here in fp64 from the gradients,
                 masters and moments that were there before: so weights cannot move without masters, nor
                 masters without weights
    movement     every matrix's masters change in every good step; the weights of the compute dtype within
                 the run (of short convolutions, whose weights are large, only masters in fp32)
    norm         the reported norm == the fp64 norm of the gradients / loss scale, to fp32's rounding
    wide         gradients are fp32 tensors with more digits than the compute dtype has; the loss is fp32
    skipped      a step whose gradient is not finite leaves masters, moments and weights bit for bit
    layout       gradients and loss like one process of the same dtype; masters like its masters; the same
                 steps are skipped. In fp16, one of the two may skip a step alone if the largest value of
                 the other in that step, times how many of its products the first adds up in one, and with
                 the bound of the gradients, reaches the end of fp16's range: the steps from there on are
                 not compared, and they may be at most NOT_COMPARED
    fp64         one process of the dtype like one process in fp64 from the same initial weights

Bounds. u: the unit roundoff of a dtype (fp32 2^-24, fp16 2^-11, bf16 2^-8, e4m3 2^-4, e5m2 2^-3). A
rounding to nearest is off by u / sqrt(6) of the value in the root mean square (uniform within half a unit;
the significand uniform in 1 .. 2). K roundings in a chain are independent, so they add up as sqrt(K)
(Higham and Mary 2019, SIAM J. Sci. Comput. 41-5): with SIGMAS standard deviations, as if each acted in full
on every output,

    E(dtype) = SIGMAS u sqrt(K / 6)            K: `gradient_error` in bounds.py, counted from the model

is the relative error (Frobenius) of the gradients against exact arithmetic. A product of factors changes by
the sum of their relative changes. Those of different matrices are independent, so with d_i the relative
distance of matrix i in two runs (measured on the weights that were read), over the matrices in series,

    D = SIGMAS sqrt(sum of d_i^2)

Mixers with a state. Decays are at most 1, and I - beta k k^T with |k| = 1 and beta in 0 .. 2 is no longer
than 1: so a state hands an error on as it hands on what was written with it, and never grows it. An error in
the logarithm g of a decay, relative to g, changes the decay exp(g) by at most 1 / e of that. So each tensor
counts once, however long the sequence is. States, decays and sums are fp32 in every dtype: their roundings
count with fp32's u (`inner` in bounds.py; beside those of bf16 they are nothing).

What a state gives is a product of F factors that are each proportional to what the layer reads: of q, k and v
with Kimi's delta attention, of x and SiLU(z) with Mamba (D x is larger than what passes the state until B and
C have grown; sigmoids and steps, whose arguments are near 0, hardly move). A relative error e of what is read
goes through F matrices in independent directions, so that e^2 comes out F times as large. The norm behind the
product gives it size 1, whatever the size of its factors: at the start it outweighs the embeddings, and the
stream has its error in full. The backward of a product reads the other F - 1 factors, with their errors. So
with r_l the squares that layer l adds,

    forward:   e_(l + 1)^2 = F_l e_l^2 + r_l        backward:   sum of (F_l - 1) e_l^2 + r_l

and E and D are these sums (`through_layers`). F is 1, and the sums are those above, where a part adds little
to the stream: attention and MLPs, short convolutions, and the gated delta rule, whose product with SiLU(z)
comes after its norm.

Of two runs of one dtype whose microbatches see the same operations,

    error <= SIGMAS u32 sqrt(n) + D + E min(1, sqrt(D / u))           n: additions in fp32

since a value that changed by D rounds to another neighbour with probability D / u, and is then off by u.
Layouts that compute a product or a sum in another order (tp, cp, ep) have sqrt(2) E in the first
place. The path of the masters m_s - m_0 follows by the optimizer: SGD and LARS are linear in the gradient; a
direction that is a sign (Lion; Adam's first steps, and LAMB's) turns where the error is larger than the
gradient, with probability rho / pi, and is then off by 2: 2 sqrt(rho / pi); Muon's polynomial multiplies a
small direction by at most 3.4445^5 = 485 (kernels/newton_schulz.py), and is never further off than 2.

Errors are those of the terms that a gradient is the sum of. Later in a run the terms cancel while they stay
as large: so gradients are compared relative to the largest gradient of the run so far (at the start all
tokens pull in the same direction), and rho grows by as much. All of it is of first order: learning rates are
chosen so that a step changes no more than a few percent.

The modules, each of which imports only those above it:

    job                 what is trained: a tiny recipe, its data
    cells               which dtypes, optimizers, ZeRO stages and layouts are proved
    errors              a number and its bound; norms
    recorder            what one rank records of a run
    recorded_run        a run as a whole: the records of all ranks, joined
    paper               the optimizers' papers in fp64
    single_run          what must hold in one run
    bounds              how far two runs may be apart
    two_runs            a run compared with another one
    state_statistics    the kernels of mixers with a state, in bf16
    kernel_statistics   the statistics of kernels in bf16
    accumulation        the sum of microbatches in fp32
    prover              runs cells, and judges them
    command             python -m scripts.verify NAME --precision
"""
from lab.proof.precision.command import check

__all__ = ["check"]
