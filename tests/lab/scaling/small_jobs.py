"""The words of a job that trains in a second, for tests that start real ones."""

SMALL = (
    "--data.tokenizer bytes --model.vocab 257 --model.layers 1 --model.hidden 32 --model.mixer.heads 2 "
    "--model.mixer.kv_heads 2 --model.mixer.head_dim 16 --model.mlp.width 64 --train.seq_len 32 "
    "--train.micro_batch 1 --train.global_batch 4"
).split()


def settings_of(words: list[str]) -> tuple[tuple[str, str], ...]:
    """((key, value), ...) of --key value."""
    return tuple((key.removeprefix("--"), value) for key, value in zip(words[::2], words[1::2]))
