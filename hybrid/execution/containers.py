"""Containers replace forwards in eval mode: by the Hugging Face module over the snapshot, or by a whole decoder."""

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from hybrid.decoders.batch import BLOCK_SIZE, is_packable, packed
from hybrid.decoders.fused_model import AnyDecoder, FusedModel
from hybrid.execution.executor import Executor
from hybrid.execution.group_tasks import Task
from hybrid.models.model_info import ModelInfo
from hybrid.models.structure import Part
from hybrid.runtime.inputs import as_model_inputs, require_in_vocabulary
from hybrid.sampling.vocabulary import whole_logits
from hybrid.weights.snapshot import Snapshot

# Settings of a model's configuration that make every forward return more than logits.
MORE_THAN_LOGITS = ("output_hidden_states", "output_attentions", "output_router_logits")


class Forward:
    """The forward of a switched module: its container's, without gradients.

    A copy or a pickle of the module has the module's own forward again, and no reference to the engine. torch.compile
    does not trace it: a compiled model trains compiled, and its modules run here as they are.
    """

    def __init__(self, container: "NativeContainer", original: Callable):
        functools.update_wrapper(self, original)  # Hugging Face reads the signature of a forward
        self.container, self.original = container, original

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part, executor = self.container.part, self.container.executor
        if executor.forward_thread == threading.get_ident() and part.kind != "model":
            return self.container.run_inner(self.original, args, kwargs)
        return self._outermost(args, kwargs)

    @torch.no_grad()
    def _outermost(self, args: tuple, kwargs: dict) -> Any:
        part, executor, window = self.container.part, self.container.executor, self.container.window
        with executor.lock.call():
            if part.kind == "model":
                args, kwargs = as_model_inputs(args, kwargs, window.device)
            if executor.inside:
                return self.container.run(self.original, args, kwargs)
            if not window.is_open and executor.rebuild():
                return part.module.forward(*args, **kwargs)
            return self.container.request(self.original, args, kwargs)

    def __reduce__(self) -> tuple:
        before = self.container.own_forward
        # While a module is copied, the copy exists but has no attributes yet: getattr gives its class's forward.
        return (getattr, (self.container.part.module, "forward")) if before is None else (itself, (before,))


def itself(forward: Callable) -> Callable:
    """Return `forward`: restores, in a copy, a forward that was set on the instance."""
    return forward


