"""Every method of PEFT: those that cannot be merged run in the model's own modules, over the weights in place or over
the snapshot, and give what the plain PEFT model gives."""

import contextlib
import io
import itertools
import warnings

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

import hybrid
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model

TARGETS = {"target_modules": ["q_proj", "down_proj"]}
TOKENS = {"num_virtual_tokens": 4}
# Settings of each method, for `tiny_model("llama")`. A method that PEFT adds must be placed here or below.
NATIVE = {
    "ADALORA": {**TARGETS, "total_step": 10, "r": 4},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BEFT": TARGETS,
    "BOFT": TARGETS,
    "C3A": {**TARGETS, "block_size": 16},
    "CARTRIDGE": TOKENS,
    "CPT": {"cpt_token_ids": [3, 4, 5, 6], "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "DEFT": TARGETS,
    "DELORA": TARGETS,
    "FOURIERFT": {**TARGETS, "n_frequency": 64},
    "FROD": TARGETS,
    "GLORA": TARGETS,
    "GRALORA": TARGETS,
    "HIRA": TARGETS,
    "HRA": TARGETS,
    "IA3": {**TARGETS, "feedforward_modules": ["down_proj"]},
    "LILY": TARGETS,
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": TARGETS,
    "LOKR": TARGETS,
    "MISS": {**TARGETS, "r": 4},
    "OFT": TARGETS,
    "OSF": TARGETS,
    "P_TUNING": TOKENS,
    "PEANUT": TARGETS,
    "PREFIX_TUNING": TOKENS,
    "PROMPT_TUNING": TOKENS,
    "PSOFT": TARGETS,
    "PVERA": TARGETS,
    "RANDLORA": TARGETS,
    "ROAD": {**TARGETS, "group_size": 8},
    "SHADOW": {},
    "SHIRA": {**TARGETS, "r": 2},
    "SUPERTUNING": TARGETS,
    "TINYLORA": TARGETS,
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5]},
    "UNILORA": TARGETS,
    "VBLORA": {**TARGETS, "vector_length": 16, "num_vectors": 8, "r": 2},
    "VERA": {**TARGETS, "r": 8},
    "WAVEFT": {**TARGETS, "n_frequency": 64},
    "LORA": {**TARGETS, "alora_invocation_tokens": [5]},  # aLoRA; other LoRA is merged: tests/weights/test_lora.py
}
ELSEWHERE = {
    "ADAMSS": "needs scikit-learn",
    "XLORA": "needs trained adapters on disk",
    "MULTITASK_PROMPT_TUNING": "forwards need task_ids, which rollouts and scores do not take",
    "POLY": "forwards need task_ids, which rollouts and scores do not take",
}
# Methods without layers that can be switched off: `adapters=False` is refused.
ALWAYS_ON = {"ADAPTION_PROMPT", "CARTRIDGE", "CPT", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "SHADOW"}
# Steps that are not compared: forwards of AdaLoRA raise on partitioned weights, with plain DeepSpeed too, and those of
# CPT, in eval mode too, write its weights (PEFT 0.21).
UNTRAINED = {("ADALORA", 3), ("CPT", 0), ("CPT", 2)}
BATCH_DEPENDENT = {"LILY"}  # routes by the mean over a batch's tokens: a row has no result of its own
GREEDY = hybrid.SamplingParams(max_new_tokens=5, temperature=0.0)
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}  # float32 sums in another order, of logits that span tens


