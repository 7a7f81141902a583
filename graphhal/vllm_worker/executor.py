"""What a vLLM runner calls in place of its encoder-graph manager."""

import atexit
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from graphhal.discovery import open_platform
from graphhal.errors import InputError, NoPlatformError, SettingsError
from graphhal.peers import Peers
from graphhal.platform import Platform
from graphhal.runner import EncoderGraphs
from graphhal.settings import Settings
from graphhal.vllm_worker import compatibility, memory, ranks, touched, towers
from graphhal.vllm_worker.limits import merged, with_free_slots
from graphhal.vllm_worker.metrics import Reporter
from graphhal.vllm_worker.protocol import has_protocol
from graphhal.vllm_worker.refusals import (
    AUDIO_KEYS,
    KNOWN_MODALITIES,
    SIGHT_KEYS,
    UNKNOWN,
    engine_refusal,
    request_refusal,
)
from graphhal.vllm_worker.served_encoder import ServedEncoder
from graphhal.vllm_worker.serving import serving_of, vllm_context
from graphhal.vllm_worker.summed_stats import summed
from graphhal.vllm_worker.switch import wants_encoder_graphs
from graphhal.vllm_worker.unsized_groups import count_items, modality_of
from graphhal.vllm_worker.vllms_log import join_vllms_log, warn_once

log = logging.getLogger(__name__)

_alive: "weakref.WeakSet[EncoderGraphExecutor]" = weakref.WeakSet()
_given_up: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()
"""Models whose capture failed in code of graphhal's or a platform's own, and why."""


def build(
    vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
) -> "EncoderGraphExecutor | None":
    """An executor for a model, or None where vLLM's own manager shall serve it.

    Arguments are those of vLLM's `EncoderCudaGraphManager`; where it was constructed with others,
    what is missing is None.

    Raises:
        SettingsError: options are invalid, or vLLM's and graphhal's contradict each other.
    """
    if not wants_encoder_graphs(vllm_config):
        return None
    join_vllms_log()
    problem = compatibility.problem((*touched.MANAGER, *touched.PROTOCOL))
    if problem is None:
        made = _made(vllm_config, device, dtype, model)
        if isinstance(made, EncoderGraphExecutor):
            return made
        problem = made
    return declined(vllm_config, device, dtype, model, problem)


def leave(
    manager: type, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
) -> "EncoderGraphExecutor | None":
    """As `build`, where a package derived the manager: its runner may call more than was read."""
    if not wants_encoder_graphs(vllm_config):
        return None
    name = f"{manager.__module__}.{manager.__qualname__}"
    reason = f"{name} is derived from vLLM's manager, and was not read"
    return declined(vllm_config, device, dtype, model, reason, "its")


def declined(
    vllm_config: Any,
    device: torch.device,
    dtype: torch.dtype,
    model: Any,
    reason: str,
    whose: str = "vLLM's",
) -> "EncoderGraphExecutor | None":
    """What stands for an executor where graphhal does not serve; said once for a reason.

    Returns:
        None where the model has the protocol, for a manager that is not graphhal's; else an
        executor that replays nothing, since no other could serve the model.
    """
    join_vllms_log()
    has_other = has_protocol(model)
    served = f"{whose} own encoder graphs serve it" if has_other else "it runs eagerly"
    warn_once(log, f"graphhal: {type(model).__name__} is not served, {served}", reason)
    if has_other:
        return None
    return EncoderGraphExecutor(vllm_config, device, dtype, model, None, Settings(), reason)


def _made(
    vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
) -> "EncoderGraphExecutor | str":
    """An executor that serves what those of the other ranks do; or what keeps a rank from it."""
    peers = Peers()
    made: EncoderGraphExecutor | None = None
    problem: str | None = None
    wrong: SettingsError | None = None
    try:
        peers = ranks.tensor_parallel()
        settings = merged(towers.settings_of(vllm_config), vllm_config.compilation_config)
        platform = open_platform(settings.platform, settings)
        settings = with_free_slots(settings, model, platform.info.allow_empty)
        made = EncoderGraphExecutor(vllm_config, device, dtype, model, platform, settings)
    except SettingsError as error:
        problem, wrong = str(error), error
    except NoPlatformError as error:
        problem = str(error)
    except Exception as error:  # a name of vLLM that is looked up late, or a platform's code
        log.debug("%s cannot be served", type(model).__name__, exc_info=True)
        problem = f"{type(error).__name__}: {error}"
    problem = ranks.in_one_voice(peers, "options and platform", problem)
    if wrong is not None:
        raise wrong
    if made is None or problem is not None:
        return str(problem)
    made.serve_alike(peers)
    return made


def report() -> list[dict[str, Any]]:
    """Counters of every executor in this process; for `LLM.collective_rpc` and for tests."""
    return [executor.stats() for executor in _alive]


