"""What can be wrong with manifests and schema validation cannot see; nothing here asks a cluster. Read `lint` first."""
