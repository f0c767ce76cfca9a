"""The table of planted bugs: python -m scripts.mutate [--world 4] [--only WORD ...]

Plants one silent bug at a time into a copy of this checkout and runs scripts.verify on layouts that the bug
can affect. Each bug is of a class of faults that published codebases had. A bug that verify does not see is
a hole in the proof: exit 1.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config import OPTIMIZERS, ConfigError
from config.parts import part_of
from config.provenance import checkout_files
from lab.proof.mutate.checkout import ROOT
from lab.proof.mutate.control import has_verdict, last_output_line, run_command
from lab.proof.mutate.draw import Mutant, make_mutant
from lab.proof.mutate.source import Edit, Source

INITIAL_WEIGHTS = "initial weights"  # in the place of a layout: what verify checks before it runs one
LIMIT_S = 600.0
# a copy that dies of these was not built to run wrong: its text was replaced where it means something else
BROKEN_COPY = tuple(f"died: {name}" for name in (
    "AttributeError", "ImportError", "IndentationError", "NameError", "SyntaxError", "TypeError",
    "UnboundLocalError",
))
ADAMW_ONLY = "".join(f" no-{name}" for name in OPTIMIZERS if name != "adamw")
PLAIN_SUMS = " no-reduce-ring no-reduce-hierarchy no-reduce-server no-powersgd"


@dataclass(frozen=True)
class Mutation:
    """A planted bug.

    what: the fault in words, and where it was seen (NAME NUMBER: an issue or pull request).
    file, old, new: the edit.
    model, world, layout: a recipe, a number of ranks and the words of a layout in which the bug acts.
    is_strict: a hazard that gloo hides, since its exchanges end in wait(): for verify --strict.
    settings: overrides of verify, without which the bug does not act.
    """

    what: str
    file: str
    old: str
    new: str
    model: str
    world: int
    layout: str
    is_strict: bool = False
    settings: tuple[str, ...] = ()


TABLE = (
    Mutation(
        what="norm gradient under sequence parallelism is not summed over tp (Megatron-LM 1446)",
        file="model/norm.py",
        old='"norm", is_partial=sp)',
        new='"norm", is_partial=False)',
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="per-head norm gradient is summed only under sequence parallelism (Megatron-LM 7452)",
        file="model/attention.py",
        old=(
            'self.head_dim, "norm", is_partial=True)\n'
            "            if not self.reads_keys:\n"
            "                self.k_norm = replicated_vector(\n"
            '                    f"{key}.k_norm.weight", self.head_dim, "norm", is_partial=True)'
        ),
        new=(
            'self.head_dim, "norm", cfg.parallel.sp)\n'
            "            if not self.reads_keys:\n"
            "                self.k_norm = replicated_vector(\n"
            '                    f"{key}.k_norm.weight", self.head_dim, "norm", cfg.parallel.sp)'
        ),
        model="qwen3-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what="replicated logits meet a vocab-parallel loss: too high by log(tp) (Megatron-LM 7452)",
        file="parallel/tensor/layers.py",
        old="return merge if group.size > 1 else None",
        new="return (lambda lse, picked: merge(lse, picked / group.size)) if group.size > 1 else None",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="the target's logit counts on every rank of a split vocabulary",
        file="parallel/tensor/layers.py",
        old="parts[:, 1].sum(0)",
        new="parts[:, 1].mean(0)",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="a tp-replicated parameter counts once a rank in the clip norm (Megatron-LM 7452)",
        file="parallel/sharding/bucket.py",
        old="if param.spec.is_replicated_over_tp and mesh.tp.index > 0:",
        new="if False:",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="a tied table counts twice in the clip norm",
        file="parallel/sharding/bucket.py",
        old="return param.spec.is_first_end(mesh.pp.index)",
        new="return True",
        model="llama3.2-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
    ),
    Mutation(
        what="tied embedding and head drift apart (Megatron-LM 656)",
        file="parallel/sharding/bucket.py",
        old='(("tp", mesh.tp), ("embedding_ends", mesh.embedding_ends))',
        new='(("tp", mesh.tp),)',
        model="llama3.2-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
    ),
    Mutation(
        what="the row-parallel bias is added on every rank",
        file="parallel/tensor/layers.py",
        old="leave_region(self.multiply(x, bias=None), self.tp, self.sp)",
        new="leave_region(self.multiply(x, self.bias), self.tp, self.sp)",
        model="gpt2-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="the schedule of a ramp's first batch runs on: later microbatches are dropped",
        file="train.py",
        old="run.schedules[len(microbatches)]",
        new="run.schedules[min(run.schedules)]",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1 ramp",
    ),
    Mutation(
        what="microbatches with unequal token counts get equal weight (torchtitan 1842)",
        file="train.py",
        old=(
            "num_targets = torch.stack([batch.num_counted() for batch in microbatches]).sum()\n"
            "    return comm.all_reduce_sum(num_targets, mesh.dp_cp)"
        ),
        new="return len(microbatches) * microbatches[0].num_counted()",
        model="llama3-tiny",
        world=1,
        layout="zero0 mb2 docs",
    ),
    Mutation(
        what="the loss is divided by this rank's tokens (Megatron-LM 673)",
        file="train.py",
        old="return comm.all_reduce_sum(num_targets, mesh.dp_cp)",
        new="return mesh.dp_cp.size * num_targets",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="only the last microbatch trains (Fast-LLM 550)",
        file="kernels/linear.py",
        old="return into.addmm_(dy.t(), x)",
        new="return into.copy_(dy.t() @ x)",
        model="llama3-tiny",
        world=1,
        layout="zero0 mb1",
    ),
    Mutation(
        what="the deferred weight gradient never arrives (pytorch 153833)",
        file="parallel/pipeline/executor.py",
        old="            write_grad(weight, compute)",
        new="            compute(weight.main_grad.clone(), weight.grad_is_written)",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 zb-h1 mb1",
    ),
    Mutation(
        what="a deferred weight gradient goes into the buffer of the I, which ZeRO-2 has sent away",
        file="parallel/pipeline/executor.py",
        old="self.pending.setdefault(self.microbatch, []).append((weight, compute))",
        new=(
            "weight = type('W', (), {'main_grad': weight.main_grad, 'grad_is_written': False})\n"
            "        self.pending.setdefault(self.microbatch, []).append((weight, compute))"
        ),
        model="llama3-tiny",
        world=2,
        layout="pp2 zero2 zb-h1 mb1",
    ),
    Mutation(
        what="a stale ZeRO shard: weights are not gathered after the update",
        file="parallel/sharding/weights.py",
        old="if self.zero == 0 or self.group.size == 1:",
        new="if True:",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
    ),
    Mutation(
        what="ZeRO-3 keeps whole weights from before the update",
        file="parallel/sharding/weights.py",
        old=(
            "self.full = None\n"
            "        self.pending_gather = None\n"
        ),
        new=(
            "self.pending_gather = None\n"
            "        return\n"
        ),
        model="llama3.2-tiny",
        world=2,
        layout="dp2 zero3 mb1",
    ),
    Mutation(
        what="gradients are averaged over the data ranks although the loss is already a mean",
        file="parallel/sharding/gradients.py",
        old="self.start_all_reduce(self.full, over_replicas=False)",
        new="self.start_all_reduce(self.full.div_(self.groups.reduce.size), over_replicas=False)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="replicas of a shard group are forgotten (HSDP)",
        file="parallel/sharding/gradients.py",
        old="        if self.pending_scatter_is_last:",
        new="        if False:",
        model="llama3-tiny",
        world=2,
        layout="rep2 zero1 mb1",
    ),
    Mutation(
        what="ZeRO-2 with accumulation reduces the first microbatch alone (DeepSpeed 966)",
        file="parallel/sharding/gradients.py",
        old="write_or_add(self.local, part, add=self.local_is_written)",
        new="write_or_add(self.local, part, False) if not self.local_is_written else None",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero2 mb1",
    ),
    Mutation(
        what="gradients doubled where the group has two ranks (pytorch 160285)",
        file="parallel/tensor/regions.py",
        old="return comm.all_reduce_sum(dy.clone(), ctx.group), None",
        new="return comm.all_reduce_sum(dy.clone(), ctx.group) * 2, None",
        model="llama3-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what="the input gradient of the head is not summed over tp",
        file="parallel/tensor/regions.py",
        old="return comm.all_reduce_sum(dy.clone(), ctx.group), None",
        new="return dy, None",
        model="llama3-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what="sequence shards of tp ranks are swapped in the gather's backward",
        file="parallel/tensor/regions.py",
        old="return comm.reduce_scatter_each(x, group)",
        new="return comm.reduce_scatter_each(x.flip(1), group).flip(1)",
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="a microbatch meets another one's activations (Megatron-LM 5100)",
        file="parallel/pipeline/executor.py",
        old="microbatches[op.microbatch], scale)",
        new="microbatches[op.microbatch - (op.stage > 0)], scale)",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
    ),
    Mutation(
        what="dropout depends on the rank's own row numbers",
        file="model/transformer.py",
        old="microbatch.step, microbatch.sequence_ids,",
        new="microbatch.step, microbatch.sequence_ids - microbatch.sequence_ids[0],",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="dropout columns restart on every sequence shard",
        file="model/transformer.py",
        old="positions = local_chunk(positions[None], self.mesh.tp)[0]",
        new="positions = positions[:len(positions) // self.mesh.tp.size]",
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="interleaved chunks start with identical weights (OLMo-core)",
        file="parallel/sharding/spec.py",
        old='f"{seed}/{box.key}/{block}"',
        new="""f"{seed}/{box.key.split('.', 2)[-1]}/{block}" """,
        model="llama3-tiny",
        world=2,
        layout="initial weights",
    ),
    Mutation(
        what="the learned positions of sequence shards are those of the first shard",
        file="model/embedding.py",
        old="local_chunk(positions, self.tp) if self.sp",
        new="positions[:, :positions.shape[1] // self.tp.size] if self.sp",
        model="gpt2-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="ring attention's backward reads the keys and values of step 0 at every step (diffusers 14265)",
        file="parallel/context/ring.py",
        old="k=step_k[:, keys],\n                    v=step_v[:, keys],",
        new="k=k[:, keys],\n                    v=v[:, keys],",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="a step of the ring overwrites the gradients of the step before",
        file="parallel/context/ring.py",
        old="                    add=True,\n",
        new="                    add=False,\n",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="ring attention ignores document boundaries (axolotl 4002)",
        file="parallel/context/zigzag.py",
        old="visible = make_attention_mask(*place, window, documents, device,",
        new="visible = make_attention_mask(*place, window, None if pair.distance else documents, device,",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring docs",
    ),
    Mutation(
        what="the window is counted in local places",
        file="parallel/context/zigzag.py",
        old="place = (pair.query_chunk * chunk_size, chunk_size, pair.key_chunk * chunk_size, chunk_size)",
        new="place = (min(pair.distance, 1) * chunk_size, chunk_size, 0, chunk_size)",
        model="mistral-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="the window hides a chunk that it still touches",
        file="parallel/context/zigzag.py",
        old="nearest = (pair.distance - 1) * chunk_size + 1",
        new="nearest = pair.distance * chunk_size",
        model="mistral-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="the halves of the zigzag are swapped on arrival",
        file="parallel/context/zigzag.py",
        old="torch.cat((early, late.flip(0)))",
        new="torch.cat((early, late))",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ulysses",
    ),
    Mutation(
        what="positions restart on every rank of a context-parallel group",
        file="parallel/context/zigzag.py",
        old="positions=batch.positions[:, mine]",
        new="positions=batch.positions[:, :len(mine)]",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="targets of another half of the sequence",
        file="parallel/context/zigzag.py",
        old="targets=batch.targets[:, mine]",
        new="targets=batch.targets[:, mine.roll(len(mine) // 2)]",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ulysses",
    ),
    Mutation(
        what="the loss is a mean over this rank's tokens under context parallelism (Megatron-LM 673, 906)",
        file="train.py",
        old="return comm.all_reduce_sum(num_targets, mesh.dp_cp)",
        new="return mesh.dp_cp.size * num_targets",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="context-parallel ranks' tokens are counted over the data ranks alone",
        file="train.py",
        old="comm.all_reduce_sum(num_targets, mesh.dp_cp)",
        new="comm.all_reduce_sum(num_targets, mesh.dp)",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="dropout columns restart on every rank of a context-parallel group",
        file="model/transformer.py",
        old="if positions is None:",
        new="if True:",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="gradients of keys stay with the rank that made them",
        file="parallel/context/ring.py",
        old="send_to_next_rank(dkv + wait_received(dkv_passing), group)",
        new="send_to_next_rank((wait_received(dkv_passing), dkv)[1], group)",
        model="llama3-tiny",
        world=4,
        layout="cp4 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="partial outputs are averaged, not weighted by their sums",
        file="kernels/partial_attention.py",
        old="both = torch.logaddexp(lse, other_lse)",
        new="both = lse.maximum(other_lse)",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="a whole prompt is treated as a cut one in generation",
        file="model/context.py",
        old="sequence_is_sharded: bool = False,",
        new="sequence_is_sharded: bool = True,",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="query heads come back from the all-to-all interleaved",
        file="parallel/context/ulysses.py",
        old=".movedim(0, 2).flatten(2, 3)",
        new=".movedim(0, 3).flatten(2, 3)",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ulysses",
    ),
    Mutation(
        what="LAMB's norms are those of this rank's shards",
        file="optim/lamb.py",
        old="comm.all_reduce_sum(squares, self.mesh.world).sqrt()",
        new="squares.sqrt()",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 lamb",
    ),
    Mutation(
        what="Muon's pieces arrive in another order than they were sent",
        file="optim/muon_exchange.py",
        old="[boxes_to_owner(rank, me) for rank in ranks]",
        new="[boxes_to_owner(rank, me)[::-1] for rank in ranks]",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 muon",
    ),
    Mutation(
        what="replicas of a matrix's owner keep the old momentum's update (Muon)",
        file="optim/muon_exchange.py",
        old="[boxes_to_holder(me, rank) for rank in ranks]",
        new="[boxes_to_holder(me, rank) if rank == me + 1 else [] for rank in ranks]",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 muon",
    ),
    Mutation(
        what="the input gradient of a column layer is not summed over tp",
        file="parallel/tensor/regions.py",
        old="return comm.start_all_reduce(dx, self.group).wait",
        new="return lambda: dx",
        model="llama3-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what="sequences of a microbatch change places in a gather",
        file="parallel/wire/comm.py",
        old="allgather_into_tensor_coalesced(results, messages, options)",
        new="allgather_into_tensor_coalesced(results, messages[::-1], options)",
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb2",
    ),
    Mutation(
        what="a sum under way is read before it has arrived",
        file="parallel/tensor/regions.py",
        old="return comm.start_reduce_scatter_each(dx, self.group).wait",
        new="return comm.start_reduce_scatter_each(dx, self.group).result.clone",
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the next stage gets the branch of the last block without the residual",
        file="model/transformer.py",
        old="with_keys(add_residual(x, residual), context",
        new="with_keys(x, context",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 mb1",
    ),
    Mutation(
        what="a norm is made again from the residual before the branch was added",
        file="model/norm.py",
        old="recompute_output(y, self.normalize, total)",
        new="recompute_output(y, self.normalize, total if residual is None else residual)",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1 selective",
    ),
    Mutation(
        what="sequence shards of an input that is made again come back in another order",
        file="parallel/tensor/regions.py",
        old="return comm.start_all_gather_each(x, self.group).wait\n",
        new=(
            "work = comm.start_all_gather_each(x, self.group)\n"
            "        return lambda: work.wait().roll(1, 1)\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1 selective",
    ),
    Mutation(
        what="the latent norm's gradient under sequence parallelism is not summed over tp",
        file="model/mla.py",
        old='.weight", rank, "norm", is_partial=self.sp)',
        new='.weight", rank, "norm", is_partial=False)',
        model="deepseek-v2-lite-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the latents' gradients stay those of one rank's heads",
        file="model/mla.py",
        old="enter_region(torch.cat(latents, -1), self.tp, self.sp)",
        new="(enter_region if self.sp else lambda x, *_: x)(torch.cat(latents, -1), self.tp, self.sp)",
        model="deepseek-v3-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what="the shared rotary key's gradient counts once a group of heads",
        file="model/mla.py",
        old="s = q.shape[1]\n        angles",
        new=(
            "s = q.shape[1]\n"
            "        rope_key = rope_key * self.tp.size - rope_key.detach() * (self.tp.size - 1)\n"
            "        angles"
        ),
        model="deepseek-v2-lite-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="keys and values of all heads lie one after the other on each tp rank",
        file="model/mla.py",
        old="kv = linear(latent, self.kv_up).unflatten(-1, (self.heads, -1))\n",
        new=(
            "kv = linear(latent, self.kv_up)\n"
            "        parts = kv.split((self.heads * self.nope_dim, self.heads * self.value_dim), -1)\n"
            "        kv = torch.cat([part.unflatten(-1, (self.heads, -1)) for part in parts], -1)\n"
        ),
        model="deepseek-v3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="all sequences of a microbatch have their keys rotated by the positions of the first",
        file="kernels/head_norm.py",
        old="k = apply_rope(k, cos, sin, compiled)",
        new="k = apply_rope(k, cos[:1].expand_as(cos), sin[:1].expand_as(sin), compiled)",
        model="qwen3-tiny",
        world=2,
        layout="dp2 docs zero0 mb2",
    ),
    Mutation(
        what="the latent key that all heads share is rotated by the positions of the first sequence",
        file="kernels/latent_heads.py",
        old="rope_key = rotate_channels(rope_key, *angles, pairs, compiled)",
        new="rope_key = rotate_channels(rope_key, *(x[:1].expand_as(x) for x in angles), pairs, compiled)",
        model="deepseek-v3-tiny",
        world=2,
        layout="dp2 docs zero0 mb2",
    ),
    Mutation(
        what="YaRN's growth of the softmax scale is forgotten under context parallelism",
        file="model/mla.py",
        old="self.score_scale = score_scale(model)",
        new="self.score_scale = score_scale(model) if mesh.cp.size == 1 else mup_score_scale(model)",
        model="deepseek-v3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="the token after the next is looked up in a rank's own part of the sequence",
        file="train.py",
        old="shard_batch(batch.with_tokens_ahead(depth), run.mesh.cp)",
        new="shard_batch(batch, run.mesh.cp).with_tokens_ahead(depth)",
        model="deepseek-v3-tiny",
        world=2,
        layout="cp2 no-docs zero0 mb1 cp-ring",
    ),
    Mutation(
        what="the loss of further tokens is divided by this rank's tokens",
        file="model/mtp.py",
        old="cross_entropy(h, targets, scale * self.loss_weight)",
        new="cross_entropy(h, targets, self.loss_weight / (targets != -100).sum().clamp(min=1))",
        model="deepseek-v3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="the embedding of further tokens on the last stage is a table of its own",
        file="model/embedding.py",
        old="is_shared = cfg.model.tied or cfg.model.mtp is not None",
        new="is_shared = cfg.model.tied",
        model="deepseek-v3-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
    ),
    Mutation(
        what="the join's gradient under sequence parallelism is not summed over tp",
        file="model/mtp.py",
        old="partial_over = partial_over_tp(cfg.parallel.sp)",
        new="partial_over = ()",
        model="deepseek-v3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="PowerSGD: the second factor is that of this rank's gradient",
        file="parallel/sharding/powersgd.py",
        old="self.work = comm.start_all_reduce(flatten_parts(right_factors), self.group)",
        new="self.work = comm.PendingExchange(flatten_parts(right_factors))",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 powersgd",
    ),
    Mutation(
        what="PowerSGD: the first factor is orthonormalised before it is summed",
        file="parallel/sharding/powersgd.py",
        old="[matrix @ basis for matrix",
        new="[orthonormal(matrix @ basis) for matrix",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 powersgd",
    ),
    Mutation(
        what="fp8: a tensor that tp cuts along its outputs has a scale a rank",
        file="parallel/tensor/layers.py",
        old="outs=over_tp,",
        new="outs=None,",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1 tensorwise",
    ),
    Mutation(
        what="fp8: a row that tp cuts has the scale of this rank's part",
        file="parallel/tensor/layers.py",
        old="ins=over_tp,",
        new="ins=None,",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1 rowwise",
    ),
    Mutation(
        what="fp8: a feature's scale over the tokens is that of this rank's chunks",
        file="parallel/tensor/layers.py",
        old="over_cp = partial(comm.all_reduce_max_float, group=mesh.cp) if mesh.cp.size > 1 else None",
        new="over_cp = None",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 rowwise",
    ),
    Mutation(
        what="fp8: a tensor that tp and cp cut has a scale for each rank of cp",
        file="parallel/tensor/layers.py",
        old="all_parts = partial(comm.all_reduce_max_float, group=mesh.tp_cp)",
        new="all_parts = partial(comm.all_reduce_max_float, group=mesh.tp)",
        model="llama3-tiny",
        world=4,
        layout="tp2 cp2 zero0 mb1 tensorwise",
    ),
    Mutation(
        what="fp8: the transposed weight's rows are taken for whole",
        file="kernels/fp8_linear.py",
        old="    return maxima, maxima.columns if divides_outputs else maxima.rows\n",
        new="    return maxima, maxima.columns.clone() if divides_outputs else maxima.rows\n",
        model="gpt2-tiny",
        world=2,
        layout="tp2 zero0 mb1 rowwise",
    ),
    Mutation(
        what="fp8: the weight's shards are taken for those of its other dim",
        file="kernels/fp8_linear.py",
        old="    return maxima, maxima.columns if divides_outputs else maxima.rows\n",
        new="    return maxima, maxima.rows if divides_outputs else maxima.columns\n",
        model="gpt2-tiny",
        world=2,
        layout="tp2 zero0 mb1 rowwise",
    ),
    Mutation(
        what="fp8: an input that is made again has another scale",
        file="kernels/fp8_linear.py",
        old="Maxima(columns=ctx.saved_tensors[0])",
        new="Maxima(columns=ctx.saved_tensors[0] if ctx.region is None else 1.5 * ctx.saved_tensors[0])",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1 tensorwise selective",
    ),
    Mutation(
        what="fp8: blocks along the tokens start anew at half of a block",
        file="kernels/fp8_linear.py",
        old=(
            "        return quantize_origin_pair(x, self.activation_kind, E4M3, self.side, maxima)"
        ),
        new=(
            "        pair = quantize_origin_pair(x, self.activation_kind, E4M3, self.side, maxima)\n"
            "        if self.tokens is not None:\n"
            "            args = x, self.activation_kind, E4M3, self.side // 2, None\n"
            "            half = quantize_transposed_origin(*args)\n"
            "            back = QuantizedMatrix(half.q, half.scale, half.kind, self.side // 2)\n"
            "            pair = QuantizedPair(pair.ahead, back)\n"
            "        return pair"
        ),
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 blockwise",
    ),
    Mutation(
        what="fp8: weights in 8 bits outlive the step in which they were made",
        file="parallel/sharding/weights.py",
        old="        self.drop_quantized()  # every update",
        new="        if self.group.size == 1: self.drop_quantized()  # the one place",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1 tensorwise",
    ),
    Mutation(
        what="fp8: ZeRO-3 frees weights in 8 bits, but keeps what their scales are computed from",
        file="parallel/sharding/weights.py",
        old="            slot.param.quantized.drop()",
        new="            slot.param.quantized.free() if self.zero == 3 else slot.param.quantized.drop()",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero3 mb1 tensorwise",
    ),
    Mutation(
        what="fp8: ZeRO-3 gathers weights that have changed, and takes the old ones in 8 bits",
        file="parallel/sharding/weights.py",
        old="            slot.param.quantized.free()",
        new="            slot.param.quantized.drop = lambda: None",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero3 mb1 blockwise",
    ),
    Mutation(
        what="fp8: the experts' weights in 8 bits outlive the step in which they were made",
        file="parallel/sharding/weights.py",
        old="            slot.param.quantized.drop()",
        new="            slot.param.spec.is_expert and self.group.size > 1 or slot.param.quantized.drop()",
        model="mixtral-tiny",
        world=2,
        layout="dp2 zero1 mb1 rowwise",
    ),
    Mutation(
        what="fp8: the rows that an expert has here share a scale",
        file="kernels/fp8_grouped.py",
        old="quantize_operand(x, RECIPES[recipe].activation_kind, E4M3, side)",
        new=(
            "quantize_operand(x, RECIPES[recipe].activation_kind, E4M3, side, "
            "x.abs().amax().expand(len(x), 1))"
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 zero0 mb1 rowwise",
    ),
    Mutation(
        what="fp8: the experts that a rank has share a scale",
        file="kernels/fp8_grouped.py",
        old='ahead, back = quantize_pair(matrices, "tensor", E4M3)',
        new=(
            "largest = matrices.abs().amax().expand(experts, 1)\n"
            '        ahead, back = quantize_pair(matrices, "tensor", E4M3, 128, Maxima(largest, largest))'
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1 tensorwise",
    ),
    Mutation(
        what="fp8: the rows' gradients have the scale of those that came with them",
        file="kernels/fp8_grouped.py",
        old="quantize_operand(dy, kind, dtype, ctx.side)",
        new="quantize_operand(dy, kind, dtype, ctx.side, dy.abs().amax().expand(len(dy), 1))",
        model="mixtral-tiny",
        world=2,
        layout="dp2 zero0 mb1 tensorwise",
    ),
    Mutation(
        what="an offloaded tensor is taken for another of its shape",
        file="parallel/offload.py",
        old="(x.data_ptr(), x.dtype, tuple(x.shape)",
        new="(x.dtype, tuple(x.shape)",
        model="llama3-tiny",
        world=1,
        layout="offload zero0 mb1",
    ),
    Mutation(
        what="offloaded moments are not brought back to the host",
        file="parallel/offload.py",
        old="copies.copy(host[current], part)",
        new="host[current].copy_(part if host is hosts[0] else host[current])",
        model="llama3-tiny",
        world=2,
        layout="dp2 offload zero1 mb1",
    ),
    Mutation(
        what="ranks that share a key head keep their own part of its gradient (bigcode Megatron-LM 35)",
        file="parallel/tensor/layers.py",
        old='"hidden", std, partial_over=("tp",)))',
        new='"hidden", std))',
        model="llama3-tiny",
        world=8,
        layout="tp8 zero0 mb1",
    ),
    Mutation(
        what="ranks that share key heads take them in turns instead of in blocks",
        file="parallel/tensor/layers.py",
        old="head = mesh.tp.index * kv_heads // mesh.tp.size",
        new="head = mesh.tp.index % kv_heads",
        model="llama3-tiny",
        world=8,
        layout="tp8 zero0 mb1",
    ),
    Mutation(
        what="weight decay reaches norms",
        file="parallel/sharding/views.py",
        old="UpdateRange(slice(start, end), spec.has_decay, spec.lr_factor, slot.counted_in_norm)",
        new=(
            "UpdateRange(slice(start, end), spec.has_decay or not slot.counted_in_norm, spec.lr_factor, "
            "slot.counted_in_norm)"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="muP's rates are lost where ZeRO shards",
        file="parallel/sharding/views.py",
        old="UpdateRange(slice(start, end), spec.has_decay, spec.lr_factor, slot.counted_in_norm)",
        new=(
            "UpdateRange(slice(start, end), spec.has_decay, 1.0 if bucket.zero else spec.lr_factor, "
            "slot.counted_in_norm)"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1 mup",
    ),
    Mutation(
        what="a shard takes the muP rate of its first parameter for all",
        file="parallel/sharding/views.py",
        old=(
            "if ranges and ranges[-1][1:] == found[1:]:\n"
            "            merged_start = ranges.pop().elements.start\n"
            "            found = found._replace(elements=slice(merged_start, end))"
        ),
        new=(
            "if ranges and ranges[-1][1::2] == found[1::2]:\n"
            "            found = ranges.pop()\n"
            "            found = found._replace(elements=slice(found.elements.start, end))"
        ),
        model="deepseek-v3-tiny",
        world=2,
        layout="dp2 zero2 mb1 mup",
    ),
    Mutation(
        what="muP's rate reaches norms whose gradient is partial",
        file="parallel/sharding/spec.py",
        old='        if self.role == "hidden":\n',
        new='        if self.role == "hidden" or self.partial_over:\n',
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1 mup",
    ),
    Mutation(
        what="muP takes this rank's share of the inputs for the width",
        file="parallel/sharding/spec.py",
        old='        if self.role == "hidden":\n',
        new=(
            '        if self.role == "hidden" and self.boxes[0].size[1] < self.boxes[0].shape[1]:\n'
            "            return replace(self, std=self.std / (width_ratio / 2)**0.5, "
            "lr_factor=2 / width_ratio)\n"
            '        if self.role == "hidden":\n'
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1 mup",
    ),
    Mutation(
        what="muP's factor of the logits is missing in the backward of a split head",
        file="model/head.py",
        old="h = h * self.logit_scale",
        new="h = h * self.logit_scale if self.tp.size == 1 else h + (h * self.logit_scale - h).detach()",
        model="mixtral-tiny",
        world=2,
        layout="tp2 zero0 mb1 mup",
    ),
    Mutation(
        what="muP's factor of the logits is counted once a rank",
        file="model/head.py",
        old="h = h * self.logit_scale",
        new="h = h * self.logit_scale**self.tp.size",
        model="gpt2-tiny",
        world=2,
        layout="tp2 zero0 mb1 mup",
    ),
    Mutation(
        what="attention scores under context parallelism are not muP's",
        file="model/attention.py",
        old="if self.score_scale != 1:",
        new="if self.score_scale != 1 and not context.sequence_is_sharded:",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring mup",
    ),
    Mutation(
        what="muP's rate of a matrix that Muon moves is lost in its exchange",
        file="optim/muon.py",
        old="- lr * lr_factor * update",
        new="- lr * (lr_factor if self.group.size == 1 else 1.0) * update",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 muon mup",
    ),
    Mutation(
        what="rounding counts from the start of a rank's piece of a tensor: split tensors round otherwise",
        file="parallel/sharding/views.py",
        old="ElementIndex(salt=0, base=base,",
        new="ElementIndex(salt=0, base=0,",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero3 mb1 adamw-bf16",
    ),
    Mutation(
        what="rounding takes a piece's columns for the whole rows",
        file="parallel/sharding/views.py",
        old="width = row_size if box.size[0] == 1 else prod(box.size[1:])",
        new="width = row_size",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1 adamw-bf16",
    ),
    Mutation(
        what="rounding depends on the rank: replicas drift apart",
        file="optim/adamw.py",
        old="salt=salt(seed, step, key)",
        new="salt=salt(seed, step, f'{key}{start > 0}')",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1 adamw-bf16",
    ),
    Mutation(
        what="in-place all-reduce overwrites the router's local counts (Megatron-LM 7452, finding 10)",
        file="model/router.py",
        old="counts = counts.clone()  # the sum over ranks is in place",
        new="pass",
        model="mixtral-tiny",
        world=2,
        layout="cp2 zero0 mb1",
    ),
    Mutation(
        what="the clip norm leaves out experts of other ranks (Megatron-LM 5916)",
        file="optim/clip.py",
        old="mesh.expert_fsdp, mesh.expert_model_parallel",
        new="mesh.expert_fsdp, mesh.model_parallel",
        model="mixtral-tiny",
        world=4,
        layout="dp2 tp2 ep4 zero0 mb1",
    ),
    Mutation(
        what="expert gradients are summed over the ranks of the dense parameters (Megatron-LM 5916)",
        file="parallel/sharding/bucket.py",
        old="ShardingGroups(mesh.expert_fsdp, mesh.dp_replicate, mesh.expert_dp)",
        new="ShardingGroups(mesh.fsdp, mesh.dp_replicate, mesh.dp_cp)",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what=(
            "probabilities travel without their gradient: the router learns from its own losses alone "
            "(Automodel 2995)"
        ),
        file="parallel/expert/dispatch.py",
        old="probs = probs.reshape(-1, 1)",
        new="probs = (probs if plan.group.size == 1 else probs.detach()).reshape(-1, 1)",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what="an expert without tokens in a microbatch loses what it had (Automodel 2995)",
        file="kernels/grouped_gemm.py",
        old=(
            "        elif not add:\n"
            "            expert_into.zero_()"
        ),
        new="        else:\n            expert_into.zero_()",
        model="mixtral-tiny",
        world=4,
        layout="cp4 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="gradients of experts are doubled at ep 2 (pytorch 160285)",
        file="parallel/expert/dispatch.py",
        old="ctx.exchange.send_back(dy, ctx.chunk)",
        new="ctx.exchange.send_back(dy * ctx.exchange.group.size, ctx.chunk)",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what="the sequence-wise balance counts a sequence shard alone (Megatron-LM 5996)",
        file="model/router.py",
        old="comm.all_reduce_sum(counts, self.mesh.tp_cp)",
        new="comm.all_reduce_sum(counts, self.mesh.cp)",
        model="mixtral-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the auxiliary loss is divided by the microbatch's tokens",
        file="kernels/router.py",
        old="losses.aux_loss * losses.scale *",
        new="losses.aux_loss / (losses.counted.sum() + 1) *",
        model="mixtral-tiny",
        world=1,
        layout="zero0 mb2 docs",
    ),
    Mutation(
        what="the router's gradient is not summed over the tp ranks that routed other tokens",
        file="model/router.py",
        old='"router", cfg.model.init_std, partial_over=("tp",))',
        new='"router", cfg.model.init_std)',
        model="mixtral-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="the shared experts' gate has a partial gradient under sequence parallelism",
        file="model/moe.py",
        old="partial_over = partial_over_tp(cfg.parallel.sp)",
        new="partial_over = ()",
        model="qwen2-moe-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the router's bias moves by this rank's counts",
        file="model/router_states.py",
        old="counts = self.stats[self.layers.index(router.layer), :num_experts]",
        new="counts = router.stats[:num_experts]",
        model="dots1-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="the global balance uses this rank's counts",
        file="model/router_states.py",
        old="self.stats = comm.all_reduce_sum(stats, self.mesh.world)",
        new="self.stats = comm.all_reduce_sum(stats, self.mesh.pp)",
        model="qwen3-moe-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="both ranks that share an expert hold its first half",
        file="model/moe.py",
        old="mesh.ep_etp.index % etp * local_width",
        new="0 * local_width",
        model="mixtral-tiny",
        world=2,
        layout="dp2 etp2 zero0 mb1",
    ),
    Mutation(
        what="both ranks that share an expert add their part of its biases to the first outputs",
        file="model/moe.py",
        old="add_expert_bias(y, self.down_bias, members, self.first_biased)",
        new="add_expert_bias(y, self.down_bias, members)",
        model="gpt-oss-tiny",
        world=2,
        layout="dp2 etp2 zero0 mb1",
    ),
    Mutation(
        what="biases of experts learn from their last rows alone",
        file="kernels/expert_bias.py",
        old="write_or_add(into, grad, add)",
        new="write_or_add(into, grad, False)",
        model="gpt-oss-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what="the gradient of a router's learned bias is not summed over tp, whose ranks route other tokens",
        file="model/router.py",
        old='self.num_experts, "bias", is_partial=True)',
        new='self.num_experts, "bias", is_partial=False)',
        model="gpt-oss-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="expert outputs go back in the order of experts, not in that in which rows came",
        file="kernels/grouped_gemm.py",
        old="y = torch.empty_like(y).index_copy_(0, scatter, y)",
        new="y = y.index_select(0, scatter)",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what="weight gradients of all experts read the tokens of the first expert",
        file="kernels/grouped_gemm.py",
        old="x.index_select(0, x_source[rows])\n            write_wgrad",
        new="x.index_select(0, x_source[:n])\n            write_wgrad",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what="a token gets the sum of all but the last of its experts",
        file="kernels/grouped_gemm.py",
        old="sum_rows(y, slots, ctx.every_slot_filled)",
        new="sum_rows(y, slots[:, :-1], ctx.every_slot_filled)",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    Mutation(
        what="a sequence's queue for a full expert stands in the order of ranks",
        file="model/router.py",
        old="zigzag.unshard_sequence(comm.all_gather(both[None], cp))",
        new="comm.all_gather(both[None], cp).transpose(0, 1).flatten(1, 2)",
        model="qwen2-moe-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring capacity",
    ),
    Mutation(
        what="rows that fill up an expert are copies of a token, and its gradient reaches the expert",
        file="parallel/expert/dispatch.py",
        old="token_choice.clamp(max=num_choices)",
        new="token_choice.clamp(max=num_choices - 1)",
        model="qwen2-moe-tiny",
        world=2,
        layout="tp2 zero0 mb1 padded",
    ),
    Mutation(
        what="jitter restarts on every tp rank",
        file="model/router.py",
        old="positions = local_chunk(jitter_rng.positions[None], mesh.tp)[0]",
        new="positions = jitter_rng.positions[:len(jitter_rng.positions) // mesh.tp.size]",
        model="mixtral-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what="recompute tells a router's counts twice",
        file="model/router.py",
        old="        losses, stats = self.losses(choice.sums, router_inputs)\n",
        new=(
            "        losses, stats = self.losses(choice.sums, router_inputs)\n"
            "        self.stats += stats * (self.mesh.tp.size > 1)\n"
        ),
        model="mixtral-tiny",
        world=2,
        layout="tp2 zero0 mb1 full",
    ),
    Mutation(
        what="a norm over all heads takes the mean of this rank's in its backward",
        file="parallel/tensor/layers.py",
        old="comm.all_reduce_sum((scaled_grad * normalized).sum(-1, keepdim=True), ctx.group)",
        new="(scaled_grad * normalized).sum(-1, keepdim=True) * ctx.group.size",
        model="olmoe-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="inputs of experts lose the other tp ranks' gradients",
        file="parallel/tensor/regions.py",
        old="return all_gather_sequence(dy, ctx.group)[:, :ctx.s], None",
        new="return all_gather_sequence(dy.roll(1, 1), ctx.group)[:, :ctx.s], None",
        model="mixtral-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
    ),
    Mutation(
        what=(
            "tokens and targets of a batch of one window are one memory: the mask is written into the "
            "tokens"
        ),
        file="data/pack.py",
        old=(
            "tokens = token_ids[:, :-1].clone()  # [b, s]\n"
            "    targets = token_ids[:, 1:].clone()  # [b, s]"
        ),
        new=(
            "tokens = token_ids[:, :-1].contiguous()\n"
            "    targets = token_ids[:, 1:].contiguous()"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1 docs",
    ),
    Mutation(
        what="a prompt that sequence parallelism pads is padded in front",
        file="model/generate.py",
        old="tokens = torch.tensor([new_ids + padding], device=device)",
        new="tokens = torch.tensor([padding + new_ids], device=device)",
        model="llama3-tiny",
        world=4,
        layout="tp4 sp zero0 mb1",
    ),
    Mutation(
        what="all ranks sample from the last position of the padding, not of the text",
        file="model/head.py",
        old="return self.logits(x)[0, position]",
        new="return self.logits(x)[0, -1]",
        model="llama3-tiny",
        world=4,
        layout="tp4 sp zero0 mb1",
    ),
    Mutation(
        what="the vocabulary's shards are joined in the reverse order in generation",
        file="model/head.py",
        old="logits = torch.cat(shards.unbind(0), -1)",
        new="logits = torch.cat(shards.flip(0).unbind(0), -1)",
        model="qwen3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="later stages count the positions of a new token from 0",
        file="model/generate.py",
        old="x = stage.hidden_states(x, positions, cache=cache)",
        new="x = stage.hidden_states(x, positions - positions[:, :1] * (number > 0), cache=cache)",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 mb1 1f1b",
    ),
    Mutation(
        what="the cache grows once a stage, not once a token: a rank with two stages writes other text",
        file="model/generate.py",
        old=(
            "        if stage.head is not None:\n"
            "            x = stage.head(x, position=position)\n"
            "    if cache is not None:\n"
            "        cache.length += tokens.shape[1]\n"
        ),
        new=(
            "        if cache is not None:\n"
            "            cache.length += tokens.shape[1]\n"
            "        if stage.head is not None:\n"
            "            x = stage.head(x, position=position)\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 zb-v mb1",
    ),
    Mutation(
        what="a rank reads its neighbour's share of the batch",
        file="data/loader.py",
        old="self._first_sequence(step) + offset",
        new="self._first_sequence(step) + (self.rank + 1) % self.world * share",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="rows of a batch are counted from the rank's first",
        file="data/loader.py",
        old="torch.arange(share) + offset",
        new="torch.arange(share)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="a resumed run reads the first samples again",
        file="train.py",
        old="run.spikes.data_step(step)",
        new="run.spikes.data_step(step - session.start_step)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="a run that is started again begins anew",
        file="checkpoint/state.py",
        old="resumed = store.newest_checkpoint(root, notes, bad, check) if root.is_dir() else None",
        new="resumed = None",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
    ),
    Mutation(
        what="a resumed run begins with second moments of zero",
        file="checkpoint/state.py",
        old=(
            "    load_buckets(run.buckets)\n"
            "    if run.ema is not None and not stored_ema:\n"
        ),
        new=(
            '    for v in run.optim.state()["adam_v"]:\n'
            "        v.zero_()\n"
            "    load_buckets(run.buckets)\n"
            "    if run.ema is not None and not stored_ema:\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1" + ADAMW_ONLY,
    ),
    Mutation(
        what="the masters that a resume loads are not published: other shares are those of the start",
        file="checkpoint/state.py",
        old=(
            "    load_buckets(run.buckets)\n"
            "    if run.ema is not None and not stored_ema:\n"
        ),
        new="    if run.ema is not None and not stored_ema:\n",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
    ),
    Mutation(
        what="a skipped step moves the weights",
        file="optim/adamw.py",
        old=(
            '        if is_good.device.type == "cpu" and not is_good:\n'
            "            return\n"
        ),
        new="        is_good = torch.ones_like(is_good)\n",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1" + ADAMW_ONLY,
    ),
    Mutation(
        what="a skipped step moves the moments",
        file="optim/adamw.py",
        old=(
            '        if is_good.device.type == "cpu" and not is_good:\n'
            "            return\n"
        ),
        new=(
            '        if is_good.device.type == "cpu" and not is_good:\n'
            "            replicas = self.buckets[0].groups.reduce.size\n"
            '            for exp_avg in self.moments["adam_m"] if replicas > 1 else ():\n'
            "                exp_avg.mul_(self.cfg.beta1)\n"
            "            return\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1" + ADAMW_ONLY,
    ),
    Mutation(
        what="under ZeRO-3 a rank draws initial weights where its shard would be in the first parameter",
        file="parallel/sharding/bucket.py",
        old="needed = range(kept.start - slot.offset, kept.stop - slot.offset)",
        new="needed = range(kept.start, kept.stop)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero3 mb1",
    ),
    Mutation(
        what="the validation loss is divided by this rank's tokens",
        file="runtime/evaluate.py",
        old="counts = comm.all_reduce_sum(own_counts, group)",
        new="counts = group.size * own_counts",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 docs",
    ),
    Mutation(
        what="every rank validates on the sequences of the first",
        file="phases.py",
        old='open_loader(cfg, "valid", mesh.dp.index, mesh.dp.size, device=device, phase=phase)',
        new='open_loader(cfg, "valid", 0, mesh.dp.size, device=device, phase=phase)',
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="a checkpoint has what tp ranks hold alike once a rank",
        file="parallel/sharding/shares.py",
        old="for slot, rank in zip(replicated, tp_ranks) if rank != mesh.tp.index}",
        new="for slot, rank in zip(replicated, tp_ranks) if rank == -1}",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="nobody writes what tp ranks hold alike into the checkpoint",
        file="parallel/sharding/shares.py",
        old="for slot, rank in zip(replicated, tp_ranks) if rank != mesh.tp.index}",
        new="for slot, rank in zip(replicated, tp_ranks)}",
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the first gradient of a step is added to that of the step before",
        file="parallel/sharding/gradients.py",
        old=(
            "        self.local_is_written = False\n"
            "        for slot in self.slots:\n"
            "            slot.param.grad_is_written = False"
        ),
        new=(
            "        self.local_is_written = False\n"
            "        for slot in self.slots:\n"
            "            slot.param.grad_is_written = self.groups.reduce.size > 1"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="the second gradient of a step overwrites the first",
        file="kernels/grad.py",
        old="compute(weight.main_grad, weight.grad_is_written)",
        new="compute(weight.main_grad, False)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
    ),
    Mutation(
        what="an expert without rows keeps its gradient of the step before",
        file="kernels/grouped_gemm.py",
        old=(
            "        elif not add:\n"
            "            expert_into.zero_()"
        ),
        new="        elif False:\n            pass",
        model="mixtral-tiny",
        world=4,
        layout="cp4 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="an expert without rows: its gradient is zeroed by a factor of 0, and a NaN stays",
        file="kernels/grouped_gemm.py",
        old="            expert_into.zero_()",
        new="            expert_into.mul_(0)",
        model="mixtral-tiny",
        world=4,
        layout="cp4 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="ZeRO-2 adds the step's first shard to that of the step before",
        file="parallel/sharding/gradients.py",
        old="        self.local_is_written = False\n        for slot",
        new="        for slot",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero2 mb1",
    ),
    Mutation(
        what="the loss is summed over the pipeline alone",
        file="parallel/pipeline/executor.py",
        old="        total = comm.all_reduce_sum(total, self.mesh.dp_cp)\n",
        new="",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="the router's bias is not in the checkpoint",
        file="model/router.py",
        old='(("bias", self.bias), ("load", self.load))',
        new='(("load", self.load),)',
        model="dots1-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="queries of a second tile are masked with the rows of the first",
        file="kernels/partial_attention.py",
        old="mask[:, :, None, rows]",
        new="mask[:, :, None, :rows.stop - rows.start]",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring wide",
    ),
    Mutation(
        what="rows of a second chunk of logits meet the targets of the first",
        file="kernels/cross_entropy.py",
        old="row_targets = targets[rows]",
        new="row_targets = targets[:min(chunk, len(targets) - first)]",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1 wide",
    ),
    Mutation(
        what="of a bucket with several parameters the first alone is summed",
        file="parallel/sharding/gradients.py",
        old="self.start_all_reduce(self.full, over_replicas=False)",
        new="self.start_all_reduce(self.full[:self.slots[0].numel], over_replicas=False)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1 wide" + PLAIN_SUMS,
    ),
    Mutation(
        what="Muon reads what comes before it is there",
        file="optim/muon_exchange.py",
        old="comm.start_all_to_all(flat, sent, received, group).wait()",
        new="comm.start_all_to_all(flat, sent, received, group).result.clone()",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 muon",
    ),
    Mutation(
        what="the ring adds what comes before it is there",
        file="parallel/wire/algorithms.py",
        old=(
            "    for transfer in comm.start_transfers([(x, target)], [(received, source)], group):\n"
            "        transfer.wait()\n"
            "    return received"
        ),
        new=(
            "    transfers = comm.start_transfers([(x, target)], [(received, source)], group)\n"
            "    received = received.clone()\n"
            "    for transfer in transfers:\n"
            "        transfer.wait()\n"
            "    return received"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1 reduce-ring",
    ),
    Mutation(
        what="the clip norm is summed over the pipeline, not over tp",
        file="optim/clip.py",
        old="(False, mesh.fsdp, mesh.model_parallel)",
        new="(False, mesh.fsdp, mesh.pp)",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="replicas of a shard are summed over cp",
        file="parallel/sharding/bucket.py",
        old="ShardingGroups(mesh.fsdp, mesh.dp_replicate, mesh.dp_cp)",
        new="ShardingGroups(mesh.fsdp, mesh.cp, mesh.dp_cp)",
        model="llama3-tiny",
        world=2,
        layout="rep2 zero1 mb1",
    ),
    Mutation(
        what="a share is padded for its ranks alone, and three replicas cut it by sends (ours)",
        file="parallel/sharding/packing.py",
        old="num_shards if zero and is_collective else",
        new="num_shards if zero else",
        model="llama3.2-tiny",
        world=6,
        layout="rep3 dp2 zero1 reduce-ring mb1",
    ),
    Mutation(
        what="Muon shares matrices out among the ranks of a shard",
        file="optim/muon.py",
        old="self.group = mesh.pipeline_stage",
        new="self.group = mesh.fsdp",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 muon",
    ),
    Mutation(
        what="the last element of a partial gradient is not summed over tp",
        file="parallel/sharding/gradients.py",
        old="self.local[first:end]",
        new="self.local[first:end - 1]",
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the last element of a tensor's part in a shard is not updated",
        file="optim/adamw.py",
        old="slice(max(tensor_start, start) - start, min(tensor_end, end) - start)",
        new="slice(max(tensor_start, start) - start, min(tensor_end, end - 1) - start)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1 adamw-bf16",
    ),
    Mutation(
        what="pieces of split tensors lie as if the rank's part began at zero",
        file="parallel/sharding/views.py",
        old="global_start = tuple(map(add, whole.start, inner_start))",
        new="global_start = inner_start",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="every rank of a split vocabulary looks into the first rows",
        file="parallel/tensor/layers.py",
        old="local_ids = ids - group.index * rows",
        new="local_ids = ids",
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="the clip norm is that of this rank's shards",
        file="optim/clip.py",
        old="squares = comm.all_reduce_sum(squares, shard_group)",
        new="squares = 1.0 * squares",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
    ),
    Mutation(
        what="the clip norm is summed over the shards that are whole, not over the model",
        file="optim/clip.py",
        old="(False, mesh.fsdp, mesh.model_parallel)",
        new="(False, mesh.model_parallel, mesh.fsdp)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1",
    ),
    Mutation(
        what="queries and keys of a meeting are taken for each other",
        file="parallel/context/ring.py",
        old="visible_chunk_pairs(group.index, source,",
        new="visible_chunk_pairs(source, group.index,",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="parts of the sequence are multiplied for the wrong rank",
        file="parallel/tensor/overlap.py",
        old="        partial = product(parts[target], weight)\n",
        new="        partial = product(parts[source], weight)\n",
        model="llama3-tiny",
        world=4,
        layout="tp4 sp async-tp zero0 mb1",
    ),
    Mutation(
        what="the gathered gradient of a row layer's output is that of this rank's part alone",
        file="kernels/linear.py",
        old="        dy, dx = ctx.region.enter_and_multiply(dy, ctx.weight.t(), None)",
        new=(
            "        full_dy, dx = ctx.region.enter_and_multiply(dy, ctx.weight.t(), None)\n"
            "        dy = dy.repeat(1, full_dy.shape[1] // dy.shape[1], 1)"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 sp async-tp zero0 mb1",
    ),
    Mutation(
        what="probabilities come in the order of ranks, and chunks in that of experts",
        file="parallel/expert/dispatch.py",
        old="    by_rank = products.transpose(0, 1), arrivals.transpose(0, 1)\n",
        new="    by_rank = products, arrivals\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1",
    ),
    Mutation(
        what="a chunk's gradient goes home to the place of another chunk",
        file="parallel/expert/dispatch.py",
        old="        ctx.exchange.send_back(dy, ctx.chunk)\n",
        new="        ctx.exchange.send_back(dy, len(ctx.exchange.counts) - 1 - ctx.chunk)\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1 padded",
    ),
    Mutation(
        what="a chunk of outputs is sent with the counts of the next one",
        file="parallel/expert/dispatch.py",
        old="        number = len(self.sent)\n",
        new="        number = (len(self.sent) + 1) % len(self.plan.chunks)\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1 padded",
    ),
    Mutation(
        what="chunks leave in the order of the backward in the forward, on one of two ranks",
        file="parallel/expert/dispatch.py",
        old="        results = exchange.leave(rows, range(len(exchange.counts)))\n",
        new=(
            "        step = 1 - 2 * exchange.group.index\n"
            "        results = exchange.leave(rows, range(len(exchange.counts))[::step])\n"
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1 padded",
    ),
    Mutation(
        what="the gradient of the first chunk's rows is dropped",
        file="parallel/expert/dispatch.py",
        old="        ctx.exchange.send_back(dy, ctx.chunk)\n",
        new=(
            "        is_dropped = ctx.chunk == 0 and len(ctx.exchange.counts) > 1\n"
            "        ctx.exchange.send_back(dy * (not is_dropped), ctx.chunk)\n"
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1",
    ),
    Mutation(
        what="an expert that lies in two chunks keeps the weight gradient of one",
        file="kernels/grouped_gemm.py",
        old="write_wgrad(expert_into, round_up_rows(expert_dy), round_up_rows(expert_x), add)",
        new="write_wgrad(expert_into, round_up_rows(expert_dy), round_up_rows(expert_x), False)",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks3 zero0 mb2",
    ),
    Mutation(
        what="rows of an expert that a boundary divides are rounded up where they end, down where they begin",
        file="parallel/expert/dispatch.py",
        old="    return rows_before.diff(dim=0)\n",
        new="    return (counts * before[1:, None] + num_chunks - 1) // num_chunks - rows_before[:-1]\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks3 zero0 mb1",
    ),
    Mutation(
        what="experts' weight gradients that waited for an exchange are dropped",
        file="parallel/expert/dispatch.py",
        old="            ctx.late_grads.finish()\n",
        new="            ctx.late_grads.waiting.clear()\n            ctx.late_grads.finish()\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
    ),
    # ---- what gloo forgives and NCCL does not: for verify --strict
    Mutation(
        what="the gradients of dispatched rows are read before they are home",
        file="parallel/expert/dispatch.py",
        old="        return ctx.exchange.come_home(), None\n",
        new=(
            "        exchange = ctx.exchange\n"
            "        home = exchange.under_way[0].result if exchange.home is None else exchange.home\n"
            "        early = home.clone()\n"
            "        exchange.come_home()\n"
            "        return early, None\n"
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="gathered weights are used one part early: their all-gather is not awaited",
        file="parallel/sharding/weights.py",
        old="self.bind_parameters(self.pending_gather.wait())",
        new="self.bind_parameters(self.pending_gather.result)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero3 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a gradient shard is read before its reduce-scatter has ended",
        file="parallel/sharding/gradients.py",
        old="part = self.pending_scatter.wait()\n",
        new="part = self.pending_scatter.result\n",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero2 mb1",
        is_strict=True,
    ),
    Mutation(
        what="the step does not wait for the shards of ZeRO-1, which the backward leaves under way",
        file="parallel/sharding/gradients.py",
        old=(
            "        self.wait_reduce_scatter()\n"
            "        if self.pending_sum is not None:\n"
            "            self.pending_sum.wait()"
        ),
        new=(
            "        if self.pending_sum is not None:\n"
            "            self.pending_sum.wait()"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a bucket is reduced before its last gradient is added: at the backward's start",
        file="parallel/sharding/zero.py",
        old=(
            "        self.allocate_grads(part)\n"
            "\n"
            "    def end_backward"
        ),
        new=(
            "        self.allocate_grads(part)\n"
            "        self.end_backward(part)\n"
            "\n"
            "    def end_backward"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a message of the pipeline is overwritten while it is under way",
        file="parallel/pipeline/executor.py",
        old="            (send,) = comm.start_transfers([(output, other_rank)], [], group)\n",
        new=(
            "            (send,) = comm.start_transfers([(output, other_rank)], [], group)\n"
            "            output.mul_(1.0 + 1e-6)\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
        is_strict=True,
    ),
    Mutation(
        what="a received hidden state is read before it has arrived",
        file="parallel/pipeline/executor.py",
        old=(
            "    transfer.wait()\n"
            "    return buffer\n"
        ),
        new="    return buffer\n",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 gpipe mb1",
        is_strict=True,
    ),
    Mutation(
        what="sends of a pipeline are never awaited",
        file="parallel/pipeline/executor.py",
        old=(
            "        for op in list(state.sends):\n"
            "            state.sends.pop(op).wait()\n"
        ),
        new="",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
        is_strict=True,
    ),
    Mutation(
        what="a step of the ring overwrites the keys that it is sending",
        file="parallel/context/ring.py",
        old=(
            "            if passing is not None:\n"
            "                kv = wait_received(passing)\n"
            "\n"
            "        dkv = own_dkv"
        ),
        new=(
            "            if passing is not None:\n"
            "                kv.add_(0.5)\n"
            "                kv = wait_received(passing)\n"
            "\n"
            "        dkv = own_dkv"
        ),
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
        is_strict=True,
    ),
    Mutation(
        what="a step of the ring waits for its send, and not for what it receives",
        file="parallel/context/ring.py",
        old="    for transfer in transfers:\n",
        new="    for transfer in transfers[:1]:\n",
        model="llama3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
        is_strict=True,
    ),
    Mutation(
        what="rows of tokens are handed to the experts before they have arrived",
        file="parallel/expert/dispatch.py",
        old="        return self.under_way.pop(chunk).wait()\n",
        new="        return self.under_way.pop(chunk).result\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="outputs of the last chunk are summed before they have arrived",
        file="parallel/expert/dispatch.py",
        old="        arrived = [self.arrive(chunk) for chunk in range(len(self.counts))]\n",
        new=(
            "        arrived = [self.arrive(chunk) for chunk in range(max(1, len(self.counts) - 1))]\n"
            "        self.under_way.clear()\n"
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="rows of all chunks are written over once the first has arrived",
        file="parallel/expert/dispatch.py",
        old="        exchange.arrive(chunk)\n",
        new=(
            "        source = exchange.under_way[max(exchange.under_way)].source\n"
            "        exchange.arrive(chunk)\n"
            "        if source is not None:\n"
            "            source.zero_()\n"
        ),
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a chunk's outputs return into the place of one that is under way",
        file="parallel/expert/dispatch.py",
        old="            out = self.of_chunks(self.home)[chunk]\n",
        new="            out = self.home[:counts.num_sent]\n",
        model="mixtral-tiny",
        world=2,
        layout="dp2 ep2 ep-chunks2 zero0 mb1 padded",
        is_strict=True,
    ),
    Mutation(
        what="the gathered sequence is read before it has arrived, beside the product that hides it",
        file="parallel/tensor/regions.py",
        old="return comm.start_all_gather_each(x, self.group).wait\n",
        new=(
            "work = comm.start_all_gather_each(x, self.group)\n"
            "        return lambda: work.result\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 sp zero0 mb1 selective no-fp8",
        is_strict=True,
    ),
    Mutation(
        what="the sum of an input's gradient is read before it has arrived",
        file="parallel/tensor/regions.py",
        old="return comm.start_all_reduce(dx, self.group).wait\n",
        new=(
            "work = comm.start_all_reduce(dx, self.group)\n"
            "            return lambda: work.result\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 no-sp zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="an offloaded activation is freed before its copy has ended",
        file="parallel/offload.py",
        old="        self.copy_stream.keep_memory(x)\n",
        new="",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 offload mb1",
        is_strict=True,
    ),
    Mutation(
        what="an offloaded activation is read before it is back",
        file="parallel/offload.py",
        old="        self.copy_stream.make_compute_wait(saved.copied_event)\n",
        new="",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 offload mb1",
        is_strict=True,
    ),
    Mutation(
        what="the optimizer reads a chunk before it is on the device",
        file="parallel/offload.py",
        old="        copies.make_compute_wait(copied_event)\n",
        new="",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 offload mb1",
        is_strict=True,
    ),
    Mutation(
        what="host memory is read before the last chunk is back in it",
        file="parallel/offload.py",
        old="    copies.synchronize()\n",
        new="",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 offload mb1",
        is_strict=True,
    ),
    Mutation(
        what="a part of the sequence is multiplied before it has arrived",
        file="parallel/tensor/overlap.py",
        old=(
            "        wait_all(transfers)\n"
            "        product(gathered[source], weight, bias, out=y[source])\n"
        ),
        new=(
            "        product(gathered[source], weight, bias, out=y[source])\n"
            "        wait_all(transfers)\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 sp async-tp zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="the product of the next part overwrites one that is under way",
        file="parallel/tensor/overlap.py",
        old=(
            "        partial = product(parts[target], weight)\n"
            "        sent.append(partial)\n"
        ),
        new=(
            "        partial = product(parts[target], weight, out=sent[0] if sent else None)\n"
            "        sent.append(partial)\n"
        ),
        model="llama3-tiny",
        world=4,
        layout="tp4 sp async-tp zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="parts are summed before they have arrived",
        file="parallel/tensor/overlap.py",
        old=(
            "    wait_all(under_way)\n"
            "    return summands.sum(0, dtype=accumulation_dtype(x.dtype)).to(x.dtype)"
        ),
        new=(
            "    summed = summands.sum(0, dtype=accumulation_dtype(x.dtype)).to(x.dtype)\n"
            "    wait_all(under_way)\n"
            "    return summed"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 sp async-tp zero0 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a checkpoint is written before the updated weights have arrived",
        file="checkpoint/replicas.py",
        old="    wait_param_gathers(run.buckets)\n    comm.check_collectives(",
        new="    comm.check_collectives(",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a shard is updated while it is being sent",
        file="parallel/sharding/weights.py",
        old="self.local.clone(), self.group, out=self.full",
        new="self.local, self.group, out=self.full",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
        is_strict=True,
    ),
    Mutation(
        what="a later phase runs the schedule of the first phase's batch",
        file="build.py",
        old="schedules = make_schedules(cfg, mesh.world.size)",
        new="schedules = make_schedules(phases.all[0].cfg, mesh.world.size)",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 mb1 no-wide no-ramp",
        settings=("--train.phases", "configs/phases/proof.yaml"),
    ),
    Mutation(
        what="the average of the weights begins anew at a resume",
        file="checkpoint/state.py",
        old="    if run.ema is not None and not stored_ema:\n        run.ema.start()",
        new="    if run.ema is not None:\n        run.ema.start()",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1 ema",
    ),
    Mutation(
        what="spike: the window of what is usual is not in the checkpoint, and a spike after it is applied",
        file="checkpoint/state.py",
        old='        "spikes": run.spikes.state(),\n',
        new="",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1",
        settings=("--optim.spike_sigma", "50", "--optim.spike_window", "2"),
    ),
    Mutation(
        what="spike: a resume forgets how many steps its window knows",
        file="optim/spikes.py",
        old="self.count = torch.full_like(self.count, count)",
        new="self.count = torch.zeros_like(self.count)",
        model="llama3-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1",
        settings=("--optim.spike_sigma", "50", "--optim.spike_window", "2"),
    ),
    Mutation(
        what="rerun: the counts of routers are those of all runs of the step",
        file="train.py",
        old="    run.routers.start_step()\n",
        new="    if run.extras[0].record is None:\n        run.routers.start_step()\n",
        model="mixtral-tiny",
        world=2,
        layout="ep2 zero0 mb1",
        settings=("--train.rerun_every", "1"),
    ),
    Mutation(
        what="rerun: PowerSGD's error is that of all runs of the step",
        file="durable/rerun.py",
        old="                bucket.grads.powersgd.restore(state)\n",
        new="                bucket.grads.powersgd.bases = state.bases\n",
        model="llama3-tiny",
        world=2,
        layout="dp2 zero0 powersgd mb1",
        settings=("--train.rerun_every", "1"),
    ),
    Mutation(
        what="rerun: a step that is computed again draws the masks of the step after it",
        file="train.py",
        old="local_microbatches = shard_microbatches(run, microbatches)",
        new=(
            "local_microbatches = shard_microbatches(run, microbatches)\n"
            "    for batch in local_microbatches:\n"
            "        object.__setattr__(batch, 'step', batch.step + (run.extras[0].record is not None))"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
        settings=("--train.rerun_every", "1", "--model.dropout", "0.1"),
    ),
    Mutation(
        what="spike: rank 0 alone does not apply the step",
        file="optim/spikes.py",
        old="return self.window.accept(gradients.loss, gradients.norm, good)",
        new=(
            "accepted = self.window.accept(gradients.loss, gradients.norm, good)\n"
            "        return good if run.mesh.world.index else accepted"
        ),
        model="llama3-tiny",
        world=2,
        layout="tp2 zero0 mb1",
        settings=("--optim.spike_sigma", "50", "--optim.spike_window", "2"),
    ),
    Mutation(
        what="weights are averaged after the all-gather that overwrites them has begun",
        file="train.py",
        old=(
            "    run.extras.weights_updated(run, step, is_good)\n"
            "    start_param_gathers(run.buckets, is_good)  # the next step waits for them\n"
        ),
        new=(
            "    start_param_gathers(run.buckets, is_good)  # the next step waits for them\n"
            "    run.extras.weights_updated(run, step, is_good)\n"
        ),
        model="llama3-tiny",
        world=2,
        layout="dp2 zero1 mb1 ema",
        is_strict=True,
    ),
    Mutation(
        what="scores grow with a token's place on its rank, and not in the sequence",
        file="model/rope.py",
        old="torch.div(positions + growth.first,",
        new="torch.div(torch.arange(positions.shape[1]).expand_as(positions) + growth.first,",
        model="ministral3-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="the window of a kind of layers is lost where the sequence is sharded",
        file="model/context.py",
        old="window=view.window,",
        new="window=None if sequence_is_sharded else view.window,",
        model="gemma2-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ulysses",
    ),
    Mutation(
        what="keys that travel to another stage bring no gradient back",
        file="model/shared_keys.py",
        old="v.view(b, tokens // b, -1, shape.value_dim),",
        new="v.detach().view(b, tokens // b, -1, shape.value_dim),",
        model="shared-keys-tiny",
        world=2,
        layout="pp2 zero0 1f1b mb1 uneven",
    ),
    Mutation(
        what="logits are bounded on one rank alone, and not in the shards of a vocabulary",
        file="model/head.py",
        old="cap=self.logit_cap,",
        new="cap=self.logit_cap if self.tp.size == 1 else None,",
        model="gemma2-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="the factor of the branches is lost where the sequence is divided over tp",
        file="model/block.py",
        old="self.residual_scale = cfg.model.residual_scale",
        new="self.residual_scale = 1.0 if cfg.parallel.sp else cfg.model.residual_scale",
        model="granite-tiny",
        world=2,
        layout="tp2 sp zero0 mb1",
    ),
    Mutation(
        what="the gradient of the norm of a state's outputs is not summed over the heads of other ranks",
        file="model/delta.py",
        old="""mixer.v_dim, "norm", is_partial=True)""",
        new="""mixer.v_dim, "norm", is_partial=False)""",
        model="delta-tiny",
        world=2,
        layout="tp2 zero0 mb1",
    ),
    Mutation(
        what="the second part of a sequence on a rank begins with the state of the first",
        file="parallel/context/parts.py",
        old="for chunk in range(last):",
        new="for chunk in range(first + 1):",
        model="delta-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="the convolution of a part does not see the tokens of other ranks",
        file="model/recurrence.py",
        old="state = inputs_before(x, number, self.cp)",
        new="state = None",
        model="short-conv-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring",
    ),
    Mutation(
        what="a state is carried beyond the end of its document to another rank",
        file="model/recurrence.py",
        old="documents, before = split_documents(documents, max(1, conv - 1), cp)",
        new="documents, before = split_documents(documents, max(1, conv - 1), cp)[0], None",
        model="mamba-tiny",
        world=2,
        layout="cp2 zero0 mb1 cp-ring docs",
    ),
)


def plant(bug: Mutation, folder: Path) -> None:
    """Copies the checkout, without tests and docs, and plants the bug in the copy.

    Raises ConfigError if the source no longer has the text that the bug replaces.
    """
    for name in checkout_files(ROOT):
        if name.startswith(("tests/", "docs/")):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)

    planted = folder / bug.file
    text = planted.read_text()
    if bug.old not in text:
        raise ConfigError(
            f"lab/proof/mutate/table.py: {bug.what}: {bug.file} no longer has {bug.old!r}; "
            "bring the table up to date"
        )
    planted.write_text(text.replace(bug.old, bug.new))


def mutants(bugs: Sequence[Mutation]) -> list[Mutant]:
    """Bugs of the table, to be judged by tests."""
    sources = {file: Source.parse((ROOT / file).read_text()) for file in {bug.file for bug in bugs}}
    found = []
    for bug in bugs:
        source = sources[bug.file]
        start, end = source.text.index(bug.old), source.text.rindex(bug.old) + len(bug.old)
        edit = Edit(start, end, source.text[start:end].replace(bug.old, bug.new))
        found.append(make_mutant(bug.file, source, bug.what, edit))
    return found


def caught(bug: Mutation) -> tuple[bool, str]:
    """Returns whether verify failed on the planted copy, and the line in which it said why.

    Raises ConfigError if verify gave no verdict (an error exit, words that no layout has, or no end), and if
    the copy is no program with a bug, but a broken one.
    """
    command = [sys.executable, "-m", "scripts.verify", bug.model, "--world", str(bug.world), "--layouts", "2"]
    if bug.layout != INITIAL_WEIGHTS:
        command += ["--only", *bug.layout.split()]
    if bug.is_strict:
        command.append("--strict")
    command += bug.settings
    with tempfile.TemporaryDirectory(prefix="bevatron-mutant-") as folder:
        checkout = Path(folder, "checkout")
        checkout.mkdir()
        plant(bug, checkout)
        result = run_command(command, checkout, LIMIT_S, Path(folder, "log"))

    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    wrong = [line for line in lines if line.startswith("WRONG")]
    died = result.code == 1 and not wrong
    if died or not has_verdict(result):
        reason = "did not end" if result.code is None else last_output_line(result)
        raise ConfigError(f"lab/proof/mutate/table.py: {bug.what}: no verdict of scripts.verify: {reason}")
    for line in wrong:
        if any(words in line for words in BROKEN_COPY):
            raise ConfigError(f"lab/proof/mutate/table.py: {bug.what}: the copy cannot run: {line}")
    return result.code == 1, wrong[0] if wrong else ""


def chosen(only: Sequence[str], world: int) -> list[Mutation]:
    """The bugs whose text has all the words of `only` and that need at most `world` ranks."""
    bugs = []
    for bug in TABLE:
        text = f"{bug.what} {bug.file} {bug.layout}"
        if bug.world <= world and all(word in text for word in only):
            bugs.append(bug)
    return bugs


def run(only: Sequence[str], world: int, part: str = "1/1") -> int:
    """Checks the chosen bugs (see `chosen`) of a part of them. Returns the exit code."""
    bugs = part_of(chosen(only, world), part)
    num_caught = 0
    started = time.perf_counter()
    for bug in bugs:
        try:
            is_caught, line = caught(bug)
            outcome = "caught" if is_caught else "MISSED"
        except ConfigError as error:  # the others are checked all the same
            is_caught, line = False, str(error)
            outcome = "NO VERDICT"
        num_caught += is_caught
        print(f"{outcome:<7} {bug.what}")
        print(f"        {line or 'verify saw nothing'}", flush=True)

    seconds = time.perf_counter() - started
    print(f"{num_caught} of {len(bugs)} planted bugs caught ({seconds:.0f} s)")
    return 0 if num_caught == len(bugs) else 1
