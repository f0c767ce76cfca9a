"""The sections of `scripts.bench first`, most information a second first, and the shapes that fit a card."""

from dataclasses import dataclass, replace

from lab.benchmarks.card import GIB, TOO_LARGE, USABLE_MEMORY, fitted_shape, get_dtype, planned_bytes
from lab.benchmarks.markdown import markdown_table

START_S = 20.0  # imports from a cold disk
RESERVE_S = 5.0  # for the table and the tar
MAX_JOBS = 8  # concurrently on a GPU
JOB_BYTES = 8 * GIB  # upper limit of a kernel test
SLACK = {True: 1.5, False: 3.0}  # {beside: time limit over expected time}; a lone job is not cut off


@dataclass(frozen=True)
class Section:
    """Rows of one kind.

    expected_s: an estimate for an H100. beside: whether jobs run concurrently.
    shares_pool: with the previous section. model, contestant: for a step.
    """

    name: str
    expected_s: float
    what: str
    kind: str = "step"
    beside: bool = False
    shares_pool: bool = False
    model: str = ""
    contestant: str = ""


def step(model: str, contestant: str, expected_s: float, what: str) -> Section:
    return Section(f"{model} {contestant}", expected_s, what, model=model, contestant=contestant)


SECTIONS = (
    Section("rates", 25, "products, copies, attention, launches, the clock under load", "rates"),
    step("dense", "ours", 25, "the step that all others are compared with"),
    Section("kernels", 85, "right or wrong: pytest -m gpu tests/kernels", "kernels", beside=True),
    Section(
        "modelled",
        5,
        "the step model's launches of these shapes (no GPU), beside the kernels",
        "modelled",
        beside=True,
        shares_pool=True,
    ),
    Section("corpus", 5, "the text of the small models", "corpus"),
    Section("models", 45, "small models with the kernels and without", "models", beside=True),
    step("moe", "ours", 25, "64 experts, top 8"),
    step("dense", "ours+fp8", 25, "tensorwise scales"),
    step("packed", "ours", 25, "two documents in a sequence"),
    step("packed", "ours+libraries", 30, "the same with the attention libraries of --site"),
    step("dense", "ours+graphs", 30, "recorded forward and backward"),
    step("8b", "ours", 25, "as many layers as fit"),
    step("8b", "ours+fp8", 25, "the same, tensorwise scales"),
    step("dense-128k", "ours", 25, "a vocabulary of 128,256"),
    step("moe", "ours+fp8", 25, "experts in fp8"),
    step("packed-uneven", "ours", 25, "documents that end anywhere"),
    Section("exchanges", 10, "every verb over NCCL: one rank, a rank a GPU", "exchanges"),
    replace(step("dense", "ours", 15, "the same once more: the noise"), name="dense ours, again"),
    step("dense", "megatron-core", 40, "with Transformer Engine"),
    step("dense", "torchtitan+compile", 45, "as its trainer compiles it"),
    step("moe", "megatron-core", 40, ""),
    step("packed", "megatron-core", 40, ""),
    step("8b", "torchtitan+compile", 45, ""),
    step("dense", "transformers+liger", 40, ""),
)
SCENARIOS = {  # {section: scenario of the step model}
    "dense ours": "dense",
    "moe ours": "moe",
    "dense ours+fp8": "dense+tensorwise",
    "packed ours": "packed",
    "packed ours+libraries": "packed+cudnn",
    "8b ours": "8b",
    "dense-128k ours": "dense-128k",
    "moe ours+fp8": "moe+tensorwise",
    "packed-uneven ours": "packed-uneven",
}


def jobs_beside(memory_bytes: int, cores: int) -> int:
    """Return how many processes share the GPU, limited by its memory and by the host's cores."""
    return max(1, min(MAX_JOBS, memory_bytes // JOB_BYTES, cores // 2))


def plan_text(memory_bytes: int, minutes: float, is_tiny: bool = False) -> str:
    """Return the order and expected time of the sections, with layers and planned memory of each step."""
    seconds = START_S
    rows = []
    for section in SECTIONS:
        seconds += section.expected_s
        row = {"rows": section.name, "what": section.what, "layers": "", "planned GiB": ""}
        if section.model:
            shape = fitted_shape(section.model, section.contestant, memory_bytes, is_tiny)
            dtype = get_dtype(section.contestant)
            row["layers"] = str(shape.layers) if shape else f"absent: {TOO_LARGE}"
            row["planned GiB"] = f"{planned_bytes(shape, dtype) / GIB:.1f}" if shape else ""
        row["expected until, minutes"] = f"{seconds / 60:.1f}"
        row["in time"] = "yes" if seconds <= 60 * minutes - RESERVE_S else "only if others are faster"
        rows.append(row)
    usable = USABLE_MEMORY * memory_bytes / GIB
    title = f"{memory_bytes / GIB:.0f} GiB, {usable:.1f} of them planned; {minutes:g} minutes."
    return "\n".join([title, "", *markdown_table(rows)])