class EncoderGraphExecutor:
    """Has the methods that vLLM's runners call on a manager, over graphhal's engine.

    `execute` returns None wherever the group must run eagerly: the runner then calls the model's
    `embed_multimodal`, exactly as without encoder graphs. Constructing takes no device memory.

    Args:
        vllm_config: the engine's configuration.
        device: of the graphs.
        dtype: of the model.
        model: unwrapped.
        platform: None where nothing shall be served.
        settings: merged with vLLM's options.
        refusal: why nothing shall be served; its groups are counted under it.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        dtype: torch.dtype,
        model: Any,
        platform: Platform | None,
        settings: Settings,
        refusal: str = "no platform",
    ) -> None:
        self.settings = settings
        self.name = type(model).__name__
        self._vllm_config = vllm_config
        self._model = model
        self._process = os.getpid()
        self._captured = False
        self._held: torch.Tensor | None = None
        self._taken = memory.Taken(0, None)
        self._misses: dict[tuple[str, str], int] = {}
        self._limit: int | None = None
        self._served: list[ServedEncoder] = []
        self._refused: dict[str, str] = {}
        self._said: set[str] = set()
        self.refusal: str | None = refusal
        if platform is not None:
            self.refusal = engine_refusal(vllm_config, model, ranks.is_first_stage())
            if self.refusal is None:
                self._serve(model, platform, device, dtype)
            else:
                level = logging.WARNING if self.refusal.endswith(UNKNOWN) else logging.INFO
                log.log(level, "graphhal: %s has no encoder graphs: %s", self.name, self.refusal)
        file = settings.stats_file
        self._reporter = Reporter(
            self.name,
            settings.log_seconds,
            None if file is None else Path(file.replace("{pid}", str(os.getpid()))),
            self.stats,
        )
        self.token_budgets = self._budgets()
        _alive.add(self)
        atexit.register(_say_goodbye, weakref.ref(self))
        # Processes that were forked, as vLLM's workers are by default, run no `atexit` functions.
        Finalize(None, _say_goodbye, (weakref.ref(self),), exitpriority=0)

    def __del__(self) -> None:
        """A runner that ends drops it, with or without `clear`, before the process ends."""
        if hasattr(self, "_reporter"):  # else it was not constructed
            self.end()

    def end(self) -> None:
        """Clear what was captured, except in a fork, which has neither the graphs nor the threads,
        and perhaps a lock that one held."""
        if self._captured and self._process == os.getpid():
            self.clear()

    def _serve(
        self, model: Any, platform: Platform, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.refusal = _given_up.get(model)
        if self.refusal is None:
            found = serving_of(model, self._vllm_config, self.settings, platform, device, dtype)
            self._served, self._refused = found.encoders, found.refused
            self.refusal, self._limit = found.refusal, found.limit

    def serve_alike(self, peers: Peers) -> None:
        """Serve nothing, with one loud line, where other ranks serve otherwise."""
        names = ", ".join(served.encoder.name for served in self._served)
        own = self.refusal or f"serves {names or 'nothing'}"
        said = ranks.in_one_voice(peers, f"encoders of {self.name}", own)
        if said != own:
            self._serve_nothing(f"ranks differ: {said}")

    def _serve_nothing(self, reason: str, traceback: bool = False) -> None:
        """Groups of every encoder are counted under the reason."""
        self.refusal = reason
        log.warning("graphhal: %s runs eagerly: %s", self.name, reason, exc_info=traceback)
        self._served.clear()
        self.token_budgets = []

    def supports_modality(self, modality: str) -> bool:
        """Whether a group of this modality may be given to `execute`; where nothing may be
        replayed all of them, so that the misses are counted."""
        if self.refusal is not None:
            return modality in KNOWN_MODALITIES
        return modality in self._refused or any(
            modality in served.encoder.modalities for served in self._served
        )

    def is_captured(self) -> bool:
        """Whether `execute` is to be asked: `capture` was called."""
        return self._captured

    def get_num_graphs_to_capture(self) -> int:
        """Graphs that `capture` will try to get."""
        return sum(len(graphs.ladder()) for graphs in self._graphs())

    def capture(self, graph_pool: Any = None) -> None:
        """Capture every graph, or what tells how much they take, where vLLM profiles memory.

        Args:
            graph_pool: vLLM's; not used, since graphs of one encoder share a pool of their own.
        """
        if not self._served:
            self._captured = self.refusal is not None
            return
        profiling = memory.is_profiling()
        try:
            with vllm_context(self._vllm_config), memory.collecting():
                encoders = list(self._graphs())
                if profiling:
                    self._held = memory.sample(self._model, encoders, self._limit)
                else:
                    self._taken = memory.capture_all(self._model, encoders, self._limit)
        except SettingsError:
            raise
        except Exception as error:
            if not all(served.is_alone for served in self._served):
                raise  # the other ranks wait for what this one decides
            self._give_up(f"graphhal's own code failed in capture: {error!r:.200}")
        self._captured = True
        if not profiling:
            self._reporter.captured(self.stats())

    def _give_up(self, reason: str) -> None:
        """The engine starts all the same, and serves this model eagerly: for good, since graphs
        that no profile counted would take the KV cache's memory."""
        _given_up[self._model] = reason
        self._held = None
        for graphs in self._graphs():
            with suppress(Exception):
                graphs.clear()
        self._serve_nothing(reason, traceback=True)

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Encode one group of one modality by replay; None where it must run eagerly.

        Raises:
            InputError: an item is wrong, and the model's own code would not say so.
        """
        self._reporter.touch()
        refusal = self.refusal or request_refusal(mm_kwargs)
        served = None if refusal is not None else self._find(mm_kwargs)
        if served is None:
            self._count(mm_kwargs, refusal)
            return None
        try:
            return served.encode(mm_kwargs)
        except InputError as error:
            if served.encoder.raises:
                raise
            log.debug("%s: %s", served.encoder.name, error)
            self._count(mm_kwargs, "inputs that the adapter does not know")
            return None
        except Exception as error:
            if not served.is_alone:
                raise  # the other ranks encode: an eager call here would leave them waiting
            # The runner's own call is other code, and an exception would end the whole engine.
            what = f"{served.encoder.name} fails with {type(error).__name__}"
            log.log(
                logging.DEBUG if what in self._said else logging.ERROR,
                "graphhal: %s, such groups run eagerly: %s", what, error, exc_info=True,
            )  # fmt: skip
            self._said.add(what)
            self._count(mm_kwargs, "graphhal's own code failed")
            return None

    def _find(self, mm_kwargs: Mapping[str, Any]) -> ServedEncoder | None:
        """The encoder of all of a group: whatever else it holds would be left out."""
        sound = sight = False
        for key, value in mm_kwargs.items():
            if value is not None:
                sound, sight = sound or key in AUDIO_KEYS, sight or key in SIGHT_KEYS
        for served in self._served:
            modalities = served.encoder.modalities
            if (not sound or "audio" in modalities) and (not sight or modalities != ("audio",)):
                return served
        return None

    def _count(self, mm_kwargs: Mapping[str, Any], reason: str | None) -> None:
        asked_for = {m for served in self._served for m in served.encoder.modalities}
        asked_for |= self._refused.keys()
        modality = asked_for.pop() if len(asked_for) == 1 else modality_of(mm_kwargs)
        key = (modality, reason or self._refused.get(modality) or "no encoder takes these inputs")
        self._misses[key] = self._misses.get(key, 0) + count_items(mm_kwargs)

    def clear(self) -> None:
        """Release every graph. Safe twice; a summary is logged where anything was served."""
        self._held = None
        self._reporter.stop()
        if self._captured:
            self._reporter.served(self.stats(), final=True)
        encoders = list(self._graphs())
        with memory.giving_back(self._model, encoders):
            for graphs in encoders:
                graphs.clear()
        self._reporter.released()
        self._captured = False

    def check_weights(self) -> bool:
        """Whether graphs still read the weights in use; graphs that do not are released.

        In-place updates need no call. After a reload that rebinds tensors, requests notice by
        themselves; this only makes it happen earlier.
        """
        checked = [graphs.check_weights() for graphs in self._graphs()]
        return all(checked)

    def get_cumulative_stats(self) -> dict[str, Any]:
        """What vLLM's manager reports, and graphhal's counters beside it."""
        stats = self.stats()
        total = stats["graph_hits"] + stats["graph_misses"]
        return {
            **stats,
            "hit_rate": stats["graph_hits"] / total if total else 0.0,
            "num_budgets": stats["graph_count"],
            "token_budgets": self.token_budgets,
        }

    def stats(self) -> dict[str, Any]:
        """Counters, graphs and memory of all encoders as plain data."""
        return {
            "model": self.name,
            "encoders": [served.encoder.name for served in self._served],
            "modalities": sorted({m for s in self._served for m in s.encoder.modalities}),
            "refusal": self.refusal,
            "refused": dict(self._refused),
            **summed(self._graphs(), self._misses),
            "expected_bytes": self._taken.expected,
            "counted_bytes": self._taken.counted,
            "allocator_bytes": self._taken.allocator,
            "limit_bytes": self._limit,
        }

    def _graphs(self) -> Iterator[EncoderGraphs]:
        for served in self._served:
            yield from served.graphs.values()

    def _budgets(self) -> list[int]:
        return sorted(
            {capacity.tokens for graphs in self._graphs() for capacity in graphs.ladder()}
        )


def _say_goodbye(reference: "weakref.ref[EncoderGraphExecutor]") -> None:
    executor = reference()
    if executor is not None:
        executor.end()