def test_every_method_of_peft_is_placed():
    methods = {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert methods == NATIVE.keys() | ELSEWHERE.keys()


def adapted(method: str) -> nn.Module:
    """A tiny model with a method's adapter, whose parameters are random."""
    torch.manual_seed(1)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[method](task_type="CAUSAL_LM", **NATIVE[method])
    model = peft.get_peft_model(tiny_model("llama"), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    return model


@torch.no_grad()
def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one unpadded sequence, int64 [tokens], without those of virtual tokens."""
    return model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False).logits[0, -len(ids) :]


def require_plain_results(engine: hybrid.HybridEngine, reference: nn.Module, by_row: bool) -> None:
    """Tokens, logits and logprobs are the plain model's; in rollouts and scores those of each row without padding.

    by_row: whether rows have results of their own.
    """
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 4 + rank, "do_sample": False}
    assert torch.equal(engine.generate(input_ids=ids, **request), reference.generate(input_ids=ids, **request))
    engine.eval()
    actual = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask, use_cache=False).logits
    kept = mask.bool()
    torch.testing.assert_close(actual[:, -6:][kept], expected[:, -6:][kept], **TOLERANCE)
    engine.train()

    before = storage_digest(engine)
    batch = engine.rollout(ids, mask, GREEDY)
    scores = engine.score(batch.sequences, batch.attention_mask)
    assert storage_digest(engine) == before
    if not by_row:
        return
    for row, (own, real) in enumerate(zip(batch.sequences, batch.attention_mask.bool(), strict=True)):
        length = int(mask[row].sum())
        logits = logits_of(reference, own[real])
        logps = logits.log_softmax(-1)[:-1].gather(1, own[real][1:, None])[:, 0]
        torch.testing.assert_close(scores.per_token_logps[row][real[1:]][-len(logps) :], logps, **TOLERANCE)
        new = logps[length - 1 :]
        torch.testing.assert_close(batch.raw_per_token_logps[row, : len(new)], new, **TOLERANCE)
        assert torch.equal(logits[length - 1 : -1].argmax(-1), own[real][length:])


def check_method(method: str, stage: int, block: dict) -> None:
    # Not copies: some methods have hooks on gradients, whose copies belong to the first model.
    model, reference, other, base = (*(adapted(method) for _ in range(3)), tiny_model("llama").eval())
    reference.eval()
    config = settings(stage, rollout={"containers": "fused"}, hybrid_engine={"enabled": True, **block})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(model, config)
        require_plain_results(engine, reference, method not in BATCH_DEPENDENT)
        require_plain_results(engine, reference, method not in BATCH_DEPENDENT)
    native = [str(w.message) for w in caught if "runs in native containers" in str(w.message)]
    assert len(native) == (dist.get_rank() == 0), native
    assert {row["container"] for row in engine.coverage()} == {"native"}
    ids = prompts(1, 7, padded=False, seed=3)[0]
    if method in ALWAYS_ON:
        with pytest.raises(NotImplementedError, match="adapters=False is not available"):
            engine.score(ids, torch.ones_like(ids), adapters=False)
    else:
        scores = engine.score(ids, torch.ones_like(ids), adapters=False)
        expected = logits_of(base, ids[0]).log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(scores.per_token_logps[0], expected, **TOLERANCE)

    if (method, stage) in UNTRAINED:
        return
    plain = engine_of(other, settings(stage, hybrid_engine={"enabled": False}))
    losses = []
    for each in (engine, plain):
        torch.manual_seed(7)  # dropout
        each.train()
        losses.append(train_step(each, 1))
    assert torch.equal(*losses), losses
    assert storage_digest(engine) == storage_digest(plain)
    assert engine.weight_version == 1
    own = list(engine.module.parameters())
    with torch.no_grad(), GatheredParameters(own, enabled=stage == 3):
        for copied, param in zip(reference.parameters(), own, strict=True):
            copied.copy_(param)
    require_plain_results(engine, reference, method not in BATCH_DEPENDENT)


QUICK = [("IA3", 3), ("PREFIX_TUNING", 2), ("P_TUNING", 3), ("VERA", 0), ("LORA", 3), ("TRAINABLE_TOKENS", 3)]


@pytest.mark.parametrize(("method", "stage"), slow_but(QUICK, itertools.product(NATIVE, [0, 2, 3])))
def test_a_method_that_cannot_be_merged_runs_natively(ranks, method, stage):
    ranks.run(check_method, method, stage, {})


SHARED = [{"pin_parameters": False}, {"inference_tp_size": 2}]
QUICK_SHARED = [
    ("IA3", SHARED[0]),
    ("PROMPT_TUNING", SHARED[0]),
    ("LOHA", SHARED[1]),
    ("PROMPT_TUNING", SHARED[1]),
    ("TRAINABLE_TOKENS", SHARED[1]),
]


@pytest.mark.parametrize(("method", "block"), slow_but(QUICK_SHARED, itertools.product(NATIVE, SHARED)))
def test_ranks_that_share_weights_run_it_too(ranks, method, block):
    ranks.run(check_method, method, 3, block)


def check_tensor_parallel(method: str) -> None:
    """Weights that cannot be sliced are whole on every rank if they fit, else gathered layer by layer."""

    def engine_with(**rollout) -> hybrid.HybridEngine:
        block = {"enabled": True, "inference_tp_size": 2, "max_out_tokens": 32}
        return engine_of(adapted(method), settings(3, rollout={"max_num_seqs": 3, **rollout}, hybrid_engine=block))

    whole, reference = engine_with(), adapted(method).eval()
    needs = {str(mode): need.total for mode, need in whole.memory_plan(3, 24, 8).needs.items()}
    tight = engine_with(memory_limit=(needs["streaming"] + needs["pinned"]) // 2)
    for engine, held in ((whole, "weights are whole on every rank"), (tight, "weights are gathered layer by layer")):
        assert held in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
        require_plain_results(engine, reference, by_row=True)


@pytest.mark.parametrize("method", slow_but(["PROMPT_TUNING"], ["IA3", "LOHA", "PROMPT_TUNING"]))
def test_tensor_parallel_holds_whole_weights_or_gathers_layers(ranks, method):
    ranks.run(check_tensor_parallel, method)


def check_prompt_encoders_that_are_read(methods: list[str]) -> None:
    """PEFT does not call an encoder in inference mode: it reads its weight, outside of any forward."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 4 + rank, "do_sample": False}
    for method in methods:
        reference, model = adapted(method).eval(), adapted(method)
        for each in (reference, model):
            each.active_peft_config.inference_mode = True
        engine = engine_of(model, settings(3, hybrid_engine={"enabled": True, "pin_parameters": False}))
        assert torch.equal(engine.generate(input_ids=ids, **request), reference.generate(input_ids=ids, **request))


def test_streamed_prompt_encoders_are_whole_outside_of_forwards(ranks):
    ranks.run(check_prompt_encoders_that_are_read, ["PROMPT_TUNING", "PREFIX_TUNING"])


def trained_by_script(method: str, stage: int, generates: bool) -> tuple[list[float], str]:
    """Losses, and a digest of the weights, of a script that calls DeepSpeed's function after `hybrid.install()`.

    generates: whether its configuration enables `hybrid_engine`, and the model generates before each step.
    """
    model, reference = adapted(method), adapted(method).eval()
    config = settings(stage, hybrid_engine={"enabled": generates})
    trained = [param for param in model.parameters() if param.requires_grad]
    if not generates:
        del config["rollout"]
    with hybrid.installed(), contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    assert isinstance(engine, hybrid.HybridEngine) == generates
    rank, losses = dist.get_rank(), []
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 4 + rank, "do_sample": False}
    for update in range(3):
        if generates:
            before = storage_digest(engine)
            tokens = model.generate(input_ids=ids, **request)
            assert torch.equal(tokens, reference.generate(input_ids=ids, **request))
            assert storage_digest(engine) == before
        losses.append(float(train_step(engine, update)))
        own = list(engine.module.parameters())
        with torch.no_grad(), GatheredParameters(own, enabled=stage == 3):
            for copied, param in zip(reference.parameters(), own, strict=True):
                copied.copy_(param)
    return losses, storage_digest(engine)


def check_installed(method: str, stage: int) -> None:
    assert trained_by_script(method, stage, True) == trained_by_script(method, stage, False)


@pytest.mark.parametrize(
    ("method", "stage"),
    slow_but([("IA3", 3), ("PROMPT_TUNING", 0)], itertools.product(["IA3", "LOHA", "PROMPT_TUNING"], [0, 2, 3])),
)
def test_an_installed_engine_goes_on_with_scripts(ranks, method, stage):
    ranks.run(check_installed, method, stage)


@pytest.mark.parametrize("method", slow_but(["IA3", "PROMPT_TUNING", "TRAINABLE_TOKENS"], NATIVE))
@pytest.mark.filterwarnings("ignore:the model runs in native containers")
def test_init_inference_runs_it(method):
    reference = adapted(method).eval()
    ids, mask = prompts(3, 7, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = reference.generate(input_ids=ids, **request)
    logits = reference(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for inject in (True, False):
        engine = hybrid.init_inference(adapted(method), dtype=torch.float32, replace_with_kernel_inject=inject)
        assert torch.equal(engine.generate(input_ids=ids, **request), expected)
        assert torch.equal(engine(input_ids=ids, attention_mask=mask, use_cache=False).logits, logits)
        engine.destroy()
    with pytest.raises(NotImplementedError, match="dtype: .*int8 given; the model has adapters; merge them first"):
        hybrid.init_inference(adapted(method), dtype="int8")
