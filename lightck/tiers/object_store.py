"""A tier in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure. The library is obstore.

A store must let an object be read as soon as it was put (read-after-write consistency), and hold it whole or not at all
(atomic puts). More is not needed: no put is conditional, because names are unique, and a listing may be late (eventual
consistency).

Credentials come from where the library looks for them: the environment, or the machine. The text of its errors holds
what the store has sent, key ids and signed addresses among it. So an error of lightck names the status and a few codes
that are known, and is never raised from one of the library.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.tiers.decisions import Listing
from lightck.tiers.names import parse
from lightck.tiers.store import TEMPORARY_PREFIX, is_own

if TYPE_CHECKING:
    from types import ModuleType

    from obstore.store import ObjectStore as _Library

_Result = TypeVar("_Result")
SCHEMES = ("s3", "gs", "az")
_BUCKET_LENGTH_MIN = 2
_URL = re.compile(
    rf"({'|'.join(SCHEMES)})://[A-Za-z0-9][A-Za-z0-9._-]{{1,100}}((?:/[A-Za-z0-9._=+,-]{{1,200}}){{0,20}})"
)
_CREDENTIALS_IN_URL = re.compile(r"[@?#]")
_CLIENT_OPTIONS = frozenset(
    [
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    ]
)
"""Options of the connection. The library wants them apart from those of the store."""
_OPTIONS_NBYTES_MAX = 1 << 15
_TIMEOUTS = {"timeout": "120s", "connect_timeout": "10s"}
"""The timeouts of one request. 120 s for a piece of 32 MiB are 280 kB/s. Both are options."""
_N_RETRIES, _RETRY_SECONDS_MAX = 3, 60
"""Of the library, for one call. What comes after that is the pause of the drain, which grows."""
_WHOLE_NBYTES_MAX = 64 << 20
"""What is larger (the layout table of a very large pool) is put in parts."""
_KNOWN_CODES = frozenset(
    [
        "AccessDenied",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "EntityTooLarge",
        "ExpiredToken",
        "InternalError",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "InvalidToken",
        "KMS.DisabledException",
        "MethodNotAllowed",
        "NoSuchBucket",
        "NoSuchKey",
        "NotImplemented",
        "PermanentRedirect",
        "QuotaExceeded",
        "RequestTimeTooSkewed",
        "RequestTimeout",
        "ServiceUnavailable",
        "SignatureDoesNotMatch",
        "SlowDown",
        "TooManyRequests",
        "XMinioStorageFull",
        "ContainerNotFound",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "ServerBusy",
    ]
)
"""Codes that an error may name. Another text of a store may hold anything."""
_CREDENTIALS_ASKED_FOR = re.compile(r"token request|/latest/(?:api/token|meta-data/)|AssumeRoleWithWebIdentity")
"""In the address or the name of a request that is made for credentials."""
_KINDS = {
    "Connect": "it cannot be reached",
    "Timeout": "it did not answer in time",
    "Request": "the connection broke",
    "Decode": "the connection broke",
    "Interrupted": "the connection broke",
}


_is_used, _is_forked = Event(), Event()
"""Whether this process has called the library, and whether it was forked from one that had. The library's threads are
not in a forked child, and a call would wait for them for ever."""


class _Failure(NamedTuple):
    """Why a call of the library failed, without any text of the store."""

    kind: str
    status: int | None
    code: str | None

    @classmethod
    def of(cls, err: BaseException) -> _Failure:
        text = str(err)
        status = re.search(r"status code: ([1-5]\d\d)\b", text)
        code = re.search(r"<Code>([A-Za-z.]{1,40})</Code>", text)
        found = re.search(r"HttpError \{\s*kind: (\w+)", text)
        kind = _KINDS.get(found[1]) if found else None
        if _CREDENTIALS_ASKED_FOR.search(text.partition(" - ")[0]):
            kind = "no credentials were found, or they could not be fetched"
        return cls(
            kind or type(err).__name__,
            int(status[1]) if status else None,
            code[1] if code and code[1] in _KNOWN_CODES else None,
        )

    @property
    def says_gone(self) -> bool:
        """Whether the store is there, and the object is not."""
        return self.status == 404 and self.code not in ("NoSuchBucket", "ContainerNotFound")

    @property
    def cannot_be_done(self) -> bool:
        """Whether the store refuses the request itself, rather than being out of order."""
        return self.status is not None and (400 <= self.status < 500 and self.status not in (408, 429))

    def __str__(self) -> str:
        answer = " ".join(str(each) for each in (self.status, self.code) if each is not None)
        if self.status is None:
            return self.kind
        return f"{self.kind}; the answer was {answer}" if "credentials" in self.kind else f"the store answers {answer}"


class ObjectStore:
    """The objects below one URL. It asks the store for nothing before the first call."""

    n_parallel = 4
    lists_at_once = False
    knows_sizes = False

    def __init__(self, root: str, options: Mapping[str, str | int | bool] | None = None) -> None:
        """``root``: a URL without slashes at its end. Raises ``ValueError``, ``TypeError`` and ``TierError``."""
        refuse_unusable_url(root)
        refuse_unusable_options(options)
        self.root = root
        self._library = _opened(_library(root), root, options or {})

    def __str__(self) -> str:
        return self.root

    def has_claim(self) -> bool:
        """Whether a claim lies below the URL. Raises ``TierError``."""
        return bool(self.listing().claims)

    def refuse_foreign_contents(self) -> None:
        """Raise ``TierError`` if something else than a tier lies below the URL."""
        foreign, is_tier = None, False
        for name, _ in self._ask("cannot be listed", lambda: list(self._names())):
            is_tier |= name.endswith("/claim.json") and parse(name) is not None
            if not is_own(name.split("/")[0]):
                foreign = foreign or name
        if foreign is not None and not is_tier:
            raise TierError(
                f"Below {self.root!r} lies something, and it is no tier: {foreign!r}. Nothing was written. Name a URL "
                "below which nothing lies."
            )

    def listing(self) -> Listing:
        """List the tier. Raises ``TierError``."""
        names = self._ask("cannot be listed", lambda: [each for each in self._names() if parse(each[0]) is not None])
        return Listing.of(names, time.time())

    def now(self) -> float:
        """Return the time at which an object would be written now, by the clock of the store. Raises ``TierError``."""
        name = TEMPORARY_PREFIX + secrets.token_hex(8)
        self._ask("cannot be written", lambda: self._library.put(name, b"t", use_multipart=False))
        try:
            found = self._ask("cannot be read", lambda: self._library.head(name))
        finally:
            self._delete(name)
        return found["last_modified"].timestamp()

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Store an object. ``name`` is one that ``names.py`` makes. Raises ``TierError``."""
        assert parse(name) is not None, "only names that lightck makes are written"
        in_parts = len(data) > _WHOLE_NBYTES_MAX
        self._ask("cannot be written", lambda: self._library.put(name, data, use_multipart=in_parts))

    def get(self, name: str, nbytes_max: int) -> bytes:
        """Return an object of at most ``nbytes_max`` bytes. Raises ``FileNotFoundError`` if there is none,
        ``DamagedError`` if it is larger, and ``TierError``, also if the connection ends before the object does."""
        assert parse(name) is not None, "only names that lightck makes are read"

        def call() -> tuple[int, bytes]:
            result = self._library.get(name)
            nbytes = int(result.meta["size"])
            return nbytes, bytes(result.bytes()) if nbytes <= nbytes_max else b""

        found = self._try(call)
        if isinstance(found, _Failure):
            if found.says_gone:
                raise FileNotFoundError(f"{name} is not in the tier {self.root!r}")
            raise self._error(f"cannot give {name}", found)
        nbytes, data = found
        if nbytes > nbytes_max:
            raise DamagedError(f"{name} has {nbytes} bytes, more than {nbytes_max}")
        if len(data) != nbytes:
            raise self._error(f"cannot give {name}", _Failure("the connection broke", None, None))
        return data

    def nbytes_of(self, name: str) -> int | None:
        """Return the number of bytes of an object, which is not read; None if there is none. Raises ``TierError``."""
        assert parse(name) is not None, "only names that lightck makes are asked for"
        found = self._try(lambda: int(self._library.head(name)["size"]))
        if isinstance(found, _Failure):
            if found.says_gone:
                return None
            raise self._error(f"cannot be asked for {name}", found)
        return found

    def delete(self, name: str) -> None:
        """Remove an object. It is no error if there is none. Raises ``TierError``."""
        assert parse(name) is not None, "only names that lightck makes are removed"
        self._delete(name)

    def link(self, name: str, new_name: str) -> bool:
        """Copy an object inside the store. Returns False if there is no such object, or if the store refuses to copy:
        then its bytes are sent again. Raises ``TierError``."""
        assert None not in (parse(name), parse(new_name)), "only names that lightck makes are written"
        found = self._try(lambda: self._library.copy(name, new_name))
        if isinstance(found, _Failure):
            if found.cannot_be_done or found.status == 501:
                return False
            raise self._error("cannot be written", found)
        return True

    def _names(self) -> Iterator[tuple[str, float]]:
        """Yield the names of all objects, with their times."""
        for page in self._library.list(chunk_size=1000):
            for each in page:
                if each["path"]:
                    yield each["path"], each["last_modified"].timestamp()

    def _delete(self, name: str) -> None:
        found = self._try(lambda: self._library.delete(name))
        if isinstance(found, _Failure) and found.status != 404:
            raise self._error(f"cannot remove {name}", found)

    def _ask(self, fact: str, call: Callable[[], _Result]) -> _Result:
        found = self._try(call)
        if isinstance(found, _Failure):
            raise self._error(fact, found)
        return found

    @staticmethod
    def _try(call: Callable[[], _Result]) -> _Result | _Failure:
        """Call the library. Its error is caught here, and what is raised afterwards does not refer to it, because its
        text may hold secrets."""
        if _is_forked.is_set():
            return _Failure(
                "obstore cannot be used in a forked process whose parent has used it (spawn it)", None, None
            )
        _is_used.set()
        try:
            return call()
        except Exception as err:
            failure = _Failure.of(err)
            return failure._replace(status=404) if isinstance(err, FileNotFoundError) else failure
        except BaseException as err:
            if type(err).__name__ != "PanicException":  # Ctrl-C, or the end of the process
                raise
            return _Failure("the library obstore failed", None, None)

    def _error(self, fact: str, failure: _Failure) -> TierError:
        return TierError(
            f"The tier {self.root!r} {fact}: {failure}. Check the bucket, the credentials in the environment, and the "
            "endpoint and region in options=. The pools, and the checkpoints that lie in the tier, are unchanged."
        )


