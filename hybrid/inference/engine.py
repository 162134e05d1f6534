"""`hybrid.init_inference` and its InferenceEngine: DeepSpeed's inference API over this project's decoders."""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from pydantic import BaseModel, ValidationError
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from hybrid.call_lock import CallLock, one_at_a_time
from hybrid.config import (
    InferenceConfig,
    MoEConfig,
    RolloutConfig,
    TensorParallelConfig,
    read_inference_config,
    values_set,
)
from hybrid.decoders.calls import Calls, SharedCalls
from hybrid.decoders.collective_forwards import ExpertForwards, SliceForwards
from hybrid.decoders.deepspeed_moe import exchange_tokens, expert_layers
from hybrid.decoders.fused_model import FusedModel, containers_of, coverage_of, parts_of
from hybrid.decoders.tp_modules import first_output, whole_difference
from hybrid.extension_lock import extension_lock_reported
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.decode import Decoding, SamplingKeys, TooManyTokensError
from hybrid.generation.generate import TimedDecoder, generate, prompts_of, stride_on
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.model_runner import Decoder
from hybrid.generation.sampling import Seeds, wrapped
from hybrid.inference.auto_tp import Spread
from hybrid.inference.checkpoints import open_checkpoint, save_mp_checkpoint
from hybrid.inference.deepspeed_experts import own_experts
from hybrid.inference.injection_policy import read_policy, require_whole_heads
from hybrid.inference.loaded_slices import LoadedSlices
from hybrid.inference.loader import (
    Cast,
    Read,
    Weights,
    cast_model,
    emptied,
    floating_dtype,
    initialize,
    load,
    move_buffers,
    put,
    require_makers,
    stored_tensors,
    whole_as_they_run,
)
from hybrid.inference.restore import as_it_was_on_failure
from hybrid.inputs import as_model_inputs
from hybrid.kernels.cuda_graph import GraphedForward
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.models.structure import Structure, read_structure
from hybrid.parallel import InferenceGroup, engine_name, first_to, own_row_ids, world_size
from hybrid.profiling import ModelTimes, Profiler
from hybrid.weights.gather import is_partitioned
from hybrid.weights.int8 import Take, in_int8, require_groups
from hybrid.weights.lend import Window
from hybrid.weights.lora import read_adapters
from hybrid.weights.slices import require_divisible
from hybrid.weights.snapshot import Snapshot

LAYERS_PER_GROUP = 8  # for the snapshot; without effect, as nothing is gathered here


@extension_lock_reported()
def init_inference(
    model: nn.Module, config: str | Path | dict[str, Any] | BaseModel | None = None, **kwargs: Any
) -> "InferenceEngine":
    """Build an InferenceEngine. Takes the arguments of `deepspeed.init_inference`.

    model: any module; Hugging Face models of known families run fused if `replace_with_kernel_inject` is true. The
        model is changed: cast to `dtype`, moved to the device, and put in eval mode.
    config: DeepSpeed's inference settings: a dict, the path of a JSON file or a `DeepSpeedInferenceConfig`. Keyword
        arguments are further settings.
    Raises ValueError, with key, value and what is allowed, for invalid settings, and NotImplementedError for
    unsupported ones; the model is then unchanged.
    """
    return InferenceEngine(model, read_inference_config(config, kwargs))


