"""Federated training: what an honest client does with its data."""

from gradveil.federation.client import ClientResult, run_client

__all__ = ["ClientResult", "run_client"]
