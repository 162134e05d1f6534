"""DeepSpeedExamples' `inference/huggingface/text-generation/inference-test.py`, call by call, after `hybrid.install()`.

The oracle is the same script with `--hf_baseline`, which runs Hugging Face's `generate` alone.
"""

import json
import math
import os
import string
import time
from dataclasses import dataclass, replace
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import see_memory_usage
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaTokenizerFast,
    PreTrainedTokenizerFast,
)

import hybrid
from tests.inference.test_int8 import rounded
from tests.marks import slow_but
from tests.tiny_models import tiny_model

SENTENCES = (
    "DeepSpeed is a machine learning framework",
    "He is working on",
    "He has a",
    "He got all",
    "Everyone is happy and I can",
    "The new movie that got Oscar this year",
    "In the far far distance from our galaxy,",
    "Peace is the only way",
)
LETTERS = ("<unk>", "<s>", "</s>", "▁", *string.ascii_letters, ",", ".")
FAMILIES = ["bloom", "opt", "gpt2", "gptj", "llama"]


@dataclass(frozen=True)
class Arguments:
    """The script's flags under its names.  performance_iters: of `--test_performance`, 30 in the script."""

    model: str
    world_size: int = 1
    checkpoint_path: str | None = None
    save_mp_checkpoint_path: str | None = None
    batch_size: int = 4
    dtype: str = "float32"
    hf_baseline: bool = False
    use_kernel: bool = False
    max_tokens: int = 1024
    max_new_tokens: int = 12
    greedy: bool = True
    use_meta_tensor: bool = False
    test_performance: bool = False
    test_hybrid_engine: bool = False
    performance_iters: int = 3


class DSPipeline:
    """The calls of the class of this name in the script's `utils.py`."""

    def __init__(self, model_name: str, dtype: torch.dtype, is_meta: bool, device: int, checkpoint_path: str | None):
        self.device = torch.device(get_accelerator().device_name(device))
        self.tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token
        if is_meta:
            config = AutoConfig.from_pretrained(model_name)
            self.repo_root, self.checkpoints_json = self._generate_json(checkpoint_path or model_name)
            with deepspeed.OnDevice(dtype=torch.float16, device="meta"):  # for any --dtype
                self.model = AutoModelForCausalLM.from_config(config)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model_name)
        self.model.eval()
        if dtype == torch.float16:
            self.model.half()

    def __call__(self, inputs: list[str], num_tokens: int, do_sample: bool) -> list[str]:
        return self.generate_outputs(inputs, num_tokens, do_sample)

    @staticmethod
    def _generate_json(repo_root: str) -> tuple[str, str]:
        """The folder of the weights, and the JSON about them: the folder's own, or one in the working directory."""
        own = os.path.join(repo_root, "ds_inference_config.json")
        if os.path.exists(own):
            return repo_root, own
        files = [entry.name for entry in Path(repo_root).rglob("*.[bp][it][n]") if entry.is_file()]
        with open("checkpoints.json", "w", encoding="utf-8") as file:
            json.dump({"type": "BLOOM", "checkpoints": files, "version": 1.0}, file)
        return repo_root, "checkpoints.json"

    def generate_outputs(self, inputs: list[str], num_tokens: int, do_sample: bool) -> list[str]:
        """Texts, prompts included."""
        # The script calls batch_encode_plus, which transformers 5 has removed.
        tokens = self.tokenizer(inputs, return_tensors="pt", padding=True)
        for name in tokens:
            tokens[name] = tokens[name].to(self.device)
        self.model.to(self.device)
        request = {"max_new_tokens": num_tokens, "do_sample": do_sample}
        if isinstance(self.tokenizer, LlamaTokenizerFast):  # the script passes these no mask, so they attend to padding
            outputs = self.model.generate(tokens.input_ids, **request)
        else:
            outputs = self.model.generate(**tokens, **request)
        return self.tokenizer.batch_decode(outputs, skip_special_tokens=True)


