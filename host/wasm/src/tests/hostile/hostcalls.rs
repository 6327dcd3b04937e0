//! What a driver asks of the host, and must not get.

use serde_json::json;

use super::Stop::{Discover, Prepare};
use super::{Case, Guest, PREPARE_ONE, case, small};

/// What an operator of little care grants.
const ALL: &str =
    "sysfsRead: [\"**\"]\nsysfsWrite: [{glob: \"**\", pattern: \"[0-9]+\"}]\ndeviceNodes: [\"/dev/**\"]";
const NUMBERS: &str = "[0-9]+";

fn asked(guest: Guest) -> Vec<u8> {
    let write = json!([{"glob": "**", "pattern": NUMBERS}]);
    guest.asks(json!({"sysfs-read": ["**"], "sysfs-write": write, "device-nodes": ["/dev/**"]})).module()
}

fn sysfs(function: &str, path: &str) -> Vec<u8> {
    asked(small().relays("sysfs", function, path))
}

fn dev(function: &str, path: &str) -> Vec<u8> {
    asked(small().relays("device-nodes", function, path))
}

/// Writes a value in `prepare`, and answers with what the host says.
fn writes(path: &str, value: &str) -> Vec<u8> {
    let guest =
        small().relays_by("sysfs-write", "write", &format!("{path}{value}"), "i32 i32 i32 i32 i32", "");
    let (split, length) = (path.len(), value.len());
    let call = format!(
        "(call $relay (i32.const 49152) (i32.const {split}) (i32.const {}) (i32.const {length}) (i32.const 8456))",
        49152 + split
    );
    let prepare = format!("(drop (block (result i32) {PREPARE_ONE})) {call} i32.const 8192");
    asked(Guest { prepare, discover: "i32.const 8192".into(), ..guest })
}

pub(super) fn cases() -> Vec<Case> {
    let all = [paths(), links(), kinds(), globs(), written(), nodes(), floods()].into_iter().flatten();
    all.map(|case| if case.grant.is_empty() { case.granted(ALL) } else { case }).collect()
}

