"""Evaluation on local files: nothing below may reach for a network, nor draw its own progress bar."""

import os

for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(_name, "1")
for _name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):  # the stage shows progress once
    os.environ[_name] = "1"
os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap would fork a process that holds a model
os.environ["TOKENIZERS_PARALLELISM"] = "false"
