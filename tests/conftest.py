"""The seed, and the profiles of hypothesis. Small tensors, so one thread.

COLLATE_NPU_SEED repeats a run: examples, the producers' batches, and what the quick run takes of families and entries
follow from it. Where none is given it comes from the clock; it stands in the header and below failures.
HYPOTHESIS_PROFILE is `fast`, `full` (the default) or `fuzz`, which looks further.
"""

import gc
import os
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from reported import REPORT, report

from collate_npu import releases

os.environ.setdefault("COLLATE_NPU_SEED", str(time.time_ns() // 1000 % 1_000_000))  # xdist's workers inherit it
SEED = os.environ["COLLATE_NPU_SEED"]
PROFILE = os.environ.setdefault("HYPOTHESIS_PROFILE", "full")
os.environ.pop("COLLATE_NPU_REPORT", "")
# Slow generation is judged by the whole run, not by one loaded machine; the seed finds an example again, no database.
common = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=20, **common)
settings.register_profile("first", max_examples=20, phases=[Phase.explicit, Phase.generate], **common)  # nothing is shrunk
settings.register_profile("full", max_examples=60, **common)
settings.register_profile("fuzz", max_examples=500, **common)
settings.load_profile(PROFILE)
torch.set_num_threads(1)
MOST = 4
"""So many times the examples of its profile a test may ask for, under `fast`: what laws of small tensors do."""
TOLD: list[str] = []  # what is left to the draw, as a table


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.option.hypothesis_seed = config.option.hypothesis_seed or SEED


def pytest_report_header() -> str:
    return f"seed: COLLATE_NPU_SEED={SEED} repeats what this run draws, profile {PROFILE}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in TOLD:
        terminalreporter.write_line(line)
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"drawn with COLLATE_NPU_SEED={SEED} HYPOTHESIS_PROFILE={PROFILE}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TOLD[:] = getattr(node, "workeroutput", {}).get("told", TOLD)  # xdist's workers collect


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What this run found. Whether red is a failure, who asks for it says."""
    getattr(session.config, "workeroutput", {})["told"] = TOLD
    if REPORT:
        seen = session.config.pluginmanager.get_plugin("terminalreporter").stats
        red = {one.nodeid: said(one.longreprtext) for one in (*seen.get("failed", ()), *seen.get("error", ()))}
        report({name: len(seen.get(name, ())) for name in ("passed", "skipped")}, red)


def said(trace: str) -> str:
    """Its last error: that of a process stands below its trace."""
    lines = [line[1:].strip() for line in trace.splitlines() if line.startswith("E ")] or trace.splitlines()[-1:]
    errors = [line for line in lines if "Error: " in line and "Traceback" not in line]
    return errors[-1] if errors else (lines or [""])[0]


def no_models() -> str:
    """Why transformers cannot build a model here, if so: with the torch_npu wheel and no CANN it tries to import it."""
    if find_spec("torch_npu") is None or find_spec("transformers") is None:
        return ""
    try:
        import transformers.modeling_utils  # noqa: F401
    except ImportError as error:
        return f"transformers does not load beside torch_npu without CANN: {error}"
    return ""


@pytest.hookimpl(wrapper=True)  # draws of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    from rotation import of_this_run, told  # which reads the seed from above

    yield
    if not any("::" in arg for arg in config.args):  # one that is named runs
        taken = of_this_run(items)
        TOLD[:] = told(items, taken)
        config.hook.pytest_deselected(items=[*{*items} - {*taken}])
        items[:] = taken
    marked = [item for item in items if item.get_closest_marker("models")]
    if marked and (reason := no_models()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    if PROFILE == "fast":
        draw_little({item.function for item in items if isinstance(item, pytest.Function)})


def pytest_collection_finish() -> None:
    """A fourth of the quick run's time was looking for garbage among modules and tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 100)


def draw_little(functions: set) -> None:
    """No more examples than the profile says; hypothesis has no other place for what a test asks for itself."""
    for function in functions:
        own = getattr(function, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > MOST * settings.default.max_examples:
            function._hypothesis_internal_use_settings = settings(own, max_examples=MOST * settings.default.max_examples)


@pytest.fixture(scope="module")
def newest_transformers():
    """Routes for transformers depend on the release installed; the rules of older ones are tested by their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(releases._FOUND, "transformers", "5.23.0")
        yield
