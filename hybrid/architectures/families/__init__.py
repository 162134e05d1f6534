"""The families that are known, one file each; the more special before those that they vary."""

from hybrid.architectures.families.bloom import BLOOM
from hybrid.architectures.families.falcon import FALCON
from hybrid.architectures.families.gemma import GEMMA2, GEMMA3
from hybrid.architectures.families.gpt2 import GPT2
from hybrid.architectures.families.gpt_neox import GPT_NEOX
from hybrid.architectures.families.gptj import GPTJ
from hybrid.architectures.families.granite import GRANITE
from hybrid.architectures.families.llama import LLAMA
from hybrid.architectures.families.mistral import MISTRAL
from hybrid.architectures.families.moe import MIXTRAL, QWEN3_MOE
from hybrid.architectures.families.olmo2 import OLMO2
from hybrid.architectures.families.opt import OPT
from hybrid.architectures.families.phi3 import PHI3
from hybrid.architectures.families.qwen import QWEN2, QWEN3
from hybrid.architectures.families.smollm3 import SMOLLM3

FAMILIES = (
    GEMMA3,
    GEMMA2,
    QWEN3_MOE,
    MIXTRAL,
    QWEN3,
    SMOLLM3,
    QWEN2,
    MISTRAL,
    GRANITE,
    OLMO2,
    LLAMA,
    PHI3,
    GPT2,
    OPT,
    GPT_NEOX,
    GPTJ,
    BLOOM,
    FALCON,
)
