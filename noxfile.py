"""Sessions: `nox -s need` (do you need it?), `nox -s audit` (the main job), `nox -s tests` (the test command, minutes),
`nox -s tests_all` (all of them); `nox -l` lists the rest. `COLLATE_NPU_SEED=123 nox -s tests` draws what that run drew.

`npu` and the sessions `peers_*` run the released packages of other stacks, each set in an environment of its own;
`oldest_torch` the oldest torch, on any Python: `nox -s oldest_torch -P 3.10`. `elsewhere` tells what runs on other Pythons
and beside other releases.

torch is pinned in every install: an unpinned one may pull several gigabytes of CUDA packages onto a CPU machine. The pin
alone is the CPU build only where the package index serves one. Elsewhere two variables say which torch:

    COLLATE_NPU_TORCH_INDEX=ADDRESS    one more index to install from: that of PyTorch's CPU builds, from its installation
                                       page; then also COLLATE_NPU_TORCH=torch==2.13.0+cpu
    COLLATE_NPU_TORCH=torch==2.13.0    the default; on a machine with a GPU and the default index that is the CUDA build

In an environment that has its torch already: `pip install .` there, then `collate-npu audit --device cuda`.

Triton and flash-linear-attention stay out of every environment that runs transformers' Gated DeltaNet on a CPU.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

os.environ.setdefault("PIP_NO_COMPILE", "1")  # a third of an install's time; Python compiles what it imports,
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # and keeps that: containers set this, and every process compiled anew
TORCH = os.environ.get("COLLATE_NPU_TORCH", "torch==2.13.0")
if index := os.environ.get("COLLATE_NPU_TORCH_INDEX"):
    for name in ("PIP_EXTRA_INDEX_URL", "UV_INDEX"):
        os.environ[name] = " ".join([index, *os.environ.get(name, "").split()])
    os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip looks
TRANSFORMERS = "transformers==5.23.0"
OLDEST_TORCH = os.environ.get("COLLATE_NPU_OLDEST_TORCH", "torch==2.6.0")
"""torch_npu 2.6 is the oldest beside CANN 8.2 and later (COMPATIBILITY.md of Ascend/pytorch)."""
TORCH_NEEDS = ("numpy", "filelock", "typing_extensions", "sympy==1.13.1", "networkx", "jinja2", "fsspec", "setuptools")
NEEDS = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]
OLDEST = tuple(need.replace(">=", "==") for need in NEEDS if not need.startswith("torch>="))
"""The lower bounds as they stand; transformers 4.57.1 is the first release with Qwen3-Next that is not withdrawn."""
TEST = ("pytest==9.2.0", "pytest-xdist==3.8.0", "hypothesis==6.170.15")
TWO_WORKERS = ("-n", "2", "--dist", "loadgroup")
AUDIT = ("rich==15.0.0", "wrapt==2.5.2")
DATA = "datasets==5.2.0"
PLOTS = "matplotlib==3.11.2"
ENV = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENV |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
"""The second line: memory that is given back after each step, and asked for again, took an eighth of torchtitan's time."""
FAST = {**ENV, "HYPOTHESIS_PROFILE": "fast"}
QUICK = (*TWO_WORKERS, "-m", "not slow")
AGAIN = {**FAST, "COLLATE_NPU_SHARE": "0.5"}
"""Tests that run on the newest releases too: a commit draws half of them, `.ci/run nightly` runs all."""
PEERS = {**ENV, "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "full")}
"""Tests of other stacks: of these sessions a commit runs half (.ci/draw.py)."""
SWIFT_NEEDS = (
    "modelscope", "modelscope-hub", "pandas", "pyarrow", "dill", "multiprocess", "xxhash", "python-dateutil", "requests",
    "urllib3", "httpx", "httpcore", "sniffio", "certifi", "pillow", "cryptography", "cffi", "pycparser", "einops",
    "json_repair",
    "trl==0.29.1", "msgspec", "dacite",  # `megatron rlhf`
    "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing",  # the last line of `megatron sft`
)  # fmt: skip
"""What ms-swift imports on the paths tested, without the gigabyte it would otherwise bring."""
MISC_NEEDS = (
    "tensordict", "ray", "hydra-core", "codetiming", "pandas", "orjson", "peft", "omegaconf", "pyzmq", "modelscope",
    "addict", "spmd_types==0.2.3", "tyro==1.0.16", "torch_checkpointing==0.1.1", "tensorboard",
    "torchdata==0.11.0", "uvicorn", "fastapi", "msgspec", "prometheus_client", "cachetools",
)  # fmt: skip
BENCH_NEEDS = ("hydra-core", "codetiming", "orjson", "addict")
FACTORY_NEEDS = (
    "pillow", "fire", "omegaconf", "pydantic", "einops", "scipy", "pandas", "av<17", "sentencepiece", "tiktoken", "protobuf",
    "modelscope", "matplotlib", "pyyaml",
)  # fmt: skip
AXOLOTL_NEEDS = (
    "addict", "colorama", "python-dotenv", "posthog", "art", "fire", "fastcore", "einops", "scipy", "numba", "requests",
    "typer==0.29.1", "rich==15.0.0", "pillow", "evaluate", "wandb", "pyyaml",
)  # fmt: skip
OPENRLHF_NEEDS = (
    "ray==2.55.0", "einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "pydantic", "tqdm", "aiohttp",
    "pylatexenc", "loralib", "torchdata==0.11.0", "setuptools", "pillow",
)  # fmt: skip
LOADERS = (
    "ray==2.60.0", "torchdata==0.11.0", "megatron-energon==7.4.1", "webdataset==1.0.2", "mosaicml-streaming==0.13.0",
)  # fmt: skip
DATA_NEEDS = (
    "tensordict==0.15.3", "pandas", "pyarrow", "click", "msgpack", "protobuf", "filelock", "jsonschema", "fsspec", "aiohttp",
    "tensorboardX", "requests",  # Ray Data and Ray Train
    "pyzmq", "omegaconf", "msgspec", "psutil",  # TransferQueue
    "braceexpand", "multi-storage-client", "rapidyaml", "filetype", "pillow",  # webdataset and Energon
    "brotli", "zstd", "python-snappy", "boto3", "catalogue", "cramjam",  # mosaicml-streaming
)  # fmt: skip
"""What the loaders import on the paths tested; the stores of clouds stay out."""
NEMO_NEEDS = (
    "torchdata==0.11.0", "tiktoken", "pillow", "pyyaml", "omegaconf", "hydra-core", "einops==0.8.1", "six", "tensorboard",
)  # fmt: skip
VEOMNI_NEEDS = ("torchdata==0.11.0", "einops==0.8.2", "psutil", "packaging", "blobfile", "pyyaml", "pillow", "tiktoken")
SKYRL_NEEDS = (
    "ray", "hydra-core", "omegaconf", "loguru", "jaxtyping", "tensordict", "torchdata==0.11.0", "pydantic==2.11.9", "pillow",
    "toml", "strenum", "msgpack", "redis", "boto3", "nest_asyncio", "fastapi", "uvicorn", "pyyaml", "einops",
    "cloudpathlib",  # from 0.4 on
)  # fmt: skip
TORCH_ALONE = tuple(
    f"--ignore=tests/{name}"
    for name in (
        "masks", "parallel", "kernels/fusion_attention", "npu", "package", "tools/env", "tools/test_show.py",
        "tools/cli/test_cli.py", "tools/test_guide.py", "collate/test_transport.py",
        *(f"distributed/test_distributed_{name}.py" for name in ("agreement", "parallel")),
        "test_benchmarks.py", "test_compiled.py", "test_counted_work.py", "test_house.py", "test_imports.py",
        "laws", "test_examples.py", "test_outputs.py", "test_segments.py",
    )
)  # fmt: skip
"""What no release of transformers changes; the session on the oldest leaves these out."""
WITHOUT_TRANSFORMERS = tuple(
    f"--ignore=tests/{name}"
    for name in (
        "npu", "integration", "distributed", "peers", "package", "producers", "tools", "integrations", "test_house.py",
        "test_examples.py", "test_readme.py",
    )
)  # fmt: skip
"""What the oldest torch can change."""
BESIDE_TORCH_NPU = tuple(
    f"tests/{name}" for name in ("test_imports.py", "collate", "consumers", "masks/test_forms.py", "tools/env")
)
"""What a torch_npu that does not load can change: imports, the routes by device, kernels of torch, the machine's report."""
TRAINERS = ("accelerate==1.15.0", "trl==1.16.0", "peft==0.20.0", DATA)


LAST = {"3.10": {"transformers": "5.20.2", "trl": "1.14.2", "hypothesis": "6.168.5"}}
"""The last releases that run on a Python, of what is pinned later."""
PINNED = (*TEST, *AUDIT, TRANSFORMERS, *TRAINERS)
ROWS = {
    "oldest": ("3.10", OLDEST_TORCH, ("numpy==1.26.4",)),
    "python-3.10": ("3.10", TORCH, PINNED),
    "transformers-4": ("3.11", TORCH, ("transformers==4.57.1", "accelerate==1.10.0", "numpy==1.26.4")),
    "transformers-5.0": ("3.11", TORCH, ("transformers==5.0.0", "accelerate==1.10.0", "numpy>=2")),
    "torch-2.10": ("3.12", "torch==2.10.0", ("transformers==5.10.4", *TRAINERS[:1], DATA, "numpy>=2")),
    "python-3.12": ("3.12", TORCH, PINNED),
    "python-3.13": ("3.13", TORCH, PINNED),
    "newest": ("3.13", "torch==2.15.0", ("transformers==5.24.0", *TRAINERS, "numpy>=2")),
    "python-3.14": ("3.14", TORCH, PINNED),
}
"""Of `elsewhere`, by name: a Python, a torch, and what stands beside it; each release once, not their product."""
LOCKS = Path(".ci/locks")
"""COLLATE_NPU_UNLOCKED=1 takes what the index has today."""
SAME = dict.fromkeys(("need", "tests_all-newest", "fuzz", "faults", "mutants", "soak"), "tests")
BY_THEMSELVES = {"--target", "--python-version", "--ignore-requires-python"}
"""What is installed so stands in no lock."""
_PUT: set[str] = set()
NEWEST = {pin.partition("==")[0]: pin for pin in os.environ.get("COLLATE_NPU_NEWEST", "").split()}
"""`nox -s upstream` gives the releases to take in the place of those pinned."""


def run_on(self: nox.Session, *args: str, before: Callable[..., object], **settings: object) -> object:
    """In a report a session goes on behind a red test, an interrupted run and an empty one: the report lists them."""
    return before(self, *args, **({"success_codes": (0, 1, 2, 5)} if args[0] == "pytest" else {}) | settings)


if "COLLATE_NPU_REPORT" in os.environ:
    nox.Session.run = partialmethod(run_on, before=nox.Session.run)


def python_of(session: nox.Session) -> str:
    """Its Python, as 3.12."""
    named = re.search(r"3\.\d+", session.python or platform.python_version())
    return named[0] if named else ""


def lock_of(name: str, python: str = "3.11") -> Path:
    """That of a session of this name; the other Pythons have the lock of `tests` alone."""
    name = re.sub(r"-3\.\d+", "", name).replace("(", "-").rstrip(")")
    return LOCKS / f"{SAME.get(name, name)}{'' if python == '3.11' else f'-{python}'}.txt"


def fits(lock: Path) -> bool:
    """Does it name the files for this machine? The first line tells, where they are not those of x86-64 alone."""
    if "COLLATE_NPU_UNLOCKED" in os.environ or sys.platform != "linux" or not lock.exists():
        return False
    return platform.machine() in ("x86_64", *lock.read_text("utf-8").partition("\n")[0].split())


def put(session: nox.Session, *packages: str) -> None:
    """What a session installs: where its lock holds, every file by its hash, at once; else what is said here."""
    lock = lock_of(session.name, python_of(session))
    if "COLLATE_NPU_NEWEST" in os.environ:
        put_newest(session, *packages)
    elif BY_THEMSELVES & set(packages) or not fits(lock):
        session.install(*(last(one, python_of(session)) for one in packages))
    elif session.name not in _PUT:
        _PUT.add(session.name)
        session.install("--no-deps", "--require-hashes", "-r", str(lock))
        if lock.read_text().startswith("# beside torch"):  # a build for CUDA brings its libraries, which no lock has
            session.install(*(("--no-deps", OLDEST_TORCH) if session.name == "oldest_torch" else (TORCH,)))
            session.install("--no-deps", "-e", ".")
        take_compiled(next(Path(session.virtualenv.location).glob("lib/python*/site-packages")))


def take_compiled(own: Path) -> None:
    """What `tests` compiled of the same files: a first import takes ten seconds less. Python compiles anew what differs."""
    for code in Path(".nox/tests").glob("lib/python*/site-packages/**/__pycache__/*.pyc"):
        copy = own.joinpath(*code.parts[5:])
        if copy.parent.parent.is_dir() and not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            os.link(code, copy)


def last(package: str, python: str) -> str:
    """Its last release that runs on this Python."""
    name = package.partition("==")[0]
    return f"{name}=={LAST[python][name]}" if name in LAST.get(python, ()) else package


def put_newest(session: nox.Session, *packages: str) -> None:
    """The same with NEWEST; what is installed into a folder of its own is older for a reason, and stays."""
    if "--target" in packages:
        session.install(*packages)
        return
    rest = [NEWEST.get(re.split("[=<]", one)[0], one) for one in packages]
    if any(re.match("[A-Za-z.]", one) for one in rest):  # more than flags
        session.install(*rest)


def any_python(session: nox.Session) -> tuple[str, ...]:
    """It asks for a later Python, and uses nothing of it here."""
    return ("--python-version", "3.12") if session.venv_backend == "uv" else ("--ignore-requires-python",)


def install(session: nox.Session, *packages: str) -> None:
    """The package itself beside others, torch pinned. A session that needs what the package depends on pins that too."""
    put(session, TORCH, "numpy", *packages)
    put(session, "--no-deps", "-e", ".")


@nox.session
def lock(session: nox.Session) -> None:
    """What the environments hold that were built with COLLATE_NPU_UNLOCKED=1, each file with its hash, into .ci/locks;
    `nox -s lock -- --elsewhere` resolves `tests` for the other Pythons, on x86-64 and aarch64."""
    session.install("pip", "packaging", "nox", "uv")
    session.run("python", ".ci/lock.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    put(session, "ruff==0.17.5")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the package."""
    install(session, "mypy==2.4.1", *AUDIT)
    session.run("mypy")


@nox.session
def need(session: nox.Session) -> None:
    """Do you need it? transformers' Trainer and TRL's, plain and with the line; arguments go to `collate-npu need`."""
    install(session, TRANSFORMERS, *TRAINERS, *AUDIT)
    session.run("collate-npu", "need", *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """The main job: every hybrid family of transformers, tiny, on real text; arguments go to `collate-npu audit`."""
    install(session, TRANSFORMERS, "accelerate==1.15.0", DATA, *AUDIT)
    # tiny models run faster on one thread
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    session.run("collate-npu", "audit", *session.posargs, env={"OMP_NUM_THREADS": threads})


def install_tests(session: nox.Session, transformers: str = "newest") -> None:
    if transformers == "newest":
        install(session, *PINNED)
    else:
        install(session, *TEST, *OLDEST)


@nox.session
def tests(session: nox.Session) -> None:
    """The test command: all but the slow ones, on the newest transformers; families and examples turn with the seed."""
    install_tests(session)
    session.run("pytest", *QUICK, *session.posargs, env=FAST)


@nox.session
@nox.parametrize("transformers", ["newest", "oldest"], ids=["newest", "oldest"])
def tests_all(session: nox.Session, transformers: str) -> None:
    """Every test on the newest transformers, some cases of each (COLLATE_NPU_NIGHTLY=1: all); on the oldest supported one
    what a release can change, with fewer examples."""
    install_tests(session, transformers)
    if transformers == "newest":
        session.run("pytest", *TWO_WORKERS, *session.posargs, env=ENV)
    else:
        session.run("pytest", *TWO_WORKERS, *TORCH_ALONE, *session.posargs, env=AGAIN)


@nox.session
def fuzz(session: nox.Session) -> None:
    """The laws again, with twenty times the examples, and every producer's batches through every entry."""
    install_tests(session)
    env = {**ENV, "HYPOTHESIS_PROFILE": "fuzz", "COLLATE_NPU_NIGHTLY": "1"}
    session.run("pytest", *TWO_WORKERS, "-m", "hypothesis", "--ignore=tests/distributed", *session.posargs, env=env)
    session.run("pytest", *TWO_WORKERS, "tests/producers", env=env)


@nox.session
def faults(session: nox.Session) -> None:
    """Faults that a user would see, planted into a copy of the tree: a commit plants ten, drawn, and must see ten.

    `-- --all` plants all, `-- halo` those with this word.
    """
    install_tests(session)
    words = session.posargs or (("--all",) if "COLLATE_NPU_NIGHTLY" in os.environ else ())
    session.run("python", "-m", "mutants.faults", *words, env={**FAST, "PYTHONPATH": "tests"})


@nox.session
def mutants(session: nox.Session) -> None:
    """Small changes to the code, 400 drawn (`-- 40`: so many): the share that the quick tests notice. A measure, no gate."""
    install_tests(session)
    env = {**FAST, "PYTHONPATH": "tests", "COLLATE_NPU_MUTANTS": (*session.posargs, "400")[0], "COLLATE_NPU_NIGHTLY": "1"}
    session.run("pytest", "-q", "-p", "mutants.hunting", "tests", "-m", "not slow", env=env)


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines and branches of the rooms up to `proof` that no quick test in this process comes by, each with its number."""
    install_tests(session)
    session.install("pytest-cov==7.1.0", "coverage==7.17.3")
    session.run("pytest", *QUICK, "--cov", "--cov-report=term-missing:skip-covered", *session.posargs, env=FAST)


@nox.session
def advisories(session: nox.Session) -> None:
    """Known vulnerabilities of what the locks hold, where their database is reached; what it does not know is listed."""
    session.install("pip-audit==2.10.1")
    for lock in sorted(LOCKS.glob("*.txt")):
        session.run("pip-audit", "--disable-pip", "--require-hashes", "--requirement", str(lock))


@nox.session
def soak(session: nox.Session) -> None:
    """Long runs: `nox -s soak -- ranks --minutes 10`, `-- loaders --epochs 1000`, `-- batches`."""
    install_tests(session)
    session.run("python", "-m", "soak", *session.posargs, env={**ENV, "PYTHONPATH": "tests"})


@nox.session(venv_backend="none")
def card(session: nox.Session) -> None:
    """A card's first hour, in the Python on the PATH: `nox -s card` on a CUDA or Ascend machine installs nothing, and writes
    what it found, dated, into build/card (`-- --device cpu --quick` is a dry run)."""
    session.run("python", "-m", "benchmarks.card", *session.posargs, external=True)


@nox.session
def package(session: nox.Session) -> None:
    """The wheel and the source archive: what is in them, and what a user gets by the README's line of installation."""
    put(session, "build==1.6.1", "twine==7.0.0", "mypy==2.4.1", "cyclonedx-bom==7.5.0", *TEST)
    out = Path(session.create_tmp()).resolve()
    for old in out.glob("collate_npu-*"):
        old.unlink()
    shutil.rmtree(out / "source", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(out), ".", silent=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(out / "again"), ".", silent=True)
    built = sorted(path for path in out.iterdir() if path.name.startswith("collate_npu-"))
    session.run("twine", "check", "--strict", *map(str, built))
    wheel = next(str(path) for path in built if path.suffix == ".whl")
    user, pins = out / "user", out / "pins.txt"
    pins.write_text("\n".join((TORCH, TRANSFORMERS, "accelerate==1.15.0", *AUDIT)))
    by_uv = session.venv_backend == "uv"
    session.run("python", "-m", "venv", "--clear", *["--without-pip"] * by_uv, str(user))
    python = str(user / "bin" / "python")
    install = ("uv", "pip", "install", "--python", python) if by_uv else (python, "-m", "pip", "install")
    session.run_install(*install, "--constraint", str(pins), wheel, external=True, silent=True)
    of_user = ("--output-file", str(out / "sbom.json"), "--output-reproducible", python)
    session.run("cyclonedx-py", "environment", *of_user, silent=True)
    alone = ("-p", "no:cacheprovider", "--noconftest", "-o", "pythonpath=tests", "tests/package")
    session.run("pytest", "-s", *alone, *session.posargs, env={**ENV, "WHEELS": str(out), "AS_USER": str(user / "bin")})
    archive = next(path for path in built if path.name.endswith(".tar.gz"))
    session.run_install(*install, "--no-deps", "--force-reinstall", str(archive), external=True, silent=True)
    shutil.unpack_archive(archive, out / "source")
    (source,) = (out / "source").iterdir()
    of_pytest = next(Path(session.virtualenv.location).glob("lib/python*/site-packages"))
    with session.chdir(source):  # its tests, with what the user has, and pytest
        env = {**FAST, "COLLATE_NPU_SHARE": "0.05", "PYTHONPATH": os.pathsep.join((str(source), str(of_pytest)))}
        session.run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *QUICK, env=env, external=True)


@nox.session
def oldest_torch(session: nox.Session) -> None:
    """The library alone, without transformers, on the oldest torch.

    The wheel comes without what it depends on, which is gigabytes of CUDA where the index has no CPU build of it: then
    stand-ins are compiled for those libraries (needs cc, nm and readelf).
    """
    put(session, *TORCH_NEEDS, "pytest==9.2.0", "pytest-xdist==3.8.0", "hypothesis>=6.120", *AUDIT)
    put(session, "--no-deps", OLDEST_TORCH, "-e", ".")
    session.run("python", "tests/cuda_stand_ins.py")
    some = () if "COLLATE_NPU_NIGHTLY" in os.environ else ("-m", "not slow")
    session.run("pytest", *TWO_WORKERS, *some, *WITHOUT_TRANSFORMERS, *session.posargs, env=AGAIN)


BESIDE_TORCH = ("accelerate", "trl", "peft")
"""What asks for torch, and so for the libraries of CUDA."""


@nox.session
@nox.parametrize("python,torch,beside", list(ROWS.values()), ids=list(ROWS))
def row(session: nox.Session, torch: str, beside: tuple[str, ...]) -> None:
    """One row of `elsewhere`: the test command; without transformers, what of it needs none."""
    lock = lock_of("tests", python_of(session))
    if beside is PINNED and fits(lock):
        session.install("--no-deps", "--require-hashes", "-r", str(lock))
        alone: list[str] = []
    else:
        beside = tuple(last(one, python_of(session)) for one in (*beside, *TEST, *AUDIT))
        alone = [one for one in beside if one.startswith(BESIDE_TORCH)]
        needs = TORCH_NEEDS if torch == OLDEST_TORCH else (*(one.partition("==")[0] for one in TORCH_NEEDS), "psutil")
        session.install(*needs, *(one for one in beside if one not in alone))
    session.install("--no-deps", torch, "-e", ".", *alone)
    session.run("python", "tests/cuda_stand_ins.py", silent=True)
    session.run("python", ".ci/found.py")
    left = () if any(one.startswith("transformers") for one in beside) else WITHOUT_TRANSFORMERS
    session.run("pytest", *QUICK, *left, *session.posargs, env=FAST, success_codes=(0, 1))


@nox.session(venv_backend="none")
def elsewhere(session: nox.Session) -> None:
    """What runs on other Pythons and beside other releases, into benchmarks/elsewhere.json and the guide's page of
    installation: `nox -s elsewhere`, or of some rows `nox -s elsewhere -- python-3.12 newest`."""
    session.run(sys.executable, ".ci/elsewhere.py", *session.posargs, external=True)


@nox.session
def npu(session: nox.Session) -> None:
    """The real torch_npu wheel with stand-ins for CANN, and the vendor's own benchmark (needs cc, nm and readelf)."""
    install(session, "torch_npu==2.13.0", TRANSFORMERS, "accelerate==1.15.0", "einops==0.8.1", *TEST, *AUDIT)
    put(session, "--no-deps", "mindstudio-probe==26.2.0")
    env = {**AGAIN, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "COLLATE_NPU_REQUIRE_WHEEL": "1"}
    session.run("pytest", "tests/npu", env=env)
    # a process of its own, without the stand-ins: CANN is missing
    session.run("pytest", *QUICK, *BESIDE_TORCH_NPU, *session.posargs, env=env)


def of_turns(*runs: str) -> tuple[str, ...]:
    """All at night; of a commit one, by bits of the seed that no pair of .ci/draw.py takes."""
    turn = (int(os.environ.get("COLLATE_NPU_SEED", "0")) >> 8) % len(runs)
    return runs if "COLLATE_NPU_NIGHTLY" in os.environ else runs[turn : turn + 1]


def install_swift(session: nox.Session, *more: str) -> None:
    old = ("transformers==5.19.0", "huggingface_hub==1.33.0", "accelerate==1.15.0", "aiohttp")
    install(session, *more, *old, *TEST)
    put(session, "--no-deps", "ms-swift==4.6.0", "mcore-bridge==1.6.5", "datasets==4.8.4", "peft<0.21", *SWIFT_NEEDS)
    put(session, "--no-deps", "verl==0.9.1")
    put(session, TORCH, "tensordict", "ray", "hydra-core", "codetiming", "orjson", AUDIT[1])


@nox.session
def peers_swift(session: nox.Session) -> None:
    """ms-swift, mcore-bridge and megatron-core, and what both splits of a batch agree on."""
    install_swift(session, "megatron-core==0.16.1")
    # sft first: of two unions that are equal typing returns the one made first, and ms-swift's parser goes by the order
    names = ("swift_sft", "swift_megatron", "swift_transformers", "mcore_bridge")
    session.run("pytest", *(f"tests/peers/test_{name}.py" for name in names), env=PEERS)
    # apart: what ms-swift changes of transformers stays
    session.run("pytest", "tests/tools/test_need.py", "-k", "installed", env=PEERS, success_codes=(0, 5))
    # apart: beside Triton, transformers' own layers take fla's kernels
    fla = Path(session.create_tmp()).resolve() / "fla"
    put(session, "--no-deps", "--target", str(fla), "fla-core==0.6.0", "triton==3.7.0")
    session.run("pytest", "tests/peers/test_swift_fla.py", env={**PEERS, "PYTHONPATH": str(fla)}, success_codes=(0, 5))
    # 5.19 drops a boundary in silence where its kernel is missing; later releases raise.
    session.run("pytest", "tests/integration/test_differential.py::test_a_batch_has_one_meaning", env=AGAIN)
    # In a process of their own: mcore-bridge changes Megatron's classes as soon as it is imported.
    session.run("pytest", *sorted(str(path) for path in Path("tests/peers").glob("test_megatron*.py")), env=PEERS)
    session.run("pytest", "tests/producers", "-k", "test_verdicts or mcore or swift or verl or slime", env=PEERS)


@nox.session
def peers_megatron(session: nox.Session) -> None:
    """The newest megatron-core: its own Gated DeltaNet takes flat rows (triton is a stand-in).

    It asks for Python 3.12 and uses nothing of it here.
    """
    install(session, "einops==0.8.1", "packaging", *TEST)
    newest_megatron(session)
    session.run("pytest", "tests/peers/test_megatron.py", env=PEERS)


def newest_megatron(session: nox.Session) -> None:
    put(session, "--no-deps", *any_python(session), "megatron-core==0.19.2")


@nox.session
def peers_newest(session: nox.Session) -> None:
    """ms-swift and verl beside the newest megatron-core, whose Gated DeltaNet runs on two ranks of a row."""
    install_swift(session, "einops==0.8.1", "packaging")
    newest_megatron(session)
    # apart: mcore-bridge changes Megatron's classes
    for stack in ("mcore_bridge", "verl"):
        cells = f"tests/peers/test_{stack}.py::test_its_cells_on_one_rank_and_on_two"
        session.run("pytest", cells, env={**PEERS, "COLLATE_NPU_NIGHTLY": "1"})


@nox.session
def peers_misc(session: nox.Session) -> None:
    """verl, twinkle and torchtitan (FlexAttention on a CPU needs g++)."""
    install(session, TRANSFORMERS, "accelerate==1.15.0", *TEST)
    put(session, "--no-deps", "verl==0.9.1", "megatron-core==0.16.1", "twinkle-kit==0.5.1", "torchtitan==0.3.0")
    put(session, "--no-deps", "mcore-bridge==1.6.5", "TransferQueue==0.1.11")  # twinkle's Megatron models; verl's trainer
    put(session, TORCH, TRANSFORMERS, "datasets==4.8.4", *MISC_NEEDS, AUDIT[1])
    # apart: twinkle's Megatron has a stand-in for TransformerEngine, verl's none; FlexAttention needs the true triton
    fsdp = "tests/peers/test_verl_fsdp.py"
    turns = of_turns("Ray Train", "twinkle on Ray", "FSDP")  # each starts a cluster of Ray
    left = {"twinkle": "" if "twinkle on Ray" in turns else "not on_ray"}
    left["torchtitan"] = "not together" if turns == ("FSDP",) else ""  # its trainer and FSDP, the two longest, by turns
    for stack in ("verl", "twinkle", "torchtitan"):
        named = {str(path) for path in Path("tests/peers").glob(f"test_{stack}*.py")}
        session.run("pytest", *sorted(named - {fsdp}), "-k", left.get(stack, ""), env=PEERS)
    session.run("pytest", "tests/producers", "-k", "test_verdicts or mcore or twinkle or verl or torchtitan", env=PEERS)
    if "Ray Train" in turns:  # before create_tmp: Ray's workers end at once where the temporary folder is the environment's
        session.run("pytest", "tests/tools/cli/test_cli_run.py", "-k", "Ray", env=PEERS, success_codes=(0, 5))
    if "FSDP" in turns:
        pinned = Path(session.create_tmp()).resolve() / "transformers-5.9.0"  # by verl, for everything but Megatron
        hub = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9")
        put(session, "--no-deps", "--target", str(pinned), "transformers==5.9.0", "tokenizers==0.22.2", *hub)
        # all of it is long: a draw may leave none
        session.run("pytest", fsdp, env={**PEERS, "PYTHONPATH": str(pinned)}, success_codes=(0, 5))


@nox.session
def peers_fla(session: nox.Session) -> None:
    """flash-linear-attention's Triton kernels, forward and backward, in Triton's interpreter: alone, under transformers,
    and on two ranks. The one environment with both, because here no kernel is launched."""
    install(session, TRANSFORMERS, "accelerate==1.15.0", "einops==0.8.2", *TEST, *AUDIT)
    put(session, "--no-deps", "fla-core==0.6.0", "triton==3.7.0")
    session.run(
        "pytest", *sorted(str(path) for path in Path("tests/peers").glob("test_fla*.py")), *session.posargs, env=PEERS
    )
    older = Path(session.create_tmp()).resolve() / "fla-0.5.2"  # rules differ by release: releases.py
    put(session, "--no-deps", "--target", str(older), "fla-core==0.5.2")
    # apart: fla reads once which card there is
    for kernels in of_turns("triton", "triton_ascend"):
        env = {**PEERS, "PYTHONPATH": str(older), "FLA_KERNELS": kernels, "COLLATE_NPU_SHARE": "0.5"}
        session.run("pytest", "tests/peers/test_fla.py", *session.posargs, env=env)


@nox.session
def peers_llamafactory(session: nox.Session) -> None:
    """LLaMA-Factory, beside the newest transformers and TRL it takes (torchaudio is a stand-in)."""
    old = ("transformers==5.6.0", "trl==0.24.0", "accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1")
    install(session, *old, *TEST)
    put(session, "--no-deps", "llamafactory==0.9.5")
    put(session, TORCH, *old, *FACTORY_NEEDS, AUDIT[1])
    session.run("pytest", "tests/peers/test_llamafactory.py", *session.posargs, env=PEERS)


@nox.session
def peers_axolotl(session: nox.Session) -> None:
    """axolotl, beside the releases it pins (triton and bitsandbytes are stand-ins)."""
    pinned = ("transformers==5.16.1", "trl==1.9.0", "accelerate==1.13.0", "datasets==4.8.4", "peft==0.20.0")
    install(session, *pinned, *TEST)
    contributed = ("axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6")
    put(session, "--no-deps", "axolotl==0.19.0", *contributed)
    put(session, TORCH, *pinned, *AXOLOTL_NEEDS, AUDIT[1])
    session.run("pytest", "tests/peers/test_axolotl.py", *session.posargs, env=PEERS)


@nox.session
def peers_openrlhf(session: nox.Session) -> None:
    """OpenRLHF, beside the releases it pins, and `adapt` under DeepSpeed, its Ulysses too, and PEFT (flash_attn and vllm are
    stand-ins)."""
    pinned = ("transformers==5.15.0", "accelerate==1.15.0", "datasets==4.8.4", "peft==0.20.0")
    install(session, *pinned, *TEST)
    put(session, "--no-deps", "openrlhf==0.11.2", "deepspeed==0.19.6", "ring_flash_attn==0.1.8")
    put(session, TORCH, *pinned, *OPENRLHF_NEEDS, AUDIT[1])
    tests = (f"tests/peers/test_{name}.py" for name in ("openrlhf", "deepspeed"))
    session.run("pytest", *tests, *session.posargs, env=PEERS)


@nox.session
def peers_data(session: nox.Session) -> None:
    """Loaders: torchdata, datasets, webdataset, Energon, streaming, Ray Data, TransferQueue and Megatron's indexed datasets
    (torchvision is a stand-in)."""
    install(session, TRANSFORMERS, DATA, *TEST)
    put(session, "--no-deps", *LOADERS, "megatron-core==0.16.1", "TransferQueue==0.1.11")
    put(session, TORCH, *DATA_NEEDS)
    # apart: transformers takes the stand-in for torchvision to be the package
    for tests in (("tensordict", "recorded"), ("loaders",)):
        session.run("pytest", *(f"tests/peers/test_{name}.py" for name in tests), *session.posargs, env=PEERS)
    session.run("pytest", "tests/producers", "-k", "test_verdicts or loader", env=PEERS)
    session.run("pytest", "tests/test_examples.py::test_it_runs_and_finds_no_difference[ray_data]", env=PEERS)


@nox.session
def peers_nemo(session: nox.Session) -> None:
    """NeMo Automodel, beside the transformers it pins, and Megatron-Bridge, which asks for an older one and runs on this.

    CUDA devices are the CPU; TransformerEngine and modelopt are stand-ins.
    """
    pinned = ("transformers==5.18.0", "accelerate==1.15.0", "datasets==4.8.4")
    install(session, *pinned, *TEST)
    put(session, "--no-deps", "nemo-automodel==0.7.0", "megatron-fsdp==0.5.0", "torchao==0.18.0", "flashoptim==0.1.4")
    put(session, "--no-deps", "megatron-bridge==0.3.1", "megatron-core==0.16.1")
    put(session, TORCH, *pinned, *NEMO_NEEDS)
    # apart: what stands in for TransformerEngine is not in Automodel's way
    for stack in ("nemo_automodel", "megatron_bridge"):
        session.run("pytest", f"tests/peers/test_{stack}.py", *session.posargs, env=PEERS)
    session.run("pytest", "tests/integrations/test_adapt.py", "-k", "nested", env=PEERS)
    session.run("pytest", "tests/producers", "-k", "test_verdicts or nemo", env=PEERS)


@nox.session
def peers_veomni(session: nox.Session) -> None:
    """VeOmni, beside the transformers it pins (cards and their kernels are stand-ins)."""
    pinned = ("transformers==5.9.0", "accelerate==1.15.0", "datasets==2.21.0")
    install(session, *pinned, *TEST)
    put(session, "--no-deps", *any_python(session), "veomni==0.1.12")
    put(session, TORCH, *pinned, *VEOMNI_NEEDS)
    session.run("pytest", "tests/peers/test_veomni.py", *session.posargs, env=PEERS)
    session.run("pytest", "tests/producers", "-k", "test_verdicts or VeOmni", env=PEERS)


@nox.session
def peers_skyrl(session: nox.Session) -> None:
    """SkyRL and cosmos-rl, beside a transformers that SkyRL takes; flash-attn's padding is a stand-in."""
    pinned = ("transformers==5.8.0", "accelerate==1.15.0", "datasets==4.8.4", "peft==0.18.1")
    install(session, *pinned, *TEST)
    put(session, "--no-deps", "skyrl==0.3.0", "cosmos-rl==0.4.7")
    put(session, TORCH, *pinned, *SKYRL_NEEDS)
    session.run("pytest", "tests/peers/test_skyrl.py", *session.posargs, env=PEERS)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed beside the real peers and the floors; arguments go to `benchmarks` (`--quick`, `--only collate` ...).

    One environment for all of them, so pins of ms-swift and verl on transformers and TRL are passed over.
    """
    newest = (TRANSFORMERS, *TRAINERS)
    install(session, *newest, "megatron-core==0.16.1", "rich==15.0.0", PLOTS)
    put(session, "--no-deps", "ms-swift==4.6.0", "twinkle-kit==0.5.1", "verl==0.9.1", "peft<0.21")
    needs = [name for name in SWIFT_NEEDS if not name.startswith("trl")]
    put(session, "--no-deps", *LOADERS)
    put(session, TORCH, *newest, *needs, *DATA_NEEDS, *BENCH_NEEDS)
    session.run("python", "-m", "benchmarks", *session.posargs, env=ENV)


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """What newer releases of the other stacks change, into benchmarks/upstream.json and the guide's page of stacks."""
    session.run(sys.executable, ".ci/upstream.py", *session.posargs, external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The site in build/site: the guide, and the API read from the source; a broken link or anchor is an error, and so is an
    output of the notebook that is not the one it holds (`nox -s docs -- --write` stores what came out)."""
    install(session, TRANSFORMERS, *AUDIT, "nbclient==0.11.0", "ipykernel==7.4.0")
    session.run("python", ".ci/notebooks.py", *session.posargs, env={**ENV, "TRANSFORMERS_VERBOSITY": "error"})
    put(session, "mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8", "mkdocstrings-python==2.0.11", "ruff==0.17.5")
    session.run("mkdocs", "build", "--strict", "--config-file", ".ci/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})
