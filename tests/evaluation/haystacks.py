"""Essays and word lists of ours, as the packages' files hold them, and a tokenizer that fits them."""

from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mdn.evaluation import needles

STEMS = ["river", "stone", "letter", "winter", "market", "garden", "engine", "paper", "island", "mirror"]
NOUNS = [f"{stem}{end}" for stem in STEMS for end in ("", "man", "way")]
ADJECTIVES = ["quiet", "brisk", "amber", "hollow", "narrow", "ad-hoc", "early", "plain", "distant"]
ESSAYS = 3


def essay(seed: int, words: int = 6000) -> str:
    """Sentences of made-up words, broken over lines, with quotations and things that only look like ends."""
    random, parts = Random(seed), list[str]()
    while len(parts) < words:
        sentence = [random.choice(STEMS) for _ in range(random.randrange(3, 15))]
        sentence[0] = random.choice(["The", "Mr. Hill's", "(In", "“No”, said", "3.5", "It's"])
        parts += [
            *sentence[:-1],
            sentence[-1] + random.choice([".", ".", ".", "?", "!", ".)", '."', ".[1]x"]),
        ]
    return "".join(part + random.choice([" ", " ", " ", "  ", "\n", "\n\n"]) for part in parts)


def write_haystacks(raw: Path) -> Path:
    folder, lists = raw / needles.ESSAYS, raw / needles.WORDS
    folder.mkdir(parents=True)
    for seed in range(ESSAYS):
        (folder / f"essay{seed}.txt").write_text(essay(seed), encoding="utf-8")
    lists.mkdir(parents=True)
    (lists / "nounlist.txt").write_text("\n".join(NOUNS) + "\n")
    (lists / "adjectivelist.txt").write_text("\n".join(ADJECTIVES) + "\n")
    return raw


def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE as GPT-2's, about as many tokens a word as GPT-2's on English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [needles.ONE, needles.MANY, needles.NEEDLE, needles.NOISE]
    tokenizer.train_from_iterator([*texts, *(essay(seed) for seed in range(ESSAYS))], trainer)
    return tokenizer
