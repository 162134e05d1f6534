"""TRL trainers under ZeRO-3 on two ranks train bit-identically with and without this engine.

With greedy search, equal completions, losses and weights show that generation equals Hugging Face's `generate` and that
training is undisturbed.
"""

import copy
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hybrid
from hybrid.compat import install as drop_in
from hybrid.compat import trl as integration
from hybrid.compat import trl_forward
from rlhf_examples.common.models import small_model
from rlhf_examples.environments import environment_tokenizer, user
from tests.compat.test_install import fresh_accelerate_state, quietly, without_rollout_block
from tests.engines import CONTAINERS, settings, storage_digest
from tests.marks import slow_but
from tests.tiny_models import END, VOCABULARY, tiny_model

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl")
STEPS, PROMPTS = 3, ["w5 w6 w7", "w8", "w9 w10 w11 w12", "w13 w14"]
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "seed": 0,
}
MIGRATION = Path(__file__).resolve().parents[2] / "docs" / "migration.md"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the tiny models' vocabulary."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": END, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def reward(completions: list[str], seen: list | None = None, **kwargs) -> list[float]:
    """A reward that differs between texts."""
    if seen is not None:
        seen.append(kwargs["completion_ids"])
    return [sum(int(word[1:]) for word in text.split() if word.startswith("w")) % 17 / 4.0 for text in completions]