fn paths() -> Vec<Case> {
    const BAD: &str = "bad-path";
    vec![
        case(
            "path-up",
            "reads above /sys",
            || sysfs("read", "class/../../outside"),
            (Discover, BAD, "class/../../outside"),
        ),
        case(
            "path-absolute",
            "reads a file of the node",
            || sysfs("read", "/etc/shadow"),
            (Discover, BAD, "/etc/shadow"),
        ),
        case(
            "path-with-nul",
            "reads a path that ends early",
            || sysfs("read", "devices\0/vendor"),
            (Discover, BAD, "devices\\0"),
        ),
        case(
            "path-with-a-line",
            "reads a path of two lines",
            || sysfs("read", "devices\n/vendor"),
            (Discover, BAD, "devices\\n"),
        ),
        case("path-empty", "reads nothing", || sysfs("read", ""), (Discover, BAD, "\"\"")),
        case(
            "path-with-holes",
            "reads a path with empty parts",
            || sysfs("read", "devices//card0"),
            (Discover, BAD, "devices//card0"),
        ),
        case(
            "path-too-long",
            "reads a path that is longer than any",
            || sysfs("read", &("a/".repeat(3000) + "a")),
            (Discover, BAD, "no plain path"),
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
    ]
}

fn links() -> Vec<Case> {
    const OUTSIDE: &str = "outside-sysfs";
    vec![
        case(
            "link-up",
            "follows a link that leads out of /sys",
            || sysfs("read", "up"),
            (Discover, OUTSIDE, "leads out"),
        ),
        case(
            "link-to-the-root",
            "follows a link to the node's root",
            || sysfs("read", "root/etc/passwd"),
            (Discover, OUTSIDE, "leads out"),
        ),
        case(
            "link-to-descriptors",
            "follows a link to the host's own open files",
            || sysfs("read", "descriptors/0"),
            (Discover, OUTSIDE, "leads out"),
        ),
        case(
            "link-to-itself",
            "follows a link that leads to itself",
            || sysfs("read", "loop"),
            (Discover, OUTSIDE, "leads out"),
        ),
        case(
            "link-asked-for",
            "asks where a link leads that leads out",
            || sysfs("read-link", "up"),
            (Discover, OUTSIDE, "leads out"),
        ),
    ]
}

fn kinds() -> Vec<Case> {
    vec![
        case(
            "read-pipe",
            "reads a pipe that nobody writes to",
            || sysfs("read", "fifo"),
            (Discover, "not-a-file", "no regular file"),
        ),
        case(
            "read-endless",
            "reads a file of a terabyte",
            || sysfs("read", "devices/card0/endless"),
            (Discover, "file-too-large", "65536"),
        ),
        case(
            "read-binary",
            "reads bytes as text",
            || sysfs("read", "devices/card0/binary"),
            (Discover, "not-text", "not UTF-8"),
        ),
        case(
            "read-config",
            "reads a device's configuration space",
            || sysfs("read", "devices/card0/config"),
            (Discover, "never-allowed", "no driver may"),
        ),
        case(
            "read-remove",
            "touches what removes a device",
            || sysfs("read", "devices/card0/remove"),
            (Discover, "never-allowed", "no driver may"),
        ),
        case(
            "read-dir-of-file",
            "lists a file",
            || sysfs("read-dir", "devices/card0/vendor"),
            (Discover, "not-a-folder", "is no folder"),
        ),
    ]
}

fn globs() -> Vec<Case> {
    /// Glob and path that fit in more ways than there are atoms, if each is tried.
    fn many_ways() -> Vec<u8> {
        let wide = "**/a/".repeat(80) + "b";
        let guest = small().relays("sysfs", "glob", &("a/".repeat(200) + "*"));
        guest.asks(json!({"sysfs-read": [wide]})).module()
    }
    vec![
        case(
            "glob-of-all",
            "asks for all paths that there are, in each way",
            || sysfs("glob", "**/**/**/**/**/**/**/**/**/**"),
            (Discover, "glob-too-wide", "more than"),
        ),
        case(
            "glob-up",
            "a glob that leads above /sys",
            || sysfs("glob", "../*"),
            (Discover, "bad-path", "no plain path"),
        ),
        case(
            "glob-broken",
            "a glob that is none",
            || sysfs("glob", "devices/["),
            (Discover, "bad-glob", "is not a glob"),
        ),
        case(
            "glob-in-many-ways",
            "a glob that is held against its grant in more ways than there are atoms",
            many_ways,
            (Discover, "not-granted", "sysfsRead"),
        )
        .granted(MANY_WAYS),
    ]
}

/// `**/a/` eighty times, and `b`.
const MANY_WAYS: &str = concat!(
    "sysfsRead: [\"",
    "**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/",
    "**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/",
    "**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/",
    "**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/**/a/",
    "b\"]"
);

fn written() -> Vec<Case> {
    vec![
        case(
            "write-while-looking",
            "writes while it is asked what there is",
            || {
                let call = "(call $relay (i32.const 49152) (i32.const 20) (i32.const 49172) (i32.const 1) (i32.const 8192))";
                asked(small().relays_by(
                    "sysfs-write",
                    "write",
                    "devices/card0/numvfs4",
                    "i32 i32 i32 i32 i32",
                    call,
                ))
            },
            (Discover, "not-now", "during prepare"),
        ),
        case(
            "write-two-values",
            "a value that is granted, and another on a second line",
            || writes("devices/card0/numvfs", "4\n0000:00:01.0"),
            (Prepare, "not-granted", "sysfsWrite"),
        ),
        case(
            "write-a-line-more",
            "a value that is granted, and the end of a line",
            || writes("devices/card0/numvfs", "4\n"),
            (Prepare, "not-granted", "sysfsWrite"),
        ),
        case(
            "write-remove",
            "removes a device where all is granted",
            || writes("devices/card0/remove", "1"),
            (Prepare, "never-allowed", "no driver may"),
        ),
        case(
            "write-through-a-link",
            "writes to a file of the node",
            || writes("up", "1"),
            (Prepare, "outside-sysfs", "leads out"),
        ),
        case(
            "write-up",
            "writes above /sys",
            || writes("../outside", "1"),
            (Prepare, "bad-path", "no plain path"),
        ),
        case(
            "write-5000-digits",
            "a value that is longer than a page",
            || writes("devices/card0/numvfs", &"1".repeat(5000)),
            (Prepare, "value-too-large", "4096"),
        ),
    ]
}

fn nodes() -> Vec<Case> {
    vec![
        case(
            "stat-up",
            "looks at a file of the node",
            || dev("stat", "/dev/../etc/shadow"),
            (Discover, "bad-path", "no plain path below /dev"),
        ),
        case(
            "stat-elsewhere",
            "looks at the host's own open files",
            || dev("stat", "/proc/self/fd/0"),
            (Discover, "bad-path", "no plain path below /dev"),
        ),
        case(
            "stat-descriptors",
            "looks at the host's own open files through /dev",
            || dev("stat", "/dev/fd/0"),
            (Discover, "not-a-node", "behind a link"),
        ),
        case("stat-link", "looks at a link", || dev("stat", "/dev/link"), (Discover, "not-a-node", "")),
        case(
            "stat-mem",
            "looks at the machine's memory",
            || dev("stat", "/dev/mem"),
            (Discover, "never-allowed", "no driver may"),
        ),
        case(
            "stat-with-a-line",
            "looks at a path of two lines",
            || dev("stat", "/dev/a\n/dev/b"),
            (Discover, "bad-path", "/dev/a\\n"),
        ),
    ]
}

fn floods() -> Vec<Case> {
    fn endless(guest: Guest, call: &str) -> Vec<u8> {
        let discover = format!("(loop $l (global.set $top (i32.const 16384)) {call} (br $l)) unreachable");
        Guest { discover, ..guest }.module()
    }
    vec![
        case(
            "calls-100000",
            "asks the host a hundred thousand times, until it is told to stop",
            || {
                let guest = small().relays("sysfs", "read", "none");
                let again = "(i32.ne (i32.load8_u (i32.load (i32.const 8200))) (i32.const 104))";
                let body = guest.discover.replace(" i32.const 8192", "");
                let discover = format!("(loop $l (global.set $top (i32.const 16384)) {body} (br_if $l {again})) i32.const 8192");
                asked(Guest { discover, ..guest })
            },
            (Discover, "host-call-limit", "100000 times"),
        )
        .granted(PATIENT),
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

const PATIENT: &str = "sysfsRead: [\"**\"]\nsysfsWrite: [{glob: \"**\", pattern: \"[0-9]+\"}]\ndeviceNodes: [\"/dev/**\"]\nlimits: {cpuMs: 20000, wallMs: 40000}";
