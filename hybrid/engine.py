"""HybridEngine: DeepSpeed's training engine that also generates. Switches modes and delegates to the components."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import log_dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from hybrid.build import Builder, Mode, attention_refusals, int8_refusals, router_refusals, speculation_refusals
from hybrid.call_lock import CallLock, with_call_lock
from hybrid.config import HybridEngineConfig, Refusal, RolloutConfig, refuse
from hybrid.decoders.calls import Calls, SharedCalls
from hybrid.decoders.collective_forwards import CollectiveForwards, ExpertForwards, LayerwiseForwards
from hybrid.decoders.containers import containers_of, coverage_of, parts_of
from hybrid.decoders.deepspeed_moe import exchange_tokens, expert_layers
from hybrid.decoders.fused_model import FusedModel
from hybrid.decoders.tp_forwards import ModuleExchange
from hybrid.decoders.tp_modules import SharedContainer, SharedModules, first_output
from hybrid.deepspeed_api import DeepSpeedMethods
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.generate import Route, require_token_ids
from hybrid.generation.generator import Generator
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.rollout_batch import RolloutCall
from hybrid.generation.sampler import Seeds
from hybrid.generation.scoring import Scores
from hybrid.generation.speculation import speculator_of
from hybrid.generation.stream import Stream, TokenStreamer
from hybrid.memory_plan import MemoryPlan, MemoryPlanner, free_bytes
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.models.structure import generating_part
from hybrid.parallel import (
    InferenceGroup,
    all_gather_objects,
    engine_name,
    limit_waits,
    lost_rank_reported,
    world_size,
)
from hybrid.profiling import Profiler
from hybrid.rank_waits import RankWaits
from hybrid.rollout import EnvironmentLimits, RolloutBatch, SamplingParams, StopAfter, UnfinishedRows
from hybrid.sleep import Sleep
from hybrid.weights.export import save_pretrained
from hybrid.weights.gather import partition_groups
from hybrid.weights.host_tensors import tensors_in
from hybrid.weights.lend import Window
from hybrid.weights.lora import read_adapters
from hybrid.weights.module_tables import EngineHooks, ModuleTree
from hybrid.weights.offload import TrainingStates, require_movable_optimizer, scratch
from hybrid.weights.slices import require_divisible
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.watch import WeightWatch


class HybridEngine(DeepSpeedMethods, DeepSpeedEngine):
    """DeepSpeed's engine for ZeRO 0-3, whose model also generates, fast and in the same process.

    In train mode it is DeepSpeed's engine. In eval mode forwards run without gradients over a snapshot of the weights,
    which is gathered once per weight version, with adapters merged. Training storage is only read. Built by
    `hybrid.initialize`.

    Threads may share the engine: their calls run one at a time, in the order in which they came, and
    `with inference()` keeps other threads out until it ends. The caller must keep other threads out of a sequence of
    calls such as forward, backward, step. Calls that are collectives (all calls, if `in_step`; under ZeRO-3 the first
    one after a step) must come in the same order on every rank.
    """

    def __init__(self, args: Any, model: nn.Module, *, blocks: tuple[HybridEngineConfig, RolloutConfig], **kwargs: Any):
        self.call_lock = CallLock()
        read_adapters(model)  # raises for adapters that cannot be merged, before DeepSpeed partitions anything
        # Read again below: DeepSpeed casts the model, and a decoder's constants depend on the dtype (Gemma).
        info = ModelInfo(generating_part(model))
        refuse(int8_refusals(info, *blocks))
        refuse(router_refusals(info, blocks[1]))
        refuse(speculation_refusals(info, blocks[1]))
        require_divisible_heads(info, blocks[0].inference_tp_size)
        mpu_group = group_of_mpu(kwargs.get("mpu"), blocks[0].inference_tp_size)
        super().__init__(args, model, **kwargs)
        self._settings, self._rollout_settings = blocks
        if self._rollout_settings.offload_states:
            require_movable_optimizer(self.optimizer)
        self._in_eval = False
        self._unhooked = ExitStack()  # on close, restores the hooks of switched modules
        self._tree = ModuleTree(self.module)
        name = engine_name()
        self._waits = RankWaits(name, self._rollout_settings.wait_report_s, self.call_lock, self._decoding_groups)
        self._profiler = Profiler(name, get_accelerator().synchronize)
        self._builder = Builder(
            generating_part(self.module),
            *blocks,
            self.zero_optimization_stage(),
            self._profiler.phase,
            self._profiler.gathered,
            self._training_hooks,
        )
        refuse(attention_refusals(self._builder.info, self._rollout_settings))
        self._planner = MemoryPlanner(self._builder)
        self._generator = self._make_generator()
        self._version = self._builder.version
        self._watch, self._is_outdated = WeightWatch(self._policy), False
        offloads = self._rollout_settings.offload_states
        self._states = TrainingStates(self, self._profiler.phase) if offloads else None
        self._sleep = self._make_sleep()
        if isinstance(optimizer := getattr(self, "basic_optimizer", None), torch.optim.Optimizer):
            self._before_update = optimizer.register_step_pre_hook(self._version.begin_update)
        self._exchange = exchange_tokens(expert_layers(self._policy))
        self._group = InferenceGroup(self._planner.in_use.tp_size, group=mpu_group)
        self._limit_waits()
        self._run_on(self._builder.make(self._planner.in_use, self._group))
        self._replace_refused_decoder()
        self._waits.built()
        self._routes = [Route(self._policy, self.generate)] if self._builder.info.can_generate else []
        if isinstance(head := getattr(self.module, "score", None), nn.Module):
            # A sequence classifier's head: TRL's PPO trainer reads it through DeepSpeed's engine.
            self.__dict__["score"] = head

    @property
    def _policy(self) -> nn.Module:
        """The part of the module that generates. Not an attribute: the engine, an nn.Module, would register it."""
        return self._builder.info.model

    def _limit_waits(self) -> None:
        """Apply `rollout.wait_timeout_s` to the process groups in which ranks wait for each other."""
        limit_s, exchange = self._rollout_settings.wait_timeout_s, self._exchange
        if limit_s is not None and world_size() > 1:
            own = (None, self._group.group, self._group.tensor.group, None if exchange is None else exchange.group)
            limit_waits((*own, *partition_groups(self.module.parameters())), limit_s)

    def _decoding_groups(self) -> list[InferenceGroup]:
        """The groups whose ranks compute together; none while the engine is built."""
        parts = (self.__dict__.get("_fused"), self.__dict__.get("_module_exchange"))
        return [part.group for part in parts if part is not None and part.group is not None]

    def _replace_refused_decoder(self) -> None:
        """If the tensor-parallel decoder cannot be used, share the model's own modules instead."""
        if self._fused.group is not None and self._fused.fallback_reason:
            self._share_modules(self._fused.fallback_reason)

    def _share_modules(self, why: str) -> None:
        """Run the model's own modules in tensor parallel, by its `tp_plan`, if their output equals that of the whole
        weights. A collective.

        why: reason for not using our decoder.
        """
        try:
            snapshot, info = self._builder.module_slices(self._group), self._builder.info
            with autocast_if_enabled(self):
                expected = first_output(info, self.device)
            shared = SharedModules(info, snapshot.adapted, self._group, self.device, self._empty_cache)
            self._run_on(self._builder.fused(snapshot, why), shared)
            with autocast_if_enabled(self), self._window.opened():
                shared.require_same(expected)
            self._snapshot.release()
        except UnsupportedModel as reason:
            self._run_without_slices(f"{why}; {reason}")

    def _run_without_slices(self, why: str) -> None:
        """Hold whole weights on every rank if they fit, else run whole layers, gathered one by one. A collective."""
        if not self._planner.use_whole_if_it_fits():
            self._run_on(self._builder.layer_by_layer(why))
            return
        self._generator.block_pool = self._make_block_pool()
        fused, held = self._builder.make(Mode(), self._group), f"weights are whole on every rank ({why})"
        log_dist(f"hybrid: inference_tp_size has no effect, {held}", ranks=[0])
        fused.remark = f"; {held}"
        if fused.fallback_reason:
            fused.fallback_reason = held
        self._run_on(fused)

    def _empty_cache(self) -> DynamicCache:
        """A cache like those of the model's `generate()`, with its own storage."""
        cache = DynamicCache(config=self._builder.info.config.get_text_config(decoder=True))
        KVCache(self._rollout_settings.kv_step).adopt(cache)
        return cache

    def _run_on(self, fused: FusedModel, shared: SharedModules | None = None) -> None:
        """Set up what runs in eval mode: weights, window, request handling and containers.

        shared: the model's own modules in tensor parallel, if they run.
        """
        assert isinstance(fused.snapshot, Snapshot), "an int8 copy is a second decoder's"
        self._snapshot, self._fused, self._int8 = fused.snapshot, fused, self._builder.make_int8()
        if self._int8 is not None:
            fused.remark = f"; generate() and rollout(): {self._int8.description}"
        # If this rank has no whole copy, the model's own layers run on weights that ZeRO-3 gathers as they run.
        self._streams = self._planner.in_use.is_shared and shared is None
        self._module_exchange = None if shared is None else shared.exchange
        self._switched_hooks = EngineHooks(self._switched_modules, self._training_hooks)
        self._other_hooks = EngineHooks(self._other_modules, self._training_hooks)
        self._window = Window(
            self._policy,
            fused.snapshot,
            self._profiler,
            lends=not self._streams,
            merges=not self._streams or (fused.is_shared and not fused.fallback_reason),
            hooks=(self._switched_hooks, self._other_hooks),
            slices_lent=nullcontext if shared is None else shared.lent,
            states=self._states,
            device=self.device,
            require_awake=self._sleep.require_awake,
        )
        self._calls = self._make_calls(shared)
        self._generator.attach(self._builder.info, self._calls, expands=shared is None and self._exchange is None)
        parts = parts_of(self._builder.info, inner=self.in_step)
        if shared is None:
            self._containers = containers_of(parts, self._calls)
        else:
            self._containers = [SharedContainer(part, self._calls, shared.exchange) for part in parts]

    def _switched_modules(self) -> set[nn.Module]:
        """The modules whose forward is a container's in eval mode."""
        return {container.part.module for container in self._containers}

    def _other_modules(self) -> list[nn.Module]:
        switched = self._switched_modules()
        return [module for module in self._policy.modules() if module not in switched]

    def _make_calls(self, shared: SharedModules | None) -> Calls:
        """What runs requests: of this rank alone, or of all ranks that compute together."""
        own = (self._window, self._fused, self.call_lock, self._rebuild_if_changed)
        if not self.in_step:
            return Calls(*own, self._int8)
        partitioned, group = self.zero_optimization_stage() == 3, self._group.group
        native: ModuleExchange | CollectiveForwards | None = None if shared is None else shared.exchange
        if self._exchange is not None:
            native, group = ExpertForwards(self._policy, self._exchange, self.device), self._exchange.group
        elif self._streams and partitioned:
            native = LayerwiseForwards(
                self._builder.info.structure,
                self._profiler.phase,
                self._profiler.gathered,
                self.device,
                self._rollout_settings.sync_interval,
                hooks=self._training_hooks,
            )
        # Gathering partitioned weights is a collective of all ranks, not only of the group.
        group = None if partitioned else group
        return SharedCalls(*own, group, native, self._profiler.phase, self._int8)

    def _make_block_pool(self) -> BlockPool:
        """The KV cache's block pool, limited by `kv_cache_bytes` and by what `memory_limit` leaves."""
        settings, left = self._rollout_settings, self._planner.kv_limit()
        caching: dict[str, Any] = {
            "caches_prefixes": settings.enable_prefix_caching,
            "extra_bytes": settings.prefix_cache_bytes,
        }
        if left is None or (settings.kv_cache_bytes is not None and settings.kv_cache_bytes <= left):
            return BlockPool(settings.kv_step, settings.kv_cache_bytes, free_bytes=free_bytes, **caching)
        name = f"rollout.memory_limit={self._planner.limit}"
        plan = lambda: f"\n{self.memory_plan(1, 0, self._settings.max_out_tokens)}"  # noqa: E731
        return BlockPool(settings.kv_step, left, name, plan, free_bytes, **caching)

    def _make_generator(self) -> Generator:
        settings = self._rollout_settings
        return Generator(
            device=self.device,
            profiler=self._profiler,
            kv_cache=KVCache(settings.kv_step),
            block_pool=self._make_block_pool(),
            seeds=Seeds(),
            max_num_seqs=settings.max_num_seqs,
            max_out_tokens=self._settings.max_out_tokens,
            require_memory=self._require_memory,
            runs_other_methods=True,
            return_router_indices=settings.return_router_indices,
            speculator=speculator_of(settings.speculation),
        )

    def _make_sleep(self) -> Sleep:
        return Sleep(
            self.device,
            free=self._free_inference,
            tensors=self._training_tensors,
            refusal=self._window_refusal,
            exchange=all_gather_objects if world_size() > 1 else lambda value: [value],
            moving=lambda: self._watch.ignoring(),  # addresses change, values do not
        )

    # ---------------------------------------------------------------- modes

    @with_call_lock
    def eval(self) -> None:
        """Switch to eval mode: forwards run in the inference containers, without gradients.

        From the second iteration on, rank 0 prints the summary line of DeepSpeed's hybrid engine. Raises RuntimeError
        while the engine sleeps.
        """
        self._sleep.require_awake("eval()")
        if not self._window.is_open:
            self._profiler.next_iteration()
            self._builder.fallback_reasons.reset()
            self._rebuild_if_changed()
        self._install()
        self._in_eval = True
        super().eval()

    @with_call_lock
    def train(self, mode: bool = True) -> None:
        """Switch to train mode: the model has its own forwards, and this is DeepSpeed's engine.

        mode: False calls `eval()`.
        Raises RuntimeError inside `inference()`.
        """
        if not mode:
            self.eval()
            return
        self._refuse_in_window("train()")
        self._uninstall()
        self._in_eval = False
        super().train()
        self._release()

    @contextmanager
    def inference(self, adapters: bool | None = None) -> Iterator["HybridEngine"]:
        """An inference window: the snapshot is refreshed once, and nothing is gathered again inside the block.

        adapters: None uses the model's active adapters; False runs the base model (a LoRA policy's reference).
        Afterwards the engine is in its previous mode, even after an exception.
        """
        with self.call_lock, self._eval_mode(), self._calls.block(adapters):
            yield self

    @contextmanager
    def _call(self, adapters: bool | None) -> Iterator[None]:
        """A user's call, in eval mode. If it fails, this rank still joins the other ranks' collectives."""
        with self.call_lock, self._eval_mode(), autocast_if_enabled(self), self._calls.call(adapters):
            yield

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Eval mode inside the block; afterwards every module's `training` flag is restored."""
        self._sleep.require_awake("inference")
        self._rebuild_if_changed()
        if self._in_eval or self._window.is_open:
            try:
                yield
            finally:
                if self._settings.release_inference_cache and not self._window.is_open:
                    self._free_kv()
                    get_accelerator().empty_cache()
            return
        with self._tree.evaluating():
            try:
                self._install()
                yield
            finally:
                self._in_eval = False
                self._uninstall()
                self._release()

    @with_call_lock
    def sleep(self, level: int = 1) -> None:
        """Let inference, or the whole engine, leave the device, so that another model can use the memory. A collective.

        level: 1 frees what inference holds: the KV cache, the snapshot, the int8 copy, decoders and their CUDA graphs;
            the next rollout after `wake()` makes them again. The engine trains, saves and loads as usual.
            2 moves to the host in addition: weights (partitions under ZeRO-3), master weights, optimizer states and
            gradients, at every ZeRO stage and with any optimizer. Their objects stay and can be read, on the host. What
            ZeRO keeps on the host stays there. On CPU ranks, whose device is the host, level 2 frees no more than 1.
        vLLM's levels, for its own copy of the weights: 1 moves it to the host, 2 drops it. Here that copy is the
        snapshot, which is dropped at both levels, because the weights that it is made from are here.

        Nothing wakes by itself. While the engine sleeps, RuntimeError is raised, with the remedy, by `eval()`,
        `inference()`, `generate`, `rollout`, `score` and forwards in eval mode; at level 2 also by forwards,
        `backward`, `step`, saving, loading, `coverage` and `memory_plan`. `train()`, `stats()`, `weight_version` and
        `destroy()` work. A deeper level may follow; the same or a lower one does nothing. Weights, gradients (also
        between `backward` and `step`), random numbers and the weight version are afterwards what they were.

        Every rank must call it; it fails on all ranks or none, and then nothing has moved. Memory that tensors outside
        of the engine share stays on the device, with a warning: a forward that waits for its backward, for example.
        Raises ValueError for another level; RuntimeError inside `inference()`, and if ranks' calls differ or fail.
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

    @with_call_lock
    def destroy(self) -> None:
        """Restore the model's forwards, free all copies, then destroy DeepSpeed's engine.

        The memory of the engine, its model and its optimizer is freed once no references to them are left. What sleep
        has moved to the host stays there. Raises RuntimeError inside `inference()`, where the model holds lent tensors.
        """
        if "_containers" in self.__dict__:  # DeepSpeed also calls this if the engine's constructor failed
            self._refuse_in_window("destroy()")
            for route in self.__dict__.get("_routes", ()):
                route.close()
            if "_before_update" in self.__dict__:
                self._before_update.remove()
            self._watch.close()
            self._waits.close()
            self._uninstall()
            self._free_kv()
            self._release_weights()
            drop_global_references(self.module)
        super().destroy()

    def _detect_changes(self) -> None:
        """Update the weight version for changes since the last call. Skipped in a window, where tensors are lent, and
        while weights are in host memory."""
        if self._window.is_open or self._sleep.level == 2:
            return
        self._version.end_update()
        if self._tree.changed():
            self._watch, self._is_outdated = WeightWatch(self._policy), True
            self._version.loads += 1
        elif self._watch.written():
            self._version.loads += 1

    def _rebuild_if_changed(self) -> bool:
        """Before a window: update the weight version; if modules, adapters or parameters were replaced, read the model
        again and rebuild snapshot, decoder and containers. Every rank does the same. Gives whether it rebuilt them.

        Raises NotImplementedError, as `initialize` does, for an adapter that cannot be merged.
        """
        self._detect_changes()
        if not self._is_outdated:
            return False
        self._builder.read(self._policy)
        installed = self._containers[0].installed
        self._uninstall()
        self._free_kv()
        self._release_weights()
        self._run_on(self._builder.make(self._planner.in_use, self._group))
        self._is_outdated = False
        self._replace_refused_decoder()
        if installed:
            self._install()
        return True

    def _install(self) -> None:
        """Switch forwards to the containers. DeepSpeed's hooks are off on these modules: ZeRO-3's would prefetch."""
        if self._containers[0].installed:
            return
        self._replace_refused_decoder()
        self._unhooked.enter_context(self._switched_hooks.off())
        for container in self._containers:
            container.install()

    def _uninstall(self) -> None:
        for container in self._containers:
            container.uninstall()
        self._unhooked.close()

    def _release(self) -> None:
        """When inference ends, free what the settings say is not kept."""
        with self._profiler.phase("release"):
            if self._module_exchange is not None:
                self._module_exchange.release()
            if self._settings.release_inference_cache:
                self._free_kv()
            keeps = self._rollout_settings.keep_snapshot
            if self._fused.stream is not None or not keeps:
                self._release_weights(keeps_int8=keeps)
            if self._settings.release_inference_cache or not self._rollout_settings.keep_snapshot:
                get_accelerator().empty_cache()

    def _release_weights(self, keeps_int8: bool = False) -> None:
        """Free the snapshot, the int8 copy unless it is kept, and their decoders."""
        for fused in (self._fused,) if self._int8 is None or keeps_int8 else (self._fused, self._int8):
            fused.snapshot.release()
            fused.release()

    def _free_kv(self) -> None:
        self._generator.release_kv()

    def _free_inference(self) -> None:
        """Free all that the next window can make again."""
        with self._profiler.phase("release"):
            if self._module_exchange is not None:
                self._module_exchange.release()
            self._free_kv()
            self._release_weights()

    def _training_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Every tensor of the model and its optimizer, and those of them that have no content to keep."""
        held = tensors_in(self.module, self.optimizer, getattr(self, "basic_optimizer", None))
        return held, scratch(self.optimizer)

    @contextmanager
    def _training_state(self) -> Iterator[None]:
        """Inside the block, even in a window, the model holds its own weights and training states are on the device."""
        on_device = nullcontext() if self._states is None else self._states.on_device()
        # DeepSpeed reads with `modifier_rank`: no write.
        self._sleep.require_awake("saving", level=2)
        with self.call_lock, self._window.suspended(), self._watch.ignoring(), on_device:
            yield

    def _window_refusal(self, call: str) -> RuntimeError | None:
        """The error of a call that must not be made inside a window; None outside of one."""
        if not self._window.is_open:
            return None
        return RuntimeError(f"{call} inside `with engine.inference()`: leave the block first")

    def _refuse_in_window(self, call: str) -> None:
        if error := self._window_refusal(call):
            raise error

    def _require_states(self, call: str) -> None:
        """Raise RuntimeError for a call that needs the training states in their places: inside a window, and asleep."""
        self._refuse_in_window(call)
        self._sleep.require_awake(call, level=2)

    # ------------------------------------------------------------- training

    @with_call_lock
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """In train mode DeepSpeed's forward; in eval mode the model over the snapshot, without gradients.

        Takes the model's arguments and gives its output.
        """
        if self._in_eval or self._window.is_open:
            self._sleep.require_awake("forward() in eval mode")
            self._rebuild_if_changed()
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
        if self._in_eval or self._window.is_open:
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
        self._version.end_update()  # count a step of the optimizer that was made without the engine
        applies, skipped = self.is_gradient_accumulation_boundary(), self.skipped_steps
        try:
            with self._training(), self._watch.ignoring():
                super().step(*args, **kwargs)
            self._version.updating |= self.was_step_applied()
        except BaseException:
            # Even if this rank has not written yet: other ranks may have, and all ranks must refresh together.
            self._version.updating |= applies and self.skipped_steps == skipped
            raise
        finally:
            self._version.end_update()

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

        exclude_frozen_parameters: leaves them out under all their names; DeepSpeed (0.19.8) keeps a tied head.
        """
        with self._training_state():
            state_dict = super().module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state_dict.pop(prefix + name, None)
        return state_dict

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole weights on rank 0 under ZeRO-3, as accelerate requests them; also allowed inside `inference()`."""
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
    def load_module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_module_state_dict; the weights get a new version.

        Raises RuntimeError inside `inference()`.
        """
        self._require_states("load_module_state_dict()")
        try:
            return super().load_module_state_dict(*args, **kwargs)
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

        part: the submodule to write, if the engine's module is a wrapper.
        merged: merge adapters into the weights, in float32 and rounded once; False writes only PEFT's adapter.
        instead: called with each parameter, on every rank in the same order; gives whole float32 values to write in its
            place (a moving average, for example), or None for its own. The whole model is then written in float32.
        Raises RuntimeError inside `inference()`; ValueError for a model that Hugging Face cannot load, and for
        merged=False without PEFT adapters; NotImplementedError for adapters that cannot be merged. If writing fails,
        rank 0 raises the error and all other ranks RuntimeError.
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
        self._version.loads += 1

    # ------------------------------------------------------------ inference

    @property
    @with_call_lock
    def weight_version(self) -> int:
        """A number that grows with every step that applied an update, every load, every other detected write to weights
        (see `mark_weights_changed`), and every change of the active adapters."""
        self._detect_changes()
        return self._snapshot.weights.number()

    def generate(self, *args: Any, adapters: bool | None = None, seed: int | None = None, **kwargs: Any) -> Any:
        """Hugging Face's `generate`, with the same arguments and return value.

        Greedy search and sampling run fused. Beam search, assisted generation and other methods run in Hugging Face's
        own loop over the model's own layers; the first time with a warning.
        Inputs may be on any device, ids of any integer dtype; the output is on the model's device.
        adapters: None uses the model's active adapters; False generates from the base model.
        seed: of the sampling RNG, whose draws are a function of (seed, rank, row, position); None takes `next_seed()`.
            torch's generators are not used.
        `synced_gpus` is accepted and has no effect: the engine synchronises ranks where that is needed.
        Raises, before any weight is gathered: TypeError or ValueError for prompts that cannot be decoded, a sequence
        longer than `max_out_tokens`, or one that memory limits do not allow; NotImplementedError for arguments that are
        not supported.
        """
        with self._call(adapters):
            if self._streams and self._builder.info.is_encoder_decoder:
                raise NotImplementedError(
                    "generate: an encoder-decoder model with hybrid_engine.pin_parameters=false, or with "
                    "inference_tp_size above 1, is not available; use true, and 1"
                )
            return self._generator.generate(args, kwargs, adapters, seed)

    @with_call_lock
    def next_seed(self) -> int:
        """The seed of the next call without a `seed`: a function of torch's initial seed (`torch.manual_seed`) and of
        the number of such calls. The sequence restarts when the initial seed changes."""
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
        **model_inputs: Any,
    ) -> RolloutBatch:
        """Completions of prompts, with the logprobs of the sampled tokens.

        prompt_ids, prompt_mask: [rows, prompt_len], left padded; ids of any integer dtype, a mask of any dtype, on any
            device. A rank may have 0 rows. The returned batch is on the model's device, its ids and masks int64. None
            with `resume`: no new prompts.
        num_generations: completions per prompt, at least 1.
        adapters: None uses the model's active adapters; False samples from the base model.
        row_ids: integers [rows] that key the sampling RNG, unique over all ranks' prompts: with the same ids a rollout
            does not depend on the world size. None numbers the rows of each rank in a range of its own.
        max_new_tokens: integers [rows], of each prompt's completions, at most `sampling.max_new_tokens`; None: that for
            all.
        environment: answers the rows' turns, so that they have several; an object with two methods, each plain (called
            in a thread) or a coroutine. `reset(row, prompt_ids)` gives the token ids of the row's prompt, or None for
            the given one; `step(row, completion_ids)` gets the tokens sampled in a turn, int64 [n] on the host, and
            gives an Observation. row: prompts × generations. While one row's environment works, the others decode.
            What raises ends its row, and is in the batch's `finish_reason` and `errors`.
        environment_limits: None: EnvironmentLimits().
        stop_after: stops the rows that are left once so many are done; they come back as the batch's `unfinished`.
        resume: rows of an earlier rollout to go on with, before the new ones; with their sampling keys and limits.
        on_rows: called, between decode steps, with rows that are done. `rollout_iter` gives them in a loop.
        Raises, before any weight is gathered: TypeError or ValueError for invalid prompts, row ids, limits or
        environments, a model without `generate`, a sequence longer than `max_out_tokens`, or one that memory limits do
        not allow; NotImplementedError for an encoder-decoder, for `model_inputs`, and for an environment together with
        `stop_after` or `resume`; and, if the model runs in its own layers, for each of the three.
        """
        require_token_ids(self._builder.info, model_inputs, "rollout")
        call = RolloutCall(
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
        )
        with self._call(adapters):
            return self._generator.rollout(call, adapters, self._snapshot.weights.number())

    def rollout_iter(self, *args: Any, adapters: bool | None = None, **kwargs: Any) -> Stream[RolloutBatch]:
        """`rollout`, with the same arguments, whose rows come as they finish: `for row in engine.rollout_iter(...)`, or
        `async for`.

        Each item is a RolloutBatch of one row (and of its forks, if it has any), with its `row_index`. The rollout goes
        on in a thread meanwhile, so that rewards can be computed while others decode; this thread's next calls of the
        engine wait for its end. The stream's `output()` is what `rollout` returns. If its iteration ends early,
        `close()` the stream, or use it in a `with`.
        Raises what `rollout` raises, from the iteration.
        """

        def run(put: Callable[[RolloutBatch], None]) -> RolloutBatch:
            given: set[int] = set()

            def give_rows(batch: RolloutBatch) -> None:
                index = batch.row_index.tolist()
                for row in dict.fromkeys(index):
                    if row not in given:
                        given.add(row)
                        put(batch.select_rows([at for at, of_row in enumerate(index) if of_row == row]))

            whole = self.rollout(*args, adapters=adapters, on_rows=give_rows, **kwargs)  # type: ignore[misc]  # no third
            give_rows(whole)
            return whole

        return Stream(run, self.call_lock, self.device, stops=not self.in_step)

    def generate_stream(self, *args: Any, **kwargs: Any) -> Stream[torch.Tensor]:
        """`generate`, with the same arguments, whose tokens come as they are drawn: int64 [rows] for each step, padding
        after a row's end. The stream's `output()` is what `generate` returns.

        Rows are decoded in lockstep: for many rows `rollout_iter` is faster.
        """
        stops = not self.in_step
        return Stream(
            lambda put: self.generate(*args, streamer=TokenStreamer(put), **kwargs), self.call_lock, self.device, stops
        )

    def score(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        adapters: bool | None = None,
        temperature: float = 1.0,
        rows_per_forward: int = 16,
        **model_inputs: Any,
    ) -> Scores:
        """Logprob and entropy of every token of given sequences except the first.  float32 [rows, tokens - 1] each.

        sequences, attention_mask: [rows, tokens], padded on either or both sides, dtypes and device as in `rollout`; a
            rank may have 0 rows.
        adapters: None uses the model's active adapters; False scores with the base model.
        temperature: divides the logits; above 0.
        rows_per_forward: maximum rows computed together.
        With `rollout.weight_dtype: int8` scores are by the training weights, not by those that rollouts sample with.
        Raises TypeError or ValueError for invalid sequences, a temperature of 0 or less, or sequences that the KV cache
        cannot hold; NotImplementedError for an encoder-decoder and for `model_inputs`.
        """
        require_token_ids(self._builder.info, model_inputs, "score")
        with self._call(adapters):
            return self._generator.score(sequences, attention_mask, adapters, temperature, rows_per_forward)

    def _require_memory(self, rows: int, tokens: int) -> None:
        """Raise ValueError, with the memory plan, if `rows` sequences of `tokens` tokens exceed `memory_limit`."""
        if not self._planner.fits(rows, tokens):
            raise ValueError(
                f"rollout.memory_limit={self._planner.limit}: {rows} sequences of {tokens} tokens, new ones included, "
                f"need more; raise it, or ask for fewer rows or tokens\n{self._planner.plan(rows, tokens)}"
            )

    def _training_hooks(self) -> list[RemovableHandle]:
        """Handles of DeepSpeed's hooks on the module: the engine's and ZeRO-3's."""
        handles = [self.module_forward_pre_hook, self.module_forward_post_hook]
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        if isinstance(offload, DeepSpeedZeRoOffload):
            handles += [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
        return handles

    # ----------------------------------------------------------- inspection

    @property
    def in_step(self) -> bool:
        """Whether ranks run inference together: then every rank must make the same calls in the same order."""
        return self._planner.in_use.is_shared or self._exchange is not None

    def memory_plan(self, batch_size: int, prompt_length: int, max_new_tokens: int) -> MemoryPlan:
        """Bytes on this rank that a rollout needs in each mode that this engine could run in. `print` shows a table.

        batch_size: this rank's sequences, every generation of a prompt counted; at most `rollout.max_num_seqs` of them
            are decoded at once.
        prompt_length, max_new_tokens: tokens.
        Only arithmetic: nothing is allocated, and it is not a collective. Raises RuntimeError asleep at level 2.
        """
        self._sleep.require_awake("memory_plan()", level=2)  # plans read where the weights are
        return self._planner.plan(min(batch_size, self._rollout_settings.max_num_seqs), prompt_length + max_new_tokens)

    def coverage(self) -> list[dict[str, str]]:
        """What eval mode runs: for each part of the model its `module` name, `kind`, `container` and the reason.

        A fused decoder is compared with the model's layers on first use; if it differs, later calls report that. Raises
        RuntimeError asleep at level 2.
        """
        self._sleep.require_awake("coverage()", level=2)
        with autocast_if_enabled(self):
            copied = not (self._streams and self._fused.fallback_reason_now())
            return coverage_of(self._containers, self._fused, copied)

    def stats(self) -> dict[str, float | str]:
        """This rank's statistics since the last `eval()`: seconds by phase (`gather_s`, `merge_s`, `prefill_s`,
        `decode_s`, `environment_s` (nothing could decode until an environment answered), `wait_s`, `release_s`,
        `train_s`, `elapsed_s`), `tokens` generated, `prefilled_tokens` and `cached_tokens` of prompts (computed, and
        found in the KV cache; of all ranks that decode one batch), `cached_scored_tokens` (of scored sequences: tokens
        of which only the head ran, with `rollout.cache_hidden_states`), `drafted_tokens`, `accepted_tokens` and
        `saved_steps` of `rollout.speculation` (steps that the accepted tokens saved; of all these ranks too),
        `tokens_per_s` of prefill, decode and wait together, and `gathered_bytes`; `refresh_s`: seconds of gathering and
        merging, the most of the ranks that share weights (`inference_tp_size`) as of their latest request.
        Bytes held now: `snapshot_bytes`, `container_bytes` (copies that fused containers made) and `kv_bytes`.
        `asleep`: the level at which the engine sleeps, 0 if it is awake; `host_bytes`: what it has in host memory for
        that time. `peak_bytes`: the sum of the peaks of the snapshot with one gathered group, the containers, the KV
        cache and the fused decoder's largest forward. `fallback_reason`: why the latest request that could not run
        fused ran in the model's own layers, and the remedy; "" if every request ran fused."""
        exchange_bytes = 0 if self._module_exchange is None else self._module_exchange.nbytes()
        decoders = [self._fused] if self._int8 is None else [self._fused, self._int8]
        peak_bytes = self._snapshot.peak_bytes
        if self._int8 is not None:  # streamed layers are freed before the copy is refreshed
            int8 = self._int8.snapshot
            peak_bytes = max(int8.peak_bytes, int8.nbytes() + peak_bytes)
        return {
            **self._profiler.stats(),
            "snapshot_bytes": sum(fused.snapshot.nbytes() for fused in decoders),
            "container_bytes": sum(fused.nbytes() for fused in decoders),
            "kv_bytes": self._generator.kv_bytes() + exchange_bytes,
            "peak_bytes": peak_bytes
            + sum(fused.nbytes() for fused in decoders)
            + self._generator.peak_kv_bytes()
            + max(fused.peak_activation_bytes() for fused in decoders),
            "asleep": self._sleep.level,
            "host_bytes": self._sleep.host.nbytes(),
            "fallback_reason": self._builder.fallback_reasons.last,
            "native_reason": self._builder.fallback_reasons.last,  # its name in 0.2, for a release
        }


def require_divisible_heads(info: ModelInfo, size: int | str) -> None:
    """Raise ValueError if `size` ranks cannot divide the attention heads that the model's family or `tp_plan` gives."""
    if isinstance(size, int) and size > 1:
        if info.layout is not None:
            require_divisible(info.layout.spec.num_heads, info.layout.spec.num_kv_heads, size)
        for attention in () if info.tp_plan is None else info.tp_plan.attentions:
            require_divisible(attention.heads, attention.kv_heads, size)


def group_of_mpu(mpu: Any, size: int | str) -> dist.ProcessGroup | None:
    """The process group that shares weights in inference, if the caller's `mpu` gives one, as in DeepSpeed's engine;
    None if consecutive ranks share them.

    Raises ValueError if the group's size is not `inference_tp_size`.
    """
    names = ("get_model_parallel_group", "get_tensor_model_parallel_group")
    groups = [getattr(mpu, name)() for name in names if hasattr(mpu, name)]
    if size == "auto" or size == 1 or not groups or dist.get_world_size(groups[0]) == 1:
        return None
    ranks = dist.get_world_size(groups[0])
    same = f"the model parallel group of mpu has {ranks} ranks; give the same"
    refuse([Refusal(ranks != size, "hybrid_engine.inference_tp_size", size, same)])
    return groups[0]


def drop_global_references(model: nn.Module) -> None:
    """Remove the global references that ZeRO-3 keeps to `model`, its engine and its optimizer (docs/upstream.md)."""
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not model]
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():  # the cache is wrapped by a decorator
        getattr(cell.cell_contents, "cache_clear", lambda: None)()
