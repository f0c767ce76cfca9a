"""Blocks of 16 numbers, and the table of what torchao 0.18.0 makes of them (tests/kernels/nvfp4_torchao.txt).

    python tests/kernels/nvfp4_table.py > tests/kernels/nvfp4_torchao.txt      needs torchao

Each line: the name of a block, the byte of its scale (E4M3), its 16 elements (E2M1, two a byte), all in
hexadecimal. The largest element of the tensor is TENSOR, 6 * 448, so that its scale is 1, and every order of
the divisions rounds alike. torchao has no scales of blocks below 2^-6, and none of these needs one.
"""
import numpy as np

SIDE = 16
TENSOR = 6.0 * 448.0


def blocks() -> dict[str, np.ndarray]:
    """{name: [16] in fp32}."""
    stream = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for number in range(24):
        size = 2.0 ** stream.integers(0, 12)
        made[f"random_{number}"] = stream.standard_normal(SIDE) * size / 4
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    made["all_numbers"] = np.array(numbers + [-x for x in numbers])
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    made["ties"] = np.array(ties + [-x for x in ties])
    made["beside_ties"] = np.nextafter(np.float32(made["ties"]), np.float32([8.0] * 8 + [0.0] * 8))
    made["largest"] = np.full(SIDE, TENSOR)
    made["saturates"] = np.array([6.0 * 16.9] + [5.0] * 15)  # the scale becomes 16, and 6.34 becomes 6
    made["rounds_up"] = np.array([6.0 * 17.1] + [5.0] * 15)
    return {name: block.astype(np.float32) for name, block in made.items()}


def main() -> None:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    for name, block in blocks().items():
        tensor_scale = per_tensor_amax_to_scale(torch.tensor(TENSOR))
        scale, q = nvfp4_quantize(torch.from_numpy(block)[None], SIDE, tensor_scale)
        print(name, *(t.view(torch.uint8).numpy().tobytes().hex() for t in (scale, q)))


if __name__ == "__main__":
    main()
