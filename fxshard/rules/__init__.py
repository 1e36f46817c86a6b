"""Operator rules, one file per family: see :mod:`fxshard.rules.rule` for the interface."""

from fxshard.rules import (  # noqa: F401  importing registers the rules
    adaptive_pool,
    attention,
    conv,
    conv_transpose,
    counter,
    custom_gradient,
    extremum,
    factory,
    indexing,
    joining,
    loss,
    matmul,
    moments,
    moving,
    norm,
    pad,
    pointwise,
    pool,
    random,
    reduce,
    resize,
    scan,
    shuffle,
    slicing,
    sliding,
    softmax,
    strided,
    vector_norm,
    view,
)
from fxshard.rules.call import OpCall
from fxshard.rules.rule import Expand, Gather, Row, Rule, emit_same, find_rule, registered, rule

__all__ = ["Expand", "Gather", "OpCall", "Row", "Rule", "emit_same", "find_rule", "registered", "rule"]
