"""What people do with runs, on a cluster that is real: skipped unless one is named. See CONTRIBUTING.md."""
