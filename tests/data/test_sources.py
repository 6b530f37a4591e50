import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pyarrow
import pytest

from mdn.config import ConfigError, DataSet, Part
from mdn.data.sources import FORMATS, documents, hub_documents, hub_rows, part_files

TEXTS = ["one line", "two\nlines", "", "naïve Ω 🙂", " spaced  ", "x" * 5000]


def write_rows(path: Path, texts: list[str | None], field: str = "text") -> None:
    """Rows with the text and other fields, in the format of the path's suffixes."""
    rows = [{"id": n, field: text, "meta": {"source": "test"}} for n, text in enumerate(texts)]
    if path.suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path, row_group_size=2)
        return
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".zst":
        half = len(data) // 2  # two frames, as parallel compressors write them
        with path.open("wb") as file:
            for part in (data[:half], data[half:]):
                file.write(pyarrow.compress(part, codec="zstd", asbytes=True))
    else:
        path.write_bytes(data)


def read(root: Path, path: str, format: str, field: str = "text") -> list[str]:
    part = Part(name="p", path=path, format=format, field=field)
    return list(documents(part, part_files(part, root)))


@pytest.mark.parametrize(
    ("suffix", "format"), [("jsonl", "jsonl"), ("jsonl.zst", "jsonl"), ("parquet", "parquet")]
)
@pytest.mark.parametrize("field", ["text", "content"])
def test_rows_give_their_field_in_order(tmp_path, suffix, format, field):
    write_rows(tmp_path / f"b.{suffix}", TEXTS, field)
    write_rows(tmp_path / f"a.{suffix}", ["first file", None], field)
    assert read(tmp_path, f"*.{suffix}", format, field) == ["first file", "", *TEXTS]


def test_documents_are_the_text_between_tags(tmp_path):
    first = '<doc id="1" title="A">\nA\n\nBody a.\nMore.\n</doc>\n'
    second = '\n<doc id="2" title="B">\nB <doc x> b\n\n\n</doc>\n'
    (tmp_path / "wiki").write_text(first + second)
    assert read(tmp_path, "wiki", "documents") == ["A\n\nBody a.\nMore.", "B <doc x> b"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<doc id=1>\nno end\n", "ends inside a document"),
        ("stray\n<doc id=1>\nA\n</doc>\n", "line 1 is outside"),
        ("<doc id=1>\nA\n</doc>\n</doc>\n", "line 4 is outside"),
    ],
)
def test_broken_tags_are_an_error(tmp_path, text, why):
    (tmp_path / "wiki").write_text(text)
    with pytest.raises(ValueError, match=why):
        read(tmp_path, "wiki", "documents")


def test_lines_are_split_at_newlines_only(tmp_path):
    (tmp_path / "c4").write_bytes("a\u2028b\x0bc\rd\r\n\nlast".encode())
    assert read(tmp_path, "c4", "lines") == ["a\u2028b\x0bc\rd", "", "last"]


def test_text_files_are_documents_in_the_order_of_their_names(tmp_path):
    for name in ("1999", "1790", "2020"):
        (tmp_path / f"{name}.txt").write_text(f"in {name}\n\n")
    assert read(tmp_path, "*.txt", "text") == ["in 1790\n\n", "in 1999\n\n", "in 2020\n\n"]


@pytest.mark.parametrize(
    "value",
    [
        ["a", "b"],
        {"k": "a", "l": "b"},
        [{"t": "a", "z": 1}, {"t": "b"}],
        {"k": {"title": "K", "t": "a"}, "l": {"t": "b"}},
    ],
)
def test_json_takes_mappings_and_lists_of_texts_or_records(tmp_path, value):
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read(tmp_path, "x.json", "json", field="t") == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            '{"k": {"title": "K", "extract": "E"}}',
            r"parts\.p\.field: 'text' is not in .*; use one of title, extract",
        ),
        ("[1, 2]", "'1' is not a text"),
        ('"alone"', "neither a mapping nor a list"),
        ('["cut', "not JSON"),
    ],
)
def test_json_of_another_shape_is_an_error(tmp_path, value, why):
    (tmp_path / "x.json").write_text(value)
    with pytest.raises(ValueError, match=why):
        read(tmp_path, "x.json", "json")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "parquet"])
