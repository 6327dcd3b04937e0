//! The cases of `cases.txt`, and the functions that make their drivers.

use serde_json::{Value, json};

use super::{Case, Guest, PREPARE_ONE, small};

/// The grant of a careless operator, for drivers that request all of it.
const EDITS_GRANT: &str = "deviceNodes: [\"/dev/**\", /dev/pipe]\nmounts: [\"/**:rw\", /usr/share, /etc/ssh]\nenv: [A, \"ACME_*\", \"LD_*\", \"DOTNET_*\"]\nnetDevices: [\"*\"]\nhooks: [/bin/true, /opt/hooks/open, /opt/vendor/hook]\n\
     groups: [44]\nrdtClasses: [acme]\nannotations: [\"acme.com/*\", \"devices.nri.io/*\"]";
pub(in crate::tests) const HOST_GRANT: &str = "sysfsRead: [\"**\"]\nsysfsWrite: [{glob: \"**/numvfs\", pattern: \"[0-9]+\"}, {glob: \"**/remove\", pattern: \"[0-9]+\"}, {glob: \"**/up\", pattern: \"[0-9]+\"}, {glob: \"**/outside\", pattern: \"[0-9]+\"}, {glob: \"**/path\", pattern: \"[0-9]+\"}, {glob: \"**/hot_remove\", pattern: \"[0-9]+\"}, {glob: \"**/drivers_autoprobe\", pattern: \"[0-9]+\"}, {glob: \"**/online\", pattern: \"[0-9]+\"}, {glob: \"**/uevent\", pattern: \"[0-9]+\"}, {glob: \"**/flags\", pattern: \"[0-9]+\"}, {glob: \"**/loglevel\", pattern: \"[0-9]+\"}]\n\
    deviceNodes: [\"/dev/**\"]\n\
    hostFiles: [\"/**\"]\npciDriver: [{functions: \"*\", drivers: \"vfio-pci\"}]\nnetDevices: [\"*\"]";

/// Files by their names, as a request and a grant have to name what is written.
const WRITES: &[&str] = &[
    "numvfs",
    "remove",
    "up",
    "outside",
    "path",
    "hot_remove",
    "drivers_autoprobe",
    "online",
    "uevent",
    "flags",
    "loglevel",
];

pub(super) fn cases() -> Vec<Case> {
    let lines = include_str!("cases.txt")
        .lines()
        .filter(|line| !line.starts_with('#'));
    lines.map(parse).collect()
}

fn parse(line: &'static str) -> Case {
    let text = |field: &'static str| if field == "-" { "" } else { field };
    let fields: Vec<&str> = line.split(" | ").collect();
    let [name, attack, function, input, grant, stop, code, says] = fields[..] else {
        panic!("{line}")
    };
    let grant = match (grant, function.split(' ').next().unwrap()) {
        ("-", "edits" | "claim" | "node" | "mount" | "env" | "hook") => EDITS_GRANT,
        (
            "-",
            "sysfs" | "dev" | "files" | "interfaces" | "restores" | "writes" | "binds" | "saves",
        ) => HOST_GRANT,
        (grant, _) => text(grant),
    };
    let input: Value = serde_json::from_str(input).expect(line);
    let stop = serde_json::from_value(stop.into()).expect(line);
    let file = Box::new(move || make(function, &input));
    Case {
        name,
        attack,
        grant,
        file,
        stop,
        code: text(code),
        says: text(says),
    }
}

fn make(function: &str, input: &Value) -> Vec<u8> {
    let (value, text) = (|| input.clone(), || input.as_str().unwrap());
    let part = |index: usize| input[index].as_str().unwrap();
    let guest = match function {
        "guest" => guest(input),
        "discover" => Guest {
            discover: text().into(),
            ..small()
        },
        "bytes" => return text().as_bytes().to_vec(),
        "wat" => return wat::parse_str(text()).unwrap(),
        "extra" => Guest {
            extra: text().into(),
            ..small()
        },
        "times" => {
            let times = usize::try_from(input[1].as_u64().unwrap()).unwrap();
            Guest {
                extra: part(0).repeat(times),
                ..small()
            }
        }
        "large has" => Guest {
            pages: 1000,
            ..small().has(value())
        },
        "large prepares" => Guest {
            pages: 1000,
            ..small().prepares(value())
        },
        "realloc" => Guest {
            realloc: text().into(),
            ..small()
        },
        "wasi" => Guest {
            wit: Some(WASI),
            imports: WASI_IMPORTS.into(),
            discover: text().into(),
            ..small()
        },
        "describes" => small().describes(value()),
        "asks" => small().asks(value()),
        "has" | "pools" => small().has(value()),
        "device" => device(value()),
        "capacity" => {
            device(json!({"name": "d", "capacities": [{"name": "memory", "value": input}]}))
        }
        "discovers" => small().discovers(value()),
        "answers" => small().answers(value()),
        "prepares" => small().prepares(value()),
        "ails" => small().ails(value()),
        "leaves-out" => small().leaves_out(value()),
        "demands" => small().demands(json!(input.to_string())),
        "demands-text" => small().demands(value()),
        "claim" => claim(value()),
        "edits" => claim(json!({"edits": input})),
        "node" => claim(json!({"edits": {"device-nodes": [input]}})),
        "env" => claim(json!({"edits": {"env": [input]}})),
        "hook" => claim(json!({"edits": {"hooks": [input]}})),
        "mount" => {
            let mount =
                json!({"host-path": part(0), "container-path": part(1), "options": input[2]});
            claim(json!({"edits": {"mounts": [mount]}}))
        }
        "writes" => changes("sysfs-write", "write", part(0), part(1)),
        "binds" => changes("pci-driver", "bind", part(0), part(1)),
        "saves" => changes("progress", "save", part(0), part(1)),
        "restores" => asks_host(small().relays("pci-driver", "restore", text())),
        "import" => {
            return wat::parse_str(format!("(component (import \"{}\" (instance)))", text()))
                .unwrap();
        }
        other => match other.split_once(' ') {
            Some(("sysfs", function)) => asks_host(small().relays("sysfs", function, text())),
            Some(("dev", function)) => asks_host(small().relays("device-nodes", function, text())),
            Some(("files", function)) => asks_host(small().relays("host-files", function, text())),
            Some(("interfaces", function)) => {
                asks_host(small().relays("net-interfaces", function, text()))
            }
            _ => panic!("no function {other}"),
        },
    };
    guest.module()
}

