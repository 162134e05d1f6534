"""The model's own forwards where they are collectives: ranks without a forward run dummy steps with the others."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.execution.deepspeed_moe import TokenExchange, needs_equal_messages, padded_forward
from hybrid.models.structure import Structure
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import Guard, any_rank, stop_others
from hybrid.runtime.profiling import Phase
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.gather import gathered
from hybrid.weights.module_dicts import patched_attribute, unhooked


class CollectiveForwards:
    """Forwards of a whole model, as many on every rank of `group`; None: all ranks.

    interval: forwards between two checks whether every rank is done.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, interval: int = 1):
        self.device, self.group, self.interval = device, group, interval
        self.running = False  # a forward is running: forwards that it calls are part of it
        self.count = 0
        self.called = ""  # as in `opened`

    @contextmanager
    def opened(self, guarded: bool, called: str = "") -> Iterator[None]:
        """Inside the block, forwards run by `run`.

        guarded: a forward may fail on one rank alone.  called: the submodule that every rank calls; "": the model.
        """
        self.count, self.called = 0, called
        yield

    def run(self, module: nn.Module, forward: Callable) -> Any:
        """Return the output of a forward of the model, or of a submodule within the model's forward."""
        if self.running:
            return forward()
        INTERRUPTS.raise_pending()
        self._is_wanted(True)
        return self._run(module, forward)

    def finish(self, interrupt: BaseException | None = None) -> None:
        """Run dummy steps until every rank is done; after an interrupt of this rank, stop the others."""
        while self._is_wanted(False, interrupt):
            self._dummy_step()

    @waiting_to("run the model's own layers")
    def _is_wanted(self, wants: bool, interrupt: BaseException | None = None) -> bool:
        """Whether any rank runs a forward now. Between two checks the answer is True without a collective.

        Raises RankFailedError if another rank was interrupted.
        """
        self.count += 1
        if (self.count - 1) % self.interval > 0:
            return True
        wanted, interrupted = any_rank([wants, interrupt is not None], self.device, self.group)
        if wanted and interrupted:
            stop_others(interrupt, self.group)
            return self._is_wanted(wants, interrupt)
        return wanted

    def _run(self, module: nn.Module, forward: Callable) -> Any:
        raise NotImplementedError

    def _dummy_step(self) -> None:
        raise NotImplementedError


