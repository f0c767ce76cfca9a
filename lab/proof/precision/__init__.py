"""Prove the dtypes used for training: python -m scripts.verify NAME --precision --world 2

scripts.verify proves layouts in fp64. Here bf16, fp16, fp32 and fp8 run through train.train itself: every
optimizer, every ZeRO stage, on real files. After every step the following must hold:

    agreement    own weights == masters rounded to the compute dtype; what forward and backward read == the
                 concatenated shards of all ranks (in 8 bits: as parallel/wire/compress.py defines it);
                 replicas are equal; all of it bit for bit
    8-bit rows   with parallel.compress_tokens, what arrives at the experts == what was sent, to the bound of
                 each element's block (lab/proof/rounded_rows.py)
    update       masters and moments == the optimizer's paper, computed here in fp64 from the gradients and
                 the previous masters and moments, so that weights cannot move without masters, nor
                 masters without weights
    movement     every matrix's masters change in every good step, and its compute-dtype weights within
                 the run (for short convolutions, whose weights are large, only masters in fp32)
    norm         the reported norm == the fp64 norm of the gradients / loss scale, to fp32 rounding
    wide         gradients are fp32 tensors with more digits than the compute dtype has; the loss is fp32
    skipped      a step with a non-finite gradient leaves masters, moments and weights unchanged bit for bit
    layout       gradients, loss and masters match one process of the same dtype; the same steps are
                 skipped. In fp16, one of the two may skip a step alone if the other's largest value in
                 that step, times the number of its products that the first adds up in one, and with the
                 bound of the gradients, reaches the end of fp16's range. Later steps are not compared;
                 there may be at most NOT_COMPARED
    fp64         one process of the dtype matches one process in fp64 from the same initial weights

Bounds. u: the unit roundoff of a dtype (fp32 2^-24, fp16 2^-11, bf16 2^-8, e4m3 2^-4, e5m2 2^-3, e2m1 2^-2).
A rounding to nearest has an RMS error of u / sqrt(6) of the value (uniform within half a unit; the
significand uniform in 1 .. 2), and a stochastic one sqrt(2) of that (1/6 of a step squared instead of 1/12).
K roundings in series are independent, so they add up as sqrt(K) (Higham and Mary 2019, SIAM J. Sci. Comput.
41-5). With SIGMAS standard deviations, as if each acted in full on every output,

    E(dtype) = SIGMAS u sqrt(K / 6)            K: `gradient_error` in bounds.py, counted from the model

is the relative error (Frobenius) of the gradients against exact arithmetic. A product of factors changes by
the sum of their relative changes. Changes of different matrices are independent. With d_i the relative
distance of matrix i in two runs (measured on the weights as read), over the matrices in series,

    D = SIGMAS sqrt(sum of d_i^2)

Recurrent mixers. Decays are at most 1, and I - beta k k^T with |k| = 1 and beta in 0 .. 2 has norm at most 1,
so a state carries an error along with the values written together with it, and never amplifies it. An error
in the logarithm g of a decay, relative to g, changes the decay exp(g) by at most 1 / e of that. So each
tensor counts once, regardless of the sequence length. States, decays and sums are fp32 in every dtype: their
roundings count with fp32's u (`inner` in bounds.py; negligible next to those of bf16).

The output of a state is a product of F factors that are each proportional to the input of the layer: q, k and
v in Kimi's delta attention, x and SiLU(z) in Mamba (D x exceeds what passes through the state until B and C
have grown; sigmoids and steps, whose arguments are near 0, hardly move). A relative error e of the input
passes through F matrices in independent directions, so e^2 grows by a factor of F. The norm after the product
gives it size 1, whatever the size of its factors: initially it outweighs the embeddings, and the residual
stream gets its full error. The backward of a product reads the other F - 1 factors, with their errors. So
with r_l the squares that layer l adds,

    forward:   e_(l + 1)^2 = F_l e_l^2 + r_l        backward:   sum of (F_l - 1) e_l^2 + r_l

and E and D are these sums (`through_layers`). Where a part adds little to the stream, F is 1 and the sums are
those above: attention and MLPs, short convolutions, and the gated delta rule, whose product with SiLU(z)
comes after its norm.

For two runs of one dtype whose microbatches see the same operations,

    error <= SIGMAS u32 sqrt(n) + D + E min(1, sqrt(D / u))           n: additions in fp32

since a value that changed by D rounds to another neighbour with probability D / u, and is then off by u.
Layouts that compute a product or a sum in another order (tp, cp, ep) start with sqrt(2) E. The path of the
masters m_s - m_0 depends on the optimizer. SGD and LARS are linear in the gradient. A direction that is a
sign (Lion; Adam's first steps, and LAMB's) flips where the error exceeds the gradient, with probability
rho / pi, and is then off by 2: 2 sqrt(rho / pi). The polynomial of Muon and NorMuon multiplies a small
direction by at most 3.4445^5 = 485 (kernels/newton_schulz.py), and is never off by more than 2. Dion gives
every direction that it finds the same size, however small: 2.

These are errors of the terms that add up to a gradient. Later in a run the terms cancel but stay as large, so
gradients are compared relative to the largest gradient of the run so far (at the start all tokens pull in the
same direction), and rho grows by the same factor. All of it is first order: learning rates are chosen so that
a step changes at most a few percent.

The modules; each imports only those above it:

    job                 the job: a tiny recipe and its data
    cells               the proved dtypes, optimizers, ZeRO stages and layouts
    errors              a number with its bound; norms
    row_errors          rows that travel in 8 bits
    recorder            records a run on one rank
    recorded_run        a complete run: the joined records of all ranks
    paper               the optimizers' papers in fp64
    single_run          checks within one run
    bounds              how far apart two runs may be
    two_runs            compares two runs
    state_statistics    the kernels of recurrent mixers, in bf16
    kernel_statistics   the statistics of kernels in bf16
    accumulation        the fp32 accumulation of microbatches
    prover              runs cells and judges them
    command             python -m scripts.verify NAME --precision
"""
from lab.proof.precision.command import check

__all__ = ["check"]
