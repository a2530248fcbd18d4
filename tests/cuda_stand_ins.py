"""Stand-ins for the CUDA libraries, so that a torch wheel made for CUDA computes on a CPU without gigabytes of them.

Run as a script where torch is installed without its dependencies: `python cuda_stand_ins.py`. Each library that torch
names and that is not here becomes an empty one beside torch's own, in which every function returns 0 and there is no
device. Reads only the wheel's own symbol tables; needs nm, readelf and cc, and about a second. A torch without CUDA
misses nothing, and nothing is done.
"""

import re
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvToolsExt|nvJitLink|nvshmem)\w*\.so")
UNVERSIONED = re.compile(r"_*(cu|nccl|nvrtc|nvtx)")
ANSWERS = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }",  # cudaErrorNoDevice
    "cudaGetErrorString": 'const char *cudaGetErrorString(int error) { return "a stand-in for CUDA"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }',
}


def build(folder: Path) -> list[Path]:
    """Compile a stand-in for each missing library into `folder`, where torch's own libraries are and look first."""
    own = sorted(folder.glob("*.so*"))
    asked = (re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-d", str(library))) for library in own)
    needed = {name for names in asked for name in names if CUDA.match(name)}
    missing = sorted(needed - {library.name for library in own})
    asked, defined = _symbols(own)
    homes = {version: home for library in own for home, version in _versions(library) if home in missing}
    functions: dict[str, dict[str, list[str]]] = {name: {name: []} for name in missing}
    for name, version in sorted(asked.items()):
        home = homes.get(version) or (missing[0] if missing and not version and UNVERSIONED.match(name) else "")
        if home and name not in defined:
            functions[home].setdefault(version or home, []).append(name)
    return [_compile(folder / home, names) for home, names in functions.items()]


def _versions(library: Path) -> list[tuple[str, str]]:
    """The versions that a library asks others for: pairs of the other's name and a version."""
    home, found = "", []
    for kind, name in re.findall(r"(File|Name): (\S+)", _output("readelf", "-V", "-W", str(library))):
        home = name if kind == "File" else home
        found += [(home, name)] if kind == "Name" else []
    return found


def _symbols(libraries: Iterable[Path]) -> tuple[dict[str, str], set[str]]:
    """What the libraries ask for, with the version of each name (a library's name), and what they define."""
    asked, defined = {}, set()
    for library in libraries:
        for line in _output("nm", "-D", "--with-symbol-versions", str(library)).splitlines():
            kind, name = line.split()[-2:]
            name, _, version = name.partition("@")
            if kind in "Uvw":
                asked[name] = version
            else:
                defined.add(name)
    return asked, defined


def _compile(target: Path, functions: dict[str, list[str]]) -> Path:
    """One library; `functions` are the names it defines under each version."""
    script = target.with_suffix(".map")
    nodes = (f"{version} {{ {' '.join(f'{name};' for name in names)} }};" for version, names in functions.items())
    script.write_text("\n".join(nodes), encoding="utf-8")
    names = [name for names in functions.values() for name in names]
    source = "\n".join(ANSWERS.get(name, f"long {name}(void) {{ return 0; }}") for name in names)
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{target.name}", f"-Wl,--version-script,{script}"]
    subprocess.run(["cc", *flags, "-o", str(target), "-x", "c", "-"], input=source, text=True, check=True)
    script.unlink()
    return target


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    spec = find_spec("torch")
    assert spec is not None, "torch is not installed"
    print(*(library.name for library in build(Path(spec.origin).parent / "lib")))
