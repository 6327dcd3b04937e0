//! Time, memory and handles without end.

use super::Stop::{Compile, Describe, Discover, Harmless, Prepare, Unprepare};
use super::{Case, Guest, case, small};

const SPIN: &str = "(loop $l (br $l)) unreachable";
const SHORT: &str = "limits: {cpuMs: 30}";
const BRIEF: &str = "limits: {wallMs: 100}";

/// What a driver may have of WASI, as far as these drivers use it.
const WASI: &str = "
    package nodedock:hostile;
    world hostile {
        include nodedock:driver/driver@0.1.0;
        import wasi:clocks/monotonic-clock@0.2.0;
        import wasi:random/random@0.2.0;
        import wasi:cli/exit@0.2.0;
        import wasi:cli/stdout@0.2.0;
        import wasi:filesystem/preopens@0.2.0;
    }
    package wasi:io@0.2.0 {
        interface poll { resource pollable { block: func(); } }
        interface error { resource error; }
        interface streams {
            use error.{error};
            variant stream-error { last-operation-failed(error), closed }
            resource output-stream {
                blocking-write-and-flush: func(contents: list<u8>) -> result<_, stream-error>;
                write: func(contents: list<u8>) -> result<_, stream-error>;
            }
        }
    }
    package wasi:clocks@0.2.0 {
        interface monotonic-clock {
            use wasi:io/poll@0.2.0.{pollable};
            now: func() -> u64;
            subscribe-duration: func(when: u64) -> pollable;
        }
    }
    package wasi:random@0.2.0 { interface random { get-random-bytes: func(len: u64) -> list<u8>; } }
    package wasi:filesystem@0.2.0 {
        interface types { resource descriptor; }
        interface preopens {
            use types.{descriptor};
            get-directories: func() -> list<tuple<descriptor, string>>;
        }
    }
    package wasi:cli@0.2.0 {
        interface exit { exit: func(status: result); }
        interface stdout {
            use wasi:io/streams@0.2.0.{output-stream};
            get-stdout: func() -> output-stream;
        }
    }";

const IMPORTS: &str = r#"
    (import "wasi:clocks/monotonic-clock@0.2.0" "now" (func $now (result i64)))
    (import "wasi:clocks/monotonic-clock@0.2.0" "subscribe-duration" (func $timer (param i64) (result i32)))
    (import "wasi:io/poll@0.2.0" "[method]pollable.block" (func $block (param i32)))
    (import "wasi:random/random@0.2.0" "get-random-bytes" (func $random (param i64 i32)))
    (import "wasi:cli/exit@0.2.0" "exit" (func $exit (param i32)))
    (import "wasi:cli/stdout@0.2.0" "get-stdout" (func $stdout (result i32)))
    (import "wasi:io/streams@0.2.0" "[method]output-stream.blocking-write-and-flush"
        (func $write (param i32 i32 i32 i32)))
    (import "wasi:io/streams@0.2.0" "[method]output-stream.write" (func $write_now (param i32 i32 i32 i32)))
    (import "wasi:filesystem/preopens@0.2.0" "get-directories" (func $folders (param i32)))"#;

/// A driver that does this with WASI when it is asked for devices.
fn wasi(discover: &str) -> Vec<u8> {
    Guest { wit: Some(WASI), imports: IMPORTS.into(), discover: discover.into(), ..small() }.module()
}

fn discover(body: &str) -> Vec<u8> {
    Guest { discover: body.into(), ..small() }.module()
}

fn extra(text: &str) -> Vec<u8> {
    Guest { extra: text.into(), ..small() }.module()
}

pub(super) fn cases() -> Vec<Case> {
    [loops(), stacks(), memory(), tables(), wasi_cases()].into_iter().flatten().collect()
}

