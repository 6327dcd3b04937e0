//! Answers and allocations that break the canonical ABI.

use serde_json::json;

use super::Stop::{Describe, Discover, Harmless, Prepare, Unprepare};
use super::{Case, Guest, case, small};

fn discover(body: &str) -> Vec<u8> {
    Guest { discover: body.into(), ..small() }.module()
}

fn realloc(body: &str) -> Vec<u8> {
    Guest { realloc: body.into(), ..small() }.module()
}

const TRAP: &str = "driver-trapped";

pub(super) fn cases() -> Vec<Case> {
    [places(), allocators(), discriminants(), texts()].into_iter().flatten().collect()
}

fn places() -> Vec<Case> {
    vec![
        case(
            "answer-out-of-memory",
            "its answer is beyond its memory",
            || discover("i32.const 0x7ffffff0"),
            (Discover, TRAP, "out of bounds"),
        ),
        case(
            "answer-at-the-end",
            "its answer begins within its memory and ends beyond",
            || discover("i32.const 65532"),
            (Discover, TRAP, "out of bounds"),
        ),
        case(
            "answer-negative",
            "its answer is at -4",
            || discover("i32.const -4"),
            (Discover, TRAP, "out of bounds"),
        ),
        case(
            "answer-unaligned",
            "its answer is at an odd place",
            || discover("i32.const 8193"),
            (Discover, TRAP, "aligned"),
        ),
        case(
            "list-of-nothing",
            "claims 2^28 pools where there is no memory",
            || small().has(json!({"$at": [8, 1 << 28]})).module(),
            (Discover, TRAP, "out of bounds"),
        ),
        case(
            "list-length-overflows",
            "claims 2^32-1 pools, whose size is no number of 32 bits",
            || small().has(json!({"$at": [8, u32::MAX]})).module(),
            (Discover, TRAP, ""),
        ),
        case(
            "list-unaligned",
            "has its pools at an odd place",
            || small().has(json!({"$at": [8193, 1]})).module(),
            (Discover, TRAP, "aligned"),
        ),
        case(
            "list-in-itself",
            "its list of pools is the list's own head, over and over",
            || small().has(json!({"$at": [65536, 40]})).module(),
            (Discover, "driver-answer-not-valid", "pool name"),
        ),
        case(
            "text-out-of-memory",
            "a name of 4 GiB",
            || small().has(json!([{"name": {"$at": [16, u32::MAX]}}])).module(),
            (Discover, TRAP, "out of bounds"),
        ),
        case(
            "memo-out-of-memory",
            "a memo that ends beyond its memory",
            || small().prepares(json!({"memo": {"$at": [65000, 1 << 20]}})).module(),
            (Prepare, TRAP, "out of bounds"),
        ),
    ]
}

fn allocators() -> Vec<Case> {
    const LOG: &str =
        r#"(import "nodedock:driver/log@0.1.0" "write" (func $log (param i32 i32 i32 i32 i32)))"#;
    vec![
        case(
            "realloc-out-of-memory",
            "has the host write beyond its memory",
            || realloc("i32.const 0x7ffffff0"),
            (Discover, TRAP, "beyond end of memory"),
        ),
        case(
            "realloc-negative",
            "has the host write at -8",
            || realloc("i32.const -8"),
            (Discover, TRAP, "beyond end of memory"),
        ),
        case(
            "realloc-unaligned",
            "has the host write a record at an odd place",
            || realloc("i32.const 20001"),
            (Discover, TRAP, "aligned"),
        ),
        case(
            "realloc-traps",
            "dies while the host hands it its arguments",
            || realloc("unreachable"),
            (Discover, TRAP, "unreachable"),
        ),
        case(
            "realloc-in-one-place",
            "has the host write each argument over the one before",
            || {
                Guest { prepare: "i32.const 8192".into(), realloc: "i32.const 30000".into(), ..small() }
                    .prepares(json!({}))
                    .module()
            },
            (Unprepare, "claim-skipped", "u-1"),
        ),
        case(
            "realloc-over-its-own-data",
            "has the host write over all that it would answer with",
            || realloc("i32.const 0"),
            (Prepare, "claim-skipped", "u-1"),
        ),
        case(
            "realloc-calls-the-host",
            "calls the host while the host is about to call it",
            || {
                Guest {
                imports: LOG.into(),
                realloc: "(call $log (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)) i32.const 20000".into(),
                ..small()
            }
            .module()
            },
            (Discover, TRAP, "cannot leave"),
        ),
        case(
            "start-calls-the-host",
            "calls the host before it is whole",
            || {
                Guest {
                imports: LOG.into(),
                extra: "(func $s (call $log (i32.const 9) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))) (start $s)".into(),
                ..small()
            }
            .module()
            },
            (Describe, "describe-failed", ""),
        ),
    ]
}

