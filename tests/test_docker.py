"""The Dockerfile: rules that every build should keep, and the page's build where there is a builder."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "launchers.md").read_text()
VARIANTS = ("cpu", "cuda")
BUILD_TIMEOUT_S = 3000
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ADD", "ENV", "WORKDIR", "USER", "CMD"}
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE", re.I)


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with their arguments, continued lines joined. Raises ValueError for one that the
    rules do not know."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M))
    lines = [line.split(maxsplit=1) for line in joined.split("\n") if line.strip()]
    found = [(name.upper(), " ".join(argument.split())) for name, argument in lines]
    if unknown := {name for name, _ in found} - INSTRUCTIONS:
        raise ValueError(f"no rule knows {unknown}")
    return found


def is_pinned(image: str) -> bool:
    """Whether an image has a tag with a version of at least two numbers, or a digest."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@sha256:" in image or re.match(r"\d+\.\d+", tag) is not None


def images_unpinned(found: list[tuple[str, str]]) -> list[str]:
    """Images that `FROM` and `COPY --from` name without a version; stages may be named by the build argument."""
    stages, images = set(), []
    for name, argument in found:
        if name == "FROM":
            image, _, stage = argument.partition(" AS ")
            images += [image] if not set(with_variants(image)) <= stages else []
            stages.add(stage)
        elif name in ("COPY", "ADD") and (image := re.match(r"--from=(\S+)", argument)):
            images += [image[1]] if image[1] not in stages else []
    return [f"{image} has no version" for image in images if not is_pinned(image)]


def with_variants(text: str) -> list[str]:
    """`text` for every value of VARIANT."""
    return [text.replace("${VARIANT}", variant) for variant in VARIANTS]


def user_is_root(found: list[tuple[str, str]]) -> list[str]:
    """Whether the last stage, after its last `USER`, is root's."""
    last_from = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    users = [argument for name, argument in found[last_from:] if name == "USER"]
    return [] if users and users[-1].partition(":")[0] not in ("root", "0") else ["the image runs as root"]


def installs_unconstrained(found: list[tuple[str, str]]) -> list[str]:
    """`pip install` without constraints.txt."""
    commands = [part for name, argument in found if name == "RUN" for part in re.split(r"&&|\|\||;", argument)]
    installs = [part.strip() for part in commands if re.search(r"\bpip3? install\b", part)]
    constrained = re.compile(r"(-c|--constraint)[ =]constraints\.txt\b")
    return [f"no constraints: {part}" for part in installs if not constrained.search(part)]


def sources_missing(found: list[tuple[str, str]]) -> list[str]:
    """Sources of `COPY` and `ADD` that the repository lacks, or that .dockerignore does not keep."""
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    missing = []
    for name, argument in found:
        if name in ("COPY", "ADD") and "--from=" not in argument:
            *sources, _ = [word for word in argument.split() if not word.startswith("--")]
            missing += [f"{source} is not in the repository" for source in sources if not (ROOT / source).exists()]
            missing += [f"{source} is not in .dockerignore" for source in sources if f"!{source}" not in kept]
    return missing


def secrets(found: list[tuple[str, str]]) -> list[str]:
    """`ARG` and `ENV` whose names are those of secrets: an image keeps their values."""
    words = [word for name, argument in found if name in ("ARG", "ENV") for word in shlex.split(argument)]
    names = [word.partition("=")[0] for word in words]
    return [f"{name} may be a secret" for name in names if SECRET.search(name)]


def lists_left(found: list[tuple[str, str]]) -> list[str]:
    """Layers that read apt's lists and keep them."""
    runs = [argument for name, argument in found if name == "RUN" and "apt-get update" in argument]
    removal = "rm -rf /var/lib/apt/lists/*"
    return [f"apt's lists stay: {run}" for run in runs if removal not in run.partition("apt-get update")[2]]


RULES = (images_unpinned, user_is_root, installs_unconstrained, sources_missing, secrets, lists_left)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_dockerfile_keeps_the_rule(rule):
    assert rule(instructions(TEXT)) == []


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (images_unpinned, "FROM python:3.11.14-slim-bookworm AS", "FROM python:latest AS"),
        (images_unpinned, "FROM python:3.11.14-slim-bookworm AS", "FROM python AS"),
        (images_unpinned, "FROM python:3.11.14-slim-bookworm AS", "FROM host:5000/python AS"),
        (images_unpinned, "FROM base AS for-cuda", "FROM base AS for-gpu"),
        (images_unpinned, "--from=toolkit", "--from=nvidia/cuda:latest"),
        (user_is_root, "USER hybrid", "USER root"),
        (user_is_root, "USER hybrid", "USER hybrid\nUSER 0:0"),
        (user_is_root, "USER hybrid\n", ""),
        (installs_unconstrained, '--constraint=constraints.txt ".[', '".['),
        (installs_unconstrained, '--constraint=constraints.txt ".[', '--constraint=mine.txt ".['),
        (installs_unconstrained, "CMD", "RUN pip install -c constraints.txt a && pip install b\nCMD"),
        (sources_missing, "COPY configs configs", "COPY configs setup.cfg ./"),
        (sources_missing, "COPY configs configs", "COPY tests tests"),
        (secrets, "ARG USER_ID=1000", "ARG USER_ID=1000\nARG HF_TOKEN"),
        (secrets, "ENV CUDA_HOME=", "ENV WANDB_API_KEY=1 CUDA_HOME="),
        (lists_left, " \\\n    && rm -rf /var/lib/apt/lists/*", ""),
        (lists_left, " \\\n    && rm -rf /var/lib/apt/lists/*", "\nRUN rm -rf /var/lib/apt/lists/*"),
    ],
)
def test_a_bad_dockerfile_is_reported(rule, good, bad):
    assert good in TEXT
    assert rule(instructions(TEXT.replace(good, bad))) != []


def test_an_unknown_instruction_is_refused():
    with pytest.raises(ValueError, match="ONBUILD"):
        instructions(f"{TEXT}ONBUILD RUN pip install a\n")


def builder() -> str | None:
    """The first of these that answers: a docker client without its daemon does not."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, timeout=60).returncode == 0:
            return name
    return None


@pytest.mark.slow
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_pages_image_for_cpus_passes_the_doctor():
    if (name := builder()) is None:
        pytest.skip("no docker, podman or buildah that answers")
    (command,) = re.findall(r"^docker (build --tag=my-image \.)$", PAGE, re.M)
    tag = "hybrid-engine-test"
    subprocess.run([name, *command.replace("my-image", tag).split()], cwd=ROOT, check=True)
    try:
        run = [name, "run", "--rm", tag]
        if name == "buildah":
            run = [name, "run", subprocess.check_output([name, "from", tag], text=True).strip(), "--"]
        done = subprocess.run([*run, "hybrid", "doctor"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "CPU kernels" in done.stdout and "built in" in done.stdout
        assert subprocess.check_output([*run, "whoami"], text=True) == "hybrid\n"
        assert subprocess.check_output([*run, "sh", "-c", "which g++ ninja"], text=True).count("\n") == 2
    finally:
        subprocess.run([name, "rmi", "--force", tag], check=False)
