"""The table of planted bugs: python -m scripts.mutate [--world 4] [--only WORD ...]

Plants one silent bug at a time into a copy of this checkout, each a class of faults that published codebases shipped,
and runs scripts.verify on layouts that the bug can touch. A bug that verify does not see is a hole in the proof: exit 1.
"""
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError
from scripts.mutate.checkout import ROOT, files_of
from scripts.mutate.control import complaint, ends, judged

ALIKE = "initial weights"  # in the place of a layout: what verify looks for before it runs one
REFUSED = "initial weights must depend on the name"
LIMIT_S = 600.0
ADAMW = " no-lion no-lars no-sgd no-muon no-lamb"
PLAIN_SUMS = " no-ring no-hierarchy no-server no-powersgd"

@dataclass(frozen=True)
class Mutation:
    """what: the fault in words, and where it was seen (NAME NUMBER: an issue or pull request); file, old, new: the edit;
    model and layout: a recipe, a world and the words of a layout in which it bites."""
    what: str
    file: str
    old: str
    new: str
    model: str
    world: int
    layout: str


TABLE = (
    Mutation("norm gradient under sequence parallelism is not summed over tp (Megatron-LM 1446)", "model/norm.py",
             '"ones", cfg.parallel.sp)', '"ones", False)', "llama3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("per-head norm gradient is summed only under sequence parallelism (Megatron-LM 7452)", "model/attention.py",
             '(self.dim,), "ones", True)', '(self.dim,), "ones", cfg.parallel.sp)', "qwen3-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("replicated logits meet a vocab-parallel loss: too high by log(tp) (Megatron-LM 7452)", "parallel/tensor.py",
             "return merge if group.size > 1 else None", "return (lambda lse, picked: merge(lse, picked / group.size)) if group.size > 1 else None",
             "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("the target's logit counts on every rank of a split vocabulary", "parallel/tensor.py",
             "parts[:, 1].sum(0)", "parts[:, 1].mean(0)", "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("a tp-replicated parameter counts once a rank in the clip norm (Megatron-LM 7452)", "parallel/params.py",
             "(mesh.tp.index == 0 or not whole(p)) and", "True and", "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("a tied table counts twice in the clip norm", "parallel/params.py",
             '("tied" not in p.spec.partial or mesh.pp.index == 0)', "True", "llama3.2-tiny", 2, "pp2 zero0 1f1b mb1"),
    Mutation("tied embedding and head drift apart (Megatron-LM 656)", "parallel/params.py",
             '(("tp", mesh.tp), ("tied", mesh.tied))', '(("tp", mesh.tp),)', "llama3.2-tiny", 2, "pp2 zero0 1f1b mb1"),
    Mutation("the row-parallel bias is added on every rank", "parallel/tensor.py",
             "y = leave(y, self.tp, self.sp)\n        return y if self.bias is None else _AddBias.apply(y, self.bias)",
             "return leave(y if self.bias is None else _AddBias.apply(y, self.bias), self.tp, self.sp)",
             "gpt2-tiny", 2, "tp2 zero0 mb1"),
    Mutation("the schedule of a ramp's first batch runs on: later microbatches are dropped", "train.py",
             "run.ops[len(batches)]", "run.ops[min(run.ops)]", "llama3-tiny", 2, "dp2 zero0 mb1 ramp"),
    Mutation("microbatches with unequal token counts get equal weight (torchtitan 1842)", "train.py",
             "tokens = comm.sum_(sum(b.counted() for b in batches), run.mesh.loss)",
             "tokens = len(batches) * batches[0].counted().clamp(min=1)", "llama3-tiny", 1, "zero0 mb2"),
    Mutation("the loss is divided by this rank's tokens (Megatron-LM 673)", "train.py",
             "tokens = comm.sum_(sum(b.counted() for b in batches), run.mesh.loss)",
             "tokens = run.mesh.loss.size * sum(b.counted() for b in batches)", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("only the last microbatch trains (Fast-LLM 550)", "kernels/linear.py",
             "return into.addmm_(dy.t(), x)", "return into.copy_(dy.t() @ x)", "llama3-tiny", 1, "zero0 mb1"),
    Mutation("the deferred weight gradient never arrives (pytorch 153833)", "parallel/pipeline.py",
             "compute(weight.main_grad)", "compute(weight.main_grad.clone())", "llama3-tiny", 2, "pp2 zero0 zb-h1 mb1"),
    Mutation("a deferred weight gradient goes into the buffer of the I, which ZeRO-2 has sent away", "parallel/pipeline.py",
             "self.jobs.setdefault(self.at, []).append((weight, compute))",
             "self.jobs.setdefault(self.at, []).append((type('W', (), {'main_grad': weight.main_grad}), compute))",
             "llama3-tiny", 2, "pp2 zero2 zb-h1 mb1"),
    Mutation("a stale ZeRO shard: weights are not gathered after the update", "parallel/params.py",
             "elif self.zero and self.group.size > 1:", "elif False:", "llama3-tiny", 2, "dp2 zero1 mb1"),
    Mutation("ZeRO-3 keeps whole weights from before the update", "parallel/params.py",
             "self.weights = self.arriving = None\n", "self.arriving = None\n        return\n", "llama3.2-tiny", 2, "dp2 zero3 mb1"),
    Mutation("gradients are averaged over the data ranks although the loss is already a mean", "parallel/params.py",
             "start_sum(self.grad, self.everyone,",
             "start_sum(self.grad.div_(self.everyone.size), self.everyone,", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("replicas of a shard group are forgotten (HSDP)", "parallel/params.py",
             "        if self.last:", "        if False:", "llama3-tiny", 2, "rep2 zero1 mb1"),
    Mutation("ZeRO-2 with accumulation reduces the first microbatch alone (DeepSpeed 966)", "parallel/params.py",
             "self.shard.add_(part)", "self.shard.add_(part) if not self.shard.any() else None", "llama3-tiny", 2, "dp2 zero2 mb1"),
    Mutation("gradients doubled where the group has two ranks (pytorch 160285)", "parallel/collectives.py",
             "return comm.sum_(dy.clone(), ctx.group), None",
             "return comm.sum_(dy.clone(), ctx.group) * 2, None", "llama3-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("the input gradient of the head is not summed over tp", "parallel/collectives.py",
             "return comm.sum_(dy.clone(), ctx.group), None", "return dy, None", "llama3-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("sequence shards of tp ranks are swapped in the gather's backward", "parallel/collectives.py",
             "return comm.scatter_sum(x.transpose(0, 1), group).transpose(0, 1).contiguous()",
             "return comm.scatter_sum(x.flip(1).transpose(0, 1), group).transpose(0, 1).flip(1).contiguous()", "llama3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("a microbatch meets another one's activations (Megatron-LM 5100)", "parallel/pipeline.py",
             "batches[op.mb], scale)", "batches[op.mb - (op.stage > 0)], scale)", "llama3-tiny", 2, "pp2 zero0 1f1b mb1"),
    Mutation("dropout depends on the rank's own row numbers", "model/transformer.py",
             "batch.step, batch.rows,", "batch.step, batch.rows - batch.rows[0],", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("dropout columns restart on every sequence shard", "model/transformer.py",
             "columns = take_dim1(columns[None], self.tp)[0] if self.cfg.parallel.sp else columns",
             "columns = columns[:len(columns) // self.tp.size] if self.cfg.parallel.sp else columns", "llama3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("interleaved chunks start with identical weights (OLMo-core)", "parallel/spec.py",
             'f"{seed}/{box.key}/{block}"', """f"{seed}/{box.key.split('.', 2)[-1]}/{block}" """, "llama3-tiny", 2, "initial weights"),
    Mutation("the learned positions of sequence shards are those of the first shard", "model/embed.py",
             "take_dim1(positions, self.tp) if self.sp",
             "positions[:, :positions.shape[1] // self.tp.size] if self.sp", "gpt2-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("ring attention's backward reads the keys and values of step 0 at every step (diffusers 14265)", "parallel/ring.py",
             "q[:, rows], ks[:, keys], vs[:, keys], see, lse",
             "q[:, rows], k[:, keys], v[:, keys], see, lse", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("ring attention ignores document boundaries (axolotl 4002)", "parallel/zigzag.py",
             "if docs is not None:", "if docs is not None and apart == 0:", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring docs"),
    Mutation("the window is counted in local places", "parallel/zigzag.py",
             "far = apart * c + place", "far = min(apart, 1) * c + place", "mistral-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("the window hides a chunk that it still touches", "parallel/zigzag.py",
             "(a - b - 1) * c + 1 < window", "(a - b) * c < window", "mistral-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("the halves of the zigzag are swapped on arrival", "parallel/zigzag.py",
             "torch.cat((early, late.flip(0))).transpose", "torch.cat((early, late)).transpose", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ulysses"),
    Mutation("positions restart on every rank of a context-parallel group", "parallel/zigzag.py",
             "positions=batch.positions[:, mine]", "positions=batch.positions[:, :len(mine)]", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("targets of another half of the sequence", "parallel/zigzag.py",
             "targets=batch.targets[:, mine]", "targets=batch.targets[:, mine.roll(len(mine) // 2)]", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ulysses"),
    Mutation("the loss is a mean over this rank's tokens under context parallelism (Megatron-LM 673, 906)", "train.py",
             "tokens = comm.sum_(sum(b.counted() for b in batches), run.mesh.loss)",
             "tokens = run.mesh.loss.size * sum(b.counted() for b in batches)", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("context-parallel ranks' tokens are counted over the data ranks alone", "train.py",
             "batches), run.mesh.loss)", "batches), run.mesh.data)", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("dropout columns restart on every rank of a context-parallel group", "model/transformer.py",
             "if batch.places is None else batch.places", "if True else batch.places", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("gradients of keys stay with the rank that made them", "parallel/ring.py",
             "dkv if step == 1 else dkv + arrived(going)",
             "dkv if step == 1 else (arrived(going), dkv)[1]", "llama3-tiny", 4, "cp4 zero0 mb1 cp-ring"),
    Mutation("partial outputs are averaged, not weighted by their sums", "kernels/partial_attention.py",
             "both = torch.logaddexp(lse, other_lse)", "both = lse.maximum(other_lse)", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("a whole prompt is treated as a cut one in generation", "model/transformer.py",
             "cut: bool = False, learn", "cut: bool = True, learn", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("query heads come back from the all-to-all interleaved", "parallel/ulysses.py",
             ".movedim(0, 2).flatten(2, 3)", ".movedim(0, 3).flatten(2, 3)", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ulysses"),
    Mutation("LAMB's norms are those of this rank's shards", "optim/lamb.py",
             "comm.sum_(squares, self.mesh.world).sqrt()", "squares.sqrt()", "llama3-tiny", 2, "dp2 zero1 lamb"),
    Mutation("Muon's pieces arrive in another order than they were sent", "optim/muon.py",
             "[travels(r, me) for r in ranks]", "[travels(r, me)[::-1] for r in ranks]", "llama3-tiny", 2, "tp2 zero0 muon"),
    Mutation("replicas of a matrix's owner keep the old momentum's update (Muon)", "optim/muon.py",
             "if r != me else [] for r in ranks]", "if r == me + 1 else [] for r in ranks]", "llama3-tiny", 2, "dp2 zero0 muon"),
    Mutation("the input gradient of a column layer is not summed over tp", "parallel/collectives.py",
             "return comm.start_sum(dx, self.group).wait", "return lambda: dx", "llama3-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("a sum under way is read before it has arrived", "parallel/collectives.py",
             "return lambda: work.wait().transpose(0, 1).contiguous()",
             "return lambda: work.result.transpose(0, 1).clone()", "llama3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("a norm is made again from the residual before the branch was added", "model/norm.py",
             "remade(y, self.of, x) if", "remade(y, self.of, residual) if", "llama3-tiny", 2, "tp2 zero0 mb1 selective"),
    Mutation("sequence shards of an input that is made again come back in another order", "parallel/collectives.py",
             "return lambda: work.wait().transpose(0, 1)\n",
             "return lambda: work.wait().roll(1, 0).transpose(0, 1)\n", "llama3-tiny", 2, "tp2 sp zero0 mb1 selective"),
    Mutation("the latent norm's gradient under sequence parallelism is not summed over tp", "model/mla.py",
             '(m.kv_rank,), "ones", sp)', '(m.kv_rank,), "ones", False)', "deepseek-v2-lite-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("the latents' gradients stay those of one rank's heads", "model/mla.py",
             "enter(torch.cat(latents, -1), self.tp, self.sp)", "(enter if self.sp else lambda x, *_: x)(torch.cat(latents, -1), self.tp, self.sp)",
             "deepseek-v3-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("the shared rotary key's gradient counts once a group of heads", "model/mla.py",
             "r = self.turn(r[:, :, None], ctx)[:, :, 0]",
             "r = self.turn(r[:, :, None], ctx)[:, :, 0]\n        r = r * self.tp.size - r.detach() * (self.tp.size - 1)",
             "deepseek-v2-lite-tiny", 2, "tp2 zero0 mb1"),
    Mutation("keys and values of all heads lie one after the other on each tp rank", "model/mla.py",
             "k, v = linear(c, self.kv_up).view(b, -1, self.heads, self.nope + self.v).split((self.nope, self.v), -1)",
             "k, v = (t.unflatten(-1, (self.heads, -1)) for t in linear(c, self.kv_up).split((self.heads * self.nope, self.heads * self.v), -1))",
             "deepseek-v3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("YaRN's growth of the softmax scale is forgotten under context parallelism", "model/mla.py",
             'if m.rope_kind == "yarn" else', 'if m.rope_kind == "yarn" and mesh.cp.size == 1 else', "deepseek-v3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
    Mutation("the token after the next is looked up in a rank's own part of the sequence", "train.py",
             "zigzag.cut(b.look_ahead(run.cfg.model.mtp), run.mesh.cp)", "zigzag.cut(b, run.mesh.cp).look_ahead(run.cfg.model.mtp)",
             "deepseek-v3-tiny", 2, "cp2 no-docs zero0 mb1 cp-ring"),
    Mutation("the loss of further tokens is divided by this rank's tokens", "model/mtp.py",
             "head.cross_entropy(h, targets, scale * self.weight)",
             "head.cross_entropy(h, targets, self.weight / (targets != -100).sum().clamp(min=1))",
             "deepseek-v3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("the embedding of further tokens on the last stage is a table of its own", "model/embed.py",
             "(m.tied or m.mtp > 0) and apart", "m.tied and apart", "deepseek-v3-tiny", 2, "pp2 zero0 1f1b mb1"),
    Mutation("the join's gradient under sequence parallelism is not summed over tp", "model/mtp.py",
             'partial=("tp",) if cfg.parallel.sp else ()))', "partial=()))", "deepseek-v3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("PowerSGD: the second factor is that of this rank's gradient", "parallel/powersgd.py",
             "self.work = comm.start_sum(flat(own), self.group)", "self.work = comm.Work(flat(own))", "llama3-tiny", 2, "dp2 zero0 powersgd"),
    Mutation("PowerSGD: the first factor is orthonormalised before it is summed", "parallel/powersgd.py",
             "[x @ q for x, q", "[orthonormal(x @ q) for x, q", "llama3-tiny", 2, "dp2 zero0 powersgd"),
    Mutation("fp8: a tensor that tp cuts along its outputs has a scale a rank", "parallel/tensor.py",
             "outs=tp if outs else None,", "outs=None,", "llama3-tiny", 2, "tp2 zero0 mb1 tensorwise"),
    Mutation("fp8: a row that tp cuts has the scale of this rank's part", "parallel/tensor.py",
             "ins=None if outs else tp,", "ins=None,", "llama3-tiny", 2, "tp2 zero0 mb1 rowwise"),
    Mutation("fp8: a feature's scale over the tokens is that of this rank's chunks", "parallel/tensor.py",
             "tokens=cp)", "tokens=None)", "llama3-tiny", 2, "cp2 zero0 mb1 rowwise"),
    Mutation("fp8: the transposed weight's rows are taken for whole", "kernels/fp8_linear.py",
             "self.scale(w.t(), RECIPES[self.recipe][1], E4M3, self.ins, self.outs, largest)",
             "self.scale(w.t(), RECIPES[self.recipe][1], E4M3, self.outs, self.ins, largest)", "gpt2-tiny", 2, "tp2 zero0 mb1 rowwise"),
    Mutation("fp8: an input that is made again has another scale", "kernels/fp8_linear.py",
             "coming().flatten(0, -2), largest)", "coming().flatten(0, -2), largest if region is None else largest * 1.5)", "llama3-tiny", 2,
             "tp2 zero0 mb1 tensorwise selective"),
    Mutation("fp8: blocks along the tokens start anew at half of a block", "kernels/fp8_linear.py",
             "self.scale(x.t(), RECIPES[self.recipe][0], E4M3, self.ins, self.tokens, largest)",
             "self.scale(x.t(), RECIPES[self.recipe][0], E4M3, self.ins, self.tokens, largest) if self.tokens is None else "
             "Scaling(self.recipe, self.side // 2).scale(x.t(), RECIPES[self.recipe][0], E4M3, None, None)",
             "llama3-tiny", 2, "cp2 zero0 mb1 blockwise"),
    Mutation("fp8: the rows that an expert has here share a scale", "kernels/fp8_grouped.py",
             "a, b = quantize(x, kind, E4M3, side)", "a, b = quantize(x, kind, E4M3, side, x.abs().amax().expand(len(x), 1))",
             "mixtral-tiny", 2, "dp2 zero0 mb1 rowwise"),
    Mutation("fp8: the experts that a rank has share a scale", "kernels/fp8_grouped.py",
             "largest.repeat_interleave(o)", "largest.amax().expand(e * o)", "mixtral-tiny", 2, "dp2 ep2 zero0 mb1 tensorwise"),
    Mutation("fp8: the rows' gradients have the scale of those that came with them", "kernels/fp8_grouped.py",
             "quantize(dy, kind, dtype, ctx.side), back", "quantize(dy, kind, dtype, ctx.side, dy.abs().amax().expand(len(dy), 1)), back",
             "mixtral-tiny", 2, "dp2 zero0 mb1 tensorwise"),
    Mutation("an offloaded tensor is taken for another of its shape", "parallel/offload.py",
             "(x.data_ptr(), x.dtype, tuple(x.shape)", "(x.dtype, tuple(x.shape)", "llama3-tiny", 1, "offload zero0 mb1"),
    Mutation("offloaded moments are not brought back to the host", "parallel/offload.py",
             "host[cut].copy_(part, non_blocking=True)",
             "host[cut].copy_(part if host is hosts[0] else host[cut])", "llama3-tiny", 2, "dp2 offload zero1 mb1"),
    Mutation("ranks that share a key head keep their own part of its gradient (bigcode Megatron-LM 35)", "parallel/tensor.py",
             '"normal", std, partial=("tp",))) for x in "kv"', '"normal", std)) for x in "kv"', "llama3-tiny", 8, "tp8 zero0 mb1"),
    Mutation("ranks that share key heads take them in turns instead of in blocks", "parallel/tensor.py",
             "head = mesh.tp.index * kv // mesh.tp.size", "head = mesh.tp.index % kv", "llama3-tiny", 8, "tp8 zero0 mb1"),
    Mutation("weight decay reaches norms", "parallel/params.py",
             "return [(slice(a, b), decay, rate, once)", "return [(slice(a, b), decay or not once, rate, once)", "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("muP's rates are lost where ZeRO shards", "parallel/params.py",
             "return [(slice(a, b), decay, rate, once)",
             "return [(slice(a, b), decay, 1.0 if self.zero else rate, once)", "llama3-tiny", 2, "dp2 zero1 mb1 mup"),
    Mutation("a shard takes the muP rate of its first parameter for all", "parallel/params.py",
             "out[-1][2:] == how:", "out[-1][2::2] == how[::2]:", "deepseek-v3-tiny", 2, "dp2 zero2 mb1 mup"),
    Mutation("muP's rate reaches norms whose gradient is partial", "parallel/spec.py",
             "        if self.hidden:\n", "        if self.hidden or self.partial:\n", "llama3-tiny", 2, "tp2 sp zero0 mb1 mup"),
    Mutation("muP takes this rank's share of the inputs for the width", "parallel/spec.py",
             "        if self.hidden:\n",
             "        if self.hidden and self.boxes[0].size[1] < self.boxes[0].shape[1]:\n"
             "            return replace(self, std=self.std / (m / 2)**0.5, rate=2 / m)\n        if self.hidden:\n",
             "llama3-tiny", 2, "tp2 zero0 mb1 mup"),
    Mutation("muP's factor of the logits is missing in the backward of a split head", "model/loss.py",
             "x * self.shrink, self.tp",
             "x * self.shrink if self.tp.size == 1 else x + (x * self.shrink - x).detach(), self.tp", "mixtral-tiny", 2, "tp2 zero0 mb1 mup"),
    Mutation("muP's factor of the logits is counted once a rank", "model/loss.py",
             "x * self.shrink, self.tp", "x * self.shrink**self.tp.size, self.tp", "gpt2-tiny", 2, "tp2 zero0 mb1 mup"),
    Mutation("attention scores under context parallelism are not muP's", "model/attention.py",
             "q = q if self.scale == 1 else", "q = q if self.scale == 1 or ctx.cut else", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring mup"),
    Mutation("muP's rate of a matrix that Muon moves is lost in its exchange", "optim/muon.py",
             "- lr * rate * updates", "- lr * (rate if self.group.size == 1 else 1.0) * updates", "llama3-tiny", 2, "dp2 zero1 muon mup"),
    Mutation("rounding counts from the start of a rank's piece of a tensor: split tensors round otherwise", "parallel/params.py",
             "Place(0, base,", "Place(0, 0,", "llama3-tiny", 2, "dp2 zero3 mb1 adamw-bf16"),
    Mutation("rounding takes a piece's columns for the whole rows", "parallel/params.py",
             "prod(box.size[1:]), row)))", "row, row)))", "llama3-tiny", 2, "tp2 zero0 mb1 adamw-bf16"),
    Mutation("rounding depends on the rank: replicas drift apart", "optim/adamw.py",
             "salt=salt(seed, step, key)", "salt=salt(seed, step, f'{key}{lo > 0}')", "llama3-tiny", 2, "dp2 zero1 mb1 adamw-bf16"),
    Mutation("in-place all-reduce overwrites the router's local counts (Megatron-LM 7452, finding 10)", "model/moe.py",
             "counts = counts.clone() if m.aux_kind", "counts = counts if m.aux_kind", "mixtral-tiny", 2, "cp2 zero0 mb1"),
    Mutation("the clip norm leaves out experts of other ranks (Megatron-LM 5916)", "optim/clip.py",
             "mesh.eshard, mesh.emodel", "mesh.eshard, mesh.model", "mixtral-tiny", 4, "dp2 tp2 ep4 zero0 mb1"),
    Mutation("expert gradients are summed over the ranks of the dense parameters (Megatron-LM 5916)", "parallel/params.py",
             "(mesh.eshard, mesh.eloss) if self.expert", "(mesh.shard, mesh.loss) if self.expert", "mixtral-tiny", 2, "dp2 ep2 zero0 mb1"),
    Mutation("probabilities travel without their gradient: the router learns from its own losses alone (Automodel 2995)", "parallel/expert.py",
             "(x, probs.reshape(-1, 1)))",
             "(x, (probs if p.group.size == 1 else probs.detach()).reshape(-1, 1)))", "mixtral-tiny", 2, "dp2 ep2 zero0 mb1"),
    Mutation("an expert without tokens in a microbatch loses what it had (Automodel 2995)", "kernels/grouped_gemm.py",
             "        if n:\n            add_wgrad(part, filled(rows), filled(inputs))",
             "        add_wgrad(part, rows, inputs) if n else part.zero_()",
             "mixtral-tiny", 4, "cp4 zero0 mb1 cp-ring"),
    Mutation("gradients of experts are doubled at ep 2 (pytorch 160285)", "parallel/expert.py",
             "ctx.flight.start(dy, False)", "ctx.flight.start(dy * ctx.flight.plan.group.size, False)", "mixtral-tiny", 2, "dp2 ep2 zero0 mb1"),
    Mutation("the sequence-wise balance counts a sequence shard alone (Megatron-LM 5996)", "model/moe.py",
             "comm.sum_(counts, self.mesh.tokens)", "comm.sum_(counts, self.mesh.cp)", "mixtral-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("the auxiliary loss is divided by the microbatch's tokens", "model/moe.py",
             "aux = learn.scale * m.aux_loss *", "aux = m.aux_loss / (counted.sum() + 1) *", "mixtral-tiny", 1, "zero0 mb2"),
    Mutation("the router's gradient is not summed over the tp ranks that routed other tokens", "model/moe.py",
             """"normal", m.init_std, partial=("tp",)))""", """"normal", m.init_std))""", "mixtral-tiny", 2, "tp2 zero0 mb1"),
    Mutation("the shared experts' gate has a partial gradient under sequence parallelism", "model/moe.py",
             'partial=("tp",) if self.sp else ())) if m.shared_gate', "partial=())) if m.shared_gate", "qwen2-moe-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("the router's bias moves by this rank's counts", "model/moe.py",
             "counts = self.told[self.layers.index(r.layer), :m.experts]", "counts = r.told[:m.experts]", "dots1-tiny", 2, "dp2 zero0 mb1"),
    Mutation("the global balance uses this rank's counts", "model/moe.py",
             "self.told = comm.sum_(every, self.mesh.world)", "self.told = comm.sum_(every, self.mesh.pp)", "qwen3-moe-tiny", 2, "dp2 zero0 mb1"),
    Mutation("both ranks that share an expert hold its first half", "model/moe.py",
             "self.group.index % self.etp * part", "0 * part", "mixtral-tiny", 2, "dp2 etp2 zero0 mb1"),
    Mutation("expert outputs go back in the order in which rows came, not by expert", "parallel/expert.py",
             "permute(rows, p.back, p.order[:, None])", "permute(rows, p.order, p.back[:, None])", "mixtral-tiny", 2, "dp2 ep2 zero0 mb1"),
    Mutation("a sequence's queue for a full expert stands in the order of ranks", "model/moe.py",
             "zigzag.join(comm.gather(both[None], cp))", "comm.gather(both[None], cp).transpose(0, 1).flatten(1, 2)", "qwen2-moe-tiny", 2,
             "cp2 zero0 mb1 cp-ring capacity"),
    Mutation("rows that fill up an expert are copies of a token, and its gradient reaches the expert", "parallel/expert.py",
             "mine.clamp(max=t * k), torch", "mine.clamp(max=t * k - 1), torch", "qwen2-moe-tiny", 2, "tp2 zero0 mb1 padded"),
    Mutation("jitter restarts on every tp rank", "model/moe.py",
             "take_dim1(noise.columns[None], mesh.tp)[0]",
             "noise.columns[:len(noise.columns) // mesh.tp.size]", "mixtral-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("recompute tells a router's counts twice", "model/moe.py",
             "        aux, told = self.losses(logits, scores, index, learn)\n",
             "        aux, told = self.losses(logits, scores, index, learn)\n        self.told += told * (self.mesh.tp.size > 1)\n",
             "mixtral-tiny", 2, "tp2 zero0 mb1 full"),
    Mutation("a norm over all heads takes the mean of this rank's in its backward", "parallel/tensor.py",
             "comm.sum_((gw * hat).sum(-1, keepdim=True), ctx.group)",
             "(gw * hat).sum(-1, keepdim=True) * ctx.group.size", "olmoe-tiny", 2, "tp2 zero0 mb1"),
    Mutation("inputs of experts lose the other tp ranks' gradients", "parallel/collectives.py",
             "return gather_dim1(dy, ctx.group)[:, :ctx.s], None",
             "return gather_dim1(dy.roll(1, 1), ctx.group)[:, :ctx.s], None", "mixtral-tiny", 2, "tp2 no-sp zero0 mb1"),
    Mutation("tokens and targets of a batch of one window are one memory: the mask is written into the tokens",
             "data/pack.py", "ids[:, :-1].clone(), ids[:, 1:].clone()",
             "ids[:, :-1].contiguous(), ids[:, 1:].contiguous()", "llama3-tiny", 2, "dp2 zero0 mb1 docs"),
    Mutation("the cache grows once a stage, not once a token: a rank with two stages writes other text",
             "parallel/pipeline.py",
             "                if number == last:\n                    x = stage.head_logits(x, at)\n"
             "        if cache is not None:\n            cache.length += tokens.shape[1]\n",
             "                if cache is not None:\n                    cache.length += tokens.shape[1]\n"
             "                if number == last:\n                    x = stage.head_logits(x, at)\n",
             "llama3-tiny", 2, "pp2 zero0 zb-v mb1"),
    Mutation("a rank reads its neighbour's share of the batch", "data/loader.py",
             "sequences(t, step) + self.rank * share", "sequences(t, step) + (self.rank + 1) % self.world * share",
             "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("rows of a batch are counted from the rank's first", "data/loader.py",
             "torch.arange(share) + self.rank * share", "torch.arange(share)", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("a resumed run reads the first samples again", "train.py",
             "data.microbatches(step - 1)", "data.microbatches(step - 1 - start)", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("a resumed run begins with second moments of zero", "checkpoint/state.py",
             "    take(run.buckets)\n    run.scaler.load(",
             "    for v in run.optim.state()[\"adam_v\"]:\n        v.zero_()\n"
             "    take(run.buckets)\n    run.scaler.load(", "llama3-tiny", 2, "dp2 zero1 mb1" + ADAMW),
    Mutation("the masters that a resume loads are not published: other shares are those of the start",
             "checkpoint/state.py", "    take(run.buckets)\n    run.scaler.load(", "    run.scaler.load(",
             "llama3-tiny", 2, "dp2 zero1 mb1"),
    Mutation("a skipped step moves the weights", "optim/adamw.py",
             "        if ok.device.type == \"cpu\" and not ok:\n            return\n",
             "        ok = torch.ones_like(ok)\n", "llama3-tiny", 2, "dp2 zero0 mb1" + ADAMW),
    Mutation("a skipped step moves the moments", "optim/adamw.py",
             "        if ok.device.type == \"cpu\" and not ok:\n            return\n",
             "        if ok.device.type == \"cpu\" and not ok:\n"
             "            for m in self.m if self.buckets[0].everyone.size > 1 else ():\n"
             "                m.mul_(self.cfg.beta1)\n            return\n",
             "llama3-tiny", 2, "dp2 zero0 mb1" + ADAMW),
    Mutation("the validation loss is divided by this rank's tokens", "runtime/evaluate.py",
             "tokens, size = comm.sum_(counted, group).unbind()", "tokens, size = (group.size * counted).unbind()",
             "llama3-tiny", 2, "dp2 zero0 docs"),
    Mutation("every rank validates on the sequences of the first", "train.py",
             "open_data(cfg, split, mesh.data.index, mesh.data.size)",
             "open_data(cfg, split, mesh.data.index * (split == \"train\"), mesh.data.size)",
             "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("a checkpoint has what tp ranks hold alike once a rank", "parallel/params.py",
             "if alone and not (slot.once and copies.index == 0):", "if alone and copies.index:",
             "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("nobody writes what tp ranks hold alike into the checkpoint", "parallel/params.py",
             "if alone and not (slot.once and copies.index == 0):",
             "if alone and not (slot.once and copies.index == 0 and (self.group.size > 1 or not slot.param.spec.partial)):",
             "llama3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("gradients are zeroed by a factor of 0: the NaN of a skipped step stays", "parallel/params.py",
             "(self.shard if self.zero >= 2 else self.grad).zero_()",
             "(self.shard if self.zero >= 2 else self.grad).mul_(0)", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("the loss is summed over the pipeline alone", "parallel/pipeline.py",
             "comm.sum_(comm.sum_(total, self.mesh.loss), self.mesh.pp)", "comm.sum_(total, self.mesh.pp)",
             "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("the router's bias is not in the checkpoint", "model/moe.py",
             '(("bias", self.bias), ("load", self.load))', '(("load", self.load),)', "dots1-tiny", 2, "dp2 zero0 mb1"),
    Mutation("queries of a second tile are masked with the rows of the first", "kernels/partial_attention.py",
             "see[:, :, None, rows]", "see[:, :, None, :rows.stop - rows.start]",
             "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring wide"),
    Mutation("rows of a second chunk of logits meet the targets of the first", "kernels/cross_entropy.py",
             "h, y = hidden[first:first + chunk], targets[first:first + chunk]",
             "h, y = hidden[first:first + chunk], targets[:min(chunk, len(targets) - first)]",
             "llama3-tiny", 2, "dp2 zero0 mb1 wide"),
    Mutation("of a bucket with several parameters the first alone is summed", "parallel/params.py",
             "start_sum(self.grad, self.everyone,", "start_sum(self.grad[:self.slots[0].numel], self.everyone,",
             "llama3-tiny", 2, "dp2 zero0 mb1 wide" + PLAIN_SUMS),
    Mutation("Muon reads what comes before it is there", "optim/muon.py",
             "comm.start_all_to_all(flat, sent, came, group).wait()",
             "comm.start_all_to_all(flat, sent, came, group).result.clone()", "llama3-tiny", 2, "dp2 zero1 muon"),
    Mutation("the ring adds what comes before it is there", "parallel/reduce.py",
             "    for work in comm.exchange([(send, to)], [(out, source)], group):\n        work.wait()\n    return out",
             "    works, out = comm.exchange([(send, to)], [(out, source)], group), out.clone()\n"
             "    for work in works:\n        work.wait()\n    return out", "llama3-tiny", 2, "dp2 zero0 mb1 ring"),
    Mutation("the clip norm is summed over the pipeline, not over tp", "optim/clip.py",
             "(False, mesh.shard, mesh.model)", "(False, mesh.shard, mesh.pp)", "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("replicas of a shard are summed over cp", "parallel/params.py",
             "self.replicas, self.hidden = mesh.dp_rep,", "self.replicas, self.hidden = mesh.cp,",
             "llama3-tiny", 2, "rep2 zero1 mb1"),
    Mutation("Muon shares matrices out among the ranks of a shard", "optim/muon.py",
             "cfg, buckets, mesh.stage", "cfg, buckets, mesh.shard", "llama3-tiny", 2, "tp2 zero0 muon"),
    Mutation("the last element of a partial gradient is not summed over tp", "parallel/params.py",
             "return [self.shard[a:b] for a, b in ranges if a < b]",
             "return [self.shard[a:b - 1] for a, b in ranges if a < b]", "llama3-tiny", 2, "tp2 sp zero0 mb1"),
    Mutation("the last element of a tensor's part in a shard is not updated", "optim/adamw.py",
             "slice(max(a, lo) - lo, min(b, hi) - lo)", "slice(max(a, lo) - lo, min(b, hi - 1) - lo)",
             "llama3-tiny", 2, "dp2 zero1 mb1 adamw-bf16"),
    Mutation("pieces of split tensors lie as if the rank's part began at zero", "parallel/params.py",
             "where = tuple(x + y for x, y in zip(box.start, start))", "where = start",
             "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("every rank of a split vocabulary looks into the first rows", "parallel/tensor.py",
             "here = ids - group.index * weight.shape[0]", "here = ids", "llama3-tiny", 2, "tp2 zero0 mb1"),
    Mutation("the clip norm is that of this rank's shards", "optim/clip.py",
             "squares = comm.sum_(squares, shard)", "squares = 1.0 * squares", "llama3-tiny", 2, "dp2 zero1 mb1"),
    Mutation("the clip norm is summed over the shards that are whole, not over the model", "optim/clip.py",
             "(False, mesh.shard, mesh.model)", "(False, mesh.model, mesh.shard)", "llama3-tiny", 2, "dp2 zero0 mb1"),
    Mutation("queries and keys of a meeting are taken for each other", "parallel/ring.py",
             "meetings(group.index, (group.index - step) % group.size,",
             "meetings((group.index - step) % group.size, group.index,", "llama3-tiny", 2, "cp2 zero0 mb1 cp-ring"),
)


def plant(m: Mutation, folder: Path) -> None:
    """A copy of the checkout with the bug in it."""
    for name in (n for n in files_of(ROOT) if not n.startswith(("tests/", "docs/"))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    text = (folder / m.file).read_text()
    if m.old not in text:
        raise ConfigError(
            f"scripts/mutate/table.py: {m.what}: {m.file} no longer has {m.old!r}; bring the table up to date"
        )
    (folder / m.file).write_text(text.replace(m.old, m.new))


def caught(m: Mutation) -> tuple[bool, str]:
    """Whether verify failed on the planted copy, and the line in which it said why. Raises ConfigError where
    verify gave no verdict: an error exit, words that no layout has, or no end."""
    with tempfile.TemporaryDirectory(prefix="bevatron-mutant-") as folder:
        (home := Path(folder, "checkout")).mkdir()
        plant(m, home)
        words = [] if m.layout == ALIKE else ["--only", *m.layout.split()]
        command = [sys.executable, "-m", "scripts.verify", m.model, "--world", str(m.world), "--layouts", "2"]
        ran = ends([*command, *words], home, LIMIT_S, Path(folder, "log"))
    said = [" ".join(line.split()) for line in ran.log.splitlines()]
    if m.layout == ALIKE and ran.code == 2 and REFUSED in ran.log:  # verify refuses to begin with these
        return True, complaint(ran)
    wrong = [line for line in said if line.startswith("WRONG")]
    if not judged(ran) or ran.code == 1 and not wrong:
        how = "did not end" if ran.code is None else complaint(ran)
        raise ConfigError(f"scripts/mutate/table.py: {m.what}: no verdict of scripts.verify: {how}")
    return ran.code == 1, wrong[0] if wrong else ""


def run(only: list[str], world: int) -> int:
    """The bugs whose text has all the words and that need no more ranks; the exit code."""
    table = [m for m in TABLE if m.world <= world and all(w in f"{m.what} {m.file} {m.layout}" for w in only)]
    missed, begun = 0, time.perf_counter()
    for m in table:
        found, said = caught(m)
        missed += not found
        print(f"{'caught' if found else 'MISSED':<7} {m.what}\n        {said or 'verify saw nothing'}", flush=True)
    print(f"{len(table) - missed} of {len(table)} planted bugs caught ({time.perf_counter() - begun:.0f} s)")
    return 1 if missed else 0
