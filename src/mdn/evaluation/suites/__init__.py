"""Which tasks make up a suite. The protocol of each is lm-eval's (see tasks.py)."""

TASKS = {
    "lm": ("lambada_openai",),
    "commonsense": (
        "piqa",
        "hellaswag",
        "winogrande",
        "arc_easy",
        "arc_challenge",
        "boolq",
        "sciq",
    ),
}
HELDOUT = {"lm"}  # suites that also score the held-out splits of the model's data set