class InferenceEngine(nn.Module):
    """An engine that runs forwards and generates, and does not train. Built by `hybrid.init_inference`.

    model, config: as for `init_inference`.
    Threads may share an engine: their calls run one at a time, in the order in which they were made.
    """

    # Attributes of DeepSpeed's engine (0.19.8) that have the same value in every engine of this class.
    local_cuda_graph = is_compiled = False
    quantization_scales = ep_group = expert_mp_group = None
    quantize_merge_count = 1

    def __init__(self, model: nn.Module, config: str | Path | dict[str, Any] | BaseModel | None = None):
        settings = config if isinstance(config, InferenceConfig) else read_inference_config(config, {})
        super().__init__()
        self.call_lock = CallLock()
        with as_it_was_on_failure(model, with_values=not settings.set_empty_params):
            self._take(model, settings.model_copy(update={"dtype": getattr(torch, settings.dtype)}))

    def _take(self, model: nn.Module, config: InferenceConfig) -> None:
        """Load, cast and place the model as the settings say, and build its containers."""
        initialize(model, [], torch.device("cpu"))  # non-persistent buffers of a model on the meta device
        mixtures = expert_layers(model)
        join_ranks(config)
        if mixtures:  # DeepSpeed's MoE layers send tokens to their experts themselves
            refuse_other_experts(mixtures, config)
            config = config.model_copy(update={"moe": MoEConfig()})
        info = ModelInfo(model)
        refuse_what_is_not_there(info, config)
        self._exchange = exchange_tokens(mixtures)
        self.module, self._config = model, config
        self.config = getattr(model, "config", None) if config.config is None else config.config
        self.mpu, self.injection_dict = config.tensor_parallel.mpu, config.injection_policy
        self._group = sharing_group(config)
        self._device = torch.device("cpu" if config.keep_module_on_host else get_accelerator().current_device_name())
        weights = None if config.checkpoint is None else open_weights(model, config, mixtures)
        if weights is not None and config.set_empty_params:
            params = dict(model.named_parameters())
            require_makers(model, [name for name in weights.absent if name in params])
            emptied(model)
        cast = Cast(model, floating_dtype(model, config.dtype), self._device)
        self.eval()
        if weights is not None:
            initialize(model, weights.absent, self._device)
        move_buffers(model, self._device)
        changes = config.dtype == torch.int8 or self._group.size > 1
        if weights is None and not changes:
            cast_model(model, cast)
        read = reader(model, weights, cast)
        self._save(read)
        self._spread: Spread | None = None
        if self._group.size > 1:
            fallback_reason = why_no_fused_slices(info, config)
            self._share_modules(read, fallback_reason) if fallback_reason else self._share(info, read)
            return
        if weights is not None or changes:
            int8 = config.dtype == torch.int8
            expected = made_by(model, next(model.parameters()).device) if weights is None and int8 else None
            load(model, stored_tensors(model), read, self._quantizing())
            if expected is not None:  # fails if a module reads a linear layer's weight directly, which is int8 now
                self._require_same(expected, "dtype: int8 given; {}; use another dtype")
        self._serve("" if config.replace_with_kernel_inject else "replace_with_kernel_inject=false")

    def _serve(self, fallback_reason: str) -> None:
        """Build the containers over the model's own weights.  fallback_reason: why none is to be fused; "": none."""
        info, adapted = ModelInfo(self.module), read_adapters(self.module)
        self._build(info, Snapshot(self.module, info.structure, adapted, LAYERS_PER_GROUP), lends=bool(adapted))
        self._fused.fallback_reason = fallback_reason or self._fused.fallback_reason
        self._fused.warns = self._fused.warns and self._config.replace_with_kernel_inject
        self._check()
        self._share_seed()
        if self._config.enable_cuda_graph and self._fused.fallback_reason:
            self._graphs = GraphedForward(self.module)
        elif self._config.enable_cuda_graph and "on Triton" not in self._fused.what:
            raise NotImplementedError(f"enable_cuda_graph: true given; {self._fused.what} has no graphs")

    def _share(self, info: ModelInfo, read: Read) -> None:
        """Load this rank's slices, and build a tensor-parallel decoder over the group."""
        slices = LoadedSlices(info, self._group, read)
        self._build(info, slices, lends=False, group=self._group)
        self._check()
        self._share_seed()

    def _quantizing(self) -> dict[str, Take]:
        """By parameter name, the function that quantizes a weight; {} unless dtype is int8."""
        int8 = self._config.dtype == torch.int8
        return in_int8(self.module, self._config.quant.weight.q_groups) if int8 else {}

    def _share_modules(self, read: Read, fallback_reason: str) -> None:
        """Put this rank's slices into the model's own modules, and compare their output with the full weights'.

        fallback_reason: why no fused decoder runs on the slices. Raises NotImplementedError if the outputs differ, or
        if the model does not run on token ids alone and there is no injection policy.
        """
        stored = stored_tensors(self.module)
        names = {tensor: name for name, tensor in stored.items()}
        for name, buffer in stored.items():
            if not isinstance(buffer, nn.Parameter):
                put(self.module, name, buffer, read(name))
        int8 = self._quantizing()
        structure = read_structure(self.module)
        parts = [part.module for part in (*structure.outer, *structure.layers)]
        self._spread = Spread(self.module, self._group.size, self._config.injection_policy)
        with whole_as_they_run(parts, names, read):
            expected = made_by(self.module, self._device)
        if expected is None and self._config.injection_policy is None:
            raise NotImplementedError(
                f"tensor_parallel: {type(self.module).__name__} does not run on token ids alone; give injection_policy"
            )
        load(self.module, stored, read, self._spread.takers(self._group, names, int8))
        if expected is not None:  # else the model takes other inputs, and the user's policy is trusted unchecked
            words = (
                f"tensor_parallel: {{}}; it was spread by {self._spread.what}. Give another injection_policy, or use "
            )
            self._require_same(expected, f"{words}tp_size=1")
        self._serve(f"spread over {self._group.size} ranks by {self._spread.what}; {fallback_reason}")

    def _require_same(self, expected: torch.Tensor, words: str) -> None:
        """Raise NotImplementedError, on every rank of the group, if a rank's output differs from `expected`.

        words: the error message, with {} for the difference.
        """
        try:
            found = first_output(self.module, self._device)
            wrong = whole_difference(found, expected.to(self._device), self._config.dtype)
        except UnsupportedModel as reason:
            wrong = str(reason)
        if self._group.sum(torch.tensor(int(bool(wrong)), device=self._device)):
            raise NotImplementedError(words.format(wrong or "another rank has other numbers"))

    def _share_seed(self) -> None:
        """Give all ranks of a tensor-parallel group the first rank's initial seed and device RNG state, as DeepSpeed
        does: sampling by the caller from equal logits then gives equal tokens."""
        if self._group.tensor.size > 1:
            accelerator = get_accelerator()
            state = accelerator.get_rng_state().to(self._device)
            accelerator.set_rng_state(self._group.tensor.share(state).cpu())
        initial = torch.tensor(wrapped(torch.initial_seed()), device=self._device)
        self._seeds = Seeds(int(self._group.tensor.share(initial)))

    def _save(self, read: Read) -> None:
        """With save_mp_checkpoint_path, write this rank's part of the weights. Only the first group of ranks writes."""
        path, group = self._config.save_mp_checkpoint_path, self._group
        if path is None:
            return
        first = group.index == 0 and first_to(f"saves/{Path(path).resolve()}")
        if group.share(torch.tensor(int(first), device=self._device)):
            save_mp_checkpoint(path, stored_tensors(self.module), read, group.size, group.index)

    def _build(
        self,
        info: ModelInfo,
        snapshot: Snapshot,
        lends: bool,
        group: InferenceGroup | None = None,
    ) -> None:
        """Build and install the containers over `snapshot`. The weights do not change from here on."""
        defaults, synchronize = RolloutConfig(), get_accelerator().synchronize
        self._profiler = Profiler(engine_name(), synchronize)
        self._times = ModelTimes(synchronize, timed_event if torch.cuda.is_available() else None)
        self._own_hooks: list[RemovableHandle] = []
        self._graphs: GraphedForward | None = None
        self._kv_cache, self._block_pool = KVCache(defaults.kv_step), BlockPool(defaults.kv_step)
        self._max_num_seqs, self._snapshot = defaults.max_num_seqs, snapshot
        self._window = Window(
            self.module,
            snapshot,
            self._refresh,
            nullcontext,
            lends=lends,
            merges=lends,
            device=self._device,
        )
        max_capture_size = self._max_num_seqs if self._config.enable_cuda_graph else 0
        self._fused = FusedModel(info, snapshot, max_capture_size, group, lambda: self._own_hooks)
        self._calls = self._make_calls(info.structure)
        self._containers = containers_of(parts_of(info), self._calls)
        for container in self._containers:
            container.install()

    def _make_calls(self, structure: Structure) -> Calls:
        """The runner of requests: for this rank alone, or for the ranks whose forwards are collectives."""
        own = (self._window, self._fused, nothing_to_join, self.call_lock)
        if self._exchange is not None:
            steps = ExpertForwards(self.module, self._exchange, self._device)
            return SharedCalls(*own, self._exchange.group, steps, self._profiler.phase)
        if self._fused.group is not None:
            counted = (self._profiler.phase, self._profiler.gathered)
            ranks = (self._device, self._group.group)
            steps = SliceForwards(self._snapshot, structure, *counted, *ranks, self._note_gathering)
            return SharedCalls(*own, self._group.group, steps, self._profiler.phase)
        return Calls(*own)

    def _note_gathering(self) -> None:
        if self._fused.checked:  # else this is the self-check
            self._fused.note_native(
                f"its layers are put together from {self._group.size} ranks' slices at every forward (ask for logits "
                "alone: leave out labels, output_hidden_states, use_cache and return_dict_in_generate, and give "
                "position_ids where rows are padded on the left; hybrid.padded_forward makes them)"
            )

    @torch.no_grad()
    def _check(self) -> None:
        """Run the self-check of the fused decoder, if there is one.

        Raises NotImplementedError if ranks share the decoder and it does not pass.
        """
        with self._calls.request(tokens=1):
            pass
        if self._fused.group is not None and not self._fused.checked:
            raise NotImplementedError(
                f"{self._group.size} ranks share the weights, but {self._fused.fallback_reason_now()}"
            )

    def _refresh(self, adapters: bool) -> None:
        self._snapshot.refresh(self._profiler.phase, adapters)

    # ------------------------------------------------------------ inference

    @one_at_a_time
    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output, or with `return_tuple=false` its first tensor. Without gradients.

        If a fused container or a graph runs, `use_cache` defaults to False: no cache is returned.
        """
        inputs, kwargs = as_model_inputs(inputs, kwargs, self._device)
        if not (self._fused.fallback_reason and self._graphs is None) and leaves_open(
            self.module, inputs, kwargs, "use_cache"
        ):
            kwargs["use_cache"] = False
        if self._graphs is None:
            output = self.module(*inputs, **kwargs)
        elif self._times.enabled:
            with self._times.forward():
                output = self._graphs(*inputs, **kwargs)
        else:
            output = self._graphs(*inputs, **kwargs)
        return output if self._config.return_tuple else first_tensor(output)

    @one_at_a_time
    def generate(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Hugging Face's `generate`, with its arguments and results. Every call starts with an empty KV cache. Inputs
        may be on any device and ids of any integer dtype; the output is on the model's device.

        seed: keys the sampling RNG together with the tensor-parallel group, the row and the position. None: the next
            seed of a sequence that starts from torch's initial seed (`torch.manual_seed`), and restarts when that
            changes; torch's generators are not drawn from. The ranks of a group use the first rank's initial seed and
            must make the same calls. If they share the model's own modules, the first rank's seed is used.
        Raises ValueError for invalid arguments or too many tokens (see `max_out_tokens`), and NotImplementedError for
        unsupported modes, before anything runs.
        """
        following = self._seeds.next()  # at every call, so that the ranks stay in step
        with self._calls.call():
            return self._generate(args, kwargs, following if seed is None else seed)

    def _generate(self, args: tuple, kwargs: dict[str, Any], seed: int) -> Any:
        prompts = prompts_of(self.module, args, kwargs)
        args, kwargs = as_model_inputs(args, kwargs, self._device)
        most, least = self._config.max_out_tokens, self._config.min_out_tokens
        if prompts is not None and prompts.shape[1] + least > most:
            raise TooManyTokensError(
                f"generate: behind a prompt of {prompts.shape[1]} tokens there is no room for min_out_tokens={least} "
                f"more in max_out_tokens={most}; raise max_out_tokens, or give a shorter prompt"
            )
        decoding = Decoding(
            phase=self._profiler.phase,
            request=self._request,
            cache=self._kv_cache,
            block_pool=self._block_pool,
            block_bytes=self._fused.block_bytes,
            require_memory=lambda rows, tokens: None,
            max_num_seqs=self._max_num_seqs,
            stride=stride_on(self._device),
            max_out_tokens=most,
            limit="max_out_tokens",
            noise=lambda rows: SamplingKeys(self._shared_seed(seed), own_row_ids(rows, self._group.tensor.number)),
            expands=self._exchange is None,
            produced=self._profiler.generated,
        )
        return generate(self.module, args, kwargs, decoding)

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's generation config, which transformers' pipelines read from the engine."""
        return self.module.generation_config

    def _shared_seed(self, seed: int) -> int:
        """`seed`; if the ranks share the model's own modules, the first rank's."""
        if self._group.size == 1 or self._fused.group is not None:
            return seed
        return int(self._group.share(torch.tensor(wrapped(seed), device=self._device)))

    @contextmanager
    def _request(self, tokens: int | None, why_native: str) -> Iterator[Decoder | None]:
        with self._calls.request(None, tokens, why_native) as decoder:
            yield TimedDecoder(decoder, self._times) if decoder is not None and self._times.enabled else decoder

    def train(self, mode: bool = True) -> "InferenceEngine":
        """Only `train(False)`, i.e. `eval()`, is supported. Raises RuntimeError if `mode` is True."""
        if mode:
            raise RuntimeError(
                "train(): an InferenceEngine does not train; hybrid.initialize makes an engine that does"
            )
        return super().train(False)

    @one_at_a_time
    def destroy(self) -> None:
        """Put the model's own forwards back, and free the KV cache, buffers, graphs and hooks of the engine."""
        for container in self._containers:
            container.uninstall()
        for hook in self._own_hooks:
            hook.remove()
        self._graphs = None
        if self._spread is not None:
            self._spread.undo.close()
        self._snapshot.release()
        self._fused.release_blocks()
        self._fused.release()
        self._kv_cache.release()
        self._block_pool.release()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(
            "compile: an engine's containers are not compiled by torch; compile a model that is in no engine, or use "
            "replace_with_kernel_inject=true"
        )

    # ----------------------------------------------------------- inspection

    @property
    def mp_group(self) -> torch.distributed.ProcessGroup | None:
        """The tensor-parallel group; None if this rank is alone in it."""
        return self._group.tensor.group

    @property
    def cuda_graph_created(self) -> bool:
        """Whether a forward has been captured as a CUDA graph."""
        return self._graphs is not None and bool(self._graphs.graphs)

    @property
    def model_profile_enabled(self) -> bool:
        """Whether `profile_model_time` was called."""
        return self._times.enabled

    @one_at_a_time
    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward from now on, also inside `generate`; `model_times` gives the results.

        use_cuda_events: use CUDA events if there are any; otherwise the clock, with a device synchronization.
        """
        if not self._times.enabled and self._graphs is None:
            hooks = (
                self.module.register_forward_pre_hook(self._times.begin),
                self.module.register_forward_hook(self._times.end),
            )
            self._own_hooks += hooks
        self._times.enable(use_cuda_events)

    @one_at_a_time
    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call. Raises AssertionError if profiling is not enabled."""
        return self._times.taken()

    def coverage(self) -> list[dict[str, str]]:
        """For each part of the model its `module` name, its `kind`, the `container` that runs it, and the reason."""
        return coverage_of(self._containers, self._fused)


