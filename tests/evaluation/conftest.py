import pytest
import torch
from tokenizers import Tokenizer

import mdn.evaluation  # noqa: F401  first of all: it keeps what follows off the network

from .models import Recurrent, byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer([("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("Ġ", "a")])


@pytest.fixture(scope="session")
def model() -> Recurrent:
    torch.manual_seed(0)
    model = Recurrent()
    with torch.no_grad():
        model.head.weight.mul_(8)  # so that greedy decoding has clear winners
    return model.eval()
