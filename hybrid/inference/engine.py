"""`hybrid.init_inference`: DeepSpeed's engine for a model that does not train, over the containers of this one."""

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
from hybrid.models.reader import read_decoder
from hybrid.models.spec import DecoderLayout, UnsupportedModel
from hybrid.models.structure import Structure, read_structure
from hybrid.models.tp_plan import read_tp_plan
from hybrid.parallel import InferenceGroup, engine_name, first_to, own_row_ids, world_size
from hybrid.profiling import ModelTimes, Profiler
from hybrid.weights.gather import is_partitioned
from hybrid.weights.int8 import Take, in_int8, require_groups
from hybrid.weights.lend import Window
from hybrid.weights.lora import read_adapters
from hybrid.weights.slices import require_divisible
from hybrid.weights.snapshot import Snapshot

LAYERS_PER_GROUP = 8  # of the snapshot, which gathers nothing here


@extension_lock_reported()
def init_inference(
    model: nn.Module, config: str | Path | dict[str, Any] | BaseModel | None = None, **kwargs: Any
) -> "InferenceEngine":
    """Build an InferenceEngine. Takes what `deepspeed.init_inference` takes.

    model: any module; what Hugging Face models of known families can do fused, is done fused where
        `replace_with_kernel_inject` is true. It is changed: cast to `dtype`, moved to the device, in eval mode.
    config: DeepSpeed's settings of inference, a dict, the path of a JSON file or a `DeepSpeedInferenceConfig`; keyword
        arguments are more of them.
    Raises ValueError, naming key, value and what is allowed, and NotImplementedError for what is not available; the
    model is then as it was.
    """
    return InferenceEngine(model, read_inference_config(config, kwargs))


