//! Hostile drivers that take code to make.

use serde_json::{Map, Value, json};

use super::Stop::{Config, Discover, Prepare, Unprepare};
use super::table::{HOST_GRANT, asks_host, changes};
use super::{Case, Guest, UID, case, small};

fn prepares(claim: Value) -> Vec<u8> {
    small().prepares(claim).module()
}

fn demands(schema: &Value) -> Vec<u8> {
    small().demands(json!(schema.to_string())).module()
}

pub(super) fn cases() -> Vec<Case> {
    let host = host_calls().into_iter();
    let host = host.map(|case| {
        if case.grant.is_empty() {
            case.granted(HOST_GRANT)
        } else {
            case
        }
    });
    [answers(), resources(), host.collect(), schemas()]
        .into_iter()
        .flatten()
        .collect()
}

fn answers() -> Vec<Case> {
    vec![
        case(
            "realloc-in-one-place",
            "has the host write each argument over the one before",
            || {
                Guest {
                    prepare: "i32.const 8192".into(),
                    realloc: "i32.const 30000".into(),
                    ..small()
                }
                .prepares(json!({}))
                .module()
            },
            (Unprepare, "claim-skipped", "u-1"),
        ),
        case(
            "path-not-utf-8",
            "asks the host for a path that is no text",
            || {
                let guest = small().relays("sysfs", "read", "aa");
                let extra = guest.extra.clone() + "(data (i32.const 49152) \"\\ff\\fe\")";
                Guest { extra, ..guest }.module()
            },
            (Discover, "driver-trapped", "utf-8"),
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
            (Prepare, "driver-answer-not-valid", "recursion limit"),
        ),
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
    ]
}

fn resources() -> Vec<Case> {
    vec![case(
        "recursion-into-the-host",
        "calls the host from the last of its stack",
        || {
            let body = "(func $r (param i32) (call $r (i32.const 0)) (call $relay (i32.const 49152) (i32.const 1) (i32.const 8192)))";
            let deep = small().relays("sysfs", "read", "a");
            Guest {
                extra: deep.extra.clone() + body,
                discover: "(call $r (i32.const 0)) i32.const 8192".into(),
                ..deep
            }
            .module()
        },
        (Discover, "driver-trapped", "call stack exhausted"),
    )]
}