def inference_test(args: Arguments, local_rank: int = 0) -> tuple[DSPipeline, list[str]]:
    """The script from its parsed flags to its texts; returns its pipeline and the texts."""
    data_type = getattr(torch, args.dtype)
    see_memory_usage("before init", True)
    pipe = DSPipeline(args.model, data_type, args.use_meta_tensor, local_rank, args.checkpoint_path)
    if args.world_size > 1:
        dist.barrier()  # every rank writes checkpoints.json; the script trusts that building a model takes longer
    weights = {"base_dir": pipe.repo_root, "checkpoint": pipe.checkpoints_json} if args.use_meta_tensor else {}
    if args.test_hybrid_engine:
        config = {
            "train_batch_size": args.batch_size,
            "fp16": {"enabled": data_type == torch.half},
            "hybrid_engine": {"enabled": True},
        }
        pipe.model, *_ = deepspeed.initialize(model=pipe.model, config=config)
        pipe.model.eval()
    elif not args.hf_baseline:
        pipe.model = deepspeed.init_inference(
            pipe.model,
            dtype=data_type,
            mp_size=args.world_size,
            replace_with_kernel_inject=args.use_kernel,
            max_tokens=args.max_tokens,
            save_mp_checkpoint_path=args.save_mp_checkpoint_path,
            **weights,
        )
    see_memory_usage("after init_inference", True)
    inputs = (list(SENTENCES) * math.ceil(args.batch_size / len(SENTENCES)))[: args.batch_size]
    times = []
    for _ in range(args.performance_iters if args.test_performance else 2):
        get_accelerator().synchronize()
        start = time.time()
        outputs = pipe(inputs, num_tokens=args.max_new_tokens, do_sample=not args.greedy)
        get_accelerator().synchronize()
        times.append(time.time() - start)
    if args.test_performance:
        print_perf_stats([seconds / args.max_new_tokens for seconds in times], pipe.model.config)
    return pipe, outputs


def print_perf_stats(latencies: list[float], config) -> None:
    """The sizes that the script reads of `pipe.model.config`, in its line."""
    num_layers = getattr(config, "num_layers", config.num_hidden_layers)
    print(f"Avg BW: {num_layers * config.hidden_size**2 * 12 * 4 / (sum(latencies) / len(latencies)) / 1e9:8.2f} GB/s")


