"""HybridEngine: DeepSpeed's training engine that also generates. Switches modes and delegates to the components."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.config import HybridEngineConfig, InvalidSetting, RolloutConfig, check_settings
from hybrid.execution.collective_forwards import CollectiveForwards, ExpertForwards, LayerwiseForwards
from hybrid.execution.deepspeed_moe import exchange_tokens, expert_layers
from hybrid.execution.executor import Executor, GroupExecutor
from hybrid.execution.generator import Generator
from hybrid.execution.module_exchange import ModuleExchange
from hybrid.execution.rank_waits import RankWaits
from hybrid.execution.sleep import Sleep
from hybrid.execution.stream import Stream, TokenStreamer
from hybrid.execution.tp_modules import SharedModules
from hybrid.generation.generate import GeneratePatch
from hybrid.generation.scoring import LayerInputScores, Scores
from hybrid.models.model_info import ModelInfo
from hybrid.models.model_inputs import ModelInputs
from hybrid.models.modules import prompt_encoders
from hybrid.models.quantized import keep_formats, without_scales
from hybrid.models.structure import generating_part
from hybrid.rollout import EnvironmentLimits, RolloutBatch, SamplingParams, StopAfter, UnfinishedRows
from hybrid.runtime.call_lock import CallLock, with_call_lock
from hybrid.runtime.inputs import DIVISOR, checked_number, is_divisor
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import (
    InferenceGroup,
    all_gather_objects,
    any_rank,
    engine_name,
    limit_waits,
    lost_rank_reported,
    world_size,
)
from hybrid.runtime.profiling import Profiler
from hybrid.serving.server import Server
from hybrid.training.builder import Builder
from hybrid.training.compiled_layers import CompiledLayers, declared_layers
from hybrid.training.deepspeed_api import DeepSpeedMethods
from hybrid.training.inference_runtime import InferenceRuntime, WeightChanges
from hybrid.training.invalid_settings import invalid_attention, invalid_for_model, invalid_invariance, invalid_sharing
from hybrid.training.logps import FORWARDS, Logps, TokenLoss, TokenLosses, TrainingForwards
from hybrid.training.memory_plan import MemoryPlan, MemoryPlanner
from hybrid.training.packed_forwards import target_tokens
from hybrid.training.sequence_parallel import SequenceParallel
from hybrid.training.values import VALUE_FORWARDS, ValueForwards
from hybrid.weights.export import save_pretrained
from hybrid.weights.gather import partition_groups
from hybrid.weights.host_tensors import tensors_in
from hybrid.weights.module_dicts import ModuleTree
from hybrid.weights.named_adapters import RowNames, chosen_adapters
from hybrid.weights.offload import TrainingStates, require_movable_optimizer, scratch


class HybridEngine(DeepSpeedMethods, DeepSpeedEngine):
    """DeepSpeed's engine for ZeRO 0-3, whose model also generates, fast and in the same process.

    In train mode it is DeepSpeed's engine. In eval mode forwards run without gradients over a snapshot of the weights,
    which is gathered once per weight version, with adapters merged. Training storage is only read. Built by
    `hybrid.initialize`.

    Threads may share the engine: their calls run one at a time, in the order in which they came, and
    `with inference()` keeps other threads out until it ends. The caller must keep other threads out of a sequence of
    calls such as forward, backward, step. Calls that are collectives (all calls, if `in_step`; under ZeRO-3 the first
    one after a step, and with merged adapters the first one with other `adapters`) must come in the same order on every
    rank.
    """

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        *,
        blocks: tuple[HybridEngineConfig, RolloutConfig],
        sequence_parallel_size: int = 1,
        **kwargs: Any,
    ):
        self.call_lock = CallLock()
        # Read again below: DeepSpeed casts the model, and a decoder's constants depend on the dtype (Gemma).
        info = ModelInfo(generating_part(model))
        check_settings(invalid_for_model(info, *blocks))
        check_settings(invalid_sharing(info, sequence_parallel_size))
        mpu_group = group_of_mpu(kwargs.get("mpu"), blocks[0].inference_tp_size)
        keep_formats(model)
        super().__init__(args, model, **kwargs)
        self.call_lock.device = self.device
        self._settings, self._rollout_settings = blocks
        if self._rollout_settings.offload_states:
            require_movable_optimizer(self.optimizer)
        self._in_eval = False
        name = engine_name()
        self._waits = RankWaits(name, self._rollout_settings.wait_report_s, self.call_lock)
        self._profiler = Profiler(name, get_accelerator().synchronize)
        self._builder = Builder(
            generating_part(self.module),
            *blocks,
            self.zero_optimization_stage(),
            self._profiler.phase,
            self._profiler.gathered,
            partial(training_hooks, self),
        )
        check_settings(invalid_attention(self._builder.info, self._rollout_settings))
        check_settings(invalid_invariance(self._builder.info, *blocks))
        self._planner = MemoryPlanner(self._builder)
        self._generator = self._make_generator()
        inner = getattr(self, "basic_optimizer", None)  # inside DeepSpeed's
        self._sleep = Sleep(
            self.device,
            free=lambda: self._runtime.free(),
            tensors=lambda: (tensors_in(self.module, self.optimizer, inner), scratch(self.optimizer)),
            refusal=lambda call: self._runtime.window.error_inside(call),
            exchange=all_gather_objects if world_size() > 1 else lambda value: [value],
            moving=lambda: self._changes.ignoring(),  # addresses change, values do not
        )
        tree = ModuleTree(self.module)
        self._changes = WeightChanges(self._policy, tree, self._builder.version, self._sleep, inner)
        offloads = self._rollout_settings.offload_states
        self._exchange = exchange_tokens(expert_layers(self._policy))
        self._group = InferenceGroup(self._planner.in_use.tp_size, group=mpu_group)
        sharing = SequenceParallel(sequence_parallel_size) if sequence_parallel_size > 1 else None
        self._sequence_parallel = sharing
        if sharing is not None:
            self.seq_parallel_group = sharing.group.group  # of DeepSpeed's get_sequence_parallel_group()
        if self._rollout_settings.wait_timeout_s is not None and world_size() > 1:
            shared = [None, self._group.group, self._group.tensor.group, getattr(self._exchange, "group", None)]
            shared += [] if sharing is None else [sharing.group.group]
            groups = (*shared, *partition_groups(self.module.parameters()))
            limit_waits(groups, self._rollout_settings.wait_timeout_s)
        self._runtime = InferenceRuntime(
            self._planner,
            self._generator,
            self._group,
            self.device,
            self._profiler,
            self._changes,
            TrainingStates(self, self._profiler.phase) if offloads else None,
            self._sleep.require_awake,
            partial(autocast_if_enabled, self),
            self._connect,
        )
        self._waits.built(self._runtime.decoding_groups)
        self._forwards = TrainingForwards(
            self,
            self.module,
            self._policy,
            self._builder.info.text_layers,
            any_rank=lambda flag: any_rank([flag], self.device)[0],
            modules=tree.listed,
            score_with_layer_inputs=self._score_with_layer_inputs,
            ranks=sharing,
        )
        self._value_forwards = ValueForwards(self, self.module, self._forwards.any_rank, tree.listed, sharing)
        self._patches: list[GeneratePatch | CompiledLayers] = []
        if self._builder.info.can_generate:
            self._patches.append(GeneratePatch(self._policy, self.generate))
        if isinstance(head := getattr(self.module, "score", None), nn.Module):
            # A sequence classifier's head: TRL's PPO trainer reads it through DeepSpeed's engine.
            self.__dict__["score"] = head

    @property
    def _policy(self) -> nn.Module:
        """The part of the module that generates. Not an attribute: the engine, an nn.Module, would register it."""
        return self._builder.info.model

    def _connect(self, runtime: InferenceRuntime, shared: SharedModules | None) -> Executor:
        """Make the executor of a runtime, and attach the generator to it."""
        executor = self._make_executor(runtime, shared)
        self._generator.attach(self._builder.info, executor, expands=shared is None and self._exchange is None)
        return executor

    def _make_executor(self, runtime: InferenceRuntime, shared: SharedModules | None) -> Executor:
        """Return what runs requests: of this rank alone, or of all ranks that compute together."""
        own = (runtime.window, runtime.fused, self.call_lock, runtime.rebuild_if_changed)
        if not self.in_step:
            return Executor(*own, runtime.int8)
        partitioned, group = self.zero_optimization_stage() == 3, self._group.group
        native: ModuleExchange | CollectiveForwards | None = None if shared is None else shared.exchange
        if self._exchange is not None:
            native, group = ExpertForwards(self._policy, self._exchange, self.device), self._exchange.group
        elif runtime.streams and partitioned:
            native = LayerwiseForwards(
                self._builder.info.structure,
                self._profiler.phase,
                self._profiler.gathered,
                self.device,
                self._rollout_settings.sync_interval,
                hooks=self._builder.own_hooks,
                held=prompt_encoders(self._policy),
            )
        # Gathering partitioned weights is a collective of all ranks, not only of the group.
        group = None if partitioned else group
        return GroupExecutor(*own, group, native, self._profiler.phase, runtime.int8)

    def _make_generator(self) -> Generator:
        return Generator(
            self._profiler,
            self._planner.make_block_pool(),
            self._settings,
            self._rollout_settings,
            require_memory=self._planner.require,
            runs_other_methods=True,
        )

    # ---------------------------------------------------------------- modes

    @with_call_lock
    def eval(self) -> None:
        """Switch to eval mode: forwards run in the inference containers, without gradients.

        From the second iteration on, rank 0 prints the summary line of DeepSpeed's hybrid engine.

        Raises:
            RuntimeError: while the engine sleeps.
        """
        self._sleep.require_awake("eval()")
        if not self._runtime.window.is_open:
            self._profiler.next_iteration()
            self._builder.fallback_reasons.reset()
            self._runtime.rebuild_if_changed()
        self._runtime.install()
        self._in_eval = True
        super().eval()

    @with_call_lock
    def train(self, mode: bool = True) -> None:
        """Switch to train mode: the model has its own forwards, and this is DeepSpeed's engine.

        Args:
            mode: False calls `eval()`.

        Raises:
            RuntimeError: inside `inference()`.
        """
        if not mode:
            self.eval()
            return
        self._runtime.window.require_closed("train()")
        self._runtime.uninstall()
        self._in_eval = False
        super().train()
        self._runtime.release()

    @contextmanager
    def inference(self, adapters: bool | None = None, adapter: str | None = None) -> Iterator["HybridEngine"]:
        """Open an inference window: the snapshot is refreshed once, and nothing is gathered again inside the block, but
        for calls with other `adapters` or another `adapter` under ZeRO-3: one copy holds the weights merged with one
        adapter, or their base.

        Afterwards the engine is in its previous mode, even after an exception. The next call inside the block sees
        adapters that were switched, disabled or scaled there (PEFT's `set_adapter`, `disable_adapter()`), and weights
        that were written.

        Args:
            adapters: None uses the model's active adapters; False runs the base model (a LoRA policy's reference).
            adapter: the name of the adapter of PEFT that calls in the block use, as in `rollout`.

        Raises:
            ValueError: for the name of no adapter.
            RuntimeError: at the next call or at the end of the block, for changes that it cannot follow: adapters
                merged, added or deleted, a cast model, writes to the parameters that the model has inside, which are
                inference's copies; and, where ranks compute together, for adapters that differ by rank.
        """
        with self.call_lock.call(), self._eval_mode(), ExitStack() as stack:
            chosen, executor = chosen_adapters(adapters, adapter), self._runtime.executor
            with executor.call(chosen):
                self._runtime.window.named.require_given(adapters, adapter)
            stack.enter_context(executor.block(chosen))
            stack.enter_context(INTERRUPTS.released())
            yield self

    @contextmanager
    def _call(
        self, adapters: bool | None, adapter: str | None = None, adapter_names: Sequence[str] | None = None
    ) -> Iterator[None]:
        """Run a user's call, in eval mode. If it fails, this rank still joins the other ranks' collectives."""
        chosen = chosen_adapters(adapters, adapter) if adapter_names is None else RowNames(adapter_names)
        with self.call_lock.call(), self._eval_mode(), autocast_if_enabled(self), self._runtime.executor.call(chosen):
            self._runtime.window.named.require_given(adapters, adapter, adapter_names)
            yield

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Eval mode inside the block; afterwards every module's `training` flag is restored."""
        self._sleep.require_awake("inference")
        self._runtime.rebuild_if_changed()
        if self._in_eval or self._runtime.window.is_open:
            try:
                yield
            finally:
                if self._settings.release_inference_cache and not self._runtime.window.is_open:
                    self._generator.release_kv()
                    get_accelerator().empty_cache()
            return
        with self._changes.tree.evaluating():
            try:
                self._runtime.install()
                yield
            finally:
                self._in_eval = False
                self._runtime.uninstall()
                self._runtime.release()

    @with_call_lock
    def sleep(self, level: int = 1) -> None:
        """Let inference, or the whole engine, leave the device, so that another model can use the memory. A collective.

        Args:
            level: 1 frees what inference holds: the KV cache, the snapshot, the int8 copy, decoders and their CUDA
                graphs; the next rollout after `wake()` makes them again. The engine trains, saves and loads as usual.
                2 moves to the host in addition: weights (partitions under ZeRO-3), master weights, optimizer states and
                gradients, at every ZeRO stage and with any optimizer. Their objects stay and can be read, on the host.
                States that ZeRO keeps on the host stay there. On CPU ranks, whose device is the host, level 2 frees no
                more than 1.

        vLLM's levels, for its own copy of the weights: 1 moves it to the host, 2 drops it. Here that copy is the
        snapshot, which is dropped at both levels, because the weights that it is made from are here.

        Nothing wakes by itself. While the engine sleeps, RuntimeError is raised, with the remedy, by `eval()`,
        `inference()`, `generate`, `rollout`, `score` and forwards in eval mode; at level 2 also by forwards,
        `backward`, `step`, saving, loading, `coverage` and `memory_plan`. `train()`, `stats()`, `weight_version` and
        `destroy()` work. A deeper level may follow; the same or a lower one does nothing. Weights, gradients (also
        between `backward` and `step`), random numbers and the weight version are afterwards what they were.

        Every rank must call it; it fails on all ranks or none, and then nothing has moved. Memory that tensors outside
        of the engine share stays on the device, with a warning: a forward that waits for its backward, for example.

        Raises:
            ValueError: for another level.
            RuntimeError: inside `inference()`, and if ranks' calls differ or fail.
        """
        self._sleep.begin(level)

    @with_call_lock
    def wake(self) -> None:
        """End sleep: what was moved to the host is on the device again. Does nothing if the engine is awake. A
        collective.

        What inference needs is made by the next window. Raises RuntimeError inside `inference()`, and torch's error if
        the device has too little memory: then the engine sleeps on, on every rank; free memory and call it again.
        """
        self._sleep.end()

    @property
    def asleep(self) -> int:
        """The level at which the engine sleeps; 0 if it is awake."""
        return self._sleep.level

    def destroy(self) -> None:
        """Restore the model's forwards, free all copies, then destroy DeepSpeed's engine. Later calls raise
        RuntimeError.

        The memory of the engine, its model and its optimizer is freed once no references to them are left. What sleep
        has moved to the host stays there. Raises RuntimeError inside `inference()`, where the model holds the
        snapshot's tensors.
        """
        with self.call_lock, INTERRUPTS.held():
            self._destroy()
            self.call_lock.refusal = "destroy() has ended this engine; hybrid.initialize builds another one"

    def _destroy(self) -> None:
        if "_runtime" in self.__dict__:  # DeepSpeed also calls this if the engine's constructor failed
            self._runtime.window.require_closed("destroy()")
            self._changes.close()
            self._waits.stop()
            self._runtime.uninstall()
            for patch in self.__dict__.get("_patches", ()):
                patch.close()
            self._generator.release_kv()
            self._runtime.release_weights()
            drop_global_references(self.module)
            self._group.close()
            if self._sequence_parallel is not None:
                self._sequence_parallel.group.close()
        super().destroy()

    @contextmanager
    def _training_state(self) -> Iterator[None]:
        """Inside the block, even in a window, the model holds its own weights and training states are on the device."""
        states = self._runtime.states
        on_device = nullcontext() if states is None else states.on_device()
        # DeepSpeed reads with `modifier_rank`: no write.
        self._sleep.require_awake("saving", level=2)
        with self.call_lock.call(), self._runtime.window.suspended(), self._changes.ignoring(), on_device:
            yield

    def _require_states(self, call: str) -> None:
        """Raise RuntimeError for a call that needs the training states in their places: inside a window, and asleep."""
        self._runtime.window.require_closed(call)
        self._sleep.require_awake(call, level=2)

    # ------------------------------------------------------------- training

    @with_call_lock
    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the transformer layers for train mode, one by one, with DeepSpeed's arguments of `compile`.

        Attention of packed rows, what lies around the layers, and eval mode run as they are: a rollout's bits do not
        change. Losses change by rounding. `transformers` and TRL call this with `torch_compile=True`. Under ZeRO-3
        layers must be leaf modules. Does nothing if layers are compiled already.

        Args:
            backend: of `torch.compile`.
            compile_kwargs: its other arguments. "dynamic" is true unless given: rows have other lengths each time.
            schedule: of DeepCompile, which is not available.
            compiled_autograd_enabled: not available: `logps` runs a backward inside a backward.

        Raises:
            RuntimeError: in eval mode and inside `inference()`.
            NotImplementedError: for DeepCompile and compiled autograd, and for layers that cannot be compiled.
        """
        if self._in_eval or self._runtime.window.is_open:
            raise RuntimeError("compile() in eval mode, whose forwards are not compiled; call engine.train() first")
        if schedule is not None or self.is_deepcompile_enabled():
            raise NotImplementedError(
                "compile: DeepCompile takes DeepSpeed's hooks off the modules, which inference switches; leave out "
                "schedule and compile.deepcompile"
            )
        if compiled_autograd_enabled:
            raise NotImplementedError("compile: compiled_autograd_enabled=True given; logps needs False")
        if self.is_compiled:
            return
        given = {**(compile_kwargs or {}), "backend": backend}
        if given.get("dynamic") is None:
            given["dynamic"] = True
        partitioned = self.zero_optimization_stage() == 3
        layers = self._builder.info.text_layers or declared_layers(self.module)
        self._patches.append(CompiledLayers(layers, partitioned, given))
        self._is_compiled, self._compile_kwargs = True, given

    @with_call_lock
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """In train mode DeepSpeed's forward; in eval mode the model over the snapshot, without gradients.

        Takes the model's arguments and gives its output.
        """
        if self._in_eval or self._runtime.window.is_open:
            self._sleep.require_awake("forward() in eval mode")
            self._runtime.rebuild_if_changed()
            # The containers open the window. Parts of a wrapper that do not generate run as in training.
            with autocast_if_enabled(self), torch.no_grad():
                return self.module(*inputs, **kwargs)
        self._sleep.require_awake("forward()", level=2)
        with self._training():
            return super().forward(*inputs, **kwargs)

    @contextmanager
    def _training(self) -> Iterator[None]:
        with self._profiler.phase("train", wait_for_device=False), lost_rank_reported("training"):
            yield

    @with_call_lock
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's backward. Raises RuntimeError in eval mode, where forwards have no gradients."""
        if self._in_eval or self._runtime.window.is_open:
            raise RuntimeError("backward() in eval mode, whose forwards have no gradients; call engine.train() first")
        self._sleep.require_awake("backward()", level=2)
        with self._training():
            return super().backward(*args, **kwargs)

    @with_call_lock
    def step(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's step. The weights get a new version if it applied an update, or raised when it would have.

        Raises RuntimeError inside `inference()`, and asleep at level 2.
        """
        self._require_states("step()")
        version = self._changes.version
        version.end_update()  # count a step of the optimizer that was made without the engine
        applies, skipped = self.is_gradient_accumulation_boundary(), self.skipped_steps
        try:
            with self._training(), self._changes.ignoring():
                super().step(*args, **kwargs)
            version.updating |= self.was_step_applied()
        except BaseException:
            # Even if this rank has not written yet: other ranks may have, and all ranks must refresh together.
            version.updating |= applies and self.skipped_steps == skipped
            raise
        finally:
            version.end_update()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's save_checkpoint, of the training weights; also allowed inside `inference()`."""
        with self._training_state():
            return super().save_checkpoint(*args, **kwargs)

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """DeepSpeed's save_16bit_model, of the training weights; also allowed inside `inference()`."""
        with self._training_state():
            return super().save_16bit_model(*args, **kwargs)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """DeepSpeed's module_state_dict, of the training weights; also allowed inside `inference()`.

        Args:
            exclude_frozen_parameters: leaves them out under all their names; DeepSpeed (0.19.8) keeps a tied head.
        """
        with self._training_state():
            state_dict = super().module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state_dict.pop(prefix + name, None)
            state_dict = without_scales(self.module, state_dict, prefix)
        return state_dict

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the whole weights on rank 0 under ZeRO-3, as accelerate requests them; also allowed inside
        `inference()`."""
        with self._training_state():
            return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)

    @with_call_lock
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_checkpoint; the weights get a new version. Raises RuntimeError inside `inference()`."""
        self._require_states("load_checkpoint()")
        try:
            return super().load_checkpoint(*args, **kwargs)
        finally:
            self.mark_weights_changed()

    @with_call_lock
    def load_module_state_dict(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_module_state_dict; the weights get a new version.

        Raises RuntimeError inside `inference()`, and ValueError for a checkpoint of another quantized base.
        """
        self._require_states("load_module_state_dict()")
        checkpoint = {**checkpoint, "module": without_scales(self.module, checkpoint["module"])}
        try:
            return super().load_module_state_dict(checkpoint, *args, **kwargs)
        finally:
            self.mark_weights_changed()

    @with_call_lock
    def save_pretrained(
        self,
        directory: str | Path,
        part: nn.Module | None = None,
        merged: bool = True,
        max_shard_bytes: int = 5 * 10**9,
        instead: Callable[[nn.Parameter], torch.Tensor | None] | None = None,
    ) -> None:
        """Write the model as a directory that Hugging Face's `from_pretrained` loads. A collective of all ranks.

        Weights are gathered layer by layer and written in files of up to `max_shard_bytes`. Host memory: one file and
        one layer on rank 0, one parameter on other ranks.

        Args:
            directory: is created if needed.
            part: the submodule to write, if the engine's module is a wrapper.
            merged: merge adapters into the weights, in float32 and rounded once; False writes only PEFT's adapter.
            max_shard_bytes: of a file.
            instead: called with each parameter, on every rank in the same order; returns whole float32 values to write
                in its place (a moving average, for example), or None for its own. The whole model is then written in
                float32.

        Raises:
            RuntimeError: inside `inference()`; and if writing fails, on all ranks but 0, which raises the error itself.
            ValueError: for a model that Hugging Face cannot load, and for merged=False without PEFT adapters.
            NotImplementedError: for adapters that cannot be merged.
        """
        self._require_states("save_pretrained()")
        save_pretrained(part or self.module, directory, merged, max_shard_bytes, instead)

    def mark_weights_changed(self) -> None:
        """Tell the engine that weights were written in a way that it does not detect. Call it on every rank: the next
        generation reads all weights again.

        Detected without it: steps of the engine and of its optimizer, loading, writes in `GatheredParameters` with a
        `modifier_rank`, and writes to a whole parameter (ZeRO 0-2) by an operation on it or through `.data` to most of
        its elements. Not detected: a few elements written through `.data`, and partitions written in place
        (`param.ds_tensor.data`, `safe_set_full_fp32_param` and similar functions).
        """
        self._changes.version.loads += 1

    # ------------------------------------------------------------ inference

    @property
    @with_call_lock
    def weight_version(self) -> int:
        """A number that grows with every step that applied an update, every load, every other detected write to weights
        (see `mark_weights_changed`), and every change of the active adapters."""
        self._changes.detect(self._runtime.window.is_open)
        return self._runtime.snapshot.weights.number()

    def generate(
        self,
        *args: Any,
        adapters: bool | None = None,
        seed: int | None = None,
        adapter: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run Hugging Face's `generate`, with the same arguments and return value.

        Greedy search and sampling run fused. Beam search, assisted generation and other methods run in Hugging Face's
        own loop over the model's own layers; the first time with a warning. Inputs may be on any device, ids of any
        integer dtype; the output is on the model's device. `synced_gpus` is accepted and has no effect: the engine
        synchronises ranks where that is needed.

        Args:
            adapters: None uses the model's active adapters; False generates from the base model.
            seed: of the sampling RNG, whose draws are a function of (seed, rank, row, position); None takes
                `next_seed()`. torch's generators are not used.
            adapter: the name of the adapter of PEFT to generate with, as in `rollout`.

        Raises:
            TypeError: for prompts that cannot be decoded, before any weight is gathered.
            ValueError: likewise, for a sequence longer than `max_out_tokens`, or one that memory limits do not allow.
            NotImplementedError: likewise, for arguments that are not supported.
            RuntimeError: as Hugging Face's sampling, at the end, if logits of a row were NaN or +inf.
        """
        with self._call(adapters, adapter):
            if self._runtime.streams and self._builder.info.is_encoder_decoder:
                raise NotImplementedError(
                    "generate: an encoder-decoder model with hybrid_engine.pin_parameters=false, or with "
                    "inference_tp_size above 1, is not available; use true, and 1"
                )
            return self._generator.generate(args, kwargs, chosen_adapters(adapters, adapter), seed)

    @with_call_lock
    def next_seed(self) -> int:
        """Return the seed of the next call without a `seed`: a function of torch's initial seed (`torch.manual_seed`)
        and of the number of such calls. The sequence restarts when the initial seed changes."""
        return self._generator.seeds.next()

    def rollout(
        self,
        prompt_ids: torch.Tensor | None,
        prompt_mask: torch.Tensor | None,
        sampling: SamplingParams,
        num_generations: int = 1,
        adapters: bool | None = None,
        row_ids: torch.Tensor | None = None,
        max_new_tokens: torch.Tensor | None = None,
        environment: Any = None,
        environment_limits: EnvironmentLimits | None = None,
        stop_after: StopAfter | None = None,
        resume: UnfinishedRows | None = None,
        on_rows: Callable[[RolloutBatch], None] | None = None,
        model_inputs: ModelInputs | None = None,
        adapter: str | None = None,
        adapter_names: Sequence[str] | None = None,
    ) -> RolloutBatch:
        """Sample completions of prompts, with the logprobs of their tokens.

        Args:
            prompt_ids: [rows, prompt_len], left padded; ids of any integer dtype, a mask of any dtype, on
                any device. A rank may have 0 rows. The returned batch is on the model's device, its ids and masks
                int64. None with `resume`: no new prompts.
            prompt_mask: 1 for tokens, of the same shape.
            num_generations: completions per prompt, at least 1.
            adapters: None uses the model's active adapters; False samples from the base model.
            row_ids: integers [rows] that key the sampling RNG, unique over all ranks' prompts: with the same ids a
                rollout does not depend on the world size. None numbers the rows of each rank in a range of its own.
            max_new_tokens: integers [rows], of each prompt's completions, at most `sampling.max_new_tokens`; None: that
                for all.
            environment: answers the rows' turns, so that they have several; an object with two methods, each plain
                (called in a thread) or a coroutine. `reset(row, prompt_ids)` gives the token ids of the row's prompt,
                or None for the given one; `step(row, completion_ids)` gets the tokens sampled in a turn, int64 [n] on
                the host, and gives an Observation. row: prompts × generations. While one row's environment works, the
                others decode. What raises ends its row, and is in the batch's `finish_reason` and `errors`.
            environment_limits: None: EnvironmentLimits().
            stop_after: stops the rows that are left once so many are done; they come back as the batch's `unfinished`.
            resume: rows of an earlier rollout to go on with, before the new ones; with their sampling keys and limits.
            on_rows: called, between decode steps, with rows that are done. `rollout_iter` gives them in a loop.
            model_inputs: inputs besides token ids, such as images, without `input_ids` and `attention_mask`: a dict of
                tensors, as the model's processor returns it for the prompts, or a list with the dict of each prompt,
                as it returns it for that one alone. Such prompts run in the model's own layers, once for all
                generations, and draw no placeholder of an image. The batch has them for `score` and `logps`.
            adapter: the name of the adapter of PEFT to sample with, whatever is active, "__base__" for none. The
                model's active adapters and the parameters that require gradients stay as they are. Merged weights are
                those of one adapter: a call for another one merges again, which is logged once; with `rollout.lora:
                unmerged` it does not. Under ZeRO-3, and where ranks compute together, every rank must name the same.
            adapter_names: PEFT's argument for mixed batches: such a name for each row of `prompt_ids`. With
                `rollout.lora: unmerged` rows of all adapters are decoded together. With merged adapters, int8 and where
                ranks compute together they are decoded adapter by adapter. A row's tokens are those of a call for its
                adapter. Ranks' names may differ.

        Raises:
            TypeError: for prompts, row ids, limits or an environment of a wrong type.
            ValueError: for their values; for a model without `generate`, a sequence longer than `max_out_tokens` or
                than memory limits allow, and prompts with a token in whose place the model reads an image, a video or
                sound. Like TypeError, before any weight is gathered.
            NotImplementedError: for an encoder-decoder, for an environment together with `stop_after` or `resume`, and
                for `model_inputs` or `adapter_names` with any of the three.
            RuntimeError: once the other rows are done, if a row's logits were NaN or +inf, or all -inf: it names row,
                step and weight version. Ranks that decode together all raise.
        """
        self._builder.info.require_decoder("rollout")
        with self._call(adapters, adapter, adapter_names):
            request = self._generator.rollout_request(
                prompt_ids,
                prompt_mask,
                sampling,
                num_generations,
                row_ids,
                max_new_tokens,
                environment,
                environment_limits,
                stop_after,
                resume,
                on_rows,
                model_inputs,
            )
            if adapter_names is not None:
                return self._generator.rollout_by_adapter(request, adapter_names)
            return self._generator.rollout(request, chosen_adapters(adapters, adapter))

    def rollout_iter(self, *args: Any, adapters: bool | None = None, **kwargs: Any) -> Stream[RolloutBatch]:
        """Run `rollout`, with the same arguments, and yield its rows as they finish, in a `for` or an `async for`.

        Each item is a RolloutBatch of one row (and of its forks, if it has any), with its `row_index`. The rollout goes
        on in a thread meanwhile, so that rewards can be computed while others decode; this thread's next calls of the
        engine wait for its end. The stream's `output()` is what `rollout` returns. If its iteration ends early,
        `close()` the stream, or use it in a `with`. The iteration raises the errors of `rollout`.
        """

        def run(put: Callable[[RolloutBatch], None]) -> RolloutBatch:
            given: set[int] = set()

            def give_rows(batch: RolloutBatch) -> None:
                index = [] if batch.row_index is None else batch.row_index.tolist()
                for row in dict.fromkeys(index):
                    if row not in given:
                        given.add(row)
                        put(batch.select_rows([at for at, of_row in enumerate(index) if of_row == row]))

            whole = self.rollout(*args, adapters=adapters, on_rows=give_rows, **kwargs)  # type: ignore[misc]  # no third
            give_rows(whole)
            return whole

        return Stream(run, self.call_lock, self.device, stops=not self.in_step)

    def generate_stream(self, *args: Any, **kwargs: Any) -> Stream[torch.Tensor]:
        """Run `generate`, with the same arguments, and yield its tokens as they are drawn.

        Rows are decoded in lockstep: for many rows `rollout_iter` is faster.

        Returns:
            A stream of int64 [rows], one tensor for each step, padding after a row's end. Its `output()` is what
            `generate` returns.
        """
        stops = not self.in_step
        return Stream(
            lambda put: self.generate(*args, streamer=TokenStreamer(put), **kwargs), self.call_lock, self.device, stops
        )

    def serve(
        self,
        adapters: bool | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_queue: int = 1024,
        adapter: str | None = None,
    ) -> Server:
        """Return a server of requests that come one by one; it serves inside its `with` or `async with` block.

        All that `rollout` does for a batch is done for requests: rows are decoded together, a prompt that continues an
        earlier sequence computes its new tokens alone, and a row's tokens depend on its sampling key, not on the rows
        beside it. Until the block ends, other calls of the engine raise RuntimeError, `train`, `step`, `sleep` and
        `destroy` among them. Where ranks compute together, every rank must call it; requests may come at any rank,
        and a rank's block ends once all ranks have ended theirs.

        Args:
            adapters: None uses the model's active adapters; False serves the base model.
            max_num_seqs: samples of this rank that are decoded at once; None: `rollout.max_num_seqs`.
            max_model_len: tokens of a sample, prompt included; None: `max_out_tokens`. The KV cache has room for
                `max_num_seqs` such samples, within `rollout.kv_cache_bytes` and the free memory.
            max_queue: samples that may wait; more raise ServerBusy.
            adapter: the name of the adapter of PEFT that is served, as in `rollout`. Requests may name others, but not
                where ranks gather weights or compute together.

        Raises:
            ValueError: for numbers outside these ranges.
            NotImplementedError: for an encoder-decoder; and as the block begins, with the reason, where ranks together
                run a model's own layers, and for aLoRA.
        """
        self._builder.info.require_decoder("serve")
        settings = chosen_adapters(adapters, adapter), max_num_seqs, max_model_len, max_queue
        return Server(self._generator, partial(self._call, adapters, adapter), self.call_lock, *settings)

    def score(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        adapters: bool | None = None,
        temperature: float = 1.0,
        rows_per_forward: int = 16,
        model_inputs: ModelInputs | None = None,
        top_logprobs: int = 0,
        adapter: str | None = None,
        adapter_names: Sequence[str] | None = None,
    ) -> Scores:
        """Return the logprob and the entropy of every token of given sequences except the first.

        With `rollout.weight_dtype: int8` scores use the training weights, rollouts the int8 copy.

        Args:
            sequences: token ids, [rows, tokens], padded on either or both sides, dtype and device as in `rollout`; a
                rank may have 0 rows.
            attention_mask: [rows, tokens].
            adapters: None uses the model's active adapters; False scores with the base model.
            temperature: divides the logits; above 0, in float32's normal range.
            rows_per_forward: maximum rows computed together.
            model_inputs: a batch's `model_inputs`, or as `rollout` takes them.
            top_logprobs: also return the ids and logprobs of this many most probable tokens of each distribution, for
                distillation from this model; logits exist for a few hundred tokens at a time.
            adapter: the name of the adapter of PEFT to score with, such as a reference or a teacher, as in `rollout`.
            adapter_names: such a name for each row, as in `rollout`.

        Returns:
            Scores, [rows, tokens - 1] each.

        Raises:
            TypeError: for invalid sequences or numbers.
            ValueError: likewise, for sequences that the KV cache cannot hold, for a token in whose place the model
                reads an image, a video or sound, unless the engine drew it, and for a model without a head.
            NotImplementedError: for an encoder-decoder.
        """
        self._builder.info.require_decoder("score")
        with self._call(adapters, adapter, adapter_names):
            more = temperature, rows_per_forward, model_inputs, top_logprobs
            if adapter_names is not None:
                return self._generator.score_by_adapter(sequences, attention_mask, adapter_names, *more)
            return self._generator.score(sequences, attention_mask, chosen_adapters(adapters, adapter), *more)

    # ------------------------------------------------------------- training

    def logps(
        self,
        batch: RolloutBatch | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        completion_mask: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        forward: str = "packed",
        router_indices: torch.Tensor | None = None,
        model_inputs: ModelInputs | None = None,
        sampling_mask: torch.Tensor | None = None,
    ) -> Logps:
        """Return the logprobs of completion tokens under the policy, with gradients. In train mode.

        The model's active adapters are trained: PEFT's `set_adapter` chooses them. `backward` and `step` follow as
        after a forward of the engine. Gradients are added by a backward inside the backward, so that
        `torch.autograd.grad` does not see the parameters, and a loss of two calls needs a `backward` for each: ZeRO
        reduces a parameter's gradient once in each. Under ZeRO every rank must call it, also with rows that have no
        completion token. The first call with "packed" compares it with "model" on four short rows; `coverage()` reports
        the result.

        With `sequence_parallel_size: n`, n neighbouring ranks must give the same rows, and compute the same loss of the
        logprobs, which each of them gets: each computes 1/n of the tokens. Without gradients (`torch.no_grad()`) ranks
        give rows of their own. `token_losses` and `values` are the same.

        Args:
            batch: a rollout's batch; or token ids, [rows, tokens], padded on either or both sides.
            attention_mask: of token ids, [rows, tokens], 1 for tokens.
            completion_mask: [rows, completion_len], 1 for the tokens whose logprobs are wanted, in the last columns of
                the ids. None: the batch's, or all tokens but each row's first.
            temperature: divides the logits.
            entropy: also return entropies.
            forward: "model": the model's own forward over padded rows, and its whole logits. "packed": the model's own
                modules over the rows' tokens without padding, each prefix that rows have in common once, and logits for
                1,024 tokens at a time; dropout must be 0. Recurrent layers' states go from a prefix to what follows
                it. It runs as "model", with a warning, for a model whose attention does not go through transformers'
                `AttentionInterface`, or whose recurrent layers are of another kind (Mamba 1).
                "exact": the forward of the rollout's kernels, whose logprobs of a rollout's rows are the rollout's, bit
                for bit on CPUs; backward through the model's own modules at the kernels' activations. Needs a fused
                decoder.
            router_indices: experts to replay, of a mixture, as `RolloutBatch.router_indices`. None: the batch's.
            model_inputs: as `rollout` takes them; None: the batch's. Rows with images run as "model".
            sampling_mask: `RolloutBatch.sampling_mask`, for logprobs and entropies of the distribution that top_k,
                top_p and min_p left: log p(token) minus the log of the sum of p over the tokens that they kept. They
                equal `sampling_per_token_logps` under the same weights, with "exact" on CPUs bit for bit. The kept
                tokens are the sampler's, as in importance sampling both policies need the same ones: under other
                weights, or with another forward's rounding, those at least as probable as the mask's token, and the
                sampled one. None: of the whole vocabulary, also for a batch that has a mask.

        Returns:
            Logps, float32 [rows, completion_len] each, 0 where masked.

        Raises:
            RuntimeError: in eval mode.
            TypeError: for a batch of another type.
            ValueError: for shapes, dtypes or numbers that do not fit, another `forward`, and dropout with "packed" or
                "exact"; on every rank for different rows on ranks that share them.
            NotImplementedError: for "exact" without a fused decoder, or where "packed" runs as "model"; with
                `sequence_parallel_size` above 1 for all but "packed".
        """
        if self._in_eval:
            raise RuntimeError("logps: the engine is in eval mode; call train() first, or score() for no gradients")
        if forward not in FORWARDS:
            raise ValueError(f"forward: {forward!r} given; it must be one of {', '.join(map(repr, FORWARDS))}")
        temperature = checked_number("temperature", temperature, float, is_divisor, f"above 0, {DIVISOR}")
        info, given = self._builder.info, (attention_mask, completion_mask, router_indices)
        rows = target_tokens(batch, *given, self.device, model_inputs, info.config, sampling_mask)
        info.placeholders.require_inputs("logps", rows.sequences, rows.attention_mask, by_row=rows.model_inputs)
        with self._profiler.phase("train"):
            return self._forwards.logps(rows, temperature, entropy, forward)

    def token_losses(
        self,
        token_loss: TokenLoss,
        batch: RolloutBatch | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        completion_mask: torch.Tensor | None = None,
        temperature: float = 1.0,
        forward: str = "packed",
    ) -> TokenLosses:
        """Return a loss of the logits of each completion token, such as a divergence from a teacher, with gradients.

        As `logps`, whose rules of `backward`, `step` and ranks apply. With "packed" logits exist for 1,024 tokens at a
        time, with "model" those of the batch.

        Args:
            token_loss: a differentiable function of a TokenLogits, the logits of some tokens, which returns their
                losses, float [n]. It is called in the forward and again in the backward, perhaps for no token; it must
                not run collectives.
            batch: as in `logps`.
            attention_mask: as in `logps`.
            completion_mask: as in `logps`.
            temperature: divides the logits.
            forward: "model" or "packed", as in `logps`.

        Returns:
            TokenLosses, float32 [rows, completion_len] each, 0 where masked.

        Raises:
            RuntimeError: in eval mode.
            TypeError: for a batch of another type.
            ValueError: for shapes, dtypes or numbers that do not fit, another `forward`, and dropout with "packed".
        """
        if self._in_eval:
            raise RuntimeError("token_losses: the engine is in eval mode; call train() first")
        if forward not in VALUE_FORWARDS:
            raise ValueError(f"forward: {forward!r} given; it must be one of {', '.join(map(repr, VALUE_FORWARDS))}")
        temperature = checked_number("temperature", temperature, float, is_divisor, f"above 0, {DIVISOR}")
        info = self._builder.info
        rows = target_tokens(batch, attention_mask, completion_mask, None, self.device, None, info.config)
        info.placeholders.require_inputs("token_losses", rows.sequences, rows.attention_mask, by_row=rows.model_inputs)
        with self._profiler.phase("train"):
            return self._forwards.token_losses(rows, temperature, token_loss, forward)

    @torch.no_grad()
    def last_hidden_states(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the head receives before each completion token, without gradients. In train mode.

        For a policy that is its own teacher, on other prompts: the `head` of `token_losses`'s TokenLogits computes the
        teacher's logits from it, for some tokens at a time. The model's modules run over packed rows, under the weights
        of this moment. Under ZeRO every rank must call it.

        Args:
            sequences: token ids, [rows, tokens], padded on either or both sides.
            attention_mask: [rows, tokens], 1 for tokens.
            completion_mask: as in `logps`.

        Returns:
            [rows, completion_len, hidden], in the model's dtype, 0 where masked.

        Raises:
            RuntimeError: in eval mode.
            ValueError: for shapes or dtypes that do not fit, and for dropout.
            NotImplementedError: where "packed" runs as "model" in `logps`.
        """
        if self._in_eval:
            raise RuntimeError("last_hidden_states: the engine is in eval mode; call train() first")
        rows = target_tokens(sequences, attention_mask, completion_mask, None, self.device)
        with self._profiler.phase("train"):
            return self._forwards.last_hidden_states(rows)

    def values(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_mask: torch.Tensor | None = None,
        forward: str = "packed",
    ) -> torch.Tensor:
        """Return the value of the state before each completion token, with gradients. In train mode.

        For a critic: a module with a linear head `score` of one output over its last hidden states, as Hugging Face's
        sequence and token classifiers have it, in a wrapper or not. `backward` and `step` follow as after a forward of
        the engine. Under ZeRO every rank must call it, also with rows that have no completion token. The first call
        with "packed" compares it with "model" on four short rows.

        Args:
            sequences: token ids, [rows, tokens], padded on either or both sides.
            attention_mask: [rows, tokens], 1 for tokens.
            completion_mask: [rows, completion_len], 1 for the tokens whose values are wanted, in the last columns of
                the ids. None: all tokens but each row's first.
            forward: "model" or "packed", as in `logps`.

        Returns:
            float32 [rows, completion_len], 0 where masked.

        Raises:
            RuntimeError: in eval mode.
            ValueError: without a value head, for shapes or dtypes that do not fit, another `forward`, and dropout with
                "packed".
        """
        if self._in_eval:
            raise RuntimeError("values: the engine is in eval mode; call train() first")
        if forward not in VALUE_FORWARDS:
            raise ValueError(f"forward: {forward!r} given; it must be one of {', '.join(map(repr, VALUE_FORWARDS))}")
        rows = target_tokens(sequences, attention_mask, completion_mask, None, self.device)
        with self._profiler.phase("train"):
            return self._value_forwards.values(rows, forward)

    def count_training_of(self, other: "HybridEngine") -> None:
        """Count another engine's training in this one's summary line and `stats()["train_s"]`, from now on.

        Use it for PPO's critic, whose forwards, backwards and steps are "Others" in the line otherwise.
        """
        self._profiler.count_training_of(other._profiler)

    def _score_with_layer_inputs(
        self, ids: torch.Tensor, mask: torch.Tensor, temperature: float, sampling_mask: torch.Tensor | None = None
    ) -> LayerInputScores:
        """Return the decoder's scores of rows, [rows, tokens], and the layer inputs that it had.

        Raises NotImplementedError, with the reason, if the model has no fused decoder, or its layers are no chain.
        """
        layout = self._builder.info.layout
        if layout is not None and not layout.spec.is_chain:
            raise NotImplementedError(
                f"logps: forward='exact' is not available: layers of the {layout.family} family read the keys and "
                "values of another layer, or an input of their own, whose gradients it does not compute; give 'packed' "
                "or 'model'"
            )
        with self._call(None):
            rows_per_forward = self._rollout_settings.max_num_seqs
            settings = None, temperature, rows_per_forward, sampling_mask
            return self._generator.score_with_layer_inputs(ids, mask, *settings)

    # ----------------------------------------------------------- inspection

    @property
    def in_step(self) -> bool:
        """Whether ranks run inference together: then every rank must make the same calls in the same order."""
        return self._planner.in_use.is_shared or self._exchange is not None

    def memory_plan(self, batch_size: int, prompt_length: int, max_new_tokens: int) -> MemoryPlan:
        """Plan the memory of a rollout in each mode that this engine could run in. Not a collective.

        Args:
            batch_size: this rank's sequences, every generation of a prompt counted; at most `rollout.max_num_seqs` of
                them are decoded at once.
            prompt_length: tokens.
            max_new_tokens: tokens.

        Returns:
            Bytes on this rank, as a plan that `print` shows as a table. Nothing is allocated.

        Raises:
            RuntimeError: asleep at level 2.
        """
        self._sleep.require_awake("memory_plan()", level=2)  # plans read where the weights are
        return self._planner.plan(min(batch_size, self._rollout_settings.max_num_seqs), prompt_length + max_new_tokens)

    def coverage(self) -> list[dict[str, str]]:
        """Return what eval mode runs.

        A fused decoder is compared with the model's layers on first use; if it differs, later calls report that.

        Returns:
            For each part of the model its `module` name, its `kind`, the `container` that runs it, and the reason. If
            `logps` has found that packed rows are not available, also a row of kind "training forward".

        Raises:
            RuntimeError: asleep at level 2.
        """
        self._sleep.require_awake("coverage()", level=2)
        with autocast_if_enabled(self):
            rows = self._runtime.coverage()
        if reason := self._forwards.reason:
            rows.append({"module": "", "kind": "training forward", "container": "model", "reason": reason})
        return rows

    def stats(self) -> dict[str, float | str]:
        """Return this rank's statistics since the last `eval()`: seconds by phase (`gather_s`, `merge_s`, `prefill_s`,
        `decode_s`, `environment_s` (nothing could decode until an environment answered), `wait_s`, `release_s`,
        `train_s`, `elapsed_s`), `tokens` generated, `prefilled_tokens` and `cached_tokens` of prompts (computed, and
        found in the KV cache; of all ranks that decode one batch), `cached_scored_tokens` (of scored sequences: tokens
        of which only the head ran, with `rollout.cache_hidden_states`), `drafted_tokens`, `accepted_tokens` and
        `saved_steps` of `rollout.speculation` (steps that the accepted tokens saved; of all these ranks too),
        `tokens_per_s` of prefill, decode and wait together, and `gathered_bytes`; `refresh_s`: seconds of gathering and
        merging, the most of the ranks that share weights (`inference_tp_size`) as of their latest request. Bytes held
        now: `snapshot_bytes`, `container_bytes` (copies that fused containers made) and `kv_bytes`. `asleep`: the level
        at which the engine sleeps, 0 if it is awake; `host_bytes`: what it has in host memory for that time.
        `peak_bytes`: the sum of the peaks of the snapshot with one gathered group, the containers, the KV cache and the
        fused decoder's largest forward. `fallback_reason`: why the latest request that could not run fused ran in the
        model's own layers, and the remedy; "" if every request ran fused. `eager_reason`: why decode steps run without
        the CUDA graphs that `enable_cuda_graph` asks for; "" if no capture has failed. `cuda_graphs`: how many there
        are."""
        return {
            **self._profiler.stats(),
            **self._runtime.stats(),
            "asleep": self._sleep.level,
            "host_bytes": self._sleep.host.nbytes(),
        }


def training_hooks(engine: DeepSpeedEngine) -> list[RemovableHandle]:
    """Return the handles of DeepSpeed's hooks on an engine's module: the engine's and ZeRO-3's."""
    handles = [engine.module_forward_pre_hook, engine.module_forward_post_hook]
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if isinstance(offload, DeepSpeedZeRoOffload):
        handles += [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    return handles


def group_of_mpu(mpu: Any, size: int | str) -> dist.ProcessGroup | None:
    """Return the process group that shares weights in inference, if the caller's `mpu` gives one, as in DeepSpeed's
    engine; None if consecutive ranks share them.

    Raises ValueError if the group's size is not `inference_tp_size`.
    """
    names = ("get_model_parallel_group", "get_tensor_model_parallel_group")
    groups = [getattr(mpu, name)() for name in names if hasattr(mpu, name)]
    if size == "auto" or size == 1 or not groups or dist.get_world_size(groups[0]) == 1:
        return None
    ranks = dist.get_world_size(groups[0])
    same = f"the model parallel group of mpu has {ranks} ranks; give the same"
    check_settings([InvalidSetting(ranks != size, "hybrid_engine.inference_tp_size", size, same)])
    return groups[0]


def drop_global_references(model: nn.Module) -> None:
    """Remove the global references that ZeRO-3 keeps to `model`, its engine and its optimizer (docs/upstream.md)."""
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not model]
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():  # the cache is wrapped by a decorator
        getattr(cell.cell_contents, "cache_clear", lambda: None)()
