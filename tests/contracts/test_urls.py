"""Redis URLs: every form, what each refuses, and that no secret is shown."""

from __future__ import annotations

import pytest

from tidemill_contracts import keys
from tidemill_contracts.urls import BadRedisUrl, RedisUrl, Tls, mask_url, parse_url


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://h", RedisUrl("server", (("h", 6379),))),
        ("redis://", RedisUrl("server", (("localhost", 6379),))),
        ("redis://h:1/2", RedisUrl("server", (("h", 1),), db=2)),
        ("redis://h?db=2", RedisUrl("server", (("h", 6379),), db=2)),
        ("redis://[::1]:7/0", RedisUrl("server", (("::1", 7),))),
        ("redis://u:p@h", RedisUrl("server", (("h", 6379),), username="u", password="p")),
        ("redis://:a%2Fb%40c@h", RedisUrl("server", (("h", 6379),), password="a/b@c")),
        ("redis://:a@b:c@h", RedisUrl("server", (("h", 6379),), password="a@b:c")),
        ("redis://h?password=p", RedisUrl("server", (("h", 6379),), password="p")),
        ("redis://h?wait_replicas=1", RedisUrl("server", (("h", 6379),), wait_replicas=1)),
        ("rediss://h", RedisUrl("server", (("h", 6379),), tls=Tls())),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem",
            RedisUrl("server", (("h", 6379),), tls=Tls("/ca.pem", "/c.pem", "/k.pem")),
        ),
        (
            "rediss://h?ssl_check_hostname=false",
            RedisUrl("server", (("h", 6379),), tls=Tls(check_hostname=False)),
        ),
        (
            "rediss://h?ssl_cert_reqs=none",
            RedisUrl("server", (("h", 6379),), tls=Tls(verify=False, check_hostname=False)),
        ),
        ("unix:///run/a%20b.sock?db=3", RedisUrl("unix", path="/run/a b.sock", db=3)),
        ("unix://u:p@/r.sock", RedisUrl("unix", path="/r.sock", username="u", password="p")),
        (
            "redis+sentinel://u:p@a,b:2/queue/4?sentinel_username=su&sentinel_password=sp",
            RedisUrl(
                "sentinel",
                (("a", 26379), ("b", 2)),
                db=4,
                username="u",
                password="p",
                master="queue",
                sentinel_username="su",
                sentinel_password="sp",
            ),
        ),
        (
            "rediss+sentinel://a/queue?ssl_ca_certs=/ca.pem",
            RedisUrl("sentinel", (("a", 26379),), master="queue", tls=Tls("/ca.pem")),
        ),
        ("redis+cluster://a,b:2", RedisUrl("cluster", (("a", 6379), ("b", 2)))),
        ("rediss+cluster://a", RedisUrl("cluster", (("a", 6379),), tls=Tls())),
    ],
)
def test_every_form_is_read(url: str, parts: RedisUrl) -> None:
    assert parse_url(url) == parts


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "must begin with one of redis://"),
        ("http://h", "must begin with one of redis://"),
        ("h:6379", "must begin with one of redis://"),
        ("redis://h:port", "port is malformed"),
        ("redis://h:0", "port is malformed"),
        ("redis://h:65536", "port is malformed"),
        ("redis://[::1", "host is malformed"),
        ("redis://:s3cret/x@h", "port is malformed"),
        ("redis://:s3cret#x@h", "`#`: write it as %23"),
        ("redis://a,b", "several hosts need"),
        ("redis://h/queue", "`db` is a number"),
        ("redis://h/-1", "`db` is a number"),
        ("redis://h/0/1", "too much follows"),
        ("redis://h?wait_replicas=all", "`wait_replicas` is a number"),
        ("redis://h?decode_responses=true", "unknown option `decode_responses`; there are"),
        ("rediss://h?ssl_ca_cert=/ca.pem", "unknown option `ssl_ca_cert`; there are"),
        ("redis://h?ssl_ca_certs=/ca.pem", "`ssl_ca_certs` needs TLS"),
        ("redis://h?db=1&db=2", "`db` is given twice"),
        ("rediss://h?ssl_cert_reqs=maybe", "`ssl_cert_reqs` is required or none"),
        ("rediss://h?ssl_check_hostname=yes", "`ssl_check_hostname` is true or false"),
        ("rediss://h?ssl_keyfile=/k", "`ssl_keyfile` needs `ssl_certfile`"),
        ("unix://", "unix:///path/to/socket"),
        ("unix://run/redis.sock", "unix:///path/to/socket"),
        ("redis+sentinel://a", "lacks the master's name"),
        ("redis+sentinel:///queue", "host is missing"),
        ("redis+cluster://a/1", "no databases"),
        ("redis+cluster://a?wait_replicas=1", "unknown option `wait_replicas`"),
        ("redis+cluster://a,", "host is missing"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_without_secrets(url: str, why: str) -> None:
    with pytest.raises(BadRedisUrl) as caught:
        parse_url(url)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("redis://u:p@w@h:1/0", "redis://u:***@h:1/0"),
        ("redis://u@h", "redis://u@h"),
        ("rediss://user:s%20x@h/0", "rediss://user:***@h/0"),
        ("unix:///tmp/x.sock", "unix:///tmp/x.sock"),
        ("unix:///tmp/x.sock?db=1&password=pw", "unix:///tmp/x.sock?db=1&password=***"),
        (
            "redis+sentinel://u:pw@a,b/q?sentinel_password=pw&db=1",
            "redis+sentinel://u:***@a,b/q?sentinel_password=***&db=1",
        ),
        ("rediss+cluster://:pw@a", "rediss+cluster://:***@a"),
    ],
)
def test_secrets_in_urls_are_masked(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_a_url_in_its_parts_does_not_show_its_secrets() -> None:
    parts = parse_url("redis+sentinel://u:s3cret@a/q?sentinel_password=s3cret")
    assert "s3cret" not in repr(parts)


@pytest.mark.parametrize(
    ("queue", "name", "job_id"),
    [
        ("tidemill:queue", "{tidemill:queue}", "{tidemill:queue}a"),
        ("{x}:queue", "{x}:queue", "{x}a"),
        ("{}queue", "{{}queue}", "{{}a"),
    ],
)
def test_in_a_cluster_a_queue_and_its_jobs_share_their_hash_tag(
    queue: str, name: str, job_id: str
) -> None:
    assert keys.in_one_slot(queue) == name
    assert keys.tagged("a", name) == job_id
    assert keys.tagged(job_id, name) == job_id


def test_elsewhere_ids_are_left_as_they_are() -> None:
    assert keys.tagged("a", "tidemill:queue") == "a"
