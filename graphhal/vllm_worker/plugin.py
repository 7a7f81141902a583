"""The entry point that vLLM calls in every process, and the one place that is replaced.

`register` runs before any configuration exists. It touches nothing of vLLM: it watches, in
`sys.meta_path`, for the modules below to be imported. When the encoder-graph module is imported,
the configuration is looked for in the frames of the importer:

* V1 runners import it only where `cudagraph_mm_encoder` is on.
* V2 runners always import it. Where the configuration in sight says off, nothing is replaced.

What is replaced is `EncoderCudaGraphManager.__new__`: whoever constructs a manager, under whatever
name it was imported, gets graphhal's executor, or vLLM's own manager where graphhal declines, as it
does where a package that was not read derived the manager.
"""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

from graphhal.vllm_worker.switch import config_in_sight, wants_encoder_graphs
from graphhal.vllm_worker.touched import ENCODER_CUDAGRAPH
from graphhal.vllm_worker.vllms_log import join_vllms_log

log = logging.getLogger(__name__)

OPT_IN_MODULES = (
    "vllm.model_executor.models.qwen3_omni_moe_thinker",
    "vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_moe_thinker",
    "vllm_omni.model_executor.models.qwen3_omni.qwen3_omni",
    "vllm_omni.model_executor.models.covo_audio.covo_audio",
    "vllm_omni.model_executor.models.covo_audio.covo_audio_llm",
)
"""Modules of models that have no encoder-graph protocol and gain it on opt-in: all of
`towers.OPT_IN`, which is not imported before one of them is."""
ASCEND_WORKER = "vllm_ascend.worker.worker"
"""Module of vllm-ascend's worker, which sizes the KV cache."""
WATCHED = (ENCODER_CUDAGRAPH, *OPT_IN_MODULES, ASCEND_WORKER)


def register() -> None:
    """Watch for vLLM's encoder graphs. Idempotent; imports nothing of vLLM, logs nothing."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    for name in WATCHED:
        module = sys.modules.get(name)
        if module is not None and not _is_being_imported(module):
            _imported(module)


def install(vllm_config: Any = None) -> None:
    """Serve encoder graphs of every engine that this process starts from now on.

    Only needed where ONE process starts several engines whose options differ, since modules are
    imported once: the first on the V2 runner without encoder graphs, or without a model in
    `vllm_models` that a later one names. `register` finds everything else by itself.

    Args:
        vllm_config: whose `vllm_models` to admit; by default none.
    """
    register()
    module = import_module(ENCODER_CUDAGRAPH)
    if not wants_encoder_graphs(vllm_config):  # else `register` has done so, or will
        _replace_constructor(module)
    if vllm_config is not None:
        _admit(vllm_config)


class _Watch(MetaPathFinder):
    """Calls back after one of the watched modules was imported; finds nothing itself."""

    def __init__(self) -> None:
        self._looking = threading.local()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in WATCHED or getattr(self._looking, "now", False):
            return None
        self._looking.now = True  # of this thread alone: others import their own
        try:
            spec = find_spec(fullname)
        finally:
            self._looking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterImport(spec.loader)
        return spec


class _AfterImport(Loader):
    """A module's own loader, with a call after it has run."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module and its spec must look as if nobody had watched.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _imported(module)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _imported(module: ModuleType) -> None:
    vllm_config = config_in_sight()
    if vllm_config is not None and not wants_encoder_graphs(vllm_config):
        log.debug("%s: encoder graphs are off, nothing is replaced", module.__name__)
        return
    if module.__name__ == ENCODER_CUDAGRAPH:
        _replace_constructor(module, logging.DEBUG if vllm_config is None else logging.WARNING)
    if vllm_config is not None:
        _admit(vllm_config)
    if vllm_config is not None and module.__name__ == ASCEND_WORKER:
        from graphhal.vllm_worker import ascend

        ascend.prepare_worker(vllm_config)


def _admit(vllm_config: Any) -> None:
    join_vllms_log()
    from graphhal.vllm_worker import towers

    towers.admit(vllm_config)


def _replace_constructor(module: ModuleType, level: int = logging.WARNING) -> None:
    """Args: the module; the level at which to say that it has no manager."""
    manager = getattr(module, "EncoderCudaGraphManager", None)
    if manager is None:
        join_vllms_log()
        log.log(level, "graphhal: vLLM is as it was: no EncoderCudaGraphManager in %s", module)
        return
    if getattr(manager.__dict__.get("__new__"), "__func__", None) is _construct:
        return
    manager.__new__ = staticmethod(_construct)
    log.debug("%s.%s constructs graphhal's executor", manager.__module__, manager.__qualname__)


def _construct(cls: type, *args: Any, **kwargs: Any) -> Any:
    """What `EncoderCudaGraphManager(...)` gives: graphhal's executor, or their own manager."""
    from graphhal.vllm_worker import ascend, executor

    build: Callable[..., Any] = executor.build
    if cls.__module__.partition(".")[0] == ascend.PACKAGE:
        build = ascend.build
    elif cls.__module__ != ENCODER_CUDAGRAPH:
        build = partial(executor.leave, cls)
    try:
        arguments = signature(build).bind(*args, **kwargs).arguments
    except TypeError:  # no release that was read constructs it like this; `build` says so
        known = dict.fromkeys(("device", "dtype", "model")) | {"vllm_config": config_in_sight()}
        arguments = {name: kwargs.get(name, value) for name, value in known.items()}
    made = build(**arguments)
    return object.__new__(cls) if made is None else made