class InferenceEngine(nn.Module):
    """A model that runs forwards and generates, and does not train. Built by `hybrid.init_inference`.

    config: as `init_inference`'s, DeepSpeed's own object among them.
    Threads may share it: their calls run one at a time, in the order in which they came.
    """

    # What DeepSpeed's engine tells its callers of (0.19.8), and is the same in every engine of this kind.
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
        """Change the model to what the settings say, and build what runs it."""
        initialize(model, [], torch.device("cpu"))  # what a model on the meta device makes itself
        mixtures = expert_layers(model)
        join_ranks(config)
        if mixtures:  # these send tokens to experts by themselves
            refuse_other_experts(mixtures, config)
            config = config.model_copy(update={"moe": MoEConfig()})
        refuse_what_is_not_there(model, config)
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
            fallback_reason = why_no_fused_slices(model, config)
            self._share_modules(read, fallback_reason) if fallback_reason else self._share(read)
            return
        if weights is not None or changes:
            int8 = config.dtype == torch.int8
            expected = made_by(model, next(model.parameters()).device) if weights is None and int8 else None
            load(model, stored_tensors(model), read, self._quantizing())
            if expected is not None:  # what reads the weights of linear layers by itself cannot have them in int8
                self._require_same(expected, "dtype: int8 given; {}; use another dtype")
        self._serve("" if config.replace_with_kernel_inject else "replace_with_kernel_inject=false")

    def _serve(self, fallback_reason: str) -> None:
        """Containers over the weights, which are in the model.  why_not: words, where none is to be fused."""
        structure, adapted = read_structure(self.module), read_adapters(self.module)
        self._build(structure, Snapshot(self.module, structure, adapted, LAYERS_PER_GROUP), lends=bool(adapted))
        self._fused.fallback_reason = fallback_reason or self._fused.fallback_reason
        self._fused.warns = self._fused.warns and self._config.replace_with_kernel_inject
        self._check()
        self._agree_on_noise()
        if self._config.enable_cuda_graph and self._fused.fallback_reason:
            self._graphs = GraphedForward(self.module)
        elif self._config.enable_cuda_graph and "on Triton" not in self._fused.what:
            raise NotImplementedError(f"enable_cuda_graph: true given; {self._fused.what} has no graphs")

    def _share(self, read: Read) -> None:
        """This rank's slices of the weights, and a decoder that is spread over the group."""
        structure, layout = read_structure(self.module), read_decoder(self.module)
        slices = LoadedSlices(self.module, structure, layout, self._group, read)
        self._build(structure, slices, lends=False, group=self._group, layout=layout)
        self._check()
        self._agree_on_noise()

    def _quantizing(self) -> dict[str, Take]:
        """By name, what takes the weights that are to be in int8."""
        int8 = self._config.dtype == torch.int8
        return in_int8(self.module, self._config.quant.weight.q_groups) if int8 else {}

    def _share_modules(self, read: Read, fallback_reason: str) -> None:
        """The model's own modules on this rank's slices, once they are seen to make what whole weights make.

        why_not: words, why the slices are not a fused decoder's.
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
        if expected is not None:  # else a policy is the user's word, who may know more of what the model wants
            words = (
                f"tensor_parallel: {{}}; it was spread by {self._spread.what}. Give another injection_policy, or use "
            )
            self._require_same(expected, f"{words}tp_size=1")
        self._serve(f"spread over {self._group.size} ranks by {self._spread.what}; {fallback_reason}")

    def _require_same(self, expected: torch.Tensor, words: str) -> None:
        """Raise NotImplementedError, on every rank of the group, where the model makes something else.

        words: of the error, with a place for what is wrong.
        """
        try:
            found = first_output(self.module, self._device)
            wrong = whole_difference(found, expected.to(self._device), self._config.dtype)
        except UnsupportedModel as reason:
            wrong = str(reason)
        if self._group.sum(torch.tensor(int(bool(wrong)), device=self._device)):
            raise NotImplementedError(words.format(wrong or "another rank has other numbers"))

    def _agree_on_noise(self) -> None:
        """Give the ranks of a tensor-parallel group the first one's seeds, and the state of its device's generator, as
        DeepSpeed does: what callers draw from equal logits is equal too."""
        if self._group.tensor.size > 1:
            accelerator = get_accelerator()
            state = accelerator.get_rng_state().to(self._device)
            accelerator.set_rng_state(self._group.tensor.share(state).cpu())
        initial = torch.tensor(wrapped(torch.initial_seed()), device=self._device)
        self._seeds = Seeds(int(self._group.tensor.share(initial)))

    def _save(self, read: Read) -> None:
        """Write this rank's part of the weights, where that is asked for: the group that comes first does."""
        path, group = self._config.save_mp_checkpoint_path, self._group
        if path is None:
            return
        first = group.index == 0 and first_to(f"saves/{Path(path).resolve()}")
        if group.share(torch.tensor(int(first), device=self._device)):
            save_mp_checkpoint(path, stored_tensors(self.module), read, group.size, group.index)

    def _build(
        self,
        structure: Structure,
        snapshot: Snapshot,
        lends: bool,
        group: InferenceGroup | None = None,
        layout: DecoderLayout | None = None,
    ) -> None:
        """The containers over the weights, which stay as they are from here on."""
        defaults, synchronize = RolloutConfig(), get_accelerator().synchronize
        self._profiler = Profiler(engine_name(), synchronize)
        self._times = ModelTimes(synchronize, timed_event if torch.cuda.is_available() else None)
        self._own_hooks: list[RemovableHandle] = []
        self._graphs: GraphedForward | None = None
        self._kv_cache, self._pages = KVCache(defaults.kv_step), BlockPool(defaults.kv_step)
        self._max_slots, self._snapshot = defaults.max_slots, snapshot
        self._window = Window(
            self.module,
            snapshot,
            self._refresh,
            nullcontext,
            lends=lends,
            merges=lends,
            device=self._device,
        )
        layers = [part.module for part in structure.layers]
        graph_slots = self._max_slots if self._config.enable_cuda_graph else 0
        self._fused = FusedModel(self.module, layers, snapshot, graph_slots, group, lambda: self._own_hooks, layout)
        self._calls = self._make_calls(structure)
        self._containers = containers_of(parts_of(self.module, structure), self._calls)
        for container in self._containers:
            container.install()

    def _make_calls(self, structure: Structure) -> Calls:
        """What runs requests, of this rank alone or of the ranks that compute together."""
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
        if self._fused.checked:  # else it is the check itself
            self._fused.note_native(
                f"its layers are put together from {self._group.size} ranks' slices at every forward (ask for logits "
                "alone: leave out labels, output_hidden_states, use_cache and return_dict_in_generate, and give "
                "position_ids where rows are padded on the left; hybrid.padded_forward makes them)"
            )

    @torch.no_grad()
    def _check(self) -> None:
        """Compare the decoder with the model's layers, where there is one."""
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

        Where a fused container or a graph runs, `use_cache` is false unless it is given: the caller gets no cache back.
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
        """Hugging Face's `generate`: takes what it takes and returns what it returns. Every call starts with an empty
        KV cache. Inputs may be on any device, ids of any integer dtype; what comes back is on the model's device.

        seed: of the noise of sampled rows, which is a function of (seed, tensor-parallel group, row, position). None
            takes the next of a sequence that torch's initial seed (`torch.manual_seed`) starts, and starts again where
            it changes; torch's generators are not drawn from. The ranks of a group have the first one's initial seed:
            let them make the same calls. Where they share the model's own modules, the seed is the first rank's.
        Raises ValueError and NotImplementedError, in words, before anything runs.
        """
        following = self._seeds.next()  # at every call, so that ranks count alike
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
            store=self._pages,
            page_bytes=self._fused.page_bytes,
            require_memory=lambda rows, tokens: None,
            max_slots=self._max_slots,
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
        """The model's; transformers' pipelines ask the engine for it."""
        return self.module.generation_config

    def _shared_seed(self, seed: int) -> int:
        """This rank's seed; where ranks call with the same inputs, the first one's."""
        if self._group.size == 1 or self._fused.group is not None:
            return seed
        return int(self._group.share(torch.tensor(wrapped(seed), device=self._device)))

    @contextmanager
    def _request(self, tokens: int | None, why_native: str) -> Iterator[Decoder | None]:
        with self._calls.request(None, tokens, why_native) as decoder:
            yield TimedDecoder(decoder, self._times) if decoder is not None and self._times.enabled else decoder

    def train(self, mode: bool = True) -> "InferenceEngine":
        """`eval()`, for modules around this one. Raises RuntimeError where it is asked to train."""
        if mode:
            raise RuntimeError(
                "train(): an InferenceEngine does not train; hybrid.initialize makes an engine that does"
            )
        return super().train(False)

    @one_at_a_time
    def destroy(self) -> None:
        """Give the model its own forwards back, and free what was made beside its weights."""
        for container in self._containers:
            container.uninstall()
        for hook in self._own_hooks:
            hook.remove()
        self._graphs = None
        if self._spread is not None:
            self._spread.undo.close()
        self._snapshot.release()
        self._fused.release_pages()
        self._fused.release()
        self._kv_cache.release()
        self._pages.release()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: what runs is compiled already, or is the model's own layers under hooks."""
        raise NotImplementedError(
            "compile: an engine's containers are not compiled by torch; compile a model that is in no engine, or use "
            "replace_with_kernel_inject=true"
        )

    # ----------------------------------------------------------- inspection

    @property
    def mp_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that share heads and matrices; None where this one is alone."""
        return self._group.tensor.group

    @property
    def cuda_graph_created(self) -> bool:
        """Whether forwards have been captured."""
        return self._graphs is not None and bool(self._graphs.graphs)

    @property
    def model_profile_enabled(self) -> bool:
        """Whether `profile_model_time` was called."""
        return self._times.enabled

    @one_at_a_time
    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward from now on, in `generate` too, for `model_times`.

        use_cuda_events: by the device's own events, where it has them; else by the clock, waiting for the device.
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
        """Milliseconds of each forward since the last call. AssertionError where profiling is not enabled."""
        return self._times.taken()

    def coverage(self) -> list[dict[str, str]]:
        """What runs where: for each part of the model its `module` name, `kind`, `container` and why."""
        return coverage_of(self._containers, self._fused)


def open_weights(model: nn.Module, config: InferenceConfig, mixtures: dict[str, MoE]) -> Weights:
    """The checkpoint's tensors by the model's names for them."""
    shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
    stored = open_checkpoint(config.checkpoint, config.base_dir, config.training_mp_size, shapes)
    return Weights(model, own_experts(mixtures, stored), config.strict)


def made_by(model: nn.Module, device: torch.device) -> torch.Tensor | None:
    """What a model on `device` makes of a few tokens; None where it wants other inputs.  [tokens, n]"""
    try:
        return first_output(model, device)
    except UnsupportedModel:
        return None


def reader(model: nn.Module, weights: Weights | None, cast: Cast) -> Read:
    """Gives a tensor by its name in the model, as inference wants it: the checkpoint's, or else the model's own, which
    it keeps alive."""
    kept = stored_tensors(model) if weights is None else dict.fromkeys(weights.absent)
    own = {name: tensor.detach() for name, tensor in stored_tensors(model).items() if name in kept}

    def read(name: str) -> torch.Tensor:
        return cast(name, own[name] if weights is None or name in weights.absent else weights.read(name))

    return read


def leaves_open(module: nn.Module, inputs: tuple, kwargs: dict[str, Any], name: str) -> bool:
    """Whether a forward could be given `name` beside these arguments, which neither have it nor go on from a cache."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind_partial(*inputs, **kwargs).arguments
    except TypeError:
        return False  # the forward's own words for arguments that it cannot take
    free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    taken = {**bound, **kwargs}
    return name not in taken and taken.get("past_key_values") is None and (free or name in signature.parameters)


