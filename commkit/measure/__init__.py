"""The measuring engine under bench, tune and accept.

module         subject
numbers        element types by nccl-tests' names and what they represent exactly (no torch)
patterns       data whose reduction is exact in any order (no torch)
statistics     per-iteration times -> median, percentiles, bandwidth (no torch)
collectives    one row a collective: sizes, busbw factor, how to run it (no torch)
operation      the buffers and arguments of one call
backend        what the engine needs from a communication library
torch_backend  torch.distributed as one; its fake group
verify         fill buffers from a pattern, count wrong elements
engine         one size: warm-up, timing, verification, one gather of the results
"""
