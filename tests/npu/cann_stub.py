"""Stand-ins for the CANN libraries, so that the unmodified torch_npu wheel imports on a machine without CANN or card.

`libascendcl.so` is `cann_stub.c` plus a function that returns 0 for every other name the wheel asks for: its undefined
symbols, and the names it looks up at run time. The other libraries are empty and lead to it. Reads only the wheel's own
symbol tables; needs nm, readelf and cc, and about two seconds.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

TOOLS = ("nm", "readelf", "cc")
RUNTIME = "libascendcl.so"
OPTIONAL = "libop_plugin_atb.so"
"""Loaded on demand, for operators of another library of Ascend's."""
DEVICES = "NPU_STUB_DEVICES"
"""The environment variable that says how many devices to pretend; without it CANN is there and a card is not."""

_LOOKED_UP = re.compile(rb"(?<=\0)(?:aclrt|aclsys|aclmdl|aclop|acl|rt)[A-Z]\w{3,}(?=\0)")
_OWN_SOURCE = Path(__file__).with_suffix(".c")


def missing() -> str | None:
    """Why the stand-ins cannot be built here, or None."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed: these tests are for the nox session npu"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"stand-ins for CANN need {', '.join(absent)}" if absent else None


def build(folder: Path) -> list[Path]:
    """Compile the stand-ins into `folder`; the list is in loading order."""
    npu, torch = package("torch_npu"), package("torch")
    wheel = [*npu.glob("_C*.so"), *npu.glob("lib/*.so")]
    wheel = [library for library in wheel if library.name != OPTIONAL]
    runtime = folder / RUNTIME
    own = _object(_OWN_SOURCE, folder / "own.o")
    provided = (_symbols(library, "-D", "--defined-only") for library in (*wheel, *torch.glob("lib/*.so*")))
    defined = _symbols(own, "--defined-only").union(*provided)
    generated = folder / "generated.c"
    generated.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(_asked_for(wheel) - defined)))
    _link(runtime, own, _object(generated, folder / "generated.o"))
    names = sorted(_needed(wheel) - {RUNTIME} - {path.name for path in (*npu.glob("lib/*"), *torch.glob("lib/*"))})
    others = [folder / name for name in names if not _loads(name)]
    for other in others:  # a name looked up in an empty library is found in the one it needs
        _link(other, "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")
    return [runtime, *others]


def preload(libraries: Iterable[Path]) -> None:
    """Load the stand-ins into this process: the loader then takes them by name, with no LD_LIBRARY_PATH."""
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _asked_for(wheel: Iterable[Path]) -> set[str]:
    found: set[str] = set()
    for library in wheel:
        found |= {name for name in _symbols(library, "--undefined-only") if not name.startswith(("Py", "_Py"))}
        found |= {name.decode() for name in _LOOKED_UP.findall(library.read_bytes())}
    return found


def _symbols(library: Path, *flags: str) -> set[str]:
    """Symbols without a version: those with one belong to the system's own libraries. Weak undefined ones may stay so."""
    dynamic = ("-D",) if library.suffix != ".o" and "-D" not in flags else ()
    table = subprocess.run(["nm", *dynamic, *flags, str(library)], capture_output=True, text=True, check=True).stdout
    entries = (line.split()[-2:] for line in table.splitlines() if line.strip())
    defined = "--defined-only" in flags
    return {name.split("@")[0] for kind, name in entries if defined or ("@" not in name and kind not in "wv")}


def _needed(wheel: Iterable[Path]) -> set[str]:
    tables = (subprocess.run(["readelf", "-d", str(x)], capture_output=True, text=True, check=True).stdout for x in wheel)
    return set().union(*(re.findall(r"\(NEEDED\).*\[(.+)\]", table) for table in tables))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _object(source: Path, target: Path) -> Path:
    subprocess.run(["cc", "-c", "-fPIC", "-O1", "-w", "-fno-builtin", "-o", str(target), str(source)], check=True)
    return target


def _link(target: Path, *parts: object) -> None:
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target), *map(str, parts)]
    subprocess.run(command, check=True)
