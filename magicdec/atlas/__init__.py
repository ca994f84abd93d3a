"""An atlas of answers: one plan for each cell of models, devices and loads, as one page."""
