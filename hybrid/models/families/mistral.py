"""Mistral: Llama, with one sliding window for every layer."""

from dataclasses import replace

from hybrid.models.families.llama import LLAMA
from hybrid.models.family import one_window

MISTRAL = replace(
    LLAMA, name="mistral", windows=one_window, declares=("sliding_window",), understands=("sliding_window",)
)
