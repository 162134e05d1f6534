"""The training engine's eval mode: the snapshot, its decoders, the window, the executor and the containers; and changes
of the training weights, after which they are refreshed or rebuilt."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch import nn
from transformers import DynamicCache

from hybrid.decoders.fused_model import FusedModel
from hybrid.execution.containers import NativeContainer, containers_of, coverage_of, parts_of
from hybrid.execution.executor import Executor, GroupExecutor
from hybrid.execution.generator import Generator
from hybrid.execution.sleep import Sleep
from hybrid.execution.tp_modules import SharedContainer, SharedModules, first_output
from hybrid.generation.hf_cache import KVCache
from hybrid.models.spec import UnsupportedModel
from hybrid.runtime.parallel import InferenceGroup
from hybrid.runtime.profiling import Profiler
from hybrid.training.builder import Mode
from hybrid.training.memory_plan import MemoryPlanner
from hybrid.weights.model_weights import WeightVersion
from hybrid.weights.module_dicts import EngineHooks, ModuleTree
from hybrid.weights.offload import TrainingStates
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.watch import WeightWatch
from hybrid.weights.weight_swap import InferenceWindow

# Returns what runs requests, of the runtime and of the model's own modules in tensor parallel, if they run.
Connect = Callable[["InferenceRuntime", SharedModules | None], Executor]


class WeightChanges:
    """Detects changes of weights that the engine does not make itself: by the optimizer, by writes, by other modules.

    Args:
        policy: the part of the engine's module that generates.
        tree: the modules of the engine's module.
        version: counts the changes.
        sleep: of the engine; at level 2 the weights are in host memory, and nothing is detected.
        optimizer: whose steps write weights.

    Attributes:
        is_outdated: modules or parameters were replaced since the model was last read.
    """

    def __init__(self, policy: nn.Module, tree: ModuleTree, version: WeightVersion, sleep: Sleep, optimizer: Any):
        self.policy, self.tree, self.version, self.sleep, self.is_outdated = policy, tree, version, sleep, False
        self.watch = WeightWatch(policy.parameters())
        is_hooked = isinstance(optimizer, torch.optim.Optimizer)
        self.hook = optimizer.register_step_pre_hook(version.begin_update) if is_hooked else None

    def detect(self, in_window: bool) -> bool:
        """Update the weight version for changes since the last call.

        Args:
            in_window: whether a window is open; replaced modules then count once it has ended.

        Returns:
            Whether modules or parameters were added, removed, replaced or cast.
        """
        if self.sleep.level == 2:
            return False
        self.version.end_update()
        if self.tree.differs():
            if not in_window:
                self.tree.changed()
                self.watch, self.is_outdated = WeightWatch(self.policy.parameters()), True
                self.version.loads += 1
            return True
        self.version.loads += self.watch.written()
        return False

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Do not count writes inside the block: the engine counts them, or they do not change values."""
        with self.watch.ignoring():
            yield

    def close(self) -> None:
        """Take the hook off the optimizer, and the counters off the parameters."""
        if self.hook is not None:
            self.hook.remove()
        self.watch.close()


