"""The record of a rank without a job, beside the same rank of a job: FLOPs, exchanges and bytes."""

import math

import pytest
import torch
from tiny_records import MIXTURE, SIZE, get_part_record

from config import Config
from config.reading import resolve
from config.tree import with_values
from model.sharding import parallel_dims
from parallel.expert import dispatch
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from plan.job import make_rank_job
from plan.record.launches import CHIPS, Launch, Recorder
from plan.record.role import RoleRecord, assumed_batch, record_role, record_steps
from plan.record.work import Facts, judge
from scripts.dry_run import make_program

BATCH = ["--train.micro_batch", "2", "--train.global_batch", "8"]
EXCHANGE = dispatch.exchange_row_counts
TRIES = 3  # of a real job
HELD = ("peak", "state")  # facts of a rank that are bytes held at a moment


def random_batch(cfg: Config, dims, rank: int, step: int):
    """As assumed, with tokens that a router sends to different experts."""
    device = torch.device("cpu")
    batches = assumed_batch(cfg, dims, device, step)
    for number, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
        batch.tokens.random_(0, cfg.model.vocab, generator=generator)
    return batches


def real_role(world: World, cfg: Config) -> tuple[dict, list]:
    """On a rank of a job: what its step does, and what its routers have decided in it."""
    make_rank_job(cfg, world.size, world.rank)  # what it describes once is not of the step
    dims = parallel_dims(cfg, world.size)
    mesh = Mesh.bind(dims, world)
    recorder = Recorder(executes=True)
    recorder.counts_host = True
    decided = []

    def batches(step):
        decided.clear()
        return random_batch(cfg, dims, mesh.dp.index, step)

    def noting(function):
        def run(*args, **options):
            result = function(*args, **options)
            decided.append(result.tolist())
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("with_values", "exchange_row_counts"):
            patch.setattr(dispatch, name, noting(getattr(dispatch, name)))
        record = record_steps(make_program(cfg), recorder, mesh, torch.device("cpu"), batches)
    return launch_facts(record), decided


def recorded(cfg: Config, world: int, rank: int) -> RoleRecord:
    """The same without a job."""
    make_rank_job(cfg, world, rank)
    return get_part_record(cfg, world, rank)


def launch_facts(record: RoleRecord) -> dict:
    return {
        "flops": flops_of(record.launches),
        "ledger": dict(record.ledger),
        "state": record.state,
        "peak": record.peak,
    }


def check_against_job(ranks, world: int, cfg: Config, expected) -> None:
    """Each rank of a real job does what its record says: expected(rank, what its routers decided).

    A thread of gloo may hold a tensor for a moment after its exchange was awaited. So a real peak, and the
    state at the beginning of a step, can be too high, never too low: where one is, the job is run again, and
    the least bytes of a rank count.
    """
    least = [dict.fromkeys(HELD, math.inf) for _ in range(world)]
    recorded_bytes: list[dict] = []
    for _ in range(TRIES):
        found = ranks(world).run(real_role, cfg) if world > 1 else [real_role(World(), cfg)]
        facts = [launch_facts(expected(rank, decided)) for rank, (_, decided) in enumerate(found)]
        recorded_bytes = [{name: each[name] for name in HELD} for each in facts]
        for rank, (run, _) in enumerate(found):
            least[rank] = {name: min(least[rank][name], run[name]) for name in HELD}
            assert run | recorded_bytes[rank] == facts[rank]
        if least == recorded_bytes:
            break
    assert least == recorded_bytes


def flops_of(launches: list[Launch]) -> float:
    return sum(judge(launch, Facts(1.0)).flops for launch in launches)