def open_weights(model: nn.Module, config: InferenceConfig, mixtures: dict[str, MoE]) -> Weights:
    """The checkpoint's tensors by the model's names. Raises ValueError if it cannot be read, or does not fit the model
    and `strict` is set."""
    shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
    stored = open_checkpoint(config.checkpoint, config.base_dir, config.training_mp_size, shapes)
    return Weights(model, own_experts(mixtures, stored), config.strict)


def made_by(model: nn.Module, device: torch.device) -> torch.Tensor | None:
    """The output of a model on `device` for a few tokens; None if it does not run on token ids alone.  [tokens, n]"""
    try:
        return first_output(model, device)
    except UnsupportedModel:
        return None


def reader(model: nn.Module, weights: Weights | None, cast: Cast) -> Read:
    """A function that gives a full tensor by its name in the model, cast and on the device: the checkpoint's, else the
    model's own. It keeps the model's own tensors alive."""
    kept = stored_tensors(model) if weights is None else dict.fromkeys(weights.absent)
    own = {name: tensor.detach() for name, tensor in stored_tensors(model).items() if name in kept}

    def read(name: str) -> torch.Tensor:
        return cast(name, own[name] if weights is None or name in weights.absent else weights.read(name))

    return read


def leaves_open(module: nn.Module, inputs: tuple, kwargs: dict[str, Any], name: str) -> bool:
    """Whether `name` can be added to a forward's arguments: the forward accepts it, it is not among them, and they do
    not continue from a cache."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind_partial(*inputs, **kwargs).arguments
    except TypeError:
        return False  # invalid arguments: the forward itself raises the error
    free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    taken = {**bound, **kwargs}
    return name not in taken and taken.get("past_key_values") is None and (free or name in signature.parameters)


def timed_event() -> torch.cuda.Event:
    """A CUDA event that records time."""
    return torch.cuda.Event(enable_timing=True)


def nothing_to_join(adapters: bool) -> None:
    """Nothing: no weights are gathered here, so a rank whose request was rejected has no gathers to join."""


def first_tensor(output: Any) -> torch.Tensor:
    """A model's first output other than the loss: logits, or the hidden states of a model without a head."""
    if isinstance(output, ModelOutput):
        return next(value for name, value in output.items() if name != "loss")
    if isinstance(output, tuple | list):  # the loss is the only scalar
        return next(value for value in output if value.dim() > 0)
    return output


