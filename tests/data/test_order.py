import numpy as np
import pytest

from mdn.data.order import Order, _permute, window_count


@pytest.mark.parametrize(
    ("tokens", "context", "windows"),
    [
        (0, 4, 0),
        (1, 4, 0),
        (4, 4, 0),
        (5, 4, 1),
        (8, 4, 1),
        (9, 4, 2),
        (1001, 10, 100),
    ],
)
def test_a_window_needs_one_token_more_than_its_inputs(tokens, context, windows):
    assert window_count(tokens, context) == windows
    starts = [start for start in range(0, tokens, context) if start + context + 1 <= tokens]
    assert len(starts) == windows


@pytest.mark.parametrize("windows", [1, 2, 3, 16, 17, 255, 256, 257, 1000, 65_537])
@pytest.mark.parametrize("seed", [0, 42, -1, 2**70])
def test_every_epoch_visits_every_window_once(windows, seed):
    batch = max(1, windows // 5)
    order = Order(windows, batch, seed)
    epochs = 3
    seen = np.concatenate([order.indices(step) for step in range(-(-epochs * windows // batch))])
    for epoch in range(epochs):
        visited = seen[epoch * windows : (epoch + 1) * windows]
        assert np.array_equal(np.sort(visited), np.arange(windows))


def test_a_step_does_not_depend_on_the_steps_before():
    steps = [7, 0, 3, 7, 10**9]
    out_of_order = [Order(1000, 16, 42).indices(step) for step in steps]
    order = Order(1000, 16, 42)
    in_order = {step: order.indices(step) for step in sorted(set(steps))}
    for step, found in zip(steps, out_of_order, strict=True):
        assert np.array_equal(found, in_order[step])


def test_the_order_is_the_same_in_every_release():
    """Values of the first release: a change here changes what every training sees."""
    assert Order(1000, 8, 42).indices(0).tolist() == [437, 98, 819, 17, 278, 147, 926, 386]
    assert Order(24_400_000, 4, 7).indices(123_456_789).tolist() == [11649856, 14798388, 6936530, 7442035]


def test_seeds_and_epochs_have_orders_of_their_own():
    n = 5000
    first, second = (Order(n, n, 1).indices(epoch) for epoch in (0, 1))
    other = Order(n, n, 2).indices(0)
    for a, b in [(first, second), (first, other), (second, other), (first, np.arange(n))]:
        assert (a == b).sum() < 12  # a random pair agrees in one place on average, in 12 with p < 1e-9
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5


@pytest.mark.parametrize("windows", [10, 300])
def test_all_places_are_equally_likely(windows):
    """Where many epochs send one place: chi-square against uniform."""
    draws = 20_000
    epochs = np.arange(draws, dtype=np.uint64)
    places = _permute(np.full(draws, 3, dtype=np.uint64), windows, 42, epochs).astype(np.int64)
    counts = np.bincount(places, minlength=windows)
    chi = ((counts - draws / windows) ** 2 / (draws / windows)).sum()
    freedom = windows - 1
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


def test_too_few_windows_for_a_batch_is_an_error():
    with pytest.raises(ValueError, match="7 windows, fewer than one batch of 8; prepare more text or lower"):
        Order(7, 8, 0)


@pytest.mark.parametrize("batch", [0, -1])
def test_an_empty_batch_is_an_error(batch):
    with pytest.raises(ValueError, match=f"batch: {batch}"):
        Order(7, batch, 0)


def test_a_negative_step_is_an_error():
    with pytest.raises(ValueError, match="step: -1"):
        Order(7, 2, 0).indices(-1)
