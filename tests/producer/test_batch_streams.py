"""Input files that are compressed, and outputs that would have to be."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tidemill_producer.batch.formats.streams import open_input
from tidemill_producer.batch.output import OutputFile
from tidemill_producer.errors import BatchError

GROUPS = [b"a\nb\n", b"c\n" * 100_000, b"d\n"]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_members_are_read_as_one_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f{ending}"
    members = [gzip.compress(group) if ending.endswith(".gz") else group for group in GROUPS]
    path.write_bytes(b"".join(members))
    with open_input(str(path)) as stream:
        assert stream.read() == b"".join(GROUPS)


@pytest.mark.parametrize("cut", [1, 9, 15])
def test_a_file_that_is_cut_short_is_told_of(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(gzip.compress(GROUPS[0]) + gzip.compress(GROUPS[1])[:-cut])
    with pytest.raises(BatchError, match="damaged or cut short"), open_input(str(path)) as stream:
        stream.read()


def test_a_missing_file_is_told_by_name() -> None:
    with pytest.raises(BatchError, match=r"Cannot read nowhere\.gz: No such file"):
        open_input("nowhere.gz")


def test_what_is_not_read_is_refused() -> None:
    with pytest.raises(BatchError, match="zstd is not read"):
        open_input("rows.jsonl.zst")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_output_that_asks_for_compression_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(BatchError, match="outputs are not compressed"):
        OutputFile(str(tmp_path / f"out.jsonl{suffix}"), overwrite=False).check()