def given_group(settings: TensorParallelConfig) -> torch.distributed.ProcessGroup | None:
    """The caller's process group for tensor parallelism, from `mpu` or `tp_group`; None if neither is given."""
    return settings.tp_group if settings.mpu is None else settings.mpu.get_model_parallel_group()


def tensor_ranks(settings: TensorParallelConfig) -> int:
    """The tensor-parallel size."""
    group = given_group(settings)
    if not settings.enabled:
        return 1
    return settings.tp_size if group is None else torch.distributed.get_world_size(group)


def expert_ranks(settings: MoEConfig) -> int:
    """The expert-parallel size."""
    return settings.ep_size if settings.enabled else 1


def ranks_sharing(config: InferenceConfig) -> int:
    """The number of ranks that share one copy of the weights: tensor- times expert-parallel size."""
    return tensor_ranks(config.tensor_parallel) * expert_ranks(config.moe)


def sharing_group(config: InferenceConfig) -> InferenceGroup:
    """The ranks that share one copy of the weights: the caller's group, or consecutive ranks. Building a new group is a
    collective of all ranks."""
    size = ranks_sharing(config)
    given = given_group(config.tensor_parallel) if expert_ranks(config.moe) == 1 else config.moe.ep_group
    ranks = tensor_ranks(config.tensor_parallel)
    return InferenceGroup(size, group=given if size > 1 else None, tensor_size=ranks)


