"""The embedded engine: SGLang's HTTP API over a compact torch decode loop, for a CPU or one GPU.

``__main__`` starts it; ``server`` speaks HTTP; ``loop`` is the engine's thread, which alone touches ``scheduler``
(who runs), ``kv_cache`` (where keys and values lie), ``model`` (forward passes) and ``sampler``; ``weights`` brings new
weights; ``spec`` says which model folders are served.
"""
