"""What goes in and what comes out: requests, rows, plans, records and how they compare."""