def timed_event() -> torch.cuda.Event:
    """An event of the device."""
    return torch.cuda.Event(enable_timing=True)


def nothing_to_join(adapters: bool) -> None:
    """Weights are whole, or slices that are there: a rank whose request was refused has nothing to gather."""


def first_tensor(output: Any) -> torch.Tensor:
    """A model's first output: logits of a model with a head, hidden states of one without; not its loss."""
    if isinstance(output, ModelOutput):
        return next(value for name, value in output.items() if name != "loss")
    if isinstance(output, tuple | list):  # a loss is the only one that is a number
        return next(value for value in output if value.dim() > 0)
    return output


def given_group(settings: TensorParallelConfig) -> torch.distributed.ProcessGroup | None:
    """The process group that the caller has for the ranks that share the weights."""
    return settings.tp_group if settings.mpu is None else settings.mpu.get_model_parallel_group()


def tensor_ranks(settings: TensorParallelConfig) -> int:
    """How many ranks share heads and matrices."""
    group = given_group(settings)
    if not settings.enabled:
        return 1
    return settings.tp_size if group is None else torch.distributed.get_world_size(group)


def expert_ranks(settings: MoEConfig) -> int:
    """Over how many parts experts are shared out."""
    return settings.ep_size if settings.enabled else 1


