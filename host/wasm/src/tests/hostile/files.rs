//! Files that are not drivers, or that take too much to read.

use super::Stop::{Admission, Compile, Harmless};
use super::{Case, Guest, case, small};

const INVALID: &str = "wasm-invalid";
const HEADER: &[u8] = b"\0asm\x01\0\0\0";
const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

fn extra(text: &str) -> Vec<u8> {
    Guest {
        extra: text.into(),
        ..small()
    }
    .module()
}

/// A component with the contract's names and nothing behind them.
fn hollow(more: &str) -> Vec<u8> {
    let exports = ["identity", "discovery", "preparation"]
        .map(|name| format!("(export \"nodedock:driver/{name}@0.2.0\" (instance $i))"));
    wat(&format!(
        "(component (instance $i) {} {more})",
        exports.concat()
    ))
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
    [forms(), floods(), contracts(), words()]
        .into_iter()
        .flatten()
        .collect()
}

fn forms() -> Vec<Case> {
    vec![
        case(
            "file-cwasm",
            "machine code as wasmtime keeps it, which would be run unchecked",
            || {
                wasmtime::Engine::default()
                    .precompile_component(&small().component())
                    .unwrap()
            },
            (Admission, "precompiled", "never taken"),
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
            "file-huge",
            "a file of 64 MiB and a byte",
            || vec![0; (64 << 20) + 1],
            (Admission, "file-too-large", "at most 67108864"),
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
            "nested-types",
            "a list of lists of lists, a hundred thousand deep",
            || {
                let lists: String = (1..100_000)
                    .map(|n| format!("(type $t{n} (list $t{}))", n - 1))
                    .collect();
                wat(&format!("(component (type $t0 (list u8)) {lists})"))
            },
            (Admission, INVALID, "type nesting is too deep"),
        ),
        case(
            "types-double",
            "types that double forty times",
            || {
                let pairs: String = (1..40)
                    .map(|n| format!("(type $t{n} (tuple $t{m} $t{m}))", m = n - 1))
                    .collect();
                wat(&format!("(component (type $t0 (tuple u8 u8)) {pairs})"))
            },
            (Admission, INVALID, "size"),
        ),
        case(
            "exports-100000",
            "a hundred thousand exports",
            || {
                let exports: String = (0..100_000)
                    .map(|n| format!("(export \"e{n}\" (type $t))"))
                    .collect();
                hollow(&format!("(type $t u8) {exports}"))
            },
            (Admission, "too-many-names", "100003"),
        ),
        case(
            "imports-100000",
            "a hundred thousand imports",
            || {
                let imports: String = (0..100_000)
                    .map(|n| format!("(import \"env\" \"f{n}\" (func))"))
                    .collect();
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
            || {
                hollow(&format!(
                    "(core module $m) {}",
                    "(core instance (instantiate $m))".repeat(100)
                ))
            },
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
            || {
                extra(&format!(
                    "(func (br_table {} (i32.const 0)))",
                    "0 ".repeat(100_000)
                ))
            },
            (Compile, "compile-failed", "br_table"),
        ),
        case(
            "blocks-deep",
            "blocks in blocks, fifty thousand deep",
            || {
                let deep = 50_000;
                let body = [
                    &[0][..],
                    &[0x02, 0x40].repeat(deep),
                    &[0x0b].repeat(deep + 1),
                ]
                .concat();
                let mut code = vec![1];
                leb(&mut code, body.len());
                code.extend(body);
                [
                    HEADER,
                    &section(1, b"\x01\x60\0\0"),
                    &section(3, b"\x01\0"),
                    &section(10, &code),
                ]
                .concat()
            },
            (Admission, "no-contract", "no WIT"),
        ),
    ]
}

fn contracts() -> Vec<Case> {
    const TYPES: &str = "contract-types";
    vec![
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
                [
                    HEADER,
                    &custom("component-type", &[&whole[..], &[7, 0x20, 1]].concat()),
                ]
                .concat()
            },
            (Admission, "not-a-driver", "cannot be made a component"),
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
                        (export \"nodedock:driver/{name}@0.2.0\" (instance ${name}))")
                });
                wat(&format!("(component (core module $m (func (export \"f\") (result i32) i32.const 1))
                    (core instance $c (instantiate $m)) (func $f (result u32) (canon lift (core func $c \"f\"))) {})", exports.concat()))
            },
            (Compile, TYPES, "type mismatch"),
        ),
    ]
}

fn words() -> Vec<Case> {
    vec![
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
    ]
}
