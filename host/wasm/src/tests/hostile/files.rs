//! Files that are no drivers, or would be too much for whoever reads them.

use super::Stop::{Admission, Compile, Harmless};
use super::{Case, Guest, case, small};

const INVALID: &str = "wasm-invalid";
const HEADER: &[u8] = b"\0asm\x01\0\0\0";
const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

fn extra(text: &str) -> Vec<u8> {
    Guest { extra: text.into(), ..small() }.module()
}

/// A component with the contract's names and nothing behind them.
fn hollow(more: &str) -> Vec<u8> {
    let exports = ["identity", "discovery", "preparation"]
        .map(|name| format!("(export \"nodedock:driver/{name}@0.1.0\" (instance $i))"));
    wat(&format!("(component (instance $i) {} {more})", exports.concat()))
}

fn import(name: &str) -> Vec<u8> {
    wat(&format!("(component (import \"{name}\" (instance)))"))
}

/// A section: its number, its length and its content.
fn section(id: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![id];
    leb(&mut bytes, content.len());
    bytes.extend(content);
    bytes
}

fn leb(bytes: &mut Vec<u8>, mut value: usize) {
    while value >= 0x80 {
        bytes.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    bytes.push(u8::try_from(value).unwrap());
}

fn custom(name: &str, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    leb(&mut bytes, name.len());
    bytes.extend(name.as_bytes());
    bytes.extend(content);
    section(0, &bytes)
}

pub(super) fn cases() -> Vec<Case> {
    [forms(), features(), floods(), contracts(), imports(), words()].into_iter().flatten().collect()
}

fn forms() -> Vec<Case> {
    vec![
        case("file-empty", "a file of nothing", Vec::new, (Admission, "file-empty", "empty")),
        case(
            "file-elf",
            "machine code for the node",
            || b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
            (Admission, "precompiled", "never taken"),
        ),
        case(
            "file-cwasm",
            "machine code as wasmtime keeps it, which would be run unchecked",
            || wasmtime::Engine::default().precompile_component(&small().component()).unwrap(),
            (Admission, "precompiled", "never taken"),
        ),
        case(
            "file-script",
            "a shell script",
            || b"#!/bin/sh\nreboot\n".to_vec(),
            (Admission, "not-wasm", "\"#!/bin/sh\\nreboot\""),
        ),
        case(
            "file-text",
            "WebAssembly as text",
            || b"(module)".to_vec(),
            (Admission, "wasm-text", "translate it"),
        ),
        case(
            "file-cut",
            "half of a driver",
            || {
                let mut bytes = small().module();
                bytes.truncate(bytes.len() / 2);
                bytes
            },
            (Admission, "wasm-truncated", "cut off"),
        ),
        case(
            "file-beyond",
            "a section that claims 4 GiB",
            || [HEADER, &[1, 0xff, 0xff, 0xff, 0xff, 0x0f]].concat(),
            (Admission, "wasm-truncated", "cut off"),
        ),
        case(
            "file-future",
            "a kind of WebAssembly that nobody knows",
            || b"\0asm\x63\0\0\0".to_vec(),
            (Admission, "not-wasm", "unknown kind"),
        ),
        case(
            "file-huge",
            "a file of 64 MiB and a byte",
            || vec![0; (64 << 20) + 1],
            (Admission, "file-too-large", "at most 67108864"),
        ),
    ]
}

fn features() -> Vec<Case> {
    vec![
        case(
            "feature-threads",
            "memory that several threads share",
            || extra("(memory 1 1 shared)"),
            (Admission, INVALID, "threads"),
        ),
        case(
            "feature-memory64",
            "memory of 64 bits",
            || extra("(memory i64 1)"),
            (Admission, INVALID, "memory64"),
        ),
        case(
            "feature-gc",
            "objects that a collector keeps",
            || extra("(type (struct (field i32)))"),
            (Admission, INVALID, "gc"),
        ),
        case("feature-exceptions", "exceptions", || extra("(tag)"), (Admission, INVALID, "exceptions")),
        case(
            "feature-relaxed-simd",
            "arithmetic that differs by machine",
            || extra("(func (param v128) (result v128) (i32x4.relaxed_trunc_f32x4_s (local.get 0)))"),
            (Admission, INVALID, "relaxed SIMD"),
        ),
        case(
            "feature-tail-calls",
            "tail calls, which are of the standard",
            || extra("(func $a (return_call $b)) (func $b)"),
            (Harmless, "", ""),
        ),
        case(
            "feature-simd",
            "vectors, which are of the standard",
            || extra("(func (param v128) (result v128) (i8x16.neg (local.get 0)))"),
            (Harmless, "", ""),
        ),
    ]
}

fn floods() -> Vec<Case> {
    vec![
        case(
            "nested-components",
            "a component in a component, two thousand deep",
            || {
                let mut bytes = COMPONENT.to_vec();
                for _ in 0..2000 {
                    bytes = [COMPONENT, &section(4, &bytes)].concat();
                }
                bytes
            },
            (Admission, "too-complex", "modules and components"),
        ),
        case(
            "nested-code",
            "a component with code in a component in a component",
            || wat("(component (component (component (core module (func)))))"),
            (Admission, "composed", "several components"),
        ),
        case(
            "nested-types",
            "a list of lists of lists, a hundred thousand deep",
            || {
                let lists: String =
                    (1..100_000).map(|n| format!("(type $t{n} (list $t{}))", n - 1)).collect();
                wat(&format!("(component (type $t0 (list u8)) {lists})"))
            },
            (Admission, INVALID, "type nesting is too deep"),
        ),
        case(
            "types-double",
            "types that double forty times",
            || {
                let pairs: String =
                    (1..40).map(|n| format!("(type $t{n} (tuple $t{m} $t{m}))", m = n - 1)).collect();
                wat(&format!("(component (type $t0 (tuple u8 u8)) {pairs})"))
            },
            (Admission, INVALID, "size"),
        ),
        case(
            "types-100000",
            "a hundred thousand types",
            || extra(&"(type (func))".repeat(100_000)),
            (Harmless, "", ""),
        ),
        case(
            "exports-100000",
            "a hundred thousand exports",
            || {
                let exports: String = (0..100_000).map(|n| format!("(export \"e{n}\" (type $t))")).collect();
                hollow(&format!("(type $t u8) {exports}"))
            },
            (Admission, "too-many-names", "100003"),
        ),
        case(
            "imports-100000",
            "a hundred thousand imports",
            || {
                let imports: String =
                    (0..100_000).map(|n| format!("(import \"env\" \"f{n}\" (func))")).collect();
                wat(&format!("(module {imports})"))
            },
            (Admission, "unknown-imports", "env"),
        ),
        case(
            "modules-1100",
            "eleven hundred modules",
            || wat(&format!("(component {})", "(core module)".repeat(1100))),
            (Admission, "too-complex", "1101 modules"),
        ),
        case(
            "instances-100",
            "a hundred instances of a module",
            || hollow(&format!("(core module $m) {}", "(core instance (instantiate $m))".repeat(100))),
            (Compile, "compile-failed", "instances"),
        ),
        case(
            "custom-section-60-mb",
            "sixty megabytes of nothing",
            || [small().module(), custom("nothing", &vec![0; 60 << 20])].concat(),
            (Harmless, "", ""),
        ),
        case(
            "locals-too-many",
            "a function of 50,001 locals",
            || extra(&format!("(func (local {}))", "i32 ".repeat(50_001))),
            (Admission, INVALID, "too many locals"),
        ),
        case(
            "branches-too-many",
            "a branch with a hundred thousand targets",
            || extra(&format!("(func (br_table {} (i32.const 0)))", "0 ".repeat(100_000))),
            (Compile, "compile-failed", "br_table"),
        ),
        case(
            "blocks-deep",
            "blocks in blocks, fifty thousand deep",
            || {
                let deep = 50_000;
                let body = [&[0][..], &[0x02, 0x40].repeat(deep), &[0x0b].repeat(deep + 1)].concat();
                let mut code = vec![1];
                leb(&mut code, body.len());
                code.extend(body);
                [HEADER, &section(1, b"\x01\x60\0\0"), &section(3, b"\x01\0"), &section(10, &code)].concat()
            },
            (Admission, "no-contract", "no WIT"),
        ),
    ]
}

fn contracts() -> Vec<Case> {
    const TYPES: &str = "contract-types";
    vec![
        case(
            "contract-0.2.0",
            "speaks another version of the contract",
            || Guest { version: "0.2.0", ..small() }.module(),
            (Admission, "contract-version", "nodedock:driver@0.2.0"),
        ),
        case(
            "contract-1.0.0",
            "speaks a version of the contract that is not yet",
            || Guest { version: "1.0.0", ..small() }.module(),
            (Admission, "contract-version", "nodedock:driver@1.0.0"),
        ),
        case("contract-none", "speaks no contract", || wat("(module)"), (Admission, "no-contract", "no WIT")),
        case(
            "contract-garbage",
            "a contract of random bytes",
            || [HEADER, &custom("component-type", b"\x2a\0\xff\xfegarbage")].concat(),
            (Admission, "not-a-driver", "cannot be made a component"),
        ),
        case(
            "contract-cut",
            "half of a contract",
            || {
                let whole = COMPONENT.to_vec();
                [HEADER, &custom("component-type", &[&whole[..], &[7, 0x20, 1]].concat())].concat()
            },
            (Admission, "not-a-driver", "cannot be made a component"),
        ),
        case(
            "contract-half-kept",
            "promises health and has none",
            || Guest { world: "observable-driver", ..small() }.module(),
            (Admission, "not-a-driver", "health"),
        ),
        case(
            "contract-hollow",
            "has the contract's names and nothing behind them",
            || hollow(""),
            (Compile, TYPES, "describe"),
        ),
        case(
            "contract-other-types",
            "answers with a number to everything",
            || {
                let exports = [("identity", "describe"), ("discovery", "discover"), ("preparation", "prepare")].map(|(name, function)| {
                    format!("(instance ${name} (export \"{function}\" (func $f)) (export \"unprepare\" (func $f)))
                        (export \"nodedock:driver/{name}@0.1.0\" (instance ${name}))")
                });
                wat(&format!("(component (core module $m (func (export \"f\") (result i32) i32.const 1))
                    (core instance $c (instantiate $m)) (func $f (result u32) (canon lift (core func $c \"f\"))) {})", exports.concat()))
            },
            (Compile, TYPES, "type mismatch"),
        ),
    ]
}

fn imports() -> Vec<Case> {
    const UNKNOWN: &str = "unknown-imports";
    vec![
        case(
            "import-sockets",
            "wants the network",
            || import("wasi:sockets/tcp@0.2.0"),
            (Admission, UNKNOWN, "no network"),
        ),
        case(
            "import-http",
            "wants the web",
            || import("wasi:http/outgoing-handler@0.2.0"),
            (Admission, UNKNOWN, "no network"),
        ),
        case(
            "import-processes",
            "wants something of the node that nobody has",
            || import("acme:node/processes@1.0.0"),
            (Admission, UNKNOWN, "acme:node/processes"),
        ),
        case(
            "import-newer",
            "wants a capability that does not exist",
            || import("nodedock:driver/teleport@0.1.0"),
            (Admission, UNKNOWN, "newer version"),
        ),
        case(
            "import-c",
            "wants functions of C",
            || wat("(module (import \"env\" \"system\" (func)))"),
            (Admission, UNKNOWN, "functions of C"),
        ),
    ]
}

fn words() -> Vec<Case> {
    vec![
        case(
            "export-twice",
            "exports one name twice, which writes to the terminal of whoever reads that",
            || {
                extra(
                    "(func (export \"a\\n\\1b[31mState: serving\")) (func (export \"a\\n\\1b[31mState: serving\"))",
                )
            },
            (Admission, INVALID, "duplicate export name"),
        ),
        case(
            "export-twice-long",
            "exports a name of 90 kB twice",
            || {
                let export = format!("(func (export \"{}\"))", "x".repeat(90_000));
                extra(&export.repeat(2))
            },
            (Admission, INVALID, "duplicate export name"),
        ),
        case(
            "export-of-a-megabyte",
            "exports a name of a megabyte",
            || extra(&format!("(func (export \"{}\"))", "x".repeat(1 << 20))),
            (Admission, INVALID, "string size"),
        ),
        case(
            "import-with-escapes",
            "an import whose name writes to the terminal",
            || wat("(module (import \"\\1b[2J\\nserving\" \"f\" (func)))"),
            (Admission, "unknown-imports", "serving"),
        ),
        case(
            "import-with-escapes-of-ours",
            "the same with a name that looks like an interface",
            || {
                let import = "(import \"a:b/c\\n\\1b[2J\" \"f\" (func))";
                Guest { imports: import.into(), ..small() }.module()
            },
            (Admission, "not-a-driver", "a:b/c"),
        ),
    ]
}