fn guest(fields: &Value) -> Guest {
    let mut guest = small();
    for (name, value) in fields.as_object().unwrap() {
        let text = value.as_str().unwrap_or_default();
        match name.as_str() {
            "describe" => guest.describe = text.into(),
            "discover" => guest.discover = text.into(),
            "prepare" => guest.prepare = text.into(),
            "unprepare" => guest.unprepare = text.into(),
            "realloc" => guest.realloc = text.into(),
            "imports" => guest.imports = text.into(),
            "extra" => guest.extra = text.into(),
            "version" => guest.version = text.to_owned().leak(),
            "world" => guest.world = text.to_owned().leak(),
            "pages" => guest.pages = value.as_u64().unwrap().try_into().unwrap(),
            other => panic!("no field {other}"),
        }
    }
    guest
}

fn device(device: Value) -> Guest {
    small().has(json!([{"name": "p", "devices": [device]}]))
}

fn claim(claim: Value) -> Guest {
    let asked = json!({
        "device-nodes": ["/dev/**"], "mounts": ["/**"], "env": ["A", "ACME_*", "LD_*", "DOTNET_*"], "net-devices": ["*"],
        "hooks": ["/bin/true", "/opt/hooks/open", "/opt/vendor/hook"],
    });
    small().asks(asked).prepares(claim)
}

/// Requests all that `HOST_GRANT` grants.
pub(in crate::tests) fn asks_host(guest: Guest) -> Guest {
    let write: Vec<_> = WRITES
        .iter()
        .map(|name| json!({"glob": format!("**/{name}"), "pattern": "[0-9]+"}))
        .collect();
    let bind = json!([{"functions": "*", "drivers": "vfio-pci"}]);
    guest.asks(json!({
        "sysfs-read": ["**"], "sysfs-write": write, "device-nodes": ["/dev/**"], "host-files": ["/**"],
        "pci-driver": bind, "net-devices": ["*"],
    }))
}

/// Calls a function of the host with two texts in `prepare`, such as a write of a value to a path, and answers with the host's answer.
pub(super) fn changes(interface: &str, function: &str, path: &str, value: &str) -> Guest {
    let guest = small().relays_by(
        interface,
        function,
        &format!("{path}{value}"),
        "i32 i32 i32 i32 i32",
        "",
    );
    let (split, length) = (path.len(), value.len());
    let call = format!(
        "(call $relay (i32.const 49152) (i32.const {split}) (i32.const {}) (i32.const {length}) (i32.const 8456))",
        49152 + split
    );
    let prepare = format!("(drop (block (result i32) {PREPARE_ONE})) {call} i32.const 8192");
    asks_host(Guest {
        prepare,
        discover: "i32.const 8192".into(),
        ..guest
    })
}

/// Interfaces of WASI for a driver, as far as these drivers use them.
pub(in crate::tests) const WASI: &str = "
    package nodedock:hostile;
    world hostile {
        include nodedock:driver/driver@0.2.0;
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

pub(in crate::tests) const WASI_IMPORTS: &str = r#"
    (import "wasi:clocks/monotonic-clock@0.2.0" "now" (func $now (result i64)))
    (import "wasi:clocks/monotonic-clock@0.2.0" "subscribe-duration" (func $timer (param i64) (result i32)))
    (import "wasi:io/poll@0.2.0" "[method]pollable.block" (func $block (param i32)))
    (import "wasi:random/random@0.2.0" "get-random-bytes" (func $random (param i64 i32)))
    (import "wasi:cli/exit@0.2.0" "exit" (func $exit (param i32)))
    (import "wasi:cli/stdout@0.2.0" "get-stdout" (func $stdout (result i32)))
    (import "wasi:io/streams@0.2.0" "[method]output-stream.blocking-write-and-flush"
        (func $write (param i32 i32 i32 i32)))
    (import "wasi:io/streams@0.2.0" "[method]output-stream.write" (func $write_now (param i32 i32 i32 i32)))
    (import "wasi:filesystem/preopens@0.2.0" "get-directories" (func $directories (param i32)))"#;
