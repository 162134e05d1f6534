"""The settings, validated: DeepSpeed's `hybrid_engine` block and our own `rollout` block beside it.

Defaults live here and nowhere else. Knows nothing of torch.
"""

import copy
import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Block(BaseModel):
    """A frozen block of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HybridEngineConfig(Block):
    """DeepSpeed's `hybrid_engine` block: the same keys and, `enabled` apart, the same defaults. Where two keys say how
    weights are held, "auto" leaves it to the engine: it takes the fastest way that fits (`MemoryPlan`).

    enabled: absent means yes, because `hybrid.initialize` was called; an explicit false gives DeepSpeed's own engine.
    max_out_tokens: the most tokens of a sequence, prompt included.
    inference_tp_size: ranks that share one copy of the weights during generation; or "auto".
    release_inference_cache: free the KV cache on `train()`.
    pin_parameters: keep a gathered snapshot for generation; false gathers layer by layer, as ZeRO-3 does in training;
        or "auto".
    tp_gather_partition_size: transformer layers gathered together.
    enable_cuda_graph: capture the decode step.
    """

    enabled: bool = True
    max_out_tokens: int = Field(512, gt=0)
    inference_tp_size: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    release_inference_cache: bool = False
    pin_parameters: bool | Literal["auto"] = True
    tp_gather_partition_size: int = Field(8, gt=0)
    enable_cuda_graph: bool = False


class RolloutConfig(Block):
    """Our own `rollout` block.

    keep_snapshot: keep the snapshot's buffers over `train()`. False frees them there: less memory while training,
        and the frozen weights are gathered again for the next rollout.
    kv_step: tokens by which the KV cache grows.
    kv_cache_bytes: the most that the KV cache of fused containers may hold; rows wait until there is room, and
        what could never have room is refused. None: no end.
    max_slots: rows that are decoded at once; others wait in a queue.
    memory_limit: bytes that inference may add to what a rank holds for training: snapshot, KV cache and the like. What
        cannot fit is refused. None: no limit; where "auto" chooses, it goes by what is free when the engine is built.
    sync_interval: where the model's own layers gather as they run, tokens between two looks at whether all ranks are
        done. Decoders that ranks run together say so at every step, with the tokens that they bring.
    containers: "fused" computes with our decoder wherever it equals the model's own layers; "native" runs those.
    lora: "merged" adds adapters to a copy of the weights that they adapt; "unmerged" computes them beside these, and
        keeps no such copy. Adapters that can only be merged are.
    offload_states: optimizer states, master weights and gradients are in host memory while a window of inference is
        open, and come back with its end.
    """

    keep_snapshot: bool = True
    kv_step: int = Field(128, gt=0)
    kv_cache_bytes: int | None = Field(None, gt=0)
    max_slots: int = Field(256, gt=0)
    memory_limit: int | None = Field(None, gt=0)
    sync_interval: int = Field(1, gt=0)
    containers: Literal["fused", "native"] = "fused"
    lora: Literal["merged", "unmerged"] = "merged"
    offload_states: bool = False


BLOCKS: dict[str, type[Block]] = {"hybrid_engine": HybridEngineConfig, "rollout": RolloutConfig}


def load_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed configuration as a dictionary of its own: neither the caller's dict nor the file is changed.

    Raises ValueError for a path that does not exist and for a file that is not JSON.
    """
    if isinstance(config, dict):
        return copy.deepcopy(config)
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"config: no file at {str(path)!r}; give the path of a DeepSpeed JSON file or a dict")
    try:
        return hjson.loads(path.read_text(), object_pairs_hook=dict)
    except hjson.HjsonDecodeError as error:
        raise ValueError(f"config: {str(path)!r} is not JSON: {error}") from error


def read_blocks(config: dict[str, Any]) -> tuple[HybridEngineConfig, RolloutConfig]:
    """The two validated blocks of a DeepSpeed configuration.

    Raises ValueError naming the key, the value and what is allowed; for a key that is not known, the nearest one.
    """
    for key in config:
        if key not in BLOCKS and (near := difflib.get_close_matches(key, BLOCKS, n=1, cutoff=0.8)):
            raise ValueError(f"config: unknown key {key!r}; did you mean {near[0]!r}?")
    return read_block(config, "hybrid_engine"), read_block(config, "rollout")


def read_block(config: dict[str, Any], name: str) -> Any:
    """The validated block `name` of `config`; its defaults where the block is absent."""
    values = config.get(name, {})
    if not isinstance(values, dict):
        raise ValueError(f"config: {name!r} must be a dictionary of settings, not {values!r}")
    kind = BLOCKS[name]
    for key in values:
        if key not in kind.model_fields:
            raise ValueError(f"{name}: unknown key {key!r}; {nearest(key, kind.model_fields)}")
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{name}.{first['loc'][0]}: {first['input']!r} given; {first['msg']}") from error


def nearest(key: str, known: Any) -> str:
    """Words that name the known key nearest to `key`, and all of them."""
    ranked = sorted(known, key=lambda name: difflib.SequenceMatcher(None, key, name).ratio(), reverse=True)
    return f"the nearest known key is {ranked[0]!r} (known: {', '.join(sorted(known))})"
