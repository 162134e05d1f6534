"""Every checkpoint format, written by the library that owns it, loads to equal weights; mismatches are listed."""

import json
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hybrid
from hybrid.inference.checkpoints import save_mp_checkpoint
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.rank_pool import pool_of
from tests.tiny_models import ALL_FAMILIES, NON_DECODERS, prompts, tiny_model, tiny_non_decoder, twin, with_peft

IDS, MASK = prompts(2, 7, padded=True)


def empty_like(model) -> torch.nn.Module:
    """The same model on the meta device."""
    with torch.device("meta"):
        return type(model)._from_config(model.config)  # save_pretrained made its dtype a str, which this reads


def load_into(model, checkpoint, **more) -> hybrid.InferenceEngine:
    return hybrid.init_inference(model, dtype=torch.float32, kernel_inject=True, checkpoint=str(checkpoint), **more)


def require_same_weights(model, reference) -> None:
    expected = reference.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def outputs(model) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, **more).logits[MASK.bool()]


@pytest.mark.parametrize("start", ["meta", "real"])
@pytest.mark.parametrize(
    "name",
    slow_but([*["llama", "gpt2", "bloom", "gemma3_text", "falcon", "mixtral"], "t5"], [*ALL_FAMILIES, *NON_DECODERS]),
)
def test_safetensors_of_every_family_load(tmp_path, name, start):
    """Every family's safetensors, into a model on the meta device and into one with other weights."""
    reference = tiny_non_decoder(name) if name in NON_DECODERS else tiny_model(name).eval()
    reference.save_pretrained(tmp_path)
    initialized = tiny_non_decoder(name, seed=1) if name in NON_DECODERS else tiny_model(name, seed=1)
    model = empty_like(reference) if start == "meta" else initialized
    engine = load_into(model, tmp_path)
    require_same_weights(model, reference)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    actual = engine(IDS, attention_mask=MASK, **more).logits[MASK.bool()]
    torch.testing.assert_close(actual, outputs(reference), atol=1e-3, rtol=1e-4)


def as_pickle(model, path) -> str:
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    return ""


