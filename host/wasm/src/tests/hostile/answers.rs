//! Answers that are too large, or about what nobody asked for.

use serde_json::{Value, json};

use super::Stop::{Discover, Harmless, Health, Prepare};
use super::{Case, Guest, UID, case, small};

const REFUSED: &str = "driver-answer-not-valid";
const TOO_LARGE: &str = "driver-answer-too-large";

fn device(device: Value) -> Vec<u8> {
    small().has(json!([{"name": "p", "devices": [device]}])).module()
}

fn prepares(claim: Value) -> Vec<u8> {
    small().prepares(claim).module()
}

pub(super) fn cases() -> Vec<Case> {
    [floods(), lists(), claims(), problems()].into_iter().flatten().collect()
}

/// What the host would have to copy before it can count.
fn floods() -> Vec<Case> {
    fn large(guest: Guest) -> Vec<u8> {
        Guest { pages: 1000, ..guest }.module()
    }
    vec![
        case(
            "devices-too-many",
            "a pool of four hundred thousand devices",
            || large(small().has(json!([{"name": "p", "devices": {"$at": [131_072, 400_000]}}]))),
            (Discover, TOO_LARGE, "bytes at once"),
        ),
        case(
            "devices-times-attributes",
            "devices that share one list of a hundred thousand attributes",
            || {
                large(small().has(json!([{"name": "p", "devices":
                {"$times": [64, {"name": "d", "attributes": {"$at": [131_072, 100_000]}}]}}])))
            },
            (Discover, TOO_LARGE, "bytes at once"),
        ),
        case(
            "name-of-60-mb",
            "a pool's name of 60 MB",
            || large(small().has(json!([{"name": {"$at": [131_072, 60_000_000]}}]))),
            (Discover, TOO_LARGE, "bytes at once"),
        ),
        case(
            "one-text-many-times",
            "sixty devices whose names are the same 4 MB",
            || {
                large(small().has(json!([{"name": "p", "devices":
                {"$times": [60, {"name": {"$at": [131_072, 4_000_000]}}]}}])))
            },
            (Discover, TOO_LARGE, "bytes at once"),
        ),
        case(
            "memo-of-60-mb",
            "a memo of 60 MB",
            || large(small().prepares(json!({"memo": {"$at": [131_072, 60_000_000]}}))),
            (Prepare, TOO_LARGE, "bytes at once"),
        ),
    ]
}

fn lists() -> Vec<Case> {
    vec![
        case(
            "pools-65",
            "a pool more than allowed",
            || small().has(json!({"$times": [65, {"name": "p"}]})).module(),
            (Discover, REFUSED, "65 pools, at most 64"),
        ),
        case(
            "devices-4097",
            "a device more than allowed, over two pools",
            || {
                small()
                    .has(json!([{"name": "p", "devices": {"$times": [4096, {"name": "d"}]}},
                                  {"name": "q", "devices": [{"name": "d"}]}]))
                    .module()
            },
            (Discover, REFUSED, "4097 devices, at most 4096"),
        ),
        case(
            "attributes-33",
            "an attribute more than allowed",
            || device(json!({"name": "d", "attributes": {"$times": [33, {"name": "a"}]}})),
            (Discover, REFUSED, "33 attributes and capacities, at most 32"),
        ),
        case(
            "attribute-of-a-thousand",
            "an attribute with a thousand values",
            || {
                device(
                    json!({"name": "d", "attributes": [{"name": "a", "value": {"ints": {"$times": [1000, 1]}}}]}),
                )
            },
            (Discover, REFUSED, "1000 attribute values, at most 48"),
        ),
        case(
            "numa-node-4294967295",
            "a device on a NUMA node that no machine has",
            || device(json!({"name": "d", "numa-nodes": [u32::MAX]})),
            (Discover, REFUSED, "NUMA node 4294967295"),
        ),
        case(
            "health-4097",
            "the health of more devices than there may be",
            || small().ails(json!({"ok": {"$times": [4097, {"pool": "p", "device": "d"}]}})).module(),
            (Health, REFUSED, "4097 devices, at most 4096"),
        ),
        case(
            "health-twice",
            "a device that is both well and ill",
            || {
                small()
                    .ails(json!({"ok": [{"pool": "p", "device": "d", "state": "healthy"},
                                          {"pool": "p", "device": "d", "state": "unhealthy"}]}))
                    .module()
            },
            (Health, REFUSED, "occurs twice"),
        ),
        case(
            "health-message",
            "a message about health with a line of its own",
            || {
                small()
                    .ails(
                        json!({"ok": [{"pool": "p", "device": "d", "message": "fine\nerror: node on fire"}]}),
                    )
                    .module()
            },
            (Health, REFUSED, "control character"),
        ),
    ]
}

