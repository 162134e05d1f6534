"""The cases of the rollout benchmark: models, cases, and the prompts and lengths of a run."""

from dataclasses import dataclass, replace

import torch
import transformers
from torch import nn

from benchmarks.families import FAMILIES, FUSED, NATIVE

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PAD = 0
MAX_TOKENS = 16384  # of a sequence

# Llama's shapes. "micro" is for tests, with the smallest heads that vLLM takes; "10M", "120M" and Qwen2.5-0.5B's sizes
# are for CPUs; the larger ones have the sizes of Qwen2.5-1.5B, Mistral-7B, Qwen2.5-32B and
# Llama-3-70B.
SHAPES = {
    "micro": {"vocab": 512, "hidden": 64, "mlp": 128, "layers": 2, "heads": 2, "kv_heads": 1},
    "10M": {"vocab": 4096, "hidden": 256, "mlp": 704, "layers": 6, "heads": 4, "kv_heads": 2},
    "120M": {"vocab": 32000, "hidden": 768, "mlp": 2048, "layers": 12, "heads": 12, "kv_heads": 4},
    "0.5B": {"vocab": 151936, "hidden": 896, "mlp": 4864, "layers": 24, "heads": 14, "kv_heads": 2},
    "1.5B": {"vocab": 151936, "hidden": 1536, "mlp": 8960, "layers": 28, "heads": 12, "kv_heads": 2},
    "7B": {"vocab": 32000, "hidden": 4096, "mlp": 14336, "layers": 32, "heads": 32, "kv_heads": 8},
    "32B": {"vocab": 152064, "hidden": 5120, "mlp": 27648, "layers": 64, "heads": 40, "kv_heads": 8},
    "70B": {"vocab": 128256, "hidden": 8192, "mlp": 28672, "layers": 80, "heads": 64, "kv_heads": 8},
}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    shape: a key of SHAPES or FAMILIES, or a Hugging Face configuration's name or path.  dtype: "f32" or "bf16".
    prompts: rows of the request; each has `group` completions.
    natural: lengths are geometric with a mean of a quarter of `new_tokens`; else all completions have `new_tokens`.
    """

    shape: str
    dtype: str
    prompts: int
    group: int = 1
    prompt_len: int = 32
    new_tokens: int = 64
    natural: bool = False

    def __post_init__(self):
        if self.natural and self.group > 1:
            raise ValueError(
                f"natural lengths with groups of {self.group}: a completion's length depends on its prompt, which "
                "a group shares; use fixed lengths, or groups of 1"
            )

    @property
    def rows(self) -> int:
        """The number of completions."""
        return self.prompts * self.group

    @property
    def name(self) -> str:
        """The case's name in `--cases`; default values are left out."""
        parts = [self.shape, self.dtype, f"{self.prompts}x{self.group}" if self.group > 1 else f"b{self.prompts}"]
        parts += ["natural"] * self.natural
        parts += [str(self.new_tokens)] * (self.new_tokens != 64)
        parts += [f"prompt {self.prompt_len}"] * (self.prompt_len != 32)
        return " ".join(parts)


CPU_CASES = (
    Case("120M", "bf16", 64),
    Case("120M", "bf16", 16),
    Case("120M", "bf16", 1),
    Case("120M", "f32", 64),
    Case("120M", "f32", 16),
    Case("10M", "bf16", 64),
    Case("10M", "bf16", 16),
    Case("120M", "bf16", 64, natural=True, new_tokens=256),
    Case("120M", "bf16", 8, group=8, prompt_len=512),
    Case("120M", "bf16", 1, prompt_len=8192),
    Case("120M", "bf16", 16, prompt_len=2048),
    Case("0.5B", "bf16", 16),
)
GPU_CASES = (
    Case("1.5B", "bf16", 64, new_tokens=256),
    Case("1.5B", "bf16", 64, natural=True, new_tokens=1024),
    Case("1.5B", "bf16", 8, group=8, prompt_len=512, new_tokens=256),
    Case("7B", "bf16", 64, new_tokens=256),
    Case("7B", "bf16", 64, natural=True, new_tokens=1024),
    Case("7B", "bf16", 8, group=8, prompt_len=512, new_tokens=256),
)
FUSED_CASES = tuple(
    Case(shape, dtype, 16, prompt_len=64) for shape in FUSED if shape != "qwen3_5" for dtype in ("bf16", "f32")
)
NATIVE_CASES = tuple(
    case for shape in NATIVE for case in (Case(shape, "f32", 16, prompt_len=64), Case(shape, "f32", 2, 8, 512))
)
GROUPS = {"families": FUSED_CASES, "native": NATIVE_CASES}
CASES = {case.name: case for case in (*CPU_CASES, *GPU_CASES, *FUSED_CASES, *NATIVE_CASES)}