class GumbelNoise(LogitsProcessor):
    """Gumbel noise as a function of row and length: greedy search then samples, and equal prompts differ."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.rand(scores.shape, generator=torch.Generator().manual_seed(ids.shape[1]))
        return scores - (-uniform.log()).log()


def trainer_of(kind: str, folder: str, hybrid_engine: dict, adapter: str, rollouts: Callable | None, **options):
    """A trainer over the same tiny model, prompts and seed, and the completions that its reward function gets."""
    import trl

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    if kind == "rloo":  # its advantages are 0 if a group's completions are equal
        own = model._get_logits_processor
        model._get_logits_processor = lambda *args, **kwargs: LogitsProcessorList(
            [*own(*args, **kwargs), GumbelNoise()]
        )
    if adapter == "peft":
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    completions: list = []
    config, trainer = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[kind]
    generation = {"do_sample": False, **options.pop("generation_kwargs", {})}
    arguments = config(
        f"{folder}/{kind}",
        deepspeed=without_rollout_block(
            settings(3, train_micro_batch_size_per_gpu="auto", hybrid_engine=hybrid_engine)
        ),
        generation_kwargs=generation,
        **SMALL,
        **options,
    )
    more = {} if rollouts is None else {"rollout_func": rollouts}
    return completions, trainer(
        model=model,
        reward_funcs=lambda **kwargs: reward(seen=completions, **kwargs),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        processing_class=word_tokenizer(),
        **more,
    )


def run_of(engine_class: type, kind: str, folder: str, adapter: str, rollouts: Callable | None, **options) -> dict:
    """A short training: completions, losses, a digest of the weights, and the remaining hooks."""
    enabled = engine_class is hybrid.HybridEngine
    forward = options.pop("training_forward", None)
    with fresh_accelerate_state(), hybrid.installed(training_forward=forward):
        block = {"enabled": True} if enabled else {}
        completions, trainer = trainer_of(kind, folder, block, adapter, rollouts, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quietly(trainer.train)
        engine = trainer.model_wrapped
        assert type(engine) is engine_class
        if trainer.ref_model is not None:
            assert type(trainer.ref_model) is engine_class
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert len(losses) == STEPS and torch.tensor(losses).isfinite().all()
        if enabled:
            stats = engine.stats()
            assert stats["tokens"] > 0, "the engine generated nothing"
            if forward == "exact" and adapter == "peft":  # the reference switches the adapter off and on
                assert engine.weight_version >= STEPS
            else:
                assert engine.weight_version == STEPS
            assert trainer.args.gradient_checkpointing, "TRL's default, whose hook on the embedding is for training"
            assert {row["container"] for row in engine.coverage()} == {os.environ.get(CONTAINERS, "fused")}
            require_reason(engine, caught, beams="num_beams" in options.get("generation_kwargs", {}))
            # Weights that TRL's default gathers around `generate` are read in place, not gathered again.
            nested = rollouts is None and options.get("ds3_gather_for_generation", True)
            assert (stats["gathered_bytes"] == 0) == nested
        return {
            "completions": completions,
            "losses": losses,
            "weights": storage_digest(engine),
            "hooks": hook_counts(engine.module),
        }


def require_reason(engine: hybrid.HybridEngine, caught: list, beams: bool) -> None:
    """The last rollout ran fused; or, with beam search, natively, with one warning on rank 0 over all steps."""
    if os.environ.get(CONTAINERS):
        return
    native = [str(warning.message) for warning in caught if "runs in native containers" in str(warning.message)]
    reason = engine.stats()["fallback_reason"]
    if not beams:
        assert reason == ""
        return
    assert reason.startswith("generate: beam_search runs by Hugging Face's own loop")
    assert native == ([f"the model runs in native containers: {reason}"] if dist.get_rank() == 0 else [])


def hook_counts(model: torch.nn.Module) -> dict[str, tuple]:
    """For each module, whether its forward is replaced, and its number of hooks: DeepSpeed's, each once.

    Except the embedding: TRL toggles gradient checkpointing around `generate`, which leaves a hook there each time.
    """
    return {
        name: ("forward" in module.__dict__, len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
        if not name.endswith("embed_tokens")
    }


def make_model(folder: str) -> None:
    """Save the initial model of every run, on rank 0."""
    if dist.get_rank() == 0:
        tiny_model("llama").save_pretrained(f"{folder}/model")
    dist.barrier()


def check_trains_alike(kind: str, adapter: str, folder: str, ways: list[dict], **options) -> None:
    """Every way to use the engine trains as TRL alone."""
    make_model(folder)
    expected = run_of(DeepSpeedEngine, kind, folder, adapter, None, **options)
    assert len({str(completion) for step in expected["completions"] for completion in step}) > 2
    assert any(expected["losses"]), "all losses are 0: the test is vacuous"
    for way in ways:
        rollouts = integration.rollout_func if way.get("rollout_func") else None
        more = {name: value for name, value in way.items() if name != "rollout_func"}
        actual = run_of(hybrid.HybridEngine, kind, folder, adapter, rollouts, **options, **more)
        for key in expected:
            assert actual[key] == expected[key], f"{way}: {key}: {difference_of(actual[key], expected[key])}"


def difference_of(actual, expected) -> str:
    """A description of the difference."""
    if isinstance(actual, dict):
        actual = {name: value for name, value in actual.items() if value != expected[name]}
        expected = {name: expected[name] for name in actual}
    return f"{actual}, without us {expected}"


NO_GATHER, DEFAULT, ROLLOUT_FUNC = {"ds3_gather_for_generation": False}, {}, {"rollout_func": True}


@needs_trl
@pytest.mark.parametrize("adapter", ["none", pytest.param("peft", marks=pytest.mark.slow)])
def test_grpo_trains_bit_identically_to_trl_alone(ranks, tmp_path, adapter):
    ranks.run(check_trains_alike, "grpo", adapter, str(tmp_path), [NO_GATHER, DEFAULT, ROLLOUT_FUNC], beta=0.1)


def check_training_forward(kind: str, adapter: str, folder: str, forward: str) -> None:
    """At every step logprobs and entropies by `engine.logps` are those of TRL's own method on the same rows."""
    make_model(folder)
    compared: list[int] = []

    def both(forward: str, original: Callable, trainer, model, *args, **kwargs) -> tuple:
        actual = trl_forward.logps_by(forward, original, trainer, model, *args, **kwargs)
        with torch.no_grad():
            expected = original(trainer, model, *args, **kwargs)
        for values, wanted in zip(actual, expected, strict=True):
            if wanted is not None:
                torch.testing.assert_close(values.detach(), wanted, atol=2e-5, rtol=1e-4)
        compared.append(model is trainer.ref_model)
        return actual

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.compat.install.logps_by", both)
        options = {"beta": 0.1, "training_forward": forward, **NO_GATHER}
        run_of(hybrid.HybridEngine, kind, folder, adapter, None, **options)
    assert compared.count(False) >= STEPS and (adapter == "peft" or compared.count(True) >= STEPS), compared