def as_old_pickle(model, path) -> str:
    torch.save(model.state_dict(), path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return ""


def as_shards(model, path) -> str:
    model.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return ""


def as_pickled_shards(model, path) -> str:
    state = list(model.state_dict().items())
    files = {"a.bin": dict(state[::2]), "b.bin": dict(state[1::2])}
    for name, part in files.items():
        torch.save(part, path / name)
    index = {"metadata": {}, "weight_map": {key: name for name, part in files.items() for key in part}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return ""


def as_state_dict(model, path) -> str:
    torch.save(model.state_dict(), path / "weights.pt")
    return "weights.pt"


def as_wrapped_state_dict(model, path) -> str:
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, path / "weights.pt")
    return "weights.pt"


def as_index_file(model, path) -> str:
    as_shards(model, path)
    return "model.safetensors.index.json"


def as_deepspeeds_json(model, path) -> str:
    """Files with different tensors, as DeepSpeed's examples write BLOOM."""
    state = list(model.state_dict().items())
    (path / "files").mkdir()
    for n in range(3):
        torch.save(dict(state[n::3]), path / "files" / f"{n}.pt")
    content = {"type": "BLOOM", "checkpoints": [f"{n}.pt" for n in range(3)], "version": 1.0, "base_dir": "files"}
    (path / "mine.json").write_text(json.dumps(content))
    return "mine.json"


def as_deepspeeds_parts(model, path) -> str:
    """Slices by Megatron's rule and replicated tensors, in DeepSpeed's files."""
    tp, replicated = [{}, {}], {}
    for name, tensor in model.state_dict().items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if "proj" in name:
            for part, piece in zip(tp, tensor.chunk(2, dim), strict=True):
                part[name] = piece.clone()
        else:
            replicated[name] = tensor
    torch.save(replicated, path / "non-tp.pt")
    for rank, part in enumerate(tp):
        torch.save(part, path / f"tp_{rank:02d}_00.pt")
    files = {"non_tp": ["non-tp.pt"], "tp": ["tp_00_00.pt", "tp_01_00.pt"]}
    content = {"type": "ds_model", "checkpoints": files, "version": 1.0, "parallelization": "tp", "tp_size": 2}
    (path / "ds_inference_config.json").write_text(json.dumps(content))
    return ""


FORMS = [
    as_pickle,
    as_old_pickle,
    as_shards,
    as_pickled_shards,
    as_state_dict,
    as_wrapped_state_dict,
    as_index_file,
    as_deepspeeds_json,
    as_deepspeeds_parts,
]


@pytest.mark.parametrize("write", FORMS)
def test_other_checkpoint_formats_load(tmp_path, write):
    reference = tiny_model("llama")
    where = tmp_path / write(reference, tmp_path)
    model = empty_like(reference)
    load_into(model, where)
    require_same_weights(model, reference)


def test_checkpoint_as_a_dict_with_base_dir(tmp_path):
    reference = tiny_model("llama")
    as_deepspeeds_json(reference, tmp_path)
    content = {**json.loads((tmp_path / "mine.json").read_text())}
    for arguments in (
        {"checkpoint": content, "base_dir": str(tmp_path)},
        {"checkpoint": "mine.json", "base_dir": str(tmp_path)},
        {"ckpt_config": {"checkpoint_dir": "mine.json", "base_dir": str(tmp_path)}},
    ):
        model = empty_like(reference)
        hybrid.init_inference(model, dtype="float32", **arguments)
        require_same_weights(model, reference)
    with pytest.raises(ValueError, match="base_dir: given twice"):
        hybrid.init_inference(model, base_dir="a", checkpoint_config={"base_dir": "b"})


@pytest.mark.parametrize("paths", ["from base_dir", "whole paths", "own base_dir"])
def test_deepspeeds_json_in_the_working_directory_loads(tmp_path, monkeypatch, paths):
    """As DeepSpeedExamples' `inference-test.py --use_meta_tensor`: checkpoints.json is in the working directory, its
    files in the folder of a snapshot, which is `base_dir`."""
    reference = tiny_model("llama")
    root, working_directory = tmp_path / "snapshot", tmp_path / "here"
    root.mkdir(), working_directory.mkdir()
    monkeypatch.chdir(working_directory)
    as_pickle(reference, root)
    files = [str(entry) for entry in root.rglob("*.[bp][it][n]")]
    content = {"type": "BLOOM", "checkpoints": files, "version": 1.0}
    if paths != "whole paths":
        content["checkpoints"] = [file.split("/")[-1] for file in files]
    if paths == "own base_dir":
        content["base_dir"] = "../snapshot"  # which has priority over the argument, as in DeepSpeed
    (working_directory / "checkpoints.json").write_text(json.dumps(content))
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = AutoModelForCausalLM.from_config(reference.config)
    base_dir = str(working_directory) if paths == "own base_dir" else str(root)
    kwargs = {"base_dir": base_dir, "checkpoint": "checkpoints.json", "save_mp_checkpoint_path": None, "mp_size": 1}
    with pytest.warns(FutureWarning, match="mp_size is an old name"):
        engine = hybrid.init_inference(
            model.eval(), dtype=torch.float32, replace_with_kernel_inject=True, max_tokens=1024, **kwargs
        )
    require_same_weights(model, reference)
    request = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(engine.to("cpu").generate(IDS, **request), twin(reference).generate(IDS, **request))


def test_missing_files_of_a_json_are_named(tmp_path):
    """The error names the paths that DeepSpeed would open."""
    (tmp_path / "x.json").write_text(json.dumps({"checkpoints": ["a.pt"], "version": 1.0}))
    with pytest.raises(ValueError, match=f"no file at {tmp_path}/there/a.pt$"):
        hybrid.init_inference(
            tiny_model("llama"), dtype="fp32", checkpoint=str(tmp_path / "x.json"), base_dir=f"{tmp_path}/there"
        )


def test_megatron_version_0_qkv_merges_as_deepspeeds_loader(tmp_path):
    """Version 0 has a rank's queries before its keys before its values; DeepSpeed's own merging is the oracle."""
    from deepspeed.runtime.state_dict_factory import MegatronSDLoader

    expected = torch.arange(24.0).view(12, 2)
    blocks = [block.chunk(2) for block in expected.chunk(3)]
    parts = [torch.cat([block[rank] for block in blocks]) for rank in range(2)]
    loader = MegatronSDLoader.__new__(MegatronSDLoader)
    assert torch.equal(loader.merge_query_key_value(parts, 0), expected)
    model = torch.nn.Module()
    model.query_key_value = torch.nn.Linear(2, 12, bias=False)
    for rank, part in enumerate(parts):
        torch.save({"query_key_value.weight": part}, tmp_path / f"{rank}.pt")
    content = {"type": "Megatron", "checkpoints": ["0.pt", "1.pt"], "parallelization": "tp", "version": 0}
    hybrid.init_inference(model, dtype="float32", checkpoint=content, base_dir=str(tmp_path), training_mp_size=2)
    assert torch.equal(model.query_key_value.weight, expected)
    with pytest.raises(ValueError, match="training_mp_size=3"):
        hybrid.init_inference(model, dtype="float32", checkpoint=content, base_dir=str(tmp_path), training_mp_size=3)


def check_training(path: str, stage: int, dtype: torch.dtype, adapter: bool) -> None:
    """A checkpoint of two ranks' training, read on each of them."""
    torch.manual_seed(0)
    model = with_peft(tiny_model("llama")) if adapter else tiny_model("llama", tie_word_embeddings=stage == 2)
    engine = engine_of(model, settings(stage, dtype=dtype))
    train_step(engine)
    engine.save_checkpoint(path, tag="first")
    train_step(engine)
    engine.save_checkpoint(path, tag="second")
    expected = get_fp32_state_dict_from_zero_checkpoint(path) if stage else engine.module.state_dict()
    for where, same in ((path, True), (f"{path}/second", True), (f"{path}/first", False)):
        fresh = tiny_model("llama", seed=1, tie_word_embeddings=not adapter and stage == 2)
        fresh = with_peft(fresh, seed=2) if adapter else fresh
        hybrid.init_inference(fresh, dtype=dtype, checkpoint=where)
        state = fresh.state_dict()
        assert all(torch.equal(state[name], expected[name].to(dtype)) for name in state) == same, where
    dist.barrier()


@pytest.mark.parametrize(
    ("stage", "dtype", "adapter"),
    slow_but(
        [(1, torch.bfloat16, False), (3, torch.float32, False), (3, torch.float32, True)],
        [
            (0, torch.float32, False),
            (1, torch.bfloat16, False),
            (2, torch.float32, False),
            (3, torch.float32, False),
            (3, torch.bfloat16, False),
            (3, torch.float32, True),
        ],
    ),
)
def test_training_checkpoints_load_as_zero_to_fp32(ranks, tmp_path, stage, dtype, adapter):
    """DeepSpeed's own zero_to_fp32 is the oracle."""
    ranks.run(check_training, str(tmp_path), stage, dtype, adapter)
    if stage == 3 and not adapter and dtype == torch.float32:
        next((tmp_path / "second").glob("*rank_1_*optim_states.pt")).unlink()
        with pytest.raises(ValueError, match="no file at .*zero_pp_rank_1_mp_rank_00_optim_states.pt"):
            load_into(tiny_model("llama"), tmp_path)
        (tmp_path / "latest").write_text("third")
        with pytest.raises(ValueError, match="latest names 'third'"):
            load_into(tiny_model("llama"), tmp_path)


# How DeepSpeed's AutoTP slices joined matrices; it rejects Phi-3's own plan.
PACKED = [
    {"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.qkv_proj\.weight$"], "partition_type": "column", "shape": [[32, 16, 16], -1]},
    {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
]
PARTS = {"phi3": {"partition_config": {"use_default_specs": False, "layer_specs": PACKED}}}


def check_parallel_training(folder: str, family: str, stage: int) -> None:
    """DeepSpeed slices a model over two ranks, trains with learning rate 0, and saves."""
    model = tiny_model(family)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2, **PARTS.get(family, {})},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.save_checkpoint(folder, tag="saved")
    dist.barrier()