fn loops() -> Vec<Case> {
    const POST: &str = r#"(func (export "cabi_post_nodedock:driver/discovery@0.1.0#discover") (param i32)
        (loop $l (br $l)))"#;
    vec![
        case(
            "loop-in-describe",
            "never ends when it is asked who it is",
            || Guest { describe: SPIN.into(), ..small() }.module(),
            (Describe, "describe-failed", "of CPU"),
        )
        .granted(SHORT),
        case(
            "loop-in-start",
            "never ends while it is instantiated",
            || extra(&format!("(func $s {SPIN}) (start $s)")),
            (Describe, "describe-failed", "of CPU"),
        )
        .granted(SHORT),
        case(
            "loop-in-discover",
            "never ends when it is asked for devices",
            || discover(SPIN),
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "loop-in-prepare",
            "never ends with a claim",
            || Guest { prepare: SPIN.into(), ..small() }.module(),
            (Prepare, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "loop-in-unprepare",
            "never gives a claim back",
            || Guest { unprepare: SPIN.into(), ..small() }.module(),
            (Unprepare, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "loop-in-realloc",
            "never ends while the host hands it its arguments",
            || Guest { realloc: SPIN.into(), ..small() }.module(),
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "loop-in-post-return",
            "never ends when it may free its answer",
            || extra(POST),
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
    ]
}

fn stacks() -> Vec<Case> {
    vec![
        case(
            "recursion",
            "calls itself for ever",
            || {
                Guest {
                    extra: "(func $r (call $r))".into(),
                    discover: "(call $r) i32.const 8192".into(),
                    ..small()
                }
                .module()
            },
            (Discover, "driver-trapped", "call stack exhausted"),
        ),
        case(
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
        ),
    ]
}

fn memory() -> Vec<Case> {
    vec![
        case(
            "memory-step-by-step",
            "takes memory in small steps until there is none",
            || discover("(loop $l (drop (memory.grow (i32.const 16))) (br $l)) unreachable"),
            (Discover, "driver-memory-limit", "8 MiB"),
        )
        .granted("limits: {memoryMiB: 8}"),
        case(
            "memory-at-once",
            "asks for 4 GiB",
            || discover("(drop (memory.grow (i32.const 65535))) i32.const 8192"),
            (Discover, "driver-memory-limit", "64 MiB"),
        ),
        case(
            "memory-declared",
            "begins with 125 MiB",
            || Guest { pages: 2000, ..small() }.module(),
            (Describe, "describe-failed", "64 MiB"),
        ),
        case(
            "memory-declared-whole",
            "begins with 4 GiB",
            || Guest { pages: 65536, ..small() }.module(),
            (Compile, "compile-failed", "memory"),
        ),
        case(
            "memories-several",
            "shares 80 MiB among two memories",
            || extra("(memory $a 640) (memory $b 640)"),
            (Describe, "describe-failed", "more than 64 MiB of memory"),
        ),
        case(
            "memories-many",
            "has 40 memories",
            || extra(&"(memory 1)".repeat(40)),
            (Compile, "compile-failed", "memories"),
        ),
    ]
}

fn tables() -> Vec<Case> {
    vec![
        case(
            "table-grows",
            "fills the host with entries of a table",
            || {
                Guest {
                extra: "(table $t 1 funcref)".into(),
                discover: "(loop $l (drop (table.grow $t (ref.null func) (i32.const 50000))) (br $l)) unreachable".into(),
                ..small()
            }
            .module()
            },
            (Discover, "driver-table-elements-limit", "100000 entries"),
        ),
        case(
            "table-declared",
            "begins with ten million entries",
            || extra("(table 10000000 funcref)"),
            (Compile, "compile-failed", "table"),
        ),
        case(
            "tables-many",
            "has 90 tables",
            || extra(&"(table 1 funcref)".repeat(90)),
            (Compile, "compile-failed", "table"),
        ),
    ]
}

fn wasi_cases() -> Vec<Case> {
    const HOUR: &str = "3600000000000";
    vec![
        case(
            "sleep-by-clock",
            "sleeps for an hour on a timer",
            || wasi(&format!("(call $block (call $timer (i64.const {HOUR}))) i32.const 8192")),
            (Discover, "driver-deadline", "within 50ms"),
        )
        .granted(BRIEF),
        case(
            "sleep-by-looking",
            "looks at the clock again and again",
            || wasi("(loop $l (drop (call $now)) (br $l)) unreachable"),
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "sleep-in-steps",
            "sleeps a little, again and again",
            || wasi("(loop $l (call $block (call $timer (i64.const 1000000))) (br $l)) unreachable"),
            (Discover, "driver-handles-limit", "256 handles"),
        ),
        case(
            "handles",
            "opens handles and closes none",
            || wasi("(loop $l (drop (call $timer (i64.const 1))) (br $l)) unreachable"),
            (Discover, "driver-handles-limit", "256 handles"),
        ),
        case(
            "random-at-once",
            "asks for 2^40 random bytes",
            || wasi("(call $random (i64.const 1099511627776) (i32.const 8192)) i32.const 8192"),
            (Discover, "driver-trapped", ""),
        ),
        case(
            "random-flood",
            "asks for random bytes without end",
            || wasi("(loop $l (global.set $top (i32.const 16384)) (call $random (i64.const 16384) (i32.const 8192)) (br $l)) unreachable"),
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "output-flood",
            "writes to standard output without end",
            || wasi("(local $o i32) (local.set $o (call $stdout)) (loop $l (call $write (local.get $o) (i32.const 1024) (i32.const 4096) (i32.const 8192)) (br $l)) unreachable"),
            (Discover, "driver-cpu-limit", "of CPU"),
        )
        .granted(SHORT),
        case(
            "output-at-once",
            "writes more lines at once than it was told it may",
            || wasi("(call $write_now (call $stdout) (i32.const 1024) (i32.const 5000) (i32.const 8192)) i32.const 8192"),
            (Discover, "driver-trapped", "check-write"),
        ),
        case(
            "exit",
            "ends the process, with success",
            || wasi("(call $exit (i32.const 0)) i32.const 8192"),
            (Discover, "driver-exited", "exit(0)"),
        ),
        case(
            "folders",
            "looks for folders that are open for it",
            || wasi("(call $folders (i32.const 8200)) (if (i32.load (i32.const 8204)) (then unreachable)) (i32.store (i32.const 8200) (i32.const 0)) i32.const 8192"),
            (Harmless, "", ""),
        ),
    ]
}
