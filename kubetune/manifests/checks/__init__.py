"""Mistakes in manifests that schema validation cannot see; nothing here asks a cluster. Read `lint` first."""
