"""Every build of the CPU kernels, on any machine: vectors of 8 and of 16 lanes, bfloat16 products in pairs and in
tiles. Instructions that the machine lacks are emulated, so these tests cover the code around them, not the
instructions."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import hybrid
from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.kernels.cpu_library import FLAGS, SOURCES, built, compiler_command, cpu_library, opened
from hybrid.models.reader import read_decoder
from tests.decoders.test_cpu_decoder import CpuRun, SegmentedForward, decoder_of, threads
from tests.decoders.test_torch_decoder import average, distance, hugging_face, own_weights, sequences
from tests.inference.test_int8 import rounded
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")

SPLIT_TOKENS = 512  # as in attention.h
# Rows that are no multiple of a tile, and depths with a remainder after the last whole block.
SHAPE = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 24}


@torch.no_grad()
def logits_of(library, model, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Logits of every token.  float32 [tokens, vocab]"""
    decoder = CpuDecoder(
        read_decoder(model), lambda place: place.module._parameters.get(place.parameter), torch.bfloat16, library
    )
    decoder.bind()
    decoder.reserve(128)
    sizes = torch.tensor([len(ids) for ids in sequences])
    batch = PackedBatch(
        ids=torch.cat(sequences),
        positions=torch.cat([torch.arange(size) for size in sizes]).int(),
        cu_seqlens=torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
        lengths=sizes.int(),
        block_tables=(1 + torch.arange(len(sequences) * 3).view(-1, 3)).int(),
    )
    return decoder.logits(decoder.forward(batch, decoder.kv(1 + len(sequences) * 3)))


PORTABLE = tuple(flag for flag in FLAGS if not flag.startswith("-march"))
X86 = platform.machine() == "x86_64"
AVX2 = (*PORTABLE, "-march=x86-64-v3") if X86 else PORTABLE
# Builds by machine, in a form that any machine runs: 16 lanes are split into the vectors that it has.
BUILDS = {
    "8 lanes without AVX": (*PORTABLE, "-DLANES=8"),
    "AVX2": (*AVX2, "-DLANES=8"),
    "AVX-512": (*AVX2, "-DLANES=16"),
    "AVX-512 with bfloat16": (*AVX2, "-DLANES=16", "-DEMULATE_BF16=1"),
    "AMX": (*AVX2, "-DLANES=16", "-DEMULATE_BF16=2"),
}
# Compiler flags of the machines themselves, and AMX's processor with 8 lanes, see below.
MACHINES = {
    "AVX2": ("-march=haswell",),
    "AVX-512": ("-march=skylake-avx512",),
    "AVX-512 with bfloat16": ("-march=cooperlake",),
    "AMX": ("-march=sapphirerapids",),
    "AMX, 8 lanes": ("-march=sapphirerapids", "-DLANES=8", "-mno-avx"),
}


@pytest.mark.parametrize("machine", slow_but(["AVX2", "AMX"], MACHINES))
@pytest.mark.skipif(not X86, reason="a compiler for x86-64 is needed")
def test_the_build_for_every_machine_compiles(machine):
    """With the real instructions, which this machine may lack. Tiles need pairs: with tiles alone, AMX's processor
    computed wrong results in vectors of 8 lanes."""
    compiler = "g++" if shutil.which("g++") else "c++"
    require_compiles(compiler, *MACHINES[machine])
    command = [compiler, "-std=c++20", *MACHINES[machine], "-dM", "-E", str(SOURCES / "decoder.cpp")]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert ("#define PAIRS 1" in macros) == (machine in ("AVX-512 with bfloat16", "AMX"))
    assert ("#define TILES 1" in macros) == (machine == "AMX")


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no compiler for aarch64 here")
def test_the_build_for_aarch64_compiles():
    require_compiles("aarch64-linux-gnu-g++")


