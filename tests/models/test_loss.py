"""The chunked cross-entropy against torch's, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from mdn.models import loss as module
from mdn.models.loss import cross_entropy
from mdn_kernels.testing import relative_error


def example(dtype=torch.float64, B=3, T=7, D=5, V=11):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=dtype).requires_grad_()
    labels = torch.randint(V, (B, T), generator=g)
    labels[0, 2] = labels[2] = -100
    return hidden, weight, labels


def plain(hidden, weight, labels, reduction):
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction=reduction)


@pytest.fixture(autouse=True, params=[1, 8], ids="rows{}".format)
def _alignment(request, monkeypatch):
    """The head of eleven tokens as it is, and with more rows."""
    monkeypatch.setitem(module.ALIGNMENT, "cpu", request.param)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 4, 21, 1000])
def test_value_and_gradients_match_torch_for_every_chunk_size(reduction, chunk, monkeypatch):
    hidden, weight, labels = example()
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", chunk * 4 * 11)
    ours = cross_entropy(hidden, weight, labels, reduction) * 0.7
    expected = plain(hidden, weight, labels, reduction) * 0.7
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    for x, y in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_one_side_may_need_a_gradient(frozen):
    hidden, weight, labels = example()
    pair = [hidden, weight]
    pair[frozen] = pair[frozen].detach()
    (ours,) = torch.autograd.grad(cross_entropy(*pair, labels), pair[1 - frozen])
    (expected,) = torch.autograd.grad(plain(*pair, labels, "mean"), pair[1 - frozen])
    torch.testing.assert_close(ours, expected)


def test_losses_of_single_tokens_are_zero_where_the_label_is_ignored():
    hidden, weight, labels = example()
    ours = cross_entropy(hidden, weight, labels, "none")
    torch.testing.assert_close(ours.flatten(), plain(hidden, weight, labels, "none"))
    assert (ours[labels == -100] == 0).all()
    assert not ours.requires_grad


def test_no_label_at_all_gives_zero_loss_and_gradient():
    hidden, weight, labels = example()
    loss = cross_entropy(hidden, weight, labels.fill_(-100))
    loss.backward()
    assert loss == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_huge_logits_do_not_overflow():
    hidden, weight, labels = example(torch.float32)
    loss = cross_entropy(hidden * 1e6, weight, labels)
    torch.testing.assert_close(loss, plain(hidden * 1e6, weight, labels, "mean"))
    loss.backward()
    assert hidden.grad.isfinite().all()


def test_autocast_takes_products_in_bfloat16_and_sums_in_float32():
    hidden, weight, labels = example(torch.float32, T=64, D=32, V=40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(hidden, weight, labels)
    loss.backward()
    expected = plain(hidden, weight, labels, "mean")
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert loss != expected
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-2)
    exact = torch.autograd.grad(expected, (hidden, weight))
    for x, y in zip((hidden.grad, weight.grad), exact, strict=True):
        assert (x - y).norm() < 0.02 * y.norm()


def test_bad_arguments_are_named():
    hidden, weight, labels = example()
    with pytest.raises(ValueError, match=r"labels: \[3, 6\]"):
        cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="'avg' is unknown"):
        cross_entropy(hidden, weight, labels, "avg")


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_card_it_is_float64s(autocast, monkeypatch):
    monkeypatch.setitem(module.CHUNK_BYTES, "cuda", 2 * 50 * 1024)  # chunks of 50, the last one smaller
    hidden, weight, labels = (x.detach().cuda() for x in example(torch.float32, B=3, T=71, D=64, V=1001))
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    ours = [x.requires_grad_() for x in (hidden, weight)]
    expected = plain(*exact, labels, "mean")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = cross_entropy(*ours, labels)
    limit = 1e-2 if autocast else 1e-5
    assert relative_error(found.detach(), expected.detach()) < limit
    for x, y in zip(torch.autograd.grad(found, ours), torch.autograd.grad(expected, exact), strict=True):
        assert relative_error(x, y) < limit
