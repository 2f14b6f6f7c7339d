"""How pages look: their style sheet, typeface, icons and signs. Not for what they say (reporting).

Begin with `style`.
"""
