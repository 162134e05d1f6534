"""The model's own forwards where they are collectives: ranks without a forward run dummy steps with the others."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.decoders.deepspeed_moe import TokenExchange, needs_equal_messages, padded_forward
from hybrid.models.structure import Structure
from hybrid.parallel import Guard, any_rank
from hybrid.profiling import Phase
from hybrid.weights.gather import gathered
from hybrid.weights.module_tables import attribute, unhooked


class CollectiveForwards:
    """Forwards of a whole model, as many on every rank of `group`; None: all ranks.

    interval: forwards between two checks whether every rank is done.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, interval: int = 1):
        self.device, self.group, self.interval = device, group, interval
        self.running = False  # a forward is running: forwards that it calls are part of it
        self.count = 0

    @contextmanager
    def opened(self, guarded: bool) -> Iterator[None]:
        """Inside the block, forwards run by `run`."""
        self.count = 0
        yield

    def run(self, module: nn.Module, forward: Callable) -> Any:
        """The output of a forward of the model, or of a submodule within the model's forward."""
        if self.running:
            return forward()
        self._is_wanted(True)
        return self._run(module, forward)

    def finish(self) -> None:
        """Run dummy steps until every rank is done."""
        while self._is_wanted(False):
            self._dummy_step()

    def _is_wanted(self, wants: bool) -> bool:
        """Whether any rank runs a forward now. Between two checks the answer is True without a collective."""
        self.count += 1
        return (self.count - 1) % self.interval > 0 or any_rank([wants], self.device, self.group)[0]

    def _run(self, module: nn.Module, forward: Callable) -> Any:
        raise NotImplementedError

    def _dummy_step(self) -> None:
        raise NotImplementedError


class LayerwiseForwards(CollectiveForwards):
    """Forwards of a model whose weights are partitioned over the ranks. The parameters outside the layers are gathered
    for the whole forward, each layer's while it runs. A rank whose forward fails, or that has none, gathers the same
    layers.

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
        hooks: Callable[[], list[RemovableHandle]] = list,
        before_forward: Callable[[], None] = lambda: None,
    ):
        super().__init__(device, group, interval)
        self.phase, self.gathered_bytes, self.whole = phase, gathered_bytes, whole
        self.hooks, self.before_forward = hooks, before_forward
        self.outer = list(dict.fromkeys(param for part in structure.outer for param in part.module.parameters()))
        self.layers = [part.module for part in structure.layers]
        self.index = {layer: index for index, layer in enumerate(self.layers)}
        self.passed = 0  # number of layers that the running forward has gathered

    @contextmanager
    def opened(self, guarded: bool) -> Iterator[None]:
        with super().opened(guarded), unhooked(self.hooks()):
            yield

    def run(self, module: nn.Module, forward: Callable) -> Any:
        """As `CollectiveForwards.run`. A submodule may be called directly, on every rank.

        Raises NotImplementedError if the model runs its layers in another order, or a layer twice.
        """
        if self.running and module in self.index:
            return self._layer(self.index[module], forward)
        return super().run(module, forward)

    def _run(self, module: nn.Module, forward: Callable) -> Any:
        if module in self.index or not any(child in self.index for child in module.modules()):
            with attribute(self, "running", True), self._gathered(module.parameters()):
                return forward()
        return self._pass(forward)

    def _dummy_step(self) -> None:
        self._pass(lambda: None)

    def _pass(self, forward: Callable) -> Any:
        """Run a forward of the whole model. Every layer has been gathered at its end, also if it raises."""
        self.before_forward()
        self.passed = 0
        with attribute(self, "running", True), self._gathered(self.outer):
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
            with self.phase("gather"):
                self.gathered_bytes(stack.enter_context(self.whole(list(params))))
            yield


class ExpertForwards(CollectiveForwards):
    """Forwards of a model with DeepSpeed's expert parallelism: each sends tokens to the experts of all ranks.

    The gates' random draws (deepspeed 0.19.8: `use_rts`, `top2_2nd_expert_sampling`) leave training's generators alone.
    """

    def __init__(self, model: nn.Module, exchange: TokenExchange, device: torch.device):
        super().__init__(device, exchange.group)
        self.model, self.exchange, self.guard = model, exchange, Guard(device, exchange.group)

    @contextmanager
    def opened(self, guarded: bool) -> Iterator[None]:
        self.guard.is_on = guarded
        with super().opened(guarded), ExitStack() as stack:
            for layer in self.exchange.layers:
                own = padded_forward(layer) if needs_equal_messages(layer) else layer.forward
                stack.enter_context(attribute(layer, "forward", self._guarded(own)))
            yield

    def _guarded(self, own: Callable) -> Callable:
        def forward(*args: Any) -> torch.Tensor:
            self.guard.check_other_ranks()
            return own(*args)

        return forward

    def _run(self, module: nn.Module, forward: Callable) -> Any:
        devices = [] if self.device.type == "cpu" else [self.device]
        with attribute(self, "running", True), torch.random.fork_rng(devices, device_type=self.device.type):
            return self.guard.run(forward)

    def _dummy_step(self) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        decodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if decodes else {})
        self._run(self.model, lambda: self.model(**inputs))
