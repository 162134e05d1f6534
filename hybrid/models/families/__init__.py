"""The known families. Each comes before the families that it is a variant of: the first that fits is used."""

from hybrid.models.families.bloom import BLOOM
from hybrid.models.families.falcon import FALCON
from hybrid.models.families.gemma import GEMMA2, GEMMA3
from hybrid.models.families.gpt2 import GPT2
from hybrid.models.families.gpt_neox import GPT_NEOX
from hybrid.models.families.gptj import GPTJ
from hybrid.models.families.llama import GRANITE, LLAMA, MISTRAL, OLMO2, PHI3
from hybrid.models.families.moe import MIXTRAL, QWEN3_MOE
from hybrid.models.families.opt import OPT
from hybrid.models.families.qwen import QWEN2, QWEN3, SMOLLM3

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