class InferenceRuntime:
    """The parts that eval mode runs on. Rebuilt when modules, adapters or parameters of the model were replaced.

    Its fields are many: parts of the engine that outlive a rebuild, which are its arguments, and parts that a rebuild
    makes.

    Args:
        planner: chooses how weights are held; its builder makes snapshots and decoders.
        generator: runs the user's calls.
        group: the ranks that share weights.
        device: of the weights.
        profiler: times the phases.
        changes: of the training weights.
        states: training states that are in host memory while a window is open; None: they stay.
        require_awake: raises if the engine sleeps.
        autocast: opens the autocast context of training.
        connect: makes the executor, and attaches the generator to it.
    """

    snapshot: Snapshot
    fused: FusedModel
    int8: FusedModel | None
    shared: SharedModules | None  # the model's own modules in tensor parallel, if they run
    window: InferenceWindow
    executor: Executor
    containers: list[NativeContainer]

    def __init__(
        self,
        planner: MemoryPlanner,
        generator: Generator,
        group: InferenceGroup,
        device: torch.device,
        profiler: Profiler,
        changes: WeightChanges,
        states: TrainingStates | None,
        require_awake: Callable[..., None],
        autocast: Callable[[], AbstractContextManager],
        connect: Connect,
    ):
        self.planner, self.builder, self.generator, self.group = planner, planner.builder, generator, group
        self.device, self.profiler, self.changes, self.states = device, profiler, changes, states
        self.require_awake, self.autocast, self.connect = require_awake, autocast, connect
        self.unhooked = ExitStack()  # on close, restores the hooks of switched modules
        self._run_on(self.builder.make(planner.in_use, group))
        self._replace_refused_decoder()

    @property
    def policy(self) -> nn.Module:
        """The part of the engine's module that generates."""
        return self.builder.info.model

    @property
    def streams(self) -> bool:
        """Whether this rank has no whole copy: ZeRO-3 gathers weights for the model's own layers as they run."""
        return self.planner.in_use.is_shared and self.shared is None

    def decoding_groups(self) -> list[InferenceGroup]:
        """Return the groups whose ranks compute together."""
        groups = (self.fused.group, None if self.shared is None else self.shared.exchange.group)
        return [group for group in groups if group is not None]

    # ---------------------------------------------------------------- build

    def _replace_refused_decoder(self) -> None:
        """If the tensor-parallel decoder cannot be used, share the model's own modules instead."""
        if self.fused.group is not None and self.fused.fallback_reason:
            self._share_modules(self.fused.fallback_reason)

    def _share_modules(self, why: str) -> None:
        """Run the model's own modules in tensor parallel, by its `tp_plan`, if their output equals that of the whole
        weights. A collective.

        Args:
            why: reason for not using our decoder.
        """
        try:
            snapshot, info = self.builder.module_slices(self.group), self.builder.info
            with self.autocast():
                expected = first_output(info, self.device)
            shared = SharedModules(info, snapshot.adapted, self.group, self.device, self._empty_cache)
            self._run_on(self.builder.fused(snapshot, why), shared)
            with self.autocast(), self.window.opened():
                shared.require_same(expected)
            self.snapshot.release()
        except UnsupportedModel as reason:
            self._run_without_slices(f"{why}; {reason}")

    def _run_without_slices(self, why: str) -> None:
        """Hold whole weights on every rank if they fit, else run whole layers, gathered one by one. A collective."""
        if not self.planner.use_whole_if_it_fits():
            self._run_on(self.builder.layer_by_layer(why))
            return
        self.generator.block_pool = self.planner.make_block_pool()
        fused, held = self.builder.make(Mode(), self.group), f"weights are whole on every rank ({why})"
        log_dist(f"hybrid: inference_tp_size has no effect, {held}", ranks=[0])
        fused.remark = f"; {held}"
        if fused.fallback_reason:
            fused.fallback_reason = held
        self._run_on(fused)

    def _empty_cache(self) -> DynamicCache:
        """Return a cache like those of the model's `generate()`, with its own storage."""
        config = self.builder.info.config
        assert config is not None, "`first_output` refuses models without a configuration"
        cache = DynamicCache(config=config.get_text_config(decoder=True))
        KVCache(self.builder.rollout.kv_step).adopt(cache)
        return cache

    def _run_on(self, fused: FusedModel, shared: SharedModules | None = None) -> None:
        assert isinstance(fused.snapshot, Snapshot), "an int8 copy is a second decoder's"
        self.snapshot, self.fused, self.int8 = fused.snapshot, fused, self.builder.make_int8()
        self.shared, fused.rollouts = shared, self.int8
        hooks = self.builder.own_hooks
        self.switched_hooks = EngineHooks(self._switched_modules, hooks)
        self.window = InferenceWindow(
            self.policy,
            fused.snapshot,
            self.profiler,
            swaps=not self.streams,
            merges=not self.streams or (fused.is_shared and not fused.fallback_reason),
            hooks=(self.switched_hooks, EngineHooks(self._other_modules, hooks)),
            slices_swapped=nullcontext if shared is None else shared.swapped,
            states=self.states,
            device=self.device,
            require_awake=self.require_awake,
            model_changed=lambda: self.changes.detect(in_window=True),
        )
        self.executor = self.connect(self, shared)
        parts = parts_of(self.builder.info, inner=isinstance(self.executor, GroupExecutor))
        if shared is None:
            self.containers = containers_of(parts, self.executor)
        else:
            self.containers = [SharedContainer(part, self.executor, shared.exchange) for part in parts]

    def _switched_modules(self) -> set[nn.Module]:
        """Return the modules whose forward is a container's in eval mode."""
        return {container.part.module for container in self.containers}

    def _other_modules(self) -> list[nn.Module]:
        switched = self._switched_modules()
        return [module for module in self.policy.modules() if module not in switched]

    def rebuild_if_changed(self) -> bool:
        """Before a window: update the weight version; if modules, adapters or parameters were replaced, read the model
        again and rebuild snapshot, decoder and containers. Every rank does the same.

        Returns:
            Whether they were rebuilt.
        """
        if self.window.is_open:  # requests detect changes
            return False
        self.changes.detect(in_window=False)
        if not self.changes.is_outdated:
            return False
        self.builder.read(self.policy)
        installed = self.containers[0].installed
        self.uninstall()
        self.generator.release_kv()
        self.release_weights()
        self._run_on(self.builder.make(self.planner.in_use, self.group))
        self.changes.is_outdated = False
        self._replace_refused_decoder()
        if installed:
            self.install()
        return True

    # --------------------------------------------------------------- switch

    def install(self) -> None:
        """Switch forwards to the containers. DeepSpeed's hooks are off on these modules: ZeRO-3's would prefetch."""
        if self.containers[0].installed:
            return
        self._replace_refused_decoder()
        self.unhooked.enter_context(self.switched_hooks.off())
        for container in self.containers:
            container.install()

    def uninstall(self) -> None:
        """Restore the model's own forwards and hooks."""
        for container in self.containers:
            container.uninstall()
        self.unhooked.close()

    # --------------------------------------------------------------- memory

    def release(self) -> None:
        """When inference ends, free what the settings say is not kept."""
        releases_cache, keeps = self.builder.settings.release_inference_cache, self.builder.rollout.keep_snapshot
        with self.profiler.phase("release"):
            if self.shared is not None:
                self.shared.exchange.release()
            if releases_cache:
                self.generator.release_kv()
            if self.fused.stream is not None or not keeps:
                self.release_weights(keeps_int8=keeps)
            if releases_cache or not keeps:
                get_accelerator().empty_cache()

    def release_weights(self, keeps_int8: bool = False) -> None:
        """Free the snapshot, the int8 copy unless it is kept, and their decoders."""
        for fused in (self.fused,) if self.int8 is None or keeps_int8 else (self.fused, self.int8):
            fused.snapshot.release()
            fused.release()

    def free(self) -> None:
        """Free all that the next window can make again."""
        with self.profiler.phase("release"):
            if self.shared is not None:
                self.shared.exchange.release()
            self.generator.release_kv()
            self.release_weights()

    # ----------------------------------------------------------- inspection

    def coverage(self) -> list[dict[str, str]]:
        """Return what eval mode runs, by part of the model."""
        copied = not (self.streams and self.fused.fallback_reason_now())
        return coverage_of(self.containers, self.fused, copied)

    def stats(self) -> dict[str, float | str]:
        """Return the bytes that inference holds, its peak, and the reasons for slower ways."""
        decoders = [self.fused] if self.int8 is None else [self.fused, self.int8]
        peak_bytes = self.snapshot.peak_bytes
        if self.int8 is not None:  # streamed layers are freed before the copy is refreshed
            int8 = self.int8.snapshot
            peak_bytes = max(int8.peak_bytes, int8.nbytes() + peak_bytes)
        copies = sum(fused.nbytes() for fused in decoders)
        activations = max(fused.peak_activation_bytes() for fused in decoders)
        return {
            "snapshot_bytes": sum(fused.snapshot.nbytes() for fused in decoders),
            "container_bytes": copies,
            "kv_bytes": self.generator.kv_bytes() + (0 if self.shared is None else self.shared.exchange.nbytes()),
            "peak_bytes": peak_bytes + copies + self.generator.peak_kv_bytes() + activations,
            "fallback_reason": self.builder.fallback_reasons.last,
            "eager_reason": next(filter(None, (fused.eager_reason for fused in decoders)), ""),
            "cuda_graphs": sum(fused.cuda_graphs for fused in decoders),
        }
