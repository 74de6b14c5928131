"""Disable each precondition of each pass in turn: a test of tests/passes must fail.

    python -m helpers.mutation.run [--modules windows layout] [--functions windows.Lifetimes] [--keywords 'not order']
    python -m helpers.mutation.run --equivalent

Runs in tests/. Exits with 1 if a mutant outside of EQUIVALENT survives, or with `--equivalent` if a mutant of
EQUIVALENT does not survive. See [Note: What counts as a precondition] in `mutants.py`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from helpers.mutation.equivalent import EQUIVALENT
from helpers.mutation.mutants import Mutant, apply, find_mutants, restore, watch

# CPU time, so that the machine's load does not matter; added to twice the tests' CPU time without a mutant.
TIMEOUT_SECONDS = 60

# Every module that makes decisions about a graph.
MODULES = (
    "aliases", "check", "call_random_ops", "choose", "collectives", "costs", "cut_backward", "drop_input_aliases",
    "drop_random_states", "eager_effects", "effects", "equal_blocks", "expand_group_calls", "function_text",
    "graph_text", "keep_module_hooks", "layout", "legalize_windows", "make_replayable",
    "offload_saved", "op_facts", "outline_blocks", "pack_gathers", "pack_reductions", "packing", "parameter_memory",
    "read_step", "read_by_strides", "remove_unread", "remove_unshard_copies", "replace_unsafe_gathers", "runner",
    "save_before_writes",
    "save_frozen_outputs", "saved_sizes", "schedule_collectives", "sinking", "step_time", "subgraphs", "timeline",
    "unfilled_reads", "untraced_code", "value_memory", "windows",
)  # fmt: skip

# Parts of the names of the test files most specific to modules without a test file of their name.
_TESTED_IN = {
    "eager_effects": "test_effects",
    **dict.fromkeys(("pack_gathers", "pack_reductions", "packing"), "pack_collectives"),
    **dict.fromkeys(("parameter_memory", "value_memory"), "test_timeline"),
    "read_step": "test_step_memory",
    "runner": "pipeline",
    "sinking": "legalize",
    "windows": "remove_unshard_copies",
}

# A test that starts a process, which does not run the mutant's code, and tests of this file.
_LEFT_OUT = ("change_with_all_code_that_decides", "test_mutation.py")


def pass_module(name: str) -> ModuleType:
    """Import a module by its name, from any folder of passes/."""
    folders = ("", ".analysis", ".budget", ".dynamo", ".partitioned", ".post_grad")
    paths = [f"compile_fsdp.passes{folder}.{name}" for folder in folders]
    return importlib.import_module(next(path for path in paths if importlib.util.find_spec(path)))


class Run:
    """Pytest plugin that runs the tests in a fork per mutant.

    The tests are collected once. A mutant runs only the tests in which its condition takes a value other than the
    mutant's, because no further test can fail.
    """

    def __init__(self, mutants: list[Mutant]) -> None:
        self.survivors: list[Mutant] = []
        self.outcomes: Counter[str] = Counter()  # "killed", "survived" or "timeout"
        self._mutants = mutants
        self._seconds: dict[str, float] = {}
        self._seen: dict[Mutant, list[pytest.Item]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        # Deterministic examples, without a database and without shrinking.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, database=None, phases=phases)
        hypothesis.settings.load_profile("mutation")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(name in item.nodeid for name in _LEFT_OUT)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._run_without_mutant(session.items)
        for mutant in sorted(self._mutants, key=self._cost):
            start = time.perf_counter()
            outcome = self._run(mutant)
            self.outcomes[outcome] += 1
            if outcome == "survived":
                self.survivors.append(mutant)
            seconds = time.perf_counter() - start
            print(f"{outcome:8}  {seconds:5.1f} s  {mutant.place[0]:4}  {mutant.key}", flush=True)
        return True

    def _run_without_mutant(self, items: list[pytest.Item]) -> None:
        modules = [pass_module(name) for name in {mutant.function.split(".")[0]: None for mutant in self._mutants}]
        seen: set[Mutant] = set()
        for module in modules:
            watch(module, seen.add)
        for item in items:
            start = time.process_time()
            seen.clear()
            if _fails([item]):
                raise SystemExit(f"expected tests that pass without a mutant, {item.nodeid} fails")
            self._seconds[item.nodeid] = time.process_time() - start
            for mutant in seen:
                self._seen.setdefault(mutant, []).append(item)
        for module in modules:
            restore(module)

    def _cost(self, mutant: Mutant) -> float:
        """Seconds of the tests that can detect the mutant; 0 puts sure survivors first."""
        return sum(self._seconds[item.nodeid] for item in self._seen.get(mutant, []))

    def _run(self, mutant: Mutant) -> str:
        name = mutant.function.split(".")[0]
        items = self._seen.get(mutant, [])
        # Quick tests first; the module's own tests may be ten times slower.
        own = _TESTED_IN.get(name, name)
        items.sort(key=lambda item: self._seconds[item.nodeid] / (10 if own in item.nodeid else 1))
        child = os.fork() if items else -1
        if child == 0:
            signal.setitimer(signal.ITIMER_VIRTUAL, TIMEOUT_SECONDS + 2 * self._cost(mutant))  # It ends the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Hides torch's messages about mutants.
            try:
                apply(mutant, pass_module(name))
                os._exit(_fails(items))
            finally:
                os._exit(1)  # The mutant broke pytest itself.
        _, status = os.waitpid(child, 0) if items else (child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGVTALRM:
            return "timeout"
        return "killed" if status else "survived"


def _fails(items: list[pytest.Item]) -> bool:
    """Whether a test fails; stops at the first failure."""
    for i, item in enumerate(items):
        before = item.session.testsfailed
        following = items[i + 1] if i + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed > before:
            return True
    return False


def run(mutants: list[Mutant], tests: str, keywords: str) -> Run:
    """Run a folder's or file's tests that match the keywords, with each mutant."""
    plugin = Run(mutants)
    # Without the terminal plugin, pytest does not know its options in addopts.
    options = ["-s", "-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts="]
    code = pytest.main([*options, "--import-mode=importlib", "-m", "not slow", "-k", keywords, tests], plugins=[plugin])
    if not plugin.outcomes.total() and mutants:
        raise SystemExit(f"expected the tests to run, pytest ended with {code!r}")
    return plugin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--functions", nargs="+", default=[""], help="prefixes of qualified names")
    parser.add_argument("--tests", default="passes", help="folder or file of the tests")
    parser.add_argument("--keywords", default="", help="which of them, as pytest's -k has it")
    parser.add_argument("--equivalent", action="store_true", help="disable those of EQUIVALENT, and no others")
    arguments = parser.parse_args()
    mutants = [mutant for name in arguments.modules for mutant in find_mutants(pass_module(name))]
    mutants = [mutant for mutant in mutants if mutant.function.startswith(tuple(arguments.functions))]
    mutants = [mutant for mutant in mutants if (mutant.key in EQUIVALENT) == arguments.equivalent]
    os.chdir(Path(__file__).parents[2])  # tests/
    result = run(mutants, arguments.tests, arguments.keywords)
    wrong = result.survivors
    if arguments.equivalent:
        wrong = [mutant for mutant in mutants if mutant not in result.survivors]
    for mutant in wrong:
        module = mutant.function.split(".")[0]
        what = "not equivalent" if arguments.equivalent else "survivor"
        print(f"{what}: {module}.py:{mutant.place[0]}  {mutant.key}")
    print(f"{len(mutants)} mutants: {dict(result.outcomes)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