def check_parts_of_training(folder: str, family: str) -> None:
    reference = tiny_model(family).eval()
    engine = load_into(empty_like(reference), folder, tp={"tp_size": 2}, training_mp_size=2)
    request = {"attention_mask": MASK, "max_new_tokens": 6}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))


training_ranks = pool_of(2)  # a separate pool of two ranks: DeepSpeed's tensor parallelism changes a process for good


@pytest.mark.parametrize(
    ("family", "stage"), slow_but([("llama", 3), ("phi3", 1)], [("llama", 1), ("llama", 3), ("bloom", 0), ("phi3", 1)])
)
def test_tensor_parallel_training_checkpoints_load(ranks, training_ranks, tmp_path, family, stage):
    """Loaded at one rank and at two. The oracle is the model before slicing."""
    training_ranks.run(check_parallel_training, str(tmp_path), family, stage)
    reference = tiny_model(family)
    files = sorted(path.name for path in (tmp_path / "saved").glob("*mp_rank_*_model_states.pt"))
    assert [re.search(r"mp_rank_(\d+)", name)[1] for name in files] == ["00", "01"]
    model = empty_like(reference)
    load_into(model, tmp_path)
    require_same_weights(model, reference)
    ranks.run(check_parts_of_training, str(tmp_path), family)
    with pytest.raises(ValueError, match="training_mp_size: 4 given; .*saved was trained with 2"):
        load_into(model, tmp_path, training_mp_size=4)
    (tmp_path / "saved" / files[1]).unlink()
    with pytest.raises(ValueError, match=f"no file at .*{files[1]}"):
        load_into(model, tmp_path)


