"""vLLM's vision blocks are called part by part, where that changes no bit."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


class Doubled(torch.nn.Module):
    """Attention that a later release, or an operator, has changed."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * self.inner(*args, **kwargs)


class DoubledWithParts(Doubled):
    """The same, and it shows what it holds, as an adapter around a layer does."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def hooked(block: torch.nn.Module) -> None:
    block.attn.register_forward_hook(lambda module, args, output: 2 * output)


def wrapped(block: torch.nn.Module) -> None:
    block.attn = DoubledWithParts(block.attn)


@pytest.mark.parametrize("change", [hooked, wrapped])
def test_blocks_that_changed_since_are_tried_anew_by_the_next_capture(
    engine: Any, change: Any
) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 4, 8]])
    (before,) = manager.execute(group)
    change(model.visual.blocks[1])
    assert manager.execute(group) is None
    manager.capture(graph_pool=None)
    assert manager.stats()["dropped"] == []
    (eager,), (replayed,) = model.embed_multimodal(**group), manager.execute(group)
    assert (eager - before).norm() > 1e-3 * eager.norm()
    assert (replayed - eager).norm() <= 1e-5 * eager.norm()


@pytest.mark.parametrize("make", ["qwen3_vl", "qwen3_omni"])
@pytest.mark.parametrize("changed", [None, Doubled, DoubledWithParts])
def test_changed_blocks_are_called_as_a_whole(
    engine: Any, make: str, changed: type[Doubled] | None
) -> None:
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    model = getattr(on_cpu, make)(engine)
    blocks = model.visual.blocks
    if changed is not None:
        blocks[1].attn = changed(blocks[1].attn)
    engine.additional_config["graphhal"]["vllm_models"] = "qwen3_omni"
    plugin.install(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 4, 8], [1, 8, 4]])
    eager, replayed = model.embed_multimodal(**group), manager.execute(group)
    assert replayed is not None
    for ours, theirs in zip(replayed, eager, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()

    graphs = next(g for g in manager._graphs() if "image" in g.adapter.modalities)
    entry = next(e for k, e in graphs._graphs.entries.items() if (k.path, k.size) == ("image", 16))
    whole: list[int] = []
    for block in blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kw: (
            whole.append(1),
            forward(*args, **kw),
        )[1]
    bounds = {name: bound.max_seqlen for name, bound in entry.capacity.sequences.items()}
    graphs.adapter.forward(entry.graph.request.inputs, bounds)
    assert len(whole) == (0 if changed is None else len(blocks))
