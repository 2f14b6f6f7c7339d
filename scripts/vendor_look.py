"""Make the vendored look of the pages from packages of npm: `python -m scripts.vendor_look FOLDER`.

FOLDER holds the unpacked packages @fontsource-variable/inter, @radix-ui/colors and lucide-static, as `npm pack` and
`tar` leave them, under the names inter, colors and lucide. Needs fontTools and brotli, which kubetune does not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from fontTools.varLib import instancer

VENDOR = Path(__file__).parents[1] / "src/kubetune/reporting/vendor"

# Letters of Western languages, and the signs that pages write. Other letters come from the system's typeface.
CHARACTERS = [*range(0x20, 0x7F), *range(0xA0, 0x180), *map(ord, "–—‘’“”•…×−·↑↓→←≤≥≈")]
WEIGHTS = (400, 650)

SCALES = ("slate", "blue", "green", "red", "amber")
# Icons of states, of places, and of what can be done.
ICONS = (
    "archive arrow-right bot check chevron-down chevron-left chevron-right circle-dashed circle-pause circle-play "
    "circle-stop circle-x clock columns-3 copy cpu database download ellipsis folder git-compare list-filter "
    "loader-circle maximize-2 message-square pencil play plus rotate-ccw search server tag target trash-2 "
    "triangle-alert upload wrench x"
).split()


def main() -> None:
    """Write typeface, colours and icons, with their licences."""
    source = Path(sys.argv[1])
    write_typeface(source / "inter")
    write_colours(source / "colors")
    write_icons(source / "lucide")
    for package, name in (("inter", "Inter"), ("colors", "radix-colors"), ("lucide", "lucide")):
        (VENDOR / f"LICENSE-{name}").write_text((source / package / "LICENSE").read_text("utf-8"))


def write_typeface(package: Path) -> None:
    """Write the typeface with the characters and weights that pages use, and with tabular figures."""
    font = TTFont(package / "files/inter-latin-wght-normal.woff2")
    subsetter = Subsetter(Options(layout_features=["kern", "calt", "ccmp", "locl", "tnum"]))
    subsetter.populate(unicodes=CHARACTERS)
    subsetter.subset(font)
    font = instancer.instantiateVariableFont(font, {"wght": WEIGHTS})
    font.flavor = "woff2"
    font.save(VENDOR / "inter.woff2")


def write_colours(package: Path) -> None:
    """Write the scales of both schemes as custom properties."""
    light: list[str] = []
    dark: list[str] = []
    for scale in SCALES:
        for name, lines in ((f"{scale}.css", light), (f"{scale}-dark.css", dark)):
            text = (package / name).read_text("utf-8").partition("@supports")[0]
            lines += re.findall(r"--[a-z]+-\d+: [^;]+;", text)
    text = f":root {{ {' '.join(light)} }}\n"
    text += (
        f"@media (prefers-color-scheme: dark) {{ :root:not(.on-paper) {{ {' '.join(dark)} }} }}\n"
    )
    (VENDOR / "radix-colors.css").write_text(
        f"/* Radix Colors 3 (MIT): see LICENSE-radix-colors */\n{text}"
    )


def write_icons(package: Path) -> None:
    """Write the icons as the symbols of one SVG file, one a line."""
    lines = []
    for name in ICONS:
        text = (package / f"icons/{name}.svg").read_text("utf-8")
        shapes = re.search(r"<svg[^>]*>(.*)</svg>", text, re.DOTALL)
        assert shapes, name
        drawn = re.sub(r"\s+", " ", shapes[1]).replace(" />", "/>").replace("> <", "><").strip()
        lines.append(f'<symbol id="{name}" viewBox="0 0 24 24">{drawn}</symbol>\n')
    head = "<!-- Lucide (ISC): see LICENSE-lucide -->\n"
    (VENDOR / "icons.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg">\n{head}{"".join(lines)}</svg>\n'
    )


if __name__ == "__main__":
    main()
