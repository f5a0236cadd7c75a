"""Compressed files: read whole, written in members, cut off where they are torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill_producer.batch.formats.streams import open_input, open_output_encoder, repair_tail
from tidemill_producer.errors import BatchError

GROUPS = [b"a\nb\n", b"c\n" * 100_000, b"d\n"]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_what_is_written_in_groups_is_read_as_one(tmp_path: Path, ending: str) -> None:
    path = str(tmp_path / f"f{ending}")
    encode = open_output_encoder(path)
    Path(path).write_bytes(b"".join(map(encode, GROUPS)))
    with open_input(path) as stream:
        assert stream.read() == b"".join(GROUPS)
    assert repair_tail(path) == Path(path).stat().st_size


@pytest.mark.parametrize("cut", [1, 9, 15])
def test_a_torn_member_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "f.jsonl.gz"
    encode = open_output_encoder(str(path))
    whole = encode(GROUPS[0]) + encode(GROUPS[1])
    path.write_bytes(whole + encode(GROUPS[2])[:-cut])
    with pytest.raises(BatchError, match="damaged or cut short"), open_input(str(path)) as stream:
        stream.read()
    assert repair_tail(str(path)) == len(whole)


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"a\nbb\n" + b"c" * 200_000)
    assert repair_tail(str(path)) == 5
    path.write_bytes(b"c")
    assert repair_tail(str(path)) == 0


def test_a_missing_file_is_told_by_name() -> None:
    with pytest.raises(BatchError, match=r"Cannot read nowhere\.gz: No such file"):
        open_input("nowhere.gz")
