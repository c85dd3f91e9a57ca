"""The sampler: a vLLM engine in this process whose experts run under execution specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.guard import NonFiniteGuard, check_guards
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport, names
from sampler.config import SamplerConfig, SamplingConfig
from sampler.graphs import eagerly
from sampler.launch import start_vllm
from sampler.model_check import check_model
from sampler.ranks import Ranks

if TYPE_CHECKING:
    from vllm import RequestOutput

    from sampler.quantization import ExpertMethod
    from sampler.stock import StockWeights
    from sampler.taps import LayerTap
    from sampler.weights import LiveWeights


@dataclass(frozen=True)
class Completion:
    """One response.

    logp: of each token, FP32 natural logarithm, under the distribution it was drawn from (temperature and
    top-p included; at temperature 0, under that of temperature 1).
    finish_reason: "stop" (the last token is a stop token) or "length".
    versions: of the weights that wrote each token; those of one call of `Sampler.generate` are of one version.
    routes: int16 [prompt + response tokens, layers, k], the experts of each token by descending coefficient, if they
        were asked for. -1 for the last token, which the engine never computed, and in layers without experts.
    """

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...]
    routes: np.ndarray | None = field(default=None, compare=False)


class Sampler:
    """Writes and scores responses, one weight version at a time.

    model_dir: a Hugging Face folder of one of `model_check.ARCHITECTURES` with safetensors; weights version 0.
    precision_map: the spec of each of its layers; of a stock engine, `sampler.stock.own_map`. None: a dense model,
    which generates and scores, for a diagnosis.

    Meant to have a process of its own: vLLM seeds the global generators, patches parts of torch, and the end
    of one engine takes the process groups from any other.

    With `tensor_parallel` above 1 this is one of the processes of an engine: all make the same calls and get the same
    results.

    weights: what a weight sync replaces, here.

    Raises ValueError when the folder, the map and the configuration do not fit each other, or the checkpoint
    is incomplete.
    """

    precision_map: PrecisionMap  # a dense model has none

    def __init__(
        self, model_dir: str | Path, precision_map: PrecisionMap | None, config: SamplerConfig
    ) -> None:
        check_model(Path(model_dir), precision_map, config)
        self.config = config
        if precision_map is not None:
            self.precision_map = precision_map
        self._strict = precision_map is not None and precision_map.model is not None
        self._frees = config.device == "cuda"  # vLLM's CPU build has no sleep
        self._sleeping = False
        self._llm = start_vllm(Path(model_dir), precision_map, config)
        self._ranks = Ranks.of_engine(config.tensor_parallel)
        [self._model] = self._llm.apply_model(lambda model: model)
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._experts: dict[int, ExpertMethod] = {}
        if config.stock:
            self._hold_stock(Path(model_dir))
        else:
            self._hold_live(precision_map)

    def _hold_live(self, precision_map: PrecisionMap | None) -> None:
        from sampler.quantization import expert_methods
        from sampler.routes import RouteRecorder
        from sampler.strict.sampling import StrictSampler
        from sampler.weights import LiveWeights

        self._experts = expert_methods(self._model)
        self.weights: LiveWeights | StockWeights = LiveWeights(self._model, precision_map)
        [self._runner] = self._llm.collective_rpc(lambda worker: worker.model_runner)
        if precision_map is None:
            return
        if self._strict:
            self._runner.sampler = StrictSampler(self._runner, self._model.logits_processor.output)
        self._recorder = RouteRecorder(self._runner, self._experts, len(precision_map.layers))

    def _hold_stock(self, model_dir: Path) -> None:
        from sampler.stock import StockExperts, StockWeights

        [worker] = self._llm.collective_rpc(lambda worker: worker)
        dtype = getattr(torch, self.config.dtype)
        self.weights = StockWeights(worker, model_dir, self.precision_map, dtype)
        self._stock_experts = StockExperts(self._model)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """For each prompt (token ids), one response for each of its seeds. limits: most tokens of the responses to each
        prompt, where that is not `sampling.max_tokens`.

        The result is a function of the weights and the arguments: neither former calls nor the process
        matter. A response also depends, in its last bits, on what shares the call.

        Raises RuntimeError while the weights are closed (a sync is open), ValueError (before anything is generated) for
        prompts that are empty, too long for as many tokens more, or hold unknown tokens, for limits below 1, and for
        seeds outside [0, 2**63); ValueError when a value that is not finite reached a quantiser, naming layer and
        expert, and FloatingPointError when a log-probability is not finite.
        """
        from vllm import SamplingParams

        if sampling.return_routes and self.config.stock:
            raise ValueError("return_routes: a stock engine does not say which experts it chose")
        limits = [sampling.max_tokens] * len(prompts) if limits is None else limits
        if not len(seeds) == len(limits) == len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts need as many lists of seeds, got {len(seeds)}, and limits, got {len(limits)}"
            )
        if min(limits, default=1) < 1:
            raise ValueError(f"limits must be at least 1, got {min(limits)}")
        self._check_sequences(prompts, "prompts", limits)
        if not all(0 <= seed < 2**63 for own in seeds for seed in own):
            raise ValueError("seeds must lie in [0, 2**63)")
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=limit,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                **self._seeded(seed),
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for own, limit in zip(seeds, limits, strict=True)
            for seed in own
        ]
        repeated = [prompt for prompt, own in zip(prompts, seeds, strict=True) for _ in own]
        recording = self._recorder.recording(self._model) if sampling.return_routes else nullcontext()
        with recording, self._eagerly() if sampling.return_routes else nullcontext():
            outputs = self._run(repeated, params)
        routes = self._routes(outputs) if sampling.return_routes else {}
        responses = iter([self._completion(output, routes.get(output.request_id)) for output in outputs])
        return [[next(responses) for _ in own] for own in seeds]

    def score(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], temperature: float = 1.0
    ) -> list[list[float]]:
        """FP32 log-probabilities of the tokens behind each prompt, by teacher forcing.

        Under the distribution at `temperature`, without top-p.
        Raises as `generate` does, and for a prompt length that leaves no prompt or no response.
        """
        from vllm import SamplingParams

        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be positive and finite")
        self._check_sequences(sequences, "sequences", [0] * len(sequences))
        for index, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            if not 1 <= length < len(sequence):
                raise ValueError(f"prompt_lengths[{index}]={length} must lie in [1, {len(sequence) - 1}]")
        # The last token is scored as the next one: the engine takes no prompt that fills the model's length.
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=1,
                prompt_logprobs=0,
                logprob_token_ids=[sequence[-1]],
                flat_logprobs=True,
                detokenize=False,
            )
            for sequence in sequences
        ]
        # Log-probabilities of prompts ignore the request's temperature, so it is applied to the logits.
        with self._logits_at(temperature):
            outputs = self._run([sequence[:-1] for sequence in sequences], params)
        return [
            self._response_logp(output, sequence, length)
            for output, sequence, length in zip(outputs, sequences, prompt_lengths, strict=True)
        ]

    def sleep(self, keep: bool) -> None:
        """Free the cache and the weights; with `keep` the latter wait in the host's memory, else they are lost.

        On a CPU nothing is freed. In which order this and the next two may be called: `rl.sync.rest`.
        """
        self._sleeping = True
        if not self.config.cuda_graph_sizes:  # which have its addresses
            for method in self._experts.values():
                method.forget_derived()
        self._forget_strict_forms()
        if self._frees:
            self._llm.sleep(level=1 if keep else 2)
            torch.cuda.empty_cache()

    def _forget_strict_forms(self) -> None:
        from sampler.strict.model import strict_weights

        for weight in strict_weights(self._model):
            weight.changed()

    def wake_weights(self) -> None:
        """Their memory is there again, at the same addresses; what it holds, after `sleep(keep=False)`, is not said."""
        if self._frees:
            self._llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """From now on it generates again, as far as the weights allow it."""
        if self._frees:
            self._llm.wake_up(tags=["kv_cache"])
        self._sleeping = False

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def experts(self) -> Mapping[int, ExpertMethod]:
        """Layer number -> what computes its experts."""
        return self._experts

    def compute_under(
        self, precision_map: PrecisionMap, masters: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """From here on the experts, and under a strict map the rest of the model, compute under another map. masters:
        layer -> its master weights, w13 and w2.

        For a diagnosis, which compares many specs: `weights` no longer names what the experts compute with. Raises
        ValueError for an engine with CUDA graphs, which go on computing what they were captured with, and for a strict
        map after one that is not, or the other way round.
        """
        from sampler.strict.model import strict_parts

        if self.config.cuda_graph_sizes:
            raise ValueError(
                "SamplerConfig.cuda_graph_sizes must be empty: another spec needs steps that are launched"
            )
        if self._ranks.count > 1:
            raise ValueError("SamplerConfig.tensor_parallel must be 1: masters are those of all experts")
        if (precision_map.model is None) == self._strict:
            raise ValueError("an engine stays strict, or not strict, as it was started")
        for part in strict_parts(self._model):
            part.under(precision_map.model)
        for layer, method in self._experts.items():
            spec = precision_map.spec_for(layer)
            if method.spec != spec and not method.hold_as_they_are(spec):
                method.hold(*masters(layer), spec)
        self.precision_map = precision_map

    @contextmanager
    def tapped(self, taps: Mapping[int, LayerTap]) -> Iterator[None]:
        """Inside, `taps` (by layer) see the experts at work, with the numbers of the sequences in the next call."""
        from sampler.taps import tapped

        first = self._llm.request_counter.counter
        with self._eagerly(), tapped(self._model, self._runner, self._experts, taps, first):
            yield

    def router_weight(self, layer: int) -> torch.Tensor:
        """[E, H]"""
        names = [
            name
            for name in self.weights.tensors()
            if name.startswith(f"model.layers.{layer}.") and name.endswith(".gate.weight")
        ]
        [name] = names
        return self.weights.tensors()[name]

    def report(self) -> EngineReport:
        if self.config.stock:
            from vllm import __version__

            own, backend = self._stock_experts, f"vllm {__version__}"
            return EngineReport("vllm", self.precision_map, backend, own.layers, own.calls)
        return EngineReport(
            engine="vllm",
            precision_map=PrecisionMap(tuple(self._experts[layer].spec for layer in sorted(self._experts))),
            backend=names(method.backend for method in self._experts.values()),
            expert_layers=len(self._experts),
            expert_calls=sum(method.calls for method in self._experts.values()),
        )

    def _run(self, prompts: Sequence[Sequence[int]], params: list[Any]) -> list[RequestOutput]:
        if self.weights.closed is not None:
            raise RuntimeError(f"nothing is generated: {self.weights.closed}")
        if self._sleeping:
            raise RuntimeError("nothing is generated: the cache is asleep")
        # Cached keys and values belong to former weights, or make a call depend on the calls before it.
        self._llm.reset_prefix_cache()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        guards = [method.guard for method in self._experts.values()]
        for guard in guards:
            guard.clear()  # of what the engine ran for itself
        try:
            outputs = self._llm.generate(requests, params, use_tqdm=False)
        except Exception:
            check_guards(guards)  # which may say why
            raise
        self._ranks.agree(_found_by(guards), map(_written, outputs))
        return outputs

    def _seeded(self, seed: int) -> dict[str, Any]:
        """How a request is told its seed: under a strict spec for `sampler.strict.sampling`, not for vLLM."""
        if not self._strict:
            return {"seed": seed}
        from sampler.strict.sampling import SEED

        return {"extra_args": {SEED: seed}}

    @contextmanager
    def _logits_at(self, temperature: float) -> Iterator[None]:
        processor = self._model.logits_processor
        if not self._strict:
            name, value = "scale", 1 / temperature
        else:
            name, value = "temperature", temperature
        setattr(processor, name, value)
        try:
            yield
        finally:
            setattr(processor, name, 1.0)

    def _eagerly(self) -> AbstractContextManager[None]:
        return eagerly(self._runner) if self.config.cuda_graph_sizes else nullcontext()

    def _check_sequences(self, sequences: Sequence[Sequence[int]], name: str, rooms: Sequence[int]) -> None:
        for index, (sequence, room) in enumerate(zip(sequences, rooms, strict=True)):
            limit = self.config.max_model_len - room
            if not 1 <= len(sequence) <= limit:
                raise ValueError(
                    f"{name}[{index}] has {len(sequence)} tokens, must have 1 to {limit}"
                    f" (max_model_len={self.config.max_model_len}, max_tokens={room})"
                )
            if not 0 <= min(sequence) <= max(sequence) < self._vocab_size:
                raise ValueError(f"{name}[{index}] holds token ids outside [0, {self._vocab_size})")

    def _routes(self, outputs: Sequence[RequestOutput]) -> dict[str, np.ndarray]:
        lengths = {o.request_id: len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs}
        return self._recorder.take(lengths)

    def _completion(self, output: RequestOutput, routes: np.ndarray | None) -> Completion:
        [response] = output.outputs
        token_ids, logp = tuple(response.token_ids), tuple(response.logprobs.logprobs)
        if response.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {response.finish_reason!r}")
        assert tuple(response.logprobs.token_ids) == token_ids
        _check_finite(logp)
        versions = (self.version,) * len(token_ids)
        return Completion(token_ids, logp, response.finish_reason, versions, routes)

    def _response_logp(self, output: RequestOutput, sequence: Sequence[int], length: int) -> list[float]:
        prompt, following = output.prompt_logprobs, output.outputs[0].logprobs
        assert prompt.token_ids == list(sequence[1:-1])
        logp = [*prompt.logprobs[length - 1 :], following[0][sequence[-1]].logprob]
        _check_finite(logp)
        return logp


def _found_by(guards: Sequence[NonFiniteGuard]) -> ValueError | None:
    try:
        check_guards(guards)
    except ValueError as error:
        return error
    return None


def _written(output: RequestOutput) -> tuple[Any, ...]:
    """Tokens and log-probabilities of a request."""
    [response] = output.outputs
    prompt = output.prompt_logprobs
    return tuple(response.token_ids), response.logprobs.logprobs, prompt.logprobs if prompt else None


def _check_finite(logp: Sequence[float]) -> None:
    if not all(map(math.isfinite, logp)):
        raise FloatingPointError(f"log-probabilities are not all finite: {list(logp)}")
