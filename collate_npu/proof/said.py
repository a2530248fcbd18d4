"""Said: what the kernels of a forward were told, and what is wrong with it, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from collate_npu.proof.forward import Fault, Forward, Seen


def block(forward: Forward, faults: Mapping[int, Fault]) -> str:
    """`27 recurrent: rule [0, 6, 11] ✔ · convolution nothing ✘ · 9 attention: [0, 6, 11] ✔`. `=` is told as the other calls
    of this forward, which is all there was to judge it by; no mark where there was nothing."""
    told: dict[tuple[str, str], dict[tuple[str, str], set[str]]] = {}
    beside = forward.beside()
    for n, seen in enumerate(forward.calls):
        if seen.positions is not None:
            continue
        kind = "attention" if seen.kind == "attention" else "recurrent"
        text = f"not read ({seen.unread})" if seen.told is None else str(seen.told)
        mark = " ✘" if n in faults else " ✔" if forward.judges(seen) else " =" if n in beside else ""
        told.setdefault((kind, seen.kind), {}).setdefault((text, mark), set()).add(seen.layer)
    parts = []
    for kind in ("recurrent", "attention"):
        layers = {layer for (group, _), each in told.items() if group == kind for names in each.values() for layer in names}
        own = {what: each for (group, what), each in told.items() if group == kind}
        if not layers:
            continue
        said: list[str] = []
        for what, each in own.items():
            name = "" if what == kind else f"{what} "
            for (text, mark), names in each.items():
                part = f" in {len(names)} of {len(layers)}" if len(names) < len(layers) else ""
                said.append(f"{name}{text}{part}{mark}")
        parts.append(f"{len(layers)} {kind}: {' · '.join(said)}")
    counted = [n for n, seen in enumerate(forward.calls) if seen.positions is not None and forward.judges(seen)]
    if counted:
        parts.append("positions ✘" if any(n in faults for n in counted) else "positions ✔")
    return " · ".join(parts)


def listed(faults: Iterable[Fault], handed: Mapping[str, str] = MappingProxyType({})) -> str:
    """Each layer with what is wrong there, those with the same faults together; `handed`: what is wrong with what it got."""
    kernels: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        kernels.setdefault((fault.layer, f"told {fault.told}: {fault.why}"), []).append(fault.kernel)
    whys = {name: [why] for name, why in handed.items()}
    for (layer, what), names in kernels.items():
        whys.setdefault(layer, []).append(f"{' and '.join(dict.fromkeys(names))} {what}")
    layers: dict[str, list[str]] = {}
    for name, each in whys.items():
        layers.setdefault("; ".join(each), []).append(name)
    return "; ".join(f"{few(names)}: {why}" for why, names in layers.items())


def few(names: Sequence[str]) -> str:
    """The first eight of them, and how many more."""
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


def counts(calls: list[Seen]) -> Counter[str]:
    """Calls by kernel."""
    return Counter(seen.kernel for seen in calls if seen.positions is None)
