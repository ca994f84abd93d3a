"""Names and files become what is modelled or run: models, devices, engines, drafts, pasted commands. Needs no torch."""
