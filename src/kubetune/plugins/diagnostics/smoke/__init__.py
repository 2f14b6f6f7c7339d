"""`kubetune smoke`: a tiny run that tests ranks, links, devices and volumes. Read `rank` first: what each rank does."""
