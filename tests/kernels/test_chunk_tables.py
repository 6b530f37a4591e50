import pytest
import torch

from mdn_kernels.common.chunk_tables import Chunks


@pytest.mark.parametrize("captured", [False, True])
def test_tables_are_shared_between_calls_but_not_those_of_a_graph(captured, monkeypatch):
    q = torch.empty(2, 130, 1, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    first, second = Chunks.of(q, None), Chunks.of(q, None)
    assert (first is second) == (not captured)
    assert torch.equal(first.owner, second.owner)


@pytest.mark.parametrize("lengths", [[130, 130], [1, 64, 65, 0, 3]])
def test_every_token_is_in_exactly_one_chunk_of_its_sequence(lengths):
    packed = len(set(lengths)) > 1
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q = torch.empty(1 if packed else len(lengths), sum(lengths) if packed else lengths[0], 1, 4)
    chunks = Chunks.of(q, offsets if packed else None)
    seen = []
    for chunk, n in enumerate(chunks.owner.tolist()):
        if n < chunks.sequences:
            start = int(chunks.starts[n]) + 64 * (chunk - int(chunks.first[n]))
            seen += [(n, token) for token in range(start, min(start + 64, int(chunks.starts[n + 1])))]
    assert seen == [(n, t) for n in range(len(lengths)) for t in range(int(offsets[n]), int(offsets[n + 1]))]
