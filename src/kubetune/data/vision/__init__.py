"""Images to pixels, and to the tokens that stand for them. Read `image_processor` first."""
