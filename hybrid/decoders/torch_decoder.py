"""A whole decoder in torch operations, on any device: the reference, and what runs where nothing faster does."""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import PAGE, PackedBatch, PagedKV
from hybrid.kernels import torch_ops
from hybrid.models.spec import JOINED, OUTER_ROLES, DecoderLayout, ParamRef
from hybrid.weights.joined import as_one
from hybrid.weights.lora import LowRank

# Copies of weights, by what they are copied from: decoders of one model share what is the same in both, and let go of
# what neither reads any more.
Copies = MutableMapping[tuple, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What the layers of one forward share.

    slots: int64 [tokens]: where each new token's key and value go in the cache.
    groups: the sequences, as attention takes them.
    turns: for each key of `DecoderLayout.rotary`, cos and sin of the tokens, [tokens, rotary_dim / 2].
    bias: ALiBi's, [heads, positions].
    """

    slots: torch.Tensor
    groups: tuple[torch_ops.Group, ...]
    turns: dict[str, tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None


@dataclass(frozen=True)
class LoraDelta:
    """What an adapter adds to the columns of a product from `first` on: scale · b (a x).  a [r, in], b [columns, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    first: int

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add it to `out`, the product of x, rounded where PEFT's forward rounds (0.21)."""
        out[:, self.first : self.first + len(self.b)] += F.linear(F.linear(x, self.a), self.b) * self.scale


class Tensors(dict[str, torch.Tensor]):
    """A layer's tensors by role, joined ones in the place of their parts.  sides: what is added to which products."""

    def __init__(
        self, sides: dict[str, list[LoraDelta]] | None = None, tensors: Mapping[str, torch.Tensor] | None = None
    ):
        super().__init__(tensors or {})
        self.sides = sides or {}


def no_sides(ref: ParamRef) -> list[LowRank]:
    """Of weights that have no adapters beside them."""
    return []


class TorchDecoder:
    """The decoder that `layout` describes, in `dtype`. Call its functions under `torch.no_grad()`, `bind` first.

    weights: a place to its whole tensor, before `select`; None for a bias that is not there. Tensors that need no
    change are used where they are, joined ones where they lie one behind the other; the rest is copied.
    sides: a weight's place to what adapters add beside it, b's rows being those of the place.
    copies: shared with other decoders of the model; held by who reads them.
    """

    context_block = PAGE  # attention reads whole pages

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        sides: Callable[[ParamRef], list[LowRank]] = no_sides,
        copies: Copies | None = None,
    ):
        self.copies: Copies = WeakValueDictionary() if copies is None else copies
        self.layout = layout
        self.spec = layout.spec
        self.weights = weights
        self.sides = sides
        self.dtype = dtype
        self.first_expert = 0  # of those whose weights are here
        self.widest = 0  # elements for each token at the widest moment of a layer
        self.most_tokens = self.most_logits = 0  # of any forward
        stepwise = self.spec.activation_stepwise
        self.activation = torch_ops.gelu_new if stepwise else torch_ops.ACTIVATIONS[self.spec.activation]
        self.outer = Tensors()
        self.blocks = [Tensors() for _ in layout.layers]

    def bind(self) -> None:
        """Read the weights, again or for the first time. Copies are refreshed in place, and keep their addresses."""
        self.bind_part(OUTER_ROLES, range(len(self.blocks)))

    @torch.no_grad()
    def bind_part(self, outer: Collection[str], layers: Iterable[int]) -> None:
        """Read the weights of these roles outside the layers, and of these layers."""
        refs = {name: ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in outer}
        bound = self._bound(refs)
        sides = {role: added for role, added in self.outer.sides.items() if role not in outer} | bound.sides
        self.outer = Tensors(sides, {**self.outer, **bound})
        for index in layers:
            self.blocks[index] = self._bound(self.layout.layers[index])
            self.widest = max(self.widest, self._width(self.blocks[index]))

    def unbind(self) -> None:
        """Let go of the weights: what has not been bound again cannot run."""
        self.outer, self.blocks = Tensors(), [Tensors() for _ in self.blocks]

    def _bound(self, refs: Mapping[str, ParamRef]) -> Tensors:
        """The tensors of these places by role, with joined ones in the place of their parts."""
        read = {role: found for role, ref in refs.items() if (found := self._read(ref)) is not None}
        bound = Tensors(self._sides(refs, {role: len(tensor) for role, tensor in read.items()}))
        for name, roles in JOINED.items():
            if f"{roles[0]}.weight" not in read:
                continue
            weights = [read.pop(f"{role}.weight") for role in roles]
            biases = [read.pop(f"{role}.bias", None) for role in roles]
            bound[f"{name}.weight"] = self._joined([refs[f"{role}.weight"] for role in roles], weights)
            if any(bias is not None for bias in biases):
                pairs = zip(biases, weights, strict=True)
                biases = [weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs]
                bound[f"{name}.bias"] = self._joined([refs.get(f"{role}.bias") for role in roles], biases)
        for role, tensor in read.items():
            bound[role] = self._joined([refs[role]], [tensor])
        return bound

    def _sides(self, refs: Mapping[str, ParamRef], rows: Mapping[str, int]) -> dict[str, list[LoraDelta]]:
        """What adapters add to the products of these places."""
        found: dict[str, list[LoraDelta]] = {}
        joined = {role: name for name, roles in JOINED.items() for role in roles if f"{roles[0]}.weight" in rows}
        for key, ref in refs.items():
            role, _, kind = key.partition(".")
            if kind != "weight":
                continue
            name = joined.get(role, role)
            before = JOINED[name][: JOINED[name].index(role)] if name != role else ()
            first = sum(rows[f"{one}.weight"] for one in before)
            for a, b, scale in self.sides(ref):
                found.setdefault(name, []).append(LoraDelta(a.to(self.dtype), b.to(self.dtype), scale, first))
        return found

    def _read(self, ref: ParamRef) -> torch.Tensor | None:
        """The role's tensor, [out, in]."""
        whole = self.weights(ref)
        return whole if whole is None or ref.select is None else ref.select(whole)

    def _joined(self, refs: Sequence[ParamRef | None], pieces: list[torch.Tensor]) -> torch.Tensor:
        """What is at these places, one above the other: where it lies, or a copy, refreshed where there is one."""
        if pieces[0].dtype == self.dtype and (where_they_lie := as_one(pieces)) is not None:
            return where_they_lie
        sources = (None if ref is None else self.weights(ref) for ref in refs)
        addresses = (0 if source is None else source.data_ptr() for source in sources)
        key = (self.dtype, *zip(refs, addresses, strict=True))
        sizes = [len(piece) for piece in pieces]
        buffer = self.copies.get(key)
        if buffer is None:
            shape = (sum(sizes), *pieces[0].shape[1:])
            buffer = self.copies[key] = torch.empty(shape, dtype=self.dtype, device=pieces[0].device)
        for part, piece in zip(buffer.split(sizes), pieces, strict=True):
            part.copy_(piece)
        return buffer

    def kv(self, pages: int) -> PagedKV:
        """New pages for keys and values, [pages, PAGE, kv_heads, head_dim] in each layer."""
        shape = (pages, PAGE, self.spec.num_kv_heads, self.spec.head_dim)

        def empty() -> list[torch.Tensor]:
            return [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in self.blocks]

        return PagedKV(keys=empty(), values=empty())

    @property
    def device(self) -> torch.device:
        """Where the weights are, or come."""
        return self.weights(self.layout.outer["embedding.weight"]).device

    def nbytes(self) -> int:
        """Bytes of weights that are copies, of this decoder and of those that it shares them with."""
        return sum(copy.nbytes for copy in self.copies.values())

    def _width(self, block: Tensors) -> int:
        """Elements that a layer needs for each token: the residual stream, as it is, normed and in float32; with the
        MLP's products, or with queries, keys and values before and after they are rotated."""
        spec, experts = self.spec, max(self.spec.experts_per_token, 1)
        up, inner = (
            next((block[f"{role}.weight"].shape[dim] for role in roles if f"{role}.weight" in block), 0)
            for roles, dim in ((("gate_up", "up", "experts_gate_up"), -2), (("down", "experts_down"), -1))
        )
        heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return 4 * spec.hidden_size + max(experts * (up + 2 * inner), 2 * heads)

    def activation_bytes(self, tokens: int) -> int:
        """Bytes that a forward over so many tokens takes, about; attention in torch's operations takes more."""
        return tokens * self.widest * self.dtype.itemsize

    def reserve(self, tokens: int) -> None:
        """Nothing to do: the rotary module is asked at every forward."""

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output for every token.  [tokens, hidden]; keys and values go into `kv`."""
        return self.layers(self.embed(batch.ids, batch.positions), batch, kv)

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence.  float32 [sequences, vocab]"""
        return self.logits(self.forward(batch, kv))

    def decode_layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int
    ) -> torch.Tensor:
        """`layers` for one new token of each sequence, as `decode` runs them."""
        return self.layers(hidden, batch, kv, first, last)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, [tokens, hidden].  ids int64 [tokens], positions int [tokens]."""
        self.most_tokens = max(self.most_tokens, len(ids))
        hidden = self._looked_up(ids)
        if self.spec.embedding_multiplier != 1.0:
            hidden = hidden * self.spec.embedding_multiplier
        hidden = self._norm(self.outer, "embedding_norm", hidden)
        if "project_in.weight" in self.outer:
            hidden = self._linear(self.outer, "project_in", hidden)
        if "positions.weight" in self.outer:
            hidden = hidden + F.embedding(positions.long() + self.spec.position_offset, self.outer["positions.weight"])
        return hidden

    def _looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [tokens, embedding_size]."""
        return F.embedding(ids, self.outer["embedding.weight"])

    def layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int = 0, last: int | None = None
    ) -> torch.Tensor:
        """Layers `first` to `last` over hidden [tokens, hidden]; the new tokens' keys and values go into `kv`."""
        span = range(first, len(self.blocks) if last is None else last)
        step = self._step(batch, {self.spec.layers[index].rotary for index in span} - {""})
        for index in span:
            hidden = self._layer(index, hidden, step, kv)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the last layer's output [n, hidden], float32 [n, vocabulary]."""
        self.most_logits = max(self.most_logits, len(hidden))
        hidden = self._norm(self.outer, "final_norm", hidden)
        if "project_out.weight" in self.outer:
            hidden = self._linear(self.outer, "project_out", hidden)
        logits = self._judged(hidden)
        if self.spec.logits_divisor != 1.0:
            logits = logits / self.spec.logits_divisor
        if self.spec.logits_softcap:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits.float()

    def _judged(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output.  [n, vocabulary]"""
        return self._linear(self.outer, "head", hidden)

    def _step(self, batch: PackedBatch, keys: set[str]) -> Step:
        """What the layers of this forward share."""
        groups = torch_ops.sequence_groups(batch.cu_seqlens, batch.lengths, batch.block_tables, PAGE)
        positions = batch.positions.long()
        counts = batch.cu_seqlens.diff().long()
        owner = torch.arange(len(counts), device=positions.device).repeat_interleave(counts)
        slots = batch.block_tables[owner, positions // PAGE].long() * PAGE + positions % PAGE
        rounded = torch.float32 if self.spec.rotary_float32 else self.dtype
        turns = {}
        for key in keys:
            cos, sin = self.layout.rotary[key](positions, self.dtype)
            turns[key] = cos.to(rounded), sin.to(rounded)
        return Step(slots, groups, turns, self._bias(groups))

    def _bias(self, groups: tuple[torch_ops.Group, ...]) -> torch.Tensor | None:
        """ALiBi's addend up to the longest sequence, None where the decoder has none."""
        if self.spec.alibi is None:
            return None
        slopes = torch.tensor(self.spec.alibi, device=self.device)
        longest = max(group.slots.shape[1] for group in groups)
        product_scale = self.spec.attention_scale if self.spec.alibi_bfloat16 else 0.0
        return torch_ops.alibi_bias(slopes, longest, self.dtype, product_scale)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block = self.blocks[index]
        read = self._norm(block, "attention_norm", hidden)
        attended = self._norm(block, "attention_post_norm", self._attention(index, read, step, kv))
        if self.spec.parallel:
            read = self._norm(block, "mlp_norm", hidden) if "mlp_norm.weight" in block else read
            return self._norm(block, "mlp_post_norm", self._mlp(index, read)) + attended + hidden
        hidden = self._added(hidden, attended)
        made = self._mlp(index, self._norm(block, "mlp_norm", hidden))
        return self._added(hidden, self._norm(block, "mlp_post_norm", made))

    def _attention(self, index: int, read: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block, spec, kind = self.blocks[index], self.spec, self.spec.layers[index]
        sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        q, k, v = self._linear(block, "qkv", read).split(sizes, dim=-1)
        if spec.qk_norm == "row":
            q, k = self._norm(block, "q_norm", q), self._norm(block, "k_norm", k)
        q, k, v = (rows.unflatten(-1, (-1, spec.head_dim)) for rows in (q, k, v))  # [tokens, heads, head_dim]
        if spec.qk_norm == "head":
            q, k = self._norm(block, "q_norm", q), self._norm(block, "k_norm", k)
        if kind.rotary:
            q, k = (torch_ops.rotated(x, *step.turns[kind.rotary], spec.rotary_interleaved) for x in (q, k))
        keys, values = kv.keys[index], kv.values[index]
        keys.view(-1, *k.shape[1:])[step.slots] = k
        values.view(-1, *v.shape[1:])[step.slots] = v
        out = torch_ops.paged_attention(
            q,
            keys,
            values,
            step.groups,
            spec.attention_scale,
            spec.attention_softcap,
            kind.window,
            step.bias,
            eager=spec.alibi is not None and not spec.alibi_bfloat16,  # BLOOM rounds its scores
        )
        return self._linear(block, "o", out.flatten(1))

    def _mlp(self, index: int, read: torch.Tensor) -> torch.Tensor:
        block, spec = self.blocks[index], self.spec
        if spec.layers[index].experts:
            return torch_ops.mixture(
                read,
                block["router.weight"],
                range(self.first_expert, self.first_expert + len(block["experts_down.weight"])),
                lambda role, expert: self._expert(block, role, expert - self.first_expert),
                spec.experts_per_token,
                spec.normalize_experts,
                spec.experts_float32,
                self.activation,
            )
        if spec.gated:
            gate, up = self._linear(block, "gate_up", read).chunk(2, dim=-1)
            return self._linear(block, "down", self.activation(gate) * up)
        return self._linear(block, "down", self.activation(self._linear(block, "up", read)))

    def _expert(self, block: Tensors, role: str, expert: int) -> torch.Tensor:
        """The matrix of one of the experts whose weights are here.  [out, in]"""
        return block[f"{role}.weight"][expert]

    def _added(self, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """The residual stream with one more part."""
        multiplier = self.spec.residual_multiplier
        return hidden + (made if multiplier == 1.0 else made * multiplier)

    def _norm(self, tensors: dict[str, torch.Tensor], role: str, x: torch.Tensor) -> torch.Tensor:
        """x normed by `role`; as it is where there is no such norm."""
        weight, spec = tensors.get(f"{role}.weight"), self.spec
        if weight is None:
            return x
        if spec.norm == "layer":
            return F.layer_norm(x, weight.shape, weight, tensors.get(f"{role}.bias"), spec.norm_eps)
        return torch_ops.rms_norm(x, weight, spec.norm_eps, spec.norm_offset, spec.norm_float32)

    def _linear(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, tensors[f"{role}.weight"], tensors.get(f"{role}.bias"))
        for side in tensors.sides.get(role, ()):
            side.add_to(out, x)
        return out
