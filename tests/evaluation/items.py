"""A few items for each task in its hub data set's schema, with what lm-eval's protocol must make of them.

`right` and `wrong` are (prompt, answer) pairs, written out by hand. `constant` is the score of a model to
which all tokens are alike, with a token a byte: the likeliest choice is then the first of the shortest, and
after division by the length of the choice without its leading space the longest.
"""

from dataclasses import dataclass
from typing import Any

Pair = tuple[str, str]


@dataclass(frozen=True)
class Example:
    split: str
    items: list[dict[str, Any]]
    right: list[Pair]
    wrong: list[Pair]
    constant: dict[str, float]


def _hellaswag(number: int, activity: str, a: str, b: str, endings: list[str], label: str) -> dict[str, Any]:
    return {
        "ind": number,
        "activity_label": activity,
        "ctx_a": a,
        "ctx_b": b,
        "ctx": f"{a} {b}".strip(),
        "endings": endings,
        "source_id": f"ours~{number}",
        "split": "val",
        "split_type": "indomain",
        "label": label,
    }


def _arc(number: int, question: str, choices: list[str], answer: str) -> dict[str, Any]:
    labels = ["A", "B", "C", "D"][: len(choices)]
    return {
        "id": f"ours_{number}",
        "question": question,
        "choices": {"text": choices, "label": labels},
        "answerKey": answer,
    }


ARC = Example(
    "test",
    [
        _arc(0, "What melts ice?", ["warmth", "silence", "shadow"], "A"),
        _arc(1, "Which is a metal?", ["wood", "copper", "glass", "wax"], "B"),
    ],
    [
        ("Question: What melts ice?\nAnswer:", " warmth"),
        ("Question: Which is a metal?\nAnswer:", " copper"),
    ],
    [
        ("Question: What melts ice?\nAnswer:", " shadow"),
        ("Question: Which is a metal?\nAnswer:", " wax"),
    ],
    {"acc": 1 / 2, "acc_norm": 1 / 2},
)

EXAMPLES = {
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "boolq": Example(
        "validation",
        [
            {
                "question": "is a dune made of sand",
                "passage": "Dunes are hills of sand.",
                "idx": 0,
                "label": 1,
            },
            {"question": "do dunes sing", "passage": "Some dunes hum. None sings.", "idx": 1, "label": 0},
            {"question": "do dunes move", "passage": "Wind moves dunes.", "idx": 2, "label": 1},
        ],
        [
            ("Dunes are hills of sand.\nQuestion: is a dune made of sand?\nAnswer:", " yes"),
            ("Some dunes hum. None sings.\nQuestion: do dunes sing?\nAnswer:", " no"),
            ("Wind moves dunes.\nQuestion: do dunes move?\nAnswer:", " yes"),
        ],
        [
            ("Dunes are hills of sand.\nQuestion: is a dune made of sand?\nAnswer:", " no"),
            ("Some dunes hum. None sings.\nQuestion: do dunes sing?\nAnswer:", " yes"),
            ("Wind moves dunes.\nQuestion: do dunes move?\nAnswer:", " no"),
        ],
        {"acc": 1 / 3},
    ),
    "hellaswag": Example(
        "validation",
        [
            _hellaswag(
                0,
                "Baking bread",
                "A woman kneads dough.",
                "she",
                ["sells a car.", "shapes a loaf from it.", "swims."],
                "1",
            ),
            _hellaswag(
                1,
                "Tying a knot",
                "[header] How to tie a knot [title] Take a rope.",
                "",
                ["Cross [substeps] both ends.", "Eat it.", "Sing it loudly now please."],
                "0",
            ),
            _hellaswag(2, "Rowing", "Two men row.", "they", ["stop.", "become a lamp.", "fly off."], "0"),
        ],
        [
            ("Baking bread: A woman kneads dough. She", " shapes a loaf from it."),
            ("Tying a knot: How to tie a knot. Take a rope.", " Cross both ends."),
            ("Rowing: Two men row. They", " stop."),
        ],
        [
            ("Baking bread: A woman kneads dough. She", " swims."),
            ("Tying a knot: How to tie a knot. Take a rope.", " Eat it."),
            ("Rowing: Two men row. They", " become a lamp."),
        ],
        {"acc": 1 / 3, "acc_norm": 1 / 3},
    ),
    "lambada_openai": Example(
        "test",
        [{"text": "He poured the tea and drank the tea"}, {"text": "Rain fell on Rome, and she left Rome"}],
        [("He poured the tea and drank the", " tea"), ("Rain fell on Rome, and she left", " Rome")],
        [("He poured the tea and drank the", " cup"), ("Rain fell on Rome, and she left", " town")],
        {"acc": 0.0, "perplexity": 50257.0**4.5},  # four and five bytes
    ),
    "piqa": Example(
        "validation",
        [
            {"goal": "Open a jar.", "sol1": "Twist the lid.", "sol2": "Twist the floor.", "label": 0},
            {"goal": "Dry a cup.", "sol1": "Dip it.", "sol2": "Wipe it.", "label": 1},
            {"goal": "Cool soup.", "sol1": "Boil the soup.", "sol2": "Blow on it.", "label": 1},
        ],
        [
            ("Question: Open a jar.\nAnswer:", " Twist the lid."),
            ("Question: Dry a cup.\nAnswer:", " Wipe it."),
            ("Question: Cool soup.\nAnswer:", " Blow on it."),
        ],
        [
            ("Question: Open a jar.\nAnswer:", " Twist the floor."),
            ("Question: Dry a cup.\nAnswer:", " Dip it."),
            ("Question: Cool soup.\nAnswer:", " Boil the soup."),
        ],
        {"acc": 2 / 3, "acc_norm": 1 / 3},
    ),
    "sciq": Example(
        "validation",
        [
            {
                "question": "What do bees make?",
                "distractor1": "ink",
                "distractor2": "silk",
                "distractor3": "salt",
                "correct_answer": "honey",
                "support": " Bees gather nectar.",
            },
            {
                "question": "What holds a sail?",
                "distractor1": "keel",
                "distractor2": "rudder",
                "distractor3": "anchor",
                "correct_answer": "mast",
                "support": "",
            },
        ],
        [
            ("Bees gather nectar.\nQuestion: What do bees make?\nAnswer:", " honey"),
            ("\nQuestion: What holds a sail?\nAnswer:", " mast"),
        ],
        [
            ("Bees gather nectar.\nQuestion: What do bees make?\nAnswer:", " silk"),
            ("\nQuestion: What holds a sail?\nAnswer:", " rudder"),
        ],
        {"acc": 0.0, "acc_norm": 1 / 2},  # keel is as short as mast and comes first
    ),
    "winogrande": Example(
        "validation",
        [
            {
                "sentence": "The cup fell off the shelf as _ was slippery.",
                "option1": "the cup",
                "option2": "the wall",
                "answer": "1",
            },
            {
                "sentence": "Ann thanked Eve because _ had helped.",
                "option1": "Ann",
                "option2": "Eve",
                "answer": "2",
            },
        ],
        [
            ("The cup fell off the shelf as the cup", " was slippery."),
            ("Ann thanked Eve because Eve", " had helped."),
        ],
        [
            ("The cup fell off the shelf as the wall", " was slippery."),
            ("Ann thanked Eve because Ann", " had helped."),
        ],
        {"acc": 1 / 2},  # both prompts are alike: the first wins
    ),
}
