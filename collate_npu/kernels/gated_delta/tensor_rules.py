"""Rules of the tensors: their shapes are read where they are given (tensors on device meta will do), never their values.

Legend: B rows, T tokens, H query and key heads, N value heads, K and V head sizes, D channels, W taps, S states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call

KDA_LAYOUTS = {"BSND": "BTHK", "BNSD": "BHTK", "TND": "THK", "NTD": "HTK"}
_CONV_LAYOUTS = {"BSND": "BTHK", "BSH": "BTD", "BNSD": "BHTK", "TND": "THK", "NTD": "HTK"}
TOKENS_FIRST = "Put the dimensions in that order (transpose, then contiguous)."


def breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the shapes and dtypes of the tensors of a call."""
    shapes = {name: order for name, order in _shapes(call).items() if isinstance(call.get(name), Tensor)}
    sizes: dict[str, int] = {"B": call.B, "T": call.T}
    found = [breach for name, order in shapes.items() for breach in _shape(call, name, order, sizes)]
    yield from found
    if not found:
        yield from _same_sizes(call, shapes)
        yield from _heads(call, sizes)
        yield from _channels(call, sizes)
    yield from _states(call)
    yield from _removed(call)


def _shapes(call: Call) -> Mapping[str, str]:
    """The order of dimensions of each tensor; for FNPU's KDA and convolution it follows from the call."""
    name = call.operator.name
    if "kda" in name and call.operator.host:
        order = KDA_LAYOUTS.get(call.word("layout", "BSND"), "")
        return {x: order for x in ("q", "k") if order}
    if name in ("fla_npu.causal_conv1d", "fla_npu.causal_conv1d_bwd"):
        x = call.get("x")
        layout = call.word("input_layout")
        order = _CONV_LAYOUTS.get(layout, "") if layout else "TD" if isinstance(x, Tensor) and x.ndim == 2 else "BTD"
        return {"x": order, "weight": "WD", "bias": "D"}
    if name == "fla_npu.chunk_local_cumsum" and call.get("head_first") is False:
        return {"g": "BTN"}
    return call.operator.shapes


def _shape(call: Call, name: str, order: str, sizes: dict[str, int]) -> Iterator[Breach]:
    """Each dimension has one size throughout the call; B and T are those of the call."""
    shape = tuple(call.get(name).shape)
    if order == "S..." or not order:
        return
    if name == "x" and order == "BTD" and len(shape) > 3:
        shape = (*shape[:2], prod(shape[2:]))  # fla flattens what stands behind the tokens
    listed = "[" + ", ".join(order) + "]"
    if len(shape) != len(order):
        yield call.breach("shape", name, shape_of(call.get(name)), f"It is {listed}.", TOKENS_FIRST)
        return
    wrong = [f"{axis} is {sizes[axis]}" for axis, size in zip(order, shape) if sizes.setdefault(axis, size) != size]
    if wrong:
        says = f"It is {listed}, and {', '.join(wrong)}."
        yield call.breach(
            "shape", name, shape_of(call.get(name)), says, TOKENS_FIRST, silent="shape" not in call.operator.checks
        )


def _same_sizes(call: Call, shapes: Mapping[str, str]) -> Iterator[Breach]:
    """Where tokens are as many as heads or channels, a tensor in the other order has the same shape."""
    unclear = []
    for name, order in shapes.items():
        at = order.find("T")
        others = [i for i, axis in enumerate(order) if axis in "HND" and i != at]
        if at < 0 or not others or call.T == 1:
            continue
        x = call.get(name)
        if not any(x.shape[i] == call.T for i in others) or _strides_tell(order, x):
            return  # this one tells for all of them
        unclear.append((name, order))
    if unclear:
        name, order = unclear[0]
        what = "channels" if "D" in order else "heads"
        says = f"[{', '.join(order)}] and the same with tokens and {what} exchanged look alike."
        remedy = f"Check the call with a row of another length than {call.T}; or leave {name} out, where its order is known."
        yield call.breach("look-alike", name, shape_of(call.get(name)), says, remedy, silent=True)


def _strides_tell(order: str, x: Tensor) -> bool:
    """A channel-last `[B, D, T]` says so itself."""
    return order == "BDT" and x.stride(1) == 1


def _heads(call: Call, sizes: Mapping[str, int]) -> Iterator[Breach]:
    heads, values = sizes.get("H"), sizes.get("N")
    if heads and values and values % heads:
        says, remedy = "Value heads are a whole multiple of key heads.", "Repeat neither; change the model's head counts."
        yield call.breach("heads", "v", f"{heads} key heads, {values} value heads", says, remedy)
    for axis, most in zip("KV", call.operator.head_sizes):
        if most and sizes.get(axis, 0) > most:
            remedy = "Use another kernel for this head size."
            yield call.breach(
                "head-size", "q" if axis == "K" else "v", str(sizes[axis]), f"{axis} is at most {most}.", remedy
            )


def _channels(call: Call, sizes: Mapping[str, int]) -> Iterator[Breach]:
    row = call.operator
    D, W = sizes.get("D"), sizes.get("W")
    multiple = {"causal_conv1d": 8, "fla_npu": 16}.get(row.package)
    if D and multiple and "channels" in row.checks and D % multiple:
        remedy = "Pad the channels, or use another convolution."
        yield call.breach("channels", "x", f"{D} channels", f"Channels are a multiple of {multiple}.", remedy)
    if W and "taps" in row.checks and not 2 <= W <= 4:
        order = _shapes(call).get("weight", "")
        says = f"weight is [{', '.join(order)}] with 2 to 4 taps."
        yield call.breach("taps", "weight", shape_of(call.get("weight")), says, "Transpose it, or use another convolution.")
    x = call.get("x")
    if row.package == "causal_conv1d" and isinstance(x, Tensor) and "seq_idx" in call.arguments:
        strides = x.stride()
        if D != 1 and (strides[1] != 1 or (call.B > 1 and strides[0] % 8) or (call.T > 1 and strides[2] % 8)):
            says = "With seq_idx the channels lie together: stride(1) is 1, the other strides are multiples of 8."
            remedy = "Pass x_BTD.contiguous().transpose(1, 2)."
            yield call.breach("strides", "x", f"strides {strides}", says, remedy)


def _states(call: Call) -> Iterator[Breach]:
    """One state a sequence; a row has one where there are no boundaries."""
    state = call.get("initial_state")
    if not isinstance(state, Tensor) or "cp_context" in call.arguments:
        return
    count = len(call.lengths) if call.where else call.B
    if state.ndim and state.shape[0] != count:
        says, remedy = f"There is one state for each of {count} sequences.", "Build one for each sequence, in their order."
        yield call.breach("states", "initial_state", shape_of(state), says, remedy)
    if "state-dtype" in call.operator.checks and shape_of(state).split()[0] != "float32":
        yield call.breach("state-dtype", "initial_state", shape_of(state), "It is float32.", "Pass initial_state.float().")


def _removed(call: Call) -> Iterator[Breach]:
    if "head_first" in call.arguments and call.operator.package == "fla":
        says, remedy = (
            "fla takes [B, T, H, ...] alone and raises for the argument.",
            "Leave head_first out, and put tokens first.",
        )
        yield call.breach("removed", "head_first", repr(call.get("head_first")), says, remedy, silent=False)