def join_ranks(config: InferenceConfig) -> None:
    """Initialize torch.distributed and select the device, if `config` needs several ranks and a launcher started
    them."""
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    wanted = config.tensor_parallel.tp_size * config.moe.ep_size > 1
    if wanted and launched and not torch.distributed.is_initialized():
        comm.init_distributed(get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))


def refuse_what_is_not_there(info: ModelInfo, config: InferenceConfig) -> None:
    """Raise ValueError for invalid settings and NotImplementedError for unsupported ones, before anything changes."""
    model = info.model
    floating = config.dtype
    supported = get_accelerator().supported_dtypes()
    if floating != torch.int8 and floating not in supported:
        raise ValueError(
            f"dtype: {floating} given; {get_accelerator().device_name()} computes {', '.join(map(str, supported))}"
        )
    if config.min_out_tokens >= config.max_out_tokens:
        raise ValueError(
            f"min_out_tokens: {config.min_out_tokens} given; with a prompt it does not fit in "
            f"max_out_tokens={config.max_out_tokens}"
        )
    refuse_ranks_that_are_not_there(config.tensor_parallel)
    if any(is_partitioned(param) for param in model.parameters()):
        raise NotImplementedError(
            "init_inference: the model is partitioned by ZeRO-3; hybrid.initialize makes an engine that generates so"
        )
    refuse_partitioning(config.zero)
    if config.checkpoint is None and config.set_empty_params:
        raise ValueError("set_empty_params: true given; without a checkpoint the model would have no weights")
    if config.checkpoint is None and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("init_inference: the model is on the meta device, and has no weights; give checkpoint=...")
    if config.dtype == torch.int8:
        refuse_what_cannot_be_quantized(model, config)
    elif values_set(config, "quant") is not None:
        warnings.warn(f"quant: given with dtype={floating}; it has no effect, only int8 quantizes", stacklevel=5)
    if config.checkpoint is None:
        for key in ("training_mp_size", "base_dir"):
            if values_set(config, key) is not None:
                raise ValueError(f"{key}: {getattr(config, key)!r} given without checkpoint, which it tells of")
    if config.injection_policy_tuple is not None:
        raise ValueError("injection_policy_tuple: DeepSpeed makes it for itself; give injection_policy")
    if config.enable_cuda_graph and not torch.cuda.is_available():
        raise NotImplementedError("enable_cuda_graph: true given; no CUDA device is here, use false")
    if config.use_triton and not (torch.cuda.is_available() and config.replace_with_kernel_inject):
        raise NotImplementedError(
            "use_triton: true given; Triton's kernels are those of fused containers: a CUDA device is needed, and "
            "replace_with_kernel_inject=true"
        )
    if config.injection_policy is not None:
        if config.replace_with_kernel_inject or expert_ranks(config.moe) > 1:
            raise ValueError(
                "injection_policy: given with replace_with_kernel_inject=true, or with moe.ep_size; give one of them"
            )
        read_policy(model, config.injection_policy)
    refuse_experts_that_are_not_there(info, config)
    size = ranks_sharing(config)
    if size > 1:
        refuse_what_cannot_be_shared(info, config, size)
    if not config.triangular_masking and looks_back_only(model):
        raise NotImplementedError("triangular_masking: false given; the model is a decoder, which looks back only")


