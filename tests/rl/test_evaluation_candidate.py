"""From a run's checkpoint to the folder that a sampler loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kernels.catalogue import named_spec
from rl.errors import ConfigError, DataError
from rl.evaluation.candidate import LEARNER, Candidate, convert_checkpoint, open_candidate
from rl.evaluation.config import EngineConfig
from tests.rl.tiny_chat import make_model, make_run


@dataclass(frozen=True)
class Run:
    """Two checkpoints of the same weights' history, and the second as the learner itself writes it."""

    folder: Path
    base: Path
    trained: Path

    @property
    def cache(self) -> Path:
        return self.folder.parent / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("candidate")
    run = Run(place / "time", make_model(place / "base"), place / "trained")
    spec = [
        "spec.last_layers_bf16=1",
        "+spec.sampler.weight.outer_domain=expert",
        "spec.allow_difference=true",
    ]
    policy = make_run(run.folder, run.base, *spec)
    policy.save_hf(run.trained)
    return run


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    """A copy that a test may damage."""
    shutil.copytree(made.folder, tmp_path / "time")
    return Run(tmp_path / "time", made.base, made.trained)


def open_it(path: Path, run: Run) -> Candidate:
    return open_candidate(str(path), str(run.cache))


def assert_same_model(left: Path, right: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert (left / "config.json").read_text() == (right / "config.json").read_text()


def test_a_run_gives_its_newest_weights_as_the_learner_would_write_them(run: Run):
    candidate = open_it(run.folder, run)
    assert_same_model(candidate.model, run.trained)
    assert not load_file(candidate.model / "model.safetensors")["lm_head.weight"].equal(
        load_file(run.base / "model.safetensors")["lm_head.weight"]
    )
    assert AutoTokenizer.from_pretrained(candidate.model).chat_template
    assert (candidate.step, candidate.origin.name) == (2, "step_000002")


def test_an_earlier_checkpoint_can_be_named(run: Run):
    first = open_it(run.folder / "checkpoints" / "step_000001", run)
    newest = open_it(run.folder / "checkpoints" / "step_000002", run)
    assert (first.step, newest.step) == (1, 2)
    assert newest.fingerprint == open_it(run.folder, run).fingerprint != first.fingerprint
    assert first.model != newest.model


def test_the_conversion_is_made_once_and_found_by_content(run: Run, monkeypatch: pytest.MonkeyPatch):
    model = open_it(run.folder, run).model
    monkeypatch.setattr("rl.evaluation.candidate.convert_checkpoint", None)
    assert open_it(run.folder, run).model == model
    moved = run.folder.rename(run.folder.with_name("moved"))
    assert open_it(moved, run).model == model


def test_broken_checkpoints_are_not_evaluated(run: Run):
    """Symptom: an unfinished checkpoint is picked."""
    newest = run.folder / "checkpoints" / "step_000002"
    (newest / "COMPLETE").unlink()
    assert open_it(run.folder, run).step == 1
    with pytest.raises(DataError, match="step_000002"):
        open_it(newest, run)
    shutil.rmtree(run.folder / "checkpoints")
    with pytest.raises(DataError, match="no complete checkpoint"):
        open_it(run.folder, run)


def test_a_checkpoint_of_another_shape_is_refused(run: Run, tmp_path: Path):
    other = make_model(tmp_path / "other", num_experts=8)
    with pytest.raises(DataError, match="experts"):
        convert_checkpoint(run.folder / "checkpoints" / "step_000001" / LEARNER, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_is_refused(run: Run, tmp_path: Path):
    for path in (tmp_path / "nowhere", run.folder / "checkpoints"):
        with pytest.raises(DataError, match="neither a run folder"):
            open_it(path, run)


def test_trained_is_the_samplers_map_in_the_run_and_names_are_specs_for_all_layers(run: Run):
    candidate = open_it(run.folder, run)
    quantised = named_spec("minite", {"weight.outer_domain": "expert"})
    assert candidate.precision_map("trained").layers == (quantised, named_spec("bf16"))
    assert candidate.precision_map("bf16").layers == (named_spec("bf16"),) * 2


def test_a_plain_model_has_no_trained_spec(run: Run):
    candidate = open_it(run.base, run)
    assert (candidate.step, candidate.model) == (0, run.base)
    assert candidate.precision_map("minite").layers == (named_spec("minite"),) * 2
    with pytest.raises(ConfigError, match="specs=trained"):
        candidate.precision_map("trained")


def test_the_engine_is_the_runs_but_for_what_is_given_and_what_the_prompts_need(run: Run):
    candidate = open_it(run.folder, run)
    settings = candidate.engine(EngineConfig(threads=3), max_model_len=700)
    assert (settings.kv_cache_gib, settings.threads, settings.max_model_len) == (0.25, 3, 700)
    long = candidate.engine(EngineConfig(), max_model_len=50_000)
    assert long.max_num_batched_tokens == 50_000
    with pytest.raises(ConfigError, match=r"sampler: .*dtype"):
        candidate.engine(EngineConfig(dtype="int3"), max_model_len=700)


def test_the_fingerprint_of_a_plain_model_is_that_of_its_files(run: Run, tmp_path: Path):
    copy = Path(shutil.copytree(run.base, tmp_path / "copy"))
    assert open_it(copy, run).fingerprint == open_it(run.base, run).fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert open_it(copy, run).fingerprint != open_it(run.base, run).fingerprint