def require_compiles(compiler: str, *flags: str) -> None:
    """Fails with the compiler's output; writes no file."""
    flags = (*(flag for flag in PORTABLE if "param" not in flag), *flags)
    ran = subprocess.run(
        [compiler, *flags, "-fsyntax-only", str(SOURCES / "decoder.cpp")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("build", slow_but(["AVX2"], BUILDS))
@pytest.mark.parametrize(("family", "dtype"), [("gemma3_text", torch.float32), ("qwen3", torch.bfloat16)])
def test_every_build_matches_hugging_face(family, dtype, build):
    library = opened(built(BUILDS[build]))
    assert library.lanes() == (8 if "8 lanes" in build or build == "AVX2" else 16)
    model = tiny_model(family).eval()
    exact = hugging_face(model)
    model = model.to(dtype)
    actual = CpuRun(decoder_of(model, dtype, library=library), sequences()).every_logit()
    if dtype == torch.float32:
        assert distance(actual, exact) < 2e-6  # as in test_cpu_decoder.py
    else:
        expected = hugging_face(model)
        assert average(actual, expected) < average(expected, exact)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("head_dim", [24, 80, 128])
def test_heads_of_every_size_in_every_build(head_dim, build):
    model = tiny_model("llama", head_dim=head_dim).eval()
    exact = hugging_face(model)
    model = model.bfloat16()
    decoder = CpuDecoder(read_decoder(model), own_weights, torch.bfloat16, opened(built(BUILDS[build])))
    decoder.bind()
    expected = hugging_face(model)
    assert average(CpuRun(decoder, sequences()).every_logit(), expected) < average(expected, exact)


@pytest.mark.parametrize("build", slow_but(["AMX"], BUILDS))
def test_a_row_is_bit_identical_in_every_batch_and_split_in_every_build(build):
    """Over several splits of the context: in one piece, one token at a time, and among shorter sequences. Heads of
    which a tile holds a part, and more queries of a KV head than tiles hold."""
    sizes = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40}
    model = tiny_model("llama", dtype=torch.bfloat16, **sizes, max_position_embeddings=2048).eval()
    decoder = decoder_of(model, torch.bfloat16, library=opened(built(BUILDS[build])))
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (1100, 37, 530)]
    expected = [SegmentedForward(decoder, [ids]).run([])[0] for ids in batch]
    for count, cuts in ((2, []), (1, [30, 31, 511, 512, 513, 1024, 1025, 1098, 1099])):
        with threads(count):
            actual = SegmentedForward(decoder, batch).run(cuts)
        for index, outputs in enumerate(actual):
            assert all(map(torch.equal, outputs, expected[index])), f"sequence {index}, {count} threads, cut at {cuts}"


def test_tiles_keep_bits_and_take_few_loads(tmp_path):
    """`tiles.cpp` compares the bits of queries and of rows alone with those in every tile pattern, and counts. Before
    tiles of 32 queries, 32 queries took 352 loads for their 256 products. int8 weights take the tiles of bfloat16."""
    program = tmp_path / "tiles"
    flags = (*BUILDS["AMX"], "-O1", "-Wno-psabi", f"-I{SOURCES}")
    source = Path(__file__).with_name("tiles.cpp")
    subprocess.run([*compiler_command(), *flags, str(source), "-o", str(program), "-lstdc++", "-lm"], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    counts = {
        name: (int(loads), int(products)) for name, loads, products in re.findall(r"(.+) (\d+) (\d+)", ran.stdout)
    }
    blocks = SPLIT_TOKENS // BLOCK_SIZE
    assert counts["attention 16"] == (11 * blocks, 8 * blocks)  # 64 dimensions of keys: 2 deep, of values: 4 wide
    assert counts["attention 32"] == (16 * blocks, 16 * blocks)
    seen = 3 * blocks - 3  # causal: the first two tiles do not see 2 and 1 blocks
    assert counts["attention 96"] == (16 * seen, 16 * seen)
    for rows, expected in {1: (48, 32), 16: (48, 32), 64: (128, 128)}.items():
        assert counts[f"bfloat16 {rows}"] == counts[f"int8 {rows}"] == expected


@pytest.mark.parametrize("build", slow_but(["AVX2"], BUILDS))
def test_a_large_negative_gate_is_zero(build):
    """e^89 is no float32; gates of massive activations are that large (OLMo 2 norms behind its MLPs)."""
    model = tiny_model("olmo2").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] = 1000.0
    decoder = CpuDecoder(read_decoder(model), own_weights, torch.float32, opened(built(BUILDS[build])))
    decoder.bind()
    assert distance(CpuRun(decoder, sequences()).every_logit(), hugging_face(model)) < 2e-6