def refuse_partitioning(zero: dict[str, Any]) -> None:
    """Raise NotImplementedError for ZeRO stage 3 and ValueError for invalid settings; warn if they have no effect."""
    try:
        stage = DeepSpeedZeroConfig(**zero).stage
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"zero: {'.'.join(map(str, first['loc']))}: {first['input']!r} given; {first['msg']}"
        ) from error
    if stage == ZeroStageEnum.weights:
        raise NotImplementedError(
            f"zero.stage: {stage} given; weights that stay partitioned are hybrid.initialize's, with "
            "hybrid_engine.pin_parameters=false"
        )
    if stage or zero.keys() - {"stage", "leaf_module", "overlap_comm"}:  # DeepSpeed's object always has the last two
        warnings.warn(f"zero: {zero} given; it has no effect, nothing is trained here", stacklevel=6)


def refuse_ranks_that_are_not_there(settings: TensorParallelConfig) -> None:
    """Raise ValueError if `tp_size` does not divide the world size, or is not the size of the given group."""
    size, group = settings.tp_size if settings.enabled else 1, given_group(settings)
    if group is not None:
        found = torch.distributed.get_world_size(group)
        if "tp_size" in settings.model_fields_set and settings.tp_size != found:
            raise ValueError(f"tensor_parallel.tp_size: {size} given; the group that is given too has {found} ranks")
        return
    if world_size() % size:
        raise ValueError(f"tensor_parallel.tp_size: {size} given; it must divide the world size, {world_size()}")


