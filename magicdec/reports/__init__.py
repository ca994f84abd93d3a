"""Shows plans and records: terminal, HTML, PDF, figures and engines' settings. Holds no formula of the model."""