def repeat_decisions(monkeypatch, decided: list) -> None:
    """Routers without values decide what those of the job have decided, in each step what it was in the kept
    one."""
    left = []

    def batch(*args):
        left[:] = decided
        return assumed_batch(*args)

    def with_values(counts, num_choices, num_experts):
        return torch.tensor(left.pop(0))

    def exchange_row_counts(sent_counts, group, etp, is_assumed):
        EXCHANGE(sent_counts, group, etp, is_assumed)
        return torch.tensor(left.pop(0))

    monkeypatch.setattr("plan.record.role.assumed_batch", batch)
    monkeypatch.setattr(dispatch, "with_values", with_values)
    monkeypatch.setattr(dispatch, "exchange_row_counts", exchange_row_counts)


DENSE = [
    (1, ""),
    (1, "--model.mixer.kernel sdpa --model.mixer.value_dim 12"),
    (2, "--parallel.tp 2"),
    (2, "--parallel.tp 2 --parallel.sp true --parallel.async_tp true"),
    (2, "--parallel.cp 2"),
    (2, "--parallel.cp 2 --parallel.cp_kind ulysses"),
    (2, "--parallel.pp 2"),
    (2, "--parallel.pp 2 --parallel.schedule zb-v"),
    (2, "--parallel.pp 2 --parallel.schedule interleaved --parallel.recompute selective"),
    (2, "--parallel.zero 1 --train.ema 0.9"),
    (2, "--parallel.zero 2"),
    (2, "--parallel.zero 3 --parallel.recompute full"),
    (2, "--parallel.compress int8"),
    (2, "--parallel.reduce ring"),
    (2, "--parallel.offload both"),
    (2, "--parallel.tp 2 --model.tied true --train.dtype bf16"),
    (4, "--parallel.tp 2 --parallel.pp 2 --parallel.zero 0"),
    (4, "--parallel.dp_rep 2 --parallel.zero 1 --log.noise_scale true"),
    (2, "--optim.name muon --parallel.zero 1"),
    (2, "--optim.name lars --parallel.zero 2"),
    (4, "--optim.name muon --parallel.tp 2 --parallel.zero 3"),
    (2, "--optim.name muon --parallel.pp 2"),
    (4, "--optim.name muon --parallel.pp 2"),
    (4, "--optim.name normuon --parallel.tp 2 --parallel.zero 1"),
    (4, "--optim.name dion --parallel.tp 2 --parallel.zero 1"),
    (4, "--optim.name lamb --parallel.pp 2 --parallel.zero 1"),
]
MIXTURES = [
    (1, ""),
    (2, "--parallel.ep 2"),
    (2, "--parallel.ep 2 --parallel.ep_chunks 2 --parallel.recompute full"),
    (2, "--parallel.ep 2 --model.mlp.capacity.factor 1.0 --model.mlp.capacity.pad true"),
    (2, "--parallel.ep 2 --parallel.ep_bound 8"),
    (4, "--parallel.ep 2 --parallel.etp 2 --parallel.ep_bound 8 --parallel.ep_chunks 2"),
    (2, "--parallel.ep 2 --parallel.compress_tokens fp8 --train.dtype bf16"),
    (4, "--parallel.tp 2 --parallel.sp true --parallel.ep 2 --parallel.zero 1"),
    (4, "--optim.name muon --parallel.ep 2 --parallel.zero 1"),
    (4, "--optim.name lamb --parallel.ep 2 --parallel.tp 2"),
    (4, "--model.mlp.bias true --model.mlp.router.logit_bias true --parallel.ep 2 --parallel.etp 2"),
]


def ids(layouts):
    return [words.replace("--parallel.", "").replace("--", "") or "one" for _, words in layouts]


@pytest.mark.slow(core=["zero 3 recompute full"])
@pytest.mark.parametrize("world, words", DENSE, ids=ids(DENSE))
def test_a_dense_record_is_the_run(ranks, world, words):
    cfg = resolve("llama3-tiny", None, [*SIZE, *BATCH, *words.split()])

    def expected(rank, decided):
        assert not decided
        return recorded(cfg, world, rank)

    check_against_job(ranks, world, cfg, expected)