fn host_calls() -> Vec<Case> {
    /// Glob and path that match in more ways than there are atoms, if each is tried.
    fn many_ways() -> Vec<u8> {
        let wide = "**/a/".repeat(80) + "b";
        let guest = small().relays("sysfs", "glob", &("a/".repeat(200) + "*"));
        guest.asks(json!({"sysfs-read": [wide]})).module()
    }
    fn endless(guest: Guest, call: &str) -> Vec<u8> {
        let discover =
            format!("(loop $l (global.set $top (i32.const 16384)) {call} (br $l)) unreachable");
        Guest { discover, ..guest }.module()
    }
    vec![
case(
            "path-too-long",
            "reads a path that is longer than any",
            || asks_host(small().relays("sysfs", "read", &("a/".repeat(3000) + "a"))).module(),
            (Discover, "bad-path", "no plain path"),
        ),
case(
            "path-not-asked-for",
            "reads what is granted, and what it never asked for",
            || {
                small()
                    .relays("sysfs", "read", "devices/card0/vendor")
                    .asks(json!({"sysfs-read": ["class/**"]}))
                    .module()
            },
            (Discover, "not-granted", "sysfsRead"),
        ),
case(
            "glob-in-many-ways",
            "a glob that is held against its grant in more ways than there are atoms",
            many_ways,
            (Discover, "not-granted", "sysfsRead"),
        )
        .granted(format!("sysfsRead: [\"{}b\"]", "**/a/".repeat(80)).leak()),
case(
            "write-while-looking",
            "writes while it is asked what there is",
            || {
                let call = "(call $relay (i32.const 49152) (i32.const 20) (i32.const 49172) (i32.const 1) (i32.const 8192))";
                asks_host(small().relays_by(
                    "sysfs-write",
                    "write",
                    "devices/card0/numvfs4",
                    "i32 i32 i32 i32 i32",
                    call,
                )).module()
            },
            (Discover, "not-now", "during prepare"),
        ),
case(
            "write-5000-digits",
            "a value that is longer than a page",
            || changes("sysfs-write", "write", "devices/card0/numvfs", &"1".repeat(5000)).module(),
            (Prepare, "value-too-large", "4096"),
        ),
case(
            "calls-100000",
            "asks the host a hundred thousand times, until it is refused",
            || {
                let guest = small().relays("sysfs", "read", "none");
                let again = "(i32.ne (i32.load8_u (i32.load (i32.const 8200))) (i32.const 104))";
                let body = guest.discover.replace(" i32.const 8192", "");
                let discover = format!("(loop $l (global.set $top (i32.const 16384)) {body} (br_if $l {again})) i32.const 8192");
                asks_host(Guest { discover, ..guest }).module()
            },
            (Discover, "host-call-limit", "100000 times"),
        )
        .granted(format!("{HOST_GRANT}\nlimits: {{cpuMs: 20000, wallMs: 40000}}").leak()),
case(
            "log-flood",
            "writes lines with escapes to the log without end",
            || {
                let guest = small().relays_by("log", "write", "\u{1b}[2J\nlevel=error", "i32 i32 i32 i32 i32", "");
                endless(guest, "(call $relay (i32.const 4) (i32.const 49152) (i32.const 16) (i32.const 0) (i32.const 0))")
            },
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted("limits: {cpuMs: 30}"),
case(
            "log-of-a-level",
            "writes to the log at a level that is none",
            || {
                let call = "(call $relay (i32.const 99) (i32.const 49152) (i32.const 1) (i32.const 0) (i32.const 0))";
                small().relays_by("log", "write", "a", "i32 i32 i32 i32 i32", call).module()
            },
            (Discover, "driver-trapped", "discriminant"),
        ),
case(
            "log-of-a-megabyte",
            "writes a line with a hundred thousand fields",
            || {
                let call = "(call $relay (i32.const 2) (i32.const 49152) (i32.const 1) (i32.const 65536) (i32.const 2000000))";
                let guest = small().relays_by("log", "write", "a", "i32 i32 i32 i32 i32", call);
                Guest { pages: 600, ..guest }.module()
            },
            (Discover, "driver-answer-too-large", "bytes at once"),
        ),
    ]
}

fn schemas() -> Vec<Case> {
    vec![
        case(
            "schema-doubles",
            "a schema of which each part is two of the next, forty times",
            || {
                let part = |n: u32| json!({"allOf": [{"$ref": format!("#/$defs/d{}", n + 1)}, {"$ref": format!("#/$defs/d{}", n + 1)}]});
                let mut parts: Map<String, Value> =
                    (0..40).map(|n| (format!("d{n}"), part(n))).collect();
                parts.insert("d40".into(), json!({"type": "object"}));
                demands(&json!({"$ref": "#/$defs/d0", "$defs": parts}))
            },
            (Config, "schema-invalid", "is too large"),
        ),
        case(
            "schema-of-many-patterns",
            "ten thousand patterns that take a megabyte each",
            || {
                let patterns: Map<String, Value> = (0..5000)
                    .map(|n| (format!("\\w{{90}}{n}"), json!(true)))
                    .collect();
                demands(&json!({"patternProperties": patterns}))
            },
            (Config, "schema-invalid", "is too large"),
        ),
        case(
            "schema-unevaluated",
            "a schema that looks at its parts twice, at each of fifty depths",
            || {
                let deep = (0..40).fold(
                    json!({}),
                    |inner, _| json!({"allOf": [inner], "unevaluatedProperties": false}),
                );
                demands(&deep)
            },
            (Config, "schema-invalid", "is too large"),
        ),
        case(
            "schema-of-300-kb",
            "a schema of 300 kB",
            || demands(&json!({"description": "x".repeat(300_000)})),
            (Config, "schema-invalid", "at most 262144"),
        ),
        case(
            "schema-deep",
            "a schema of a thousand depths",
            || {
                small()
                    .demands(json!("{\"not\":".repeat(1000) + &"}".repeat(1000)))
                    .module()
            },
            (Config, "schema-invalid", "recursion limit"),
        ),
        case(
            "schema-of-no-type",
            "a schema that is none",
            || demands(&json!({"type": "x\n".repeat(2000)})),
            (Config, "schema-invalid", ""),
        ),
    ]
}