def test_a_cut_file_is_named(tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    write_rows(path, [f"document {n} " * 50 for n in range(300)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size - 40])
    with pytest.raises(ValueError, match=rf"cut\.{suffix}: cannot be read \(.+\); check"):
        read(tmp_path, path.name, suffix.split(".")[0])


def test_a_missing_parquet_column_names_those_there(tmp_path):
    write_rows(tmp_path / "a.parquet", ["x"])
    with pytest.raises(ConfigError, match=r"parts\.p\.field: 'body' is not in .*use one of id, text, meta"):
        read(tmp_path, "a.parquet", "parquet", field="body")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_missing_and_empty_files_are_errors(tmp_path, format):
    with pytest.raises(ConfigError, match=r"parts\.p\.path: no file matches"):
        read(tmp_path, "nothing*", format)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty: empty; fetch it again"):
        read(tmp_path, "empty", format)


def test_an_unknown_format_lists_the_known(tmp_path):
    with pytest.raises(ConfigError, match=r"parts\.p\.format: 'csv' is unknown; use one of documents, lines"):
        read(tmp_path, "a", "csv")


@pytest.mark.parametrize("format", ["documents", "lines", "text", "json"])
def test_text_that_is_not_utf8_is_named(tmp_path, format):
    (tmp_path / "latin").write_bytes("<doc id=1>\ncafé\n</doc>\n".encode("latin-1"))
    with pytest.raises(ValueError, match="latin: not UTF-8"):
        read(tmp_path, "latin", format)


def test_a_path_with_brackets_in_the_root_is_found(tmp_path):
    root = tmp_path / "odd[1]"
    root.mkdir()
    (root / "a.txt").write_text("a")
    assert read(root, "*.txt", "text") == ["a"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "parquet"])
def test_hub_sets_stream_from_a_local_folder(tmp_path, monkeypatch, suffix):
    if suffix == "jsonl.zst":
        pytest.importorskip("zstandard")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    texts = [text or "filled" for text in TEXTS]
    write_rows(folder / f"train-0.{suffix}", texts)
    data = DataSet(source="huggingface", repository=str(folder))
    rows, files = hub_rows(data)
    assert list(hub_documents(data, rows)) == texts
    assert [Path(name).name for name, *_ in files] == [f"train-0.{suffix}"]
    with pytest.raises(ConfigError, match=r"text: rows of .* have no 'body'; use one of id, text, meta"):
        list(hub_documents(DataSet(source="huggingface", repository=str(folder), text="body"), rows))


def test_a_hub_set_without_a_repository_is_an_error():
    with pytest.raises(ConfigError, match="repository: missing"):
        hub_rows(DataSet(source="huggingface"))


MEASURE = """
import re, sys
from pathlib import Path
from mdn.config import Part
from mdn.data.sources import documents

def own_memory():  # without mapped files
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

start = peak = own_memory()
part = Part(name="p", path=sys.argv[1], format=sys.argv[2])
for number, text in enumerate(documents(part, [Path(sys.argv[1])])):
    if number % 200 == 0:
        peak = max(peak, own_memory())
print(number + 1, peak - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("suffix", "format"), [("jsonl", "jsonl"), ("jsonl.zst", "jsonl"), ("parquet", "parquet")]
)
def test_reading_takes_far_less_memory_than_the_text(tmp_path, suffix, format):
    path, count, text = tmp_path / f"big.{suffix}", 12_000, "some words " * 1500
    if suffix == "parquet":
        pl.DataFrame({"text": [text] * count}).write_parquet(path, row_group_size=200)
    else:
        line = json.dumps({"text": text}).encode() + b"\n"
        with pyarrow.output_stream(path, compression="zstd" if path.suffix == ".zst" else None) as file:
            for _ in range(count):
                file.write(line)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), format], check=True, capture_output=True, text=True
    )
    read_count, megabytes = done.stdout.split()
    assert int(read_count) == count
    assert float(megabytes) < count * len(text) / 1e6 / 2  # 198 MB of text