@needs_trl
@pytest.mark.parametrize(
    ("kind", "adapter", "forward"),
    slow_but(
        [("grpo", "none", "packed")],
        [
            ("grpo", "none", "packed"),
            ("grpo", "peft", "packed"),
            ("grpo", "none", "exact"),
            ("rloo", "none", "packed"),
            ("rloo", "peft", "exact"),
        ],
    ),
)
def test_trl_trains_by_engine_logps(ranks, tmp_path, kind, adapter, forward):
    ranks.run(check_training_forward, kind, adapter, str(tmp_path), forward)


@needs_trl
def test_another_training_forward_is_refused():
    with pytest.raises(ValueError, match="training_forward: 'padded' given; it must be one of 'model', 'packed'"):
        hybrid.install(training_forward="padded")
    with pytest.raises(ValueError, match="training_forward: 'padded' given"):
        hybrid.installed(training_forward="padded").__enter__()


@needs_trl
def test_an_inner_block_ends_with_the_outer_forward():
    def forwards() -> set[str]:
        return {patch.build.args[0] for patch in drop_in.TRAINERS.values()}

    with hybrid.installed(training_forward="packed"):
        with hybrid.installed(training_forward="exact"):
            assert forwards() == {"exact"}
        assert forwards() == {"packed"}
        with hybrid.installed():
            assert forwards() == {"packed"}
        assert all(patch.is_active for patch in drop_in.TRAINERS.values())
    assert not any(patch.is_active for patch in drop_in.TRAINERS.values())


def check_beams(folder: str) -> None:
    make_model(folder)
    runs = {}
    for num_beams, engine_class in ((1, DeepSpeedEngine), (3, DeepSpeedEngine), (3, hybrid.HybridEngine)):
        kwargs = {"num_beams": num_beams} if num_beams > 1 else {}
        runs[num_beams, engine_class] = run_of(
            engine_class, "grpo", folder, "none", None, generation_kwargs=kwargs, beta=0.1
        )
    greedy, expected, actual = runs.values()
    assert expected["completions"] != greedy["completions"], "beam search equals greedy search: the test is vacuous"
    assert any(expected["losses"]) and expected["weights"] != greedy["weights"]
    for key in expected:
        assert actual[key] == expected[key], f"{key}: {difference_of(actual[key], expected[key])}"


@needs_trl
@pytest.mark.slow
def test_beam_search_of_generation_kwargs_matches_trl_alone(ranks, tmp_path):
    """TRL passes `num_beams` in a GenerationConfig: completions, losses and weights equal those of TRL alone."""
    ranks.run(check_beams, str(tmp_path))


@pytest.mark.slow
@needs_trl
def test_rloo_trains_bit_identically_to_trl_alone(ranks, tmp_path):
    ranks.run(check_trains_alike, "rloo", "none", str(tmp_path), [NO_GATHER, DEFAULT], beta=0.05)


@pytest.mark.slow
@needs_trl
def test_grpo_with_evaluations_trains_bit_identically_to_trl_alone(ranks, tmp_path):
    ranks.run(
        check_trains_alike,
        "grpo",
        "none",
        str(tmp_path),
        [NO_GATHER, DEFAULT, ROLLOUT_FUNC],
        beta=0.1,
        eval_strategy="steps",
        eval_steps=1,
    )


