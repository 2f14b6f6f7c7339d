"""Registries of container images, by the OCI distribution spec 1.1: addresses, credentials and requests.

The library for this, oras 0.2, reads whole layers into memory, wants each layer as a file on the disk, and does not
try again what a registry answers with 503. Not for what an image holds (result/publishing/oci_image). Read
`registry_client` first.
"""
