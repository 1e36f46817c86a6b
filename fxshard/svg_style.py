"""How an SVG picture of a plan looks; light, and dark where the reader's system is.

The two sets of colours are Okabe and Ito's for the colour-blind, lighter on dark ground.
"""

from __future__ import annotations

from fxshard.drawing import Kind

_FONTS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_LIGHT = {
    "page": "#ffffff",
    "ink": "#1b2430",
    "quiet": "#5b6776",
    "rule": "#dde3ea",
    "module": "#f5f7fa",
    "box": "#ffffff",
    "split": "#0072b2",
    "whole": "#5b6776",
    "gathered": "#c25100",
    "communication": "#9c3587",
    "other": "#8a95a3",
    "memory": "#00805f",
}
_DARK = {
    "page": "#11161d",
    "ink": "#e8edf3",
    "quiet": "#9aa7b6",
    "rule": "#2a3440",
    "module": "#18202a",
    "box": "#1e2833",
    "split": "#56b4e9",
    "whole": "#b4c0cd",
    "gathered": "#f29b4b",
    "communication": "#dd8fc9",
    "other": "#7d8a99",
    "memory": "#3cc9a0",
}


def _rules(colours: dict[str, str]) -> str:
    kinds = "".join(
        f".{kind} .body{{fill:{colour}}} .{kind} .edge,.{kind} .box{{stroke:{colour}}}"
        for kind, colour in colours.items()
        if kind in tuple(Kind)
    )
    return f"""
.page{{fill:{colours["page"]}}} text{{fill:{colours["ink"]}}} .quiet,.small,.column{{fill:{colours["quiet"]}}}
.rule{{stroke:{colours["rule"]}}} .module rect{{fill:{colours["module"]};stroke:{colours["rule"]}}}
.box{{fill:{colours["box"]}}} {kinds}
.edge{{stroke:{colours["quiet"]}}} .tip{{fill:{colours["quiet"]}}}
.sent .arrow,.sent .kind{{fill:{colours["communication"]}}}
.area{{fill:{colours["memory"]}}} .curve{{stroke:{colours["memory"]}}}
"""


STYLE = f"""
text{{font:13px {_FONTS}}} .title{{font-size:22px;font-weight:650}} .name{{font-weight:600}}
.quiet{{font-weight:400}} .small{{font-size:11.5px}} .column{{font-size:12px;font-weight:600;letter-spacing:.02em}}
.sent,.sent .number{{font-size:12px}} .kind{{font-weight:600}} .number{{font-variant-numeric:tabular-nums}}
.box{{stroke-width:1.4}} .gathered .box{{stroke-dasharray:5 3}} .other .box{{stroke-dasharray:2 3}}
.sign .edge{{fill:none;stroke-width:1.4}} .edges .edge{{fill:none;stroke-width:1.3}}
.edges .order{{stroke-dasharray:5 4}} .rule{{fill:none}}
.area{{opacity:.13}} .curve{{fill:none;stroke-width:1.6}} .curve.backward{{stroke-dasharray:4 3}}
{_rules(_LIGHT)}
@media (prefers-color-scheme: dark) {{{_rules(_DARK)}}}
"""
"""The style sheet."""
