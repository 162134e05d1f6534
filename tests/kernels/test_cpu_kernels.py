"""The CPU kernels: sampling and logprobs against float64 and Hugging Face's warpers; compiling, and the fallback."""

import ctypes
import dataclasses
import os
import shutil
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid.decoders.cpu_decoder import RECURRENT, VECTORS
from hybrid.generation.request import split_warpers
from hybrid.kernels import cpu_library as kernels
from hybrid.models.spec import JOINED, LAYER_ROLES, OUTER_ROLES, XIELU, DecoderSpec
from hybrid.sampling.params import SamplingParams
from hybrid.sampling.sampler import (
    entropy,
    sample_tokens,
    sample_tokens_in_torch,
    score_tokens,
    selective_log_softmax,
    stream_keys,
    uniform,
)
from tests.invalid_logits import with_invalid_rows
from tests.sampling_params import params_of

DRAWERS = {"kernels": sample_tokens, "torch": sample_tokens_in_torch}
DRAWS = {
    "greedy": params_of(temperature=0),
    "plain": params_of(),
    "cold": params_of(temperature=0.3),
    "hot": params_of(temperature=2.5),
    "top_k": params_of(top_k=7),
    "top_k of one": params_of(temperature=0.5, top_k=1),
    "top_k over blocks": params_of(top_k=60),
    "top_k over the vocabulary": params_of(top_k=10**6),
    "top_p": params_of(top_p=0.7),
    "top_p, nearly nothing": params_of(top_p=1e-6),
    "top_p, nearly all": params_of(top_p=0.9999),
    "min_p": params_of(min_p=0.05),
    "top_k and top_p": params_of(temperature=0.8, top_k=20, top_p=0.8),
    "top_k and min_p": params_of(temperature=1.3, top_k=30, min_p=0.1),
    "top_p and min_p": params_of(temperature=1.7, top_p=0.9, min_p=0.02),
    "all": params_of(temperature=0.7, top_k=40, top_p=0.95, min_p=0.01),
}


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Logits [rows, vocabulary] of which some are -inf; in the last row all but one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.1] = -torch.inf
    logits[-1] = -torch.inf
    logits[-1, vocabulary // 2] = 1.5
    return logits


def warped(logits: torch.Tensor, how: SamplingParams) -> torch.Tensor:
    """Logits after Hugging Face's warpers, in `generate`'s order.  float64 [rows, vocab]"""
    steps = [TemperatureLogitsWarper(float(how.temperature))]
    steps += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    steps += [MinPLogitsWarper(how.min_p)] if how.min_p else []
    scores = logits.double()
    for step in steps:
        scores = step(None, scores)
    return scores


def keys_of(u: torch.Tensor, position: int) -> torch.Tensor:
    """Keys whose uniform number at a position is u, float64 [n] of whole multiples of 2^-53.  int64 [n]

    splitmix64's finalizer run backwards, in unbounded integers.
    """
    mask, keys = 2**64 - 1, []
    for share in u.tolist():
        x = int(share * 2**53) << 11
        x ^= (x >> 31) ^ (x >> 62)
        x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
        x ^= (x >> 27) ^ (x >> 54)
        x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
        x ^= (x >> 30) ^ (x >> 60)
        x = (x - 0x9E3779B97F4A7C15 * (position + 1)) & mask
        keys.append(x - 2**64 if x >= 2**63 else x)
    return torch.tensor(keys)


def test_keys_of_invert_the_generator():
    u = torch.tensor([0.0, 0.5, 1 - 2**-53, 0.1234], dtype=torch.float64)
    for position in (0, 3, 511):
        assert torch.equal(uniform(keys_of(u, position), position), (u * 2**53).floor() / 2**53)


@pytest.mark.parametrize("drawer", DRAWERS)
@pytest.mark.parametrize("vocabulary", [97, 1000, 5003])
@pytest.mark.parametrize("how", DRAWS)
def test_draws_are_the_inverse_cdf_over_the_tokens_hugging_face_keeps(how, vocabulary, drawer):
    """Only tokens that Hugging Face keeps are drawn, each at its place in the cumulative softmax."""
    how, logits = DRAWS[how], random_logits(3, vocabulary)
    generator = torch.Generator().manual_seed(1)
    for row in logits:
        if how.temperature == 0:
            kept = torch.full_like(row, -torch.inf).double()
            kept[row.argmax()] = 0.0
        else:
            kept = warped(row[None], how)[0]
        cdf = kept.softmax(0).cumsum(0)
        before = torch.cat([cdf.new_zeros(1), cdf[:-1]])
        # The middles of the tokens' intervals, and random numbers.
        middles = ((before + cdf) / 2)[kept > -torch.inf]
        middles = middles[torch.randperm(len(middles), generator=generator)[:300]]
        u = torch.cat([middles, torch.rand(200, generator=generator).double()])
        edges = (u[:, None] - cdf).abs().amin(dim=1)
        u = u[edges > 1e-5]  # float32 sums of thousands
        expected = torch.searchsorted(cdf, u, right=True)
        positions = torch.full((len(u),), 5)
        repeated = row.expand(len(u), -1)
        actual = DRAWERS[drawer](repeated, keys_of(u, 5), positions, how)
        assert torch.equal(actual.tokens, expected)
        temperature = how.temperature or 1.0
        at = actual.tokens[:, None]
        drawn_from = kept if how.temperature else row  # a greedy token's logprob is not 0
        distributions = (drawn_from, row.double() / temperature, row.double())
        for logps, scores in zip(
            (actual.sampling_logps, actual.old_logps, actual.raw_logps), distributions, strict=True
        ):
            exact = scores.double().log_softmax(0)[at[:, 0]]
            torch.testing.assert_close(logps.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("drawer", DRAWERS)
def test_all_tokens_tied_at_the_top_k_threshold_are_kept(drawer):
    """As in Hugging Face, which compares with the k-th largest logit; min_p keeps tokens exactly at its threshold."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, -1.0] * 40])
    u = (torch.arange(4000) + 0.5).double() / 4000
    for how in (params_of(top_k=41), params_of(top_k=40), params_of(top_k=41, min_p=0.36)):
        actual = DRAWERS[drawer](logits.expand(len(u), -1), keys_of(u, 0), torch.zeros(4000, dtype=torch.long), how)
        kept = warped(logits, how)[0] > -torch.inf
        assert set(actual.tokens.tolist()) == set(kept.nonzero().flatten().tolist()), how


def test_the_largest_of_equal_logits_is_the_first():
    logits = torch.zeros(3, 1000)
    logits[0, [400, 401, 900]] = 1.0
    logits[1, 999] = 1.0
    for draw in DRAWERS.values():
        assert draw(logits, *torch.zeros(2, 3, dtype=torch.long), params_of(temperature=0)).tokens.tolist() == [
            400,
            999,
            0,
        ]


@pytest.mark.parametrize("bits", [3, 9, 12])
def test_the_kernels_uniform_numbers_match_python(bits):
    """Over 2^k equal logits the token is the first k bits of the uniform number, which is exact in any arithmetic."""
    keys = stream_keys(-7, torch.arange(3000), torch.arange(3000) % 5)
    positions = torch.arange(3000) * 7
    tokens = sample_tokens(torch.zeros(3000, 2**bits), keys, positions, params_of()).tokens
    assert torch.equal(tokens, (uniform(keys, positions) * 2**bits).long())


def test_kernels_and_torch_draw_the_same_tokens():
    logits = random_logits(64, 5003)
    keys, positions = stream_keys(3, torch.arange(64), torch.zeros(64, dtype=torch.long)), torch.arange(64)
    for name, how in DRAWS.items():
        actual, expected = (draw(logits, keys, positions, how) for draw in DRAWERS.values())
        assert torch.equal(actual.tokens, expected.tokens), name
        for kind in ("sampling_logps", "old_logps", "raw_logps"):
            torch.testing.assert_close(getattr(actual, kind), getattr(expected, kind), atol=1e-5, rtol=1e-6)


def test_a_draw_is_bit_identical_in_every_batch():
    logits = random_logits(19, 1000)
    keys, positions = torch.arange(19) * 12345, torch.arange(19)
    for how in DRAWS.values():
        batch = sample_tokens(logits, keys, positions, how)
        for row in range(19):
            rows = slice(row, row + 1)
            single = sample_tokens(logits[rows], keys[rows], positions[rows], how)
            assert all(torch.equal(vars(single)[name], vars(batch)[name][rows]) for name in vars(single))


@pytest.mark.parametrize("drawer", DRAWERS)
@pytest.mark.parametrize("how", DRAWS)
def test_rows_without_a_softmax_get_logprobs_of_nan(how, drawer):
    """A policy that has diverged: its tokens stay within the vocabulary, and other rows are unchanged to the bit."""
    for vocabulary in (5, 97, 1000):
        logits = random_logits(14, vocabulary)
        logits[0, 1:] = -torch.inf  # masked tokens are valid
        keys, positions = torch.arange(14) * 999, torch.zeros(14, dtype=torch.long)
        expected = DRAWERS[drawer](logits, keys, positions, DRAWS[how])
        broken, invalid = with_invalid_rows(logits)
        actual = DRAWERS[drawer](broken, keys, positions, DRAWS[how])
        assert ((actual.tokens >= 0) & (actual.tokens < vocabulary)).all()
        assert actual.per_token()[:3][:, invalid].isnan().all(), actual.per_token()[:3][:, invalid]
        valid = [row for row in range(14) if row not in invalid]
        assert torch.equal(actual.tokens[valid], expected.tokens[valid])
        assert torch.equal(actual.per_token()[:3][:, valid], expected.per_token()[:3][:, valid])
        assert not expected.per_token()[:3].isnan().any()


def test_scores_of_rows_without_a_softmax_are_nan():
    logits, invalid = with_invalid_rows(random_logits(14, 1000))
    targets = torch.full((14,), 333)  # where a row has its +inf
    for logps, entropies in (
        score_tokens(logits, targets, 0.7),
        (selective_log_softmax(logits, targets), entropy(logits)),
    ):
        for row in range(14):
            assert (row in invalid) == bool(logps[row].isnan()) == bool(entropies[row].isnan()), row


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", [97, 1000, 5003])
def test_logprobs_and_entropies_match_float64(vocabulary, temperature):
    logits = random_logits(12, vocabulary)
    targets = torch.randint(vocabulary, (12,), generator=torch.Generator().manual_seed(2))
    exact = (logits.double() / temperature).log_softmax(-1)
    expected = exact.gather(1, targets[:, None])[:, 0]
    entropies = torch.special.entr(exact.exp()).sum(-1)
    scaled = logits / temperature
    for logps, entropies_of_kernel in (
        score_tokens(logits, targets, temperature),
        (selective_log_softmax(scaled, targets), entropy(scaled)),
    ):
        torch.testing.assert_close(logps.double(), expected, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(entropies_of_kernel.double(), entropies, atol=1e-5, rtol=1e-5)


# Hugging Face's processors as SamplingParams


class OwnWarper(TemperatureLogitsWarper):
    """A custom warper, which may do anything."""


def test_trailing_warpers_become_the_draw():
    penalty, shortest = RepetitionPenaltyLogitsProcessor(1.2), MinLengthLogitsProcessor(5, torch.tensor([2]))
    temperature, top_k, top_p, min_p = (
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(9),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.1),
    )
    cases = {
        (): ((), params_of()),
        (temperature,): ((), params_of(temperature=0.7)),
        (temperature, top_k, top_p, min_p): ((), params_of(0.7, 9, 0.8, 0.1)),
        (penalty, shortest, top_k, min_p): ((penalty, shortest), params_of(top_k=9, min_p=0.1)),
        (temperature, penalty, top_p): ((temperature, penalty), params_of(top_p=0.8)),
    }
    for processors, (before, draw) in cases.items():
        actual = split_warpers(LogitsProcessorList(processors), True, 200)
        assert (tuple(actual[0]), actual[1]) == (before, draw)


def test_other_warpers_stay_processors():
    temperature, top_k, top_p = TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)
    for processors in (
        [top_p, top_k],
        [top_k, temperature],
        [top_k, TopKLogitsWarper(5)],
        [TopPLogitsWarper(0.8, min_tokens_to_keep=2)],
        [MinPLogitsWarper(0.1, min_tokens_to_keep=3)],
        [TopKLogitsWarper(9, filter_value=-100.0)],
    ):
        before, draw = split_warpers(LogitsProcessorList(processors), True, 200)
        assert (list(before), draw) == (processors, None)
    before, draw = split_warpers(LogitsProcessorList([OwnWarper(0.7)]), True, 200)
    assert (len(before), draw) == (1, params_of())
    before, draw = split_warpers(LogitsProcessorList([top_k]), False, 200)
    assert (list(before), draw) == ([top_k], params_of(temperature=0)), "greedy search must keep processors"


# Records


def test_decoder_records_have_the_names_of_decoder_specs():
    """A field on one side only would be read as 0, or never."""
    names = {name for name, _ in kernels.Decoder._fields_}
    numbers = {name for name, kind in kernels.Decoder._fields_ if kind in (ctypes.c_int64, ctypes.c_double)}
    spec = {field.name for field in dataclasses.fields(DecoderSpec)}
    assert spec - names == {"max_positions", "recurrent", "sinks", "unweighted_norms"}  # the last two: by layer
    for mixer in RECURRENT:
        of_record = [name for name, _ in kernels.RECORDS[mixer.__name__]._fields_]
        assert of_record == [field.name for field in dataclasses.fields(mixer)]
    sliced = {"embedding_rows", "first_row", "local_rows", "first_expert", "local_experts"}
    sliced |= {"whole_vocabulary", "first_token", "local_tokens", "per_layer_rows"}
    assert numbers - spec == {"bfloat16", "intermediate_size", "lora_ranks", "num_layers", "num_moe_layers"} | sliced


def test_layer_records_have_the_names_of_roles():
    kinds = (kernels.Norm, kernels.Linear)
    names = [name for name, kind in kernels.Layer._fields_ if kind in kinds]
    vectors = {name for name, kind in kernels.Layer._fields_ if kind is ctypes.c_void_p}
    assert vectors >= {*VECTORS, "xielu"}
    of_roles = JOINED | {"latent_up": ("kv_b",), "key_up": ("kv_b",)}
    assert {role for name in names for role in of_roles.get(name, (name,))} == {*LAYER_ROLES} - {*VECTORS, *XIELU}
    outer = {name for name, kind in kernels.Decoder._fields_ if kind in kinds}
    assert outer == set(OUTER_ROLES) - {"embedding", "positions", "per_layer_embedding"}


def test_a_record_that_differs_from_the_librarys_is_an_error(monkeypatch):
    longer = kernels.read_records("struct Draw {\n  double temperature, top_p;\n  const float* logits[3];\n};")
    assert ctypes.sizeof(longer["Draw"]) == 40
    monkeypatch.setattr(kernels, "RECORDS", {**kernels.RECORDS, **longer})
    with pytest.raises(AssertionError, match="records.h is read wrongly"):
        kernels.opened(kernels.built(kernels.FLAGS))


def test_a_field_of_an_unknown_type_is_an_error():
    with pytest.raises(KeyError, match="short"):
        kernels.read_records("struct Draw {\n  short top_k;\n};")


# Compiling


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybrid-engine"


@pytest.fixture
def compiled(monkeypatch) -> list[Path]:
    """Records the compiled paths; compiling only writes a file."""
    paths: list[Path] = []

    def write(path: Path, compiler: str, flags: tuple[str, ...]) -> None:
        paths.append(path)
        path.write_text(" ".join([*compiler, *flags]))

    monkeypatch.setattr(kernels, "compile_into", write)
    return paths


def test_without_a_compiler_torch_is_used_and_the_warning_says_so(cache, monkeypatch):
    monkeypatch.setattr(kernels, "COMPILERS", ("no-such-compiler", "nor-this"))
    with pytest.warns(UserWarning, match="torch's are used: no C\\+\\+ compiler: none of no-such-compiler, nor-this"):
        assert kernels.cpu_library.__wrapped__() is None


def test_the_environment_chooses_the_compiler(cache, compiled, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    first = kernels.built(("-O1",))
    monkeypatch.setenv("CXX", "cat -u")  # any program with an argument
    second = kernels.built(("-O1",))
    assert compiled == [first, second], "another compiler makes another library"
    assert second.read_text() == f"{shutil.which('cat')} -u -O1"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OSError, match="CXX='no-such-compiler' is not there"):
        kernels.built(("-O1",))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
def test_a_compiler_of_c_makes_a_library_that_loads(cache, monkeypatch):
    """PEFT's BOFT leaves `CXX=gcc` in the environment where its own kernel does not compile (peft 0.21.2)."""
    monkeypatch.setenv("CXX", "gcc")
    flags = [flag for flag in kernels.FLAGS if not flag.startswith("-O")]  # compiles in a few seconds
    path = str(kernels.built(flags))
    load = "import ctypes, sys; ctypes.CDLL('libgomp.so.1', ctypes.RTLD_GLOBAL); ctypes.CDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, path], check=True, env={**os.environ, "LD_BIND_NOW": "1"})


def test_without_anything_on_the_path_torch_is_used(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert kernels.cpu_library.__wrapped__() is None


def test_the_compilers_output_is_in_the_warning(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'vector.h: it does not know this' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(kernels, "COMPILERS", (str(compiler),))
    with pytest.warns(UserWarning, match="it does not know this"):
        assert kernels.cpu_library.__wrapped__() is None
    assert [path.suffix for path in cache.iterdir()] == [".lock"], "a failed compilation left files"


def test_a_library_is_compiled_once_per_flags(cache, compiled):
    first = kernels.built(("-O1",))
    assert kernels.built(("-O1",)) == first
    second = kernels.built(("-O1", "-g"))
    assert compiled == [first, second]
    assert first != second
    assert {first, second} < set(cache.iterdir())


def test_changed_sources_make_another_library(cache, compiled, tmp_path, monkeypatch):
    first = kernels.built(())
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "decoder.cpp").write_text("int changed;")
    monkeypatch.setattr(kernels, "SOURCES", tmp_path / "sources")
    assert kernels.built(()) != first


def test_concurrent_builds_wait_for_the_first(cache, monkeypatch):
    started, go_on, count = threading.Event(), threading.Event(), []

    def slowly(path: Path, compiler: str, flags: tuple[str, ...]) -> None:
        count.append(path)
        started.set()
        assert go_on.wait(20)
        path.write_text("")

    monkeypatch.setattr(kernels, "compile_into", slowly)
    paths: list[Path] = []
    builders = [threading.Thread(target=lambda: paths.append(kernels.built(()))) for _ in range(4)]
    for builder in builders:
        builder.start()
    assert started.wait(20)
    assert paths == []
    go_on.set()
    for builder in builders:
        builder.join()
    assert len(count) == 1
    assert len(set(paths)) == 1


def test_an_unwritable_cache_falls_back_to_the_temporary_directory(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "file").write_text("")
    # A parent that is no directory, and a directory in which no file can be created.
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "hybrid-engine").symlink_to("/proc/self", target_is_directory=True)
    for home in ("file", "closed"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        path = kernels.built((home,))
        assert path.is_file()
        assert path.parent == tmp_path / "temporary" / f"hybrid-engine-{os.getuid()}"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, "other users can write libraries there"


def test_a_temporary_directory_that_others_can_write_is_not_used(compiled, tmp_path, monkeypatch):
    """Its libraries would be loaded into this process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / f"hybrid-engine-{os.getuid()}").mkdir()
    (tmp_path / f"hybrid-engine-{os.getuid()}").chmod(0o777)
    with pytest.warns(UserWarning, match="others can write"):
        assert kernels.cpu_library.__wrapped__() is None


def test_a_build_leaves_only_the_library(cache):
    """Compiles a small file, which is quick."""
    cache.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            kernels.compile_into(cache / "one.so", ["c++"], ("-std=c++20", "-O0", "-fopenmp", "-fPIC"))
        except subprocess.CalledProcessError as error:
            pytest.fail(error.stderr)
    assert [path.name for path in cache.iterdir()] == ["one.so"]
