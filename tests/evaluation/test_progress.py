"""What a task's bar says."""

from types import SimpleNamespace

import pytest

from mdn.evaluation.progress import Speed, bars


@pytest.mark.parametrize(
    ("speed", "finished", "text"),
    [(None, None, ""), (12.34, None, "12.3 items/s"), (3.0, 1234.5, "1,234.5 items/s")],
)
def test_speed_is_in_items_and_of_the_whole_task_once_it_is_done(speed, finished, text):
    assert str(Speed().render(SimpleNamespace(speed=speed, finished_speed=finished))) == text


def test_a_bar_appears_with_its_first_move_and_counts_items(capsys):
    with bars() as show:
        show("piqa")
        move = show("boolq")
        move(0, 8)
        move(8, 8)
    said = capsys.readouterr().err
    assert "boolq" in said
    assert "8/8" in said
    assert "piqa" not in said
