"""Kernels in Triton, for what the libraries do slowly.

They take tensors and return tensors; :mod:`fxshard.ops` makes operators of them, :mod:`fxshard.faster` says where they
are used.  Triton comes with torch for CUDA and is imported where a kernel is, never with the package.
"""
