"""Setup errors are raised before a trainer trains, and `import compile_fsdp` imports no trainer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import compile_fsdp
from compile_fsdp.errors import (
    AlreadyCompiledError,
    FSDP1Error,
    NotShardedError,
    UnknownOptionError,
    UnsupportedFeatureError,
)
from compile_fsdp.integrations import accelerate, fabric, lightning, torchtitan, transformers
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.fake_world import fake_world
from helpers.ranks.fresh import run_fresh

MISSING = {"accelerate": "accelerate", "lightning": "pytorch_lightning", "transformers": "transformers"}
IMPORT = """
import importlib, json, sys
import compile_fsdp
imported = sorted({name.partition(".")[0] for name in sys.modules})
messages = {}
for extra, package in json.loads(sys.argv[1])[0].items():
    sys.modules[package] = None  # it cannot be imported
    try:
        importlib.import_module(f"compile_fsdp.integrations.{extra}")
    except ImportError as error:
        messages[extra] = [type(error).__name__, str(error)]
print(json.dumps([imported, messages]))
"""


def test_import_loads_no_trainer_and_missing_extra_is_named() -> None:
    (imported, messages), _ = run_fresh(IMPORT, MISSING)
    assert "compile_fsdp" in imported
    assert {"accelerate", "lightning_fabric", "pytorch_lightning", "torchtitan", "transformers"} & {*imported} == set()
    assert messages == {
        extra: [
            "MissingExtraError",
            f"expected {package} to be installed; install it with: pip install 'compile-fsdp[{extra}]'",
        ]
        for extra, package in MISSING.items()
    }


def test_error_about_sharding_names_trainer_setting() -> None:
    with fake_world(2):
        linear, mesh = nn.Linear(2, 2), init_device_mesh("cpu", (2,))
        fsdp1 = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(NotShardedError, match="configure_model calls fully_shard"):
            lightning.CompileFSDP().compile(linear)
        with pytest.raises(NotShardedError, match=r"the function given to compiled\(\) calls fully_shard"):
            fabric.compiled(lambda model, mesh: model)(linear, mesh)
        for model, error in ((linear, NotShardedError), (fsdp1, FSDP1Error)):
            with pytest.raises(error, match=r"TrainingArguments\(fsdp=True\)"):
                transformers.CompileFSDP().compile(model)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def test_already_compiled_model_is_refused() -> None:
    with fake_world(2), pytest.raises(AlreadyCompiledError) as error:
        fabric.compiled(_shard)(nn.Sequential(torch.compile(nn.Linear(2, 2))), init_device_mesh("cpu", (2,)))
    assert "torch.compile's wrapper at ['0']" in str(error.value)


@pytest.mark.parametrize("by_region", [False, True])
def test_accelerator_that_compiles_is_refused(by_region: bool) -> None:
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=by_region)
    with pytest.raises(AlreadyCompiledError, match="ACCELERATE_DYNAMO_BACKEND"):
        accelerate.prepare(SimpleNamespace(state=SimpleNamespace(dynamo_plugin=plugin)), nn.Linear(2, 2))  # type: ignore[arg-type]


def test_unknown_option_raises_in_constructor() -> None:
    with pytest.raises(UnknownOptionError, match="no_such_option"):
        transformers.CompileFSDP(options={"no_such_option": True})


def test_each_outermost_module_is_compiled_once_and_resharded() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        inner, outer = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
        fully_shard(outer[0], mesh=mesh)
        model = nn.ModuleList([_shard(inner, mesh), _shard(outer, mesh)])
        compiles = lightning.CompileFSDP(options=AOT_EAGER)
        compile_fsdp.reset_reports()
        for _ in range(2):
            compiles.compile(model)
            inner(torch.ones(2, 2))
            outer(torch.ones(2, 2))
            compiles.reshard(model)  # otherwise the next round starts unsharded and compiles new graphs
        assert [report.direction for report in compile_fsdp.reports()] == ["forward", "forward"]


@dataclasses.dataclass
class _Spec:
    parallelize_fn: Any


def _parallelize(enable: bool, components: list[str], disable_cuda_graphs: bool) -> list[str]:
    """Call `parallelize_fn` as torchtitan's Trainer does; return the received keywords."""
    calls = []

    def parallelize_fn(model: nn.Module, *, parallel_dims: DeviceMesh, **settings: Any) -> nn.Module:
        calls.extend(sorted(settings))
        return _shard(model, parallel_dims)

    config = torchtitan.compiled(SimpleNamespace(model_spec=_Spec(parallelize_fn)), options=AOT_EAGER)
    with fake_world(2):
        config.model_spec.parallelize_fn(
            nn.Linear(2, 2),
            parallel_dims=init_device_mesh("cpu", (2,)),
            training=SimpleNamespace(disable_cuda_graphs=disable_cuda_graphs),
            compile_config=SimpleNamespace(enable=enable, components=components),
        )
    return calls


def test_torchtitan_settings_reach_parallelize_fn() -> None:
    assert _parallelize(True, ["loss"], True) == ["compile_config", "training"]
    assert _parallelize(False, ["model"], True) == ["compile_config", "training"]


def test_unsupported_torchtitan_settings_raise() -> None:
    with pytest.raises(AlreadyCompiledError, match=r"compile\.components without 'model'"):
        _parallelize(True, ["model", "loss"], True)
    with pytest.raises(UnsupportedFeatureError, match="disable_cuda_graphs=True"):
        _parallelize(False, [], False)
