"""Some rounds of ``claims.py``, whose long campaigns are run by hand."""

from __future__ import annotations

from tiers import claims


def test_eight_processes_claim_a_folder_at_once(tmp_path):
    assert claims.run(str(tmp_path), {}, 5).claims >= 5 * claims.N_TRAINERS


def test_eight_processes_claim_a_place_in_an_object_store_at_once(bucket):
    assert claims.run(bucket.url, bucket.options, 5).claims >= 5 * claims.N_TRAINERS
