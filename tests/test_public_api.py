"""The public surface: a change here is a change for users, and is written down in CHANGELOG.md."""

from __future__ import annotations

import quorumark
from quorumark import (
    attacks,
    codec,
    embed,
    errors,
    federation,
    field,
    flower,
    layout,
    report,
    research,
    shamir,
    training,
    usercode,
)
from quorumark import round as rounds
from quorumark.attacks import lora as lora_attacks
from quorumark.attacks import plan, suite
from quorumark.engine import ceremony, member, signer
from quorumark.report import attacks as attack_report
from quorumark.round import history, server
from quorumark.round import member as round_member
from quorumark.verify import (
    align,
    audit,
    audited,
    breadth,
    calibration,
    certificate,
    challenge,
    coalition,
    evidence,
    findings,
    graph,
    guard,
    ledger,
    lora,
    null,
    omissions,
    openings,
    reference,
    statistic,
    suspect,
)

PUBLIC = {
    field: "KEY_BYTES P Stream Vector add axpy check check_output check_scalar chunks derive_key dot from_signed inv "
    "inv_sqrt matmul mul neg random scalar_inv scale set_threads sub threads to_signed",
    shamir: "CompressedShare Decoded check_degree compressed_block decode generated_block is_generated lagrange "
    "lagrange_matrix reconstruct share share_chunks share_compressed",
    codec: "FRACTION_BITS LIMIT decode encode encode_axpy round_trip",
    layout: "DEFAULT_EXCLUDE ModelLayout TensorSpec read_safetensors write_safetensors",
    embed: "Amplitudes MarkState PaperScale Strength TooStrongError check_round check_size check_weights ideal_mark "
    "ideal_norms marked_vector model_digest norm_count norm_places paper_amplitudes update_norms weights",
    federation: "Federation FederationMember Losses RoundReport watch",
    rounds: "FolderState Group MemoryState Plan SecAggMember SecAggServer State Turn Upload group_of pack sums unpack",
    history: "History Settled checks_sums research_seed",
    round_member: "RoundMember",
    server: "Ask RoundServer",
    member: "Config MODEL MemberNode RESULT create_memory introduction named refusal",
    ceremony: "CeremonyServer introduced",
    signer: "SignerClient SignerServer",
    flower: "Watermarked make_key quorumark_mod serve_queries verify_model watermark_mod watermarked",
    training: "torch_evaluate torch_train",
    suspect: "Match Suspect TensorInfo match_layout non_finite read_suspect",
    certificate: "Certificate PAYLOAD_TYPE PREDICATE_TYPE STATEMENT_TYPE verify_signatures",
    report: "certificate_page write_page",
    research: "KnownKey SeededKey TensorsInMemory",
    audit: "LIFE PROOF AuditResult Burns Challenge KeyOpening ShareOpening challenge check_audit "
    "check_challenge genesis_digest leaves_needed open_leaves",
    ledger: "Ledger Policy StoredVector read_policy reconcile",
    guard: "budget check_query least_effective",
    breadth: "Narrow narrow_remainder",
    omissions: "MOST_SEEDS Audits Omitted left_out",
    audited: "LARGEST Audit explain",
    findings: "agreed_alignment again check_signed combine how_aligned",
    challenge: "PROOF Challenge challenge check_challenge genesis_digest leaves_needed spread",
    openings: "LIFE Burns KeyOpening Leaves ShareOpening check_opening from_archives from_shares leaf_dict leaf_from "
    "open_leaves outliers",
    calibration: "Calibration calibrate",
    coalition: "Prepared answer answer_with check_certificate combine prepare prepare_again sign",
    evidence: "CORROBORATION VERDICTS Finding Partial Query Signed SuspectFile now vector_digest",
    null: "cosine_text decimal_of log10_bound log10_p raised_threshold threshold_for z_text",
    reference: "Reference describe_lora digest_of_anchor read_chain",
    statistic: "STATISTICS Canonical canonical_form inner_product norms vector_digest",
    lora: "PROCEDURE Base Factors Gauged Lora base_layout find_factors gauge gauge_suspect is_whole",
    lora_attacks: "change_rank factor_names merge refactor",
    align: "PROCEDURE AlignedModel Alignment Group Groups Mixing Slot Stream align assign",
    graph: "Knob Scaling derive_groups derive_scalings derive_signs",
    attacks: "ATTACKS Attack Result Target chain estimate_key fitted public_scales run transfer_rate",
    plan: "BUILT_IN Job Plan Step known_only read_plan",
    suite: "Subject classifier key_of_members load_weights read_results read_subject run",
    attack_report: "COLUMNS ORIGINAL Row attacks_page figures read_rows standalone write_report write_rows",
    usercode: "example_inputs load_function told_by",
}


def test_public_names() -> None:
    for module, names in PUBLIC.items():
        assert sorted(module.__all__) == sorted(names.split())
        for name in module.__all__:
            assert hasattr(module, name)


def test_every_error_is_ours() -> None:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, errors.QuorumarkError) for e in found)
    assert all(e.__name__ in (errors.__doc__ or "") for e in found), "the tree at the top of errors.py is complete"


def test_constants() -> None:
    assert field.P == 2305843009213693951
    assert (codec.FRACTION_BITS, codec.LIMIT) == (40, 524288.0)
    assert quorumark.__version__