def check_rollout_func(folder: str) -> list:
    """Sampled: logprobs equal those of Hugging Face's forward and warpers, as TRL expects of vLLM; equal prompts
    differ."""
    make_model(folder)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(50), TopPLogitsWarper(0.95)])
    reference, checked_lengths, completions = tiny_model("llama").eval(), [], []

    def recording_rollout_func(prompts, trainer):
        output = integration.rollout_func(prompts, trainer)
        engine = trainer.model_wrapped
        parameters = list(engine.module.parameters())
        with torch.no_grad(), GatheredParameters(parameters):
            for copy, parameter in zip(reference.parameters(), parameters, strict=True):
                copy.copy_(parameter)
        assert [row.split() for row in prompts] == [
            word_tokenizer().convert_ids_to_tokens(row) for row in output["prompt_ids"]
        ]
        for prompt, completion, logps in zip(*output.values(), strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = warpers(None, logits).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            # float32 sums over other batch shapes
            torch.testing.assert_close(torch.tensor(logps), expected, atol=1e-4, rtol=1e-4)
            checked_lengths.append(len(logps))
        completions.append(output["completion_ids"])
        return output

    options = {"generation_kwargs": {"do_sample": True}, "temperature": 1.3, "top_p": 0.95, "top_k": 50}
    run_of(hybrid.HybridEngine, "grpo", folder, "none", recording_rollout_func, **options)
    assert len(checked_lengths) == 4 * STEPS
    assert all(rows[0] != rows[1] for rows in completions), "a group's completions share their sampling keys"
    return completions


@needs_trl
def test_rollout_func_returns_sampling_logprobs(ranks, tmp_path):
    first, second = ranks.run(check_rollout_func, str(tmp_path))
    assert first != second, "ranks share their sampling keys"


def check_the_pages_code(folder: str) -> None:
    if dist.get_rank() == 0:
        Path(folder, "ds.json").write_text(json.dumps(settings(3, train_micro_batch_size_per_gpu="auto")))
    dist.barrier()
    (section,) = (part for part in MIGRATION.read_text().split("\n## ") if part.startswith("From TRL"))
    section = section.replace("ds.json", f"{folder}/ds.json").replace("runs/grpo", f"{folder}/run")
    first, second = re.findall(r"```python\n(.*?)```", section, re.S)
    for code in (first, first[: first.index("trainer = ")] + second):
        names = {
            "model": tiny_model("llama"),
            "reward": reward,
            "prompts": Dataset.from_dict({"prompt": PROMPTS}),
            "tokenizer": word_tokenizer(),
            "settings": SMALL,
        }
        with fresh_accelerate_state():
            try:
                quietly(exec, code, names)
            finally:
                hybrid.uninstall()
        engine = names["trainer"].model_wrapped
        assert engine.weight_version == STEPS and engine.stats()["tokens"] > 0


@needs_trl
def test_the_trl_code_of_the_migration_page_runs(ranks, tmp_path):
    ranks.run(check_the_pages_code, str(tmp_path))


def stand_in(engine: object, **changes) -> SimpleNamespace:
    """A stand-in for a trainer, with the attributes that `rollout_func` reads."""
    kwargs = {"max_new_tokens": 4, "temperature": 0.7, "cache_implementation": None, "eos_token_id": [2]}
    tokenize = lambda prompts: ([[5, 6], [7]], None, {})  # noqa: E731
    own = {"generation_kwargs": kwargs, "eos_token_ids": [2], "_tokenize_prompts": tokenize}
    return SimpleNamespace(model_wrapped=engine, **{**own, **changes})


def check_unsupported() -> None:
    engine = quietly(hybrid.initialize, model=tiny_model("llama"), config=settings(3))[0]
    good = integration.rollout_func(["a", "b"], stand_in(engine))
    assert [len(row) for row in good["completion_ids"]] == [len(row) for row in good["logprobs"]]
    truncated = {"max_new_tokens": 4, "top_k": 5}
    with pytest.warns(UserWarning, match="rollout_func: top_p=1, top_k=5, .* has no sampling mask"):
        integration.rollout_func(["a", "b"], stand_in(engine, generation_kwargs=truncated))
    before = storage_digest(engine)
    unsupported = {"max_new_tokens": 4, "suppress_tokens": [3]}
    beams = {"max_new_tokens": 4, "num_beams": 2}
    images = lambda prompts: ([[5]], [["an image"]], {})  # noqa: E731
    for trainer, kind, message in (
        (stand_in(torch.nn.Linear(1, 1)), ValueError, r"in a Linear, .* call hybrid.install\(\) before"),
        (stand_in(engine, generation_kwargs=beams), NotImplementedError, "generation_kwargs num_beams=2"),
        (
            stand_in(engine, generation_kwargs=unsupported),
            NotImplementedError,
            r"generation_kwargs suppress_tokens=\[3\]",
        ),
        (stand_in(engine, generation_kwargs=None), ValueError, "use use_vllm=False"),
        (stand_in(engine, _tokenize_prompts=images), NotImplementedError, "prompts with images given"),
    ):
        with pytest.raises(kind, match=message):
            integration.rollout_func(["a", "b"], trainer)
    assert storage_digest(engine) == before and engine.module.training


def test_rollout_func_raises_for_unsupported_settings(ranks):
    ranks.run(check_unsupported)


# Tools and environments


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Adder:
    """An environment with the tool `add`, which completes the prompt and counts its calls."""

    def reset(self, more: str, **example) -> str:
        self.calls = 0
        return more

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return self.calls / 4


SUMS = [[3], [1, 2, 4], [5], [2, 2, 2]]  # 1 and 3 turns
LOOKS = {  # what the trainer gets: the ways to give it the tool
    "tools": {"tools": [add]},
    "environment_factory": {"environment_factory": Adder},
    "environments": {"environment_factory": {"sums": Adder}},
}


def sum_prompts(way: str) -> Dataset:
    """The prompts of SUMS; with an environment its `reset` gives all but the first number."""
    rows = []
    for numbers in SUMS:
        first, more = str(numbers[0]), "".join(f" + {number}" for number in numbers[1:]) + " ="
        own = {"prompt": user(first + more)} if way == "tools" else {"prompt": user(first), "more": more}
        rows.append(own | ({"environment": "sums"} if way == "environments" else {}))
    return Dataset.from_list(rows)


def adding_tokenizer() -> PreTrainedTokenizerFast:
    """The environments' tokenizer, whose calls name their arguments, which TRL requires: "add a 3 b 4"."""
    tokenizer = environment_tokenizer()
    tokenizer.add_tokens([AddedToken(name, single_word=True) for name in "ab"])
    values, pairs = "call.function.arguments.values() | join(' ')", "call.function.arguments.items() | map('join', ' ')"
    tokenizer.chat_template = tokenizer.chat_template.replace(values, f"{pairs} | join(' ')")
    calls = copy.deepcopy(tokenizer.response_template)
    calls["fields"]["tool_calls"]["open_pattern"] = r"add a (?P<a>\d+) b (?P<b>\d+)\s*(?=</s>)"
    tokenizer.response_template = calls
    return tokenizer


def make_adding_model(folder: str) -> None:
    """Save a tiny model that adds numbers one by one, trained for a few seconds; on rank 0."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        tokenizer = adding_tokenizer()
        model = small_model(32, 2, tokenizer)
        texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in added(SUMS)]
        rows = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(40):  # not for longer: completions of a group must differ
            model(**rows, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
    dist.barrier()


def added(sums: list[list[int]]) -> list[list[dict]]:
    """Conversations that compute sums by `add`."""
    conversations = []
    for result, *others in sums:
        messages = user(" + ".join(map(str, [result, *others])) + " =")
        for number in others:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": result, "b": number}}}
            result += number
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "add", "content": str(result)})
        conversations.append([*messages, {"role": "assistant", "content": str(result)}])
    return conversations


def sampled_words(words: list[str]) -> list[int]:
    """1 for the words that the model wrote: from the start or "<assistant>", through "</s>"."""
    mask, inside = [], True
    for word in words:
        mask.append(int(inside and word != "<assistant>"))
        inside = word == "<assistant>" or (inside and word != "</s>")
    return mask


def check_tools(folder: str, way: str) -> list[int]:
    """Every turn's logprobs, masks and rewards; returns the most turns of this rank's rows, by step."""
    import trl

    make_adding_model(folder)
    tokenizer, reference = adding_tokenizer(), AutoModelForCausalLM.from_pretrained(f"{folder}/model").eval()
    seen, most_turns = [], []

    def count_tools(completions, environments=None, **kwargs) -> list[float]:
        seen.append((completions, environments and [environment.calls for environment in environments]))
        return [float(len(messages)) for messages in completions]

    with fresh_accelerate_state(), hybrid.installed():
        arguments = trl.GRPOConfig(
            f"{folder}/run",
            deepspeed=without_rollout_block(
                settings(3, train_micro_batch_size_per_gpu="auto", hybrid_engine={"enabled": True})
            ),
            ds3_gather_for_generation=False,
            max_tool_calling_iterations=3,
            num_iterations=2,  # so that the trainer computes old logprobs, by its own forward
            **{**SMALL, "num_generations": 4, "max_completion_length": 24, "max_steps": 8},
        )
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(f"{folder}/model"),
            reward_funcs=count_tools,
            args=arguments,
            train_dataset=sum_prompts(way),
            processing_class=tokenizer,
            rollout_func=integration.rollout_func,
            **LOOKS[way],
        )
        generate_and_score = trainer._generate_and_score_completions

        def checked(inputs):
            output = generate_and_score(inputs)
            copy_weights(trainer.model_wrapped, reference)
            most_turns.append(check_turns(output, tokenizer, reference, seen[-1]))
            return output

        trainer._generate_and_score_completions = checked
        quietly(trainer.train)
        log = [line for line in trainer.state.log_history if "loss" in line]
        assert "_tool_call_loop" not in vars(trainer), "the trainer's own method is not back"
        assert trainer.model_wrapped.stats()["fallback_reason"] == ""
    assert len(most_turns) == 4, most_turns
    assert any(line.get("tools/call_frequency", 0) > 0 for line in log)
    if way != "tools":
        scored = [line for line in log if "rewards/Adder/mean" in line]
        assert scored, log
        for line in scored:
            assert line["rewards/Adder/mean"] == pytest.approx(line["tools/call_frequency"] / 4, abs=1e-6)
    return most_turns


def copy_weights(engine: hybrid.HybridEngine, reference: torch.nn.Module) -> None:
    parameters = list(engine.module.parameters())
    with torch.no_grad(), GatheredParameters(parameters):
        for copy, parameter in zip(reference.parameters(), parameters, strict=True):
            copy.copy_(parameter)


def check_turns(output: dict, tokenizer, reference: torch.nn.Module, seen: tuple) -> int:
    """The oracles are the words themselves, and Hugging Face's forward over whole rows; returns the most turns."""
    completions, calls = seen
    ids, mask, width = output["completion_ids"], output["completion_mask"], output["completion_ids"].shape[1]
    whole = torch.cat([output["prompt_ids"], ids], dim=1)
    attention = torch.cat([output["prompt_mask"], mask], dim=1)
    with torch.no_grad():
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = reference(whole, attention_mask=attention, position_ids=positions).logits[:, -width - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    learned = (output["tool_mask"] * mask).bool()
    ratios = (output["old_per_token_logps"] - output["sampling_per_token_logps"])[learned].exp()
    torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-4, rtol=0)
    turns = []
    for row, messages in enumerate(completions):
        length = int(mask[row].sum())
        words = tokenizer.convert_ids_to_tokens(ids[row, :length].tolist())
        sampled = output["tool_mask"][row, :length].bool()
        assert sampled.int().tolist() == sampled_words(words), words
        logps = output["sampling_per_token_logps"][row, :length]
        torch.testing.assert_close(logps[sampled], expected[row, :length][sampled], atol=1e-4, rtol=1e-4)
        assert not logps[~sampled].any()
        tools = [message["content"] for message in messages if message["role"] == "tool"]
        assert words.count("<tool>") == len(tools) and messages[-1]["role"] == "assistant"
        assert [words[i + 1] for i, word in enumerate(words) if word == "<tool>" and tools[0].isdecimal()] == [
            text for text in tools if tools[0].isdecimal()
        ]
        if calls is not None:
            assert calls[row] == len(tools)
        turns.append(words.count("<assistant>") + 1)
    return max(turns)


@needs_trl
@pytest.mark.parametrize("way", slow_but(["tools", "environments"], LOOKS))
def test_tools_run_inside_rollout_func(ranks, tmp_path, way):
    """Under ZeRO-3, whose ranks have unequal numbers of turns: TRL's own generation would wait for ever."""
    first, second = ranks.run(check_tools, str(tmp_path), way)
    assert any(own != other for own, other in zip(first, second, strict=True)), f"equal turns: {first}, vacuous"
    assert max(first + second) >= 3, (first, second)