@dataclass(frozen=True)
class Request:
    """The input of a rollout, the same for every contender.

    prompt_ids: int64 [prompts, prompt_len], without padding; a prompt's first token is its row number + 1.
    lengths: tokens of each prompt's completions, the end token included.
    ends: whether a completion of that length ends with the token `end`; else nothing ends one before `new_tokens`.
    """

    prompt_ids: torch.Tensor
    group: int
    new_tokens: int
    lengths: tuple[int, ...]
    ends: bool
    end: int

    @property
    def completion_lengths(self) -> list[int]:
        """Tokens of each completion; the completions of a prompt are adjacent."""
        return [length for length in self.lengths for _ in range(self.group)]

    def on(self, device: torch.device) -> "Request":
        """This request with its prompts on `device`."""
        return replace(self, prompt_ids=self.prompt_ids.to(device))


def make_request(case: Case, vocab_size: int, seed: int) -> Request:
    """The request of a round: prompts differ by seed, so that no cache helps a later round; lengths are the same."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(1, vocab_size - 1, (case.prompts, case.prompt_len), generator=generator)
    prompt_ids[:, 0] = torch.arange(case.prompts) + 1
    return Request(prompt_ids, case.group, case.new_tokens, prompt_lengths(case), case.natural, vocab_size - 1)


def prompt_lengths(case: Case) -> tuple[int, ...]:
    """Tokens of each prompt's completions: `new_tokens`, or seeded, geometric, with a mean of a quarter of it."""
    if not case.natural:
        return (case.new_tokens,) * case.prompts
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(case.prompts).geometric_(4 / case.new_tokens, generator=generator)
    return tuple(lengths.clamp(max=case.new_tokens).long().tolist())


class EndAtLength(transformers.LogitsProcessor):
    """Ends each row at its length and never before.

    A row's length is looked up by its prompt's first token, so that it depends only on the row's own tokens: rows may
    leave, change their order, and be padded on the left.
    """

    rowwise = True

    def __init__(self, request: Request):
        device = request.prompt_ids.device
        self.end, self.prompt_len = request.end, request.prompt_ids.shape[1]
        self.lengths = torch.tensor([0, *request.lengths], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [rows, tokens], scores [rows, vocab]; returns new scores."""
        first = (input_ids != PAD).int().argmax(dim=1)
        rows = input_ids.gather(1, first[:, None])[:, 0]
        generated = input_ids.shape[1] - first - self.prompt_len
        ending = generated + 1 >= self.lengths[rows]
        scores = scores.masked_fill(ending[:, None], -torch.inf)
        scores[:, self.end] = torch.where(ending, 0.0, -torch.inf)
        return scores


def hugging_face_sizes(shape: str) -> dict[str, int]:
    """The sizes of a key of SHAPES by their names in a Hugging Face configuration."""
    names = {"vocab": "vocab_size", "hidden": "hidden_size", "mlp": "intermediate_size", "layers": "num_hidden_layers"}
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    sizes = {names[name]: size for name, size in SHAPES[shape].items()}
    return {**sizes, "max_position_embeddings": MAX_TOKENS}


def read_config(shape: str) -> transformers.PretrainedConfig:
    """The configuration of a key of SHAPES or FAMILIES, or of a Hugging Face name or path; without end tokens."""
    if shape in SHAPES:
        config = transformers.LlamaConfig(**hugging_face_sizes(shape))
    elif shape in FAMILIES:
        settings = {**FAMILIES[shape], "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
        config = transformers.CONFIG_MAPPING[settings.pop("type")](**settings)
    else:
        config = transformers.AutoConfig.from_pretrained(shape)
    config.eos_token_id, config.pad_token_id = None, PAD
    return config


def make_model(shape: str, dtype: str, device: str) -> nn.Module:
    """A model with random weights in eval mode, created on its device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(read_config(shape), dtype=DTYPES[dtype])
    return model.eval()
