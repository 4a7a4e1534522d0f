"""Commands, and ``skyrl_train.train``."""

import os

# numpy and torch read it when they are imported. The engines need the other cores, and a process with threads cannot be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A tokenizer starts threads for the first text, and reads this then. Prompts are counted before processes are forked.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
