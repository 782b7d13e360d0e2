"""An object store on this machine, behind a proxy that makes faults. It is moto's server; with LIGHTCK_TEST_S3=PORT it
is another one, which knows the credentials below, such as OpenStack Swift with s3api (docs/evidence/tiers.md)."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lightck.tiers.object_store import ObjectStore
from tiers.fault_proxy import FaultProxy

KEY_ID, SECRET = "AKIAMARKED:KEYID00001", "marked/secret/of/the/environment/0000000"


class Bucket(NamedTuple):
    """A bucket of its own, and the proxy before it."""

    proxy: FaultProxy
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/run7"

    @property
    def options(self) -> dict[str, str | int | bool]:
        return {"endpoint": self.proxy.endpoint, "region": "us-east-1", "allow_http": True}

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.url, self.options)

    def objects(self) -> dict[str, bytes]:
        """Return everything in the bucket, as the library lists and gives it."""
        library = self.store._library
        return {each["path"]: bytes(library.get(each["path"]).bytes()) for page in library.list() for each in page}


@pytest.fixture(scope="session")
def store_port() -> Iterator[int]:
    """The port of a server that speaks the protocol of S3. moto's checks no credentials."""
    if "LIGHTCK_TEST_S3" in os.environ:
        yield int(os.environ["LIGHTCK_TEST_S3"])
        return
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


_buckets = itertools.count()


@pytest.fixture
def bucket(store_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket. The credentials are in the environment, where the library looks for them."""
    import boto3

    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    proxy = FaultProxy(store_port)
    found = Bucket(proxy, f"bucket-{os.getpid()}-{next(_buckets)}")
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{store_port}", region_name="us-east-1")
    client.create_bucket(Bucket=found.name)
    yield found
    proxy.heal()
    proxy.stop()


@pytest.fixture
def pools(pool: Path) -> Path:
    """The directory of a group, which does not exist yet."""
    return pool.parent / "pools"


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"
