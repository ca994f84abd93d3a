"""Settings and fixtures of the package's tests, which hold for these as well."""

from tests.conftest import loads_of_few_requests, program

__all__ = ["loads_of_few_requests", "program"]