class NativeContainer:
    """Replaces one module's forward while the engine is in eval mode."""

    kind = "native"
    why = "the Hugging Face module itself, over the snapshot's weights"

    def __init__(self, part: Part, executor: Executor):
        self.part = part
        self.executor, self.window = executor, executor.window
        self.own_forward = None  # a forward that was set on the instance
        self.forward: Forward | None = None  # one object for all installations: no new forward is found
        self.installed = False

    def install(self) -> None:
        """Replace the module's forward by this container's."""
        module: nn.Module = self.part.module
        self.own_forward = module.__dict__.get("forward")
        if self.forward is None or self.forward.original != module.forward:
            self.forward = Forward(self, module.forward)
        module.forward = self.forward
        self.window.switched.add(module)
        self.installed = True

    def request(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the module's output, if the user executor it directly."""
        name = "" if self.part.kind == "model" else self.part.name
        with self.executor.request(module=name):
            self.require_inputs(original, args, kwargs)
            return self.run(original, args, kwargs)

    def require_inputs(self, original: Callable, args: tuple, kwargs: dict) -> None:
        """Raise ValueError if a call of the model has ids that name an input, such as an image, that is not given."""
        placeholders = self.executor.fused.info.placeholders
        if self.part.kind != "model" or not placeholders.settings:
            return
        given = {**dict(zip(inspect.signature(original).parameters, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        if not given.keys() & {"inputs_embeds", "past_key_values"}:
            ids, mask = given.pop("input_ids", None), given.get("attention_mask")
            placeholders.require_inputs("forward", ids, mask, given)

    def run(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the module's output, inside a request."""
        executor, outer = self.executor, self.executor.forward_thread
        executor.forward_thread = threading.get_ident()
        try:
            with self.window.adapters_matched():
                return self.run_inner(original, args, kwargs)
        finally:
            executor.forward_thread = outer

    def run_inner(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the module's output within `run` of a container around it."""
        forward = self.window.forward_of(self.part.module, original)
        return self.executor.native(self.part.module, functools.partial(forward, *args, **kwargs))

    def uninstall(self) -> None:
        """Restore the module's forward; does nothing if it was not replaced."""
        if not self.installed:
            return
        if self.own_forward is None:
            del self.part.module.forward
        else:
            self.part.module.forward = self.own_forward
        self.window.switched.discard(self.part.module)
        self.own_forward, self.installed = None, False


class FusedContainer(NativeContainer):
    """Replaces the whole model's forward: executor for logits alone run through the fused decoder, others natively."""

    kind = "fused"

    def request(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the logits by the fused decoder if the call asks for nothing else; otherwise the model's own
        output."""
        config = getattr(self.part.module, "config", None)
        more = any(getattr(config, option, False) for option in MORE_THAN_LOGITS)
        call = None if more else plain_call(args, kwargs)
        by_default = more or kwargs.get("use_cache") is None
        warns = call is None and by_default and plain_call(args, {**kwargs, "use_cache": False}) is not None
        fallback_reason = (
            "a forward gives more than logits back, such as a cache (pass use_cache=False; leave "
            f"{', '.join(MORE_THAN_LOGITS)} of the model's configuration off)"
        )
        tokens = None if call is None else call[0].shape[1]
        with self.executor.request(tokens=tokens, fallback_reason=fallback_reason if warns else "") as decoder:
            self.require_inputs(original, args, kwargs)
            if decoder is None or call is None:
                return self.run(original, args, kwargs)
            if self.executor.exchanges_tasks and self.executor.fused.layout is not None:
                require_in_vocabulary(*call, self.executor.fused.layout.spec.vocab_size)
            return CausalLMOutputWithPast(logits=self.executor.compute(decoder, ForwardTask(*call)))


def parts_of(info: ModelInfo, inner: bool = False) -> list[Part]:
    """Return the whole model and each of its parts, once each.

    inner: include the Hugging Face model inside an adapted model, which `generate()` executor.
    """
    model, structure = info.model, info.structure
    parts = [part for part in (*structure.outer, *structure.layers) if part.module is not model]
    if inner and info.base is not model:
        name = next(name for name, module in model.named_modules() if module is info.base)
        parts.append(Part(name, info.base, "model"))
    return [Part("", model, "model"), *{part.module: part for part in parts}.values()]


def containers_of(parts: list[Part], executor: Executor) -> list[NativeContainer]:
    """Return a container for each of `parts_of`'s parts."""
    return [FusedContainer(parts[0], executor), *(NativeContainer(part, executor) for part in parts[1:])]


def plain_call(args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the ids and mask, int64 [rows, tokens], of a call for the logits of whole sequences without a cache; else
    None.

    Padding may be on either side of a sequence but not inside it; positions must count from its first token.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    ids = args[0] if len(args) == 1 else options.pop("input_ids", None)
    mask, positions = options.pop("attention_mask", None), options.pop("position_ids", None)
    plain = options.pop("use_cache", True) is False and options.pop("return_dict", True) is True
    plain = plain and all(isinstance(value, int) and not value for value in options.values())  # other options are off
    if not plain or len(args) > 1 or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    mask = torch.ones_like(ids) if mask is None else mask.long()
    if mask.shape != ids.shape or ids.numel() == 0:
        return None
    expected = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
    fits = ((mask.cumsum(dim=1) - 1 == expected) | (mask == 0)).all()
    return (ids, mask) if bool(fits) and is_packable(mask) else None


@dataclass(frozen=True)
class ForwardTask(Task):
    """Logits of whole sequences, as `padded_logits` returns them.  ids, mask: int64 [rows, tokens]."""

    ids: torch.Tensor
    mask: torch.Tensor

    def run(self, decoder: AnyDecoder, state: Any, is_local: bool = True) -> torch.Tensor:
        return padded_logits(decoder, self.ids, self.mask)


def padded_logits(decoder: AnyDecoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits [rows, tokens, vocab] in the decoder's dtype, 0 at masked tokens.  ids, mask: int64 [rows,
    tokens]."""
    real = mask.bool()
    pieces = [row[kept] for row, kept in zip(ids.cpu(), real.cpu(), strict=True)]
    width = -(-max(map(len, pieces)) // BLOCK_SIZE)
    blocks = [list(range(1 + n * width, 1 + (n + 1) * width)) for n in range(len(pieces))]  # block 0 is reserved
    batch = packed(pieces, [0] * len(pieces), blocks, decoder.device, list(range(len(pieces))))
    decoder.reserve(ids.shape[1])
    kv = decoder.kv(1 + batch.block_tables.numel())
    if decoder.spec.is_recurrent:
        kv = replace(kv, states=decoder.states(len(pieces)))
    hidden = decoder.forward(batch, kv)
    logits = whole_logits(decoder.logits(hidden), decoder.vocabulary)
    padded = torch.zeros(*ids.shape, logits.shape[1], dtype=decoder.dtype, device=decoder.device)
    padded[real] = logits.to(decoder.dtype)
    return padded


def coverage_of(containers: list[NativeContainer], fused: FusedModel, copied: bool = True) -> list[dict[str, str]]:
    """Return for each container its part's `module` name, its `kind`, the `container` that runs, and `why`.

    containers: as installed, one of them a FusedContainer.  copied: whether anything runs on the snapshot.
    """
    fallback_reason, last = fused.fallback_reason_now(), fused.reasons.last
    runs = "" if fallback_reason else fused.description + f"; the latest request ran natively: {last}" * bool(last)
    kind = NativeContainer.kind if fallback_reason else FusedContainer.kind
    rows = []
    for container in containers:
        part, why = container.part, f"{container.why}: {fallback_reason}" if fallback_reason else runs
        copies = fused.snapshot if copied and isinstance(fused.snapshot, Snapshot) else None
        adapters = "" if copies is None else copies.describe_adapters(part.module)
        why = f"{why}; {adapters}" if adapters else why
        rows.append({"module": part.name, "kind": part.kind, "container": kind, "why": why})
    return rows