def refuse_unusable_url(root: str) -> None:
    """Raise ``ValueError`` for a URL that names no place of an object store."""
    if _CREDENTIALS_IN_URL.search(root):
        raise ValueError(
            "The URL of a tier has one of the characters @, ? and #, which may separate a secret from the rest. It is "
            "not shown here. Pass s3://BUCKET/PREFIX, put credentials into the environment, and the rest into options=."
        )
    scheme, _, rest = root.partition("://")
    if scheme in SCHEMES and len(rest.partition("/")[0]) < _BUCKET_LENGTH_MIN:
        raise ValueError(
            f"{root!r} is no URL of a tier: the name of a bucket has at least {_BUCKET_LENGTH_MIN} letters or digits. "
            "Look whether the URL begins with the bucket, s3://BUCKET/PREFIX."
        )
    if scheme not in SCHEMES and scheme.lower() in SCHEMES:
        raise ValueError(f"{root!r} is no URL of a tier: write {scheme.lower()!r} in small letters.")
    match = _URL.fullmatch(root)
    if match is None or any(part in (".", "..") for part in match[2].split("/")):
        raise ValueError(
            f"{root!r} is no URL of a tier. Pass s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, with "
            "letters, digits and . _ - = + , in the parts of the prefix. The address of the server belongs in "
            'options={"endpoint": ...}.'
        )


