"""Operator rules, one file per family: see :mod:`fxshard.rules.rule` for the interface."""

from fxshard.rules import conv, matmul, norm, pointwise, pool, random, reduce, view  # noqa: F401  importing registers the rules
from fxshard.rules.call import OpCall
from fxshard.rules.rule import Expand, Gather, Row, Rule, emit_same, find_rule, registered, rule

__all__ = ["Expand", "Gather", "OpCall", "Row", "Rule", "emit_same", "find_rule", "registered", "rule"]