def refuse_experts_that_are_not_there(info: ModelInfo, config: InferenceConfig) -> None:
    """Check the `moe` settings against the model and the ranks.

    Raises ValueError if the number of experts differs, or `ep_size` does not divide the experts or the ranks;
    NotImplementedError for unsupported settings. Warns of an `ep_group` without effect.
    """
    moe, ranks = config.moe, expert_ranks(config.moe)
    if moe.type == "residual":
        raise NotImplementedError("moe.type: 'residual' given; standard experts are there")
    if moe.ep_mp_group is not None:
        raise NotImplementedError("moe.ep_mp_group: given; ranks that share an expert are those of tensor_parallel")
    if moe.ep_group is not None and ranks == 1:
        warnings.warn("moe.ep_group: given with ep_size=1; it has no effect, give ep_size too", stacklevel=6)
    said = None if moe.moe_experts == [1] else moe.moe_experts
    if ranks == 1 and said is None:
        return
    model, count = info.model, 0 if info.layout is None else info.layout.spec.num_experts
    if said is not None and count not in said:
        raise ValueError(f"moe.moe_experts: {said} given; {type(model).__name__} has {count} experts in a layer")
    if ranks > 1 and not count:
        raise NotImplementedError(f"moe.ep_size: {ranks} given; {type(model).__name__} has no experts that are known")
    if count % ranks:
        raise ValueError(f"moe.ep_size: {ranks} given; it must divide the {count} experts of a layer")
    if ranks > 1 and given_group(config.tensor_parallel) is not None:
        raise NotImplementedError("moe.ep_size: given with tensor_parallel.tp_group or mpu; give tp_size instead")
    if moe.ep_group is not None and (
        config.tensor_parallel.tp_size > 1 or torch.distributed.get_world_size(moe.ep_group) != ranks
    ):
        raise ValueError(f"moe.ep_group: it must have the ep_size={ranks} ranks, and goes with tp_size=1 alone")
    if world_size() % ranks_sharing(config):
        raise ValueError(
            f"moe.ep_size: {ranks} given with tp_size={tensor_ranks(config.tensor_parallel)}; together they must "
            f"divide the world size, {world_size()}"
        )


def refuse_other_experts(mixtures: dict[str, MoE], config: InferenceConfig) -> None:
    """Raise ValueError if DeepSpeed's own MoE layers differ from the `moe` settings, and NotImplementedError for
    settings that they do not support."""
    moe, said = config.moe, None if config.moe.moe_experts == [1] else config.moe.moe_experts
    if moe.ep_group is not None or moe.ep_mp_group is not None:
        raise NotImplementedError("moe: a group given; DeepSpeed's layers make their own, leave it out")
    if expert_ranks(moe) > 1 and config.save_mp_checkpoint_path is not None:
        raise NotImplementedError("save_mp_checkpoint_path: given with DeepSpeed's experts over several ranks")
    for name, layer in mixtures.items():
        kind = "residual" if layer.use_residual else "standard"
        if expert_ranks(moe) != layer.ep_size:
            raise ValueError(f"moe.ep_size: {expert_ranks(moe)} given; {name} was built with ep_size={layer.ep_size}")
        if said is not None and layer.num_experts not in said:
            raise ValueError(f"moe.moe_experts: {said} given; {name} has {layer.num_experts} experts")
        if moe.type != kind and values_set(moe, "type") is not None:
            raise ValueError(f"moe.type: {moe.type!r} given; {name} is {kind}")
        if world_size() % layer.ep_size:
            raise ValueError(f"moe.ep_size: {layer.ep_size} given; it must divide the world size, {world_size()}")