def test_tensor_parallel_parts_of_joined_matrices_without_a_map_raise(tmp_path):
    """As other tensor parallelism saves them: by shapes alone gate and up would be mixed."""
    reference = tiny_model("phi3")
    for rank in range(2):
        cut = {
            name: tensor.chunk(2)[rank] if "proj" in name else tensor for name, tensor in reference.state_dict().items()
        }
        for name, tensor in reference.state_dict().items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                cut[name] = tensor.chunk(2, 1)[rank]
        torch.save({"module": cut, "mp_world_size": 2}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(ValueError, match="gate_up_proj.weight.*parts of several matrices each, and no map"):
        load_into(empty_like(reference), tmp_path)
    for rank in range(2):
        state = torch.load(tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
        state["universal_checkpoint_info"] = {"autotp_unsupported_parameter_patterns": {"^a$": "uneven"}}
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(ValueError, match="DeepSpeed does not know how to put together: .*uneven"):
        load_into(empty_like(reference), tmp_path)
    for rank in range(2):
        state["universal_checkpoint_info"] = {"affine_map": {"version": 9, "params": {}}}
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(ValueError, match="a map of parts of version 9, and DeepSpeed here knows version 1"):
        load_into(empty_like(reference), tmp_path)


@pytest.mark.parametrize(
    "write", [as_pickle, as_shards, as_pickled_shards, as_state_dict, as_index_file, as_deepspeeds_json]
)
def test_training_mp_size_with_an_unsharded_checkpoint_raises(tmp_path, write):
    reference = tiny_model("llama")
    where = tmp_path / write(reference, tmp_path)
    with pytest.raises(ValueError, match="training_mp_size: 2 given; .* is not split. Parts are those of"):
        load_into(empty_like(reference), where, training_mp_size=2)


def test_a_base_models_checkpoint_loads_into_a_model_with_a_head(tmp_path):
    """The base model's prefix is added and removed, as transformers does."""
    reference = tiny_non_decoder("bert")
    reference.bert.save_pretrained(tmp_path)
    model = tiny_non_decoder("bert", seed=1)
    with pytest.warns(match="missing: .*cls.predictions"):
        load_into(model, tmp_path, strict=False)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, reference.bert.embeddings.word_embeddings.weight)


# Mismatches


def test_missing_unexpected_and_mismatched_tensors_are_listed(tmp_path):
    reference = tiny_model("llama")
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.extra"] = torch.zeros(2)
    state["lm_head.weight"] = torch.zeros(97, 31)
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = tiny_model("llama", seed=1)
    before = twin(model)
    message = (
        r"missing: model.layers.1.mlp.up_proj.weight, model.norm.weight \(2 in all\); "
        r"unexpected: model.extra \(1 in all\); "
        r"of another shape: lm_head.weight is \[97, 31\] and must be \[97, 32\] \(1 in all\). strict=False"
    )
    with pytest.raises(ValueError, match=message):
        load_into(model, tmp_path, set_empty_params=True)
    require_same_weights(model, before)
    with pytest.warns(match="missing: model.layers.1"):
        load_into(model, tmp_path, strict=False)
    kept = {"model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, (before if name in kept else reference).state_dict()[name]), name
    empty = empty_like(reference)
    with pytest.warns(match="missing: model.layers.1"):
        load_into(empty, tmp_path, strict=False)
    assert torch.equal(empty.model.norm.weight, torch.ones(32))  # as the model initializes it
    assert 0 < empty.lm_head.weight.std() < 0.05


def test_a_tied_head_is_needed_only_once(tmp_path):
    reference = tiny_model("llama", tie_word_embeddings=True)
    state = reference.state_dict()
    for absent in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.save({name: tensor for name, tensor in state.items() if name != absent}, tmp_path / "w.pt")
        model = empty_like(reference)
        model.tie_weights()
        load_into(model, tmp_path / "w.pt")
        require_same_weights(model, reference)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_missing_expert_is_listed(tmp_path):
    reference = tiny_model("mixtral")
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in state if "experts.3" in name)
    del state[gone]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"of another shape: .*experts"):
        load_into(tiny_model("mixtral"), tmp_path)


