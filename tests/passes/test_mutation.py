"""`make mutate`: preconditions are found, disabled and restored, and tests notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_fsdp.passes import Kept
from compile_fsdp.passes.analysis import layout
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from helpers.graphs.build import Layer
from helpers.mutation.equivalent import EQUIVALENT
from helpers.mutation.mutants import Mutant, apply, find_mutants, restore
from helpers.mutation.run import MODULES, pass_module


def mutant_of(module: str, key: str) -> Mutant:
    return next(mutant for mutant in find_mutants(pass_module(module)) if mutant.key == f"{module}.{key}")


def kept_reasons() -> set[Kept]:
    layer = Layer()
    layer.fill(layer.build.input("other", (4, 4), torch.bfloat16))
    graph = layer.build.output(*layer.add("read free"))
    return {reason for _, reason in remove_unshard_copies(graph).kept}


@pytest.mark.parametrize("module", MODULES)
def test_preconditions_of_every_module_are_found(module: str) -> None:
    assert find_mutants(pass_module(module))


def test_disabled_precondition_never_refuses_wherever_it_is_called_from() -> None:
    assert kept_reasons() == {Kept.COPY_CONVERTS}
    mutant = mutant_of("layout", "find_copy_fault: param.dtype != value.dtype -> False")
    try:
        apply(mutant, layout)
        assert kept_reasons() == set()
    finally:
        restore(layout)
    assert kept_reasons() == {Kept.COPY_CONVERTS}


def test_every_listed_equivalent_mutant_exists() -> None:
    keys = {mutant.key for module in MODULES for mutant in find_mutants(pass_module(module))}
    assert set(EQUIVALENT) <= keys


def test_tests_kill_only_mutants_of_code_that_they_run() -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "helpers.mutation.run", "--tests", "passes/dynamo/test_expand_group_calls.py"]
    command += ["--functions", "expand_group_calls._expand", "runner.Pipeline._run"]
    environment = {**os.environ, "PYTHONPATH": str(tests)}  # as in the Makefile
    run = subprocess.run(command, env=environment, cwd=tests, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    outcomes = {line.split("  ")[-1]: line.split()[0] for line in run.stdout.splitlines() if " -> " in line}
    assert outcomes["expand_group_calls._expand: isinstance(result, fx.Proxy) -> False"] == "killed"
    # These tests run no pipeline.
    assert {line for key, line in outcomes.items() if key.startswith("runner.")} == {"survivor:"}
