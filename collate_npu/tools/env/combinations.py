"""Combinations: hazards of what is installed and set here, taken together; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collate_npu.tools import kernel_hazards
from collate_npu.tools.env.answers import ROUNDS
from collate_npu.tools.env.installed import UNKNOWN, release


def hazards(
    packages: Mapping[str, str],
    settings: Mapping[str, str],
    *,
    devices: str,
    npu: str,
    rounding: Mapping[str, bool],
    start: str = "",
) -> Iterator[str]:
    """A line for each. `devices`, `npu` and `rounding` are what was found of torch; `start` is MindSpeed's."""
    if broken := [name for name, version in packages.items() if version == UNKNOWN]:
        yield f"The metadata of {', '.join(broken)} is broken: install anew, others cannot tell the version either."
    yield from _hazards(packages, settings, devices, npu)
    if start:
        yield start
    yield from _rounded(rounding)


def _hazards(packages: Mapping[str, str], settings: Mapping[str, str], devices: str, npu: str) -> Iterator[str]:
    yield from _npu_hazards(packages, settings, npu)
    if "torch" not in packages:
        yield "torch is not installed: install the build for this machine (the CPU build where there is no card)."
    elif "torch does not load" in devices and "torch_npu" not in packages:
        yield "torch is installed and does not load: every other command needs it."
    if "triton" in packages and {"flash-linear-attention", "fla-core"} & packages.keys() and devices == "cpu only":
        yield (
            "flash-linear-attention (fla-core) and triton are installed and there is no GPU: transformers hands Gated "
            "DeltaNet to their kernels, which fail on a CPU. Uninstall them here."
        )
    if "transformers" in packages and release(packages["transformers"]) < (5, 15):
        yield (
            f"transformers {packages['transformers']} drops the mask of a single left-padded row in recurrent layers "
            "(mended in 5.15): such batches are refused."
        )
    yield from kernel_hazards.recurrent_hazards(packages)
    if "mcore-bridge" in packages:
        yield from _gated_delta_net_hazards(packages, settings)


def _gated_delta_net_hazards(packages: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[str]:
    """mcore-bridge 1.6.5: model/gpts/qwen3_next.py:456-458; megatron-core core/transformer/transformer_config.py:982-986."""
    bridge, core = packages["mcore-bridge"], packages.get("megatron-core", "")
    yield (
        f"No Gated DeltaNet of mcore-bridge {bridge} reads attention_mask_2d: call integrations.swift.install() or "
        "integrations.megatron.mcore_bridge.install() before the model is built, or pad right."
    )
    if settings.get("USE_MCORE_GDN", "1").lower() in ("0", "false", "no", "off"):
        yield (
            "USE_MCORE_GDN=0 takes transformers' Gated DeltaNet: no context parallelism, and with transformers 5.13 or newer"
            f" (here {packages.get('transformers', 'none')}) no Qwen3-Next without that install. Unset it."
        )
    elif core and release(core) < (0, 18):
        yield f"Gated DeltaNet of megatron-core {core} has no context parallelism: 0.18 is the first release with it."


def _rounded(rounding: Mapping[str, bool]) -> Iterator[str]:
    on = [name for name, value in rounding.items() if value]
    if on:
        kinds = " and ".join(sorted({ROUNDS[name] for name in on}))
        yield (
            f"{kinds} rounds float32 products to ten bits ({', '.join(on)}): right results differ by 1e-3. The audit "
            "measures that noise; set them to False to compare in full float32."
        )


def _npu_hazards(packages: Mapping[str, str], settings: Mapping[str, str], npu: str) -> Iterator[str]:
    if "torch_npu" not in packages:
        return
    torch, torch_npu = packages.get("torch", ""), packages["torch_npu"]
    if release(torch) != release(torch_npu):
        # "{PyTorch version}" or "{PyTorch version}.postN": COMPATIBILITY.md of Ascend/pytorch, which also names the CANN
        # release of each pair: torch_npu 2.7.1 takes CANN 8.3.RC1, 2.7.1.post2 CANN 8.5.0, 2.12.0 CANN 9.1.0
        yield (
            f"torch {torch} and torch_npu {torch_npu} are not a pair: install the same minor release of both, the one "
            "made for this machine's CANN."
        )
    if "does not load" in npu:
        yield (
            "torch_npu is installed without the CANN libraries, and `import torch` loads it: set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU, or source CANN's set_env.sh. transformers imports it too "
            "when it builds a model, and fails: uninstall torch_npu for that."
        )
    if settings.get("NPU_FA2_SPARSE_MODE") == "2":
        yield (
            "NPU_FA2_SPARSE_MODE=2 aligns the causal triangle to the top left: right for training, wrong wherever there "
            "are more keys than queries (a KV cache). The default, 3, is right for both."
        )
    if "transformers" in packages:
        yield (
            "transformers' flash attention on NPU drops sliding windows without an error "
            "(integrations/npu_flash_attention.py:54-104): use sdpa for models that have them."
        )
