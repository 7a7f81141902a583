"""The built-in adapters register like anybody's."""

import subprocess
import sys

from graphhal.adapters.plugin import graphhal_adapters


def test_every_family_is_registered_under_its_own_name():
    factories = graphhal_adapters()
    names = [factory.name for factory in factories]
    assert names == ["qwen3_omni_vision", "qwen3_omni_audio", "covo_audio", "siglip"]
    assert {factory.modality for factory in factories} == {"image", "audio"}


def test_importing_the_plugin_loads_no_heavy_library():
    code = (
        "import sys, graphhal.adapters.plugin;"
        "print([m for m in ('torch', 'transformers', 'PIL', 'av') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