def test_what_a_library_saves_for_its_backward_is_offloaded_too():
    """Torch's attention and ours save tensors of the same sizes."""
    words = [*SIZE, *BATCH, *"--train.dtype bf16 --train.seq_len 128 --parallel.offload activations".split()]
    cfg = resolve("llama3-tiny", None, words)
    kinds = [with_values(cfg, {"model.mixer.kernel": kind}) for kind in ("sdpa", "triton")]
    library, ours = (get_part_record(one, 1, 0, CHIPS["h100"]).host for one in kinds)
    assert library == ours > 0


@pytest.mark.parametrize("chunks", ["1", "2"])
def test_a_bound_on_rows_leaves_one_host_read_a_step(chunks):
    """Without it the host reads counts in each layer and microbatch, and with recompute twice."""
    keys = "--parallel.ep 2 --train.dtype bf16 --parallel.recompute full --parallel.ep_chunks".split()
    cfg = resolve("mixtral-tiny", None, [*MIXTURE, *BATCH, *keys, chunks])
    bounded = with_values(cfg, {"parallel.ep_bound": 1.25})
    coded = with_values(bounded, {"parallel.compress_tokens": "fp8"})
    exact, reads, reads_of_coded = (
        get_part_record(each, 2, 0, CHIPS["h100"]).host_reads for each in (cfg, bounded, coded)
    )
    mixtures, microbatches = cfg.model.layers, cfg.train.global_batch // 2 // cfg.train.micro_batch
    assert exact == 2 * mixtures * microbatches * [("parallel/expert/dispatch.py", "with_values")]
    assert reads == reads_of_coded == [("model/bounded_rows.py", "all_rows_fit")]


ONE_LAYER_EACH = "--model.layers 2 --train.micro_batch 1".split()
OF_EIGHT = {
    "llama3-tiny": [
        "--parallel.zero 3",
        "--parallel.cp 4 --parallel.zero 1",
        "--parallel.tp 4 --parallel.sp true --parallel.zero 1",
        "--parallel.tp 2 --parallel.cp 2 --parallel.pp 2 --parallel.zero 2",
        "--parallel.dp_rep 2 --parallel.cp 2 --parallel.cp_kind ulysses --parallel.zero 1",
    ],
    "mixtral-tiny": ["--parallel.ep 4 --parallel.zero 1", "--parallel.ep 2 --parallel.tp 2 --parallel.pp 2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [(name, one) for name, all_of in OF_EIGHT.items() for one in all_of])
def test_the_first_rank_of_a_place_is_the_fullest(name, words):
    """All of a place compute alike, hold as much as the first or less, and exchange as often: but under ZeRO
    the ranks that own the norms sum their gradients over tp."""
    keys = MIXTURE if name == "mixtral-tiny" else SIZE
    cfg = resolve(name, None, [*keys, *BATCH, *ONE_LAYER_EACH, *words.split()])
    dims = parallel_dims(cfg, 8)
    records = [record_role(cfg, dims, rank, CHIPS["h100"], make_program(cfg)) for rank in range(8)]
    for record in records:
        first = records[dims.coordinates(record.rank)["pp"] * (8 // dims.pp)]
        assert flops_of(record.launches) == flops_of(first.launches)
        assert record.state <= first.state and record.peak <= first.peak
        calls = {key: count for key, count in record.ledger.items() if key[2] == "calls"}
        for key, count in calls.items():
            of_norms = 1 if key[:2] == ("tp", "all_reduce") else 0
            assert count <= first.ledger[key] + of_norms, key


@pytest.mark.slow(core=["ep 2"])
@pytest.mark.parametrize("world, words", MIXTURES, ids=ids(MIXTURES))
def test_the_record_of_a_mixture_is_the_run_with_its_routing(ranks, monkeypatch, world, words):
    cfg = resolve("mixtral-tiny", None, [*MIXTURE, *BATCH, *words.split()])

    def expected(rank, decided):
        repeat_decisions(monkeypatch, decided)
        return recorded(cfg, world, rank)

    check_against_job(ranks, world, cfg, expected)
