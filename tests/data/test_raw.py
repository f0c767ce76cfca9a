"""data/raw.py: nanoGPT's and modded-nanogpt's files."""

import numpy as np
import pytest

from config import ConfigError
from data.raw import GPT2_EOD, RawShards


def nanogpt(path, ids):
    np.array(ids, "<u2").tofile(path)
    return path


def shard(path, ids, claim=None):
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, claim or len(ids)
    path.write_bytes(head.tobytes() + np.array(ids, "<u2").tobytes())
    return path


def test_files_of_nanogpt_and_modded_nanogpt_are_read(tmp_path):
    ids = [5, 6, GPT2_EOD, 7, 8, 9, GPT2_EOD, 1]
    for raw in (
        RawShards(nanogpt(tmp_path / "a.bin", ids), eod=GPT2_EOD),
        RawShards(shard(tmp_path / "b.bin", ids)),
    ):
        assert raw.tokens == 8 and raw.read(1, 5).tolist() == ids[1:5]
        assert raw.document_starts(0, 8).tolist() == [3, 7] and raw.document_starts(3, 7).tolist() == []
        assert [raw.split_point(k, 4) for k in range(5)] == [
            0,
            3,
            7,
            7,
            8,
        ]  # at a document's start, where one is near
        assert raw.identity != RawShards(nanogpt(tmp_path / "c.bin", ids[:-1] + [2])).identity


@pytest.mark.parametrize(
    "content", [b"", b"abc", np.array([20240520, 1, 9], "<i4").tobytes() + bytes(1012 + 16)]
)
def test_a_file_of_no_known_form_is_refused(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="x.bin: .* bytes are not"):
        RawShards(tmp_path / "x.bin")


def test_ids_and_boundaries_need_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="token 2: id 900"):
        RawShards(nanogpt(tmp_path / "a.bin", [1, 2, 900]), vocab=900)
    raw = RawShards(nanogpt(tmp_path / "a.bin", [1, 2, 900]), vocab=901)
    with pytest.raises(ConfigError, match="doc_mask"):
        raw.document_starts(0, 2)


def test_identity_is_that_of_the_size_and_both_ends(tmp_path):
    """2^20 bytes of each end; the middle of a large file would take minutes to read."""
    n, end = 5 << 18, 1 << 19  # tokens of two bytes
    ids = (np.arange(n) % 50000).astype("<u2")
    whole = RawShards(nanogpt(tmp_path / "a.bin", ids)).identity

    def changed(place: int) -> bool:
        other = ids.copy()
        other[place] += 1
        return RawShards(nanogpt(tmp_path / "b.bin", other)).identity != whole

    told = [changed(at) for at in (0, end - 1, end, n - end - 1, n - end, n - 1)]
    assert told == [True, True, False, False, True, True]
    assert RawShards(nanogpt(tmp_path / "b.bin", ids[:-1])).identity != whole
