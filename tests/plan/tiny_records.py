"""Recorded steps of tiny jobs."""

from model.sharding import parallel_dims
from plan.record.role import RoleRecord, record_role
from scripts.dry_run import collect_peer_answers, make_program

SIZE = (
    "--model.vocab 288 --model.layers 4 --model.hidden 32 --model.mixer.heads 4 --model.mixer.kv_heads 2 "
    "--model.mlp.width 48 --train.seq_len 32 --model.vocab_multiple 32"
).split()
MIXTURE = [*SIZE, "--model.mlp", "experts", "--model.mlp.experts", "4", "--model.mlp.width", "32"]


def get_part_record(cfg, world: int, rank: int, chip=None, **options) -> RoleRecord:
    """Record the step of a rank without a job. chip: of CHIPS, or None for a CPU."""
    dims = parallel_dims(cfg, world)
    answers = collect_peer_answers(cfg, dims, [rank], chip)
    return record_role(cfg, dims, rank, chip, make_program(cfg), answers=answers, **options)