def ranks_sharing(config: InferenceConfig) -> int:
    """How many ranks share one copy of the weights."""
    return tensor_ranks(config.tensor_parallel) * expert_ranks(config.moe)


def sharing_group(config: InferenceConfig) -> InferenceGroup:
    """The ranks that share the weights: a group that is there already, or neighbours."""
    size = ranks_sharing(config)
    given = given_group(config.tensor_parallel) if expert_ranks(config.moe) == 1 else config.moe.ep_group
    ranks = tensor_ranks(config.tensor_parallel)
    return InferenceGroup(size, group=given if size > 1 else None, tensor_size=ranks)


def join_ranks(config: InferenceConfig) -> None:
    """Where ranks are to work together and a launcher has started them, let them find each other and their devices."""
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    wanted = config.tensor_parallel.tp_size * config.moe.ep_size > 1
    if wanted and launched and not torch.distributed.is_initialized():
        comm.init_distributed(get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))


def refuse_what_is_not_there(model: nn.Module, config: InferenceConfig) -> None:
    """Raise for settings that cannot be followed, before anything is changed."""
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
    refuse_experts_that_are_not_there(model, config)
    size = ranks_sharing(config)
    if size > 1:
        refuse_what_cannot_be_shared(model, config, size)
    if not config.triangular_masking and looks_back_only(model):
        raise NotImplementedError("triangular_masking: false given; the model is a decoder, which looks back only")