@pytest.mark.slow  # the kernels of this machine have its own products, tested in every other file
@pytest.mark.parametrize("level", [1, 2], ids=["pairs", "tiles"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_emulated_bfloat16_products_match_plain_vectors(family, level):
    library = opened(built(BUILDS["AVX-512 with bfloat16" if level == 1 else "AMX"]))
    model = tiny_model(family, dtype=torch.bfloat16, **(SHAPE if family == "llama" else {})).eval()
    generator = torch.Generator().manual_seed(0)
    # More rows than tiles of one pass, and fewer than one tile.
    sequences = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (70, 9, 1)]
    actual, expected = (logits_of(build, model, sequences) for build in (library, cpu_library()))
    # The same products, summed in another order and rounded to bfloat16 at every operation; a mixture may send a token
    # to another expert where two are nearly as likely.
    different = ((actual - expected).abs() > 0.02 * expected.abs().max()).any(dim=1)
    assert different.sum() <= (2 if family == "mixtral" else 0)
    single = logits_of(library, model, sequences[1:2])
    assert torch.equal(single, actual[70:79]), "a row depends on the batch around it"


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_that_tiles_multiply_together_keep_their_bits(activation):
    """Gate and up projections whose sums stay in the L1 cache, against those with biases of 0, which are written."""
    library, sizes = (
        opened(built(BUILDS["AMX"])),
        {"hidden_size": 64, "intermediate_size": 96, "hidden_act": activation},
    )
    generator = torch.Generator().manual_seed(0)
    # Two passes of tiles and a part of one, less than a tile, one row.
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (70, 9, 1)]
    plain = tiny_model("llama", dtype=torch.bfloat16, **sizes).eval()
    biased = tiny_model("llama", dtype=torch.bfloat16, **sizes, mlp_bias=True).eval()
    missing, unexpected = biased.load_state_dict(plain.state_dict(), strict=False)
    assert missing and all(name.endswith("bias") for name in missing) and not unexpected
    for name in missing:
        torch.nn.init.zeros_(biased.get_parameter(name))
    assert torch.equal(logits_of(library, plain, rows), logits_of(library, biased, rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "dtype", "tokens"),
    [("AMX", torch.bfloat16, 512), ("AMX", torch.float32, 2048), ("AVX2", torch.bfloat16, 2048)],
)
def test_forwards_of_prompts_are_short_where_products_are_in_tiles(build, dtype, tokens):
    decoder = CpuDecoder(read_decoder(tiny_model("llama")), own_weights, dtype, opened(built(BUILDS[build])))
    assert decoder.prefill_tokens == tokens


@pytest.mark.slow
@pytest.mark.parametrize("build", ["AVX2", "AVX-512", "AVX-512 with bfloat16", "AMX"])
@pytest.mark.parametrize("groups", [1, 2])
def test_int8_in_every_build_matches_rounded_weights(groups, build):
    """Of a bfloat16 model. Rows that are no multiple of a tile, and with one group depths with a remainder."""
    sizes = SHAPE if groups == 1 else {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    exact = rounded(tiny_model("llama", **sizes), groups)  # float32
    model = tiny_model("llama", dtype=torch.bfloat16, **sizes)
    in_bfloat16 = rounded(model, groups).eval()
    hybrid.init_inference(model, dtype="int8", kernel_inject=True, quant={"weight": {"q_groups": groups}})
    library = opened(built(BUILDS[build]))
    decoder = CpuDecoder(read_decoder(model), own_weights, torch.bfloat16, library)
    decoder.bind()
    actual = CpuRun(decoder, sequences()).every_logit()
    expected = hugging_face(in_bfloat16)
    assert average(actual, expected) < 1.2 * average(expected, hugging_face(exact.eval()))
    alone = logits_of(library, model, sequences()[:1])
    assert torch.equal(alone, actual[0]), "a row depends on the batch around it"
