"""The look of the pages: style sheet, typeface, icons, and the sign of a page in the browser's tabs.

Typeface, colours and icons are vendored; `scripts/vendor_look.py` made them from their packages.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from pathlib import Path

HERE = Path(__file__).parents[1]
# Colours of lines and runs in the style sheet. Further runs differ only by their letters.
COLOURS = 12


def style(typeface: str | None = None) -> str:
    """Return the style sheet of all pages.

    `typeface`: the address of the typeface. Without one it is inside, for a page that asks for nothing.
    The length of a bar is a class (`part-37`), since pages that are served may have no inline styles.
    """
    # .part-37{--part:0.37}
    # One class for each length that a bar can have.
    parts = [f".part-{n}{{--part:{n / 100:g}}}" for n in range(101)]
    parts += [f".colour-{n}{{background:var(--c{n})}}" for n in range(COLOURS)]
    if typeface is None:
        content = (HERE / "vendor/inter.woff2").read_bytes()
        typeface = f"data:font/woff2;base64,{b64encode(content).decode()}"
    face = (
        f'@font-face{{font-family:Inter;font-weight:400 650;src:url("{typeface}") format("woff2")}}'
    )
    colours = text_of("vendor/radix-colors.css")
    return "\n".join([face, colours, text_of("templates/style.css"), icon_style(), "".join(parts)])


# The icons of the states of runs, trials and checks; others have an open circle.
STATE_ICONS = {
    "check": ("done", "ready"),
    "circle-play": ("running",),
    "loader-circle": ("starting", "loading"),
    "circle-stop": ("stopped", "ended"),
    "circle-pause": ("pruned", "stopped-early"),
    "clock": ("waiting",),
    "circle-x": ("failed",),
    # The last one wins: a run that is done is marked where its numbers are to be doubted.
    "triangle-alert": ("damaged", "warned"),
}


@cache
def icon_style() -> str:
    """Return a class for each icon, such as `i-play`: it draws the icon before an element's text, in its colour."""
    icons = _icons()
    names = ", ".join(f".i-{name}::before" for name in icons)
    rules = [
        f".state::before, details:not(.menu) > summary::before, {names} "
        '{ content: "" / ""; display: inline-block; flex: none; width: 1.1em; height: 1.1em; '
        "vertical-align: -.16em; background: var(--sign, currentcolor); mask: var(--icon) center / contain no-repeat; "
        "print-color-adjust: exact; -webkit-print-color-adjust: exact; }"
    ]
    for name, address in icons.items():
        rules.append(f'.i-{name}::before {{ --icon: url("{address}"); }}')
    rules.append(f'.state::before {{ --icon: url("{icons["circle-dashed"]}"); }}')
    rules.append(f'details > summary::before {{ --icon: url("{icons["chevron-right"]}"); }}')
    for name, states in STATE_ICONS.items():
        selectors = ", ".join(f".state.{state}::before" for state in states)
        rules.append(f'{selectors} {{ --icon: url("{icons[name]}"); }}')
    arrow = icons["chevron-down"].replace("stroke='%23000'", "stroke='%23808890'")
    rules.append(f':root {{ --chevron: url("{arrow}"); }}')
    return "\n".join(rules)


def _icons() -> dict[str, str]:
    """Return each vendored icon as the address of a picture, by name."""
    icons = {}
    for name, shapes in re.findall(
        r'<symbol id="([a-z0-9-]+)"[^>]*>(.*)</symbol>', text_of("vendor/icons.svg")
    ):
        # An address in a style sheet may have none of these signs.
        drawn = shapes.replace('"', "'").replace("<", "%3C").replace(">", "%3E")
        icons[name] = (
            "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 24 24' fill='none' "
            f"stroke='%23000' stroke-width='2' stroke-linecap='round' stroke-linejoin='round'%3E{drawn}%3C/svg%3E"
        )
    return icons


# The colours of a tab's sign by the state of what it shows: Radix' steps 9, which are seen on light and dark.
_SIGNS = {
    "done": "30a46c",
    "running": "0090ff",
    "starting": "0090ff",
    "failed": "e5484d",
    "damaged": "e5484d",
    "warned": "ffc53d",
}


def favicon(state: str = "") -> str:
    """Return the address of the sign of a page in the browser's tabs: a curve, with a dot in the colour of a state."""
    dot = ""
    if state:
        dot = f"%3Ccircle cx='24' cy='8' r='8' fill='%23{_SIGNS.get(state, '8b8d98')}'/%3E"
    return (
        "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
        "%3Crect width='32' height='32' rx='7' fill='%231c2024'/%3E"
        "%3Cpath d='M6 9c3 14 10 15 20 15' fill='none' stroke='%2370b8ff' stroke-width='3.4' stroke-linecap='round'/%3E"
        f"{dot}%3C/svg%3E"
    )


def text_of(name: str) -> str:
    """Return the text of a file of `reporting`, such as a template."""
    return (HERE / name).read_text("utf-8")