class LayerwiseForwards(CollectiveForwards):
    """Forwards of a model whose weights are partitioned over the ranks. The parameters outside the layers are gathered
    for the whole forward, each layer's while it runs. A rank whose forward fails, or that has none, gathers the same
    layers.

    held: modules that run outside of the model's forward too; they are whole during a request.
    whole: makes parameters whole inside a block, and gives the number of bytes gathered.
    phase, gathered_bytes: time and count the gathering.
    hooks: gives ZeRO-3's hooks, which would gather on their own and are taken off.
    before_forward: called before each forward of the model.
    """

    def __init__(
        self,
        structure: Structure,
        phase: Phase,
        gathered_bytes: Callable[[int], None],
        device: torch.device,
        interval: int = 1,
        group: dist.ProcessGroup | None = None,
        whole: Callable[[list[nn.Parameter]], AbstractContextManager[int]] = gathered,
        hooks: Callable[[], Iterable[RemovableHandle]] = list,
        before_forward: Callable[[], None] = lambda: None,
        held: Iterable[nn.Module] = (),
    ):
        super().__init__(device, group, interval)
        self.held = {module for root in held for module in root.modules()}
        held_params = {param for module in self.held for param in module.parameters()}
        self.held_params = [param for param in outer_params(structure) if param in held_params]
        self.phase, self.gathered_bytes, self.whole = phase, gathered_bytes, whole
        self.hooks, self.before_forward = hooks, before_forward
        self.outer = [param for param in outer_params(structure) if param not in held_params]
        self.layers = [part.module for part in structure.layers]
        self.index = {layer: index for index, layer in enumerate(self.layers)}
        self.passed = 0  # number of layers that the running forward has gathered

    @contextmanager
    def opened(self, guarded: bool, called: str = "") -> Iterator[None]:
        with super().opened(guarded, called), unhooked(self.hooks()), self._gathered(self.held_params):
            yield

    def run(self, module: nn.Module, forward: Callable) -> Any:
        """As `CollectiveForwards.run`. A submodule may be called directly, on every rank.

        Raises NotImplementedError if the model runs its layers in another order, or a layer twice.
        """
        if self.running and module in self.index:
            return self._layer(self.index[module], forward)
        return forward() if module in self.held else super().run(module, forward)

    def _run(self, module: nn.Module, forward: Callable) -> Any:
        has_layers = module not in self.index and any(child in self.index for child in module.modules())
        if self.called and not has_layers:
            with patched_attribute(self, "running", True), self._gathered(module.parameters()):
                return forward()
        # Ranks call the model: one that does not run this submodule takes part by a dummy step, which is a whole pass.
        return self._pass(partial(self._layer, self.index[module], forward) if module in self.index else forward)

    def _dummy_step(self) -> None:
        self._pass(lambda: None)

    def _pass(self, forward: Callable) -> Any:
        """Run a forward of the whole model. Every layer has been gathered at its end, also if it raises."""
        self.before_forward()
        self.passed = 0
        with patched_attribute(self, "running", True), self._gathered(self.outer):
            try:
                return forward()
            finally:
                self._skip_to(len(self.layers))

    def _layer(self, index: int, forward: Callable) -> Any:
        if index < self.passed:
            raise NotImplementedError(
                f"layer {index} runs after layer {self.passed - 1}: weights that are gathered layer by layer need "
                "layers that run in their order; use hybrid_engine.pin_parameters=true and inference_tp_size=1"
            )
        self._skip_to(index)
        self.passed += 1
        with self._gathered(self.layers[index].parameters()):
            return forward()

    def _skip_to(self, index: int) -> None:
        """Gather the layers before `index` that this rank does not run: gathering is a collective."""
        while self.passed < index:
            self.passed += 1
            with self._gathered(self.layers[self.passed - 1].parameters()):
                pass

    @contextmanager
    def _gathered(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        with ExitStack() as stack:
            with self.phase("gather"), waiting_to("gather a layer"):
                self.gathered_bytes(stack.enter_context(self.whole(list(params))))
            yield


def outer_params(structure: Structure) -> list[nn.Parameter]:
    """Return the parameters of the modules outside the layers."""
    return list(dict.fromkeys(param for part in structure.outer for param in part.module.parameters()))


class ExpertForwards(CollectiveForwards):
    """Forwards of a model with DeepSpeed's expert parallelism: each sends tokens to the experts of all ranks.

    The gates' random draws (deepspeed 0.19.8: `use_rts`, `top2_2nd_expert_sampling`) leave training's generators alone.
    """

    def __init__(self, model: nn.Module, exchange: TokenExchange, device: torch.device):
        super().__init__(device, exchange.group)
        self.model, self.exchange, self.guard = model, exchange, Guard(device, exchange.group)
        sends = set(exchange.layers)
        self.sending = {module for module in model.modules() if not sends.isdisjoint(module.modules())}

    def run(self, module: nn.Module, forward: Callable) -> Any:
        """As `CollectiveForwards.run`. A submodule that sends no tokens runs by itself."""
        return super().run(module, forward) if module in self.sending else forward()

    @contextmanager
    def opened(self, guarded: bool, called: str = "") -> Iterator[None]:
        self.guard.is_on = guarded
        with super().opened(guarded, called), ExitStack() as stack:
            for layer in self.exchange.layers:
                original = padded_forward(layer) if needs_equal_messages(layer) else layer.forward
                stack.enter_context(patched_attribute(layer, "forward", self._guarded(original)))
            yield

    def _guarded(self, original: Callable) -> Callable:
        def forward(*args: Any) -> torch.Tensor:
            self.guard.check_other_ranks()
            return original(*args)

        return forward

    def _run(self, module: nn.Module, forward: Callable) -> Any:
        devices = [] if self.device.type == "cpu" else [self.device]
        with patched_attribute(self, "running", True), torch.random.fork_rng(devices, device_type=self.device.type):
            return self.guard.run(forward)

    def _dummy_step(self) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        decodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if decodes else {})
        self._run(self.model, lambda: self.model(**inputs))