def test_damaged_files_raise(tmp_path):
    reference = tiny_model("llama")
    reference.save_pretrained(tmp_path / "st")
    for form, write, name in (("st", None, "model.safetensors"), ("bin", as_pickle, "pytorch_model.bin")):
        folder = tmp_path / form
        if write:
            folder.mkdir()
            write(reference, folder)
        content_before = (folder / name).read_bytes()
        for content in (
            content_before[: len(content_before) // 2],
            content_before[:-10],
            content_before[:7],
            b"",
            b"\0" * 100 + content_before[100:],
        ):
            (folder / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{name} cannot be read; it is damaged"):
                load_into(tiny_model("llama"), folder)


def check_zero_saved(path: str) -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    engine.save_checkpoint(path, tag="saved")
    dist.barrier()


def test_damaged_training_checkpoints_raise(ranks, tmp_path):
    """Every file of a ZeRO-3 checkpoint truncated, emptied, overwritten, removed, or from another run."""
    ranks.run(check_zero_saved, str(tmp_path))
    saved = tmp_path / "saved"
    load_into(tiny_model("llama"), tmp_path)
    files = sorted(saved.glob("*.pt"))
    assert len(files) == 4
    for path in files:
        content_before = path.read_bytes()
        for content in (
            content_before[: len(content_before) // 2],
            content_before[:-10],
            b"",
            b"\0" * 100 + content_before[100:],
        ):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{path.name} cannot be read; it is damaged"):
                load_into(tiny_model("llama"), tmp_path)
        torch.save({"step": 1}, path)
        with pytest.raises(ValueError, match=f"{path.name} has no .*; a DeepSpeed engine did not save it"):
            load_into(tiny_model("llama"), tmp_path)
        torch.save([1], path)
        with pytest.raises(ValueError, match=f"{path.name} has no .*; a DeepSpeed engine did not save it"):
            load_into(tiny_model("llama"), tmp_path)
        path.unlink()
        with pytest.raises(ValueError, match="no file at .*mp_rank_00|one of 2 ranks', and there are 1"):
            load_into(tiny_model("llama"), tmp_path)
        path.write_bytes(content_before)
    optimizer = next(path for path in files if "rank_1" in path.name and "optim" in path.name)
    content_before = optimizer.read_bytes()
    state = torch.load(optimizer, weights_only=False)
    flats = state["optimizer_state_dict"]["fp32_flat_groups"]
    state["optimizer_state_dict"]["fp32_flat_groups"] = [flat[:-5] for flat in flats]
    torch.save(state, optimizer)
    with pytest.raises(ValueError, match="rank_1.*optim_states.pt has .* elements of weights, and .* says"):
        load_into(tiny_model("llama"), tmp_path)
    optimizer.write_bytes(content_before)
    for content in (b"", b"\n", b"third", b"\xff\xfe"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(ValueError, match="latest names '.*', and there is no such directory"):
            load_into(tiny_model("llama"), tmp_path)


INDEX = "model.safetensors.index.json"
OTHER_JSON = "mine.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, b'{"weight_map": {"model.norm.w', "is not JSON"),
        (INDEX, b"\xff\x00\x01", "is not JSON"),
        (INDEX, b"", "is not JSON"),
        (INDEX, b"[" * 100_000, "is not JSON"),
        (INDEX, b"[1]", "holds a list, not a dictionary"),
        (INDEX, b'{"metadata": {}}', "has no weight_map"),
        (INDEX, b'{"weight_map": ["a"]}', "has no weight_map"),
        (INDEX, b'{"weight_map": {}}', "has no weight_map"),
        (INDEX, b'{"weight_map": {"model.norm.weight": 3}}', "has no weight_map"),
        (INDEX, b'{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "no file at .*gone.safetensors"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"', "is not JSON"),
        (OTHER_JSON, b'{"type": "BLOOM"}', "DeepSpeed's JSON has `checkpoints`, a list of files; this one has type"),
        (OTHER_JSON, b'{"checkpoints": "a.pt"}', "DeepSpeed's JSON has `checkpoints`, a list"),
        (OTHER_JSON, b'{"checkpoints": []}', "checkpoints is empty"),
        (OTHER_JSON, b'{"checkpoints": [1, 2]}', r"checkpoints has \[1, 2\]; it must be a list of files"),
        (OTHER_JSON, b'{"checkpoints": {"non_tp": ["a.pt"]}}', "it must have `tp`, the ranks' parts"),
        (OTHER_JSON, b'{"checkpoints": {"tp": "a.pt"}}', "checkpoints has 'a.pt'; it must be a list of files"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"], "type": "Llama"}', "type='Llama' given; it is one of megatron, bloom"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"], "type": 3}', "type=3 given; it is one of"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"], "parallelization": "dp"}', "parallelization='dp' given"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"], "parallelization": "tp", "tp_size": "2"}', "1 files for tp_size='2'"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"], "parallelization": "tp", "tp_size": 2}', "1 files for tp_size=2"),
        (OTHER_JSON, b'{"checkpoints": ["a.pt"], "parallelization": "tp", "version": "new"}', "version='new' given"),
    ],
)
def test_invalid_index_and_json_files_raise(tmp_path, name, content, message):
    reference = tiny_model("llama")
    if name == INDEX:
        as_shards(reference, tmp_path)
    torch.save(reference.state_dict(), tmp_path / "a.pt")
    (tmp_path / name).write_bytes(content)
    for where in (tmp_path / name, tmp_path) if name == INDEX else (tmp_path / name,):
        with pytest.raises(ValueError, match=message):
            load_into(tiny_model("llama"), where)