def write_model(family: str, folder: Path) -> str:
    """A model of a family with its tokenizer, a token for each letter, and its weights in two pickles.

    BLOOM's tensors have the hub's names: the base model's, without its prefix.
    """
    model = tiny_model(family, vocab_size=len(LETTERS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and (".h." in name or "layers." in name):
                parameter.mul_(6.0)  # else greedy texts repeat one letter
    tokenizer = LlamaTokenizerFast(vocab={letter: n for n, letter in enumerate(LETTERS)}, merges=[])
    if family != "llama":
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **special)
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    state = list((model.transformer if family == "bloom" else model).state_dict().items())
    files = {"pytorch_model-1.bin": dict(state[::2]), "pytorch_model-2.bin": dict(state[1::2])}
    for name, part in files.items():
        torch.save(part, folder / name)
    index = {"metadata": {}, "weight_map": {key: name for name, part in files.items() for key in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return str(folder)


def baseline_of(args: Arguments) -> list[str]:
    """The texts of `--hf_baseline`, asserted to differ between rows and to be longer than their prompts."""
    alone = replace(args, hf_baseline=True, world_size=1, use_meta_tensor=False, test_hybrid_engine=False)
    _, texts = inference_test(alone)
    added = {text.removeprefix(prompt) for text, prompt in zip(texts, SENTENCES, strict=False)}
    assert len(added) >= min(args.batch_size, 5) and max(map(len, added)) >= args.max_new_tokens // 2
    return texts


@pytest.mark.parametrize(
    ("family", "use_kernel"),
    slow_but(
        [("bloom", True)],
        [(family, use_kernel) for family in FAMILIES for use_kernel in (True, False)],
    ),
)
def test_texts_match_hugging_face_at_one_rank(tmp_path, monkeypatch, family, use_kernel):
    """`--greedy`, with and without `--use_meta_tensor`."""
    monkeypatch.chdir(tmp_path)
    args = Arguments(write_model(family, tmp_path / "model"), use_kernel=use_kernel)
    expected = baseline_of(args)
    for is_meta in (False, True):
        with hybrid.installed(), pytest.warns(FutureWarning, match="mp_size is an old name"):
            pipe, texts = inference_test(replace(args, use_meta_tensor=is_meta))
        assert isinstance(pipe.model, hybrid.InferenceEngine)
        assert {row["container"] for row in pipe.model.coverage()} == {"fused" if use_kernel else "native"}
        assert texts == expected, f"use_meta_tensor={is_meta}"


@pytest.mark.parametrize("use_kernel", slow_but([True], [True, False]))
def test_int8_texts_match_hugging_face_with_rounded_weights(tmp_path, monkeypatch, use_kernel):
    """The oracle is Hugging Face over weights rounded to int8."""
    args = Arguments(write_model("llama", tmp_path), use_kernel=use_kernel, dtype="int8")
    own = AutoModelForCausalLM.from_pretrained(args.model)
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: rounded(own, 1))
        expected = baseline_of(args)
    with hybrid.installed():
        _, texts = inference_test(args)
    assert texts == expected


def test_float16_matches_or_raises_by_the_accelerator(tmp_path):
    """The script's default `--dtype`, which raises where DeepSpeed's accelerator does not support it, as on CPU."""
    args = Arguments(write_model("opt", tmp_path), use_kernel=True, dtype="float16")
    with hybrid.installed():
        if torch.float16 in get_accelerator().supported_dtypes():
            assert inference_test(args)[1] == baseline_of(args)
        else:
            with pytest.raises(ValueError, match="dtype: torch.float16 given; cpu computes torch.float32"):
                inference_test(args)


@pytest.mark.parametrize("use_kernel", slow_but([True], [True, False]))
def test_a_pretrained_model(stories260k, use_kernel):
    args = Arguments(str(stories260k), use_kernel=use_kernel, batch_size=8, max_new_tokens=20)
    expected = baseline_of(args)
    with hybrid.installed():
        assert inference_test(args)[1] == expected


@pytest.mark.slow
def test_performance_and_profiling(tmp_path):
    """`--test_performance` reads sizes of `pipe.model.config`, and uses the profiling of DeepSpeed's engine."""
    args = Arguments(write_model("bloom", tmp_path), use_kernel=True, test_performance=True, batch_size=9)
    expected = baseline_of(args)
    with hybrid.installed():
        pipe, texts = inference_test(args)
    assert texts == expected and len(texts) == 9
    assert pipe.model.module.config is pipe.model.config
    pipe.model.profile_model_time()
    assert pipe(list(SENTENCES), 5, False) == baseline_of(replace(args, max_new_tokens=5, batch_size=8))
    assert len(pipe.model.model_times()) == 5 and pipe.model.model_times() == []


@pytest.mark.slow
def test_sampled_texts_depend_on_torchs_seed(tmp_path):
    """Without `--greedy`, the script's default: the same seed gives the same texts, another seed others."""
    args = Arguments(write_model("llama", tmp_path), use_kernel=True, greedy=False)
    texts = []
    with hybrid.installed():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            texts.append(inference_test(args)[1])
    assert texts[0] == texts[1] != texts[2]


def check_ranks(folder: str, family: str, use_kernel: bool) -> None:
    """Texts of two ranks equal one rank's: from a model, a checkpoint, and the slices that the first run saved."""
    os.chdir(folder)
    args = Arguments(f"{folder}/model", world_size=2, use_kernel=use_kernel)
    expected = baseline_of(args)
    parts = {"use_meta_tensor": True, "checkpoint_path": "parts"}
    for more in ({"save_mp_checkpoint_path": "parts"}, {"use_meta_tensor": True}, parts):
        with hybrid.installed():
            pipe, texts = inference_test(replace(args, **more), local_rank=dist.get_rank())
        assert isinstance(pipe.model, hybrid.InferenceEngine)
        assert texts == expected, more
        assert all("sharded over 2 ranks" in row["why"] for row in pipe.model.coverage())
        dist.barrier()


@pytest.mark.parametrize(
    ("family", "use_kernel"),
    slow_but(
        [("opt", False)],
        [(family, use_kernel) for family in ("bloom", "opt", "llama") for use_kernel in (True, False)],
    ),
)
def test_texts_match_hugging_face_at_two_ranks(ranks, tmp_path, family, use_kernel):
    write_model(family, tmp_path / "model")
    ranks.run(check_ranks, str(tmp_path), family, use_kernel)


def check_sampled_ranks(folder: str) -> list[str]:
    args = Arguments(folder, world_size=2, use_kernel=True, greedy=False)
    with hybrid.installed():
        return inference_test(args, local_rank=dist.get_rank())[1]


def test_two_ranks_sample_the_same(ranks, tmp_path):
    write_model("llama", tmp_path)
    first, second = ranks.run(check_sampled_ranks, str(tmp_path))
    assert first == second and len(set(first)) == 4


def check_hybrid_engine(folder: str) -> None:
    args = Arguments(folder, world_size=2, test_hybrid_engine=True)
    expected = baseline_of(args)
    with hybrid.installed():
        pipe, texts = inference_test(args, local_rank=dist.get_rank())
    assert isinstance(pipe.model, hybrid.HybridEngine)
    assert texts == expected


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_hybrid_engine_flag_matches_hugging_face(ranks, tmp_path, family):
    """`--test_hybrid_engine`: `deepspeed.initialize` without an optimizer, then `eval()` and `generate`."""
    write_model(family, tmp_path)
    ranks.run(check_hybrid_engine, str(tmp_path))
