"""Commands, and ``skyrl_train.train``."""

import os

# numpy and torch read it when they are imported. The engines need the other cores, and a process with threads cannot be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A tokenizer starts threads when it encodes its first text, unless this is set. A run counts the tokens of its prompts before it
# forks processes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
