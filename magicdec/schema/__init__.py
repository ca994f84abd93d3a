"""Everything that goes in and comes out: requests, rows, plans, records and how they compare."""