fn discriminants() -> Vec<Case> {
    fn device(device: serde_json::Value) -> Vec<u8> {
        small().has(json!([{"name": "p", "devices": [device]}])).module()
    }
    vec![
        case(
            "result-neither",
            "an answer that is neither good nor bad",
            || small().discovers(json!({"$tag": 7})).module(),
            (Discover, TRAP, "discriminant"),
        ),
        case(
            "option-neither",
            "an option that is neither there nor not",
            || small().has(json!([{"name": "p", "extended-resource": {"$tag": 2}}])).module(),
            (Discover, TRAP, "discriminant"),
        ),
        case(
            "variant-unknown",
            "an attribute of a kind that is none",
            || device(json!({"name": "d", "attributes": [{"name": "a", "value": {"$tag": 77}}]})),
            (Discover, TRAP, "discriminant"),
        ),
        case(
            "enum-unknown",
            "a taint of an effect that is none",
            || device(json!({"name": "d", "taints": [{"key": "a", "effect": {"$tag": 9}}]})),
            (Discover, TRAP, "discriminant"),
        ),
        case(
            "problem-kind-unknown",
            "a problem of a kind that is none",
            || small().discovers(json!({"err": {"kind": {"$tag": 200}, "code": "x"}})).module(),
            (Discover, TRAP, "discriminant"),
        ),
        case(
            "bool-255",
            "a truth of 255, which the canonical ABI takes for true",
            || device(json!({"name": "d", "allow-multiple-allocations": {"$tag": 255}})),
            (Harmless, "", ""),
        ),
    ]
}

fn texts() -> Vec<Case> {
    vec![
        case(
            "name-not-utf-8",
            "is called by bytes that are no text",
            || small().describes(json!({"name": {"$bytes": [0xff, 0xfe]}})).module(),
            (Describe, "describe-failed", "utf-8"),
        ),
        case(
            "pool-not-utf-8",
            "a pool's name is cut within a character",
            || small().has(json!([{"name": {"$bytes": [0x61, 0xc3]}}])).module(),
            (Discover, TRAP, "utf-8"),
        ),
        case(
            "label-not-utf-8",
            "an annotation of a surrogate",
            || {
                small()
                    .has(json!([{"name": "p", "annotations": [["k", {"$bytes": [0xed, 0xa0, 0x80]}]]}]))
                    .module()
            },
            (Discover, TRAP, "utf-8"),
        ),
        case(
            "problem-not-utf-8",
            "refuses in words that are none",
            || small().discovers(json!({"err": {"code": "x", "message": {"$bytes": [0xc0, 0x80]}}})).module(),
            (Discover, TRAP, "utf-8"),
        ),
        case(
            "uid-not-utf-8",
            "answers for a claim that has no name",
            || small().answers(json!([{"uid": {"$bytes": [0x80]}, "outcome": {"ok": {}}}])).module(),
            (Prepare, TRAP, "utf-8"),
        ),
        case(
            "path-not-utf-8",
            "asks the host for a path that is no text",
            || {
                let guest = small().relays("sysfs", "read", "aa");
                let extra = guest.extra.clone() + "(data (i32.const 49152) \"\\ff\\fe\")";
                Guest { extra, ..guest }.module()
            },
            (Discover, TRAP, "utf-8"),
        ),
    ]
}
