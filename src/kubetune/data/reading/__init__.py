"""Records as they lie on disk or on the hub, and their shapes: any of them becomes the one form the rest works with.

Whatever is not understood is refused by file and line, or counted. Read `examples` first, then `formats`.
"""
