import pytest
from tiny_vocabulary import write_tiny_vocabulary
from tokenizers import Tokenizer

from mdn.data.tokenization import tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    return tokenizer(folder, write_tiny_vocabulary(folder))
