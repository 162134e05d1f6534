"""What ranks import, for the process that they are forked from. It starts no threads: a fork would lose them."""

import os

# DeepSpeed looks for an accelerator as it is imported, and torch's threads are made when they are first needed.
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import peft  # noqa: F401
import trl  # noqa: F401
from transformers import LlamaForCausalLM  # noqa: F401

import hybrid  # noqa: F401