fn claims() -> Vec<Case> {
    vec![
        case(
            "claim-missing",
            "says nothing of the claim that it is asked for",
            || small().answers(json!([])).module(),
            (Prepare, "claim-skipped", ""),
        ),
        case(
            "claim-twice",
            "answers for a claim twice, and differently",
            || {
                small().answers(json!([{"uid": UID, "outcome": {"ok": {}}}, {"uid": UID, "outcome": {"err": {"code": "no"}}}])).module()
            },
            (Prepare, "claim-answered-twice", ""),
        ),
        case(
            "claim-of-another",
            "answers for a claim of somebody else beside its own",
            || {
                small().answers(json!([{"uid": "u-2", "outcome": {"ok": {"memo": {"$times": [9, 1]}}}}, {"uid": UID, "outcome": {"ok": {}}}])).module()
            },
            (Harmless, "", ""),
        ),
        case(
            "claims-many",
            "answers for twenty thousand claims that nobody asked for",
            || {
                small()
                    .answers(json!({"$times": [20_000, {"uid": "../../x", "outcome": {"ok": {}}}]}))
                    .module()
            },
            (Prepare, "claim-skipped", ""),
        ),
        case(
            "memo-one-byte-more",
            "a memo of 64 KiB and a byte",
            || prepares(json!({"memo": {"$times": [65_537, 120]}})),
            (Prepare, REFUSED, "65537 bytes of memo, at most 65536"),
        ),
        case(
            "device-of-another-claim",
            "prepares a device that is not the claim's",
            || prepares(json!({"devices": [{"requests": ["r"], "pool": "p", "device": "e"}]})),
            (Prepare, REFUSED, "not allocated to the claim"),
        ),
        case(
            "share-of-another-claim",
            "prepares a share of the device that is not the claim's",
            || {
                prepares(
                    json!({"devices": [{"requests": ["r"], "pool": "p", "device": "d", "share-id": "s"}]}),
                )
            },
            (Prepare, REFUSED, "not allocated to the claim"),
        ),
        case(
            "device-twice",
            "prepares a device twice",
            || prepares(json!({"devices": {"$times": [2, {"requests": ["r"], "pool": "p", "device": "d"}]}})),
            (Prepare, REFUSED, "occurs twice"),
        ),
        case(
            "request-of-another",
            "gives the device to a request that did not ask for it",
            || prepares(json!({"devices": [{"requests": ["admin"], "pool": "p", "device": "d"}]})),
            (Prepare, REFUSED, "request \"admin\""),
        ),
        case(
            "status-deep",
            "a status of JSON in JSON, two thousand deep",
            || {
                let data = format!("{{\"a\":{}{}}}", "[".repeat(2000), "]".repeat(2000));
                prepares(
                    json!({"devices": [{"requests": ["r"], "pool": "p", "device": "d", "status": {"data": data}}]}),
                )
            },
            (Prepare, REFUSED, "recursion limit"),
        ),
        case(
            "status-address",
            "an address in a status that is an option of a program",
            || {
                prepares(json!({"devices": [{"requests": ["r"], "pool": "p", "device": "d",
                "status": {"network": {"interface-name": "eth0", "ips": ["--help"]}}}]}))
            },
            (Prepare, REFUSED, "\"--help\""),
        ),
    ]
}

fn problems() -> Vec<Case> {
    vec![
        case(
            "problem-of-10-mb",
            "refuses in ten million letters",
            || {
                Guest {
                prepare: "(memory.fill (i32.const 131072) (i32.const 120) (i32.const 10000000)) i32.const 65536".into(),
                pages: 1000,
                ..small().answers(json!([{"uid": UID, "outcome": {"err": {"code": "long", "message": {"$at": [131_072, 10_000_000]}}}}]))
            }
            .module()
            },
            (Prepare, "long", "xxxxxxxx"),
        ),
        case(
            "problem-with-escapes",
            "refuses in words that clear a terminal and feign a line of the host",
            || {
                small().discovers(json!({"err": {"code": "evil\ncode", "message": "\u{1b}[2J\nlevel=error msg=\"node lost\"\u{202e}"}})).module()
            },
            (Discover, "no-code", "level=error"),
        ),
        case(
            "problem-of-an-age",
            "asks not to be asked for 49 days",
            || {
                small().discovers(json!({"err": {"kind": "unavailable", "code": "later", "message": "wait", "retry-after-ms": u32::MAX}})).module()
            },
            (Discover, "later", "wait"),
        ),
        case(
            "problem-of-many-facts",
            "refuses with a thousand facts",
            || {
                small().discovers(json!({"err": {"code": "facts", "message": "many", "details": {"$times": [1000, ["k\n", "v\u{1b}"]]}}})).module()
            },
            (Discover, "facts", "many"),
        ),
    ]
}
