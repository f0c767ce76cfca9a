"""Keys that are set and do nothing in this config: refused in one line, or noted where a refusal would hurt.

`set` means: another value than the default of keys.py and than the model's preset (a preset may bring keys
of a feature that the user turns off). Most such keys are mistakes, and refused. Those that scripts keep set
while they sweep something else (sizes, optimizers, data) are noted in one line: the run goes on. Keys that
contradict each other are rules.py's affair; TABLE, READ and RULED name every key of keys.py, and
tests/test_unused.py holds them to it. train.py asks; programs that build configs for a proof or a plan
(scripts/verify, plan/search.py) do not.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from config import Config, ConfigError, build, fp8_recipe, presets, scale_block, words
from keys import Model


@dataclass(frozen=True)
class Unused:
    """keys: of one section, without it; when(config, ranks): they do nothing; why, way: the end of the line;
    note: why a refusal would hurt, "" where the keys are refused; usual: a default is meant as well."""
    section: str
    keys: str
    when: Callable[[Config, int], bool]
    why: str
    way: str
    note: str = ""
    usual: bool = False


def stages_modes(cfg: Config) -> list[str]:
    """The recompute modes that some stage has."""
    return words(cfg.parallel.recompute_stages) or [cfg.parallel.recompute]


def alone(cfg: Config, world: int) -> bool:
    """Does every rank hold parameters that no other holds?"""
    return world == cfg.parallel.tp * cfg.parallel.pp


ONE_STAGE = ("gpipe", "1f1b", "zb-h1")  # schedules with one stage a rank
SIZES = "one script, many sizes"  # scaling runs keep the key set while the degrees go down to 1
TABLE = (
    # ---- the model
    Unused("model", "top_k moe_ffn shared_experts shared_gate first_dense moe_every router router_renorm "
                    "router_groups router_group_top_k router_scale router_bias router_bias_rate jitter "
                    "aux_loss aux_kind z_loss drop pad",
           lambda c, _: c.model.experts is None,
           "belongs to a mixture, and model.experts is none", "set model.experts, or leave it out"),
    Unused("model", "router_bias_rate", lambda c, _: not c.model.router_bias,
           "moves the bias of model.router_bias, which is off", "set that true, or leave it out"),
    Unused("model", "aux_kind", lambda c, _: not c.model.aux_loss,
           "says what model.aux_loss balances, which is 0", "set model.aux_loss, or leave it out"),
    Unused("model", "drop", lambda c, _: c.model.capacity is None,
           "says whom model.capacity turns away, which is none", "set model.capacity, or leave it out"),
    Unused("model", "rope_theta rope_factor rope_kind rope_low_freq rope_high_freq rope_original "
                    "rope_mscale rope_mscale_all",
           lambda c, _: c.model.positions == "learned",
           "belongs to rotary positions, and model.positions is learned", "set that rope, or leave it out"),
    Unused("model", "rope_kind rope_low_freq rope_high_freq rope_original rope_mscale rope_mscale_all",
           lambda c, _: c.model.rope_factor is None,
           "says how model.rope_factor scales, which is none", "set model.rope_factor, or leave it out"),
    Unused("model", "rope_mscale rope_mscale_all", lambda c, _: c.model.rope_kind != "yarn",
           "belongs to YaRN, and model.rope_kind is llama3", "set model.rope_kind yarn, or leave it out"),
    Unused("model", "context", lambda c, _: c.model.positions == "rope" and c.model.context < c.train.seq_len,
           "is below train.seq_len, and rotary positions go on beyond it (an export would claim less)",
           "raise it to train.seq_len, or shorten that", usual=True),
    Unused("model", "nope_dim rope_dim v_dim", lambda c, _: c.model.kv_rank is None,
           "belongs to latent attention, and model.kv_rank is none", "set model.kv_rank, or leave it out"),
    Unused("model", "qkv_bias", lambda c, _: c.model.bias,
           "adds biases that model.bias has given already", "leave one of them out"),
    Unused("model", "mtp_weight", lambda c, _: not c.model.mtp,
           "weighs the loss of model.mtp, which is 0", "set model.mtp, or leave it out"),
    Unused("model", "attention", lambda c, _: c.parallel.cp > 1 and c.parallel.cp_kind == "ring",
           "chooses a kernel, and ring context parallelism has its own",
           "set parallel.cp_kind ulysses, or leave it out"),
    # ---- the step
    Unused("train", "fp8_keep fp8_block", lambda c, _: fp8_recipe(c.train) is None,
           "says how fp8 is done, and train.dtype is not fp8", "set train.dtype fp8, or leave it out"),
    Unused("train", "fp8_block", lambda c, _: fp8_recipe(c.train) != "blockwise",
           "is the block of train.fp8 blockwise, which is not asked for", "set that, or leave it out",
           note="one script, every way to scale"),
    Unused("train", "loss_scale loss_scale_window", lambda c, _: c.train.dtype != "fp16",
           "scales the loss of fp16, and train.dtype is another", "set train.dtype fp16, or leave it out"),
    Unused("optim", "min_lr", lambda c, _: c.optim.decay == "constant",
           "is the floor of a decay, and optim.decay is constant", "take another, or leave it out"),
    Unused("optim", "decay_fraction", lambda c, _: c.optim.decay != "wsd",
           "is the decaying share of wsd, and optim.decay is another", "take wsd, or leave it out"),
    Unused("optim", "momentum", lambda c, _: c.optim.name not in ("muon", "lars", "sgd"),
           "is that of muon, lars and sgd, and optim.name is another, which has beta1", "leave it out"),
    Unused("optim", "beta1 beta2", lambda c, _: c.optim.name in ("lars", "sgd"),
           "is not read by this optim.name, which has optim.momentum", "leave it out",
           note="one recipe, many optimizers: published recipes set the betas"),
    Unused("optim", "eps", lambda c, _: c.optim.name in ("lion", "lars", "sgd"),
           "is not read by this optim.name", "leave it out",
           note="one recipe, many optimizers: published recipes set eps"),
    # ---- the layout
    Unused("parallel", "sp", lambda c, _: c.parallel.tp == 1,
           "has nothing to cut at parallel.tp 1", "leave it out", note=SIZES),
    Unused("parallel", "schedule vpp", lambda c, _: c.parallel.pp == 1,
           "has nothing to overlap at parallel.pp 1", "leave it out", note=SIZES),
    Unused("parallel", "cp_kind", lambda c, _: c.parallel.cp == 1,
           "has nothing to share at parallel.cp 1", "leave it out", note=SIZES),
    Unused("parallel", "zero reduce compress compress_weights", alone,
           "has nothing to share: every rank holds parameters of its own", "leave it out", note=SIZES),
    Unused("parallel", "timeout_s", lambda c, world: world == 1,
           "waits for peers, and there are none", "leave it out", note=SIZES),
    Unused("parallel", "stages", lambda c, _: c.parallel.pp == 1 and c.parallel.schedule in ONE_STAGE,
           "cuts the layers, and parallel.pp 1 has one stage", "raise parallel.pp, or leave it out"),
    Unused("parallel", "recompute", lambda c, _: c.parallel.recompute_stages is not None,
           "is overruled by parallel.recompute_stages", "give one of them"),
    Unused("parallel", "recompute_parts", lambda c, _: "selective" not in stages_modes(c),
           "says what parallel.recompute selective makes again, which no stage has",
           "set that, or leave this out"),
    Unused("parallel", "node", lambda c, _: c.parallel.reduce != "hierarchy",
           "is read by parallel.reduce hierarchy alone", "set that, or leave this out"),
    Unused("parallel", "compress_block", lambda c, _: scale_block(c.parallel) is None,
           "is the block of int8 and fp8, and nothing is compressed so",
           "set parallel.compress or compress_weights, or leave it out"),
    Unused("parallel", "powersgd_rank", lambda c, _: c.parallel.compress != "powersgd",
           "belongs to parallel.compress powersgd, which is not asked for", "set that, or leave this out"),
    # ---- what is around it
    Unused("data", "cache", lambda c, _: "stdlib" not in c.data.path.split(),
           "keeps data that is made on the spot, and data.path names files", "leave it out",
           note="a site's job script sets it once for all data"),
    Unused("eval", "prompt temperature", lambda c, _: c.eval.sample == 0,
           "belongs to the sampled text, and eval.sample is 0", "set eval.sample, or leave it out"),
    Unused("log", "project", lambda c, _: c.log.wandb == "off",
           "is W&B's, and log.wandb is off", "set log.wandb, or leave it out",
           note="a job script names its project whether or not a trial run is logged"),
    Unused("log", "noise_scale", lambda c, _: c.train.global_batch == c.train.micro_batch,
           "compares two sizes of batch, and a step is one microbatch", "lower train.micro_batch"),
)

# Keys that every run reads, whatever the others say. (model.ffn of a mixture without dense layers is read by
# exports alone; a preset has the published value.)
READ = {
    "model": "preset layers hidden heads kv_heads head_dim ffn vocab vocab_multiple norm norm_eps "
             "activation positions tied bias qk_norm kv_rank mtp window dropout init_std mup_base experts",
    "train": "steps tokens flops seq_len micro_batch global_batch ramp seed dtype max_minutes deterministic "
             "compile cuda_graphs device threads",
    "optim": "name lr warmup decay weight_decay clip",
    "parallel": "tp pp cp bucket_mb offload recompute_stages",
    "data": "path tokenizer split doc_mask prefetch",
    "eval": "every batches sample",
    "checkpoint": "every keep resume init_from async_save timeout_s",
    "log": "dir name every wandb",
    "profile": "steps",
}
# Keys whose idle case rules.py or build.py refuses, in every world and program.
RULED = {
    "model": "qk_norm_whole q_rank rope_pairs mup_head_dim capacity",
    "train": "fp8",
    "optim": "states",
    "parallel": "ep etp dp_rep",
}


def is_set(cfg: Config, section: str, key: str, preset: Model) -> bool:
    """Has the key a value that neither keys.py nor the preset gives it?"""
    value = getattr(getattr(cfg, section), key)
    usual = [getattr(getattr(Config(), section), key)]
    return value not in (usual + [getattr(preset, key)] if section == "model" else usual)


def found(cfg: Config, world: int) -> Iterator[tuple[str, str, Unused]]:
    """(key with its section, its value as it is written, the first row that says why it does nothing)."""
    preset = build(Model, {k: v for k, v in presets().get(cfg.model.preset, {}).items() if k != "recipe"})
    seen = set()
    for row in TABLE:
        for key in row.keys.split() if row.when(cfg, world) else ():
            path = f"{row.section}.{key}"
            if path not in seen and (row.usual or is_set(cfg, row.section, key, preset)):
                seen.add(path)
                value = getattr(getattr(cfg, row.section), key)
                yield path, str(value).lower() if isinstance(value, bool) else str(value), row


def check(cfg: Config, world: int = 1) -> str:
    """One line about the keys that do nothing here and may stay, "" where there are none.

    Raises ConfigError for the first that may not."""
    notes = []
    for path, value, row in found(cfg, world):
        if not row.note:
            raise ConfigError(f"{path}: {value} does nothing: it {row.why}; {row.way}")
        notes.append(f"{path} {value} {row.why}")
    return "note: " + "; ".join(notes) if notes else ""