@pytest.mark.parametrize("kind", ["BLOOM", "bloom", "ds_model", "Megatron", "megatron", None])
@pytest.mark.parametrize("way", ["pp", "tp", None])
def test_types_of_deepspeeds_json(tmp_path, kind, way):
    """`type` alone implies how Megatron's files are joined; an explicit `parallelization` has priority."""
    reference = tiny_model("llama")
    settings = {key: value for key, value in (("type", kind), ("parallelization", way)) if value is not None}
    if (way or ("tp" if kind in ("Megatron", "megatron") else "pp")) == "pp":
        as_deepspeeds_json(reference, tmp_path)
        content = {**json.loads((tmp_path / "mine.json").read_text()), **settings}
    else:
        as_deepspeeds_parts(reference, tmp_path)
        content = {**json.loads((tmp_path / "ds_inference_config.json").read_text()), **settings}
    for key in {"type", "parallelization"} - settings.keys():
        content.pop(key, None)
    (tmp_path / "said.json").write_text(json.dumps(content))
    model = empty_like(reference)
    load_into(model, tmp_path / "said.json")
    require_same_weights(model, reference)


@pytest.mark.parametrize("version", [0, 2.0])
def test_megatrons_checkpoint_version_is_read_from_the_files(tmp_path, version):
    """As DeepSpeed's reader does where the JSON's version is null: Megatron's files contain their layout's version."""
    expected = torch.arange(24.0).view(12, 2)
    blocks = [block.chunk(2) for block in expected.chunk(3)]
    for rank in range(2):
        part = torch.cat([block[rank] for block in blocks]) if version == 0 else expected.chunk(2)[rank]
        content = {"module": {"query_key_value.weight": part}, "checkpoint_version": version}
        torch.save(content, tmp_path / f"{rank}.pt")
    model = torch.nn.Module()
    model.query_key_value = torch.nn.Linear(2, 12, bias=False)
    content = {"type": "Megatron", "checkpoints": ["0.pt", "1.pt"], "version": None}
    hybrid.init_inference(model, dtype="float32", checkpoint=content, base_dir=str(tmp_path))
    assert torch.equal(model.query_key_value.weight, expected)


