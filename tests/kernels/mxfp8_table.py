"""Blocks of 32 numbers, and the table of what torchao 0.18.0 makes of them (tests/kernels/mxfp8_torchao.txt).

    python tests/kernels/mxfp8_table.py > tests/kernels/mxfp8_torchao.txt      needs torchao

Each line: the name of a block, the byte of its scale (E8M0), its 32 elements (E4M3), all in hexadecimal; and
last a digest of torchao's layout of scales.
"""
import hashlib

import numpy as np

SIDE = 32
SCALES = (300, 9)  # of the layout: neither size fills its tiles of 128 x 4


def blocks() -> dict[str, np.ndarray]:
    """{name: [32] in fp32}."""
    stream = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for number in range(8):
        made[f"random_{number}"] = stream.integers(-4000, 4001, SIDE) / 1024.0
        mantissas = stream.integers(-(2**20), 2**20, SIDE)
        made[f"bf16_{number}"] = truncated(mantissas * 2.0 ** -stream.integers(0, 30))
    for exponent in (-149, -140, -127, -126, -120, -118, -110, -100, -20, 20, 100, 110, 119):
        made[f"scale_2^{exponent}"] = stream.integers(-255, 256, SIDE) * 2.0**exponent
    made["zero"] = np.zeros(SIDE)
    made["minus_zero"] = np.full(SIDE, -0.0)
    made["one_subnormal"] = one_of(2.0**-149, 0.0)
    made["ties"] = np.arange(SIDE) * 0.5 + 432.0  # halfway between neighbors of E4M3, with scale 1
    made["subnormal_elements"] = np.append(np.arange(SIDE - 1) * 2.0**-11, 448.0)
    made["wide"] = np.append(2.0 ** -np.arange(SIDE - 1), 300.0)
    for text, largest in (("224", 224.0), ("448", 448.0), ("449", 449.0), ("511", 511.0), ("256", 256.0)):
        made[f"largest_{text}"] = one_of(largest, 100.0)
    made["largest_of_fp32"] = one_of(float(np.finfo(np.float32).max), 1e38)
    made["smallest_scale"] = one_of(448.0 * 2.0**-127, 2.0**-120)
    made["above_smallest_scale"] = one_of(449.0 * 2.0**-127, 2.0**-120)
    made["infinite"] = one_of(np.inf, 1e30)
    made["minus_infinite"] = one_of(-np.inf, 1e30)
    made["nan"] = one_of(np.nan, 3.0)
    return {name: block.astype(np.float32) for name, block in made.items()}


def one_of(first: float, others: float) -> np.ndarray:
    return np.array([first] + [others] * (SIDE - 1))


def truncated(x: np.ndarray) -> np.ndarray:
    """x in bf16, rounded to zero."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def scale_codes() -> np.ndarray:
    """Bytes of scales [300, 9]."""
    return np.random.default_rng(1).integers(0, 255, SCALES).astype(np.uint8)


def main() -> None:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

    for name, block in blocks().items():
        x = torch.from_numpy(block)[None]
        scale, q = to_mx(x, torch.float8_e4m3fn, SIDE, ScaleCalculationMode.RCEIL)
        codes = [t.view(torch.uint8).numpy().tobytes().hex() for t in (scale, q)]
        print(name, *codes)
    laid = to_blocked(torch.from_numpy(scale_codes())).numpy().tobytes()
    print("layout", hashlib.sha256(laid).hexdigest())


if __name__ == "__main__":
    main()