def refuse_what_cannot_be_quantized(model: nn.Module, config: InferenceConfig) -> None:
    """Raise ValueError or NotImplementedError if the model or the settings do not support int8."""
    weight = config.quant.weight
    if not (config.quant.enabled and weight.enabled):
        raise ValueError("quant.enabled: false given with dtype=int8; give another dtype, or true")
    if weight.num_bits != 8 or weight.q_type != "symmetric":
        raise NotImplementedError(
            f"quant.weight: num_bits={weight.num_bits}, q_type={weight.q_type!r} given; there are 8 bits, symmetric"
        )
    if weight.quantized_initialization or weight.post_init_quant:
        raise NotImplementedError(
            "quant.weight: quantized_initialization and post_init_quant are ZeRO's, leave them out"
        )
    if expert_ranks(config.moe) > 1:
        raise NotImplementedError("dtype: int8 given with moe.ep_size; use another dtype, or tensor_parallel alone")
    if read_adapters(model):
        raise NotImplementedError("dtype: int8 given for a model with adapters; merge them first (merge_and_unload)")
    require_groups(model, weight.q_groups, ranks_sharing(config))
    if config.save_mp_checkpoint_path is not None:
        raise NotImplementedError("save_mp_checkpoint_path: given with dtype=int8; write it with a floating dtype")


def refuse_what_cannot_be_shared(info: ModelInfo, config: InferenceConfig, size: int) -> None:
    """Raise ValueError or NotImplementedError if `size` ranks cannot share the model's weights under the settings."""
    model = info.model
    if config.enable_cuda_graph:
        raise NotImplementedError(
            f"enable_cuda_graph: true given for {size} ranks that share weights, and wait for each other at every "
            "step; use false"
        )
    if config.injection_policy is not None:
        require_whole_heads(model, read_policy(model, config.injection_policy), size)
        return
    if read_adapters(model):
        raise NotImplementedError(
            f"init_inference: {size} ranks cannot share a model with adapters; merge them first (merge_and_unload)"
        )
    if fallback_reason := why_no_fused_slices(info, config):
        require_spreadable(model, size, fallback_reason)
        return
    spec, ranks = info.layout.spec, tensor_ranks(config.tensor_parallel)
    require_divisible(spec.num_heads, spec.num_kv_heads, ranks, "tensor_parallel.tp_size")


def why_no_fused_slices(info: ModelInfo, config: InferenceConfig) -> str:
    """The reason why ranks share the model's own modules; "" if they share a fused decoder."""
    if config.injection_policy is not None:
        return "injection_policy is given"
    if config.dtype == torch.int8:
        return "fused slices are not in int8"
    if info.layout is None:
        return f"no fused container: {info.no_layout}"
    if config.replace_with_kernel_inject or expert_ranks(config.moe) > 1:  # its own modules would keep all experts
        return ""
    # Without a tp_plan, slicing by its layers' names would be a guess; the decoder is certain.
    return "" if info.tp_plan is None else "replace_with_kernel_inject=false"


def require_spreadable(model: nn.Module, size: int, fallback_reason: str) -> None:
    """Raise NotImplementedError if a model's own modules cannot be tensor-parallel.

    fallback_reason: why there is no fused decoder, for the message.
    """
    try:
        Spread(model, size)
    except UnsupportedModel as why:
        raise NotImplementedError(
            f"tensor_parallel: {size} ranks given; the modules of {type(model).__name__} cannot be spread over ranks "
            f"({why}), and fused slices are not there ({fallback_reason}): give injection_policy, or use tp_size=1"
        ) from why


def looks_back_only(model: nn.Module) -> bool:
    """Whether a model has causal attention, if only in its decoder.

    Read from the attention modules' `is_causal`. Models without it (BLOOM) are causal if they generate, or if their
    model type has only causal language models (transformers 5.23).
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    decoders_alone = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    generates = isinstance(model, PreTrainedModel) and model.can_generate()
    return True in said if said else generates or kind in decoders_alone