def refuse_unusable_options(options: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for options that no store takes. Values are never shown."""
    if options is None:
        return
    if not isinstance(options, Mapping) or not all(
        isinstance(key, str) and isinstance(value, (str, int, bool)) for key, value in options.items()
    ):
        raise TypeError(
            'options= is a mapping of names to str, int or bool, such as {"region": "eu-central-1"}. Its values are '
            "not shown here."
        )
    if sum(len(key) + len(str(value)) for key, value in options.items()) > _OPTIONS_NBYTES_MAX:
        raise ValueError(f"options= has more than {_OPTIONS_NBYTES_MAX} characters. Leave out what is not needed.")
    endpoint = options.get("endpoint", options.get("aws_endpoint", "https://"))
    if not re.match(r"https?://", str(endpoint)):
        raise ValueError('options={"endpoint": ...}: the address begins with https:// or http://. Add that.')


def _library(root: str) -> ModuleType:
    try:
        import obstore.store
    except ImportError:
        pass
    else:
        return obstore.store
    raise TierError(
        f"The tier {root!r} needs the package obstore, which is not installed. Nothing was changed. Install it with: "
        "pip install 'lightck[stores]'"
    )


def _opened(library: ModuleType, root: str, options: Mapping[str, str | int | bool]) -> _Library:
    """Return the library's store. Raises ``ValueError`` if it refuses the options."""
    client: dict[str, Any] = {**_TIMEOUTS}
    config: dict[str, Any] = {}
    for key, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        (client if key in _CLIENT_OPTIONS else config)[key] = text
    if root.startswith("s3://") and not any("disable_bulk_delete" in key for key in config):
        config["disable_bulk_delete"] = "true"  # one object at a time: not every store has the other request
    retries = {"max_retries": _N_RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS_MAX)}
    try:
        store: _Library = library.from_url(root, config=config, client_options=client, retry_config=retries)
    except Exception as err:
        kind, text = type(err).__name__, str(err)
    else:
        return store
    if kind == "UnknownConfigurationKeyError":
        unknown = re.search(r"key: '([a-z0-9_]{1,60})'", text)
        named = f" ({unknown[1]!r})" if unknown and unknown[1] in options else ""
        raise ValueError(
            f"options= for {root!r} has a name that obstore does not know{named}. See the names in its documentation: "
            "S3Config, GCSConfig, AzureConfig, ClientConfig."
        )
    if "Account must be specified" in text:
        raise ValueError(
            f'{root!r} needs the name of an account. Pass options={{"account_name": ...}}, or set '
            "AZURE_STORAGE_ACCOUNT_NAME in the environment."
        )
    raise ValueError(
        f"obstore refuses the options for {root!r}: {', '.join(sorted(options)) or 'none were passed'}. Their values "
        "are not shown here. Check them, and the variables of the environment that it reads."
    )


def _after_fork() -> None:
    if _is_used.is_set():
        _is_forked.set()


os.register_at_fork(after_in_child=_after_fork)
