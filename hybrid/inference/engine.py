"""`hybrid.init_inference` and its InferenceEngine: DeepSpeed's inference API over this project's decoders."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hybrid.config import InferenceConfig, RolloutConfig, read_inference_config
from hybrid.decoders.fused_model import FusedModel
from hybrid.execution.collective_forwards import ExpertForwards, LayerwiseForwards
from hybrid.execution.containers import containers_of, coverage_of, parts_of
from hybrid.execution.deepspeed_moe import exchange_tokens, expert_layers
from hybrid.execution.executor import Executor, GroupExecutor
from hybrid.execution.generator import Generator
from hybrid.execution.rank_waits import RankWaits
from hybrid.execution.sleep import Sleep
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.generate import TooManyTokensError, prompts_of
from hybrid.generation.scoring import Distributions, Scores
from hybrid.inference.build import LoadedModel, ModelLoader
from hybrid.inference.loader import Cast, materialize, restored_on_error
from hybrid.inference.validation import inference_group, join_ranks, validated
from hybrid.kernels.cuda_graph import GraphedForward
from hybrid.models.model_info import ModelInfo
from hybrid.models.model_inputs import ModelInputs
from hybrid.runtime.call_lock import CallLock, with_call_lock
from hybrid.runtime.extension_lock import extension_lock_reported
from hybrid.runtime.inputs import as_model_inputs
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.memory import free_bytes
from hybrid.runtime.parallel import InferenceGroup, all_gather_objects, engine_name
from hybrid.runtime.profiling import ModelTimes, Profiler
from hybrid.sampling.sampler import Seeds, wrapped
from hybrid.serving.server import Server
from hybrid.weights.host_tensors import tensors_in
from hybrid.weights.weight_swap import InferenceWindow


@extension_lock_reported()
def init_inference(
    model: nn.Module, config: str | Path | dict[str, Any] | BaseModel | None = None, **kwargs: Any
) -> "InferenceEngine":
    """Build an InferenceEngine. Takes the arguments of `deepspeed.init_inference`.

    Args:
        model: any module; Hugging Face models of known families run fused if `replace_with_kernel_inject` is true. The
            model is changed: cast to `dtype`, moved to the device, and put in eval mode.
        config: DeepSpeed's inference settings: a dict, the path of a JSON file or a `DeepSpeedInferenceConfig`.
        kwargs: further settings.

    Raises:
        ValueError: for invalid settings, with key, value and what is allowed; the model is then unchanged.
        NotImplementedError: for unsupported settings; the model is then unchanged.
    """
    return InferenceEngine(model, read_inference_config(config, kwargs))


class InferenceEngine(nn.Module):
    """An engine that runs forwards and generates, and does not train. Built by `hybrid.init_inference`.

    Its fields are many: DeepSpeed's public names (`module`, `config`, `mpu`, ...), and the parts that run a request.
    Threads may share an engine: their calls run one at a time, in the order in which they were made.

    Args:
        model: as for `init_inference`.
        config: like `model`.
    """

    # DeepSpeed's (0.19.8); the same value in every engine.
    local_cuda_graph = is_compiled = False
    quantization_scales = ep_group = expert_mp_group = None
    quantize_merge_count = 1
    _executor: Executor
    _fused: FusedModel
    _graphs: GraphedForward | None

    def __init__(self, model: nn.Module, config: str | Path | dict[str, Any] | BaseModel | None = None):
        settings = config if isinstance(config, InferenceConfig) else read_inference_config(config, {})
        super().__init__()
        self.call_lock = CallLock()
        with restored_on_error(model, with_values=not settings.set_empty_params):
            self._build(model, settings.model_copy(update={"dtype": getattr(torch, settings.dtype)}))

    @property
    def device(self) -> torch.device:
        """The device that inputs are moved to."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations; with int8 weights, that of the model's own weights."""
        return self._dtype

    def can_generate(self) -> bool:
        """Whether the model has Hugging Face's `generate`; `transformers.pipeline` asks."""
        return getattr(self.module, "can_generate", bool)()

    def _build(self, model: nn.Module, config: InferenceConfig) -> None:
        """Load, cast and place the model as the settings say, and install its containers."""
        materialize(model, [], torch.device("cpu"))  # non-persistent buffers of a model on the meta device
        moe_layers = expert_layers(model)
        join_ranks(config)
        info = ModelInfo(model)
        config = validated(info, config, moe_layers)
        self._exchange = exchange_tokens(moe_layers)
        self.module, self._config = model, config
        self.config = getattr(model, "config", None) if config.config is None else config.config
        self.mpu, self.injection_dict = config.tensor_parallel.mpu, config.injection_policy
        self._group = inference_group(config)
        self._device = torch.device("cpu" if config.keep_module_on_host else get_accelerator().current_device_name())
        self.call_lock.device = self._device
        self._dtype = Cast(model, config.dtype, None).dtype
        self._sleep = self._make_sleep()
        self.eval()
        self._install(ModelLoader(info, config, moe_layers, self._group, self._device).load())
        with torch.no_grad(), self._executor.request(tokens=1):  # runs the self-check
            pass
        if self._fused.group is not None and not self._fused.checked:
            raise NotImplementedError(
                f"{self._group.size} ranks share the weights, but {self._fused.fallback_reason_now()}"
            )
        self._share_seed()
        if config.enable_cuda_graph is True and self._fused.fallback_reason:
            self._graphs = GraphedForward(model)
        elif config.enable_cuda_graph is True and not self._fused.has_graphs:
            raise NotImplementedError(f"enable_cuda_graph: true given; {self._fused.description} has no graphs")

    def _install(self, loaded: LoadedModel) -> None:
        """Build and install the containers over the loaded weights, which do not change from here on."""
        defaults = RolloutConfig(speculation=self._config.speculation)
        synchronize = get_accelerator().synchronize
        name = engine_name()
        self._waits = RankWaits(name, defaults.wait_report_s, self.call_lock)
        self._profiler = Profiler(name, synchronize)
        make_event = partial(torch.cuda.Event, enable_timing=True) if torch.cuda.is_available() else None
        self._times = ModelTimes(synchronize, make_event)
        self._own_hooks: list[RemovableHandle] = []
        self._graphs = None
        self._snapshot, self._close = loaded.snapshot, loaded.close
        adapted = bool(loaded.snapshot.adapted)
        self._window = InferenceWindow(
            self.module,
            loaded.snapshot,
            self._profiler,
            swaps=adapted,
            merges=adapted,
            device=self._device,
            require_awake=self._sleep.require_awake,
        )
        max_capture_size = defaults.max_num_seqs if self._config.enable_cuda_graph else 0
        group = None if loaded.slices is None else self._group
        self._fused = FusedModel(
            loaded.info,
            loaded.snapshot,
            max_capture_size,
            group,
            lambda: self._own_hooks,
            fallback_reason=loaded.fallback_reason,
            warns=self._config.replace_with_kernel_inject or group is not None,
            trusts_forwards=self._config.trust_forward,
        )
        self._executor = self._make_executor(loaded)
        self._generator = Generator(
            self._profiler,
            BlockPool(defaults.kv_step, free_bytes=free_bytes),
            self._config,
            defaults,
            times=self._times,
            key_range=self._group.tensor.number,
            seed_group=self._group if self._group.size > 1 and group is None else None,
        )
        self._generator.attach(loaded.info, self._executor, expands=self._exchange is None)
        self._containers = containers_of(parts_of(loaded.info), self._executor)
        for container in self._containers:
            container.install()
        self._waits.built(self._decoding_groups)

    def _decoding_groups(self) -> list[InferenceGroup]:
        """Return the groups whose ranks compute together."""
        return [] if self._fused.group is None else [self._fused.group]

    def _make_sleep(self) -> Sleep:
        shared = self._exchange if self._exchange is not None else self._group if self._group.size > 1 else None
        return Sleep(
            self._device,
            free=self._free_inference,
            tensors=lambda: (tensors_in(self.module, self._snapshot.parts), ()),  # a rank's slices are in the snapshot
            refusal=self._request_refusal,
            exchange=partial(all_gather_objects, group=shared.group) if shared else lambda value: [value],
            moving=nullcontext,
        )

    def _make_executor(self, loaded: LoadedModel) -> Executor:
        """Return the runner of requests: for this rank alone, or for the ranks whose forwards are collectives."""
        # No weights are gathered here, so a rank whose request was rejected has no gathers to join.
        own = (self._window, self._fused, self.call_lock, lambda: False)
        if self._exchange is not None:
            experts = ExpertForwards(self.module, self._exchange, self._device)
            return GroupExecutor(*own, self._exchange.group, experts, self._profiler.phase)
        if loaded.slices is not None:
            steps = LayerwiseForwards(
                loaded.info.structure,
                self._profiler.phase,
                self._profiler.gathered,
                self._device,
                group=self._group.group,
                whole=loaded.slices.whole,
                before_forward=self._note_gathering,
            )
            return GroupExecutor(*own, self._group.group, steps, self._profiler.phase)
        executor = Executor(*own)
        executor.is_joint = self._group.size > 1
        return executor

    def _note_gathering(self) -> None:
        if self._fused.checked:  # else this is the self-check
            self._fused.note_fallback(
                f"its layers are gathered from {self._group.size} ranks' slices at every forward (ask for logits "
                "alone: leave out labels, output_hidden_states, use_cache and return_dict_in_generate, and give "
                "position_ids where rows are padded on the left; hybrid.padded_forward makes them)"
            )

    def _share_seed(self) -> None:
        """Give all ranks of a tensor-parallel group the first rank's initial seed and device RNG state, as DeepSpeed
        does: sampling by the caller from equal logits then gives equal tokens."""
        if self._group.tensor.size > 1:
            accelerator = get_accelerator()
            state = accelerator.get_rng_state().to(self._device)
            accelerator.set_rng_state(self._group.tensor.share(state).cpu())
        initial = torch.tensor(wrapped(torch.initial_seed()), device=self._device)
        self._generator.seeds = Seeds(int(self._group.tensor.share(initial)))

    @with_call_lock
    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output, or with `return_tuple=false` its first tensor. Without gradients.

        If a fused container or a graph runs, `use_cache` defaults to False: no cache is returned.
        """
        self._sleep.require_awake("forward()")
        inputs, kwargs = as_model_inputs(inputs, kwargs, self._device)
        native = self._fused.fallback_reason and self._graphs is None
        if not native and accepts_use_cache(self.module, inputs, kwargs):
            kwargs["use_cache"] = False
        if self._graphs is None:
            output = self.module(*inputs, **kwargs)
        else:
            with self._times.forward() if self._times.enabled else nullcontext():
                output = self._graphs(*inputs, **kwargs)
        return output if self._config.return_tuple else first_tensor(output)

    @with_call_lock
    def generate(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Run Hugging Face's `generate`, with its arguments and results. Every call starts with an empty KV cache.

        Inputs may be on any device and ids of any integer dtype; the output is on the model's device.

        Args:
            seed: keys the sampling RNG together with the tensor-parallel group, the row and the position. None: the
                next seed of a sequence that starts from torch's initial seed (`torch.manual_seed`), and restarts when
                that changes; torch's generators are not drawn from. The ranks of a group use the first rank's initial
                seed and must make the same calls. If they share the model's own modules, the first rank's seed is used.

        Raises:
            ValueError: for invalid arguments or too many tokens (see `max_out_tokens`), before anything runs.
            NotImplementedError: for unsupported modes, before anything runs.
        """
        self._sleep.require_awake("generate()")
        following = self._generator.seeds.next()  # at every call, so that the ranks stay in step
        with self._executor.call():
            prompts = prompts_of(self.module, args, kwargs)
            most, least = self._config.max_out_tokens, self._config.min_out_tokens
            if prompts is not None and prompts.shape[1] + least > most:
                raise TooManyTokensError(
                    f"generate: behind a prompt of {prompts.shape[1]} tokens there is no room for "
                    f"min_out_tokens={least} more in max_out_tokens={most}; raise max_out_tokens, or give a shorter "
                    "prompt"
                )
            return self._generator.generate(args, kwargs, seed=following if seed is None else seed)

    def serve(self, max_num_seqs: int | None = None, max_model_len: int | None = None, max_queue: int = 1024) -> Server:
        """Return a server of requests that come one by one; arguments and errors as `HybridEngine.serve`."""
        self._generator.info.require_decoder("serve")
        settings = None, max_num_seqs, max_model_len, max_queue
        return Server(self._generator, self._serving_call, self.call_lock, *settings)

    @contextmanager
    def _serving_call(self) -> Iterator[None]:
        with self.call_lock.call():
            self._sleep.require_awake("serve()")
            with self._executor.call():
                yield

    @with_call_lock
    def score(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        temperature: float = 1.0,
        rows_per_forward: int = 16,
        model_inputs: ModelInputs | None = None,
        top_logprobs: int = 0,
    ) -> Scores:
        """Return the logprob and the entropy of every token of given sequences except the first, for a reference model.

        A prefix that sequences have in common is computed once, and logits exist for a few hundred tokens at a time.
        Ranks that share the weights make the same calls, with the same sequences.

        Args:
            sequences: token ids, [rows, tokens], padded on either or both sides, of any integer dtype and device.
            attention_mask: [rows, tokens].
            temperature: divides the logits; above 0, in float32's normal range.
            rows_per_forward: maximum rows computed together.
            model_inputs: as in `HybridEngine.score`.
            top_logprobs: as in `HybridEngine.score`.

        Returns:
            Scores, [rows, tokens - 1] each, 0 where masked.

        Raises:
            TypeError: for invalid sequences or numbers.
            ValueError: likewise, for a token in whose place the model reads an image, a video or sound, and for a model
                without a language-modelling head.
            NotImplementedError: for an encoder-decoder.
        """
        self._sleep.require_awake("score()")
        self._generator.info.require_decoder("score")
        with self._executor.call():
            arguments = sequences, attention_mask, None, temperature, rows_per_forward
            return self._generator.score(*arguments, model_inputs, top_logprobs)

    @with_call_lock
    def score_distribution(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        temperature: float = 1.0,
        rows_per_forward: int = 16,
    ) -> Distributions:
        """Return the distribution of every token of given sequences except the first, for a teacher.

        Kept are hidden states, [tokens, hidden], common prefixes once; `logits(rows, columns)` of the result computes
        the logits of some tokens, as long as the engine is awake. Never [rows, tokens, vocabulary].

        Args:
            sequences: token ids, [rows, tokens], as in `score`.
            attention_mask: [rows, tokens].
            temperature: divides the logits.
            rows_per_forward: maximum rows computed together.

        Raises:
            TypeError: for invalid sequences or numbers.
            ValueError: likewise.
            NotImplementedError: without a fused decoder, and where ranks share the weights; `score(top_logprobs=k)` is
                available there.
        """
        self._sleep.require_awake("score_distribution()")
        self._generator.info.require_decoder("score_distribution")
        with self._executor.call():
            kept = self._generator.score_distribution(sequences, attention_mask, temperature, rows_per_forward)

        def head(hidden: torch.Tensor) -> torch.Tensor:
            with self.call_lock.call():
                self._sleep.require_awake("Distributions.logits()")
                return kept.head(hidden)

        return replace(kept, head=head)

    def train(self, mode: bool = True) -> "InferenceEngine":
        """Only `train(False)`, i.e. `eval()`, is supported. Raises RuntimeError if `mode` is True."""
        if mode:
            raise RuntimeError(
                "train(): an InferenceEngine does not train; hybrid.initialize makes an engine that does"
            )
        return super().train(False)

    @with_call_lock
    def sleep(self, level: int = 1) -> None:
        """Let the engine leave the device, so that another model can use the memory. The ranks of a group call it
        together.

        Args:
            level: 1 frees what is made anew after `wake()`: the KV cache, merged adapters, decoders and CUDA graphs.
                2 moves the weights to the host in addition. Their objects stay and can be read, on the host.

        In vLLM level 1 does what 2 does here, and 2 drops the weights, of which this engine has the only copy.

        Nothing wakes by itself. While the engine sleeps, `generate`, forwards and at level 2 `coverage` raise
        RuntimeError, with the remedy; `destroy()` works, and leaves the weights on the host. A deeper level may follow;
        the same or a lower one does nothing. Results after `wake()` are those before.
        Memory that tensors outside of the engine share stays on the device, with a warning.

        Raises:
            ValueError: for another level.
            RuntimeError: inside a request, and if ranks' calls differ or fail: then nothing has moved.
        """
        self._sleep.begin(level)

    @with_call_lock
    def wake(self) -> None:
        """End sleep: the weights are on the device again. Does nothing if the engine is awake.

        Raises torch's error if the device has too little memory: then the engine sleeps on; free memory and call it
        again.
        """
        self._sleep.end()

    @property
    def asleep(self) -> int:
        """The level at which the engine sleeps; 0 if it is awake."""
        return self._sleep.level

    def _request_refusal(self, call: str) -> RuntimeError | None:
        """Return the error of a call that must not be made inside a request; None outside of one."""
        if not self._window.is_open:
            return None
        return RuntimeError(f"{call} inside a request, by a hook or a streamer: call it when the request has ended")

    def _free_inference(self) -> None:
        """Free all that the next request can make again. Slices of weights (tensor parallelism) cannot be."""
        if self._graphs is not None:
            self._graphs = GraphedForward(self.module)
        self._fused.release()
        self._generator.release_kv()
        if self._snapshot.weights.groups:
            self._snapshot.release()

    def destroy(self) -> None:
        """Put the model's own forwards back, and free the KV cache, buffers, graphs and hooks of the engine. Later
        calls raise RuntimeError."""
        with self.call_lock, INTERRUPTS.held():
            self._destroy()
            self.call_lock.refusal = "destroy() has ended this engine; hybrid.init_inference builds another one"

    def _destroy(self) -> None:
        for container in self._containers:
            container.uninstall()
        for hook in self._own_hooks:
            hook.remove()
        self._waits.stop()
        self._graphs = None
        self._close()
        self._snapshot.release()
        self._fused.release()
        self._generator.release_kv()
        self._group.close()

    def coverage(self) -> list[dict[str, str]]:
        """Return what runs the model.

        Returns:
            For each part its `module` name, its `kind`, the `container` that runs it, and the reason.

        Raises:
            RuntimeError: asleep at level 2.
        """
        self._sleep.require_awake("coverage()", level=2)
        return coverage_of(self._containers, self._fused)

    # Further methods and attributes of DeepSpeed's InferenceEngine (0.19.8).

    @property
    def mp_group(self) -> torch.distributed.ProcessGroup | None:
        """The tensor-parallel group; None if this rank is alone in it."""
        return self._group.tensor.group

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's generation config, which transformers' pipelines read from the engine."""
        return self.module.generation_config

    @property
    def cuda_graph_created(self) -> bool:
        """Whether a forward has been captured as a CUDA graph."""
        return self._graphs is not None and len(self._graphs.graphs) > 0

    @property
    def model_profile_enabled(self) -> bool:
        """Whether `profile_model_time` was called."""
        return self._times.enabled

    @with_call_lock
    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward from now on, also inside `generate`; `model_times` gives the results.

        Args:
            use_cuda_events: use CUDA events if there are any; otherwise the clock, with a device synchronization.
        """
        if not self._times.enabled and self._graphs is None:
            self._own_hooks += [
                self.module.register_forward_pre_hook(self._times.begin),
                self.module.register_forward_hook(self._times.end),
            ]
        self._times.enable(use_cuda_events)

    @with_call_lock
    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward since the last call.

        Raises:
            AssertionError: if profiling is not enabled.
        """
        return self._times.taken()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(
            "compile: an engine's containers are not compiled by torch; compile a model that is in no engine, or use "
            "replace_with_kernel_inject=true"
        )


def accepts_use_cache(module: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether `use_cache` can be added to a forward's arguments: the forward accepts it, it is not among them, and they
    do not continue from a cache."""
    params = inspect.signature(module.forward).parameters
    try:
        bound = inspect.signature(module.forward).bind_partial(*inputs, **kwargs).arguments
    except TypeError:
        return False  # invalid arguments: the forward itself raises the error
    accepts = "use_cache" in params or any(param.kind is param.VAR_KEYWORD for param in params.values())
    arguments = {**bound, **kwargs}
    return accepts and "use_cache" not in arguments and arguments.get("past_key_values") is None


def first_tensor(output: Any) -> torch.Tensor:
    """Return a model's first output other than the loss: logits, or the hidden states of a model without a head."""
    if isinstance(output, ModelOutput):
        return next(value for name, value in output.items() if name != "loss")
    if isinstance(output, tuple | list):  # the loss is the only scalar
        return next(value for value in output if value.dim() > 0)
    return output