def refuse_partitioning(zero: dict[str, Any]) -> None:
    """Raise where ZeRO is to keep weights partitioned; warn where it has nothing to do."""
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
    if stage or zero.keys() - {"stage", "leaf_module", "overlap_comm"}:  # DeepSpeed's object always says the last two
        warnings.warn(f"zero: {zero} given; it has no effect, nothing is trained here", stacklevel=6)


def refuse_ranks_that_are_not_there(settings: TensorParallelConfig) -> None:
    """Raise ValueError where the ranks that are to share the weights are not those that there are."""
    size, group = settings.tp_size if settings.enabled else 1, given_group(settings)
    if group is not None:
        found = torch.distributed.get_world_size(group)
        if "tp_size" in settings.model_fields_set and settings.tp_size != found:
            raise ValueError(f"tensor_parallel.tp_size: {size} given; the group that is given too has {found} ranks")
        return
    if world_size() % size:
        raise ValueError(f"tensor_parallel.tp_size: {size} given; it must divide the world size, {world_size()}")


def refuse_experts_that_are_not_there(model: nn.Module, config: InferenceConfig) -> None:
    """Raise where experts cannot be shared out as `moe` says, or are not as many."""
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
    count = read_decoder(model).spec.num_experts if is_decoder(model) else 0
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
    """Raise where DeepSpeed's layers have their experts otherwise than `moe` says."""
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
    """Raise for a model, or settings, that int8 is not there for."""
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


def refuse_what_cannot_be_shared(model: nn.Module, config: InferenceConfig, size: int) -> None:
    """Raise for a model, or settings, that ranks cannot share the weights of."""
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
    if fallback_reason := why_no_fused_slices(model, config):
        require_spreadable(model, size, fallback_reason)
        return
    spec, ranks = read_decoder(model).spec, tensor_ranks(config.tensor_parallel)
    require_divisible(spec.num_heads, spec.num_kv_heads, ranks, "tensor_parallel.tp_size")


def why_no_fused_slices(model: nn.Module, config: InferenceConfig) -> str:
    """Words, where ranks share the model's own modules; "" where they share a fused decoder."""
    if config.injection_policy is not None:
        return "injection_policy is given"
    if config.dtype == torch.int8:
        return "fused slices are not in int8"
    try:
        read_decoder(model)
    except UnsupportedModel as reason:
        return f"no fused container: {reason}"
    if config.replace_with_kernel_inject or expert_ranks(config.moe) > 1:  # the model's own modules keep all experts
        return ""
    try:
        read_tp_plan(model)
    except UnsupportedModel:  # what its layers are called would be a guess, and the decoder knows
        return ""
    return "replace_with_kernel_inject=false"


def require_spreadable(model: nn.Module, size: int, fallback_reason: str) -> None:
    """Raise where a model's own modules cannot be spread over ranks.  why_not: words, why no decoder of ours is."""
    try:
        Spread(model, size)
    except UnsupportedModel as why:
        raise NotImplementedError(
            f"tensor_parallel: {size} ranks given; the modules of {type(model).__name__} cannot be spread over ranks "
            f"({why}), and fused slices are not there ({fallback_reason}): give injection_policy, or use tp_size=1"
        ) from why


def looks_back_only(model: nn.Module) -> bool:
    """Whether a model has attention, its decoder's for one, that is causal.

    Hugging Face's attention says so; BLOOM's and others' do not, whose kind of model is known as a decoder's alone
    (transformers 5.23).
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    decoders_alone = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    generates = isinstance(model, PreTrainedModel) and model.can_generate()
    return True in said if said else generates or kind in decoders_alone


def is_decoder(model: nn.Module) -> bool:
    """Whether a fused container knows the model."""
    try:
        read_decoder(model)
    except UnsupportedModel:
        return False
    return True