def test_damaged_saved_mp_checkpoints_raise(tmp_path):
    reference = tiny_model("llama")
    names = list(reference.state_dict())
    for rank in range(2):
        save_mp_checkpoint(str(tmp_path), names, reference.state_dict().__getitem__, 2, rank)
    model = empty_like(reference)
    load_into(model, tmp_path)
    require_same_weights(model, reference)
    second = tmp_path / "tp_01.safetensors"
    content_before = second.read_bytes()
    state = load_file(second)
    save_file({name: tensor for name, tensor in state.items() if "up_proj" not in name}, second)
    with pytest.raises(ValueError, match=r"of another shape: .*up_proj.weight is \[24, 32\] and must be \[48, 32\]"):
        load_into(empty_like(reference), tmp_path)
    second.write_bytes(content_before[:-100])
    with pytest.raises(ValueError, match="tp_01.safetensors cannot be read; it is damaged"):
        load_into(empty_like(reference), tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match="no file at .*tp_01.safetensors"):
        load_into(empty_like(reference), tmp_path)
    (tmp_path / "ds_inference_config.json").unlink()
    with pytest.raises(ValueError, match="has none of ds_inference_config.json"):
        load_into(empty_like(reference), tmp_path)


def test_missing_files_raise(tmp_path):
    reference = tiny_model("llama")
    as_shards(reference, tmp_path / "shards")
    gone = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"no file at .*{gone.name}"):
        load_into(tiny_model("llama"), tmp_path / "shards")
    (tmp_path / "index").mkdir()
    as_pickled_shards(reference, tmp_path / "index")
    torch.save({"model.norm.weight": torch.ones(32)}, tmp_path / "index" / "b.bin")
    with pytest.raises(ValueError, match="names tensors that its files do not have: .*q_proj"):
        load_into(tiny_model("llama"), tmp_path / "index")
    with pytest.raises(ValueError, match="no file at .*nowhere"):
        load_into(tiny_model("llama"), tmp_path / "nowhere")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="has none of ds_inference_config.json, model.safetensors"):
        load_into(tiny_model("llama"), tmp_path / "nothing")
    content = {"type": "BLOOM", "checkpoints": ["1.pt"], "version": 1}
    with pytest.raises(ValueError, match="no file at .*1.pt"):
        hybrid.init_inference(tiny_model("llama"), dtype="float32", checkpoint=content)


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickles_run_no_code(tmp_path):
    state = tiny_model("llama").state_dict()
    torch.save({"state_dict": state, "more": Harmful(tmp_path / "made")}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_into(tiny_model("llama"), tmp_path / "w.pt")
    assert not (tmp_path / "made").exists()


def test_a_model_without_weights_needs_a_checkpoint():
    with pytest.raises(ValueError, match="on the meta device, and has no weights; give checkpoint"):
        hybrid.init_inference(empty_like(tiny_model("llama")), dtype="float32")
    with pytest.raises(ValueError, match="set_empty_params: true given; without a checkpoint"):
        hybrid.init_inference(tiny_model("llama"), dtype="float32", set_empty_params=True)


@pytest.mark.parametrize("start", ["meta", "real"])
def test_parameters_that_cannot_be_initialized_are_listed(tmp_path, start):
    """A module without Hugging Face's initialization cannot fill missing weights; it is restored."""
    torch.save({"0.weight": torch.zeros(4, 4), "2.weight": torch.ones(3, 3)}, tmp_path / "w.pt")
    with torch.device("meta" if start == "meta" else "cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = r"it does not have 0.bias, 2.weight, 2.bias \(3 in all\), .* this is a Sequential"
    with pytest.warns(match="does not fit Sequential"), pytest.raises(ValueError, match=message):
        load_into(model, tmp_path / "w.pt", strict=False, set_empty_params=True)
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta if start == "meta" else torch.equal(tensor, before[name]), name
    if start == "real":
        with pytest.warns(match="does not fit Sequential"):
            load_into(model, tmp_path / "w.pt", strict=False)
        assert torch.equal(model[0].weight, torch.zeros(4, 4))
        assert torch.equal(model[2].weight, before["2.weight"])


def test_dtype_on_load(tmp_path):
    """Equals from_pretrained with the same dtype."""
    reference = tiny_model("gemma3_text")
    reference.save_pretrained(tmp_path)
    built = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = empty_like(reference)
    hybrid.init_inference(model, dtype="bf16", checkpoint=str(tmp_path))
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, built.state_dict()[name]), name


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "bert"])
def test_saved_mp_checkpoints_load(tmp_path, name):
    reference = tiny_non_decoder(name) if name in NON_DECODERS else tiny_model(name)
    expected = twin(reference)
    hybrid.init_inference(reference, dtype="float32", save_mp_checkpoint_path=str(tmp_path))
    model = empty_like(expected)
    load_into(model, tmp_path)
    require_same_weights(model, expected)
