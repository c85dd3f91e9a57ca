"""Options and fixtures of the consistency suite. Load it with `-p kernels.consistency.plugin`.

Options of a suite that is named by `--pyargs` must come from a plug-in: pytest reads conftest files of paths only.
"""

from __future__ import annotations

import sys

import pytest

from kernels.catalogue import named_spec
from kernels.conformance.backend import Adapter, named_adapter
from kernels.labels import spec_from_label
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import ExecutionSpec

SIDES = ("learner", "sampler")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("consistency", "agreement of a learner's and a sampler's quantiser")
    for side in SIDES:
        group.addoption(
            f"--{side}-quantizer",
            metavar="MODULE:NAME",
            help=f"the {side}'s activation quantiser: bfloat16 [R, K] -> kernels.quantize.QuantizedTensor,"
            " or a kernels.conformance.Adapter",
        )
    group.addoption("--spec", metavar="SPEC", help="execution spec to which both must conform as well")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that name nothing in one line, before any test. Raises pytest.UsageError."""
    here = str(config.invocation_params.dir)
    if here not in sys.path:  # the command `pytest`, unlike `python -m pytest`, leaves it out
        sys.path.insert(0, here)
    for side in SIDES:
        adapter(config, side)
    execution_spec(config)


def adapter(config: pytest.Config, side: str) -> Adapter:
    """Raises pytest.UsageError when the option is absent or names nothing."""
    path = config.getoption(f"--{side}-quantizer")
    if path is None:
        raise pytest.UsageError(f"kernels.consistency needs --{side}-quantizer MODULE:NAME")
    try:
        return named_adapter(path)
    except ValueError as error:
        raise pytest.UsageError(f"--{side}-quantizer: {error}") from error


def execution_spec(config: pytest.Config) -> ExecutionSpec | None:
    """The spec of `--spec`. Raises pytest.UsageError for an unknown one, and one without an activation quantiser."""
    name = config.getoption("--spec")
    if name is None:
        return None
    try:
        spec = spec_from_label(name)
    except ValueError as error:
        raise pytest.UsageError(f"--spec: {error}") from error
    if spec.activation is None:
        raise pytest.UsageError(f"--spec: {name} does not quantise activations")
    return spec


@pytest.fixture(scope="session")
def learner(pytestconfig: pytest.Config) -> Adapter:
    return adapter(pytestconfig, "learner")


@pytest.fixture(scope="session")
def sampler(pytestconfig: pytest.Config) -> Adapter:
    return adapter(pytestconfig, "sampler")


@pytest.fixture(scope="session", params=SIDES)
def side(request: pytest.FixtureRequest) -> Adapter:
    return adapter(request.config, request.param)


@pytest.fixture(scope="session")
def spec(pytestconfig: pytest.Config) -> ExecutionSpec:
    """Skips the test when no spec was named."""
    found = execution_spec(pytestconfig)
    if found is None:
        pytest.skip("no --spec")
    return found


@pytest.fixture(scope="session")
def quantizer(pytestconfig: pytest.Config) -> QuantizerSpec:
    """The format in which bytes are decoded: that of `--spec`, else NVFP4 with decode scales."""
    found = execution_spec(pytestconfig) or named_spec("minite")
    assert found.activation is not None
    return found.activation
