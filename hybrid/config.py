"""Validated settings: DeepSpeed's `hybrid_engine` block, our `rollout` block, and the keys of DeepSpeed's
`init_inference`.

Defaults live here and nowhere else. This module does not import torch.
"""

import copy
import difflib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import hjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)


class Block(BaseModel):
    """A frozen block of settings. Raises ValidationError for a key that is not a field."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class HybridEngineConfig(Block):
    """DeepSpeed's `hybrid_engine` block: the same keys and, except for `enabled`, the same defaults.

    `inference_tp_size` and `pin_parameters` decide how weights are held. Where they are "auto", the engine takes the
    fastest mode that fits in memory (`MemoryPlan`).

    enabled: absent means true, because `hybrid.initialize` was called; an explicit false builds DeepSpeed's own engine.
    max_out_tokens: maximum tokens of a sequence, prompt included.
    inference_tp_size: ranks that share one copy of the weights during generation; or "auto".
    release_inference_cache: free the KV cache after every call; inside `inference()`, when the block ends.
    pin_parameters: keep a gathered snapshot for generation; false gathers layer by layer, as ZeRO-3 does in training;
        or "auto". No effect with ZeRO 0 to 2, where nothing is partitioned.
    tp_gather_partition_size: transformer layers per gather.
    enable_cuda_graph: run decode steps as CUDA graphs; "auto" does where the decoder can. true without a CUDA device
        has no effect, and warns.
    """

    enabled: bool = True
    max_out_tokens: int = Field(512, gt=0)
    inference_tp_size: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    release_inference_cache: bool = False
    pin_parameters: bool | Literal["auto"] = True
    tp_gather_partition_size: int = Field(8, gt=0)
    enable_cuda_graph: bool | Literal["auto"] = "auto"


HISTORY_BYTES = 64 << 20
MIN_MATCH = 2


class SpeculationConfig(Block):
    """Drafts of a row's next tokens, which decode steps verify: several tokens in a step, the same as without drafts.

    ngram: draft from the row's prompt and completion, and from the other completions of its prompt: what followed the
        longest match of its latest tokens. A number from 1 to 16 is the shortest match; true is 2; false does not.
    history: draft from earlier rollouts of the same prompt, also of earlier weights. A number is the most bytes that
        they take on each rank; true is 64 MiB; false keeps none.
    max_draft: the most drafted tokens of a row in a step. Measurements decide how many are drafted, and whether any.
    """

    ngram: StrictBool | StrictInt = True
    history: StrictBool | StrictInt = True
    max_draft: int = Field(8, ge=1, le=64)

    @field_validator("ngram", mode="before")
    @classmethod
    def _is_match(cls, value: Any) -> bool | int:
        if not isinstance(value, bool) and not (isinstance(value, int) and 1 <= value <= 16):
            raise ValueError("it must be true, false, or the tokens of the shortest match, from 1 to 16")
        return value

    @field_validator("history", mode="before")
    @classmethod
    def _is_size(cls, value: Any) -> bool | int:
        if not isinstance(value, bool) and not (isinstance(value, int) and value >= 1024):
            raise ValueError("it must be true, false, or a number of bytes, at least 1024")
        return value

    @model_validator(mode="after")
    def _drafts_from_something(self) -> "SpeculationConfig":
        if not self.ngram and not self.history:
            raise ValueError("with neither ngram nor history there are no drafts; leave speculation out")
        return self

    @property
    def least_match(self) -> int:
        """Tokens of the shortest match."""
        return MIN_MATCH if isinstance(self.ngram, bool) else self.ngram

    @property
    def history_bytes(self) -> int:
        """The most bytes of the history; 0: there is none."""
        return HISTORY_BYTES * self.history if isinstance(self.history, bool) else self.history


class RolloutConfig(Block):
    """Our own `rollout` block: a field for each key.

    keep_snapshot: keep the snapshot's buffers during training. False frees them in `train()`: less memory while
        training, but the frozen weights are gathered again for the next rollout.
    kv_step: tokens by which the KV cache grows.
    kv_cache_bytes: maximum size of the fused containers' KV cache. Sequences wait until blocks are free; a request that
        can never fit raises ValueError. None: no limit.
    max_num_seqs: sequences decoded at once; the rest wait in a queue.
    enable_prefix_caching: keep the keys and values of ended sequences in the KV cache until their room is needed or the
        weights change, for sequences that begin with the same tokens: the next turn of a conversation computes only
        what is new. Tokens and logprobs are those without it, on CPUs to the bit. Recurrent states are kept at the end
        of a sequence, for the one that continues it, and where prompts part. vLLM's name.
    prefix_cache_bytes: extra bytes of the KV cache for finished sequences, so that their prefixes survive the next
        request, and a rollout of more rows than it decodes at once. With recurrent layers one half is for states.
    cache_hidden_states: keep the last layer's output of each token with its keys and values, so that `score()` of
        sequences that were just rolled out, for their entropies or at another temperature, runs the head alone. Takes
        the hidden size times the dtype's bytes for each token: 8 KiB in addition to the 128 KiB of keys and values of
        an 8B Llama in bfloat16. Scores are those without it, on CPUs to the bit. Needs enable_prefix_caching.
    memory_limit: bytes that inference may add to what a rank holds for training: snapshot, KV cache, logits,
        activations. A request that cannot fit raises ValueError. Under ZeRO-3 with merged adapters, the base weights
        stay in memory too if the limit has room for both. None: no limit; "auto" then uses the memory that is free
        when the engine is built.
    sync_interval: where the model's own layers gather their weights as they run, forwards between two collectives that
        check whether every rank is done. Shared decoders check at every step, in the exchange of their batches.
    containers: "fused" uses our decoder wherever it equals the model's own layers; "native" runs those layers.
    trust_forward: use our decoder also where a forward, or a function that it calls, is not transformers' own: a remote
        model's, or a patch of the user's or of another package. The self-check compares it on a few tokens alone: set
        it only if the code computes the same for all inputs. False: such a model runs in its own layers.
    lora: "merged" adds adapters to a copy of the weights that they adapt; "unmerged" computes the low-rank product
        separately and makes no copy. Adapters that can only be merged are merged in both cases.
    offload_states: keep optimizer states, master weights and gradients in host memory while an inference window is
        open; they are moved back when it ends.
    weight_dtype: what `rollout()` and `generate()` decode with: "model", the model's dtype; or "int8", linear weights
        with a scale per output channel, quantized from the current weights (adapters merged) at each refresh: half the
        bytes of bfloat16. Logprobs of a rollout are then those of the int8 policy. `score()`, and forwards in eval
        mode, compute with the training weights: they give the trainer's side of importance sampling, and the exact
        reference of a LoRA policy. Under ZeRO-3 these gather layer by layer, as with pin_parameters=false.
    attention_backend: kernels of the fused decoder's attention on GPUs: "triton", ours; "flashinfer" (the package's
        extra `flashinfer`), in prefill, and in decode steps that are not CUDA graphs; "auto", FlashInfer where it is
        installed and has what the model needs, else ours. "flashinfer" raises ValueError where "auto" takes ours. The
        default is "triton" because the two have not been compared on a device.
    batch_invariant: on GPUs, give a token's logits the same bits in any batch, in decode steps, prefill and `score()`:
        products of matrices and attention sum in an order that does not depend on the rows, which is slower. On CPUs
        the fused decoder always does, and it changes nothing. Refused where only other kernels run.
    speculation: a block with `ngram`, `history` and `max_draft`: steps draft several tokens of a row and verify them,
        where that is measured to be faster; the same tokens and logprobs as without. None: one token of a row in a
        step.
    return_router_indices: rollouts of a mixture of experts give the experts of each token,
        `RolloutBatch.router_indices`, for `replay_routing` in training (vLLM's `enable_return_routed_experts`). Two
        bytes for each token, layer and chosen expert, in the KV cache and, in host memory, in the batch: 768 per token
        with 48 layers and 8 experts each.
    wait_report_s: seconds after which a rank that waits in a collective of this engine logs which ranks are missing,
        and again whenever that time has doubled. None: never.
    wait_timeout_s: seconds after which a wait for other ranks, in the engine's process groups, ends with LostRankError.
        DeepSpeed's collectives in these groups end by it too. None: the groups' own timeout, which is 30 minutes
        unless `deepspeed.init_distributed(timeout=...)` gives another.
    """

    keep_snapshot: bool = True
    kv_step: int = Field(128, gt=0)
    kv_cache_bytes: int | None = Field(None, gt=0)
    max_num_seqs: int = Field(256, gt=0)
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int = Field(0, ge=0)
    cache_hidden_states: bool = False
    memory_limit: int | None = Field(None, gt=0)
    sync_interval: int = Field(1, gt=0)
    containers: Literal["fused", "native"] = "fused"
    trust_forward: bool = False
    lora: Literal["merged", "unmerged"] = "merged"
    offload_states: bool = False
    weight_dtype: Literal["model", "int8"] = "model"
    attention_backend: Literal["auto", "triton", "flashinfer"] = "triton"
    batch_invariant: bool = False
    speculation: SpeculationConfig | None = None
    return_router_indices: bool = False
    wait_report_s: float | None = Field(10, gt=0)
    wait_timeout_s: int | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _finds_hidden_states(self) -> "RolloutConfig":
        if self.cache_hidden_states and not self.enable_prefix_caching:
            raise ValueError(
                "cache_hidden_states: true given with enable_prefix_caching: false; the prefix cache finds them: "
                "set it to true, or leave cache_hidden_states out"
            )
        return self


BLOCKS: dict[str, type[Block]] = {"hybrid_engine": HybridEngineConfig, "rollout": RolloutConfig}


def load_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration as a new dictionary; neither the caller's dict nor the file is changed.

    Raises ValueError if `config` is neither a dict nor a path, the path does not exist, the file is not a JSON object,
    or the file gives one key two different values.
    """
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if not isinstance(config, str | Path):
        raise ValueError(f"config: a {type(config).__name__} given; give the path of a DeepSpeed JSON file or a dict")
    path = Path(config)
    try:
        if not path.is_file():
            raise ValueError(f"config: no file at {str(path)!r}; give the path of a DeepSpeed JSON file or a dict")
        content = hjson.loads(path.read_text(), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise ValueError(f"config: {str(path)!r} cannot be read: {error.strerror}; give a file that can") from error
    except (hjson.HjsonDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"config: {str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config: {str(path)!r} holds a {type(content).__name__}; it must be settings by name")
    return content


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs of one JSON object as a dict. Raises ValueError for a key with two different
    values."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        require_same(key, values.setdefault(key, value), value)
    return values


def require_same(key: str, first: Any, second: Any) -> None:
    """Raise ValueError if a key's two values differ."""
    if first is not second and first != second:
        raise ValueError(f"{key}: given twice, as {first!r} and as {second!r}; give it once")


def read_blocks(config: dict[str, Any]) -> tuple[HybridEngineConfig, RolloutConfig]:
    """Return the two validated blocks of a DeepSpeed configuration; the defaults for an absent block.

    Raises ValueError for an unknown key, with the nearest known one, and for an invalid value, with what is allowed.
    """
    for key in config:
        if key not in BLOCKS and (near := difflib.get_close_matches(key, BLOCKS, n=1, cutoff=0.8)):
            raise ValueError(f"config: unknown key {key!r}; did you mean {near[0]!r}?")
    hybrid_engine, rollout = (read_block(kind, config.get(name, {}), name) for name, kind in BLOCKS.items())
    return hybrid_engine, rollout


def read_block(kind: type[Block], values: Any, path: str = "") -> Any:
    """`values`, a dictionary, as a validated block of `kind`, nested blocks included.

    path: the block's key, for error messages. Raises ValueError if `values` is not a dictionary, for an unknown key,
    and for an invalid value.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {values!r} given; it must be a dictionary of settings")
    prefix = f"{path}." if path else ""
    values = by_field_name(kind, values, path)
    for name in values:
        annotation = kind.model_fields[name].annotation
        kinds = get_args(annotation) or (annotation,)
        inner = next((one for one in kinds if isinstance(one, type) and issubclass(one, Block)), None)
        if inner is not None and not (values[name] is None and type(None) in kinds):
            values[name] = read_block(inner, values[name], prefix + name)
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{prefix}{first['loc'][0]}" if first["loc"] else path
        raise ValueError(f"{name}: {first['input']!r} given; {first['msg']}") from error


def by_field_name(kind: type[Block], values: dict[str, Any], path: str, deprecated: Iterable[str] = ()) -> dict:
    """`values` with aliases replaced by the field names of `kind`; keys in `deprecated` are kept.

    Raises ValueError for an unknown key, with the nearest known one, and if a field's name and alias have different
    values.
    """
    aliases = {field.alias: name for name, field in kind.model_fields.items() if field.alias}
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in kind.model_fields and name not in deprecated:
            keys = sorted([*kind.model_fields, *aliases])
            nearest = max(keys, key=lambda other: difflib.SequenceMatcher(None, key, other).ratio())
            raise ValueError(
                f"{path or 'init_inference'}: unknown key {key!r}; the nearest known key is {nearest!r} "
                f"(known: {', '.join(keys)})"
            )
        require_same(name, named.setdefault(name, value), value)
    return named


@dataclass(frozen=True)
class InvalidSetting:
    """A row of a table of settings that are invalid, or not supported, under a condition.

    when: the condition.  setting, value: the key, and what was given; None: not shown.
    reason: what is allowed, or what to do instead.
    error: ValueError for an invalid value, NotImplementedError for one that is not supported.
    """

    when: bool
    setting: str
    value: Any
    reason: str
    error: type[Exception] = ValueError


unsupported = partial(InvalidSetting, error=NotImplementedError)


def check_settings(rows: Iterable[InvalidSetting]) -> None:
    """Raise the error of the first row whose condition holds.

    Of a generator no further row is computed, so that a row's fields may rely on the rows above it.
    """
    for row in rows:
        if row.when:
            value = str(row.value).lower() if isinstance(row.value, bool) else repr(row.value)
            value = "" if row.value is None else f"{value} "
            raise row.error(f"{row.setting}: {value}given; {row.reason}")


# `init_inference`


class TensorParallelConfig(Block):
    """Tensor parallelism.

    enabled: false means tp_size 1.
    tp_size: ranks that share one copy of the weights. Here: neighbours, in groups over the whole world, unless
        `mpu` or `tp_group` names the group; DeepSpeed has one group, of the first ranks.
    tp_grain_size: granularity of slices. Here: no effect, slices may have any size.
    mpu: an object with `get_model_parallel_group()`, whose ranks share the weights.
    tp_group: the process group whose ranks share the weights. Here: a tp_size given with it must equal its size.
    """

    enabled: bool = True
    tp_size: int = Field(1, gt=0)
    tp_grain_size: int = Field(64, gt=0)
    mpu: Any = None
    tp_group: Any = None


class MoEConfig(Block):
    """Expert parallelism.

    enabled: false means ep_size 1.
    ep_size: ranks that a layer's experts are divided over. Here: for Hugging Face's models too; for DeepSpeed's own MoE
        layers it must equal the ep_size that they were built with.
    moe_experts: experts in a layer. Here: checked against the model; [1] is not checked.
    type: kind of DeepSpeed's MoE layers. Here: checked against the model.
    ep_mp_group: ranks that share one expert. Here: refused, use tensor_parallel.
    ep_group: ranks that the experts are divided over. Here: only with tp_size=1; DeepSpeed still makes its own groups.
    """

    enabled: bool = True
    ep_size: int = Field(1, gt=0)
    moe_experts: list[int] = Field([1], alias="num_experts")
    type: Literal["standard", "residual"] = "standard"
    ep_mp_group: Any = None
    ep_group: Any = Field(None, alias="expert_group")


class WeightQuantConfig(Block):
    """Weights in int8.

    enabled: whether weights are quantized. Here: false is refused with int8.
    num_bits: bits of a weight. Here: 8.
    q_type: how values are mapped. Here: symmetric.
    q_groups: groups with one scale each. Here: per output channel; DeepSpeed's are per matrix.
    quantized_initialization, post_init_quant: ZeRO-Inference's settings. Here: refused with int8.
    """

    enabled: bool = True
    num_bits: int = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: int = Field(1, gt=0)
    quantized_initialization: dict[str, Any] = {}
    post_init_quant: dict[str, Any] = {}


class QuantConfig(Block):
    """Quantization with `dtype=int8`.

    enabled: whether anything is quantized. Here: false is refused with int8.
    activation: settings for activations. Here: no effect, activations are not quantized.
    qkv: settings for the q, k and v projections. Here: no effect, they are quantized like all other weights.
    weight: settings for weights.
    """

    enabled: bool = True
    activation: dict[str, Any] = {}
    qkv: dict[str, Any] = {}
    weight: WeightQuantConfig = WeightQuantConfig()


class CheckpointConfig(Block):
    """The checkpoint's keys in one block.

    checkpoint_dir: same as `checkpoint`. Here: used; DeepSpeed ignores this block.
    save_mp_checkpoint_path, base_dir: same as the keys outside the block. Here: used; DeepSpeed ignores this block.
    """

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


DTYPES = {
    "float32": ("float32", "float", "fp32"),
    "float16": ("float16", "half", "fp16"),
    "bfloat16": ("bfloat16", "bfloat", "bf16"),
    "int8": ("int8",),
}


class InferenceConfig(Block):
    """The configuration of `deepspeed.init_inference`: a field for each key, with the same aliases and defaults.

    replace_with_kernel_inject: fused containers, if the model has one; false runs the model's own layers. Here: a model
        without one runs its own layers, with a warning.
    dtype: of the weights; a torch dtype or its name. Here: int8 quantizes the weights, and activations keep the model's
        dtype.
    tensor_parallel: how ranks share the weights.
    enable_cuda_graph: run forwards as CUDA graphs. Here: by default the decode steps of `generate` are graphs wherever
        the decoder can; true also captures forwards of a model without a decoder. Without a CUDA device it warns.
    use_triton: use Triton kernels. Here: those of the fused containers on CUDA; refused where Triton is not available.
    triton_autotune: tune the Triton kernels. Here: no effect, they have nothing to tune.
    zero: ZeRO settings. Here: stage 3 is refused, use `hybrid.initialize` for a partitioned model; otherwise no effect.
    triangular_masking: causal attention. Here: false is refused for decoders.
    moe: how ranks divide the experts; a bool sets `enabled`.
    keep_module_on_host: keep the weights in host memory, or load them there.
    quant: how int8 quantizes.
    checkpoint: source of the weights: DeepSpeed's JSON, as a path relative to the working directory or as a dict. Here:
        also a directory or a file of weights in any supported format.
    base_dir: directory that the JSON's file names are relative to, unless the JSON has its own. Here: also for
        directories and files of weights, and for a JSON that is not in the working directory.
    strict: whether checkpoint and model must have the same tensors. Here: not a key of DeepSpeed's; false loads the
        tensors that both have, with a warning.
    set_empty_params: free the model's own weights before the checkpoint is read.
    save_mp_checkpoint_path: directory that the weights are written to, one part per rank. Here: this engine reads the
        parts with any number of ranks; DeepSpeed cannot read them.
    checkpoint_config: the three checkpoint keys in a block.
    return_tuple: what transformer layers return. Here: what the engine returns: the model's output, or with false its
        first tensor (logits or hidden states).
    training_mp_size: number of parts of the checkpoint. Here: checked against the checkpoint if it is not 1.
    replace_method: no effect, as in DeepSpeed.
    injection_policy: maps a layer class to the names of the projections whose outputs are summed over the ranks. Here:
        or to a `hybrid.LayerPolicy`.
    injection_policy_tuple: internal to DeepSpeed. Here: refused.
    config: replaces the model's configuration as `engine.config`.
    max_out_tokens: maximum tokens of a sequence, prompt included.
    min_out_tokens: new tokens that must fit after every prompt. Here: must be less than max_out_tokens.
    transposed_mode: layout of the weights. Here: no effect, weights are read in the model's layout.
    speculation: draft tokens and verify them, where that is measured to be faster. Here: not a key of DeepSpeed's; a
        block as `rollout.speculation`, with replace_with_kernel_inject.
    trust_forward: as `rollout.trust_forward`. Here: not a key of DeepSpeed's.
    """

    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    dtype: Any = "float16"
    tensor_parallel: TensorParallelConfig = Field(TensorParallelConfig(), alias="tp")
    enable_cuda_graph: bool | Literal["auto"] = "auto"
    use_triton: bool = False
    triton_autotune: bool = False
    zero: dict[str, Any] = {}
    triangular_masking: bool = Field(True, alias="tm")
    moe: MoEConfig = MoEConfig()
    keep_module_on_host: bool = False
    quant: QuantConfig = QuantConfig()
    checkpoint: str | dict[str, Any] | None = None
    base_dir: str = ""
    strict: bool = True
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: CheckpointConfig = Field(CheckpointConfig(), alias="ckpt_config")
    return_tuple: bool = True
    training_mp_size: int = Field(1, gt=0)
    replace_method: str = "auto"
    injection_policy: dict[Any, Any] | None = Field(None, alias="injection_dict")
    injection_policy_tuple: tuple | None = None
    config: Any = Field(None, alias="args")
    max_out_tokens: int = Field(1024, alias="max_tokens", gt=0)
    min_out_tokens: int = Field(1, alias="min_tokens", ge=0)
    transposed_mode: bool = False
    speculation: SpeculationConfig | None = None
    trust_forward: bool = False

    @field_validator("dtype")
    @classmethod
    def _name_of_dtype(cls, value: Any) -> str:
        for name, aliases in DTYPES.items():
            if str(value).removeprefix("torch.") in aliases:
                return name
        raise ValueError(f"known are {', '.join(alias for aliases in DTYPES.values() for alias in aliases)}")


# Keys whose values are nested blocks.
NESTED = {"tensor_parallel", "tp", "moe", "zero", "quant", "weight", "activation", "qkv", "checkpoint_config"}
NESTED |= {"ckpt_config"}
# DeepSpeed's deprecated keys (0.19.8), and the block and key that replace each.
FORWARDED = {
    "mp_size": ("tensor_parallel", "tp_size"),
    "mpu": ("tensor_parallel", "mpu"),
    "ep_size": ("moe", "ep_size"),
    "ep_group": ("moe", "ep_group"),
    "expert_group": ("moe", "ep_group"),
    "ep_mp_group": ("moe", "ep_mp_group"),
    "expert_mp_group": ("moe", "ep_mp_group"),
    "moe_experts": ("moe", "moe_experts"),
    "moe_type": ("moe", "type"),
}
WITHOUT_EFFECT = {
    "replace_method": "DeepSpeed does not need it any more either",
    "triton_autotune": "there is nothing to tune",
    "transposed_mode": "weights are read in the model's layout",
    "tensor_parallel.tp_grain_size": "slices may have any size",
    "quant.activation": "activations are not quantized",
    "quant.qkv": "queries, keys and values are quantized like all other weights",
}


def read_inference_config(
    config: str | Path | dict[str, Any] | BaseModel | None, kwargs: dict[str, Any]
) -> InferenceConfig:
    """`init_inference`'s configuration (a dict, the path of a JSON file, or DeepSpeed's object) and keyword arguments,
    combined into one InferenceConfig. Neither is changed. "auto" means not given, as in DeepSpeed.

    Raises ValueError for a key with two different values, for an unknown key, with the nearest known one, and for an
    invalid value. Warns about deprecated keys and about keys that have no effect here.
    """
    config = {} if config is None else config
    values, kwargs = plain(config if isinstance(config, dict | BaseModel) else load_config(config)), plain(kwargs)
    for key in values.keys() & kwargs.keys():
        require_same(key, values[key], kwargs[key])
    settings = with_checkpoint_block(read_block(InferenceConfig, without_deprecated_keys({**values, **kwargs})))
    for path, reason in WITHOUT_EFFECT.items():
        if (value := value_if_set(settings, path)) is not None:
            warnings.warn(f"{path}: {value!r} given; it has no effect, {reason}", stacklevel=4)
    return settings


def plain(values: dict[str, Any] | BaseModel) -> dict[str, Any]:
    """Return settings as a new dictionary, without keys that are "auto". DeepSpeed's config objects
    (`DeepSpeedTPConfig` and the like) become dictionaries of the fields that were set."""
    # DeepSpeed (0.19.8) deletes a deprecated field once it has set the new one in a nested block.
    if isinstance(values, BaseModel):
        inner = {name for name in type(values).model_fields if isinstance(getattr(values, name, None), BaseModel)}
        names = inner | {name for name in values.model_fields_set if hasattr(values, name)}
        values = {name: getattr(values, name) for name in names}
    return {
        key: plain(value) if key in NESTED and isinstance(value, dict | BaseModel) else value
        for key, value in values.items()
        if not (isinstance(value, str) and value == "auto") or key == "replace_method"
    }


def without_deprecated_keys(values: dict[str, Any]) -> dict[str, Any]:
    """`init_inference`'s values with deprecated keys moved into the blocks that replace them; these blocks are copied.

    Raises ValueError for an unknown key, for a key with two different values, and if a block is no dict or bool.
    """
    values = by_field_name(InferenceConfig, values, "", FORWARDED)
    for old in FORWARDED.keys() & values.keys():
        block, new = FORWARDED[old]
        warnings.warn(f"{old} is an old name; use {block}.{new}", FutureWarning, stacklevel=5)
        inner = values.get(block, {})
        inner = {"enabled": inner} if isinstance(inner, bool) else inner
        if not isinstance(inner, dict):
            raise ValueError(f"{block}: {inner!r} given together with {old}; it must be a dictionary of settings")
        kind: Any = InferenceConfig.model_fields[block].annotation
        inner = by_field_name(kind, inner, block)
        value = values.pop(old)
        require_same(f"{block}.{new}", inner.setdefault(new, value), value)
        values[block] = inner
    if isinstance(values.get("moe"), bool):
        values["moe"] = {"enabled": values["moe"]}
    return values


def with_checkpoint_block(config: InferenceConfig) -> InferenceConfig:
    """`config` with the values of `checkpoint_config` moved to the outer keys.

    Raises ValueError if an outer key was given with a different value.
    """
    block = config.checkpoint_config
    moved = {"checkpoint": block.checkpoint_dir, **block.model_dump(exclude={"checkpoint_dir"})}
    moved = {name: value for name, value in moved.items() if value is not None}
    for name in moved.keys() & config.model_fields_set:
        require_same(name, getattr(config, name), moved[name])
    return config.model_copy(update=moved)


def value_if_set(block: Block, path: str) -> Any:
    """Return the value at a dotted path if it was given and is not the default, else None."""
    *outer, name = path.split(".")
    for key in outer:
        block = getattr(block, key)
    value = getattr(block, name)
    return value if name in block.model_fields_set and value != type(block).model_fields[name].default else None
