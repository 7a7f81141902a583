"""graphhal inside vLLM: everything that touches vLLM's insides is in this folder.

vLLM finds `plugin.register` by entry point, in every process that it starts. See `docs/vllm.md`.
"""
