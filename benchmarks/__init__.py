"""Side-by-side measurements of kubetune and of what a user would pick instead. Not part of the package."""
